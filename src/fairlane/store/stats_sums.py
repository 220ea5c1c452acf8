"""Adding the stats of claims to the stored ones: one transaction over a bounded number of journal entries."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from fairlane.clock import Instant
from fairlane.policy.keys import By
from fairlane.policy.policy import Policy
from fairlane.scheduler.journal import Tail, decode_stats
from fairlane.scheduler.snapshot import LaneRow
from fairlane.stats.keys import DAY, MINUTE, KeyStats, Place, Sums, count_lanes, place_of_gate
from fairlane.store import procedures, stats_rows
from fairlane.store.procedures import TIME, Many, Procedure, Rows, Terms, query, run_by, snapshot, value
from fairlane.store.rows import decode_key, decode_keys, encode
from fairlane.store.stats import Moment
from fairlane.store.stats_rows import LONGEST_KEY
from fairlane.store.stats_values import AddedUp, key_scope

STRETCH = 250
"""Keys that are read, changed and written together: a worker's event loop does nothing else meanwhile."""
ENTRIES_EACH = 40
"""Lanes and gates of an entry, on average, in a pass that reads as many entries as it may: more ends it sooner."""
AT_ONCE = 50
"""Entries that are read together: some 2,000 entries, after which other tasks get their turn."""
LANES_AT_ONCE = 500
"""Lanes, or gates, that are read together where all are counted: some 10 ms."""
NOTHING = AddedUp(0, 0, more=False)


class Kept(msgspec.Struct, frozen=True):
    """The scopes and limits that the stats of a queue were kept by: its policy may have others by now."""

    scopes: list[By] = []
    limits: list[str] = []

    @classmethod
    def by(cls, policy: Policy) -> Kept:
        return cls(sorted(policy.scopes), sorted(bound.name for bound in policy.bound if bound.limit.by))

    @classmethod
    def decode(cls, text: str) -> Kept:
        return msgspec.json.decode(text, type=cls) if text else cls()


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
    ((id_, kept, passed_at, has_old, claims),) = yield query("look_before_adding_up", queue, moment.now, limit + 1)
    work = Work(queue, id_, Kept.decode(kept) != Kept.by(policy))
    if not (claims or has_old or work.counts_anew) or (0 <= moment.now - passed_at < rest and claims <= limit):
        return None
    return work


def _add_up(work: Work, limit: int) -> Procedure[AddedUp]:
    """Add up to `limit` journal entries, and forget what is old; unless somebody else is at it."""
    most: int = yield from value("take_turn_at_adding_up", work.id)
    if not most:
        return NOTHING
    moment = Moment((yield TIME).now)
    found = yield query("select_queue_stats", work.id)
    policy = yield from moment.policy(work.queue)
    adding = _Pass(work, policy, moment.now, min(limit, most), StatsRow(*found[0]) if found else StatsRow())
    is_kept_otherwise = adding.kept != adding.before
    if is_kept_otherwise and not work.counts_anew:
        return AddedUp(0, 0, more=True)  # the policy has changed since we looked
    more = yield from adding.fold()
    if is_kept_otherwise:
        while more:
            more = yield from adding.fold()
        yield from adding.count_anew((yield from moment.tails([work.queue]))[work.queue])
    refreshed = yield query("select_keys_to_refresh", work.id, moment.now, STRETCH)
    yield from adding.put([stats_rows.key_stats(*row).at(moment.now) for row in refreshed])
    yield query("delete_old_minutes", work.id, (moment.now - DAY) // MINUTE)
    yield query("put_queue_stats", work.id, *adding.row, moment.now)
    has_more = more or len(refreshed) >= STRETCH or adding.kept != Kept.by(policy)
    return AddedUp(adding.claims, adding.keys, has_more)


_add_up_some = run_by(Terms(writes=True, is_together=True, is_durable=False))(_add_up)
_add_up_anew = run_by(Terms(writes=True, is_together=True, is_durable=False, is_of_one_moment=True))(_add_up)


def add_up(work: Work, limit: int) -> procedures.Work[AddedUp]:
    """Add up to `limit` journal entries in one transaction, and forget what is old; unless somebody else is at it."""
    return (_add_up_anew if work.counts_anew else _add_up_some)(work, limit)


class StatsRow(NamedTuple):
    """What is stored of a queue beside its keys."""

    counted: int = 0
    """The last stats that is in the stats."""
    counted_at: Instant | None = None
    kept: str = ""
    hours: str | None = None


class _Pass:
    """Adds the journal entries of a queue to its stored stats, and counts keys anew where its policy has changed."""

    def __init__(self, work: Work, policy: Policy, now: Instant, limit: int, row: StatsRow) -> None:
        self._id = work.id
        self._queue = work.queue
        self._policy = policy
        self._now = now
        self._limit = limit
        self._counted = row.counted
        self._counted_at = row.counted_at
        self._hours = stats_rows.decode_hours(row.hours)
        self.before = Kept.decode(row.kept)
        self.kept = Kept.by(policy)
        self.claims = 0
        self.keys = 0

    @property
    def row(self) -> StatsRow:
        """What is to be stored."""
        hours = encode(self._hours) if self._hours else None
        return StatsRow(self._counted, self._counted_at, encode(self.kept), hours)

    def fold(self) -> Procedure[bool]:
        """Add some journal entries; say whether there are more."""
        sums, read, entries, more = Sums(self._policy), 0, 0, True
        while more and read < self._limit and entries < ENTRIES_EACH * self._limit:
            room = min(self._limit - read, AT_ONCE)
            found = yield query("select_stats", self._id, self._counted, room)
            more = len(found) == room
            for number, encoded in found:
                if entries >= ENTRIES_EACH * self._limit:
                    more = True
                    break
                stats = decode_stats(encoded)
                sums.add(stats)
                read += 1
                entries += len(stats.lanes) + len(stats.gates)
                self._counted, self._counted_at = number, stats.at
        if not read:
            return False
        self.claims += read
        for places in _stretches(sums.places):
            yield from self.put(sums.over((yield from self._stored(places)), self._now, places))
        minutes = yield query("select_minutes_at", self._id, [each.number for each in sums.minutes])
        after = sums.over_minutes(stats_rows.decode_minute(text) for (text,) in minutes)
        yield query("put_minutes", self._id, Rows([(each.number, encode(each)) for each in after], 2))
        yield query("delete_stats", self._id, self._counted)
        self._hours = sums.over_hours(self._hours, self._now)
        return more

    def put(self, keys: Collection[KeyStats]) -> Procedure[None]:
        """Write keys; those that are idle are forgotten."""
        self.keys += len(keys)
        if kept := [stats_rows.parameters(each) for each in keys if not each.is_idle]:
            yield Many("put_keys", self._id, kept)
        if idle := [(key_scope(each.by), stats_rows.key_text(each.key)) for each in keys if each.is_idle]:
            yield query("delete_keys", self._id, Rows(idle, 2))

    def _stored(self, places: Sequence[Place]) -> Procedure[list[KeyStats]]:
        asked = [(self._queue, key_scope(by), stats_rows.key_text(key)) for by, key in places]
        return [stats_rows.key_stats(*row) for _, *row in (yield query("select_keys", Rows(asked, 3)))]

    def count_anew(self, tail: Tail) -> Procedure[None]:
        """Count the keys of the first scope that is new, and leave the others to later passes; and find out whom limits
        hold back. Every stats that this transaction sees is in: lanes agree with what their claims did."""
        scopes = [by for by in self.kept.scopes if by not in self.before.scopes]
        new, later = scopes[:1], scopes[1:]
        self.kept = Kept([by for by in self.kept.scopes if by not in later], self.kept.limits)
        yield query("forget_scopes", self._id, [key_scope(by) for by in self._policy.scopes])
        yield query("reset_keys", self._id, [key_scope(by) for by in new])
        counted = yield from self._count_lanes(new, tail)
        held = yield from self._held_places(tail)
        for places in _stretches(counted | dict.fromkeys(held)):
            stored = {each.place: each for each in (yield from self._stored(places))}
            yield from self.put([_counted(place, stored.get(place), counted.get(place), held) for place in places])
        yield query("delete_idle_keys", self._id)

    def _count_lanes(self, scopes: Sequence[By], tail: Tail) -> Procedure[dict[Place, tuple[int, int]]]:
        """How many jobs wait and run, by key of these scopes."""
        counted = count_lanes(scopes, [lane for lane in tail.lanes.values() if lane])
        after = b""
        while scopes and (rows := (yield query("walk_lanes_in_use", self._id, after, LANES_AT_ONCE))):
            lanes = [
                LaneRow(lane, b"", priority, decode_keys(keys), ready, in_flight, 0, 0, 0, None, 0.0)
                for lane, priority, keys, ready, in_flight in rows
                if lane not in tail.lanes
            ]
            count_lanes(scopes, lanes, counted)
            after = rows[-1][0]
        return counted

    def _held_places(self, tail: Tail) -> Procedure[dict[Place, set[str]]]:
        """By key, the limits at which somebody waits."""
        held: dict[Place, set[str]] = defaultdict(set)
        gates = [(gate.limit, gate.key) for gate in tail.gates.values() if gate and gate.waiting > 0]
        after = b""
        while True:
            for limit, key in gates:
                place = place_of_gate(self._policy, limit, key)
                if place is not None and place[0] in self._policy.scopes:
                    held[place].add(limit)
            rows = yield query("walk_gates_in_use", self._id, after, LANES_AT_ONCE)
            if not rows:
                return held
            gates = [(limit, decode_key(key)) for gate, limit, key in rows if gate not in tail.gates]
            after = rows[-1][0]


def _counted(
    place: Place, stored: KeyStats | None, counted: tuple[int, int] | None, held: Mapping[Place, Collection[str]]
) -> KeyStats:
    known = stored or KeyStats(by=place[0], key=place[1])
    waiting, running = counted or (known.waiting, known.running)
    held_by = tuple(sorted(held.get(place, ()))) if waiting else ()
    return replace(known, waiting=waiting, running=running, held_by=held_by)


def _stretches(places: Collection[Place]) -> Iterator[list[Place]]:
    """Those of these keys that can be listed, some at a time."""
    listed = filter(_is_listed, places)
    while stretch := list(islice(listed, STRETCH)):
        yield stretch


def _is_listed(place: Place) -> bool:
    size = sum(len(value) for value in place[1] if value is not None)
    # A character takes six bytes at most, as JSON has it.
    return 6 * size < LONGEST_KEY or len(stats_rows.key_text(place[1]).encode()) < LONGEST_KEY
