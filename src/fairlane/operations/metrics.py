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
from fairlane.operations.views import KeyView, QueueView
from fairlane.operations.workers import workers_at
from fairlane.policy.keys import key_words, select
from fairlane.policy.partitions import whole_of
from fairlane.policy.policy import BoundLimit, Policy
from fairlane.store.protocol import Store
from fairlane.store.rows import Declared
from fairlane.store.stats import Looking, Moment, Wanted
from fairlane.telemetry.metrics import NO_TASK, OTHER, Labels

Figures = dict[str, list[tuple[Labels, float]]]
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


def figures_at(moment: Moment, keys: int) -> Looking[Figures]:
    """What every fleet metric stands at; of keys, the first so many."""
    views = yield from queues_at(moment)
    workers = yield from workers_at(moment)
    policies = yield from moment.policies()
    figures: Figures = {"fairlane_workers_alive": [((), float(workers.alive))]}
    for name, value in _OF_A_QUEUE.items():
        figures[name] = [((view.queue,), float(value(view))) for view in views]
    figures["fairlane_queue_held_jobs"] = [
        ((view.queue, held.limit), float(held.jobs)) for view in views for held in view.held
    ]
    runs = Counter((view.queue, run.task) for view in views for run in view.long_runs)
    figures["fairlane_queue_long_runs"] = [(labels, float(count)) for labels, count in sorted(runs.items())]
    blocked = Counter(
        (task,)
        for each in workers.workers
        if each.state == "blocked"
        for task in {block.task or NO_TASK for block in each.blocks if block.until is None}
    )
    figures["fairlane_workers_blocked"] = [(labels, float(count)) for labels, count in sorted(blocked.items())]
    saturation = yield from _saturation(moment, policies)
    figures["fairlane_key_waiting_jobs"] = yield from _keys(moment, views, policies, keys, saturation)
    figures["fairlane_limit_saturation_ratio"] = sorted(saturation.items())
    return figures


def _saturation(moment: Moment, policies: Mapping[str, Declared]) -> Looking[dict[Labels, float]]:
    """How full the limits of whole queues are; of partitions, the fullest."""
    in_force = {name: declared.policy for name, declared in policies.items()}
    wanted = {name: [(bound, ()) for _, bound in policy.queue_gates] for name, policy in in_force.items()}
    found: dict[Labels, float] = {}
    for name, gauges in (yield from gauges_of(moment, wanted)).items():
        for gauge, (bound, _) in zip(gauges, wanted[name], strict=True):
            _fuller(found, (whole_of(name), gauge.limit), gauge_view(gauge, bound).saturation)
    return found


def _keys(
    moment: Moment,
    views: list[QueueView],
    policies: Mapping[str, Declared],
    count: int,
    saturation: dict[Labels, float],
) -> Looking[list[tuple[Labels, float]]]:
    """The keys with most jobs waiting, by name, and the rest of their queues; and how full their limits are."""
    waiting = [view for view in views if view.ready and policies[view.queue].policy.scopes]
    busiest = sorted(waiting, key=lambda view: (-view.ready, view.queue))[:QUEUES_WITH_KEYS]
    found: list[tuple[float, Labels]] = []
    for view in busiest if count else ():
        for key in (yield from page_at(moment, view.queue, limit=count)).keys:
            found.append((float(key.waiting), (view.queue, _words(key))))
            _fill(saturation, view.queue, key)
        policy = policies[view.queue].policy
        limited = {bound.limit.by for bound in policy.keyed_limits}
        for by in (by for by in policy.scopes[1:] if by in limited):
            for key in (yield from page_at(moment, view.queue, by, limit=count)).keys:
                _fill(saturation, view.queue, key)
    first = sorted(found, key=lambda each: (-each[0], each[1]))[:count]
    rest = {view.queue: float(view.ready) for view in waiting}
    for jobs, (queue, _) in first:
        rest[queue] = max(0.0, rest[queue] - jobs)
    return [(labels, jobs) for jobs, labels in first if jobs] + [
        ((queue, OTHER), jobs) for queue, jobs in rest.items() if jobs
    ]


def _fill(saturation: dict[Labels, float], queue: str, key: KeyView) -> None:
    for gauge in key.gauges:
        _fuller(saturation, (queue, gauge.limit), gauge.saturation)


def _fuller(found: dict[Labels, float], labels: Labels, saturation: float) -> None:
    found[labels] = max(found.get(labels, 0.0), saturation)


def _words(key: KeyView) -> str:
    return ",".join(f"{name}={'none' if value is None else value}" for name, value in key.keys.items())


async def limits_waited_for(store: Store, claims: Sequence[Claim]) -> dict[UUID, str]:
    """Of these running jobs, those that hold a full limit for which others wait, and which limit that is: the first of
    each."""
    return await store.ask(lambda moment: _waited_for(moment, claims))


def _waited_for(moment: Moment, claims: Sequence[Claim]) -> Looking[dict[UUID, str]]:
    known = yield from moment.policies()
    policies = {claim.queue: known[claim.queue].policy for claim in claims if claim.queue in known}
    held = {claim.id: (claim.queue, _held_by(policies[claim.queue], claim)) for claim in claims if claim.queue in known}
    wanted: dict[str, dict[Wanted, None]] = {}
    for queue, limits in held.values():
        wanted.setdefault(queue, {}).update(dict.fromkeys(limits))
    gauges = yield from gauges_of(moment, {queue: list(each) for queue, each in wanted.items()})
    shut = {
        queue: [each for each, gauge in zip(asked, gauges[queue], strict=True) if gauge.room <= 0]
        for queue, asked in wanted.items()
    }
    names = [queue for queue, each in shut.items() if each]
    places = [(bound.limit.by, key) for each in shut.values() for bound, key in each if key]
    ready = {each.queue for each in (yield from moment.survey(names)) if each.ready} if names else set()
    waiting = {
        (queue, figures.by, figures.key)
        for queue, figures in ((yield from moment.keys_named(names, places)) if places else ())
        if figures.waiting
    }
    found: dict[UUID, str] = {}
    for job, (queue, limits) in held.items():
        for bound, key in limits:
            # A limit of the whole queue holds back whoever is ready.
            is_waited_for = (queue, bound.limit.by, key) in waiting if key else queue in ready
            if is_waited_for and (bound, key) in shut[queue]:
                found.setdefault(job, _setting_words(bound, key))
    return found


def _held_by(policy: Policy, claim: Claim) -> list[Wanted]:
    """The limits that a job holds for as long as it runs, with its keys."""
    keys: Mapping[str, str | None] = {**claim.keys, "task": claim.task}
    counting = [b for b in policy.bound if b.limit.is_held_by_runs]
    selected = [(bound, select(bound.limit.by, keys, claim.priority)) for bound in counting]
    return [(bound, key) for bound, key in selected if policy.limit_at(bound, key) is not None]


def _setting_words(bound: BoundLimit, key: tuple[str | None, ...]) -> str:
    whose = key_words(dict(zip(bound.limit.by, key, strict=True)))
    return f"{limit_words(bound)}{f' for {whose}' if whose else ''}"
