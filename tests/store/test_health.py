"""The condition of a database, and of what waits in it, as its store tells it."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from fairlane.clock import ManualClock
from fairlane.policy import Fair, Policy, Rate
from fairlane.store import health, records
from fairlane.store.health import PostgresHealth, SqliteHealth
from fairlane.store.protocol import Store
from fairlane.store.stats_values import WorkerReport
from tests.model import boards
from tests.store.harness import MINUTE, SECOND, Database, claim, diagnosed, finish, given_jobs, operations_on

POLICY = Policy("webhooks", fair=Fair(by="account"), limits=(Rate(1, per="1m", by="account"),))
ACME, BOLT = {"account": "acme"}, {"account": "bolt"}


@pytest.fixture
async def store(database: Database, clock: ManualClock) -> Store:
    store = await database.open(clock)
    await store.declare(POLICY)
    return store


async def change(database: Database, statement: dict[str, str]) -> None:
    """What nobody but the claims may write, by hand."""
    if database.kind == "postgres":
        connection = await asyncpg.connect(database.url)
        try:
            await connection.execute(statement["postgres"])
        finally:
            await connection.close()
    else:
        with sqlite3.connect(database.url) as local:
            local.execute(statement["sqlite"])
        local.close()


def checks(findings: list[Any]) -> list[str]:
    return [each.check for each in findings]


async def test_a_database_in_memory_has_no_file(tmp_path: Path) -> None:
    database = Database("sqlite-memory", "")
    store = await database.open()
    health = await store.health()
    assert isinstance(health, SqliteHealth)
    assert (health.path, health.wal_size, health.free_space, health.others) == (None, 0, None, [])
    assert health.size > 0
    await database.close()


async def test_a_file_tells_its_size_its_log_and_who_else_has_it_open(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    database = Database("sqlite-file", str(path))
    store = await database.open()
    await store.declare(POLICY)
    await given_jobs(store, POLICY, ACME, 5)
    health = await store.health()
    assert isinstance(health, SqliteHealth)
    assert health.journal_mode == "wal"
    assert health.wal_size == os.stat(f"{path}-wal").st_size > 0
    assert health.free_space is not None
    assert health.free_space > 0
    assert health.others == []
    pipe = asyncio.subprocess.PIPE
    holding = 'exec 3<"$0"; echo open; read line'
    other = await asyncio.create_subprocess_exec("sh", "-c", holding, str(path), stdin=pipe, stdout=pipe)
    try:
        assert other.stdout is not None
        assert await other.stdout.readline() == b"open\n"
        health = await store.health()
        assert isinstance(health, SqliteHealth)
        assert health.others == [other.pid]
    finally:
        await other.communicate(b"\n")
        await database.close()


@pytest.fixture
async def server(empty_postgres_url: str) -> Any:
    database = Database("postgres", empty_postgres_url)
    store = database.connect()
    await store.migrate()
    yield database, await database.open()
    await database.close()


async def test_a_server_tells_its_settings_its_tables_and_its_connections(server: Any) -> None:
    _, store = server
    health = await store.health()
    assert isinstance(health, PostgresHealth)
    assert set(health.settings) == {"autovacuum", "fsync", "full_page_writes", "synchronous_commit", "track_counts"}
    assert {"jobs", "flows", "gates", "queue_states"} <= {each.name for each in health.tables}
    due = {each.name: each.due_at for each in health.tables}
    assert (due["queue_states"], due["flows"]) == (200, 2_000), "as the migrations have it"
    assert all(each.is_vacuumed for each in health.tables)
    (limit,) = [each for each in health.connections if each.setting == "max_connections"]
    assert 0 < limit.used <= limit.most


async def test_a_table_that_is_not_vacuumed_is_told(server: Any) -> None:
    database, store = server
    assert "autovacuum" not in checks(await diagnosed(store))
    await change(database, {"postgres": "alter table fairlane.flows set (autovacuum_enabled = off)"})
    (finding,) = [each for each in await diagnosed(store) if each.check == "autovacuum"]
    assert "fairlane.flows" in finding.message
    await change(database, {"postgres": finding.remedy})
    assert "autovacuum" not in checks(await diagnosed(store))


async def test_whoever_holds_a_snapshot_open_is_told_by_name(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from fairlane.operations import diagnosis as diagnosis_database

    database, store = server
    assert (await store.health()).holders == []
    connection = await asyncpg.connect(database.url, server_settings={"application_name": "a long report"})
    transaction = connection.transaction(isolation="repeatable_read")
    await transaction.start()
    await connection.execute("select 1")
    (holder,) = (await store.health()).holders
    assert (holder.kind, holder.name, holder.state) == ("session", "a long report", "idle in transaction")
    assert holder.pid == connection.get_server_pid()
    assert "old transaction" not in checks(await diagnosed(store)), "it is not old"
    monkeypatch.setattr(diagnosis_database, "LONG_OPEN", 0)
    (finding,) = [each for each in await diagnosed(store) if each.check == "old transaction"]
    assert f"'a long report' (pid {holder.pid}" in finding.message
    await transaction.rollback()
    assert (await store.health()).holders == []
    await connection.close()


async def test_a_limit_of_the_role_and_of_the_database_is_told(server: Any) -> None:
    database, store = server
    name = database.url.rpartition("/")[2].partition("?")[0]
    await change(database, {"postgres": f'alter database "{name}" connection limit 1'})
    (limit,) = [each for each in (await store.health()).connections if "database" in each.setting]
    assert limit.most == 1
    (finding,) = [each for each in await diagnosed(store) if each.check == "connections"]
    assert (finding.level, "the limit of database" in finding.message) == ("fault", True)


async def parked(store: Store, clock: ManualClock) -> None:
    """acme waits for its rate; bolt could start."""
    await given_jobs(store, POLICY, ACME, 3)
    await finish(store, await claim(store, "webhooks", 1))
    assert await claim(store, "webhooks", 1) == []
    await given_jobs(store, POLICY, BOLT, 1)


async def test_a_gate_that_was_to_wake_its_lanes_is_found(store: Store, clock: ManualClock) -> None:
    await parked(store, clock)
    start = await store.now()
    assert await store.run(health.standstills(["webhooks"], start)) == []
    (found,) = await store.run(health.standstills(["webhooks"], start + 2 * MINUTE))
    assert (found.queue, found.limit, found.key, found.lanes) == ("webhooks", "rate/60s:account", ["acme"], 1)
    assert found.since is not None
    assert start < found.since <= start + MINUTE
    await store.declare(Policy("other"))
    assert await store.run(health.standstills(["other"], start + 2 * MINUTE)) == []


# What the doctor makes of it, where claims are kept from doing their work by a hand in the tables.


async def test_a_gate_that_is_overdue_while_others_start_is_a_fault(
    shared_database: Database, clock: ManualClock
) -> None:
    store = await shared_database.open(clock)
    await store.declare(POLICY)
    await parked(store, clock)
    clock.advance("30m")
    started = await claim(store, "webhooks", 5)
    assert sorted(each.keys["account"] or "" for each in started) == ["acme", "bolt"]
    await finish(store, started)
    await claim(store, "webhooks", 1)
    assert (await store.add_up("webhooks")).claims
    assert "stuck lane" not in checks(await diagnosed(store))
    early = (await store.now()) - 20 * MINUTE
    await boards.seal(store, "webhooks")
    await change(
        shared_database,
        {
            "postgres": f"update fairlane.gates set wake_at = {early} where waiting > 0",
            "sqlite": f"update gates set wake_at = {early} where waiting > 0",
        },
    )
    (finding,) = [each for each in await diagnosed(store) if each.check == "stuck lane"]
    assert "rate/60s:account for account=acme was to let 1 lanes go on" in finding.message


async def test_a_flow_behind_the_cursor_is_a_fault_and_the_remedy_heals_it(
    shared_database: Database, clock: ManualClock
) -> None:
    store = await shared_database.open(clock)
    await store.declare(Policy("webhooks", fair=Fair(by="account")))
    policy = Policy("webhooks", fair=Fair(by="account"))
    await given_jobs(store, policy, ACME, 3)
    await given_jobs(store, policy, BOLT, 3)
    await claim(store, "webhooks", 2)
    assert "stuck lane" not in checks(await diagnosed(store))
    await change(
        shared_database,
        {
            "postgres": "update fairlane.queue_states set cursor = cursor + 100",
            "sqlite": "update queues set cursor = cursor + 100",
        },
    )
    found = [each for each in await diagnosed(store) if each.check == "stuck lane"]
    assert sorted(each.message.partition(" ")[0] for each in found) == ["account=acme", "account=bolt"]
    assert await claim(store, "webhooks", 4) == [], "they are stuck indeed"
    queues = operations_on(store).queues
    for step in (queues.pause, queues.suspend, queues.unsuspend, queues.resume):
        await step("webhooks")
    assert "stuck lane" not in checks(await diagnosed(store))
    assert len(await claim(store, "webhooks", 4)) == 4


async def test_a_task_that_no_live_worker_knows_is_told(store: Store, clock: ManualClock) -> None:
    await given_jobs(store, POLICY, ACME, 2)
    assert "unknown task" not in checks(await diagnosed(store)), "nobody is there to ask"
    (finding,) = [each for each in await diagnosed(store, tasks=["refund"]) if each.check == "unknown task"]
    assert (finding.level, finding.queue) == ("warning", "webhooks")
    assert "this app does not know it" in finding.message
    await report(store, 1, ["refund"])
    (finding,) = [each for each in await diagnosed(store, tasks=["deliver"]) if each.check == "unknown task"]
    assert finding.level == "fault"
    assert finding.message == "2 jobs wait for task 'deliver', and no worker that serves this queue knows it"
    assert "fairlane jobs cancel --queue webhooks --task deliver" in finding.remedy
    await report(store, 2, ["deliver"])
    (finding,) = [each for each in await diagnosed(store) if each.check == "unknown task"]
    assert (finding.level, "1 of 2 workers" in finding.message) == ("warning", True)
    await store.run(records.report(UUID(int=1), None))
    assert "unknown task" not in checks(await diagnosed(store))


async def test_a_worker_that_reports_is_there_even_if_it_does_not_listen(store: Store, clock: ManualClock) -> None:
    await given_jobs(store, POLICY, ACME, 1)
    assert "no worker" in checks(await diagnosed(store))
    await report(store, 1, ["deliver"])
    assert await diagnosed(store) == []
    clock.advance("1m")
    assert checks(await diagnosed(store)) == ["late worker", "no worker"]


async def test_figures_that_nobody_adds_up_are_told(store: Store, clock: ManualClock) -> None:
    await given_jobs(store, POLICY, ACME, 2)
    await finish(store, await claim(store, "webhooks", 1))
    await store.add_up("webhooks")
    assert "stats are behind" not in checks(await diagnosed(store))
    clock.advance("10m")
    await finish(store, await claim(store, "webhooks", 1))
    (finding,) = [each for each in await diagnosed(store) if each.check == "stats are behind"]
    assert (finding.level, finding.queue) == ("warning", "webhooks")
    await store.add_up("webhooks")
    assert "stats are behind" not in checks(await diagnosed(store))


async def report(store: Store, number: int, tasks: list[str]) -> None:
    said = WorkerReport(
        name=f"w{number}",
        host="web",
        pid=number,
        version="1",
        queues={"webhooks": 1.0},
        concurrency=10,
        started_at=await store.now(),
        every=5 * SECOND,
        tasks=tasks,
    )
    await store.run(records.report(UUID(int=number), said))
