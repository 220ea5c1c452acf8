"""How a run ends, and what that makes of its job."""

from __future__ import annotations

import asyncio
import logging
import threading
from datetime import timedelta

import pytest

from fairlane import App, Backoff, Cancel, Dead, Retry, Snooze, State, context
from fairlane.clock import ManualClock, as_datetime
from fairlane.errors import ConfigurationError, JobCancelled, JobFailed
from tests.waiting import until
from tests.worker.harness import WatchedStore, hanging, reaches, working

NO_WAIT = Backoff(0, jitter=0)


async def test_the_result_of_a_task_comes_back_to_its_producer(app: App) -> None:
    @app.task
    async def double(number: int) -> int:
        return 2 * number

    async with working(app):
        assert await (await double.enqueue(21)).result(timeout="5s") == 42


async def test_a_failed_job_runs_again_until_its_attempts_are_used_up(app: App) -> None:
    seen: list[int] = []

    @app.task(max_attempts=3, backoff=NO_WAIT)
    async def fail() -> None:
        seen.append(context().attempt)
        raise ValueError("no luck")

    async with working(app):
        job = await fail.enqueue()
        with pytest.raises(JobFailed, match="3 of 3 attempts: ValueError: no luck"):
            await job.result()
    assert seen == [1, 2, 3]


async def test_an_error_is_kept_with_the_place_it_came_from(app: App, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "fairlane.worker")  # pytest cannot report half a pair

    @app.task(max_attempts=1)
    async def fail() -> None:
        raise ValueError("a NUL \x00 and half a pair \ud800")

    async with working(app):
        job = await fail.enqueue()
        with pytest.raises(JobFailed):
            await job.result()
    error = (await job.record()).error or ""
    assert error.startswith("ValueError: a NUL ␀ and half a pair ?")
    assert "test_outcomes.py" in error
    assert "worker/execution.py" not in error


async def test_an_error_that_is_not_in_retry_on_ends_the_job(app: App) -> None:
    @app.task(max_attempts=5, retry_on=(OSError,))
    async def fail() -> None:
        raise KeyError("missing")

    async with working(app):
        with pytest.raises(JobFailed, match="1 of 5 attempts: KeyError"):
            await (await fail.enqueue()).result()


async def test_dead_on_outranks_retry_on(app: App) -> None:
    @app.task(max_attempts=5, dead_on=FileNotFoundError)
    async def fail() -> None:
        raise FileNotFoundError("gone")

    async with working(app):
        with pytest.raises(JobFailed, match="1 of 5 attempts: FileNotFoundError: gone"):
            await (await fail.enqueue()).result()


async def test_dead_ends_a_job_at_once_with_its_reason(app: App) -> None:
    @app.task(max_attempts=5)
    async def fail() -> None:
        raise Dead("the account is closed")

    async with working(app):
        with pytest.raises(JobFailed, match="1 of 5 attempts: the account is closed"):
            await (await fail.enqueue()).result()


async def test_a_handler_can_cancel_its_own_job(app: App) -> None:
    @app.task
    async def stop() -> None:
        raise Cancel("nothing to do")

    async with working(app):
        with pytest.raises(JobCancelled, match="nothing to do"):
            await (await stop.enqueue()).result()


async def test_a_snoozed_job_keeps_its_attempt_and_comes_back_when_it_said(
    app: App, store: WatchedStore, clock: ManualClock
) -> None:
    attempts: list[int] = []

    @app.task(max_attempts=1)
    async def snooze() -> str:
        attempts.append(context().attempt)
        if len(attempts) == 1:
            raise Snooze("10m")
        return "awake"

    async with working(app):
        job = await snooze.enqueue()
        await store.finished("settle")
        record = await job.record()
        assert record.state is State.SCHEDULED
        assert record.due_at == clock.now() + 600_000_000
        clock.advance("10m")
        assert await job.result() == "awake"
    assert attempts == [1, 1]


async def test_a_retry_says_when(app: App, clock: ManualClock) -> None:
    moment = as_datetime(clock.now()) + timedelta(hours=2)

    @app.task(max_attempts=3, backoff=Backoff("1h"))
    async def retry(how: str) -> None:
        raise {"delay": Retry("5s"), "at": Retry(at=moment), "backoff": Retry()}[how]

    async with working(app):
        jobs = [await retry.enqueue(how) for how in ("delay", "at", "backoff")]
        for job in jobs:
            await reaches(job, State.SCHEDULED)
        waits = [((await job.record()).due_at or 0) - clock.now() for job in jobs]
    assert waits[:2] == [5_000_000, 7_200_000_000]
    assert 3_600_000_000 <= waits[2] <= 4_320_000_000


async def test_a_delay_that_makes_no_sense_fails_the_attempt_and_says_so(app: App) -> None:
    @app.task(max_attempts=1)
    async def snooze(delay: str) -> None:
        raise Snooze(delay)

    async with working(app):
        for delay, reason in (("soon", "'soon' is not a duration"), ("99999999d", "a hundred years")):
            with pytest.raises(JobFailed, match=reason):
                await (await snooze.enqueue(delay)).result()


@pytest.mark.parametrize("error", [StopIteration("odd"), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
async def test_whatever_a_blocking_handler_raises_is_a_failure_of_its_job_alone(app: App, error: BaseException) -> None:
    @app.task(max_attempts=1)
    def fail() -> None:
        raise error

    @app.task
    def fine() -> str:
        return "fine"

    async with working(app):
        with pytest.raises(JobFailed, match=type(error).__name__):
            await (await fail.enqueue()).result()
        assert await (await fine.enqueue()).result() == "fine"


async def test_an_error_that_no_coroutine_can_raise_is_recorded_as_itself(app: App) -> None:
    @app.task(max_attempts=3, dead_on=StopIteration)
    def fail() -> int:
        return next(iter([]))

    async with working(app):
        job = await fail.enqueue()
        with pytest.raises(JobFailed):
            await job.result()
        record = await job.record()
        assert (record.state, record.attempt) == (State.DEAD, 1)
        assert record.error is not None
        assert "next(iter([]))" in record.error  # where it was raised
        assert "RuntimeError" not in record.error


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
async def test_whatever_an_async_handler_raises_is_a_failure_of_its_job_alone(app: App, error: BaseException) -> None:
    @app.task(max_attempts=1)
    async def fail() -> None:
        raise error

    @app.task
    async def fine() -> str:
        return "fine"

    async with working(app):
        with pytest.raises(JobFailed, match=type(error).__name__):
            await (await fail.enqueue()).result()
        assert await (await fine.enqueue()).result() == "fine"


async def test_a_result_that_cannot_be_stored_fails_with_a_clear_reason(app: App) -> None:
    @app.task(max_attempts=1)
    async def lock() -> object:
        return threading.Lock()

    @app.task(max_attempts=1)
    async def flood() -> str:
        return "x" * 300_000

    async with working(app):
        with pytest.raises(JobFailed, match=r"its result \(lock\) cannot be stored as JSON"):
            await (await lock.enqueue()).result()
        with pytest.raises(JobFailed, match="300,002 bytes, more than the 262,144 allowed"):
            await (await flood.enqueue()).result()


async def test_an_async_handler_that_overruns_its_timeout_is_cancelled_and_fails(app: App, clock: ManualClock) -> None:
    started = asyncio.Event()
    ended = asyncio.Event()

    @app.task(max_attempts=1, timeout="30s")
    async def hang() -> None:
        started.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.set()

    async with working(app, lease="10m"):
        job = await hang.enqueue()
        await started.wait()
        clock.advance("29s")
        assert await job.status() is State.RUNNING
        clock.advance("1s")
        await ended.wait()
        with pytest.raises(JobFailed, match="TimeoutError: the job ran longer than its timeout of 30 s"):
            await job.result()


async def test_a_timeout_can_be_in_dead_on(app: App, clock: ManualClock) -> None:
    hang, started = hanging(app, max_attempts=5, timeout="30s", dead_on=TimeoutError)

    async with working(app, lease="10m"):
        job = await hang.enqueue()
        await started.wait()
        clock.advance("30s")
        with pytest.raises(JobFailed, match="1 of 5 attempts"):
            await job.result()


async def test_only_the_job_that_overran_its_timeout_is_stopped(app: App, clock: ManualClock) -> None:
    started = [asyncio.Event(), asyncio.Event(), asyncio.Event()]
    release = asyncio.Event()

    @app.task(max_attempts=1, timeout="30s")
    async def hold(place: int) -> str:
        started[place].set()
        await release.wait()
        return "in time"

    async with working(app, lease="10m"):
        first = await hold.enqueue(0)
        await started[0].wait()
        clock.advance("20s")
        second = await hold.enqueue(1)
        await started[1].wait()
        clock.advance("10s")
        with pytest.raises(JobFailed):
            await first.result()
        assert await second.status() is State.RUNNING
        third = await hold.enqueue(2)
        await started[2].wait()
        clock.advance("20s")  # the timer goes on to the next one
        with pytest.raises(JobFailed):
            await second.result()
        release.set()
        assert await third.result() == "in time"


async def test_a_thread_that_overruns_its_timeout_keeps_its_slot_until_it_returns(app: App, clock: ManualClock) -> None:
    started, release, flagged = threading.Event(), threading.Event(), []

    @app.task(max_attempts=1, timeout="30s")
    def hang() -> str:
        started.set()
        release.wait(20)
        flagged.append(context().cancelled)
        return "late"

    async with working(app, lease="10m") as worker:
        job = await hang.enqueue()
        await asyncio.to_thread(started.wait, 20)
        clock.advance("31s")
        await until(lambda: worker._execution._timeouts._at is None)
        assert await job.status() is State.RUNNING
        assert worker.health().running == 1
        release.set()
        with pytest.raises(JobFailed, match="TimeoutError"):
            await job.result()
    assert flagged == [True]


@pytest.mark.parametrize("signal", [Snooze, Retry])
def test_a_signal_with_a_time_that_lies_in_the_past_is_refused_where_it_is_made(
    signal: type[Snooze] | type[Retry],
) -> None:
    # `Snooze(-1)` ran 1,937 times in 3 seconds: a snooze counts no attempt.
    with pytest.raises(ConfigurationError, match=f"{signal.__name__}: delay=-1 lies in the past"):
        signal(-1)
