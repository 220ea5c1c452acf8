"""What only PostgreSQL has to get right when a job ends: open transactions, broken sessions, dead waiters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from fairlane.job import State
from fairlane.policy import Policy
from fairlane.store import results as awaiting
from fairlane.store.postgres import PostgresStore
from fairlane.store.postgres import wakeups as results
from fairlane.store.postgres.connections import STATEMENTS, Connections
from tests.store.harness import claim, finish, given_jobs, soon
from tests.store.test_results import NEVER, is_heard
from tests.waiting import until, until_found

PLAIN = Policy("webhooks")


@pytest.fixture(autouse=True)
def no_last_resort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awaiting, "LOOK_EVERY", NEVER)


@pytest.fixture
async def store(postgres_url: str) -> AsyncIterator[PostgresStore]:
    store = PostgresStore(postgres_url)
    await store.open()
    await store.declare(PLAIN)
    yield store
    await store.close()


@pytest.fixture
async def connection(postgres_url: str, store: PostgresStore) -> AsyncIterator[asyncpg.Connection[Any]]:
    connection = await Connections(postgres_url, "a test").connect()
    yield connection
    await connection.close()


async def rows(connection: asyncpg.Connection[Any]) -> tuple[int, int]:
    """How many listen, and for how many ends."""
    row = await connection.fetchrow(
        "select (select count(*) from fairlane.result_listeners), (select count(*) from fairlane.result_waiters)"
    )
    assert row is not None
    return row[0], row[1]


async def become(connection: asyncpg.Connection[Any], expected: tuple[int, int]) -> None:
    async def are_so() -> bool:
        return await rows(connection) == expected

    await until_found(are_so)


async def test_a_settlement_that_was_under_way_at_the_registration_is_waited_out(
    store: PostgresStore, connection: asyncpg.Connection[Any]
) -> None:
    (job,) = await given_jobs(store, PLAIN)
    (held,) = await claim(store, "webhooks")
    async with connection.transaction():
        # It looks for listeners now, finds none, and commits later.
        assert await connection.fetchval(STATEMENTS["settle_done"], None, [(job, held.lease, 1, None)], []) == []
        waiting = asyncio.create_task(store.wait_until_ended(job, None))
        # Until the loop has looked, and seen that it has to look again.
        listener = store._results
        await until(lambda: any(job in jobs and each.producers for each, jobs in listener._uncertain))
        assert not waiting.done()
    assert (await soon(waiting)).state is State.DONE


async def test_all_who_wait_in_a_process_share_one_session_and_leave_nothing(
    store: PostgresStore, connection: asyncpg.Connection[Any]
) -> None:
    jobs = await given_jobs(store, PLAIN, count=40)
    waits = [asyncio.create_task(store.wait_until_ended(job, None)) for job in jobs]
    await is_heard(store, jobs)
    assert await rows(connection) == (1, 40)
    for wait in waits[:10]:
        wait.cancel()
    await become(connection, (1, 30))
    await finish(store, await claim(store, "webhooks", 40))
    await soon(asyncio.gather(*waits[10:]))
    await become(connection, (1, 0))
    await store.close()
    assert await rows(connection) == (0, 0)


async def test_a_session_that_nobody_needs_ends(
    store: PostgresStore, connection: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "IDLE_AFTER", 0.0)
    for _ in range(3):
        (job,) = await given_jobs(store, PLAIN)
        waiting = asyncio.create_task(store.wait_until_ended(job, None))
        await is_heard(store, [job])
        assert await rows(connection) == (1, 1), "a session that is needed stays"
        await finish(store, await claim(store, "webhooks"))
        assert (await soon(waiting)).state is State.DONE
        await become(connection, (0, 0))


async def test_a_wait_outlives_the_session_that_listened_for_it(
    store: PostgresStore, connection: asyncpg.Connection[Any]
) -> None:
    (job, other) = await given_jobs(store, PLAIN, count=2)
    waits = [asyncio.create_task(store.wait_until_ended(each, None)) for each in (job, other)]
    for _ in range(2):
        await is_heard(store, [job, other])
        before = store._results._id
        pid = await connection.fetchval(
            "select pid from pg_locks where locktype = 'advisory' and objid::bigint = "
            "(select alive_lock & 4294967295 from fairlane.result_listeners where waiter = $1)",
            before,
        )
        assert await connection.fetchval("select pg_terminate_backend($1)", pid) is True
        await until(lambda before=before: store._results._id != before)  # type: ignore[misc]
    await is_heard(store, [job, other])
    await finish(store, await claim(store, "webhooks", 2))
    assert {record.state for record in await soon(asyncio.gather(*waits))} == {State.DONE}


async def test_a_dead_waiter_is_not_spoken_to_and_goes_with_the_next_reaping(
    store: PostgresStore, connection: asyncpg.Connection[Any]
) -> None:
    (job, other) = await given_jobs(store, PLAIN, count=2)
    living = asyncio.create_task(store.wait_until_ended(other, None))
    await is_heard(store, [other])
    dead = uuid4()
    await connection.execute("insert into fairlane.result_listeners values ($1, 7)", dead)
    await connection.execute("insert into fairlane.result_waiters values ($1, $2)", job, dead)
    assert await connection.fetchval("select fairlane.announce(array[$1::uuid])", job) == 0
    await store.reap()
    assert await rows(connection) == (1, 1)
    await finish(store, await claim(store, "webhooks", 2))
    assert (await soon(living)).state is State.DONE


async def test_nobody_is_told_of_a_job_that_nobody_waits_for(
    store: PostgresStore, connection: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[object] = []
    listener = store._results
    monkeypatch.setattr(listener, "_on_announcement", lambda *told: heard.append(told[-1]))
    (job, other) = await given_jobs(store, PLAIN, count=2)
    waiting = asyncio.create_task(store.wait_until_ended(job, None))
    await is_heard(store, [job])
    first, second = await claim(store, "webhooks", 2)
    await finish(store, [second])
    await finish(store, [first])
    await until(lambda: heard)
    assert heard == [str(job)]
    assert other == second.id
    waiting.cancel()
