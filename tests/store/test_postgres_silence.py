"""Connections to PostgreSQL that die without a word: every wait ends, and nobody else waits for the dead."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from fairlane import App, State
from fairlane.errors import StoreUnavailable
from fairlane.policy import Policy
from fairlane.store.postgres import PostgresStore, connections, wakeups
from tests.store.harness import LEASE, WORKER, claim, claim_once, given_jobs, new_jobs, worker_named
from tests.waiting import until, until_found

PLAIN = Policy("webhooks")
PROGRAM = """
from fairlane import App

app = App()


@app.task
async def work() -> int:
    return 1
"""


class BlackHole:
    """A network that forwards, until it swallows: sockets stay open, and nothing comes through any more."""

    def __init__(self, url: str) -> None:
        self._parts = urlsplit(url)
        self._server: asyncio.Server | None = None
        self._links: list[_Link] = []
        self.swallows_new = False
        """Whether new connections are accepted and never answered."""

    async def open(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        return urlunsplit(self._parts._replace(netloc=f"{self._parts.username}@127.0.0.1:{port}"))

    @property
    def tries(self) -> int:
        """How often it was connected to."""
        return len(self._links)

    def swallow(self) -> None:
        """What is open now is dead, and nobody is told."""
        for link in self._links:
            link.is_dead = True

    async def close(self) -> None:
        for link in self._links:
            link.close()
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = _Link(self.swallows_new)
        self._links.append(link)
        link.writers.append(writer)
        if self.swallows_new:
            await link.closed.wait()
            return
        far_reader, far_writer = await asyncio.open_connection(self._parts.hostname, self._parts.port)
        link.writers.append(far_writer)
        await asyncio.gather(link.pump(reader, far_writer), link.pump(far_reader, writer), return_exceptions=True)


class _Link:
    def __init__(self, is_dead: bool) -> None:
        self.is_dead = is_dead
        self.closed = asyncio.Event()
        self.writers: list[asyncio.StreamWriter] = []

    def close(self) -> None:
        self.closed.set()
        for writer in self.writers:
            writer.transport.abort()

    async def pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(65_536):
                if not self.is_dead:
                    target.write(data)
                    await target.drain()
        if not self.is_dead:
            target.transport.abort()
        await self.closed.wait()


@pytest.fixture
async def hole(postgres_url: str) -> AsyncIterator[BlackHole]:
    hole = BlackHole(postgres_url)
    yield hole
    await hole.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bounds, a tenth as long."""
    for name in ("ASK_AFTER", "LOOK_EVERY", "CONNECT_WITHIN", "PATIENCE", "CLOSE_WITHIN"):
        monkeypatch.setattr(connections, name, getattr(connections, name) / 10)
    for name in ("PULSE_EVERY", "PULSE_WITHIN"):
        monkeypatch.setattr(wakeups, name, getattr(wakeups, name) / 10)


@pytest.fixture
async def store(hole: BlackHole) -> AsyncIterator[PostgresStore]:
    store = PostgresStore(await hole.open())
    await store.open()
    await store.declare(PLAIN)
    yield store
    await store.close()


@pytest.fixture
async def other(postgres_url: str) -> AsyncIterator[PostgresStore]:
    store = PostgresStore(postgres_url)
    await store.open()
    yield store
    await store.close()


# F11
@pytest.mark.parametrize("count", [1, 5, 300])
async def test_an_enqueue_over_connections_that_have_silently_died_is_stored_once_over_a_new_one(
    impatient: None, store: PostgresStore, other: PostgresStore, hole: BlackHole, count: int
) -> None:
    await asyncio.gather(*(store.policy("webhooks") for _ in range(20)))  # several connections, all of them idle
    hole.swallow()
    jobs = new_jobs(PLAIN, count=count)
    async with asyncio.timeout(20):
        await store.enqueue(jobs)
    assert {each.id for each in await claim(other, "webhooks", 2 * count)} == {job.id for job in jobs}


# F11
async def test_an_enqueue_that_nothing_can_reach_gets_its_answer_in_bounded_time(
    impatient: None, store: PostgresStore, hole: BlackHole
) -> None:
    hole.swallow()
    hole.swallows_new = True
    async with asyncio.timeout(20):
        with pytest.raises(StoreUnavailable, match=r"cannot be reached: .*; start it, or check the host"):
            await store.enqueue(new_jobs(PLAIN))


# F11
async def test_a_statement_that_the_server_works_at_may_take_as_long_as_it_likes(
    impatient: None, store: PostgresStore, postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    admin = await asyncpg.connect(postgres_url)
    asked = asyncio.Event()
    real = store._connections.connect

    async def connect() -> connections.Session:
        asked.set()
        return await real()

    async with admin.transaction():
        await admin.execute("lock table fairlane.jobs in access exclusive mode")
        enqueuing = asyncio.ensure_future(store.enqueue(new_jobs(PLAIN)))
        await until(lambda: store._connections._silence._uses)
        store._connections.connect = connect  # type: ignore[method-assign]
        await asked.wait()
        await until(lambda: store._connections._silence._asking is None)
        assert not enqueuing.done()
    await enqueuing
    assert "is ended" not in caplog.text
    await admin.close()


# F8
async def test_a_listener_whose_connection_has_silently_died_hears_again(
    impatient: None, store: PostgresStore, other: PostgresStore, hole: BlackHole
) -> None:
    listener = await store.listen(WORKER)
    hole.swallow()
    async with asyncio.timeout(30):
        assert await listener.wait(None) is True  # it may have missed something
        await until(lambda: listener.alive_lock is not None)  # type: ignore[attr-defined]
        while (await claim_once(store, "webhooks", 1, listener=listener)).look_again:
            pass
        await given_jobs(other, PLAIN)
        assert await listener.wait(None) is True
    await listener.close()


# F8
async def test_whoever_waits_for_a_result_over_a_connection_that_has_silently_died_gets_it(
    impatient: None, store: PostgresStore, other: PostgresStore, hole: BlackHole
) -> None:
    (job,) = await given_jobs(other, PLAIN)
    waiting = asyncio.ensure_future(store.wait_until_ended(job, None))
    await until(lambda: store._results._connection is not None and not store._results._uncertain)
    hole.swallow()
    await other.cancel(job)
    async with asyncio.timeout(30):
        assert (await waiting).state is State.CANCELLED


# F8
async def test_a_worker_that_is_cut_off_with_the_claim_lock_stops_the_queue_for_five_seconds_at_most(
    store: PostgresStore, other: PostgresStore, hole: BlackHole, postgres_url: str
) -> None:
    await given_jobs(other, PLAIN, count=2)

    def want() -> int:
        hole.swallow()  # it has the lock now
        return 1

    claiming = asyncio.ensure_future(store.claim("webhooks", want, worker=WORKER, lease=LEASE))
    admin = await asyncpg.connect(postgres_url)
    held = (
        "select count(*) from pg_locks join pg_stat_activity using (pid) where locktype = 'advisory' "
        "and classid = 1717660018 and granted and application_name = 'fairlane' and state = 'idle'"
    )

    async def is_held() -> bool:
        return bool(await admin.fetchval(held))

    await until_found(is_held)
    began = time.monotonic()
    assert len(await claim(other, "webhooks", 1, worker=worker_named("other"))) == 1
    assert time.monotonic() - began < 12
    with contextlib.suppress(StoreUnavailable):
        await claiming
    await admin.close()


def test_our_sockets_notice_a_peer_that_is_gone_within_seconds(postgres_url: str) -> None:
    async def options() -> list[int]:
        store = PostgresStore(postgres_url)
        await store.open()
        async with store._connections.session() as connection:
            found: Any = connection._transport.get_extra_info("socket")  # type: ignore[attr-defined]
            kept = found.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
            told = [found.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names]
        await store.close()
        return [kept, *told]

    if sys.platform == "linux":
        assert asyncio.run(options()) == [1, 10, 5, 3, 15_000]


async def worker_process(url: str, folder: Path, *given: str) -> asyncio.subprocess.Process:
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "fairlane.cli", "worker", "program:app", *given]
    return await asyncio.create_subprocess_exec(
        *command, cwd=folder, env={**os.environ, "FAIRLANE_URL": url}, stderr=asyncio.subprocess.PIPE
    )


async def _reports(app: App) -> bool:
    return bool((await app.operations.workers.list()).workers)


# F8, F11
@pytest.mark.parametrize("signals", [1, 2])
async def test_a_worker_process_that_is_cut_off_obeys_signals(
    hole: BlackHole, postgres_url: str, tmp_path: Path, signals: int
) -> None:
    url = await hole.open()
    process = await worker_process(url, tmp_path, "--drain-timeout", "2s")
    try:
        async with App(postgres_url) as app:
            await until_found(lambda: _reports(app))
        hole.swallow()
        hole.swallows_new = True
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        async with asyncio.timeout(60):
            if signals == 2:
                while b"asked to stop" not in await process.stderr.readline():
                    pass
                process.send_signal(signal.SIGTERM)
            await process.communicate()
        took = time.monotonic() - began
        # Nothing ran: to say goodbye to a database that is not there takes seconds, twice told to stop it takes three.
        assert took < (40 if signals == 1 else 15), took
        assert process.returncode == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()


async def test_a_crowd_is_told_together_that_nobody_can_be_reached(
    impatient: None, store: PostgresStore, hole: BlackHole
) -> None:
    """F11: who waits for a session while others try in vain does not wait for a try of its own."""
    hole.swallow()
    hole.swallows_new = True
    calls = [store.enqueue(new_jobs(PLAIN)) for _ in range(64)]
    answers = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 60)
    assert {type(each) for each in answers} == {StoreUnavailable}
    assert hole.tries < 64
