"""What a worker holds, for how long, and what it does when it holds it no more."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta
from uuid import uuid4

import pytest

from fairlane import App, Concurrency, State, context
from fairlane.clock import ManualClock
from fairlane.scheduler.settlement import Released, settle
from fairlane.store.protocol import WorkerIdentity
from fairlane.waits import Outage
from tests.waiting import until
from tests.worker.harness import WatchedStore, reaches, turns, working


async def test_a_job_longer_than_its_lease_is_run_once_and_keeps_its_slot(
    app: App, store: WatchedStore, clock: ManualClock
) -> None:
    # L12, A12.
    app.queue("default", limits=[Concurrency(1)])
    started, release, runs = asyncio.Event(), asyncio.Event(), []

    @app.task
    async def long(name: str) -> str:
        runs.append(name)
        started.set()
        await release.wait()
        return name

    async with working(app, lease="30s") as worker:
        first = await long.enqueue("first")
        await started.wait()
        second = await long.enqueue("second")
        for _ in range(30):  # five minutes, ten leases
            renewals = store.ended["renew"]
            clock.advance("10s")
            await store.finished("renew", renewals + 1)
            await turns()
        assert runs == ["first"]
        assert await second.status() is State.READY
        assert worker.health().running == 1
        release.set()
        assert [await first.result(), await second.result()] == ["first", "second"]
    assert runs == ["first", "second"]


async def test_all_leases_are_renewed_in_one_call(app: App, store: WatchedStore, clock: ManualClock) -> None:
    release = asyncio.Event()
    started = 0

    @app.task
    async def hold() -> None:
        nonlocal started
        started += 1
        await release.wait()

    async with working(app, lease="30s"):
        for count in range(1, 6):  # each job comes alone, so each is claimed under a lease of its own
            await hold.enqueue()
            await until(lambda count=count: started == count)  # type: ignore[misc]
        clock.advance("10s")
        await store.finished("renew")
        assert len(store.arguments["renew"][0][0]) == 5
        assert store.calls["renew"] == 1
        release.set()


async def test_an_idle_worker_renews_nothing(app: App, store: WatchedStore, clock: ManualClock) -> None:
    @app.task
    async def work() -> None: ...

    async with working(app, lease="30s"):
        await (await work.enqueue()).result()
        await turns(50)
        for _ in range(6):
            clock.advance("10s")
            await turns(50)
    assert store.calls["renew"] == 0


@pytest.mark.parametrize("kind", ["async", "thread"])
async def test_a_worker_stops_a_job_whose_lease_is_gone_and_settles_nothing(
    app: App, store: WatchedStore, clock: ManualClock, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    # L01 from the worker's side: it was taken for dead, and its job runs elsewhere.
    started, interrupted, stopped = asyncio.Event(), asyncio.Event(), threading.Event()

    @app.task(name="async")
    async def hang() -> None:
        started.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            interrupted.set()

    @app.task(name="thread")
    def poll() -> None:
        here, loop = context(), worker_loop
        loop.call_soon_threadsafe(started.set)
        while not here.cancelled:
            pass
        stopped.set()
        loop.call_soon_threadsafe(interrupted.set)

    worker_loop = asyncio.get_running_loop()
    async with working(app, lease="30s", queues="default"):
        job = await (hang if kind == "async" else poll).enqueue()
        await started.wait()
        store.before["reap"] = asyncio.get_running_loop().create_future  # the worker's own reaper sleeps
        clock.advance("40s")
        # As another worker's reaper would: this one did not renew in time.
        await store.real.reap()
        store.before.pop("reap")
        await store.called("renew")
        await interrupted.wait()
        await turns(50)
        settled = [each.job for batch in store.arguments.get("settle", []) for each in batch[0]]
        assert job.id not in settled
        assert f"job {job.id} ({kind}): ClaimLost" in caplog.text
        # Whoever claims it next runs it; here it is this worker again, with another lease.
        await job.cancel()


async def test_a_worker_that_lost_its_connection_stops_what_it_no_longer_holds(
    app: App, store: WatchedStore, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    # L21.
    started, interrupted, release = asyncio.Event(), asyncio.Event(), asyncio.Event()
    runs = 0

    @app.task(name="lost")
    async def lost() -> str:
        nonlocal runs
        runs += 1
        if runs > 1:
            return "by another run"
        started.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            interrupted.set()
        return "never"

    @app.task(name="kept")
    async def kept() -> str:
        await release.wait()
        return "kept"

    async with working(app, lease="30s") as worker:
        mine, other = await app.enqueue_many([lost.call(), kept.call()])
        await started.wait()
        # The database takes one of two claims of one lease away, and hands the job out again: the lease itself stands.
        [run] = [run for run in worker._execution.held() if run.claim.id == mine.id]
        store.lose("renew", "claim", "held", "settle", "reap", "listen", "report", "add_up")
        await store.real.settle([settle(run.claim, Released("by the test"), 0)])
        clock.advance("10s")
        await store.called("renew")
        # What was on its way to the database when the line was cut may still come back, and say that it is there.
        await until(lambda: not worker.health().is_connected)
        store.restore()
        await interrupted.wait()
        release.set()
        assert await other.result() == "kept"
        assert await mine.result() == "by another run"
        await until(lambda: worker.health().is_connected)  # each loop notices when it asks again
    assert f"job {mine.id} (lost): ClaimLost" in caplog.text


async def test_a_job_of_a_dead_worker_is_run_by_another_when_its_lease_ends(
    app: App, store: WatchedStore, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    # L18 with a simulated death: a claim that nobody renews.
    @app.task
    async def work() -> int:
        return context().attempt

    async with app:
        job = await work.enqueue()
        dead = WorkerIdentity(uuid4(), "gone")
        await store.real.claim("default", lambda: 1, worker=dead, lease=timedelta(seconds=30))
        async with working(app, lease="30s"):
            await turns(50)
            assert await job.status() is State.RUNNING
            clock.advance("30s")
            assert await job.result() == 1  # nobody knows whether it had begun
    assert f"job {job.id} ({work.name}): its lease ran out, its worker did not renew it; it is now ready" in caplog.text


async def test_after_an_outage_those_who_live_renew_before_anybody_is_reaped(
    app: App, store: WatchedStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, are_back = asyncio.Event(), asyncio.Event()

    async def others_are_back(outage: Outage) -> None:
        if store.ended["reap"] > 1:
            waits.set()
            await are_back.wait()

    monkeypatch.setattr(Outage, "others_are_back", others_are_back)

    @app.task
    async def work() -> int:
        return context().attempt

    async with app:
        job = await work.enqueue()
        other = WorkerIdentity(uuid4(), "as cut off as we")
        (held,) = (await store.real.claim("default", lambda: 1, worker=other, lease=timedelta(seconds=30))).claims
        async with working(app, lease="30s"):
            await store.finished("reap")
            await turns(50)  # the reaper sleeps
            store.lose("reap")
            clock.advance("31s")
            await store.finished("reap", 2)
            store.restore()
            await waits.wait()
            await store.real.renew([held.lease], timedelta(seconds=30))
            are_back.set()
            await store.finished("reap", 3)
            assert await job.status() is State.RUNNING


async def test_a_draining_worker_keeps_its_leases_until_the_last_job_stops(
    app: App, store: WatchedStore, clock: ManualClock
) -> None:
    started, release = asyncio.Event(), asyncio.Event()

    @app.task
    async def long() -> str:
        started.set()
        await release.wait()
        return "done"

    async with working(app, lease="30s", drain_timeout="1h") as worker:
        job = await long.enqueue()
        await started.wait()
        worker.stop()
        for n in range(12):
            clock.advance("10s")
            await store.finished("renew", n + 1)
            await turns()
        assert (await store.real.reap()).settled == []
        release.set()
        assert await job.result() == "done"
        await reaches(job, State.DONE)


async def test_a_worker_that_stood_still_does_not_reap_its_own_jobs(
    app: App, store: WatchedStore, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    started, release, runs = asyncio.Event(), asyncio.Event(), []

    @app.task
    async def long() -> str:
        runs.append(1)
        started.set()
        await release.wait()
        return "once"

    async with working(app, lease="30s"):
        job = await long.enqueue()
        await started.wait()
        for n in range(5):
            await store.finished("reap", n + 1)
            await turns(50)  # the reaper sleeps
            clock.advance("1h")  # the machine was suspended: lease and all timers are overdue at once
        await store.finished("reap", 6)
        release.set()
        assert await job.result() == "once"
    assert runs == [1]
    assert "leases were renewed" in caplog.text


async def test_nothing_begins_under_a_lease_that_ended_while_its_worker_stood_still(
    app: App, store: WatchedStore, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    begun: list[int] = []

    @app.task
    async def work() -> None:
        begun.append(store.calls["claim"])

    async def stand_still() -> None:
        store.after.clear()
        clock.advance("31s")

    async with working(app, lease="30s"):
        await store.finished("claim")
        await turns()
        store.after["claim"] = stand_still
        before = store.calls["claim"]
        job = await work.enqueue()
        await job.result()
    # The first claim was given back, or was reaped before that: another worker could have had it meanwhile.
    (claims,) = begun
    assert claims >= before + 2
    assert "released, the job is ready again: its worker stood still for longer than its lease" in caplog.text
