"""`processes`: one worker claims for several processes, which run its jobs. Real processes, on both stores."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fairlane import App, Job, State
from fairlane.errors import ConfigurationError
from fairlane.worker import Worker, WorkerOptions
from fairlane.worker.children import Crew
from tests.waiting import PATIENCE, until
from tests.worker.harness import reaches, running

COMMAND = (sys.executable, "-m", "fairlane.cli", "worker", "tests.worker.crew_shop:app", "--log-level", "warning")
ROOT = Path(__file__).resolve().parents[2]


class Scene:
    """An app whose handlers run elsewhere, and what they have noted."""

    def __init__(self, shop: Any, ledger: Path, folder: Path) -> None:
        self.app: App = shop.app
        self.shop = shop
        self.folder = folder
        self._ledger = ledger

    def noted(self, what: str) -> list[tuple[str, int, int]]:
        """Which job, in which attempt and which process, has noted this."""
        lines = (line.split() for line in self._ledger.read_text().splitlines())
        return [(job, int(attempt), int(pid)) for word, job, attempt, pid, _ in lines if word == what]

    def pids(self, what: str) -> set[int]:
        return {pid for _, _, pid in self.noted(what)}

    @asynccontextmanager
    async def crew(self, processes: int = 2, concurrency: int = 2, **options: Any) -> AsyncIterator[Worker]:
        """A worker here, whose processes are there once the block begins."""
        given = WorkerOptions(processes=processes, concurrency=concurrency, command=COMMAND, **options)
        async with running(await self.app.worker(given)) as worker:
            await until(lambda: len(mates(worker)) == processes)
            yield worker


@pytest.fixture
def scene(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    ledger = tmp_path / "ledger"
    ledger.touch()
    monkeypatch.setenv("FAIRLANE_URL", url)
    monkeypatch.setenv("CREW_LEDGER", str(ledger))
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    name = "tests.worker.crew_shop"
    sys.modules.pop(name, None)
    return Scene(importlib.import_module(name), ledger, tmp_path)


def mates(worker: Worker) -> list[int]:
    execution = worker._execution
    assert isinstance(execution, Crew)
    return [mate.pid for mate in execution._mates]


def is_alive(pid: int) -> bool:
    """Whether it runs: one that has ended and was not waited for does not."""
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


async def results(jobs: list[Job[Any]]) -> list[Any]:
    return [await job.result(timeout=PATIENCE) for job in jobs]


async def test_jobs_run_in_the_processes_of_a_worker_with_all_that_belongs_to_them(scene: Scene) -> None:
    async with scene.app, scene.crew(3) as worker:
        shop = scene.shop
        pids: set[int] = set()
        while pids != set(mates(worker)):  # on a busy machine, one may be late for its first jobs
            pids |= set(await results(await shop.where.enqueue_many([shop.where.call(n) for n in range(60)])))
        before = len(scene.noted("where"))
        told = await shop.tell.enqueue("seen")
        assert await told.result(timeout=PATIENCE) == {}
        assert await scene.app.values.get("seen") == "told"
        assert (await told.record()).progress == 0.5
        await until(lambda: len(scene.noted("where")) == before + 1)  # its follow-up
        squared, own = await (await shop.square.enqueue(7)).result(timeout=PATIENCE)
        assert squared == 49
        assert own not in mates(worker)
        assert worker.report().concurrency == 6
    assert not any(map(is_alive, pids))


async def test_a_running_job_is_cancelled_where_it_runs(scene: Scene) -> None:
    async with scene.app, scene.crew():
        job = await scene.shop.hang.enqueue()
        await until(lambda: scene.noted("hangs"))
        await job.cancel()
        await reaches(job, State.CANCELLED)
        assert len(scene.noted("interrupted")) == 1


async def test_the_death_of_a_process_costs_only_its_own_jobs(scene: Scene) -> None:
    # L23: what ran there is suspected and not charged; nobody else notices.
    async with scene.app, scene.crew(3) as worker:
        go = str(scene.folder / "go")
        jobs = await scene.shop.wait_for.enqueue_many([scene.shop.wait_for.call(go) for _ in range(6)])
        await until(lambda: len(scene.noted("waits")) == 6)
        victim = mates(worker)[1]
        lost = {job for job, _, pid in scene.noted("waits") if pid == victim}
        os.kill(victim, signal.SIGKILL)
        await until(lambda: len(mates(worker)) == 3 and victim not in mates(worker))
        times, task = worker._execution.run_times, scene.shop.wait_for.name
        assert times.usual(task) is None, "a run that was lost does not say how long its task takes"
        Path(go).touch()
        assert await results(jobs) == ["in peace"] * 6
        assert times.usual(task) is not None
        runs = Counter(job for job, _, _ in scene.noted("waits"))
        assert {job for job, count in runs.items() if count > 1} == lost
        assert len(lost) == 2
        assert {attempt for _, attempt, _ in scene.noted("waits")} == {1}, "no attempt was charged"
        for job in jobs:
            outcomes = [each.outcome for each in await job.attempts() if each.outcome != "released"]
            assert outcomes == (["lost", "done"] if str(job.id) in lost else ["done"])


async def test_a_process_whose_loop_is_blocked_keeps_no_unstarted_job_from_the_others(scene: Scene) -> None:
    # L24, and nothing runs twice: what is taken back from it is not begun there any more.
    async with scene.app, scene.crew(2, 4) as worker:
        shop, go = scene.shop, scene.folder / "go"
        blocker = await shop.block.enqueue(str(go))
        await until(lambda: scene.noted("blocks"))
        (blocked,) = scene.pids("blocks")
        jobs = await shop.where.enqueue_many([shop.where.call(number) for number in range(200)])
        assert set(await results(jobs)) == set(mates(worker)) - {blocked}
        assert await blocker.status() is State.RUNNING
        await until(lambda: bool(worker.report().blocks))
        [block] = worker.report().blocks
        assert (block.job, block.task, block.pid) == (str(blocker.id), "tests.worker.crew_shop.block", blocked)
        assert not worker.health().warnings, "it is known what keeps it"
        # Once it goes on, it takes its part again.
        go.touch()
        assert await blocker.result(timeout=PATIENCE) == blocked
        await until(lambda: worker._slots.concurrency == 8)
        assert not worker.health().warnings
        while blocked not in scene.pids("where"):
            await results(await shop.where.enqueue_many([shop.where.call(number) for number in range(40)]))
        assert set(Counter(job for job, _, _ in scene.noted("where")).values()) == {1}


async def test_each_process_whose_loop_is_blocked_is_named_with_its_job(scene: Scene) -> None:
    # O18: a second one was named only once the first was over.
    async with scene.app, scene.crew(2, 4) as worker:
        block, gos = scene.shop.block, [scene.folder / "first", scene.folder / "second"]
        jobs = []
        for number, go in enumerate(gos, 1):
            jobs.append(await block.enqueue(str(go)))
            await until(lambda number=number: len(scene.noted("blocks")) == number)  # type: ignore[misc]
            await until(lambda number=number: len(worker.report().blocks) == number)  # type: ignore[misc]
        where = {job: pid for job, _, pid in scene.noted("blocks")}
        assert len(set(where.values())) == 2
        assert [(each.job, each.pid) for each in worker.report().blocks] == [
            (str(job.id), where[str(job.id)]) for job in jobs
        ]
        gos[0].touch()
        await jobs[0].result(timeout=PATIENCE)
        await until(lambda: [each.until is None for each in worker.report().blocks] == [True, False])
        assert [each.job for each in worker.report().blocks] == [str(jobs[1].id), str(jobs[0].id)]
        gos[1].touch()
        await jobs[1].result(timeout=PATIENCE)


async def test_what_waits_behind_a_handler_that_blocks_runs_elsewhere(scene: Scene) -> None:
    # L24: it was received together with the blocker, and has not begun.
    async with scene.app, scene.crew(2, 4):
        shop, go = scene.shop, scene.folder / "go"
        calls = [shop.block.call(str(go)), *(shop.where.call(number) for number in range(7))]
        blocker, *jobs = await scene.app.enqueue_many(calls)
        await results(jobs)
        assert await blocker.status() is State.RUNNING
        go.touch()
        await blocker.result(timeout=PATIENCE)
        assert set(Counter(job for job, _, _ in scene.noted("where")).values()) == {1}


async def test_a_smooth_rate_holds_for_what_starts_in_several_processes(scene: Scene) -> None:
    # A27: 50 a second, and never closer together than that.
    async with scene.app, scene.crew(3, 4, queues=["paced"]):
        shop = scene.shop
        jobs = await shop.paced.enqueue_many([shop.paced.call(number) for number in range(60)])
        starts = sorted(await results(jobs))
    gaps = [later - earlier for earlier, later in pairwise(starts)]
    # Handlers note the time a moment after they were called, on a busy machine a long one: one of them may seem late,
    # and the next one close behind it.
    assert min(gaps) > 2_000
    for span in (10, 30, 59):
        assert all(starts[n + span] - starts[n] >= span * 20_000 - 18_000 for n in range(60 - span))


async def test_a_job_in_a_thread_that_will_not_stop_goes_with_its_process_and_is_ready_at_once(scene: Scene) -> None:
    async with scene.app:
        async with scene.crew(2, 2, drain_timeout=0, cancel_grace="100ms") as worker:
            job = await scene.shop.stuck.enqueue()
            await until(lambda: scene.noted("stuck"))
            (pid,) = scene.pids("stuck")
        assert worker.left_running == 0
        assert not is_alive(pid)
        assert await job.status() is State.READY


async def test_processes_need_a_command() -> None:
    with pytest.raises(ConfigurationError, match="fairlane worker --processes 3"):
        WorkerOptions(processes=3)


# The whole command.


@asynccontextmanager
async def command(*options: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """`fairlane worker`, killed at the end if it has not ended."""
    process = await asyncio.create_subprocess_exec(*COMMAND, *options, cwd=ROOT, stderr=asyncio.subprocess.PIPE)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def ended(process: asyncio.subprocess.Process) -> tuple[int | None, str]:
    _, said = await asyncio.wait_for(process.communicate(), PATIENCE)
    return process.returncode, said.decode()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process ends when a thread of its gets its turn")
async def test_the_processes_of_a_worker_that_is_killed_stop_before_their_leases_end_and_nothing_is_lost(
    scene: Scene,
) -> None:
    # L24: also one whose loop is blocked, and one whose interpreter is.
    async with scene.app:
        shop, go = scene.shop, scene.folder / "go"
        ordinary = await shop.wait_for.enqueue_many([shop.wait_for.call(str(go)) for _ in range(4)])
        async with command("--processes", "4", "--concurrency", "2", "--lease", "5s") as worker:
            await until(lambda: len(scene.noted("waits")) == 4)
            blocker = await shop.block.enqueue(str(go))
            await until(lambda: scene.noted("blocks"))
            keeper = await shop.keep_the_interpreter.enqueue()
            await until(lambda: scene.noted("keeps"))
            pids = scene.pids("waits") | scene.pids("blocks") | scene.pids("keeps")
            assert len(pids) > 1
            worker.kill()
            await worker.wait()
            await until(lambda: not any(map(is_alive, pids)))
            # Nobody has renewed anything since; yet the leases have not ended.
            states = [await job.status() for job in (*ordinary, blocker, keeper)]
            assert states == [State.RUNNING] * 6, "the processes were gone before the leases"
        await keeper.cancel()
        go.touch()
        async with command("--processes", "2", "--concurrency", "4", "--lease", "5s") as worker:
            assert await results(ordinary) == ["in peace"] * 4
            await blocker.result(timeout=PATIENCE)
            worker.send_signal(signal.SIGTERM)
            assert (await ended(worker))[0] == 0
        assert set(Counter(job for job, _, _ in scene.noted("waits")).values()) == {2}
        assert {attempt for _, attempt, _ in scene.noted("waits")} == {1}, "the loss of a host charges nobody"


async def test_sigterm_drains_all_processes_and_gives_back_what_has_not_started(scene: Scene) -> None:
    # L15.
    async with scene.app:
        shop, go = scene.shop, scene.folder / "go"
        jobs = await shop.wait_for.enqueue_many([shop.wait_for.call(str(go)) for _ in range(10)])
        async with command("--processes", "2", "--concurrency", "2") as worker:
            await until(lambda: len(scene.noted("waits")) == 4)
            worker.send_signal(signal.SIGTERM)
            go.touch()
            assert await ended(worker) == (0, "")
        states = Counter([await job.status() for job in jobs])
        assert (states[State.DONE], states[State.READY]) == (len(scene.noted("ended")), 10 - states[State.DONE])
        assert states[State.DONE] >= 4
        assert not any(map(is_alive, scene.pids("waits")))


async def test_a_second_signal_interrupts_jobs_in_all_processes_and_loses_nothing(scene: Scene) -> None:
    async with scene.app:
        jobs = await scene.shop.hang.enqueue_many([scene.shop.hang.call() for _ in range(4)])
        async with command("--processes", "2", "--concurrency", "2") as worker:
            await until(lambda: len(scene.noted("hangs")) == 4)
            worker.send_signal(signal.SIGINT)
            worker.send_signal(signal.SIGTERM)
            code, said = await ended(worker)
        assert code == 0, said
        assert len(scene.noted("interrupted")) == 4
        assert [await job.status() for job in jobs] == [State.READY] * 4


async def test_a_third_signal_ends_all_processes(scene: Scene) -> None:
    async with scene.app:
        await scene.shop.block.enqueue(str(scene.folder / "never"))
        async with command("--processes", "2", "--concurrency", "2") as worker:
            await until(lambda: scene.noted("blocks"))
            for _ in range(3):
                worker.send_signal(signal.SIGTERM)
                await asyncio.sleep(0)
            assert (await ended(worker))[0] in (0, 130)  # signals that come together count as one
            await until(lambda: not any(map(is_alive, scene.pids("blocks"))))
