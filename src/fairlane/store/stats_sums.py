"""Adding up what claims have told into the stored stats: one transaction over a bounded number of tallies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from fairlane.clock import Instant
from fairlane.policy.keys import By
from fairlane.policy.policy import Policy
from fairlane.scheduler.journal import Tail, decode_tally
from fairlane.scheduler.snapshot import LaneRow
from fairlane.stats.keys import (
    DAY,
    MINUTE,
    KeyFigures,
    Minute,
    Place,
    Sums,
    changes_of_held,
    count_lanes,
    place_of_gate,
    still_held,
)
from fairlane.store import stats_rows
from fairlane.store.health import Health, Standstill
from fairlane.store.procedures import Query
from fairlane.store.rows import decode_key, decode_keys
from fairlane.store.stats import Looking, Many, Moment, Rows
from fairlane.store.stats_rows import LONGEST_KEY, Kept
from fairlane.store.stats_values import Tallied, key_scope

Row = Sequence[Any]

STRETCH = 250
"""Keys that are read, changed and written together: a worker's event loop does nothing else meanwhile."""
ENTRIES_EACH = 40
"""What tallies say of lanes and gates, on average, in a pass that reads as many as it may: more ends it sooner."""
AT_ONCE = 50
"""Tallies that are read together: some 2,000 entries, after which whoever waits for a turn gets it."""
LANES_AT_ONCE = 500
"""Lanes, or gates, that are read together where all are counted: some 10 ms."""
NOTHING = Tallied(0, 0, more=False)


class Work(NamedTuple):
    """What there is to do in a queue."""

    queue: str
    id: int
    counts_anew: bool
    """Its policy has other scopes or limits than the stats were kept by: lanes and claims must be of one moment."""


def work_of(moment: Moment, queue: str, limit: int, rest: int) -> Looking[Work | None]:
    """Whether there is anything to do that nobody was at within `rest` microseconds, or that more than `limit` wait
    for."""
    policy = yield from moment.policy(queue)
    ((id_, kept, passed_at, has_old, claims),) = yield Query("look_before_tallying", (queue, moment.now, limit + 1))
    work = Work(queue, id_, Kept.decode(kept) != Kept.by(policy))
    if not (claims or has_old or work.counts_anew) or (0 <= moment.now - passed_at < rest and claims <= limit):
        return None
    return work


def add_up(moment: Moment, work: Work, limit: int) -> Looking[Tallied]:
    """Add up to `limit` tallies, and forget what is old."""
    found = yield Query("select_queue_figures", (work.id,))
    policy = yield from moment.policy(work.queue)
    adding = _AddingUp(policy, moment.now, FiguresRow(*found[0]) if found else FiguresRow(), limit)
    if adding.is_kept_otherwise and not work.counts_anew:
        return Tallied(0, 0, more=True)  # the policy has changed since we looked
    more = yield from _fold(adding, work)
    if adding.is_kept_otherwise:
        while more:
            more = yield from _fold(adding, work)
        adding.count_one_scope()
        yield from _count_anew(adding, moment, work)
    refreshed = yield Query("select_keys_to_refresh", (work.id, moment.now, STRETCH))
    yield from _put(work.id, adding.refreshed(refreshed))
    yield Query("delete_old_minutes", (work.id, adding.minutes_from))
    yield Query("put_queue_figures", (work.id, *adding.row(), moment.now))
    return adding.did(more=more or len(refreshed) >= STRETCH)


def _fold(adding: _AddingUp, work: Work) -> Looking[bool]:
    """Add some tallies; say whether there are more."""
    more = True
    while more and (room := adding.room):
        found = yield Query("select_told", (work.id, adding.tallied, room))
        more = len(found) == room
        for number, entries in found:
            if not adding.room:
                more = True
                break
            adding.read(number, entries)
    if not adding.has_read:
        return False
    for places in adding.places:
        asked = [(work.queue, key_scope(by), stats_rows.key_text(key)) for by, key in places]
        known = yield Query("select_keys", (Rows(asked, 3),))
        yield from _put(work.id, adding.changed(places, (row[1:] for row in known)))
    minutes = yield Query("select_minutes_at", (work.id, adding.minutes))
    yield Query("put_minutes", (work.id, Rows(adding.changed_minutes(text for (text,) in minutes), 2)))
    yield Query("delete_told", (work.id, adding.tallied))
    adding.written()
    return more


def _put(queue: int, changed: _Changed) -> Looking[None]:
    if changed.put:
        yield Many("put_keys", queue, changed.put)
    if changed.gone:
        yield Query("delete_keys", (queue, Rows(changed.gone, 2)))


def _count_anew(adding: _AddingUp, moment: Moment, work: Work) -> Looking[None]:
    """Every tally that this transaction sees is in: what lanes say, and what their claims have told, agree."""
    yield Query("forget_scopes", (work.id, adding.scopes))
    if adding.new_scopes:
        yield from _count(adding, (yield from moment.tails([work.queue]))[work.queue], work.id)
    adding.count_held_anew()
    scope = key = ""
    while held := (yield Query("select_held_keys", (work.id, scope, key, STRETCH))):
        yield from _put(work.id, adding.still_held(held))
        scope, key, *_ = held[-1]


def _count(adding: _AddingUp, tail: Tail, queue: int) -> Looking[None]:
    counting = _Counting(adding.policy, adding.kept.new_scopes(adding.before))
    counting.add(lane for lane in tail.lanes.values() if lane)
    counting.add_gates((gate.limit, gate.key) for gate in tail.gates.values() if gate and gate.waiting > 0)
    after = b""
    while lanes := (yield Query("walk_lanes_in_use", (queue, after, LANES_AT_ONCE))):
        counting.add(
            LaneRow(lane, b"", priority, decode_keys(keys), ready, in_flight, 0, 0, 0, None, 0.0)
            for lane, priority, keys, ready, in_flight in lanes
            if lane not in tail.lanes
        )
        after = lanes[-1][0]
    after = b""
    while gates := (yield Query("walk_gates_in_use", (queue, after, LANES_AT_ONCE))):
        counting.add_gates((limit, decode_key(key)) for gate, limit, key in gates if gate not in tail.gates)
        after = gates[-1][0]
    for scope in adding.new_scopes:
        key = ""
        while known := (yield Query("walk_keys", (queue, scope, key, STRETCH))):
            yield from _put(queue, counting.corrected(known))
            key = known[-1][1]
    for changed in counting.unknown:
        yield from _put(queue, changed)


class FiguresRow(NamedTuple):
    """What is stored of a queue beside its keys."""

    tallied: int = 0
    """The last tally that is in the figures."""
    tallied_at: Instant | None = None
    kept: str = ""
    held: str = "{}"
    hours: str | None = None


class _Changed(NamedTuple):
    """Keys to be written, as rows; and those to be forgotten, by scope and name."""

    put: list[Row]
    gone: list[tuple[str, str]]

    @classmethod
    def of(cls, keys: Sequence[KeyFigures]) -> _Changed:
        gone = [(key_scope(each.by), stats_rows.key_text(each.key)) for each in keys if each.is_idle]
        return cls([stats_rows.parameters(each) for each in keys if not each.is_idle], gone)


class _AddingUp:
    """Tallies of a queue on their way into its figures."""

    def __init__(self, policy: Policy, now: Instant, row: FiguresRow, limit: int) -> None:
        self.policy = policy
        self._limit = limit
        self._sums = Sums(policy)
        self._entries = self._read = 0
        self._held = stats_rows.decode_held(row.held)
        self.now = now
        self.tallied = row.tallied
        self.tallied_at = row.tallied_at
        self.tallies = 0
        self.keys = 0
        self.before = Kept.decode(row.kept)
        self.kept = Kept.by(policy)
        self._hours = stats_rows.decode_hours(row.hours)

    @property
    def room(self) -> int:
        """How many tallies it may read next: none, once it has read as much as fits into one pass."""
        return 0 if self._entries >= ENTRIES_EACH * self._limit else min(self._limit - self._read, AT_ONCE)

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
        self._hours = self._sums.over_hours(self._hours, self.now)
        self._sums = Sums(self.policy)
        self._entries = self._read = 0

    @property
    def has_read(self) -> bool:
        return self._read > 0

    @property
    def places(self) -> Iterator[Sequence[Place]]:
        """The keys that were told of, a stretch at a time: each is to be loaded, changed and written."""
        listed = [place for place in self._sums.places if _is_listed(place)]
        return (listed[first : first + STRETCH] for first in range(0, len(listed), STRETCH))

    def changed(self, places: Iterable[Place], found: Iterable[Row]) -> _Changed:
        """What becomes of keys, given what is stored of them."""
        known = [stats_rows.key_figures(row) for row in found]
        after = self._sums.applied_to({(each.by, each.key): each for each in known}, self.now, places)
        return self._change(known, after)

    def refreshed(self, found: Iterable[Row]) -> _Changed:
        """The same for keys of which nothing was told for so long that something is to be forgotten."""
        known = [stats_rows.key_figures(row) for row in found]
        return self._change(known, [each.at(self.now) for each in known])

    def _change(self, before: Iterable[KeyFigures], after: Sequence[KeyFigures]) -> _Changed:
        self._held = stats_rows.add_held(self._held, changes_of_held(before, after))
        self.keys += len(after)
        return _Changed.of(after)

    @property
    def minutes(self) -> list[int]:
        """The minutes that were told of."""
        return [each.number for each in self._sums.minutes]

    def changed_minutes(self, found: Iterable[str]) -> list[tuple[int, str]]:
        """What becomes of them, given what is stored: each with its figures."""
        known = {each.number: each for each in map(stats_rows.decode_minute, found)}
        after = [known.get(each.number, Minute(each.number)).and_also(each) for each in self._sums.minutes]
        return [(each.number, stats_rows.encode(each)) for each in after]

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
        return [key_scope(by) for by in self.policy.scopes]

    @property
    def new_scopes(self) -> list[str]:
        return [key_scope(by) for by in self.kept.new_scopes(self.before)]

    def count_held_anew(self) -> None:
        """From here on, those are counted that are given to `still_held`."""
        self._held = {}

    def still_held(self, found: Iterable[Row]) -> _Changed:
        """What becomes of keys that some limit held back: it may be no more."""
        known = [stats_rows.key_figures(row) for row in found]
        after = [still_held(self.policy, each) for each in known]
        self._held = stats_rows.add_held(self._held, changes_of_held([], after))
        return _Changed.of([each for each, old in zip(after, known, strict=True) if each != old])

    def row(self) -> FiguresRow:
        """What is to be stored."""
        hours = stats_rows.encode(self._hours) if self._hours else None
        return FiguresRow(self.tallied, self.tallied_at, self.kept.encoded, stats_rows.encode(self._held), hours)

    def did(self, *, more: bool) -> Tallied:
        return Tallied(self.tallies, self.keys, more or self.kept != Kept.by(self.policy))


def _is_listed(place: Place) -> bool:
    size = sum(len(value) for value in place[1] if value is not None)
    # A character takes six bytes at most, as JSON has it.
    return 6 * size < LONGEST_KEY or len(stats_rows.key_text(place[1]).encode()) < LONGEST_KEY


class _Counting:
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

    def corrected(self, found: Iterable[Row]) -> _Changed:
        """What becomes of keys, given what is stored of them: only those are written that were not so."""
        known = [stats_rows.key_figures(row) for row in found]
        after = [self._counted_anew(each) for each in known]
        return _Changed.of([each for each, old in zip(after, known, strict=True) if each != old or each.is_idle])

    def _counted_anew(self, known: KeyFigures) -> KeyFigures:
        place = (known.by, known.key)
        waiting, running = self._counted.pop(place, (0, 0))
        held_by = tuple(sorted(self._held.pop(place, ())))
        return msgspec.structs.replace(known, waiting=waiting, running=running, held_by=held_by)

    @property
    def unknown(self) -> Iterator[_Changed]:
        """What is to be written of keys that nothing is stored of, a stretch at a time: those that were not found."""
        places = iter(self._counted | self._held)
        while stretch := list(islice(places, STRETCH)):
            counted = [
                self._counted_anew(KeyFigures(by=place[0], key=place[1])) for place in stretch if _is_listed(place)
            ]
            yield _Changed([stats_rows.parameters(each) for each in counted], [])


T = TypeVar("T")

LAST_TALLIES = 5_000
"""Claims that are added up together when a worker stops."""
EVER = 1 << 62
AT_CHECKPOINT = 1_000
"""Claims that may wait for a worker to add them up, before whoever claims does it. Workers do so every few seconds."""


class StatsKeeper(Protocol):
    """A store, as far as stats are concerned. What there is to ask are the methods of `Moment`."""

    async def ask(self, question: Callable[[Moment], Looking[T]]) -> T:
        """Answer a question from one snapshot, as of one moment: whatever it asks, and however much. It may be asked
        again from the beginning, if the database breaks off."""
        ...

    async def add_up(self, work: Work, limit: int) -> Tallied:
        """Add up to `limit` claims in one transaction, unless somebody else is at it."""
        ...

    async def fold(self, queue: str) -> None:
        """Fold what has happened in a queue, and write its tables."""
        ...

    async def tally(self, queue: str, limit: int = 500, rest: int = 0) -> Tallied:
        """Add up to `limit` claims of a queue to its stats, unless somebody else is at it; forget what is old.

        Nothing is done if somebody was at it within the last `rest` microseconds, and no more than `limit` wait.
        """
        work = await self.ask(lambda moment: work_of(moment, queue, limit, rest))
        return NOTHING if work is None else await self.add_up(work, limit)

    async def conclude(self, queue: str) -> None:
        """Fold what has happened and add it up: whoever claimed last stops, and perhaps nobody comes after it."""
        await self.fold(queue)
        await self._add_all_up(queue)

    async def _add_all_up(self, queue: str) -> None:
        """Add up whatever claims have told, and count keys that the policy looks at for the first time."""
        while (await self.tally(queue, LAST_TALLIES)).more:
            pass

    async def _add_some_up(self, queue: str) -> None:
        """The tables of a queue were written. Perhaps no worker is there to add up, and nobody but those who claim."""
        if (await self.tally(queue, AT_CHECKPOINT, EVER)).more:
            await self._add_all_up(queue)

    async def health(self, *, brief: bool = False) -> Health:
        """The condition of the database itself, as far as it tells; `brief`: only what comes and goes, and is cheap to
        ask: old snapshots, connections, space."""
        ...

    async def standstills(self, queues: Sequence[str], before: Instant, limit: int = 10) -> list[Standstill]:
        """Flows of these queues where no claim looks, and gates that were to wake their lanes before a certain time: at
        most `limit` of each queue and kind."""
        ...
