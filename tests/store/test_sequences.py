"""Jobs that run one after the other, on every store: nothing starts before the one before it has ended for good."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence as Several
from itertools import pairwise
from uuid import UUID

import msgspec
import pytest

from fairlane.clock import ManualClock
from fairlane.job import Claim, State
from fairlane.policy import Concurrency, Fair, Policy, Sequence
from fairlane.scheduler.settlement import (
    Cancelled,
    Died,
    Done,
    Failed,
    Interrupted,
    Lost,
    Released,
    Retried,
    RunOutcome,
    Snoozed,
)
from fairlane.store import operators
from fairlane.store.audit import Note
from fairlane.store.protocol import QueueCounts, Store
from tests.store.harness import (
    LEASE,
    SECOND,
    Database,
    claim,
    claim_once,
    finish,
    given_jobs,
    hear,
    ids,
    new_jobs,
    soon,
    state_of,
    worker_named,
)
from tests.store.processes import Run, run_together

QUEUE = "documents"
PLAIN = Policy(QUEUE, limits=(Sequence(by="document"),))
POLICIES = [
    PLAIN,
    Policy(QUEUE, fair=Fair(by="document"), limits=(Sequence(by="document"),)),
    Policy(
        QUEUE,
        fair=Fair(by="account"),
        limits=(Sequence(by=("account", "document")), Concurrency(3, by="account"), Concurrency(20)),
    ),
]
NOTE = Note(actor="ada", action="test")
A = {"document": "a", "account": "acme"}
B = {"document": "b", "account": "acme"}


async def next_job(store: Store) -> Claim:
    """The one job that may start now."""
    (only,) = await claim(store, QUEUE, 10)
    return only


async def nothing_starts(store: Store) -> None:
    assert await claim(store, QUEUE, 10) == []


async def assert_free(store: Store, policy: Policy, clock: ManualClock) -> None:
    """A14: nothing runs and nothing waits for a retry, so every place is free."""
    await nothing_starts(store)
    assert await store.counts(QUEUE) == QueueCounts(ready=0, running=0, parked_lanes=0, events=0)
    for keys in (A, B):
        jobs = await given_jobs(store, policy, keys, 2)
        for job in jobs:
            only = await next_job(store)
            assert only.id == job
            await finish(store, [only])
    clock.advance("1d")
    await nothing_starts(store)


@pytest.mark.parametrize("policy", POLICIES, ids=["plain", "fair", "fair by account"])
async def test_jobs_of_one_key_run_one_after_the_other_whatever_their_task(store: Store, policy: Policy) -> None:
    await store.declare(policy)
    mixed = [new_jobs(policy, A, task=f"task{n % 3}")[0] for n in range(6)]
    await store.enqueue(mixed)
    others = await given_jobs(store, policy, B, 2)
    first = await claim(store, QUEUE, 10)
    assert {each.id for each in first} == {mixed[0].id, others[0]}
    await nothing_starts(store)
    ran = []
    held = first
    while held:
        ran += [each.id for each in held if each.keys["document"] == "a"]
        await finish(store, held)
        held = await claim(store, QUEUE, 10)
    assert ran == [each.id for each in mixed]


@pytest.mark.parametrize("policy", POLICIES, ids=["plain", "fair", "fair by account"])
@pytest.mark.parametrize(
    "again",
    [Failed("no", 60 * SECOND), Retried("no", 60 * SECOND), Snoozed("later", 60 * SECOND)],
    ids=lambda o: type(o).__name__,
)
async def test_a_head_that_will_be_tried_again_blocks_until_it_has_ended(
    store: Store, clock: ManualClock, policy: Policy, again: RunOutcome
) -> None:
    await store.declare(policy)
    jobs = await given_jobs(store, policy, A, 3, max_attempts=3)
    other = await given_jobs(store, policy, B, 1)
    held = await claim(store, QUEUE, 10)
    assert set(ids(held)) == {jobs[0], other[0]}
    await finish(store, [each for each in held if each.id == other[0]])
    await finish(store, [each for each in held if each.id == jobs[0]], again)
    await nothing_starts(store)
    clock.advance("59s")
    await nothing_starts(store)
    # Long after its time: whoever promotes late must not let another one in.
    clock.advance("1h")
    (head,) = await claim(store, QUEUE, 10)
    assert head.id == jobs[0]
    await finish(store, [head], again)
    await nothing_starts(store)
    clock.advance("60s")
    (head,) = await claim(store, QUEUE, 10)
    await finish(store, [head], Died("for good"))
    for job in jobs[1:]:
        head = await next_job(store)
        assert head.id == job
        await finish(store, [head])
    await assert_free(store, policy, clock)


@pytest.mark.parametrize("end", [Done(None), Died("no"), Cancelled("no")], ids=lambda o: type(o).__name__)
async def test_every_final_end_lets_the_next_one_start(store: Store, clock: ManualClock, end: RunOutcome) -> None:
    await store.declare(PLAIN)
    jobs = await given_jobs(store, PLAIN, A, 2)
    await finish(store, [await next_job(store)], end)
    last = await next_job(store)
    assert last.id == jobs[1]
    await finish(store, [last])
    await assert_free(store, PLAIN, clock)


async def test_a_released_job_is_the_head_again(store: Store, clock: ManualClock) -> None:
    await store.declare(PLAIN)
    jobs = await given_jobs(store, PLAIN, A, 2)
    await finish(store, [await next_job(store)], Released("shutting down"))
    again = await next_job(store)
    assert again.id == jobs[0]
    # Given back for a while, it keeps its place for as long.
    await finish(store, [again], Released("not here", delay=5 * SECOND))
    await nothing_starts(store)
    clock.advance("5s")
    for job in jobs:
        head = await next_job(store)
        assert head.id == job
        await finish(store, [head])
    await assert_free(store, PLAIN, clock)


async def test_a_job_that_a_flood_of_bells_hides_is_not_overtaken(store: Store, clock: ManualClock) -> None:
    await store.declare(PLAIN)
    jobs = await given_jobs(store, PLAIN, A, 2)
    head = await next_job(store)
    # More lane events than one claim folds: that the job is ready again is told last.
    await store.enqueue([new_jobs(PLAIN, {"document": str(n)})[0] for n in range(1_500)])
    await finish(store, [head], Released("shutting down"))
    started: list[UUID] = []
    while len(started) < 1_502:
        held = await claim(store, QUEUE, 200)
        assert held, "everything could start"
        started += ids(held)
        await finish(store, held)
    assert started.index(jobs[0]) < started.index(jobs[1])
    await assert_free(store, PLAIN, clock)


async def test_l18_a_job_whose_worker_is_gone_runs_again_before_all_others(store: Store, clock: ManualClock) -> None:
    await store.declare(PLAIN)
    jobs = await given_jobs(store, PLAIN, A, 2, max_attempts=3)
    for _ in range(5):  # two losses are nobody's, three are its attempts
        assert (await next_job(store)).id == jobs[0]
        await nothing_starts(store)
        clock.advance(LEASE)
        reaped = await store.reap()
        assert [each.job for each in reaped.settled] == [jobs[0]]
    assert await state_of(store, jobs[0]) is State.DEAD
    last = await next_job(store)
    assert last.id == jobs[1]
    await finish(store, [last])
    await assert_free(store, PLAIN, clock)


async def test_cancelling_a_job_that_waits_for_its_retry_lets_the_next_one_start_at_once(
    store: Store, clock: ManualClock
) -> None:
    await store.declare(PLAIN)
    jobs = await given_jobs(store, PLAIN, A, 2)
    await finish(store, [await next_job(store)], Failed("no", 3_600 * SECOND))
    await nothing_starts(store)
    waiter = worker_named("a waiter")
    listener = await store.listen(waiter)
    try:
        await hear(store, QUEUE, listener, worker=waiter)
        assert await store.cancel(jobs[0]) is State.CANCELLED
        assert await soon(listener.wait(None)), "whoever waits is told"
        last = await next_job(store)
        assert last.id == jobs[1]
        await finish(store, [last])
    finally:
        await listener.close()
    await assert_free(store, PLAIN, clock)


async def test_a_place_is_given_back_although_its_lane_was_forgotten(store: Store, clock: ManualClock) -> None:
    await store.declare(PLAIN)
    for cancels in (True, False):
        (job,) = await given_jobs(store, PLAIN, A, 1)
        await finish(store, [await next_job(store)], Failed("no", 60 * SECOND))
        await nothing_starts(store)
        clock.advance("1s")
        for _ in range(3):
            await store.collect(QUEUE)
        (behind,) = await given_jobs(store, PLAIN, A, 1)
        await nothing_starts(store)
        if cancels:
            await store.cancel(job)
        else:
            clock.advance("60s")
            head = await next_job(store)
            assert head.id == job
            await finish(store, [head])
        head = await next_job(store)
        assert head.id == behind
        await finish(store, [head])
    await assert_free(store, PLAIN, clock)


async def test_a_future_job_joins_at_the_end_when_it_is_due(store: Store, clock: ManualClock) -> None:
    await store.declare(PLAIN)
    (later,) = await given_jobs(store, PLAIN, A, 1, delay=10 * SECOND)
    jobs = await given_jobs(store, PLAIN, A, 2)
    first = await next_job(store)
    assert first.id == jobs[0]
    clock.advance("10s")
    await nothing_starts(store)
    await finish(store, [first])
    for job in (jobs[1], later):
        head = await next_job(store)
        assert head.id == job
        await finish(store, [head])
    await assert_free(store, PLAIN, clock)


async def test_a_retry_that_is_hurried_keeps_its_place(store: Store, clock: ManualClock) -> None:
    await store.declare(PLAIN)
    jobs = await given_jobs(store, PLAIN, A, 2)
    await finish(store, [await next_job(store)], Failed("no", 3_600 * SECOND))
    await store.run(operators.retry_now([jobs[0]]))
    for job in jobs:
        head = await next_job(store)
        assert head.id == job
        await finish(store, [head])
    await assert_free(store, PLAIN, clock)


async def test_a_replayed_job_joins_at_the_end(store: Store, clock: ManualClock) -> None:
    await store.declare(PLAIN)
    jobs = await given_jobs(store, PLAIN, A, 3)
    await finish(store, [await next_job(store)], Died("no"))
    await store.replay([jobs[0]])
    for job in (jobs[1], jobs[2], jobs[0]):
        head = await next_job(store)
        assert head.id == job
        await finish(store, [head])
    await assert_free(store, PLAIN, clock)


# A10
async def test_a_forced_start_breaks_the_order_and_is_counted(store: Store, clock: ManualClock) -> None:
    await store.declare(PLAIN)
    jobs = await given_jobs(store, PLAIN, A, 4)
    head = await next_job(store)
    await store.run(operators.force([jobs[2]], NOTE))
    forced = await next_job(store)
    assert forced.id == jobs[2]
    await finish(store, [head])
    await nothing_starts(store)
    await finish(store, [forced], Failed("no", 60 * SECOND))
    await nothing_starts(store)
    await store.run(operators.force([jobs[2]], NOTE))
    forced = await next_job(store)
    assert forced.id == jobs[2]
    await finish(store, [forced])
    for job in (jobs[1], jobs[3]):
        head = await next_job(store)
        assert head.id == job
        await finish(store, [head])
    await assert_free(store, PLAIN, clock)


async def test_a_restart_changes_nothing(shared_database: Database, clock: ManualClock) -> None:
    store = await shared_database.open(clock)
    await store.declare(PLAIN)
    jobs = await given_jobs(store, PLAIN, A, 2)
    await finish(store, [await next_job(store)], Failed("no", 60 * SECOND))
    await shared_database.close()
    store = await shared_database.open(clock)
    await store.declare(PLAIN)
    await nothing_starts(store)
    clock.advance("60s")
    for job in jobs:
        head = await next_job(store)
        assert head.id == job
        await finish(store, [head])
    await assert_free(store, PLAIN, clock)


OUTCOMES: Several[RunOutcome] = (
    Done(None),
    Done(None),
    Failed("no", 5 * SECOND),
    Failed("no", 0),
    Retried("no", 40 * SECOND),
    Snoozed("no", 7 * SECOND),
    Released("no"),
    Released("no", 3 * SECOND),
    Interrupted("gone"),
    Lost("gone", 1),
    Died("no"),
    Cancelled("no"),
)


@pytest.mark.parametrize("seed", range(6))
async def test_whatever_happens_the_jobs_of_a_key_end_in_the_order_of_their_enqueue(
    store: Store, clock: ManualClock, seed: int
) -> None:
    chance = random.Random(seed)
    policy = POLICIES[seed % 3]
    await store.declare(policy)
    order: dict[str, list[UUID]] = {name: [] for name in "abc"}
    ended: defaultdict[str, list[UUID]] = defaultdict(list)
    held: list[Claim] = []
    alive: dict[str, list[UUID]] = {name: [] for name in "abc"}
    for step in range(150):
        name = chance.choice("abc")
        match chance.choice(("enqueue", "claim", "settle", "settle", "wait", "cancel", "collect", "apply")):
            case "enqueue" if step < 100:
                keys = {"document": name, "account": "acme"}
                jobs = await given_jobs(store, policy, keys, chance.randint(1, 4), max_attempts=3)
                order[name] += jobs
                alive[name] += jobs
            case "claim":
                for each in (await claim_once(store, QUEUE, chance.randint(1, 3))).claims:
                    key = str(each.keys["document"])
                    assert each.id == alive[key][0], "it has overtaken the one before it"
                    assert all(other.keys["document"] != key for other in held), "two of one key run"
                    held.append(each)
            case "settle" if held:
                each = held.pop(chance.randrange(len(held)))
                await finish(store, [each], chance.choice(OUTCOMES))
                if (await state_of(store, each.id)).is_final:
                    key = str(each.keys["document"])
                    ended[key].append(each.id)
                    alive[key].remove(each.id)
            case "wait":
                clock.advance(f"{chance.randint(1, 10)}s")
            case "cancel" if alive[name] and chance.random() < 0.3:
                job = chance.choice(alive[name])
                if all(each.id != job for each in held):
                    assert await store.cancel(job) is State.CANCELLED
                    alive[name].remove(job)
                    order[name].remove(job)
            case "collect":
                await store.collect(QUEUE)
            case "apply" if chance.random() < 0.2:
                first = policy.limits[0]
                policy = Policy(QUEUE, fair=policy.fair, limits=(first, Concurrency(chance.randint(5, 9))))
                await store.apply(policy)
    while any(alive.values()) or held:
        for each in held:
            key = str(each.keys["document"])
            assert each.id == alive[key][0]
            ended[key].append(each.id)
            alive[key].remove(each.id)
        await finish(store, held)
        held = await claim(store, QUEUE, 10)
        if not held:
            clock.advance("60s")
            held = await claim(store, QUEUE, 10)
    assert ended == {name: jobs for name, jobs in order.items() if jobs}
    await assert_free(store, policy, clock)


# A09
@pytest.mark.slow
async def test_among_processes_the_jobs_of_a_key_run_one_after_the_other_in_their_order(
    shared_database: Database,
) -> None:
    store = await shared_database.open()
    policy = Policy("webhooks", limits=(Sequence(by="account"),))
    await store.declare(policy)
    order: dict[str, list[str]] = {}
    for n in range(6):
        order[str(n)] = [str(job) for job in await given_jobs(store, policy, {"account": n}, 20)]
        order[str(n)] += [str(job) for _ in range(5) for job in await given_jobs(store, policy, {"account": n}, 1)]
    told = await run_together("stumble", shared_database, 4)
    runs = [run for each in told for run in msgspec.json.decode(each, type=list[Run])]
    by_account: defaultdict[str, list[Run]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run.start):
        by_account[run.account].append(run)
    for account, own in by_account.items():
        assert all(before.end <= after.start for before, after in pairwise(own)), "two ran at once"
        assert list(dict.fromkeys(run.job for run in own)) == order[account], "one has overtaken another"
    assert len(runs) > sum(map(len, order.values())), "some were tried again"
