"""Limits at the claim: the sentences of `scenarios.md` that the pure plan can answer for."""

from __future__ import annotations

from collections import Counter

import pytest

from fairlane.clock import SECOND
from fairlane.policy import Concurrency, Fair, Level, Policy, Rate, gate_id
from fairlane.scheduler.board import RECHECK
from fairlane.scheduler.snapshot import Standing
from tests.scheduler.simulation import EPOCH, Bench, Fleet

FAIR = Fair(by="account", charge="count")


def positions(bench: Bench, want: int) -> list[int]:
    return [start.head.position for start in bench.claim(want).starts]


@pytest.mark.parametrize("by", [None, "account", "endpoint"], ids=["queue", "flow", "lane"])
@pytest.mark.parametrize("size", [1, 3, 100])
def test_a01_seven_tokens_start_seven_jobs_however_many_claims_ask(by: str | None, size: int) -> None:
    bench = Bench(Policy("q", FAIR, (Rate(7, per="1h", by=by),), ("account", "endpoint")))
    for priority in (0, 5):
        bench.enqueue({"account": "a", "endpoint": "e"}, count=20, priority=priority)
    assert sum(len(bench.claim(size).starts) for _ in range(20)) == 7


def test_a02_a_job_stopped_by_a_second_limit_costs_the_first_nothing() -> None:
    limits = (Rate(10, per="1h", by="account"), Concurrency(1, by="endpoint"))
    bench = Bench(Policy("q", FAIR, limits))
    bench.enqueue({"account": "a", "endpoint": "e"}, count=30)
    for _ in range(10):
        bench.claim(5)
    gate = bench.queue.gates[gate_id("q", "rate/3600s:account", ("a",))]
    assert len(bench.ledger.runs) == 1
    assert gate.tat == EPOCH + limits[0].interval


def test_a05_two_limits_of_one_kind_on_one_key_both_hold() -> None:
    limits = (Rate(10, per="1m", by="account"), Rate(30, per="1h", by="account"), Concurrency(9), Concurrency(4))
    fleet = Fleet(Policy("q", FAIR, limits), slots=20, run_time=lambda lane: SECOND)
    fleet.enqueue({"account": "a"}, count=100)
    fleet.run(until=EPOCH + 3_600 * SECOND)
    assert fleet.ledger.violations() == []
    assert 30 <= len(fleet.ledger.runs) <= 60


def test_a06_a_rate_by_endpoint_and_a_concurrency_by_account_each_hold_at_their_own_scope() -> None:
    limits = (Rate(5, per="1s", by="endpoint"), Concurrency(3, by="account"))
    fleet = Fleet(Policy("q", FAIR, limits), slots=30, run_time=lambda lane: SECOND // 4)
    for account in "abc":
        for endpoint in ("shared", f"of {account}"):
            fleet.enqueue({"account": account, "endpoint": endpoint}, count=20)
    fleet.run()
    assert fleet.ledger.violations() == []
    assert len(fleet.ledger.runs) == 120


@pytest.mark.parametrize("by", [None, "account", "endpoint"], ids=["queue", "flow", "lane"])
def test_a07_a_limit_of_zero_stops_its_key_without_a_busy_loop(by: str | None) -> None:
    bench = Bench(Policy("q", FAIR, (Concurrency(0, by=by),), ("account", "endpoint")))
    bench.enqueue({"account": "a", "endpoint": "e"}, count=3)
    plan = bench.claim(5)
    assert (plan.starts, plan.more, bench.queue.next_alarm()) == ([], False, None)
    read = bench.queue.rows_read
    bench.claim(5)
    assert bench.queue.rows_read - read <= 4


def test_a14_when_nothing_runs_every_count_is_zero_although_claims_were_given_back_and_reaped() -> None:
    bench = Bench(Policy("q", FAIR, (Concurrency(5), Concurrency(2, by="account"), Concurrency(1, by="endpoint"))))
    for nth in range(6):
        bench.enqueue({"account": str(nth % 2), "endpoint": str(nth)})
    bench.claim(10)
    done, back, gone, *_ = sorted(bench.claimed)
    bench.settle(done, 5)
    bench.give_back(back)
    bench.reap(gone, 5)
    for position in sorted(bench.claimed):
        bench.settle(position, 5)
    bench.claim(0)
    assert {gate.in_flight for gate in bench.queue.gates.values()} == {0}


@pytest.mark.parametrize("by", [None, "account", "endpoint"], ids=["queue", "flow", "lane"])
def test_a17_a_claim_given_back_gets_its_tokens_and_its_turn_back(by: str | None) -> None:
    bench = Bench(Policy("q", FAIR, (Rate(3, per="1h", by=by),), ("account", "endpoint")))
    bench.enqueue({"account": "a", "endpoint": "e"}, count=9)
    assert positions(bench, 5) == [1, 2, 3]
    assert positions(bench, 5) == []
    bench.give_back(3)
    bench.give_back(1)
    assert positions(bench, 5) == [1, 3]
    assert positions(bench, 5) == []
    assert [flow.vtime for flow in bench.queue.flows.values()] == [3.0]


def test_a_token_that_was_held_for_long_does_not_let_one_job_too_many_start() -> None:
    rate = Rate(100, per="1s", by="account")
    bench = Bench(Policy("q", FAIR, (rate,)))
    bench.enqueue({"account": "a"}, count=500)
    held = positions(bench, 100)
    bench.now += 1 * SECOND  # the bucket is full again
    assert len(positions(bench, 100)) == 100
    for position in held:
        bench.give_back(position)
    started_more = len(positions(bench, 100))
    assert started_more == 0, f"{100 + started_more} starts at one instant, of 100 allowed"


def test_l13_a_job_given_back_or_reaped_keeps_its_place() -> None:
    bench = Bench(Policy("q", FAIR))
    bench.enqueue({"account": "a"}, count=5)
    assert positions(bench, 3) == [1, 2, 3]
    bench.enqueue({"account": "a"})
    bench.reap(2, 10)
    bench.give_back(1)
    assert positions(bench, 9) == [1, 2, 4, 5, 6]


@pytest.mark.parametrize("fair", [None, FAIR], ids=["one flow", "fair"])
@pytest.mark.parametrize("by", ["account", "endpoint", ("account", "endpoint")])
def test_f05_behind_a_shut_gate_too_the_higher_priority_goes_first(
    fair: Fair | None, by: str | tuple[str, ...]
) -> None:
    bench = Bench(Policy("q", fair, (Concurrency(1, by=by),), ("account", "endpoint")))
    keys = {"account": "a", "endpoint": "e"}
    low = [head.position for head in bench.enqueue(keys, count=4)]
    (holder,) = positions(bench, 3)
    bench.now += SECOND
    high = [head.position for head in bench.enqueue(keys, count=4, priority=5)]
    order = []
    while holder:
        bench.settle(holder, 1_000)
        holder = next(iter(positions(bench, 3)), 0)
        order.append(holder)
    assert order == [*high, *low[1:], 0]


def test_lanes_of_one_flow_are_served_by_rank_although_newer_ones_have_just_rung() -> None:
    bench = Bench(Policy("q", None, keys=("account",)))
    for nth in range(40):
        bench.enqueue({"account": f"old{nth}"}, count=2)
    bench.claim(0)
    bench.now += SECOND
    for nth in range(40):
        bench.enqueue({"account": f"new{nth}"})
    assert len(positions(bench, 30)) == 30
    assert {run.enqueued_at for run in bench.ledger.runs} == {EPOCH}, "a later job went first"


def test_a_lane_whose_gate_nobody_asked_for_is_not_taken_to_be_open() -> None:
    """Idle lanes on the board made the plan load more lanes than it asked the gates of."""
    limits = (Rate(1, per="1h", by="endpoint"),)
    bench = Bench(Policy("q", Fair(by="account", charge="count"), limits))
    for nth in range(8):
        bench.enqueue({"account": "a", "endpoint": str(nth)})
    for position in positions(bench, 8):
        bench.settle(position, 1_000)
    for nth in range(4):
        bench.enqueue({"account": "a", "endpoint": str(nth)}, priority=9)
        bench.claim(0)
    bench.now += SECOND
    for nth in range(4, 8):
        bench.enqueue({"account": "a", "endpoint": str(nth)}, priority=-9)
    for _ in range(5):
        assert positions(bench, 1) == []


def test_a_shut_queue_starts_nothing_and_rings_when_it_opens() -> None:
    bench = Bench(Policy("q", FAIR, (Rate(2, per="10s", burst=1),)))
    bench.enqueue({"account": "a"}, count=5)
    assert positions(bench, 5) == [1]
    alarm = bench.queue.next_alarm()
    assert alarm == EPOCH + 5 * SECOND
    bench.now = alarm - 1
    assert positions(bench, 5) == []
    bench.now = alarm
    assert positions(bench, 5) == [2]


def test_cancelled_lanes_wait_on_no_gate_and_take_no_wakeup_from_others() -> None:
    bench = Bench(Policy("q", None, (Concurrency(1, by="region"),), ("region", "endpoint")))
    (holder,) = bench.enqueue({"region": "eu", "endpoint": "0"})
    bench.claim(1)
    for nth in range(1, 4):
        bench.enqueue({"region": "eu", "endpoint": str(nth)})
    bench.claim(3)
    for lane in [lane for lane, jobs in bench.ledger.waiting.items() if jobs][:2]:
        bench.withdraw(lane, bench.ledger.waiting[lane][0][0])
    bench.claim(0)
    assert [gate.waiting for gate in bench.queue.gates.values()] == [1]
    assert Counter(lane.standing for lane in bench.queue.lanes.values())[Standing.PARKED] == 1
    bench.settle(holder.position, 5)
    assert positions(bench, 1) == [4]


def test_a_lane_that_was_cancelled_in_the_same_breath_takes_no_wakeup_from_another() -> None:
    bench = Bench(Policy("q", None, (Concurrency(1, by="region"),), ("region", "endpoint")))
    (holder,) = bench.enqueue({"region": "eu", "endpoint": "0"})
    bench.claim(1)
    bench.enqueue({"region": "eu", "endpoint": "1"})
    bench.now += SECOND
    bench.enqueue({"region": "eu", "endpoint": "2"})
    bench.claim(3)
    bench.withdraw(next(lane for lane, jobs in bench.ledger.waiting.items() if jobs), 2)
    bench.settle(holder.position, 5)
    assert positions(bench, 1) == [3]


def test_a_ready_lane_that_was_cancelled_to_the_last_job_is_not_parked() -> None:
    bench = Bench(Policy("q", None, (Concurrency(1, by="region"),), ("region", "endpoint")))
    bench.enqueue({"region": "eu", "endpoint": "0"})
    bench.claim(1)
    bench.enqueue({"region": "eu", "endpoint": "1"})
    bench.claim(0)
    bench.withdraw(next(lane for lane, jobs in bench.ledger.waiting.items() if jobs), 2)
    bench.claim(1)
    assert [gate.waiting for gate in bench.queue.gates.values()] == [0]


def test_of_many_lanes_on_one_gate_the_one_with_the_highest_priority_is_woken_first() -> None:
    bench = Bench(Policy("q", None, (Concurrency(1, by="region"),), ("region", "endpoint")))
    (holder,) = bench.enqueue({"region": "eu", "endpoint": "holder"})
    bench.claim(1)
    for nth in range(30):
        bench.enqueue({"region": "eu", "endpoint": str(nth)})
    bench.claim(30)
    (urgent,) = bench.enqueue({"region": "eu", "endpoint": "urgent"}, priority=5)
    bench.claim(30)
    bench.settle(holder.position, 5)
    assert positions(bench, 1) == [urgent.position]


def test_of_a_tenants_few_lanes_on_one_gate_the_one_with_the_highest_priority_is_woken_first() -> None:
    bench = Bench(Policy("q", FAIR, (Concurrency(1, by="endpoint"),)))
    keys = {"account": "a", "endpoint": "e"}
    (holder,) = bench.enqueue(keys)
    bench.claim(1)
    for priority in (-3, -2, -1):  # each parks at a later virtual time than the one before
        bench.enqueue(keys, priority=priority)
        bench.claim(1)
        bench.enqueue({"account": "a", "endpoint": f"other{priority}"})
        bench.claim(1)
    bench.settle(holder.position, 5)
    (started,) = positions(bench, 1)
    assert bench.ledger.running[started].lane[0] == -1


def test_a_flow_that_gets_more_than_its_quota_still_serves_its_lanes_by_rank() -> None:
    bench = Bench(Policy("q", FAIR, keys=("account", "endpoint")))
    for nth in range(30):
        bench.enqueue({"account": "a", "endpoint": f"old{nth}"})
    bench.claim(0)
    bench.now += SECOND
    for nth in range(10):
        bench.enqueue({"account": f"b{nth}", "endpoint": "e"})
    for nth in range(3):
        bench.enqueue({"account": "a", "endpoint": f"new{nth}"})
    assert len(positions(bench, 20)) == 20
    late = [run for run in bench.ledger.runs if run.enqueued_at > EPOCH]
    assert "a" not in {dict(run.lane[1])["account"] for run in late}, "a later job went first"


def _woken_in_a_flow_that_parks() -> tuple[Bench, int]:
    """A lane of `a` is woken for the room in "eu", then its flow parks on its account before the lane is visited."""
    bench = Bench(Policy("q", FAIR, (Concurrency(2, by="region"), Concurrency(1, by="account"))))
    for account in "bc":  # they have had a turn: `a` is woken before them
        (ran,) = bench.enqueue({"account": account, "region": "us"})
        bench.claim(1)
        bench.settle(ran.position, 5)
    (first, second) = (bench.enqueue({"account": name, "region": "eu"})[0] for name in ("h1", "h2"))
    bench.claim(2)
    for account in "abc":
        bench.enqueue({"account": account, "region": "eu"})
        bench.claim(5)
    bench.settle(first.position, 5)
    bench.claim(0)
    for region in ("us1", "us2", "us3", "us4"):
        bench.enqueue({"account": "a", "region": region}, priority=5)
    assert len(bench.claim(1).starts) == 1
    woken = next(row for row in bench.queue.lanes.values() if row.keys == {"account": "a", "region": "eu"})
    assert woken.standing == Standing.READY
    assert bench.queue.gates[gate_id("q", "concurrency:region", ("eu",))].waiting == 2
    return bench, second.position


def test_f14_room_that_a_lane_in_a_parked_flow_was_woken_for_goes_to_the_next_lanes() -> None:
    bench, second = _woken_in_a_flow_that_parks()
    bench.settle(second, 5)
    bench.claim(5)
    running = {dict(run.lane[1])["account"] for run in bench.ledger.running.values()}
    assert running == {"a", "b", "c"}


def test_f14_room_that_nobody_comes_for_is_offered_again_within_its_time() -> None:
    bench, _ = _woken_in_a_flow_that_parks()
    bench.claim(5)
    if not _runs_in_eu(bench) & {"b", "c"}:
        alarm = bench.queue.next_alarm()
        assert alarm is not None
        assert alarm <= bench.now + RECHECK
        bench.now = alarm
        bench.claim(5)
    assert _runs_in_eu(bench) & {"b", "c"}


def _runs_in_eu(bench: Bench) -> set[str | None]:
    keys = [dict(run.lane[1]) for run in bench.ledger.running.values()]
    return {each["account"] for each in keys if each["region"] == "eu"}


def test_each_level_parks_what_it_stops() -> None:
    for by, level in ((None, Level.QUEUE), ("account", Level.FLOW), ("endpoint", Level.LANE)):
        bench = Bench(Policy("q", FAIR, (Concurrency(1, by=by),), ("account", "endpoint")))
        bench.enqueue({"account": "a", "endpoint": "e"}, count=3)
        bench.claim(3)
        (flow,), (lane,) = bench.queue.flows.values(), bench.queue.lanes.values()
        assert (flow.standing == Standing.PARKED) == (level is Level.FLOW)
        assert (lane.standing == Standing.PARKED) == (level is Level.LANE)
