"""How many jobs wait, as producers are told on every store: exact, whoever has folded what."""

from __future__ import annotations

import asyncio
import random
from uuid import UUID

import pytest

from fairlane.clock import ManualClock
from fairlane.enqueue import Pacing
from fairlane.job import Claim, State
from fairlane.policy import Backlog, Concurrency, Fair, Policy, Sequence
from fairlane.policy.backlog import backlogs_of
from fairlane.scheduler.settlement import Died, Done, Failed, Released, RunOutcome
from fairlane.store.protocol import Store
from tests.store.harness import LEASE, SECOND, Database, claim, finish, given_jobs, ids, new_jobs, state_of

BY_ACCOUNT = Policy("mail", limits=(Backlog(5, by="account"),))
WHOLE = Policy("mail", limits=(Backlog(5, when_full="reject"),), keys=("account",))
POLICIES = [
    BY_ACCOUNT,
    Policy(
        "mail", fair=Fair(by="account"), limits=(Backlog(5, by="account"), Backlog(9), Concurrency(2, by="account"))
    ),
    Policy("mail", limits=(Sequence(by="account"), Backlog(5, by="account"))),
    WHOLE,
]


async def ready(store: Store, policy: Policy, account: str = "acme", tx: object = None) -> int:
    """How many wait in the first of the policy's backlogs."""
    keys = {"account": account} | ({"task": "deliver"} if policy.sequence is None else {})
    (gate, *_) = backlogs_of(policy, 0, keys)
    return (await store.count_ready(policy, [gate], tx))[gate]


@pytest.mark.parametrize("seed", range(8))
async def test_whatever_happens_the_count_is_the_number_of_jobs_that_are_ready(
    store: Store, clock: ManualClock, seed: int
) -> None:
    chance = random.Random(seed)
    policy = POLICIES[seed % 4]
    await store.declare(policy)
    jobs: dict[str, list[UUID]] = {"a": [], "b": []}
    held: list[Claim] = []
    outcomes: list[RunOutcome] = [Done(None), Died("no"), Failed("no", 5 * SECOND), Released("no"), Failed("no", 0)]
    for _ in range(60):
        name = chance.choice("ab")
        match chance.choice(("enqueue", "claim", "settle", "settle", "wait", "cancel", "collect", "replay", "apply")):
            case "enqueue":
                delay = chance.choice((None, None, 3 * SECOND))
                keys = {"account": name}
                jobs[name] += await given_jobs(store, policy, keys, chance.randint(1, 3), delay=delay)
            case "claim":
                held += await claim(store, "mail", chance.randint(1, 3))
            case "settle" if held:
                await finish(store, [held.pop(chance.randrange(len(held)))], chance.choice(outcomes))
            case "wait":
                clock.advance("1s")
                held += await claim(store, "mail", 1)
            case "cancel" if jobs[name]:
                job = chance.choice(jobs[name])
                if await state_of(store, job) is not State.RUNNING:
                    await store.cancel(job)
            case "collect":
                await store.collect("mail")
            case "replay" if jobs[name]:
                await store.replay([chance.choice(jobs[name])])
            case "apply":
                policy = Policy(
                    "mail", policy.fair, (*policy.limits[:2], Concurrency(chance.randint(5, 9))), policy.keys
                )
                await store.apply(policy)
        for account in jobs:
            is_whole = not policy.backlogs[0].limit.by
            counted = [job for each, own in jobs.items() for job in own if is_whole or each == account]
            waiting = [job for job in counted if await state_of(store, job) is State.READY]
            assert await ready(store, policy, account) == len(waiting)


async def test_a_reaped_job_waits_again(store: Store, clock: ManualClock) -> None:
    await store.declare(BY_ACCOUNT)
    await given_jobs(store, BY_ACCOUNT, {"account": "acme"}, 2)
    await claim(store, "mail", 2)
    assert await ready(store, BY_ACCOUNT) == 0
    clock.advance(LEASE)
    await store.reap()
    assert await ready(store, BY_ACCOUNT) == 2


@pytest.mark.parametrize("policy", [BY_ACCOUNT, WHOLE], ids=["by account", "whole queue"])
async def test_without_a_worker_the_count_is_right_and_bells_do_not_pile_up(store: Store, policy: Policy) -> None:
    await store.declare(policy)
    await store.enqueue([new_jobs(policy, {"account": str(n)})[0] for n in range(1_500)])
    await given_jobs(store, policy, {"account": "acme"}, 7)
    assert await ready(store, policy) == (7 if policy is BY_ACCOUNT else 1_507)
    assert (await store.counts("mail")).events == 0
    assert (await store.counts("mail")).ready == 1_507


async def test_a_transaction_counts_its_own_jobs_and_nobody_else_does(shared_database: Database) -> None:
    store = await shared_database.open()
    await store.declare(BY_ACCOUNT)
    await given_jobs(store, BY_ACCOUNT, {"account": "acme"}, 3)
    async with shared_database.transaction() as producer:
        await store.enqueue(new_jobs(BY_ACCOUNT, {"account": "acme"}, 2), producer.tx)
        assert await ready(store, BY_ACCOUNT, tx=producer.tx) == 5
        assert await ready(store, BY_ACCOUNT) == 3
        await store.enqueue([new_jobs(BY_ACCOUNT, {"account": str(n)})[0] for n in range(300)], producer.tx)
        # Too many lane events to add up: on PostgreSQL only those that are committed can be folded.
        assert await ready(store, BY_ACCOUNT, tx=producer.tx) == 5
        await producer.rollback()
    assert await ready(store, BY_ACCOUNT) == 3
    assert len(await claim(store, "mail", 10)) == 3


async def test_concurrent_producers_are_over_by_no_more_than_what_is_under_way(database: Database) -> None:
    policy = Policy("mail", limits=(Backlog(20, by="account", when_full="reject"),))
    store = await database.open()
    await store.declare(policy)
    pacing = Pacing(store, ManualClock())
    producers = 8

    async def produce() -> int:
        stored = 0
        for _ in range(10):
            jobs = new_jobs(policy, {"account": "acme"})
            if not (await pacing.judge({"mail": policy}, jobs)).refused:
                await store.enqueue(jobs)
                stored += 1
        return stored

    stored = sum(await asyncio.gather(*(produce() for _ in range(producers))))
    assert 20 <= stored < 20 + producers
    assert await ready(store, policy) == stored


async def test_a_bulk_is_judged_one_after_the_other(store: Store, clock: ManualClock) -> None:
    policy = Policy("mail", limits=(Backlog(3, by="account"), Backlog(6, when_full="reject")))
    await store.declare(policy)
    await given_jobs(store, policy, {"account": "a"}, 2)
    jobs = new_jobs(policy, {"account": "a"}, 2) + new_jobs(policy, {"account": "b"}, 3)
    verdicts = await Pacing(store, clock).judge({"mail": policy}, jobs)
    assert list(verdicts.told) == [jobs[1].id]
    assert [(each.key, each.ready, each.max) for each in verdicts.told.values()] == [({"account": "a"}, 3, 3)]
    assert list(verdicts.refused) == [jobs[4].id]
    assert [(each.key, each.ready, each.max) for each in verdicts.refused.values()] == [({}, 6, 6)]


async def test_a_backlog_holds_back_no_start(store: Store) -> None:
    await store.declare(BY_ACCOUNT)
    jobs = await given_jobs(store, BY_ACCOUNT, {"account": "acme"}, 8)
    assert ids(await claim(store, "mail", 20)) == jobs
    assert await ready(store, BY_ACCOUNT) == 0
