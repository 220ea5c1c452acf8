"""What no unique index and no foreign key sees to on PostgreSQL: the claim lock does, and it is looked at here."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from fairlane.job import Claim
from fairlane.policy import Concurrency, Fair, Policy, Rate
from fairlane.scheduler.settlement import Done, Failed, Released, RunOutcome, settle
from fairlane.store import upkeep
from fairlane.store.postgres import PostgresStore
from fairlane.store.postgres.connections import StoreClock
from fairlane.store.postgres.store import Driver
from fairlane.store.protocol import Pruned, Retention
from tests.model import boards
from tests.store.harness import given_jobs, worker_named

POLICY = Policy(
    "webhooks",
    fair=Fair(by="account"),
    limits=(Concurrency(3, by="account"), Rate(1_000, per="1s", by="endpoint"), Concurrency(20)),
)
OUTCOMES: list[RunOutcome] = [Done(None), Done(b"1"), Failed("boom", 1_000), Released("drain")]


@pytest.fixture
async def stores(postgres_url: str) -> AsyncIterator[list[PostgresStore]]:
    opened = [PostgresStore(postgres_url) for _ in range(4)]
    for store in opened:
        await store.open()
    await opened[0].declare(POLICY)
    yield opened
    for store in opened:
        await store.close()


async def test_of_two_who_prune_by_count_the_second_does_not_remove_what_is_to_be_kept(
    stores: list[PostgresStore], connection: asyncpg.Connection[Any]
) -> None:
    worker = worker_named("a worker")
    retention = Retention(keep=4)
    for _ in range(10):
        await given_jobs(stores[0], POLICY, {"account": 0, "endpoint": 0})
        claimed = await stores[0].claim("webhooks", lambda: 1, worker=worker, lease=timedelta(minutes=1))
        await stores[0].settle([settle(claim, Done(None), 0) for claim in claimed.claims])
    async with connection.transaction():
        driver = Driver(connection, StoreClock(None), (), {}, {})
        assert (await driver.perform(upkeep.prune(retention, 100).make())).jobs == 6
        # To another, who cannot see that yet, six are too many as well: the next six.
        assert await stores[1].prune(retention) == Pruned(0)
    assert await stores[1].prune(retention) == Pruned(0)
    assert await connection.fetchval("select count(*) from fairlane.jobs") == 4


async def live_a_little(store: PostgresStore, seed: int) -> None:
    """Enqueue, claim, settle in every way, cancel, reap, collect: whatever comes."""
    chance = random.Random(seed)
    worker = worker_named(f"worker {seed}")
    held: list[Claim] = []
    known: list[UUID] = []
    for _ in range(60):
        match chance.randrange(8):
            case 0 | 1:
                keys = {"account": chance.randrange(12), "endpoint": chance.randrange(4)}
                delay = chance.choice([None, None, 1_000])
                known += await given_jobs(store, POLICY, keys, chance.randrange(1, 6), delay=delay)
            case 2 | 3 | 4:
                want = chance.randrange(1, 8)
                lease = timedelta(seconds=chance.choice([30, 30, 0]))
                held += (await store.claim("webhooks", lambda want=want: want, worker=worker, lease=lease)).claims  # type: ignore[misc]
            case 5:
                outcome = chance.choice(OUTCOMES)
                await store.settle([settle(each, outcome, chance.randrange(5_000)) for each in held])
                held.clear()
            case 6 if known:
                await store.cancel(chance.choice(known))
            case _:
                await store.reap()
                await store.collect("webhooks")
    await store.settle([settle(each, Done(None), 1_000) for each in held])


async def test_after_any_life_each_row_is_stored_once_and_the_counts_are_right(
    stores: list[PostgresStore], connection: asyncpg.Connection[Any]
) -> None:
    await asyncio.gather(*(live_a_little(store, seed) for seed, store in enumerate(stores)))
    await boards.checkpoint(stores[0], "webhooks")
    duplicates = await connection.fetch(
        "select 'change', seq from fairlane.journal group by queue_id, seq having count(*) > 1 union all "
        "select 'queue', null from fairlane.queue_states group by queue_id having count(*) > 1"
    )
    assert duplicates == []
    orphans = await connection.fetchval(
        "select count(*) from fairlane.lanes l "
        "where not exists (select from fairlane.flows f where f.queue_id = l.queue_id and f.id = l.flow)"
    )
    assert orphans == 0
    counted = await connection.fetchrow("select ready, running, parked from fairlane.queue_states")
    summed = await connection.fetchrow(
        "select sum(ready)::bigint, sum(in_flight)::bigint, count(*) filter (where standing = 2) from fairlane.lanes"
    )
    assert counted is not None
    assert summed is not None
    assert tuple(counted) == tuple(summed)


async def test_once_every_bell_is_folded_the_state_agrees_with_the_jobs(
    stores: list[PostgresStore], connection: asyncpg.Connection[Any]
) -> None:
    await asyncio.gather(*(live_a_little(store, seed) for seed, store in enumerate(stores, 10)))
    await stores[0].apply(Policy("webhooks", fair=Fair(by="account")))  # folds all there is
    jobs = await connection.fetchrow(
        "select count(*) filter (where state = 1), count(*) filter (where state = 2) from fairlane.jobs"
    )
    counts = await stores[0].counts("webhooks")
    assert jobs is not None
    assert (counts.ready, counts.running, counts.events) == (jobs[0], jobs[1], 0)
    leases = await connection.fetchval(
        "select count(*) from fairlane.jobs j where j.state = 2 "
        "and not exists (select from fairlane.leases l where l.id = j.lease and j.id = any (l.jobs))"
    )
    assert leases == 0, "a job runs under a lease that is not there: nobody would ever reap it"
