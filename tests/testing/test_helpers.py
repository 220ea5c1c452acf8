"""The app of a program in memory, jobs that run at once, and what was enqueued."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fairlane import App, FairlaneError, State
from fairlane.clock import ManualClock
from fairlane.testing import assert_enqueued, enqueued_jobs, immediate, in_memory, run_until_idle


@pytest.fixture
def app(tmp_path: Path) -> App:
    """The app of a program, with a database of its own that no test may touch."""
    app = App(f"sqlite:///{tmp_path / 'real.db'}")
    app.queue("mail", keys=["account"])

    @app.task(queue="mail", name="send", max_attempts=2)
    async def send(number: int, account: str, *, urgent: bool = False) -> int:
        if number < 0:
            raise ValueError(f"{number} is no number")
        return number

    return app


async def test_an_app_in_memory_leaves_its_own_database_alone(app: App, tmp_path: Path) -> None:
    send, clock = app.registry["send"], ManualClock()
    own = app.clock
    async with in_memory(app, clock) as given:
        assert given is clock
        await send.enqueue(1, account="acme")
        await run_until_idle(app)
        await assert_enqueued(app, send, count=1, state=State.DONE)
    assert list(tmp_path.iterdir()) == []
    assert app.clock is own
    async with in_memory(app):
        assert await enqueued_jobs(app) == []


async def test_in_immediate_mode_a_job_has_run_when_its_enqueue_returns(app: App) -> None:
    send = app.registry["send"]
    async with in_memory(app):
        with immediate(app):
            job = await send.enqueue(7, account="acme")
            assert await job.status() is State.DONE
            later = await send.using(delay="1m").enqueue(7, account="acme")
            assert await later.status() is State.SCHEDULED
        assert await (await send.enqueue(8, account="acme")).status() is State.READY


async def test_in_immediate_mode_what_a_task_raises_is_raised_where_it_was_enqueued(app: App) -> None:
    send = app.registry["send"]
    async with in_memory(app):
        with immediate(app), pytest.raises(ValueError, match="-1 is no number"):
            await send.enqueue(-1, account="acme")


async def test_in_immediate_mode_what_a_task_enqueues_has_run_too(app: App) -> None:
    seen: list[int] = []

    @app.task
    async def count_down(number: int) -> None:
        seen.append(number)
        if number:
            await count_down.enqueue(number - 1)

    async with in_memory(app):
        with immediate(app):
            await count_down.enqueue(2)
        assert seen == [2, 1, 0]


async def test_a_call_that_was_enqueued_is_found_by_its_arguments_however_they_were_given(app: App) -> None:
    send = app.registry["send"]
    async with in_memory(app):
        await send.using(priority=3).enqueue(1, "acme")
        await send.enqueue(2, account="beta", urgent=True)
        for call in (send.call(1, account="acme"), send.call(1, "acme", urgent=False)):
            (found,) = await assert_enqueued(app, call, count=1, priority=3, keys={"account": "acme"})
            assert found.arguments == {"number": 1, "account": "acme", "urgent": False}
        assert len(await assert_enqueued(app, send, queue="mail")) == 2
        await assert_enqueued(app, send.call(3, account="acme"), count=0)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"count": 3}, "jobs of send: 2 enqueued, expected 3"),
        ({"priority": 9}, "jobs of send, priority=9: 0 enqueued, expected at least 1"),
        ({"keys": {"account": "gamma"}}, "jobs of send, keys={'account': 'gamma'}: 0 enqueued"),
        ({"state": State.DONE}, "jobs of send, state='done': 0 enqueued"),
    ],
)
async def test_what_was_not_enqueued_is_told_beside_what_was(app: App, asked: dict[str, object], told: str) -> None:
    send = app.registry["send"]
    async with in_memory(app):
        await send.enqueue(1, "acme")
        await send.enqueue(2, account="beta")
        with pytest.raises(AssertionError, match=re.escape(told)) as caught:
            await assert_enqueued(app, send, **asked)  # type: ignore[arg-type]
        assert "send(number=1, account='acme', urgent=False) in 'mail', ready" in str(caught.value)


async def test_a_job_that_cannot_be_stored_is_refused_in_immediate_mode_as_ever(app: App) -> None:
    async with in_memory(app):
        with immediate(app), pytest.raises(FairlaneError, match="account"):
            await app.registry["send"].enqueue(1)
