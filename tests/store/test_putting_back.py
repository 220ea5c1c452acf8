"""Jobs that have ended are put back by an operator: new again, and with their past. The same on every store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from uuid import UUID, uuid4

import pytest

from fairlane.clock import ManualClock
from fairlane.errors import ConfigurationError, JobNotFound
from fairlane.job import State
from fairlane.scheduler.settlement import Died, Done, Failed
from fairlane.store import operators, records
from fairlane.store.operators import AT_ONCE, Handled, JobFilter
from fairlane.store.protocol import Store
from tests.store.harness import (
    SECOND,
    Database,
    assert_at_rest,
    claim,
    finish,
    given_jobs,
    hear,
    ids,
    soon,
    state_of,
    worker_named,
)
from tests.store.test_operators import KEEP, KEYED, PLAIN, declared, ended, listed, one_in_each_state


@pytest.fixture
async def queue(store: Store) -> str:
    return await declared(store)


async def test_a_replayed_job_is_new_again_and_remembers_its_past(store: Store, clock: ManualClock, queue: str) -> None:
    (job,) = await given_jobs(store, PLAIN, max_attempts=2)
    for n in range(2):
        clock.advance("1m")
        await finish(store, await claim(store, queue), Failed(f"boom {n}", SECOND))
    before = await store.run(records.attempts(job))
    assert await store.replay([job]) == [Handled(job, State.DEAD)]
    record = await store.job(job)
    assert (record.state, record.attempt, record.replays) == (State.READY, 0, 1)
    assert (record.error, record.finished_at, record.claimed_at, record.worker) == (None, None, None, None)
    assert await store.run(records.attempts(job)) == before
    clock.advance("1m")
    (held,) = await claim(store, queue)
    assert (held.id, held.attempt, held.max_attempts) == (job, 1, 2)
    await finish(store, [held], Done(b"at last"))
    assert [(each.attempt, each.outcome, each.error) for each in await store.run(records.attempts(job))] == [
        (1, "failed", "boom 0"),
        (2, "failed", "boom 1"),
        (1, "done", None),
    ]
    assert (await store.job(job)).result == b"at last"
    await assert_at_rest(store, PLAIN, clock)


async def test_replayed_jobs_join_their_lane_at_the_end_and_in_their_order(store: Store, queue: str) -> None:
    dead = await ended(store, 3, Died("over"))
    waiting = await given_jobs(store, PLAIN, count=2)
    await store.replay(dead[::-1])
    assert ids(await claim(store, queue, 10)) == [*waiting, *dead]


async def test_a_job_can_be_replayed_for_later(store: Store, clock: ManualClock, queue: str) -> None:
    (job,) = await ended(store, 1, Died("over"))
    await store.replay([job], delay=60 * SECOND)
    record = await store.job(job)
    assert (record.state, record.due_at) == (State.SCHEDULED, clock.now() + 60 * SECOND)
    assert await claim(store, queue) == []
    clock.advance("60s")
    assert ids(await claim(store, queue)) == [job]


@pytest.mark.parametrize("started", [True, False])
async def test_a_cancelled_job_that_is_replayed_is_asked_to_stop_no_more(
    store: Store, queue: str, started: bool
) -> None:
    (job,) = await given_jobs(store, PLAIN)
    held = await claim(store, queue) if started else []
    await store.cancel(job)
    await finish(store, held, Failed("interrupted", SECOND))
    assert await state_of(store, job) is State.CANCELLED
    await store.replay([job])
    (again,) = await claim(store, queue)
    assert (again.id, again.cancel_requested) == (job, False)
    await finish(store, [again], Failed("boom", SECOND))
    assert await state_of(store, job) is State.SCHEDULED


@pytest.mark.parametrize(
    ("action", "states"),
    [
        (operators.REPLAY, {State.DEAD, State.CANCELLED}),
        (operators.PURGE, {State.DONE, State.DEAD, State.CANCELLED}),
        (operators.RETRY, {State.SCHEDULED}),
    ],
    ids=["replay", "purge", "retry"],
)
async def test_an_action_skips_what_it_is_not_for_and_says_why(
    store: Store, queue: str, action: operators.Action, states: set[State]
) -> None:
    jobs = await one_in_each_state(store)
    before = {state: await store.job(job) for state, job in jobs.items()}
    gone = uuid4()
    actions: dict[str, Callable[[list[UUID]], Awaitable[list[Handled]]]] = {
        "replayed": store.replay,
        "purged": lambda jobs: store.run(operators.purge(jobs)),
        "made due": lambda jobs: store.run(operators.retry_now(jobs)),
    }
    do = actions[action.done]
    report = {each.job: each for each in await do([*jobs.values(), gone, gone])}
    assert len(report) == len(jobs) + 1
    for state, job in jobs.items():
        assert report[job].was is state
        if state in states:
            assert report[job].skipped is None
        else:
            assert f"it is {state}; only" in (report[job].skipped or "")
            assert await store.job(job) == before[state]
    assert report[gone].was is None
    assert "no such job" in (report[gone].skipped or "")


async def test_a_job_that_retention_removed_cannot_be_replayed(store: Store, clock: ManualClock, queue: str) -> None:
    (job,) = await ended(store, 1, Died("over"))
    clock.advance("8d")
    await store.prune(KEEP)
    (handled,) = await store.replay([job])
    assert (handled.was, "retention has passed" in (handled.skipped or "")) == (None, True)
    with pytest.raises(JobNotFound):
        await store.job(job)


async def test_replaying_twice_replays_once(store: Store, queue: str) -> None:
    (job,) = await ended(store, 1, Died("over"))
    assert [each.skipped for each in await store.replay([job, job])] == [None]
    assert "it is ready" in ((await store.replay([job]))[0].skipped or "")
    assert (await store.job(job)).replays == 1
    assert ids(await claim(store, queue, 5)) == [job]


async def test_a_replayed_job_is_not_pruned_by_its_first_death(store: Store, clock: ManualClock, queue: str) -> None:
    jobs = await ended(store, 2, Died("over"))
    clock.advance("6d")
    await store.replay(jobs[:1])
    await finish(store, await claim(store, queue), Died("again"))
    clock.advance("2d")
    assert (await store.prune(KEEP)).jobs == 1
    assert await state_of(store, jobs[0]) is State.DEAD
    assert await listed(store, JobFilter(state=State.DEAD)) == [jobs[0]]
    clock.advance("6d")
    assert (await store.prune(KEEP)).jobs == 1


async def test_a_replay_wakes_a_waiter(database: Database, clock: ManualClock) -> None:
    store = await database.open(clock)
    await store.declare(PLAIN)
    (job,) = await ended(store, 1, Died("over"))
    me = worker_named("me")
    listener = await store.listen(me)
    await hear(store, PLAIN.queue, listener, worker=me)
    waiting = asyncio.ensure_future(listener.wait(None))
    await store.replay([job])
    assert await soon(waiting) is True
    await listener.close()


async def test_replays_keep_to_the_limits(store: Store, clock: ManualClock, queue: str) -> None:
    jobs = await given_jobs(store, KEYED, {"account": "acme"}, 6)
    while claims := await claim(store, "keyed", 6):
        await finish(store, claims, Died("over"))
    assert {each.skipped for each in await store.replay(jobs)} == {None}
    assert (await store.counts("keyed")).events > 0
    assert len(await claim(store, "keyed", 6)) == 2


async def test_no_action_takes_more_than_it_can_hold(store: Store, queue: str) -> None:
    many = [UUID(int=n) for n in range(AT_ONCE + 1)]
    for do in (operators.replay, operators.purge, operators.retry_now):
        with pytest.raises(ConfigurationError, match="at most 1,000"):
            await store.run(do(many))
