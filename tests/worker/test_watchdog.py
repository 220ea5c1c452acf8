"""Runs that take too long and handlers that block the event loop are named, and keep nothing from other workers."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from fairlane import App, Concurrency, State
from fairlane.clock import SECOND, ManualClock
from fairlane.scheduler.settlement import Released, settle
from fairlane.store import health
from fairlane.store.stats_values import BlockedLoop
from fairlane.worker.execution import Run
from fairlane.worker.runs import RunTimes, Stop
from tests.telemetry.test_metrics import of, parsed
from tests.telemetry.worker_process import WorkerProcess, worker_process
from tests.waiting import PATIENCE, until, until_found
from tests.worker.harness import WatchedStore, reaches, turns, working

SHOP = """
import asyncio, os, pathlib, time
from fairlane import App, Concurrency
app = App()
app.queue("shop", keys=["account"], limits=[Concurrency(1, by="account")])
app.queue("plain")

def hold(path):
    while not os.path.exists(path):
        time.sleep(0.01)

@app.task(queue="plain", name="block")
async def block(path: str) -> None:
    hold(path)

@app.task(queue="plain", name="quick")
async def quick(ledger: str, number: int) -> int:
    with open(ledger, "a") as file:
        file.write(f"{os.getpid()} {number}\\n")
    return number

@app.task(queue="plain", name="spin")
async def spin(path: str) -> None:
    time.sleep(0.03)

@app.task(queue="plain", name="wait_for")
async def wait_for(path: str) -> None:
    while not os.path.exists(path):
        await asyncio.sleep(0.01)

@app.task(queue="shop", name="export", timeout="1h")
async def export(path: str, account: str) -> None:
    while not os.path.exists(path):
        await asyncio.sleep(0.01)
"""

HOLDING_CLAIMS = """
import threading
from fairlane.worker.claims import Claiming

# A claim that is under way when the handler blocks: made by a thread, in the worker's name, as soon as there is a file
# for it. The worker hears of it once its loop is back, as of any other.
def claim_meanwhile(claiming):
    while not os.path.exists("claim"):
        time.sleep(0.01)

    async def claim():
        from datetime import timedelta
        store = app.make_store()
        await store.open()
        claimed = await store.claim(
            "plain", lambda: 10, worker=claiming._runtime.identity, lease=timedelta(hours=1)
        )
        await store.close()
        return claimed.claims

    claims = asyncio.run(claim())
    queue = claiming._slots.queues["plain"]

    def hear():
        claiming._slots.note_claimed(queue, len(claims))
        claiming._execution.start(queue, claims, claiming._now() + 3_600_000_000)

    claiming._loop.call_soon_threadsafe(hear)

run = Claiming.run

async def run_and_claim(self):
    threading.Thread(target=claim_meanwhile, args=(self,), daemon=True).start()
    await run(self)

Claiming.run = run_and_claim
"""

NO_POLL = """
from datetime import timedelta
from fairlane.worker.options import WorkerOptions

time_of = WorkerOptions.time
WorkerOptions.time = lambda self, name: timedelta(days=1) if name == "poll" else time_of(self, name)
"""


def producer(url: str) -> App:
    app = App(url)
    app.queue("shop", keys=["account"], limits=[Concurrency(1, by="account")])
    app.queue("plain")

    async def one(path: str) -> None: ...
    async def quick(ledger: str, number: int) -> int: ...  # type: ignore[empty-body]
    async def export(path: str, account: str) -> None: ...

    app.task(queue="plain", name="block")(one)
    app.task(queue="plain", name="wait_for")(one)
    app.task(queue="plain", name="spin")(one)
    app.task(queue="plain", name="quick")(quick)
    app.task(queue="shop", name="export")(export)
    return app


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(SHOP)
    return tmp_path


async def ends(worker: WorkerProcess) -> None:
    worker.process.send_signal(signal.SIGTERM)
    assert await worker.ended() == 0


@pytest.mark.parametrize("processes", [1, 2])
async def test_a_handler_that_blocks_the_loop_is_named_while_it_does(url: str, shop: Path, processes: int) -> None:
    """O18: the loop cannot say so itself. With --processes it is named by the worker all the same."""
    options = ("--queues", "plain", "--name", "one", "--metrics-port", "0", "--processes", str(processes))
    async with producer(url) as app, worker_process(shop, url, *options) as worker:
        beside = await app.registry["wait_for"].enqueue(str(shop / "go"))
        await reaches(beside, State.RUNNING)
        job = await app.registry["block"].enqueue(str(shop / "go"))
        line = await worker.says("the event loop has been blocked")
        assert f"by job {job.id} (block)" in line
        assert "block (" in line
        assert "> hold (" in line
        assert "shop.py:" in line
        assert processes > 1 or "1 other job stands still" in line, "with two, it may run in the other process"

        async def is_reported() -> bool:
            [seen] = [each for each in (await app.operations.workers.list()).workers if each.name == "one"]
            return [(each.job, each.task) for each in seen.blocks] == [(str(job.id), "block")]

        await until_found(is_reported)
        [found] = [each for each in await app.operations.diagnose() if each.check == "blocked event loop"]
        assert found.level == "fault"
        assert str(job.id) in found.message
        assert "block" in found.message
        assert ("its event loop has been" in found.message) is (processes == 1)
        assert ("leases" in found.remedy) is (processes == 1)
        assert any(str(job.id) in hint.words for hint in (await app.operations.overview()).hints)
        stats = await app.operations.metrics(0)
        assert stats["fairlane_workers_blocked"] == [(("block",), 1.0)]
        assert not any(each.check == "troubled worker" for each in await app.operations.diagnose())

        (shop / "go").touch()
        await job.result(timeout=PATIENCE)
        await worker.says("the event loop was blocked for")
        counted = parsed((await worker.get("/metrics"))[1])["fairlane_event_loop_blocked_seconds_total"]
        assert counted[of(task="block")] >= 1
        await ends(worker)


async def test_a_blocked_loop_keeps_no_unstarted_job_from_other_workers(url: str, shop: Path) -> None:
    """L24: what was claimed with the job that blocks runs elsewhere, once, and long before the lease ends."""
    options = ("--queues", "plain", "--concurrency", "10", "--lease", "1h")
    ledger = shop / "ledger"
    async with producer(url) as app:
        held = await app.registry["block"].enqueue(str(shop / "go"))
        jobs = [await app.registry["quick"].enqueue(str(ledger), number) for number in range(9)]
        async with worker_process(shop, url, *options, "--name", "blocked") as blocked:
            line = await blocked.says("given back unstarted")
            assert "9 claimed jobs" in line
            async with worker_process(shop, url, *options, "--name", "other") as other:
                for job in jobs:
                    await job.result(timeout=PATIENCE)
                assert await held.status() is State.RUNNING
                await ends(other)
            (shop / "go").touch()
            await held.result(timeout=PATIENCE)
            # It is whole again: all its slots are free, and none of what was given back runs a second time.
            more = [await app.registry["quick"].enqueue(str(ledger), number) for number in range(9, 40)]
            for job in more:
                await job.result(timeout=PATIENCE)
            await ends(blocked)
        ran = [line.split() for line in ledger.read_text().splitlines()]
        assert sorted(int(number) for _, number in ran) == list(range(40))
        assert {pid for pid, number in ran if int(number) < 9} == {str(other.process.pid)}
        assert [(await job.record()).attempt for job in jobs] == [1] * 9


async def test_a_wakeup_that_a_blocked_loop_cannot_hear_reaches_another_worker(url: str, shop: Path) -> None:
    """L24: it is registered as idle, and each job that comes wakes one of the idle, chosen by chance."""
    (shop / "shop.py").write_text(SHOP + NO_POLL)
    options, ledger = ("--queues", "plain", "--lease", "1h"), shop / "ledger"
    async with producer(url) as app, worker_process(shop, url, *options) as one:
        async with worker_process(shop, url, *options) as other:
            store = await app.opened()

            async def both_wait() -> bool:
                return (await store.run(health.traces("plain", [], []))).listeners == 2

            await until_found(both_wait)
            held = await app.registry["block"].enqueue(str(shop / "go"))
            await until(lambda: any("has been blocked" in line for line in one.lines + other.lines))
            for number in range(8):
                job = await app.registry["quick"].enqueue(str(ledger), number)
                await job.result(timeout=PATIENCE)
            (shop / "go").touch()
            await held.result(timeout=PATIENCE)
            await ends(other)
        await ends(one)


async def test_children_of_one_command_take_over_what_a_blocked_one_holds(url: str, shop: Path) -> None:
    """L24 with --processes."""
    ledger = shop / "ledger"
    options = ("--queues", "plain", "--concurrency", "8", "--processes", "2", "--lease", "1h")
    async with producer(url) as app:
        held = await app.registry["block"].enqueue(str(shop / "go"))
        jobs = [await app.registry["quick"].enqueue(str(ledger), number) for number in range(20)]
        async with worker_process(shop, url, *options) as workers:
            for job in jobs:
                await job.result(timeout=PATIENCE)
            assert await held.status() is State.RUNNING
            (shop / "go").touch()
            await held.result(timeout=PATIENCE)
            await ends(workers)
        ran = [int(line.split()[1]) for line in ledger.read_text().splitlines()]
        assert sorted(ran) == list(range(20))


async def test_many_short_steps_are_no_block(url: str, shop: Path) -> None:
    """Three seconds of work in one turn of the event loop: nothing of it is given back."""
    async with producer(url) as app:
        spin = app.registry["spin"]
        jobs = await spin.enqueue_many([spin.call("") for _ in range(100)])
        async with worker_process(shop, url, "--queues", "plain", "--concurrency", "100") as worker:
            for job in jobs:
                await job.result(timeout=PATIENCE)
            await ends(worker)
    assert not [line for line in worker.lines if "blocked" in line or "given back" in line]


async def test_a_claim_that_a_blocked_loop_has_not_heard_of_goes_to_other_workers(url: str, shop: Path) -> None:
    """L24: it was asked for before the handler blocked, and its answer waits for the loop."""
    (shop / "shop.py").write_text(SHOP + HOLDING_CLAIMS)
    options = ("--queues", "plain", "--concurrency", "10", "--lease", "1h")
    ledger = shop / "ledger"
    async with producer(url) as app:
        async with worker_process(shop, url, *options, "--name", "blocked") as blocked:
            held = await app.registry["block"].enqueue(str(shop / "go"))
            await blocked.says("the event loop has been blocked")
            jobs = [await app.registry["quick"].enqueue(str(ledger), number) for number in range(3)]
            (shop / "claim").touch()
            await blocked.says("3 claimed jobs were given back unstarted")
            (shop / "shop.py").write_text(SHOP)
            async with worker_process(shop, url, *options, "--name", "other") as other:
                for job in jobs:
                    await job.result(timeout=PATIENCE)
                assert await held.status() is State.RUNNING
                await ends(other)
            (shop / "go").touch()
            await held.result(timeout=PATIENCE)
            more = [await app.registry["quick"].enqueue(str(ledger), number) for number in range(3, 30)]
            for job in more:
                await job.result(timeout=PATIENCE)
            await ends(blocked)
        ran = [line.split() for line in ledger.read_text().splitlines()]
        assert sorted(int(number) for _, number in ran) == list(range(30))
        assert {pid for pid, number in ran if int(number) < 3} == {str(other.process.pid)}


async def test_a_run_that_is_stuck_is_named_by_log_doctor_status_and_metrics(url: str, shop: Path) -> None:
    """O18: with the least time turned down, for a task that has never ended."""
    options = ("--queues", "plain", "--name", "one", "--long-run", "1s")
    async with producer(url) as app, worker_process(shop, url, *options) as worker:
        job = await app.registry["wait_for"].enqueue(str(shop / "go"))
        line = await worker.says(f"job {job.id} (wait_for) has run for")
        assert "no run of its task has ended here yet" in line

        async def is_found() -> bool:
            return any(each.check == "long run" for each in await app.operations.diagnose())

        await until_found(is_found)
        [found] = [each for each in await app.operations.diagnose() if each.check == "long run"]
        assert (found.level, found.queue) == ("warning", "plain")
        assert f"job {job.id} (wait_for)" in found.message
        assert "in worker one" in found.message
        seen = await app.operations.overview()
        assert any(str(job.id) in hint.words for hint in seen.hints)
        [run] = next(each for each in seen.queues if each.queue == "plain").long_runs
        assert (run.job, run.task, run.worker, run.limit) == (str(job.id), "wait_for", "one", None)
        assert (await app.operations.metrics(0))["fairlane_queue_long_runs"] == [(("plain", "wait_for"), 1.0)]
        (shop / "go").touch()
        await job.result(timeout=PATIENCE)
        await ends(worker)
    assert sum("has run for" in line for line in worker.lines) == 1


async def test_a_run_that_holds_a_limit_for_which_others_wait_is_named_with_it(url: str, shop: Path) -> None:
    """N10: it is not long yet, by its own timeout; but its limit does not work "as the policy requires"."""
    options = ("--queues", "shop", "--name", "one", "--long-run", "1s")
    async with producer(url) as app, worker_process(shop, url, *options) as worker:
        held, *_ = [await app.registry["export"].enqueue(str(shop / "go"), "acme") for _ in range(3)]
        alone = await app.registry["export"].enqueue(str(shop / "go"), "globex")
        line = await worker.says(f"job {held.id} (export) has run for")
        assert "it holds Concurrency(1, by='account') for account=acme, for which others wait" in line

        async def is_seen() -> bool:
            [queue] = [each for each in (await app.operations.overview()).queues if each.queue == "shop"]
            return [run.job for run in queue.long_runs] == [str(held.id)] and queue.held_jobs == 2

        await until_found(is_seen)
        [queue] = [each for each in (await app.operations.overview()).queues if each.queue == "shop"]
        [run] = queue.long_runs
        assert not run.is_long
        assert run.limit == "Concurrency(1, by='account') for account=acme"
        assert f"job {held.id} (export) has held Concurrency(1, by='account') for account=acme for" in queue.words
        assert not any(str(alone.id) in line for line in worker.lines)
        (shop / "go").touch()
        await held.result(timeout=PATIENCE)
        await ends(worker)


# In one process, with a clock of its own.


@pytest.fixture
def gate() -> asyncio.Event:
    return asyncio.Event()


def slow(app: App, gate: asyncio.Event, **options: Any) -> Any:
    app.queue("work")

    @app.task(queue="work", name="slow", **options)
    async def slow(waits: bool) -> None:
        if waits:
            await gate.wait()

    return slow


async def test_a_run_is_long_by_what_its_task_usually_takes(
    app: App, clock: ManualClock, gate: asyncio.Event, caplog: pytest.LogCaptureFixture
) -> None:
    task = slow(app, gate)
    async with app, working(app) as worker:
        for _ in range(20):  # one in twenty takes five minutes, the others a minute
            worker._execution.run_times.note("slow", 60_000_000)
        worker._execution.run_times.note("slow", 300_000_000)
        job = await task.enqueue(True)
        await reaches(job, State.RUNNING)
        await until(lambda: [run.started_at for run in worker._execution.running])
        clock.advance("179s")
        await worker._long_runs.look()
        assert worker.report().long_runs == []
        clock.advance("1s")
        for _ in range(3):
            await worker._long_runs.look()
        [found] = worker.report().long_runs
        assert (found.job, found.task, found.queue, found.usual) == (str(job.id), "slow", "work", 60_000_000)
        gate.set()
        await job.result()
        await worker._long_runs.look()
        assert worker.report().long_runs == []
    told = [record for record in caplog.records if "has run for 3 min" in record.getMessage()]
    assert len(told) == 1
    assert told[0].levelno == logging.WARNING
    assert "95 of 100 runs of its task take at most 60 s" in told[0].getMessage()


async def test_a_run_whose_claim_is_lost_is_no_long_run_and_is_counted_while_it_goes_on(
    app: App, clock: ManualClock
) -> None:
    """A thread that cannot be stopped: its job was listed twice, once for each run."""
    app.queue("work")
    go, calls = threading.Event(), 0

    @app.task(queue="work", name="stuck")
    def stuck() -> None:
        nonlocal calls
        calls += 1
        go.wait()

    async with app, working(app, lease="1h") as worker:
        execution = worker._execution
        job = await stuck.enqueue()
        try:
            await until(lambda: calls == 1)
            [lost] = execution.running
            clock.advance("10m")
            execution.interrupt(lost, Stop.GONE)
            await worker._long_runs.look()
            report = worker.report()
            assert (report.long_runs, report.lost_runs, report.running) == ([], 1, 1)
            store = await app.opened()
            await store.settle([settle(lost.claim, Released("lost"), 0)])
            await until(lambda: calls == 2)
            clock.advance("5m")
            await worker._long_runs.look()
            report = worker.report()
            [found] = report.long_runs
            assert (found.job, report.lost_runs) == (str(job.id), 1)
            assert clock.now() - found.since == 5 * 60 * SECOND
        finally:
            go.set()
        await until(lambda: not execution.running)
        assert worker.report().lost_runs == 0


@pytest.mark.parametrize("stop", [Stop.GONE, Stop.SHUTDOWN])
async def test_a_run_that_was_cut_short_does_not_say_what_its_task_usually_takes(
    app: App, clock: ManualClock, gate: asyncio.Event, stop: Stop
) -> None:
    task = slow(app, gate)
    async with app, working(app) as worker:
        execution = worker._execution
        await reaches(await task.enqueue(True), State.RUNNING)
        await until(lambda: [run.started_at for run in execution.running])
        clock.advance("10m")
        [run] = execution.running
        execution.interrupt(run, stop)
        await until(lambda: run not in execution.running)
        assert execution.run_times.usual("slow") is None
        gate.set()
        await (await task.enqueue(False)).result(timeout=PATIENCE)
        assert execution.run_times.usual("slow") is not None


@pytest.mark.parametrize(
    ("usual", "timeout", "long_after"),
    [
        (None, None, 30),
        (None, "10m", 600),
        (1, None, 30),
        (60, None, 180),
        (60, "2m", 120),
        (1, "5s", 5),
    ],
)
def test_what_is_long(usual: int | None, timeout: str | None, long_after: int) -> None:
    app, times = App("sqlite://"), RunTimes()
    task = slow(app, asyncio.Event(), **({} if timeout is None else {"timeout": timeout}))
    if usual is not None:
        times.note("slow", usual * 1_000_000)
    assert times.long_after(task, 30_000_000) == long_after * 1_000_000


@pytest.mark.parametrize("also_by_the_loop", [False, True])
async def test_what_the_watchdog_gives_back_never_begins(app: App, also_by_the_loop: bool) -> None:
    """Inside the handler, as if it were the watchdog's thread while the handler blocks."""
    began: list[int] = []
    given_back: list[Run] = []
    app.queue("work")

    @app.task(queue="work", name="job")
    async def job(number: int) -> None:
        began.append(number)
        execution = worker._execution
        given_back.extend(run for run in execution.unstarted() if execution.give_back(run))
        assert not any(execution.give_back(run) for run in given_back)
        if also_by_the_loop:
            execution.give_back_unstarted("the loop was about to")
        await turns()
        execution.forget(given_back)

    async with app:
        jobs = await job.enqueue_many([job.call(number) for number in range(4)])
        async with working(app, concurrency=4) as worker:
            await reaches(jobs[0], State.DONE)
            await turns()
            assert began == [0]
            assert {run.claim.id for run in given_back} == {each.id for each in jobs[1:]}
            assert worker._slots.used == 0
            assert not worker._execution.held()
            # Nobody has recorded it: that is for the watchdog alone to do.
            assert [await each.status() for each in jobs[1:]] == [State.RUNNING] * 3


async def test_what_the_watchdog_could_not_record_is_recorded_by_the_loop(app: App) -> None:
    """The database did not answer its thread: the jobs go back to their place once the loop is back."""
    began: list[int] = []
    app.queue("work")

    @app.task(queue="work", name="job")
    async def job(number: int) -> None:
        began.append(number)
        execution, watchdog = worker._execution, worker._watchdog
        if number == 0:
            taken = [run for run in execution.unstarted() if execution.give_back(run)]
            watchdog._owed = [settle(run.claim, Released("blocked"), 0) for run in taken]
            execution.forget(taken)
            watchdog._after_block(BlockedLoop(since=0, until=1))

    async with app:
        jobs = await job.enqueue_many([job.call(number) for number in range(4)])
        async with working(app, concurrency=4) as worker:
            for each in jobs:
                await reaches(each, State.DONE)
        assert sorted(began) == [0, 1, 2, 3]
        assert [(await each.record()).attempt for each in jobs] == [1] * 4


async def test_claims_that_were_given_back_before_they_were_heard_of_are_not_taken_in(
    app: App, store: WatchedStore
) -> None:
    app.queue("work")

    @app.task(queue="work", name="job")
    async def job() -> None: ...

    async with app:
        each = await job.enqueue()

        async def give_back() -> None:
            del store.after["claim"]
            unheard = await store.claims_beside(worker.identity.id, worker._leases.held())
            revoked = worker._execution.revoke(unheard)
            assert [claim.id for claim in revoked] == [each.id]
            await store.settle([settle(claim, Released("blocked"), 0) for claim in revoked])

        store.after["claim"] = give_back
        async with working(app) as worker:
            await reaches(each, State.DONE)
            await turns()
            assert worker._slots.used == 0
        assert (await each.record()).attempt == 1
        assert [attempt.outcome for attempt in await each.attempts()] == ["released", "done"]
