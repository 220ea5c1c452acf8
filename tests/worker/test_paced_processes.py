"""A smooth rate that two worker processes share (A27): what was claimed ahead and has not started can be taken back
from either, and what could not start at its time is never bunched with what the other starts."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fairlane import App, Job, State, Task
from tests.waiting import stand_still_now, until, until_found
from tests.worker.paced_app import PER_SECOND, QUEUE, make_app

ROOT = Path(__file__).resolve().parents[2]
JOBS = 40
BUNCH = 2.0
"""How many calls more than the rate admits are a bunch: workers hold some five to ten. (A handler may look at the clock
a time slice or two after it was started, and the next one not.)"""
WATCHDOG = 120.0
"""Seconds after which workers that hang have failed. Never the measure of anything."""


class Call(NamedTuple):
    at: int
    """Nanoseconds of the machine's own clock."""
    number: int
    process: int


class Pair:
    """Two workers, and what their handlers wrote down."""

    def __init__(self, url: str, app: App, call: Task[[int], None], folder: Path) -> None:
        self.app = app
        self.jobs: list[Job[None]] = []
        self.workers: list[Process] = []
        self._call = call
        self._url = url
        self._calls = folder / "calls"
        self._file = None if url.startswith("postgres") else Path(url.removeprefix("sqlite:///"))

    async def start(self) -> None:
        command = [sys.executable, "-m", "fairlane.cli", "worker", "tests.worker.paced_app:app", "--concurrency", "20"]
        environment = dict(os.environ, FAIRLANE_URL=self._url, PYTHONPATH=str(ROOT), FAIRLANE_CALLS=str(self._calls))
        self.workers.append(
            await asyncio.create_subprocess_exec(*command, "--log-level", "error", env=environment, cwd=ROOT)
        )

    async def end(self) -> None:
        for each in self.workers:
            with contextlib.suppress(ProcessLookupError):
                each.kill()
            await each.wait()

    async def enqueue(self, count: int) -> None:
        calls = [self._call.call(number) for number in range(len(self.jobs), len(self.jobs) + count)]
        self.jobs += await self._call.enqueue_many(calls)

    def calls(self) -> list[Call]:
        text = self._calls.read_text() if self._calls.exists() else ""
        return sorted(Call(*map(int, line.split())) for line in text.splitlines())

    async def are_called(self, count: int) -> None:
        await until(lambda: len(self.calls()) >= count, WATCHDOG)

    async def are_called_after(self, instant: int) -> None:
        await until(lambda: self.calls()[-1].at > instant, WATCHDOG)

    async def both_call(self) -> None:
        """Once either has called; with enough left to do, however late the second one started."""

        async def is_so() -> bool:
            calls = self.calls()
            if len(self.jobs) - len(calls) < JOBS // 2:
                await self.enqueue(JOBS // 2)
            return len({each.process for each in calls}) == 2

        await until_found(is_so, WATCHDOG)

    async def waiting_for_their_instant(self) -> list[Job[None]]:
        """Claimed, and not called yet."""
        called = {each.number for each in self.calls()}
        states = [await job.status() for job in self.jobs]
        return [
            job
            for number, (job, state) in enumerate(zip(self.jobs, states, strict=True))
            if state is State.RUNNING and number not in called
        ]

    async def held(self, at_least: int) -> list[Job[None]]:
        """Once so many wait for their instant."""
        found: list[Job[None]] = []

        async def are_held() -> bool:
            found[:] = await self.waiting_for_their_instant()
            return len(found) >= at_least

        await until_found(are_held, WATCHDOG)
        return found

    async def nothing_runs(self) -> None:
        async def is_so() -> bool:
            return State.RUNNING not in [await job.status() for job in self.jobs]

        await until_found(is_so, WATCHDOG)

    async def are_done(self) -> None:
        async def is_so() -> bool:
            return all([await job.status() is State.DONE for job in self.jobs])

        await until_found(is_so, WATCHDOG)

    @contextlib.asynccontextmanager
    async def stopped(self, worker: Process) -> AsyncIterator[None]:
        """It stands still; but not with the lock that the other one needs."""

        async def stands() -> bool:
            stand_still_now(worker.pid)
            if self._is_writable():
                return True
            worker.send_signal(signal.SIGCONT)
            return False

        try:
            await until_found(stands)
            yield
        finally:
            worker.send_signal(signal.SIGCONT)

    def _is_writable(self) -> bool:
        if self._file is None:
            return True
        with open(f"{self._file}.lock") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True


def most_above(calls: list[Call]) -> float:
    """By how many calls the rate was exceeded in the worst stretch of time."""
    at = [each.at / 1e9 for each in calls]
    return max(
        (later - first + 1) - (1 + PER_SECOND * (at[later] - at[first]))
        for first in range(len(at))
        for later in range(first, len(at))
    )


@pytest.fixture
async def pair(url: str, tmp_path: Path) -> AsyncIterator[Pair]:
    app, call = make_app(url)
    async with app:
        pair = Pair(url, app, call, tmp_path)
        try:
            for _ in range(2):
                await pair.start()
            yield pair
        finally:
            await pair.end()


@pytest.mark.slow
async def test_what_a_worker_that_stood_still_could_not_start_is_not_bunched_with_what_the_other_starts(
    pair: Pair,
) -> None:
    await pair.enqueue(JOBS)
    await pair.both_call()
    for worker in pair.workers:
        async with pair.stopped(worker):
            # Long enough for every instant that it holds to go by: the other starts what comes after those.
            await pair.enqueue(JOBS // 4)
            await pair.are_called_after(time.monotonic_ns() + 1_000_000_000)
        await pair.are_called(len(pair.calls()) + PER_SECOND // 2)
    await pair.are_done()
    calls = pair.calls()
    assert sorted(each.number for each in calls) == list(range(len(pair.jobs))), "each is called once"
    assert most_above(calls) < BUNCH


async def _pause(pair: Pair, held: list[Job[None]]) -> None:
    await pair.app.operations.queues.pause(QUEUE, actor="ann")


async def _lower(pair: Pair, held: list[Job[None]]) -> None:
    await pair.app.operations.limits.set(QUEUE, "rate/1s:", 0.01, actor="ann")


async def _cancel(pair: Pair, held: list[Job[None]]) -> None:
    await asyncio.gather(*(job.cancel() for job in pair.jobs))


@pytest.mark.slow
@pytest.mark.parametrize("act", [_pause, _lower, _cancel], ids=["pause", "lowered limit", "cancel"])
async def test_what_has_not_started_is_taken_back_from_both_workers(pair: Pair, act: Any) -> None:
    await pair.enqueue(JOBS)
    await pair.both_call()
    held = await pair.held(PER_SECOND // 2)
    await act(pair, held)
    since = time.monotonic_ns()
    await pair.nothing_runs()
    late = [each for each in pair.calls() if each.at > since]
    assert len(late) <= len(held) // 2, "those that were held have started all the same"
    started, states = {each.number for each in pair.calls()}, [await job.status() for job in pair.jobs]
    taken_back = State.CANCELLED if act is _cancel else State.READY
    assert {states[number] for number in range(len(pair.jobs)) if number not in started} == {taken_back}
    assert most_above(pair.calls()) < BUNCH
