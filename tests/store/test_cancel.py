"""Cancelling, in every state a job can be in."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from uuid import uuid4

import pytest

from fairlane.clock import ManualClock
from fairlane.errors import JobNotFound
from fairlane.job import State
from fairlane.policy import Concurrency, Fair, Policy
from fairlane.scheduler.settlement import Cancelled, Died, Done, Failed, Released, Retried, RunOutcome, Snoozed
from fairlane.store import records
from fairlane.store.protocol import Store
from tests.store.harness import (
    LEASE,
    SECOND,
    Database,
    assert_at_rest,
    claim,
    finish,
    given_jobs,
    hear,
    ids,
    soon,
    worker_named,
)

PLAIN = Policy("webhooks")


@pytest.fixture
async def queue(store: Store) -> str:
    await store.declare(PLAIN)
    return PLAIN.queue


@pytest.mark.parametrize("delay", [None, 60 * SECOND], ids=["ready", "scheduled"])
async def test_a_waiting_job_is_cancelled_at_once_and_never_claimed(
    store: Store, clock: ManualClock, queue: str, delay: int | None
) -> None:
    before, job, after = await given_jobs(store, PLAIN, count=3, delay=delay)
    clock.advance("1s")
    assert await store.cancel(job) is State.CANCELLED
    record = await store.job(job)
    assert (record.state, record.finished_at) == (State.CANCELLED, clock.now())
    clock.advance("60s")
    assert ids(await claim(store, queue, 5)) == [before, after]


async def test_a_running_job_is_asked_to_stop_and_goes_on_until_it_does(store: Store, queue: str) -> None:
    (job,) = await given_jobs(store, PLAIN)
    (held,) = await claim(store, queue)
    assert await store.cancel(job) is State.RUNNING
    assert (await store.job(job)).cancel_requested is True
    assert (await store.renew([held.lease], LEASE)).cancelled == [job]
    assert await store.run(records.held([(job, held.lease)])) == [job]
    await finish(store, [held], Cancelled("as asked"))
    record = await store.job(job)
    assert (record.state, record.error) == (State.CANCELLED, "as asked")


async def test_only_the_jobs_of_the_renewed_leases_are_reported_as_cancelled(store: Store, queue: str) -> None:
    await given_jobs(store, PLAIN, count=4)
    mine, other = await claim(store, queue, 2), await claim(store, queue, 2)
    await store.cancel(mine[1].id)
    await store.cancel(other[0].id)
    assert (await store.renew([mine[0].lease], LEASE)).cancelled == [mine[1].id]


async def test_a_job_that_finishes_although_it_was_asked_to_stop_is_done(store: Store, queue: str) -> None:
    (job,) = await given_jobs(store, PLAIN)
    (held,) = await claim(store, queue)
    await store.cancel(job)
    await finish(store, [held], Done(b"too late to stop"))
    record = await store.job(job)
    assert (record.state, record.result) == (State.DONE, b"too late to stop")


@pytest.mark.parametrize(
    ("outcome", "state"),
    [(Done(b"1"), State.DONE), (Died("over"), State.DEAD), (Cancelled("stop"), State.CANCELLED)],
    ids=lambda value: str(value)[:10],
)
async def test_cancelling_a_finished_job_changes_nothing(
    store: Store, clock: ManualClock, queue: str, outcome: RunOutcome, state: State
) -> None:
    (job,) = await given_jobs(store, PLAIN)
    await finish(store, await claim(store, queue), outcome)
    before = await store.job(job)
    clock.advance("1s")
    assert await store.cancel(job) is state
    assert await store.job(job) == before


async def test_a_job_that_does_not_exist_cannot_be_cancelled(store: Store, queue: str) -> None:
    with pytest.raises(JobNotFound):
        await store.cancel(uuid4())


# L05
@pytest.mark.parametrize(
    "outcome",
    [
        Failed("boom", SECOND),
        Retried("again", SECOND),
        Snoozed("later", SECOND),
        Released("drain"),
        Released("unknown task", SECOND),
        None,
    ],
    ids=["failed", "retried", "snoozed", "released", "released-for-later", "reaped"],
)
async def test_a_cancel_that_arrives_while_a_job_runs_survives(
    database: Database, clock: ManualClock, outcome: RunOutcome | None
) -> None:
    store = await database.open(clock)
    await store.declare(PLAIN)
    (job,) = await given_jobs(store, PLAIN)
    (held,) = await claim(store, "webhooks")
    await store.cancel(job)
    if outcome is None:
        clock.advance("31s")
        await store.reap()
    else:
        await finish(store, [held], outcome)
    clock.advance("1s")
    again = await claim(await database.open(clock), "webhooks")
    record = await store.job(job)
    assert (record.state, record.due_at, again) == (State.CANCELLED, None, [])
    assert record.finished_at is not None
    assert [each.outcome for each in await store.run(records.attempts(job))] == ["cancelled"]


@pytest.mark.parametrize("ends", ["fails", "asks for a retry", "is lost"])
async def test_a_run_that_was_asked_to_stop_is_not_counted_as_failed_however_it_ends(
    store: Store, clock: ManualClock, ends: str
) -> None:
    policy = Policy("webhooks", Fair(by="account"))
    await store.declare(policy)
    (job,) = await given_jobs(store, policy, {"account": "acme"})
    held = await claim(store, "webhooks")
    await store.cancel(job)
    match ends:
        case "fails":
            await finish(store, held, Failed("boom", SECOND))
        case "asks for a retry":
            await finish(store, held, Retried("later", SECOND))
        case _:
            clock.advance(LEASE + timedelta(seconds=1))
            await store.reap()
    assert (await store.job(job)).state is State.CANCELLED
    assert await claim(store, "webhooks") == []
    await store.add_up("webhooks")
    ((_, stats),) = (await store.ask(lambda moment: moment.list_keys(["webhooks"], ("account",)))).keys
    assert (stats.ended, stats.failed) == (1, 0)


async def test_cancelled_jobs_are_no_longer_counted_as_ready(store: Store, clock: ManualClock) -> None:
    policy = Policy("webhooks", fair=Fair(by="account"), limits=(Concurrency(1, by="account"),))
    await store.declare(policy)
    jobs = [job for account in "ab" for job in await given_jobs(store, policy, {"account": account}, 5)]
    for job in jobs[:2]:  # before any claim has seen them
        await store.cancel(job)
    held = await claim(store, "webhooks", 10)
    assert ids(held) == [jobs[2], jobs[5]]
    assert (await store.counts("webhooks")).ready == 6
    for job in jobs:
        await store.cancel(job)
    await finish(store, held, Cancelled("as asked"))
    await assert_at_rest(store, policy, clock, [{"account": "a"}, {"account": "b"}])


async def test_a_worker_is_nudged_when_a_job_that_it_runs_is_cancelled(database: Database, clock: ManualClock) -> None:
    store, operator = await database.open(clock), await database.open(clock)
    await store.declare(PLAIN)
    (job,) = await given_jobs(store, PLAIN)
    worker = worker_named("busy")
    listener = await store.listen(worker)
    (held,) = await claim(store, "webhooks", worker=worker)
    await hear(store, "webhooks", listener, worker=worker)
    waiting = asyncio.ensure_future(listener.wait(None))
    assert await operator.cancel(job) is State.RUNNING
    assert await soon(waiting) is True
    assert (await store.renew([held.lease], LEASE)).cancelled == [job]
    await listener.close()
