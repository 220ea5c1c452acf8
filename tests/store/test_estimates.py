"""N6, O17: when a job will start, on every store: never before its limits allow, however many are ahead."""

from __future__ import annotations

from uuid import UUID

import pytest

from fairlane.clock import ManualClock
from fairlane.policy import Concurrency, Fair, Policy, Rate
from fairlane.policy.gates import Reason
from fairlane.store.protocol import Store
from fairlane.store.stats_values import WorkerReport, WorkerSeen, slots_for
from tests.store.harness import SECOND, claim, finish, given_jobs, operations_on, serving

RATE = Policy("q", limits=(Rate(60, per="1m", burst=1, by="endpoint"),))


@pytest.mark.parametrize("has_claimed", [True, False], ids=["claimed", "nobody has claimed"])
async def test_under_a_rate_the_estimate_counts_all_that_are_ahead(
    store: Store, clock: ManualClock, has_claimed: bool
) -> None:
    await store.declare(RATE)
    await serving(store, clock, "q", slots=100)
    jobs = await given_jobs(store, RATE, {"endpoint": "api"}, 16_001)
    started = len(await claim(store, "q", 1)) if has_claimed else 0
    for ahead in (56, 594, 5_000, 16_000):
        told = await operations_on(store).jobs.explain(jobs[ahead])
        assert told.estimate is not None
        assert ahead <= (told.estimate - clock.now()) / SECOND <= 1.01 * ahead, "many go in bundles"
        (lane,) = [hold for hold in told.holds if hold.reason is Reason.LANE]
        assert lane.count == ahead - started
        assert ("10,000 or more" in lane.words) == (ahead > 10_000)


async def test_another_lane_at_the_same_rate_is_ahead_as_far_as_it_came_first(store: Store, clock: ManualClock) -> None:
    await store.declare(RATE)
    await serving(store, clock, "q", slots=100)
    await given_jobs(store, RATE, {"endpoint": "api"}, 30, priority=1)
    (job,) = await given_jobs(store, RATE, {"endpoint": "api"})
    await given_jobs(store, RATE, {"endpoint": "api"}, 500, priority=-1)
    await claim(store, "q", 1)
    told = await operations_on(store).jobs.explain(job)
    assert told.estimate is not None
    assert 30 <= (told.estimate - clock.now()) / SECOND <= 1.25 * 30, "how other lanes take turns is not known exactly"


@pytest.mark.parametrize("has_claimed", [True, False], ids=["claimed", "nobody has claimed"])
async def test_a_head_start_is_told_as_far_as_it_goes(store: Store, clock: ManualClock, has_claimed: bool) -> None:
    """Priority 5 is worth five minutes: jobs that have waited for longer go first, and all others do not."""
    await store.declare(RATE)
    await serving(store, clock, "q", slots=100)
    await given_jobs(store, RATE, {"endpoint": "api"}, 100)
    for _ in range(has_claimed):
        await claim(store, "q", 1)
    urgent = await given_jobs(store, RATE, {"endpoint": "api"}, 20, priority=5)
    told = await operations_on(store).jobs.explain(urgent[-1])
    assert told.estimate is not None
    assert 19 <= (told.estimate - clock.now()) / SECOND <= 1.3 * 20
    clock.advance("6m")
    await serving(store, clock, "q", slots=100)
    (later,) = await given_jobs(store, RATE, {"endpoint": "api"}, priority=5)
    told = await operations_on(store).jobs.explain(later)
    assert told.estimate is not None
    assert 118 <= (told.estimate - clock.now()) / SECOND <= 1.3 * 120


async def test_a_flow_is_told_its_turns_and_not_the_end_of_the_queue(store: Store, clock: ManualClock) -> None:
    policy = Policy("q", Fair(by="account", charge="count"), (Rate(60, per="1m", burst=1),))
    await store.declare(policy)
    await serving(store, clock, "q", slots=100)
    for account in ("a", "b"):
        await given_jobs(store, policy, {"account": account}, 2_000)
    jobs = await given_jobs(store, policy, {"account": "quiet"}, 11)
    await claim(store, "q", 1)
    for ahead in (0, 10):
        told = await operations_on(store).jobs.explain(jobs[ahead])
        assert told.estimate is not None
        assert 3 * ahead <= (told.estimate - clock.now()) / SECOND <= 1.25 * 3 * ahead + 5


async def test_a_scheduled_job_joins_behind_all_that_wait(store: Store, clock: ManualClock) -> None:
    await store.declare(RATE)
    await serving(store, clock, "q", slots=100)
    await given_jobs(store, RATE, {"endpoint": "api"}, 601)
    (soon,) = await given_jobs(store, RATE, {"endpoint": "api"}, delay=10 * SECOND)
    (late,) = await given_jobs(store, RATE, {"endpoint": "api"}, delay=3_600 * SECOND)
    await claim(store, "q", 1)
    assert (await operations_on(store).jobs.explain(soon)).estimate == clock.now() + 601 * SECOND
    assert (await operations_on(store).jobs.explain(late)).estimate == clock.now() + 3_600 * SECOND


async def test_few_slots_and_the_pace_that_was_seen_make_it_later(store: Store, clock: ManualClock) -> None:
    policy = Policy("q", limits=(Concurrency(50),))
    await store.declare(policy)
    await serving(store, clock, "q", slots=2)
    jobs = await given_jobs(store, policy, {}, 500)
    await finish(store, await claim(store, "q", 2), ran=SECOND)
    told = await operations_on(store).jobs.explain(jobs[-1])
    assert told.estimate is not None
    assert (told.estimate - clock.now()) / SECOND == pytest.approx(497 / 2, rel=0.02), "two at a time, a second each"
    for _ in range(40):  # 20 jobs a minute, whatever else is said of them
        clock.advance("3s")
        await finish(store, await claim(store, "q", 1), ran=SECOND)
    await serving(store, clock, "q", slots=2)
    await store.add_up("q")
    told = await operations_on(store).jobs.explain(jobs[-1])
    assert told.estimate is not None
    assert (told.estimate - clock.now()) / SECOND == pytest.approx(457 * 3, rel=0.1)


async def test_a_worker_divides_its_slots_among_the_queues_that_have_work(store: Store, clock: ManualClock) -> None:
    policy = Policy("q")
    for other in (policy, Policy("busy"), Policy("capped", limits=(Concurrency(1),)), Policy("idle")):
        await store.declare(other)
    await serving(store, clock, "q", "busy", "capped", "idle", slots=8)
    jobs = await given_jobs(store, policy, {}, 101)
    await finish(store, await claim(store, "q", 1), ran=SECOND)

    async def starts_in() -> float:
        told = await operations_on(store).jobs.explain(jobs[-1])
        assert told.estimate is not None
        return (told.estimate - clock.now()) / SECOND

    assert await starts_in() == pytest.approx(99 // 8, rel=0.02)
    await given_jobs(store, Policy("capped", limits=(Concurrency(1),)), {}, 500)
    await claim(store, "capped", 8)
    assert await starts_in() == pytest.approx(99 // 7, rel=0.02), "a limit keeps the others of it from slots"
    await given_jobs(store, Policy("busy"), {}, 3)
    assert await starts_in() == pytest.approx(99 // 4, rel=0.02), "three and one take four of eight"
    await given_jobs(store, Policy("busy"), {}, 500)
    assert await starts_in() == pytest.approx(99 // 2, rel=0.02), "a third of eight, in whole slots"


def test_partitions_share_the_part_of_their_queue() -> None:
    report = WorkerReport(
        name="w",
        host="vm",
        pid=1,
        version="1",
        queues={"calls": 2.0, "mails": 1.0},
        concurrency=12,
        started_at=0,
        every=SECOND,
    )
    busy = {"calls__p1": 90, "mails": 90, "unserved": 90}
    assert slots_for([WorkerSeen(UUID(int=1).hex, 0, report)], "calls", busy, 0) == 4
    assert slots_for([WorkerSeen(UUID(int=1).hex, 0, report)], "mails", busy, 0) == 4
    assert slots_for([WorkerSeen(UUID(int=1).hex, 0, report)], "calls", {**busy, "mails": 0}, 0) == 6


async def test_without_a_run_that_has_ended_nothing_is_promised_behind_a_full_limit(
    store: Store, clock: ManualClock
) -> None:
    policy = Policy("q", limits=(Concurrency(2, by="account"),))
    await store.declare(policy)
    jobs = await given_jobs(store, policy, {"account": "acme"}, 20)
    (other,) = await given_jobs(store, policy, {"account": "bolt"})
    await claim(store, "q", 2)
    await serving(store, clock, "q", slots=10)
    told = await operations_on(store).jobs.explain(jobs[-1])
    assert (told.earliest, told.estimate) == (clock.now(), None), "unknown is not zero"
    assert (await operations_on(store).jobs.explain(other)).estimate == clock.now(), (
        "nothing is in its way, however long runs take"
    )
    clock.advance("10s")
    assert (await operations_on(store).jobs.explain(jobs[-1])).estimate is None, (
        "they have run for 10 s, and may for hours"
    )


async def test_holders_that_outlast_the_history_make_it_later(store: Store, clock: ManualClock) -> None:
    policy = Policy("q", limits=(Concurrency(2, by="account"),))
    await store.declare(policy)
    jobs = await given_jobs(store, policy, {"account": "acme"}, 30)
    for _ in range(5):
        await finish(store, await claim(store, "q", 2), ran=SECOND // 4)
    await claim(store, "q", 2)
    clock.advance("40s")
    await serving(store, clock, "q", slots=10)
    told = await operations_on(store).jobs.explain(jobs[-1])
    assert told.estimate is not None
    assert told.estimate - clock.now() >= 9 * 40 * SECOND
