"""What is wrong with the database itself, as far as it tells. Pure: the store has looked."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from shlex import quote
from typing import assert_never

from fairlane.clock import SECOND, lasting
from fairlane.errors import FairlaneError, SchemaTooNew, StoreUnavailable
from fairlane.operations.findings import Finding, Level
from fairlane.operations.views import BlockView, LongRunView, WorkerView
from fairlane.policy.partitions import whole_of
from fairlane.store.boards import QueueTime
from fairlane.store.health import Health, HorizonHolder, PostgresHealth, SqliteHealth, TableHealth
from fairlane.store.stats_values import PUBLISHING, unbegun_in

MINUTE, HOUR = 60 * SECOND, 3_600 * SECOND
LONG_OPEN = 10 * MINUTE
"""For a transaction beside a queue: claims walk over every row version that it keeps."""
VERY_LONG_OPEN = HOUR
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
        yield Finding(
            check="unknown task",
            level=Level.WARNING if is_known else Level.FAULT,
            queue=queue,
            message=f"jobs of task {task!r} are given back again and again: {who}",
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
