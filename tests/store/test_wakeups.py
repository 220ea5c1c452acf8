"""Waking: whoever can do something hears of it, nobody else does, and nothing that was committed stays hidden.

Waits that must end are given `None` or a moment that the manual clock never reaches: a store that polled would hang.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from fairlane.clock import ManualClock
from fairlane.job import Claim
from fairlane.policy import Concurrency, Policy, Rate
from fairlane.scheduler.settlement import Failed, Released, Retried, RunOutcome, Snoozed
from fairlane.store.protocol import Listener, Store, WorkerIdentity
from tests.store.harness import (
    LEASE,
    SECOND,
    Database,
    claim,
    claim_once,
    finish,
    given_jobs,
    hear,
    ids,
    new_jobs,
    soon,
    worker_named,
)

PLAIN = Policy("webhooks")


@dataclass
class Waiter:
    """A worker with one free slot, and its ear."""

    store: Store
    worker: WorkerIdentity
    listener: Listener

    async def register(self) -> None:
        await hear(self.store, "webhooks", self.listener, worker=self.worker)

    def start_waiting(self, until: int | None = None) -> asyncio.Future[bool]:
        return asyncio.ensure_future(self.listener.wait(until))

    async def next_claim(self, *, keeps_time: bool = True) -> Claim:
        """What a worker does: claim; if there is nothing, wait until something may have changed; claim again."""
        while True:
            brought = await claim_once(self.store, "webhooks", 1, worker=self.worker, listener=self.listener)
            if brought.claims:
                return brought.claims[0]
            if brought.more or brought.look_again:
                await asyncio.sleep(0)
                continue
            await self.listener.wait(brought.next_due if keeps_time else None)


@asynccontextmanager
async def waiters(stores: list[Store]) -> AsyncIterator[list[Waiter]]:
    """A waiter on each of these stores, registered with an empty queue."""
    made = []
    for n, store in enumerate(stores):
        worker = worker_named(f"waiter {n}")
        made.append(Waiter(store, worker, await store.listen(worker)))
    try:
        for each in made:
            await each.register()
        yield made
    finally:
        for each in made:
            await each.listener.close()


@pytest.fixture
async def stores(database: Database, clock: ManualClock) -> list[Store]:
    """Four stores on one database: a producer's, and three for waiters."""
    opened = [await database.open(clock) for _ in range(4)]
    await opened[0].declare(PLAIN)
    return opened


async def all_quiet(store: Store) -> None:
    """Let whatever is on its way arrive: a few trips to the database and back."""
    for _ in range(5):
        await store.counts("webhooks")
        await asyncio.sleep(0)


# C04
async def test_a_queue_known_to_be_empty_is_known_not_to_be_as_soon_as_an_insert_commits(stores: list[Store]) -> None:
    for store in stores:
        assert await claim(store, "webhooks") == []
    for store in stores[1:]:
        jobs = await given_jobs(stores[0], PLAIN)
        claims = await claim(store, "webhooks")
        assert ids(claims) == jobs
        await finish(store, claims)
        assert await claim(store, "webhooks") == []


# C08
async def test_one_job_wakes_one_of_three_waiters_and_the_others_wait_for_their_deadline(
    stores: list[Store], clock: ManualClock
) -> None:
    deadline = clock.now() + 5 * SECOND
    async with waiters(stores[1:]) as three:
        waits = {each.start_waiting(deadline): each for each in three}
        (job,) = await given_jobs(stores[0], PLAIN)
        woken, asleep = await soon(asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED))
        (nudged,) = woken
        assert nudged.result() is True
        held = await claim(stores[0], "webhooks")
        assert ids(held) == [job]
        await finish(stores[0], held)
        for store in stores:
            await all_quiet(store)
        clock.set(deadline)
        assert await soon(asyncio.gather(*asleep)) == [False, False]


# C08
async def test_a_waiter_that_loses_the_race_goes_on_waiting_and_hears_of_the_next_job(
    stores: list[Store], clock: ManualClock
) -> None:
    async with waiters(stores[1:2]) as (waiter,):
        for _ in range(3):
            waiting = waiter.start_waiting()
            await given_jobs(stores[0], PLAIN)
            assert await soon(waiting) is True
            await finish(stores[2], await claim(stores[2], "webhooks"))  # somebody else was faster
            await waiter.register()
        picked_up = asyncio.ensure_future(waiter.next_claim())
        jobs = await given_jobs(stores[0], PLAIN)
        assert (await soon(picked_up)).id == jobs[0]


# C08
async def test_as_many_waiters_wake_as_jobs_arrived(stores: list[Store]) -> None:
    async with waiters(stores[1:]) as three:
        picked_up = asyncio.gather(*(each.next_claim() for each in three))
        jobs = await given_jobs(stores[0], PLAIN, count=3)
        assert sorted(ids(await soon(picked_up))) == sorted(jobs)


# C08
async def test_a_closed_listener_takes_no_wakeup_from_the_others(stores: list[Store]) -> None:
    async with waiters(stores[1:2]) as (stays,):
        for store in stores[2:]:
            async with waiters([store]):
                pass
        picked_up = asyncio.ensure_future(stays.next_claim())
        jobs = await given_jobs(stores[0], PLAIN)
        assert (await soon(picked_up)).id == jobs[0]


# C08
async def test_a_waiter_hears_nothing_of_other_queues(stores: list[Store], clock: ManualClock) -> None:
    other = Policy("other")
    await stores[0].declare(other)
    deadline = clock.now() + SECOND // 2
    async with waiters(stores[1:2]) as (waiter,):
        waiting = waiter.start_waiting(deadline)
        await given_jobs(stores[0], other, count=3)
        for store in stores:
            await all_quiet(store)
        clock.set(deadline)
        assert await soon(waiting) is False


# C08
async def test_a_waiter_hears_of_every_queue_it_is_registered_with(stores: list[Store]) -> None:
    policies = [Policy(name) for name in ("a", "b", "c")]
    for policy in policies:
        await stores[0].declare(policy)
    async with waiters(stores[1:2]) as (waiter,):
        for policy in policies:
            await hear(waiter.store, policy.queue, waiter.listener, worker=waiter.worker)
        for policy in policies:
            waiting = waiter.start_waiting()
            await given_jobs(stores[0], policy)
            assert await soon(waiting) is True
            await finish(stores[1], await claim(stores[1], policy.queue))


# C09
async def test_a_producer_and_a_waiter_at_the_same_instant_never_miss_each_other(stores: list[Store]) -> None:
    async with waiters(stores[1:2]) as (waiter,):
        for turn in range(60):
            coming = asyncio.ensure_future(soon(waiter.next_claim()))
            for _ in range(turn % 7):
                await asyncio.sleep(0)
            (job,) = await given_jobs(stores[0], PLAIN)
            held = await coming
            assert held.id == job
            await finish(stores[1], [held])


# C09
async def test_many_producers_and_many_waiters_never_miss_each_other(stores: list[Store]) -> None:
    producing, each_makes = 3, 30

    async def produce(store: Store) -> None:
        for _ in range(each_makes):
            await given_jobs(store, PLAIN)

    async def consume(waiter: Waiter) -> None:
        while True:
            held = await waiter.next_claim()
            await finish(waiter.store, [held])
            done.append(held.id)
            if len(done) == producing * each_makes:
                everything.set()

    done: list[object] = []
    everything = asyncio.Event()
    async with waiters(stores[1:]) as three:
        consumers = [asyncio.ensure_future(consume(each)) for each in three]
        await asyncio.gather(*(produce(store) for store in stores[:producing]))
        try:
            await soon(everything.wait())
        finally:
            for task in consumers:
                task.cancel()
            await asyncio.gather(*consumers, return_exceptions=True)
    assert len(set(done)) == producing * each_makes


# C09
async def test_a_job_committed_by_its_producers_own_transaction_wakes_a_waiter(shared_database: Database) -> None:
    # On the machine's clock: SQLite hears of a foreign connection's commit only when it looks.
    store, other = await shared_database.open(), await shared_database.open()
    await store.declare(PLAIN)
    for turn in range(3):
        (job,) = new_jobs(PLAIN)
        async with waiters([other]) as (waiter,), shared_database.transaction() as producer:
            picked_up: asyncio.Future[Claim] | None = None
            if turn == 0 and shared_database.kind == "postgres":
                picked_up = asyncio.ensure_future(waiter.next_claim())
            await store.enqueue([job], tx=producer.tx)
            await producer.commit()
            held = await soon(picked_up or waiter.next_claim())
            assert held.id == job.id
            await finish(other, [held])


# C11
async def test_a_rolled_back_enqueue_wakes_nobody_for_good(shared_database: Database, clock: ManualClock) -> None:
    store, other = await shared_database.open(clock), await shared_database.open(clock)
    await store.declare(PLAIN)
    async with waiters([other]) as (waiter,):
        async with shared_database.transaction() as producer:
            await store.enqueue(new_jobs(PLAIN, count=3), tx=producer.tx)
            await producer.rollback()
        picked_up = asyncio.ensure_future(waiter.next_claim())
        for each in (store, other):
            await all_quiet(each)
        assert not picked_up.done()
        jobs = await given_jobs(store, PLAIN)
        assert (await soon(picked_up)).id == jobs[0]


# C10
async def test_a_claim_says_when_the_next_scheduled_job_is_due(store: Store, clock: ManualClock) -> None:
    await store.declare(PLAIN)
    assert (await claim_once(store, "webhooks", 1)).next_due is None
    due = clock.now() + 90 * SECOND
    (late,) = await given_jobs(store, PLAIN, run_at=due + 7)
    (early,) = await given_jobs(store, PLAIN, run_at=due)
    for expected, job in ((due, early), (due + 7, late)):
        brought = await claim_once(store, "webhooks", 1)
        assert (brought.claims, brought.next_due) == ([], expected)
        clock.set(expected)
        held = await claim(store, "webhooks")
        assert ids(held) == [job]
        await finish(store, held)


# C10
async def test_a_claim_says_when_a_failed_job_is_due_again(store: Store, clock: ManualClock) -> None:
    await store.declare(PLAIN)
    (job,) = await given_jobs(store, PLAIN)
    await finish(store, await claim(store, "webhooks"), Failed("boom", 12_345_678))
    brought = await claim_once(store, "webhooks", 1)
    assert (brought.claims, brought.next_due) == ([], clock.now() + 12_345_678)
    clock.set(clock.now() + 12_345_678)
    assert ids(await claim(store, "webhooks")) == [job]


# C10
@pytest.mark.parametrize("by", ["account", None])
async def test_a_claim_says_when_a_rate_admits_the_next_job(store: Store, clock: ManualClock, by: str | None) -> None:
    policy = Policy("webhooks", limits=(Rate(2, per="7s", by=by),), keys=("account",))
    await store.declare(policy)
    await given_jobs(store, policy, {"account": "acme"}, 5)
    await finish(store, await claim(store, "webhooks", 5))
    brought = await claim_once(store, "webhooks", 5)
    assert (brought.claims, brought.next_due) == ([], clock.now() + 3_500_000)
    clock.set(clock.now() + 3_500_000)
    assert len(await claim(store, "webhooks", 5)) == 1


# C10
async def test_the_next_due_time_is_the_earliest_of_all(store: Store, clock: ManualClock) -> None:
    policy = Policy("webhooks", limits=(Rate(1, per="20s", by="account"),))
    await store.declare(policy)
    for account in "ab":
        await given_jobs(store, policy, {"account": account}, 2)
    await finish(store, await claim(store, "webhooks", 5))
    await given_jobs(store, policy, {"account": "c"}, 1, delay=30 * SECOND)
    assert (await claim_once(store, "webhooks", 5)).next_due == clock.now() + 20 * SECOND
    await given_jobs(store, policy, {"account": "c"}, 1, delay=10 * SECOND)
    assert (await claim_once(store, "webhooks", 5)).next_due == clock.now() + 10 * SECOND


# C10, L18
async def test_a_claim_that_finds_nothing_knows_of_the_lease_that_ends_next(store: Store, clock: ManualClock) -> None:
    await store.declare(PLAIN)
    await given_jobs(store, PLAIN)
    await claim(store, "webhooks", lease=LEASE)
    brought = await claim_once(store, "webhooks", 1)
    assert brought.next_due == clock.now() + 30 * SECOND


# C10
async def test_a_lane_that_opens_by_time_is_picked_up_then_although_nobody_enqueues(
    stores: list[Store], clock: ManualClock
) -> None:
    async with waiters(stores[1:2]) as (waiter,):
        (job,) = await given_jobs(stores[0], PLAIN, delay=40 * SECOND)
        picked_up = asyncio.ensure_future(waiter.next_claim())
        await all_quiet(stores[1])
        assert not picked_up.done()
        clock.advance("40s")
        assert (await soon(picked_up)).id == job


# C10, C09
async def test_a_claimer_that_leaves_work_behind_wakes_another_to_do_it(
    stores: list[Store], clock: ManualClock
) -> None:
    jobs = await given_jobs(stores[0], PLAIN, count=3, delay=40 * SECOND)
    async with waiters(stores[1:]) as (timekeeper, *others):
        # One holds the timer and has one free slot; the others hear of the rest only if it tells them.
        waiting = [timekeeper.next_claim(), *(each.next_claim(keeps_time=False) for each in others)]
        picked_up = asyncio.gather(*waiting)
        for store in stores:
            await all_quiet(store)
        clock.advance("40s")
        assert sorted(ids(await soon(picked_up))) == sorted(jobs)


# C10
async def test_a_waiter_hears_of_a_job_that_is_due_before_what_it_waits_for(
    stores: list[Store], clock: ManualClock
) -> None:
    async with waiters(stores[1:2]) as (waiter,):
        picked_up = asyncio.ensure_future(waiter.next_claim())
        await all_quiet(stores[1])
        await given_jobs(stores[0], PLAIN, delay=3_600 * SECOND)
        await all_quiet(stores[1])
        jobs = await given_jobs(stores[0], PLAIN, delay=60 * SECOND)
        await all_quiet(stores[1])
        clock.advance("60s")
        assert (await soon(picked_up)).id == jobs[0]


# C10
@pytest.mark.parametrize("way", ["settled", "released", "reaped", "failed"])
async def test_a_waiter_hears_of_work_that_a_settlement_made_claimable(
    database: Database, clock: ManualClock, way: str
) -> None:
    policy = Policy("webhooks", limits=(Concurrency(1, by="account"),))
    store, other = await database.open(clock), await database.open(clock)
    await store.declare(policy)
    first, second = await given_jobs(store, policy, {"account": "acme"}, 2)
    held = await claim(store, "webhooks")
    async with waiters([other]) as (waiter,):
        picked_up = asyncio.ensure_future(waiter.next_claim())
        await all_quiet(other)
        match way:
            case "settled":
                await finish(store, held)
            case "released":
                await finish(store, held, Released("drain"))
            case "failed":
                await finish(store, held, Failed("boom", 3_600 * SECOND))
            case _:
                clock.advance("31s")
                await store.reap()
        expected = second if way in ("settled", "failed") else first
        assert (await soon(picked_up)).id == expected


# C10
@pytest.mark.parametrize(
    "outcome",
    [Retried("at once", 0), Failed("boom", 3_600 * SECOND), Snoozed("nap", SECOND)],
    ids=["retried at once", "failed", "snoozed"],
)
async def test_a_waiter_hears_of_a_job_that_another_process_has_put_off(
    stores: list[Store], outcome: RunOutcome
) -> None:
    """E2: a retry that an engine's worker had settled was found by a look at the file, once a second."""
    await given_jobs(stores[0], PLAIN)
    held = await claim(stores[0], "webhooks")
    async with waiters(stores[1:2]) as (waiter,):
        waiting = waiter.start_waiting()
        await finish(stores[0], held, outcome)
        assert await soon(waiting) is True
