"""A visit: one question to the store for jobs of a queue or, where somebody else is claiming from it, of another of its
partitions. Whoever is passed by has not been asked, and is asked later."""

from __future__ import annotations

from fairlane.store.protocol import Choice
from fairlane.worker.slots import QueueSlots, Slots

__all__ = ["Visit"]


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
