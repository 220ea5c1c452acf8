"""Whatever the policy and whatever happens, these hold.

After every claim `lives.py` and `invariants.py` check, against a ledger that never reads the plan's rows: no limit is
exceeded, gates hold exactly what runs and what was charged (A02), jobs of a lane start in the order of their positions
(L13), lanes and flows are counted right, parked ones are counted by their gates, no ready flow lies behind the cursor
(F12), and a claim that returned fewer than wanted left nothing behind that could start.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given, settings

from fairlane.policy import Policy
from tests.scheduler.lives import checked_claim, drain, finish, take
from tests.scheduler.simulation import Bench
from tests.scheduler.strategies import Step, busy_lives, lives, policies, wide_policies


@settings(deadline=None, max_examples=200)
@given(policies(), lives())
def test_no_life_of_a_queue_breaks_a_limit_loses_a_job_or_leaves_a_slot_unused(
    policy: Policy, steps: list[Step]
) -> None:
    bench = Bench(policy)
    for step in steps:
        take(bench, step)
    finish(bench)


@settings(deadline=None, max_examples=120)
@given(wide_policies(), busy_lives())
def test_no_life_of_a_queue_with_many_lanes_breaks_a_limit_or_loses_a_job(policy: Policy, steps: list[Step]) -> None:
    bench = Bench(policy)
    for step in steps:
        take(bench, step)
    finish(bench)


@settings(deadline=None, max_examples=60)
@given(policies(), lives())
def test_every_job_is_started_once_more_than_it_was_given_back_or_reaped(policy: Policy, steps: list[Step]) -> None:
    bench = Bench(replace(policy, limits=tuple(limit for limit in policy.limits if getattr(limit, "max", 1))))
    again: Counter[int] = Counter()
    for step in steps:
        if step[0] == "withdraw":
            continue
        before = set(bench.claimed)
        take(bench, step)
        if step[0] in ("give back", "reap"):
            again.update(before - set(bench.claimed))
    drain(bench)
    starts = Counter(run.position for run in bench.ledger.runs)
    enqueued = range(1, bench.queue._position + 1)
    assert starts == Counter({position: 1 + again[position] for position in enqueued})


@settings(deadline=None, max_examples=60)
@given(policies(max_limits=0), lives())
def test_without_limits_the_lanes_of_a_flow_are_served_in_the_order_of_their_ranks(
    policy: Policy, steps: list[Step]
) -> None:
    bench = Bench(policy)
    for step in steps:
        if step[0] == "claim":
            checked_claim(bench, step[1], in_order=True)
        else:
            take(bench, step)
    while checked_claim(bench, 3, in_order=True):
        pass


@settings(deadline=None, max_examples=40)
@given(policies(), lives())
def test_a_claim_for_nothing_starts_nothing_and_folds_every_bell(policy: Policy, steps: list[Step]) -> None:
    bench = Bench(policy)
    for step in steps:
        take(bench, step)
    plan = bench.claim(0)
    assert plan.starts == []
    assert not bench.queue.arrivals
    assert not bench.queue.releases
