"""What is wrong and can be seen from outside: with policies, keys, queues, schedules, workers and the database. Looking
changes nothing.

Each check is bounded: it reads counts, policies with their overrides, single rows by their ids, and of the jobs at most
what one page of a listing looks at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from shlex import quote
from typing import NamedTuple, assert_never

from fairlane.clock import SECOND, Instant, as_datetime, lasting
from fairlane.errors import FairlaneError, SchemaTooNew, StoreUnavailable
from fairlane.operations.policies import Declarations, PolicyInForce, shown_policies
from fairlane.operations.requests import find_jobs
from fairlane.operations.views import LongRunView, QueueStatus, QueueView, WorkerView, jobs_left, jobs_wait
from fairlane.policy.keys import By, key_words, select
from fairlane.policy.overrides import Scope, without_place
from fairlane.policy.partitions import Phase, division, parse_partition, phase_of, way_to, whole_of, widths
from fairlane.policy.policy import Policy
from fairlane.scheduler.explain import start_command
from fairlane.stats.keys import MINUTE, Minute
from fairlane.store import health, schedules, upkeep
from fairlane.store.boards import QueueTime
from fairlane.store.health import Health, HorizonHolder, PostgresHealth, SqliteHealth, Standstill
from fairlane.store.operators import JobFilter
from fairlane.store.protocol import FOLD_AT_MOST, Store
from fairlane.store.schedules import ScheduleRow
from fairlane.store.stats import Looking, Moment
from fairlane.store.stats_values import PUBLISHING, QueueStats, unbegun_in


class Level(StrEnum):
    """How bad a finding is."""

    FAULT = "fault"
    """Jobs are stuck, can be lost in a crash, or do not run as declared."""
    WARNING = "warning"
    """It works now, and may not for long."""
    NOTE = "note"
    """Perhaps on purpose."""


@dataclass(frozen=True, slots=True)
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
    stats: Collection[QueueStats],
    views: Iterable[QueueView],
    workers: Sequence[WorkerView],
) -> list[Finding]:
    """Look at a database and at every queue in it, at its workers, and at what the code declares; the worst first.
    `tasks` are those that the program at hand knows, if it is one that runs them; `views` show each partition by
    itself."""
    shown = await shown_policies(store, declared, with_partitions=True)
    policies = {each.queue: each.policy for each in shown if each.policy is not None}
    time = await store.time()
    overdue = time.now - LONG_OVERDUE
    standing = await store.run(health.standstills(list(policies), overdue, MOST_STANDSTILLS))
    minutes = await store.ask(lambda moment: moment.minutes(list(policies), overdue)) if standing else {}
    rows = await store.run(schedules.schedules())
    findings = [
        *about_database(await store.health()),
        *about_workers(workers),
        *about_policies(shown),
        *about_stats(stats, time.now),
        *about_stopped(views),
        *about_standstills(standing, policies, minutes),
        *about_time(time),
        *about_schedules(rows, time, has_worker=any(each.takes_jobs for each in workers)),
    ]
    parts: dict[str, list[str]] = {}
    for queue in policies:
        findings += await _about_gates(store, queue)
        parts.setdefault(whole_of(queue), []).append(queue)
    unknown = about_reported_tasks(workers)
    for names in parts.values():
        findings += await _about_named_keys(store, names, policies[names[0]])
        unknown |= await _about_waiting_tasks(store, names, policies[names[0]], workers, tasks)
    return by_level([*findings, *unknown.values()])


async def findings_at_a_glance(store: Store, workers: Sequence[WorkerView]) -> list[Finding]:
    """What workers report and what presses the database: cheap enough for every look at an overview."""
    pressing = about_database(await store.health(brief=True))
    return by_level([*about_workers(workers), *about_reported_tasks(workers).values(), *pressing])


# Policies and keys.


def about_policies(shown: Iterable[PolicyInForce]) -> Iterator[Finding]:
    """Drift, wrong widths, changes that were broken off, overrides without effect."""
    by_queue = {each.queue: each for each in shown}
    for each in by_queue.values():
        is_partition = parse_partition(each.queue) is not None
        if each.policy is not None and not is_partition:
            yield from _partitions(each, each.policy)
            for override in each.policy.overrides.all:
                if (reason := without_place(each.policy, override)) is not None:
                    yield Finding(
                        "override without effect",
                        each.queue,
                        f"{override.describe()}, which changes nothing: {reason}",
                        "clear it with `fairlane resume`, `limit clear` or `weight clear`",
                        Level.WARNING,
                    )
        whole = by_queue.get(whole_of(each.queue))
        # Of partitions, what is not said of their queue.
        if whole is each or whole is None or not whole.is_drift:
            yield from _drift(each)


def _partitions(each: PolicyInForce, policy: Policy) -> Iterator[Finding]:
    """A queue on its way to another number of partitions, or divided otherwise than the code says."""
    if phase_of(policy) is not Phase.RESTING:
        (before, to), place = widths(policy), policy.partition
        remedy = f"let that end: workers go on with it, and so does `fairlane partition {each.queue} --to {to}`"
        is_abandoned = place is not None and place.is_abandoned
        if not is_abandoned:
            remedy += f"; to give it up: `fairlane partition {each.queue} --to {before} --abandon`"
        message = f"it is on its way {'back ' if is_abandoned else ''}from {before} to {to} partitions: keys that move "
        yield Finding("partitions", each.queue, f"{message}stand still", remedy)
    if each.declared is not None and each.is_divided_otherwise:
        (has, has_by), (wants, wants_by) = division(policy), division(each.declared)
        yield Finding(
            "partitions",
            each.queue,
            f"it has {has} (by {', '.join(has_by) or 'no key'}), and the code declares {wants} (by "
            f"{', '.join(wants_by) or 'no key'}): programs with this code send and serve jobs by the stored number",
            f"declare it as it is, or change the queue: {way_to(policy, each.declared)}",
            Level.WARNING,
        )


def _drift(each: PolicyInForce) -> Iterator[Finding]:
    if each.declared is None or (each.policy is not None and not each.drift):
        return
    message = "the code declares it, and this database does not know it"
    if each.policy is not None:
        changes = "; ".join(difference.describe() for difference in each.drift)
        message = f"the code declares another policy than version {each.version}, which is in force: {changes}"
    yield Finding("drift", each.queue, message, "`fairlane policy apply` puts the declared one in force")


MOST_LOOKS = 20
"""Keys of one queue that are looked for among its jobs, and reported: a look at ten thousand jobs takes a while."""


class _NamedKey(NamedTuple):
    """Keys that a policy or an override names one by one."""

    what: str
    scope: Scope
    by: By | None
    """The scope in which stats are kept by these keys, if they are."""

    @property
    def place(self) -> tuple[By, tuple[str | None, ...]]:
        return self.by or (), tuple(map(dict(self.scope).get, self.by or ()))


def _named_keys(policy: Policy) -> Iterator[_NamedKey]:
    scopes = {frozenset(by): by for by in reversed(policy.scopes)}
    named: list[tuple[str, Scope]] = []
    if policy.fair is not None:
        (name, *_) = policy.fair.by
        named += [(f"Fair gives {name}={value} a weight", ((name, value),)) for value in policy.fair.weights]
    for bound in policy.bound:
        for value in bound.named or ():
            (name,) = bound.limit.by
            named.append((f"{bound.name} names {name}={value}", ((name, value),)))
    for override in policy.overrides.all:
        # Any priority is possible, and none of them is a key that jobs are listed by.
        if override.scope and "priority" not in dict(override.scope) and without_place(policy, override) is None:
            named.append((f"an override says that {override.describe()}", override.scope))
    for what, scope in named:
        yield _NamedKey(what, scope, scopes.get(frozenset(dict(scope))))


async def _about_named_keys(store: Store, names: Sequence[str], policy: Policy) -> list[Finding]:
    """A weight, a limit or an override for a key that no job is known to carry: a slip of the pen, or a plan for later.

    Stats by key know all jobs that wait or run, or have ended lately. What they do not know is looked for among the
    newest jobs that have ended.
    """
    named = list(_named_keys(policy))
    places = list(dict.fromkeys(each.place for each in named if each.by is not None))
    known, is_all = await store.ask(partial(_carried, names=names, places=places)) if named else (set(), True)
    findings = []
    for each in [each for each in named if each.place not in known][:MOST_LOOKS]:
        keys = dict(each.scope)
        page = await find_jobs(store, JobFilter(queue=names[0], task=keys.pop("task", None), keys=keys), None, 1)
        # A bounded look says nothing of older jobs. Stats would know them, if they waited.
        may_wait = page.after is not None and (each.by is None or not is_all)
        if not page.jobs and not may_wait:
            said = ", ".join(f"{name}={value}" for name, value in each.scope)
            message = f"{each.what}, and no job with {said} waits, runs, or is among the newest of the queue"
            remedy = f"compare with what jobs carry: `fairlane jobs list --queue {names[0]}`"
            findings.append(Finding("key that no job carries", names[0], message, remedy, Level.NOTE))
    return findings


def _carried(
    moment: Moment, *, names: Sequence[str], places: Sequence[tuple[By, tuple[str | None, ...]]]
) -> Looking[tuple[set[tuple[By, tuple[str | None, ...]]], bool]]:
    """Of these keys, those that stats know or scheduled jobs carry; and whether all scheduled jobs were looked at."""
    known = {(stats.by, stats.key) for _, stats in (yield from moment.keys_named(names, places))}
    later = yield from moment.scheduled_by_lane(names)
    scopes = {by for by, _ in places}
    known |= {(by, select(by, lane.keys, lane.priority)) for by in scopes for lane in later.lanes}
    return known, later.is_all


# Queues.


MANY_EVENTS = 10 * FOLD_AT_MOST
"""More than ten claims fold: claims do not keep up, or nobody claims."""
MANY_UNADDED = 1_000
STATS_LATE = 5 * MINUTE
GATES_AT_ONCE, MOST_STRETCHES = 1_000, 20
"""Gates that are held against the running jobs: of a queue with more, the next look goes on."""
LONG_OVERDUE = 10 * MINUTE
"""After which a gate that has not woken its lanes is reported."""
LATE = MINUTE
"""After which a slot that was not fired is reported: workers fire within a second, and look again twice a minute."""


def about_stopped(views: Iterable[QueueView]) -> Iterator[Finding]:
    """Queues with jobs to run and no worker or dispatcher. There is one finding, with one command, for all queues that
    an engine runs, and one for all that Fairlane's workers run."""
    stopped: dict[bool | None, list[QueueView]] = {}
    for each in views:
        if each.status is QueueStatus.STOPPED and each.refusal is None and (each.ready or each.is_left):
            stopped.setdefault(each.is_forwarded, []).append(each)
    for is_forwarded, several in stopped.items():
        names = list(dict.fromkeys(whole_of(each.queue) for each in several))
        who = "dispatcher" if is_forwarded else "worker"
        message = several[0].words
        if len(names) > 1:
            left = jobs_left(sum(each.ready for each in several), sum(each.lapsed for each in several))
            message = f"{', '.join(names)}: no {who} serves these queues: {left}"
        remedy = start_command(*names, is_forwarded=is_forwarded)
        yield Finding(f"no {who}", None if len(names) > 1 else names[0], message, remedy)


async def _about_gates(store: Store, queue: str) -> list[Finding]:
    """Gates that count jobs which do not run, or do not count jobs that do."""
    for _ in range(MOST_STRETCHES):
        counted = await store.run(upkeep.count_gates(queue, GATES_AT_ONCE))
        if counted.found:
            others = f" (and {len(counted.found) - 1} more)" if len(counted.found) > 1 else ""
            message = f"{counted.found[0].words}{others}: its slots are not what its limit allows"
            remedy = (
                "a worker of the queue corrects it within two minutes and records it (`fairlane audit`); if it comes "
                "back, please report it with that entry"
            )
            return [Finding("a gate is miscounted", queue, message, remedy)]
        if not counted.more:
            break
    return []


def about_stats(stats: Iterable[QueueStats], now: Instant) -> Iterator[Finding]:
    """Unfolded events and unsummed stats: every reader has to add them up, which takes longer and longer."""
    for each in stats:
        if each.events > MANY_EVENTS:
            message = f"{each.events:,} lane events have not been folded: claims do not keep up, or nobody claims"
            yield Finding("lane events pile up", each.queue, message, "start workers for this queue, or more of them")
        is_old = each.counted_at is not None and now - each.counted_at > STATS_LATE
        if each.uncounted >= MANY_UNADDED or (each.uncounted and is_old):
            known = f"the last one that is was made at {_time(each.counted_at)}" if each.counted_at else "none is"
            yield Finding(
                "stats are behind",
                each.queue,
                f"{each.uncounted:,} claims are not in the stored stats ({known}): what you see is right, but every "
                "look has to add them up",
                "workers add them up, beside their jobs; start one for this queue, or look at the log of one",
                Level.WARNING,
            )


def about_standstills(
    found: Sequence[Standstill], policies: dict[str, Policy], minutes: dict[str, list[Minute]]
) -> Iterator[Finding]:
    """Jobs whose turn does not come, though their queue starts others."""
    for each in found:
        policy, queue = policies[each.queue], quote(each.queue)
        if () in policy.overrides.pauses:
            continue
        bound = None if each.limit is None else policy.bound_named(each.limit)
        by = policy.fair_by if each.limit is None else () if bound is None else bound.limit.by
        who = key_words(dict(zip(by, each.key, strict=True))) if by else ""
        if each.limit is None:
            flow = who or "the queue's only flow"
            message = f"{flow} has jobs that could start, and no claim looks where it stands"
        elif each.since is not None and _has_started_since(minutes.get(each.queue, []), each.since):
            message = (
                f"{each.limit}{f' for {who}' if who else ''} was to let {each.lanes:,} lanes go on at "
                f"{_time(each.since)} and has not, while other jobs have started"
            )
        else:
            continue
        remedy = (
            f"keep what `fairlane explain --queue {queue}` says and report it; then let the queue be put in order "
            f"anew, with its limits in force throughout: fairlane pause {queue}; fairlane suspend {queue}; "
            f"fairlane unsuspend {queue}; fairlane resume {queue}"
        )
        yield Finding("stuck lane", each.queue, message, remedy)


def _has_started_since(minutes: Iterable[Minute], at: Instant) -> bool:
    """Whether claims have started jobs well after that time: while all slots are in use, no gate is looked at."""
    return any(each.started and each.number * MINUTE > at + LONG_OVERDUE for each in minutes)


def _time(at: Instant) -> str:
    return f"{as_datetime(at - at % SECOND):%Y-%m-%d %H:%M:%S} UTC"


def about_schedules(rows: Iterable[ScheduleRow], time: QueueTime, *, has_worker: bool) -> Iterator[Finding]:
    """Overdue slots. A schedule that no live worker declares may have been removed from the program."""
    for row in rows:
        if row.is_paused or row.next_at is None or time.wall - row.next_at <= LATE:
            continue
        is_orphaned = row.is_orphaned(time.now)
        nobody = ": no worker has it any more" if is_orphaned else ""
        pause = f"`fairlane schedules pause {quote(row.name)}`"
        yield Finding(
            "overdue schedule",
            row.declaration()["queue"],
            f"schedule {row.name!r} was due at {_time(row.next_at)} and nobody has fired it{nobody}",
            f"start a worker whose program declares it, or look at the log of one; if it is to rest: {pause}",
            Level.NOTE if has_worker and is_orphaned else Level.FAULT,
        )


# Tasks that nobody knows.


MOST_TASKS = 200
TASK = ("task",)
Unknown = dict[tuple[str, str], Finding]
"""Findings about unknown tasks, by queue and task."""


async def _about_waiting_tasks(
    store: Store, names: Sequence[str], policy: Policy, workers: Sequence[WorkerView], known: Collection[str] | None
) -> Unknown:
    """Tasks of waiting jobs of a queue, given by its partitions, that no live worker which serves it knows, or where
    there is none, not the app at hand. `known` are the tasks of that app."""
    # Who reports no task at all says nothing about them.
    serving = [each for each in workers if each.takes_jobs and each.tasks and not each.queues.keys().isdisjoint(names)]
    if TASK not in policy.scopes or (not serving and known is None):
        return {}
    found: Unknown = {}
    for task, jobs in (await store.ask(partial(_waiting_by_task, names=names))).items():
        ignorant = sum(task not in each.tasks for each in serving)
        level = Level.FAULT if serving and ignorant == len(serving) else Level.WARNING
        if ignorant == len(serving) and serving:
            who = "no worker that serves this queue knows it"
        elif ignorant:
            who = f"{ignorant} of {len(serving)} workers that serve this queue do not know it"
        elif not serving and known is not None and task not in known:
            who = "this app does not know it"
        else:
            continue
        found[names[0], task] = _unknown_task(names[0], task, f"{jobs_wait(jobs)} for task {task!r}, and {who}", level)
    return found


def _waiting_by_task(moment: Moment, *, names: Sequence[str]) -> Looking[Counter[str]]:
    """How many jobs wait, by task, with those that are scheduled."""
    counts = Counter[str]()
    for _, stats in (yield from moment.list_keys(names, TASK, limit=MOST_TASKS)).keys:
        counts[stats.key[0] or ""] += stats.waiting
    for lane in (yield from moment.scheduled_by_lane(names)).lanes:
        counts[lane.keys.get("task") or ""] += lane.arrived
    return Counter({task: count for task, count in sorted(counts.items()) if task and count > 0})


def about_reported_tasks(workers: Iterable[WorkerView]) -> Unknown:
    """Tasks that workers say they do not know."""
    alive = [each for each in workers if each.takes_jobs]
    ignorant: dict[tuple[str, str], list[str]] = {}
    for each in alive:
        for task, queue in each.unknown_tasks.items():
            ignorant.setdefault((whole_of(queue), task), []).append(each.name)
    found: Unknown = {}
    for (queue, task), workers_of in sorted(ignorant.items()):
        is_known = any(task in each.tasks and queue in map(whole_of, each.queues) for each in alive)
        names = ", ".join(workers_of[:NAMED]) + (", …" if len(workers_of) > NAMED else "")
        who = f"worker {names} does not know it" if is_known else "no worker that serves this queue knows it"
        message = f"jobs of task {task!r} are given back again and again: {who}"
        found[queue, task] = _unknown_task(queue, task, message, Level.WARNING if is_known else Level.FAULT)
    return found


def _unknown_task(queue: str, task: str, message: str, level: Level) -> Finding:
    cancel = f"`fairlane jobs cancel --queue {quote(queue)} --task {quote(task)} --dry-run`"
    return Finding(
        "unknown task", queue, message, f"deploy code that registers it, under this name; or {cancel}", level
    )


# The database. Pure: the store has looked.


LONG_OPEN = 10 * MINUTE
"""For a transaction beside a queue: claims walk over every row version that it keeps."""
VERY_LONG_OPEN = 60 * MINUTE
MANY_TRANSACTIONS = 1_000_000
MANY_DEAD, FAR_BEHIND, LONG_NOT_VACUUMED = 100_000, 10, 10 * MINUTE
CROWDED, FULL = 0.8, 0.95
MEGABYTE = 1 << 20
LARGE_WAL = 256 * MEGABYTE
LITTLE_SPACE, HARDLY_ANY_SPACE = 1_024 * MEGABYTE, 100 * MEGABYTE
DURABILITY = (
    ("fsync", "a crash of the machine may destroy the whole database", "in postgresql.conf, and reload", Level.FAULT),
    (
        "full_page_writes",
        "a crash in the middle of a write may leave a broken page, unless the file system excludes that",
        "in postgresql.conf, and reload",
        Level.WARNING,
    ),
    (
        "synchronous_commit",
        "what was enqueued or settled in the last moment before a crash may be lost",
        "for this role or database, unless that is intended",
        Level.WARNING,
    ),
)
"""Settings that must not be off, each with what may happen otherwise, and where to set it."""


def about_database(health: Health) -> Iterator[Finding]:
    """Settings, vacuum, old transactions, connections, space: as much of it as was looked at."""
    match health:
        case PostgresHealth():
            for name, danger, where, level in DURABILITY:
                if health.settings.get(name) == "off":
                    yield Finding("durability", None, f"{name} is off: {danger}", f"set {name} = on {where}", level)
            yield from _autovacuum(health)
            yield from (finding for holder in health.holders for finding in _horizon(holder))
            yield from _connections(health)
        case SqliteHealth():
            yield from _file(health)
        case _:
            assert_never(health)


def about_time(time: QueueTime) -> Iterator[Finding]:
    """The clock was set back. Jobs run as they should, but the recorded times are ahead of it."""
    if time.ahead >= SECOND:
        yield Finding(
            "queue time",
            None,
            f"the database's clock is {lasting(time.ahead / SECOND)} behind queue time: it was set back, and queue "
            "time went on; recorded times of jobs are ahead by as much",
            "no action needed; keep the machine's clock in sync (NTP), so that it is not set back again",
            Level.NOTE,
        )


def about_no_database(error: FairlaneError) -> Finding:
    """What kept us from looking at all, as a finding."""
    if isinstance(error, StoreUnavailable):
        remedy = error.remedy or "start it, or look at the way there: address, network, password"
        return Finding("database", None, error.problem or str(error), remedy)
    remedy = "upgrade Fairlane on this machine" if isinstance(error, SchemaTooNew) else "run `fairlane migrate`"
    return Finding("schema", None, str(error), remedy)


def _autovacuum(health: PostgresHealth) -> Iterator[Finding]:
    off = [name for name in ("autovacuum", "track_counts") if health.settings.get(name) == "off"]
    if off:
        message = f"{' and '.join(off)} off: dead rows pile up, and claims take longer and longer"
        on = " and ".join(f"{name} = on" for name in off)
        yield Finding("autovacuum", None, message, f"set {on} in postgresql.conf, and reload")
    for table in health.tables:
        is_long_ago = table.vacuumed_for is None or table.vacuumed_for > LONG_NOT_VACUUMED
        if not table.is_vacuumed:
            message = f"autovacuum is switched off for fairlane.{table.name}: dead rows pile up in it"
            yield Finding("autovacuum", None, message, f"alter table fairlane.{table.name} reset (autovacuum_enabled)")
        elif table.dead > max(MANY_DEAD, FAR_BEHIND * table.due_at) and is_long_ago:
            ago = "never" if table.vacuumed_for is None else f"{lasting(table.vacuumed_for / SECOND)} ago"
            yield Finding(
                "autovacuum",
                None,
                f"fairlane.{table.name} has {table.dead:,} dead rows and is to be vacuumed at {table.due_at:,}; "
                f"it last was: {ago}",
                f"`vacuum fairlane.{table.name}`; give autovacuum more workers, or let it pause less "
                "(autovacuum_vacuum_cost_limit)",
                Level.WARNING,
            )


def _horizon(holder: HorizonHolder) -> Iterator[Finding]:
    """An old snapshot keeps every row version that has died since."""
    age = holder.open_for
    if holder.transactions < MANY_TRANSACTIONS if age is None else age < LONG_OPEN:
        return
    since = f"{holder.transactions:,} transactions" if age is None else lasting(age / SECOND)
    pid = "" if holder.pid is None else f"pid {holder.pid}"
    about = ", ".join(each for each in (pid, holder.user, holder.state) if each)
    remedy = {
        "session": f"end it, if nobody needs it: select pg_terminate_backend({holder.pid}); "
        "idle_in_transaction_session_timeout ends those that were forgotten",
        "prepared transaction": f"rollback prepared '{holder.name}', or commit it",
    }.get(holder.kind, f"let its reader catch up, or select pg_drop_replication_slot('{holder.name}')")
    yield Finding(
        "old transaction",
        None,
        f"{holder.kind} {holder.name!r} ({about}) has held a snapshot for {since}: no row that has died since can be "
        "removed",
        remedy,
        Level.FAULT if age is None or age >= VERY_LONG_OPEN else Level.WARNING,
    )


def _connections(health: PostgresHealth) -> Iterator[Finding]:
    for limit in health.connections:
        part = limit.used / limit.most if limit.most > 0 else 1.0
        if part >= CROWDED:
            yield Finding(
                "connections",
                None,
                f"{limit.used:,} of {limit.most:,} connections are in use ({limit.setting}): new ones will soon be "
                "refused",
                "raise that limit, or let programs share connections; a worker process needs about ten",
                Level.FAULT if part >= FULL else Level.WARNING,
            )


def _file(health: SqliteHealth) -> Iterator[Finding]:
    if health.path is None:
        return
    if health.journal_mode != "wal":
        message = f"{health.path} is in journal mode {health.journal_mode!r}: readers block writers"
        remedy = "keep it on a local disk, where SQLite can share memory between processes"
        yield Finding("journal mode", None, message, remedy)
    if health.wal_size > LARGE_WAL:
        others = f"; open in processes {', '.join(map(str, health.others))}" if health.others else ""
        yield Finding(
            "write-ahead log",
            None,
            f"{health.path}-wal has {health.wal_size // MEGABYTE:,} MB: a reader that does not end keeps it from being "
            f"folded in{others}",
            "end that reader: a shell, a viewer, a transaction left open",
            Level.WARNING,
        )
    if health.free_space is not None and health.free_space < LITTLE_SPACE:
        yield Finding(
            "disk space",
            None,
            f"{health.free_space // MEGABYTE:,} MB are left on the disk of {health.path}, which has "
            f"{(health.size + health.wal_size) // MEGABYTE:,} MB",
            "make room, or let finished jobs be removed sooner (keep_done, keep_dead)",
            Level.FAULT if health.free_space < HARDLY_ANY_SPACE else Level.WARNING,
        )


# Workers.


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
            message = f"worker {each.name}: its loop {name} died ({state})"
            yield Finding("dead loop", None, message, "restart it, and check its log")
        if not each.is_well and not dead:
            message = f"worker {each.name} reports that it is unhealthy"
            yield Finding("unwell worker", None, message, "check its log, and restart it")
        yield from _blocked(each)
        if each.lost_runs:
            remedy = (
                "a handler in a thread cannot be stopped: give its task a timeout on what it waits for, and restart "
                "the worker if it does not end"
            )
            yield Finding("lost run", None, f"worker {each.name}: {each.lost_words}", remedy, Level.WARNING)
        for name, words in each.warnings.items():
            yield _trouble(each, name, words)
        if each.has_uneven_clock:
            message = f"the clock of worker {each.name} differs from the database's by {each.clock_offset:+.1f} s"
            yield Finding("clock skew", None, message, "synchronize both clocks (NTP)")
    yield from _long_runs(run for each in workers for run in each.long_runs)


def _late(worker: WorkerView, alone: list[str]) -> Finding:
    """Once others serve all that it served, its death is past: it is reported for as long as it is listed."""
    message = f"worker {worker.name} was last heard from at {worker.seen_at:%Y-%m-%d %H:%M:%S} UTC"
    again = "what it ran is run again once the leases end"
    if worker.is_replaced:
        message += ": it died, and others have taken its place"
        return Finding("late worker", None, message, f"check its log if it was not meant to end; {again}", Level.NOTE)
    message += f", and nobody else serves {', '.join(alone)}" if alone else ""
    message += ": it died or is frozen"
    return Finding("late worker", None, message, f"restart it; {again}", Level.FAULT if alone else Level.WARNING)


def _blocked(worker: WorkerView) -> Iterator[Finding]:
    for block in worker.blocks:
        since = f" since {block.since:%H:%M:%S} UTC" if block.until is None else f" until {block.until:%H:%M:%S} UTC"
        beside = f"; jobs stuck behind it: {', '.join(block.beside)}" if block.beside else ""
        meanwhile = "the leases of the worker are not renewed meanwhile, so what it runs may run twice"
        if block.pid is not None:
            meanwhile = "other processes run what has not started meanwhile"
        yield Finding(
            "blocked event loop",
            None,
            f"worker {worker.name}: {block.words},{since}{beside}",
            f"make the task a plain `def`, which runs in a thread, or await what it waits for; {meanwhile}",
            Level.FAULT if block.until is None else Level.WARNING,
        )


def _long_runs(runs: Iterable[LongRunView]) -> Iterator[Finding]:
    """One finding for all that hold a limit of a queue, and for all of a task that hold none: the longest is named."""
    groups: dict[tuple[str, str], list[LongRunView]] = {}
    for run in sorted(runs, key=lambda run: run.since):
        groups.setdefault((whole_of(run.queue), run.limit or run.task), []).append(run)
    for (queue, _), (run, *others) in groups.items():
        usual = "no run of its task has ended in this worker yet"
        if run.usual is not None:
            usual = f"95 of 100 runs of its task take at most {lasting(run.usual)}"
        holds = "" if run.limit is None else f"; it holds {run.limit}, for which others wait"
        more = "1 other" if len(others) == 1 else f"{len(others):,} others"
        holds += f"; {more} {'of its task' if run.limit is None else 'hold it too'}, none for longer" if others else ""
        yield Finding(
            "long run",
            queue,
            f"job {run.job} ({run.task}) has run for {lasting(run.ran)}, since {run.since:%Y-%m-%d %H:%M:%S} UTC, in "
            f"worker {run.worker}: {usual}{holds}",
            f"see what it waits for; `fairlane jobs cancel {run.job}` asks it to stop; a timeout on the task prevents "
            "this",
            Level.WARNING,
        )


def _trouble(worker: WorkerView, name: str, words: str) -> Finding:
    if name == PUBLISHING:
        message = f"dispatcher {worker.name}: its broker refuses what it publishes ({words}); the jobs of "
        remedy = "check the broker; publishing is retried until it accepts messages"
        return Finding("broker refuses", None, f"{message}{', '.join(worker.queues)} wait in their place", remedy)
    if worker.is_dispatcher and name in map(unbegun_in, worker.queues):
        remedy = "start a worker of the engine that consumes the queue, or check those that do"
        return Finding("unbegun jobs", None, f"dispatcher {worker.name}: {words}", remedy, Level.WARNING)
    message = f"worker {worker.name}: {name} fails ({words}); its jobs go on"
    return Finding("troubled worker", None, message, "check its log; it retries on its own", Level.WARNING)
