"""Settings that a server, a database or a role may have as their defaults, and what becomes of Fairlane under them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
import pytest

from fairlane import App, Concurrency, Fair, Job, Rate, State, Task
from fairlane.errors import StoreUnavailable
from fairlane.store.postgres import PostgresStore
from tests.waiting import PATIENCE
from tests.worker.harness import reaches, working

BAD = [
    "default_transaction_isolation = 'serializable'",
    "default_transaction_isolation = 'repeatable read'",
    "extra_float_digits = -15",
    "standard_conforming_strings = off",
    "datestyle = 'German, DMY'",
    "timezone = 'Asia/Kathmandu'",
    "intervalstyle = 'sql_standard'",
    "bytea_output = 'escape'",
    "search_path = ''",
    "search_path = 'nowhere', 'pg_catalog'",
    "idle_in_transaction_session_timeout = '100ms'",
    "idle_session_timeout = '500ms'",
    "statement_timeout = '5s'",
    "lock_timeout = '100ms'",
    "synchronous_commit = off",
    "array_nulls = off",
    "transform_null_equals = on",
    "enable_indexscan = off",
]


@asynccontextmanager
async def administered(url: str) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    admin = await asyncpg.connect(url)
    try:
        yield admin
    finally:
        await admin.close()


async def set_default(url: str, setting: str) -> None:
    """From now on, sessions of this database begin with it."""
    async with administered(url) as admin:
        name = await admin.fetchval("select current_database()")
        await admin.execute(f"alter database {name} set {setting}")


def shop(url: str) -> tuple[App, Task[[int, str], int]]:
    app = App(url)
    app.queue("webhooks", fair=Fair(by="account"), limits=[Concurrency(3, by="account"), Rate(10_000, per="1s")])

    @app.task(queue="webhooks", name="deliver")
    async def deliver(number: int, account: str) -> int:
        return number

    return app, deliver


async def all_end(jobs: list[Job[int]]) -> None:
    for job in jobs:
        await reaches(job, State.DONE)


# F12
@pytest.mark.parametrize("setting", BAD)
async def test_a_default_of_the_database_stops_no_worker(postgres_url: str, setting: str) -> None:
    await set_default(postgres_url, setting)
    app, deliver = shop(postgres_url)
    async with app, working(app, concurrency=4) as worker:
        jobs = [await deliver.enqueue(number, f"a{number % 5}") for number in range(20)]
        jobs += [
            each
            async for batch in app.enqueue_stream([deliver.call(number, "bulk") for number in range(300)])
            for each in batch
        ]
        await all_end(jobs)
        assert [each.queue for each in await app.operations.queues.list()] == ["webhooks"]
        assert worker.health().is_well, worker.health().loops
    assert worker.left_unsettled == 0


# F12
@pytest.mark.parametrize("isolation", ["serializable", "repeatable read"])
async def test_several_workers_meet_no_serialization_failure_of_their_own(
    postgres_url: str, isolation: str, caplog: pytest.LogCaptureFixture
) -> None:
    await set_default(postgres_url, f"default_transaction_isolation = '{isolation}'")
    (app, deliver), (second, _), (third, _) = shop(postgres_url), shop(postgres_url), shop(postgres_url)
    async with (
        app,
        second,
        third,
        working(app, concurrency=4) as one,
        working(second, concurrency=4) as two,
        working(third, concurrency=4) as three,
    ):
        for _ in range(5):
            jobs = [deliver.enqueue(number, f"a{number % 7}") for number in range(100)]
            await all_end(await asyncio.gather(*jobs))
        assert [each.health().is_well for each in (one, two, three)] == [True] * 3
    assert "40001" not in caplog.text


async def test_a_session_has_the_settings_that_our_statements_rely_on(postgres_url: str) -> None:
    for setting in BAD:
        await set_default(postgres_url, setting)
    store = PostgresStore(postgres_url)
    await store.open()
    async with store._connections.session() as connection:
        found = {
            name: await connection.fetchval("select current_setting($1)", name)
            for name in ("transaction_isolation", "extra_float_digits", "standard_conforming_strings", "lock_timeout")
        }
        assert connection.backend == await connection.fetchval("select pg_backend_pid()")
    assert found == {
        "transaction_isolation": "read committed",
        "extra_float_digits": "1",
        "standard_conforming_strings": "on",
        "lock_timeout": "100ms",  # the operator's to decide
    }
    await store.close()


# L22
async def test_a_database_that_is_read_only_for_a_while_is_ridden_out(postgres_url: str) -> None:
    app, deliver = shop(postgres_url)
    async with app, working(app, concurrency=2) as worker, administered(postgres_url) as admin:
        name = await admin.fetchval("select current_database()")
        await all_end([await deliver.enqueue(1, "acme")])
        await set_default(postgres_url, "default_transaction_read_only = on")
        await admin.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'fairlane'"
        )
        with pytest.raises(StoreUnavailable, match=r"read-only transaction .SQLSTATE 25006.; this is a standby, or"):
            await deliver.enqueue(2, "acme")
        await admin.execute(f"alter database {name} reset default_transaction_read_only")
        async with asyncio.timeout(PATIENCE):
            assert await (await deliver.enqueue(3, "acme")).result() == 3
        assert worker.health().is_well, worker.health().loops


# F12
async def test_a_callers_serializable_transaction_is_the_callers_to_retry(postgres_url: str) -> None:
    app, deliver = shop(postgres_url)
    async with app, administered(postgres_url) as one, administered(postgres_url) as two:
        await one.execute("create table accounts (name text primary key, plan text)")
        await one.execute("insert into accounts values ('acme', 'free'), ('zeta', 'free')")
        first, second = one.transaction(isolation="serializable"), two.transaction(isolation="serializable")
        await first.start()
        await second.start()
        await one.fetch("select * from accounts")
        await two.fetch("select * from accounts")
        await one.execute("update accounts set plan = 'pro' where name = 'acme'")
        await two.execute("update accounts set plan = 'pro' where name = 'zeta'")
        lost = await deliver.using(tx=one).enqueue(1, "acme")
        kept = await deliver.using(tx=two).enqueue(2, "zeta")
        await second.commit()
        with pytest.raises(asyncpg.SerializationError):
            await first.commit()
        async with working(app):
            assert await kept.result() == 2
        assert await one.fetchval("select count(*) from fairlane.jobs where id = $1", lost.id) == 0


# F12
@pytest.mark.parametrize("isolation", ["serializable", "repeatable_read"])
async def test_a_job_of_a_callers_transaction_wakes_a_worker_whatever_its_isolation(
    postgres_url: str, isolation: str
) -> None:
    app, deliver = shop(postgres_url)
    async with app, administered(postgres_url) as caller, working(app, poll="1h"):
        await all_end([await deliver.enqueue(0, "acme")])  # from now on it is idle
        async with caller.transaction(isolation=isolation):  # type: ignore[arg-type]
            job = await deliver.using(tx=caller).enqueue(1, "acme")
        assert await job.result() == 1
