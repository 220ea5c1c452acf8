"""Rates: what is charged is what was started, and a bucket is neither overdrawn nor forgotten."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from fairlane.clock import ManualClock
from fairlane.policy import Concurrency, Policy, Rate
from fairlane.scheduler.settlement import Failed, Released
from fairlane.store.protocol import Store
from tests.store.harness import (
    MINUTE,
    SECOND,
    Database,
    assert_at_rest,
    by_key,
    claim,
    claim_once,
    finish,
    given_jobs,
    ids,
    worker_named,
)

ACME = {"account": "acme"}


# A01
async def test_a_rate_with_seven_tokens_left_admits_seven_however_often_it_is_asked(
    store: Store, clock: ManualClock
) -> None:
    policy = Policy("webhooks", limits=(Rate(10, per="1h", by="account"),))
    await store.declare(policy)
    await given_jobs(store, policy, ACME, 60)
    await finish(store, await claim(store, "webhooks", 3))
    started = 0
    for want in (1, 2, 50, 1, 50, 50):
        claims = await claim(store, "webhooks", want, worker=worker_named(f"asks for {want}"))
        started += len(claims)
        await finish(store, claims[1:])
    assert started == 7
    clock.advance("6m")
    assert len(await claim(store, "webhooks", 50)) == 1


# A01
async def test_a_rate_admits_its_burst_once_among_many_claimers(database: Database, clock: ManualClock) -> None:
    policy = Policy("webhooks", limits=(Rate(7, per="1h", by="account"),))
    stores = [await database.open(clock) for _ in range(4)]
    await stores[0].declare(policy)
    await given_jobs(stores[0], policy, ACME, 60)
    claims = await asyncio.gather(*(claim(store, "webhooks", 3) for store in stores for _ in range(4)))
    assert sum(map(len, claims)) == 7


# A01
async def test_a_fractional_rate_admits_one_job_in_its_time(store: Store, clock: ManualClock) -> None:
    policy = Policy("webhooks", limits=(Rate(0.5, per="1s"),))
    await store.declare(policy)
    await given_jobs(store, policy, {}, 10)
    assert len(await claim(store, "webhooks", 10)) == 1
    clock.set(clock.now() + 2 * SECOND - 1)
    assert await claim(store, "webhooks", 10) == []
    clock.set(clock.now() + 1)
    assert len(await claim(store, "webhooks", 10)) == 1


# A02
async def test_a_job_stopped_by_a_second_limit_costs_the_first_one_nothing(store: Store, clock: ManualClock) -> None:
    limits = (Rate(10, per="1h", by="endpoint"), Concurrency(2, by="account"))
    policy = Policy("webhooks", limits=limits)
    await store.declare(policy)
    await given_jobs(store, policy, {"account": "acme", "endpoint": "api"}, 30)
    started = 0
    while claims := await claim(store, "webhooks", 30):
        assert len(claims) == 2
        started += len(claims)
        assert await claim(store, "webhooks", 30) == []
        await finish(store, claims)
    assert started == 10


# A02
async def test_a_job_stopped_by_its_rate_holds_no_slot(store: Store) -> None:
    limits = (Concurrency(4, by="account"), Rate(1, per="1h", by="endpoint"))
    policy = Policy("webhooks", limits=limits)
    await store.declare(policy)
    for endpoint in "abcdef":
        await given_jobs(store, policy, {"account": "acme", "endpoint": endpoint}, 5)
    first = await claim(store, "webhooks", 30)
    assert len(first) == 4
    await finish(store, first)
    second = await claim(store, "webhooks", 30)
    assert by_key([*first, *second], "endpoint") == dict.fromkeys("abcdef", 1)


# A02
async def test_a_job_stopped_by_the_queue_s_cap_costs_its_key_no_token(store: Store) -> None:
    policy = Policy("webhooks", limits=(Concurrency(3), Rate(6, per="1h", by="account")))
    await store.declare(policy)
    await given_jobs(store, policy, ACME, 30)
    started = 0
    while claims := await claim(store, "webhooks", 30):
        assert len(claims) == 3
        started += 3
        await finish(store, claims)
    assert started == 6


# A02
async def test_a_failed_run_has_spent_its_token(store: Store, clock: ManualClock) -> None:
    policy = Policy("webhooks", limits=(Rate(4, per="1h", by="account"),))
    await store.declare(policy)
    await given_jobs(store, policy, ACME, 10)
    await finish(store, await claim(store, "webhooks", 3), Failed("boom", 1))
    clock.set(clock.now() + 1)
    assert len(await claim(store, "webhooks", 10)) == 1


# A03
async def test_a_key_that_holds_only_future_jobs_spends_no_tokens(store: Store, clock: ManualClock) -> None:
    policy = Policy("webhooks", limits=(Rate(3, per="1h", by="account"),))
    await store.declare(policy)
    await given_jobs(store, policy, ACME, 5, delay=10 * MINUTE)
    for _ in range(5):
        assert await claim(store, "webhooks", 10) == []
        clock.advance("1m")
    counts = await store.counts("webhooks")
    assert (counts.ready, counts.running, counts.parked_lanes) == (0, 0, 0)
    clock.advance("5m")
    assert len(await claim(store, "webhooks", 10)) == 3


# A03
async def test_future_jobs_take_nothing_from_the_ready_ones_of_their_key(store: Store, clock: ManualClock) -> None:
    policy = Policy("webhooks", limits=(Rate(3, per="1h", by="account"),))
    await store.declare(policy)
    await given_jobs(store, policy, ACME, 5, delay=10 * MINUTE)
    ready = await given_jobs(store, policy, ACME, 5)
    assert ids(await claim(store, "webhooks", 10)) == ready[:3]


# A05
async def test_two_rates_on_one_key_both_hold_and_nothing_else_does(store: Store, clock: ManualClock) -> None:
    limits = (Rate(3, per="1s", by="account"), Rate(10, per="10s", by="account"))
    policy = Policy("webhooks", limits=limits)
    await store.declare(policy)
    await given_jobs(store, policy, ACME, 100)
    tats = [0, 0]
    for _ in range(60):
        rooms = [limit.room(tat, clock.now()) for limit, tat in zip(limits, tats, strict=True)]
        started = await claim(store, "webhooks", 100)
        assert len(started) == min(rooms)
        if started:
            tats = [limit.charged(tat, clock.now(), len(started)) for limit, tat in zip(limits, tats, strict=True)]
        await finish(store, started)
        clock.advance(0.17)


# A05
@pytest.mark.parametrize("order", [1, -1])
async def test_two_limits_of_the_same_kind_and_scope_both_hold(store: Store, order: int) -> None:
    rates = Policy("rates", limits=(Rate(5, per="1h", by="account"), Rate(3, per="1h", by="account"))[::order])
    slots = Policy("slots", limits=(Concurrency(5, by="account"), Concurrency(3, by="account"))[::order])
    for policy in (rates, slots):
        await store.declare(policy)
        await given_jobs(store, policy, ACME, 10)
        assert len(await claim(store, policy.queue, 10)) == 3


# A17
async def test_a_claim_given_back_before_it_started_gets_its_tokens_back(store: Store, clock: ManualClock) -> None:
    limits = (Rate(5, per="1h", by="account"), Rate(50, per="1d"))
    policy = Policy("webhooks", limits=limits)
    await store.declare(policy)
    await given_jobs(store, policy, ACME, 10)
    claims = await claim(store, "webhooks", 10)
    assert len(claims) == 5
    await finish(store, claims[3:], Released("shutdown"))
    again = await claim(store, "webhooks", 10)
    assert ids(again) == ids(claims[3:])
    await finish(store, [*claims[:3], *again])
    assert await claim(store, "webhooks", 10) == []


# A17
async def test_a_claim_given_back_for_later_gets_its_tokens_back_at_once(store: Store, clock: ManualClock) -> None:
    policy = Policy("webhooks", limits=(Rate(2, per="1h", by="account"),))
    await store.declare(policy)
    jobs = await given_jobs(store, policy, ACME, 4)
    claims = await claim(store, "webhooks", 4)
    await finish(store, claims, Released("unknown task", 5 * SECOND))
    assert ids(await claim(store, "webhooks", 4)) == jobs[2:]


# A17
async def test_a_refund_after_the_bucket_has_filled_does_not_overfill_it(store: Store, clock: ManualClock) -> None:
    policy = Policy("webhooks", limits=(Rate(3, per="1m", by="account"),))
    await store.declare(policy)
    await given_jobs(store, policy, ACME, 20)
    claims = await claim(store, "webhooks", 3, lease=timedelta(minutes=10))
    clock.advance("5m")
    await finish(store, claims, Released("shutdown"))
    assert len(await claim(store, "webhooks", 20)) == 3


# A17
async def test_a_token_given_back_late_does_not_let_one_job_too_many_start(store: Store, clock: ManualClock) -> None:
    policy = Policy("webhooks", limits=(Rate(3, per="30s", by="account"),))
    await store.declare(policy)
    await given_jobs(store, policy, ACME, 20)
    held = await claim(store, "webhooks", 1)
    clock.advance("10s")
    assert len(await claim(store, "webhooks", 20)) == 3  # the bucket had filled again
    await finish(store, held, Released("shutdown"))
    assert await claim(store, "webhooks", 20) == [], "four jobs started at one instant, with a burst of three"


# A26
@pytest.mark.parametrize("by", ["account", None])
@pytest.mark.parametrize("limit", [3, 7, 0.3, 999.9])
async def test_a_gate_that_reopens_at_a_rounded_time_opens_at_that_very_time(
    store: Store, clock: ManualClock, limit: float, by: str | None
) -> None:
    policy = Policy("webhooks", limits=(Rate(limit, per="1s", burst=1, by=by),), keys=("account",))
    await store.declare(policy)
    clock.set(clock.now() + 123_457)
    await given_jobs(store, policy, ACME, 40)
    for _ in range(40):
        brought = await claim_once(store, "webhooks", 5)
        assert len(brought.claims) == 1
        await finish(store, brought.claims)
        waiting = await claim_once(store, "webhooks", 5)
        if waiting.next_due is not None and (await store.counts("webhooks")).ready:
            clock.set(waiting.next_due - 1)
            assert await claim(store, "webhooks", 5) == []
            clock.set(waiting.next_due)


# A26
async def test_gates_that_reopen_together_all_open(store: Store, clock: ManualClock) -> None:
    policy = Policy("webhooks", limits=(Rate(3, per="1s", burst=1, by="account"),))
    await store.declare(policy)
    for n in range(30):
        await given_jobs(store, policy, {"account": n}, 3)
    assert len(await claim(store, "webhooks", 100)) == 30
    for _ in range(2):
        clock.set(clock.now() + 333_334)
        assert len(await claim(store, "webhooks", 100)) == 30
    assert (await store.counts("webhooks")).ready == 0


# A14
async def test_rates_leave_nothing_behind(store: Store, clock: ManualClock) -> None:
    limits = (Rate(5, per="1m", by="account"), Rate(7, per="1h"), Concurrency(6, by="account"))
    policy = Policy("webhooks", limits=limits)
    await store.declare(policy)
    await given_jobs(store, policy, ACME, 9)
    while (await store.counts("webhooks")).ready or (await store.counts("webhooks")).events:
        claims = await claim(store, "webhooks", 4)
        await finish(store, claims[1:2], Released("drain"))
        await finish(store, claims[:1] + claims[2:])
        clock.advance("20m")
    await assert_at_rest(store, policy, clock, [ACME, {"account": "other"}])
