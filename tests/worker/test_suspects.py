"""A job that may have killed its process runs alone next: here, and in a process of its own."""

from __future__ import annotations

import asyncio
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar
from uuid import UUID, uuid4

import pytest

from fairlane import App, Job, State, Task
from fairlane.clock import SECOND, ManualClock
from fairlane.scheduler.settlement import SEEN, Done, Lost, Released, RunOutcome, settle
from fairlane.store import records
from fairlane.store.protocol import Store, WorkerIdentity
from fairlane.worker import Worker
from fairlane.worker.children import Crew
from fairlane.worker.claims import Pacer
from fairlane.worker.execution import Run
from fairlane.worker.processes import Begin, BlackBox, End, Ended, Mate, Noted, Order
from tests.store.harness import operations_on
from tests.waiting import until, until_found
from tests.worker.harness import WatchedStore, reaches, turns, working

GONE = WorkerIdentity(uuid4(), "gone")


async def settle_next(store: Store, count: int, outcome: RunOutcome, queue: str = "default") -> None:
    """Let so many jobs be claimed by a worker that is gone, and end so."""
    claimed = await store.claim(queue, lambda: count, worker=GONE, lease=timedelta(seconds=30))
    assert len(claimed.claims) == count
    await store.settle([settle(each, outcome, 0) for each in claimed.claims])


async def test_a_suspect_waits_until_nothing_else_runs_and_nothing_starts_beside_it(
    app: App, store: WatchedStore, clock: ManualClock
) -> None:
    # L23, in a program that runs its worker itself.
    running: set[int] = set()
    beside: dict[int, set[int]] = {}
    release = asyncio.Event()

    @app.task
    async def work(number: int) -> None:
        running.add(number)
        for each in running:
            beside.setdefault(each, set()).update(running - {each})
        if number == 0:
            await release.wait()
        await turns(5)
        running.discard(number)

    async with app:
        suspects = await work.enqueue_many([work.call(number) for number in (1, 2)])
        await settle_next(store.real, 2, Lost("its process died", SEEN))
        await settle_next(store.real, 2, Released("not yet", 3_600 * SECOND))
        async with working(app, concurrency=10, lease="1d") as worker:
            before = await work.enqueue(0)
            await until(lambda: 0 in running)
            clock.advance("1h")
            await until(lambda: len(worker._execution.suspects) == 2)
            after = await work.enqueue_many([work.call(number) for number in (3, 4)])
            await until(lambda: len(worker._execution.waiting) == 2)
            release.set()
            for job in [before, *suspects, *after]:
                await job.result()
    assert beside[0] == beside[1] == beside[2] == set()
    assert beside[3] == {4}


async def test_others_wait_for_a_bounded_time_until_a_suspect_can_be_alone(
    app: App, store: WatchedStore, clock: ManualClock
) -> None:
    # L23, in a program that runs its worker itself: what runs beside the suspect does not end.
    release = asyncio.Event()
    ran: list[int] = []

    @app.task
    async def work(number: int) -> None:
        ran.append(number)
        if number == 0:
            await release.wait()

    async with app:
        suspect = await work.enqueue(1)
        await settle_next(store.real, 1, Lost("its process died", SEEN))
        await settle_next(store.real, 1, Released("not yet", 3_600 * SECOND))
        async with working(app, concurrency=10, lease="1d") as worker:
            await work.enqueue(0)
            await until(lambda: ran == [0])
            clock.advance("1h")
            await until(lambda: len(worker._execution.suspects) == 1)
            others = await work.enqueue_many([work.call(number) for number in (3, 4)])

            def are_done() -> bool:
                clock.advance("100ms")
                return {3, 4} <= set(ran)

            await until(are_done)
            assert 1 not in ran
            for job in others:
                await job.result()
            release.set()

            def has_run() -> bool:
                clock.advance("100ms")
                return 1 in ran

            await until(has_run)
            await suspect.result()


class Cell(Mate):
    """A process that is there at once, and whose jobs end when they are told."""

    made: ClassVar[list[Cell]] = []

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.began: list[UUID] = []
        self.made.append(self)

    is_ready = True

    async def start(self) -> None: ...

    async def gone(self) -> str:
        never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await never

    def send(self, order: Order) -> None:
        assert isinstance(order, Begin)
        self.began += [handed.claim.id for handed in order.jobs]

    def begun(self) -> dict[UUID, Noted]:
        return dict.fromkeys(self.runs, Noted.RUNS)

    def end(self) -> None:
        (run,) = self.runs.values()
        self._hear_news(self, Ended([End(run.claim.id, settle(run.claim, Done(None), 0))]))


async def a_cell_and_suspects(worker: Worker, store: Store, task: Task[..., Any]) -> tuple[Cell, list[Job[Any]]]:
    """The process for suspects, and three of them, the first of which runs there."""
    worker._slots.is_paused = True  # they are to be lost by another
    jobs = list(await task.enqueue_many([task.call(number) for number in range(3)]))
    await settle_next(store, 3, Lost("its process died", SEEN))
    crew = worker._execution
    assert isinstance(crew, Crew)
    crew._prepare_spare()
    await until(lambda: bool(crew._mates))
    worker._slots.is_paused = False
    worker._slots.look_everywhere()
    (cell,) = Cell.made
    await until(lambda: cell.began == [jobs[0].id])
    return cell, jobs


async def test_a_suspect_that_waits_behind_another_is_not_claimed_in_vain_and_starts_once_that_ends(
    app: App, store: WatchedStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It was claimed and given back once a second for as long as the other ran.
    monkeypatch.setattr("fairlane.worker.children.Mate", Cell)
    monkeypatch.setattr(Cell, "made", [])

    @app.task
    async def work(number: int) -> None: ...

    async with app, working(app, concurrency=10, lease="1d", command=("python",)) as worker:
        cell, jobs = await a_cell_and_suspects(worker, store.real, work)
        for _ in range(240):
            clock.advance("500ms")
            await turns(60)
        running, *waiting = jobs
        for job in waiting:
            released = [each for each in await store.run(records.attempts(job.id)) if each.outcome == "released"]
            assert 6 <= len(released) <= 9, "after 1, 2, 4, 8, 16, 30, 30 … seconds"
            told = await operations_on(store.real).jobs.explain(job.id)
            assert told.earliest is None, "nobody knows when the other ends"
            words = [hold.words for hold in told.holds]
            assert len(words) == 1
            assert words[0].startswith("is to run alone, because its process died while it ran: job ")
            assert f"job {running.id} ({work.name}) has run alone for" in words[0]
            assert "it has waited for" in words[0]
        for count in (2, 3):
            cell.end()  # the clock stands still: nothing but the end of the other brings it back
            await until(lambda count=count: len(cell.began) == count)  # type: ignore[misc]
        assert cell.began == [job.id for job in jobs]
        cell.end()
        for job in jobs:
            await reaches(job, State.DONE)


async def test_a_suspect_that_a_limit_holds_keeps_no_other_from_running_alone(
    app: App, store: WatchedStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It is called back and cannot come: the next one follows after a second.
    monkeypatch.setattr("fairlane.worker.children.Mate", Cell)
    monkeypatch.setattr(Cell, "made", [])

    @app.task
    async def work(number: int) -> None: ...

    async with app, working(app, concurrency=10, lease="1d", command=("python",)) as worker:
        cell, (first, second, third) = await a_cell_and_suspects(worker, store.real, work)
        for _ in range(60):
            clock.advance("500ms")
            await turns(30)
        await second.cancel()
        cell.end()
        await reaches(first, State.DONE)

        def is_next() -> bool:
            clock.advance("100ms")
            return cell.began[1:] == [third.id]

        await until(is_next)
        cell.end()
        await reaches(third, State.DONE)


def test_a_black_box_tells_what_has_begun() -> None:
    box = BlackBox.empty(2)
    notes = BlackBox(os.dup(box.descriptor), 2)
    first, second = uuid4(), uuid4()
    for _ in range(100):
        notes.note(first)
        notes.note(second, Noted.RUNS_IN_A_PROCESS)
        assert box.read() == {first: Noted.RUNS, second: Noted.RUNS_IN_A_PROCESS}
        notes.erase(second)
        notes.note_end(first)
        assert box.read() == {first: Noted.ENDED}
        notes.erase(first)
        assert box.read() == {}
    notes.close()
    box.close()


SHOP = """
import asyncio, os, signal, time
from datetime import datetime, timedelta, timezone
from fairlane import App, Rate, Retry, context
from tests.store.harness import operations_on

app = App(os.environ["FAIRLANE_URL"])

@app.task(max_attempts=4)
async def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)

@app.task(max_attempts=4)
async def where() -> int:
    context().put("seen", os.getpid())
    return os.getpid()

@app.task(max_attempts=4)
async def fail() -> None:
    raise ValueError("as it should")

@app.task(max_attempts=4)
async def later() -> None:
    raise Retry(at=datetime.now(timezone.utc) + timedelta(hours=2))

@app.task(timeout="100ms", max_attempts=1)
async def sleep() -> None:
    await asyncio.Event().wait()

@app.task
async def wait() -> None:
    await asyncio.Event().wait()

IMPORTED = time.monotonic_ns() // 1_000
app.queue("paced", limits=[Rate(1, per="1s", burst=1)])

@app.task(queue="paced")
async def paced() -> list[int]:
    return [IMPORTED, time.monotonic_ns() // 1_000]
"""


@pytest.fixture
def lone_shop(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[App, tuple[str, ...]]:
    """An app, and the command that starts a process for one of its jobs alone."""
    name = f"lone_{uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(SHOP)
    monkeypatch.setenv("FAIRLANE_URL", url)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = __import__(name)
    return module.app, (sys.executable, "-m", "fairlane.cli", "worker", f"{name}:app", "--log-level", "warning")


async def suspects(app: App, *names: str, queue: str = "default") -> list[Job[Any]]:
    """Jobs of these tasks, one after the other lost while they ran."""
    store = await app.opened()
    jobs = []
    for name in names:
        found = next(task for task in app.registry if task.name.endswith(f".{name}"))
        jobs.append(await found.enqueue())
    await settle_next(store, len(jobs), Lost("its process died", SEEN), queue)
    return jobs


async def test_a_suspect_runs_in_a_process_of_its_own_and_harms_nobody_by_its_death(
    lone_shop: tuple[App, tuple[str, ...]],
) -> None:
    # L23: the killer has three attempts left after its loss in company, and the worker outlives them all.
    app, command = lone_shop
    async with app:
        killer, innocent, failing, slow = await suspects(app, "kill", "where", "fail", "sleep")
        async with working(app, command=command) as worker:
            assert await innocent.result() not in (None, os.getpid())
            await reaches(killer, State.DEAD)
            await reaches(slow, State.DEAD)
            store = await app.opened()

            async def has_failed() -> bool:
                return "failed" in [each.outcome for each in await store.run(records.attempts(failing.id))]

            await until_found(has_failed)
            assert worker.health().is_well
        history = [each.outcome for each in await store.run(records.attempts(killer.id)) if each.outcome != "released"]
        assert history == ["lost", "lost", "lost", "lost"]
        record = await store.job(killer.id)
        assert record.error == "it ran alone, and its process died (by SIGKILL)"
        assert "TimeoutError" in ((await store.job(slow.id)).error or "")
        assert await failing.status() is not State.DEAD
        assert await app.values.get("seen") == await innocent.result()


async def test_a_process_that_dies_before_the_handler_is_called_costs_the_job_nothing(
    lone_shop: tuple[App, tuple[str, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    app, _ = lone_shop
    async with app:
        (job,) = await suspects(app, "where")
        store = await app.opened()

        async def was_given_back() -> bool:
            return [each.outcome for each in await store.run(records.attempts(job.id))].count("released") >= 2

        async with working(app, command=(sys.executable, "-c", "raise SystemExit(9)")):
            await until_found(was_given_back)
        history = await store.run(records.attempts(job.id))
        assert {each.outcome for each in history} == {"lost", "released"}
        assert await job.status() in (State.SCHEDULED, State.READY)
    assert "it died while it started (exit code 9)" in caplog.text


async def test_a_suspect_knows_the_time_where_it_runs(lone_shop: tuple[App, tuple[str, ...]]) -> None:
    app, command = lone_shop
    async with app:
        (job,) = await suspects(app, "later")
        store = await app.opened()

        async def was_put_off() -> bool:
            return (await store.run(records.attempts(job.id)))[-1].outcome == "retry"

        async with working(app, command=command):
            await until_found(was_put_off)
        due_at = (await store.job(job.id)).due_at
        assert due_at is not None
        assert 3_600 * SECOND < due_at - await store.now() <= 7_200 * SECOND


async def test_a_suspect_is_not_held_while_its_process_starts(lone_shop: tuple[App, tuple[str, ...]]) -> None:
    # F5: a worker that crashes again and again just after its start would charge the same job each time.
    app, _ = lone_shop
    async with app:
        (job,) = await suspects(app, "where")
        async with working(app, command=(sys.executable, "-c", "import time; time.sleep(3600)")):
            await reaches(job, State.SCHEDULED)


async def test_a_suspect_behind_a_smooth_rate_starts_when_its_process_calls_it(
    lone_shop: tuple[App, tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A27: a process takes a second to start, and what follows keeps its distance from the handler's start.
    app, command = lone_shop
    noted: list[int] = []
    began = Pacer.began

    def note(pacer: Pacer, run: Run, at: int) -> None:
        noted.append(at)
        began(pacer, run, at)

    monkeypatch.setattr(Pacer, "began", note)
    async with app:
        (job,) = await suspects(app, "paced", queue="paced")
        async with working(app, queues=["paced"], command=command):
            imported, called = await job.result()
    assert len(noted) == 1
    assert imported <= noted[0] <= called


async def test_a_suspect_is_cancelled_where_it_runs(lone_shop: tuple[App, tuple[str, ...]]) -> None:
    app, command = lone_shop
    async with app:
        (job,) = await suspects(app, "wait")
        async with working(app, command=command) as worker:
            await until(lambda: any(run.started_at for run in worker._execution.running))
            await job.cancel()
            await reaches(job, State.CANCELLED)
