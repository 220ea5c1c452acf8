"""Plays the acts: enqueue, start the workers, watch the ledger, count.

Everything is enqueued before the workers start; time counts from the first start of a handler.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit, urlunsplit
from uuid import uuid4

import msgspec

from fairlane.demo.app import make_app
from fairlane.demo.ledger import LedgerReader
from fairlane.demo.results import Figures, Promise, Run, judge, measure
from fairlane.demo.scenarios import ACTS, WHALE, Act, Workload
from fairlane.demo.workers import DemoFailed, Troupe, count_ready, raise_curtain

LOOK_EVERY = 0.1
READY_WITHIN = 30.0
STALLED_AFTER = 20.0
ENQUEUE_AT_ONCE = 1_000


class Progress(msgspec.Struct, frozen=True):
    """One look at a running act: who runs and who waits."""

    act: Act
    workload: Workload
    stage: str
    """What is going on, in a word or two: `enqueueing`, `starting workers`, `running`, `done`."""
    elapsed: float = 0.0
    """Seconds since the first handler started."""
    whale_done: int = 0
    whale_running: int = 0
    small_done: int = 0
    small_running: int = 0

    @property
    def running(self) -> int:
        return self.whale_running + self.small_running


class Watcher(Protocol):
    """Whoever shows the demo."""

    def look(self, progress: Progress) -> None: ...

    def finish(self, performance: Performance) -> None: ...


class Performance(msgspec.Struct, frozen=True):
    """An act that was played."""

    act: Act
    workload: Workload
    runs: list[Run]
    figures: Figures


class Report(msgspec.Struct, frozen=True):
    """What the whole demo showed."""

    workload: Workload
    performances: list[Performance]
    promises: list[Promise]

    @property
    def figures(self) -> list[Figures]:
        return [each.figures for each in self.performances]


def play(url: str, workload: Workload, watcher: Watcher, acts: Sequence[Act] = ACTS) -> Report:
    """Play all acts on one database and judge what they showed."""
    asyncio.run(_migrate(url))
    performances = []
    for act in acts:
        with tempfile.TemporaryDirectory(prefix="fairlane-demo-") as stage:
            runs = _perform(act, workload, url, Path(stage), watcher)
        performances.append(Performance(act, workload, runs, measure(act, workload, runs)))
        watcher.finish(performances[-1])
    return Report(workload, performances, judge([each.figures for each in performances], workload.all_slots))


async def _migrate(url: str) -> None:
    app, _ = make_app(url)
    await app.migrate()


def _perform(act: Act, workload: Workload, url: str, stage: Path, watcher: Watcher) -> list[Run]:
    watcher.look(Progress(act, workload, "enqueueing"))
    asyncio.run(_enqueue(act, workload, url))
    watcher.look(Progress(act, workload, "starting workers"))
    ledger = LedgerReader(stage)
    with Troupe(act, workload, url, stage) as troupe:
        _wait_until_ready(troupe, workload, stage)
        raise_curtain(stage)
        for progress in _follow(act, workload, ledger):
            watcher.look(progress)
            troupe.check()
    ledger.follow()
    watcher.look(_progress(act, workload, ledger, "done"))
    return ledger.runs


async def _enqueue(act: Act, workload: Workload, url: str) -> None:
    """The whale first; then each small tenant brings all of its jobs at once."""
    app, deliver = make_app(url)
    on_queue = deliver.using(queue=act.queue)
    async with app:
        for _, jobs in groupby(workload.deliveries(), key=lambda job: job.tenant):
            calls = [on_queue.call(job.number, job.tenant, job.endpoint) for job in jobs]
            for first in range(0, len(calls), ENQUEUE_AT_ONCE):
                await app.enqueue_many(calls[first : first + ENQUEUE_AT_ONCE])


def _wait_until_ready(troupe: Troupe, workload: Workload, stage: Path) -> None:
    deadline = time.monotonic() + READY_WITHIN
    while count_ready(stage) < workload.processes:
        troupe.check()
        if time.monotonic() > deadline:
            raise DemoFailed(f"the workers were not ready within {READY_WITHIN:g} s")
        time.sleep(LOOK_EVERY / 10)


def _follow(act: Act, workload: Workload, ledger: LedgerReader) -> Iterator[Progress]:
    """Look at the ledger until every job has run, or nothing has happened for too long."""
    moved_at = time.monotonic()
    while len(ledger.runs) < workload.total:
        time.sleep(LOOK_EVERY)
        if ledger.follow():
            moved_at = time.monotonic()
        elif time.monotonic() - moved_at > STALLED_AFTER:
            raise DemoFailed(
                f"act {act.name}: nothing has run for {STALLED_AFTER:g} s; "
                f"{len(ledger.runs):,} of {workload.total:,} jobs had ended by then"
            )
        yield _progress(act, workload, ledger, "running")


def _progress(act: Act, workload: Workload, ledger: LedgerReader, stage: str) -> Progress:
    whale_done = sum(run.tenant == WHALE for run in ledger.runs)
    whale_running = sum(run.tenant == WHALE for run in ledger.running.values())
    return Progress(
        act,
        workload,
        stage,
        ledger.elapsed,
        whale_done,
        whale_running,
        len(ledger.runs) - whale_done,
        len(ledger.running) - whale_running,
    )


@contextmanager
def sqlite_file() -> Iterator[str]:
    """The URL of a SQLite file in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="fairlane-demo-") as folder:
        yield f"sqlite:///{Path(folder) / 'demo.db'}"


@contextmanager
def throwaway_postgres() -> Iterator[str]:
    """The URL of a PostgreSQL server that lives as long as this block."""
    from fairlane.testing.postgres import PostgresUnavailable, ThrowawayPostgres

    with ExitStack() as stack:
        try:
            server = stack.enter_context(ThrowawayPostgres())
        except PostgresUnavailable as error:
            raise DemoFailed(str(error)) from error
        yield server.url()


@contextmanager
def own_database(url: str) -> Iterator[str]:
    """The URL of a new database on the server of `url`, dropped afterwards; what `url` itself names is only a door."""
    import asyncpg

    if urlsplit(url).scheme not in ("postgresql", "postgres"):
        raise DemoFailed(f"--url takes a PostgreSQL, such as postgresql://user@host/database; {url!r} is none")
    name = f"fairlane_demo_{uuid4().hex[:12]}"
    try:
        asyncio.run(_run_formatted(url, "create database %I", name))
    except asyncpg.InsufficientPrivilegeError as error:
        raise DemoFailed(
            "the demo plays in a database of its own and drops it afterwards, but this user may not create one "
            f"({error}); give a user that may, or use --postgres"
        ) from error
    except (OSError, ValueError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise DemoFailed(f"the PostgreSQL of --url cannot be used: {error}") from error
    try:
        yield urlunsplit(urlsplit(url)._replace(path=f"/{name}"))
    finally:
        asyncio.run(_run_formatted(url, "drop database if exists %I with (force)", name))


async def _run_formatted(url: str, statement: str, name: str) -> None:
    import asyncpg

    connection = await asyncpg.connect(url, timeout=10)
    try:
        # An identifier cannot be a parameter of these statements, so the server itself quotes it.
        quoted = await connection.fetchval("select format($1, $2::text)", statement, name)
        await connection.execute(quoted)
    finally:
        await connection.close()
