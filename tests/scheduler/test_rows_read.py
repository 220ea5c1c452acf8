"""What a claim reads is bounded by what it serves, whatever waits."""

from __future__ import annotations

from typing import Literal

import pytest

from fairlane.clock import SECOND
from fairlane.policy import Concurrency, Fair, Limit, Policy, Rate
from fairlane.scheduler import resident
from fairlane.simulation.memory import MemoryQueue
from tests.scheduler.simulation import Bench

FAIR = Fair(by="account", charge="count")
POLICIES = {
    "one flow": Policy("q", None, keys=("account", "endpoint")),
    "a flow each": Policy("q", Fair(by=("account", "endpoint"), charge="count")),
    "many-laned flows": Policy("q", FAIR, keys=("account", "endpoint")),
    "gated lanes": Policy("q", FAIR, (Concurrency(2, by="endpoint"), Rate(1_000, per="1s", by="endpoint"))),
    "gated flows": Policy("q", FAIR, (Concurrency(50, by="account"),), ("account", "endpoint")),
    "gated queue": Policy("q", FAIR, (Concurrency(10_000), Rate(10_000, per="1s")), ("account", "endpoint")),
}


def most_rows_per_claim(policy: Policy, lanes: int, want: int, *, deep: int = 2) -> int:
    bench = Bench(policy)
    for nth in range(lanes):
        bench.enqueue({"account": str(nth % 20), "endpoint": str(nth)}, count=deep)
    while bench.queue.arrivals:
        bench.claim(0)
    most = 0
    for _ in range(4):
        bench.now += SECOND
        before = bench.queue.rows_read
        started = bench.claim(want).starts
        most = max(most, bench.queue.rows_read - before)
        assert len(started) == want
        for start in started:
            bench.settle(start.head.position, 1_000)
    return most


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("want", [1, 20])
def test_a_claim_reads_as_many_rows_with_a_hundred_lanes_as_with_thousands(policy: Policy, want: int) -> None:
    few, many = most_rows_per_claim(policy, 100, want), most_rows_per_claim(policy, 5_000, want)
    assert max(few, many) <= 16 * want + 80
    assert many <= 1.2 * few + 20


@pytest.mark.parametrize("policy", [POLICIES["one flow"], POLICIES["many-laned flows"]], ids=["one flow", "fair"])
def test_a_claim_reads_as_many_rows_with_a_thousand_jobs_waiting_as_with_a_hundred_thousand(policy: Policy) -> None:
    many, few = (most_rows_per_claim(policy, 100, 20, deep=deep) for deep in (1_000, 40))
    assert abs(many - few) <= 2


@pytest.mark.parametrize("weight", [1.0, {"0": 5.0, "1": 0.5}], ids=["even", "uneven"])
@pytest.mark.parametrize("charge", ["count", "time"])
def test_no_job_is_looked_up_twice_however_the_turns_fall(
    charge: Literal["count", "time"], weight: float | dict[str, float]
) -> None:
    bench = Bench(Policy("q", Fair(by="account", charge=charge, weight=weight)))
    for account in range(30):
        bench.enqueue({"account": str(account)}, count=20)
    for want in (30, 45, 100, 200, 225):
        started = bench.claim(want).starts
        assert len(started) == want
        for start in started:
            bench.settle(start.head.position, 1_000 * (1 + start.head.position % 7))
    assert bench.queue.heads_read == 600


@pytest.mark.parametrize(
    "limit",
    [Concurrency(1, by="account"), Concurrency(0, by="endpoint"), Rate(1, per="1d", by="region")],
    ids=["flows on one gate each", "lanes on a gate each", "all on one gate"],
)
def test_parked_lanes_cost_a_claim_nothing(limit: Limit) -> None:
    def rows(parked: int) -> int:
        bench = Bench(Policy("q", FAIR, (limit,), ("account", "endpoint", "region")))
        for nth in range(parked):
            bench.enqueue({"account": f"p{nth % 50}", "endpoint": f"e{nth}", "region": "eu"}, count=2)
        for _ in range(60):
            bench.claim(100)
        open_keys = {"account": "open", "endpoint": "open", "region": "us"}
        if isinstance(limit, Concurrency) and limit.max == 0:
            return _rows_of_an_empty_claim(bench)
        bench.enqueue(open_keys)
        before = bench.queue.rows_read
        assert len(bench.claim(5).starts) == 1
        return bench.queue.rows_read - before

    assert rows(2_000) <= rows(100) + 2


def _rows_of_an_empty_claim(bench: Bench) -> int:
    before = bench.queue.rows_read
    assert bench.claim(5).starts == []
    return bench.queue.rows_read - before


def test_one_flow_whose_lanes_all_turn_out_shut_is_left_after_a_bounded_number_of_rows() -> None:
    bench = Bench(Policy("q", None, (Concurrency(1, by="endpoint"),)))
    for nth in range(1_500):
        bench.enqueue({"endpoint": str(nth)}, count=2)
    while bench.queue.arrivals:
        bench.claim(0)
    for _ in range(150):
        bench.claim(10)
    before = bench.queue.rows_read
    plan = bench.claim(10)
    assert plan.starts == []
    assert bench.queue.rows_read - before <= 40 * 10 + 400


def test_lanes_that_run_short_of_known_jobs_are_looked_up_together() -> None:
    # Short runs are charged less and have more turns: lanes run out of the jobs that are known at different times.
    bench, claims = Bench(Policy("q", Fair(by="account"))), 0
    for nth in range(300):
        bench.enqueue({"account": str(nth)}, count=40)
    while started := bench.claim(100).starts:
        claims += 1
        bench.now += SECOND // 10
        for start in started:
            account = int(bench.queue.board.lanes[start.lane].keys["account"] or 0)
            bench.settle(start.head.position, 1_000 * (1 + account % 30))
    assert bench.queue.questions <= claims / 2


def test_where_no_jobs_are_kept_beyond_those_that_start_every_claim_still_fills_its_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So many lanes are held that none keeps spare jobs, and some of them have a few left over."""
    monkeypatch.setattr(resident, "MOST_HEADS", 0)
    queue, now = MemoryQueue(Policy("q", Fair(by="account"), (Concurrency(50, by="account"),))), 0
    for account in ("a", "b", "c"):
        queue.enqueue(now, {"account": account, "task": "t"}, 20)
    started = [len(queue.claim(now + turn, want).starts) for turn, want in enumerate((3, 5, 2, 2, 4, 1, 3))]
    assert started == [3, 5, 2, 2, 4, 1, 3]
