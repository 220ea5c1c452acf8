"""Slots: never more in flight than a limit allows, and never fewer for longer than a claim runs."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import timedelta

import pytest

from fairlane.clock import ManualClock
from fairlane.job import Claim
from fairlane.policy import Concurrency, Fair, Policy, Rate
from fairlane.scheduler.settlement import (
    Cancelled,
    Died,
    Done,
    Failed,
    Released,
    Retried,
    RunOutcome,
    Snoozed,
    settle,
)
from fairlane.store.protocol import Store
from tests.store.harness import (
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
BY_ACCOUNT = Policy("webhooks", limits=(Concurrency(2, by="account"),))


# A06
async def test_a_rate_by_endpoint_and_slots_by_account_each_hold_at_their_own_scope(
    store: Store, clock: ManualClock
) -> None:
    limits = (Rate(4, per="1h", by="endpoint"), Concurrency(3, by="account"))
    policy = Policy("webhooks", limits=limits)
    await store.declare(policy)
    pairs = [("a", "x"), ("b", "x"), ("a", "y"), ("c", "z"), ("c", "x")]
    for account, endpoint in pairs:
        await given_jobs(store, policy, {"account": account, "endpoint": endpoint}, 10)
    started: Counter[str | None] = Counter()
    while claims := await claim(store, "webhooks", 100):
        started += by_key(claims, "endpoint")
        in_flight = by_key(claims)
        assert max(in_flight.values()) <= 3
        for account, endpoint in pairs:
            assert in_flight[account] == 3 or started[endpoint] == 4, "a lane that no limit stops was left behind"
        await finish(store, claims)
    assert started == {"x": 4, "y": 4, "z": 4}


# A06
async def test_a_limit_over_two_keys_counts_each_pair(store: Store) -> None:
    policy = Policy("webhooks", limits=(Concurrency(2, by=("account", "region")), Concurrency(3, by="account")))
    await store.declare(policy)
    for region in ("eu", "us", "ap"):
        await given_jobs(store, policy, {"account": "acme", "region": region}, 5)
        await given_jobs(store, policy, {"account": region, "region": "eu"}, 5)
    claims = await claim(store, "webhooks", 100)
    assert by_key(claims) == {"acme": 3, "eu": 2, "us": 2, "ap": 2}
    assert max(by_key((c for c in claims if c.keys["account"] == "acme"), "region").values()) == 2


# A06
async def test_limits_by_task_and_by_priority_see_the_built_in_keys(store: Store) -> None:
    policy = Policy("webhooks", limits=(Concurrency(2, by="priority"), Concurrency(3, by="task")))
    await store.declare(policy)
    for priority in (-5, 0, 5):
        await given_jobs(store, policy, {}, 5, priority=priority)
    claims = await claim(store, "webhooks", 100)
    assert len(claims) == 3
    assert max(Counter(each.priority for each in claims).values()) <= 2


# A07
@pytest.mark.parametrize("by", ["account", None])
async def test_a_limit_of_zero_stops_its_key_without_a_busy_loop(store: Store, by: str | None) -> None:
    policy = Policy("webhooks", limits=(Concurrency(0, by=by),), keys=("account",))
    await store.declare(policy)
    await given_jobs(store, policy, ACME, 5)
    for _ in range(3):
        brought = await claim_once(store, "webhooks", 5)
        assert (brought.claims, brought.more, brought.next_due) == ([], False, None)
    assert (await store.counts("webhooks")).ready == 5


# A09
@pytest.mark.parametrize(
    "policy",
    [
        Policy("plain", limits=(Concurrency(2, by="account"),)),
        Policy("fair", fair=Fair(by="account"), limits=(Concurrency(2, by="account"), Concurrency(7))),
        Policy("lanes", fair=Fair(by="account"), limits=(Concurrency(2, by="account"), Concurrency(1, by="endpoint"))),
    ],
    ids=lambda policy: policy.queue,
)
async def test_no_key_ever_has_more_in_flight_than_its_limit_with_many_claimers(
    database: Database, policy: Policy
) -> None:
    stores = [await database.open() for _ in range(4)]
    await stores[0].declare(policy)
    total = 240
    for n in range(total // 10):
        await given_jobs(stores[n % 4], policy, {"account": n % 6, "endpoint": n % 12}, 10)
    runs: Counter[object] = Counter()
    in_flight: Counter[str | None] = Counter()
    highest: Counter[str | None] = Counter()

    async def work(store: Store, name: str) -> None:
        held: list[Claim] = []
        while sum(runs.values()) < total:
            # Counted after the claim and before the settlement: what overlaps here overlapped in the database.
            claims = await claim(store, policy.queue, 3, worker=worker_named(name))
            in_flight.update(each.keys["account"] for each in claims)
            for account, count in in_flight.items():
                highest[account] = max(highest[account], count)
            in_flight.subtract(each.keys["account"] for each in held)
            runs.update(ids(held))
            await finish(store, held)
            held = claims

    await asyncio.gather(*(work(store, f"{n}.{m}") for n, store in enumerate(stores) for m in range(2)))
    assert max(highest.values()) == 2
    assert len(highest) == 6
    assert set(runs.values()) == {1}
    assert len(runs) == total


# A11
async def test_a_claimed_job_that_has_not_started_yet_still_holds_its_slot(store: Store, clock: ManualClock) -> None:
    await store.declare(BY_ACCOUNT)
    await given_jobs(store, BY_ACCOUNT, ACME, 5)
    held = await claim(store, "webhooks", 2)
    for _ in range(3):
        clock.advance("5s")
        assert await claim(store, "webhooks", 5, worker=worker_named("another")) == []
    assert (await store.counts("webhooks")).running == 2
    await finish(store, held)
    await finish(store, await claim(store, "webhooks", 5))
    await finish(store, await claim(store, "webhooks", 5))
    await assert_at_rest(store, BY_ACCOUNT, clock, [ACME])


# A12, L12
async def test_a_job_longer_than_its_lease_keeps_its_slot_and_runs_once(store: Store, clock: ManualClock) -> None:
    await store.declare(BY_ACCOUNT)
    await given_jobs(store, BY_ACCOUNT, ACME, 5)
    held = await claim(store, "webhooks", 2, lease=timedelta(seconds=30))
    for _ in range(10):
        clock.advance("20s")
        assert (await store.renew([held[0].lease], timedelta(seconds=30))).gone == []
        assert (await store.reap()).settled == []
        assert await claim(store, "webhooks", 5) == []
    await finish(store, held)
    assert [(await store.job(each.id)).attempt for each in held] == [1, 1]
    assert len(await claim(store, "webhooks", 5)) == 2


# A13
@pytest.mark.parametrize(
    "outcome",
    [Died("cannot be decoded"), Released("unknown task", 60 * SECOND), Cancelled("before it began")],
    ids=lambda outcome: type(outcome).__name__,
)
async def test_a_job_dropped_before_user_code_runs_frees_its_slots_at_once(
    store: Store, clock: ManualClock, outcome: RunOutcome
) -> None:
    limits = (Concurrency(1, by="account"), Concurrency(1))
    policy = Policy("webhooks", fair=Fair(by="account"), limits=limits)
    await store.declare(policy)
    first, second = await given_jobs(store, policy, ACME, 2)
    dropped = await claim(store, "webhooks", 2)
    assert ids(dropped) == [first]
    await finish(store, dropped, outcome, ran=0)
    following = await claim(store, "webhooks", 2)
    assert ids(following) == [second]
    await finish(store, following)
    clock.advance("1m")
    await finish(store, await claim(store, "webhooks", 2))
    await assert_at_rest(store, policy, clock, [ACME])


# A14
@pytest.mark.parametrize(
    "policy",
    [
        Policy("q", limits=(Concurrency(3, by="account"),)),
        Policy("q", limits=(Concurrency(3),), keys=("account",)),
        Policy("q", fair=Fair(by="account"), limits=(Concurrency(3, by="account"), Concurrency(5))),
        Policy("q", fair=Fair(by="region"), limits=(Concurrency(2, by="account"), Rate(9, per="1s", by="account"))),
    ],
    ids=["by-key", "whole-queue", "flow", "lane"],
)
async def test_when_nothing_runs_every_in_flight_count_is_zero(
    store: Store, clock: ManualClock, policy: Policy
) -> None:
    await store.declare(policy)
    keys = [{"account": account, "region": region} for account in "ab" for region in ("eu", None)]
    for pair in keys:
        await given_jobs(store, policy, pair, 8, max_attempts=2)
    ways: list[RunOutcome] = [
        Done(b"1"),
        Failed("boom", SECOND),
        Snoozed("later", SECOND),
        Retried("again", SECOND),
        Died("over"),
        Cancelled("stop"),
        Released("drain"),
        Released("drain", SECOND),
    ]
    turn = 0
    for _ in range(400):
        claims = await claim(store, "q", 4)
        counts = await store.counts("q")
        assert counts.running == len(claims)
        for each in claims:
            turn += 1
            if turn % 9 != 0:  # the others are left to the reaper
                await finish(store, [each], ways[turn % len(ways)])
        clock.advance("31s")
        await store.reap()
        if not claims and counts.ready == 0:
            break
    await assert_at_rest(store, policy, clock, keys)


# A18
async def test_keys_that_look_alike_are_never_taken_for_each_other(store: Store, clock: ManualClock) -> None:
    policy = Policy("webhooks", fair=Fair(by="account"), limits=(Concurrency(1, by="account"),))
    await store.declare(policy)
    # fmt: off
    values = [
        None, "None", "", " ", "null", "~", "0", "00", "acme", "ACME", " acme", "acme ", "a:b", "a,b", "a\nb", "a\\nb",
        "'", '"', "%", "\u00e9", "e\u0301", "ß", "ss", "🦊", "x" * 512, "x" * 511, "webhooks:acme", "{\"a\":1}",
        "\u200b",
    ]
    # fmt: on
    for value in values:
        await given_jobs(store, policy, {"account": value}, 2)
    claims = await claim(store, "webhooks", 100)
    assert sorted(map(repr, (each.keys["account"] for each in claims))) == sorted(map(repr, values))
    for each in claims:
        assert (await store.job(each.id)).keys == each.keys
    await finish(store, claims)
    assert len(await claim(store, "webhooks", 100)) == len(values)


# A18
async def test_values_of_several_keys_do_not_run_into_each_other(store: Store) -> None:
    policy = Policy("webhooks", limits=(Concurrency(1, by=("account", "region")),))
    await store.declare(policy)
    pairs: list[tuple[str | None, str | None]] = [
        ("a", "b,c"), ("a,b", "c"), ("a", "b:c"), ("ab", "c"), ("a", "bc"), (None, "a"), ("a", None), ("b", "a"),
        ("a", "b"),
    ]  # fmt: skip
    for account, region in pairs:
        await given_jobs(store, policy, {"account": account, "region": region}, 2)
    assert len(await claim(store, "webhooks", 100)) == len(pairs)


# A18
async def test_a_number_and_its_text_are_one_key(store: Store) -> None:
    policy = Policy("webhooks", limits=(Concurrency(1, by="account"),))
    await store.declare(policy)
    await given_jobs(store, policy, {"account": 42}, 1)
    await given_jobs(store, policy, {"account": "42"}, 1)
    assert [each.keys for each in await claim(store, "webhooks", 5)] == [{"account": "42"}]


# A18
async def test_labels_that_no_policy_looks_at_are_kept_with_the_job_and_limit_nothing(store: Store) -> None:
    await store.declare(BY_ACCOUNT)
    for n in range(3):
        await given_jobs(store, BY_ACCOUNT, {"account": "acme", "region": n, "note": None}, 1)
    claims = await claim(store, "webhooks", 5)
    assert [each.keys for each in claims] == [{"account": "acme", "region": str(n), "note": None} for n in range(2)]


# A25
async def test_a_stale_workers_late_release_cannot_free_a_slot_that_a_newer_attempt_holds(
    store: Store, clock: ManualClock
) -> None:
    policy = Policy("webhooks", limits=(Concurrency(1, by="account"),))
    await store.declare(policy)
    await given_jobs(store, policy, ACME, 3)
    (stale,) = await claim(store, "webhooks", 1, worker=worker_named("lost"))
    clock.advance("31s")
    await store.reap()
    (newer,) = await claim(store, "webhooks", 1, worker=worker_named("next"))
    assert newer.id == stale.id
    late: list[RunOutcome] = [Released("drain"), Done(None), Failed("boom", 0), Cancelled("stop")]
    for outcome in late:
        assert await store.settle([settle(stale, outcome, 0)]) == [stale.id]
        assert await claim(store, "webhooks", 3) == []
    assert (await store.counts("webhooks")).running == 1
    await finish(store, [newer])
    await finish(store, await claim(store, "webhooks", 3))
    await finish(store, await claim(store, "webhooks", 3))
    await assert_at_rest(store, policy, clock, [ACME])


async def test_one_queue_s_limits_and_jobs_are_no_concern_of_another(store: Store, clock: ManualClock) -> None:
    policies = [Policy(name, limits=(Concurrency(2, by="account"), Concurrency(3))) for name in ("a", "b", "a.b")]
    for policy in policies:
        await store.declare(policy)
        await given_jobs(store, policy, ACME, 5)
    for policy in policies:
        claims = await claim(store, policy.queue, 5)
        assert [each.queue for each in claims] == [policy.queue] * 2
    assert (await store.counts("a")).ready == 3
