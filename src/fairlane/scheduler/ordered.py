"""Ids in an order: what an index is to a table, for a board in memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

__all__ = ["Entry", "Ordered", "OrderedByPlace"]

Entry = tuple[Any, ...]
"""What it is ordered by, and last the id."""

FEW = 16
"""One in so many is found and moved by itself. If it is more, the whole list is put in order at once."""

Place = TypeVar("Place", bound=Hashable)


class Ordered:
    """Entries in their order."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        # One list, moved in memory: for tens of thousands of entries that costs less than any tree in Python.
        self._entries: list[Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, entry: Entry) -> None:
        self._entries.insert(bisect_left(self._entries, entry), entry)

    def drop(self, entry: Entry) -> None:
        del self._entries[bisect_left(self._entries, entry)]

    def move(self, gone: list[Entry], put: list[Entry]) -> None:
        """Drop some and put others."""
        if len(gone) * FEW < len(self._entries):
            for entry in gone:
                self.drop(entry)
            for entry in put:
                self.put(entry)
            return
        left = set(gone)
        self._entries = [entry for entry in self._entries if entry not in left]
        self._entries += put
        self._entries.sort()

    def least(self) -> Entry | None:
        return self._entries[0] if self._entries else None

    def first(self, count: int) -> list[Any]:
        """The ids of the first `count`."""
        return [entry[-1] for entry in self._entries[:count]]

    def entries_since(self, bound: Entry, count: int) -> list[Entry]:
        """The first `count` at or after a bound."""
        start = bisect_left(self._entries, bound)
        return self._entries[start : start + count]

    def before(self, bound: Entry, count: int) -> list[Any]:
        """The ids of the first `count`, as far as they lie before a bound."""
        return [entry[-1] for entry in self._entries[: min(count, bisect_left(self._entries, bound))]]


class OrderedByPlace(Generic[Place]):
    """Entries in their order, for each place that they can be in."""

    __slots__ = ("_places",)

    def __init__(self) -> None:
        self._places: dict[Place, Ordered] = {}

    def put(self, place: Place, entry: Entry) -> None:
        ordered = self._places.get(place)
        if ordered is None:
            ordered = self._places[place] = Ordered()
        ordered.put(entry)

    def drop(self, place: Place, entry: Entry) -> None:
        ordered = self._places[place]
        ordered.drop(entry)
        if not len(ordered):
            del self._places[place]

    def first(self, place: Place, count: int) -> list[Any]:
        ordered = self._places.get(place)
        return [] if ordered is None else ordered.first(count)

    def count(self, place: Place) -> int:
        ordered = self._places.get(place)
        return 0 if ordered is None else len(ordered)
