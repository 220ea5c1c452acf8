"""In a process that runs jobs for a worker: their handlers, and nothing else. It claims, renews and settles nothing.

A job begins only if that can be by the time that the worker has set: after it, the worker hands the job to another
process without asking. The job is therefore noted in shared memory first, and the clock is looked at then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol
from uuid import UUID, uuid4

from fairlane.clock import Clock
from fairlane.errors import StoreUnavailable
from fairlane.job_builder import Stamp
from fairlane.policy.division import LEARNED_EVERY
from fairlane.scheduler.settlement import Outcome, Settlement
from fairlane.store.protocol import Store, WorkerIdentity
from fairlane.task import Registry
from fairlane.telemetry.telemetry import Telemetry
from fairlane.waits import Alarm, jittered, pause
from fairlane.worker.child import (
    Began,
    Begin,
    BlackBox,
    Blocked,
    End,
    Ended,
    Interrupt,
    Leave,
    Line,
    Noted,
    Ready,
    decode_order,
)
from fairlane.worker.execution import Execution, Run
from fairlane.worker.instruments import WatchedExecution, Watching
from fairlane.worker.middleware import Middleware
from fairlane.worker.options import QueueShare, WorkerOptions
from fairlane.worker.slots import QueueSlots, ShareSlots, Slots
from fairlane.worker.watchdog import Watchdog

log = logging.getLogger("fairlane.worker")


class HiredExecution(Execution):
    """Runs what a worker hands over."""

    sets_suspects_apart = False
    """The worker does."""

    def __init__(self, *given: Any, box: BlackBox, tell: Callable[[End], None], **named: Any) -> None:
        super().__init__(*given, **named)
        self._box = box
        self._tell = tell
        self.began: Callable[[UUID, int], None] = lambda job, at: None
        """Hears at once when a paced job begins."""
        self._paced: set[UUID] = set()
        self._late = Alarm(self._clock, self._give_up_late)

    def take(self, queue: QueueSlots, begin: Begin) -> None:
        """Run these."""
        self.store_time.offset, self.store_ahead = begin.offset, begin.ahead
        self._logs_each = log.isEnabledFor(logging.DEBUG)
        queue.used += len(begin.jobs)
        for handed in begin.jobs:
            run = self._run_of(queue, handed.claim, handed.begin_by)
            if run is not None:
                self.waiting.append(run)
                if handed.is_paced:
                    self._paced.add(handed.claim.id)
        self._fill_slots()
        self._late.set(begin.jobs[0].begin_by)

    def _begins(self, run: Run) -> bool:
        job = run.claim.id
        # Noted before the clock is asked: see `BlackBox`.
        self._box.note(job, Noted.RUNS if run.child is None else Noted.RUNS_ELSEWHERE)
        run.started_at = self._now()
        if run.started_at > run.begin_by:
            self._box.erase(job)
            self._give_up(run)
            return False
        if job in self._paced:
            # Past the event loop, which would send it in its next turn: the handler may end the process before that.
            self._paced.discard(job)
            self.began(job, run.started_at)
        return True

    def _give_up(self, run: Run) -> None:
        """It could not begin in time."""
        self.running.discard(run)
        run.queue.used -= 1
        self._paced.discard(run.claim.id)
        self._tell(End(run.claim.id, is_unbegun=True))
        self._refill()

    def _give_up_late(self) -> None:
        now = self._now()
        unbegun = [*self.waiting, *(run for run in self.running if run.started_at == 0)]
        for run in unbegun:
            if run.begin_by < now:
                super()._withdraw(run, None)
                self._paced.discard(run.claim.id)
                self._tell(End(run.claim.id, is_unbegun=True))
        left = [run.begin_by for run in unbegun if run.begin_by >= now]
        if left:
            self._late.set(min(left))

    def _give_back_stale(self) -> None:
        """The time by which jobs have to begin is the worker's."""

    def _withdraw(self, run: Run, outcome: Outcome | None) -> None:
        super()._withdraw(run, outcome)
        self._paced.discard(run.claim.id)
        if outcome is None:
            self._tell(End(run.claim.id))

    def _end(
        self,
        run: Run,
        outcome: Outcome | None,
        error: BaseException | None = None,
        settlement: Settlement | None = None,
    ) -> Settlement | None:
        self._box.note_end(run.claim.id)
        settlement = super()._end(run, outcome, error, settlement)
        if settlement is None:
            self._tell(End(run.claim.id))
        return settlement

    def close(self) -> None:
        self._late.close()
        super().close()


class WatchedHiredExecution(WatchedExecution, HiredExecution):
    """The same, and tells of each. The worker counts them."""


class Runner:
    """What runs in the process."""

    def __init__(
        self,
        store: Store,
        registry: Registry,
        options: WorkerOptions,
        clock: Clock,
        *,
        max_result: int,
        stamp: Stamp,
        middlewares: Sequence[Middleware],
        telemetry: Telemetry,
        look_again: Callable[[], Awaitable[None]],
        box: BlackBox,
        **_: Any,
    ) -> None:
        share = QueueShare(name="handed over")
        self._queue = QueueSlots(share.name, ShareSlots(share, ()))
        self._clock = clock
        self._look_again = look_again
        self._box = box
        self._line: Line | None = None
        self._ends: list[End] = []
        self._unerased: list[UUID] = []
        self._loop = asyncio.get_running_loop()
        self._left = asyncio.Event()
        slots = Slots([share], options.concurrency, options.order, lambda: 0)
        is_watched = telemetry.hooks or telemetry.tracing.tracer() is not None
        self._execution = (WatchedHiredExecution if is_watched else HiredExecution)(
            store,
            registry,
            slots,
            clock,
            self._settle_later,
            max_result,
            stamp,
            middlewares,
            box=box,
            tell=self._tell,
        )
        self._watchdog = Watchdog(self._execution)
        self._watching: Watching | None = None
        if isinstance(self._execution, WatchedHiredExecution):
            identity = WorkerIdentity(uuid4(), options.name or "")
            self._watching = Watching(telemetry, identity, store, clock, nested=options.traces == "nested")
            self._watching.metrics = None  # the worker counts for all its processes
            self._watching.store_now = self._execution.store_now
            self._execution.watching = self._watching

    @property
    def left_running(self) -> int:
        """Handlers that would not stop: threads that are still busy."""
        return len(self._execution.running)

    async def run(self, connection: socket.socket) -> None:
        """Run what the worker sends, until it says that there is nothing more."""
        line = self._line = Line(connection, self._hear, self._left.set)
        self._execution.began = lambda job, at: line.send(Began(job, at))
        self._watchdog.on_blocked = lambda block: line.send(Blocked(block))
        self._watchdog.on_block_ended = lambda block, seconds: line.send(Blocked(block))
        following = asyncio.ensure_future(self._follow())
        line.send(Ready())
        await self._left.wait()
        following.cancel()
        await self._watchdog.stop()
        self._execution.close()

    def _hear(self, body: bytes) -> None:
        match decode_order(body):
            case Begin() as begin:
                if self._watching is not None:
                    self._watching.remember_origins({each.claim.id: each.trace for each in begin.jobs if each.trace})
                self._execution.take(self._queue, begin)
                self._watchdog.start()  # not before: the clock by which a block is dated comes with a job
            case Interrupt(job=job, reason=reason):
                for run in self._execution.find([job]):
                    self._execution.interrupt(run, reason)
            case Leave():
                self._left.set()

    async def _follow(self) -> None:
        """Know where the follow-ups go that handlers declare, also after queues were given more partitions."""
        while True:
            await pause(self._clock, jittered(LEARNED_EVERY))
            with contextlib.suppress(StoreUnavailable):
                await self._look_again()

    def _settle_later(self, settlement: Settlement, queue: QueueSlots, *, may_be_settled: bool = False) -> None:
        self._tell(End(settlement.job, settlement, may_be_settled))

    def _tell(self, end: End) -> None:
        """Say that a job has ended, together with those that end in this turn of the event loop."""
        self._ends.append(end)
        if len(self._ends) == 1:
            self._loop.call_soon(self._send)

    def _send(self) -> None:
        assert self._line is not None
        ends, self._ends = self._ends, []
        self._line.send(Ended(ends))
        self._unerased += [end.job for end in ends]
        if self._line.is_sent:
            for job in self._unerased:
                self._box.erase(job)
            self._unerased.clear()


class RunnerHost(Protocol):
    """What runs jobs for a worker: an app."""

    async def make_worker(self, kind: Callable[..., Runner], options: WorkerOptions) -> Runner: ...

    async def close(self) -> None: ...


async def serve(app: RunnerHost, options: WorkerOptions, descriptor: int, notes: int) -> Runner:
    """Run jobs for the worker at the other end of this socket, until it says that there are no more."""
    box = BlackBox(notes, options.concurrency)
    runner = await app.make_worker(lambda *given, **named: Runner(*given, box=box, **named), options)
    try:
        await runner.run(socket.socket(fileno=descriptor))
    finally:
        await app.close()
    return runner
