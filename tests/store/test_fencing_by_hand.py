"""A claim by hand ends once: late, doubled, lost and unheard settlements."""

from __future__ import annotations

import asyncio
import inspect
from contextlib import AsyncExitStack
from typing import Any

import pytest

from fairlane import HeldClaim, Job, State, context
from fairlane.clock import ManualClock
from fairlane.errors import AlreadySettled, ClaimLost
from fairlane.job import Claim, JobRecord
from fairlane.worker import JobContext
from tests.store.by_hand import Shop, open_shop
from tests.store.harness import Database, soon
from tests.store.test_claims_by_hand import SETTLEMENTS
from tests.worker.harness import working


async def settled_twice(claim: HeldClaim, how: str) -> None:
    match how:
        case "snooze":
            await claim.snooze("1s")
        case "dead":
            await claim.dead("again")
        case "retry" | "ack" | "release" | "renew":
            await getattr(claim, how)()


@pytest.mark.parametrize("how", SETTLEMENTS)
async def test_a_claim_ends_once(shop: Shop, how: str) -> None:
    (job,) = await shop.enqueue()
    (claim,) = await shop.queue.claim(1)
    await claim.ack(1)
    with pytest.raises(AlreadySettled, match=f"you have settled this claim of job {job.id} already"):
        await settled_twice(claim, how)
    assert await job.result() == 1


@pytest.mark.parametrize("how", SETTLEMENTS)
async def test_a_claim_whose_lease_ran_out_is_lost_and_nothing_is_applied(
    shop: Shop, clock: ManualClock, how: str
) -> None:
    (job,) = await shop.enqueue()
    (claim,) = await shop.queue.claim(1, lease="10s")
    clock.advance("11s")
    assert await shop.app.upkeep() is False
    assert await job.status() is State.READY
    (again,) = await shop.queue.claim(1)
    before = await job.record()
    for _ in range(2):
        with pytest.raises(ClaimLost, match=f"the claim of job {job.id} is gone") as told:
            await settled_twice(claim, how)
        assert told.value.jobs == (job.id,)
    assert await job.record() == before
    assert again.attempt == 1, "the first loss is nobody's fault"
    await again.ack(5)
    assert await job.result() == 5


async def test_a_renewed_claim_is_not_reaped_and_tells_of_a_cancellation(shop: Shop, clock: ManualClock) -> None:
    jobs = await shop.enqueue(2)
    claims = await shop.queue.claim(2, lease="10s")
    clock.advance("8s")
    await shop.queue.renew(claims)
    clock.advance("8s")
    await shop.app.upkeep()
    assert await jobs[1].cancel() is State.RUNNING
    await claims[0].ack(1)
    await claims[1].renew("1m")
    assert claims[1].cancel_requested
    assert not claims[0].cancel_requested
    clock.advance("30s")
    await shop.app.upkeep()
    await claims[1].cancel("as asked")
    await shop.queue.renew(claims)  # nothing left to renew
    assert await jobs[1].status() is State.CANCELLED


async def test_the_lost_of_a_batch_are_named_and_the_others_are_done(shop: Shop, clock: ManualClock) -> None:
    jobs = await shop.enqueue(2)
    (lost,) = await shop.queue.claim(1, lease="10s")
    (kept,) = await shop.queue.claim(1, lease="1h")
    clock.advance("11s")
    await shop.app.upkeep()
    with pytest.raises(ClaimLost) as renewing:
        await shop.queue.renew([lost, kept])
    assert renewing.value.jobs == (lost.id,)
    fresh = (await shop.queue.claim(1))[0]
    with pytest.raises(ClaimLost):
        await shop.queue.ack([lost, fresh], [1, 2])
    assert not fresh.is_settled, "a claim that is known to be lost is refused before anything is asked"
    await shop.queue.ack([kept, fresh], [3, 4])
    assert [await job.result() for job in jobs] == [4, 3]


async def test_an_ack_that_races_with_the_reaper_is_either_recorded_or_lost(
    shared_database: Database, clock: ManualClock, stack: AsyncExitStack
) -> None:
    shop = await open_shop(stack, shared_database, clock)
    other = await open_shop(stack, shared_database, clock)
    ended = {"acked": 0, "lost": 0}
    for n in range(200):
        job = await shop.deliver.using(max_attempts=100).enqueue(n)
        (claim,) = await shop.queue.claim(1, lease="1s")
        clock.advance("2s")

        async def ack(claim: HeldClaim = claim, n: int = n) -> bool:
            try:
                await claim.ack(n)
            except ClaimLost:
                return False
            return True

        # At the same instant, whoever wins; and now and then the one after the other, so that both do.
        if n % 4 == 0:
            await other.app.upkeep()
            acked = await ack()
        else:
            acked, _ = await asyncio.gather(ack(), other.app.upkeep())
        if acked:
            assert await job.result() == n
            ended["acked"] += 1
            assert await other.queue.claim(1) == []
        else:
            (again,) = await other.queue.claim(1)
            assert (again.id, again.attempt) == (job.id, 1)
            await again.ack(-n)
            assert await job.result() == -n
            ended["lost"] += 1
    assert ended["acked"] + ended["lost"] == 200
    assert all(ended.values()), ended


async def test_a_settlement_nobody_heard_of_may_be_asked_for_again(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    (job,) = await shop.enqueue()
    (claim,) = await shop.queue.claim(1)
    store = await shop.app.opened()
    real, repeated = store.settle, []

    async def cut(settlements: Any, *, is_repeated: bool = False, **rest: Any) -> Any:
        repeated.append(is_repeated)
        if len(repeated) in (1, 2):
            raise ConnectionError("cut")
        return await real(settlements, is_repeated=is_repeated, **rest)

    monkeypatch.setattr(store, "settle", cut)
    with pytest.raises(ConnectionError):
        await claim.dead("so it seems")
    assert not claim.is_settled
    with pytest.raises(ConnectionError):
        await claim.ack(1)  # another end must not pass for the first
    await claim.ack(1)
    assert repeated == [False, False, True]
    assert await job.result() == 1


async def test_a_settlement_whose_caller_was_cancelled_is_recorded_all_the_same(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job,) = await shop.enqueue()
    (claim,) = await shop.queue.claim(1)
    store = await shop.app.opened()
    real, asked, go_on = store.settle, asyncio.Event(), asyncio.Event()

    async def slow(settlements: Any, **options: Any) -> Any:
        asked.set()
        await go_on.wait()
        return await real(settlements, **options)

    monkeypatch.setattr(store, "settle", slow)
    acking = asyncio.create_task(claim.ack(1))
    await soon(asked.wait())
    acking.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await soon(acking)
    with pytest.raises(AlreadySettled):
        await claim.ack(2)
    assert await job.result() == 1


async def test_an_own_settlement_is_recognised_after_the_connection_was_lost(
    postgres_url: str, clock: ManualClock, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = await open_shop(stack, Database("postgres", postgres_url), clock)
    (job,) = await shop.enqueue()
    (claim,) = await shop.queue.claim(1)
    store = await shop.app.opened()
    real = store.settle

    async def committed_and_cut(settlements: Any, *, is_repeated: bool = False, **rest: Any) -> Any:
        await real(settlements, is_repeated=is_repeated, **rest)
        raise ConnectionError("cut after the commit")

    with monkeypatch.context() as patched:
        patched.setattr(store, "settle", committed_and_cut)
        with pytest.raises(ConnectionError):
            await claim.ack(1)
    await claim.ack(1)
    assert claim.is_settled
    assert await job.result() == 1


async def test_only_a_claim_can_be_settled() -> None:
    for kind in (Job, JobRecord, Claim):
        assert [name for name in (*SETTLEMENTS, "settle") if hasattr(kind, name)] == [], kind
    assert not hasattr(JobRecord, "cancel")


async def test_a_handler_settles_its_own_job_only_in_a_transaction_of_its_own(shop: Shop) -> None:
    names: list[str] = []

    @shop.app.task(queue="webhooks", keys=lambda: {"account": "acme"})
    async def look() -> None:
        names.extend(name for name in dir(context()) if not name.startswith("_"))

    async with working(shop.app):
        await (await look.enqueue()).result(timeout="20s")
    assert set(names) & {*SETTLEMENTS, "cancel", "settle"} == {"ack"}
    assert inspect.signature(JobContext.ack).parameters["tx"].default is inspect.Parameter.empty
