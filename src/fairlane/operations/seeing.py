"""Queues at a glance: is work flowing, who waits and why. Looking changes nothing.

Every view is of one moment: what it shows together is read in one snapshot of the database.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from fairlane.clock import SECOND, Instant, as_datetime
from fairlane.explaining import is_routed
from fairlane.operations.asking import in_force
from fairlane.operations.charting import MINUTE, SHOWN, chart_of, lately, latest, per_minute
from fairlane.operations.diagnosis import findings_at_a_glance
from fairlane.operations.diagnosis_workers import about_reported_tasks, about_workers, knows, unknown_tasks
from fairlane.operations.findings import Finding
from fairlane.operations.gauging import gauge_view, gauges_of, limit_words
from fairlane.operations.hinting import hints_of, status_of
from fairlane.operations.seeing_keys import held_keys, keys_at
from fairlane.operations.seeing_workers import worker_list
from fairlane.operations.views import (
    Counted,
    HeldView,
    KeyView,
    LimitView,
    OneQueue,
    Overview,
    QueueStatus,
    QueueView,
    Totals,
    WorkerList,
    WorkerView,
)
from fairlane.policy.documents import policy_words
from fairlane.policy.limits import Rate
from fairlane.policy.partitions import whole_of
from fairlane.policy.policy import Policy
from fairlane.scheduler.estimate import Seen
from fairlane.scheduler.explain import forwarded_to_an_engine
from fairlane.simulation.measures import describe
from fairlane.stats.gates import Gauge
from fairlane.stats.keys import Held, Minute
from fairlane.store.protocol import Store
from fairlane.store.rows import Declared
from fairlane.store.stats import Looking, Moment
from fairlane.store.stats_values import QueueFigures, WorkerSeen, serves, service_of

__all__ = ["list_queues", "overview", "overview_beside", "queues_at", "show_queue"]


class _Look(msgspec.Struct, frozen=True):
    """What all views of queues are made of."""

    now: Instant
    policies: Mapping[str, Declared]
    figures: Mapping[str, QueueFigures]
    minutes: Mapping[str, list[Minute]]
    gauges: Mapping[str, list[Gauge]]
    """Of the limits of each whole queue, by partition."""
    workers: WorkerList
    seen: list[WorkerSeen]
    forwarded: Collection[str] | None
    """The queues that the app at hand leaves to an engine, if there is one."""


def _look(moment: Moment, forwarded: Collection[str] | None, only: str | None = None) -> Looking[_Look]:
    policies = yield from moment.policies()
    names = [name for name in policies if only is None or whole_of(name) == only]
    now = moment.now
    figures = {each.queue: each for each in (yield from moment.survey(names))}
    minutes = yield from moment.minutes(names, now - SHOWN * MINUTE)
    wanted = {name: [(bound, ()) for _, bound in policies[name].policy.queue_gates] for name in names}
    gauges = yield from gauges_of(moment, {name: policies[name].policy for name in names}, wanted)
    seen = yield from moment.workers()
    return _Look(now, policies, figures, minutes, gauges, worker_list(seen, now), seen, forwarded)


def _look_at_keys_too(
    moment: Moment, forwarded: Collection[str] | None, only: str | None = None
) -> Looking[tuple[_Look, list[KeyView]]]:
    look = yield from _look(moment, forwarded, only)
    return look, (yield from _held_keys(moment, look))


async def overview(store: Store, forwarded: Collection[str] | None = ()) -> Overview:
    """All queues, and what to do about them. `forwarded` are those that the app at hand leaves to an engine; `None`, if
    none is at hand."""
    return (await overview_beside(store, {}, forwarded))[0]


async def overview_beside(
    store: Store, wanted: Mapping[str, Sequence[Mapping[str, object]]], forwarded: Collection[str] | None = ()
) -> tuple[Overview, list[tuple[str, KeyView]]]:
    """The same, and beside it some keys of queues, as of the same moment."""

    def ask(moment: Moment) -> Looking[tuple[_Look, list[KeyView], list[tuple[str, KeyView]]]]:
        look, held = yield from _look_at_keys_too(moment, forwarded)
        beside = []
        for queue, keys in wanted.items():
            if queue in look.policies:
                beside += [(queue, view) for view in (yield from keys_at(moment, queue, keys))]
        return look, held, beside

    look, keys, beside = await store.ask(ask)
    views, workers = await _views_of(store, look), look.workers
    overview = Overview(
        now=as_datetime(look.now),
        totals=_totals(views, workers),
        queues=views,
        hints=hints_of(views, keys, await findings_at_a_glance(store, workers.workers)),
        chart=chart_of((each for minutes in look.minutes.values() for each in minutes), look.now),
    )
    return overview, beside


async def list_queues(store: Store, forwarded: Collection[str] | None = ()) -> list[QueueView]:
    """All queues, without anything else."""
    return await _views_of(store, await store.ask(lambda moment: _look(moment, forwarded)))


def queues_at(moment: Moment) -> Looking[list[QueueView]]:
    """All queues as of one moment, whoever runs their jobs."""
    return _views((yield from _look(moment, ())))


async def show_queue(store: Store, queue: str, forwarded: Collection[str] | None = ()) -> OneQueue:
    """One queue with its limits, its partitions and its last hour; or `UnknownQueue`."""
    name = (await in_force(store, whole_of(queue))).policy.queue
    look, keys = await store.ask(lambda moment: _look_at_keys_too(moment, forwarded, name))
    declared = look.policies[name]
    policy = declared.policy
    (view,) = await _views_of(store, look)
    chart = chart_of((each for minutes in look.minutes.values() for each in minutes), look.now)
    parts = [_view(name, [name], look) for name in look.figures] if len(look.figures) > 1 else []
    return OneQueue(
        now=as_datetime(look.now),
        view=view,
        policy=describe(policy),
        version=declared.version,
        policy_words=policy_words(policy),
        limits=_limits(policy, look, chart.denied),
        scopes=[list(by) for by in policy.scopes],
        partitions=parts,
        hints=hints_of([view], keys, _findings_of(view.queue, look.workers.workers)),
        chart=chart,
    )


def _held_keys(moment: Moment, look: _Look) -> Looking[list[KeyView]]:
    """The keys behind whose limits most jobs wait, with how fast their queues go."""
    seen: dict[str, Seen] = {}
    for name in look.figures:
        known = seen.get(whole_of(name), Seen([], look.now))
        seen[whole_of(name)] = Seen([*known.minutes, *look.minutes.get(name, [])], look.now)
    policies = {name: look.policies[name].policy for name in look.figures}
    return (yield from held_keys(moment, policies, seen, look.seen))


def _findings_of(queue: str, workers: Sequence[WorkerView]) -> list[Finding]:
    return [each for each in (*about_workers(workers), *about_reported_tasks(workers)) if each.queue == queue]


async def _views_of(store: Store, look: _Look) -> list[QueueView]:
    """A view of each queue. Of one that nobody serves, its jobs may tell that an engine runs them, if no app does."""
    views = _views(look)
    for number, view in enumerate(views):
        is_open = view.is_forwarded is None and view.status is QueueStatus.STOPPED
        if is_open and await is_routed(store, view.queue):
            views[number] = _with_status(msgspec.structs.replace(view, is_forwarded=True))
    return views


def _views(look: _Look) -> list[QueueView]:
    """A view of each queue, its partitions taken together."""
    parts: dict[str, list[str]] = {}
    for name in look.figures:
        parts.setdefault(whole_of(name), []).append(name)
    return [_view(whole, names, look) for whole, names in sorted(parts.items())]


def _view(queue: str, names: Sequence[str], look: _Look) -> QueueView:
    figures = [look.figures[name] for name in names]
    policy = look.policies[names[0]].policy
    ready = sum(each.ready for each in figures)
    held = _held(look, names, ready)
    minutes = [each for name in names for each in look.minutes.get(name, [])]
    started, ended, failed = per_minute(minutes, look.now)
    recent = lately(minutes, look.now)
    alive = [each for each in look.workers.workers if not each.is_late and serves(each.queues, names)]
    serving = [each for each in alive if each.takes_jobs]
    oldest = min((each.oldest_ready_at for each in figures if each.oldest_ready_at is not None), default=None)
    service = service_of(look.seen, names, look.now)
    view = QueueView(
        queue=queue,
        status=QueueStatus.IDLE,
        words="",
        ready=ready,
        held=held,
        held_jobs=sum(_held_jobs(look, name) for name in names),
        running=sum(each.running for each in figures),
        scheduled=_sum(each.scheduled for each in figures),
        dead=_sum(each.dead for each in figures),
        oldest_wait=None if oldest is None or not ready else max(0.0, (look.now - oldest) / SECOND),
        ended=sum(hour.ended for each in figures for hour in each.hours),
        failed=sum(hour.failed for each in figures for hour in each.hours),
        started_per_minute=started,
        ended_per_minute=ended,
        failed_per_minute=failed,
        recently_started=recent.started,
        recently_ended=recent.ended,
        recently_failed=recent.failed,
        recently_denied=sum(recent.denied.values()),
        rates=_rates(policy, latest(minutes, look.now).denied),
        workers=len(serving),
        workers_stopping=len(alive) - len(serving),
        slots=sum(each.concurrency for each in serving),
        slots_free=_slots_free(look, serving),
        is_paused=all(() in look.policies[name].policy.overrides.pauses for name in _in_use(names, policy)),
        partitions=len(_in_use(names, policy)),
        unseen=max(0, sum(each.unseen for each in figures)),
        figures_as_of=as_datetime(look.now),
        is_forwarded=forwarded_to_an_engine(queue, look.forwarded, was_seen=service.is_forwarded),
        refusal=service.refusal,
        unbegun=service.unbegun,
        long_runs=sorted(
            (run for each in alive for run in each.long_runs if run.queue in names), key=lambda run: run.since
        ),
        unknown_tasks=[
            task
            for (of, task) in sorted(unknown_tasks(serving))
            if of == whole_of(queue) and not knows(serving, of, task)
        ],
    )
    return _with_status(view)


def _slots_free(look: _Look, serving: Sequence[WorkerView]) -> int:
    """As workers have last reported, less what has started since. What a dispatcher has published is in none of its
    slots."""
    free = sum(max(0, each.concurrency - each.running) for each in serving)
    if any(each.is_dispatcher for each in serving):
        return free
    served = {queue for each in serving for queue in each.queues}
    names = [name for name in look.figures if serves(served, [name])]
    running = sum(look.figures[name].running for name in names)
    reporting = [each for each in look.workers.workers if serves(each.queues, names)]
    reported = sum(each.running + each.waiting + each.unsettled for each in reporting)
    return max(0, free - max(0, running - reported))


def _rates(policy: Policy, denied: Mapping[str, int]) -> dict[str, str]:
    """Of the limits that turned jobs away, the rates."""
    bounds = [policy.bound_named(name) for name in denied]
    return {each.name: limit_words(each) for each in bounds if each is not None and isinstance(each.limit, Rate)}


def _with_status(view: QueueView) -> QueueView:
    status, words = status_of(view)
    return msgspec.structs.replace(view, status=status, words=words)


def _in_use(names: Sequence[str], policy: Policy) -> list[str]:
    """Of these partitions, those that the queue is divided into now: it may have had more."""
    known = policy.partition.names if policy.partition is not None and len(names) > 1 else names
    return [name for name in names if name in known] or list(names)


def _held(look: _Look, names: Sequence[str], ready: int) -> list[HeldView]:
    """By limit, whom it holds back; a full limit of the whole queue holds back all that are ready."""
    policy = look.policies[names[0]].policy
    sums: dict[str, Held] = {}
    for name in names:
        for limit, held in look.figures[name].held.items():
            known = sums.get(limit, Held())
            sums[limit] = Held(known.keys + held.keys, known.jobs + held.jobs)
        for gauge in look.gauges[name]:
            if gauge.room <= 0:
                known = sums.get(gauge.limit, Held())
                sums[gauge.limit] = Held(0, known.jobs + look.figures[name].ready)
    views = []
    for limit, held in sums.items():
        bound = policy.bound_named(limit)
        if bound is not None and held.jobs > 0:
            words = limit_words(bound)
            by = list(bound.limit.by)
            views.append(HeldView(limit=limit, words=words, by=by, keys=held.keys, jobs=min(held.jobs, ready)))
    return sorted(views, key=lambda each: (-each.jobs, each.limit))


def _held_jobs(look: _Look, name: str) -> int:
    """How many jobs of a partition something holds back."""
    figures = look.figures[name]
    return figures.ready if any(gauge.room <= 0 for gauge in look.gauges[name]) else figures.held_jobs


def _limits(policy: Policy, look: _Look, denied: Mapping[str, int]) -> list[LimitView]:
    held = {each.limit: each for each in _held(look, list(look.figures), 1 << 60)}
    gauges = {gauge.limit: gauge for gauge in look.gauges[policy.queue]}
    views = []
    for bound in policy.bound:
        gauge = gauges.get(bound.name)
        shown = None if gauge is None else gauge_view(gauge, bound)
        holding = held.get(bound.name)
        is_of_queue = not bound.limit.by
        views.append(
            LimitView(
                limit=bound.name,
                words=limit_words(bound) if shown is None else shown.words,
                by=list(bound.limit.by),
                gauge=shown,
                held_keys=0 if holding is None else holding.keys,
                held_jobs=0 if holding is None or is_of_queue else holding.jobs,
                denied=denied.get(bound.name, 0),
                is_suspended=policy.overrides.suspension is not None,
                overridden_keys=sum(name == bound.name for name, _ in policy.overrides.limits),
            )
        )
    return views


def _totals(views: Sequence[QueueView], workers: WorkerList) -> Totals:
    waits = [view.oldest_wait for view in views if view.oldest_wait is not None]
    return Totals(
        ready=sum(view.ready for view in views),
        held_jobs=sum(view.held_jobs for view in views),
        running=sum(view.running for view in views),
        scheduled=_sum(view.scheduled for view in views),
        dead=_sum(view.dead for view in views),
        oldest_wait=max(waits, default=None),
        ended=sum(view.ended for view in views),
        failed=sum(view.failed for view in views),
        started_per_minute=sum(view.started_per_minute for view in views),
        ended_per_minute=sum(view.ended_per_minute for view in views),
        failed_per_minute=sum(view.failed_per_minute for view in views),
        workers=workers.alive - workers.stopping,
        workers_stopping=workers.stopping,
        workers_late=workers.late,
        slots=workers.slots,
    )


def _sum(numbers: Iterable[Counted]) -> Counted:
    counted = list(numbers)
    return Counted(sum(each.count for each in counted), all(each.is_all for each in counted))
