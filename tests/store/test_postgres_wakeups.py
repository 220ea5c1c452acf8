"""Waking on PostgreSQL: nobody speaks to the dead, to the busy, or to nobody at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from fairlane.errors import ConfigurationError
from fairlane.policy import Policy
from fairlane.store.postgres import PostgresStore, wakeups
from fairlane.store.postgres.connections import hang_up
from fairlane.store.postgres.wakeups import PostgresListener
from fairlane.store.protocol import Listener, WorkerIdentity
from tests.store.harness import claim, claim_once, given_jobs, hear, ids, new_jobs, soon, worker_named

PLAIN = Policy("webhooks")


@pytest.fixture
async def stores(postgres_url: str) -> AsyncIterator[list[PostgresStore]]:
    opened = [PostgresStore(postgres_url, application_name=f"store {n}") for n in range(3)]
    for store in opened:
        await store.open()
    await opened[0].declare(PLAIN)
    yield opened
    for store in opened:
        await store.close()


async def waiting(store: PostgresStore, name: str) -> tuple[WorkerIdentity, Listener]:
    worker = worker_named(name)
    listener = await store.listen(worker)
    await hear(store, "webhooks", listener, worker=worker)
    return worker, listener


async def kill_listeners(connection: asyncpg.Connection[Any], store: str) -> None:
    """End a worker the hard way: its session goes, its registration stays."""
    await connection.fetch(
        "select pg_terminate_backend(l.pid, 5000) from pg_locks l join pg_stat_activity a on a.pid = l.pid "
        "where l.locktype = 'advisory' and l.mode = 'ExclusiveLock' and a.application_name = $1 and a.state = 'idle'",
        store,
    )


async def test_a_dead_worker_is_not_told_in_place_of_a_live_one(
    stores: list[PostgresStore], connection: asyncpg.Connection[Any]
) -> None:
    dead_store, live_store, producer = stores
    _, dead = await waiting(dead_store, "dead")
    worker, live = await waiting(live_store, "live")
    dead._listening.cancel()  # type: ignore[attr-defined]
    await kill_listeners(connection, "store 0")
    assert await connection.fetchval("select count(*) from fairlane.waiters") == 2
    for _ in range(8):  # whoever is told is chosen by chance
        jobs = await given_jobs(producer, PLAIN)
        assert await soon(live.wait(None)) is True
        assert ids(await claim(live_store, "webhooks", worker=worker)) == jobs
        await hear(live_store, "webhooks", live, worker=worker)
    await producer.reap()
    assert await connection.fetchval("select count(*) from fairlane.waiters") == 1
    await live.close()


async def test_a_nudge_that_reaches_a_worker_without_free_slots_is_passed_on(stores: list[PostgresStore]) -> None:
    busy_store, idle_store, producer = stores
    busy_worker, busy = await waiting(busy_store, "busy")
    queue = (await producer._claimer.queue("webhooks")).id
    # The busy one fills its slots in the very moment in which somebody tells it of another job.
    await given_jobs(producer, PLAIN)
    (held,) = (await claim_once(busy_store, "webhooks", 1, worker=busy_worker, listener=busy)).claims
    _, idle = await waiting(idle_store, "idle")
    busy._on_own_channel(None, 0, "", str(queue))  # type: ignore[attr-defined]
    assert await soon(idle.wait(None)) is True
    assert held is not None
    await busy.close()
    await idle.close()


async def test_a_worker_that_leaves_hands_the_watch_to_another(stores: list[PostgresStore]) -> None:
    _, leaving = await waiting(stores[0], "leaving")
    _, staying = await waiting(stores[1], "staying")
    await leaving.close()
    assert await soon(staying.wait(None)) is True
    await staying.close()


async def test_a_nudge_that_a_worker_hears_while_it_leaves_is_passed_on(
    stores: list[PostgresStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, leaving = await waiting(stores[0], "leaving")
    _, staying = await waiting(stores[1], "staying")
    assert isinstance(leaving, PostgresListener)
    assert isinstance(staying, PostgresListener)
    queue = (await stores[2]._claimer.queue("webhooks")).id

    async def hear_and_hang_up(connection: asyncpg.Connection[Any]) -> None:
        # The producer had chosen it before it withdrew, and commits only now.
        await hang_up(connection)
        leaving._on_own_channel(connection, 0, "", str(queue))

    with monkeypatch.context() as patched:
        patched.setattr(wakeups, "hang_up", hear_and_hang_up)
        await leaving.close()
    await stores[0].close()
    while staying.heard(queue) < 2:  # one because it leaves, one for what it heard
        assert await soon(staying.wait(None)) is True
    await staying.close()


@pytest.mark.parametrize("isolation", ["repeatable_read", "serializable"])
async def test_a_producer_whose_snapshot_is_too_old_to_see_a_waiter_tells_everybody(
    stores: list[PostgresStore], connection: asyncpg.Connection[Any], isolation: Any
) -> None:
    transaction = connection.transaction(isolation=isolation)
    await transaction.start()
    await connection.fetchval("select count(*) from fairlane.waiters")  # the snapshot is taken here
    worker, listener = await waiting(stores[0], "late")
    (job,) = new_jobs(PLAIN)
    await stores[1].enqueue([job], tx=connection)
    await transaction.commit()
    assert await soon(listener.wait(None)) is True
    assert ids(await claim(stores[0], "webhooks", worker=worker)) == [job.id]
    await listener.close()


async def test_nobody_is_told_where_nobody_waits(
    stores: list[PostgresStore], connection: asyncpg.Connection[Any]
) -> None:
    heard: list[object] = []
    await connection.add_listener("fairlane", lambda *said: heard.append(said))
    worker, listener = await waiting(stores[0], "idle")
    await connection.add_listener(f"fairlane_{worker.id.hex}", lambda *said: heard.append(said))
    await given_jobs(stores[1], PLAIN)
    assert len((await claim_once(stores[0], "webhooks", 1, worker=worker, listener=listener)).claims) == 1
    while not heard:
        await connection.execute("select 1")
    heard.clear()
    await given_jobs(stores[1], PLAIN, count=10)  # everybody is busy now
    for _ in range(5):
        await connection.execute("select 1")
        await asyncio.sleep(0)
    assert heard == []
    await listener.close()


async def test_jobs_cannot_join_a_transaction_that_is_not_there(
    stores: list[PostgresStore], connection: asyncpg.Connection[Any]
) -> None:
    with pytest.raises(ConfigurationError, match="not in a transaction"):
        await stores[0].enqueue(new_jobs(PLAIN), tx=connection)
    with pytest.raises(ConfigurationError, match="asyncpg"):
        await stores[0].enqueue(new_jobs(PLAIN), tx=object())


# E06
async def test_jobs_cannot_join_a_transaction_of_another_database(
    stores: list[PostgresStore], empty_postgres_url: str
) -> None:
    elsewhere = PostgresStore(empty_postgres_url)
    await elsewhere.migrate()
    other = await asyncpg.connect(empty_postgres_url)
    async with other.transaction():
        with pytest.raises(ConfigurationError, match="is not the one that this app uses"):
            await stores[0].enqueue(new_jobs(PLAIN), tx=other)
    await other.close()
