"""Real worker processes on PostgreSQL that are stopped while their statements are under way: nothing is broken off."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import pytest

from fairlane import App, State
from tests.waiting import PATIENCE

WORKERS, SLOTS = 3, 2

SHOP = """
import asyncio, os
from fairlane import App
app = App()

@app.task
async def wait_for(path: str) -> str:
    print("started", flush=True)
    while not os.path.exists(path):
        await asyncio.sleep(0.005)
    return "in peace"
"""

STATEMENTS_THAT_WAIT = (
    "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and pid <> pg_backend_pid()"
)


@pytest.fixture
def shop(tmp_path: Path, postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> App:
    """The producer's side of a program whose workers are other processes."""
    (tmp_path / "shop.py").write_text(SHOP)
    monkeypatch.setenv("FAIRLANE_URL", postgres_url)
    app = App()

    async def wait_for(path: str) -> str: ...  # type: ignore[empty-body]

    app.task(name="shop.wait_for")(wait_for)
    return app


@asynccontextmanager
async def locked(url: str, tables: str) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    """Whoever touches these tables waits until the end of the block."""
    connection = await asyncpg.connect(url)
    try:
        async with connection.transaction():
            await connection.execute(f"lock table {tables} in access exclusive mode")
            yield connection
    finally:
        await connection.close()


async def start_workers(folder: Path, count: int = WORKERS) -> list[asyncio.subprocess.Process]:
    command = [sys.executable, "-m", "fairlane.cli", "worker", "shop:app", "--concurrency", str(SLOTS)]
    pipe = asyncio.subprocess.PIPE
    return [await asyncio.create_subprocess_exec(*command, cwd=folder, stdout=pipe, stderr=pipe) for _ in range(count)]


async def statements_wait(connection: asyncpg.Connection[asyncpg.Record], count: int) -> None:
    async with asyncio.timeout(PATIENCE):
        while await connection.fetchval(STATEMENTS_THAT_WAIT) < count:
            # The server shows the same picture throughout a transaction, unless it is told to look again.
            await connection.execute("select pg_stat_clear_snapshot()")


async def told_to_stop(worker: asyncio.subprocess.Process) -> str:
    """Send SIGTERM, and return what was said once it was heard."""
    worker.send_signal(signal.SIGTERM)
    assert worker.stderr is not None
    async with asyncio.timeout(PATIENCE):
        return (await worker.stderr.readuntil(b"asked to stop\n")).decode()


async def ended_quietly(worker: asyncio.subprocess.Process, said: str) -> bool:
    """Whether it has ended well, and nobody but the worker has said anything, and nothing but news."""
    _, rest = await asyncio.wait_for(worker.communicate(), PATIENCE)
    lines = (said + rest.decode()).splitlines()
    assert [line for line in lines if " INFO     fairlane.worker: " not in line] == []
    return worker.returncode == 0


async def test_workers_stopped_while_they_settle_leave_nothing_undone_and_say_nothing(
    shop: App, postgres_url: str, tmp_path: Path
) -> None:
    async with shop:
        wait_for = shop.registry["shop.wait_for"]
        go = tmp_path / "go"
        jobs = [await wait_for.enqueue(str(go)) for _ in range(WORKERS * SLOTS)]
        workers = await start_workers(tmp_path)
        for worker in workers:
            assert worker.stdout is not None
            for _ in range(SLOTS):
                assert await asyncio.wait_for(worker.stdout.readline(), PATIENCE) == b"started\n"
        async with locked(postgres_url, "fairlane.jobs, fairlane.leases") as connection:
            go.touch()
            await statements_wait(connection, WORKERS)
            said = [await told_to_stop(worker) for worker in workers]
        assert [await ended_quietly(*each) for each in zip(workers, said, strict=True)] == [True] * WORKERS
        assert [await job.status() for job in jobs] == [State.DONE] * len(jobs)


async def test_workers_stopped_while_they_claim_and_reap_give_back_what_they_got_and_say_nothing(
    shop: App, postgres_url: str, tmp_path: Path
) -> None:
    async with shop:
        jobs = [await shop.registry["shop.wait_for"].enqueue(str(tmp_path / "never")) for _ in range(WORKERS * SLOTS)]
        async with locked(postgres_url, "fairlane.leases") as connection:
            workers = await start_workers(tmp_path)
            await statements_wait(connection, 2 * WORKERS)  # each has asked for work, and looked for abandoned claims
            said = [await told_to_stop(worker) for worker in workers]
        assert [await ended_quietly(*each) for each in zip(workers, said, strict=True)] == [True] * WORKERS
        assert [await job.status() for job in jobs] == [State.READY] * len(jobs)
        assert [(await job.record()).attempt for job in jobs] == [0] * len(jobs)


async def test_a_worker_that_is_stopped_while_it_declares_its_queues_ends_well(
    shop: App, postgres_url: str, tmp_path: Path
) -> None:
    async with locked(postgres_url, "fairlane.queues") as connection:
        (worker,) = await start_workers(tmp_path, 1)
        await statements_wait(connection, 1)
        said = await told_to_stop(worker)
    assert await ended_quietly(worker, said)
