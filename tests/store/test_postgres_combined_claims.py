"""Claiming together on PostgreSQL: one holds the lock, and everybody who waits for it gets its jobs."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from fairlane.clock import ManualClock
from fairlane.job import Claim, State
from fairlane.policy import Concurrency, Fair, Policy
from fairlane.store import records
from fairlane.store.postgres import PostgresStore
from fairlane.store.postgres.claims import NUMBERS, Crowding, Holder, deal
from fairlane.store.protocol import Claimed
from tests.store.harness import LEASE, SECOND, claim_once, finish, given_jobs, ids, new_jobs, soon, worker_named

PLAIN = Policy("webhooks")
CROWD = 6


@pytest.fixture
async def stores(postgres_url: str, clock: ManualClock) -> AsyncIterator[list[PostgresStore]]:
    """Claimers that ask in public, each as if it were a process of its own."""
    opened = [PostgresStore(postgres_url, clock=clock, application_name=f"store {n}") for n in range(CROWD)]
    for store in opened:
        await store.open()
    await opened[0].declare(PLAIN)
    for store in opened:
        await crowded(store)
    yield opened
    for store in opened:
        await store.close()


async def crowded(store: PostgresStore, queue: str = "webhooks") -> None:
    store._claimer._crowding[(await store._claimer.queue(queue)).id].is_dense = True


async def take_lock(connection: asyncpg.Connection[Any]) -> None:
    await connection.execute("select pg_advisory_lock(1717660018, id) from fairlane.queues where name = 'webhooks'")


async def release_lock(connection: asyncpg.Connection[Any]) -> None:
    await connection.execute("select pg_advisory_unlock(1717660018, id) from fairlane.queues where name = 'webhooks'")


async def requests(connection: asyncpg.Connection[Any]) -> int:
    found: int = await connection.fetchval(
        "select count(*) from pg_locks where locktype = 'advisory' and mode = 'ShareLock' and granted and objsubid = 1 "
        "and database = (select oid from pg_database where datname = current_database())"
    )
    return found


async def all_at_once(
    connection: asyncpg.Connection[Any], stores: Sequence[PostgresStore], want: int
) -> list[asyncio.Task[Claimed]]:
    """Let everybody ask while somebody else holds the lock, then let go of it."""
    await take_lock(connection)
    asking = [
        asyncio.ensure_future(claim_once(store, "webhooks", want, worker=worker_named(f"worker {n}")))
        for n, store in enumerate(stores)
    ]
    while await soon(requests(connection)) < len(stores):
        pass
    await release_lock(connection)
    return asking


async def claims_made(connection: asyncpg.Connection[Any]) -> int:
    """How often the queue's state has been written."""
    found: int = await connection.fetchval("select version * 16 + writes from fairlane.queue_states")
    return found


async def test_one_claims_for_all_who_wait(stores: list[PostgresStore], connection: asyncpg.Connection[Any]) -> None:
    jobs = await given_jobs(stores[0], PLAIN, count=100)
    before = await claims_made(connection)
    claimed = await soon(asyncio.gather(*await all_at_once(connection, stores, 4)))
    assert [len(each.claims) for each in claimed] == [4] * CROWD
    assert len({each.lease for each in claimed}) == CROWD
    assert all(claim.lease == each.lease for each in claimed for claim in each.claims)
    started = [job for each in claimed for job in ids(each.claims)]
    assert sorted(started) == sorted(jobs[: 4 * CROWD])
    for each in claimed:  # in claim order, which is enqueue order within a lane
        assert ids(each.claims) == [job for job in jobs if job in ids(each.claims)]
    assert await claims_made(connection) == before + 1
    assert await requests(connection) == 0


async def test_each_holds_its_own_lease_as_itself(
    stores: list[PostgresStore], connection: asyncpg.Connection[Any], clock: ManualClock
) -> None:
    await given_jobs(stores[0], PLAIN, count=CROWD)
    claimed = await soon(asyncio.gather(*await all_at_once(connection, stores, 1)))
    for n, (store, each) in enumerate(zip(stores, claimed, strict=True)):
        (claim,) = each.claims
        assert (await store.job(claim.id)).worker == f"worker {n}"
        assert await store.run(records.held([(claim.id, each.lease)])) == [claim.id]
    assert (await stores[0].renew([claimed[1].lease], LEASE)).gone == []
    await finish(stores[2], claimed[2].claims)
    assert (await stores[0].job(claimed[2].claims[0].id)).state is State.DONE
    assert await connection.fetchval("select count(*) from fairlane.leases") == CROWD - 1
    clock.advance(2 * LEASE.total_seconds())
    await stores[1].renew([claimed[1].lease], LEASE)
    lost = {each.job for each in (await stores[0].reap()).settled}
    assert lost == {claimed[n].claims[0].id for n in (0, 3, 4, 5)}


async def test_whoever_was_served_and_still_stands_in_line_is_not_served_twice(
    stores: list[PostgresStore], connection: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A leader that serves only two leaves others who lead after it, while those two may still stand behind them.
    monkeypatch.setattr("fairlane.store.postgres.claims.SLOTS_AT_MOST", 2)
    jobs = await given_jobs(stores[0], PLAIN, count=20 * CROWD)
    started: list[UUID] = []

    async def work(store: PostgresStore) -> None:
        while len(started) < len(jobs):
            await crowded(store)
            claimed = await claim_once(store, "webhooks", 1, worker=worker_named("worker"))
            started.extend(ids(claimed.claims))
            await finish(store, claimed.claims)

    await take_lock(connection)
    working = [asyncio.ensure_future(work(store)) for store in stores]
    while await soon(requests(connection)) < CROWD:
        pass
    await release_lock(connection)
    await soon(asyncio.gather(*working))
    assert sorted(started) == sorted(jobs)


async def test_whoever_is_left_short_looks_for_itself(
    stores: list[PostgresStore], connection: asyncpg.Connection[Any]
) -> None:
    jobs = await given_jobs(stores[0], PLAIN, count=6)
    claimed = await soon(asyncio.gather(*await all_at_once(connection, stores, 4)))
    assert sorted(job for each in claimed for job in ids(each.claims)) == sorted(jobs)
    assert sorted(len(each.claims) for each in claimed) == [0, 0, 0, 0, 2, 4]
    for store, each in zip(stores, claimed, strict=True):
        if len(each.claims) == 2 and each.more:
            queue = (await store._claimer.queue("webhooks")).id
            assert not store._claimer._crowding[queue].is_dense


async def test_a_worker_that_dies_while_it_waits_loses_nothing_for_good(
    stores: list[PostgresStore], connection: asyncpg.Connection[Any], clock: ManualClock
) -> None:
    jobs = await given_jobs(stores[0], PLAIN, count=4 * CROWD)
    await take_lock(connection)
    asking = [asyncio.ensure_future(claim_once(store, "webhooks", 4, worker=worker_named("asks"))) for store in stores]
    while await soon(requests(connection)) < CROWD:
        pass
    asking[3].cancel()
    await asyncio.gather(asking[3], return_exceptions=True)
    await release_lock(connection)
    rest = await soon(asyncio.gather(*asking[:3], *asking[4:]))
    started = [job for each in rest for job in ids(each.claims)]
    assert len(started) == len(set(started)) == 4 * (CROWD - 1)
    clock.advance(2 * LEASE.total_seconds())
    for each in rest:
        await stores[0].renew([each.lease], LEASE)
    await stores[0].reap()
    left = await claim_once(stores[0], "webhooks", 4 * CROWD)
    assert sorted(started + ids(left.claims)) == sorted(jobs)


async def test_a_leader_that_falls_silent_before_it_begins_does_not_keep_the_lock(
    stores: list[PostgresStore], connection: asyncpg.Connection[Any]
) -> None:
    await given_jobs(stores[0], PLAIN)
    claimer = stores[0]._claimer
    queue = await claimer.queue("webhooks")
    silent = await claimer._connected()
    await claimer._seat.enter(silent, queue, 1, worker_named("silent"), SECOND)
    assert await silent.fetchval("show idle_session_timeout") == "5s"
    assert await connection.fetchval("select pg_try_advisory_lock(1717660018, $1)", queue.id) is False
    await silent.execute(queue.take_over)
    assert await silent.fetchval("show idle_session_timeout") == "0"
    await silent.execute("rollback")
    assert await connection.fetchval("select pg_try_advisory_lock(1717660018, $1)", queue.id) is True
    await release_lock(connection)


async def test_limits_hold_while_everybody_claims_together(postgres_url: str, stores: list[PostgresStore]) -> None:
    policy = Policy("api", fair=Fair(by="account"), limits=(Concurrency(3, by="account"), Concurrency(8)))
    await stores[0].declare(policy)
    jobs = [
        job.id
        for n in range(4)
        for job in await _enqueued(stores[n], policy, count=25, keys={"account": f"tenant {n}"})
    ]
    running: Counter[str] = Counter()
    done: list[UUID] = []

    async def work(store: PostgresStore) -> None:
        while len(done) < len(jobs):
            await crowded(store, "api")
            claimed = await claim_once(store, "api", 4, worker=worker_named("worker"))
            _start(running, claimed.claims)
            await asyncio.sleep(0)
            # They have ended once the store may know of it: what is released can be claimed before we are told.
            for each in claimed.claims:
                running[str(each.keys["account"])] -= 1
            await finish(store, claimed.claims)
            done.extend(ids(claimed.claims))

    await soon(asyncio.gather(*(work(store) for store in stores)))
    assert sorted(done) == sorted(jobs)


def _start(running: Counter[str], claims: Sequence[Claim]) -> None:
    running.update(str(each.keys["account"]) for each in claims)
    assert max(running.values(), default=0) <= 3
    assert running.total() <= 8


async def _enqueued(store: PostgresStore, policy: Policy, **options: Any) -> Sequence[Any]:
    new = new_jobs(policy, **options)
    await store.enqueue(new)
    return new


async def test_a_session_that_has_used_up_its_numbers_is_replaced(stores: list[PostgresStore]) -> None:
    jobs = await given_jobs(stores[0], PLAIN, count=3)
    claimer = stores[0]._claimer
    started = ids((await claim_once(stores[0], "webhooks", 1)).claims)
    before, claimer._seat._number = claimer._connection, NUMBERS - 2
    for _ in range(2):
        await crowded(stores[0])
        started += ids((await claim_once(stores[0], "webhooks", 1)).claims)
    assert claimer._connection is not before
    assert claimer._seat._number == 1
    assert started == jobs


async def test_sessions_that_are_gone_are_forgotten(
    stores: list[PostgresStore], connection: asyncpg.Connection[Any]
) -> None:
    await given_jobs(stores[0], PLAIN, count=CROWD)
    await soon(asyncio.gather(*await all_at_once(connection, stores, 1)))
    assert await connection.fetchval("select count(*) from fairlane.claimers") == CROWD
    await stores[1]._claimer.close()
    while await connection.fetchval("select count(*) from pg_stat_activity where application_name = 'store 1'") > 1:
        pass
    await stores[0].reap()
    assert await connection.fetchval("select count(*) from fairlane.claimers") == CROWD - 1


def holder(asked: int) -> Holder:
    return Holder(UUID(int=asked), asked, UUID(int=0), "", 0)


@pytest.mark.parametrize(
    ("starts", "asked", "dealt"),
    [
        (0, [2, 2], []),
        (3, [2, 2], [1, 1, 2]),
        (4, [2, 2, 5], [1, 1, 2, 2]),
        (3, [0, 1, 2], [2, 3, 3]),
    ],
)
def test_each_is_filled_before_the_next(starts: int, asked: list[int], dealt: list[int]) -> None:
    assert deal(starts, [holder(each) for each in asked]) == dealt


def test_asking_in_public_starts_when_the_wait_is_longer_than_the_work_and_ends_when_nobody_waits() -> None:
    crowding = Crowding()
    seen = [crowding.is_dense]
    crowding.alone(loading=0.0001, held=0.005)
    seen.append(crowding.is_dense)
    crowding.alone(loading=0.006, held=0.005)
    seen.append(crowding.is_dense)
    crowding.led(3)
    seen.append(crowding.is_dense)
    crowding.led(0)
    seen.append(crowding.is_dense)
    assert seen == [False, False, True, True, False]
