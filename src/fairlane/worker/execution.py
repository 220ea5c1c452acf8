"""Running jobs: each in a task of its own, or in a thread, from claim to settlement.

Nothing here waits for the database. A run that ends frees its slot at once and hands its settlement on, so that
claiming, running and settling overlap. The cost of a job is kept small: no lock, no timer, one task.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from uuid import UUID

from fairlane.clock import SECOND
from fairlane.errors import InvalidJob, UndecodablePayload
from fairlane.job import Claim
from fairlane.scheduler.settlement import Cancelled, Died, Done, Released, RunOutcome, Settlement, settle
from fairlane.scheduler.snapshot import AHEAD, Pace
from fairlane.store.stats_values import BlockedLoop
from fairlane.task import Task
from fairlane.waits import Alarm, StoreTime
from fairlane.worker.claims import SHORTEST_RUN, Pacer, QueueSlots, Slots
from fairlane.worker.logs import claimed_jobs, log_end, log_lost, log_start, log_unreadable
from fairlane.worker.processes import Child, Mate, ProcessPool
from fairlane.worker.reports import Watching
from fairlane.worker.runs import (
    JobContext,
    RunningJob,
    RunTimes,
    Stop,
    around_run,
    current_run,
    log_job,
    outcome_of,
    settlement_of,
    wrapping,
)
from fairlane.worker.runtime import Program

log = logging.getLogger("fairlane.worker")

STARTS_AT_ONCE = 250
"""Jobs to start in one turn of the event loop, at most."""
HELD_AHEAD_AT_MOST = SECOND
"""A job that was claimed ahead and has not started by then is given back: the slots stay busy for longer."""
LATE = "it could not start at the instant that its rate had for it"
MOST_PACED = 1_000
"""Jobs that wait for their start times, at most."""
SETTLED_EVERY = SECOND // 200
"""Jobs that start one by one in quick succession are settled together, once per this period."""
NO_PACES: Mapping[UUID, Pace] = {}
STOOD_STILL = "its worker stood still for longer than its lease, and another may run it by now"
FIRST_START_LAG, LONGEST_START_LAG = SECOND // 20, SECOND // 4
"""The assumption before any job has started, and the maximum: clocks can be wrong."""
FIRST_WAIT_TO_BE_ALONE, LONGEST_WAIT_TO_BE_ALONE = SECOND, 60 * SECOND
"""Without a process for suspects, other jobs wait this long for running ones to end, doubled each time that was not
enough; then others go first for as long."""
FIRST_UNKNOWN_DELAY, LONGEST_UNKNOWN_DELAY = SECOND, 300 * SECOND
UNKNOWN_REMEMBERED = 10_000
UNKNOWN_REPORTED_FOR = 2 * LONGEST_UNKNOWN_DELAY
"""A job whose task is unknown comes back within half of this."""
LEASES_REMEMBERED = 100


SettleLater = Callable[..., None]
"""Takes settlements that are to be recorded, as `Settling.add` does."""


@dataclass(slots=True, eq=False)
class Run(RunningJob):
    """One claim on its way through this worker."""

    queue: QueueSlots
    begin_by: int
    """By the monotonic clock; later, its lease may have ended."""
    pace: Pace | None = field(init=False, default=None)
    """When it may start by the monotonic clock, if it passes a smooth rate."""
    handle: asyncio.Task[None] | None = field(init=False, default=None)
    child: Child | None = field(init=False, default=None)
    """The process that its task runs in, with `executor="process"`."""
    is_given_back: bool = field(init=False, default=False)
    """It will not begin here: decided once, by the event loop or by the watchdog, under their lock."""
    mate: Mate | None = field(init=False, default=None)
    reports_start: bool = field(init=False, default=False)
    """Another job waits for it to begin."""


class Execution:
    """The runs of one worker."""

    sets_suspects_apart = True
    """A job that may have killed its process runs with nothing beside it."""
    keeps_pace = True
    """It starts jobs at the times that smooth rates give them."""
    calls_handlers = True
    """It runs claimed jobs in this process."""

    def __init__(
        self,
        program: Program,
        slots: Slots,
        time: StoreTime,
        settle_later: SettleLater,
        watching: Watching | None = None,
    ) -> None:
        clock = program.clock
        self.store = program.store
        self.loop = asyncio.get_running_loop()
        self.thread = threading.get_ident()
        """The thread of the event loop."""
        self.log = log
        self.running: set[Run] = set()
        self.waiting: deque[Run] = deque()
        self.suspects: deque[Run] = deque()
        """Jobs that may have killed their process. They take no slot while they wait to run alone."""
        self._alone: Run | None = None
        self._lets_run_out_since: int | None = None
        """Since when nothing starts, so that a suspect can run alone here."""
        self._lets_run_out_for = FIRST_WAIT_TO_BE_ALONE
        self.mean_run = float(HELD_AHEAD_AT_MOST)
        """Microseconds that a job takes, on average. It starts high, so that nothing is claimed on a guess."""
        self.time = time
        self.start_lag = FIRST_START_LAG
        """Microseconds from a claim until its jobs have started, about the most of late."""
        self._find: Callable[[str], Task[..., Any] | None] = program.registry.find
        self._slots = slots
        self._clock = clock
        self._now = clock.monotonic
        self.settle_later = settle_later
        self._watching = watching if watching is not None and watching.is_wanted else None
        self.max_result = program.max_result
        self.build = program.build
        self._middlewares = wrapping(program.middlewares, "around_run")
        self._unknown: OrderedDict[UUID, tuple[int, int, Claim]] = OrderedDict()
        """Jobs of unknown tasks: how often and when each was claimed last."""
        self.run_times = RunTimes()
        self.beginning = threading.Lock()
        """Held while the event loop or the watchdog's thread decides whether a claim begins here or is given back."""
        self._revoked: set[UUID] = set()
        """Leases that the watchdog gave back before their claims arrived here."""
        self._heard_of: deque[UUID] = deque(maxlen=LEASES_REMEMBERED)
        """The leases of the last claims."""
        self._threads: ThreadPoolExecutor | None = None
        self._children: ProcessPool | None = None
        # Each run begins with what was set around the worker, not with what the run that made room for it has set.
        self._around = contextvars.copy_context()
        self._timeouts = Alarm(clock, self._stop_overdue)
        self._stale = Alarm(clock, self._give_back_stale)
        self._pacer = Pacer(clock, self._launch, self._give_back_late)
        self.is_filling = False
        """Jobs are about to start in the next turns of the event loop."""
        self.ended: Counter[str] = Counter()
        """Attempts that have ended, by what became of the job."""
        self._logs_each = False

    # From claim to handler.

    def start(
        self, queue: QueueSlots, claims: Sequence[Claim], begin_by: int, paces: Mapping[UUID, Pace] = NO_PACES
    ) -> None:
        """Take these claims in. Those that cannot run are settled at once; the others start, or wait for a slot or for
        their start time. None starts after `begin_by`, by the monotonic clock."""
        self._logs_each = log.isEnabledFor(logging.DEBUG)  # asked once a claim, not once a job
        if claims:
            lease = claims[0].lease
            with self.beginning:
                self._heard_of.append(lease)
                is_ours = lease not in self._revoked
            if not is_ours:
                queue.used -= len(claims)
                return
        for claim in claims:
            run = self._run_of(queue, claim, begin_by)
            if run is None:
                continue
            if (pace := paces.get(claim.id)) is not None:
                # It waits for its start time, and takes no slot meanwhile.
                run.pace = pace.moved(self._now() - self.time.now())
                run.begin_by = min(run.begin_by, run.pace.latest)
                queue.used -= 1
                self._pacer.add(run)
            elif claim.is_suspect and self.sets_suspects_apart:
                self._set_apart(run)
            else:
                self.waiting.append(run)
        self._fill_slots()
        if self.waiting or self.suspects:
            self._stale.set(self._clock.monotonic() + HELD_AHEAD_AT_MOST)

    def _run_of(self, queue: QueueSlots, claim: Claim, begin_by: int) -> Run | None:
        """The run of this claim; `None` if it cannot run, and was settled."""
        task = self._find(claim.task)
        if claim.cancel_requested:
            self._refuse(queue, claim, Cancelled("cancelled before it ran"))
        elif task is None:
            self._refuse(queue, claim, self._unknown_task(claim))
        else:
            try:
                args, kwargs = self._decoded(task, claim)
            except UndecodablePayload as error:
                log_unreadable(claim, error, log)
                self._refuse(queue, claim, Died(str(error)))
            else:
                return Run(self, claim, task, args, kwargs, queue, begin_by)
        return None

    def _decoded(self, task: Task[..., Any], claim: Claim) -> tuple[Any, Any]:
        return task.codec.decode_call(claim.payload)

    def _set_apart(self, run: Run) -> None:
        """Let it wait, without a slot, until nothing else runs here."""
        run.queue.used -= 1
        self.suspects.append(run)

    def _launch(self, run: Run) -> None:
        """Its start time has come."""
        if run.is_given_back:
            self._pacer.drop(run)
            return
        run.queue.used += 1
        if run.claim.is_suspect and self.sets_suspects_apart:
            self._set_apart(run)
        else:
            self.waiting.append(run)
        self._fill_slots()
        self._stale.set(self._clock.monotonic() + HELD_AHEAD_AT_MOST)

    def _give_back_late(self, run: Run) -> None:
        if self.give_back(run):
            self.settle_later(settle(run.claim, self.released(run, LATE), 0), run.queue)

    @property
    def ahead(self) -> int | None:
        """How many more jobs may wait for their start times: as many as will get a slot by then. 0 while most of those
        are held, so that each claim is for many; `None` if this keeps no start times."""
        if not self.keeps_pace:
            return None
        most = min(MOST_PACED, int(self._slots.concurrency * AHEAD / max(self.mean_run, SHORTEST_RUN)))
        held = len(self._pacer)
        return most - held if 4 * held <= 3 * most else 0

    def revoke_paced(self, queue: QueueSlots) -> None:
        """The policy under which these were claimed has changed: give back what has not started."""
        for run in self._paced_of(queue):
            self._withdraw(run, self.released(run, "its queue's policy has changed"))
        self._refill()

    def holds_paced(self, queue: QueueSlots) -> bool:
        """Whether a job of this queue waits for its start time, or for a slot since then."""
        return bool(self._paced_of(queue))

    def _paced_of(self, queue: QueueSlots) -> list[Run]:
        launched = [run for run in (*self.waiting, *self.running) if run.pace is not None and run.started_at == 0]
        return [run for run in (*self._pacer.runs(), *launched) if run.queue is queue]

    def released(self, run: Run, reason: str) -> Released:
        return Released(reason, is_spent=self._pacer.is_spent(run))

    def note_start(self, claimed_at: int) -> None:
        """Learn how late the jobs of a claim have started: rates must hold for those who observe the starts."""
        lag = max(0, min(self.time.now() - claimed_at, LONGEST_START_LAG))
        self.start_lag = lag if lag > self.start_lag else self.start_lag + (lag - self.start_lag) // 16

    def _refuse(self, queue: QueueSlots, claim: Claim, outcome: RunOutcome) -> None:
        queue.used -= 1
        self.settle_later(settle(claim, outcome, 0), queue)

    def _unknown_task(self, claim: Claim) -> Released:
        seen, _, _ = self._unknown.pop(claim.id, (0, 0, claim))
        self._unknown[claim.id] = (seen + 1, self._now(), claim)
        if len(self._unknown) > UNKNOWN_REMEMBERED:
            self._unknown.popitem(last=False)
        delay = min(FIRST_UNKNOWN_DELAY << min(seen, 20), LONGEST_UNKNOWN_DELAY)
        log.error(
            "job %s: this worker has no task named %r; given back for %g s; deploy it, or serve the queue elsewhere",
            claim.id,
            claim.task,
            delay / SECOND,
            extra={"claim": claim},
        )
        return Released(f"no task named {claim.task!r} on the worker that claimed it", delay)

    def _fill_slots(self) -> None:
        if self.suspects or self._alone is not None:
            self._run_suspect()
            return
        waiting, running, most = self.waiting, self.running, self._slots.concurrency
        # A few at a time: what the store answers meanwhile is heard between them, so that it works while they run.
        starting = min(len(waiting), most - len(running), STARTS_AT_ONCE)
        batch = [waiting.popleft() for _ in range(starting)]
        self._run(batch)
        if batch and not waiting and (last := batch[-1]).pace is None:
            # Once those that were just created have taken their first step.
            self.loop.call_soon(self.note_start, last.claim.claimed_at)
        if not self.is_filling and waiting and len(running) < most:
            self.is_filling = True
            self.loop.call_soon(self._go_on_filling)

    def _run(self, runs: Iterable[Run]) -> None:
        create_task, around, watching = self.loop.create_task, self._around, self._watching
        for run in runs:
            self.running.add(run)
            running = self._body(run) if watching is None else self._run_watched(run, watching)
            run.handle = create_task(running, context=around.copy())
            if run.task.timeout is not None:
                self._timeouts.set(self._clock.monotonic() + run.task.timeout)

    def _body(self, run: Run) -> Coroutine[Any, Any, None]:
        return self._run_in_process(run) if run.task.options.executor == "process" else self._run_here(run)

    async def _run_watched(self, run: Run, watching: Watching) -> None:
        if run.is_given_back:
            return
        entered = watching.started(run)
        try:
            await self._body(run)
        finally:
            watching.left(entered)

    def _run_suspect(self) -> None:
        """Let the next suspect run once nothing else does. Everything that waits goes on waiting."""
        if not self.running:
            run = self._alone = self.suspects.popleft()
            run.queue.used += 1
            self._run([run])
            self._lets_run_out_since, self._lets_run_out_for = None, FIRST_WAIT_TO_BE_ALONE
        elif self._alone is None and self._lets_run_out_since is None:
            self._lets_run_out_since = self._now()
            self._stale.set(self._now() + self._lets_run_out_for)

    def _give_up_being_alone(self) -> None:
        """What runs takes too long to end: let others go first for a while."""
        since, wait = self._lets_run_out_since, self._lets_run_out_for
        if since is None:
            return
        if since + wait > self._now():
            self._stale.set(since + wait)
            return
        self._lets_run_out_since, self._lets_run_out_for = None, min(2 * wait, LONGEST_WAIT_TO_BE_ALONE)
        for run in list(self.suspects):
            self._withdraw(run, Released("what ran beside it did not end; its turn comes later", wait))
        self._refill()

    def _go_on_filling(self) -> None:
        if self.waiting and len(self.running) < self._slots.concurrency:
            self._fill_slots()
            self.loop.call_soon(self._go_on_filling)  # behind those that were just created
        else:
            self.is_filling = False

    @property
    def rest(self) -> float:
        """Seconds after which more will have ended: jobs of a smooth rate start one by one."""
        return SETTLED_EVERY / SECOND if self._pacer.starts_within(SETTLED_EVERY) else 0.0

    # The run itself.

    def _begins(self, run: Run) -> bool:
        """Whether it may begin. From here on, anybody who finds this process dead must assume that it ran."""
        with self.beginning:
            if run.is_given_back:
                return False
            run.started_at = self._now()
        if run.started_at > run.begin_by:
            self._end(run, self._missed(run))
            return False
        if run.pace is not None:
            self._pacer.began(run, run.started_at)
        return True

    def _missed(self, run: Run) -> Released:
        return Released(STOOD_STILL) if run.pace is None else self.released(run, LATE)

    async def _run_in_process(self, run: Run) -> None:
        # Not started until there is a process for it: its timeout has not begun, and it can be given back.
        if self._children is None:
            self._children = ProcessPool()
        async with self._children.child() as run.child:
            await self._run_here(run)

    async def _run_here(self, run: Run) -> None:
        current_run.set(run)
        if not self._begins(run):
            return
        if self._logs_each:
            log_start(run, log)
        try:
            if self._middlewares:
                value = await around_run(self._middlewares, JobContext(run), lambda: self._called(run))
            else:
                value = await self._called(run)
        except GeneratorExit:
            raise  # the loop itself has ended: there is nothing left to settle with
        except BaseException as error:
            if isinstance(error, _Unraisable) and error.__cause__ is not None:
                error = error.__cause__
            self._end(run, outcome_of(run, error, self.time.wall()), error)
        else:
            self._end(run, None if run.stop is Stop.GONE else self._done(run, value))

    async def _called(self, run: Run) -> Any:
        """Call its function. One that is not async runs in a thread."""
        if run.task.is_async:
            return await run.task.function(*run.args, **run.kwargs)
        if run.child is not None:
            call = partial(run.child.call, run.task, run.args, run.kwargs)
        else:
            call = partial(contextvars.copy_context().run, _call, run)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._slots.concurrency, thread_name_prefix="fairlane-handler")
        value, error = await self.loop.run_in_executor(self._threads, call)
        if isinstance(error, StopIteration | GeneratorExit):
            raise _Unraisable(f"the task raised {error!r}") from error
        if error is not None:
            raise error
        if run.stop is Stop.TIMEOUT:
            # A thread cannot be stopped. One that overran its timeout kept its slot and its lease until now.
            raise TimeoutError
        return value

    def _done(self, run: Run, value: Any) -> RunOutcome:
        try:
            return Done(run.task.codec.encode_result(value, self.max_result), run.effects)
        except InvalidJob as error:
            return outcome_of(run, error, self.time.wall()) or Died(str(error))

    def _end(
        self,
        run: Run,
        outcome: RunOutcome | None,
        error: BaseException | None = None,
        settlement: Settlement | None = None,
    ) -> Settlement | None:
        """A run has ended. Returns what is to be recorded; `None` if its claim is lost. A run in another process brings
        its own settlement."""
        ran = self.ran(run)
        self.mean_run += (ran - self.mean_run) * 0.1
        self._let_go(run)
        # Its task's context holds the run: left as a cycle, every job would wait for the collector.
        run.handle = None
        if run is self._alone:
            self._alone = None
        if outcome is not None:
            settlement = settlement_of(run, outcome, ran)
            if type(outcome) is Done:
                if self._logs_each:
                    log_end(run, settlement, None, 0, log)
            elif not settlement.unstarted or run.pace is None:  # a start that was missed is no news
                log_end(run, settlement, error, self.time.now(), log)
        self._hand_on(run, settlement)
        self._refill()
        if self._watching is not None:
            self._watching.ended(run, settlement, ran, error)
        return settlement

    def _let_go(self, run: Run) -> None:
        """It no longer runs, and frees its slot."""
        self.running.discard(run)
        run.queue.used -= 1
        if run.pace is not None:
            self._pacer.drop(run)

    def _hand_on(self, run: Run, settlement: Settlement | None) -> None:
        """Count how it has ended, and let that be recorded; without a settlement, its claim is lost."""
        if settlement is None:
            self.ended["lost"] += 1
            return
        if settlement.to.is_final:
            self.ended[str(settlement.to)] += 1
        elif not settlement.unstarted:
            self.ended["snoozed" if settlement.outcome == "snoozed" else "to be retried"] += 1
        if settlement.outcome not in ("lost", "released"):  # which were cut short, or given back
            self.run_times.note(run.claim.task, settlement.ran)
        self.settle_later(settlement, run.queue, may_be_settled=run.may_be_settled)

    def _refill(self) -> None:
        if (self.waiting or self.suspects) and not self.is_filling:
            self._fill_slots()
        self._slots.note_freed()

    def ran(self, run: RunningJob) -> int:
        """Microseconds since its handler was called."""
        return self._now() - run.started_at

    # Stopping runs.

    def interrupt(self, run: Run, reason: Stop) -> None:
        """Ask a run to stop: async handlers are cancelled, threads see a flag. A lost claim overrides the rest."""
        if run.stop is not None and reason is not Stop.GONE:
            return
        if reason is Stop.GONE and run.may_be_settled:
            return  # by itself: should it not be so, its settlement will find out
        if reason is Stop.GONE:
            log_lost(run.claim, log)
        if run.started_at == 0:
            self._withdraw(run, None if reason is Stop.GONE else Cancelled(reason.value))
            self._refill()
            return
        first, run.stop = run.stop is None, reason
        if first and run.task.is_async and run.handle is not None:
            run.handle.cancel()
        elif run.child is not None:
            run.child.kill()

    def _withdraw(self, run: Run, outcome: RunOutcome | None) -> None:
        """Take back a run whose handler has not been called."""
        if not self.give_back(run):
            outcome = None  # the watchdog has
        if run in self.running:
            assert run.handle is not None
            run.handle.cancel()
            if run is self._alone:
                self._alone = None
        elif run in self.waiting:
            self.waiting.remove(run)
        else:
            if run in self.suspects:
                self.suspects.remove(run)
            run.queue.used += 1  # without a slot, which is about to be given up
        self._let_go(run)
        if outcome is not None:
            self.settle_later(settle(run.claim, outcome, 0), run.queue)

    def give_back(self, run: Run) -> bool:
        """Keep a run from beginning; False if it has begun or was given back before. Thread-safe."""
        with self.beginning:
            if run.started_at or run.is_given_back:
                return False
            run.is_given_back = True
            return True

    def revoke(self, claims: Sequence[Claim]) -> list[Claim]:
        """Keep claims from being taken in, and return those that have not arrived here yet. Thread-safe."""
        with self.beginning:
            unheard = [claim for claim in claims if claim.lease not in self._heard_of]
            self._revoked.update(claim.lease for claim in unheard)
            return unheard

    def settle_instead(self, settlement: Settlement) -> None:
        """The watchdog does not know whether it has recorded this."""
        self.settle_later(settlement, next(iter(self._slots.queues.values())), may_be_settled=True)

    def forget(self, runs: Iterable[Run]) -> None:
        """The watchdog gave these back while the event loop was blocked."""
        for run in runs:
            if run in self.running or run in self.waiting or run in self.suspects or run in self._pacer.runs():
                self._withdraw(run, None)
        self._refill()

    def _stop_overdue(self) -> None:
        now, soonest = self._now(), None
        for run in list(self.running):
            timeout = run.task.timeout
            if timeout is None or run.stop is not None or run.mate is not None:
                continue  # the process that runs it sees to it
            left = run.started_at + timeout - now if run.started_at else timeout
            if left <= 0:
                log_job(log, logging.WARNING, run.claim, " ran longer than its timeout")
                self.interrupt(run, Stop.TIMEOUT)
            elif soonest is None or left < soonest:
                soonest = left
        if soonest is not None:
            self._timeouts.set(self._clock.monotonic() + soonest)

    def _give_back_stale(self) -> None:
        self._give_up_being_alone()
        if self.waiting:
            left = self.waiting[0].claim.claimed_at + HELD_AHEAD_AT_MOST - self.time.now()
            if left > 0:
                # Others have come meanwhile, in the place of those that have started.
                self._stale.set(self._clock.monotonic() + left)
                return
            # What waits was claimed ahead because jobs were short. They are not.
            self.mean_run = max(self.mean_run, float(HELD_AHEAD_AT_MOST))
            self._slots.ahead = 0
            self.give_back_unstarted("its worker was busy for longer than expected")

    def give_back_unstarted(self, reason: str) -> None:
        """Release every claim whose handler has not been called, back to its old place."""
        unstarted = self.unstarted()
        for run in unstarted:
            self._withdraw(run, self.released(run, reason))
        if unstarted:
            log.info("%s given back unstarted: %s", claimed_jobs(len(unstarted)), reason)

    # For those who look.

    def blocks(self) -> list[BlockedLoop]:
        """What blocks, or last blocked, the event loops of child processes. Thread-safe."""
        return []

    def unstarted(self) -> list[Run]:
        """Every claim held here whose handler has not been called."""
        running = (run for run in tuple(self.running) if run.started_at == 0)
        return [*self._pacer.runs(), *self.waiting, *self.suspects, *running]

    @property
    def queues(self) -> list[str]:
        return list(self._slots.queues)

    def unknown_tasks(self) -> dict[str, str]:
        """Unknown tasks of recently claimed jobs, each with its queue."""
        lately = self._now() - UNKNOWN_REPORTED_FOR
        return {claim.task: claim.queue for _, at, claim in self._unknown.values() if at > lately}

    def held(self) -> list[Run]:
        """Every claim held here that is not lost, started or not."""
        # In the order in which they move on: the watchdog looks from another thread, and must not miss one that does.
        held = (*self._pacer.runs(), *self.suspects, *self.waiting, *self.running)
        return [run for run in held if run.stop is not Stop.GONE]

    @property
    def is_holding(self) -> bool:
        """Whether something runs here, or is about to."""
        return bool(self.running or len(self._pacer))

    def misses(self, run: Run) -> bool:
        """Whether losing its claim matters."""
        return True

    def leases(self) -> set[UUID]:
        return {run.claim.lease for run in self.held()}

    def find(self, jobs: Iterable[UUID]) -> list[Run]:
        wanted = set(jobs)
        return [run for run in self.held() if run.claim.id in wanted]

    async def all_ended(self) -> None:
        while here := [run.handle for run in self.running if run.handle is not None]:
            await asyncio.wait(here)

    async def kill_the_rest(self) -> None:
        """Runs that do not stop are left behind: a thread cannot be killed."""

    async def leave(self, within: float) -> None:
        """Let child processes end, within so many seconds."""

    def close(self) -> None:
        self._timeouts.close()
        self._stale.close()
        self._pacer.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        if self._children is not None:
            self._children.close()


class _Unraisable(RuntimeError):
    """What a function raised that no coroutine can raise; it is the cause."""


def _call(run: Run) -> tuple[Any, BaseException | None]:
    # An error is returned, not raised: a StopIteration cannot pass through a future.
    try:
        return run.task.function(*run.args, **run.kwargs), None
    except BaseException as error:
        return None, error
