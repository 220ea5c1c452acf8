"""The schema: applied once, by whoever comes first; refused politely where it does not fit."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from fairlane.clock import ManualClock
from fairlane.errors import SchemaError, SchemaOutOfDate, SchemaTooNew
from fairlane.policy import Policy
from fairlane.store.migrations import load_migrations
from tests.next_migration import add_next_migration
from tests.store.harness import Database, Kind, claim, finish, given_jobs
from tests.store.processes import run_together

PLAIN = Policy("webhooks")


@pytest.fixture(params=["sqlite-file", "postgres"])
def bare_place(request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    """A database without any schema."""
    kind: Kind = request.param
    url = str(tmp_path / "bare.db") if kind == "sqlite-file" else request.getfixturevalue("empty_postgres_url")
    return Database(kind, url)


@pytest.fixture
async def bare_database(bare_place: Database) -> AsyncIterator[Database]:
    yield bare_place
    await bare_place.close()


def names_of(database: Database) -> list[str]:
    package = "fairlane.store.postgres" if database.kind == "postgres" else "fairlane.store.sqlite"
    return [migration.name for migration in load_migrations(package)]


async def tamper(database: Database, change: str) -> None:
    """Change the table that records migrations: the one table that this suite knows by name."""
    table = "fairlane.migrations" if database.kind == "postgres" else "migrations"
    async with database.transaction() as somebody:
        if database.kind == "postgres":
            await somebody.tx.execute(change.format(table=table))
        else:
            somebody.tx.execute(change.format(table=table))
        await somebody.commit()


async def test_migrations_are_applied_once_and_in_order(bare_database: Database) -> None:
    store = bare_database.connect()
    assert await store.migrate() == names_of(bare_database)
    assert await store.migrate() == []
    await store.close()


@pytest.mark.slow
async def test_six_processes_at_once_apply_each_migration_once(bare_database: Database) -> None:
    told = await run_together("migrate", bare_database, 6)
    applied = Counter(name for each in told for name in msgspec.json.decode(each, type=list[str]))
    assert applied == Counter(names_of(bare_database))
    store = await bare_database.open()
    await store.declare(PLAIN)


async def test_sqlite_migrates_itself_and_postgres_says_how(bare_database: Database) -> None:
    if bare_database.kind == "postgres":
        with pytest.raises(SchemaOutOfDate, match=r"at migration 0, .* run `fairlane migrate`"):
            await bare_database.open()
        store = bare_database.connect()
        await store.migrate()
        await store.close()
    store = await bare_database.open()
    await store.declare(PLAIN)
    jobs = await given_jobs(store, PLAIN)
    assert [each.id for each in await claim(store, "webhooks")] == jobs


async def test_jobs_outlive_the_next_migration(shared_database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    store = await shared_database.open()
    await store.declare(PLAIN)
    jobs = await given_jobs(store, PLAIN, count=2)
    await shared_database.close()
    add_next_migration(monkeypatch)
    if shared_database.kind == "postgres":
        with pytest.raises(SchemaOutOfDate, match=r"at migration \d+, .* run `fairlane migrate`"):
            await shared_database.open()
        store = shared_database.connect()
        assert await store.migrate() == names_of(shared_database)[-1:]
        await store.close()
    store = await shared_database.open()
    assert await store.migrate() == []
    assert [each.id for each in await claim(store, "webhooks", 5)] == jobs


async def test_a_newer_schema_is_refused_politely(shared_database: Database) -> None:
    await shared_database.open()
    await shared_database.close()
    await tamper(shared_database, "insert into {table} (number, name, checksum) values (9999, '9999_future', 'x')")
    with pytest.raises(SchemaTooNew, match=r"at migration 9999, this version knows \d+; upgrade"):
        await shared_database.open()
    store = shared_database.connect()
    with pytest.raises(SchemaTooNew):
        await store.migrate()
    await store.close()


async def test_a_migration_applied_from_another_text_is_refused_by_name(shared_database: Database) -> None:
    await shared_database.open()
    await shared_database.close()
    await tamper(shared_database, "update {table} set checksum = 'another' where number = 1")
    with pytest.raises(SchemaError, match=re.escape(names_of(shared_database)[0])) as refused:
        await shared_database.open()
    assert not isinstance(refused.value, SchemaTooNew | SchemaOutOfDate)


async def test_a_refused_store_leaves_the_database_as_it_was(shared_database: Database) -> None:
    store = await shared_database.open()
    await store.declare(PLAIN)
    jobs = await given_jobs(store, PLAIN, count=2)
    await shared_database.close()
    await tamper(shared_database, "insert into {table} (number, name, checksum) values (9999, '9999_future', 'x')")
    with pytest.raises(SchemaTooNew):
        await shared_database.open()
    await tamper(shared_database, "delete from {table} where number = 9999")
    store = await shared_database.open()
    assert [each.id for each in await claim(store, "webhooks", 5)] == jobs


@pytest.mark.parametrize("durable_claims", [False, True])
async def test_claims_work_the_same_whether_they_wait_for_the_disk_or_not(
    database: Database, clock: ManualClock, durable_claims: bool
) -> None:
    store = await database.open(clock, durable_claims=durable_claims)
    await store.declare(PLAIN)
    jobs = await given_jobs(store, PLAIN, count=3)
    claims = await claim(store, "webhooks", 3)
    assert [each.id for each in claims] == jobs
    await finish(store, claims)
    assert await store.now() == clock.now()
