"""Effects from a handler: what it adds lands when its job is done, and never otherwise."""

from __future__ import annotations

from uuid import uuid4

import pytest

from fairlane import App, Outcome, State, context
from fairlane.errors import InvalidJob, InvalidValue, JobFailed, UnknownQueue
from tests.waiting import until
from tests.worker.harness import working


async def test_what_a_handler_adds_lands_when_its_job_is_done(app: App) -> None:
    ran: list[int] = []

    @app.task
    async def follow(number: int) -> int:
        ran.append(number)
        return number

    chosen = uuid4()

    @app.task
    async def lead(number: int) -> None:
        job = context()
        job.enqueue(follow.call(number), follow.using(id=chosen, delay="1h").call(0))
        job.put("last", {"number": number})
        job.put("gone", 1)
        job.delete("gone")
        job.delete("kept")
        job.put("kept", 2)
        assert await app.values.get("last") is None

    async with working(app):
        await (await lead.enqueue(7)).result()
        later = app.job(chosen)
        assert await later.status() is State.SCHEDULED
        assert await app.values.get("last") == {"number": 7}
        assert await app.values.get("gone") is None
        assert await app.values.get("kept") == 2
        await until(lambda: ran)
    assert ran == [7]


async def test_a_handler_in_a_thread_can_add_effects_too(app: App) -> None:
    @app.task
    def lead(number: int) -> None:
        context().put("number", number)

    async with working(app):
        await (await lead.enqueue(7)).result()
    assert await app.values.get("number") == 7


async def test_a_handler_that_fails_leaves_nothing_behind(app: App) -> None:
    @app.task(max_attempts=1)
    async def lead() -> None:
        context().enqueue(lead.call())
        context().put("number", 1)
        raise ValueError("no luck")

    async with working(app):
        with pytest.raises(JobFailed):
            await (await lead.enqueue()).result()
    assert await app.values.get("number") is None
    assert (await (await app.opened()).counts("default")).ready == 0


async def test_effects_that_cannot_be_stored_are_refused_in_the_handler(app: App) -> None:
    seen: list[type[Exception]] = []

    @app.task
    async def lead(number: int) -> None:
        try:
            context().enqueue(lead)  # type: ignore[arg-type]
        except InvalidJob as error:
            seen.append(type(error))
        try:
            context().put("x" * 600, 1)
        except InvalidValue as error:
            seen.append(type(error))
        try:
            context().enqueue(lead.using(queue="nowhere").call(1))
        except UnknownQueue as error:
            seen.append(type(error))

    async with working(app):
        await (await lead.enqueue(1)).result()
    assert seen == [InvalidJob, InvalidValue, UnknownQueue]


async def test_a_follow_up_whose_id_is_taken_fails_the_attempt_and_says_why(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    @app.task
    async def follow() -> None: ...

    taken = await follow.using(delay="1h").enqueue()

    @app.task(max_attempts=1)
    async def lead() -> None:
        context().enqueue(follow.using(id=taken.id).call())
        context().put("number", 1)

    async with working(app):
        with pytest.raises(JobFailed, match="its effects were refused: DuplicateJob"):
            await (await lead.enqueue()).result()
    assert await app.values.get("number") is None
    assert "its effects were refused" in caplog.text


async def test_a_unique_follow_up_is_stored_once(app: App) -> None:
    @app.task
    async def follow(number: int) -> None: ...

    held = await follow.using(unique="a", delay="1h").enqueue(1)
    assert held.outcome is Outcome.ENQUEUED

    @app.task
    async def lead() -> None:
        context().enqueue(follow.using(unique="a").call(2))

    async with working(app):
        await (await lead.enqueue()).result()
    assert (await (await app.opened()).counts("default")).ready == 0
