"""The watchdog reports runs that take too long, and handlers that block the event loop, while they do.

A blocked loop cannot report itself. It updates a heartbeat, and a thread checks it. When the heartbeat is late, the
thread reads the loop's stack, logs which job blocks it, and gives back, through a store of its own, claimed jobs that
have not begun. One lock (`Execution.beginning`) decides whether a claim begins or is given back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any
from uuid import UUID

import msgspec

from fairlane.clock import SECOND, Clock, lasting
from fairlane.job import Claim
from fairlane.redaction import error_text
from fairlane.scheduler.settlement import Released, Settlement, settle
from fairlane.store import records
from fairlane.store.protocol import Store, WorkerIdentity
from fairlane.store.stats_values import LONG_RUNS_AT_MOST, BlockedLoop, LongRun, WorkerReport
from fairlane.waits import jittered, pause
from fairlane.worker.execution import Execution, Run
from fairlane.worker.logs import claimed_jobs
from fairlane.worker.runs import Stop, current_run

log = logging.getLogger("fairlane.worker")

WaitedFor = Callable[[Sequence[Claim]], Awaitable[Mapping[UUID, str]]]
"""Returns, by job, the limit that a claim holds and for which other jobs wait."""

LOOKED_EVERY = 5 * SECOND
ASKED_EVERY = 15 * SECOND
"""How often the store is asked whether other jobs wait for what an old run holds."""
ANSWER_WITHIN = 5.0
"""Seconds to wait for that answer."""
TICK = 0.25
"""Seconds between two heartbeats, and between two checks of them."""
MISSED = 4
"""Heartbeats. Checks are counted, not time: a process that was suspended has missed none."""
REPORTED_FOR = 10 * 60 * SECOND
"""How long a block is still reported once it is over."""
NAMED = 10
"""How many other jobs on a blocked loop are named."""
FRAMES = 6
BLOCKED = "the event loop of its worker is blocked"
OURS = (os.path.dirname(os.path.dirname(__file__)) + os.sep, os.path.dirname(asyncio.__file__) + os.sep)


class LongRuns:
    """Runs that take far longer than others of their task, or hold a limit for which other jobs wait."""

    def __init__(self, execution: Execution, clock: Clock, at_least: int, waited_for: WaitedFor | None) -> None:
        self._execution = execution
        self._clock = clock
        self._at_least = at_least
        self._waited_for = waited_for
        self._asked_at: int | None = None
        self._limits: Mapping[UUID, str] = {}
        self._logged: set[UUID] = set()
        self.found: list[LongRun] = []

    async def keep_looking(self) -> None:
        while True:
            await pause(self._clock, jittered(LOOKED_EVERY))
            await self.look()

    @property
    def lost(self) -> int:
        """How many runs go on although their claims are lost. They are not long runs of their queues, where their jobs
        wait or run again. Thread-safe."""
        return sum(run.stop is Stop.GONE for run in tuple(self._execution.running))

    async def look(self) -> None:
        """Find them, and log each once."""
        running = [run for run in tuple(self._execution.running) if run.started_at and run.stop is not Stop.GONE]
        old = [
            run
            for run in running
            if self._execution.ran(run) >= min(run.task.timeout or self._at_least, self._at_least)
        ]
        old.sort(key=lambda run: run.started_at)
        await self._ask([run.claim for run in old[:LONG_RUNS_AT_MOST]])
        found = [(run, each) for run in old if (each := self._long_run(run)) is not None][:LONG_RUNS_AT_MOST]
        self.found = [each for _, each in found]
        for run, each in found:
            if run.claim.id not in self._logged:
                log.warning("%s", self._words(run, each), extra={"claim": run.claim})
        self._logged = {run.claim.id for run, _ in found}

    async def _ask(self, claims: Sequence[Claim]) -> None:
        now = self._clock.monotonic()
        if not claims or self._waited_for is None:
            self._limits, self._asked_at = {}, None
        elif self._asked_at is None or now - self._asked_at >= ASKED_EVERY:
            self._asked_at = now
            try:
                async with asyncio.timeout(ANSWER_WITHIN):
                    self._limits = await self._waited_for(claims)
            except Exception as error:
                self._limits = {}
                log.debug("whether others wait for what long runs hold could not be asked: %s", error)

    def _long_run(self, run: Run) -> LongRun | None:
        claim, times = run.claim, self._execution.run_times
        is_long = self._execution.ran(run) >= times.long_after(run.task, self._at_least)
        limit = self._limits.get(claim.id)
        if not is_long and limit is None:
            return None
        return LongRun(
            job=str(claim.id),
            task=claim.task,
            queue=claim.queue,
            since=run.started_at + self._execution.time.offset,
            usual=times.usual(claim.task),
            is_long=is_long,
            limit=limit,
        )

    def _words(self, run: Run, found: LongRun) -> str:
        ran = lasting(self._execution.ran(run) / SECOND)
        usual = "no run of its task has ended here yet"
        if found.usual is not None:
            usual = f"95 of 100 runs of its task take at most {lasting(found.usual / SECOND)}"
        holds = "" if found.limit is None else f"; it holds {found.limit}, for which others wait"
        return f"job {found.job} ({found.task}) has run for {ran}: {usual}{holds}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescue:
    """What the watchdog needs to act in the place of a worker whose event loop is blocked."""

    make_store: Callable[[], Store]
    identity: WorkerIdentity
    say: Callable[[], WorkerReport]
    leases: Callable[[], Collection[UUID]]


class Watchdog:
    """Watches the event loop of a worker, or of a child process, from a thread of its own."""

    def __init__(self, execution: Execution, rescue: Rescue | None, tell: Callable[[BlockedLoop], None]) -> None:
        """`tell` is called in the thread when the event loop is blocked, and in the event loop when it no longer is."""
        self._execution = execution
        self._tell = tell
        # A dispatcher's claims have begun elsewhere, as far as it knows.
        self._rescue = rescue if execution.calls_handlers else None
        self._loop = execution.loop
        self._beats = 0
        self._beat_at = self._back_at = time.monotonic()
        self._next_beat: asyncio.TimerHandle | None = None
        self._stopped = threading.Event()
        self._is_rescuing = False
        self._thread = threading.Thread(target=self._watch, name="fairlane-watchdog", daemon=True)
        self._block: BlockedLoop | None = None
        self._is_awaited = False
        """The next heartbeat ends a block."""
        self._has_failed = False
        self._owed: list[Settlement] = []
        """Settlements of claims given back here that could not be recorded yet."""

    def start(self) -> None:
        if self._next_beat is None:
            self._beat()
            self._thread.start()

    async def stop(self) -> None:
        """Stop watching; return once nothing more will be written about this worker."""
        self._stopped.set()
        if self._next_beat is not None:
            self._next_beat.cancel()
        if self._is_rescuing:
            await asyncio.to_thread(self._thread.join, ANSWER_WITHIN)

    def blocks(self) -> list[BlockedLoop]:
        """What blocks this event loop and those of child processes now, the longest first; then the last block that
        ended within the last minutes."""
        blocks = [each for each in (self._block, *self._execution.blocks()) if each is not None]
        since = self._execution.time.now() - REPORTED_FOR
        ended = [each for each in blocks if each.until is not None and each.until >= since]
        return [
            *sorted([each for each in blocks if each.until is None], key=lambda each: each.since),
            *sorted(ended, key=lambda each: each.until or 0)[-1:],
        ]

    def _beat(self) -> None:
        self._beat_at = time.monotonic()
        if self._is_awaited:
            self._is_awaited, self._back_at = False, self._beat_at
        self._beats += 1
        self._next_beat = self._loop.call_later(TICK, self._beat)

    # In the thread.

    def _watch(self) -> None:
        seen, step, missed = 0, None, 0
        while not self._stopped.wait(TICK) and not self._loop.is_closed():
            # Many short steps before the next heartbeat are lag, and no block.
            if (now := (self._beats, asyncio.current_task(self._loop))) != (seen, step):
                (seen, step), missed = now, 0
                continue
            missed += 1
            if missed == MISSED:
                try:
                    self._on_blocked(seen)
                except Exception:
                    log.exception("the watchdog failed; jobs go on")

    def _on_blocked(self, beats: int) -> None:
        began, self._is_awaited, self._has_failed = self._beat_at, True, False
        run = self._culprit()
        block = self._block = BlockedLoop(
            since=self._execution.time.now() - round((time.monotonic() - began) * SECOND),
            job=None if run is None else str(run.claim.id),
            task=None if run is None else run.claim.task,
            where=_frames(sys._current_frames().get(self._execution.thread)),
            beside=[str(each.claim.id) for each in self._on_the_loop() if each is not run][:NAMED],
        )
        extra = None if run is None else {"claim": run.claim}
        log.warning("%s", self._words(block, time.monotonic() - began), extra=extra)
        self._tell(block)
        self._is_rescuing = self._rescue is not None
        try:
            while self._is_blocked(beats) and self._rescue is not None:
                asyncio.run(self._act(self._rescue, beats))
            while self._is_blocked(beats):
                self._stopped.wait(TICK)
        finally:
            self._is_rescuing = False
            seconds = (time.monotonic() if self._is_awaited else self._back_at) - began
            block = self._block = msgspec.structs.replace(block, until=block.since + round(seconds * SECOND))
        log.warning("the event loop was blocked for %s by %s", lasting(seconds), _who(block), extra=extra)
        self._tell_loop(self._after_block, block)

    def _is_blocked(self, beats: int) -> bool:
        return self._beats == beats and not self._stopped.is_set() and not self._loop.is_closed()

    def _tell_loop(self, call: Callable[..., object], *given: object) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *given)
        except RuntimeError:
            log.debug("the event loop has ended")

    def _culprit(self) -> Run | None:
        """The run whose handler blocks the loop, or started the task that does."""
        task = asyncio.current_task(self._loop)
        for run in tuple(self._execution.running):
            if run.handle is task:
                return run
        # Since Python 3.12 a task says in which context it runs; a handler's own tasks run in copies of its context.
        context: Mapping[Any, Any] = getattr(task, "get_context", dict)()
        found = context.get(current_run)
        return found if isinstance(found, Run) else None

    def _on_the_loop(self) -> list[Run]:
        running = tuple(self._execution.running)
        return [run for run in running if run.started_at and run.task.is_async and run.mate is None]

    def _words(self, block: BlockedLoop, seconds: float) -> str:
        others = len(self._on_the_loop()) - (block.job is not None)
        still = f"; {others} other {'job stands' if others == 1 else 'jobs stand'} still" if others > 0 else ""
        return (
            f"the event loop has been blocked for {seconds:.1f} s by {_who(block)}, at {block.where}{still}; blocking "
            "code belongs in a task that is not async, which runs in a thread"
        )

    # In the thread, with an event loop and a store of its own.

    async def _act(self, rescue: Rescue, beats: int) -> None:
        """Report the block and give back what has not begun, for as long as the worker's loop cannot."""
        store = rescue.make_store()
        reported_at = -float(SECOND)
        try:
            await store.open()
            while self._is_blocked(beats):
                await self._give_back(store, rescue)
                for queue in self._execution.queues:
                    await store.wake_another(queue, rescue.identity.id)
                if time.monotonic() - reported_at >= LOOKED_EVERY / SECOND:
                    reported_at = time.monotonic()
                    await store.run(records.report(rescue.identity.id, rescue.say()))
                for _ in range(MISSED):
                    await asyncio.sleep(TICK if self._is_blocked(beats) else 0)
        except Exception as error:
            level, self._has_failed = logging.DEBUG if self._has_failed else logging.WARNING, True
            log.log(level, "what a blocked event loop holds cannot be given back: %s; trying again", error_text(error))
            await asyncio.sleep(MISSED * TICK)
        finally:
            with contextlib.suppress(Exception):
                await store.close()

    async def _give_back(self, store: Store, rescue: Rescue) -> None:
        execution = self._execution
        try:
            # Asked before the store is: whatever is settled in between is no claim of ours there any more.
            known = rescue.leases()
            taken = [run for run in execution.unstarted() if execution.give_back(run)]
        except RuntimeError:
            return  # the loop is back, and changes what we look at
        was_tried = bool(self._owed)
        self._owed += [settle(run.claim, execution.released(run, BLOCKED), 0) for run in taken]
        if taken:
            self._tell_loop(execution.forget, taken)
        unheard = await store.claims_beside(rescue.identity.id, known)
        self._owed += [settle(claim, Released(BLOCKED), 0) for claim in execution.revoke(unheard)]
        if self._owed:
            count = len(self._owed)
            await store.settle(self._owed, is_repeated=was_tried)
            self._owed = []
            log.warning("%s given back unstarted: %s", claimed_jobs(count), BLOCKED)

    # In the event loop, once it is back.

    def _after_block(self, block: BlockedLoop) -> None:
        owed, self._owed = self._owed, []
        for settlement in owed:
            self._execution.settle_instead(settlement)
        self._tell(block)


def _who(block: BlockedLoop) -> str:
    return "code of no known job" if block.job is None else f"job {block.job} ({block.task})"


def _frames(frame: FrameType | None) -> str:
    """The frames of user code, the outermost first: all that lie below the last of ours."""
    found: list[str] = []
    for each, line in traceback.walk_stack(frame) if frame is not None else ():
        path = each.f_code.co_filename
        if path.startswith(OURS) and found:
            break
        found.append(f"{each.f_code.co_name} ({os.sep.join(path.split(os.sep)[-2:])}:{line})")
    found.reverse()
    if len(found) > FRAMES:
        found[FRAMES // 2 : -FRAMES // 2] = ["…"]
    return " > ".join(found)
