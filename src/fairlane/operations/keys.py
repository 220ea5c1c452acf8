"""Keys: all of a queue, or one of them; how full their limits are, and what happened by minute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import reduce
from typing import Any, NamedTuple, TypeVar

import msgspec

from fairlane.clock import SECOND, Instant, as_datetime
from fairlane.errors import ConfigurationError
from fairlane.job import JobRecord, State
from fairlane.operations.explanations import explained, explanation_of, no_such_key
from fairlane.operations.requests import partitions_among
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
from fairlane.scheduler.snapshot import LaneStats
from fairlane.stats.gates import Gauge, gauges, origin_of_weight
from fairlane.stats.keys import HOUR, HOURS, MINUTE, MINUTES, KeyStats, Minute, Span
from fairlane.store.operators import JobFilter, find_jobs
from fairlane.store.stats import Looking, Moment, Wanted
from fairlane.store.stats_values import FlowWeight, KeySort, WorkerSeen, service_of

RECENT = 5
"""Minutes that say how things go of late, besides the one that has begun."""
S = TypeVar("S", bound=Span)
M = TypeVar("M", bound=KeyMinute)


def chart_of(minutes: Iterable[Minute], now: Instant) -> Chart:
    """The last hour of several queues together."""
    sums: dict[int, Minute] = {}
    for each in minutes:
        known = sums.get(each.number)
        sums[each.number] = each if known is None else known.and_also(each)
    shown = _filled(sums.values(), now // MINUTE, MINUTES, Minute)
    denied = Counter[str]()
    for each in shown:
        denied.update(each.denied)
    return Chart(
        minutes=[
            _minute(
                MinuteView,
                each,
                arrived=each.arrived,
                longest_wait=each.waited_longest / SECOND,
                denied=each.denied,
            )
            for each in shown
        ],
        denied=dict(sorted(denied.items(), key=lambda item: (-item[1], item[0]))),
    )


def _minute(kind: type[M], span: Span, **more: Any) -> M:
    return kind(
        at=as_datetime(span.number * MINUTE),
        started=span.started,
        ended=span.ended,
        failed=span.failed,
        mean_wait=span.waited / span.claimed / SECOND if span.claimed else 0.0,
        mean_run=span.ran / span.timed / SECOND if span.timed else 0.0,
        **more,
    )


def _filled(spans: Iterable[S], last: int, count: int, quiet: Callable[[int], S]) -> list[S]:
    """The last minutes or hours, up to the one that has begun, the oldest first; quiet ones too."""
    known = {each.number: each for each in spans}
    return [known.get(number) or quiet(number) for number in range(last - count + 1, last + 1)]


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
    passed: Sequence[tuple[Gauge, int]],
    now: Instant,
    pace: float | None,
    *,
    beside: Callable[[Gauge], Iterable[int]] = lambda _: (),
    running_for: int = 0,
) -> float | None:
    """Seconds until all that waits has started: as limits allow it, or as fast as jobs were really started (`pace`, a
    second), whichever is slower. `passed` are the limits, each with how many of the jobs pass it. At a gate that queues
    share, each start goes with one in every other queue as long as jobs wait there, which `beside` counts. What runs
    has run for `running_for` at least. `None`: nothing says so, it depends on run times that are not known, or somebody
    has to act first."""
    latest = now
    known = run_time_of(round(run_time * SECOND), [running_for])
    common = [gauge for gauge, jobs in passed if jobs >= waiting]
    for jobs, shut in [(waiting, common), *((n, [*common, gauge]) for gauge, n in passed if n < waiting)]:
        gates = [(each.in_force, each.gate, jobs + sum(min(jobs, n) for n in beside(each))) for each in shut]
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
Found = tuple[str, KeyStats]
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
ORDERS: dict[KeySort, Callable[[KeyView], float]] = {
    KeySort.WAITING: lambda view: view.waiting,
    KeySort.RUNNING: lambda view: view.running,
    KeySort.ENDED: lambda view: view.ended,
    KeySort.STARTED: lambda view: 0.0 if view.last_started_at is None else view.last_started_at.timestamp(),
    KeySort.NAME: lambda view: 0,
}
"""What keys are sorted by, the largest first; then by name."""


def _sorted(views: Iterable[KeyView], sort: KeySort) -> list[KeyView]:
    return sorted(views, key=lambda view: (-ORDERS[sort](view), [value or "" for value in view.keys.values()]))


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
    """Those of these queues whose waiting jobs are not being started, each with the reason."""


@checked_methods
class Keys(Section):
    """`app.operations.keys`: the keys of queues, how full their limits are, and what holds them."""

    async def show(self, queue: str, keys: KeyValues) -> OneKey:
        """One key, whether it has jobs or not: what waits, runs and comes next, its limits and what holds it."""
        return await (await self._store()).ask(lambda moment: _key_at(moment, queue, canonical_keys(keys)))

    async def show_several(self, queue: str, keys: Sequence[KeyValues]) -> list[KeyView]:
        """Some keys of a queue at a glance, in the order given; those that are no keys of its policy are left out."""
        return await (await self._store()).ask(lambda moment: keys_at(moment, queue, keys))

    async def rank(
        self, queue: str | None = None, by: str | Sequence[str] | None = None, *, sort: str = "waiting", limit: int = 50
    ) -> Ranking:
        """The first keys of a queue; of none in particular, those of the busiest, each by its fair key."""
        return await (await self._store()).ask(lambda moment: _ranked(moment, queue, by, sort, limit))

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
        return await (await self._store()).ask(
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
        keys = _sorted(keys, _sort(sort))
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
    newcomers: list[Found] = []
    if after is None and not held_only:
        newcomers = yield from _newcomers(moment, look, scope, search, {stats.key for _, stats in found})
    views = yield from _views(moment, look, [*found, *newcomers])
    service = service_of(look.workers, names, look.now)
    return KeyList(
        now=as_datetime(look.now),
        queue=whole_of(queue),
        by=list(scope),
        scopes=[list(each) for each in policy.scopes],
        sort=str(ordered),
        search=search,
        held_only=held_only,
        keys=_sorted(views, ordered) if newcomers else views,
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
        raise no_such_key(policy, canonical)
    look = yield from _look(moment, queue, scope)
    ((where, stats),) = yield from _named(moment, look, scope, [tuple(canonical[name] for name in scope)])
    (view,) = yield from _views(moment, look, [(where, stats)])
    wanted = {name: value for name, value in canonical.items() if name != "task"}
    running: list[JobRecord] = []
    for name in look.policies:
        asked = JobFilter(queue=name, state=State.RUNNING, keys=wanted, task=canonical.get("task"))
        running += (yield from find_jobs(asked, limit=SHOWN_JOBS)).jobs
    known = yield from explained(moment, queue, canonical)
    return OneKey(
        now=as_datetime(look.now),
        view=view,
        hours_failed=[each.failed for each in _filled(stats.hours, look.now // HOUR, HOURS, Span)],
        minutes=[_minute(KeyMinute, each) for each in _filled(stats.minutes, look.now // MINUTE, MINUTES, Span)],
        lanes=(yield from _lanes(moment, look.policies[where], canonical)),
        running=[_job(each) for each in sorted(running, key=lambda job: job.id, reverse=True)[:SHOWN_JOBS]],
        next_jobs=[_job(each) for each in (yield from moment.next_jobs(where, canonical, SHOWN_JOBS))],
        why=[hold.words for hold in explanation_of(queue, known, [()] * len(known)).holds],
        overrides=[each.describe() for each in policy.overrides.all if dict(each.scope) == canonical],
    )


def _named(moment: Moment, look: _Look, scope: By, keys: Sequence[Key]) -> Looking[list[Found]]:
    """Some keys of a scope, each once, whether anything is known of it or not."""
    named = yield from moment.keys_named(list(look.policies), [(scope, key) for key in keys])
    named.sort(key=lambda each: (-each[1].waiting, -each[1].running))
    known = {found[1].key: found for found in _merged(named)}
    for key in keys:
        home = _home(look.policies, dict(zip(scope, key, strict=True)))
        known.setdefault(key, (home, KeyStats(by=scope, key=key)))
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
        for (_, stats), view in zip(shown, (yield from _views(moment, look, shown)), strict=True):
            views[scope, stats.key] = view
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
    by_key = Counter[Key]()
    for lane in scheduled.lanes:
        by_key[select(scope, lane.keys, lane.priority)] += lane.arrived
    return _Look(
        now,
        {name: policies[name].policy for name in names},
        sum(each.ran for each in every),
        by_key,
        scheduled.is_all,
        {whole_of(queue): Seen(every, now)},
        (yield from moment.workers()),
    )


def _merged(found: Sequence[Found]) -> list[Found]:
    """Each key once: one that jobs of several partitions carry is shown as if it were in one."""
    merged: dict[Key, Found] = {}
    for queue, stats in found:
        known = merged.get(stats.key)
        merged[stats.key] = (queue, stats) if known is None else (known[0], known[1].and_also(stats))
    return list(merged.values())


def _newcomers(moment: Moment, look: _Look, scope: By, search: str, shown: set[Key]) -> Looking[list[Found]]:
    """Keys without figures: all that is known of them are jobs that are scheduled."""
    names, wanted = list(look.policies), search.casefold()
    keys = [
        key
        for key in look.scheduled
        if key not in shown and (not wanted or any(wanted in value.casefold() for value in key if value is not None))
    ]
    named = yield from moment.keys_named(names, [(scope, key) for key in keys[:NEWCOMERS]])
    known = {stats.key for _, stats in named}
    return [
        (_home(look.policies, dict(zip(scope, key, strict=True))), KeyStats(by=scope, key=key))
        for key in keys[:NEWCOMERS]
        if key not in known
    ]


def _home(policies: Mapping[str, Policy], keys: Mapping[str, str | None]) -> str:
    """The partition where jobs with these keys belong; the first one, where that is not said."""
    first, place = next(iter(policies)), next(iter(policies.values())).partition
    if place is None or not set(place.by) <= keys.keys():
        return first
    home = place.names[place.home_of(keys) or 0]
    return home if home in policies else first


class _Passed(NamedTuple):
    """A limit that jobs of a key pass, with the key that it is kept by."""

    bound: BoundLimit
    key: Key
    jobs: int
    """How many of those that wait."""


def _views(moment: Moment, look: _Look, found: Sequence[Found]) -> Looking[list[KeyView]]:
    """Views of keys, of whatever scopes and queues, with the gauges of all their limits from one look."""
    passed = yield from _limits_passed(moment, look, found)
    asked: dict[str, list[Wanted]] = {}
    flows: dict[str, list[bytes]] = {}
    shared: list[_Passed] = []
    for (queue, stats), (limits, _) in zip(found, passed, strict=True):
        asked.setdefault(queue, []).extend((each.bound, each.key) for each in limits)
        if stats.held_by:
            shared += [each for each in limits if each.bound.is_shared]
        if (flow := _flow(look.policies[queue], stats)) is not None:
            flows.setdefault(queue, []).append(flow)
    gauges = {name: iter(each) for name, each in (yield from gauges_of(moment, asked)).items()}
    weights = yield from moment.weights_named(flows)
    sharing = yield from _sharing(moment, look, shared)
    views = []
    for (queue, stats), (limits, is_all) in zip(found, passed, strict=True):
        of_key = [(each, next(gauges[queue])) for each in limits]
        view = _view(look, queue, stats, of_key, sharing, weights)
        views.append(msgspec.structs.replace(view, drains_at_least=not is_all))
    return views


def _limits_passed(moment: Moment, look: _Look, found: Sequence[Found]) -> Looking[list[tuple[list[_Passed], bool]]]:
    """The limits that jobs of each key pass, and whether that is all of them: limits by other keys, which only some of
    the jobs pass, are counted for keys that something holds, if all their jobs are in one flow of few lanes."""
    flows: dict[str, dict[Key, None]] = {}
    for queue, stats in found:
        if (flow := _only_flow(look.policies[queue], stats)) is not None:
            flows.setdefault(queue, {})[flow] = None
    lanes = (yield from moment.lanes_in(flows)) if flows else {}
    passed = []
    for queue, stats in found:
        policy, keys = look.policies[queue], dict(zip(stats.by, stats.key, strict=True))
        limits = [
            _Passed(bound, key, stats.waiting)
            for bound in policy.bound
            if set(bound.limit.by) <= keys.keys()
            and policy.limit_at(bound, key := tuple(keys[name] for name in bound.limit.by)) is not None
        ]
        is_all = True
        if _is_split(policy, stats):
            flow = _only_flow(policy, stats)
            of_flow = None if flow is None else lanes.get((queue, flow))
            limits, is_all = [*limits, *_passed_by_some(policy, stats, of_flow or ())], of_flow is not None
        passed.append((limits, is_all))
    return passed


def _passed_by_some(policy: Policy, stats: KeyStats, lanes: Iterable[LaneStats]) -> list[_Passed]:
    """The limits by other keys that waiting jobs of a key pass."""
    passed: dict[bytes, _Passed] = {}
    for lane in lanes:
        if select(stats.by, lane.keys, lane.priority) == stats.key:
            for gate, bound in policy.gates_of(lane.priority, lane.keys):
                if not set(bound.limit.by) <= set(stats.by):
                    jobs = passed[gate].jobs if gate in passed else 0
                    passed[gate] = _Passed(bound, select(bound.limit.by, lane.keys, lane.priority), jobs + lane.arrived)
    return [each for each in passed.values() if each.jobs > 0]


def _is_split(policy: Policy, stats: KeyStats) -> bool:
    """Whether something holds the key, and its jobs may pass different limits."""
    others = any(not set(bound.limit.by) <= set(stats.by) for bound in policy.bound)
    return others and stats.waiting > 0 and bool(stats.held_by)


def _only_flow(policy: Policy, stats: KeyStats) -> Key | None:
    """The flow of all jobs of such a key, if they are in one."""
    keys, place = dict(zip(stats.by, stats.key, strict=True)), policy.partition
    is_in_one_partition = place is None or (bool(place.by) and set(place.by) <= keys.keys())
    if not _is_split(policy, stats) or not is_in_one_partition or not set(policy.fair_by) <= keys.keys():
        return None
    return tuple(keys[name] for name in policy.fair_by)


def _sharing(moment: Moment, look: _Look, passed: Sequence[_Passed]) -> Looking[dict[Place, dict[str, int]]]:
    """For each of these gates that queues share, how many jobs that may start wait there in each queue."""
    gates: dict[tuple[By, Key], set[str]] = {}
    for bound, key, _ in passed:
        gates.setdefault((bound.limit.by, key), set()).add(bound.name)
    if not gates:
        return {}
    declared = yield from moment.policies()
    limits = {name: {bound.name for bound in each.policy.shared_limits} for name, each in declared.items()}
    every = set[str]().union(*gates.values())
    names = [name for name in limits if limits[name] & every and _can_start(look, name)]
    found: list[tuple[str, By, Key, int]] = []
    if ((), ()) in gates:
        found += [(each.queue, (), (), each.ready) for each in (yield from moment.survey(names))]
    if places := [place for place in gates if place[0]]:
        named = yield from moment.keys_named(names, places)
        found += [(name, each.by, each.key, each.waiting) for name, each in named]
    waiting: dict[Place, dict[str, int]] = {}
    for name, by, key, jobs in found:
        policy = declared[name].policy
        if not _is_paused(policy, (), ()) and not _is_paused(policy, by, key):
            for limit in gates[by, key] & limits[name]:
                waiting.setdefault((limit, key), {})[name] = jobs
    return waiting


def _is_paused(policy: Policy, by: By, key: Key) -> bool:
    return key in policy.overrides.pauses.get(by, {})


def _flow(policy: Policy, stats: KeyStats) -> bytes | None:
    """The flow of a key, if turns are taken by its scope."""
    return policy.flow_of_key(stats.key) if policy.fair is not None and policy.fair.by == stats.by else None


def _view(
    look: _Look,
    queue: str,
    stored: KeyStats,
    passed: Sequence[tuple[_Passed, Gauge]],
    sharing: Mapping[Place, Mapping[str, int]],
    weights: Mapping[bytes, FlowWeight],
) -> KeyView:
    policy, key, now = look.policies[queue], stored.key, look.now
    stats = stored.at(now)
    started = [each for each in stats.minutes if each.started]
    claimed = sum(each.claimed for each in started)
    held = [name for name in stats.held_by if policy.bound_named(name) is not None]
    seen = look.seen.get(whole_of(queue))
    together = {name for name in look.policies if whole_of(name) == whole_of(queue)}
    minutes = _filled(stats.minutes, now // MINUTE, MINUTES, Span)
    drained = None
    if held and stats.waiting and _can_start(look, queue) and not any(name.startswith("pause:") for name in held):
        drained = drained_in(
            stats.waiting,
            stats.run_time,
            [(gauge, each.jobs) for each, gauge in passed],
            now,
            None if seen is None else seen.pace(_served_since(stats)),
            beside=lambda gauge: [
                n for name, n in sharing.get((gauge.limit, gauge.key), {}).items() if name not in together
            ],
            running_for=now - stats.started_at if stats.running and stats.started_at else 0,
        )
    return KeyView(
        keys=dict(zip(stats.by, key, strict=True)),
        queue=queue,
        waiting=stats.waiting,
        scheduled=Counted(look.scheduled.get(key, 0), look.has_all_scheduled),
        running=stats.running,
        held_by=held if stats.waiting else [],
        ended=stats.ended,
        failed=stats.failed,
        run_time=stats.run_time if stats.run_time > 0 or any(each.timed for each in stats.hours) else None,
        share=stats.ran / look.ran if look.ran else None,
        is_paused=_is_paused(policy, stats.by, key),
        gauges=[gauge_view(gauge, each.bound) for each, gauge in passed if each.bound.limit.by == stats.by],
        last_arrived_at=None if stats.arrived_at is None else as_datetime(stats.arrived_at),
        last_started_at=None if stats.started_at is None else as_datetime(stats.started_at),
        hours=[each.ended for each in _filled(stats.hours, now // HOUR, HOURS, Span)],
        mean_wait=sum(each.waited for each in started) / claimed / SECOND if claimed else None,
        waits=[round(each.waited / each.claimed / SECOND, 3) if each.started else None for each in minutes],
        drained_in=drained,
        **_weight(policy, stats, weights),
    )


def _can_start(look: _Look, queue: str) -> bool:
    return service_of(look.workers, [queue], look.now).can_start


def _served_since(stats: KeyStats) -> Instant | None:
    """Since when jobs of a key have waited all the time while jobs of it were started: nothing has arrived since, and
    some still wait. The minute of the first start is left out, since nobody may have served it in its beginning."""
    if stats.arrived_at is None:
        return None
    arrived_in = stats.arrived_at // MINUTE
    first = min((each.number for each in stats.minutes if each.started and each.number >= arrived_in), default=None)
    return stats.arrived_at if first is None else max(stats.arrived_at, first * MINUTE + 1)


def _weight(policy: Policy, stats: KeyStats, known: Mapping[bytes, FlowWeight]) -> dict[str, Any]:
    """What a key's turns are dealt by, and where that number came from."""
    flow, key = _flow(policy, stats), stats.key
    if flow is None or policy.fair is None:
        return {"weight": None}
    own = known.get(flow, FlowWeight(policy.fair.weight_of(key), is_brought=False))
    scope = tuple(sorted(zip(policy.fair.by, key, strict=True)))
    return {
        "weight": policy.weight_at(key, own.weight),
        "weight_from": origin_of_weight(policy, key, is_brought=own.is_brought),
        "boost": policy.overrides.boosts.get(scope, 1.0),
    }


def _lanes(moment: Moment, policy: Policy, keys: Mapping[str, str | None]) -> Looking[list[LaneView]]:
    """The lanes of a key that is a flow of its own; of any other key, none are shown."""
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
        raise no_such_key(policy, wanted)
    return found


def _sort(sort: str) -> KeySort:
    try:
        return KeySort(sort)
    except ValueError:
        known = ", ".join(str(each) for each in KeySort)
        raise ConfigurationError(f"sort={sort!r}: keys can be sorted by {known}") from None
