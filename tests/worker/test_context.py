"""What a handler can ask about its job, and how it hears that it should stop."""

from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar

import pytest

from fairlane import App, State, context
from fairlane.errors import ConfigurationError, JobCancelled
from tests.worker.harness import WatchedStore, hanging, working

tenant: ContextVar[str] = ContextVar("tenant", default="none")


def test_outside_of_a_job_there_is_no_context() -> None:
    with pytest.raises(ConfigurationError, match="no job is running here"):
        context()


async def test_a_handler_knows_its_job(app: App) -> None:
    app.queue("mail", keys=["account"])

    @app.task(queue="mail", max_attempts=7, name="send")
    async def send(account: str) -> list[object]:
        here = context()
        return [str(here.id), here.attempt, here.max_attempts, dict(here.keys), here.queue, here.task, here.cancelled]

    async with working(app):
        job = await send.enqueue("acme")
        assert await job.result() == [str(job.id), 1, 7, {"account": "acme"}, "mail", "send", False]


async def test_a_thread_knows_its_job_and_reports_its_progress(app: App) -> None:
    @app.task
    def work() -> str:
        context().progress_sync(0.25, "a quarter")
        return str(context().id)

    async with working(app):
        job = await work.enqueue()
        assert await job.result() == str(job.id)
        record = await job.record()
    assert (record.progress, record.progress_message) == (0.25, "a quarter")


async def test_progress_outside_of_0_to_1_is_refused(app: App) -> None:
    @app.task
    async def work() -> None:
        with pytest.raises(ValueError, match="does not lie between 0 and 1"):
            await context().progress(7)

    async with working(app):
        await (await work.enqueue()).result()


async def test_a_progress_report_that_cannot_be_made_does_not_fail_the_job(app: App, store: WatchedStore) -> None:
    store.lose("report_progress")

    @app.task(max_attempts=1)
    async def work() -> str:
        await context().progress(0.5)
        return "done all the same"

    async with working(app):
        assert await (await work.enqueue()).result() == "done all the same"


async def test_what_one_job_sets_in_its_context_is_not_seen_by_the_next(app: App) -> None:
    @app.task
    async def visit(name: str) -> str:
        before = tenant.get()
        tenant.set(name)
        return before

    async with working(app, concurrency=1):
        assert [await (await visit.enqueue(name)).result() for name in ("a", "b")] == ["none", "none"]


async def test_a_cancelled_async_job_is_interrupted_and_ends_cancelled(app: App) -> None:
    # L05, the half that happens in the worker.
    hang, started = hanging(app, max_attempts=5)

    async with working(app):
        job = await hang.enqueue()
        await started.wait()
        assert await job.cancel() is State.RUNNING
        with pytest.raises(JobCancelled, match="cancelled while it ran"):
            await job.result()


async def test_a_cancelled_job_in_a_thread_sees_its_flag(app: App) -> None:
    started = threading.Event()

    @app.task(max_attempts=5)
    def poll() -> None:
        here = context()
        started.set()
        while True:
            here.raise_if_cancelled()

    async with working(app):
        job = await poll.enqueue()
        await asyncio.to_thread(started.wait, 20)
        await job.cancel()
        with pytest.raises(JobCancelled):
            await job.result()


async def test_a_job_that_fails_after_it_was_cancelled_does_not_run_again(app: App) -> None:
    # L05: a cancel survives a retry.
    started, runs = asyncio.Event(), []

    @app.task(max_attempts=5)
    async def stubborn() -> None:
        runs.append(1)
        started.set()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            raise ValueError("I would rather fail") from None

    async with working(app):
        job = await stubborn.enqueue()
        await started.wait()
        await job.cancel()
        with pytest.raises(JobCancelled):
            await job.result()
    assert runs == [1]


async def test_a_cancel_is_heard_by_a_worker_whose_slots_are_all_busy(app: App) -> None:
    hang, started = hanging(app)

    async with working(app, concurrency=1):
        job = await hang.enqueue()
        await started.wait()
        await job.cancel()  # the clock stands still: no renewal is due
        with pytest.raises(JobCancelled):
            await job.result()
