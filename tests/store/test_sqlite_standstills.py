"""A SQLite file whose lock nobody gives back, or that is gone: whoever uses it is told, within a bound."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fairlane import App
from fairlane.errors import StoreLost, StoreUnavailable
from fairlane.policy import Policy
from fairlane.store import records
from fairlane.store.sqlite import SqliteStore, database
from fairlane.store.sqlite.database import WriteLock
from tests.store.harness import claim_once, new_jobs
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
PLAIN = Policy("webhooks")
SOON = 0.5

HOLDER = """
import sys, time
from fairlane.store.sqlite.database import WriteLock
WriteLock(sys.argv[1]).take()
print("held", flush=True)
time.sleep(3600)
"""

APP = """
from fairlane import App
app = App()
app.queue("webhooks")

@app.task(queue="webhooks")
async def deliver() -> None: ...
"""


@contextmanager
def stopped_holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the write lock and is stopped."""
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs.db"


@contextmanager
def worker_on(path: Path) -> Iterator[subprocess.Popen[str]]:
    """`fairlane worker` on this file, once it serves."""
    (path.parent / "standstill_app.py").write_text(APP)
    environment = dict(os.environ, FAIRLANE_URL=f"sqlite:///{path}", PYTHONPATH=str(path.parent))
    command = [sys.executable, "-m", "fairlane.cli", "worker", "standstill_app:app"]
    with subprocess.Popen(
        command, env=environment, cwd=path.parent, stderr=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        try:
            assert process.stderr is not None
            while " serves " not in process.stderr.readline():
                assert process.poll() is None
            yield process
        finally:
            process.kill()


async def test_a_wait_for_the_write_lock_ends_in_time_and_names_who_holds_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F7: every call is answered, reads too, though the holder will never give it back."""
    monkeypatch.setattr(database, "BUSY_TIMEOUT", SOON)
    store = SqliteStore(str(path))
    await store.open()
    await store.declare(PLAIN)
    with stopped_holder(path) as holder:
        for ask in (
            lambda: store.enqueue(new_jobs(PLAIN)),
            lambda: store.counts("webhooks"),
            lambda: claim_once(store, "webhooks", 1),
        ):
            with pytest.raises(StoreUnavailable) as told:
                await asyncio.wait_for(ask(), 30)
            assert f"process {holder.pid}" in str(told.value)
            assert f"stopped; let it go on (kill -CONT {holder.pid})" in str(told.value)
        await asyncio.wait_for(store.close(), 30)


async def test_a_transaction_that_went_past_the_lock_keeps_nobody_waiting_longer(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F7: whoever waits is answered when the first has waited long enough, and not one after the other."""
    monkeypatch.setattr(database, "BUSY_TIMEOUT", SOON)
    store = SqliteStore(str(path))
    await store.open()
    await store.declare(PLAIN)
    theirs = sqlite3.connect(path, isolation_level=None)
    theirs.execute("begin immediate")
    asked = [store.enqueue(new_jobs(PLAIN)) for _ in range(6)]
    answers = await asyncio.wait_for(asyncio.gather(*asked, store.counts("webhooks"), return_exceptions=True), 60)
    assert {type(each) for each in answers} == {StoreUnavailable}
    assert all("pass it as tx=, or end it first" in str(each) for each in answers)
    in_turn = [each for each in answers if "has been locked for" not in str(each)]
    assert len(in_turn) <= 1, "each waited for itself"
    theirs.execute("rollback")
    theirs.close()
    await store.enqueue(new_jobs(PLAIN))
    assert (await store.counts("webhooks")).events == 1
    await store.close()


async def test_what_was_answered_with_an_error_is_not_done_later(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "BUSY_TIMEOUT", SOON)
    store = SqliteStore(str(path))
    await store.open()
    await store.declare(PLAIN)
    with stopped_holder(path) as holder:
        refused = new_jobs(PLAIN)
        with pytest.raises(StoreUnavailable):
            await store.enqueue(refused)
        holder.send_signal(signal.SIGCONT)
        holder.kill()
        holder.wait()
    kept = new_jobs(PLAIN)

    async def is_kept() -> bool:
        try:
            await store.enqueue(kept)
        except StoreUnavailable:
            return False
        return True

    while not await is_kept():  # the thread has not heard yet that the lock is free
        pass
    claimed = await claim_once(store, "webhooks", 10)
    assert [claim.id for claim in claimed.claims] == [job.id for job in kept]
    await store.close()


async def test_a_long_transaction_of_this_process_is_no_standstill(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a wait for others has a bound: what is our own takes the time that it takes."""
    monkeypatch.setattr(database, "BUSY_TIMEOUT", 0.01)
    store = SqliteStore(str(path))
    await store.open()
    await store.declare(PLAIN)
    many = asyncio.ensure_future(store.enqueue(new_jobs(PLAIN, count=20_000)))
    await asyncio.sleep(0)
    assert (await store.counts("webhooks")).events == 1
    await many
    await store.close()


@pytest.mark.slow
def test_a_worker_ends_when_it_is_told_though_the_write_lock_is_held(path: Path) -> None:
    """F7: SIGTERM is obeyed within the bound of what is being asked."""
    with worker_on(path) as worker, stopped_holder(path):
        began = time.monotonic()
        worker.send_signal(signal.SIGTERM)
        worker.communicate(timeout=120)
        assert time.monotonic() - began < 60


async def test_a_program_does_not_outlive_its_own_end_because_the_write_lock_is_held(path: Path) -> None:
    """The thread that waits for the lock does not keep the interpreter."""
    program = (
        "import asyncio, sys\n"
        "from fairlane.store.sqlite import SqliteStore, database\n"
        "database.BUSY_TIMEOUT = 0.2\n"
        "async def main():\n"
        "    store = SqliteStore(sys.argv[1])\n"
        "    try:\n"
        "        await store.open()\n"
        "    except ConnectionError as error:\n"
        "        print(error)\n"
        "asyncio.run(main())\n"
    )
    with stopped_holder(path) as holder:
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", program, str(path)],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    assert f"process {holder.pid}" in done.stdout


@pytest.mark.parametrize("how", ["deleted", "replaced", "moved"])
async def test_a_file_that_is_gone_takes_no_more_jobs(path: Path, how: str) -> None:
    """F7: what would be written to it, nobody would find."""
    app = App(f"sqlite:///{path}")
    app.queue("webhooks")

    async def deliver() -> None: ...

    task = app.task(queue="webhooks", name="deliver")(deliver)
    async with app:
        await task.enqueue()
        match how:
            case "deleted":
                path.unlink()
            case "replaced":
                shutil.copy(path, path.with_suffix(".copy"))
                path.with_suffix(".copy").replace(path)
            case _:
                path.rename(path.with_suffix(".old"))
        with pytest.raises(StoreLost, match=rf"{how if how == 'replaced' else 'no longer there'}.*restart"):
            await task.enqueue()
        with pytest.raises(StoreLost):
            await app.operations.queues.list()
    if how == "replaced":
        async with app:
            await task.enqueue()


@pytest.mark.slow
def test_a_worker_whose_file_is_gone_ends_and_says_why(path: Path) -> None:
    with worker_on(path) as worker:
        path.unlink()
        _, said = worker.communicate(timeout=120)
    assert worker.returncode == 1
    assert "is no longer there" in said


async def test_a_lock_that_is_free_again_is_taken_by_whoever_waited(path: Path) -> None:
    store = SqliteStore(str(path))
    await store.open()
    await store.declare(PLAIN)
    theirs = WriteLock(str(path))
    theirs.take()
    waiting = asyncio.ensure_future(store.enqueue(new_jobs(PLAIN)))
    await until(lambda: store._database.is_waiting)
    theirs.give()
    await waiting
    theirs.close()
    await store.close()


async def test_a_process_that_only_reads_waits_for_nobody(path: Path) -> None:
    # It counted as waiting from its start on: from ten seconds later, reads that queued for a moment were refused.
    async with App(f"sqlite:///{path}") as writer:
        await (await writer.opened()).run(records.put_value("key", b"value"))
        reader = SqliteStore(str(path))
        await reader.open()
        assert not reader._database.is_waiting
        reader._database._blocked_since = 0.0  # a write of its own was refused long ago
        assert await reader.run(records.get_value("key")) == b"value"
        assert not reader._database.is_waiting
        await reader.close()
