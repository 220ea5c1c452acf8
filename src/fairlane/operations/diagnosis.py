"""What is wrong and can be seen from outside: with policies, keys, queues, schedules, workers and the database. Looking
changes nothing.

Each check is bounded: it reads counts, policies with their overrides, single rows by their ids, and of the jobs at most
what one page of a listing looks at.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from shlex import quote

from fairlane.clock import SECOND, Instant, as_datetime
from fairlane.job import State
from fairlane.operations.diagnosis_fleet import (
    about_database,
    about_pressure,
    about_reported_tasks,
    about_time,
    about_workers,
)
from fairlane.operations.explanations import is_routed
from fairlane.operations.findings import Finding, Level, by_level
from fairlane.operations.keys import MINUTE
from fairlane.operations.policies import Declarations, PolicyInForce, show_policies
from fairlane.operations.requests import find_jobs
from fairlane.operations.views import WorkerView
from fairlane.operations.workers import list_workers
from fairlane.policy.division import Phase, division, phase_of, way_to, widths
from fairlane.policy.keys import flow_id, gate_id, key_words
from fairlane.policy.overrides import Scope, pause_name, without_place
from fairlane.policy.partitions import parse_partition, whole_of
from fairlane.policy.policy import Policy
from fairlane.scheduler.explain import forwarded_to_an_engine, no_service, start_command
from fairlane.stats.keys import Minute
from fairlane.store import health, schedules, upkeep
from fairlane.store.boards import QueueTime
from fairlane.store.health import Standstill
from fairlane.store.operators import JobFilter
from fairlane.store.protocol import FOLD_AT_MOST, QueueCounts, Store
from fairlane.store.schedules import ScheduleRow
from fairlane.store.stats import Looking, Moment
from fairlane.store.stats_values import KeyPage, LanesCounted, QueueFigures, serves

MOST_STANDSTILLS = 5
"""Of each queue and kind."""


async def diagnose(
    store: Store,
    declared: Declarations | None = None,
    tasks: Collection[str] | None = None,
    forwarded: Collection[str] | None = (),
) -> list[Finding]:
    """Look at a database and at every queue in it, at its workers, and at what the code declares; the worst first.
    `tasks` are those that the program at hand knows, if it is one that runs them; `forwarded`, the queues that it
    leaves to an engine, or `None` if there is no program at hand."""
    shown = await show_policies(store, declared, with_partitions=True)
    policies = {each.queue: each.policy for each in shown if each.policy is not None}
    workers = (await list_workers(store)).workers
    alive = [each for each in workers if each.takes_jobs]
    seen = {queue for each in workers if each.is_dispatcher for queue in each.queues}
    unserved: dict[bool | None, dict[str, int]] = {}
    findings = [*about_database(await store.health()), *about_workers(workers), *about_policies(shown)]
    for policy in policies.values():
        counts = await store.counts(policy.queue)
        findings += await _about_one(store, policy, counts)
        if not any(serves(each.queues, [policy.queue]) for each in alive) and await has_waiting(store, policy, counts):
            was_seen = whole_of(policy.queue) in seen
            is_forwarded = forwarded_to_an_engine(policy.queue, forwarded, was_seen=was_seen)
            if is_forwarded is None:
                is_forwarded = await is_routed(store, policy.queue) or None
            stopping = sum(not each.is_late and serves(each.queues, [policy.queue]) for each in workers)
            unserved.setdefault(is_forwarded, {})[whole_of(policy.queue)] = stopping
    findings += about_service(unserved)
    unknown = await _about_tasks(store, policies, alive, tasks)
    findings += [*unknown, *about_reported_tasks(alive, unknown)]
    findings += await _about_all(store, policies)
    time = await store.time()
    findings += [
        *about_time(time),
        *about_schedules(await store.run(schedules.schedules()), time, has_worker=bool(alive)),
    ]
    return by_level(findings)


async def findings_at_a_glance(store: Store, workers: Sequence[WorkerView]) -> list[Finding]:
    """What workers report and what presses the database: cheap enough for every look at an overview."""
    pressing = about_pressure(await store.health(brief=True))
    return by_level([*about_workers(workers), *about_reported_tasks(workers), *pressing])


async def _about_one(store: Store, policy: Policy, counts: QueueCounts) -> list[Finding]:
    """What jobs and workers have left behind in a queue, or have not."""
    queue, named = policy.queue, list(named_keys(policy))
    flows = [flow for each in named for flow in each.flows]
    gates = [gate for each in named for gate in each.gates]
    traces = await store.run(health.traces(queue, flows, gates))
    return [
        *await about_named_keys(store, named, traces.found),
        *about_bells(queue, counts),
        *await about_gates(store, queue),
    ]


async def _about_tasks(
    store: Store, policies: dict[str, Policy], alive: list[WorkerView], tasks: Collection[str] | None
) -> list[Finding]:
    whole: dict[str, list[Policy]] = {}
    for name, policy in policies.items():
        whole.setdefault(whole_of(name), []).append(policy)
    return [finding for parts in whole.values() for finding in await about_tasks(store, parts, alive, tasks)]


async def _about_all(store: Store, policies: dict[str, Policy]) -> list[Finding]:
    names, now = list(policies), await store.now()
    overdue = now - LONG_OVERDUE
    found = await store.run(health.standstills(names, overdue, MOST_STANDSTILLS))
    minutes = await store.ask(lambda moment: moment.minutes(names, overdue)) if found else {}
    figures = await store.ask(lambda moment: moment.survey(names))
    return [*about_figures(figures, now), *about_standstills(found, policies, minutes)]


def about_policies(shown: Iterable[PolicyInForce]) -> Iterator[Finding]:
    """Drift, wrong widths, changes that were broken off, overrides without effect."""
    by_queue = {each.queue: each for each in shown}
    yield from _unfinished(by_queue.values())
    for each in by_queue.values():
        whole = by_queue.get(whole_of(each.queue))
        yield from _width(each)
        # Of partitions, what is not said of their queue.
        if whole is each or whole is None or not whole.is_drift:
            yield from _drift(each)
        if each.policy is not None:
            yield from _overrides_without_place(each.policy)


def _unfinished(shown: Iterable[PolicyInForce]) -> Iterator[Finding]:
    """Queues on their way to another number of partitions, as the first partition says."""
    for each in shown:
        if each.policy is None or parse_partition(each.queue) or phase_of(each.policy) is Phase.RESTING:
            continue
        (before, to), place = widths(each.policy), each.policy.partition
        go_on = f"let that end: workers go on with it, and so does `fairlane partition {each.queue} --to {to}`"
        give_up = f"; to give it up: `fairlane partition {each.queue} --to {before} --abandon`"
        back = place is not None and place.is_abandoned
        yield Finding(
            check="partitions",
            queue=each.queue,
            message=f"it is on its way {'back ' if back else ''}from {before} to {to} partitions: keys that move stand "
            "still",
            remedy=go_on if back else go_on + give_up,
        )


def _width(each: PolicyInForce) -> Iterator[Finding]:
    """A queue that is divided otherwise than the code says."""
    if each.policy is None or each.declared is None or not each.is_divided_otherwise or parse_partition(each.queue):
        return
    (has, has_by), (wants, wants_by) = division(each.policy), division(each.declared)
    yield Finding(
        check="partitions",
        level=Level.WARNING,
        queue=each.queue,
        message=f"it has {has} (by {', '.join(has_by) or 'no key'}), and the code declares {wants} (by "
        f"{', '.join(wants_by) or 'no key'}): programs with this code send and serve jobs by the stored number",
        remedy=f"declare it as it is, or change the queue: {way_to(each.policy, each.declared)}",
    )


def _drift(each: PolicyInForce) -> Iterator[Finding]:
    if each.declared is None or (each.policy is not None and not each.drift):
        return
    if each.policy is None:
        message = "the code declares it, and this database does not know it"
    else:
        changes = "; ".join(difference.describe() for difference in each.drift)
        message = f"the code declares another policy than version {each.version}, which is in force: {changes}"
    remedy = "`fairlane policy apply` puts the declared one in force"
    yield Finding(check="drift", queue=each.queue, message=message, remedy=remedy)


def _overrides_without_place(policy: Policy) -> Iterator[Finding]:
    for override in policy.overrides.all if parse_partition(policy.queue) is None else ():
        reason = without_place(policy, override)
        if reason is not None:
            yield Finding(
                check="override without effect",
                level=Level.WARNING,
                queue=policy.queue,
                message=f"{override.describe()}, which changes nothing: {reason}",
                remedy="clear it with `fairlane resume`, `limit clear` or `weight clear`",
            )


MANY_BELLS = 10 * FOLD_AT_MOST
"""More than ten claims fold: claims do not keep up, or nobody claims."""
MANY_TALLIES = 1_000
FIGURES_LATE = 5 * MINUTE
GATES_AT_ONCE, MOST_STRETCHES = 1_000, 20
"""Gates that are held against the running jobs: of a queue with more, the next look goes on."""
LONG_OVERDUE = 10 * MINUTE
"""After which a gate that has not woken its lanes is told."""


async def has_waiting(store: Store, policy: Policy, counts: QueueCounts) -> bool:
    """Whether jobs of a queue wait for somebody to run them. A bell that nobody has folded may tell of a job that came,
    or of one that ended."""
    if () in policy.overrides.pauses:
        return False
    if counts.ready or not counts.bells:
        return counts.ready > 0
    return bool((await find_jobs(store, JobFilter(queue=policy.queue, state=State.READY), None, 1)).jobs)


def about_service(unserved: Mapping[bool | None, Mapping[str, int]]) -> Iterator[Finding]:
    """Jobs wait, and nobody is there to run them: by whether an engine does, the queues, each with how many workers of
    it are stopping. One command starts all of them."""
    for is_forwarded, queues in unserved.items():
        (first, *others), who = queues, "dispatcher" if is_forwarded else "worker"
        service = no_service(queues[first], is_forwarded=is_forwarded)
        message = f"no {who} serves {', '.join(queues)}, where jobs wait" if others else f"jobs wait, and {service}"
        yield Finding(
            check=f"no {who}",
            queue=None if others else first,
            message=message,
            remedy=f"start one: {start_command(*queues, is_forwarded=is_forwarded)}",
        )


async def about_gates(store: Store, queue: str) -> list[Finding]:
    """Gates that count jobs which do not run, or do not count jobs that do."""
    for _ in range(MOST_STRETCHES):
        counted = await store.run(upkeep.count_gates(queue, GATES_AT_ONCE))
        if counted.found:
            others = f" (and {len(counted.found) - 1} more)" if len(counted.found) > 1 else ""
            return [
                Finding(
                    check="a gate is miscounted",
                    queue=queue,
                    message=f"{counted.found[0].words}{others}: its slots are not what its limit allows",
                    remedy="a worker of the queue corrects it within two minutes and records it (`fairlane audit`); if "
                    "it comes back, please report it with that entry",
                )
            ]
        if not counted.more:
            break
    return []


def about_bells(queue: str, counts: QueueCounts) -> Iterator[Finding]:
    if counts.bells > MANY_BELLS:
        yield Finding(
            check="bells pile up",
            queue=queue,
            message=f"{counts.bells:,} bells have not been folded: claims do not keep up, or nobody claims",
            remedy="start workers for this queue, or more of them",
        )


def about_figures(figures: Iterable[QueueFigures], now: Instant) -> Iterator[Finding]:
    """Stats that nobody adds up: every look has to, and takes longer and longer."""
    for each in figures:
        is_old = each.counted_at is not None and now - each.counted_at > FIGURES_LATE
        if each.uncounted >= MANY_TALLIES or (each.uncounted and is_old):
            known = (
                "none is" if each.counted_at is None else f"the last one that is was made at {_time(each.counted_at)}"
            )
            yield Finding(
                check="stats are behind",
                level=Level.WARNING,
                queue=each.queue,
                message=f"{each.uncounted:,} claims are not in the stored stats ({known}): what you see is right, but "
                "every look has to add them up",
                remedy="workers add them up, beside their jobs; start one for this queue, or look at the log of one",
            )


def about_standstills(
    found: Sequence[Standstill], policies: dict[str, Policy], minutes: dict[str, list[Minute]]
) -> Iterator[Finding]:
    """Jobs whose turn does not come, though their queue starts others."""
    for each in found:
        policy = policies[each.queue]
        if () in policy.overrides.pauses:
            continue
        queue = quote(each.queue)
        remedy = (
            f"keep what `fairlane explain --queue {queue}` says and report it; then let the queue be put in order "
            f"anew, with its limits in force throughout: fairlane pause {queue}; fairlane suspend {queue}; "
            f"fairlane unsuspend {queue}; fairlane resume {queue}"
        )
        if each.limit is None:
            who = key_words(dict(zip(policy.fair_by, each.key, strict=True))) or "the queue's only flow"
            message = f"{who} has jobs that could start, and no claim looks where it stands"
            yield Finding(check="stuck lane", queue=each.queue, message=message, remedy=remedy)
        elif each.since is not None and _has_started_since(minutes.get(each.queue, []), each.since):
            bound = policy.bound_named(each.limit)
            who = f" for {key_words(dict(zip(bound.limit.by, each.key, strict=True)))}" if bound and each.key else ""
            message = (
                f"{each.limit}{who} was to let {each.lanes:,} lanes go on at {_time(each.since)} and has not, while "
                "other jobs have started"
            )
            yield Finding(check="stuck lane", queue=each.queue, message=message, remedy=remedy)


def _has_started_since(minutes: Iterable[Minute], at: Instant) -> bool:
    """Whether claims have started something, well after that: where all slots are in use, nobody looks at any gate."""
    return any(each.started and each.minute * MINUTE > at + LONG_OVERDUE for each in minutes)


def _time(at: Instant) -> str:
    return f"{as_datetime(at - at % SECOND):%Y-%m-%d %H:%M:%S} UTC"


LATE = MINUTE
"""After which a slot that was not fired is told: workers fire within a second, and look again twice a minute."""


def about_schedules(rows: Iterable[ScheduleRow], time: QueueTime, *, has_worker: bool) -> Iterator[Finding]:
    """Slots that nobody fires. One that no worker has any more, although there are some, may have been removed."""
    for row in rows:
        if row.is_paused or row.next_at is None or time.wall - row.next_at <= LATE:
            continue
        due = f"{as_datetime(row.next_at - row.next_at % SECOND):%Y-%m-%d %H:%M:%S} UTC"
        is_removed = has_worker and row.is_orphaned(time.now)
        nobody = ": no worker has it any more" if row.is_orphaned(time.now) else ""
        pause = f"`fairlane schedules pause {quote(row.name)}`"
        yield Finding(
            check="overdue schedule",
            level=Level.NOTE if is_removed else Level.FAULT,
            queue=row.told()["queue"],
            message=f"schedule {row.name!r} was due at {due} and nobody has fired it{nobody}",
            remedy=f"start a worker whose program declares it, or look at the log of one; if it is to rest: {pause}",
        )


MOST_LOOKS = 20
"""Keys of one queue that are looked for among its jobs, and reported: a look at ten thousand jobs takes a while."""
MOST_TASKS = 200
TASK = ("task",)


@dataclass(frozen=True, slots=True)
class NamedKey:
    """Keys that somebody has named one by one, and the ids that a job with these keys leaves behind."""

    queue: str
    what: str
    scope: Scope
    flows: tuple[bytes, ...]
    gates: tuple[bytes, ...]


async def about_named_keys(store: Store, named: Sequence[NamedKey], found: Collection[bytes]) -> list[Finding]:
    """A weight, a limit or an override for a key of which there is no job: a slip of the pen, or a plan for later.
    `found` are the flows and gates that there are."""
    return [_no_job_carries(each) for each in await _without_jobs(store, named, found)]


async def about_tasks(
    store: Store, policies: Sequence[Policy], workers: Sequence[WorkerView], known: Collection[str] | None
) -> list[Finding]:
    """Tasks of waiting jobs of a queue, given by its partitions, that nobody knows: no live worker that serves it, or
    where there is none, not the app at hand. `known` are the tasks of that app."""
    names = [policy.queue for policy in policies]
    # Who reports no task at all says nothing about them.
    serving = [each for each in workers if each.tasks and not each.queues.keys().isdisjoint(names)]
    if not serving and known is None:
        return []
    findings: list[Finding] = []
    for task, jobs in sorted((await _waiting_by_task(store, policies[0], names)).items()):
        ignorant = sum(task not in each.tasks for each in serving)
        if ignorant == len(serving) and serving:
            who = "no worker that serves this queue knows it"
            findings.append(_unknown_task(names[0], task, jobs, who, Level.FAULT))
        elif ignorant:
            who = f"{ignorant} of {len(serving)} workers that serve this queue do not know it"
            findings.append(_unknown_task(names[0], task, jobs, who, Level.WARNING))
        elif not serving and known is not None and task not in known:
            findings.append(_unknown_task(names[0], task, jobs, "this app does not know it", Level.WARNING))
    return findings


async def _waiting_by_task(store: Store, policy: Policy, names: Sequence[str]) -> dict[str, int]:
    """How many jobs wait, by task, with those that are scheduled."""
    counts: dict[str, int] = {}
    if TASK in policy.scopes:
        page, scheduled = await store.ask(lambda moment: _by_task(moment, names))
        counts = {figures.key[0] or "": figures.waiting for _, figures in page.keys if figures.waiting}
        for lane in scheduled.lanes:
            task = lane.keys.get("task") or ""
            counts[task] = counts.get(task, 0) + lane.arrived
    return {task: count for task, count in counts.items() if task and count > 0}


def _by_task(moment: Moment, names: Sequence[str]) -> Looking[tuple[KeyPage, LanesCounted]]:
    page = yield from moment.list_keys(names, TASK, limit=MOST_TASKS)
    return page, (yield from moment.scheduled_by_lane(names))


def _unknown_task(queue: str, task: str, jobs: int, who: str, level: Level) -> Finding:
    waiting = "1 job waits" if jobs == 1 else f"{jobs:,} jobs wait"
    return Finding(
        check="unknown task",
        level=level,
        queue=queue,
        message=f"{waiting} for task {task!r}, and {who}",
        remedy="deploy code that registers it, under this name; or "
        f"`fairlane jobs cancel --queue {quote(queue)} --task {quote(task)} --dry-run`",
    )


def named_keys(policy: Policy) -> Iterator[NamedKey]:
    """Every key that the policy or an override names. All partitions have the same ones: they are named once."""
    if policy.partition is not None and policy.partition.index:
        return
    if policy.fair is not None:
        (name, *_) = policy.fair.by
        for value in policy.fair.weights:
            yield _named(policy, f"Fair gives {name}={value} a weight", ((name, value),))
    for bound in policy.bound:
        for value in bound.named or ():
            (name,) = bound.limit.by
            yield _named(policy, f"{bound.name} names {name}={value}", ((name, value),))
    for override in policy.overrides.all:
        # Any priority is possible, and none of them is a key that jobs are listed by.
        if override.scope and "priority" not in dict(override.scope) and without_place(policy, override) is None:
            yield _named(policy, f"an override says that {override.describe()}", override.scope)


def _named(policy: Policy, what: str, scope: Scope) -> NamedKey:
    keys = dict(scope)
    flow = tuple(keys[name] for name in policy.fair_by) if policy.is_flow(keys) else None
    limits = [bound for bound in policy.keyed_limits if set(bound.limit.by) == set(keys)]
    return NamedKey(
        policy.queue,
        what,
        scope,
        flows=() if flow is None else (flow_id(policy.queue, policy.fair_by, flow),),
        gates=(
            gate_id(policy.queue, pause_name(tuple(keys)), tuple(keys.values())),
            *(policy.gate_of(bound, tuple(keys[name] for name in bound.limit.by)) for bound in limits),
        ),
    )


async def _without_jobs(store: Store, named: Sequence[NamedKey], found: Collection[bytes]) -> list[NamedKey]:
    """Those that no job is known to carry: not where it waits or runs, and not among the newest jobs of the queue.

    Flows and gates are the cheap look. Idle ones are collected, and jobs that no claim has seen yet have none; so what
    they do not know is looked for among the jobs themselves.
    """
    unseen = [each for each in named if not any(id in found for id in (*each.flows, *each.gates))]
    return [each for each in unseen[:MOST_LOOKS] if not (await find_jobs(store, _jobs_with(each), None, 1)).jobs]


def _jobs_with(named: NamedKey) -> JobFilter:
    keys = dict(named.scope)
    return JobFilter(queue=named.queue, task=keys.pop("task", None), keys=keys)


def _no_job_carries(named: NamedKey) -> Finding:
    keys = ", ".join(f"{name}={value}" for name, value in named.scope)
    return Finding(
        check="key that no job carries",
        level=Level.NOTE,
        queue=named.queue,
        message=f"{named.what}, and no job with {keys} waits, runs, or is among the newest of the queue",
        remedy=f"compare with what jobs carry: `fairlane jobs list --queue {named.queue}`",
    )
