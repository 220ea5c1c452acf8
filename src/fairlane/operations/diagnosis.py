"""What is wrong and can be seen from outside: with policies, keys, queues, schedules, workers and the database. Looking
changes nothing.

Each check is bounded: it reads counts, policies with their overrides, single rows by their ids, and of the jobs at most
what one page of a listing looks at.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from shlex import quote
from typing import assert_never

from fairlane.clock import SECOND, Instant, as_datetime, lasting
from fairlane.errors import FairlaneError, SchemaTooNew, StoreUnavailable
from fairlane.operations.explanations import is_routed
from fairlane.operations.keys import MINUTE
from fairlane.operations.policies import Declarations, PolicyInForce, shown_policies
from fairlane.operations.requests import find_jobs, known_partitions
from fairlane.operations.views import BlockView, LongRunView, WorkerView
from fairlane.operations.workers import workers_at
from fairlane.policy.keys import By, flow_id, gate_id, key_words, select
from fairlane.policy.overrides import Scope, pause_name, without_place
from fairlane.policy.partitions import Phase, division, parse_partition, phase_of, way_to, whole_of, widths
from fairlane.policy.policy import Policy
from fairlane.scheduler.explain import forwarded_to_an_engine, no_service, start_command
from fairlane.stats.keys import Minute
from fairlane.store import health, schedules, upkeep
from fairlane.store.boards import QueueTime
from fairlane.store.health import Health, HorizonHolder, PostgresHealth, SqliteHealth, Standstill, TableHealth
from fairlane.store.operators import JobFilter
from fairlane.store.protocol import FOLD_AT_MOST, QueueCounts, Store
from fairlane.store.schedules import ScheduleRow
from fairlane.store.stats import Looking, Moment
from fairlane.store.stats_values import PUBLISHING, KeyPage, LanesCounted, QueueFigures, serves, unbegun_in


class Level(StrEnum):
    """How bad a finding is."""

    FAULT = "fault"
    """Jobs stand still, are lost in a crash, or run otherwise than somebody thinks."""
    WARNING = "warning"
    """It works now, and may not for long."""
    NOTE = "note"
    """Perhaps on purpose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that was found, and what to do about it."""

    check: str
    queue: str | None
    """`None`: it is about the database, or about a worker."""
    message: str
    remedy: str
    level: Level = Level.FAULT

    @property
    def words(self) -> str:
        """The message, with the queue that it is about."""
        return self.message if self.queue is None else f"{self.queue}: {self.message}"


def by_level(findings: Iterable[Finding]) -> list[Finding]:
    """The worst first."""
    order = list(Level)
    return sorted(findings, key=lambda each: order.index(each.level))


MOST_STANDSTILLS = 5
"""Of each queue and kind."""


async def diagnose(
    store: Store,
    declared: Declarations,
    tasks: Collection[str] | None,
    forwarded: Collection[str] | None,
) -> list[Finding]:
    """Look at a database and at every queue in it, at its workers, and at what the code declares; the worst first.
    `tasks` are those that the program at hand knows, if it is one that runs them; `forwarded`, the queues that it
    leaves to an engine, or `None` if there is no program at hand."""
    shown = await shown_policies(store, declared, with_partitions=True)
    policies = {each.queue: each.policy for each in shown if each.policy is not None}
    workers = (await store.ask(workers_at)).workers
    alive = [each for each in workers if each.takes_jobs]
    seen = {queue for each in workers if each.is_dispatcher for queue in each.queues}
    unserved: dict[bool | None, dict[str, int]] = {}
    findings = [*about_database(await store.health()), *about_workers(workers), *about_policies(shown)]
    figures = {each.queue: each for each in await store.ask(lambda moment: moment.survey(list(policies)))}
    for policy in policies.values():
        findings += await _about_one(store, policy, await store.counts(policy.queue))
        is_served = any(serves(each.queues, [policy.queue]) for each in alive)
        if not is_served and has_waiting(policy, figures[policy.queue]):
            was_seen = whole_of(policy.queue) in seen
            is_forwarded = forwarded_to_an_engine(policy.queue, forwarded, was_seen=was_seen)
            if is_forwarded is None:
                is_forwarded = await is_routed(store, policy.queue) or None
            stopping = sum(not each.is_late and serves(each.queues, [policy.queue]) for each in workers)
            unserved.setdefault(is_forwarded, {})[whole_of(policy.queue)] = stopping
    findings += about_service(unserved)
    unknown = await _about_tasks(store, policies, alive, tasks)
    findings += [*unknown, *about_reported_tasks(alive, unknown)]
    findings += await _about_all(store, policies, figures.values())
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


async def _about_all(store: Store, policies: dict[str, Policy], figures: Iterable[QueueFigures]) -> list[Finding]:
    names, now = list(policies), await store.now()
    overdue = now - LONG_OVERDUE
    found = await store.run(health.standstills(names, overdue, MOST_STANDSTILLS))
    minutes = await store.ask(lambda moment: moment.minutes(names, overdue)) if found else {}
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


def has_waiting(policy: Policy, figures: QueueFigures) -> bool:
    """Whether jobs of a queue wait for somebody to run them, or were running when their worker died."""
    return () not in policy.overrides.pauses and figures.ready + figures.lapsed > 0


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
    return any(each.started and each.number * MINUTE > at + LONG_OVERDUE for each in minutes)


def _time(at: Instant) -> str:
    return f"{as_datetime(at - at % SECOND):%Y-%m-%d %H:%M:%S} UTC"


LATE = MINUTE
"""After which a slot that was not fired is told: workers fire within a second, and look again twice a minute."""


def about_schedules(rows: Iterable[ScheduleRow], time: QueueTime, *, has_worker: bool) -> Iterator[Finding]:
    """Slots that nobody fires. One that no worker has any more, although there are some, may have been removed."""
    for row in rows:
        if row.is_paused or row.next_at is None or time.wall - row.next_at <= LATE:
            continue
        is_removed = has_worker and row.is_orphaned(time.now)
        nobody = ": no worker has it any more" if row.is_orphaned(time.now) else ""
        pause = f"`fairlane schedules pause {quote(row.name)}`"
        yield Finding(
            check="overdue schedule",
            level=Level.NOTE if is_removed else Level.FAULT,
            queue=row.declaration()["queue"],
            message=f"schedule {row.name!r} was due at {_time(row.next_at)} and nobody has fired it{nobody}",
            remedy=f"start a worker whose program declares it, or look at the log of one; if it is to rest: {pause}",
        )


MOST_LOOKS = 20
"""Keys of one queue that are looked for among its jobs, and reported: a look at ten thousand jobs takes a while."""
MOST_TASKS = 200
TASK = ("task",)


@dataclass(frozen=True, slots=True)
class NamedKey:
    """Keys that somebody has named one by one, and the flows and gates that a job with these keys leaves behind."""

    queue: str
    what: str
    scope: Scope
    flows: tuple[bytes, ...]
    gates: tuple[bytes, ...]
    by: By | None
    """The scope in which stats are kept by these keys, if they are."""


async def about_named_keys(store: Store, named: Sequence[NamedKey], found: Set[bytes]) -> list[Finding]:
    """A weight, a limit or an override for a key that no job is known to carry: a slip of the pen, or a plan for later.

    `found` are the flows and gates that there are: the cheap look. Idle ones are collected, and jobs that no claim has
    seen yet have none; so what they do not know is looked for among the jobs, with the newest of those that ended.
    """
    findings = []
    for each in [each for each in named if found.isdisjoint((*each.flows, *each.gates))][:MOST_LOOKS]:
        keys = dict(each.scope)
        wanted = JobFilter(queue=each.queue, task=keys.pop("task", None), keys=keys)
        page = await find_jobs(store, wanted, None, 1)
        is_carried = bool(page.jobs)
        if page.after is not None and not is_carried:
            names = await known_partitions(store, each.queue)
            is_carried = await store.ask(partial(_may_wait, named=each, names=names))
        if not is_carried:
            said = ", ".join(f"{name}={value}" for name, value in each.scope)
            findings.append(
                Finding(
                    check="key that no job carries",
                    level=Level.NOTE,
                    queue=each.queue,
                    message=f"{each.what}, and no job with {said} waits, runs, or is among the newest of the queue",
                    remedy=f"compare with what jobs carry: `fairlane jobs list --queue {each.queue}`",
                )
            )
    return findings


def _may_wait(moment: Moment, named: NamedKey, names: Sequence[str]) -> Looking[bool]:
    """Whether a job with these keys may wait or run that a look at the newest jobs did not come to: stats by key know
    all that are not scheduled."""
    if named.by is None:
        return True
    key = tuple(map(dict(named.scope).get, named.by))
    if (yield from moment.keys_named(names, [(named.by, key)])):
        return True
    later = yield from moment.scheduled_by_lane(names)
    return not later.is_all or any(select(named.by, lane.keys, lane.priority) == key for lane in later.lanes)


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
            who, level = "no worker that serves this queue knows it", Level.FAULT
        elif ignorant:
            who = f"{ignorant} of {len(serving)} workers that serve this queue do not know it"
            level = Level.WARNING
        elif not serving and known is not None and task not in known:
            who, level = "this app does not know it", Level.WARNING
        else:
            continue
        waiting = "1 job waits" if jobs == 1 else f"{jobs:,} jobs wait"
        findings.append(unknown_task(names[0], task, f"{waiting} for task {task!r}, and {who}", level))
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
        by=next((by for by in policy.scopes if set(by) == set(keys)), None),
    )


# The database and the workers. Pure: the store has looked.


LONG_OPEN = 10 * MINUTE
"""For a transaction beside a queue: claims walk over every row version that it keeps."""
VERY_LONG_OPEN = 60 * MINUTE
MANY_TRANSACTIONS = 1_000_000
MANY_DEAD, FAR_BEHIND, LONG_NOT_VACUUMED = 100_000, 10, 10 * MINUTE
CROWDED, FULL = 0.8, 0.95
MEGABYTE = 1 << 20
LARGE_WAL = 256 * MEGABYTE
LITTLE_SPACE, HARDLY_ANY_SPACE = 1_024 * MEGABYTE, 100 * MEGABYTE


def about_database(health: Health) -> Iterator[Finding]:
    match health:
        case PostgresHealth():
            yield from _settings(health.settings)
            yield from _autovacuum(health)
        case SqliteHealth():
            yield from _journal_mode(health)
        case _:
            assert_never(health)
    yield from about_pressure(health)


def about_pressure(health: Health) -> Iterator[Finding]:
    """What comes and goes: old transactions, connections, space. A brief look is enough for it."""
    match health:
        case PostgresHealth():
            yield from (finding for holder in health.holders for finding in _horizon(holder))
            yield from _connections(health)
        case SqliteHealth():
            yield from _file(health)
        case _:
            assert_never(health)


def about_time(time: QueueTime) -> Iterator[Finding]:
    """The clock was set back. Jobs run as they should, but the recorded times are ahead of it."""
    if time.ahead >= SECOND:
        yield _of_database(
            "queue time",
            f"the database's clock is {lasting(time.ahead / SECOND)} behind queue time: it was set back, and queue "
            "time went on; recorded times of jobs are ahead by as much",
            "no action needed; keep the machine's clock in sync (NTP), so that it is not set back again",
            Level.NOTE,
        )


def about_no_database(error: FairlaneError) -> Finding:
    """What kept us from looking at all, as a finding."""
    if isinstance(error, StoreUnavailable):
        remedy = error.remedy or "start it, or look at the way there: address, network, password"
        return _of_database("database", error.problem or str(error), remedy)
    remedy = "upgrade Fairlane on this machine" if isinstance(error, SchemaTooNew) else "run `fairlane migrate`"
    return _of_database("schema", str(error), remedy)


def _of_database(check: str, message: str, remedy: str, level: Level = Level.FAULT) -> Finding:
    return Finding(check=check, queue=None, message=message, remedy=remedy, level=level)


def _settings(settings: dict[str, str]) -> Iterator[Finding]:
    if settings.get("fsync") == "off":
        yield _of_database(
            "durability",
            "fsync is off: a crash of the machine may destroy the whole database",
            "set fsync = on in postgresql.conf, and reload",
        )
    if settings.get("full_page_writes") == "off":
        yield _of_database(
            "durability",
            "full_page_writes is off: a crash in the middle of a write may leave a broken page, unless the file system "
            "excludes that",
            "set full_page_writes = on in postgresql.conf, and reload",
            Level.WARNING,
        )
    if settings.get("synchronous_commit") == "off":
        yield _of_database(
            "durability",
            "synchronous_commit is off: what was enqueued or settled in the last moment before a crash may be lost",
            "set synchronous_commit = on for this role or database, unless that is intended",
            Level.WARNING,
        )


def _autovacuum(health: PostgresHealth) -> Iterator[Finding]:
    off = [name for name in ("autovacuum", "track_counts") if health.settings.get(name) == "off"]
    if off:
        yield _of_database(
            "autovacuum",
            f"{' and '.join(off)} off: dead rows pile up, and claims take longer and longer",
            f"set {' and '.join(f'{name} = on' for name in off)} in postgresql.conf, and reload",
        )
    for table in health.tables:
        if not table.is_vacuumed:
            yield _of_database(
                "autovacuum",
                f"autovacuum is switched off for fairlane.{table.name}: dead rows pile up in it",
                f"alter table fairlane.{table.name} reset (autovacuum_enabled)",
            )
        elif _is_far_behind(table):
            ago = "never" if table.vacuumed_for is None else f"{lasting(table.vacuumed_for / SECOND)} ago"
            yield _of_database(
                "autovacuum",
                f"fairlane.{table.name} has {table.dead:,} dead rows and is to be vacuumed at {table.due_at:,}; "
                f"it last was: {ago}",
                f"`vacuum fairlane.{table.name}`; give autovacuum more workers, or let it pause less "
                "(autovacuum_vacuum_cost_limit)",
                Level.WARNING,
            )


def _is_far_behind(table: TableHealth) -> bool:
    is_long_ago = table.vacuumed_for is None or table.vacuumed_for > LONG_NOT_VACUUMED
    return table.dead > max(MANY_DEAD, FAR_BEHIND * table.due_at) and is_long_ago


def _horizon(holder: HorizonHolder) -> Iterator[Finding]:
    """An old snapshot keeps every row version that has died since."""
    age = holder.open_for
    if age is None and holder.transactions < MANY_TRANSACTIONS:
        return
    if age is not None and age < LONG_OPEN:
        return
    since = f"{holder.transactions:,} transactions" if age is None else lasting(age / SECOND)
    pid = "" if holder.pid is None else f"pid {holder.pid}"
    about = ", ".join(each for each in (pid, holder.user, holder.state) if each)
    who = f"{holder.kind} {holder.name!r} ({about})"
    remedy = {
        "session": f"end it, if nobody needs it: select pg_terminate_backend({holder.pid}); "
        "idle_in_transaction_session_timeout ends those that were forgotten",
        "prepared transaction": f"rollback prepared '{holder.name}', or commit it",
    }.get(holder.kind, f"let its reader catch up, or select pg_drop_replication_slot('{holder.name}')")
    level = Level.FAULT if age is None or age >= VERY_LONG_OPEN else Level.WARNING
    message = f"{who} has held a snapshot for {since}: no row that has died since can be removed"
    yield _of_database("old transaction", message, remedy, level)


def _connections(health: PostgresHealth) -> Iterator[Finding]:
    for limit in health.connections:
        part = limit.used / limit.most if limit.most > 0 else 1.0
        if part >= CROWDED:
            yield _of_database(
                "connections",
                f"{limit.used:,} of {limit.most:,} connections are in use ({limit.setting}): new ones will soon "
                "be refused",
                "raise that limit, or let programs share connections; a worker process needs about ten",
                Level.FAULT if part >= FULL else Level.WARNING,
            )


def _journal_mode(health: SqliteHealth) -> Iterator[Finding]:
    if health.path is not None and health.journal_mode != "wal":
        yield _of_database(
            "journal mode",
            f"{health.path} is in journal mode {health.journal_mode!r}: readers block writers",
            "keep it on a local disk, where SQLite can share memory between processes",
        )


def _file(health: SqliteHealth) -> Iterator[Finding]:
    if health.path is None:
        return
    if health.wal_size > LARGE_WAL:
        others = f"; open in processes {', '.join(map(str, health.others))}" if health.others else ""
        yield _of_database(
            "write-ahead log",
            f"{health.path}-wal has {health.wal_size // MEGABYTE:,} MB: a reader that does not end keeps it from being "
            f"folded in{others}",
            "end that reader: a shell, a viewer, a transaction left open",
            Level.WARNING,
        )
    if health.free_space is not None and health.free_space < LITTLE_SPACE:
        yield _of_database(
            "disk space",
            f"{health.free_space // MEGABYTE:,} MB are left on the disk of {health.path}, which has "
            f"{(health.size + health.wal_size) // MEGABYTE:,} MB",
            "make room, or let finished jobs be removed sooner (keep_done, keep_dead)",
            Level.FAULT if health.free_space < HARDLY_ANY_SPACE else Level.WARNING,
        )


NAMED = 3
"""Workers that are named where more may be meant."""


def about_workers(workers: Sequence[WorkerView]) -> Iterator[Finding]:
    """Workers that have gone silent, loops that died or are blocked, long runs, what fails around them, clocks that
    differ."""
    served = {queue for each in workers if each.takes_jobs for queue in each.queues}
    for each in workers:
        if each.is_late:
            yield _late(each, sorted(set(each.queues) - served))
            continue
        dead = each.dead_loops
        for name, state in dead.items():
            yield Finding(
                check="dead loop",
                queue=None,
                message=f"worker {each.name}: its loop {name} died ({state})",
                remedy="restart it, and check its log",
            )
        if not each.is_well and not dead:
            yield Finding(
                check="unwell worker",
                queue=None,
                message=f"worker {each.name} reports that it is unhealthy",
                remedy="check its log, and restart it",
            )
        for block in each.blocks:
            yield _blocked(each, block)
        if each.lost_runs:
            yield Finding(
                check="lost run",
                level=Level.WARNING,
                queue=None,
                message=f"worker {each.name}: {each.lost_words}",
                remedy="a handler in a thread cannot be stopped: give its task a timeout on what it waits for, and "
                "restart the worker if it does not end",
            )
        for name, words in each.troubles.items():
            yield _trouble(each, name, words)
        if each.has_uneven_clock:
            yield Finding(
                check="clock skew",
                queue=None,
                message=f"the clock of worker {each.name} differs from the database's by {each.clock_offset:+.1f} s",
                remedy="synchronize both clocks (NTP)",
            )
    yield from _long_runs(run for each in workers for run in each.long_runs)


def unknown_tasks(workers: Iterable[WorkerView]) -> dict[tuple[str, str], list[WorkerView]]:
    """By queue and task, those live workers that were given jobs of a task and do not know it."""
    found: dict[tuple[str, str], list[WorkerView]] = {}
    for each in workers:
        for task, queue in each.unknown_tasks.items():
            found.setdefault((whole_of(queue), task), []).append(each)
    return found


def knows(workers: Iterable[WorkerView], queue: str, task: str) -> bool:
    """Whether one of these workers serves a queue and knows a task."""
    return any(task in each.tasks and queue in map(whole_of, each.queues) for each in workers)


def about_reported_tasks(workers: Iterable[WorkerView], told: Collection[Finding] = ()) -> Iterator[Finding]:
    """Tasks that workers say they do not know; without those that findings tell of already."""
    alive = [each for each in workers if each.takes_jobs]
    for (queue, task), ignorant in sorted(unknown_tasks(alive).items(), key=lambda each: each[0]):
        if any(each.queue == queue and f"task {task!r}" in each.message for each in told):
            continue
        is_known = knows(alive, queue, task)
        names = ", ".join(each.name for each in ignorant[:NAMED]) + (", …" if len(ignorant) > NAMED else "")
        who = f"worker {names} does not know it" if is_known else "no worker that serves this queue knows it"
        message = f"jobs of task {task!r} are given back again and again: {who}"
        yield unknown_task(queue, task, message, Level.WARNING if is_known else Level.FAULT)


def unknown_task(queue: str, task: str, message: str, level: Level) -> Finding:
    return Finding(
        check="unknown task",
        level=level,
        queue=queue,
        message=message,
        remedy="deploy code that registers it, under this name; or "
        f"`fairlane jobs cancel --queue {quote(queue)} --task {quote(task)} --dry-run`",
    )


def _blocked(worker: WorkerView, block: BlockView) -> Finding:
    since = f" since {block.since:%H:%M:%S} UTC" if block.until is None else f" until {block.until:%H:%M:%S} UTC"
    beside = f"; jobs stuck behind it: {', '.join(block.beside)}" if block.beside else ""
    meanwhile = "the leases of the worker are not renewed meanwhile, so what it runs may run twice"
    if block.pid is not None:
        meanwhile = "other processes run what has not started meanwhile"
    return Finding(
        check="blocked event loop",
        level=Level.FAULT if block.until is None else Level.WARNING,
        queue=None,
        message=f"worker {worker.name}: {block.words},{since}{beside}",
        remedy=f"make the task a plain `def`, which runs in a thread, or await what it waits for; {meanwhile}",
    )


def _long_runs(runs: Iterable[LongRunView]) -> Iterator[Finding]:
    """One finding for all that hold a limit of a queue, and for all of a task that hold none: the longest is named."""
    groups: dict[tuple[str, str], list[LongRunView]] = {}
    for run in sorted(runs, key=lambda run: run.since):
        groups.setdefault((whole_of(run.queue), run.limit or run.task), []).append(run)
    return (_long_run(longest, len(others)) for longest, *others in groups.values())


def _long_run(run: LongRunView, others: int) -> Finding:
    usual = "no run of its task has ended in this worker yet"
    if run.usual is not None:
        usual = f"95 of 100 runs of its task take at most {lasting(run.usual)}"
    holds = "" if run.limit is None else f"; it holds {run.limit}, for which others wait"
    more = "1 other" if others == 1 else f"{others:,} others"
    holds += f"; {more} {'of its task' if run.limit is None else 'hold it too'}, none for longer" if others else ""
    return Finding(
        check="long run",
        level=Level.WARNING,
        queue=whole_of(run.queue),
        message=f"job {run.job} ({run.task}) has run for {lasting(run.ran)}, since {run.since:%Y-%m-%d %H:%M:%S} UTC, "
        f"in worker {run.worker}: {usual}{holds}",
        remedy=f"see what it waits for; `fairlane jobs cancel {run.job}` asks it to stop; a timeout on the "
        "task prevents this",
    )


def _trouble(worker: WorkerView, name: str, words: str) -> Finding:
    if name == PUBLISHING:
        return Finding(
            check="broker refuses",
            queue=None,
            message=f"dispatcher {worker.name}: its broker refuses what it publishes ({words}); the jobs of "
            f"{', '.join(worker.queues)} wait in their place",
            remedy="check the broker; publishing is retried until it accepts messages",
        )
    if worker.is_dispatcher and name in map(unbegun_in, worker.queues):
        return Finding(
            check="unbegun jobs",
            level=Level.WARNING,
            queue=None,
            message=f"dispatcher {worker.name}: {words}",
            remedy="start a worker of the engine that consumes the queue, or check those that do",
        )
    return Finding(
        check="troubled worker",
        level=Level.WARNING,
        queue=None,
        message=f"worker {worker.name}: {name} fails ({words}); its jobs go on",
        remedy="check its log; it retries on its own",
    )


def _late(worker: WorkerView, alone: list[str]) -> Finding:
    """Once others serve all that it served, its death is past: it is told for as long as it is listed, and no more."""
    last = f"worker {worker.name} was last heard from at {worker.seen_at:%Y-%m-%d %H:%M:%S} UTC"
    if worker.is_replaced:
        return Finding(
            check="late worker",
            level=Level.NOTE,
            queue=None,
            message=f"{last}: it died, and others have taken its place",
            remedy="check its log if it was not meant to end; what it ran is run again once the leases end",
        )
    lost = f", and nobody else serves {', '.join(alone)}" if alone else ""
    return Finding(
        check="late worker",
        level=Level.FAULT if alone else Level.WARNING,
        queue=None,
        message=f"{last}{lost}: it died or is frozen",
        remedy="restart it; what it ran is run again once the leases end",
    )
