"""Running jobs in a test, on every kind of store that an app can have."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fairlane import App, Concurrency, Dead, Job, Rate, Retry, Snooze, State, context
from fairlane.clock import ManualClock
from fairlane.errors import ConfigurationError
from fairlane.testing import run_for, run_until_idle


@pytest.fixture(params=["memory", "file", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    match request.param:
        case "memory":
            return "sqlite://"
        case "file":
            return f"sqlite:///{tmp_path / 'jobs.db'}"
    given: str = request.getfixturevalue("postgres_url")
    return given


@pytest.fixture
async def app(url: str) -> AsyncIterator[App]:
    app = App(url, clock=ManualClock())
    yield app
    await app.close()


async def test_everything_that_can_run_has_run_with_what_it_enqueued(app: App) -> None:
    seen: list[int] = []

    @app.task
    async def count_down(number: int) -> None:
        seen.append(number)
        if number:
            await count_down.enqueue(number - 1)

    await count_down.enqueue(3)
    ran = await run_until_idle(app)
    assert seen == [3, 2, 1, 0]
    assert [each.outcome for each in ran] == ["done"] * 4


async def test_a_task_may_wait_for_another_that_it_has_enqueued(app: App) -> None:
    @app.task
    async def inner() -> int:
        return 21

    @app.task
    async def outer() -> int:
        return 2 * await (await inner.enqueue()).result()

    job = await outer.enqueue()
    await run_until_idle(app)
    assert await job.result() == 42


async def test_what_is_not_due_waits_until_the_clock_is_moved(app: App) -> None:
    @app.task
    def later() -> None: ...

    job = await later.using(delay="1h").enqueue()
    assert await run_until_idle(app) == []
    began = app.clock.now()
    (ran,) = await run_until_idle(app, advance=True)
    assert ran.job == job.id
    assert app.clock.now() - began == 3_600_000_000


async def test_retries_snoozes_and_refills_follow_the_clock_when_it_is_to_advance(app: App) -> None:
    app.queue("slow", limits=[Rate(1, per="1m", burst=1), Concurrency(1)])

    @app.task(queue="slow", max_attempts=3)
    async def flaky() -> str:
        if context().attempt == 1:
            raise Retry("10m")
        return "well"

    @app.task(queue="slow")
    async def sleepy() -> None:
        if app.clock.now() < woken:
            raise Snooze("1h")

    woken = app.clock.now() + 1_800_000_000
    jobs: list[Job[Any]] = [await flaky.enqueue(), await flaky.enqueue(), await sleepy.enqueue()]
    ran = await run_until_idle(app, advance=True)
    assert [await job.status() for job in jobs] == [State.DONE] * 3
    assert sorted(each.outcome for each in ran) == ["done", "done", "done", "retry", "retry", "snoozed"]


async def test_what_a_task_raised_is_told(app: App) -> None:
    @app.task(max_attempts=1)
    def broken() -> None:
        raise KeyError("no such thing")

    await broken.enqueue()
    (ran,) = await run_until_idle(app)
    assert (ran.outcome, ran.state, type(ran.raised)) == ("failed", State.DEAD, KeyError)
    assert "no such thing" in (ran.error or "")


async def test_a_task_that_never_ends_is_named(app: App) -> None:
    @app.task
    async def stuck() -> None:
        await asyncio.Event().wait()

    await stuck.enqueue()
    with pytest.raises(TimeoutError, match="stuck"):
        await run_until_idle(app, timeout=5.0)


async def test_time_that_passes_runs_what_becomes_due_in_it_and_no_more(app: App) -> None:
    at: list[int] = []

    @app.task
    async def later() -> None:
        at.append((app.clock.now() - began) // 1_000_000)

    began = app.clock.now()
    for minutes in (1, 5, 61):
        await later.using(delay=minutes * 60).enqueue()
    await run_for(app, "1h")
    assert at == [60, 300]
    assert app.clock.now() - began == 3_600_000_000


async def test_only_a_clock_that_can_be_moved_is_moved() -> None:
    app = App("sqlite://")
    for moving in (run_until_idle(app, advance=True), run_for(app, "1m")):
        with pytest.raises(ConfigurationError, match="SystemClock"):
            await moving
    await app.close()


async def test_the_last_failing_attempt_has_failed_and_its_job_is_dead(app: App) -> None:
    """H5. `outcome` is about the attempt, as in `job.attempts()`; `state` is about the job."""

    @app.task(max_attempts=3)
    async def fail() -> None:
        raise ConnectionError("no route")

    @app.task(max_attempts=2)
    async def ask() -> None:
        raise Retry("1m")

    @app.task(max_attempts=3)
    async def end() -> None:
        raise Dead("no such address")

    jobs: list[Job[Any]] = [await fail.enqueue(), await ask.enqueue(), await end.enqueue()]
    ran = await run_until_idle(app, advance=True)
    ended = [[(each.outcome, each.state) for each in ran if each.job == job.id] for job in jobs]
    assert ended == [
        [("failed", State.SCHEDULED), ("failed", State.SCHEDULED), ("failed", State.DEAD)],
        [("retry", State.SCHEDULED), ("retry", State.DEAD)],
        [("dead", State.DEAD)],
    ]
    for job in jobs:
        assert [each.outcome for each in await job.attempts()] == [each.outcome for each in ran if each.job == job.id]
        assert await job.status() is State.DEAD


@pytest.fixture
def scheduled(app: App) -> App:
    """Two schedules, and a job that is due tomorrow."""

    @app.task(name="work")
    async def work(what: str) -> None: ...

    app.schedule("0 9 * * *", work, "daily", name="daily")
    app.schedule("0 * * * *", work, "hourly", name="hourly")
    return app


@pytest.mark.parametrize(
    ("schedules", "expected"),
    [
        (True, 1 + 1 + 24),
        (False, 1),
        ("daily", 1 + 1),
        (["daily"], 1 + 1),
        (["hourly", "daily"], 1 + 1 + 24),
        ([], 1),
    ],
)
async def test_time_passes_with_all_some_or_none_of_the_schedules(
    scheduled: App, schedules: bool | str | list[str], expected: int
) -> None:
    """H5."""
    await scheduled.registry["work"].using(delay="1h").enqueue("delayed")
    assert len(await run_for(scheduled, "1d", schedules=schedules)) == expected


async def test_a_schedule_that_was_left_out_is_fired_again_later(scheduled: App) -> None:
    """H5. It stood still meanwhile, so that what it missed is made up for once."""
    assert len(await run_for(scheduled, "1d", schedules=["daily"])) == 1
    assert len(await run_for(scheduled, "3d", schedules=False)) == 0
    assert len(await run_for(scheduled, "1d", schedules=["daily"])) == 2


@pytest.mark.parametrize(
    ("schedules", "told"),
    [
        ("dayly", r"run_for: schedules: there is no schedule 'dayly'; did you mean 'daily'\?"),
        (["daily", "x"], "run_for: schedules: there is no schedule 'x'; this app has daily, hourly"),
        (5, "run_for: schedules=5 cannot be used; give True or False, text or a list of names"),
        ([5], "run_for: schedules=\\[5\\] cannot be used; give True or False, text or a list of names"),
        (None, "run_for: schedules=None cannot be used; give True or False, text or a list of names"),
    ],
)
async def test_schedules_that_are_not_there_are_refused(scheduled: App, schedules: Any, told: str) -> None:
    """H5."""
    with pytest.raises(ConfigurationError, match=told):
        await run_for(scheduled, "1d", schedules=schedules)
