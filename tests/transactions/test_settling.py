"""A job that ends in its handler's own transaction, with every driver on both stores."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import pytest

from fairlane import App, Effects, Job, State, context
from fairlane.clock import ManualClock
from fairlane.errors import ClaimLost, ConfigurationError, JobFailed
from fairlane.task import Task
from tests.transactions.conftest import Place
from tests.transactions.drivers import Blocking, Caller, Django
from tests.waiting import until
from tests.worker.harness import working

T = TypeVar("T")
Body = Callable[[Caller, int], Coroutine[Any, Any, Any]]


def run_here(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never waits: what a blocking handler does, in its own thread."""
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError("it waited")


def task_with_connection(app: App, caller: type[Caller], place: Place, body: Body) -> Task[[int], Any]:
    """A task with a connection of its own: in a thread, or in the event loop, as its driver is."""

    def charge(order: int) -> Any:
        mine = caller(place.address)
        assert isinstance(mine, Blocking)
        mine.connect()
        try:
            return run_here(body(mine, order))
        finally:
            mine.disconnect()

    async def charge_async(order: int) -> Any:
        mine = caller(place.address)
        await mine.open()
        try:
            return await body(mine, order)
        finally:
            await mine.close()

    register = app.task(name="charge", max_attempts=1)
    task: Task[[int], Any] = register(charge if caller.is_blocking else charge_async)
    return task


async def ack(caller: Caller, order: int, result: Any) -> None:
    await caller.begin()
    await caller.execute(f"insert into orders values ({order})")
    if caller.is_blocking:
        context().ack_sync(result, tx=caller.tx)
    else:
        await context().ack(result, tx=caller.tx)


@pytest.fixture
async def run(
    app: App, caller: Caller, driver: tuple[str, type[Caller]], place: Place
) -> Callable[[Body], Awaitable[Job[Any]]]:
    """Runs a job with this body until it has ended, and its worker has recorded all there is to record."""

    async def run(body: Body) -> Job[Any]:
        task = task_with_connection(app, driver[1], place, body)
        job = await task.enqueue(1)
        async with working(app, concurrency=2):
            await until_ended(job)
        return job

    return run


@pytest.fixture
async def near(caller: Caller, driver: tuple[str, type[Caller]], place: Place) -> AsyncIterator[Caller]:
    """A caller in the thread of the event loop: who claims by hand is async, whatever its connection."""
    near = driver[1](place.address)
    if isinstance(near, Django):
        pytest.skip("Django refuses to be used in the thread of an event loop")
    if isinstance(near, Blocking):
        near.connect()
    else:
        await near.open()
    yield near
    await near.close()


async def until_ended(job: Job[Any]) -> None:
    with_result = asyncio.ensure_future(job.result())
    await asyncio.wait({with_result})
    with_result.exception()


async def test_a_job_ends_with_the_commit_of_its_handler(
    app: App, run: Callable[[Body], Awaitable[Job[Any]]], place: Place
) -> None:
    @app.task
    async def receipt(order: int) -> None: ...

    async def body(caller: Caller, order: int) -> str:
        context().enqueue(receipt.using(delay="1h").call(order))
        context().put("charged", order)
        await ack(caller, order, {"charged": order})
        await caller.commit()
        return "what is returned comes too late"

    job = await run(body)
    assert await job.result() == {"charged": 1}
    assert await place.orders() == [1]
    assert await app.values.get("charged") == 1
    assert await place.fetch("select count(*) from " + jobs_of(place) + " where task like '%receipt'") == [1]
    store = await app.opened()
    assert (await store.counts("default")).running == 0 or (await store.counts("default")).events > 0
    assert len(await job.attempts()) == 1
    assert await place.fetch("select count(*) from " + leases_of(place)) == [0]


async def test_after_a_rollback_the_job_ends_as_its_handler_does(
    app: App, run: Callable[[Body], Awaitable[Job[Any]]], place: Place
) -> None:
    async def body(caller: Caller, order: int) -> str:
        context().put("charged", order)
        await ack(caller, order, "never")
        await caller.rollback()
        return "returned"

    job = await run(body)
    assert await job.result() == "returned"
    assert await place.orders() == []
    assert await app.values.get("charged") == 1


async def test_after_the_commit_a_job_is_done_whatever_its_handler_raises(
    app: App, run: Callable[[Body], Awaitable[Job[Any]]], place: Place
) -> None:
    async def body(caller: Caller, order: int) -> None:
        await ack(caller, order, "done")
        await caller.commit()
        raise RuntimeError("too late")

    job = await run(body)
    assert (await job.status(), await job.result()) == (State.DONE, "done")
    assert await place.orders() == [1]


async def test_a_handler_that_raises_in_its_transaction_has_failed(
    app: App, run: Callable[[Body], Awaitable[Job[Any]]], place: Place
) -> None:
    async def body(caller: Caller, order: int) -> None:
        await ack(caller, order, "never")
        await caller.rollback()
        raise RuntimeError("changed its mind")

    job = await run(body)
    with pytest.raises(JobFailed, match="changed its mind"):
        await job.result()
    assert await place.orders() == []


async def test_a_stale_claim_aborts_the_transaction(app: App, near: Caller, place: Place) -> None:
    queue = app.queue("by-hand")

    @app.task(queue="by-hand")
    async def charge(order: int) -> None: ...

    job = await charge.enqueue(1)
    (stale,) = await queue.claim(1, lease="30s")
    assert isinstance(app.clock, ManualClock)
    app.clock.advance("31s")
    await app.upkeep()
    (fresh,) = await queue.claim(1, lease="30s")
    await near.begin()
    await near.execute("insert into orders values (1)")
    with pytest.raises(ClaimLost, match=str(job.id)):
        await stale.ack(tx=near.tx)
    await near.rollback()
    assert await place.orders() == []
    await near.begin()
    await near.execute("insert into orders values (2)")
    await fresh.ack(tx=near.tx)
    assert await job.status() is State.RUNNING, "nothing has happened before the commit"
    await near.commit()
    assert await job.status() is State.DONE


async def test_whoever_dies_after_the_commit_has_still_ended_the_job(app: App, near: Caller, place: Place) -> None:
    queue = app.queue("by-hand")

    @app.task(queue="by-hand")
    async def charge(order: int) -> None: ...

    job, other = await charge.enqueue(1), await charge.enqueue(2)
    committed, rolled_back = await queue.claim(2, lease="30s")
    await near.begin()
    await near.execute("insert into orders values (1)")
    await committed.ack(tx=near.tx, effects=Effects(put={"charged": True}))
    await near.commit()
    await near.begin()
    await near.execute("insert into orders values (2)")
    await rolled_back.ack(tx=near.tx)
    await near.rollback()
    await committed.ack()  # told again, and recognised
    assert isinstance(app.clock, ManualClock)
    app.clock.advance("31s")
    await app.upkeep()  # as if both had died: only the one that was rolled back comes again
    assert [claim.id for claim in await queue.claim(5, lease="30s")] == [other.id]
    assert await job.status() is State.DONE
    assert await app.values.get("charged") is True
    assert await place.orders() == [1]


async def test_an_ack_whose_transaction_stays_open_holds_up_no_other_lease(app: App, near: Caller) -> None:
    if app.url.startswith("sqlite"):
        pytest.skip("SQLite has one writer: whoever has a transaction open holds up everybody")
    queue = app.queue("by-hand")

    @app.task(queue="by-hand")
    async def charge(order: int) -> None: ...

    hung, other = await charge.enqueue(1), await charge.enqueue(2)
    (first,) = await queue.claim(1, lease="30s")
    (second,) = await queue.claim(1, lease="30s")
    assert (first.id, second.id) == (hung.id, other.id)
    await near.begin()
    await first.ack(tx=near.tx)
    assert isinstance(app.clock, ManualClock)
    app.clock.advance("31s")
    async with asyncio.timeout(30):  # where it waits for the transaction, for ever
        await app.upkeep()
    assert (await hung.status(), await other.status()) == (State.RUNNING, State.READY)
    await near.rollback()
    await app.upkeep()
    assert await hung.status() is State.READY


async def test_a_handler_is_not_interrupted_because_it_has_ended_its_claim(
    app: App, caller: Caller, driver: tuple[str, type[Caller]], place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    if caller.is_blocking:
        pytest.skip("nobody can interrupt a thread")
    store, clock = await app.opened(), app.clock
    assert isinstance(clock, ManualClock)
    renewed = asyncio.Event()
    committed = asyncio.Event()
    ended: list[str] = []
    renew = store.renew

    async def watched(*args: Any) -> Any:
        answer = await renew(*args)
        renewed.set()
        return answer

    monkeypatch.setattr(store, "renew", watched)

    async def body(caller: Caller, order: int) -> None:
        await ack(caller, order, "done")
        await caller.commit()
        committed.set()
        await renewed.wait()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        ended.append("by itself")

    job = await task_with_connection(app, driver[1], place, body).enqueue(1)
    async with working(app, lease="30s"):
        await committed.wait()
        renewed.clear()
        clock.advance("11s")
        await until(lambda: ended)
    assert ended == ["by itself"]
    assert await job.result() == "done"


async def test_a_blocking_ack_in_the_event_loop_is_refused(app: App, place: Place, caller: Caller) -> None:
    @app.task(max_attempts=1)
    async def charge() -> None:
        context().ack_sync(tx=caller.tx)

    job = await charge.enqueue()
    async with working(app):
        await until_ended(job)
    with pytest.raises(JobFailed, match=f"{ConfigurationError.__name__}: a blocking call inside an event loop"):
        await job.result()


def jobs_of(place: Place) -> str:
    return "fairlane.jobs" if place.kind == "postgres" else "jobs"


def leases_of(place: Place) -> str:
    return "fairlane.leases" if place.kind == "postgres" else "leases"
