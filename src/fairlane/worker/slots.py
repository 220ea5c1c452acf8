"""Slots: how many jobs of which queue this worker may hold, and which queue is asked next."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fairlane.clock import Instant
from fairlane.worker.options import Order, QueueShare

__all__ = ["QueueSlots", "Slots"]

MOST_UNSETTLED = 2_000
"""Outcomes that may wait for the store: beyond it, running more would only pile up more to lose in a crash."""

CLAIMED_AT_ONCE = 1_000
"""Whoever claims keeps others from it for as long as that takes."""


class QueueSlots:
    """One queue as this worker sees it."""

    __slots__ = (
        "due_at",
        "is_hungry",
        "is_idle",
        "is_limited",
        "is_registered",
        "looks",
        "name",
        "owes_wakeup",
        "served",
        "share",
        "used",
    )

    def __init__(self, share: QueueShare) -> None:
        self.share = share
        self.name = share.name
        self.used = 0
        self.served = 0.0
        """Jobs claimed so far, divided by the weight: the lowest is asked next."""
        self.is_hungry = True
        """There may be work: ask as soon as there is room."""
        self.is_idle = False
        """It had nothing for us when we last asked."""
        self.is_limited = True
        """A job of its that waits here holds slots and tokens which others could use."""
        self.is_registered = False
        """The store will nudge us."""
        self.owes_wakeup = False
        """We were nudged, and must ask or pass the wake-up on, even without room."""
        self.due_at: Instant | None = None
        self.looks = 0


class Slots:
    """All slots of a worker. Counts are plain numbers, read from the store's thread while a claim holds its lock."""

    def __init__(
        self, shares: Sequence[QueueShare], concurrency: int, order: Order, unsettled: Callable[[], int]
    ) -> None:
        self.queues = {share.name: QueueSlots(share) for share in shares}
        self._all = list(self.queues.values())
        self._reserving = [queue for queue in self._all if queue.share.min_slots]
        self._order = order
        self._unsettled = unsettled
        self.concurrency = concurrency
        self.ahead = 0
        """Jobs that may be held beyond the slots, because they will have their turn before the next claim is back."""
        self.holds_limited_ahead = False
        """Also those of queues that have limits."""
        self.is_closed = False

    @property
    def used(self) -> int:
        return sum(queue.used for queue in self._all)

    def room(self, queue: QueueSlots) -> int:
        """How many more jobs of this queue may be held now."""
        if self.is_closed:
            return 0
        ahead = self.ahead if self.holds_limited_ahead or not queue.is_limited else 0
        free = min(self.concurrency + ahead - self.used, MOST_UNSETTLED - self._unsettled())
        for other in self._reserving:
            if other is not queue and other.used < other.share.min_slots:
                free -= other.share.min_slots - other.used
        most = queue.share.max_slots
        if most is not None and most - queue.used < free:
            free = most - queue.used
        return max(0, free)

    def portion(self, queue: QueueSlots) -> int:
        """How many to ask for: all the room there is, or its share where other queues wait for the same slots."""
        room = min(self.room(queue), CLAIMED_AT_ONCE)
        if self._order == "strict" or room <= 1:
            return room
        rivals = sum(other.share.weight for other in self._all if other.is_hungry and other is not queue)
        if not rivals:
            return room
        return max(1, -int(-room * queue.share.weight // (queue.share.weight + rivals)))

    def next_to_ask(self) -> QueueSlots | None:
        """The hungry queue whose turn it is, or one that owes a wake-up; none: wait."""
        able = [queue for queue in self._all if queue.owes_wakeup or (queue.is_hungry and self.room(queue) > 0)]
        if not able:
            return None
        return able[0] if self._order == "strict" else min(able, key=lambda queue: queue.served)

    def note_claimed(self, queue: QueueSlots, count: int) -> None:
        queue.used += count
        queue.served += count / queue.share.weight

    def feed(self, queue: QueueSlots) -> None:
        """There may be work again. A queue that was idle earns no credit by it."""
        queue.is_hungry = True
        if queue.is_idle:
            queue.is_idle = False
            lowest = min((other.served for other in self._all if other.is_hungry and other is not queue), default=0.0)
            queue.served = max(queue.served, lowest)
