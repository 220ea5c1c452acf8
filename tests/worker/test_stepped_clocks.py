"""F6, C12: workers, while the clock of the database or of their own machine is set."""

from __future__ import annotations

import pytest

from fairlane import App, Rate, Retry, State
from fairlane.clock import SECOND, ManualClock, as_datetime
from fairlane.store.sqlite import SqliteStore
from fairlane.worker import Worker
from tests.waiting import until
from tests.worker.harness import WatchedStore, reaches, turns, working

HOUR = 3_600 * SECOND


@pytest.fixture
def server() -> ManualClock:
    """The clock of the database, where that is not the one of the worker's machine."""
    return ManualClock()


@pytest.fixture
def store(server: ManualClock) -> WatchedStore:
    return WatchedStore(SqliteStore(None, clock=server))


@pytest.fixture
def app(clock: ManualClock, store: WatchedStore) -> App:
    app = App("sqlite://", clock=clock)
    app._make_store = lambda: store
    return app


def looks_within(worker: Worker, clock: ManualClock, seconds: int) -> bool:
    """Whether it sleeps, and asks its queue again soon. If it still asks, it sees the next step too early."""
    (queue,) = worker._slots.queues.values()
    sleeps = worker._slots.is_awaited and not worker._slots.wake.is_set() and not queue.used
    return sleeps and queue.due_at is not None and 0 < queue.due_at - clock.monotonic() < seconds * SECOND


@pytest.mark.parametrize("step", [10 * SECOND, HOUR])
async def test_a_worker_goes_on_with_a_rate_when_the_clock_of_its_machine_is_set_back(
    clock: ManualClock, step: int
) -> None:
    app = App("sqlite://", clock=clock)
    app.queue("default", limits=[Rate(1, per="10s")])
    runs: list[int] = []

    @app.task
    async def work(number: int) -> None:
        runs.append(number)

    async with app:
        for number in range(3):
            await work.enqueue(number)
        async with working(app, poll="1h") as worker:
            await until(lambda: len(runs) == 1 and looks_within(worker, clock, 11))
            clock.advance("2s")
            clock.set(clock.now() - step)
            clock.advance("9s")
            await until(lambda: len(runs) == 2 and looks_within(worker, clock, 11))
            clock.advance("11s")
            await until(lambda: len(runs) == 3)


async def test_a_worker_goes_on_with_a_rate_when_the_databases_clock_is_set_forward(
    app: App, store: WatchedStore, clock: ManualClock, server: ManualClock
) -> None:
    app.queue("default", limits=[Rate(1, per="10s")])
    runs: list[int] = []

    @app.task
    async def work(number: int) -> None:
        runs.append(number)

    async with app:
        for number in range(3):
            await work.enqueue(number)
        async with working(app, poll="1h") as worker:
            await until(lambda: len(runs) == store.ended["settle"] == 1 and looks_within(worker, clock, 11))
            server.advance("21s")
            clock.advance("11s")
            await until(lambda: len(runs) == store.ended["settle"] == 2 and looks_within(worker, clock, 11))
            server.advance("11s")
            clock.advance("11s")
            await until(lambda: len(runs) == 3)


async def test_when_the_databases_clock_is_set_forward_live_workers_renew_before_anybody_is_reaped(
    app: App, store: WatchedStore, clock: ManualClock, server: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    queue = app.queue("by-hand")
    queue_of_worker = app.queue("default")

    @app.task(queue="by-hand")
    async def work() -> None: ...

    async with app:
        job = await work.enqueue()
        (held,) = await queue.claim(lease="30s")
        async with working(app, lease="30s", queues=queue_of_worker.name):
            await store.finished("reap")
            await turns(50)
            server.advance("1h")
            clock.advance("30s")
            await until(lambda: "the database's clock was set forward" in caplog.text)
            assert store.calls["reap"] == 1
            await queue.renew([held])
            clock.advance("15s")
            await store.finished("reap", 2)
            assert await job.status() is State.RUNNING
            await held.ack()


async def test_the_jobs_of_a_dead_worker_are_taken_over_soon_after_a_step_forward(
    app: App, store: WatchedStore, clock: ManualClock, server: ManualClock
) -> None:
    queue = app.queue("by-hand")
    queue_of_worker = app.queue("default")

    @app.task(queue="by-hand")
    async def work() -> None: ...

    async with app:
        job = await work.enqueue()
        await queue.claim(lease="30s")
        async with working(app, lease="30s", queues=queue_of_worker.name):
            await store.finished("reap")
            await turns(50)
            server.advance("1h")
            clock.advance("30s")
            await store.finished("keep_time", 3)
            await turns(50)
            clock.advance("15s")
            await reaches(job, State.READY)


async def test_a_retry_at_a_time_of_day_goes_by_the_databases_clock(app: App, server: ManualClock) -> None:
    """Queue time is an hour ahead of it, since a step forward was undone."""
    app.queue("default")

    @app.task
    async def work() -> None:
        raise Retry(at=as_datetime(server.now() + 600 * SECOND))

    async with app:
        server.advance("1h")
        await app.upkeep()
        server.set(server.now() - HOUR)
        job = await work.enqueue()
        async with working(app):
            await reaches(job, State.SCHEDULED)
            assert (await job.record()).due_at == server.now() + HOUR + 600 * SECOND
