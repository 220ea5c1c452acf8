"""Upkeep: what is old goes, what is in use stays, and nobody can tell from the outside."""

from __future__ import annotations

from datetime import timedelta

import pytest

from fairlane.clock import ManualClock
from fairlane.errors import JobNotFound
from fairlane.job import State
from fairlane.policy import Concurrency, Fair, Policy, Rate
from fairlane.scheduler.settlement import Cancelled, Died, Done, Released, RunOutcome
from fairlane.store.protocol import Pruned, Retention, Store
from tests.store.harness import SECOND, assert_at_rest, by_key, claim, finish, given_jobs, ids, state_of

PLAIN = Policy("webhooks")
KEEP = Retention()


@pytest.mark.parametrize(
    ("outcome", "stays"),
    [(Done(b"1"), "24h"), (Cancelled("stop"), "24h"), (Died("over"), "7d")],
    ids=["done", "cancelled", "dead"],
)
async def test_finished_jobs_stay_for_their_time_and_no_longer(
    store: Store, clock: ManualClock, outcome: RunOutcome, stays: str
) -> None:
    await store.declare(PLAIN)
    (job,) = await given_jobs(store, PLAIN)
    await finish(store, await claim(store, "webhooks"), outcome)
    clock.advance(stays)
    clock.advance(timedelta(seconds=-1))
    assert (await store.prune(KEEP)).jobs == 0
    assert (await store.job(job)).state.is_final
    clock.advance("2s")
    pruned = await store.prune(KEEP)
    assert (pruned.jobs, pruned.more) == (1, False)
    with pytest.raises(JobNotFound):
        await store.job(job)
    assert await store.prune(KEEP) == Pruned(jobs=0)


async def test_retention_is_counted_from_the_end_of_a_job_not_from_its_beginning(
    store: Store, clock: ManualClock
) -> None:
    await store.declare(PLAIN)
    (job,) = await given_jobs(store, PLAIN)
    clock.advance("30d")
    await finish(store, await claim(store, "webhooks"))
    clock.advance("1h")
    assert (await store.prune(KEEP)).jobs == 0
    assert await state_of(store, job) is State.DONE


async def test_nothing_that_has_not_ended_is_ever_pruned(store: Store, clock: ManualClock) -> None:
    await store.declare(PLAIN)
    ready, running = await given_jobs(store, PLAIN, count=2)
    (scheduled,) = await given_jobs(store, PLAIN, delay=100 * 24 * 3_600 * SECOND)
    (held,) = await claim(store, "webhooks", lease=timedelta(days=60))
    clock.advance("50d")
    assert (await store.prune(KEEP)).jobs == 0
    assert held.id == ready
    states = [await state_of(store, job) for job in (ready, running, scheduled)]
    assert states == [State.RUNNING, State.READY, State.SCHEDULED]


@pytest.mark.parametrize("together", [1, 3, 7, 12], ids=lambda count: f"settled by {count}")
async def test_pruning_never_takes_more_than_its_limit_and_says_that_there_is_more(
    store: Store, clock: ManualClock, together: int
) -> None:
    # A store may file what was settled together as one; that is no reason to remove it together.
    await store.declare(PLAIN)
    await given_jobs(store, PLAIN, count=24)
    for outcome in (Done(None), Died("over")):
        claims = await claim(store, "webhooks", 12)
        for n in range(0, 12, together):
            await finish(store, claims[n : n + together], outcome)
    clock.advance("8d")
    passes = [await store.prune(KEEP, limit=5) for _ in range(5)]
    assert [each.jobs for each in passes] == [5, 5, 5, 5, 4]
    assert [each.more for each in passes] == [True, True, True, True, False]
    assert await store.prune(KEEP, limit=5) == Pruned(jobs=0)


async def test_retention_times_are_the_ones_asked_for(store: Store, clock: ManualClock) -> None:
    await store.declare(PLAIN)
    done, dead = await given_jobs(store, PLAIN, count=2)
    claims = await claim(store, "webhooks", 2)
    await finish(store, claims[:1])
    await finish(store, claims[1:], Died("over"))
    clock.advance("11s")
    assert (await store.prune(Retention(done=60 * SECOND, dead=10 * SECOND))).jobs == 1
    assert await state_of(store, done) is State.DONE
    with pytest.raises(JobNotFound):
        await store.job(dead)


# C03
async def test_a_job_enqueued_after_the_newest_was_pruned_is_not_hidden(store: Store, clock: ManualClock) -> None:
    await store.declare(PLAIN)
    for _ in range(3):
        jobs = await given_jobs(store, PLAIN, count=3)
        claims = await claim(store, "webhooks", 3)
        assert ids(claims) == jobs
        await finish(store, claims)
        clock.advance("25h")
        assert (await store.prune(KEEP)).jobs == 3


async def test_idle_state_is_collected(store: Store, clock: ManualClock) -> None:
    limits = (Concurrency(2, by="account"), Rate(5, per="1m", by="endpoint"))
    policy = Policy("webhooks", fair=Fair(by="account", charge="count"), limits=limits)
    await store.declare(policy)
    for n in range(10):
        await given_jobs(store, policy, {"account": n, "endpoint": n}, 1)
    await finish(store, await claim(store, "webhooks", 10))
    await claim(store, "webhooks", 1)
    clock.advance("1d")
    # Somebody else moves the cursor past the tags of those who are gone.
    await given_jobs(store, policy, {"account": "last", "endpoint": "last"}, 3)
    while claims := await claim(store, "webhooks", 1):
        await finish(store, claims)
    clock.advance("1d")
    removed = Pruned(0)
    for _ in range(20):
        some = await store.collect("webhooks", limit=7)
        removed = Pruned(0, removed.lanes + some.lanes, removed.flows + some.flows, removed.gates + some.gates)
        if not some.more:
            break
    assert removed.lanes >= 10
    assert removed.flows >= 10
    assert removed.gates >= 20
    await assert_at_rest(store, policy, clock, [{"account": 3, "endpoint": 3}])


async def test_collecting_twice_finds_nothing_the_second_time(store: Store, clock: ManualClock) -> None:
    await store.declare(PLAIN)
    await given_jobs(store, PLAIN, count=3)
    await finish(store, await claim(store, "webhooks", 3))
    assert await claim(store, "webhooks", 1) == []
    while (await store.collect("webhooks")).more:
        pass
    assert await store.collect("webhooks") == Pruned(0)


async def test_a_gate_with_something_in_flight_is_never_collected(store: Store, clock: ManualClock) -> None:
    policy = Policy("webhooks", limits=(Concurrency(2, by="account"), Concurrency(3)))
    await store.declare(policy)
    await given_jobs(store, policy, {"account": "acme"}, 2)
    held = await claim(store, "webhooks", 2, lease=timedelta(days=9))
    clock.advance("1d")
    await store.collect("webhooks")
    await given_jobs(store, policy, {"account": "acme"}, 5)
    await store.collect("webhooks")
    assert await claim(store, "webhooks", 5) == []
    await finish(store, held)
    await store.collect("webhooks")
    assert len(await claim(store, "webhooks", 5)) == 2


async def test_a_lane_that_waits_is_never_collected(store: Store, clock: ManualClock) -> None:
    policy = Policy("webhooks", fair=Fair(by="account"), limits=(Rate(1, per="1h", by="account"),))
    await store.declare(policy)
    for account in "abc":
        await given_jobs(store, policy, {"account": account}, 3)
    for _ in range(3):
        await store.collect("webhooks")
        claims = await claim(store, "webhooks", 10)
        assert by_key(claims) == {"a": 1, "b": 1, "c": 1}
        await finish(store, claims)
        await store.collect("webhooks")
        clock.advance("1h")
    await assert_at_rest(store, policy, clock, [{"account": "a"}])


async def test_a_bucket_that_is_not_full_is_never_collected(store: Store, clock: ManualClock) -> None:
    policy = Policy("webhooks", limits=(Rate(4, per="4h", by="account"),))
    await store.declare(policy)
    keys = {"account": "acme"}
    await given_jobs(store, policy, keys, 4)
    await finish(store, await claim(store, "webhooks", 4))
    for _ in range(3):
        assert await claim(store, "webhooks", 1) == []
        await store.collect("webhooks")
        (job,) = await given_jobs(store, policy, keys, 1)
        assert await claim(store, "webhooks", 1) == [], "the tokens that were spent came back with the collection"
        await store.cancel(job)
        clock.advance("20m")
    clock.advance("30m")
    await given_jobs(store, policy, keys, 9)
    assert len(await claim(store, "webhooks", 9)) == 1


async def test_a_flow_that_has_had_its_service_is_not_collected_into_a_new_turn(store: Store) -> None:
    policy = Policy("webhooks", fair=Fair(by="account", charge="count", weight={"light": 0.01}))
    await store.declare(policy)
    await given_jobs(store, policy, {"account": "light"}, 1)
    await given_jobs(store, policy, {"account": "steady"}, 200)
    first = await claim(store, "webhooks", 5)
    assert by_key(first) == {"light": 1, "steady": 4}
    await finish(store, first)
    await finish(store, await claim(store, "webhooks", 1))
    await store.collect("webhooks")
    await given_jobs(store, policy, {"account": "light"}, 5)
    # One job of weight 0.01 is worth a hundred turns of the other; it has had them in advance.
    assert by_key(await claim(store, "webhooks", 80)) == {"steady": 80}


@pytest.mark.parametrize("stretches", [1, 2, 3])
async def test_collecting_some_lanes_of_a_flow_leaves_the_others_usable(store: Store, stretches: int) -> None:
    policy = Policy("webhooks", fair=Fair(by="account", charge="count"), keys=("account", "endpoint"))
    await store.declare(policy)
    lanes = [{"account": "two lanes", "endpoint": endpoint} for endpoint in "xy"]
    for keys in (*lanes, *[{"account": "ahead", "endpoint": "x"}] * 9):
        await given_jobs(store, policy, keys)
    while claims := await claim(store, "webhooks", 3):
        await finish(store, claims)
    for _ in range(stretches):
        await store.collect("webhooks", limit=1)
    jobs = [job for keys in lanes for job in await given_jobs(store, policy, keys)]
    assert sorted(ids(await claim(store, "webhooks", 5))) == sorted(jobs)


@pytest.mark.parametrize("by", ["account", None])
async def test_spent_tokens_outlive_a_collection_followed_by_a_change_of_policy(
    store: Store, clock: ManualClock, by: str | None
) -> None:
    rate = Rate(4, per="4h", by=by)
    policy = Policy("webhooks", limits=(rate,), keys=("account",))
    await store.declare(policy)
    await given_jobs(store, policy, {"account": "acme"}, 4)
    await finish(store, await claim(store, "webhooks", 4))
    assert await claim(store, "webhooks", 1) == []
    while (await store.collect("webhooks")).more:
        pass
    await store.apply(Policy("webhooks", limits=(rate, Concurrency(100)), keys=("account",)))
    await given_jobs(store, policy, {"account": "acme"}, 4)
    assert await claim(store, "webhooks", 4) == []
    clock.advance("1h")
    assert len(await claim(store, "webhooks", 4)) == 1


async def test_bells_that_no_claim_has_folded_survive_collection(store: Store, clock: ManualClock) -> None:
    policy = Policy("webhooks", fair=Fair(by="account"), limits=(Concurrency(2, by="account"),))
    await store.declare(policy)
    keys = {"account": "acme"}
    for turn in range(5):
        jobs = await given_jobs(store, policy, keys, 2)
        await store.collect("webhooks")
        claims = await claim(store, "webhooks", 5)
        assert ids(claims) == jobs
        await finish(store, claims[:1], Released("drain"))
        await finish(store, claims[1:])
        await store.collect("webhooks")
        claims = await claim(store, "webhooks", 5)
        assert ids(claims) == jobs[:1], f"turn {turn}"
        await finish(store, claims)
    await assert_at_rest(store, policy, clock, [keys])


async def test_a_scheduled_job_comes_back_although_its_lane_was_collected(store: Store, clock: ManualClock) -> None:
    policy = Policy("webhooks", fair=Fair(by="account"), limits=(Concurrency(1, by="account"),))
    await store.declare(policy)
    (now,) = await given_jobs(store, policy, {"account": "acme"}, 1)
    (later,) = await given_jobs(store, policy, {"account": "acme"}, 1, delay=3_600 * SECOND)
    first = await claim(store, "webhooks", 5)
    assert ids(first) == [now]
    await finish(store, first)
    assert await claim(store, "webhooks", 5) == []
    clock.advance("30m")
    await store.collect("webhooks")
    clock.advance("30m")
    assert ids(await claim(store, "webhooks", 5)) == [later]


async def test_collection_leaves_other_queues_alone(store: Store, clock: ManualClock) -> None:
    policies = [Policy(name, limits=(Rate(2, per="1h", by="account"),)) for name in ("a", "b")]
    for policy in policies:
        await store.declare(policy)
        await given_jobs(store, policy, {"account": "acme"}, 2)
        await finish(store, await claim(store, policy.queue, 2))
        assert await claim(store, policy.queue, 2) == []
    clock.advance("1d")
    await given_jobs(store, policies[1], {"account": "acme"}, 5)
    assert len(await claim(store, "b", 5)) == 2
    assert (await store.collect("a")).lanes == 1
    assert await claim(store, "b", 5) == []
