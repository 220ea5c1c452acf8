"""Turns between the partitions of a queue: the one with the lowest virtual time is asked first.

Each partition has a virtual time of its own, which rises by the service that its flows have had, divided by their
weights. One with few tenants rises faster for the same work, so that the lowest one is where tenants have had the
least. What counts is by how much it has risen since this process first saw it, and while it had work: a partition that
is new, or was idle, is owed nothing for the time before.

Where somebody else is claiming from the one whose turn it is, another may be served before it, unless that one is four
claims ahead already: so what partitions get does not drift apart, however long they are sought after.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

__all__ = ["Turns"]

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
