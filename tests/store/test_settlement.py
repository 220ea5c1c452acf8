"""How claims end: what is recorded, what a stale worker cannot change, where a job goes on."""

from __future__ import annotations

import asyncio
from uuid import uuid4

import msgspec
import pytest

from fairlane.clock import ManualClock
from fairlane.errors import JobNotFound
from fairlane.job import State
from fairlane.policy import Concurrency, Policy
from fairlane.scheduler.settlement import (
    Cancelled,
    Died,
    Done,
    Failed,
    Released,
    Retried,
    RunOutcome,
    Snoozed,
    settle,
)
from fairlane.store import records
from fairlane.store.protocol import Store
from tests.store.harness import (
    SECOND,
    Database,
    claim,
    finish,
    given_jobs,
    ids,
    new_jobs,
    state_of,
    worker_named,
)

PLAIN = Policy("webhooks")
ALL_OUTCOMES: list[RunOutcome] = [
    Done(b"late"),
    Failed("late", SECOND),
    Retried("late", SECOND),
    Snoozed("late", SECOND),
    Died("late"),
    Cancelled("late"),
    Released("late"),
]


@pytest.fixture
async def queue(store: Store) -> str:
    await store.declare(PLAIN)
    return PLAIN.queue


# L01
@pytest.mark.parametrize("outcome", ALL_OUTCOMES, ids=lambda outcome: type(outcome).__name__)
async def test_a_late_settlement_after_a_requeue_changes_nothing(
    store: Store, clock: ManualClock, queue: str, outcome: RunOutcome
) -> None:
    (job,) = await given_jobs(store, PLAIN)
    (stale,) = await claim(store, queue)
    clock.advance("31s")
    await store.reap()
    before = await store.job(job), await store.run(records.attempts(job))
    assert await store.settle([settle(stale, outcome, 5)]) == [job]
    assert (await store.job(job), await store.run(records.attempts(job))) == before
    assert before[0].state is State.READY


# L01
@pytest.mark.parametrize("outcome", ALL_OUTCOMES, ids=lambda outcome: type(outcome).__name__)
async def test_a_late_settlement_after_another_worker_claimed_the_job_changes_nothing(
    store: Store, clock: ManualClock, queue: str, outcome: RunOutcome
) -> None:
    (job,) = await given_jobs(store, PLAIN)
    (stale,) = await claim(store, queue, worker=worker_named("lost"))
    clock.advance("31s")
    await store.reap()
    (newer,) = await claim(store, queue, worker=worker_named("next"))
    before = await store.job(job), await store.run(records.attempts(job))
    assert await store.settle([settle(stale, outcome, 5)]) == [job]
    assert (await store.job(job), await store.run(records.attempts(job))) == before
    await finish(store, [newer], Done(b"mine"))
    assert (await store.job(job)).result == b"mine"


# L01
@pytest.mark.parametrize("first", ALL_OUTCOMES, ids=lambda outcome: type(outcome).__name__)
async def test_a_claim_is_settled_once(store: Store, queue: str, first: RunOutcome) -> None:
    (job,) = await given_jobs(store, PLAIN)
    (held,) = await claim(store, queue)
    await finish(store, [held], first)
    before = await store.job(job), await store.run(records.attempts(job))
    assert await store.settle([settle(held, Done(b"twice"), 5)]) == [job]
    assert (await store.job(job), await store.run(records.attempts(job))) == before


# L01
async def test_a_stale_claim_in_a_batch_does_not_spoil_the_others(store: Store, clock: ManualClock, queue: str) -> None:
    jobs = await given_jobs(store, PLAIN, count=5)
    claims = await claim(store, queue, 5)
    await finish(store, [claims[1]], Released("drain"))
    lost = await store.settle([settle(each, Done(None), 5) for each in claims])
    assert lost == [jobs[1]]
    assert [await state_of(store, job) for job in jobs] == [State.DONE, State.READY, *[State.DONE] * 3]


# L01
async def test_a_settlement_with_a_token_that_was_never_given_out_changes_nothing(store: Store, queue: str) -> None:
    (job,) = await given_jobs(store, PLAIN)
    (held,) = await claim(store, queue)
    forged = msgspec.structs.replace(held, lease=uuid4())
    assert await store.settle([settle(forged, Done(None), 5)]) == [job]
    assert await state_of(store, job) is State.RUNNING


# L01
async def test_one_claim_twice_in_a_batch_is_settled_once(store: Store, clock: ManualClock) -> None:
    policy = Policy("slots", limits=(Concurrency(2),))
    await store.declare(policy)
    await given_jobs(store, policy, count=6)
    first, second = await claim(store, "slots", 5)
    await store.settle([settle(first, Done(b"1"), 5), settle(first, Done(b"1"), 5)])
    assert await state_of(store, first.id) is State.DONE
    assert len(await claim(store, "slots", 5)) == 1, "one slot was freed, not two"
    assert await state_of(store, second.id) is State.RUNNING


async def test_settling_nothing_is_nothing(store: Store, queue: str) -> None:
    assert await store.settle([]) == []


# L02
async def test_two_settlements_of_one_claim_at_the_same_instant_exactly_one_wins(
    database: Database, clock: ManualClock
) -> None:
    stores = [await database.open(clock) for _ in range(3)]
    await stores[0].declare(PLAIN)
    for _ in range(20):
        jobs = await given_jobs(stores[0], PLAIN, count=5)
        claims = await claim(stores[0], "webhooks", 5)
        results = [b"0", b"1", b"2"]
        lost = await asyncio.gather(
            *(
                store.settle([settle(each, Done(result), 5) for each in claims[:: 1 - 2 * (n % 2)]])
                for n, (store, result) in enumerate(zip(stores, results, strict=True))
            )
        )
        for job in jobs:
            winners = [result for result, missing in zip(results, lost, strict=True) if job not in missing]
            assert winners == [(await stores[0].job(job)).result]


# L10
async def test_a_payload_that_cannot_be_decoded_stops_nobody_and_is_set_aside_with_the_reason(
    store: Store, queue: str
) -> None:
    payloads = [b"\xff\x00\xfe not a document", b"", b"{}", b"x" * 100_000]
    jobs = [job for payload in payloads for job in new_jobs(PLAIN, payload=payload)]
    await store.enqueue(jobs)
    claims = await claim(store, queue, 10)
    assert [each.payload for each in claims] == payloads
    await finish(store, claims[:1], Died("the payload cannot be decoded"), ran=0)
    await finish(store, claims[1:])
    record = await store.job(jobs[0].id)
    assert (record.state, record.error) == (State.DEAD, "the payload cannot be decoded")
    assert record.payload == payloads[0]


# L13, promise 5
async def test_released_jobs_keep_their_age_and_their_place(store: Store, clock: ManualClock, queue: str) -> None:
    jobs = []
    for _ in range(6):
        jobs += await given_jobs(store, PLAIN)
        clock.advance("1s")
    first = await claim(store, queue, 4)
    await finish(store, [first[2]], Released("drain"))
    await finish(store, [first[0]], Released("drain"))
    again = await claim(store, queue, 3)
    assert ids(again) == [jobs[0], jobs[2], jobs[4]]
    assert [each.enqueued_at for each in again[:2]] == [first[0].enqueued_at, first[2].enqueued_at]


# L13, promise 5
async def test_reaped_jobs_keep_their_age_and_their_place(store: Store, clock: ManualClock, queue: str) -> None:
    jobs = await given_jobs(store, PLAIN, count=6)
    first = await claim(store, queue, 4)
    clock.advance("31s")
    await store.reap()
    again = await claim(store, queue, 6)
    assert ids(again) == jobs
    assert {each.enqueued_at for each in again} == {each.enqueued_at for each in first}


# L13, promise 5
@pytest.mark.parametrize(
    "outcome",
    [Failed("boom", 5 * SECOND), Retried("again", 5 * SECOND), Snoozed("later", 5 * SECOND), Released("?", 5 * SECOND)],
    ids=lambda outcome: type(outcome).__name__,
)
async def test_a_job_put_off_joins_the_end_of_its_lane_when_it_is_due(
    store: Store, clock: ManualClock, queue: str, outcome: RunOutcome
) -> None:
    jobs = await given_jobs(store, PLAIN, count=3)
    await finish(store, await claim(store, queue, 1), outcome)
    record = await store.job(jobs[0])
    assert (record.state, record.due_at) == (State.SCHEDULED, clock.now() + 5 * SECOND)
    clock.set(clock.now() + 5 * SECOND - 1)
    (head,) = await claim(store, queue, 1)
    assert head.id == jobs[1]
    clock.set(clock.now() + 1)
    assert ids(await claim(store, queue, 3)) == [jobs[2], jobs[0]]


# L13
async def test_a_scheduled_job_joins_the_end_of_its_lane_when_it_is_due(
    store: Store, clock: ManualClock, queue: str
) -> None:
    early = await given_jobs(store, PLAIN, delay=10 * SECOND)
    jobs = await given_jobs(store, PLAIN, count=2)
    clock.advance("10s")
    (head,) = await claim(store, queue, 1)
    late = await given_jobs(store, PLAIN)
    assert ids([head, *await claim(store, queue, 5)]) == [*jobs, *early, *late]


# L14
async def test_one_id_from_enqueue_to_history(store: Store, clock: ManualClock, queue: str) -> None:
    (new,) = new_jobs(PLAIN, {"account": "acme"}, priority=7, task="ship", payload=b"\x00\x01", max_attempts=4)
    await store.enqueue([new])
    (held,) = await claim(store, queue)
    record = await store.job(new.id)
    assert held.id == record.id == new.id
    shared = ("queue", "task", "priority", "keys", "payload", "max_attempts")
    for name in shared:
        assert getattr(held, name) == getattr(record, name) == getattr(new, name)
    assert (held.attempt, held.enqueued_at, held.claimed_at) == (1, clock.now(), clock.now())
    assert held.cancel_requested is False
    await finish(store, [held])
    assert (await store.job(new.id)).id == new.id
    assert len(await store.run(records.attempts(new.id))) == 1


async def test_a_job_that_does_not_exist_is_not_found(store: Store, queue: str) -> None:
    with pytest.raises(JobNotFound):
        await store.job(uuid4())


@pytest.mark.parametrize("result", [None, b"", b"\x00\xff", b"r" * 200_000], ids=["none", "empty", "bytes", "long"])
async def test_a_result_comes_back_byte_for_byte(
    store: Store, clock: ManualClock, queue: str, result: bytes | None
) -> None:
    (job,) = await given_jobs(store, PLAIN)
    await finish(store, await claim(store, queue), Done(result))
    record = await store.job(job)
    assert (record.state, record.result, record.finished_at) == (State.DONE, result, clock.now())


@pytest.mark.parametrize(
    ("outcome", "state", "error"),
    [
        (Failed("boom", SECOND), State.SCHEDULED, "boom"),
        (Died("hopeless"), State.DEAD, "hopeless"),
        (Cancelled("not wanted"), State.CANCELLED, "not wanted"),
        (Released("drain"), State.READY, None),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_a_job_goes_where_its_outcome_says(
    store: Store, clock: ManualClock, queue: str, outcome: RunOutcome, state: State, error: str | None
) -> None:
    (job,) = await given_jobs(store, PLAIN)
    await finish(store, await claim(store, queue), outcome)
    record = await store.job(job)
    assert record.state is state
    assert record.finished_at == (clock.now() if state.is_final else None)
    if error is not None:
        assert record.error == error
