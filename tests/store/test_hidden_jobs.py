"""No job that was committed is ever hidden from the claims that follow."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from uuid import UUID

import pytest

from fairlane.clock import ManualClock
from fairlane.policy import Concurrency, Fair, Policy
from fairlane.scheduler.settlement import Released
from fairlane.store.protocol import Store
from tests.store.harness import Database, claim, finish, given_jobs, ids, new_jobs

PLAIN = Policy("webhooks")
POLICIES = [
    PLAIN,
    Policy("webhooks", fair=Fair(by="account"), limits=(Concurrency(3, by="account"),)),
    Policy("webhooks", fair=Fair(by="region"), limits=(Concurrency(3, by="account"),)),
]
KINDS = ["fifo", "flows", "lanes"]


# C01
@pytest.mark.parametrize("policy", POLICIES, ids=KINDS)
async def test_a_job_inserted_while_claims_are_in_flight_is_never_hidden(database: Database, policy: Policy) -> None:
    stores = [await database.open() for _ in range(4)]
    await stores[0].declare(policy)
    made: list[UUID] = []
    seen: list[UUID] = []

    async def produce(store: Store, seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(40):
            keys = {"account": chance.randrange(4), "region": chance.randrange(2)}
            made.extend(await given_jobs(store, policy, keys, chance.choice([1, 1, 3])))

    async def consume(store: Store) -> None:
        while not (produced.done() and len(seen) >= len(made)):
            claims = await claim(store, "webhooks", 5)
            seen.extend(ids(claims))
            await finish(store, claims)
            if produced.done() and not claims and (await store.counts("webhooks")).running == 0:
                return

    produced = asyncio.gather(*(produce(store, n) for n, store in enumerate(stores)))
    await asyncio.gather(produced, *(consume(store) for store in stores[:2]))
    late = await claim(stores[3], "webhooks", 1_000)
    assert sorted(seen + ids(late)) == sorted(made)


# C01, C09
@pytest.mark.parametrize("policy", POLICIES, ids=KINDS)
async def test_transactions_that_commit_out_of_order_hide_nothing(
    shared_database: Database, clock: ManualClock, policy: Policy
) -> None:
    if shared_database.kind != "postgres":
        pytest.skip("SQLite has one writer at a time: transactions cannot commit out of order")
    store = await shared_database.open(clock)
    await store.declare(policy)
    chance = random.Random(11)
    expected: list[UUID] = []
    seen: list[UUID] = []
    for _ in range(12):
        async with AsyncExitStack() as stack:
            producers = [await stack.enter_async_context(shared_database.transaction()) for _ in range(6)]
            jobs = {}
            for n, producer in enumerate(producers):
                keys = {"account": chance.randrange(3), "region": chance.randrange(2)}
                jobs[n] = new_jobs(policy, keys, chance.choice([1, 2]))
                await store.enqueue(jobs[n], tx=producer.tx)
            for n in chance.sample(range(6), 6):
                if chance.random() < 0.3:
                    await producers[n].rollback()
                else:
                    await producers[n].commit()
                    expected += [job.id for job in jobs[n]]
                expected += await given_jobs(store, policy, {"account": 1, "region": 1})
                claims = await claim(store, "webhooks", 50)
                seen += ids(claims)
                await finish(store, claims)
    while claims := await claim(store, "webhooks", 50):
        seen += ids(claims)
        await finish(store, claims)
    assert sorted(seen) == sorted(expected)


# C01
async def test_a_transaction_that_stays_open_for_long_hides_neither_its_own_jobs_nor_those_of_others(
    shared_database: Database, clock: ManualClock
) -> None:
    if shared_database.kind != "postgres":
        pytest.skip("SQLite has one writer at a time: nobody else can write meanwhile")
    store = await shared_database.open(clock)
    await store.declare(PLAIN)
    slow = new_jobs(PLAIN, count=2)
    async with shared_database.transaction() as producer:
        await store.enqueue(slow, tx=producer.tx)
        for _ in range(20):
            jobs = await given_jobs(store, PLAIN)
            claims = await claim(store, "webhooks", 5)
            assert ids(claims) == jobs
            await finish(store, claims)
        await producer.commit()
    assert ids(await claim(store, "webhooks", 5)) == [job.id for job in slow]


# C03
async def test_a_fresh_process_sees_what_was_inserted_before_it_began(
    shared_database: Database, clock: ManualClock
) -> None:
    first = await shared_database.open(clock)
    await first.declare(PLAIN)
    jobs = await given_jobs(first, PLAIN, count=3)
    held = await claim(first, "webhooks", 1)
    await shared_database.close()
    second = await shared_database.open(clock)
    jobs += await given_jobs(second, PLAIN, count=2)
    assert ids(held) + ids(await claim(second, "webhooks", 10)) == jobs
    await finish(second, held)


# C03
@pytest.mark.parametrize("policy", POLICIES, ids=KINDS)
async def test_a_job_that_comes_back_to_the_position_last_claimed_is_not_hidden(store: Store, policy: Policy) -> None:
    await store.declare(policy)
    keys = {"account": "acme", "region": "eu"}
    (job,) = await given_jobs(store, policy, keys)
    for _ in range(4):
        claims = await claim(store, "webhooks", 5)
        assert ids(claims) == [job]
        assert await claim(store, "webhooks", 5) == []
        await finish(store, claims, Released("drain"))
    later = await given_jobs(store, policy, keys, 1)
    assert ids(await claim(store, "webhooks", 5)) == [job, *later]


# C03
@pytest.mark.parametrize("policy", POLICIES, ids=KINDS)
async def test_jobs_given_back_below_what_was_claimed_since_are_not_hidden(store: Store, policy: Policy) -> None:
    await store.declare(policy)
    keys = {"account": "acme", "region": "eu"}
    jobs = await given_jobs(store, policy, keys, 9)
    first = await claim(store, "webhooks", 3)
    await finish(store, first[1:])
    second = await claim(store, "webhooks", 2)
    assert ids(second) == jobs[3:5]
    await finish(store, first[:1], Released("drain"))
    third = await claim(store, "webhooks", 1)
    assert ids(third) == jobs[:1]
    await finish(store, [*second, *third])
    assert ids(await claim(store, "webhooks", 3)) == jobs[5:8]


# C04
async def test_a_lane_that_ran_dry_is_found_again_by_its_next_job(store: Store) -> None:
    policy = POLICIES[1]
    await store.declare(policy)
    for turn in range(6):
        for account in "abc":
            jobs = await given_jobs(store, policy, {"account": account, "region": "eu"}, 1 + turn % 2)
            claims = await claim(store, "webhooks", 5)
            assert ids(claims) == jobs
            await finish(store, claims)
            assert await claim(store, "webhooks", 5) == []
