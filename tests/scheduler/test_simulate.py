"""Simulations: whatever the policy and the jobs, the timeline they give is one that could have happened."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from fairlane.clock import SECOND
from fairlane.policy import Concurrency, Fair, Policy, Rate
from fairlane.policy.gates import FromJob
from fairlane.simulation.measures import Simulation, Waits, jain_index, measure, timeline
from fairlane.simulation.run import Fleet, JobKind, Recording, SimulatedJob, play
from tests.scheduler.ledger import scope_of, too_fast
from tests.scheduler.strategies import keys, policies, priorities

kinds = st.builds(
    lambda keys, priority: JobKind(str(keys["account"]), {**keys, "task": "t"}, priority),
    keys=keys,
    priority=priorities,
)
run_times = st.sampled_from([0, 1_000, 50_000, SECOND, 34 * SECOND])
moments = st.sampled_from([0, 0, 0, 1, 1_000, 300_000, SECOND, 61 * SECOND])
retries = st.sampled_from([(), (), (), (0,), (SECOND,), (1_000, 10 * SECOND)])


@st.composite
def workloads(draw: st.DrawFn) -> list[SimulatedJob]:
    some = draw(st.lists(kinds, min_size=1, max_size=6))
    jobs = draw(
        st.lists(
            st.builds(SimulatedJob, st.sampled_from(some), moments, run_times, retries, st.booleans()), max_size=40
        )
    )
    return sorted(jobs, key=lambda job: job.at)


trips = st.sampled_from([0, 0, 1, 3_000, 200_000])
fleets = st.builds(Fleet, slots=st.integers(1, 6), claim_time=trips, settle_time=trips)


def starts_by_scope(record: Recording, by: tuple[str, ...]) -> dict[tuple[str | None, ...], list[tuple[int, int]]]:
    found = defaultdict(list)
    for place, begin, end in zip(record.kind_of, record.started_at, record.finished_at, strict=True):
        kind = record.kinds[place]
        found[scope_of(by, (kind.priority, tuple(kind.keys.items())))].append((begin, end))
    return found


def most_at_once(runs: list[tuple[int, int]]) -> int:
    # Runs that take no time at all overlap with nothing.
    changes = sorted(
        [(begin, 1) for begin, end in runs if begin < end] + [(end, -1) for begin, end in runs if begin < end]
    )
    level = most = 0
    for _, change in changes:
        level += change
        most = max(most, level)
    return most


@settings(deadline=None, max_examples=150)
@given(policies(), workloads(), fleets)
def test_no_simulated_timeline_exceeds_a_limit_or_the_slots(
    policy: Policy, jobs: list[SimulatedJob], fleet: Fleet
) -> None:
    record = play(policy, jobs, fleet)
    for limit in policy.limits:
        for runs in starts_by_scope(record, limit.by).values():
            if isinstance(limit, Concurrency):
                assert most_at_once(runs) <= limit.max
            elif isinstance(limit, Rate):
                assert too_fast(limit, [begin for begin, _ in runs]) == []
    assert most_at_once(starts_by_scope(record, ())[()]) <= fleet.slots


@settings(deadline=None, max_examples=100)
@given(policies(), workloads(), fleets)
def test_every_job_runs_as_often_as_it_says_and_never_before_its_time(
    policy: Policy, jobs: list[SimulatedJob], fleet: Fleet
) -> None:
    policy = Policy("q", policy.fair, tuple(each for each in policy.limits if getattr(each, "max", 1)), policy.keys)
    record = play(policy, jobs, fleet)
    assert len(record.kind_of) == sum(1 + len(job.retries) for job in jobs)
    assert record.left == []
    assert record.retried == sum(len(job.retries) for job in jobs)
    assert record.dead == sum(job.dies for job in jobs)
    for ready_at, started_at in zip(record.ready_at, record.started_at, strict=True):
        assert started_at >= ready_at + fleet.claim_time


@settings(deadline=None, max_examples=100)
@given(policies(max_limits=0), workloads(), st.integers(1, 6))
def test_without_limits_and_trips_no_slot_is_free_while_a_job_waits(
    policy: Policy, jobs: list[SimulatedJob], slots: int
) -> None:
    record = play(policy, jobs, Fleet(slots=slots, claim_time=0, settle_time=0))
    runs = list(zip(record.ready_at, record.started_at, record.finished_at, strict=True))
    for ready_at, started_at, _ in runs:
        if started_at > ready_at:
            for moment in {ready_at, started_at - 1, *(end for _, _, end in runs if ready_at <= end < started_at)}:
                assert sum(begin <= moment < end for _, begin, end in runs) == slots


@settings(deadline=None, max_examples=50)
@given(policies(), workloads(), fleets)
def test_the_same_jobs_under_the_same_policy_always_give_the_same_recording(
    policy: Policy, jobs: list[SimulatedJob], fleet: Fleet
) -> None:
    one, other = play(policy, jobs, fleet), play(policy, jobs, fleet)
    assert one == other
    assert measure(one) == measure(other)


@settings(deadline=None, max_examples=50)
@given(policies(), workloads(), fleets, st.sampled_from([1, 50_000, 2 * SECOND]))
def test_what_has_not_started_at_the_end_is_left(
    policy: Policy, jobs: list[SimulatedJob], fleet: Fleet, until: int
) -> None:
    once = [SimulatedJob(job.kind, job.at, job.run_time) for job in jobs if job.at <= until]
    record = play(policy, once, fleet, until=until)
    assert all(started_at < until for started_at in record.started_at)
    assert record.jobs == len(once)
    assert len(record.kind_of) + len(record.left) == record.jobs
    assert record.ended_at == until


def jobs_of(label: str, count: int, run_time: int, at: int = 0, **keys: str | None) -> list[SimulatedJob]:
    kind = JobKind(label, {**keys, "task": "t"})
    return [SimulatedJob(kind, at, run_time) for _ in range(count)]


def simulated(policy: Policy, jobs: list[SimulatedJob], slots: int, trip: int = 0) -> Simulation:
    return measure(play(policy, jobs, Fleet(slots=slots, claim_time=trip, settle_time=trip)))


def test_waits_shares_and_utilisation_are_those_that_one_counts_by_hand() -> None:
    jobs = jobs_of("a", 2, SECOND, account="a") + jobs_of("b", 2, 3 * SECOND, account="b")
    found = simulated(Policy("q"), jobs, slots=1)
    assert found.seconds == 8.0
    assert found.utilisation == 1.0
    a, b = found.classes
    assert (a.waits, b.waits) == (Waits(0.0, 1.0, 1.0, 1.0), Waits(2.0, 5.0, 5.0, 5.0))
    assert (a.share, b.share) == (0.25, 0.75)
    # Both had jobs waiting for the first second only, and then a ran.
    assert (a.share_when_busy, b.share_when_busy) == (1.0, 0.0)
    assert [group.name for group in found.keys] == ["a", "b"]


def test_a_claim_takes_its_time_and_slots_that_are_freed_meanwhile_are_filled_together() -> None:
    jobs = jobs_of("a", 4, SECOND, account="a")
    record = play(Policy("q"), jobs, Fleet(slots=2, claim_time=100_000, settle_time=0))
    assert list(record.started_at) == [100_000, 100_000, 1_200_000, 1_200_000]
    assert record.claims == 2


def test_a_limit_has_room_again_once_the_settlement_has_landed() -> None:
    jobs = jobs_of("a", 2, SECOND, account="a")
    policy = Policy("q", limits=(Concurrency(1, by="account"),))
    record = play(policy, jobs, Fleet(slots=2, claim_time=100_000, settle_time=50_000))
    assert list(record.started_at) == [100_000, 1_250_000]


def test_the_use_of_a_limit_is_told_by_key() -> None:
    jobs = jobs_of("a", 4, SECOND, account="a") + jobs_of("b", 1, SECOND, account="b")
    found = simulated(Policy("q", limits=(Concurrency(1, by="account"),)), jobs, slots=4)
    (use,) = found.limits
    assert (use.limit, use.keys, use.fullest) == ("Concurrency(1, by='account')", 2, "a")
    assert (use.full, use.held_up, use.waited) == (1.0, 0.75, 3.0)


def test_a_limit_of_the_whole_queue_is_waited_for_by_whoever_is_ready() -> None:
    found = simulated(Policy("q", limits=(Rate(1, per="1s", burst=1),)), jobs_of("a", 3, 1_000), slots=4)
    (use,) = found.limits
    assert use.held_up == pytest.approx(1.0, abs=0.01)
    assert use.waited == pytest.approx(2.0, abs=0.01)


def test_fair_turns_are_seen_in_the_index_and_in_the_waits_of_the_small() -> None:
    jobs = jobs_of("hot", 500, 50_000, account="hot")
    for nth in range(10):
        jobs += jobs_of("small", 20, 50_000, account=f"small-{nth}")
    fifo = measure(play(Policy("q"), jobs, Fleet(slots=5, claim_time=0, settle_time=0)), ("account",))
    fair = simulated(Policy("q", Fair(by="account")), jobs, slots=5)
    assert fifo.jain is not None
    assert fair.jain is not None
    assert fifo.jain < 0.2 < 0.9 < fair.jain
    assert fair.classes[1].waits.p95 < 0.5 * fifo.classes[1].waits.p95
    assert fair.classes[0].share_when_busy == pytest.approx(1 / 11, rel=0.1)


def test_a_tenant_that_waits_only_now_and_then_is_compared_over_the_time_that_it_waits() -> None:
    jobs = jobs_of("hot", 400, 50_000, account="hot")
    jobs += [job for at in range(0, 8, 2) for job in jobs_of("now and then", 20, 50_000, at * SECOND, account="other")]
    jobs.sort(key=lambda job: job.at)
    fair = simulated(Policy("q", Fair(by="account")), jobs, slots=4)
    assert fair.jain == pytest.approx(1.0, abs=0.05)
    fifo = measure(play(Policy("q"), jobs, Fleet(slots=4, claim_time=0, settle_time=0)), ("account",))
    assert fifo.jain is not None
    assert fifo.jain < 0.8


def test_weights_count_in_the_index() -> None:
    jobs = jobs_of("a", 300, 50_000, account="a") + jobs_of("b", 300, 50_000, account="b")
    found = simulated(Policy("q", Fair(by="account", weight={"a": 3})), jobs, slots=4)
    assert found.jain == pytest.approx(1.0, abs=0.02)
    assert found.classes[0].share_when_busy == pytest.approx(0.75, abs=0.02)


def test_a_stopped_key_is_left_and_counted_as_waiting_until_the_end() -> None:
    jobs = jobs_of("stopped", 1, SECOND, account="x") + jobs_of("free", 2, SECOND, account="y")
    found = simulated(Policy("q", limits=(Concurrency(0, by="account"),)), jobs, slots=1)
    assert (found.runs, found.left) == (0, 3)
    stopped = play(
        Policy("q", limits=(Concurrency(0),)), jobs, Fleet(slots=1, claim_time=0, settle_time=0), until=9 * SECOND
    )
    assert measure(stopped).classes[0].waits.max == 9.0


def test_nothing_to_do_is_no_error() -> None:
    found = simulated(Policy("q", Fair(by="account"), (Concurrency(1),)), [], slots=3)
    assert (found.jobs, found.runs, found.utilisation, found.jain, found.classes) == (0, 0, 0.0, None, ())
    assert timeline(play(Policy("q"), [], Fleet(slots=1, claim_time=0, settle_time=0))).classes == ()


def test_jobs_out_of_their_order_are_refused() -> None:
    jobs = jobs_of("a", 1, 1, at=5) + jobs_of("a", 1, 1, at=3)
    with pytest.raises(ValueError, match="in the order of their times"):
        play(Policy("q"), jobs, Fleet(slots=1, claim_time=0, settle_time=0))


def test_a_timeline_adds_up_to_the_worker_seconds_and_ends_with_nobody_waiting() -> None:
    jobs = jobs_of("a", 30, SECOND, account="a") + jobs_of("b", 10, 2 * SECOND, at=3 * SECOND, account="b")
    record = play(Policy("q"), jobs, Fleet(slots=4, claim_time=1_000, settle_time=1_000))
    drawn = timeline(record, columns=50)
    sums = [sum(values) * drawn.column_seconds for values in drawn.running]
    assert sums == pytest.approx([30.0, 20.0])
    assert [values[-1] for values in drawn.waiting] == [0, 0]
    assert max(drawn.waiting[0]) == 30 - 4


def test_the_index_of_equals_is_one_and_of_one_among_many_is_their_share() -> None:
    assert jain_index([2.0, 2.0, 2.0]) == pytest.approx(1.0)
    assert jain_index([9.0, 0.0, 0.0]) == pytest.approx(1 / 3)
    assert jain_index([]) == 1.0


def test_o16_numbers_that_jobs_bring_are_simulated_as_those_numbers() -> None:
    policy = Policy("q", Fair(by="account", weight=FromJob()), (Concurrency(FromJob(), by="account"),))
    plans = {"a": {"weight": 3.0, "concurrency:account": 8}, "b": {"weight": 1.0, "concurrency:account": 8}}
    jobs = [
        structs.replace(job, numbers=plans[account])
        for account in plans
        for job in jobs_of(account, 300, 50_000, account=account)
    ]
    found = simulated(policy, jobs, slots=12)
    assert found.classes[0].share_when_busy == pytest.approx(8 / 12, abs=0.05), "its 8 slots"
    assert found.without_numbers == 0
    few = simulated(policy, jobs, slots=4)
    assert few.classes[0].share_when_busy == pytest.approx(0.75, abs=0.03), "its weight"
    assert few.jain == pytest.approx(1.0, abs=0.02)


def test_the_newest_number_holds_and_a_retry_takes_nothing_back() -> None:
    policy = Policy("q", limits=(Concurrency(FromJob(), by="account"),))
    first, *others = jobs_of("a", 5, SECOND, account="a")
    jobs = [structs.replace(first, retries=(3 * SECOND,), numbers={"concurrency:account": 1})]
    jobs += [structs.replace(each, at=1, numbers={"concurrency:account": 2}) for each in others]
    record = play(policy, jobs, Fleet(slots=9, claim_time=0, settle_time=0))
    assert [at // SECOND for at in record.started_at] == [0, 0, 1, 1, 2, 4]


def test_jobs_without_the_numbers_that_a_policy_asks_for_are_counted() -> None:
    policy = Policy("q", limits=(Concurrency(FromJob(), by="account"),))
    jobs = jobs_of("a", 3, SECOND, account="a") + jobs_of("b", 1, SECOND, account="b")
    jobs[3] = structs.replace(jobs[3], numbers={"concurrency:account": 4, "of another policy": 7})
    found = simulated(policy, jobs, slots=9)
    assert (found.without_numbers, found.seconds) == (3, 3.0)


@pytest.mark.parametrize("by", [None, "account"])
def test_n5_a_shared_limit_is_as_full_as_one_of_the_queue_itself(by: str | None) -> None:
    jobs = jobs_of("a", 4, SECOND, account="a")
    own, shared = (
        simulated(Policy("q", limits=(Concurrency(1, by=by, name=name),)), jobs, slots=4).limits[0]
        for name in (None, "vendor")
    )
    assert (own.full, own.held_up, own.waited) == (1.0, 0.75, 3.0)
    assert (shared.full, shared.held_up, shared.waited, shared.keys) == (own.full, own.held_up, own.waited, own.keys)
