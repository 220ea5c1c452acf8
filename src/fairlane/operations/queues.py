"""Queues at a glance: whether work flows, what waits and why. Looking changes nothing.

Every view is of one moment: what it shows together is read in one snapshot of the database.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from shlex import quote
from typing import Unpack

import msgspec

from fairlane.clock import SECOND, Instant, as_datetime, lasting
from fairlane.errors import InvalidOverride
from fairlane.operations.diagnosis import (
    Finding,
    Level,
    about_reported_tasks,
    about_stopped,
    about_workers,
)
from fairlane.operations.explanations import explained, explanation_of, forwarded_at, is_routed
from fairlane.operations.keys import (
    chart_of,
    gauge_view,
    gauges_of,
    held_keys,
    lately,
    limit_words,
    per_minute,
)
from fairlane.operations.overrides import Change, OverrideSection
from fairlane.operations.requests import find_jobs, in_force, scope_of
from fairlane.operations.section import ChangeOptions, KeyValues, TimedOptions
from fairlane.operations.views import (
    Chart,
    Counted,
    GaugeView,
    HeldView,
    Hint,
    HintKind,
    KeyView,
    LimitView,
    OneQueue,
    QueueStatus,
    QueueView,
    WorkerList,
    WorkerView,
    jobs_left,
    jobs_wait,
)
from fairlane.operations.workers import worker_list
from fairlane.parameters import checked_methods
from fairlane.policy.keys import canonical_keys, key_words
from fairlane.policy.overrides import Kind, Override
from fairlane.policy.partitions import whole_of
from fairlane.policy.policy import Policy, policy_words
from fairlane.scheduler.estimate import Seen
from fairlane.scheduler.explain import Explanation, forwarded_to_an_engine, no_service
from fairlane.simulation.measures import describe
from fairlane.stats.gates import Gauge
from fairlane.stats.keys import MINUTE, MINUTES, Held, Minute
from fairlane.store.operators import JobFilter
from fairlane.store.protocol import Store
from fairlane.store.rows import Declared
from fairlane.store.stats import Looking, Moment
from fairlane.store.stats_values import QueueStats, WorkerSeen, serves, service_of

LOOKED_AT = 200
"""Jobs of a queue among which a task is looked for that was not named in full."""


class Look(msgspec.Struct, frozen=True):
    """What all views of queues are made of."""

    now: Instant
    policies: Mapping[str, Declared]
    stats: Mapping[str, QueueStats]
    minutes: Mapping[str, list[Minute]]
    gauges: Mapping[str, list[Gauge]]
    """Of the limits of each whole queue, by partition."""
    workers: WorkerList
    seen: list[WorkerSeen]
    forwarded: Collection[str] | None
    """The queues that the app at hand leaves to an engine, if there is one."""

    @property
    def chart(self) -> Chart:
        """The last hour of all these queues together."""
        return chart_of((each for minutes in self.minutes.values() for each in minutes), self.now)


def look_at(moment: Moment, forwarded: Collection[str] | None, only: str | None = None) -> Looking[Look]:
    policies = yield from moment.policies()
    names = [name for name in policies if only is None or whole_of(name) == only]
    now = moment.now
    stats = {each.queue: each for each in (yield from moment.survey(names))}
    minutes = yield from moment.minutes(names, now - MINUTES * MINUTE)
    wanted = {name: [(bound, ()) for _, bound in policies[name].policy.queue_gates] for name in names}
    gauges = yield from gauges_of(moment, wanted)
    seen = yield from moment.workers()
    return Look(now, policies, stats, minutes, gauges, worker_list(seen, now), seen, forwarded)


def look_with_keys(
    moment: Moment, forwarded: Collection[str] | None, only: str | None = None
) -> Looking[tuple[Look, list[KeyView]]]:
    """The same, and the keys behind whose limits most jobs wait."""
    look = yield from look_at(moment, forwarded, only)
    seen: dict[str, Seen] = {}
    for name in look.stats:
        known = seen.get(whole_of(name), Seen([], look.now))
        seen[whole_of(name)] = Seen([*known.minutes, *look.minutes.get(name, [])], look.now)
    policies = {name: look.policies[name].policy for name in look.stats}
    return look, (yield from held_keys(moment, policies, seen, look.seen))


@checked_methods
class Queues(OverrideSection):
    """`app.operations.queues`: how queues are doing and why, and pausing and suspending them."""

    async def show(self, queue: str) -> OneQueue:
        """One queue: its policy in words, its limits, its partitions, its last hour; or `UnknownQueue`."""
        store = await self._store()
        name = (await in_force(store, whole_of(queue))).policy.queue
        look, keys = await store.ask(lambda moment: look_with_keys(moment, self._source.forwarded, name))
        declared = look.policies[name]
        policy = declared.policy
        (view,) = await views_of(store, look)
        chart = look.chart
        workers = look.workers.workers
        findings = [
            each for each in (*about_workers(workers), *about_reported_tasks(workers).values()) if each.queue == name
        ]
        return OneQueue(
            now=as_datetime(look.now),
            view=view,
            policy=describe(policy),
            version=declared.version,
            policy_words=policy_words(policy),
            limits=_limits(policy, look, chart.denied),
            scopes=[list(by) for by in policy.scopes],
            partitions=[_view(name, [name], look) for name in look.stats] if len(look.stats) > 1 else [],
            hints=hints_of([view], keys, [each for each in findings if each.queue == name]),
            chart=chart,
        )

    async def explain(self, queue: str, keys: KeyValues | None = None) -> Explanation:
        """Everything that holds all jobs of a queue or of one partition of it, or all of some keys in it."""
        store, canonical = await self._store(), canonical_keys(keys or {})
        parts = await store.ask(lambda moment: explained(moment, queue, canonical))
        forwarded = [await forwarded_at(store, facts, self._source.forwarded) for facts, _ in parts]
        return explanation_of(queue, parts, forwarded)

    async def pause(
        self, queue: str, *, keys: KeyValues | None = None, task: str | None = None, **options: Unpack[TimedOptions]
    ) -> Change:
        """Start nothing more of a queue, a key or a task. What runs goes on; keys first seen later are covered."""
        scope = scope_of(keys, await _full_name(await self._store(), queue, task))
        return await self._put(queue, "pause", Override(kind=Kind.PAUSE, scope=scope), **options)

    async def resume(
        self, queue: str, *, keys: KeyValues | None = None, task: str | None = None, **options: Unpack[ChangeOptions]
    ) -> Change:
        """End a pause: the one of exactly this queue, key or task."""
        # The task may have been paused under just the name that is given.
        names = dict.fromkeys([task, await _full_name(await self._store(), queue, task)])
        pauses = [Override(kind=Kind.PAUSE, scope=scope_of(keys, name)) for name in names]
        return await self._end(queue, "resume", *pauses, **options)

    async def suspend(self, queue: str, **options: Unpack[TimedOptions]) -> Change:
        """Let no limit of a queue hold anything back. All go on counting; pauses and turns stay."""
        return await self._put(queue, "suspend", Override(kind=Kind.SUSPEND), **options)

    async def unsuspend(self, queue: str, **options: Unpack[ChangeOptions]) -> Change:
        """Let the limits of a queue hold again. What runs beyond them drains first."""
        return await self._end(queue, "unsuspend", Override(kind=Kind.SUSPEND), **options)

    # Last: below it, `list` in an annotation would be this method.
    async def list(self) -> list[QueueView]:
        """Every queue at a glance."""
        store = await self._store()
        return await views_of(store, await store.ask(lambda moment: look_at(moment, self._source.forwarded)))


async def _full_name(store: Store, queue: str, task: str | None) -> str | None:
    """A task by its full name, if the queue's newest jobs have one that ends so; it may be one that is yet to come."""
    if task is None:
        return None
    await in_force(store, queue)
    seen = {each.task for each in (await find_jobs(store, JobFilter(queue=queue), limit=LOOKED_AT)).jobs}
    alike = sorted(each for each in seen if each.endswith(f".{task}"))
    if task in seen or not alike:
        return task
    if len(alike) > 1:
        raise InvalidOverride(f"queue {queue!r}: several tasks end in {task!r}: {', '.join(alike)}; give the full name")
    return alike[0]


def queues_at(moment: Moment) -> Looking[list[QueueView]]:
    """All queues as of one moment, whoever runs their jobs."""
    return _views((yield from look_at(moment, ())))


async def views_of(store: Store, look: Look, *, by_partition: bool = False) -> list[QueueView]:
    """A view of each queue, or of each partition. Of one that nobody serves, its jobs may tell that an engine runs
    them, if no app does."""
    views = [_view(name, [name], look) for name in look.stats] if by_partition else _views(look)
    for number, view in enumerate(views):
        is_open = view.is_forwarded is None and view.status is QueueStatus.STOPPED
        if is_open and await is_routed(store, view.queue):
            views[number] = _with_status(msgspec.structs.replace(view, is_forwarded=True))
    return views


def _views(look: Look) -> list[QueueView]:
    """A view of each queue, its partitions taken together."""
    parts: dict[str, list[str]] = {}
    for name in look.stats:
        parts.setdefault(whole_of(name), []).append(name)
    return [_view(whole, names, look) for whole, names in sorted(parts.items())]


def _view(queue: str, names: Sequence[str], look: Look) -> QueueView:
    stats = [look.stats[name] for name in names]
    policy = look.policies[names[0]].policy
    ready = sum(each.ready for each in stats)
    held = _held(look, names, ready)
    minutes = [each for name in names for each in look.minutes.get(name, [])]
    started, ended, failed = per_minute(minutes, look.now)
    recent = lately(minutes, look.now)
    alive = [each for each in look.workers.workers if not each.is_late and serves(each.queues, names)]
    serving = [each for each in alive if each.takes_jobs]
    oldest = min((each.oldest_ready_at for each in stats if each.oldest_ready_at is not None), default=None)
    service = service_of(look.seen, names, look.now)
    view = QueueView(
        queue=queue,
        status=QueueStatus.IDLE,
        words="",
        ready=ready,
        held=held,
        held_jobs=sum(_held_jobs(look, name) for name in names),
        running=sum(each.running for each in stats),
        lapsed=sum(each.lapsed for each in stats),
        scheduled=sum_of(each.scheduled for each in stats),
        dead=sum_of(each.dead for each in stats),
        oldest_wait=None if oldest is None or not ready else max(0.0, (look.now - oldest) / SECOND),
        ended=sum(hour.ended for each in stats for hour in each.hours),
        failed=sum(hour.failed for each in stats for hour in each.hours),
        started_per_minute=started,
        ended_per_minute=ended,
        failed_per_minute=failed,
        recently_started=recent.started,
        recently_ended=recent.ended,
        recently_failed=recent.failed,
        recently_denied=sum(recent.denied.values()),
        rates=_rates(policy, lately(minutes, look.now, 1).denied),
        workers=len(serving),
        workers_stopping=len(alive) - len(serving),
        slots=sum(each.concurrency for each in serving),
        slots_free=_slots_free(look, serving),
        is_paused=all(() in look.policies[name].policy.overrides.pauses for name in _in_use(names, policy)),
        partitions=len(_in_use(names, policy)),
        unseen=max(0, sum(each.unseen for each in stats)),
        stats_as_of=as_datetime(look.now),
        is_forwarded=forwarded_to_an_engine(queue, look.forwarded, was_seen=service.is_forwarded),
        refusal=service.refusal,
        unbegun=service.unbegun,
        long_runs=sorted(
            (run for each in alive for run in each.long_runs if run.queue in names), key=lambda run: run.since
        ),
        unknown_tasks=[
            task
            for (of, task), found in about_reported_tasks(serving).items()
            if of == whole_of(queue) and found.level is Level.FAULT
        ],
    )
    return _with_status(view)


def _slots_free(look: Look, serving: Sequence[WorkerView]) -> int:
    """As workers have last reported, less what has started since. What a dispatcher has published is in none of its
    slots."""
    free = sum(max(0, each.concurrency - each.running) for each in serving)
    if any(each.is_dispatcher for each in serving):
        return free
    served = {queue for each in serving for queue in each.queues}
    names = [name for name in look.stats if serves(served, [name])]
    running = sum(look.stats[name].running for name in names)
    reporting = [each for each in look.workers.workers if serves(each.queues, names)]
    reported = sum(each.running + each.waiting + each.unsettled for each in reporting)
    return max(0, free - max(0, running - reported))


def _rates(policy: Policy, denied: Mapping[str, int]) -> dict[str, str]:
    """Of the limits that turned jobs away, the rates."""
    bounds = [policy.bound_named(name) for name in denied]
    return {each.name: limit_words(each) for each in bounds if each is not None and each.limit.is_of_starts}


def _with_status(view: QueueView) -> QueueView:
    status, words = status_of(view)
    return msgspec.structs.replace(view, status=status, words=words)


def _in_use(names: Sequence[str], policy: Policy) -> list[str]:
    """Of these partitions, those that the queue is divided into now: it may have had more."""
    known = policy.partition.names if policy.partition is not None and len(names) > 1 else names
    return [name for name in names if name in known] or list(names)


def _held(look: Look, names: Sequence[str], ready: int) -> list[HeldView]:
    """By limit, whom it holds back; a full limit of the whole queue holds back all that are ready."""
    policy = look.policies[names[0]].policy
    sums: dict[str, Held] = {}
    for name in names:
        for limit, held in look.stats[name].held.items():
            known = sums.get(limit, Held())
            sums[limit] = Held(known.keys + held.keys, known.jobs + held.jobs)
        for gauge in look.gauges[name]:
            if gauge.room <= 0:
                known = sums.get(gauge.limit, Held())
                sums[gauge.limit] = Held(0, known.jobs + look.stats[name].ready)
    views = []
    for limit, held in sums.items():
        bound = policy.bound_named(limit)
        if bound is not None and held.jobs > 0:
            words = limit_words(bound)
            by = list(bound.limit.by)
            views.append(HeldView(limit=limit, words=words, by=by, keys=held.keys, jobs=min(held.jobs, ready)))
    return sorted(views, key=lambda each: (-each.jobs, each.limit))


def _held_jobs(look: Look, name: str) -> int:
    """How many jobs of a partition something holds back."""
    stats = look.stats[name]
    return stats.ready if any(gauge.room <= 0 for gauge in look.gauges[name]) else stats.held_jobs


def _limits(policy: Policy, look: Look, denied: Mapping[str, int]) -> list[LimitView]:
    held = {each.limit: each for each in _held(look, list(look.stats), 1 << 60)}
    gauges = {gauge.limit: gauge for gauge in look.gauges[policy.queue]}
    views = []
    for bound in policy.bound:
        gauge, holding = gauges.get(bound.name), held.get(bound.name)
        shown = None if gauge is None else gauge_view(gauge, bound)
        views.append(
            LimitView(
                limit=bound.name,
                words=limit_words(bound) if shown is None else shown.words,
                by=list(bound.limit.by),
                gauge=shown,
                held_keys=0 if holding is None else holding.keys,
                held_jobs=0 if holding is None or not bound.limit.by else holding.jobs,
                denied=denied.get(bound.name, 0),
                is_suspended=policy.overrides.suspension is not None,
                overridden_keys=sum(name == bound.name for name, _ in policy.overrides.limits),
            )
        )
    return views


def sum_of(numbers: Iterable[Counted]) -> Counted:
    counted = list(numbers)
    return Counted(sum(each.count for each in counted), all(each.is_all for each in counted))


LAGGING_AFTER = 60.0
"""Seconds that a job which nothing holds back may wait before it is reported as lag."""
MOST_HINTS = 20
OF_ONE_LIMIT = 3
"""Keys that are named one by one for a limit that holds many back: its queue's page has the others."""
TOLD_BY_QUEUES = ("broker refuses", "unbegun jobs")
"""Findings about dispatchers that their queues tell of."""
FEW_SLOTS = 0.9
OFTEN_FAILING = 0.5
OFTEN_DENIED = 0.1
"""Jobs turned away for each that started: where slots are what is short, limits turn hardly any away."""


def status_of(view: QueueView) -> tuple[QueueStatus, str]:
    """How a queue is doing, in a word and in a sentence. What the view says of its status is not looked at."""
    ready, held, running = view.ready, view.held_jobs, view.running
    if view.is_paused:
        return QueueStatus.PAUSED, f"paused: {jobs_wait(ready)}, {running:,} still run"
    if not ready and not running and view.unknown_tasks:
        tasks = ", ".join(map(repr, view.unknown_tasks))
        return QueueStatus.STOPPED, f"no worker that serves it knows task {tasks}: its jobs are given back"
    if not ready and not view.is_left:
        return (QueueStatus.FLOWING, f"{running:,} run, nothing waits") if running else (QueueStatus.IDLE, "idle")
    if view.refusal is not None:
        return QueueStatus.STOPPED, f"the broker refuses what is published: {jobs_wait(ready)}; {view.refusal}"
    if not view.workers:
        who = no_service(view.workers_stopping, is_forwarded=view.is_forwarded)
        return QueueStatus.STOPPED, f"{who}: {jobs_left(ready, running)}"
    eligible = ready - held
    pauses = [each for each in view.held if each.limit.startswith("pause:")]
    has_limits = len(pauses) < len(view.held) or not pauses
    if _is_rated(view, eligible):
        let = "lets jobs start as it opens" if len(view.rates) == 1 else "let jobs start as they open"
        return (
            QueueStatus.LIMITED,
            f"{', '.join(view.rates.values())} {let}, as the policy requires: {jobs_wait(ready)}",
        )
    if eligible <= 0:
        who = " and ".join(["pauses of operators"] * bool(pauses) + ["limits"] * has_limits)
        words, why = f"{who} hold back everything that waits ({_jobs(ready)})", ", as the policy requires"
        if pauses:
            why = f"; {', '.join(f'{_jobs(each.jobs)}: {each.words}' for each in pauses)}"
        elif longest := next((run for run in view.long_runs if run.limit is not None), None):
            why = f"; job {longest.job} ({longest.task}) has held {longest.limit} for {lasting(longest.ran)}"
        return QueueStatus.LIMITED, f"{words}{why}"
    if _is_lagging(view, eligible):
        are = "is" if view.slots_free == 1 else "are"
        slots = f"{view.slots_free:,} of {view.slots:,} slots {are} free" if view.slots_free else "no slot is free"
        oldest = "" if held or view.oldest_wait is None else f"; the oldest waits for {lasting(view.oldest_wait)}"
        return QueueStatus.LAGGING, f"{_jobs(eligible)} could start, and {slots}{oldest}"
    by = " and ".join(["limits"] * has_limits + ["pauses"] * bool(pauses))
    back = f", {held:,} {'is' if held == 1 else 'are'} held back by {by}" if held else ""
    return QueueStatus.FLOWING, f"{_jobs(eligible)} could start now{back}"


def _is_rated(view: QueueView, eligible: int) -> bool:
    """Whether rates are all that slows a queue down, at a moment in which they are shut or have just opened: they have
    turned jobs away lately, nothing else holds any back, and those that could start now do not wait for a slot."""
    if not view.rates or any(each.limit not in view.rates for each in view.held):
        return False
    return eligible <= 0 or not _is_busy(view) or _has_just_opened(view)


def _has_just_opened(view: QueueView) -> bool:
    """Whether a limit that turns jobs away again and again holds nobody at this moment: it lets the next job start."""
    return not view.held_jobs and view.recently_denied > OFTEN_DENIED * view.recently_started


def _is_lagging(view: QueueView, eligible: int) -> bool:
    """Whether jobs that nothing holds back wait for long. Where others are held back, nobody knows which is the oldest:
    then by whether all slots are busy, and more could start than start in a minute. A limit that has room for the next
    job just now holds back the others all the same."""
    if _has_just_opened(view) or (view.oldest_wait is not None and view.oldest_wait <= LAGGING_AFTER):
        return False
    if not view.held_jobs and not view.recently_denied:
        return view.oldest_wait is not None and view.oldest_wait > LAGGING_AFTER
    return _is_busy(view) and view.recently_started > 0 and eligible > view.started_per_minute


def _is_busy(view: QueueView) -> bool:
    return view.slots > 0 and view.slots - view.slots_free >= FEW_SLOTS * view.slots


def hints_of(queues: Sequence[QueueView], keys: Iterable[KeyView], findings: Iterable[Finding]) -> list[Hint]:
    """Faults first, then lag, then pauses, then what may break soon, then limits that do their work."""
    left = {each.queue for each in queues if each.is_left}
    limited = (each for each in keys if each.is_paused or whole_of(each.queue) not in left)
    found = [*about_stopped(queues), *findings]
    hints = [*_of_findings(found), *_about_queues(queues), *_about_keys(limited)]
    order = {HintKind.FAULT: 0, HintKind.LAG: 1, HintKind.PAUSE: 2, HintKind.WARNING: 3, HintKind.LIMIT: 4}
    return sorted(hints, key=lambda hint: order[hint.kind])[:MOST_HINTS]


def _of_findings(findings: Iterable[Finding]) -> Iterator[Hint]:
    """What the doctor finds at a glance, but for what the queues say themselves. What may be on purpose is left to the
    doctor."""
    kinds = {Level.FAULT: HintKind.FAULT, Level.WARNING: HintKind.WARNING}
    for each in findings:
        if (kind := kinds.get(each.level)) is not None and each.check not in TOLD_BY_QUEUES:
            yield Hint(kind=kind, queue=each.queue, words=each.words, knob=each.remedy)


def _about_queues(queues: Sequence[QueueView]) -> Iterator[Hint]:
    for each in queues:
        name = quote(each.queue)
        if each.status is QueueStatus.STOPPED and each.refusal is not None:
            knob = "check the broker; publishing is retried until it accepts messages"
            yield _hint(HintKind.FAULT, each, each.words, knob)
        elif each.status is QueueStatus.LAGGING:
            knob = "start more workers, or give them more --concurrency"
            if each.slots and not _is_busy(each):
                knob = f"slots are free, so it is not the workers: fairlane explain --queue {name}"
            yield _hint(HintKind.LAG, each, each.words, knob)
        elif each.status is QueueStatus.PAUSED and each.ready:
            words, knob = f"{each.queue} is {each.words}", f"fairlane resume {name}"
            yield Hint(kind=HintKind.PAUSE, queue=each.queue, words=words, knob=knob)
        if each.unbegun is not None:
            knob = "start a worker of the engine that consumes the queue, or check those that do"
            yield _hint(HintKind.WARNING, each, each.unbegun, knob)
        if failures := _failures(each):
            yield _hint(HintKind.FAULT, each, failures, f"fairlane dead list --queue {name}")


def _hint(kind: HintKind, view: QueueView, words: str, knob: str) -> Hint:
    return Hint(kind=kind, queue=view.queue, words=f"{view.queue}: {words}", knob=knob)


def _failures(view: QueueView) -> str | None:
    if view.recently_failed > OFTEN_FAILING * view.recently_ended:
        share = view.recently_failed / view.recently_ended
        return f"{share:.0%} of the runs of the last five minutes failed"
    if view.recently_failed and view.dead.count:
        more = "" if view.dead.is_all else " or more"
        runs = "1 run" if view.recently_failed == 1 else f"{view.recently_failed:,} runs"
        return f"{runs} of the last five minutes failed, and {_jobs(view.dead.count)}{more} died"
    return None


def _about_keys(keys: Iterable[KeyView]) -> Iterator[Hint]:
    named = Counter[tuple[str, str]]()
    for each in keys:
        if not each.held_by or not each.waiting:
            continue
        queue = whole_of(each.queue)
        who, name, options = key_words(each.keys), quote(queue), _key_options(each)
        named.update((queue, limit) for limit in each.held_by)
        if max(named[queue, limit] for limit in each.held_by) > OF_ONE_LIMIT:
            continue
        gauge = next((gauge for gauge in each.gauges if gauge.limit in each.held_by), None)
        if each.is_paused:
            words, knob = f"{who} is paused: {jobs_wait(each.waiting)}", f"fairlane resume {name} {options}"
            yield Hint(kind=HintKind.PAUSE, queue=queue, words=words, knob=knob, keys=each.keys)
        elif gauge is not None:
            words = f"{who} is held by its {_bound_words(gauge)}: {jobs_wait(each.waiting)}"
            if each.drained_in is not None:
                words += f", {'at least ' if each.drains_at_least else ''}{lasting(each.drained_in)} to drain"
            knob = f"fairlane limit set {name} {quote(gauge.limit)} NUMBER {options}"
            shared = gauge.limit.partition("@")[2]
            if gauge.reason == "sequence" or (shared and not shared.startswith(f"{queue}__")):
                # It has no number, or none of its own in this queue: what holds it is all there is to know.
                knob = f"fairlane explain --queue {name} {options}"
            yield Hint(kind=HintKind.LIMIT, queue=queue, words=words, knob=knob, keys=each.keys, limit=gauge.limit)


def _bound_words(gauge: GaugeView) -> str:
    return {
        "rate": f"rate ({gauge.words})",
        "breaker": "breaker, which is open after failures",
        "sequence": "sequence: its jobs run one after the other",
    }.get(gauge.reason, f"limit of {gauge.bound:g}")


def _key_options(view: KeyView) -> str:
    return " ".join(f"--key {quote(f'{name}={value}')}" for name, value in view.keys.items())


def _jobs(count: int) -> str:
    return "1 job" if count == 1 else f"{count:,} jobs"
