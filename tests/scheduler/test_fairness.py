"""Turns between flows: the sentences of `scenarios.md`, one by one."""

from __future__ import annotations

from collections import Counter
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlane.clock import SECOND
from fairlane.policy import Concurrency, Fair, Policy, Rate
from fairlane.scheduler.journal import MAX_LAG
from fairlane.scheduler.snapshot import Standing
from tests.scheduler.ledger import LaneKey
from tests.scheduler.simulation import EPOCH, Bench, Fleet

BY_COUNT = Policy("q", Fair(by="account", charge="count"))
BY_TIME = Policy("q", Fair(by="account"))


def accounts(fleet: Bench, since: int = 0) -> list[str | None]:
    """Whose jobs were started, in order."""
    return [dict(run.lane[1])["account"] for run in fleet.ledger.runs[since:]]


def fleet_of(policy: Policy, slots: int, took: int = SECOND) -> Fleet:
    return Fleet(policy, slots=slots, run_time=lambda lane: took)


@pytest.mark.parametrize("policy", [BY_COUNT, BY_TIME], ids=["by count", "by time"])
def test_f01_small_tenants_behind_a_hundred_thousand_jobs_finish_within_their_turns(policy: Policy) -> None:
    fleet = fleet_of(policy, slots=20, took=5_000)
    fleet.enqueue({"account": "big"}, count=100_000)
    fleet.run(until=EPOCH + SECOND)
    before = len(fleet.ledger.runs)
    for nth in range(100):
        fleet.enqueue({"account": f"small{nth}"}, count=10)
    fleet.run(until=fleet.now + SECOND)
    order = accounts(fleet, before)
    last_small = max(n for n, account in enumerate(order) if account != "big")
    assert last_small < 10 * 101 + 2 * fleet.slots


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 60), st.integers(1, 15), st.integers(1, 4))
def test_f02_every_key_is_served_within_as_many_claims_as_the_keys_need(keys: int, size: int, deep: int) -> None:
    bench = Bench(BY_COUNT)
    for nth in range(keys):
        bench.enqueue({"account": str(nth)}, count=deep)
    rounds = ceil(keys / size)
    last_served = dict.fromkeys(map(str, range(keys)), -1)
    for claim in range(deep * rounds + 1):
        for start in bench.claim(size).starts:
            last_served[str(dict(bench.names[start.lane][1])["account"])] = claim
        waiting = {str(dict(lane[1])["account"]) for lane, jobs in bench.ledger.waiting.items() if jobs}
        assert all(claim - last_served[account] < rounds + 1 for account in waiting)
        for position in sorted(bench.claimed):
            bench.settle(position, 1_000)
    assert not bench.queue.waiting()


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 30), min_size=2), st.integers(1, 60))
def test_f04_within_a_claim_no_flow_gets_a_second_turn_before_another_had_its_first(
    depth: dict[str, int], want: int
) -> None:
    bench = Bench(BY_COUNT)
    for account, count in depth.items():
        bench.enqueue({"account": account}, count=count)
    bench.claim(want)
    served: Counter[str | None] = Counter()
    for who in accounts(bench):
        assert all(served[other] >= served[who] for other in depth if served[other] < depth[other])
        served[who] += 1
    assert sum(served.values()) == min(want, sum(depth.values()))


@pytest.mark.parametrize("a_second", [1, 2])
def test_f05_a_low_priority_job_runs_once_the_head_start_of_the_others_is_used_up(a_second: int) -> None:
    fleet = fleet_of(Policy("q", priority_step=60 * SECOND), slots=1)
    low = fleet.enqueue({}, priority=0)[0]
    for second in range(900):
        fleet.enqueue({}, count=a_second, priority=5)
        fleet.run(until=EPOCH + second * SECOND + SECOND // 2)
        fleet.now = EPOCH + (second + 1) * SECOND
        fleet._end_due()
    started = next(run.at for run in fleet.ledger.runs if run.position == low.position)
    # Before it come those enqueued within its five steps of sixty seconds, one a second.
    assert abs(started - EPOCH - 300 * a_second * SECOND) <= 2 * SECOND


@pytest.mark.parametrize("policy_charge", ["count", "time"])
def test_f06_weights_of_three_to_one_give_three_to_one_and_an_idle_share_goes_to_the_others(
    policy_charge: str,
) -> None:
    fair = Fair(by="account", weight={"a": 3}, charge="count" if policy_charge == "count" else "time")
    fleet = fleet_of(Policy("q", fair), slots=4)
    fleet.enqueue({"account": "a"}, count=600)
    fleet.enqueue({"account": "b"}, count=400)
    fleet.run(until=EPOCH + 100 * SECOND)
    had = fleet.service("account", EPOCH, fleet.now)
    assert had["a"] / had["b"] == pytest.approx(3, rel=0.05)
    fleet.run()
    assert fleet.now == EPOCH + 1_000 // 4 * SECOND, "a slot stood idle"


def test_f07_a_key_that_was_idle_for_long_rejoins_without_credit() -> None:
    fleet = fleet_of(BY_TIME, slots=4)
    fleet.enqueue({"account": "idle"})
    fleet.enqueue({"account": "busy"}, count=40_000)
    fleet.run(until=EPOCH + 5_000 * SECOND)
    before = len(fleet.ledger.runs)
    fleet.enqueue({"account": "idle"}, count=1_000)
    fleet.run(until=fleet.now + 100 * SECOND)
    order = accounts(fleet, before)
    for upto in range(1, len(order) + 1):
        served = Counter(order[:upto])
        assert abs(served["idle"] - served["busy"]) <= 2 * (fleet.slots + 1)


def test_f09_a_lane_stopped_by_a_limit_never_delays_another_of_its_flow_or_priority() -> None:
    for fair in (None, Fair(by="account")):
        bench = Bench(Policy("q", fair, (Concurrency(1, by="endpoint"),), ("account", "endpoint")))
        bench.enqueue({"account": "a", "endpoint": "slow"}, count=50)
        bench.claim(10)
        for nth in range(9):
            bench.enqueue({"account": "a", "endpoint": f"quick{nth}"})
        assert len(bench.claim(9).starts) == 9


def test_f10_one_tenants_high_priority_never_takes_another_tenants_turn() -> None:
    fleet = fleet_of(BY_TIME, slots=4)
    fleet.enqueue({"account": "loud"}, count=400, priority=100)
    fleet.enqueue({"account": "quiet"}, count=400, priority=-100)
    fleet.run(until=EPOCH + 150 * SECOND)
    served = Counter(accounts(fleet))
    assert abs(served["loud"] - served["quiet"]) <= 2 * (fleet.slots + 1)


@pytest.mark.parametrize("lanes", [2, 50])
def test_f11_a_tenant_with_many_lanes_gets_the_same_number_of_turns_as_a_tenant_with_one(lanes: int) -> None:
    fleet = fleet_of(Policy("q", Fair(by="account", charge="count"), keys=("account", "endpoint")), slots=7)
    for nth in range(lanes):
        fleet.enqueue({"account": "many", "endpoint": str(nth)}, count=400 // lanes)
    fleet.enqueue({"account": "one", "endpoint": "0"}, count=400)
    fleet.run(until=EPOCH + 100 * SECOND)
    served = Counter(accounts(fleet))
    assert abs(served["many"] - served["one"]) <= 2


def test_f12_a_refund_moves_a_flow_back_and_the_cursor_with_it() -> None:
    bench = Bench(BY_COUNT)
    bench.enqueue({"account": "a"}, count=20)
    bench.claim(10)
    bench.enqueue({"account": "b"}, count=20)
    bench.claim(4)
    for position in range(1, 11):
        bench.give_back(position)
    bench.claim(0)
    assert bench.queue.queue.cursor < 10.0
    # What was never run does not count against a; it is behind b by what it missed, and no job is lost.
    assert Counter(accounts(bench, len(bench.ledger.runs)))["a"] == 0
    before = len(bench.ledger.runs)
    bench.claim(26)
    assert Counter(accounts(bench, before))["a"] >= 13


def test_f12_a_flow_that_was_only_parked_keeps_its_turn() -> None:
    policy = Policy("q", Fair(by="account", charge="count"), (Rate(1, per="1s", burst=1, by="account"),))
    fleet = fleet_of(policy, slots=1, took=10_000)
    for nth in range(60):
        fleet.enqueue({"account": f"t{nth}"}, count=30)
    fleet.run(until=EPOCH + 20 * SECOND)
    served = Counter(accounts(fleet))
    assert max(served.values()) - min(served.values()) <= 1, "equal flows behind equal rates had unequal turns"


def test_f13_a_flood_of_arrivals_never_delays_the_slots_that_were_freed() -> None:
    bench = Bench(Policy("q", None, (Concurrency(1, by="account"),)))
    bench.enqueue({"account": "a"}, count=2)
    (first,) = bench.claim(5).starts
    bench.now += SECOND
    bench.settle(first.head.position, 1_000)
    for nth in range(3_000):
        bench.enqueue({"account": f"flood{nth}"})
    assert [start.head.position for start in bench.claim(1).starts] == [2]
    assert bench.queue.arrivals, "the flood was to be larger than one claim folds"


def test_f14_capacity_that_a_woken_lane_cannot_use_goes_to_the_next_at_once() -> None:
    limits = (Concurrency(1, by="region"), Concurrency(1, by="endpoint"))
    bench = Bench(Policy("q", None, limits))
    (busy,) = bench.enqueue({"region": "us", "endpoint": "e1"})
    (holder,) = bench.enqueue({"region": "eu", "endpoint": "e0"})
    assert len(bench.claim(2).starts) == 2
    bench.enqueue({"region": "eu", "endpoint": "e1"})  # woken first, and stopped by its endpoint
    bench.claim(2)
    (able,) = bench.enqueue({"region": "eu", "endpoint": "e2"})
    bench.claim(2)
    bench.settle(holder.position, 1_000)
    assert [start.head.position for start in bench.claim(2).starts] == [able.position]
    assert busy.position in bench.claimed


def _parked_for_long(newcomers: int) -> tuple[Fleet, int]:
    """`parked` waits on a region for long while `served` is served; then the region opens wide."""
    policy = Policy("q", Fair(by="account", charge="count"), (Concurrency(50, by="region"),))
    fleet = Fleet(policy, slots=60, run_time=lambda lane: _hog_or_quick(lane))
    fleet.enqueue({"account": "hog", "region": "eu"}, count=50)
    fleet.enqueue({"account": "parked", "region": "eu"}, count=9_000)
    fleet.enqueue({"account": "served", "region": "us"}, count=20_000)
    fleet.run(until=EPOCH + 900 * SECOND)
    assert fleet.service("account", EPOCH, fleet.now)["served"] > 8 * MAX_LAG * SECOND
    for nth in range(newcomers):
        fleet.enqueue({"account": f"new{nth}", "region": "us"}, count=3_000)
    before = len(fleet.ledger.runs)
    fleet.run(until=EPOCH + 1_300 * SECOND)
    return fleet, before


def _hog_or_quick(lane: LaneKey) -> int:
    return 1_000 * SECOND if dict(lane[1])["account"] == "hog" else SECOND


@pytest.mark.parametrize("newcomers", [0, 1])
def test_a_flow_that_was_parked_for_long_never_besieges_the_others_beyond_its_lag(newcomers: int) -> None:
    fleet, before = _parked_for_long(newcomers)
    longest = wait = 0
    for account in accounts(fleet, before):
        wait = 0 if account == "served" else wait + 1
        longest = max(longest, wait)
    assert longest <= (1 + newcomers) * (MAX_LAG + fleet.slots)
    assert Counter(accounts(fleet, before))["parked"] > MAX_LAG, "the parked flow never came back"


@pytest.mark.parametrize("arrives_after", [0, 500, 1_500, 100_000], ids="{}µs".format)
@pytest.mark.parametrize("cost", [0.0, 34.0], ids=["no history", "a history of long jobs"])
def test_an_alone_flow_whose_guess_was_far_too_high_neither_locks_out_nor_favours_a_newcomer(
    arrives_after: int, cost: float
) -> None:
    fleet = fleet_of(BY_TIME, slots=50, took=1_000)
    fleet.queue.queue = fleet.queue.queue.__class__(0.0, 0.0, 0, 0, cost)
    fleet.enqueue({"account": "alone"}, count=20_000)
    fleet.run(until=EPOCH + arrives_after)
    before = len(fleet.ledger.runs)
    fleet.enqueue({"account": "newcomer"}, count=5_000)
    fleet.run(until=fleet.now + 200_000)
    order = accounts(fleet, before)
    assert "newcomer" in order[: MAX_LAG + 2 * fleet.slots], "locked out"
    served = Counter(order)
    assert abs(served["newcomer"] - served["alone"]) <= MAX_LAG + 2 * fleet.slots


def test_a_newcomer_that_joined_on_a_guess_far_too_high_is_not_locked_out_by_its_correction() -> None:
    bench = Bench(BY_TIME)
    bench.queue.queue = bench.queue.queue.__class__(0.0, 0.0, 0, 0, 34.0)
    bench.enqueue({"account": "alone"}, count=5_000)
    bench.claim(50)
    bench.enqueue({"account": "newcomer"}, count=10)
    bench.claim(0)  # it joins at 50 guesses of 34 seconds
    before = len(bench.ledger.runs)
    for _ in range(60):
        for position in sorted(bench.claimed):
            bench.settle(position, 1_000)
        bench.claim(50)
    order = accounts(bench, before)
    assert order.index("newcomer") <= MAX_LAG + 50


def test_an_empty_flow_is_idle_and_costs_no_claim_a_row() -> None:
    bench = Bench(BY_COUNT)
    bench.enqueue({"account": "a"})
    bench.claim(5)
    assert [flow.standing for flow in bench.queue.flows.values()] == [Standing.IDLE]
    read = bench.queue.rows_read
    bench.claim(5)
    assert bench.queue.rows_read == read


def test_a_flow_that_owes_no_more_than_a_job_has_its_turn_and_pays_after_it() -> None:
    bench = Bench(BY_TIME)
    for account in "abcd":
        bench.enqueue({"account": account}, count=50)
    for _ in range(5):  # until run times are known
        for start in bench.claim(4).starts:
            bench.settle(start.head.position, 1_000)
    uneven = {start.lane: start for start in bench.claim(4).starts}
    assert len(uneven) == 4
    for nth, start in enumerate(uneven.values()):
        bench.settle(start.head.position, 500 + 400 * nth)  # from half a job to not quite two
    # Some owe a little. Before their turn it would cost one of them its own: who is owed half a job would have two.
    assert {start.lane for start in bench.claim(4).starts} == set(uneven)


def test_a_flow_that_owes_more_than_a_job_waits_until_the_others_have_had_as_much() -> None:
    bench = Bench(BY_TIME)
    for account in "ab":
        bench.enqueue({"account": account}, count=50)
    for _ in range(5):
        for start in bench.claim(2).starts:
            bench.settle(start.head.position, 1_000)
    slow, quick = bench.claim(2).starts
    bench.settle(slow.head.position, 5_000)
    bench.settle(quick.head.position, 1_000)
    served = [bench.claim(1).starts[0] for _ in range(3)]
    assert {start.lane for start in served} == {quick.lane}
