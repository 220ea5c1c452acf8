"""Turns, through real claims: who is served next, and that nobody's turn is lost in the tables."""

from __future__ import annotations

from collections import Counter
from math import ceil

import pytest

from fairlane.clock import ManualClock
from fairlane.job import Claim
from fairlane.policy import Concurrency, Fair, Policy, Rate
from fairlane.scheduler.settlement import Released
from fairlane.store.protocol import FOLD_AT_MOST, Store
from tests.store.harness import SECOND, by_key, claim, claim_once, finish, given_jobs, ids, new_jobs

BY_COUNT = Policy("webhooks", fair=Fair(by="account", charge="count"))


async def serve(store: Store, queue: str, batch: int, total: int, *, ran: int = 1_000) -> list[Claim]:
    """Claim and finish in batches until so many jobs have started, or none is left."""
    served: list[Claim] = []
    while len(served) < total and (claims := await claim(store, queue, min(batch, total - len(served)))):
        served += claims
        await finish(store, claims, ran=ran)
    return served


def widest_gap(served: list[Claim], accounts: set[str]) -> int:
    """The largest difference in starts between any two accounts, at any moment."""
    counts: Counter[str | None] = Counter(dict.fromkeys(accounts, 0))
    gap = 0
    for each in served:
        counts[each.keys["account"]] += 1
        gap = max(gap, max(counts.values()) - min(counts.values()))
    return gap


# F01
async def test_small_tenants_behind_a_huge_one_finish_within_a_bounded_number_of_turns(store: Store) -> None:
    await store.declare(BY_COUNT)
    await given_jobs(store, BY_COUNT, {"account": "huge"}, 10_000)
    for n in range(100):
        await given_jobs(store, BY_COUNT, {"account": f"small {n}"}, 10)
    served = await serve(store, "webhooks", 100, 1_010)
    assert by_key(served) == {"huge": 10} | {f"small {n}": 10 for n in range(100)}


# F02
async def test_every_key_is_served_within_keys_by_claim_size_claims(store: Store) -> None:
    await store.declare(BY_COUNT)
    keys, size = 150, 16
    for n in range(keys):
        await given_jobs(store, BY_COUNT, {"account": n}, 4)
    window = ceil(keys / size)
    claims = [await claim(store, "webhooks", size) for _ in range(3 * window)]
    for first in range(2 * window + 1):
        served = {each.keys["account"] for batch in claims[first : first + window] for each in batch}
        assert len(served) == keys, f"the {window} claims from claim {first} on left keys out"


# F04
@pytest.mark.parametrize("batch", [1, 3, 7, 50])
async def test_no_top_up_lets_a_hot_key_skip_its_turn(store: Store, batch: int) -> None:
    await store.declare(BY_COUNT)
    await given_jobs(store, BY_COUNT, {"account": "hot"}, 2_000)
    for account in "abcde":
        await given_jobs(store, BY_COUNT, {"account": account}, 40)
    served = await serve(store, "webhooks", batch, 240)
    assert widest_gap(served, {"hot", *"abcde"}) == 1


# F04
async def test_a_short_flow_s_share_of_a_claim_goes_to_all_others_alike(store: Store) -> None:
    await store.declare(BY_COUNT)
    for account, count in (("one", 1), ("two", 2), ("many", 100), ("more", 100)):
        await given_jobs(store, BY_COUNT, {"account": account}, count)
    (brought,) = [await claim(store, "webhooks", 43)]
    assert by_key(brought) == {"one": 1, "two": 2, "many": 20, "more": 20}


# F06
@pytest.mark.parametrize("charge", ["count", "time"])
async def test_weights_of_three_to_one_give_three_to_one(store: Store, charge: str) -> None:
    fair = Fair(by="account", weight={"gold": 3}, charge="time" if charge == "time" else "count")
    policy = Policy("webhooks", fair=fair)
    await store.declare(policy)
    await given_jobs(store, policy, {"account": "gold"}, 500)
    await given_jobs(store, policy, {"account": "plain"}, 500)
    served = by_key(await serve(store, "webhooks", 8, 400, ran=SECOND))
    assert served["gold"] == pytest.approx(300, abs=8)


# F06
async def test_an_idle_tenants_share_is_used_by_the_others(store: Store) -> None:
    policy = Policy("webhooks", fair=Fair(by="account", weight={"gold": 100}, charge="count"))
    await store.declare(policy)
    await given_jobs(store, policy, {"account": "gold"}, 3)
    await given_jobs(store, policy, {"account": "a"}, 20)
    await given_jobs(store, policy, {"account": "b"}, 20)
    assert len(await claim(store, "webhooks", 43)) == 43


# F06, F03
async def test_charged_by_time_a_tenant_with_long_jobs_gets_its_share_of_the_seconds(store: Store) -> None:
    policy = Policy("webhooks", fair=Fair(by="account"))
    await store.declare(policy)
    length = {"long": 30 * SECOND, "short": SECOND}
    await given_jobs(store, policy, {"account": "long"}, 100)
    await given_jobs(store, policy, {"account": "short"}, 800)
    seconds: Counter[str] = Counter()
    for _ in range(300):
        for each in await claim(store, "webhooks", 2):
            account = str(each.keys["account"])
            seconds[account] += length[account]
            await finish(store, [each], ran=length[account])
    assert seconds["long"] / seconds.total() == pytest.approx(0.5, abs=0.05)


# F07
async def test_a_key_that_was_idle_for_long_earns_no_credit(store: Store) -> None:
    await store.declare(BY_COUNT)
    await given_jobs(store, BY_COUNT, {"account": "early"}, 1)
    await serve(store, "webhooks", 1, 1)
    await given_jobs(store, BY_COUNT, {"account": "busy"}, 400)
    await serve(store, "webhooks", 10, 200)
    await given_jobs(store, BY_COUNT, {"account": "early"}, 100)
    await given_jobs(store, BY_COUNT, {"account": "new"}, 100)
    served = await serve(store, "webhooks", 5, 90)
    assert widest_gap(served, {"early", "busy", "new"}) <= 2


# F12
async def test_a_claim_given_back_does_not_cost_its_tenant_a_turn(store: Store) -> None:
    await store.declare(BY_COUNT)
    for account in "abc":
        await given_jobs(store, BY_COUNT, {"account": account}, 100)
    for _ in range(20):
        claims = await claim(store, "webhooks", 6)
        await finish(store, [each for each in claims if each.keys["account"] == "a"], Released("drain"))
        await finish(store, [each for each in claims if each.keys["account"] != "a"])
    counts = by_key(await serve(store, "webhooks", 6, 90))
    # `a` was served 40 times and given back 40 times: it is behind the others, never ahead of them.
    assert counts["a"] >= counts["b"]
    assert counts["a"] >= counts["c"]


# F09
@pytest.mark.parametrize("fair", [None, Fair(by="region"), Fair(by="account")], ids=["fifo", "lanes", "flows"])
@pytest.mark.parametrize("limit", [Concurrency(1, by="account"), Rate(1, per="1h", by="account")], ids=repr)
async def test_a_lane_stopped_by_a_limit_never_delays_another(
    store: Store, fair: Fair | None, limit: Concurrency | Rate
) -> None:
    policy = Policy("webhooks", fair=fair, limits=(limit,), keys=("account", "region"))
    await store.declare(policy)
    await given_jobs(store, policy, {"account": "stopped", "region": "eu"}, 300)
    free = [(await given_jobs(store, policy, {"account": n, "region": "eu"}, 1))[0] for n in range(20)]
    claims = await claim(store, "webhooks", 21)
    assert set(free) < set(ids(claims))
    late = await given_jobs(store, policy, {"account": "late", "region": "eu"}, 1, priority=-10)
    assert ids(await claim(store, "webhooks", 1)) == late


# F10
async def test_one_tenants_high_priority_never_takes_anothers_turn(store: Store) -> None:
    await store.declare(BY_COUNT)
    for priority in (-100, 0, 100):
        await given_jobs(store, BY_COUNT, {"account": "pushy"}, 30, priority=priority)
    await given_jobs(store, BY_COUNT, {"account": "calm"}, 90, priority=-50)
    served = await serve(store, "webhooks", 7, 120)
    assert widest_gap(served, {"pushy", "calm"}) == 1
    own = [each.priority for each in served if each.keys["account"] == "pushy"]
    assert own == [100] * 30 + [0] * 30


# F11
async def test_a_tenant_with_fifty_lanes_gets_the_share_of_a_tenant_with_one(store: Store) -> None:
    policy = Policy("webhooks", fair=Fair(by="account", charge="count"), limits=(Rate(1_000, per="1s", by="endpoint"),))
    await store.declare(policy)
    for n in range(50):
        await given_jobs(store, policy, {"account": "wide", "endpoint": n}, 4)
    await given_jobs(store, policy, {"account": "narrow", "endpoint": "only"}, 200)
    served = await serve(store, "webhooks", 9, 300)
    assert widest_gap(served, {"wide", "narrow"}) == 1


# F11
async def test_the_lanes_of_one_flow_are_served_in_the_order_of_their_heads(store: Store, clock: ManualClock) -> None:
    policy = Policy("webhooks", limits=(Concurrency(100, by="account"),))
    await store.declare(policy)
    order = []
    for n in range(60):
        order += await given_jobs(store, policy, {"account": n * 7 % 12}, 1)
        clock.advance(0.001)
    assert ids(await serve(store, "webhooks", 7, 60)) == order


# F12
@pytest.mark.parametrize("slots", [1, 3])
async def test_tenants_that_wait_at_one_gate_take_turns_there(store: Store, slots: int) -> None:
    fair = Fair(by="account", charge="count")
    policy = Policy("webhooks", fair=fair, limits=(Concurrency(slots, by="endpoint"),))
    await store.declare(policy)
    accounts = {str(n) for n in range(60)}
    for account in accounts:
        await given_jobs(store, policy, {"account": account, "endpoint": "shared"}, 3)
    # A claim asks for more than there is room: whoever gets nothing is parked, and must be woken in its turn.
    served = await serve(store, "webhooks", 150, 150)
    assert widest_gap(served, accounts) <= 2


# F12
async def test_lanes_that_wait_at_one_gate_start_in_the_order_of_their_age(store: Store, clock: ManualClock) -> None:
    policy = Policy("webhooks", limits=(Concurrency(1, by="account"),), keys=("account", "endpoint"))
    await store.declare(policy)
    order = []
    for n in range(40):
        order += await given_jobs(store, policy, {"account": "acme", "endpoint": n * 7 % 40}, 1)
        clock.advance(0.001)
    assert ids(await serve(store, "webhooks", 100, 40)) == order


# F13
async def test_a_flood_of_arrivals_never_delays_a_slot_of_the_whole_queue(store: Store) -> None:
    policy = Policy("webhooks", fair=Fair(by="account"), limits=(Concurrency(1),))
    await store.declare(policy)
    await given_jobs(store, policy, {"account": "first"}, 2)
    held = await claim(store, "webhooks", 1)
    await flood(store, policy)
    await finish(store, held)
    assert len((await claim_once(store, "webhooks", 1)).claims) == 1


# F13
async def test_a_flood_of_arrivals_never_delays_a_slot_of_one_key(store: Store) -> None:
    policy = Policy("webhooks", limits=(Concurrency(1, by="account"),))
    await store.declare(policy)
    _, waiting = await given_jobs(store, policy, {"account": "first"}, 2)
    held = await claim(store, "webhooks", 2)
    await flood(store, policy)
    await finish(store, held)
    assert waiting in ids((await claim_once(store, "webhooks", 2 * FOLD_AT_MOST)).claims)


async def flood(store: Store, policy: Policy) -> None:
    """More lane events than one claim folds."""
    await store.enqueue([job for n in range(3 * FOLD_AT_MOST) for job in new_jobs(policy, {"account": n})])


# F13
async def test_every_job_of_a_flood_is_started_in_the_end(store: Store) -> None:
    policy = Policy("webhooks", fair=Fair(by="account"), limits=(Concurrency(1, by="account"),))
    await store.declare(policy)
    await flood(store, policy)
    assert len(await claim(store, "webhooks", 4 * FOLD_AT_MOST)) == 3 * FOLD_AT_MOST


# F14
@pytest.mark.parametrize("fair", [None, Fair(by="region")], ids=["fifo", "fair"])
async def test_room_that_a_woken_lane_cannot_use_goes_to_the_next_lane_at_once(store: Store, fair: Fair | None) -> None:
    limits = (Concurrency(1, by="account"), Rate(2, per="1h", by="endpoint"))
    policy = Policy("webhooks", fair=fair, limits=limits, keys=("account", "endpoint", "region"))
    await store.declare(policy)

    async def given(account: str, endpoint: str, count: int) -> list[object]:
        return [*await given_jobs(store, policy, {"account": account, "endpoint": endpoint, "region": "eu"}, count)]

    await given("a", "w", 1)
    held = await claim(store, "webhooks", 1)
    await given("a", "x", 3)
    behind = await given("a", "y", 1)
    assert await claim(store, "webhooks", 5) == []
    for _ in range(2):  # somebody else spends what `x` allows
        await given("b", "x", 1)
        await finish(store, await claim(store, "webhooks", 1))
    await finish(store, held)
    assert ids(await claim(store, "webhooks", 5)) == behind


# F14
async def test_room_that_a_woken_lane_has_no_job_for_goes_to_the_next_lane_at_once(store: Store) -> None:
    policy = Policy("webhooks", limits=(Concurrency(1, by="account"),), keys=("account", "endpoint"))
    await store.declare(policy)
    await given_jobs(store, policy, {"account": "a", "endpoint": "w"}, 1)
    held = await claim(store, "webhooks", 1)
    doomed = [job for n in range(5) for job in await given_jobs(store, policy, {"account": "a", "endpoint": n}, 1)]
    behind = await given_jobs(store, policy, {"account": "a", "endpoint": "y"}, 1)
    assert await claim(store, "webhooks", 5) == []
    for job in doomed:
        await store.cancel(job)
    await finish(store, held)
    assert ids(await claim(store, "webhooks", 5)) == behind


# F14
async def test_as_many_lanes_start_as_slots_were_freed(store: Store) -> None:
    policy = Policy("webhooks", limits=(Concurrency(10, by="account"),), keys=("account", "endpoint"))
    await store.declare(policy)
    for n in range(100):
        await given_jobs(store, policy, {"account": "a", "endpoint": n}, 2)
    held = await claim(store, "webhooks", 100)
    assert len(held) == 10
    for freed in (1, 3, 10, 7, 1, 10, 10):
        await finish(store, held[:freed])
        fresh = await claim(store, "webhooks", 100)
        assert len(fresh) == freed
        held = [*held[freed:], *fresh]


# F09
async def test_lanes_that_arrive_behind_a_full_gate_delay_the_others_by_a_claim_or_two(store: Store) -> None:
    policy = Policy("api", fair=Fair(by="account", charge="count"), limits=(Concurrency(1, by="endpoint"),))
    await store.declare(policy)
    await store.enqueue(new_jobs(policy, {"account": "first", "endpoint": "full"}))
    assert len(await claim(store, "api", 1)) == 1
    await store.enqueue(
        [job for n in range(900) for job in new_jobs(policy, {"account": f"late {n}", "endpoint": "full"})]
    )
    free = new_jobs(policy, {"account": "last", "endpoint": "free"})
    await store.enqueue(free)
    brought = [await claim_once(store, "api", 1) for _ in range(2)]
    assert [each.id for once in brought for each in once.claims] == [free[0].id]
