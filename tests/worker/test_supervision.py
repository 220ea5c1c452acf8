"""O08: a loop that dies is loud, health turns red, and the worker ends."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import timedelta

import pytest

from fairlane import App, State
from fairlane.clock import ManualClock
from fairlane.errors import JobNotFound, WorkerDied
from fairlane.worker import WorkerOptions
from tests.waiting import until
from tests.worker.harness import WatchedStore, turns, working


async def fault() -> None:
    raise RuntimeError("a bug in the store")


@pytest.mark.parametrize(
    ("method", "loop"),
    [
        ("claim", "claiming"),
        ("reap", "reaping"),
        ("prune", "pruning"),
        ("collect", "collecting"),
        ("count_gates", "auditing"),
        ("listen", "listening"),
    ],
)
async def test_a_loop_that_dies_is_loud_and_ends_the_worker(
    app: App, store: WatchedStore, clock: ManualClock, caplog: pytest.LogCaptureFixture, method: str, loop: str
) -> None:
    async with app:
        store.before[method] = fault
        worker = await app.worker()
        running = asyncio.create_task(worker.run())

        def has_ended() -> bool:
            clock.advance("5s")  # every loop comes round
            return running.done()

        await until(has_ended)
        with pytest.raises(WorkerDied, match=f"{loop}: RuntimeError: a bug in the store"):
            await running
        assert not worker.health().is_well
        assert worker.health().loops[loop] == "RuntimeError: a bug in the store"
    assert f"the worker's loop '{loop}' died" in caplog.text
    assert any(record.levelname == "CRITICAL" for record in caplog.records)


async def test_the_death_of_an_upkeep_loop_does_not_interrupt_running_jobs(
    app: App, store: WatchedStore, clock: ManualClock
) -> None:
    started, release = asyncio.Event(), asyncio.Event()

    @app.task
    async def work() -> str:
        started.set()
        await release.wait()
        return "done"

    async with app:
        worker = await app.worker(WorkerOptions(lease=timedelta(hours=1)))
        running = asyncio.create_task(worker.run())
        job = await work.enqueue()
        await started.wait()
        store.before["prune"] = fault
        clock.advance("10s")
        await until(lambda: not worker.health().is_well)
        assert not running.done()
        release.set()
        with pytest.raises(WorkerDied):
            await running
        assert await job.result() == "done"


async def test_the_death_of_the_lease_keeper_still_lets_jobs_end_under_their_leases(
    app: App, store: WatchedStore, clock: ManualClock
) -> None:
    started, release = asyncio.Event(), asyncio.Event()

    @app.task
    async def work() -> str:
        started.set()
        await release.wait()
        return "done"

    async with app:
        worker = await app.worker(WorkerOptions(lease="30s", drain_timeout="10m"))
        running = asyncio.create_task(worker.run())
        job = await work.enqueue()
        await started.wait()
        store.before["renew"] = fault
        clock.advance("10s")
        await until(lambda: not worker.health().is_well)
        store.restore()
        await turns(50)
        renewed = store.ended["renew"]
        clock.advance("10s")
        await store.finished("renew", renewed + 1)
        release.set()
        with pytest.raises(WorkerDied):
            await running
        assert await job.status() is State.DONE


async def test_a_healthy_worker_says_so(app: App, store: WatchedStore) -> None:
    async with working(app) as worker:
        await store.finished("claim")
        health = worker.health()
        assert (health.is_well, health.is_connected, health.is_stopping) == (True, True, False)
        assert set(health.loops.values()) == {"running"}
    assert worker.health().is_stopping


async def test_workers_remove_old_jobs_themselves(app: App, store: WatchedStore, clock: ManualClock) -> None:
    @app.task
    async def work() -> str:
        return "old"

    async with working(app, lease="1h"):
        job = await work.enqueue()
        await job.result()
        clock.advance("23h")
        await store.finished("prune")
        assert await job.status() is State.DONE
        clock.advance("1h")
        with contextlib.suppress(JobNotFound):
            while await job.status() is State.DONE:  # until the harness loses its patience
                clock.advance("1m")
