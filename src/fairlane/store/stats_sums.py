"""Adding up what claims have told into the stored stats: one transaction over a bounded number of tallies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

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
from fairlane.store import procedures, stats_rows
from fairlane.store.procedures import (
    TIME,
    Many,
    Procedure,
    Rows,
    Terms,
    query,
    run_by,
    snapshot,
    value,
)
from fairlane.store.rows import decode_key, decode_keys
from fairlane.store.stats import Moment
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


@snapshot
def work_of(queue: str, limit: int, rest: int) -> Procedure[Work | None]:
    """Whether there is anything to do that nobody was at within `rest` microseconds, or that more than `limit` wait
    for."""
    moment = Moment((yield TIME).now)
    policy = yield from moment.policy(queue)
    ((id_, kept, passed_at, has_old, claims),) = yield query("look_before_tallying", queue, moment.now, limit + 1)
    work = Work(queue, id_, Kept.decode(kept) != Kept.by(policy))
    if not (claims or has_old or work.counts_anew) or (0 <= moment.now - passed_at < rest and claims <= limit):
        return None
    return work


def _add_up(work: Work, limit: int) -> Procedure[Tallied]:
    """Add up to `limit` tallies, and forget what is old; unless somebody else is at it."""
    most: int = yield from value("take_turn_at_tallying", work.id)
    if not most:
        return NOTHING
    moment, limit = Moment((yield TIME).now), min(limit, most)
    found = yield query("select_queue_figures", work.id)
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
    refreshed = yield query("select_keys_to_refresh", work.id, moment.now, STRETCH)
    yield from _put(work.id, adding.refreshed(refreshed))
    yield query("delete_old_minutes", work.id, adding.minutes_from)
    yield query("put_queue_figures", work.id, *adding.row(), moment.now)
    return adding.did(more=more or len(refreshed) >= STRETCH)


_add_up_some = run_by(Terms(writes=True, is_together=True, is_durable=False), _add_up)
_add_up_anew = run_by(Terms(writes=True, is_together=True, is_durable=False, is_of_one_moment=True), _add_up)


def add_up(work: Work, limit: int) -> procedures.Work[Tallied]:
    """Add up to `limit` tallies in one transaction, and forget what is old; unless somebody else is at it."""
    return (_add_up_anew if work.counts_anew else _add_up_some)(work, limit)


def _fold(adding: _AddingUp, work: Work) -> Procedure[bool]:
    """Add some tallies; say whether there are more."""
    more = True
    while more and (room := adding.room):
        found = yield query("select_told", work.id, adding.tallied, room)
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
        known = yield query("select_keys", Rows(asked, 3))
        yield from _put(work.id, adding.changed(places, (row[1:] for row in known)))
    minutes = yield query("select_minutes_at", work.id, adding.minutes)
    yield query("put_minutes", work.id, Rows(adding.changed_minutes(text for (text,) in minutes), 2))
    yield query("delete_told", work.id, adding.tallied)
    adding.written()
    return more


def _put(queue: int, changed: _Changed) -> Procedure[None]:
    if changed.put:
        yield Many("put_keys", queue, changed.put)
    if changed.gone:
        yield query("delete_keys", queue, Rows(changed.gone, 2))


def _count_anew(adding: _AddingUp, moment: Moment, work: Work) -> Procedure[None]:
    """Every tally that this transaction sees is in: what lanes say, and what their claims have told, agree."""
    yield query("forget_scopes", work.id, adding.scopes)
    if adding.new_scopes:
        yield from _count(adding, (yield from moment.tails([work.queue]))[work.queue], work.id)
    adding.count_held_anew()
    scope = key = ""
    while held := (yield query("select_held_keys", work.id, scope, key, STRETCH)):
        yield from _put(work.id, adding.still_held(held))
        scope, key, *_ = held[-1]


def _count(adding: _AddingUp, tail: Tail, queue: int) -> Procedure[None]:
    counting = _Counting(adding.policy, adding.kept.new_scopes(adding.before))
    counting.add(lane for lane in tail.lanes.values() if lane)
    counting.add_gates((gate.limit, gate.key) for gate in tail.gates.values() if gate and gate.waiting > 0)
    after = b""
    while lanes := (yield query("walk_lanes_in_use", queue, after, LANES_AT_ONCE)):
        counting.add(
            LaneRow(lane, b"", priority, decode_keys(keys), ready, in_flight, 0, 0, 0, None, 0.0)
            for lane, priority, keys, ready, in_flight in lanes
            if lane not in tail.lanes
        )
        after = lanes[-1][0]
    after = b""
    while gates := (yield query("walk_gates_in_use", queue, after, LANES_AT_ONCE)):
        counting.add_gates((limit, decode_key(key)) for gate, limit, key in gates if gate not in tail.gates)
        after = gates[-1][0]
    for scope in adding.new_scopes:
        key = ""
        while known := (yield query("walk_keys", queue, scope, key, STRETCH)):
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
        return [each.minute for each in self._sums.minutes]

    def changed_minutes(self, found: Iterable[str]) -> list[tuple[int, str]]:
        """What becomes of them, given what is stored: each with its figures."""
        known = {each.minute: each for each in map(stats_rows.decode_minute, found)}
        after = [known.get(each.minute, Minute(minute=each.minute)).and_also(each) for each in self._sums.minutes]
        return [(each.minute, stats_rows.encode(each)) for each in after]

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
