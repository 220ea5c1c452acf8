"""Every driver × commit, rollback, savepoint rollback, duplicate, wake-up; on both stores. E01, E05 and E06."""

from __future__ import annotations

from typing import Any

import pytest

from fairlane import App, Backlog, Concurrency, Fair, Job, Outcome, State, Unique
from fairlane.errors import BacklogFull, DuplicateJob, JobNotFound
from fairlane.store import health
from fairlane.task import AsyncTask
from tests.transactions.conftest import Place
from tests.transactions.drivers import Caller
from tests.waiting import until, until_found
from tests.worker.harness import working

MANY = 300
"""Enough for them to be copied in, where the store does so."""


@pytest.fixture
def confirm(app: App) -> AsyncTask[..., int]:
    """A task of a queue with a policy, which is declared with the first job."""
    app.queue("orders", fair=Fair(by="account"), limits=[Concurrency(2, by="account")])

    @app.task(queue="orders")
    async def confirm(order: int, account: str = "acme") -> int:
        return order

    return confirm


async def is_idle(app: App, queue: str) -> None:
    """Return once a worker has registered as one that waits for jobs."""
    store = await app.opened()

    async def has_registered() -> bool:
        return (await store.run(health.traces(queue, [], []))).listeners > 0

    await until_found(has_registered)


async def is_stored(job: Job[Any]) -> bool:
    try:
        await job.status()
    except JobNotFound:
        return False
    return True


# E06
async def test_a_job_is_there_with_the_commit_and_not_before(
    confirm: AsyncTask[..., int], app: App, caller: Caller, place: Place
) -> None:
    await caller.begin()
    await caller.execute("insert into orders values (1)")
    job = await caller.enqueue(confirm, 1)
    bulk = await caller.enqueue_many(app, [confirm.call(n, f"account-{n % 7}") for n in range(MANY)])
    assert not await is_stored(job)
    assert not await is_stored(bulk[0])
    await caller.commit()
    assert await job.status() is State.READY
    assert [await each.status() for each in (bulk[0], bulk[-1])] == [State.READY, State.READY]
    assert await place.orders() == [1]
    assert (await (await app.opened()).counts("orders")).events > 0


# E06
async def test_a_rollback_leaves_nothing(confirm: AsyncTask[..., int], app: App, caller: Caller, place: Place) -> None:
    await caller.begin()
    await caller.execute("insert into orders values (1)")
    job = await caller.enqueue(confirm.using(unique="one"), 1)
    bulk = await caller.enqueue_many(app, [confirm.call(n) for n in range(MANY)])
    await caller.rollback()
    assert not await is_stored(job)
    assert not await is_stored(bulk[0])
    assert await place.orders() == []
    assert (await (await app.opened()).counts("orders")).events == 0
    again = await confirm.using(unique="one").enqueue(1)
    assert again.outcome is Outcome.ENQUEUED, "a key that was rolled back is free"


# E06
async def test_a_savepoint_takes_back_only_what_came_after_it(
    confirm: AsyncTask[..., int], app: App, caller: Caller, place: Place
) -> None:
    await caller.begin()
    await caller.execute("insert into orders values (1)")
    kept = await caller.enqueue(confirm, 1)
    await caller.savepoint()
    await caller.execute("insert into orders values (2)")
    gone = await caller.enqueue(confirm, 2)
    many = await caller.enqueue_many(app, [confirm.call(n) for n in range(MANY)])
    await caller.rollback_to_savepoint()
    late = await caller.enqueue(confirm, 3)
    await caller.commit()
    assert [await is_stored(job) for job in (kept, gone, many[0], late)] == [True, False, False, True]
    assert await place.orders() == [1]


# E05, E06
async def test_a_duplicate_is_decided_within_the_transaction(
    confirm: AsyncTask[..., int], app: App, caller: Caller
) -> None:
    await caller.begin()
    await caller.execute("insert into orders values (1)")
    first = await caller.enqueue(confirm.using(unique="order-1"), 1)
    second = await caller.enqueue(confirm.using(unique=Unique("order-1")), 1)
    bulk = await caller.enqueue_many(app, [confirm.using(unique=f"order-{n}").call(n) for n in (1, 2)])
    await caller.commit()
    assert (second.id, second.outcome) == (first.id, Outcome.DUPLICATE)
    assert [each.outcome for each in bulk] == [Outcome.DUPLICATE, Outcome.ENQUEUED]
    outside = await confirm.using(unique="order-1").enqueue(1)
    assert (outside.id, outside.outcome) == (first.id, Outcome.DUPLICATE)


# E05, E06
async def test_an_id_that_is_taken_is_refused_and_a_replaced_job_is_cancelled(
    confirm: AsyncTask[..., int], caller: Caller
) -> None:
    taken = await confirm.using(unique="replaced").enqueue(1)
    await caller.begin()
    await caller.execute("insert into orders values (1)")
    replacing = await caller.enqueue(confirm.using(unique=Unique("replaced", on_conflict="replace")), 2)
    await caller.commit()
    assert replacing.outcome is Outcome.REPLACED
    assert await taken.status() is State.CANCELLED
    await caller.begin()
    await caller.execute("insert into orders values (2)")
    with pytest.raises(DuplicateJob, match=str(taken.id)):
        await caller.enqueue(confirm.using(id=taken.id), 3)
    await caller.rollback()


# E06
async def test_the_commit_wakes_an_idle_worker(confirm: AsyncTask[..., int], app: App, caller: Caller) -> None:
    ran: set[int] = set()

    @app.task(queue="orders", name="ship")
    async def ship(order: int, account: str = "acme") -> None:
        ran.add(order)

    await ship.enqueue(0)
    async with working(app, queues=["orders"], concurrency=4):
        await until(lambda: ran == {0})
        await is_idle(app, "orders")
        # Nobody looks from time to time: the clock stands still. Only the commit can tell the worker.
        await caller.begin()
        await caller.execute("insert into orders values (1)")
        await caller.enqueue(ship, 1)
        await caller.commit()
        await until(lambda: ran == {0, 1})


# E01, E06
async def test_a_bulk_in_a_transaction_has_the_options_of_single_jobs(
    confirm: AsyncTask[..., int], app: App, caller: Caller
) -> None:
    with_options = confirm.using(
        priority=7, delay="1h", max_attempts=9, context={"plan": "gold"}, keys={"region": "north"}
    )
    await caller.begin()
    await caller.execute("insert into orders values (1)")
    alone = await caller.enqueue(with_options, 1, account='ann\\\'s "own", {}()')
    bulk = await caller.enqueue_many(
        app, [with_options.call(1, account='ann\\\'s "own", {}()'), confirm.call(2, account="ö\n\t%s $1")]
    )
    await caller.commit()
    one, two, plain = [await job.record() for job in (alone, *bulk)]
    seen = [
        (each.state, each.priority, each.max_attempts, each.keys, each.context, each.payload, each.due_at)
        for each in (one, two)
    ]
    assert seen[0] == seen[1]
    assert (one.state, one.priority, one.max_attempts) == (State.SCHEDULED, 7, 9)
    assert one.keys == {"account": 'ann\\\'s "own", {}()', "region": "north"}
    assert plain.keys == {"account": "ö\n\t%s $1"}


# E01, E06
async def test_a_backlog_counts_the_jobs_of_the_transaction(app: App, caller: Caller) -> None:
    app.queue("few", limits=[Backlog(2, by="account", when_full="reject")])

    @app.task(queue="few")
    async def few(account: str) -> None: ...

    await few.enqueue("other")
    await caller.begin()
    await caller.execute("insert into orders values (1)")
    await caller.enqueue(few, "acme")
    bulk = await caller.enqueue_many(app, [few.call("acme"), few.call("acme"), few.call("other")])
    assert [each.outcome for each in bulk] == [Outcome.ENQUEUED, Outcome.FULL, Outcome.ENQUEUED]
    with pytest.raises(BacklogFull):
        await caller.enqueue(few, "acme")
    await caller.commit()
