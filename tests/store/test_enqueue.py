"""Enqueue: one or many, now or later, in which order; and with the caller's own transaction."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
import random
from collections import defaultdict
from typing import Any
from uuid import UUID, uuid4

import msgspec
import pytest

from fairlane.clock import ManualClock
from fairlane.errors import DuplicateJob, FairlaneError, JobNotFound, UnknownQueue
from fairlane.job import JobRecord, NewJob, State
from fairlane.policy import Concurrency, Fair, Policy
from fairlane.scheduler.settlement import Cancelled, Died, Done, RunOutcome
from fairlane.store import operators
from fairlane.store.operators import JobFilter
from fairlane.store.protocol import QueueCounts, Store
from tests.store.harness import (
    MINUTE,
    SECOND,
    Database,
    claim,
    claim_once,
    finish,
    given_jobs,
    ids,
    new_jobs,
    state_of,
)

PLAIN = Policy("webhooks")
UNFAIR = [
    Policy("webhooks", limits=limits, keys=("account", "endpoint"))
    for limits in ((), (Concurrency(90, by="endpoint"),), (Concurrency(3, by="account"),))
]


@pytest.fixture
async def queue(store: Store) -> str:
    await store.declare(PLAIN)
    return PLAIN.queue


def a_mix(policy: Policy) -> list[NewJob]:
    """Jobs that differ in everything that a producer can say."""
    chance = random.Random(7)
    return [
        job
        for n in range(40)
        for job in new_jobs(
            policy,
            {"account": chance.choice(["a", "b", None]), "note": n},
            priority=chance.choice([-100, 0, 0, 0, 100]),
            task=chance.choice(["ship", "bill"]),
            payload=b"%d" % n,
            max_attempts=chance.choice([1, 25]),
            delay=chance.choice([None, None, 0, -5, 30 * SECOND]),
        )
    ]


# E01
async def test_a_bulk_enqueue_equals_so_many_single_ones(store: Store, clock: ManualClock) -> None:
    records: dict[str, list[JobRecord]] = {}
    lanes: dict[str, dict[object, list[bytes]]] = {}
    for name in ("single", "bulk"):
        policy = Policy(name, fair=Fair(by="account", charge="count"), limits=(Concurrency(30, by="account"),))
        await store.declare(policy)
        jobs = a_mix(policy)
        for some in [jobs] if name == "bulk" else [[job] for job in jobs]:
            await store.enqueue(some)
        found = [await store.job(job.id) for job in jobs]
        alike = {"id": UUID(int=0), "queue": "", "enqueued_at": 0}
        records[name] = [
            msgspec.structs.replace(each, due_at=None if each.due_at is None else each.due_at - clock.now(), **alike)
            for each in found
        ]
        claims = await claim(store, name, 25)
        clock.advance("30s")
        claims += await claim(store, name, 100)
        lanes[name] = defaultdict(list)
        for each in claims:
            lanes[name][each.keys["account"], each.priority, each.task].append(each.payload)
    assert records["bulk"] == records["single"]
    assert lanes["bulk"] == lanes["single"]
    assert sum(map(len, lanes["bulk"].values())) == 40


async def test_enqueueing_nothing_is_nothing(store: Store, queue: str) -> None:
    await store.enqueue([])
    assert await store.counts(queue) == QueueCounts(0, 0, 0, 0)


async def test_one_bulk_may_hold_jobs_of_many_queues(store: Store) -> None:
    policies = [Policy(name) for name in ("a", "b", "c")]
    for policy in policies:
        await store.declare(policy)
    await store.enqueue([job for n in range(9) for job in new_jobs(policies[n % 3], payload=b"%d" % n)])
    for n, policy in enumerate(policies):
        assert [int(each.payload) % 3 for each in await claim(store, policy.queue, 9)] == [n] * 3


async def test_a_bulk_of_thousands_is_stored_whole_and_in_order(store: Store, queue: str) -> None:
    jobs = await given_jobs(store, PLAIN, count=5_000)
    assert ids(await claim(store, queue, 6_000)) == jobs


# C07
async def test_order_within_a_lane_is_the_order_of_enqueue_even_at_one_instant(store: Store, queue: str) -> None:
    jobs = []
    for n in range(60):
        (job,) = new_jobs(PLAIN)
        # The id says nothing about the order: a producer on another machine makes its own.
        job = msgspec.structs.replace(job, id=uuid4())
        await store.enqueue([job])
        jobs.append(job.id)
        if n % 7 == 0:
            jobs += await given_jobs(store, PLAIN, count=3)
    served = []
    while claims := await claim(store, queue, 7):
        served += ids(claims)
        await finish(store, claims)
    assert served == jobs


# C07
@pytest.mark.parametrize("policy", [PLAIN, Policy("webhooks", fair=Fair(by="account"))], ids=["fifo", "fair"])
async def test_order_within_a_lane_is_the_order_of_enqueue_when_the_clock_steps_back(
    store: Store, clock: ManualClock, policy: Policy
) -> None:
    await store.declare(policy)
    jobs = []
    for step in (0, -3_600, 1, -60, 7_200, -7_000):
        clock.advance(step)
        jobs += await given_jobs(store, policy, {"account": "acme"}, 3)
    served = []
    while claims := await claim(store, "webhooks", 4):
        served += ids(claims)
        await finish(store, claims)
        clock.advance(-10)
    assert served == jobs


@pytest.mark.parametrize("want", [1, 100])
@pytest.mark.parametrize("policy", UNFAIR, ids=["keys", "limits", "behind a gate"])
@pytest.mark.parametrize(("how", "keys"), [("bulk", 3), ("bulk", 40), ("singly", 7), ("copied", 11)])
async def test_without_fair_shares_lanes_are_served_by_the_place_of_their_heads(
    store: Store, clock: ManualClock, how: str, keys: int, policy: Policy, want: int
) -> None:
    """Promise 5: jobs of one instant start in the order in which they were enqueued, whatever their keys."""
    await store.declare(policy)
    jobs = [
        new_jobs(policy, {"account": "acme", "endpoint": n % keys})[0] for n in range(300 if how == "copied" else 60)
    ]
    for some in [[job] for job in jobs] if how == "singly" else [jobs]:
        await store.enqueue(some)
    started: list[UUID] = []
    while len(started) < len(jobs) and (claims := await claim(store, "webhooks", want)):
        started += ids(claims)
        clock.advance("1s")
        await finish(store, claims)
        if how == "copied" and len(started) > 40:
            break
    assert started == [job.id for job in jobs][: len(started)]
    assert len(started) >= min(len(jobs), 40)


async def test_a_higher_priority_goes_first(store: Store, queue: str) -> None:
    order = []
    for priority in (0, -100, 100, 5, -5):
        order += [(priority, job) for job in await given_jobs(store, PLAIN, count=2, priority=priority)]
    expected = [job for _, job in sorted(order, key=lambda pair: -pair[0])]
    assert ids(await claim(store, queue, 3)) + ids(await claim(store, queue, 10)) == expected


# F05
async def test_priority_is_a_head_start_of_a_minute_a_step(store: Store, clock: ManualClock, queue: str) -> None:
    (old,) = await given_jobs(store, PLAIN, priority=0)
    clock.advance("119s")
    (ahead,) = await given_jobs(store, PLAIN, priority=2)
    clock.advance("2s")
    (behind,) = await given_jobs(store, PLAIN, priority=2)
    (other,) = await given_jobs(store, PLAIN, priority=0)
    assert ids(await claim(store, queue, 4)) == [ahead, old, behind, other]


# F05
async def test_a_low_priority_behind_an_endless_stream_of_high_runs_when_its_time_has_come(
    store: Store, clock: ManualClock, queue: str
) -> None:
    (low,) = await given_jobs(store, PLAIN, priority=-2)
    await given_jobs(store, PLAIN, count=3, priority=3)
    for minute in range(1, 20):
        clock.advance("1m")
        await given_jobs(store, PLAIN, count=2, priority=3)
        claims = await claim(store, queue, 2)
        await finish(store, claims)
        if low in ids(claims):
            # Five steps are five minutes. Ahead of it: the first three, two of each minute 1 to 4; in minute 5 a tie.
            assert minute in (6, 7)
            return
    pytest.fail("the job of low priority starved")


async def test_a_scheduled_job_is_ready_at_its_time_and_not_before(
    store: Store, clock: ManualClock, queue: str
) -> None:
    (job,) = await given_jobs(store, PLAIN, run_at=clock.now() + 90 * SECOND)
    (relative,) = await given_jobs(store, PLAIN, delay=60 * SECOND)
    record = await store.job(job)
    assert (record.state, record.due_at, record.enqueued_at) == (
        State.SCHEDULED,
        clock.now() + 90 * SECOND,
        clock.now(),
    )
    assert (await store.job(relative)).due_at == clock.now() + 60 * SECOND
    clock.set(clock.now() + 60 * SECOND - 1)
    assert await claim(store, queue, 5) == []
    clock.set(clock.now() + 1)
    assert ids(await claim(store, queue, 5)) == [relative]
    clock.set(clock.now() + 30 * SECOND)
    assert ids(await claim(store, queue, 5)) == [job]


async def test_a_time_that_has_passed_is_now(store: Store, clock: ManualClock, queue: str) -> None:
    jobs = await given_jobs(store, PLAIN, run_at=clock.now() - MINUTE)
    jobs += await given_jobs(store, PLAIN, delay=0)
    jobs += await given_jobs(store, PLAIN, delay=-MINUTE)
    jobs += await given_jobs(store, PLAIN, run_at=clock.now())
    assert [await state_of(store, job) for job in jobs] == [State.READY] * 4
    assert ids(await claim(store, queue, 5)) == jobs


async def test_scheduled_jobs_become_ready_in_the_order_of_their_times(
    store: Store, clock: ManualClock, queue: str
) -> None:
    late, early, middle = [(await given_jobs(store, PLAIN, delay=seconds * SECOND))[0] for seconds in (30, 10, 20)]
    clock.advance("1h")
    assert ids(await claim(store, queue, 5)) == [early, middle, late]


async def test_counts_say_how_many_jobs_are_where(store: Store, clock: ManualClock, queue: str) -> None:
    await given_jobs(store, PLAIN, count=5)
    await given_jobs(store, PLAIN, count=2, delay=SECOND)
    await claim(store, queue, 2)
    counts = await store.counts(queue)
    assert (counts.ready, counts.running, counts.parked_lanes, counts.events) == (3, 2, 0, 0)
    clock.advance("1s")
    await claim(store, queue, 1)
    counts = await store.counts(queue)
    assert (counts.ready, counts.running) == (4, 3)


async def test_a_claim_asks_how_many_only_once_and_may_be_told_none(store: Store, queue: str) -> None:
    await given_jobs(store, PLAIN, count=3)
    assert (await claim_once(store, queue, 0)).claims == []
    assert len(await claim(store, queue, 5)) == 3


async def test_a_queue_that_nobody_declared_is_named_in_the_refusal(store: Store, queue: str) -> None:
    stranger = Policy("stranger")
    with pytest.raises(UnknownQueue, match="stranger"):
        await given_jobs(store, stranger)
    with pytest.raises(UnknownQueue, match="stranger"):
        await claim(store, "stranger")
    jobs = new_jobs(PLAIN) + new_jobs(stranger)
    with pytest.raises(UnknownQueue, match="stranger"):
        await store.enqueue(jobs)
    assert await claim(store, queue) == [], "a bulk is stored whole or not at all"


# E09
async def test_bulk_enqueues_over_the_same_keys_in_opposite_order_never_deadlock(
    database: Database, clock: ManualClock
) -> None:
    policy = Policy("webhooks", fair=Fair(by="account"), limits=(Concurrency(5, by="account"),))
    stores = [await database.open(clock) for _ in range(4)]
    await stores[0].declare(policy)
    keys = [{"account": n} for n in range(40)]

    async def produce(store: Store, order: int) -> None:
        for _ in range(5):
            await store.enqueue([job for each in keys[::order] for job in new_jobs(policy, each)])

    async def consume(store: Store) -> int:
        claims = await claim(store, "webhooks", 50)
        await finish(store, claims)
        return len(claims)

    produced = asyncio.gather(*(produce(store, 1 - 2 * (n % 2)) for n, store in enumerate(stores)))
    consumed = 0
    while not produced.done():
        consumed += await consume(stores[0])
    await produced
    while some := await consume(stores[1]):
        consumed += some
    assert consumed == 4 * 5 * 40


# E05
@pytest.mark.parametrize(("count", "nth"), [(1, 0), (5, 0), (5, 2), (5, 4)])
async def test_an_id_that_a_job_has_already_is_refused_with_all_that_came_with_it(
    store: Store, queue: str, count: int, nth: int
) -> None:
    (taken,) = new_jobs(PLAIN, payload=b"first")
    await store.enqueue([taken])
    before, counts = await store.job(taken.id), await store.counts(queue)
    jobs = new_jobs(PLAIN, count=count, payload=b"second")
    jobs[nth] = msgspec.structs.replace(jobs[nth], id=taken.id)
    with pytest.raises(DuplicateJob, match=str(taken.id)) as refused:
        await store.enqueue(jobs)
    assert refused.value.job == taken.id
    assert (await store.job(taken.id), await store.counts(queue)) == (before, counts)
    assert ids(await claim(store, queue, 10)) == [taken.id]
    for job in jobs:
        if job.id != taken.id:
            with pytest.raises(JobNotFound):
                await store.job(job.id)


# E05
@pytest.mark.parametrize("state", list(State), ids=str)
async def test_the_id_of_a_job_is_taken_whatever_has_become_of_it(store: Store, queue: str, state: State) -> None:
    (job,) = new_jobs(PLAIN, delay=MINUTE if state is State.SCHEDULED else None)
    await store.enqueue([job])
    endings: dict[State, RunOutcome] = {
        State.DONE: Done(None),
        State.DEAD: Died("over"),
        State.CANCELLED: Cancelled("stop"),
    }
    if state not in (State.SCHEDULED, State.READY):
        held = await claim(store, queue)
        await finish(store, held if state in endings else [], endings.get(state))
    assert await state_of(store, job.id) is state
    with pytest.raises(DuplicateJob):
        await store.enqueue([job])
    assert await state_of(store, job.id) is state


# E05
async def test_an_id_that_is_given_twice_at_once_is_refused(store: Store, queue: str) -> None:
    one, other = new_jobs(PLAIN, count=2)
    with pytest.raises(DuplicateJob, match=str(one.id)):
        await store.enqueue([one, other, one])
    assert await claim(store, queue, 10) == []
    assert await store.counts(queue) == QueueCounts(ready=0, running=0, parked_lanes=0, events=0)
    await store.enqueue([one, other])
    assert ids(await claim(store, queue, 10)) == [one.id, other.id]


# E05, E09
async def test_of_producers_that_give_the_same_ids_at_once_exactly_one_stores_them(
    shared_database: Database,
) -> None:
    stores = [await shared_database.open() for _ in range(3)]
    await stores[0].declare(PLAIN)
    for _ in range(10):
        jobs = new_jobs(PLAIN, count=4)
        orders = (jobs, jobs[::-1], [jobs[2]])
        said = await asyncio.gather(
            *(store.enqueue(order) for store, order in zip(stores, orders, strict=True)), return_exceptions=True
        )
        stored = [order for order, answer in zip(orders, said, strict=True) if answer == {}]
        assert all(answer == {} or isinstance(answer, DuplicateJob) for answer in said)
        (winner,) = stored
        claims = await claim(stores[0], "webhooks", 10)
        assert ids(claims) == [job.id for job in winner]
        await finish(stores[0], claims)


# E05, E06
async def test_a_duplicate_in_the_callers_transaction_stores_nothing_of_its_enqueue(
    shared_database: Database, clock: ManualClock
) -> None:
    store = await shared_database.open(clock)
    await store.declare(PLAIN)
    taken, *fresh = new_jobs(PLAIN, count=3)
    await store.enqueue([taken])
    async with shared_database.transaction() as producer:
        with pytest.raises(DuplicateJob, match=str(taken.id)):
            await store.enqueue([*fresh, taken], tx=producer.tx)
        await producer.commit()  # PostgreSQL rolls back here: a statement has failed
    assert ids(await claim(store, "webhooks", 10)) == [taken.id]
    assert (await store.counts("webhooks")).ready == 0


# E06
async def test_an_enqueue_commits_with_the_callers_transaction(shared_database: Database, clock: ManualClock) -> None:
    store = await shared_database.open(clock)
    await store.declare(PLAIN)
    jobs = new_jobs(PLAIN, {"account": "acme"}, 3)
    async with shared_database.transaction() as producer:
        await store.enqueue(jobs[:1], tx=producer.tx)
        await store.enqueue(jobs[1:], tx=producer.tx)
        await producer.commit()
    assert ids(await claim(store, "webhooks", 5)) == [job.id for job in jobs]


# E06, C11
async def test_an_enqueue_rolls_back_with_the_callers_transaction_and_leaves_no_trace(
    shared_database: Database, clock: ManualClock
) -> None:
    store = await shared_database.open(clock)
    await store.declare(PLAIN)
    jobs = new_jobs(PLAIN, {"account": "acme"}, 2) + new_jobs(PLAIN, delay=SECOND)
    async with shared_database.transaction() as producer:
        await store.enqueue(jobs, tx=producer.tx)
        await producer.rollback()
    clock.advance("1m")
    brought = await claim_once(store, "webhooks", 5)
    assert (brought.claims, brought.more, brought.next_due) == ([], False, None)
    assert await store.counts("webhooks") == QueueCounts(0, 0, 0, 0)
    for job in jobs:
        with pytest.raises(JobNotFound):
            await store.job(job.id)
    later = await given_jobs(store, PLAIN)
    assert ids(await claim(store, "webhooks", 5)) == later


# E06
async def test_a_connection_without_a_transaction_is_refused(shared_database: Database) -> None:
    store = await shared_database.open()
    await store.declare(PLAIN)
    async with shared_database.transaction(begin=False) as producer:
        with pytest.raises(FairlaneError, match="transaction"):
            await store.enqueue(new_jobs(PLAIN), tx=producer.tx)
    assert await claim(store, "webhooks") == []


# E06
async def test_something_that_is_no_connection_is_refused_as_a_transaction(store: Store, queue: str) -> None:
    with pytest.raises(FairlaneError, match=r"str|object"):
        await store.enqueue(new_jobs(PLAIN), tx="a transaction, honestly")
    assert await claim(store, queue) == []


async def test_nobody_can_change_the_keys_of_a_job_that_is_shown(store: Store) -> None:
    """P6: many jobs, and the limits that look at them, share one mapping."""
    policy = Policy("webhooks", limits=(Concurrency(1, by="account"),))
    await store.declare(policy)
    (job,) = await given_jobs(store, policy, {"account": "acme"})
    (claimed,) = await claim(store, "webhooks", 1)
    (listed,) = (await store.run(operators.find_jobs(JobFilter()))).jobs
    for keys in (claimed.keys, listed.keys, (await store.job(job)).keys):
        changing: Any = keys
        for change in (
            lambda keys=changing: keys.update(account="globex"),
            lambda keys=changing: keys.pop("account"),
            lambda keys=changing: keys.setdefault("other", "1"),
            changing.clear,
            changing.popitem,
            lambda keys=changing: keys.__setitem__("account", "globex"),
            lambda keys=changing: keys.__delitem__("account"),
        ):
            with pytest.raises(TypeError, match="copy them first"):
                change()
        assert keys == {"account": "acme"}
        assert pickle.loads(pickle.dumps(keys)) == copy.deepcopy(keys) == dict(keys)
        assert json.dumps(keys) == '{"account": "acme"}'
