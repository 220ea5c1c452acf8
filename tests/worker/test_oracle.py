"""What operators read, held against an oracle: the rows of jobs, read in the same snapshot (O14, O15).

Three workers run, are killed and stopped. Under load, a snapshot is taken, and looked at by every surface; at a pause,
with all workers stopped wherever they are, so is the database itself, by the commands that people type.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg
import msgspec
import pytest

from fairlane import App
from fairlane.job import AttemptRecord, State
from fairlane.store import records
from fairlane.store.postgres import PostgresStore
from fairlane.store.protocol import Store
from tests.dashboard.harness import ROOT as SITE
from tests.dashboard.harness import TOKEN, Site
from tests.waiting import stand_still_now, until_found
from tests.worker.oracle_app import AT_ONCE, QUEUE, TOTAL, make_app

KEYS = 50
ROUNDS = 4
JOBS = 150
"""Of one round."""
ROOT = Path(__file__).resolve().parents[2]
LEASE = "2s"
WATCHDOG = 240.0
"""Seconds after which workers that hang have failed. Never the measure of anything."""
SEED = int(os.environ.get("FAIRLANE_ORACLE_SEED", "5"))
BY_KEY = "select keys ->> 'account', state, count(*) from {}jobs where state in (1, 2) group by 1, 2"
EVERY_JOB = "select id, keys ->> 'account' from {}jobs"
FAILED = ("failed", "dead", "lost")
Select = Callable[[str], Awaitable[list[Any]]]


class Truth(msgspec.Struct, frozen=True):
    """What rows say: who waits and who runs, by key."""

    waiting: dict[str, int]
    running: dict[str, int]

    def check(self, queue: tuple[int, int, int], keys: dict[str, tuple[int, int, bool]], where: str) -> None:
        """Hold what a surface says against it: who waits and runs, and who is held."""
        said = {key: (waits, runs) for key, (waits, runs, _) in keys.items()}
        named = sorted(self.waiting.keys() | self.running.keys())
        assert said == {key: (self.waiting.get(key, 0), self.running.get(key, 0)) for key in named}, where
        full = {key for key in named if key in self.waiting and self.running.get(key, 0) >= AT_ONCE}
        assert {key for key, (_, _, is_held) in keys.items() if is_held} == full, where
        ready, runs = sum(self.waiting.values()), sum(self.running.values())
        assert queue[:2] == (ready, runs), where
        assert queue[2] == (ready if runs >= TOTAL else sum(self.waiting[key] for key in full)), where


def truth_of(rows: list[Any]) -> Truth:
    by_state = {state: {key: count for key, of, count in rows if of == state} for state in (State.READY, State.RUNNING)}
    return Truth(by_state[State.READY], by_state[State.RUNNING])


def the_queue(overview: Any) -> Any:
    (found,) = (each for each in overview["queues"] if each["queue"] == QUEUE)
    return found


def said_of_queue(view: Any) -> tuple[int, int, int]:
    return view["ready"], view["running"], view["held_jobs"]


def said_of_keys(page: Any) -> dict[str, tuple[int, int, bool]]:
    assert page["after"] is None
    return {
        each["keys"]["account"]: (each["waiting"], each["running"], bool(each["held_by"]))
        for each in page["keys"]
        if each["waiting"] or each["running"]
    }


async def look(app: App) -> dict[str, tuple[Any, Any]]:
    """What each surface says of the queue, and of its keys."""
    overview = msgspec.to_builtins(await app.operations.overview())
    page = msgspec.to_builtins(await app.operations.keys.list(QUEUE, "account", limit=500))
    shown = msgspec.to_builtins(await app.operations.queues.show(QUEUE))
    async with Site.of(app, None, token=TOKEN) as site:  # type: ignore[arg-type]
        program = site.program()
        api = (await program.get(f"{SITE}/api/overview")).json()
        keys = (await program.get(f"{SITE}/api/queues/{QUEUE}/keys?by=account&limit=500")).json()
    return {
        "status": (said_of_queue(the_queue(overview)), said_of_keys(page)),
        "totals": (said_of_queue(overview["totals"]), said_of_keys(page)),
        "one queue": (said_of_queue(shown["view"]), said_of_keys(page)),
        "JSON API": (said_of_queue(the_queue(api)), said_of_keys(keys)),
    }


def command(url: str, *words: str) -> Any:
    """What a command prints as JSON."""
    given = [sys.executable, "-m", "fairlane.cli", *words, "--url", url, "--json"]
    return json.loads(subprocess.run(given, cwd=ROOT, check=True, stdout=PIPE).stdout)


class World:
    """A database, and the workers on it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.file = Path(url.removeprefix("sqlite:///")) if url.startswith("sqlite") else None
        self.chance = random.Random(SEED)
        self.crew: list[Process] = []

    async def start(self) -> None:
        command = [sys.executable, "-m", "fairlane.cli", "worker", "tests.worker.oracle_app:app", "--concurrency", "4"]
        options = ["--lease", LEASE, "--log-level", "error"]
        environment = dict(os.environ, FAIRLANE_URL=self.url, PYTHONPATH=str(ROOT))
        self.crew.append(await asyncio.create_subprocess_exec(*command, *options, env=environment, cwd=ROOT))

    async def end(self, how: signal.Signals) -> None:
        """One of the workers is killed, or stops in order."""
        victim = self.crew.pop(self.chance.randrange(len(self.crew)))
        victim.send_signal(how)
        await victim.wait()

    async def select(self, statement: str) -> list[Any]:
        if self.file is not None:
            with contextlib.closing(sqlite3.connect(self.file)) as file:
                return file.execute(statement.format("")).fetchall()
        connection = await asyncpg.connect(self.url)
        try:
            return [tuple(row) for row in await connection.fetch(statement.format("fairlane."))]
        finally:
            await connection.close()

    async def ended(self) -> int:
        ((count,),) = await self.select("select count(*) from {}jobs where state in (3, 4)")
        return int(count)

    async def reaches(self, count: int) -> None:
        """Return once so many jobs have ended."""

        async def is_so() -> bool:
            return await self.ended() >= count

        await until_found(is_so, WATCHDOG)

    @contextlib.asynccontextmanager
    async def snapshot(self) -> AsyncIterator[tuple[App, Select]]:
        """The database as it is at one moment, to be looked at by an app and by hand."""
        if self.file is not None:
            copy = World(f"sqlite:///{self.file.with_name('copy.db')}")
            assert copy.file is not None
            source, target = sqlite3.connect(self.file), sqlite3.connect(copy.file)
            with contextlib.closing(source), contextlib.closing(target):
                source.backup(target)
            async with App(copy.url) as app:
                yield app, copy.select
            for each in copy.file.parent.glob("copy.db*"):
                each.unlink()
            return
        async with App(self.url) as app:
            store = await app.opened()
            assert isinstance(store, PostgresStore)
            async with store._connections.session() as pinned, pinned.transaction(isolation="repeatable_read"):

                @contextlib.asynccontextmanager
                async def session() -> AsyncIterator[Any]:
                    yield pinned

                async def select(statement: str) -> list[Any]:
                    return [tuple(row) for row in await pinned.fetch(statement.format("fairlane."))]

                store._connections.session = session  # type: ignore[method-assign]
                yield app, select

    @contextlib.asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Every worker stands still, wherever it is; but none with the lock that others need to open the file."""

        async def stand_still() -> bool:
            for each in self.crew:
                stand_still_now(each.pid)
            if self._is_writable():
                return True
            for each in self.crew:
                each.send_signal(signal.SIGCONT)
            return False

        try:
            await until_found(stand_still)
            yield
        finally:
            for each in self.crew:
                each.send_signal(signal.SIGCONT)

    def _is_writable(self) -> bool:
        if self.file is None:
            return True
        with open(f"{self.file}.lock") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    async def compare_under_load(self) -> None:
        async with self.snapshot() as (app, select):
            truth = truth_of(await select(BY_KEY))
            for surface, (queue, keys) in (await look(app)).items():
                truth.check(queue, keys, f"{surface}, seed {SEED}")

    async def compare_at_rest(self) -> None:
        """Workers that were stopped may have asked for something that the database carries out now."""

        async def is_at_rest() -> bool:
            before = truth_of(await self.select(BY_KEY))
            status = command(self.url, "status")
            keys = command(self.url, "keys", QUEUE, "--by", "account", "--limit", "500")
            async with App(self.url) as app:
                looked = await look(app)
            if before != truth_of(await self.select(BY_KEY)):
                return False
            before.check(said_of_queue(the_queue(status)), said_of_keys(keys), f"fairlane status and keys, seed {SEED}")
            for surface, (queue, of_keys) in looked.items():
                before.check(queue, of_keys, f"{surface}, seed {SEED}")
            return True

        await until_found(is_at_rest)

    async def check_ledger(self, store: Store) -> None:
        """Every run that has ended is in the stats by key and by hour, and over all minutes, once."""
        jobs = [(UUID(bytes=job) if isinstance(job, bytes) else job, key) for job, key in await self.select(EVERY_JOB)]
        ran = [
            (key, each.outcome) for job, key in jobs for each in await store.run(records.attempts(job)) if _is_run(each)
        ]
        ended, failed = Counter(key for key, _ in ran), Counter(key for key, how in ran if how in FAILED)
        page = await store.ask(lambda moment: moment.list_keys([QUEUE], ("account",), limit=500))
        assert {each.key[0]: (each.ended, each.failed) for _, each in page.keys} == {
            key: (ended[key], failed[key]) for key in ended
        }, f"seed {SEED}"
        assert all(sum(hour.ended for hour in each.hours) == each.ended for _, each in page.keys)
        minutes = (await store.ask(lambda moment: moment.minutes([QUEUE], 0)))[QUEUE]
        told = sum(each.ended for each in minutes), sum(each.failed for each in minutes)
        assert told == (ended.total(), failed.total()), f"seed {SEED}"


def _is_run(attempt: AttemptRecord) -> bool:
    return attempt.ended_at is not None and attempt.outcome != "released"


@pytest.mark.slow
async def test_o14_every_surface_says_what_the_rows_say_whatever_happens_to_workers(url: str) -> None:
    world = World(url)
    app, deliver = make_app(url)
    async with app:
        store = await app.opened()
        try:
            for _ in range(3):
                await world.start()
            for number in range(ROUNDS):
                accounts = [f"a{world.chance.randrange(KEYS)}" for _ in range(JOBS)]
                await deliver.enqueue_many([deliver.call(n, each) for n, each in enumerate(accounts)])
                for part in range(3):
                    await world.reaches(number * JOBS + part * JOBS // 4)
                    await world.compare_under_load()
                await world.end(signal.SIGKILL if number % 2 else signal.SIGTERM)
                await world.compare_under_load()
                async with world.paused():
                    await world.compare_at_rest()
                await world.start()
            await world.reaches(ROUNDS * JOBS)
            await world.compare_under_load()
            while world.crew:
                await world.end(signal.SIGTERM)
            await world.compare_at_rest()
            await world.check_ledger(store)
        finally:
            for each in world.crew:
                with contextlib.suppress(ProcessLookupError):
                    each.kill()
                await each.wait()
