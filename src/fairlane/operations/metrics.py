"""The whole fleet in numbers, for scrapers: what the views of queues, limits, keys and workers say, by metric.

Cardinality is bounded: queues and limits are declared, and of keys only the few that have most jobs waiting are named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from uuid import UUID

from fairlane.job import Claim
from fairlane.operations.keys import gauge_view, gauges_of, limit_words, page_at
from fairlane.operations.queues import queues_at
from fairlane.operations.views import GaugeView, KeyView, QueueView
from fairlane.operations.workers import workers_at
from fairlane.policy.keys import By, key_words, select
from fairlane.policy.partitions import whole_of
from fairlane.policy.policy import Policy
from fairlane.store.protocol import Store
from fairlane.store.stats import Looking, Moment, Wanted
from fairlane.telemetry.metrics import NO_TASK, OTHER, Labels

FleetMetrics = dict[str, list[tuple[Labels, float]]]
"""By metric, its values by their labels."""

QUEUES_WITH_KEYS = 10
"""Queues whose keys are looked at: those with most jobs waiting."""

_OF_A_QUEUE: dict[str, Callable[[QueueView], float]] = {
    "fairlane_queue_ready_jobs": lambda view: view.ready,
    "fairlane_queue_startable_jobs": lambda view: 0 if view.is_paused else max(0, view.ready - view.held_jobs),
    "fairlane_queue_running_jobs": lambda view: view.running,
    "fairlane_queue_scheduled_jobs": lambda view: view.scheduled.count,
    "fairlane_queue_dead_jobs": lambda view: view.dead.count,
    "fairlane_queue_day_ended_jobs": lambda view: view.ended,
    "fairlane_queue_day_failed_jobs": lambda view: view.failed,
    "fairlane_queue_oldest_wait_seconds": lambda view: view.oldest_wait or 0.0,
    "fairlane_queue_workers": lambda view: view.workers,
}


def metrics_at(moment: Moment, keys: int) -> Looking[FleetMetrics]:
    """What every fleet metric stands at; of keys, the first so many."""
    views = yield from queues_at(moment)
    workers = (yield from workers_at(moment)).workers
    policies = {name: each.policy for name, each in (yield from moment.policies()).items()}
    runs = Counter((view.queue, run.task) for view in views for run in view.long_runs)
    blocked = Counter(
        (task,)
        for each in workers
        if each.state == "blocked"
        for task in {block.task or NO_TASK for block in each.blocks if block.until is None}
    )
    saturation = yield from _saturation(moment, policies)
    return {
        "fairlane_workers_alive": [((), float(sum(not each.is_late for each in workers)))],
        **{name: [((view.queue,), float(value(view))) for view in views] for name, value in _OF_A_QUEUE.items()},
        "fairlane_queue_held_jobs": [
            ((view.queue, held.limit), float(held.jobs)) for view in views for held in view.held
        ],
        "fairlane_queue_long_runs": [(labels, float(count)) for labels, count in sorted(runs.items())],
        "fairlane_workers_blocked": [(labels, float(count)) for labels, count in sorted(blocked.items())],
        "fairlane_key_waiting_jobs": (yield from _keys(moment, views, policies, keys, saturation)),
        "fairlane_limit_saturation_ratio": sorted(saturation.items()),
    }


def _saturation(moment: Moment, policies: Mapping[str, Policy]) -> Looking[dict[Labels, float]]:
    """How full the limits of whole queues are; of partitions, the fullest."""
    wanted = {name: [(bound, ()) for _, bound in policy.queue_gates] for name, policy in policies.items()}
    found: dict[Labels, float] = {}
    for name, gauges in (yield from gauges_of(moment, wanted)).items():
        views = [gauge_view(gauge, bound) for gauge, (bound, _) in zip(gauges, wanted[name], strict=True)]
        _keep_fullest(found, whole_of(name), views)
    return found


def _keys(
    moment: Moment, views: list[QueueView], policies: Mapping[str, Policy], count: int, saturation: dict[Labels, float]
) -> Looking[list[tuple[Labels, float]]]:
    """The keys with most jobs waiting, by name, and the rest of their queues; and how full their limits are."""
    waiting = [view for view in views if view.ready and policies[view.queue].scopes]
    busiest = sorted(waiting, key=lambda view: (-view.ready, view.queue))[:QUEUES_WITH_KEYS]
    found: list[tuple[float, Labels]] = []
    for view in busiest if count else ():
        policy = policies[view.queue]
        limited = {bound.limit.by for bound in policy.keyed_limits}
        for by in (policy.scopes[0], *(by for by in policy.scopes[1:] if by in limited)):
            for key in (yield from page_at(moment, view.queue, by, limit=count)).keys:
                _keep_fullest(saturation, view.queue, key.gauges)
                if by == policy.scopes[0]:
                    found.append((float(key.waiting), (view.queue, _words(key))))
    first = sorted(found, key=lambda each: (-each[0], each[1]))[:count]
    rest = {view.queue: float(view.ready) for view in waiting}
    for jobs, (queue, _) in first:
        rest[queue] = max(0.0, rest[queue] - jobs)
    return [(labels, jobs) for jobs, labels in first if jobs] + [
        ((queue, OTHER), jobs) for queue, jobs in rest.items() if jobs
    ]


def _keep_fullest(found: dict[Labels, float], queue: str, gauges: Sequence[GaugeView]) -> None:
    for each in gauges:
        found[queue, each.limit] = max(found.get((queue, each.limit), 0.0), each.saturation)


def _words(key: KeyView) -> str:
    return ",".join(f"{name}={'none' if value is None else value}" for name, value in key.keys.items())


async def limits_waited_for(store: Store, claims: Sequence[Claim]) -> dict[UUID, str]:
    """Of these running jobs, those that hold a full limit for which others wait, and which limit that is: the first of
    each."""
    return await store.ask(lambda moment: _waited_for(moment, claims))


def _waited_for(moment: Moment, claims: Sequence[Claim]) -> Looking[dict[UUID, str]]:
    policies = {name: each.policy for name, each in (yield from moment.policies()).items()}
    held = {each.id: (each.queue, _held_by(policies[each.queue], each)) for each in claims if each.queue in policies}
    wanted: dict[str, dict[Wanted, None]] = {}
    for queue, limits in held.values():
        wanted.setdefault(queue, {}).update(dict.fromkeys(limits))
    gauges = yield from gauges_of(moment, {queue: list(each) for queue, each in wanted.items()})
    full = {
        (queue, *each)
        for queue, asked in wanted.items()
        for each, gauge in zip(asked, gauges[queue], strict=True)
        if gauge.room <= 0
    }
    names = list(dict.fromkeys(queue for queue, _, _ in full))
    places = [(bound.limit.by, key) for _, bound, key in full if key]
    # A limit of the whole queue holds back whoever is ready.
    waiting: set[tuple[str, By, tuple[str | None, ...]]] = set()
    if names:
        waiting |= {(each.queue, (), ()) for each in (yield from moment.survey(names)) if each.ready}
    if places:
        named = yield from moment.keys_named(names, places)
        waiting |= {(queue, stats.by, stats.key) for queue, stats in named if stats.waiting}
    found: dict[UUID, str] = {}
    for job, (queue, limits) in held.items():
        for bound, key in limits:
            if (queue, bound, key) in full and (queue, bound.limit.by, key) in waiting and job not in found:
                whose = key_words(dict(zip(bound.limit.by, key, strict=True)))
                found[job] = f"{limit_words(bound)}{f' for {whose}' if whose else ''}"
    return found


def _held_by(policy: Policy, claim: Claim) -> list[Wanted]:
    """The limits that a job holds for as long as it runs, with its keys."""
    keys: Mapping[str, str | None] = {**claim.keys, "task": claim.task}
    counting = [b for b in policy.bound if b.limit.is_held_by_runs]
    selected = [(bound, select(bound.limit.by, keys, claim.priority)) for bound in counting]
    return [(bound, key) for bound, key in selected if policy.limit_at(bound, key) is not None]
