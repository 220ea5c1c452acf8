"""A worker whose jobs run in child processes: it claims for all of them, hands jobs over, and settles their outcomes.

A job must begin within a moment of being handed over. If a process cannot begin it in time (its event loop is blocked,
or it gets no CPU time), it never will, and the worker hands the job to another process without asking (`BlackBox`
explains why no job runs twice). A process that dies takes the jobs that had begun with it. If the worker dies, its
processes end at once.

The child process (`Runner`) only runs handlers: it does not claim, renew or settle. Before it begins a job, it notes
the job in shared memory, and then checks the clock against the time that the worker has set.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from uuid import UUID, uuid4

from fairlane.clock import SECOND, lasting
from fairlane.errors import FairlaneError, StoreUnavailable
from fairlane.job import Claim, State
from fairlane.policy.partitions import LEARNED_EVERY
from fairlane.scheduler.settlement import SEEN, UNSEEN, Interrupted, Lost, Released, RunOutcome, Settlement, settle
from fairlane.store import operators
from fairlane.store.protocol import WorkerIdentity
from fairlane.store.stats_values import BlockedLoop
from fairlane.task import Task
from fairlane.waits import Alarm, StoreTime, jittered, pause
from fairlane.worker.claims import QueueSlots, Slots
from fairlane.worker.execution import Execution, Run
from fairlane.worker.logs import log_end
from fairlane.worker.options import QueueShare, WorkerOptions
from fairlane.worker.processes import (
    Began,
    Begin,
    BlackBox,
    Blocked,
    End,
    Ended,
    Handed,
    Interrupt,
    Leave,
    Line,
    Mate,
    News,
    Noted,
    Ready,
    decode_order,
)
from fairlane.worker.reports import Watching
from fairlane.worker.runs import Stop
from fairlane.worker.runtime import Program, Warnings
from fairlane.worker.watchdog import Watchdog

log = logging.getLogger("fairlane.worker")

BEGINS_WITHIN = SECOND // 2
"""A job that a process has not begun by then is handed to another."""
BEGINS_IN_A_PROCESS_WITHIN = SECOND
"""The same for a task that runs in a process of its own, which it may have to wait for."""
MARGIN = SECOND // 50
"""How much later that is checked: by then, what another processor has written is visible."""
BETWEEN_CHECKS = SECOND // 10
FIRST_RESTART, LONGEST_RESTART = SECOND // 2, 30 * SECOND
AFTER_KILLER = SECOND // 10
"""How long to wait before restarting a process that a job has killed."""
PROVEN_AFTER = 60 * SECOND
"""The death of a process that has lived this long starts a new count."""
DEATHS_IN_A_ROW = 5
KILLED_WITHIN = 2.0
"""Seconds to wait for a killed process to be gone."""
TROUBLE = "processes"
NAMED = 10
"""How many jobs a log line names at most."""


ALONE_LATER, LONGEST_ALONE_LATER = SECOND, 30 * SECOND
"""A suspect that cannot run alone yet is given back for this long, doubled each time, so that it holds no limit
meanwhile. It is called back when the job that runs alone has ended."""


@dataclass(slots=True)
class PutOff:
    """A suspect that waits for its turn to run alone; by the monotonic clock."""

    since: int
    delay: int = ALONE_LATER
    due_at: int = 0


class KeepsDying(FairlaneError):
    """A process of this worker keeps dying, and no job causes it."""


class Crew(Execution):
    """The runs of a worker that has child processes: for all jobs, or, with `processes=1`, for suspects alone."""

    def __init__(self, *given: Any, options: WorkerOptions, warnings: Warnings, **named: Any) -> None:
        super().__init__(*given, **named)
        self._warnings = warnings
        self._command = options.command
        self._places = options.processes if options.processes > 1 else 0
        self._each = options.concurrency
        self._mates: list[Mate] = []
        self._preparing: asyncio.Task[None] | None = None
        """Keeps the spare process, for suspects when no other is idle. It is started when the first of them comes."""
        self._put_off: dict[UUID, PutOff] = {}
        """Suspects that were given back because another runs alone, in the order in which they came."""
        self._recalls = Alarm(self._clock, self._recall)
        self._recalling: asyncio.Task[None] | None = None
        self._over = asyncio.Event()
        """A job that was handed over has ended."""
        self._check = Alarm(self._clock, self._take_back_overdue)
        self._handover = 0
        """Microseconds from here to the handler: roughly the recent maximum."""

    # The processes.

    async def keep(self) -> None:
        """Keep the processes running for as long as the worker runs. Raises `KeepsDying` if one cannot be kept."""
        self._measure()  # there are no slots yet
        kept = [self.loop.create_task(self._keep_alive(place)) for place in range(self._places)]
        try:
            await asyncio.gather(*kept)
        finally:
            for each in kept:
                if not each.cancelling():  # twice would break off what ends a process that is starting
                    each.cancel()
            await asyncio.gather(*kept, return_exceptions=True)

    async def _keep_alive(self, place: int) -> None:
        deaths = wait = 0
        while True:
            began = self._now()
            lost, ending = await self._live(Mate(self._command, self._each, self._hear))
            if lost:
                wait = jittered(AFTER_KILLER)
                log.error("worker process %d died (%s) while %s ran; restarting it", place, ending, _jobs(lost))
            elif not self._slots.is_closed:
                deaths = 1 if self._now() - began >= PROVEN_AFTER else deaths + 1
                if deaths >= DEATHS_IN_A_ROW:
                    raise KeepsDying(f"worker process {place} died {deaths} times in a row ({ending}); giving up")
                wait = jittered(min(FIRST_RESTART << (deaths - 1), LONGEST_RESTART))
                log.error("worker process %d died (%s); restarting it in %.1f s", place, ending, wait / SECOND)
            if self._slots.is_closed:
                await asyncio.Event().wait()  # nobody needs another
            await pause(self._clock, wait)

    async def _keep_spare(self) -> None:
        """Keep one more process, with a single slot, until the worker stops or a job kills it."""
        lost, ending = await self._live(Mate(self._command, 1, self._hear, is_spare=True))
        log.error("the worker process for jobs that are to run alone died or did not start (%s)", ending)
        self._preparing = None
        if lost:
            self._recall()

    async def _live(self, mate: Mate) -> tuple[int, str]:
        """Let this process run jobs until it ends. Returns how many of them may have killed it, and how it ended."""
        try:
            await mate.start()
        except OSError as error:
            return 0, str(error)
        self._mates.append(mate)
        self._measure()
        self._refill()
        self._recall()
        ending = await mate.gone()
        self._mates.remove(mate)
        return self._lose(mate, ending), ending

    def _measure(self) -> None:
        """Update the number of slots, which changes with the processes."""
        own = 0 if self._places else self._each
        self._slots.concurrency = own + sum(mate.capacity for mate in self._mates)

    # From claim to handler.

    def _decoded(self, task: Task[..., Any], claim: Claim) -> tuple[Any, Any]:
        return ((), {}) if self._places else super()._decoded(task, claim)  # or where it runs

    def _fill_slots(self) -> None:
        waiting = self.waiting
        if not self._places:
            super()._fill_slots()
            return
        if not waiting:
            return
        free = sorted([mate for mate in self._mates if mate.free > 0], key=lambda mate: len(mate.runs))
        last = waiting[-1]
        for left, mate in zip(range(len(free), 0, -1), free, strict=True):
            # As many to each: they share the processors.
            self._fill(mate, -(-len(waiting) // left))
        if not waiting and last.pace is None:
            self.note_start(last.claim.claimed_at - self._handover)

    def _fill(self, mate: Mate, most: int) -> None:
        runs: list[Run] = []
        while self.waiting and len(runs) < min(most, mate.free):
            run = self.waiting.popleft()
            if run.claim.id in mate.runs:
                # An earlier claim of it was lost, and still runs there.
                self.waiting.appendleft(run)
                break
            runs.append(run)
        if runs:
            self._hand(mate, runs)

    def _hand(self, mate: Mate, runs: Sequence[Run]) -> None:
        now, watching = self._now(), self._watching
        handed = []
        for run in runs:
            claim = run.claim
            run.started_at = now
            run.mate = mate
            mate.runs[claim.id] = run
            self.running.add(run)
            in_process = run.task.options.executor == "process"
            begin_by = min(run.begin_by, now + (BEGINS_IN_A_PROCESS_WITHIN if in_process else BEGINS_WITHIN))
            mate.unseen.append((begin_by, run))
            trace = None
            if watching is not None:
                watching.count_start(claim)
                trace = watching.origin(claim.id)
            handed.append(Handed(claim, begin_by, run.pace is not None, trace))
        mate.send(Begin(handed, self.time.offset, self.time.ahead))
        self._check.set(mate.unseen[0][0] + MARGIN)

    def _set_apart(self, run: Run) -> None:
        """Run it in a process that runs nothing else, or give it back if there is none. It is not kept here: if this
        process died, nobody could tell which of its jobs had run, and each would be charged."""
        mate = self._idle()
        if mate is not None:
            self._put_off.pop(run.claim.id, None)
            self._hand(mate, [run])
            mate.is_alone = True
            self._measure()
            return
        self._prepare_spare()
        if run.pace is not None:
            self._pacer.drop(run)
        if not any(each.is_spare for each in self._mates):
            released = Released("the process that is to run it alone is starting", ALONE_LATER)
        else:
            released = self._put_off_until_alone(run)
        self._refuse(run.queue, run.claim, released)

    def _idle(self) -> Mate | None:
        """A process that runs nothing; the spare one comes last."""
        idle = [each for each in self._mates if each.is_ready and not each.runs and not each.revoked]
        return min(idle, key=lambda each: each.is_spare, default=None)

    def _put_off_until_alone(self, run: Run) -> Released:
        """Others run alone: give it back, for longer each time."""
        now = self._now()
        for job in [job for job, each in self._put_off.items() if each.due_at + 2 * LONGEST_ALONE_LATER < now]:
            del self._put_off[job]  # others have run them
        found = self._put_off.setdefault(run.claim.id, PutOff(now))
        delay, found.due_at, found.delay = found.delay, now + found.delay, min(2 * found.delay, LONGEST_ALONE_LATER)
        alone = [each for mate in self._mates if mate.is_alone for each in mate.runs.values()]
        if not alone:
            return Released("no process is free to run it alone; its turn comes later", delay)
        first = min(alone, key=lambda each: each.started_at)
        ran, waited = lasting(self.ran(first) / SECOND), lasting((now - found.since) / SECOND)
        reason = f"job {first.claim.id} ({first.claim.task}) has run alone for {ran}, and its turn comes later"
        return Released(f"{reason}; it has waited for {waited}" if now - found.since >= SECOND else reason, delay)

    def _recall(self) -> None:
        """A job that ran alone has ended: make the suspect that has waited longest due now. If a limit holds that one,
        the next one follows."""
        now = self._now()
        sleeping = [(job, each) for job, each in self._put_off.items() if each.due_at > now]
        if not sleeping or self._slots.is_closed:
            return
        if self._idle() is None:
            self._prepare_spare()
            return
        job, found = sleeping[0]
        found.due_at = now
        self._recalling = self.loop.create_task(self._make_due(job), name="fairlane-recall")
        self._recalls.set(now + ALONE_LATER)

    async def _make_due(self, job: UUID) -> None:
        try:
            await self.store.run(operators.retry_now([job]))
        except Exception as error:
            log.debug("job %s is not called back to run alone (%s); it comes by itself", job, error)

    def _prepare_spare(self) -> None:
        if self._preparing is None:
            self._preparing = self.loop.create_task(self._keep_spare(), name="fairlane-spare")

    # What processes tell.

    def _hear(self, mate: Mate, news: Began | Ended | Blocked) -> None:
        match news:
            case Began(job=job, at=at):
                run = mate.runs.get(job)
                if run is not None and run.pace is not None:
                    self._pacer.began(run, at)
            case Ended(jobs=ends):
                self._take(mate, ends)
            case Blocked(block=BlockedLoop(until=None)):
                # Its watchdog has logged which handler it is, and where.
                self._clear_warning(f"what blocks the event loop of process {mate.pid} is known now")
            case Blocked(block=block) if self._watching is not None:
                self._watching.loop_blocked(block)

    def _take(self, mate: Mate, ends: Sequence[End]) -> None:
        now, is_full = self._now(), mate.capacity < mate.slots
        unbegun: list[Run] = []
        lag = blocked = 0
        for end in ends:
            if (handed_at := mate.revoked.pop(end.job, None)) is not None:
                blocked = max(blocked, now - handed_at)
                continue
            run = mate.runs.pop(end.job)
            if end.is_unbegun:
                unbegun.append(run)
                continue
            took = now - run.started_at
            self.mean_run += (took - self.mean_run) * 0.1
            if end.settlement is not None:
                lag = max(lag, took - end.settlement.ran)
            self._finish(run, end.settlement, may_be_settled=end.may_be_settled)
        self._handover = lag if lag > self._handover else self._handover + (lag - self._handover) // 16
        if self._watching is not None:
            self._watching.metrics.observe("fairlane_event_loop_lag_seconds", max(lag, blocked) / SECOND)
        if mate.is_alone and not mate.runs:
            mate.is_alone, is_full = False, True
            self._recall()
        if is_full:
            self._measure()
            self._clear_warning()
        if unbegun:
            self._unbegun(unbegun)
            self._fill_slots()
        elif self.waiting:
            # All others are full, or it would not wait.
            self._fill(mate, len(self.waiting))
        self._slots.note_freed()

    def _finish(self, run: Run, settlement: Settlement | None, *, may_be_settled: bool = False) -> None:
        """A run has ended; without a settlement, its claim is lost."""
        self._let_go(run)
        run.may_be_settled = may_be_settled
        self._hand_on(run, settlement)
        if self._watching is not None:
            self._watching.count_end(run.claim, settlement, 0 if settlement is None else settlement.ran)
        self._over.set()

    def _unbegun(self, runs: Iterable[Run]) -> None:
        """These were handed over and did not begin. Another process may run them."""
        for run in reversed(list(runs)):
            self.running.discard(run)
            if self._watching is not None:
                self._watching.count_end(run.claim, settle(run.claim, self._missed(run), 0), 0)
            run.started_at = 0
            run.mate = None
            if run.stop is None and run.pace is None and not self._slots.is_closed and run.begin_by > self._now():
                if run.claim.is_suspect:
                    self._set_apart(run)
                else:
                    self.waiting.appendleft(run)
                continue
            outcome: RunOutcome | None = self._missed(run)
            if run.stop is Stop.GONE:
                outcome = None
            elif self._slots.is_closed:
                outcome = self.released(run, "its worker was stopped")
            self._let_go(run)
            if outcome is not None:
                self.settle_later(settle(run.claim, outcome, 0), run.queue)
        self._over.set()

    def _take_back_overdue(self) -> None:
        """Hand jobs that did not begin in time to other processes."""
        now = self._now()
        soonest: int | None = None
        for mate in self._mates:
            overdue: list[Run] = []
            while mate.unseen and mate.unseen[0][0] + MARGIN <= now:
                _, run = mate.unseen.popleft()
                if mate.runs.get(run.claim.id) is run:
                    overdue.append(run)
            if overdue:
                self._take_back(mate, overdue)
            if mate.unseen and (soonest is None or mate.unseen[0][0] < soonest):
                soonest = mate.unseen[0][0]
        if soonest is not None:
            self._check.set(max(soonest, now + BETWEEN_CHECKS) + MARGIN)

    def _take_back(self, mate: Mate, overdue: Sequence[Run]) -> None:
        begun = mate.begun()
        late = [run for run in overdue if mate.runs.get(run.claim.id) is run and run.claim.id not in begun]
        if not late:
            return
        if not mate.is_blocked:
            there = sorted({mate.runs[job].task.name for job in begun if job in mate.runs})
            self._warnings.tell(
                TROUBLE,
                f"process {mate.pid} does not start what it is given, and others run it: either its event loop is "
                f"blocked, by a handler of {' or '.join(there[:NAMED]) or 'an unknown task'}, or it gets no CPU time; "
                "blocking code belongs in a task that is not async",
            )
        for run in late:
            del mate.runs[run.claim.id]
            mate.revoked[run.claim.id] = run.started_at
        self._measure()
        self._unbegun(late)
        self._refill()

    def _lose(self, mate: Mate, ending: str) -> int:
        """A process is gone. Returns how many jobs may have killed it; the others go to other processes."""
        noted = mate.begun()
        mate.close()
        lost: list[Run] = []
        unbegun: list[Run] = []
        for job, run in mate.runs.items():
            (lost if job in noted else unbegun).append(run)
        mate.runs.clear()
        suspects = [run for run in lost if noted[run.claim.id] is not Noted.RUNS_IN_A_PROCESS and run.stop is None]
        for run in lost:
            self._finish(run, self._end_of_lost(run, noted[run.claim.id], ending, is_alone=mate.is_alone))
        if suspects and not mate.is_alone:
            log.warning(
                "a process died while %s ran; each next runs alone, to find the one that killed it: %s",
                _jobs(len(suspects)),
                ", ".join(sorted(str(run.claim.id) for run in suspects)[:NAMED]),
            )
        self._measure()
        self._clear_warning()
        self._unbegun(unbegun)
        self._refill()
        return len(suspects)

    def _clear_warning(self, words: str = "all processes start jobs again") -> None:
        if not any(mate.revoked and not mate.is_blocked for mate in self._mates):
            self._warnings.clear(TROUBLE, words)

    def blocks(self) -> list[BlockedLoop]:
        return [mate.block for mate in self._mates if mate.block is not None]

    def _end_of_lost(self, run: Run, noted: Noted, ending: str, *, is_alone: bool) -> Settlement | None:
        outcome: RunOutcome
        match run.stop, noted:
            case Stop.GONE, _:
                return None
            case Stop.SHUTDOWN, Noted.RUNS | Noted.RUNS_IN_A_PROCESS:
                outcome = Interrupted(Stop.SHUTDOWN.value)
            case _, Noted.RUNS if is_alone:
                outcome = Lost(f"it ran alone, and its process died ({ending})", SEEN)
            case _, Noted.RUNS:
                outcome = Lost(f"its worker's process died while it ran ({ending})", SEEN)
            case _, Noted.ENDED:
                outcome = Lost(f"its worker's process died before its end was recorded ({ending})", UNSEEN)
            case _:
                outcome = Lost(f"its worker's process died ({ending}); it ran in another, which died with it", 0)
        settlement = settle(run.claim, outcome, self.ran(run))
        if settlement.to is State.DEAD:
            log_end(run, settlement, None, self.time.now(), log)
        return settlement

    # Stopping runs.

    def interrupt(self, run: Run, reason: Stop) -> None:
        if run.mate is None:
            super().interrupt(run, reason)
        elif run.stop is None or (reason is Stop.GONE and run.stop is not Stop.GONE):
            run.stop = reason
            run.mate.send(Interrupt(run.claim.id, reason))

    async def all_ended(self) -> None:
        await super().all_ended()
        await self._handed_over_ended()

    async def _handed_over_ended(self) -> None:
        while any(mate.runs for mate in self._mates):
            self._over.clear()
            await self._over.wait()

    async def kill_the_rest(self) -> None:
        """Runs that do not stop end with their process; their jobs keep their place."""
        for mate in self._mates:
            if mate.runs:
                mate.kill()
        try:
            async with asyncio.timeout(KILLED_WITHIN):
                await self._handed_over_ended()
        except TimeoutError:
            log.error("%s: their processes could not be killed", _jobs(sum(len(mate.runs) for mate in self._mates)))

    async def leave(self, within: float) -> None:
        there = list(self._mates)
        waiting = [each for each in (self._preparing, self._recalling) if each is not None]
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await asyncio.gather(*(mate.leave(within) for mate in there))

    def close(self) -> None:
        self._check.close()
        self._recalls.close()
        super().close()


def _jobs(count: int) -> str:
    return "1 job" if count == 1 else f"{count:,} jobs"


class Runner(Execution):
    """The child process: it runs what the worker sends."""

    sets_suspects_apart = False
    """The worker does."""

    def __init__(self, program: Program, options: WorkerOptions, box: BlackBox) -> None:
        share = QueueShare(name="handed over")
        slots, time = Slots([share], options.concurrency, options.order, lambda: 0), StoreTime(program.clock)
        # The worker counts for all its processes.
        identity, nested = WorkerIdentity(uuid4(), options.name or ""), options.traces == "nested"
        watching = Watching(program.telemetry, identity, program.store, time, nested=nested, counts=False)
        super().__init__(program, slots, time, self._report_end, watching)
        self._queue = slots.queues[share.name]
        self._look_again = program.look_again
        self._box = box
        self._line: Line | None = None
        self._ends: list[End] = []
        self._unerased: list[UUID] = []
        self._left = asyncio.Event()
        self._late = Alarm(self._clock, self._give_up_late)
        self._watchdog = Watchdog(self, None, lambda block: self._send(Blocked(block)))

    async def run(self, connection: socket.socket) -> None:
        """Run what the worker sends until it says that there is nothing more."""
        self._line = Line(connection, self._hear, self._left.set)
        following = asyncio.ensure_future(self._follow())
        self._send(Ready())
        await self._left.wait()
        following.cancel()
        await self._watchdog.stop()
        self._late.close()
        self.close()

    async def _follow(self) -> None:
        """Learn from time to time where follow-ups of handlers go: queues may be given more partitions."""
        while self._look_again is not None:
            await pause(self._clock, jittered(LEARNED_EVERY))
            with contextlib.suppress(StoreUnavailable):
                await self._look_again()

    # What the worker says.

    def _hear(self, body: bytes) -> None:
        match decode_order(body):
            case Begin() as begin:
                self._take(begin)
                self._watchdog.start()  # not before: the clock by which a block is dated comes with a job
            case Interrupt(job=job, reason=reason):
                for run in self.find([job]):
                    self.interrupt(run, reason)
            case Leave():
                self._left.set()

    def _take(self, begin: Begin) -> None:
        if self._watching is not None:
            self._watching.remember_origins({each.claim.id: each.trace for each in begin.jobs})
        self.time.offset, self.time.ahead = begin.offset, begin.ahead
        self._logs_each = log.isEnabledFor(logging.DEBUG)
        self._queue.used += len(begin.jobs)
        for handed in begin.jobs:
            run = self._run_of(self._queue, handed.claim, handed.begin_by)
            if run is not None:
                run.reports_start = handed.is_paced
                self.waiting.append(run)
        self._fill_slots()
        self._late.set(begin.jobs[0].begin_by)

    # From handing over to the handler, and to its end.

    def _begins(self, run: Run) -> bool:
        job = run.claim.id
        # Noted before the clock is asked: see `BlackBox`.
        self._box.note(job, Noted.RUNS if run.child is None else Noted.RUNS_IN_A_PROCESS)
        run.started_at = self._now()
        if run.started_at > run.begin_by:
            self._box.erase(job)
            self._let_go(run)
            self._report(End(job, is_unbegun=True))
            self._refill()
            return False
        if run.reports_start:
            # Past the event loop, which would send it in its next turn: the handler may end the process before that.
            self._send(Began(job, run.started_at))
        return True

    def _give_up_late(self) -> None:
        now = self._now()
        for run in [*self.waiting, *(run for run in self.running if run.started_at == 0)]:
            if run.begin_by >= now:
                self._late.set(run.begin_by)
            else:
                super()._withdraw(run, None)
                self._report(End(run.claim.id, is_unbegun=True))

    def _give_back_stale(self) -> None:
        """The worker sets the time by which jobs have to begin."""

    def _withdraw(self, run: Run, outcome: RunOutcome | None) -> None:
        super()._withdraw(run, outcome)
        if outcome is None:
            self._report(End(run.claim.id))

    def _end(
        self,
        run: Run,
        outcome: RunOutcome | None,
        error: BaseException | None = None,
        settlement: Settlement | None = None,
    ) -> Settlement | None:
        self._box.note_end(run.claim.id)
        settlement = super()._end(run, outcome, error, settlement)
        if settlement is None:
            self._report(End(run.claim.id))
        return settlement

    # What the worker hears.

    def _report_end(self, settlement: Settlement, queue: QueueSlots, *, may_be_settled: bool = False) -> None:
        self._report(End(settlement.job, settlement, may_be_settled))

    def _report(self, end: End) -> None:
        """Report that a job has ended, together with the others that end in this turn of the event loop."""
        self._ends.append(end)
        if len(self._ends) == 1:
            self.loop.call_soon(self._send_ends)

    def _send(self, news: News) -> None:
        assert self._line is not None
        self._line.send(news)

    def _send_ends(self) -> None:
        ends, self._ends = self._ends, []
        self._send(Ended(ends))
        self._unerased += [end.job for end in ends]
        if self._line is not None and self._line.is_sent:
            for job in self._unerased:
                self._box.erase(job)
            self._unerased.clear()


class RunnerHost(Protocol):
    """What runs jobs for a worker: an app."""

    async def make_worker(self, kind: Callable[[Program, WorkerOptions], Runner], options: WorkerOptions) -> Runner: ...

    async def close(self) -> None: ...


async def serve(app: RunnerHost, options: WorkerOptions, descriptor: int, notes: int) -> bool:
    """Run what the worker at the other end of this socket sends. Returns whether a handler did not stop."""
    box = BlackBox(notes, options.concurrency)
    runner = await app.make_worker(lambda program, options: Runner(program, options, box), options)
    try:
        await runner.run(socket.socket(fileno=descriptor))
    finally:
        await app.close()
    return bool(runner.running)
