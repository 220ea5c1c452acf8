"""What is wrong with the database itself, as far as it tells. Pure: the store has looked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_never

from fairlane.clock import SECOND, lasting
from fairlane.errors import FairlaneError, SchemaTooNew, StoreUnavailable
from fairlane.operations.findings import Finding, Level
from fairlane.store.health import Health, HorizonHolder, PostgresHealth, SqliteHealth, TableHealth
from fairlane.store.queue_time import QueueTime

__all__ = ["about_database", "about_no_database", "about_pressure", "about_time"]

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
