"""A worker: claims, runs and settles jobs until it is stopped, and then leaves nothing behind.

Shutdown: the first `stop()` ends claiming. Jobs that have not started are given back at once, to their old place;
running jobs may go on until `drain_timeout`. Then async handlers are cancelled: their jobs keep their place too, and
the attempt counts as lost (`Lost`), as if the worker had died. A second `stop()` does not wait for that deadline. A
handler that does not stop (a thread cannot be stopped) keeps its claim until its lease ends, so that the job does not
run twice at once. Leases stop last: a job that is still draining must not look abandoned to another worker.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Protocol
from uuid import uuid4

from fairlane.clock import SECOND, Instant, lasting, microseconds
from fairlane.errors import ConfigurationError, StoreUnavailable, WorkerDied
from fairlane.events import StoreReturned, WorkerStarted, WorkerStopped, WorkerStopping
from fairlane.parameters import checked
from fairlane.store.protocol import WorkerIdentity
from fairlane.store.stats_values import WorkerReport
from fairlane.waits import Outage, StoreTime, first_of, pause
from fairlane.worker.children import Crew, RunnerHost, serve
from fairlane.worker.claims import Claiming, Slots
from fairlane.worker.execution import Execution
from fairlane.worker.leases import Leases
from fairlane.worker.options import WorkerOptions
from fairlane.worker.processes import STOPS, die_with, die_with_parent, leave_signals_to_the_worker
from fairlane.worker.reports import EVERY as REPORTS_EVERY
from fairlane.worker.reports import Health, Watching, keep_reporting, showing, take_back
from fairlane.worker.runs import Settling, Stop, log_job
from fairlane.worker.runtime import Program, Runtime, Supervisor, Warnings
from fairlane.worker.upkeep import (
    audit_gates,
    conclude,
    follow_partitions,
    keep_stats,
    reap_leases,
    remove_idle_state,
    remove_old_jobs,
)
from fairlane.worker.watchdog import LongRuns, Rescue, Watchdog

log = logging.getLogger("fairlane.worker")

REPORTED = ("running", "waiting", "unsettled", "is_well", "is_stopping", "loops", "warnings")
"""What the report of a worker takes from its health."""
UPKEEP = ("reaping", "pruning", "collecting", "auditing", "schedules", "partitions", "adding up", "messages")

LEAVES_WITHIN, HURRIED_LEAVE = 10.0, 1.0
"""Seconds for processes without a job to end by themselves."""


class Worker:
    """Runs the jobs of some queues, in this process or in processes of its own."""

    def __init__(self, program: Program, options: WorkerOptions) -> None:
        if not options.shares:
            raise ConfigurationError("queues: this worker has no queue to serve; name at least one")
        self.identity = self._identify(options.name or name_of_process())
        self.options = options
        self.warnings = Warnings()
        """What fails without harm to any job."""
        self.left_running = 0
        """Jobs that had not stopped when the worker did: threads that are still busy."""
        self.left_unsettled = 0
        """Outcomes that could not be recorded before the worker stopped."""
        self.metrics_url: str | None = None
        """Where it serves metrics, while it runs."""
        self._program = program
        self._store, self._clock, self._telemetry = program.store, program.clock, program.telemetry
        self._clock_offset = self._offset_at_reaping = 0
        self._started_at: Instant = 0
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._telemetry.measured(wanted=options.metrics_port is not None)
        self._time = StoreTime(program.clock)
        nested = options.traces == "nested"
        self._watching = Watching(program.telemetry, self.identity, program.store, self._time, nested=nested)
        self._outage = Outage(self._on_return, self._watching.store_lost)
        # No loop is cancelled in the middle of a statement.
        self._supervisor = Supervisor(self._outage.cancel, self._watching.loop_died)
        self._settling = Settling(program.store, self._outage, self._watching)
        unsettled = self._settling.count_unsettled
        self._slots = Slots(options.shares_of_all, options.slots, options.order, unsettled, program.served)
        self._execution = self._executes()(program, self._slots, self._time, self._settling.add)
        self._runtime = Runtime(
            store=program.store,
            clock=program.clock,
            options=options,
            identity=self.identity,
            outage=self._outage,
            time=self._time,
            slots=self._slots,
            watching=self._watching,
            warnings=self.warnings,
        )
        self._leases = Leases(self._runtime, self._execution, self._settling)
        self._claiming = Claiming(self._runtime, self._execution, self._leases, program.cron_runner)
        self._long_runs = LongRuns(self._execution, program.clock, microseconds(options.long_run), program.waited_for)
        rescue = None
        if program.make_store is not None:
            held = self._leases.held
            rescue = Rescue(make_store=program.make_store, identity=self.identity, say=self.report, leases=held)
        self._watchdog = Watchdog(self._execution, rescue, self._watching.loop_blocked)

    def running_by_queue(self) -> list[tuple[tuple[str, ...], float]]:
        found = Counter(run.claim.queue for run in list(self._execution.running))
        return [((queue,), float(found[queue])) for queue in list(self._slots.queues)]

    def _identify(self, name: str) -> WorkerIdentity:
        return WorkerIdentity(uuid4(), name)

    def _executes(self) -> Callable[..., Execution]:
        """Makes what runs its claims."""
        options = self.options
        if options.command:
            return partial(Crew, watching=self._watching, options=options, warnings=self.warnings)
        return partial(Execution, watching=self._watching)

    def stop(self) -> None:
        """Drain and end. A second call ends without draining."""
        if self._stop.is_set():
            self._hurry.set()
        self._slots.is_stopping = True
        self._stop.set()

    def health(self) -> Health:
        states = self._supervisor.states()
        return Health(
            is_well=not self._supervisor.causes,
            is_connected=not self._outage.is_lost,
            is_stopping=self._stop.is_set(),
            loops=states,
            running=len(self._execution.running),
            waiting=len(self._execution.waiting),
            unsettled=self._settling.count_unsettled(),
            telemetry_failures=self._telemetry.failures.total,
            warnings=self.warnings.now,
        )

    def report(self) -> WorkerReport:
        health, options = self.health(), self.options
        return WorkerReport(
            name=self.identity.name,
            host=socket.gethostname(),
            pid=os.getpid(),
            version=version("fairlane"),
            queues={share.name: share.weight for share in options.shares},
            concurrency=options.slots,
            started_at=self._started_at,
            every=REPORTS_EVERY,
            **{each: getattr(health, each) for each in REPORTED},
            clock_offset=self._clock_offset,
            tasks=sorted(task.name for task in self._program.registry),
            unknown_tasks=self._execution.unknown_tasks(),
            long_runs=self._long_runs.found,
            lost_runs=self._long_runs.lost,
            blocks=self._watchdog.blocks(),
            stats={} if self._telemetry.metrics is None else self._telemetry.metrics.totals(),
        )

    async def run(self) -> None:
        """Work until stopped. `WorkerDied` if a loop of this worker died: restart the process, it is not well."""
        queues = ", ".join(self._slots.queues)
        log.info("worker %s serves %s with %d slots", self.identity.name, queues, self.options.slots)
        async with showing(self, self._telemetry, self.options):
            await self._measure_offsets()
            self._offset_at_reaping = self._time.offset
            self._started_at = self._time.now()
            self._start_loops()
            self._watchdog.start()
            self._watching.tell(WorkerStarted, queues=tuple(self._slots.queues))
            try:
                await first_of(self._stop.wait(), self._supervisor.died.wait())
            except asyncio.CancelledError:
                self._hurry.set()
                raise
            finally:
                self._stop.set()
                await self._shut_down()
        if causes := self._supervisor.causes:
            died = "; ".join(f"{name}: {cause}" for name, cause in causes.items())
            raise WorkerDied(f"a loop of this worker died, and the worker with it ({died})")

    def _start_loops(self) -> None:
        start, runtime, program = self._supervisor.start, self._runtime, self._program
        if isinstance(self._execution, Crew) and self.options.processes > 1:
            start("processes", self._execution.keep())
        start("settling", self._settling.run(self._execution, self._slots))
        start("leases", self._leases.run())
        start("listening", self._claiming.listen())
        start("claiming", self._claiming.run())
        start("reaping", reap_leases(runtime, self._before_reaping))
        start("pruning", remove_old_jobs(self._store, self._outage, self._clock, program.retention))
        start("collecting", remove_idle_state(runtime))
        start("auditing", audit_gates(runtime))
        if program.cron_runner is not None:
            start("schedules", program.cron_runner.run(self.identity.id, self._outage, self._clock, self._time))
        start("partitions", follow_partitions(runtime, program.look_again))
        start("adding up", keep_stats(self._store, self._outage, self._clock, self._slots.queues, self.warnings))
        if self._execution.calls_handlers:
            start("watching", self._long_runs.keep_looking())
        start("reporting", keep_reporting(runtime, self.report))

    # The database.

    async def _before_reaping(self) -> int:
        """By how much queue time has gained on our clock since the last call."""
        await self._leases.keep_if_late()
        await self._measure_offsets()
        before, self._offset_at_reaping = self._offset_at_reaping, self._time.offset
        return self._offset_at_reaping - before

    async def _measure_offsets(self) -> None:
        """How queue time and the store's clock differ from the clocks of this machine."""

        async def measure() -> None:
            asked_at = self._clock.monotonic()
            there = await self._store.keep_time()
            heard_at = self._clock.monotonic()
            self._time.hear(asked_at, there.now, heard_at)
            self._time.ahead = there.ahead
            self._clock_offset = self._time.wall() - self._clock.now()

        try:
            await self._outage.ride_out(measure, "asking for the time", unless=self._stop)
        except StoreUnavailable:
            if not self._stop.is_set():
                raise

    def _on_return(self) -> None:
        self._leases.check_soon()
        self._slots.look_everywhere()
        if not self._outage.is_lost:
            self._watching.tell(StoreReturned)

    # The end.

    async def _shut_down(self) -> None:
        hurrying = asyncio.ensure_future(self._hurry_at_the_deadline())
        try:
            await self._stop_claiming()
            await first_of(self._execution.all_ended(), self._hurry.wait())
            await self._interrupt_the_rest()
            await first_of(self._settling.all_settled(), self._grace())
        finally:
            hurrying.cancel()
            # Leases stop last: a job that is still draining must not look abandoned to another worker.
            await self._supervisor.stop(
                "claiming", "listening", "settling", *UPKEEP, "watching", "reporting", "leases", "processes"
            )
            await self._watchdog.stop()
            await self._before_closing()
            await conclude(self._store, list(self._slots.queues))
            await take_back(self._store, self.identity)
            await self._execution.leave(HURRIED_LEAVE if self._hurry.is_set() else LEAVES_WITHIN)
            self._execution.close()
            self._tell_what_is_left()

    async def _before_closing(self) -> None:
        """Its loops have ended, and the store is still there."""

    async def _hurry_at_the_deadline(self) -> None:
        await pause(self._clock, microseconds(self.options.drain_timeout))
        self._hurry.set()

    async def _stop_claiming(self) -> None:
        self._watching.tell(WorkerStopping, running=len(self._execution.running))
        self._supervisor.may_end.add("claiming")
        self._claiming.stop()
        self._execution.give_back_unstarted("its worker was stopped")
        if running := len(self._execution.running):
            log.info(
                "waiting for %d running %s to end, at most %s; a second signal stops at once",
                running,
                "job" if running == 1 else "jobs",
                lasting(self.options.time("drain_timeout").total_seconds()),
            )
        # What these two hold must still reach the store, whatever one of them died of.
        if "settling" in self._supervisor.causes:
            self._supervisor.start("settling", self._settling.run(self._execution, self._slots))
        if "leases" in self._supervisor.causes:
            self._supervisor.start("leases", self._leases.run())
        await self._supervisor.stop(*UPKEEP)
        # A claim in flight is not interrupted: it may be committed, and its jobs would wait for their lease to end.
        await first_of(self._supervisor.finish("claiming"), self._hurry.wait())
        await self._supervisor.stop("claiming", "listening")

    async def _interrupt_the_rest(self) -> None:
        if not self._execution.running:
            return
        for run in list(self._execution.running):
            log_job(log, logging.WARNING, run.claim, " still runs; it is interrupted")
            self._execution.interrupt(run, Stop.SHUTDOWN)
        await first_of(self._execution.all_ended(), self._grace())
        await self._execution.kill_the_rest()

    async def _grace(self) -> None:
        await self._hurry.wait()
        await pause(self._clock, microseconds(self.options.cancel_grace))

    def _tell_what_is_left(self) -> None:
        self.left_running = len(self._execution.running)
        self.left_unsettled = self._settling.count_unsettled() + self._settling.given_up
        for run in self._execution.running:
            log_job(log, logging.ERROR, run.claim, " would not stop; it runs again once its lease ends")
        if self._settling.count_unsettled():
            log.error("%d outcomes could not be recorded; these jobs run again", self._settling.count_unsettled())
        self._watching.tell(WorkerStopped, left_running=self.left_running, left_unsettled=self.left_unsettled)
        lasted = lasting((self._time.now() - self._started_at) / SECOND)
        after = f" after {lasted}" if self._started_at else ""
        log.info("worker %s has stopped%s%s", self.identity.name, after, self._what_it_ran())

    def _what_it_ran(self) -> str:
        ended, refused = self._execution.ended, self._settling.refused
        found = Counter({"done": ended["done"] - refused.total()})
        found += Counter({what: count for what, count in ended.items() if what != "done"}) + refused
        found += Counter({"still running": self.left_running})
        if not found:
            return "; it ran no jobs"
        attempts, counts = found.total(), ", ".join(f"{count:,} {what}" for what, count in found.items())
        return f"; it made {attempts:,} {'attempt' if attempts == 1 else 'attempts'}: {counts}"


def name_of_process() -> str:
    """The name of a worker that was given none."""
    return f"{socket.gethostname()}:{os.getpid()}"


EXIT_WELL, EXIT_DIED, EXIT_UNSETTLED, EXIT_FORCED = 0, 1, 3, 130
HURRY_WITHIN = 3.0
"""Seconds for a process to say goodbye to the database after a second signal: it may not answer."""


class Host(Protocol):
    """What runs a worker: an app."""

    async def worker(self, options: WorkerOptions | None = None) -> Worker: ...

    async def close(self) -> None: ...


@checked()
def run_worker(app: Host, options: WorkerOptions | None = None) -> int:
    """Run a worker until SIGTERM or SIGINT and return the exit code. A second signal does not wait for running jobs."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        worker, code = runner.run(_run(app, options))
        if worker is not None and worker.left_running:
            # Handlers in threads that would not stop would also keep the interpreter from ending. Their claims stand
            # until their leases end, so nobody runs these jobs beside them.
            _leave(code)
    return code


def _leave(code: int) -> None:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


async def _run(app: Host, options: WorkerOptions | None) -> tuple[Worker | None, int]:
    # Heard from the first moment to the last: a worker that is stopped while it starts, or again while it closes, has
    # nothing to lose and ends well.
    loop = asyncio.get_running_loop()
    starting = asyncio.ensure_future(app.worker(options))
    stopping = _Stopping(starting)
    for number in STOPS:
        loop.add_signal_handler(number, stopping.on_signal)
    try:
        worker = await starting
        if stopping.signals:
            return None, EXIT_WELL
        stopping.worker = worker
        await worker.run()
    except asyncio.CancelledError:
        if stopping.worker is not None or stopping.signals < 2:
            raise
        return None, EXIT_WELL
    except WorkerDied as error:
        log.critical("%s", error)
        return stopping.worker, EXIT_DIED
    finally:
        await app.close()
        for number in STOPS:
            loop.remove_signal_handler(number)
    return worker, EXIT_UNSETTLED if worker.left_unsettled else EXIT_WELL


class _Stopping:
    """What signals do: the first stops the worker, the second stops it at once, the third ends the process.

    "At once" has a bound, whatever the worker still waits for: time for cancelled handlers to clean up and for their
    outcomes to be recorded, if there are any, and a moment to leave.
    """

    def __init__(self, starting: asyncio.Future[Worker]) -> None:
        self._starting = starting
        self.worker: Worker | None = None
        """The worker, once it has started."""
        self.signals = 0

    def on_signal(self) -> None:
        self.signals += 1
        if self.signals > 2:
            os._exit(EXIT_FORCED)
        log.info("asked to stop%s", "" if self.signals == 1 else ", at once")
        if self.worker is not None:
            self.worker.stop()
            if self.signals == 2:
                grace = 2 * self.worker.options.time("cancel_grace").total_seconds() if _is_busy(self.worker) else 0.0
                asyncio.get_running_loop().call_later(HURRY_WITHIN + grace, self._leave_now, self.worker)
        elif self.signals == 2:
            self._starting.cancel()

    def _leave_now(self, worker: Worker) -> None:
        log.error("the database does not answer; leaving without a word to it")
        _leave(EXIT_UNSETTLED if _is_busy(worker) else EXIT_WELL)


def _is_busy(worker: Worker) -> bool:
    health = worker.health()
    return bool(health.running or health.waiting or health.unsettled)


def run_mate(app: RunnerHost, options: WorkerOptions, descriptor: int, notes: int) -> None:
    """Run jobs for the worker at the other end of this socket, until it says that there are no more, or dies."""
    die_with_parent()
    die_with(descriptor)
    leave_signals_to_the_worker()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        if runner.run(serve(app, options, descriptor, notes)):
            _leave(EXIT_WELL)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
