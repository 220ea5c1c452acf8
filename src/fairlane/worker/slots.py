"""Slots: how many jobs of which queue this worker may hold, and which queue is asked next."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence

from fairlane.clock import Instant
from fairlane.policy.partitions import parse_partition
from fairlane.worker.options import Order, QueueShare

MOST_UNSETTLED = 2_000
"""Outcomes that may wait for the store: beyond it, running more would only pile up more to lose in a crash."""

CLAIMED_AT_ONCE = 1_000
"""Whoever claims keeps others from it for as long as that takes."""


class QueueSlots:
    """One queue, or one partition of a queue, as this worker sees it."""

    __slots__ = (
        "due_at",
        "is_hungry",
        "is_idle",
        "is_registered",
        "looks",
        "name",
        "opens_by_ends",
        "owes_wakeup",
        "terms",
        "used",
        "whole",
    )

    def __init__(self, name: str, whole: ShareSlots) -> None:
        self.name = name
        self.whole = whole
        self.used = 0
        self.is_hungry = True
        """There may be work: ask as soon as there is room."""
        self.is_idle = False
        """It had nothing for us when we last asked."""
        self.opens_by_ends = True
        """The end of a job may let another start."""
        self.is_registered = False
        """The store will nudge us."""
        self.owes_wakeup = False
        """We were nudged, and must ask or pass the wake-up on, even without room."""
        self.due_at: Instant | None = None
        self.looks = 0
        self.terms: object = None
        """By what it was last claimed from."""


class ShareSlots:
    """What a worker was told to serve by one name: a queue, with all its partitions."""

    __slots__ = ("is_limited", "queues", "served", "share", "turns")

    def __init__(self, share: QueueShare, names: Sequence[str]) -> None:
        self.share = share
        self.turns = Turns(names)
        self.queues = [QueueSlots(name, self) for name in names]
        self.served = 0.0
        """Jobs claimed so far, divided by the weight: the lowest is asked next."""
        self.is_limited = True
        """A job of its that waits here holds slots and tokens which others could use. Of all its partitions alike: one
        that was not asked yet would have no room beside what another holds ahead."""

    @property
    def used(self) -> int:
        return sum([queue.used for queue in self.queues])

    @property
    def is_idle(self) -> bool:
        """None of its partitions had anything for us when we last asked. One that is being asked is not idle."""
        return all(queue.is_idle for queue in self.queues)

    @property
    def hungry(self) -> int:
        """How many of its partitions may have work."""
        return sum([queue.is_hungry for queue in self.queues])


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
        self._all = [queue for share in self._shares for queue in share.queues]
        self.queues = {queue.name: queue for queue in self._all}
        self._reserving = [each for each in self._shares if each.share.min_slots]
        self._order = order
        self._unsettled = unsettled
        self.concurrency = concurrency
        self.ahead = 0
        """Jobs that may be held beyond the slots, because they will have their turn before the next claim is back."""
        self.prefetches = False
        """It was told to hold jobs ahead, of whatever queue."""
        self.is_closed = False
        self.is_stopping = False
        """The worker was asked to stop, and is about to close them: what a claim brings is given back."""
        self.is_paused = False
        """What jobs are handed to takes none for now."""

    @property
    def wholes(self) -> list[ShareSlots]:
        """What is served with all its partitions, however many."""
        return [each for each in self._shares if parse_partition(each.share.name) is None]

    def add(self, whole: ShareSlots, name: str) -> QueueSlots:
        """Serve one more partition."""
        queue = QueueSlots(name, whole)
        whole.turns.add(name)
        whole.queues.append(queue)
        self._all.append(queue)
        self.queues[name] = queue
        return queue

    @property
    def used(self) -> int:
        return sum([queue.used for queue in self._all])

    def room(self, queue: QueueSlots) -> int:
        """How many more jobs of this queue may be held now."""
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
        """How many to ask for: all the room there is, or its share where other queues wait for the same slots, and so
        many partitions beside it."""
        room = min(self.room(queue), CLAIMED_AT_ONCE)
        own = queue.whole
        if room <= 1 or (self._order == "strict" and not beside):
            return room
        weight = own.share.weight
        rivals = sum(each.share.weight for each in self._shares if each is not own and each.hungry)
        if self._order == "strict":
            rivals = 0
        if not rivals and not beside:
            return room
        return max(1, -int(-room * weight // ((weight + rivals) * (1 + beside))))

    def next_to_ask(self) -> QueueSlots | None:
        """The hungry queue whose turn it is, or one that owes a wake-up; none: wait."""
        able = [queue for queue in self._all if queue.owes_wakeup or (queue.is_hungry and self.room(queue) > 0)]
        if len(able) <= 1:
            return able[0] if able else None
        whole = able[0].whole if self._order == "strict" else min(able, key=lambda queue: queue.whole.served).whole
        return min([queue for queue in able if queue.whole is whole], key=lambda queue: whole.turns.tag(queue.name))

    def instead_of(self, queue: QueueSlots) -> list[QueueSlots]:
        """Where to go if somebody else is claiming from a queue: other partitions that may have work, by turns.

        Whoever was woken for it waits there: nobody else may have been.
        """
        turns = queue.whole.turns
        if queue.owes_wakeup or self.room(queue) <= 0:
            return []
        able = [
            each
            for each in queue.whole.queues
            if each is not queue and each.is_hungry and turns.may_go_before(each.name, queue.name)
        ]
        return sorted(able, key=lambda each: turns.tag(each.name))

    def note_claimed(self, queue: QueueSlots, count: int, vtime: float | None = None) -> None:
        queue.used += count
        queue.whole.served += count / queue.whole.share.weight
        queue.whole.turns.note(queue.name, vtime, is_idle=False)

    def note_idle(self, queue: QueueSlots) -> None:
        """It has nothing for us now."""
        queue.is_idle = True
        queue.whole.turns.note(queue.name, None, is_idle=True)

    def feed(self, queue: QueueSlots) -> None:
        """There may be work again. A queue that was idle earns no credit by it."""
        whole = queue.whole
        was_idle = whole.is_idle
        queue.is_hungry = True
        queue.is_idle = False
        if was_idle:
            lowest = min(
                [other.served for other in self._shares if other is not whole and not other.is_idle], default=0.0
            )
            whole.served = max(whole.served, lowest)


SMOOTHING = 0.2
CLAIMS_AHEAD = 4
"""With fewer, processes wait for each other where they need not; with more, they wait no less."""


class Turns:
    """Whose turn it is, as far as this process has seen."""

    def __init__(self, queues: Iterable[str]) -> None:
        names = list(queues)
        # Processes that all began with the same partition would wait for its lock one after the other.
        random.shuffle(names)
        self._tags = dict.fromkeys(names, 0.0)
        self._seen: dict[str, float] = {}
        self._steps: dict[str, float] = {}
        """By how much a claim of ours raises a partition."""
        self._idle: set[str] = set()

    def add(self, queue: str) -> None:
        """One more partition."""
        self._tags.setdefault(queue, self._lowest(queue))

    def tag(self, queue: str) -> float:
        """The lowest is next. Who is idle stands beside the lowest of the others."""
        own = self._tags[queue]
        return max(own, self._lowest(queue)) if queue in self._idle else own

    def in_order(self) -> list[str]:
        return sorted(self._tags, key=self.tag)

    def note(self, queue: str, vtime: float | None, *, is_idle: bool) -> None:
        """What a claim has told: the partition's virtual time, and whether it has nothing more."""
        if vtime is not None:
            self.see(queue, vtime)
        if is_idle:
            self._idle.add(queue)
        else:
            self._idle.discard(queue)

    def see(self, queue: str, vtime: float) -> float:
        """A partition has come to this virtual time, whoever was served; returns by how much it has risen."""
        risen = max(0.0, vtime - self._seen.get(queue, vtime))
        self._seen[queue] = vtime
        self._tags[queue] = self.tag(queue) + risen
        return risen

    def note_step(self, queue: str, risen: float) -> None:
        """By how much a claim of ours has raised a partition."""
        before = self._steps.get(queue, 0.0)
        self._steps[queue] = before + (risen - before) * SMOOTHING

    def may_go_before(self, queue: str, other: str) -> bool:
        """Whether a partition may be served before another whose turn it is."""
        return self.tag(queue) - self.tag(other) <= CLAIMS_AHEAD * self._steps.get(queue, 0.0)

    def _lowest(self, queue: str) -> float:
        others = (tag for name, tag in self._tags.items() if name != queue and name not in self._idle)
        return min(others, default=self._tags.get(queue, 0.0))
