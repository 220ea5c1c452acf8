"""What the doctor makes of what it is told: each check red and green, on made-up facts."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from fairlane.clock import SECOND
from fairlane.errors import SchemaOutOfDate, SchemaTooNew, StoreUnavailable
from fairlane.operations import about_no_database
from fairlane.operations.diagnosis import (
    Finding,
    Level,
    about_database,
    about_schedules,
    about_standstills,
    about_stats,
    about_time,
    about_workers,
    by_level,
)
from fairlane.operations.views import WorkerView
from fairlane.policy import Concurrency, Fair, Policy, Rate
from fairlane.stats.keys import Minute
from fairlane.store.boards import QueueTime
from fairlane.store.health import (
    ConnectionLimit,
    HorizonHolder,
    PostgresHealth,
    SqliteHealth,
    Standstill,
    TableHealth,
)
from fairlane.store.schedules import ScheduleRow
from fairlane.store.stats_values import PUBLISHING, Counted, QueueStats

MINUTE, HOUR, MEGABYTE = 60 * SECOND, 3_600 * SECOND, 1 << 20
NOW = 1_000_000 * MINUTE
SERVER = PostgresHealth(
    settings={
        "autovacuum": "on",
        "fsync": "on",
        "full_page_writes": "on",
        "synchronous_commit": "on",
        "track_counts": "on",
    },
    connections=[ConnectionLimit(setting="max_connections", used=70, most=97)],
    tables=[],
    holders=[],
)
TABLE = TableHealth(name="flows", live=10, dead=2_000_000, due_at=2_000, is_vacuumed=True, vacuumed_for=HOUR)
HOLDER = HorizonHolder(
    kind="session", name="report", pid=77, user="ada", state="idle in transaction", open_for=HOUR, transactions=9
)
FILE = SqliteHealth(
    path="shop.db", journal_mode="wal", size=10 * MEGABYTE, wal_size=16 * MEGABYTE, free_space=1 << 40, others=[7]
)


def changed(value: Any, **fields: Any) -> Any:
    return msgspec.structs.replace(value, **fields)


def setting(name: str) -> Any:
    return changed(SERVER, settings=SERVER.settings | {name: "off"})


def table(**fields: Any) -> Any:
    return changed(SERVER, tables=[changed(TABLE, **fields)])


def holder(**fields: Any) -> Any:
    return changed(SERVER, holders=[changed(HOLDER, **fields)])


def connections(used: int) -> Any:
    return changed(SERVER, connections=[ConnectionLimit(setting="max_connections", used=used, most=100)])


@pytest.mark.parametrize(
    ("health", "level", "check", "said", "remedy"),
    [
        (setting("fsync"), "fault", "durability", "fsync is off", "fsync = on"),
        (setting("full_page_writes"), "warning", "durability", "full_page_writes is off", "full_page_writes = on"),
        (setting("synchronous_commit"), "warning", "durability", "may be lost", "synchronous_commit = on"),
        (setting("autovacuum"), "fault", "autovacuum", "autovacuum off", "autovacuum = on"),
        (setting("track_counts"), "fault", "autovacuum", "track_counts off", "track_counts = on"),
        (
            table(is_vacuumed=False),
            "fault",
            "autovacuum",
            "switched off for fairlane.flows",
            "reset (autovacuum_enabled)",
        ),
        (table(), "warning", "autovacuum", "2,000,000 dead rows", "`vacuum fairlane.flows`"),
        (table(vacuumed_for=None), "warning", "autovacuum", "it last was: never", "`vacuum fairlane.flows`"),
        (holder(), "fault", "old transaction", "session 'report' (pid 77, ada, idle in", "pg_terminate_backend(77)"),
        (holder(open_for=11 * MINUTE), "warning", "old transaction", "for 11 min", "idle_in_transaction"),
        (
            holder(kind="prepared transaction", pid=None),
            "fault",
            "old transaction",
            "prepared transaction 'report' (ada",
            "rollback prepared 'report'",
        ),
        (
            holder(kind="replication slot", open_for=None, transactions=2_000_000),
            "fault",
            "old transaction",
            "for 2,000,000 transactions",
            "pg_drop_replication_slot('report')",
        ),
        (connections(85), "warning", "connections", "85 of 100 connections", "raise that limit"),
        (connections(96), "fault", "connections", "(max_connections)", "share connections"),
        (changed(FILE, journal_mode="delete"), "fault", "journal mode", "'delete'", "local disk"),
        (changed(FILE, wal_size=300 * MEGABYTE), "warning", "write-ahead log", "300 MB", "end that reader"),
        (changed(FILE, free_space=500 * MEGABYTE), "warning", "disk space", "500 MB are left", "make room"),
        (changed(FILE, free_space=5 * MEGABYTE), "fault", "disk space", "5 MB are left", "make room"),
    ],
)
def test_the_database_is_unwell(health: Any, level: str, check: str, said: str, remedy: str) -> None:
    (finding,) = about_database(health)
    assert (finding.level, finding.check, finding.queue) == (level, check, None)
    assert said in finding.message
    assert remedy in finding.remedy


@pytest.mark.parametrize(
    "health",
    [
        SERVER,
        table(dead=90_000, due_at=10),
        table(dead=2_000_000, due_at=1_900_000),
        table(vacuumed_for=MINUTE),
        holder(open_for=9 * MINUTE),
        holder(open_for=None, transactions=9),
        connections(79),
        FILE,
        changed(FILE, path=None, journal_mode="memory", free_space=None),
    ],
)
def test_the_database_is_well(health: Any) -> None:
    assert list(about_database(health)) == []


def test_what_keeps_us_from_looking_is_a_finding_too() -> None:
    behind = about_no_database(SchemaOutOfDate("the database is at migration 3, this version needs 13"))
    ahead = about_no_database(SchemaTooNew("the database is at migration 99"))
    gone = about_no_database(StoreUnavailable("PostgreSQL cannot be reached"))
    assert [(each.check, each.level) for each in (behind, ahead, gone)] == [
        ("schema", "fault"),
        ("schema", "fault"),
        ("database", "fault"),
    ]
    assert "migration 3" in behind.message
    assert behind.remedy == "run `fairlane migrate`"
    assert "upgrade Fairlane" in ahead.remedy


# Workers.

THEN = datetime(2030, 1, 31, 3, 0, tzinfo=UTC)


def worker(name: str = "web-1", **given: Any) -> WorkerView:
    stats: dict[str, Any] = {
        "id": name,
        "host": "web-1",
        "pid": 77,
        "version": "1",
        "queues": {"webhooks": 1.0},
        "concurrency": 20,
        "running": 5,
        "waiting": 0,
        "unsettled": 0,
        "is_well": True,
        "is_stopping": False,
        "is_late": False,
        "is_gone": False,
        "started_at": THEN - timedelta(hours=3),
        "seen_at": THEN,
        "clock_offset": -4.9,
        "loops": {"claiming": "running", "rehoming": "ended"},
        "tasks": [],
        "stats": {},
    }
    return WorkerView(name=name, **(stats | given))


@pytest.mark.parametrize(
    ("given", "level", "check", "said"),
    [
        ({"is_late": True}, "fault", "late worker", "2030-01-31 03:00:00 UTC, and nobody else serves webhooks"),
        ({"loops": {"claiming": "ValueError: no"}}, "fault", "dead loop", "its loop claiming died (ValueError: no)"),
        ({"is_well": False}, "fault", "unwell worker", "is unhealthy"),
        ({"clock_offset": -5.1}, "fault", "clock skew", "by -5.1 s"),
        (
            {"warnings": {"adding up": "ValueError: no"}},
            "warning",
            "troubled worker",
            "adding up fails (ValueError: no)",
        ),
        ({"warnings": {PUBLISHING: "OSError: away"}}, "fault", "broker refuses", "the jobs of webhooks wait"),
    ],
)
def test_a_worker_is_unwell(given: dict[str, Any], level: str, check: str, said: str) -> None:
    (finding,) = about_workers([worker(**given)])
    assert (finding.level, finding.check) == (level, check)
    assert said in finding.message
    assert finding.remedy


def test_a_worker_is_well() -> None:
    assert list(about_workers([worker(), worker(is_stopping=True)])) == []


def test_a_worker_that_died_is_no_fault_where_another_serves_its_queues() -> None:
    (finding,) = about_workers([worker("a", is_late=True), worker("b")])
    assert finding.level == "warning"
    (finding,) = about_workers([worker("a", is_late=True, queues={"webhooks": 1.0, "email": 1.0}), worker("b")])
    assert finding.level == "fault"
    assert "nobody else serves email" in finding.message


# Figures.


def stats(**given: Any) -> QueueStats:
    known: dict[str, Any] = {
        "ready": 0,
        "running": 0,
        "unseen": 0,
        "events": 0,
        "scheduled": Counted(),
        "dead": Counted(),
        "held": {},
        "held_jobs": 0,
        "oldest_ready_at": None,
        "counted_at": NOW - MINUTE,
        "uncounted": 5,
    }
    return QueueStats(queue="webhooks", **(known | given))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"counted_at": NOW - 6 * MINUTE}, "5 claims are not in the stored stats"),
        ({"uncounted": 1_000}, "1,000 claims are not in the stored stats"),
        ({"uncounted": 1_000, "counted_at": None}, "none is"),
    ],
)
def test_figures_that_nobody_keeps_up_are_told(given: dict[str, Any], said: str) -> None:
    (finding,) = about_stats([stats(**given)], NOW)
    assert (finding.level, finding.check, finding.queue) == ("warning", "stats are behind", "webhooks")
    assert said in finding.message


@pytest.mark.parametrize("given", [{}, {"uncounted": 0, "counted_at": NOW - HOUR}, {"counted_at": None}])
def test_figures_that_are_kept_up_are_not(given: dict[str, Any]) -> None:
    assert list(about_stats([stats(**given)], NOW)) == []


# Standstills.

POLICY = Policy("webhooks", fair=Fair(by="account"), limits=(Rate(1, per="1m", by="endpoint"), Concurrency(5)))
GATE = Standstill(queue="webhooks", limit="rate/60s:endpoint", key=["api"], lanes=3, since=NOW - HOUR)
FLOW = Standstill(queue="webhooks", limit=None, key=["acme"], lanes=2, since=None)


def started(at: int) -> dict[str, list[Minute]]:
    return {"webhooks": [Minute(at // MINUTE, claimed=1), Minute(NOW // MINUTE)]}


def test_a_flow_where_no_claim_looks_is_stuck() -> None:
    (finding,) = about_standstills([FLOW], {"webhooks": POLICY}, {})
    assert (finding.level, finding.check, finding.queue) == ("fault", "stuck lane", "webhooks")
    assert finding.message.startswith("account=acme has jobs that could start")
    assert "fairlane resume webhooks" in finding.remedy


def test_a_gate_that_wakes_nobody_is_stuck_once_others_have_started() -> None:
    (finding,) = about_standstills([GATE], {"webhooks": POLICY}, started(NOW))
    assert (finding.level, finding.check) == ("fault", "stuck lane")
    assert "rate/60s:endpoint for endpoint=api was to let 3 lanes go on at" in finding.message
    assert list(about_standstills([GATE], {"webhooks": POLICY}, started(NOW - HOUR))) == []
    assert list(about_standstills([GATE], {"webhooks": POLICY}, {})) == []


def test_the_worst_comes_first() -> None:
    levels = [each.level for each in by_level([*_one("note"), *_one("fault"), *_one("warning")])]
    assert levels == ["fault", "warning", "note"]


def _one(level: Any) -> list[Finding]:
    from fairlane.operations import Level

    return [Finding(check="x", queue=None, message="", remedy="", level=Level(level))]


SCHEDULE = ScheduleRow(
    name="nightly",
    digest=b"",
    document='{"queue": "mail"}',
    next_at=NOW - 2 * MINUTE,
    is_paused=False,
    triggers=0,
    triggered=0,
    last_slot=None,
    last_job=None,
    last_fired_at=None,
    declared_at=NOW - MINUTE,
)


@pytest.mark.parametrize(
    ("row", "has_worker", "levels"),
    [
        (SCHEDULE, True, ["fault"]),
        (SCHEDULE, False, ["fault"]),
        (changed(SCHEDULE, declared_at=NOW - HOUR), False, ["fault"]),
        (changed(SCHEDULE, declared_at=NOW - HOUR), True, ["note"]),  # removed from the program, perhaps
        (changed(SCHEDULE, is_paused=True), False, []),
        (changed(SCHEDULE, next_at=NOW - MINUTE), False, []),
        (changed(SCHEDULE, next_at=None), False, []),
    ],
)
def test_a_slot_that_nobody_fires_is_told(row: ScheduleRow, has_worker: bool, levels: list[str]) -> None:
    assert [str(each.level) for each in about_schedules([row], QueueTime(NOW), has_worker=has_worker)] == levels


def test_a_clock_that_is_behind_queue_time_is_a_note_and_no_fault() -> None:
    """C12."""
    assert list(about_time(QueueTime(NOW, 900_000))) == []
    (found,) = about_time(QueueTime(NOW, HOUR))
    assert found.level is Level.NOTE
    assert "the database's clock is 60 min behind queue time" in found.message
