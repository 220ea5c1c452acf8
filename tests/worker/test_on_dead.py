"""Effects for death with a real worker: whichever way it finds out that a job is dead."""

from __future__ import annotations

from typing import Any

import pytest

from fairlane import App, Backoff, Dead, Effects, Retry, State, Task, context
from fairlane.clock import ManualClock
from fairlane.errors import JobFailed, StoreUnavailable
from tests.waiting import until
from tests.worker.harness import WatchedStore, reaches, turns, working

NO_WAIT = Backoff(0, jitter=0)


class Undertaker:
    """A task that jobs name for their death, and what it was called with."""

    def __init__(self, app: App) -> None:
        self.called: list[str] = []

        async def bury(name: str) -> None:
            self.called.append(name)

        self.task = app.task(name="bury")(bury)

    def declared(self, name: str) -> Effects:
        return Effects(enqueue=[self.task.call(name)], put={f"died/{name}": 1})


@pytest.fixture
def undertaker(app: App) -> Undertaker:
    return Undertaker(app)


async def test_a_handler_that_fails_for_good_is_followed_once(app: App, undertaker: Undertaker) -> None:
    @app.task(max_attempts=3, backoff=NO_WAIT)
    async def fail() -> None:
        assert await app.values.get("died/failed") is None
        raise ValueError("no luck")

    async with working(app):
        job = await fail.using(on_dead=undertaker.declared("failed")).enqueue()
        with pytest.raises(JobFailed):
            await job.result()
        assert await app.values.get("died/failed") == 1
        await until(lambda: undertaker.called)
    assert undertaker.called == ["failed"]


async def test_every_way_to_die_in_a_worker_applies_the_effects(app: App, undertaker: Undertaker) -> None:
    @app.task(max_attempts=1)
    async def retry() -> None:
        raise Retry("1s")

    @app.task
    async def dead() -> None:
        raise Dead("hopeless")

    @app.task(dead_on=KeyError)
    async def dead_on() -> None:
        raise KeyError("x")

    @app.task(retry_on=OSError)
    async def not_worth_it() -> None:
        raise ValueError("x")

    @app.task(max_attempts=1)
    async def too_large() -> str:
        return "x" * 10_000_000

    @app.task
    async def undecodable(number: int) -> None: ...

    tasks: list[Task[..., Any]] = [retry, dead, dead_on, not_worth_it, too_large]
    async with working(app):
        jobs = [await task.using(on_dead=undertaker.declared(task.name)).enqueue() for task in tasks]
        jobs.append(
            await undecodable.using(on_dead=undertaker.declared("undecodable")).enqueue("seven")  # type: ignore[arg-type]
        )
        for job in jobs:
            await reaches(job, State.DEAD)
        await until(lambda: len(undertaker.called) >= len(jobs))
        await turns()
    assert sorted(undertaker.called) == sorted([*(task.name for task in tasks), "undecodable"])


async def test_a_job_whose_own_effects_are_refused_in_its_last_attempt_dies_with_those_for_death(
    app: App, undertaker: Undertaker
) -> None:
    taken = await undertaker.task.using(delay="1h").enqueue("later")

    @app.task(max_attempts=1)
    async def lead() -> None:
        context().put("done", 1)
        context().enqueue(undertaker.task.using(id=taken.id).call("again"))

    async with working(app):
        job = await lead.using(on_dead=undertaker.declared("lead")).enqueue()
        with pytest.raises(JobFailed, match="its effects were refused: DuplicateJob"):
            await job.result()
        await until(lambda: undertaker.called)
    assert undertaker.called == ["lead"]
    assert await app.values.get("done") is None


async def test_a_job_that_is_done_or_cancelled_is_not_followed(app: App, undertaker: Undertaker) -> None:
    @app.task
    async def fine() -> int:
        return 1

    async with working(app):
        waiting = await fine.using(delay="1h", on_dead=undertaker.declared("cancelled")).enqueue()
        await waiting.cancel()
        assert await (await fine.using(on_dead=undertaker.declared("done")).enqueue()).result() == 1
        await turns()
    assert undertaker.called == []
    assert (await app.values.scan()).items == []


async def test_a_handler_enqueues_follow_ups_that_have_effects_for_their_death(
    app: App, undertaker: Undertaker
) -> None:
    @app.task
    async def second() -> None:
        raise Dead("hopeless")

    @app.task
    async def first() -> None:
        context().enqueue(second.using(on_dead=undertaker.declared("second")).call())

    async with working(app):
        await (await first.enqueue()).result()
        await until(lambda: undertaker.called)
    assert undertaker.called == ["second"]


async def test_a_job_whose_worker_is_gone_for_good_is_followed(
    app: App, store: WatchedStore, clock: ManualClock, undertaker: Undertaker
) -> None:
    queue = app.queue("lost")

    @app.task(queue="lost", max_attempts=1)
    async def lost() -> None: ...

    job = await lost.using(on_dead=undertaker.declared("lost")).enqueue()
    for _ in range(2):
        assert len(await queue.claim(1, lease="30s")) == 1
        clock.advance("1m")
        await store.real.reap()
    assert len(await queue.claim(1, lease="30s")) == 1
    clock.advance("1m")
    async with working(app):
        await reaches(job, State.DEAD)
        await until(lambda: undertaker.called)
    assert undertaker.called == ["lost"]


async def test_a_death_whose_answer_was_lost_is_followed_once(
    app: App, store: WatchedStore, clock: ManualClock, undertaker: Undertaker
) -> None:
    @app.task
    async def dead() -> None:
        raise Dead("hopeless")

    async def lose_the_answer() -> None:
        del store.after["settle"]
        raise StoreUnavailable("the test has cut the line")

    store.after["settle"] = lose_the_answer
    async with working(app):
        job = await dead.using(on_dead=undertaker.declared("dead")).enqueue()
        await reaches(job, State.DEAD)
        await until(lambda: "settle" not in store.after)
        clock.advance("10s")
        await store.finished("settle", 2)
        await (await undertaker.task.enqueue("after")).result()
    assert undertaker.called == ["dead", "after"]
