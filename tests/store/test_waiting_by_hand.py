"""Waiting by hand: a job wakes one of those who wait, nobody else, and nothing that can start is slept through."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import pytest

from fairlane import Concurrency, Rate
from fairlane.clock import ManualClock
from fairlane.errors import StoreUnavailable
from fairlane.store.protocol import Listener
from tests.store.by_hand import Shop, all_quiet, ids, is_idle, open_shop, waiting
from tests.store.harness import Database, soon
from tests.waiting import until


async def test_a_wait_ends_at_its_deadline(shop: Shop, clock: ManualClock) -> None:
    (waiter,) = await waiting(shop, timeout="5s")
    clock.advance("5s")
    assert await soon(waiter) is False


async def test_a_wait_sees_what_came_before_it(shop: Shop) -> None:
    assert await shop.queue.claim(1) == []
    await shop.enqueue()
    assert await soon(shop.queue.wait()) is True
    assert len(await shop.queue.claim(1)) == 1


async def test_whoever_waits_again_without_a_claim_is_woken_again_after_a_moment(
    shop: Shop, clock: ManualClock
) -> None:
    await shop.enqueue()
    assert await soon(shop.queue.wait()) is True
    (again,) = await waiting(shop)
    clock.advance("1s")
    assert await soon(again) is True


async def test_a_job_wakes_one_waiter_of_a_process(shop: Shop, clock: ManualClock) -> None:
    three = await waiting(shop, 3, timeout="1h")
    await shop.enqueue()
    await soon(asyncio.wait(three, return_when=asyncio.FIRST_COMPLETED))
    await all_quiet(shop)
    assert [task.done() for task in three] == [True, False, False]
    (claim,) = await shop.queue.claim(1)
    await claim.ack()
    await all_quiet(shop)
    assert [task.done() for task in three] == [True, False, False]
    await shop.enqueue(2)
    assert await soon(asyncio.gather(*three)) == [True, True, True]


async def test_two_jobs_wake_two_waiters_before_any_claim(shop: Shop) -> None:
    three = await waiting(shop, 3)
    await shop.enqueue()
    await soon(three[0])
    await shop.enqueue()
    await soon(three[1])
    await all_quiet(shop)
    assert not three[2].done()


async def test_a_woken_waiter_that_does_not_claim_loses_its_job_to_another(shop: Shop, clock: ManualClock) -> None:
    two = await waiting(shop, 2)
    await shop.enqueue()
    await soon(two[0])
    await all_quiet(shop)
    assert not two[1].done()
    await is_idle(shop)
    clock.advance("2s")
    assert await soon(two[1]) is True


async def test_a_waiter_that_is_woken_and_cancelled_at_once_passes_its_job_on(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = await waiting(shop, 2)
    line = (await shop.app.connected(shop.queue.partitions)).alive_lock._lines["webhooks"]
    real = line.wake

    def wake(count: int) -> None:
        real(count)
        if count:
            two[0].cancel()

    monkeypatch.setattr(line, "wake", wake)
    await shop.enqueue()
    assert await soon(two[1]) is True
    assert two[0].cancelled()


async def test_a_job_wakes_one_process(shared_database: Database, clock: ManualClock, stack: AsyncExitStack) -> None:
    shops = [await open_shop(stack, shared_database, clock) for _ in range(4)]
    tasks = [(await waiting(shop, 1, timeout="1h"))[0] for shop in shops[1:]]
    for expected in (1, 2, 3):
        await shops[0].enqueue()
        await soon(until_done(tasks, expected))
        await all_quiet(shops[0])
        assert sum(task.done() for task in tasks) == expected
        for claim in await shops[0].queue.claim(1):
            await claim.ack()
        for shop in shops:
            await all_quiet(shop)
        assert sum(task.done() for task in tasks) == expected


async def until_done(tasks: list[asyncio.Task[bool]], count: int) -> None:
    await until(lambda: sum(task.done() for task in tasks) >= count)


async def test_a_wait_ends_when_a_limit_opens(database: Database, clock: ManualClock, stack: AsyncExitStack) -> None:
    shop = await open_shop(stack, database, clock, Concurrency(1))
    await shop.enqueue(2)
    (claim,) = await shop.queue.claim(5, lease="1h")
    (waiter,) = await waiting(shop)
    await claim.ack()
    assert await soon(waiter) is True
    assert len(await shop.queue.claim(1)) == 1


async def test_a_wait_ends_when_a_rate_refills(database: Database, clock: ManualClock, stack: AsyncExitStack) -> None:
    shop = await open_shop(stack, database, clock, Rate(1, per="10s"))
    await shop.enqueue(2)
    (claim,) = await shop.queue.claim(5, lease="1h")
    await claim.ack()
    (waiter,) = await waiting(shop)
    clock.advance("10s")
    assert await soon(waiter) is True
    assert len(await shop.queue.claim(1)) == 1


async def test_a_wait_ends_when_a_job_is_due(shop: Shop, clock: ManualClock) -> None:
    (waiter,) = await waiting(shop)
    job = await shop.deliver.using(delay="10s").enqueue(1)
    await all_quiet(shop)
    await is_idle(shop)
    assert not waiter.done()
    clock.advance("10s")
    assert await soon(waiter) is True
    assert ids(await shop.queue.claim(1)) == [job.id]


async def test_a_waiter_of_another_queue_sleeps_on(shop: Shop) -> None:
    other = asyncio.create_task(shop.app.queue("other").wait())
    (waiter,) = await waiting(shop)
    await shop.enqueue()
    assert await soon(waiter) is True
    await all_quiet(shop)
    assert not other.done()
    other.cancel()


async def test_nobody_stays_asleep_beside_a_job_however_claims_and_enqueues_interleave(
    shared_database: Database, stack: AsyncExitStack
) -> None:
    producer = await open_shop(stack, shared_database, None)
    shops = [await open_shop(stack, shared_database, None) for _ in range(2)]
    done: set[Any] = set()

    async def runtime(shop: Shop) -> None:
        while True:
            for claim in await shop.queue.claim(1):
                await claim.ack()
                done.add(claim.id)
            await shop.queue.wait()

    tasks = [asyncio.create_task(runtime(shop)) for shop in shops for _ in range(2)]
    for n in range(100):
        jobs = await producer.enqueue(1 + n % 3)
        await until(partial(done.issuperset, ids(jobs)))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_closing_the_app_sends_the_waiters_away(database: Database, clock: ManualClock) -> None:
    shop = await Shop(database, clock).open()
    two = await waiting(shop, 2)
    await soon(shop.app.close())
    assert await soon(asyncio.gather(*two)) == [False, False]


async def test_a_wait_rides_out_an_ear_that_is_lost(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    (waiter,) = await waiting(shop)
    alive_lock = (await shop.app.connected(shop.queue.partitions)).alive_lock
    lost = alive_lock._listener
    assert lost is not None

    async def gone(until: int | None) -> bool:
        raise StoreUnavailable("cut")

    monkeypatch.setattr(lost, "wait", gone)
    await shop.enqueue()  # heard by the old ear, for the last time
    assert await soon(waiter) is True
    await shop.queue.claim(1)
    (waiter,) = await waiting(shop)
    assert alive_lock._listener is not lost
    await shop.enqueue()
    assert await soon(waiter) is True


async def test_an_ear_that_cannot_be_opened_is_an_error_of_the_wait(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await shop.app.opened()

    async def refused(worker: object) -> Listener:
        raise PermissionError("not allowed to listen")

    with monkeypatch.context() as patched:
        patched.setattr(store, "listen", refused)
        with pytest.raises(PermissionError, match="not allowed"):
            await soon(shop.queue.wait())
    await shop.enqueue()
    assert await soon(shop.queue.wait()) is True
