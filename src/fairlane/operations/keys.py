"""Keys: all of a queue, or one of them; how full their limits are, and what happened by minute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import reduce
from typing import Any

import msgspec

from fairlane.clock import SECOND, Instant, as_datetime
from fairlane.errors import ConfigurationError
from fairlane.job import JobRecord, State
from fairlane.operations.explanations import explained, not_told_apart
from fairlane.operations.requests import in_force, partitions_among
from fairlane.operations.section import KeyValues, Section
from fairlane.operations.views import (
    Chart,
    Counted,
    GaugeView,
    KeyList,
    KeyMinute,
    KeyView,
    LaneView,
    MinuteView,
    NextJob,
    OneKey,
)
from fairlane.parameters import checked_methods
from fairlane.policy.keys import By, canonical_keys, select
from fairlane.policy.partitions import whole_of
from fairlane.policy.policy import BoundLimit, Policy
from fairlane.scheduler.estimate import Seen, drains_at, run_time_of
from fairlane.scheduler.explain import no_service
from fairlane.scheduler.snapshot import LaneTally
from fairlane.stats.gates import Gauge, gauges, origin_of_weight
from fairlane.stats.keys import HOUR, HOURS, KeyFigures, Minute, Span
from fairlane.store.operators import JobFilter, find_jobs
from fairlane.store.stats import Looking, Moment, Wanted
from fairlane.store.stats_values import FlowWeight, KeySort, WorkerSeen, service_of

MINUTE = 60 * SECOND
SHOWN = 60
"""Minutes of a chart."""
RECENT = 5
"""Minutes that say how things go of late, besides the one that has begun."""


def chart_of(minutes: Iterable[Minute], now: Instant) -> Chart:
    """The last hour of several queues together."""
    sums: dict[int, Minute] = {}
    for each in minutes:
        known = sums.get(each.number)
        sums[each.number] = each if known is None else known.and_also(each)
    shown = [sums.get(number, Minute(number)) for number in _shown(now)]
    denied: dict[str, int] = {}
    for each in shown:
        for limit, count in each.denied.items():
            denied[limit] = denied.get(limit, 0) + count
    return Chart(
        minutes=[_minute_view(each) for each in shown],
        denied=dict(sorted(denied.items(), key=lambda item: (-item[1], item[0]))),
    )


def key_minutes(minutes: Iterable[Span], now: Instant) -> list[KeyMinute]:
    """The last hour of a key."""
    known = {each.number: each for each in minutes}
    return [
        KeyMinute(
            at=as_datetime(each.number * MINUTE),
            started=each.started,
            ended=each.ended,
            failed=each.failed,
            mean_wait=_mean(each.waited, each.claimed),
            mean_run=_mean(each.ran, each.timed),
        )
        for each in (known.get(number, Span(number)) for number in _shown(now))
    ]


def _shown(now: Instant) -> range:
    """Which minutes a chart has: up to the one that has begun, as rates do."""
    return range(now // MINUTE - SHOWN + 1, now // MINUTE + 1)


def _mean(microseconds: int, count: int) -> float:
    """In seconds."""
    return microseconds / count / SECOND if count else 0.0


def _minute_view(minute: Minute) -> MinuteView:
    return MinuteView(
        at=as_datetime(minute.number * MINUTE),
        arrived=minute.arrived,
        started=minute.started,
        ended=minute.ended,
        failed=minute.failed,
        mean_wait=_mean(minute.waited, minute.claimed),
        longest_wait=minute.waited_longest / SECOND,
        mean_run=_mean(minute.ran, minute.timed),
        denied=minute.denied,
    )


def per_minute(minutes: Iterable[Minute], now: Instant) -> tuple[float, float, float]:
    """Starts, ends and failures of the last 60 seconds. Of a minute that is partly older, those count that came since,
    if they came evenly from the first to the last of that minute."""
    since = now - MINUTE
    started = ended = failed = 0.0
    for each in minutes:
        if each.claimed_in is not None:
            started += each.claimed_in.share_after(since) * each.started
        if each.ended_in is not None:
            share = each.ended_in.share_after(since)
            ended += share * each.ended
            failed += share * each.failed
    return started, ended, failed


def lately(minutes: Iterable[Minute], now: Instant, before: int = RECENT) -> Minute:
    """The minute that has begun and so many before it, as one."""
    first = now // MINUTE - before
    return reduce(Minute.and_also, (each for each in minutes if each.number >= first), Minute(first))


def gauges_of(moment: Moment, wanted: Mapping[str, Sequence[Wanted]]) -> Looking[dict[str, list[Gauge]]]:
    """By queue, a gauge for everything that was asked for, in that order."""
    boards = yield from moment.boards(wanted)
    return {queue: gauges(boards[queue], asked) for queue, asked in wanted.items()}


def gauge_view(gauge: Gauge, bound: BoundLimit) -> GaugeView:
    """A gauge in the form that people get."""
    saturation = min(1.0, max(0.0, gauge.used / gauge.bound)) if gauge.bound > 0 else 1.0
    return GaugeView(
        limit=gauge.limit,
        words=repr(gauge.in_force) if bound.limit.is_declared else limit_words(bound),
        reason=str(gauge.reason),
        used=gauge.used,
        bound=gauge.bound,
        room=gauge.room,
        saturation=saturation,
        opens_at=None if gauge.opens_at is None else as_datetime(gauge.opens_at),
        bound_from=gauge.origin,
    )


def limit_words(bound: BoundLimit) -> str:
    """A limit as one would write it in Python, or a pause in words."""
    return repr(bound.limit) if bound.limit.is_declared else bound.limit.describe("")


def drained_in(
    waiting: int,
    run_time: float,
    told: Iterable[Gauge],
    now: Instant,
    pace: float | None,
    *,
    of_some: Iterable[tuple[Gauge, int]] = (),
    beside: Mapping[Place, Sequence[int]] = {},
    running_for: int = 0,
    can_start: bool = True,
) -> float | None:
    """Seconds until all that waits has started: as limits allow it, or as fast as jobs were really started (`pace`, a
    second), whichever is slower. All of it passes the limits that `told` shows, and so many jobs each of those in
    `of_some`. At a gate that queues share, each start goes with one in every other queue as long as jobs wait there,
    which `beside` tells. What runs has run for `running_for` at least. `can_start` is False where it is paused or no
    worker serves it. `None`: nothing says so, it depends on run times that are not known, or somebody has to act
    first."""
    if not waiting or not can_start:
        return None
    known = run_time_of(round(run_time * SECOND), [running_for])
    gauges, latest = list(told), now
    for passed, jobs in [(gauges, waiting), *(([*gauges, each], jobs) for each, jobs in of_some)]:
        through = [jobs + sum(min(jobs, n) for n in beside.get((each.limit, each.key), ())) for each in passed]
        gates = [(each.in_force, each.gate, n) for each, n in zip(passed, through, strict=True)]
        started = drains_at(gates, now, known)
        if started is None and gates:
            return None
        latest = max(latest, started or now)
    return max((latest - now) / SECOND, waiting / pace if pace else 0.0)


MOST_KEYS = 500
"""Keys of one page."""
HINTED = 20
"""Keys that hints are made of."""
SHOWN_JOBS = 20
SHOWN_LANES = 50
NEWCOMERS = 500
"""Keys without figures that the first page of a list shows besides: those of scheduled jobs."""
Key = tuple[str | None, ...]
Found = tuple[str, KeyFigures]
"""A key, and the partition that it is in."""
Place = tuple[str, Key]
"""A limit by its name, and the key that it is kept by."""


class _Look(msgspec.Struct, frozen=True):
    """What views of keys are made of, besides figures and gates."""

    now: Instant
    policies: Mapping[str, Policy]
    ran: int = 0
    """Run time of all keys of the queue in the last day, in microseconds."""
    scheduled: Mapping[Key, int] = {}
    has_all_scheduled: bool = True
    seen: Mapping[str, Seen] = {}
    """By whole queue."""
    workers: Sequence[WorkerSeen] = ()


MOST_QUEUES = 8
"""Queues that are looked at together, the busiest of all."""
PLACES: dict[str, Callable[[KeyView], Any]] = {
    "waiting": lambda view: -view.waiting,
    "running": lambda view: -view.running,
    "ended": lambda view: -view.ended,
    "started": lambda view: 0.0 if view.last_started_at is None else -view.last_started_at.timestamp(),
    "name": lambda view: [value or "" for value in view.keys.values()],
}
assert set(PLACES) == {str(each) for each in KeySort}


class Ranking(msgspec.Struct, frozen=True, kw_only=True):
    """The first keys in some order."""

    now: datetime
    queues: list[str]
    """Those that were looked at."""
    left_out: int
    """How many others there are, which have less to do."""
    sort: str
    keys: list[KeyView]
    unserved: dict[str, str] = {}
    """Of these queues, those whose waiting jobs nobody starts, with why, in words."""


@checked_methods
class Keys(Section):
    """`app.operations.keys`: the keys of queues, how full their limits are, and what holds them."""

    async def show(self, queue: str, keys: KeyValues) -> OneKey:
        """One key, whether it has jobs or not: what waits, runs and comes next, its limits and what holds it."""
        store = await self._store()
        await in_force(store, whole_of(queue))
        return await store.ask(lambda moment: _key_at(moment, queue, canonical_keys(keys)))

    async def show_several(self, queue: str, keys: Sequence[KeyValues]) -> list[KeyView]:
        """Some keys of a queue at a glance, in the order given; those that are no keys of its policy are left out."""
        store = await self._store()
        await in_force(store, whole_of(queue))
        return await store.ask(lambda moment: keys_at(moment, queue, keys))

    async def rank(
        self, queue: str | None = None, by: str | Sequence[str] | None = None, *, sort: str = "waiting", limit: int = 50
    ) -> Ranking:
        """The first keys of a queue; of none in particular, those of the busiest, each by its fair key."""
        store = await self._store()
        if queue is not None:
            await in_force(store, whole_of(queue))
        return await store.ask(lambda moment: _ranked(moment, queue, by, sort, limit))

    # Last: below it, `list` in an annotation would be this method.
    async def list(
        self,
        queue: str,
        by: str | Sequence[str] | None = None,
        *,
        sort: str = "waiting",
        search: str = "",
        held_only: bool = False,
        after: str | None = None,
        limit: int = 50,
    ) -> KeyList:
        """A page of a queue's keys, by one of its scopes (the first one unless said otherwise); sorted by `waiting`,
        `running`, `ended`, `started` or `name`."""
        store = await self._store()
        await in_force(store, whole_of(queue))
        return await store.ask(
            lambda moment: page_at(
                moment, queue, by, sort=sort, search=search, held_only=held_only, after=after, limit=limit
            )
        )


def _ranked(
    moment: Moment, queue: str | None, by: str | Sequence[str] | None, sort: str, limit: int
) -> Looking[Ranking]:
    names = [queue] if queue is not None else (yield from _by_load(moment))
    keys: list[KeyView] = []
    unserved: dict[str, str] = {}
    for name in names[:MOST_QUEUES]:
        page = yield from page_at(moment, name, by if queue else None, sort=sort, limit=limit)
        keys += page.keys
        unserved |= {} if page.unserved is None else {name: page.unserved}
    if len(names) > 1:
        keys.sort(key=PLACES[sort])
    return Ranking(
        now=as_datetime(moment.now),
        queues=names[:MOST_QUEUES],
        left_out=max(0, len(names) - MOST_QUEUES),
        sort=sort,
        keys=keys[:limit],
        unserved=unserved,
    )


def _by_load(moment: Moment) -> Looking[list[str]]:
    """All whole queues, the busiest first."""
    load = Counter[str]()
    for each in (yield from moment.survey(list((yield from moment.policies())))):
        load[whole_of(each.queue)] += each.ready + each.running
    return sorted(load, key=lambda queue: (-load[queue], queue))


def page_at(
    moment: Moment,
    queue: str,
    by: str | Sequence[str] | None = None,
    *,
    sort: str = "waiting",
    search: str = "",
    held_only: bool = False,
    after: str | None = None,
    limit: int = 50,
) -> Looking[KeyList]:
    """The same, as of one moment."""
    if not 1 <= limit <= MOST_KEYS:
        raise ConfigurationError(f"limit={limit!r}: a page has from 1 to {MOST_KEYS} keys")
    policy = yield from moment.policy(whole_of(queue))
    scope, ordered = _scope(policy, by), _sort(sort)
    look = yield from _look(moment, queue, scope)
    names = list(look.policies)
    page = yield from moment.list_keys(
        names, scope, sort=ordered, search=search, held_only=held_only, after=after, limit=limit
    )
    found = _merged(page.keys)
    if after is None and not held_only:
        newcomers = yield from _newcomers(moment, look, scope, search, {figures.key for _, figures in found})
        found = sorted([*found, *newcomers], key=lambda each: _place(each[1], ordered))
    views = yield from _views(moment, look, found)
    service = service_of(look.workers, names, look.now)
    return KeyList(
        now=as_datetime(look.now),
        queue=whole_of(queue),
        by=list(scope),
        scopes=[list(each) for each in policy.scopes],
        sort=str(ordered),
        search=search,
        held_only=held_only,
        keys=views,
        after=page.after,
        unserved=None
        if service.is_served or not any(each.waiting for each in views)
        else no_service(service.stopping, is_forwarded=service.is_forwarded),
    )


def _key_at(moment: Moment, queue: str, canonical: Mapping[str, str | None]) -> Looking[OneKey]:
    """The same, as of one moment."""
    policy = yield from moment.policy(whole_of(queue))
    scope = next((by for by in policy.scopes if set(by) == set(canonical)), None)
    if scope is None:
        raise not_told_apart(policy, canonical)
    look = yield from _look(moment, queue, scope)
    ((where, figures),) = yield from _named(moment, look, scope, [tuple(canonical[name] for name in scope)])
    (view,) = yield from _views(moment, look, [(where, figures)])
    wanted = {name: value for name, value in canonical.items() if name != "task"}
    running: list[JobRecord] = []
    for name in look.policies:
        asked = JobFilter(queue=name, state=State.RUNNING, keys=wanted, task=canonical.get("task"))
        running += (yield from find_jobs(asked, limit=SHOWN_JOBS)).jobs
    known = yield from explained(moment, queue, canonical)
    return OneKey(
        now=as_datetime(look.now),
        view=view,
        hours_failed=[each.failed for each in _hours(figures, look.now)],
        minutes=key_minutes(figures.at(look.now).minutes, look.now),
        lanes=(yield from _lanes(moment, look.policies[where], canonical)),
        running=[_job(each) for each in sorted(running, key=lambda job: job.id, reverse=True)[:SHOWN_JOBS]],
        next_jobs=[_job(each) for each in (yield from moment.next_jobs(where, canonical, SHOWN_JOBS))],
        why=[hold.words for hold in known.told([()] * len(known.parts)).holds],
        overrides=[each.describe() for each in policy.overrides.all if dict(each.scope) == canonical],
    )


def _named(moment: Moment, look: _Look, scope: By, keys: Sequence[Key]) -> Looking[list[Found]]:
    """Some keys of a scope, each once, whether anything is known of it or not."""
    named = yield from moment.keys_named(list(look.policies), [(scope, key) for key in keys])
    named.sort(key=lambda each: (-each[1].waiting, -each[1].running))
    known = {found[1].key: found for found in _merged(named)}
    for key in keys:
        home = _home(look.policies, dict(zip(scope, key, strict=True)))
        known.setdefault(key, (home, KeyFigures(by=scope, key=key)))
    return list(known.values())


def keys_at(moment: Moment, queue: str, wanted: Sequence[Mapping[str, object]]) -> Looking[list[KeyView]]:
    """The same, as of one moment."""
    policy = yield from moment.policy(whole_of(queue))
    places: dict[By, list[Key]] = {}
    for keys in wanted:
        canonical = canonical_keys(keys)
        scope = next((by for by in policy.scopes if set(by) == set(canonical)), None)
        if scope is not None:
            places.setdefault(scope, []).append(tuple(canonical[name] for name in scope))
    views: dict[tuple[By, Key], KeyView] = {}
    for scope, keys_of_scope in places.items():
        look = yield from _look(moment, queue, scope)
        shown = yield from _named(moment, look, scope, keys_of_scope)
        for (_, figures), view in zip(shown, (yield from _views(moment, look, shown)), strict=True):
            views[scope, figures.key] = view
    return [views[scope, key] for scope, keys_of_scope in places.items() for key in dict.fromkeys(keys_of_scope)]


def held_keys(
    moment: Moment, policies: Mapping[str, Policy], seen: Mapping[str, Seen], workers: Sequence[WorkerSeen]
) -> Looking[list[KeyView]]:
    """The keys of which most jobs wait behind a limit or a pause, in all these queues."""
    found = yield from _of_all_partitions(moment, policies, (yield from moment.list_held(list(policies), HINTED)))
    return (yield from _views(moment, _Look(moment.now, policies, seen=seen, workers=workers), found))


def _of_all_partitions(
    moment: Moment, policies: Mapping[str, Policy], found: Sequence[Found]
) -> Looking[Sequence[Found]]:
    """The same keys, those of a partitioned queue with what waits in its other partitions, those of most jobs first."""
    parts = {whole_of(name): [each for each in policies if whole_of(each) == whole_of(name)] for name, _ in found}
    divided = {whole: names for whole, names in parts.items() if len(names) > 1}
    places = {(whole_of(name), each.by, each.key): None for name, each in found if whole_of(name) in divided}
    if not places:
        return found
    names = [name for several in divided.values() for name in several]
    named = yield from moment.keys_named(names, list(dict.fromkeys((by, key) for _, by, key in places)))
    merged = [each for each in found if whole_of(each[0]) not in divided]
    for whole, by, key in places:
        merged += _merged([e for e in named if (whole_of(e[0]), e[1].by, e[1].key) == (whole, by, key)])
    return sorted(merged, key=lambda each: -each[1].waiting)


def _look(moment: Moment, queue: str, scope: By) -> Looking[_Look]:
    policies = yield from moment.policies()
    names = partitions_among(policies, queue)
    scheduled = yield from moment.scheduled_by_lane(names)
    minutes = yield from moment.minutes(names, 0)
    now = moment.now
    every = [each for several in minutes.values() for each in several]
    return _Look(
        now,
        {name: policies[name].policy for name in names},
        sum(each.ran for each in every),
        _by_key(scope, scheduled.lanes),
        scheduled.is_all,
        {whole_of(queue): Seen(every, now)},
        (yield from moment.workers()),
    )


def _merged(found: Sequence[Found]) -> list[Found]:
    """Each key once: one that jobs of several partitions carry is told as if it were in one."""
    merged: dict[Key, Found] = {}
    for queue, figures in found:
        known = merged.get(figures.key)
        merged[figures.key] = (queue, figures) if known is None else (known[0], known[1].and_also(figures))
    return list(merged.values())


def _by_key(scope: By, lanes: Iterable[LaneTally]) -> dict[Key, int]:
    sums: dict[Key, int] = {}
    for lane in lanes:
        key = select(scope, lane.keys, lane.priority)
        sums[key] = sums.get(key, 0) + lane.arrived
    return sums


def _newcomers(moment: Moment, look: _Look, scope: By, search: str, shown: set[Key]) -> Looking[list[Found]]:
    """Keys without figures: all that is known of them are jobs that are scheduled."""
    names, wanted = list(look.policies), search.casefold()
    keys = [key for key in look.scheduled if key not in shown and _matches(key, wanted)]
    named = yield from moment.keys_named(names, [(scope, key) for key in keys[:NEWCOMERS]])
    known = {figures.key for _, figures in named}
    return [
        (_home(look.policies, dict(zip(scope, key, strict=True))), KeyFigures(by=scope, key=key))
        for key in keys[:NEWCOMERS]
        if key not in known
    ]


def _matches(key: Key, wanted: str) -> bool:
    return any(wanted in value.casefold() for value in key if value is not None) or not wanted


def _home(policies: Mapping[str, Policy], keys: Mapping[str, str | None]) -> str:
    """The partition where jobs with these keys belong; the first one, where that is not said."""
    first, place = next(iter(policies)), next(iter(policies.values())).partition
    if place is None or not set(place.by) <= keys.keys():
        return first
    home = place.names[place.home_of(keys) or 0]
    return home if home in policies else first


def _place(figures: KeyFigures, sort: KeySort) -> tuple[Any, ...]:
    """Where a key stands in a list."""
    most = {
        KeySort.WAITING: figures.waiting,
        KeySort.RUNNING: figures.running,
        KeySort.ENDED: figures.ended,
        KeySort.STARTED: figures.started_at or 0,
    }
    return -most.get(sort, 0), tuple(value or "" for value in figures.key)


def _views(moment: Moment, look: _Look, found: Sequence[Found]) -> Looking[list[KeyView]]:
    """Views of keys, of whatever scopes and queues, with the gauges of all their limits from one look."""
    asked: dict[str, list[tuple[BoundLimit, Key]]] = {}
    held: dict[str, list[tuple[BoundLimit, Key]]] = {}
    passed_by_some = yield from _passed_by_some(moment, look, found)
    for (queue, figures), some in zip(found, passed_by_some, strict=True):
        passed = _passed_by(look.policies[queue], figures.by, figures.key)
        passed += [(bound, key) for bound, key, _ in some or ()]
        asked.setdefault(queue, []).extend(passed)
        if figures.held_by:
            held.setdefault(queue, []).extend(passed)
    told = yield from gauges_of(moment, asked)
    gauges = {
        (queue, bound.name, key): gauge
        for queue, wanted in asked.items()
        for (bound, key), gauge in zip(wanted, told[queue], strict=True)
    }
    flows: dict[str, list[bytes]] = {}
    for queue, figures in found:
        if (flow := _flow(look.policies[queue], figures)) is not None:
            flows.setdefault(queue, []).append(flow)
    weights = yield from moment.weights_named(flows)
    sharing = yield from _sharing(moment, look, held)
    return [
        msgspec.structs.replace(
            _view(look, queue, figures, gauges, some, _beside(look, queue, sharing)),
            **_weight(look.policies[queue], figures, weights),
        )
        for (queue, figures), some in zip(found, passed_by_some, strict=True)
    ]


def _sharing(
    moment: Moment, look: _Look, passed: Mapping[str, Sequence[tuple[BoundLimit, Key]]]
) -> Looking[dict[Place, dict[str, int]]]:
    """For each of these gates that queues share, how many jobs that may start wait there in each other queue."""
    declared = yield from moment.policies()
    limits = {name: {bound.name for bound in each.policy.shared_limits} for name, each in declared.items()}
    others: dict[str, None] = {}
    gates: dict[tuple[By, Key], set[str]] = {}
    for queue, several in passed.items():
        shared = {bound.name for bound, _ in several if bound.is_shared}
        others |= {name: None for name in limits if shared & limits[name] and name not in _told_as_one(look, queue)}
        for bound, key in several:
            if bound.is_shared:
                gates.setdefault((bound.limit.by, key), set()).add(bound.name)
    names = [name for name in others if _can_start(look, name) and not _is_paused(declared[name].policy, (), ())]
    found: list[tuple[str, By, Key, int]] = []
    if names and ((), ()) in gates:
        found += [(each.queue, (), (), each.ready) for each in (yield from moment.survey(names))]
    if names and (places := [place for place in gates if place[0]]):
        named = yield from moment.keys_named(names, places)
        found += [(name, each.by, each.key, each.waiting) for name, each in named]
    waiting: dict[Place, dict[str, int]] = {}
    for name, by, key, jobs in found:
        if not _is_paused(declared[name].policy, by, key):
            for limit in gates[by, key] & limits[name]:
                waiting.setdefault((limit, key), {})[name] = jobs
    return waiting


def _told_as_one(look: _Look, queue: str) -> set[str]:
    """A queue's partitions that are told as one."""
    return {name for name in look.policies if whole_of(name) == whole_of(queue)}


def _is_paused(policy: Policy, by: By, key: Key) -> bool:
    return key in policy.overrides.pauses.get(by, {})


def _beside(look: _Look, queue: str, sharing: Mapping[Place, Mapping[str, int]]) -> dict[Place, list[int]]:
    """The same without what is told as one with this queue."""
    own = _told_as_one(look, queue)
    return {gate: [n for name, n in each.items() if name not in own] for gate, each in sharing.items()}


def _flow(policy: Policy, figures: KeyFigures) -> bytes | None:
    """The flow of a key, if turns are taken by its scope."""
    return policy.flow_of_key(figures.key) if policy.fair is not None and policy.fair.by == figures.by else None


def _limits_for(policy: Policy, by: By, key: Key) -> list[BoundLimit]:
    """The limits of exactly this scope that hold for this key."""
    bounds = [bound for bound in policy.keyed_limits if bound.limit.by == by]
    return [bound for bound in bounds if policy.limit_at(bound, key) is not None]


def _passed_by(policy: Policy, by: By, key: Key) -> list[tuple[BoundLimit, Key]]:
    """The limits that every job of this key passes, each with the key that it is kept by."""
    keys = dict(zip(by, key, strict=True))
    passed = [
        (bound, tuple(keys[name] for name in bound.limit.by))
        for bound in policy.bound
        if set(bound.limit.by) <= set(by)
    ]
    return [each for each in passed if policy.limit_at(*each) is not None]


def _passed_by_some(
    moment: Moment, look: _Look, found: Sequence[Found]
) -> Looking[list[list[tuple[BoundLimit, Key, int]] | None]]:
    """For each of these keys, the limits of other keys that only some of its waiting jobs pass, with how many do; of
    keys that nothing holds, none. `None`: they are not known, since its jobs are in several flows, or in many lanes."""
    wanted: dict[str, dict[Key, None]] = {}
    for queue, figures in found:
        if (flow := _flow_among(look.policies[queue], figures)) is not None:
            wanted.setdefault(queue, {})[flow] = None
    lanes = (yield from moment.lanes_in(wanted)) if wanted else {}
    return [
        _through(look.policies[queue], figures, lanes.get((queue, flow)) if flow is not None else None)
        if _is_split(look.policies[queue], figures)
        else []
        for queue, figures in found
        for flow in (_flow_among(look.policies[queue], figures),)
    ]


def _through(
    policy: Policy, figures: KeyFigures, lanes: Iterable[LaneTally] | None
) -> list[tuple[BoundLimit, Key, int]] | None:
    if lanes is None:
        return None
    passed: dict[bytes, tuple[BoundLimit, Key, int]] = {}
    for lane in lanes:
        if select(figures.by, lane.keys, lane.priority) == figures.key:
            for gate, bound in policy.gates_of(lane.priority, lane.keys):
                if not set(bound.limit.by) <= set(figures.by):
                    jobs = passed[gate][2] if gate in passed else 0
                    passed[gate] = (bound, select(bound.limit.by, lane.keys, lane.priority), jobs + lane.arrived)
    return [each for each in passed.values() if each[2] > 0]


def _is_split(policy: Policy, figures: KeyFigures) -> bool:
    """Whether something holds the key, and its jobs may pass different limits."""
    others = any(not set(bound.limit.by) <= set(figures.by) for bound in policy.bound)
    return others and figures.waiting > 0 and bool(figures.held_by)


def _flow_among(policy: Policy, figures: KeyFigures) -> Key | None:
    """The flow of all jobs of such a key, if they are in one."""
    keys = dict(zip(figures.by, figures.key, strict=True))
    place = policy.partition
    is_in_one = _is_split(policy, figures) and set(policy.fair_by) <= keys.keys()
    is_in_one = is_in_one and (place is None or (bool(place.by) and set(place.by) <= keys.keys()))
    return tuple(keys[name] for name in policy.fair_by) if is_in_one else None


def _view(
    look: _Look,
    queue: str,
    stored: KeyFigures,
    gauges: Mapping[tuple[str, str, Key], Gauge],
    some: Sequence[tuple[BoundLimit, Key, int]] | None,
    beside: Mapping[Place, Sequence[int]],
) -> KeyView:
    policy, key = look.policies[queue], stored.key
    figures = stored.at(look.now)
    claimed = sum(each.claimed for each in figures.minutes if each.started)
    waited = sum(each.waited for each in figures.minutes if each.started)
    limits = _limits_for(policy, figures.by, key)
    views = [gauge_view(gauges[queue, bound.name, key], bound) for bound in limits]
    waiting = figures.waiting
    held = [name for name in figures.held_by if policy.bound_named(name) is not None]
    passed = [gauges[queue, bound.name, its_key] for bound, its_key in _passed_by(policy, figures.by, key)]
    seen = look.seen.get(whole_of(queue))
    pace = None if seen is None else seen.pace(_served_since(figures))
    return KeyView(
        keys=dict(zip(figures.by, key, strict=True)),
        queue=queue,
        waiting=waiting,
        scheduled=Counted(look.scheduled.get(key, 0), look.has_all_scheduled),
        running=figures.running,
        held_by=held if waiting else [],
        ended=figures.ended,
        failed=figures.failed,
        run_time=figures.run_time if figures.run_time > 0 or any(each.timed for each in figures.hours) else None,
        share=figures.ran / look.ran if look.ran else None,
        weight=None,
        is_paused=_is_paused(policy, figures.by, key),
        gauges=views,
        last_arrived_at=None if figures.arrived_at is None else as_datetime(figures.arrived_at),
        last_started_at=None if figures.started_at is None else as_datetime(figures.started_at),
        hours=[each.ended for each in _hours(figures, look.now)],
        mean_wait=waited / claimed / SECOND if claimed else None,
        waits=[round(each.mean_wait, 3) if each.started else None for each in key_minutes(figures.minutes, look.now)],
        drained_in=drained_in(
            waiting,
            figures.run_time,
            passed,
            look.now,
            pace,
            of_some=[(gauges[queue, bound.name, its_key], jobs) for bound, its_key, jobs in some or ()],
            beside=beside,
            running_for=look.now - figures.started_at if figures.running and figures.started_at else 0,
            can_start=_can_start(look, queue) and not any(name.startswith("pause:") for name in held),
        )
        if held
        else None,
        drains_at_least=some is None,
    )


def _can_start(look: _Look, queue: str) -> bool:
    return service_of(look.workers, [queue], look.now).can_start


def _served_since(figures: KeyFigures) -> Instant | None:
    """Since when jobs of a key have waited all the time while jobs of it were started: nothing has arrived since, and
    some still wait. The minute of the first start is left out, since nobody may have served it in its beginning."""
    if figures.arrived_at is None:
        return None
    arrived_in = figures.arrived_at // MINUTE
    first = min((each.number for each in figures.minutes if each.started and each.number >= arrived_in), default=None)
    return figures.arrived_at if first is None else max(figures.arrived_at, first * MINUTE + 1)


def _weight(policy: Policy, figures: KeyFigures, known: Mapping[bytes, FlowWeight]) -> dict[str, Any]:
    """What a key's turns are dealt by, and where that number came from."""
    flow, key = _flow(policy, figures), figures.key
    if flow is None or policy.fair is None:
        return {}
    own = known.get(flow, FlowWeight(policy.fair.weight_of(key), is_brought=False))
    scope = tuple(sorted(zip(policy.fair.by, key, strict=True)))
    return {
        "weight": policy.weight_at(key, own.weight),
        "weight_from": origin_of_weight(policy, key, is_brought=own.is_brought),
        "boost": policy.overrides.boosts.get(scope, 1.0),
    }


def _hours(figures: KeyFigures, now: Instant) -> list[Span]:
    """The last day, the oldest hour first."""
    known = {each.number: each for each in figures.hours}
    last = now // HOUR
    return [known.get(hour, Span(hour)) for hour in range(last - HOURS + 1, last + 1)]


def _lanes(moment: Moment, policy: Policy, keys: Mapping[str, str | None]) -> Looking[list[LaneView]]:
    """The lanes of a key that is a flow of its own; of any other key, none are told."""
    if not policy.is_flow(keys):
        return []
    return [
        LaneView(
            keys=row.keys,
            priority=row.priority,
            waiting=max(0, row.ready),
            running=row.in_flight,
            held_by=gate.name if gate is not None and row.ready > 0 else None,
        )
        for row, gate in (yield from moment.lanes_of(policy, keys, SHOWN_LANES))
    ]


def _job(record: JobRecord) -> NextJob:
    return NextJob(
        id=str(record.id),
        task=record.task,
        priority=record.priority,
        keys=dict(record.keys),
        attempt=record.attempt,
        enqueued_at=as_datetime(record.enqueued_at),
    )


def _scope(policy: Policy, by: str | Sequence[str] | None) -> By:
    if by is None or not by:
        return policy.scopes[0]
    wanted = tuple(by.split(",")) if isinstance(by, str) else tuple(by)
    found = next((scope for scope in policy.scopes if set(scope) == set(wanted)), None)
    if found is None:
        raise not_told_apart(policy, wanted)
    return found


def _sort(sort: str) -> KeySort:
    try:
        return KeySort(sort)
    except ValueError:
        known = ", ".join(str(each) for each in KeySort)
        raise ConfigurationError(f"sort={sort!r}: keys can be sorted by {known}") from None
