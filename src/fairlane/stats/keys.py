"""Stats: sums of the journal. What waits and runs by key, and how the last minutes and hours went.

Nothing here takes part in a claim. Counts are sums of what claims did, so they agree with the lanes at every moment for
which all journal entries are in; a scope that a policy looks at for the first time is counted from the lanes once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add, attrgetter

import msgspec
from msgspec.structs import astuple, replace

from fairlane.clock import SECOND, Instant
from fairlane.policy.keys import By, select
from fairlane.policy.limits import smoothed
from fairlane.policy.policy import BoundLimit, Policy
from fairlane.scheduler.journal import add_release
from fairlane.scheduler.snapshot import ClaimStats, GateStats, LaneRow, LaneStats, Release, UnseenLane
from fairlane.stats.gates import Brought, Came, Ends

MINUTE = 60 * SECOND
HOUR = 3_600 * SECOND
HOURS = 24
"""What a key's history spans."""
MINUTES = 60
"""Of these, the last are also kept one by one."""
DAY = HOURS * HOUR
Key = tuple[str | None, ...]
Place = tuple[By, Key]
"""A key among those of its scope."""
NO_NUMBER: tuple[float | None, int] = (None, 0)


class Span(msgspec.Struct, array_like=True, frozen=True, gc=False, rename={"number": "minute"}):
    """What happened to jobs of a key, or of a queue, within an hour or a minute."""

    number: int
    """Which hour or minute, since 1970."""
    ended: int = 0
    """However they ended, failures included."""
    failed: int = 0
    ran: int = 0
    """Microseconds, added up, of those that were not lost."""
    claimed: int = 0
    waited: int = 0
    """Microseconds for which those that were claimed had been ready, added up."""
    unstarted: int = 0
    """Claims that were given back before they started."""
    lost: int = 0
    """Of those that ended, how many were lost: nobody knows how long they would have run."""

    @property
    def started(self) -> int:
        return max(0, self.claimed - self.unstarted)

    @property
    def timed(self) -> int:
        """Runs of which it is known how long they took."""
        return self.ended - self.lost


class KeyStats(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One key of a queue, or several that together are the scope of a limit or of turns."""

    by: By
    key: Key
    waiting: int = 0
    """Ready jobs."""
    running: int = 0
    held_by: tuple[str, ...] = ()
    """The limits (and pauses) of exactly this scope that hold jobs of this key back, by name."""
    arrived_at: Instant | None = None
    """When a job of it last became ready. Of jobs that were enqueued together, it is the first that counts."""
    started_at: Instant | None = None
    """When a job of it last started; while some run, when the last was claimed."""
    began_at: Instant | None = None
    """When the last of those started whose run has ended."""
    run_time: float = 0.0
    """Moving average, in seconds; 0 until a job has ended. Runs that were lost are not in it."""
    hours: tuple[Span, ...] = ()
    """The last day, the oldest first; hours in which nothing started or ended are left out."""
    minutes: tuple[Span, ...] = ()
    """The last hour, likewise."""

    @property
    def place(self) -> Place:
        return self.by, self.key

    @property
    def ended(self) -> int:
        """Within the last day; so are those that failed, and the time that they ran."""
        return sum(each.ended for each in self.hours)

    @property
    def failed(self) -> int:
        return sum(each.failed for each in self.hours)

    @property
    def ran(self) -> int:
        return sum(each.ran for each in self.hours)

    def at(self, now: Instant) -> KeyStats:
        """As it is now, if nothing has happened since: what is older than a day, or an hour, is forgotten."""
        hours, minutes = _since(self.hours, now // HOUR - HOURS), _since(self.minutes, now // MINUTE - MINUTES)
        if hours is self.hours and minutes is self.minutes:
            return self
        return replace(self, hours=hours, minutes=minutes)

    def and_also(self, other: KeyStats) -> KeyStats:
        """The same key in two partitions, as one."""
        return replace(
            self,
            waiting=self.waiting + other.waiting,
            running=self.running + other.running,
            held_by=tuple(sorted({*self.held_by, *other.held_by})),
            arrived_at=max(self.arrived_at or 0, other.arrived_at or 0) or None,
            started_at=max(self.started_at or 0, other.started_at or 0) or None,
            began_at=max(self.began_at or 0, other.began_at or 0) or None,
            run_time=self.run_time or other.run_time,
            hours=_together(self.hours, other.hours),
            minutes=_together(self.minutes, other.minutes),
        )

    @property
    def is_idle(self) -> bool:
        """It says no more than a key that was never seen."""
        return not (self.waiting or self.running or self.held_by or self.hours)


class Within(msgspec.Struct, frozen=True, array_like=True):
    """When the first and the last of some claims, or ends, of a minute were."""

    first: Instant
    last: Instant

    def share_after(self, at: Instant) -> float:
        """How much of them came later, if they came evenly."""
        if self.first > at:
            return 1.0
        return (self.last - at) / (self.last - self.first) if self.last > at else 0.0


class Minute(Span, array_like=False, frozen=True, kw_only=True):
    """What happened in a queue within a minute: stored by the names of its fields, its number as `minute`."""

    arrived: int = 0
    waited_longest: int = 0
    denied: dict[str, int] = {}
    """How often claims were turned away, by limit."""
    claimed_in: Within | None = None
    ended_in: Within | None = None

    def and_also(self, other: Minute) -> Minute:
        return Minute(
            *astuple(_added(self, other)),
            arrived=self.arrived + other.arrived,
            waited_longest=max(self.waited_longest, other.waited_longest),
            denied=dict(sorted((Counter(self.denied) + Counter(other.denied)).items())),
            claimed_in=_within(self.claimed_in, other.claimed_in),
            ended_in=_within(self.ended_in, other.ended_in),
        )


def _within(one: Within | None, other: Within | None) -> Within | None:
    if one is None or other is None:
        return one or other
    return Within(min(one.first, other.first), max(one.last, other.last))


class Held(msgspec.Struct, frozen=True):
    """How many keys a limit holds back, and how many jobs wait there."""

    keys: int = 0
    jobs: int = 0


@dataclass(slots=True)
class _Sum:
    """What journal entries say of one key."""

    arrived: int = 0
    arrived_at: Instant | None = None
    started_at: Instant | None = None
    began_at: Instant | None = None
    held: dict[str, bool] = field(default_factory=dict)
    minutes: dict[int, Span] = field(default_factory=dict)

    def add(self, lane: LaneStats, at: Instant, happened: Span) -> None:
        self.arrived += lane.arrived
        if lane.arrived > 0 or lane.newest:
            self.arrived_at = max(self.arrived_at or 0, min(lane.newest or at, at))
        if lane.started:
            self.started_at = at
        if lane.ended:
            self.began_at = max(self.began_at or 0, lane.latest) or None
        if lane.ended or lane.started or lane.unstarted:
            known = self.minutes.get(happened.number)
            self.minutes[happened.number] = happened if known is None else _added(known, happened)


class Sums:
    """The sum of the journal entries of one queue, in the order of its claims."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._keys: defaultdict[Place, _Sum] = defaultdict(_Sum)
        self._minutes: dict[int, Minute] = {}

    def add(self, stats: ClaimStats) -> None:
        number = stats.at // MINUTE
        total = Span(number)
        for lane in stats.lanes:
            happened = Span(
                number, lane.ended, lane.failed, lane.ran, lane.started, lane.waited, lane.unstarted, lane.lost
            )
            total = _added(total, happened)
            for by in self.policy.scopes:
                self._keys[by, select(by, lane.keys, lane.priority)].add(lane, stats.at, happened)
        denied: Counter[str] = Counter()
        for gate in stats.gates:
            denied[gate.limit] += gate.denied
        self.hold(stats.gates)
        minute = Minute(
            *astuple(total),
            arrived=sum(lane.arrived for lane in stats.lanes if lane.arrived > 0),
            waited_longest=stats.waited_longest,
            denied=dict(+denied),
            claimed_in=Within(stats.at, stats.at) if total.claimed else None,
            ended_in=Within(stats.at, stats.at) if total.ended else None,
        )
        known = self._minutes.get(number)
        self._minutes[number] = minute if known is None else known.and_also(minute)

    def hold(self, gates: Iterable[GateStats]) -> None:
        """Take in what has become of gates."""
        for gate in gates:
            place = place_of_gate(self.policy, gate.limit, gate.key)
            if place is not None:
                self._keys[place].held[gate.limit] = gate.is_held

    @property
    def places(self) -> list[Place]:
        """The keys of which more has changed than that jobs came which no claim has seen."""
        return list(self._keys)

    @property
    def minutes(self) -> list[Minute]:
        """What each minute adds up to, to be added to what is known of it."""
        return list(self._minutes.values())

    def over_hours(self, known: Iterable[Span], now: Instant) -> tuple[Span, ...]:
        """The last day of the queue, hour by hour, given what is known of it."""
        return _since(_together(known, _in_hours(self._minutes.values())), now // HOUR - HOURS)

    def over_minutes(self, known: Iterable[Minute]) -> list[Minute]:
        """Minutes as they are now, in their order, given what is known of them."""
        sums = {each.number: each for each in known}
        for number, each in self._minutes.items():
            sums[number] = sums.get(number, Minute(number)).and_also(each)
        return [sums[number] for number in sorted(sums)]

    def over(self, known: Iterable[KeyStats], now: Instant, places: Iterable[Place]) -> list[KeyStats]:
        """These keys as they are now, given what is known of them."""
        stored = {each.place: each for each in known}
        return [self._over(place, stored.get(place), now) for place in places]

    def came(self, place: Place) -> tuple[int, Instant]:
        """How many jobs of a key came that no claim has seen, and when the last of them did."""
        return 0, 0

    def _over(self, place: Place, known: KeyStats | None, now: Instant) -> KeyStats:
        change, known = self._keys.get(place) or _Sum(), known or KeyStats(by=place[0], key=place[1])
        came, newest = self.came(place)
        sums = reduce(_added, change.minutes.values(), Span(0))
        waiting = max(0, known.waiting + change.arrived + came - sums.claimed)
        running = max(0, known.running + sums.claimed - sums.ended - sums.unstarted)
        held = {*known.held_by, *change.held} - {limit for limit, is_held in change.held.items() if not is_held}
        run_time = known.run_time
        if sums.timed:
            run_time = smoothed(run_time, sums.ran / sums.timed / SECOND, sums.timed)
        started_at = change.started_at or known.started_at
        began_at = max(known.began_at or 0, change.began_at or 0) or None
        if not running and (began_at or sums.unstarted):
            started_at = began_at  # whatever else was claimed since was given back
        return replace(
            known,
            waiting=waiting,
            running=running,
            held_by=tuple(sorted(held)) if waiting else (),
            arrived_at=max(known.arrived_at or 0, change.arrived_at or 0, min(newest, now)) or None,
            started_at=started_at,
            began_at=began_at,
            run_time=run_time,
            hours=_together(known.hours, _in_hours(change.minutes.values())),
            minutes=_together(known.minutes, change.minutes.values()),
        ).at(now)


class Unseen(msgspec.Struct, frozen=True):
    """Arrivals that no claim has seen."""

    ready: int = 0
    """Jobs, less those that ceased to wait."""
    oldest: Instant | None = None
    """Since when the first of them is ready."""
    events: int = 0
    given: Sequence[tuple[Mapping[str, float], int]] = ()
    """The numbers that these jobs brought, however many brought the same; each with the latest job that did."""
    resumed: Mapping[Key, int] = {}
    """By key of the queue's sequence, the places in it that are free again: of jobs that came, and of those that are
    due."""


class Recent(Sums):
    """What the stored stats of a queue lack: claims that nobody has added up, and what no claim has seen."""

    def __init__(self, policy: Policy, now: Instant, claims: Sequence[ClaimStats], unseen: Unseen, ends: Ends) -> None:
        super().__init__(policy)
        self.now = now
        self.unseen = unseen
        self.ends = ends
        self.lanes: list[UnseenLane] | None = None if unseen.events else []
        """What is unseen, by lane; `None`: it was not loaded yet."""
        self._arrived: dict[By, dict[Key, int]] = {}
        self._newest: dict[By, dict[Key, Instant]] = {}
        self._brought: dict[str, Brought] = {}
        self.claims = len(claims)
        for stats in claims:
            self.add(stats)
        for release in ends.releases:
            if (lane := ends.lanes.get(release.lane)) is not None:
                ended = LaneStats(*lane)
                add_release(ended, release)
                self.add(ClaimStats(ended_at(release, now), 0, 0, [ended], []))

    @property
    def ended(self) -> int:
        """Claims that have ended, and that no claim has seen."""
        return sum(each.ended + each.unstarted for each in self.ends.releases)

    def arrived(self, by: By) -> Mapping[Key, int]:
        """By key, the jobs that came and that no claim has seen."""
        found = self._arrived.get(by)
        if found is None:
            assert self.lanes is not None, "unseen lanes are loaded first"
            found = self._arrived[by] = {}
            newest = self._newest[by] = {}
            for lane in self.lanes:
                key = select(by, lane.keys, lane.priority)
                found[key] = found.get(key, 0) + lane.arrived
                newest[key] = max(newest.get(key, 0), lane.newest)
        return found

    def came(self, place: Place) -> tuple[int, Instant]:
        by, key = place
        return self.arrived(by).get(key, 0), self._newest[by].get(key, 0)

    def brought(self, name: str, by: By) -> Brought:
        """By key of a scope, the number of this name that the last of the unseen jobs has brought."""
        if name not in self._brought:
            assert self.lanes is not None or not by, "unseen lanes are loaded first"
            given: Iterable[tuple[Key, Mapping[str, float], int]] = [((), *each) for each in self.unseen.given]
            if by:
                lanes = [each for each in self.lanes or () if each.given]
                given = [(select(by, each.keys, each.priority), each.given or {}, each.given_by) for each in lanes]
            found = self._brought[name] = {}
            for key, numbers, given_by in given:
                if name in numbers and given_by > found.get(key, NO_NUMBER)[1]:
                    found[key] = (numbers[name], given_by)
        return self._brought[name]

    def numbers_given(self, bound: BoundLimit) -> list[float]:
        """The different numbers that unseen jobs brought for a limit."""
        if bound.from_job is None:
            return []
        return [given[bound.name] for given, _ in self.unseen.given if bound.name in given]

    def _changes(self, bound: BoundLimit) -> bool:
        """Whether what is unseen may change gates of this limit: see `fold_arrivals`."""
        if bound.from_job is not None:
            return bool(self.numbers_given(bound))
        return bound.limit.is_woken_by_arrivals and (self.unseen.events > 0 or bool(self.unseen.resumed))

    def needs_lanes(self, bound: BoundLimit) -> bool:
        """Whether `came_to` looks at the unseen lanes."""
        is_counted = bound.from_job is not None or bound.limit.is_of_producers
        return bool(bound.limit.by) and is_counted and self._changes(bound)

    def came_to(self, bound: BoundLimit, key: Key) -> Came:
        """How what is unseen changes one gate. The unseen lanes are known, if the limit `needs_lanes`."""
        by = bound.limit.by
        if not self._changes(bound):
            return Came()
        if bound.from_job is not None:
            return Came(number=self.brought(bound.name, by).get(key))
        if bound.limit.is_of_producers:
            return Came(count=self.arrived(by).get(key, 0) if by else self.unseen.ready)
        return Came(resumed=self.unseen.resumed.get(key, 0))

    @property
    def stops(self) -> list[BoundLimit]:
        """The limits of keys that may stop keys of unseen jobs with a number of 0."""
        return [
            bound
            for bound in self.policy.keyed_limits
            if self.unseen.events > 0 and (bound.is_stop or any(map(bound.is_stop_with, self.numbers_given(bound))))
        ]

    def stopped(self) -> list[tuple[BoundLimit, Key]]:
        """Of the keys of unseen jobs, those that a number of 0 stops. Their lanes are known, if anything `stops`."""
        found: list[tuple[BoundLimit, Key]] = []
        for bound in self.stops:
            numbers = self.brought(bound.name, bound.limit.by) if bound.from_job else {}
            keys = self.arrived(bound.limit.by)
            found += [
                (bound, key) for key in keys if self.policy.is_stopped(bound, key, numbers.get(key, NO_NUMBER)[0])
            ]
        return found

    def lanes_over(self, left: Iterable[LaneRow], flow: Key) -> list[LaneRow]:
        """The lanes of a flow, by its key, as they are now, given how the last claim has left them."""
        lanes = {(lane.priority, *sorted(lane.keys.items())): lane for lane in left}
        ended: dict[bytes, int] = {}
        for release in self.ends.releases:
            ended[release.lane] = ended.get(release.lane, 0) + release.ended + release.unstarted
        for place, lane in lanes.items():
            running = max(0, lane.in_flight - ended.get(lane.id, 0))
            lanes[place] = replace(lane, in_flight=running)
        for came in self.lanes or ():
            if self.policy.flow_key(came.priority, came.keys) == flow:
                place = (came.priority, *sorted(came.keys.items()))
                lane = lanes.get(place) or LaneRow(b"", b"", came.priority, came.keys, 0, 0, 0, 0, 0, None, 0.0)
                lanes[place] = replace(lane, ready=lane.ready + came.arrived)
        return list(lanes.values())


def ended_at(release: Release, now: Instant) -> Instant:
    """About when the claims of a release ended: when they were claimed, and how long they ran; `now` if none ran."""
    return min(now, release.latest + release.ran // release.ended) if release.ended else now


def _together(known: Iterable[Span], more: Iterable[Span]) -> tuple[Span, ...]:
    """In their order. What is new is nearly always of the last one that is known, or comes after it."""
    spans = list(known)
    for each in more:
        at = len(spans)
        if spans and each.number <= spans[-1].number:
            at = bisect_left(spans, each.number, key=attrgetter("number"))
        if at < len(spans) and spans[at].number == each.number:
            spans[at] = _added(spans[at], each)
        else:
            spans.insert(at, each)
    return tuple(spans)


def _since(spans: tuple[Span, ...], oldest: int) -> tuple[Span, ...]:
    """Those after that number."""
    if not spans or spans[0].number > oldest:
        return spans
    return tuple(each for each in spans if each.number > oldest)


def _in_hours(minutes: Iterable[Span]) -> list[Span]:
    """Minutes, each as what happened in its hour."""
    return [Span(each.number * MINUTE // HOUR, *astuple(each)[1:8]) for each in minutes]


def _added(one: Span, other: Span) -> Span:
    return Span(one.number, *map(add, astuple(one)[1:8], astuple(other)[1:8]))


def count_lanes(
    scopes: Sequence[By], lanes: Iterable[LaneRow], counted: dict[Place, tuple[int, int]] | None = None
) -> dict[Place, tuple[int, int]]:
    """How many jobs wait and run, by key of these scopes, added to what is `counted` already."""
    counted = {} if counted is None else counted
    for lane in lanes:
        for by in scopes:
            place = (by, select(by, lane.keys, lane.priority))
            waiting, running = counted.get(place, (0, 0))
            counted[place] = (waiting + max(0, lane.ready), running + max(0, lane.in_flight))
    return counted


def place_of_gate(policy: Policy, limit: str, key: Sequence[str | None]) -> Place | None:
    """The key that a gate holds back; `None`: its limit is no more, or is one of the whole queue."""
    bound = policy.bound_named(limit)
    return (bound.limit.by, tuple(key)) if bound is not None and bound.limit.by else None


def held_by_limit(keys: Iterable[tuple[Sequence[str], int]]) -> dict[str, Held]:
    """By limit, how many keys it holds back, given which limits hold each key and how many jobs wait there."""
    counts: Counter[str] = Counter()
    jobs: Counter[str] = Counter()
    for limits, waiting in keys:
        for limit in limits:
            counts[limit] += 1
            jobs[limit] += waiting
    return {limit: Held(count, jobs[limit]) for limit, count in counts.items()}


def jobs_held(waiting: Mapping[Place, int]) -> int:
    """How many jobs wait behind held keys, given how many wait behind each: a bound that is never too small.

    A job is counted once however many limits hold its key, and once where a key is part of another (an account, and one
    endpoint of that account). Only a job of two held keys of which neither is part of the other is counted twice."""
    held: dict[By, dict[Key, int]] = {}
    for (by, key), count in waiting.items():
        held.setdefault(by, {})[key] = count
    jobs = 0
    wider: list[By] = []
    for by in sorted(held, key=lambda by: (len(by), by)):
        around = [other for other in wider if set(other) <= set(by)]
        for key, count in held[by].items():
            values = dict(zip(by, key, strict=True)) if around else {}
            if not any(tuple(values[name] for name in other) in held[other] for other in around):
                jobs += count
        wider.append(by)
    return jobs
