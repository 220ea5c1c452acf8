"""Claiming by hand: a program with a runtime of its own has the same promises as a worker, through the public API."""

from __future__ import annotations

import asyncio
import copy
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest

from fairlane import App, Concurrency, Effects, Fair, Rate, State
from fairlane.clock import ManualClock
from fairlane.errors import (
    AlreadySettled,
    ConfigurationError,
    DuplicateJob,
    PayloadTooLarge,
    UndecodablePayload,
    UnknownTask,
)
from tests.store.by_hand import Shop, ids, open_shop, url_of
from tests.store.harness import Database, soon
from tests.worker.harness import working

SETTLEMENTS = ("ack", "retry", "snooze", "dead", "release", "renew")


# What a claim is.


async def test_claims_come_in_the_order_of_the_plan_under_one_lease(shop: Shop, clock: ManualClock) -> None:
    jobs = await shop.enqueue(3)
    urgent = await shop.deliver.using(priority=5).enqueue(7, account="bob")
    claims = await shop.queue.claim(10, worker="mine")
    assert ids(claims) == [urgent.id, *ids(jobs)]
    first = claims[0]
    assert (first.args, first.kwargs) == ([7], {"account": "bob"})
    assert (first.task, first.queue, first.priority) == ("deliver", "webhooks", 5)
    assert (first.attempt, first.max_attempts, first.cancel_requested) == (1, 3, False)
    assert first.keys["account"] == "bob"
    assert first.enqueued_at == first.claimed_at == clock.now()
    assert first.payload == b'[[7],{"account":"bob"}]'
    assert len({claim._lease.id for claim in claims}) == 1
    assert (await urgent.record()).worker == "mine"
    assert await shop.queue.claim(1) == []


@pytest.mark.parametrize("wrong", [0, -1])
async def test_a_claim_of_nothing_is_refused(shop: Shop, wrong: int) -> None:
    with pytest.raises(ConfigurationError, match="at least 1 job"):
        await shop.queue.claim(wrong)
    with pytest.raises(ConfigurationError, match="not a time above 0"):
        await shop.queue.claim(1, lease=wrong)


async def test_turns_are_taken_between_keys(database: Database, clock: ManualClock, stack: AsyncExitStack) -> None:
    shop = await open_shop(stack, database, clock, fair=Fair(by="account", charge="count"))
    await shop.enqueue(10, "busy")
    await shop.enqueue(2, "quiet")
    claims = await shop.queue.claim(4)
    assert sorted(claim.keys["account"] or "" for claim in claims) == ["busy", "busy", "quiet", "quiet"]


async def test_a_queue_that_is_declared_after_the_app_was_opened_can_be_claimed_from(shop: Shop) -> None:
    late = shop.app.queue("late")
    assert await late.claim(1) == []


# Reading the call.


async def test_a_payload_that_cannot_be_read_is_claimed_and_says_so_on_access(shop: Shop) -> None:
    store = await shop.app.opened()
    (job,) = await shop.enqueue()
    real = store.enqueue

    async def broken(jobs: Any, *rest: Any) -> Any:
        return await real([msgspec.structs.replace(each, payload=b'[["x"],{}]') for each in jobs], *rest)

    store.enqueue = broken  # type: ignore[method-assign,assignment]
    broken_job = await shop.deliver.enqueue(1)
    good, bad = await shop.queue.claim(2)
    assert (good.id, bad.id) == (job.id, broken_job.id)
    assert bad.payload == b'[["x"],{}]'
    with pytest.raises(UndecodablePayload, match=f"job {bad.id}: .* task 'deliver'.*`payload`"):
        _ = bad.args
    await bad.dead("cannot be read")
    assert await broken_job.status() is State.DEAD


async def test_a_task_of_another_program_has_a_payload_and_takes_a_result_as_bytes(
    shared_database: Database, clock: ManualClock, stack: AsyncExitStack
) -> None:
    shop = await open_shop(stack, shared_database, clock)
    other = App(url_of(shared_database), clock=clock)
    await stack.enter_async_context(other)
    queue = other.queue("webhooks", keys=["account"])
    (job,) = await shop.enqueue()
    (claim,) = await queue.claim(1)
    assert claim.payload == b'[[0,"acme"],{}]'
    with pytest.raises(UnknownTask, match=r"no task 'deliver'.*`payload`"):
        _ = claim.kwargs
    with pytest.raises(UnknownTask, match="as bytes"):
        await claim.ack(3)
    await claim.ack(b"3")
    assert await job.result() == 3


# Every end.


async def test_a_claim_can_be_copied_and_names_what_it_lacks(shop: Shop) -> None:
    await shop.deliver.enqueue(1, account="acme")
    (claim,) = await shop.queue.claim(1)
    assert copy.copy(claim).id == claim.id
    with pytest.raises(AttributeError, match="HeldClaim has no attribute 'jobs'"):
        claim.jobs  # noqa: B018


async def test_ack_stores_the_result_and_the_time_it_took(
    shop: Shop, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await shop.app.opened()
    given: list[Any] = []
    real = store.settle

    async def noted(settlements: Any, **options: Any) -> Any:
        given.extend(settlements)
        return await real(settlements, **options)

    monkeypatch.setattr(store, "settle", noted)
    jobs = await shop.enqueue(2)
    first, second = await shop.queue.claim(2)
    clock.advance("3s")
    await first.ack(42)
    await second.ack(43, ran="1s")
    assert [await job.result() for job in jobs] == [42, 43]
    assert [each.ran for each in given] == [3_000_000, 1_000_000]
    assert first.is_settled


async def test_a_result_that_cannot_be_stored_leaves_the_claim_as_it_was(shop: Shop) -> None:
    (job,) = await shop.enqueue()
    (claim,) = await shop.queue.claim(1)
    with pytest.raises(PayloadTooLarge):
        await claim.ack("x" * 1_001)
    assert not claim.is_settled
    await claim.ack(1)
    assert await job.result() == 1


async def test_a_retry_counts_and_waits_for_its_delay_or_its_backoff(shop: Shop, clock: ManualClock) -> None:
    (job,) = await shop.enqueue()
    (claim,) = await shop.queue.claim(1)
    await claim.retry("10s", "not yet")
    record = await job.record()
    assert (record.state, record.attempt, record.error) == (State.SCHEDULED, 1, "not yet")
    assert record.due_at == clock.now() + 10_000_000
    clock.advance("10s")
    (claim,) = await shop.queue.claim(1)
    assert claim.attempt == 2
    await claim.retry()
    clock.advance("1h")
    (claim,) = await shop.queue.claim(1)
    await claim.retry(reason="still not")
    assert await job.status() is State.DEAD


async def test_a_snooze_does_not_count(shop: Shop, clock: ManualClock) -> None:
    (job,) = await shop.enqueue()
    (claim,) = await shop.queue.claim(1)
    await claim.snooze("1m", "later")
    assert await shop.queue.claim(1) == []
    clock.advance("1m")
    (claim,) = await shop.queue.claim(1)
    assert (claim.id, claim.attempt) == (job.id, 1)


async def test_a_job_ends_dead_or_cancelled_with_the_reason(shop: Shop) -> None:
    jobs = await shop.enqueue(2)
    first, second = await shop.queue.claim(2)
    await first.dead("no such endpoint\x00")
    await second.cancel("not wanted")
    records = [await job.record() for job in jobs]
    assert [record.state for record in records] == [State.DEAD, State.CANCELLED]
    assert [record.error for record in records] == ["no such endpoint␀", "not wanted"]


async def test_a_released_job_keeps_its_place_and_its_attempt(shop: Shop) -> None:
    jobs = await shop.enqueue(3)
    (first,) = await shop.queue.claim(1)
    await first.release()
    claims = await shop.queue.claim(3)
    assert ids(claims) == ids(jobs)
    assert claims[0].attempt == 1
    await claims[0].release("1m")
    assert await jobs[0].status() is State.SCHEDULED


async def test_a_release_gives_the_rate_tokens_back(
    database: Database, clock: ManualClock, stack: AsyncExitStack
) -> None:
    shop = await open_shop(stack, database, clock, Rate(2, per="1h"))
    await shop.enqueue(5)
    claims = await shop.queue.claim(5)
    assert len(claims) == 2
    assert await shop.queue.claim(5) == []
    await claims[1].release()
    (again,) = await shop.queue.claim(5)
    assert again.id == claims[1].id
    await again.ack()
    assert await shop.queue.claim(5) == []


async def test_a_batch_is_acked_in_one_settlement(shop: Shop) -> None:
    jobs = await shop.enqueue(3)
    claims = await shop.queue.claim(3)
    with pytest.raises(ConfigurationError, match="3 claims was given 2 results"):
        await shop.queue.ack(claims, [1, 2])
    with pytest.raises(AlreadySettled):
        await shop.queue.ack([claims[0], claims[0]])
    await shop.queue.ack(claims, [1, 2, 3])
    assert [await job.result() for job in jobs] == [1, 2, 3]
    await shop.queue.ack([])


async def test_a_claim_is_settled_by_its_own_queue(shop: Shop) -> None:
    other = shop.app.queue("other")
    await shop.enqueue()
    claims = await shop.queue.claim(1)
    with pytest.raises(ConfigurationError, match="not of <queue 'other'>"):
        await other.ack(claims)


# Limits.


async def test_limits_hold_across_claims_by_hand_and_a_worker(database: Database, stack: AsyncExitStack) -> None:
    shop = await open_shop(stack, database, None, Concurrency(3))
    jobs = await shop.enqueue(60)

    async def by_hand() -> None:
        while True:
            for claim in await shop.queue.claim(2):
                shop.held += 1
                shop.most = max(shop.most, shop.running + shop.held)
                await asyncio.sleep(0)
                shop.held -= 1
                await claim.ack(2 * claim.args[0])
            if not await shop.queue.wait("20s"):
                return

    runtime = asyncio.create_task(by_hand())
    async with working(shop.app, concurrency=5):
        assert [await job.result(timeout="20s") for job in jobs] == [2 * n for n in range(60)]
    runtime.cancel()
    await asyncio.gather(runtime, return_exceptions=True)
    assert 1 <= shop.most <= 3


# The end.


async def test_a_claim_that_is_cancelled_gives_its_jobs_back(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = await shop.enqueue(2)
    store = await shop.app.opened()
    real, committed, go_on = store.claim, asyncio.Event(), asyncio.Event()

    async def slow(*args: Any, **options: Any) -> Any:
        claimed = await real(*args, **options)
        committed.set()
        await go_on.wait()
        return claimed

    with monkeypatch.context() as patched:
        patched.setattr(store, "claim", slow)
        claiming = asyncio.create_task(shop.queue.claim(2))
        await soon(committed.wait())
        claiming.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await soon(claiming)
    claims = await shop.queue.claim(2)
    assert (ids(claims), [claim.attempt for claim in claims]) == (ids(jobs), [1, 1])


async def test_upkeep_removes_what_is_past_its_time(shop: Shop, clock: ManualClock) -> None:
    (job,) = await shop.enqueue()
    (claim,) = await shop.queue.claim(1)
    await claim.ack()
    clock.advance("25h")
    assert await shop.app.upkeep() is False
    store = await shop.app.opened()
    with pytest.raises(LookupError):
        await store.job(job.id)


# Effects.


async def test_effects_land_with_an_ack_or_leave_the_claim_held(shop: Shop) -> None:
    (job, _) = await shop.enqueue(2)
    first, second = await shop.queue.claim(2)
    await first.ack(1, Effects(enqueue=[shop.deliver.call(9)], put={"seen": [1, 2]}))
    assert await job.result() == 1
    assert await shop.app.values.get("seen") == [1, 2]
    with pytest.raises(DuplicateJob):
        await second.ack(2, Effects(enqueue=[shop.deliver.using(id=job.id).call(9)], delete=["seen"]))
    assert await shop.app.values.get("seen") == [1, 2]
    await second.ack(2)
    (follow_up,) = await shop.queue.claim(5)
    assert list(follow_up.args) == [9]
