"""A claim that passes from one process to another: one of two takes it, and no limit notices."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from uuid import UUID, uuid4

import msgspec
import pytest

from fairlane.clock import ManualClock
from fairlane.job import Claim, State
from fairlane.policy import AdaptiveConcurrency, Concurrency, Policy, Rate
from fairlane.scheduler.settlement import Done, settle
from fairlane.store import records
from fairlane.store.protocol import Adopted, Store, WorkerIdentity
from tests.store.harness import LEASE, SECOND, claim, given_jobs, state_of

QUEUE = Policy("q", None, (Concurrency(2),))
ENGINE = WorkerIdentity(uuid4(), "engine:7")


async def claimed(
    store: Store, count: int = 1, policy: Policy = QUEUE, worker: WorkerIdentity | None = None
) -> list[Claim]:
    await store.declare(policy)
    await given_jobs(store, policy, count=count)
    dispatcher = worker or WorkerIdentity.of_dispatcher("dispatcher:1")
    return (await store.claim("q", lambda: count, worker=dispatcher, lease=LEASE)).claims


async def adopt(
    store: Store,
    standing: Claim,
    own: UUID | None = None,
    *,
    tasks: Sequence[str] | None = None,
    lease_for: timedelta = LEASE,
) -> Adopted | None:
    tasks = [standing.task] if tasks is None else tasks
    return await store.adopt(
        standing.id, standing.lease, own or uuid4(), tasks=tasks, worker=ENGINE, lease_for=lease_for
    )


async def test_an_adopted_claim_is_the_same_job_under_another_lease(store: Store) -> None:
    (first,) = await claimed(store)
    adopted = await adopt(store, first)
    assert adopted is not None
    own = adopted.claim
    assert own.lease != first.lease
    assert (own.id, own.queue, own.task, own.keys, own.payload) == (
        first.id, first.queue, first.task, first.keys, first.payload,
    )  # fmt: skip
    assert (own.attempt, own.max_attempts, own.claimed_at) == (first.attempt, first.max_attempts, first.claimed_at)
    record = await store.job(first.id)
    assert (record.state, record.worker) == (State.RUNNING, "engine:7")


async def test_of_two_who_adopt_one_claim_one_gets_it(store: Store) -> None:
    (first,) = await claimed(store)
    found = [await adopt(store, first) for _ in range(2)]
    assert [each is not None for each in found] == [True, False]


async def test_an_adoption_that_nobody_heard_of_answers_the_same_when_it_is_asked_for_again(
    store: Store, clock: ManualClock
) -> None:
    (first,) = await claimed(store)
    own = uuid4()
    before = await adopt(store, first, own)
    clock.advance(LEASE / 2)
    again = await adopt(store, first, own)
    assert before is not None
    assert again is not None
    assert again.claim == before.claim
    # From now on: whoever asks again has only now begun.
    clock.advance(LEASE / 2)
    assert (await store.reap()).settled == []
    assert await store.settle([settle(again.claim, Done(None), 0)]) == []


async def test_a_claim_is_left_where_it_is_by_whoever_runs_another_task(store: Store) -> None:
    (first,) = await claimed(store)
    assert await adopt(store, first, tasks=["another", "and another"]) is None
    assert await store.run(records.held([(first.id, first.lease)])) == [first.id]
    assert await adopt(store, first, tasks=["another", first.task]) is not None


async def test_whoever_held_it_can_neither_settle_nor_keep_it(store: Store) -> None:
    first, other = await claimed(store, 2)
    adopted = await adopt(store, first)
    assert adopted is not None
    assert await store.settle([settle(first, Done(None), 0)]) == [first.id]
    assert await store.run(records.held([(first.id, first.lease), (other.id, other.lease)])) == [other.id]
    assert await store.run(records.held([(first.id, adopted.claim.lease)])) == [first.id]
    assert (await store.renew([first.lease], LEASE)).gone == []
    assert await store.settle([settle(adopted.claim, Done(b"1"), 5)]) == []
    assert await state_of(store, first.id) is State.DONE


async def test_a_lease_goes_with_the_last_claim_that_is_adopted(store: Store) -> None:
    (first,) = await claimed(store)
    assert await adopt(store, first) is not None
    assert (await store.renew([first.lease], LEASE)).gone == [first.lease]


async def test_a_claim_that_ended_cannot_be_adopted(store: Store, clock: ManualClock) -> None:
    settled, reaped = await claimed(store, 2)
    await store.settle([settle(settled, Done(None), 0)])
    assert await adopt(store, settled) is None
    clock.advance(LEASE)
    await store.reap()
    assert await adopt(store, reaped) is None


async def test_an_adopted_claim_lasts_as_long_as_its_own_lease(store: Store, clock: ManualClock) -> None:
    (first,) = await claimed(store)
    adopted = await adopt(store, first, lease_for=3 * LEASE)
    assert adopted is not None
    clock.advance(2 * LEASE)
    assert (await store.reap()).settled == []
    clock.advance(LEASE)
    (lost,) = (await store.reap()).settled
    assert (lost.job, lost.outcome, lost.to) == (first.id, "lost", State.READY)
    assert (await store.job(first.id)).attempt == 0


async def test_what_a_dead_dispatcher_had_published_and_nobody_began_was_never_started(
    store: Store, clock: ManualClock
) -> None:
    policy = Policy("q", None, (Rate(1, per="1h"),))
    (first,) = await claimed(store, 1, policy)
    clock.advance(LEASE)
    (released,) = (await store.reap()).settled
    assert (released.outcome, released.to) == ("released", State.READY)
    assert (await store.job(first.id)).attempt == 0
    # Its token of the rate came back with it.
    assert [each.id for each in await claim(store, "q", 1)] == [first.id]


async def test_a_limit_holds_while_claims_change_hands(store: Store) -> None:
    both = await claimed(store, 2)
    await given_jobs(store, QUEUE, count=3)
    for each in both:
        assert await adopt(store, each) is not None
        assert await claim(store, "q", 5) == []
    assert (await store.counts("q")).running == 2


async def test_a_cancel_reaches_whoever_holds_the_claim_by_then(store: Store) -> None:
    first, second = await claimed(store, 2)
    await store.cancel(first.id)
    before = await adopt(store, first)
    assert before is not None
    assert before.claim.cancel_requested
    after = await adopt(store, second)
    assert after is not None
    await store.cancel(second.id)
    assert (await store.renew([after.claim.lease], LEASE)).cancelled == [second.id]


async def test_an_adoption_tells_the_stores_time(store: Store, clock: ManualClock) -> None:
    (first,) = await claimed(store)
    clock.advance(timedelta(seconds=7))
    adopted = await adopt(store, first)
    assert adopted is not None
    assert adopted.at.now - adopted.claim.claimed_at == 7 * SECOND


@pytest.mark.parametrize(("lag", "cap"), [(9 * SECOND, 9), (SECOND // 10, 10)], ids=["too late", "in time"])
async def test_the_lag_from_admission_to_start_moves_an_adaptive_cap_and_the_run_time_does_not(
    store: Store, clock: ManualClock, lag: int, cap: int
) -> None:
    policy = Policy("q", None, (AdaptiveConcurrency(start=10, max=10, target="1s"),))
    claims = await claimed(store, 10, policy)
    clock.advance(0.001)
    # Runs that would have moved it the other way.
    ran = SECOND // 100 if lag > SECOND else 60 * SECOND
    ends = [msgspec.structs.replace(settle(each, Done(None), ran), lag=lag) for each in claims]
    assert await store.settle(ends[:5]) == []
    assert await store.settle(ends[5:]) == []
    clock.advance(0.001)
    await given_jobs(store, policy, count=20)
    assert len(await claim(store, "q", 20)) == cap
