"""A policy that changes while jobs wait and run."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from uuid import UUID

import pytest
from hypothesis import given, settings

from fairlane.clock import SECOND
from fairlane.policy import Concurrency, Fair, Policy, Rate, gate_id
from fairlane.scheduler.journal import MAX_LAG, Delta, Mark, Removed
from fairlane.scheduler.snapshot import Standing
from tests.scheduler.invariants import books_are_right
from tests.scheduler.lives import finish, take
from tests.scheduler.simulation import EPOCH, Bench
from tests.scheduler.strategies import Step, lives, policies

KEYS = ("account", "endpoint", "region")
FAIR = Fair(by="account", charge="count")


@settings(deadline=None, max_examples=120)
@given(policies(), policies(), lives(at_most=25), lives(at_most=15))
def test_a_change_of_policy_moves_what_is_in_flight_exactly_and_wakes_every_lane(
    old: Policy, new: Policy, before: list[Step], after: list[Step]
) -> None:
    old, new = replace(old, keys=KEYS), replace(new, keys=KEYS)
    bench = Bench(old)
    for step in before:
        take(bench, step)
    bench.ledger.crowded.clear()
    bench.apply(new)
    for lane in bench.queue.lanes.values():
        assert lane.standing == (Standing.READY if lane.ready > 0 else lane.standing)
        assert lane.standing != Standing.PARKED
    folded = Counter({lane.id: lane.in_flight for lane in bench.queue.lanes.values()})
    for gate_row in bench.queue.gates.values():
        bound = next(bound for bound in new.bound if bound.name == gate_row.limit)
        if isinstance(bound.limit, Concurrency):
            held = sum(
                folded[lane.id]
                for lane in bench.queue.lanes.values()
                if gate_row.id in {g for g, _ in (*new.gates_of(lane.priority, lane.keys), *new.queue_gates)}
            )
            assert gate_row.in_flight == held
    bench.claim(0)
    _check_counts(bench)
    for step in after:
        if step[0] != "claim":
            take(bench, step)
        else:
            bench.claim(step[1])
            _check_counts(bench)


def _check_counts(bench: Bench) -> None:
    for bound in bench.policy.bound:
        if isinstance(bound.limit, Concurrency):
            for scope in {bench.ledger.scope(bound.limit, run.lane) for run in bench.ledger.runs}:
                gate = bench.queue.gates[gate_id("q", bound.name, scope)]
                assert gate.in_flight == bench.ledger.in_flight(bound.limit, scope)


@settings(deadline=None, max_examples=60)
@given(policies(max_limits=2), lives(at_most=25))
def test_applying_the_policy_that_is_in_force_changes_no_count(policy: Policy, steps: list[Step]) -> None:
    bench = Bench(policy)
    for step in steps:
        take(bench, step)
    bench.claim(0)
    bench.apply(policy)
    bench.claim(0)
    books_are_right(bench)
    finish(bench)


@pytest.mark.parametrize("by", [None, "account", "endpoint"], ids=["queue", "flow", "lane"])
def test_a23_a_limit_lowered_below_what_is_in_flight_starts_nothing_until_that_has_drained(by: str | None) -> None:
    policy = Policy("q", FAIR, (Concurrency(5, by=by),), KEYS)
    bench = Bench(policy)
    bench.enqueue({"account": "a", "endpoint": "e", "region": "eu"}, count=20)
    assert len(bench.claim(9).starts) == 5
    bench.apply(replace(policy, limits=(Concurrency(2, by=by),)))
    bench.ledger.crowded.clear()
    for left in (4, 3, 2):
        assert bench.claim(9).starts == []
        assert bench.queue.gates[gate_id("q", bench.policy.bound[0].name, _scope(by))].in_flight == left + 1
        bench.settle(min(bench.claimed), 1_000)
    assert bench.claim(9).starts == []
    bench.settle(min(bench.claimed), 1_000)
    assert len(bench.claim(9).starts) == 1
    assert bench.ledger.violations() == []


def _scope(by: str | None) -> tuple[str, ...]:
    return {None: (), "account": ("a",), "endpoint": ("e",)}[by]


@pytest.mark.parametrize("by", [None, "account", "endpoint"], ids=["queue", "flow", "lane"])
@pytest.mark.parametrize("limits", [(), (4,)], ids=["deleted", "raised"])
def test_a24_raising_or_deleting_a_limit_wakes_who_waited_without_a_new_job(
    by: str | None, limits: tuple[int, ...]
) -> None:
    policy = Policy("q", FAIR, (Concurrency(1, by=by),), KEYS)
    bench = Bench(policy)
    bench.enqueue({"account": "a", "endpoint": "e", "region": "eu"}, count=4)
    assert len(bench.claim(9).starts) == 1
    bench.apply(replace(policy, limits=tuple(Concurrency(most, by=by) for most in limits)))
    assert len(bench.claim(9).starts) == 3


def test_a_limit_that_is_added_counts_what_started_before_it() -> None:
    policy = Policy("q", FAIR, (), KEYS)
    bench = Bench(policy)
    bench.enqueue({"account": "a", "endpoint": "e", "region": "eu"}, count=9)
    bench.claim(3)
    bench.apply(replace(policy, limits=(Concurrency(4, by="account"),)))
    assert len(bench.claim(9).starts) == 1


def test_spent_tokens_stay_spent_also_of_a_key_that_has_no_lane_any_more() -> None:
    policy = Policy("q", FAIR, (Rate(2, per="1h", by="endpoint"),), KEYS)
    bench = Bench(policy)
    keys = {"account": "a", "endpoint": "e", "region": "eu"}
    bench.enqueue(keys, count=2)
    for start in bench.claim(9).starts:
        bench.settle(start.head.position, 1_000)
    bench.claim(0)
    # Upkeep has collected them; the bucket is not full, so the gate is still there.
    removed = Removed(list(bench.queue.flows), list(bench.queue.lanes))
    bench.queue.board.apply(Delta(removed=removed), Mark(0, UUID(int=0)))
    bench.apply(replace(policy, limits=(*policy.limits, Concurrency(9))))
    bench.enqueue(keys, count=2)
    assert bench.claim(9).starts == []


def test_a_smaller_burst_does_not_shut_a_key_for_longer_than_its_own_refill() -> None:
    policy = Policy("q", FAIR, (Rate(60, per="1h", burst=600, by="account"),), KEYS)
    bench = Bench(policy)
    bench.enqueue({"account": "a", "endpoint": "e", "region": "eu"}, count=700)
    assert len(bench.claim(700).starts) == 600
    bench.apply(replace(policy, limits=(Rate(60, per="1h", burst=1, by="account"),)))
    assert bench.claim(9).starts == []
    assert bench.queue.next_alarm() == EPOCH + 60 * SECOND


def test_flows_that_a_new_fair_key_creates_are_owed_nothing_by_those_that_join_later() -> None:
    bench = Bench(Policy("q", FAIR, (), KEYS))
    for start in range(3_000):
        bench.enqueue({"account": "a", "endpoint": "e", "region": "eu"})
        bench.claim(1)
        bench.settle(start + 1, 1_000)
    bench.enqueue({"account": "a", "endpoint": "e", "region": "eu"}, count=50)
    bench.claim(0)
    bench.apply(Policy("q", Fair(by="region", charge="count"), (), KEYS))
    assert {flow.vtime for flow in bench.queue.flows.values()} == {bench.queue.queue.vtime}


def test_a_flow_that_a_change_of_policy_wakes_is_not_owed_more_than_its_lag() -> None:
    policy = Policy("q", FAIR, (Concurrency(0, by="region"),), KEYS)
    bench = Bench(replace(policy, limits=(Concurrency(0, by="region"),)))
    bench.enqueue({"account": "parked", "endpoint": "e", "region": "eu"}, count=10)
    bench.claim(1)
    bench.queue.queue = bench.queue.queue.__class__(50_000.0, 50_000.0, 9, 9, 0.0)
    bench.apply(replace(policy, limits=()))
    assert [flow.vtime for flow in bench.queue.flows.values()] == [50_000.0 - MAX_LAG]
