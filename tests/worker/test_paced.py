"""Smooth rates on a worker (F3, A27): jobs are claimed ahead, start at their instants, and can be taken back before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

from fairlane import App, Job, Rate, State, Task
from fairlane.clock import ManualClock
from fairlane.scheduler.snapshot import AHEAD
from fairlane.waits import StoreTime
from tests.waiting import until, until_found
from tests.worker.harness import reaches, working


@dataclass
class Scene:
    """A queue with ten starts a second, one at a time, and when its handlers were called."""

    app: App
    clock: ManualClock
    called: list[tuple[int, int]] = field(default_factory=list)
    """Which job, and after how many milliseconds."""
    seen: int = 0

    def __post_init__(self) -> None:
        self.app.queue("calls", limits=[Rate(10, per="1s", burst=1)])
        began = self.clock.now()

        @self.app.task(queue="calls", name="call")
        async def call(number: int) -> None:
            self.called.append((number, (self.clock.now() - began) // 1_000))

        self.app.queue("others")
        self.going = asyncio.Event()

        @self.app.task(queue="others", name="other")
        async def other() -> None: ...

        @self.app.task(queue="others", name="long")
        async def long() -> None:
            await self.going.wait()

        self.call: Task[[int], Any] = call
        self.other: Task[[], Any] = other
        self.long: Task[[], Any] = long

    async def enqueue(self, count: int) -> list[Job[Any]]:
        return [await self.call.enqueue(number) for number in range(count)]

    async def are_claimed(self, jobs: list[Job[Any]]) -> None:
        async def claimed() -> bool:
            return [await job.status() for job in jobs].count(State.RUNNING) == len(jobs)

        await until_found(claimed)

    async def go_on_until(self, calls: int) -> None:
        """Let time go by in small steps, and never see two calls in one."""

        def are_made() -> bool:
            assert len(self.called) <= max(self.seen, 1) + 1
            self.seen = len(self.called)
            if self.seen < calls:
                self.clock.advance("10ms")
            return len(self.called) >= calls

        await until(are_made)


@pytest.fixture
async def scene(url: str, clock: ManualClock) -> AsyncIterator[Scene]:
    scene = Scene(App(url, clock=clock), clock)
    async with scene.app:
        yield scene


async def test_each_job_starts_at_its_own_instant_though_they_were_claimed_together(scene: Scene) -> None:
    jobs = await scene.enqueue(5)
    async with working(scene.app, concurrency=5):
        await scene.are_claimed(jobs[1:])
        await scene.go_on_until(5)
        for job in jobs:
            await reaches(job, State.DONE)
    assert [number for number, _ in scene.called] == [0, 1, 2, 3, 4]
    at = [instant for _, instant in scene.called]
    assert min(after - before for before, after in pairwise(at)) >= 80


async def test_what_waits_for_its_instant_takes_no_slot(scene: Scene) -> None:
    jobs = await scene.enqueue(5)
    async with working(scene.app, queues=["calls", "others"], concurrency=1):
        await scene.are_claimed(jobs[1:2])
        await reaches(await scene.other.enqueue(), State.DONE)  # no time has passed


async def test_what_comes_too_late_is_given_back_and_not_bunched(scene: Scene) -> None:
    """A worker that stood still for a while starts one, and the others at their distance."""
    jobs = await scene.enqueue(8)
    async with working(scene.app, concurrency=8):
        await scene.are_claimed(jobs[1:])
        await until(lambda: len(scene.called) == 1)
        scene.clock.advance("500ms")
        await scene.go_on_until(8)
        for job in jobs:
            await reaches(job, State.DONE)
    at = [instant for _, instant in scene.called]
    assert min(after - before for before, after in pairwise(at)) >= 80


async def test_a_pause_takes_back_what_has_not_started(scene: Scene) -> None:
    jobs = await scene.enqueue(6)
    async with working(scene.app, concurrency=6):
        await scene.are_claimed(jobs[1:])
        await until(lambda: len(scene.called) == 1)
        await scene.app.operations.queues.pause("calls", actor="ann")
        for job in jobs[1:]:
            await reaches(job, State.READY)
        scene.clock.advance("5s")
        assert len(scene.called) == 1
        await scene.app.operations.queues.resume("calls", actor="ann")
        await scene.go_on_until(2)


async def test_a_pause_reaches_what_waits_for_a_slot_too(scene: Scene) -> None:
    """Jobs whose instant has come while every slot is taken have not started either."""
    jobs = await scene.enqueue(2)
    async with working(scene.app, queues=["calls", "others"], concurrency=1):
        await scene.are_claimed(jobs[1:])
        await until(lambda: len(scene.called) == 1)
        busy = await scene.long.enqueue()
        await reaches(busy, State.RUNNING)
        scene.clock.advance("100ms")  # for the second, and no slot for it
        await scene.app.operations.queues.pause("calls", actor="ann")
        await reaches(jobs[1], State.READY)
        scene.going.set()
        await reaches(busy, State.DONE)
        await reaches(await scene.other.enqueue(), State.DONE)
    assert len(scene.called) == 1


@pytest.mark.parametrize("is_finer_last", [True, False])
async def test_starts_keep_their_distance_at_every_gate_that_they_pass(
    url: str, clock: ManualClock, is_finer_last: bool
) -> None:
    app = App(url, clock=clock)
    limits = [Rate(50, per="1s", burst=1, by="account"), Rate(1, per="1s", burst=1, by=("account", "endpoint"))]
    app.queue("calls", limits=limits if is_finer_last else limits[::-1])
    called: list[int] = []

    @app.task(queue="calls", name="call")
    async def call(account: str, endpoint: str) -> None:
        called.append(clock.now() // 1_000)

    app.queue("others")

    @app.task(queue="others", name="other")
    async def other() -> None: ...

    async with app:
        jobs = [await call.enqueue("acme", f"api{number}") for number in range(6)]
        async with working(app, queues=["calls", "others"], concurrency=6):

            async def are_claimed() -> bool:
                return [await job.status() for job in jobs[1:]].count(State.RUNNING) == 5

            await until_found(are_claimed)
            await until(lambda: len(called) == 1)
            clock.advance("150ms")  # it stood still: every instant has gone by
            await until(lambda: len(called) == 2)
            await reaches(await other.enqueue(), State.DONE)
            assert len(called) == 2, "bunched"

            def are_made() -> bool:
                if len(called) < 6:
                    clock.advance("5ms")
                return len(called) == 6

            await until(are_made)
    assert min(after - before for before, after in pairwise(called)) >= 15


async def test_a_lowered_limit_reaches_what_has_not_started(scene: Scene) -> None:
    jobs = await scene.enqueue(6)
    async with working(scene.app, concurrency=6):
        await scene.are_claimed(jobs[1:])
        await until(lambda: len(scene.called) == 1)
        await scene.app.operations.limits.set("calls", "rate/1s:", 1, actor="ann")
        for job in jobs[3:]:
            await reaches(job, State.READY)
        await scene.go_on_until(3)
    _, (_, second), (_, third) = scene.called
    assert third - second >= 800


async def test_a_cancel_reaches_what_has_not_started(scene: Scene) -> None:
    jobs = await scene.enqueue(4)
    async with working(scene.app, concurrency=4):
        await scene.are_claimed(jobs[1:])
        await jobs[2].cancel()
        await reaches(jobs[2], State.CANCELLED)
        await scene.go_on_until(3)
    assert [number for number, _ in scene.called] == [0, 1, 3]


async def test_a_worker_that_stops_gives_back_what_has_not_started(scene: Scene) -> None:
    jobs = await scene.enqueue(6)
    async with working(scene.app, concurrency=6):
        await scene.are_claimed(jobs[1:])
        await until(lambda: len(scene.called) == 1)
    assert [await job.status() for job in jobs[1:]] == [State.READY] * 5
    assert {(await job.record()).attempt for job in jobs[1:]} == {0}


async def test_a_job_that_waits_for_its_instant_is_said_to_be_held_by_its_rate(scene: Scene) -> None:
    jobs = await scene.enqueue(3)
    async with working(scene.app, concurrency=3):
        await scene.are_claimed(jobs[1:])
        told = await scene.app.operations.jobs.explain(jobs[2].id)
    assert [hold.reason.value for hold in told.holds] == ["rate"]
    assert "is next at its rate: worker" in told.holds[0].words
    assert told.earliest is not None
    assert 0 < told.earliest - told.now <= AHEAD


def test_a_clock_is_known_better_than_an_answer_takes() -> None:
    """The store's clock is 5 s ahead. Its answers take 40 ms, which is not always lost on the same way."""
    time = StoreTime(ManualClock())
    for asked, way in ((1_000_000, 39_000), (2_000_000, 1_000), (3_000_000, 20_000)):
        time.hear(asked, asked + way + 5_000_000, asked + 40_000)
    assert abs(time.offset - 5_000_000) <= 1_000


def test_an_answer_that_took_long_moves_no_clock_that_it_does_not_contradict() -> None:
    time = StoreTime(ManualClock())
    time.hear(1_000_000, 6_000_000, 1_000_000)
    time.hear(2_000_000, 7_000_000, 600_000_000)
    assert time.offset == 5_000_000


def test_a_clock_that_was_set_is_believed() -> None:
    time = StoreTime(ManualClock())
    time.hear(1_000_000, 6_000_000, 1_002_000)
    time.hear(2_000_000, 3_000_000, 2_002_000)
    assert abs(time.offset - 1_000_000) <= 1_000
