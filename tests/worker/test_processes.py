"""Real processes: signals, exit codes, restarts. They report over a socket, so that nobody has to sleep."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fairlane import App, State
from fairlane.clock import SECOND
from fairlane.errors import WorkerDied
from fairlane.worker import WorkerOptions
from fairlane.worker import children as crew
from tests.waiting import PATIENCE

REPORT = """
import socket, os
def report(what):
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(os.environ["REPORTS"])
        line.sendall(f"{what} {os.getpid()}".encode())
"""

SHOP = (
    REPORT
    + """
import asyncio, time
from fairlane import App
app = App()

@app.task
async def hang():
    report("started")
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        report("interrupted")
        raise

@app.task
async def wait_for(path: str) -> str:
    report("started")
    while not os.path.exists(path):
        await asyncio.sleep(0.005)
    return "in peace"

@app.task
def stuck():
    report("started")
    time.sleep(60)
"""
)


class Reports:
    """What the processes say."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._said: asyncio.Queue[tuple[str, int]] = asyncio.Queue()

    async def hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        what, pid = (await reader.read()).decode().split()
        self._said.put_nowait((what, int(pid)))
        writer.close()

    async def next(self) -> tuple[str, int]:
        return await asyncio.wait_for(self._said.get(), PATIENCE)


@pytest.fixture
async def reports(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Reports]:
    with tempfile.TemporaryDirectory() as folder:  # a socket's path must be short
        reports = Reports(Path(folder) / "reports")
        monkeypatch.setenv("REPORTS", str(reports.path))
        server = await asyncio.start_unix_server(reports.hear, reports.path)
        yield reports
        server.close()
        await server.wait_closed()


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> App:
    """The producer's side of a program whose workers are other processes."""
    (tmp_path / "shop.py").write_text(SHOP)
    monkeypatch.setenv("FAIRLANE_URL", f"sqlite:///{tmp_path / 'jobs.db'}")
    app = App()

    async def hang() -> None: ...
    async def wait_for(path: str) -> str: ...  # type: ignore[empty-body]
    def stuck() -> None: ...

    for function in (hang, wait_for, stuck):
        app.task(name=f"shop.{function.__name__}")(function)
    return app


async def start_worker(folder: Path, *options: str) -> asyncio.subprocess.Process:
    command = [sys.executable, "-m", "fairlane.cli", "worker", "shop:app", *options]
    return await asyncio.create_subprocess_exec(*command, cwd=folder, stderr=asyncio.subprocess.PIPE)


async def ended(process: asyncio.subprocess.Process) -> tuple[int, str]:
    _, said = await asyncio.wait_for(process.communicate(), PATIENCE)
    assert process.returncode is not None
    return process.returncode, said.decode()


async def test_sigterm_lets_the_running_job_end_and_exits_with_0(shop: App, reports: Reports, tmp_path: Path) -> None:
    # L15.
    async with shop:
        job = await shop.registry["shop.wait_for"].enqueue(str(tmp_path / "go"))
        worker = await start_worker(tmp_path)
        await reports.next()
        worker.send_signal(signal.SIGTERM)
        (tmp_path / "go").touch()
        code, said = await ended(worker)
        assert (code, await job.result()) == (0, "in peace"), said


async def test_a_second_signal_stops_at_once_and_loses_nothing(shop: App, reports: Reports, tmp_path: Path) -> None:
    async with shop:
        job = await shop.registry["shop.hang"].enqueue()
        worker = await start_worker(tmp_path)
        assert (await reports.next())[0] == "started"
        worker.send_signal(signal.SIGINT)
        worker.send_signal(signal.SIGTERM)
        assert (await reports.next())[0] == "interrupted"
        code, said = await ended(worker)
        assert (code, await job.status()) == (0, State.READY), said


async def test_a_thread_that_will_not_stop_does_not_keep_the_process_from_ending(
    shop: App, reports: Reports, tmp_path: Path
) -> None:
    (tmp_path / "brief.py").write_text(
        "import sys\nfrom fairlane.worker import WorkerOptions, run_worker\nfrom shop import app\n"
        "sys.exit(run_worker(app, WorkerOptions(drain_timeout=0, cancel_grace=0)))\n"
    )
    async with shop:
        job = await shop.registry["shop.stuck"].enqueue()
        worker = await asyncio.create_subprocess_exec(
            sys.executable, "brief.py", cwd=tmp_path, stderr=asyncio.subprocess.PIPE
        )
        await reports.next()
        worker.send_signal(signal.SIGTERM)
        code, said = await ended(worker)
        assert (code, await job.status()) == (0, State.RUNNING), said
        assert f"job {job.id} (shop.stuck) would not stop" in said


async def test_a_worker_that_cannot_start_exits_non_zero_with_the_reason(shop: App, tmp_path: Path) -> None:
    worker = await start_worker(tmp_path, "--queues", "nowhere")
    code, said = await ended(worker)
    assert code != 0
    assert "'nowhere'" in said


DIES = "import sys\nif '--mate' in sys.argv:\n    report('dies')\n    raise SystemExit(7)\n"


async def test_a_worker_whose_processes_keep_dying_gives_up_loudly(
    shop: App, reports: Reports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crew, "FIRST_RESTART", SECOND // 1_000)
    (tmp_path / "shop.py").write_text(REPORT + DIES + SHOP)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    command = (sys.executable, "-m", "fairlane.cli", "worker", "shop:app")
    async with shop:
        worker = await shop.worker(WorkerOptions(processes=2, command=command))
        with pytest.raises(WorkerDied, match=r"died 5 times in a row .*exit code 7"):
            await asyncio.wait_for(worker.run(), PATIENCE)


async def test_a_worker_that_is_signalled_while_a_process_waits_to_be_restarted_ends_well(
    shop: App, reports: Reports, tmp_path: Path
) -> None:
    (tmp_path / "shop.py").write_text(REPORT + DIES + SHOP)
    worker = await start_worker(tmp_path, "--processes", "2")
    for _ in range(4):
        assert (await reports.next())[0] == "dies"
    worker.send_signal(signal.SIGTERM)
    code, said = await ended(worker)
    assert code == 0, said
    assert "restarting it in" in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_processes_that_are_stopped_while_they_load_the_app_end_well_and_quietly(
    shop: App, reports: Reports, tmp_path: Path, number: signal.Signals
) -> None:
    loading = "import signal, sys\nif '--mate' in sys.argv:\n    report('loading')\n    signal.pause()\n"
    (tmp_path / "shop.py").write_text(REPORT + loading + SHOP)
    pool = await start_worker(tmp_path, "--processes", "2", "--no-banner")
    for _ in range(2):
        assert (await reports.next())[0] == "loading"
    pool.send_signal(number)
    code, said = await ended(pool)
    assert code == 0
    assert [line for line in said.splitlines() if " INFO " not in line] == []


async def test_l19_a_worker_honours_a_pause_that_another_process_sets_from_its_next_claim_on(
    shop: App, reports: Reports, tmp_path: Path
) -> None:
    async def fairlane(*arguments: str) -> None:
        command = [sys.executable, "-m", "fairlane.cli", *arguments]
        operator = await asyncio.create_subprocess_exec(*command, cwd=tmp_path, stderr=asyncio.subprocess.PIPE)
        code, said = await ended(operator)
        assert code == 0, said

    async with shop:
        before = await shop.registry["shop.wait_for"].enqueue(str(tmp_path / "first"))
        worker = await start_worker(tmp_path)
        await reports.next()
        await fairlane("pause", "default", "--task", "shop.wait_for", "--reason", "a test")
        paused = await shop.registry["shop.wait_for"].enqueue(str(tmp_path / "second"))
        other = await shop.registry["shop.hang"].enqueue()
        # It came after the paused one: the worker has claimed, and left that one where it is.
        await reports.next()
        assert (await other.status(), await paused.status()) == (State.RUNNING, State.READY)
        (tmp_path / "first").touch()
        assert await before.result() == "in peace", "what ran goes on"
        await fairlane("resume", "default", "--task", "shop.wait_for")
        await reports.next()
        (tmp_path / "second").touch()
        assert await paused.result() == "in peace"
        worker.send_signal(signal.SIGINT)
        worker.send_signal(signal.SIGTERM)
        code, said = await ended(worker)
        assert code == 0, said
        first, second = (await shop.operations.audit.list("default")).entries
        assert (first.action, second.action, second.reason) == ("resume", "pause", "a test")


async def test_figures_and_reports_of_worker_processes_come_by_themselves(
    shop: App, reports: Reports, tmp_path: Path
) -> None:
    (tmp_path / "go").touch()
    async with shop, asyncio.timeout(3 * PATIENCE):
        job = await shop.registry["shop.wait_for"].enqueue(str(tmp_path / "go"))
        worker = await start_worker(tmp_path)
        _, pid = await reports.next()
        assert await job.result() == "in peace"
        # What has ended is told by the next claim.
        assert await (await shop.registry["shop.wait_for"].enqueue(str(tmp_path / "go"))).result() == "in peace"
        store = shop.make_store()
        await store.open()
        (seen,) = await store.ask(lambda moment: moment.workers())
        assert seen.report.pid == pid
        place = (("task",), ("shop.wait_for",))
        while not any(
            stats.ended for _, stats in await store.ask(lambda moment: moment.keys_named(["default"], [place]))
        ):
            pass  # every look is a wait for the database
        worker.send_signal(signal.SIGTERM)
        await ended(worker)
        assert await store.ask(lambda moment: moment.workers()) == []
        await store.close()
