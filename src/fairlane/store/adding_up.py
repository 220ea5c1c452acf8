"""One pass of adding tallies up, as far as it is the same on every store: a store loads what it is asked for, and
writes what it is given back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

import msgspec

from fairlane.clock import Instant
from fairlane.policy.by import By
from fairlane.policy.policy import Policy
from fairlane.scheduler.figures import (
    DAY,
    MINUTE,
    KeyFigures,
    Minute,
    Place,
    Sums,
    changes_of_held,
    count_lanes,
    place_of_gate,
)
from fairlane.scheduler.snapshot import LaneRow
from fairlane.scheduler.tally import decode_tally
from fairlane.store import key_rows
from fairlane.store.figures import Tallied, key_scope
from fairlane.store.key_rows import LONGEST_KEY, Kept

__all__ = [
    "STRETCH",
    "AddingUp",
    "Changed",
    "Counting",
    "FiguresRow",
    "Oldest",
    "Pace",
    "in_stretches",
]

T = TypeVar("T")
Row = Sequence[Any]

STRETCH = 500
"""Keys that are read, changed and written together: some 10 ms, in which a worker's event loop does nothing else."""
ENTRIES_EACH = 40
"""What tallies say of lanes and gates, on average, in a pass that reads as many as it may: more ends it sooner."""
AT_ONCE = 500
"""Tallies that are read together. Some are ten kilobytes."""
A_BREATH = 2_000
"""Entries after which whoever waits for a turn gets it."""
OLDEST_LANES = 1_000
OLDEST_AT_ONCE = 100
"""Lanes whose heads are looked up together, to find the job that has waited for the longest."""


def in_stretches(items: Sequence[T], count: int = STRETCH) -> Iterator[Sequence[T]]:
    return (items[first : first + count] for first in range(0, len(items), count))


class FiguresRow(msgspec.Struct, frozen=True):
    """What is stored of a queue beside its keys."""

    tallied: int = 0
    """The last tally that is in the figures."""
    tallied_at: Instant | None = None
    kept: str = ""
    held: str = "{}"
    oldest_ready_at: Instant | None = None


class Changed(msgspec.Struct, frozen=True):
    """Keys to be written, as rows; and those to be forgotten, their scopes and names in step."""

    put: list[Row]
    gone: tuple[list[str], list[str]]


class AddingUp:
    """Tallies of a queue on their way into its figures."""

    def __init__(self, policy: Policy, now: Instant, row: FiguresRow, limit: int) -> None:
        self._policy = policy
        self._limit = limit
        self._sums = Sums(policy)
        self._entries = self._breath = self._read = 0
        self._held = key_rows.decode_held(row.held)
        self.now = now
        self.tallied = row.tallied
        self.tallied_at = row.tallied_at
        self.tallies = 0
        self.keys = 0
        self.before = Kept.decode(row.kept)
        self.kept = Kept.by(policy)
        self.oldest_ready_at = row.oldest_ready_at

    @property
    def room(self) -> int:
        """How many tallies it may read next: none, once it has read as much as fits into one pass."""
        return 0 if self._entries >= ENTRIES_EACH * self._limit else min(self._limit - self._read, AT_ONCE)

    @property
    def is_out_of_breath(self) -> bool:
        """It has read so much at a time that others should get their turn."""
        if self._entries - self._breath < A_BREATH:
            return False
        self._breath = self._entries
        return True

    def read(self, number: int, entries: bytes) -> None:
        """Take one more tally in."""
        told = decode_tally(entries)
        self._sums.add(told)
        self._entries += len(told.lanes) + len(told.gates)
        self._read += 1
        self.tallied, self.tallied_at = number, told.at
        self.tallies += 1

    def written(self) -> None:
        """What was read so far is: go on with what comes after."""
        self._sums = Sums(self._policy)
        self._entries = self._breath = self._read = 0

    @property
    def has_read(self) -> bool:
        return self._read > 0

    @property
    def places(self) -> Iterator[Sequence[Place]]:
        """The keys that were told of, a stretch at a time: each is to be loaded, changed and written."""
        return in_stretches([place for place in self._sums.places if _is_listed(place)])

    def changed(self, places: Iterable[Place], found: Iterable[Row]) -> Changed:
        """What becomes of keys, given what is stored of them."""
        known = [key_rows.key_figures(row) for row in found]
        after = self._sums.applied_to({(each.by, each.key): each for each in known}, self.now, places)
        return self._change(known, after)

    def refreshed(self, found: Iterable[Row]) -> Changed:
        """The same for keys of which nothing was told for so long that something is to be forgotten."""
        known = [key_rows.key_figures(row) for row in found]
        return self._change(known, [each.at(self.now) for each in known])

    def _change(self, before: Iterable[KeyFigures], after: Sequence[KeyFigures]) -> Changed:
        self._held = key_rows.add_held(self._held, changes_of_held(before, after))
        self.keys += len(after)
        gone = key_rows.place_parameters((each.by, each.key) for each in after if each.is_idle)
        return Changed([key_rows.parameters(each) for each in after if not each.is_idle], gone)

    @property
    def minutes(self) -> list[int]:
        """The minutes that were told of."""
        return [each.minute for each in self._sums.minutes]

    def changed_minutes(self, found: Iterable[str]) -> list[tuple[int, str]]:
        """What becomes of them, given what is stored: each with its figures."""
        known = {each.minute: each for each in map(key_rows.decode_minute, found)}
        after = [known.get(each.minute, Minute(minute=each.minute)).and_also(each) for each in self._sums.minutes]
        return [(each.minute, key_rows.encode(each)) for each in after]

    @property
    def minutes_from(self) -> int:
        """The first minute that is kept."""
        return (self.now - DAY) // MINUTE

    @property
    def is_kept_otherwise(self) -> bool:
        """The policy has other scopes or limits than the figures were kept by: keys are to be counted anew."""
        return self.kept != self.before

    def count_one_scope(self) -> None:
        """Of the scopes that are to be counted anew, leave all but one to later passes."""
        later = self.kept.new_scopes(self.before)[1:]
        self.kept = Kept([by for by in self.kept.scopes if by not in later], self.kept.limits)

    @property
    def scopes(self) -> list[str]:
        return [key_scope(by) for by in self._policy.scopes]

    @property
    def new_scopes(self) -> list[str]:
        return [key_scope(by) for by in self.kept.new_scopes(self.before)]

    def counting(self) -> Counting:
        return Counting(self._policy, self.kept.new_scopes(self.before))

    def count_held_anew(self) -> None:
        """From here on, those are counted that are given to `still_held`."""
        self._held = {}

    def still_held(self, found: Iterable[Row]) -> Changed:
        """What becomes of keys that some limit held back: it may be no more."""
        known = [key_rows.key_figures(row) for row in found]
        after = [self.kept.still_holding(each) for each in known]
        self._held = key_rows.add_held(self._held, changes_of_held([], after))
        changed = [each for each, old in zip(after, known, strict=True) if each != old]
        gone = key_rows.place_parameters((each.by, each.key) for each in changed if each.is_idle)
        return Changed([key_rows.parameters(each) for each in changed if not each.is_idle], gone)

    def row(self) -> FiguresRow:
        """What is to be stored."""
        held = key_rows.encode(self._held)
        return FiguresRow(self.tallied, self.tallied_at, self.kept.encoded, held, self.oldest_ready_at)

    def did(self, *, more: bool) -> Tallied:
        return Tallied(self.tallies, self.keys, more or self.kept != Kept.by(self._policy))


def _is_listed(place: Place) -> bool:
    size = sum(len(value) for value in place[1] if value is not None)
    # A character takes six bytes at most, as JSON has it.
    return 6 * size < LONGEST_KEY or len(key_rows.key_text(place[1]).encode()) < LONGEST_KEY


class Counting:
    """Jobs that wait and run by key, counted from the lanes; and whom gates hold back."""

    def __init__(self, policy: Policy, scopes: Sequence[By]) -> None:
        self._policy = policy
        self._scopes = scopes
        self._counted: dict[Place, tuple[int, int]] = {}
        self._held: dict[Place, tuple[str, ...]] = {}

    def add(self, lanes: Iterable[LaneRow]) -> None:
        counted = self._counted
        for place, (waiting, running) in count_lanes(self._scopes, lanes).items():
            known = counted.get(place, (0, 0))
            counted[place] = (known[0] + waiting, known[1] + running)

    def add_gates(self, gates: Iterable[tuple[str, Sequence[str | None]]]) -> None:
        """Gates that somebody waits on, each as the name of its limit and its key."""
        for limit, key in gates:
            place = place_of_gate(self._policy, limit, key)
            if place is not None and place[0] in self._scopes:
                self._held[place] = (*self._held.get(place, ()), limit)

    def corrected(self, found: Iterable[Row]) -> Changed:
        """What becomes of keys, given what is stored of them: only those are written that were not so."""
        known = [key_rows.key_figures(row) for row in found]
        after = [self._counted_anew(each) for each in known]
        changed = [each for each, old in zip(after, known, strict=True) if each != old or each.is_idle]
        gone = key_rows.place_parameters((each.by, each.key) for each in changed if each.is_idle)
        return Changed([key_rows.parameters(each) for each in changed if not each.is_idle], gone)

    def _counted_anew(self, known: KeyFigures) -> KeyFigures:
        place = (known.by, known.key)
        waiting, running = self._counted.pop(place, (0, 0))
        held_by = tuple(sorted(self._held.pop(place, ())))
        return msgspec.structs.replace(known, waiting=waiting, running=running, held_by=held_by)

    @property
    def unknown(self) -> Iterator[Changed]:
        """What is to be written of keys that nothing is stored of, a stretch at a time: those that were not found."""
        places = iter(self._counted | self._held)
        while stretch := list(islice(places, STRETCH)):
            counted = [
                self._counted_anew(KeyFigures(by=place[0], key=place[1])) for place in stretch if _is_listed(place)
            ]
            yield Changed([key_rows.parameters(each) for each in counted], ([], []))


class Oldest:
    """Looks for the job that has waited for the longest: in lanes, those first whose heads can be the oldest."""

    def __init__(self, lanes: Sequence[tuple[bytes, int, Instant]]) -> None:
        """`lanes`: the id, the floor, and since when its head is ready at the earliest; in the order of that."""
        self._lanes = lanes
        self._next = 0
        self.ready_at: Instant | None = None

    def ask(self) -> Sequence[tuple[bytes, int]]:
        """Lanes whose heads are to be looked up next; none, once no lane that is left can have an older one."""
        first = self._next
        if first >= len(self._lanes) or (self.ready_at is not None and self._lanes[first][2] >= self.ready_at):
            return ()
        self._next += OLDEST_AT_ONCE
        return [(lane, floor) for lane, floor, _ in self._lanes[first : self._next]]

    def hear(self, heads: Iterable[Instant]) -> None:
        """Since when they are ready."""
        found = min(heads, default=None)
        if found is not None and (self.ready_at is None or found < self.ready_at):
            self.ready_at = found


class Pace:
    """Keeps a walk over all lanes to a small part of the time, however many they are."""

    SHORT = 0.05
    """Seconds: what takes less may be done at every pass."""
    PART = 50

    def __init__(self) -> None:
        self._rests_until = 0.0

    def is_rested(self, now: float) -> bool:
        return now >= self._rests_until

    def took(self, since: float, now: float) -> None:
        if now - since > self.SHORT:
            self._rests_until = now + self.PART * (now - since)
