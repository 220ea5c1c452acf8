"""Claiming: one claimer for all slots of a process. It asks when there is room and reason, else it waits to be woken.

Reasons to ask: a nudge from the store, a time at which something opens, a slot that became free while there was more
to do, a settlement of ours (it may have opened a limit), and, as the last resort, a slow poll.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from datetime import timedelta

from fairlane.clock import Clock, microseconds
from fairlane.errors import StoreUnavailable
from fairlane.store.protocol import Choice, Claimed, Listener, Store, WorkerIdentity
from fairlane.waits import Alarm, Outage, jittered
from fairlane.worker.execution import SHORTEST_RUN, Execution
from fairlane.worker.instruments import Watching
from fairlane.worker.slots import QueueSlots, Slots

log = logging.getLogger("fairlane.worker")

AHEAD_AT_MOST = 1_000
"""Jobs that are held beyond the slots, unless the worker is told how many."""
TURNS_AHEAD = 4
"""And how many for each slot: where claims take long because many wait for them, a worker of few slots that fills up on
what will end meanwhile leaves nothing to the others, and gives it back unstarted."""
LONGEST_LOOK = 1.0
"""Seconds, at most, until another look: for what a producer may commit that did not see us wait, or at a time that has
come and opened nothing."""


class Claiming:
    """Fills free slots."""

    def __init__(
        self,
        store: Store,
        identity: WorkerIdentity,
        slots: Slots,
        execution: Execution,
        outage: Outage,
        clock: Clock,
        *,
        lease: timedelta,
        poll: timedelta,
        prefetch: int | None,
    ) -> None:
        self.listener: Listener | None = None
        self._store = store
        self._identity = identity
        self._slots = slots
        self._execution = execution
        self._outage = outage
        self._clock = clock
        self._lease = lease
        self._poll = microseconds(poll)
        self._prefetch = min(AHEAD_AT_MOST, TURNS_AHEAD * slots.concurrency) if prefetch is None else prefetch
        slots.prefetches = prefetch is not None
        self._alarm = Alarm(clock, self._on_time)
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._stopping = asyncio.Event()
        self._is_waiting = False
        self._mean_claim = 0.0
        self._is_nudged = False
        self.watching: Watching | None = None
        self.on_unexplained_nudge: Callable[[], None] = lambda: None
        execution.on_slot_freed = self._on_slot_freed

    # What wakes it.

    def nudge(self) -> None:
        """The store says that there is something, without saying where."""
        for queue in self._slots.queues.values():
            if queue.is_registered:
                queue.is_registered = False
                queue.owes_wakeup = True
            elif self._execution.holds_paced(queue):
                queue.owes_wakeup = True  # asked without a free slot too: its terms may have changed
            self._slots.feed(queue)
        self._is_nudged = True
        self._wake.set()

    def look_everywhere(self) -> None:
        """Nobody will have told us what happened meanwhile: ask every queue."""
        self.look_at(self._slots.queues.values())

    def look_at(self, queues: Iterable[QueueSlots]) -> None:
        """Ask these queues."""
        for queue in queues:
            self._slots.feed(queue)
        self._wake.set()

    def look_after_settling(self, queues: Iterable[QueueSlots]) -> None:
        """What we settled may have opened a limit, unless only time opens those of its queue."""
        self.look_at([queue for queue in queues if queue.opens_by_ends])

    def stop(self) -> None:
        self._slots.is_closed = True
        self._stopping.set()
        self._wake.set()

    def _on_slot_freed(self) -> None:
        if self._is_waiting:
            self._wake.set()

    def _on_time(self) -> None:
        now, later = self._clock.monotonic(), []
        for queue in self._slots.queues.values():
            if queue.due_at is None:
                continue
            if queue.due_at <= now:
                queue.due_at = None
                self._slots.feed(queue)
            else:
                later.append(queue.due_at)
        if later:
            self._alarm.set(min(later))
        self._wake.set()

    # What it does.

    async def run(self) -> None:
        """Claim until told to stop; then pass on the wake-ups that were meant for us."""
        try:
            while True:
                queue = self._slots.next_to_ask()
                if queue is not None:
                    await self._claim(queue)
                elif self._slots.is_closed:
                    return
                else:
                    await self._wait()
        finally:
            self._alarm.close()

    async def _wait(self) -> None:
        if self._is_nudged:
            # Nobody had work for us, so it was about something else: a job of ours was cancelled.
            self._is_nudged = False
            self.on_unexplained_nudge()
        self._is_waiting = True
        await self._wake.wait()
        self._wake.clear()
        self._is_waiting = False

    async def _claim(self, queue: QueueSlots) -> None:
        visit = Visit(self._slots, queue)
        asked, asked_at, locked_at, watching = 0, 0, 0.0, self.watching

        def want() -> int:
            # Asked by the store once it holds the lock, on a thread of its own perhaps.
            nonlocal asked, locked_at
            asked = visit.portion()
            locked_at = self._loop.time()
            return asked

        async def once() -> Claimed:
            nonlocal asked_at
            visit.begin()
            asked_at = self._clock.monotonic()
            claimed = await self._store.claim(
                visit.queue.name,
                want,
                worker=self._identity,
                lease=self._lease,
                listener=self.listener,
                start_lag=self._execution.start_lag,
                ahead=self._execution.ahead,
                others=[each.name for each in visit.others],
                chose=visit.chose,
            )
            if claimed.at:
                self._execution.store_time.hear(asked_at, claimed.at, self._clock.monotonic())
            if watching is not None:
                await watching.find_origins(claimed.claims)
            return claimed

        began = self._loop.time()
        try:
            claimed = await self._outage.ride_out(once, "claiming", unless=self._stopping)
        except StoreUnavailable:
            return  # told to stop, and nobody there to claim from
        visit.end(claimed.vtime)
        queue = visit.queue
        self._slots.note_claimed(queue, len(claimed.claims), claimed.vtime)
        if claimed.is_limited is not None:
            queue.whole.is_limited = claimed.is_limited
        if claimed.opens_by_ends is not None:
            queue.opens_by_ends = claimed.opens_by_ends
        took = self._loop.time() - began
        self._note_time(took)
        if watching is not None:
            # Who was given what another has claimed has not waited for the lock.
            watching.claimed(queue.name, claimed, took, None if claimed.vtime is None else locked_at - began)
        if claimed.claims:
            self._is_nudged = False
        if claimed.terms is not queue.terms and claimed.terms is not None:
            if queue.terms is not None:
                self._execution.revoke_paced(queue)
            queue.terms = claimed.terms
        if claimed.paces:
            self._execution.note_start(claimed.at)
        self._execution.start(queue, claimed.claims, asked_at + microseconds(self._lease), claimed.paces)
        if self._slots.is_closed or self._slots.is_stopping:
            self._execution.give_back_unstarted("its worker was stopped")
        self._plan_next(queue, claimed, asked)

    def _note_time(self, seconds: float) -> None:
        self._mean_claim += (seconds * 1e6 - self._mean_claim) * 0.2
        # As many as will have ended by the time that the next claim is back; for long jobs that is none.
        turns = self._mean_claim / max(self._execution.mean_run, SHORTEST_RUN)
        self._slots.ahead = min(self._prefetch, int(self._slots.concurrency * turns))

    def _plan_next(self, queue: QueueSlots, claimed: Claimed, asked: int) -> None:
        """When to ask this queue again, from what it said."""
        if claimed.claims:
            queue.looks = 0
        if len(claimed.claims) >= asked and not claimed.paces:
            # All that was asked for: there may be more, and nobody will tell us. Ask when a slot is free.
            queue.is_hungry = True
            queue.is_registered = False
            return
        queue.is_registered = self.listener is not None
        queue.is_hungry = queue.is_hungry or claimed.more
        if not queue.is_hungry:
            self._slots.note_idle(queue)
        # By the monotonic clock: one that is set back must not keep us from asking.
        now = self._clock.monotonic()
        due = now + jittered(self._poll)
        if claimed.next_due is not None:
            due = min(due, claimed.next_due - self._execution.store_time.offset)
        if claimed.look_again or due <= now:
            self._loop.call_later(min(0.001 * 2 ** min(queue.looks, 20), LONGEST_LOOK), self.look_at, (queue,))
            queue.looks += 1
        else:
            queue.looks = 0
        if due > now:
            queue.due_at = due
            self._alarm.set(due)


class Visit:
    """Asks a queue, and says which was asked in the end: `queue`."""

    __slots__ = ("_first", "_hungry", "_left", "_owing", "_slots", "_vtime", "others", "queue")

    def __init__(self, slots: Slots, first: QueueSlots) -> None:
        self._slots = slots
        self._first = self.queue = first
        self.others = slots.instead_of(first)
        tried = (first, *self.others)
        self._hungry = [each for each in tried if each.is_hungry]
        self._owing = [each for each in tried if each.owes_wakeup]
        self._left: set[str] = set()
        """Partitions that others are claiming from."""
        self._vtime: float | None = None
        """How far the chosen one was before."""
        # Cleared before the question: what we hear while it is asked may be about work that the answer does not hold.
        for each in tried:
            each.owes_wakeup = each.is_hungry = False

    def begin(self) -> None:
        """The question is asked, perhaps not for the first time."""
        self.queue, self._left, self._vtime = self._first, set(), None

    def chose(self, choice: Choice) -> None:
        """The store holds the lock of one of them."""
        self.queue = self._slots.queues[choice.queue]
        see = self.queue.whole.turns.see
        self._left = {name for name, vtime in choice.vtimes.items() if see(name, vtime)} | choice.taken
        self._vtime = choice.vtimes[choice.queue]

    def portion(self) -> int:
        """How many jobs to ask for. What is left to others takes nothing of our room."""
        beside = [
            each
            for each in self._first.whole.queues
            if each is not self.queue and (each.is_hungry or each in self._hungry) and each.name not in self._left
        ]
        return self._slots.portion(self.queue, len(beside))

    def end(self, vtime: float | None) -> None:
        """It was answered. Those that were not asked are as they were, but for what we have heard meanwhile."""
        if self._vtime is not None and vtime is not None:
            self.queue.whole.turns.note_step(self.queue.name, vtime - self._vtime)
        for each in self._hungry:
            each.is_hungry = each.is_hungry or each is not self.queue
        for each in self._owing:
            each.owes_wakeup = each.owes_wakeup or each is not self.queue


class Listening:
    """Passes nudges on to the claimer, to whoever looks for cancellations, and to whoever fires schedules."""

    def __init__(
        self, store: Store, identity: WorkerIdentity, claiming: Claiming, outage: Outage, on_nudge: Callable[[], None]
    ) -> None:
        self._store = store
        self._identity = identity
        self._claiming = claiming
        self._outage = outage
        self._on_nudge = on_nudge
        self.on_schedules: Callable[[], None] = lambda: None

    async def run(self) -> None:
        while True:
            listener = await self._outage.ride_out(lambda: self._store.listen(self._identity), "listening")
            self._claiming.listener = listener
            # Whatever came while nobody listened is found by asking; the claim registers the new ear.
            self._claiming.look_everywhere()
            self.on_schedules()
            try:
                await self._hear(listener)
            finally:
                self._claiming.listener = None
                await self._close(listener)

    async def _hear(self, listener: Listener) -> None:
        while True:
            try:
                nudged = await listener.wait(None)
            except StoreUnavailable:
                return
            if nudged:
                if listener.schedules_changed():
                    self.on_schedules()
                self._on_nudge()
                self._claiming.nudge()

    async def _close(self, listener: Listener) -> None:
        # If that fails, its registrations go with the first nudge that finds nobody.
        with contextlib.suppress(StoreUnavailable):
            await listener.close()
