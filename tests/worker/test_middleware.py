"""What goes around runs and enqueues."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import pytest

from fairlane import App, Call, Enqueued, Retry, State
from fairlane.errors import ConfigurationError, InvalidJob
from fairlane.testing import run_until_idle
from fairlane.worker import JobContext, Middleware


class Noting(Middleware):
    def __init__(self, name: str, notes: list[str]) -> None:
        self.name = name
        self.notes = notes

    async def around_run(self, job: JobContext, run: Any) -> Any:
        self.notes.append(f"{self.name} in")
        try:
            return await run()
        finally:
            self.notes.append(f"{self.name} out")

    async def around_enqueue(self, calls: Sequence[Call[Any]], enqueue: Any) -> Enqueued[Any]:
        self.notes.append(f"{self.name} takes {len(calls)}")
        return await enqueue(calls)  # type: ignore[no-any-return]


@pytest.mark.parametrize("is_async", [True, False])
async def test_the_first_that_was_added_is_the_outermost(app: App, is_async: bool) -> None:
    notes: list[str] = []
    for name in ("first", "second"):
        app.middleware(Noting(name, notes))

    @app.task
    async def waits() -> int:
        notes.append("task")
        return 7

    @app.task
    def blocks() -> int:
        notes.append("task")
        return 7

    job = await (waits if is_async else blocks).enqueue()
    await run_until_idle(app)
    assert await job.result() == 7
    around = ["first in", "second in", "task", "second out", "first out"]
    assert notes == ["first takes 1", "second takes 1", *around]


@pytest.mark.parametrize("is_async", [True, False])
async def test_what_a_task_raises_passes_through_and_may_become_something_else(app: App, is_async: bool) -> None:
    class Patience(Middleware):
        async def around_run(self, job: JobContext, run: Any) -> Any:
            try:
                return await run()
            except (KeyError, RuntimeError) as error:
                raise Retry("1h", reason="it will come") from error

    app.middleware(Patience())

    @app.task
    async def waits() -> None:
        raise KeyError("nothing")

    @app.task
    def blocks() -> None:
        raise StopIteration("nothing")

    job = await (waits if is_async else blocks).enqueue()
    (ran,) = await run_until_idle(app)
    assert (ran.outcome, await job.status()) == ("retry", State.SCHEDULED)


async def test_context_variables_that_are_set_around_a_run_reach_a_task_in_its_thread(app: App) -> None:
    session: ContextVar[str] = ContextVar("session")

    class Sessions(Middleware):
        async def around_run(self, job: JobContext, run: Any) -> Any:
            session.set(f"for {job.task}")
            return str(await run()).upper()

    app.middleware(Sessions())

    @app.task(name="reads")
    def reads() -> str:
        return session.get()

    job = await reads.enqueue()
    await run_until_idle(app)
    assert await job.result() == "FOR READS"


async def test_an_enqueue_may_be_changed_or_refused_alone_and_in_bulk(app: App) -> None:
    class Rules(Middleware):
        async def around_enqueue(self, calls: Sequence[Call[Any]], enqueue: Any) -> Enqueued[Any]:
            if any(call.args[0] < 0 for call in calls):
                raise InvalidJob("nothing below 0")
            return await enqueue([call.using(priority=call.args[0]) for call in calls])  # type: ignore[no-any-return]

    app.middleware(Rules())

    @app.task
    async def count(number: int) -> None: ...

    jobs = [await count.enqueue(1), *await count.enqueue_many([count.call(2), count.call(3)])]
    jobs += [job async for batch in app.enqueue_stream([count.call(4)]) for job in batch]
    assert [(await job.record()).priority for job in jobs] == [1, 2, 3, 4]
    for refused in (count.enqueue(-1), app.enqueue_many([count.call(1), count.call(-1)])):
        with pytest.raises(InvalidJob, match="nothing below 0"):
            await refused


async def test_only_middleware_is_taken_as_such(app: App) -> None:
    with pytest.raises(ConfigurationError, match="not a Middleware"):
        app.middleware(print)  # type: ignore[type-var]
