"""Tasks in processes of their own: what they return and raise, and what becomes of a process that dies."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fairlane import App, Dead, State
from fairlane.clock import ManualClock
from fairlane.errors import ConfigurationError
from fairlane.testing import in_memory, run_until_idle
from fairlane.worker.processes import EXIT_ORPHANED, Child, _serve
from tests.waiting import until, until_blocking
from tests.worker.harness import reaches, working

app = App("sqlite://")


@dataclass
class Point:
    x: int
    y: int


class Odd(Exception):
    """Cannot be read back: its constructor takes more than it keeps."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


@app.task(executor="process")
def mirrored(point: Point) -> Point:
    return Point(point.y, point.x)


@app.task(executor="process")
def process_number() -> int:
    return os.getpid()


@app.task(executor="process", max_attempts=1)
def raises(kind: str) -> None:
    if kind == "odd":
        raise Odd(1, 2)
    if kind == "dead":
        raise Dead("no use")
    raise KeyError(kind)


@app.task(executor="process", max_attempts=2, retry_on=(KeyError,))
def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(executor="process", max_attempts=1)
def told_to_stop() -> str:
    for each in (signal.SIGINT, signal.SIGTERM):
        os.kill(os.getpid(), each)
    shown = [sys.executable, "-c", "import signal; print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)"]
    return subprocess.run(shown, capture_output=True, text=True, check=True).stdout.strip()


@app.task(executor="process", max_attempts=1, timeout="1m")
def hangs(place: str) -> None:
    Path(place).write_text(str(os.getpid()))
    threading.Event().wait()


@pytest.fixture
async def clock() -> AsyncIterator[ManualClock]:
    async with in_memory(app) as clock:
        yield clock


async def test_arguments_and_results_are_those_of_the_task(clock: ManualClock) -> None:
    jobs = [await mirrored.enqueue(Point(number, 0)) for number in range(3)]
    await run_until_idle(app)
    assert [await job.result() for job in jobs] == [Point(0, number) for number in range(3)]


async def test_it_is_another_process_which_stays_for_the_next_call(clock: ManualClock) -> None:
    first = await process_number.enqueue()
    async with working(app):
        number = await first.result()
        assert number != os.getpid()
        assert await (await process_number.enqueue()).result() == number


async def test_what_a_task_raises_is_what_its_attempt_ends_with(clock: ManualClock) -> None:
    for kind in ("missing", "odd", "dead"):
        await raises.enqueue(kind)
    errors = sorted(ran.error or "" for ran in await run_until_idle(app))
    assert [error.partition("\n")[0] for error in errors] == [
        "KeyError: 'missing'",
        "RuntimeError: the task raised what cannot be sent: tests.worker.test_process_pool.Odd: 1 and 2",
        "no use",
    ]
    assert "raise KeyError(kind)" in errors[0]


async def test_signals_to_all_processes_of_a_service_are_for_the_worker_to_heed(clock: ManualClock) -> None:
    job = await told_to_stop.enqueue()
    await run_until_idle(app)
    assert await job.result() == "True", "what a task starts itself is stopped as ever"


async def test_a_process_that_dies_is_a_failed_attempt_and_stops_nobody_else(clock: ManualClock) -> None:
    dead, well = await dies.enqueue(), await mirrored.enqueue(Point(1, 2))
    ran = await run_until_idle(app, advance=True)
    assert [each.outcome for each in ran if each.job == dead.id] == ["failed", "failed"]
    assert "died (by SIGKILL)" in (await dead.record()).error  # type: ignore[operator]
    assert await dead.status() is State.DEAD
    assert await well.result() == Point(2, 1)


@pytest.mark.parametrize("how", ["timeout", "cancel"])
async def test_a_run_that_is_stopped_has_its_process_killed(clock: ManualClock, how: str, tmp_path: Path) -> None:
    place = tmp_path / "number"
    job = await hangs.enqueue(str(place))
    async with working(app):
        await until(lambda: place.exists() and place.read_text())
        number = int(place.read_text())
        if how == "timeout":
            clock.advance("1m")
            await reaches(job, State.DEAD)
        else:
            await job.cancel()
            await reaches(job, State.CANCELLED)
        with pytest.raises(ProcessLookupError):
            os.kill(number, 0)


async def test_a_worker_that_stops_leaves_no_process_behind(clock: ManualClock, tmp_path: Path) -> None:
    place = tmp_path / "number"
    job = await hangs.enqueue(str(place))
    async with working(app, drain_timeout=0, cancel_grace=10):
        await until(lambda: place.exists() and place.read_text())
    assert await job.status() is State.DEAD  # a lost attempt, and it had one
    with pytest.raises(ProcessLookupError):
        os.kill(int(place.read_text()), 0)


def test_a_process_that_is_busy_does_not_outlive_its_worker() -> None:
    """L24: nobody else would stop it, and what it runs is soon run elsewhere."""
    theirs, ours = multiprocessing.get_context("spawn").Pipe()
    busy = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs,), daemon=True)
    busy.start()
    theirs.close()
    ours.send_bytes(pickle.dumps(("time", "sleep", (3_600.0,), {})))
    until_blocking(lambda: Path(f"/proc/{busy.pid}/wchan").exists() and busy.is_alive())
    ours.close()
    until_blocking(lambda: not busy.is_alive())
    assert busy.exitcode == EXIT_ORPHANED


def test_what_no_process_can_import_is_refused() -> None:
    other = App("sqlite://")
    with pytest.raises(ConfigurationError, match="at a module's top"):

        @other.task(executor="process")
        def local() -> None: ...

    with pytest.raises(ConfigurationError, match="not async"):

        @other.task(executor="process")
        async def waits() -> None: ...

    with pytest.raises(ConfigurationError, match="'thread' or 'process'"):
        other.task(executor="fiber")(process_number)  # type: ignore[call-overload]


def test_a_signal_does_not_end_a_process_that_is_still_starting() -> None:
    """A Ctrl-C at the terminal reaches it while Python starts there; it cost the attempt, and printed a traceback."""
    child = Child()
    try:
        assert child._process.pid is not None
        for each in (signal.SIGINT, signal.SIGTERM):
            os.kill(child._process.pid, each)
        answer, error = child.call(process_number, (), {})
        assert (answer, error) == (child._process.pid, None)
    finally:
        child.kill()
        child.close()
