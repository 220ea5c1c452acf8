"""How a worker ends: nothing lost, nothing run twice, nothing held for longer than needed."""

from __future__ import annotations

import asyncio
import threading

import pytest

from fairlane import App, Rate, Snooze, State
from fairlane import waits as timing
from fairlane.clock import ManualClock
from fairlane.worker import WorkerOptions
from tests.waiting import until
from tests.worker.harness import WatchedStore, hanging, turns, working


async def test_a_clean_shutdown_lets_running_jobs_end_and_releases_what_had_not_started(
    app: App, clock: ManualClock
) -> None:
    # L15, A17.
    app.queue("default", limits=[Rate(4, per="1h")])
    started, release = asyncio.Event(), asyncio.Event()

    @app.task
    async def work(number: int) -> int:
        started.set()
        await release.wait()
        return number

    async with working(app, concurrency=1, lease="1h", prefetch=3) as worker:
        worker._slots.ahead = 3
        jobs = await work.enqueue_many([work.call(n) for n in range(4)])
        await started.wait()
        await until(lambda: worker.health().waiting == 3)
        worker.stop()
        await until(lambda: worker.health().unsettled == worker.health().waiting == 0)
        assert [await job.status() for job in jobs] == [State.RUNNING, State.READY, State.READY, State.READY]
        assert [(await job.record()).attempt for job in jobs] == [1, 0, 0, 0]
        release.set()
        assert await jobs[0].result() == 0
    async with working(app, lease="1h"):  # the tokens were given back: all of them may run within the same hour
        assert [await job.result() for job in jobs[:3]] == [0, 1, 2]
        clock.advance("1s")  # rates are kept by when jobs start, which is a little after their claim
        assert await jobs[3].result() == 3


async def test_a_stopped_worker_starts_nothing_new(app: App, store: WatchedStore) -> None:
    @app.task
    async def work() -> None: ...

    async with working(app) as worker:
        await store.finished("claim")
        worker.stop()
        job = await work.enqueue()
    assert await job.status() is State.READY


async def test_what_a_claim_in_flight_brings_after_the_stop_is_released_at_once(app: App, store: WatchedStore) -> None:
    ran = []

    @app.task
    async def work() -> None:
        ran.append(1)

    async with app:
        job = await work.enqueue()
        held, gate = store.hold_up("claim", after=True)
        async with working(app) as worker:
            await held.wait()
            assert await job.status() is State.RUNNING
            worker.stop()
            await turns()
            gate.set()
        assert await job.status() is State.READY
        assert (await job.record()).attempt == 0
        assert (await store.real.counts("default")).running in (0, 1)  # not folded yet, perhaps
    assert ran == []


async def test_at_the_deadline_async_jobs_are_interrupted_and_keep_their_place(
    app: App, store: WatchedStore, clock: ManualClock
) -> None:
    hang, started = hanging(app, max_attempts=5)

    async with working(app, drain_timeout="30s", lease="10m") as worker:
        job = await hang.enqueue()
        await started.wait()
        worker.stop()
        await turns(50)
        clock.advance("29s")
        await turns(50)
        assert await job.status() is State.RUNNING
        clock.advance("1s")
    record = await job.record()
    assert (record.state, record.attempt, record.error) == (State.READY, 1, "worker shut down")


async def test_an_interrupted_job_that_had_its_last_attempt_is_dead(app: App) -> None:
    # Promise 6: a lost claim counts as an attempt.
    hang, started = hanging(app, max_attempts=1)

    async with working(app, drain_timeout=0) as worker:
        job = await hang.enqueue()
        await started.wait()
        worker.stop()
    assert await job.status() is State.DEAD


async def test_a_second_stop_does_not_wait_for_the_deadline_and_loses_nothing(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "fairlane")
    hang, started = hanging(app)

    async with working(app, drain_timeout="1h") as worker:
        job = await hang.enqueue()
        await started.wait()
        worker.stop()
        worker.stop()  # the clock stands still
    assert "waiting for 1 running job to end" in caplog.text
    assert await job.status() is State.READY


async def test_a_handler_that_finishes_its_cleanup_during_the_grace_is_settled(app: App, clock: ManualClock) -> None:
    started, cleaned = asyncio.Event(), asyncio.Event()

    @app.task
    async def tidy() -> None:
        started.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await cleaned.wait()

    async with working(app, drain_timeout=0, cancel_grace="5s") as worker:
        job = await tidy.enqueue()
        await started.wait()
        worker.stop()
        await turns(50)
        assert await job.status() is State.RUNNING
        cleaned.set()
    assert await job.status() is State.READY


async def test_a_thread_that_will_not_stop_keeps_its_claim_until_its_lease_ends(app: App, clock: ManualClock) -> None:
    started, release = threading.Event(), threading.Event()

    @app.task
    def hang() -> None:
        started.set()
        release.wait(20)

    async with working(app, drain_timeout=0, cancel_grace="5s", lease="10m") as worker:
        job = await hang.enqueue()
        await asyncio.to_thread(started.wait, 20)
        worker.stop()
        await until(lambda: all(run.stop is not None for run in worker._execution.running))
        await turns(100)
        clock.advance("5s")
    try:
        assert worker.left_running == 1
        assert await job.status() is State.RUNNING
        clock.advance("10m")
        assert [each.to for each in (await (await app.opened()).reap()).settled] == [State.READY]
    finally:
        release.set()


async def test_a_worker_whose_task_is_cancelled_leaves_its_jobs_in_order(app: App) -> None:
    hang, started = hanging(app)

    async with app:
        job = await hang.enqueue()
        worker = await app.worker(WorkerOptions(drain_timeout="1h"))
        running = asyncio.create_task(worker.run())
        await started.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert await job.status() is State.READY


async def test_a_worker_can_be_stopped_while_the_database_is_away(app: App, store: WatchedStore) -> None:
    async with working(app) as worker:
        await store.finished("claim")
        store.lose("claim", "settle", "renew", "listen", "reap")
        worker._slots.look_everywhere()
        await store.called("claim", 2)
        assert not worker.health().is_connected
    assert worker.left_unsettled == 0


async def test_a_job_snoozed_in_its_last_moment_is_snoozed(app: App) -> None:
    started = asyncio.Event()

    @app.task
    async def polite() -> None:
        started.set()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            raise Snooze("5m") from None

    async with working(app, drain_timeout=0) as worker:
        job = await polite.enqueue()
        await started.wait()
        worker.stop()
    record = await job.record()
    assert (record.state, record.attempt) == (State.SCHEDULED, 0)


def held_up(store: WatchedStore, method: str, ended: list[str]) -> tuple[asyncio.Event, asyncio.Event]:
    """From now on this call waits for the second event, once it has set the first; how it ended is noted."""
    asked, answer = asyncio.Event(), asyncio.Event()

    async def wait_here() -> None:
        asked.set()
        try:
            await answer.wait()
            ended.append("answered")
        except asyncio.CancelledError:
            ended.append("broken off")
            raise

    store.before[method] = wait_here
    return asked, answer


@pytest.mark.parametrize("method", ["reap", "listen"])
async def test_what_a_stopped_worker_has_asked_the_store_is_not_broken_off(
    app: App, store: WatchedStore, method: str
) -> None:
    ended: list[str] = []
    asked, answer = held_up(store, method, ended)
    async with working(app) as worker:
        await asked.wait()
        worker.stop()
        worker.stop()
        await turns()
        answer.set()
    assert ended == ["answered"]


async def test_a_store_that_does_not_answer_does_not_keep_a_worker_from_ending(
    app: App, store: WatchedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "ANSWER_WITHIN", 0.0)
    ended: list[str] = []
    asked, _ = held_up(store, "reap", ended)
    async with working(app):
        await asked.wait()
    assert ended == ["broken off"]


async def test_a_second_stop_gives_back_what_a_claim_in_flight_brings(app: App, store: WatchedStore) -> None:
    @app.task
    async def work() -> None: ...

    async with app:
        job = await work.enqueue()
        held, gate = store.hold_up("claim", after=True)
        async with working(app) as worker:
            await held.wait()
            worker.stop()
            worker.stop()
            await turns()
            gate.set()
        record = await job.record()
        assert (record.state, record.attempt) == (State.READY, 0)
