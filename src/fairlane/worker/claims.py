"""Claims: which queue to ask, when, and for how many jobs; and when the jobs of smooth rates begin.

One claimer serves all slots of a process. It claims when a slot is free and there is a reason to; otherwise it waits.
Reasons are: a wakeup from the store, a time at which a limit opens, a slot that became free while there was more to do,
a settlement of our own (it may have opened a limit), and, as the last resort, a slow poll.

Jobs held by the pacer take no slot. It releases one job of a rate at a time, and the next only when that one has really
begun: however late a process is (it was stopped, its loop was blocked), starts never come in bursts. Jobs that are too
late for the start times of their claim are given back.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import random
import sys
import time
from bisect import insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from fairlane.clock import SECOND, Clock, Instant, SystemClock, microseconds
from fairlane.errors import StoreUnavailable
from fairlane.policy.partitions import parse_partition
from fairlane.scheduler.snapshot import Pace, Passed
from fairlane.store.protocol import Choice, Claimed, Listener
from fairlane.waits import Alarm, jittered
from fairlane.worker.options import Order, QueueShare
from fairlane.worker.runtime import Runtime

if TYPE_CHECKING:
    from fairlane.cron.schedules import CronRunner
    from fairlane.worker.execution import Execution, Run
    from fairlane.worker.leases import Leases


SHORTEST_RUN = 5.0
"""Microseconds: the least that a run costs, however short its handler."""
MOST_UNSETTLED = 2_000
"""Outcomes that may wait for the store. Beyond that, running more jobs only adds to what a crash would lose."""

CLAIMED_AT_ONCE = 1_000
"""A claim keeps other workers from claiming for as long as it takes."""


@dataclass(slots=True, eq=False)
class QueueSlots:
    """One queue, or one partition of a queue, as this worker sees it."""

    name: str
    whole: ShareSlots
    used: int = 0
    wants_more: bool = True
    """There may be work: ask as soon as a slot is free."""
    is_idle: bool = False
    """It had no work for us when we last asked."""
    opens_by_ends: bool = True
    """The end of a job may let another start."""
    is_registered: bool = False
    """The store will nudge us."""
    owes_wakeup: bool = False
    """We were nudged, and must ask or pass the wake-up on, even without room."""
    due_at: Instant | None = None
    looks: int = 0
    terms: object = None
    """The policy under which it was last claimed from."""


class ShareSlots:
    """A queue that a worker serves, with all its partitions."""

    def __init__(self, share: QueueShare, names: Sequence[str]) -> None:
        self.share = share
        self.turns = Turns(names)
        self.queues = [QueueSlots(name, self) for name in names]
        self.served = 0.0
        """Jobs claimed so far, divided by the weight: the lowest is asked next."""
        self.is_limited = True
        """It has limits, so a job that waits here would hold slots and tokens that others could use. The same for all
        partitions: one that was not asked yet would have no room beside jobs that another holds ahead."""

    @property
    def used(self) -> int:
        return sum([queue.used for queue in self.queues])

    @property
    def is_idle(self) -> bool:
        """None of its partitions had work when we last asked. One that is being asked is not idle."""
        return all(queue.is_idle for queue in self.queues)

    @property
    def wants_more(self) -> bool:
        return any(queue.wants_more for queue in self.queues)


class Slots:
    """All slots of a worker. Counts are plain numbers, read from the store's thread while a claim holds its lock."""

    def __init__(
        self,
        shares: Sequence[QueueShare],
        concurrency: int,
        order: Order,
        unsettled: Callable[[], int],
        served: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self._shares = [ShareSlots(share, (served or {}).get(share.name, (share.name,))) for share in shares]
        self.queues = {queue.name: queue for share in self._shares for queue in share.queues}
        self._reserving = [each for each in self._shares if each.share.min_slots]
        self._order = order
        self._unsettled = unsettled
        self.concurrency = concurrency
        self.ahead = 0
        """Jobs that may be held beyond the slots, because they will start before the next claim returns."""
        self.prefetches = False
        """`prefetch` was given: jobs of any queue are held ahead."""
        self.is_closed = False
        self.is_stopping = False
        """The worker was asked to stop and is about to close the slots: jobs of a claim in flight are given back."""
        self.is_paused = False
        """Jobs cannot be handed on for now: the broker refuses them."""
        self.wake = asyncio.Event()
        """There is a reason to claim."""
        self.is_awaited = False
        """Whoever claims waits for that."""

    @property
    def wholes(self) -> list[ShareSlots]:
        """Queues that are served with all their partitions."""
        return [each for each in self._shares if parse_partition(each.share.name) is None]

    def add(self, whole: ShareSlots, name: str) -> QueueSlots:
        queue = QueueSlots(name, whole)
        whole.turns.add(name)
        whole.queues.append(queue)
        self.queues[name] = queue
        return queue

    @property
    def used(self) -> int:
        return sum([queue.used for queue in self.queues.values()])

    def room(self, queue: QueueSlots) -> int:
        if self.is_closed or self.is_paused:
            return 0
        own = queue.whole
        # Among several, what one holds ahead would take the slots that are another's turn, or kept for it.
        is_free = len(self._shares) == 1 and not own.is_limited
        ahead = self.ahead if is_free or self.prefetches else 0
        free = min(self.concurrency + ahead - self.used, MOST_UNSETTLED - self._unsettled())
        for other in self._reserving:
            if other is not own and other.used < other.share.min_slots:
                free -= other.share.min_slots - other.used
        most = own.share.max_slots
        if most is not None and most - own.used < free:
            free = most - own.used
        return max(0, free)

    def portion(self, queue: QueueSlots, beside: int = 0) -> int:
        """How many jobs to ask for: all free slots, or a share of them if other queues, or so many partitions beside
        it, wait for the same slots."""
        room = min(self.room(queue), CLAIMED_AT_ONCE)
        own = queue.whole
        if room <= 1 or (self._order == "strict" and not beside):
            return room
        weight = own.share.weight
        rivals = sum(each.share.weight for each in self._shares if each is not own and each.wants_more)
        if self._order == "strict":
            rivals = 0
        if not rivals and not beside:
            return room
        return max(1, -int(-room * weight // ((weight + rivals) * (1 + beside))))

    def next_to_ask(self) -> QueueSlots | None:
        """The queue to ask next: one that may have work, or one that owes a wakeup; `None`: wait."""
        able = [
            queue for queue in self.queues.values() if queue.owes_wakeup or (queue.wants_more and self.room(queue) > 0)
        ]
        if len(able) <= 1:
            return able[0] if able else None
        whole = able[0].whole if self._order == "strict" else min(able, key=lambda queue: queue.whole.served).whole
        return min([queue for queue in able if queue.whole is whole], key=lambda queue: whole.turns.tag(queue.name))

    def instead_of(self, queue: QueueSlots) -> list[QueueSlots]:
        """Partitions to ask instead if another worker is claiming from this queue, by turns.

        A worker that was woken for this queue must wait for it: perhaps no other was woken.
        """
        turns = queue.whole.turns
        if queue.owes_wakeup or self.room(queue) <= 0:
            return []
        able = [
            each
            for each in queue.whole.queues
            if each is not queue and each.wants_more and turns.may_go_before(each.name, queue.name)
        ]
        return sorted(able, key=lambda each: turns.tag(each.name))

    def note_claimed(self, queue: QueueSlots, count: int, vtime: float | None = None) -> None:
        queue.used += count
        queue.whole.served += count / queue.whole.share.weight
        queue.whole.turns.note(queue.name, vtime, is_idle=False)

    def note_idle(self, queue: QueueSlots) -> None:
        queue.is_idle = True
        queue.whole.turns.note(queue.name, None, is_idle=True)

    def feed(self, queue: QueueSlots) -> None:
        """There may be work again. A queue that was idle gets no credit for that time."""
        whole = queue.whole
        was_idle = whole.is_idle
        queue.wants_more = True
        queue.is_idle = False
        if was_idle:
            lowest = min(
                [other.served for other in self._shares if other is not whole and not other.is_idle], default=0.0
            )
            whole.served = max(whole.served, lowest)

    def look_at(self, queues: Iterable[QueueSlots]) -> None:
        """Ask these queues."""
        for queue in queues:
            self.feed(queue)
        self.wake.set()

    def look_everywhere(self) -> None:
        """Ask every queue: we may have missed wakeups."""
        self.look_at(self.queues.values())

    def look_after_settling(self, queues: Iterable[QueueSlots]) -> None:
        """Ask these queues, unless only time opens their limits: our settlements may have opened one."""
        self.look_at([queue for queue in queues if queue.opens_by_ends])

    def note_freed(self) -> None:
        if self.is_awaited:
            self.wake.set()


SMOOTHING = 0.2
CLAIMS_AHEAD = 4
"""With fewer, processes wait for each other without need; more does not help."""


class Turns:
    """Which partition is next, as far as this process has seen."""

    def __init__(self, queues: Iterable[str]) -> None:
        names = list(queues)
        # Processes that all began with the same partition would wait for its lock one after the other.
        random.shuffle(names)
        self._tags = dict.fromkeys(names, 0.0)
        self._seen: dict[str, float] = {}
        self._steps: dict[str, float] = {}
        """By how much a claim of ours raises the virtual time of a partition."""
        self._idle: set[str] = set()

    def add(self, queue: str) -> None:
        self._tags.setdefault(queue, self._lowest(queue))

    def tag(self, queue: str) -> float:
        """The lowest is next. An idle partition counts as the lowest of the others."""
        own = self._tags[queue]
        return max(own, self._lowest(queue)) if queue in self._idle else own

    def in_order(self) -> list[str]:
        return sorted(self._tags, key=self.tag)

    def note(self, queue: str, vtime: float | None, *, is_idle: bool) -> None:
        """Take note of what a claim returned: the partition's virtual time, and whether it has no more work."""
        if vtime is not None:
            self.see(queue, vtime)
        (self._idle.add if is_idle else self._idle.discard)(queue)

    def see(self, queue: str, vtime: float) -> float:
        """A partition has reached this virtual time, by anybody's claims. Returns by how much it has risen."""
        risen = max(0.0, vtime - self._seen.get(queue, vtime))
        self._seen[queue] = vtime
        self._tags[queue] = self.tag(queue) + risen
        return risen

    def note_step(self, queue: str, risen: float) -> None:
        before = self._steps.get(queue, 0.0)
        self._steps[queue] = before + (risen - before) * SMOOTHING

    def may_go_before(self, queue: str, other: str) -> bool:
        """Whether a partition may be served before one whose turn it is."""
        return self.tag(queue) - self.tag(other) <= CLAIMS_AHEAD * self._steps.get(queue, 0.0)

    def _lowest(self, queue: str) -> float:
        others = (tag for name, tag in self._tags.items() if name != queue and name not in self._idle)
        return min(others, default=self._tags.get(queue, 0.0))


AHEAD_AT_MOST = 1_000
"""Jobs held beyond the slots at most, unless `prefetch` is given."""
TURNS_AHEAD = 4
"""The same for each slot. If claims take long because many workers wait for them, a worker with few slots must not
claim so much ahead that others get nothing, only to give it back unstarted."""
LONGEST_LOOK = 1.0
"""Seconds at most until the next look, if a producer that did not see us wait may still commit, or if a limit did not
open when it should have."""


class Claiming:
    """Fills free slots."""

    def __init__(
        self, runtime: Runtime, execution: Execution, leases: Leases, cron_runner: CronRunner | None = None
    ) -> None:
        options = runtime.options
        self._runtime = runtime
        self._store = runtime.store
        self._slots = slots = runtime.slots
        self._execution = execution
        self._leases = leases
        self._cron_runner = cron_runner
        self._now = runtime.clock.monotonic
        self._watching = runtime.watching if runtime.watching.is_wanted else None
        self._lease = options.time("lease")
        most = min(AHEAD_AT_MOST, TURNS_AHEAD * slots.concurrency)
        self._prefetch = most if options.prefetch is None else options.prefetch
        slots.prefetches = options.prefetch is not None
        self._listener: Listener | None = None
        self._alarm = Alarm(runtime.clock, self._on_time)
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        self._mean_claim = 0.0
        self._is_nudged = False

    # What wakes it.

    async def listen(self) -> None:
        """Pass wakeups on to claiming, to the check for cancellations, and to the schedules."""
        while True:
            listener = await self._runtime.outage.ride_out(
                lambda: self._store.listen(self._runtime.identity), "listening"
            )
            self._listener = listener
            # Whatever came while nobody listened is found by asking; the claim registers the new listener.
            self._slots.look_everywhere()
            if self._cron_runner is not None:
                self._cron_runner.look_now()
            try:
                await self._hear(listener)
            finally:
                self._listener = None
                # If that fails, its registrations go with the first nudge that finds nobody.
                with contextlib.suppress(StoreUnavailable):
                    await listener.close()

    async def _hear(self, listener: Listener) -> None:
        with contextlib.suppress(StoreUnavailable):
            while True:
                if await listener.wait(None):
                    if self._cron_runner is not None and listener.schedules_changed():
                        self._cron_runner.look_now()
                    self._leases.look_soon()
                    self.nudge()

    def nudge(self) -> None:
        """The store has something for us, and does not say in which queue."""
        for queue in self._slots.queues.values():
            if queue.is_registered:
                queue.is_registered = False
                queue.owes_wakeup = True
            elif self._execution.holds_paced(queue):
                queue.owes_wakeup = True  # asked without a free slot too: its terms may have changed
            self._slots.feed(queue)
        self._is_nudged = True
        self._slots.wake.set()

    def stop(self) -> None:
        self._slots.is_closed = True
        self._stopping.set()
        self._slots.wake.set()

    def _on_time(self) -> None:
        waiting = [queue for queue in self._slots.queues.values() if queue.due_at is not None]
        for queue in waiting:
            assert queue.due_at is not None
            if queue.due_at > self._now():
                self._alarm.set(queue.due_at)
            else:
                queue.due_at = None
                self._slots.feed(queue)
        self._slots.wake.set()

    # What it does.

    async def run(self) -> None:
        """Claim until stopped; then pass on the wakeups that were meant for this worker."""
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
            self._leases.look_now()
        self._slots.is_awaited = True
        await self._slots.wake.wait()
        self._slots.wake.clear()
        self._slots.is_awaited = False

    async def _claim(self, queue: QueueSlots) -> None:
        visit = Visit(self._slots, queue)
        asked, asked_at, locked_at = 0, 0, 0.0

        def want() -> int:
            # Asked by the store once it holds the lock, on a thread of its own perhaps.
            nonlocal asked, locked_at
            asked = visit.portion()
            locked_at = self._loop.time()
            return asked

        async def once() -> Claimed:
            nonlocal asked_at
            visit.begin()
            asked_at = self._now()
            claimed = await self._store.claim(
                visit.queue.name,
                want,
                worker=self._runtime.identity,
                lease=self._lease,
                listener=self._listener,
                start_lag=self._execution.start_lag,
                ahead=self._execution.ahead,
                others=[each.name for each in visit.others],
                chose=visit.chose,
            )
            if claimed.at:
                self._runtime.time.hear(asked_at, claimed.at, self._now())
            if self._watching is not None:
                await self._watching.find_origins(claimed.claims)
            return claimed

        began = self._loop.time()
        try:
            claimed = await self._runtime.outage.ride_out(once, "claiming", unless=self._stopping)
        except StoreUnavailable:
            return  # it is stopping, and the database cannot be reached
        visit.end(claimed.vtime)
        queue = visit.queue
        self._slots.note_claimed(queue, len(claimed.claims), claimed.vtime)
        if claimed.is_limited is not None:
            queue.whole.is_limited = claimed.is_limited
        if claimed.opens_by_ends is not None:
            queue.opens_by_ends = claimed.opens_by_ends
        took = self._loop.time() - began
        self._mean_claim += (took * SECOND - self._mean_claim) * 0.2
        # As many as will have ended by the time that the next claim is back; for long jobs that is none.
        turns = self._mean_claim / max(self._execution.mean_run, SHORTEST_RUN)
        self._slots.ahead = min(self._prefetch, int(self._slots.concurrency * turns))
        if self._watching is not None:
            # Who was given what another has claimed has not waited for the lock.
            self._watching.claimed(queue.name, claimed, took, None if claimed.vtime is None else locked_at - began)
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

    def _plan_next(self, queue: QueueSlots, claimed: Claimed, asked: int) -> None:
        """Decide when to ask this queue again."""
        if claimed.claims:
            queue.looks = 0
        if len(claimed.claims) >= asked and not claimed.paces:
            # All that was asked for: there may be more, and nobody will tell us. Ask when a slot is free.
            queue.wants_more = True
            queue.is_registered = False
            return
        queue.is_registered = self._listener is not None
        queue.wants_more = queue.wants_more or claimed.more
        if not queue.wants_more:
            self._slots.note_idle(queue)
        # By the monotonic clock: one that is set back must not keep us from asking.
        now = self._now()
        due = now + jittered(microseconds(self._runtime.options.poll))
        if claimed.next_due is not None:
            due = min(due, claimed.next_due - self._runtime.time.offset)
        if claimed.look_again or due <= now:
            self._loop.call_later(min(0.001 * 2 ** min(queue.looks, 20), LONGEST_LOOK), self._slots.look_at, (queue,))
            queue.looks += 1
        else:
            queue.looks = 0
        if due > now:
            queue.due_at = due
            self._alarm.set(due)


class Visit:
    """One question to a queue; `queue` is the partition that answered."""

    __slots__ = ("_first", "_left", "_owing", "_slots", "_vtime", "_wanting", "others", "queue")

    def __init__(self, slots: Slots, first: QueueSlots) -> None:
        self._slots = slots
        self._first = self.queue = first
        self.others = slots.instead_of(first)
        tried = (first, *self.others)
        self._wanting = [each for each in tried if each.wants_more]
        self._owing = [each for each in tried if each.owes_wakeup]
        self._left: set[str] = set()
        self._vtime: float | None = None
        """The virtual time of the chosen partition before the claim."""
        # Cleared before the question: what we hear while it is asked may be about work that the answer does not hold.
        for each in tried:
            each.owes_wakeup = each.wants_more = False

    def begin(self) -> None:
        """The store is asked, perhaps not for the first time."""
        self.queue, self._left, self._vtime = self._first, set(), None

    def chose(self, choice: Choice) -> None:
        """The store holds the lock of one of the partitions."""
        self.queue = self._slots.queues[choice.queue]
        see = self.queue.whole.turns.see
        self._left = {name for name, vtime in choice.vtimes.items() if see(name, vtime)} | choice.taken
        self._vtime = choice.vtimes[choice.queue]

    def portion(self) -> int:
        """How many jobs to ask for. Partitions that others claim from take none of our slots."""
        beside = [
            each
            for each in self._first.whole.queues
            if each is not self.queue and (each.wants_more or each in self._wanting) and each.name not in self._left
        ]
        return self._slots.portion(self.queue, len(beside))

    def end(self, vtime: float | None) -> None:
        """The store has answered. Partitions that were not asked are as before, except for what we heard meanwhile."""
        if self._vtime is not None and vtime is not None:
            self.queue.whole.turns.note_step(self.queue.name, vtime - self._vtime)
        for each in self._wanting:
            each.wants_more = each.wants_more or each is not self.queue
        for each in self._owing:
            each.owes_wakeup = each.owes_wakeup or each is not self.queue


AT_INSTANT = 1
"""What timerfd_settime(2) calls TFD_TIMER_ABSTIME."""
TO_BE_OPENED, NO_FILE = -2, -1


class Pacer:
    """The jobs of one worker that wait for their start times, by the monotonic clock."""

    def __init__(self, clock: Clock, launch: Callable[[Run], None], give_back: Callable[[Run], None]) -> None:
        self._now = clock.monotonic
        self._launch = launch
        self._give_back = give_back
        self._loop = asyncio.get_running_loop()
        self._passed = Passed()
        self._waiting: dict[bytes, list[Run]] = {}
        """By the last gate that they pass, in the order of their start times."""
        self._launched: dict[bytes, Run] = {}
        """By gate: the one job that was released there and has not begun."""
        self._behind: dict[bytes, set[bytes]] = {}
        """By gate: the groups that wait for that job to begin."""
        self._due: list[tuple[Instant, int, bytes]] = []
        self._entries = 0
        self._timer = ExactAlarm(clock, self._ring)

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def starts_within(self, time: int) -> bool:
        """Whether the next of them starts within this time."""
        return bool(self._launched) or bool(self._due and self._due[0][0] <= self._now() + time)

    def runs(self) -> list[Run]:
        return [run for group in self._waiting.values() for run in group]

    def add(self, run: Run) -> None:
        group = self._waiting.setdefault(_group(run), [])
        insort(group, run, key=_at)
        if group[0] is run:
            self._look_at(_group(run))

    def began(self, run: Run, at: Instant) -> None:
        """Its handler is called. The rest is done in the next turn of the event loop: the handler comes first."""
        assert run.pace is not None
        pace, run.pace = run.pace, None
        self._loop.call_soon(self._note, pace, at)

    def _note(self, pace: Pace, at: Instant) -> None:
        self._passed.note(pace, at)
        self._let_pass(pace)

    def drop(self, run: Run) -> None:
        """It no longer waits, or was released and ended without starting."""
        assert run.pace is not None
        name = _group(run)
        if self._launched.get(name) is run:
            self._let_pass(run.pace)
            return
        if run in (group := self._waiting.get(name, [])):
            group.remove(run)
        self._look_at(name)

    def _let_pass(self, pace: Pace) -> None:
        """The job that was released at these gates has begun, or never will: the next may."""
        names = {pace.gates[-1][0]}
        for gate, _ in pace.gates:
            self._launched.pop(gate, None)
            names |= self._behind.pop(gate, set())
        for name in names:
            self._look_at(name)

    def is_spent(self, run: Run) -> bool:
        """Whether its start time is lost: the job before it started too late."""
        return run.pace is not None and self._passed.opens_at(run.pace) > run.pace.at

    def close(self) -> None:
        self._timer.close()

    def _look_at(self, name: bytes) -> None:
        """Find out when the next job of a rate may start. Jobs that are too late are given back."""
        group = self._waiting.get(name)
        while group:
            run = group[0]
            assert run.pace is not None
            if self._stands_behind(name, run.pace):
                return
            due = self._passed.opens_at(run.pace)
            if max(due, self._now()) <= run.pace.latest:
                self._entries += 1
                heappush(self._due, (due, self._entries, name))
                self._set_timer()
                return
            group.pop(0)
            self._give_back(run)
        if group is not None and not group:
            del self._waiting[name]

    def _stands_behind(self, name: bytes, pace: Pace) -> bool:
        """Whether a job that was released at one of these gates has not begun; if so, this group is next."""
        for gate, _ in pace.gates:
            if gate in self._launched:
                self._behind.setdefault(gate, set()).add(name)
                return True
        return False

    def _ring(self) -> None:
        now = self._now()
        while self._due and self._due[0][0] <= now:
            _, _, name = heappop(self._due)
            group = self._waiting.get(name)
            if not group:
                continue
            run = group[0]
            assert run.pace is not None
            if self._stands_behind(name, run.pace):
                continue
            if self._passed.opens_at(run.pace) <= now <= run.pace.latest:
                group.pop(0)
                self._launched.update(dict.fromkeys((gate for gate, _ in run.pace.gates), run))
                self._launch(run)
            else:
                self._look_at(name)
        self._set_timer()

    def _set_timer(self) -> None:
        if self._due:
            self._timer.set(self._due[0][0])


def _at(run: Run) -> Instant:
    assert run.pace is not None
    return run.pace.at


def _group(run: Run) -> bytes:
    assert run.pace is not None
    return run.pace.gates[-1][0]


class ExactAlarm(Alarm):
    """Rings in the event loop at an instant of the machine's monotonic clock.

    The timers of event loops are a millisecond late on Linux, which counts in milliseconds when it waits for sockets.
    It has timers that are read like sockets, and those are exact to some 50 µs. Elsewhere this is a plain alarm.
    """

    def __init__(self, clock: Clock, wakeup: Callable[[], None]) -> None:
        super().__init__(clock, wakeup)
        is_possible = isinstance(clock, SystemClock) and sys.platform == "linux" and sys.maxsize > 2**32
        self._file = TO_BE_OPENED if is_possible else NO_FILE

    def set(self, moment: Instant) -> None:
        if self._file == TO_BE_OPENED:
            self._file = _libc().timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
            if self._file != NO_FILE:
                asyncio.get_running_loop().add_reader(self._file, self._expired)
        if self._file == NO_FILE:
            super().set(moment)
        elif self._at is None or moment < self._at:
            self._at = moment
            # One that has passed expires at once.
            seconds, rest = divmod(max(moment, 1), SECOND)
            _libc().timerfd_settime(self._file, AT_INSTANT, (ctypes.c_long * 4)(0, 0, seconds, rest * 1_000), None)

    def _expired(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._file, 8)
        if self._at is not None:
            self._at = None
            self._ring()

    def close(self) -> None:
        super().close()
        if self._file >= 0:
            asyncio.get_running_loop().remove_reader(self._file)
            os.close(self._file)
        self._file = NO_FILE


@cache
def _libc() -> ctypes.CDLL:
    # `os.timerfd_create` came with Python 3.13.
    return ctypes.CDLL(None, use_errno=True)
