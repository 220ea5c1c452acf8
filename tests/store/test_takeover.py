"""Processes take a queue over from one another, under tight limits, and are killed wherever they are (J01, J02).

So is the database. PostgreSQL loses what was not flushed, and the processes remember it; of a SQLite file only a crash
of the host loses anything, and nobody is left to remember.

`FAIRLANE_TAKEOVER_CLAIMS=10000 FAIRLANE_TAKEOVER_PROCESSES=8 pytest -s tests/store/test_takeover.py` does it at length.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import sqlite3
import sys
import time
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from fairlane.errors import StoreUnavailable
from fairlane.job import State
from fairlane.store.protocol import QueueCounts, Store
from fairlane.testing.postgres import ThrowawayPostgres
from tests.model import boards
from tests.store.claim_ledger import ClaimLedger, Token
from tests.store.harness import Database, new_jobs
from tests.store.lost_power import PowerLoss
from tests.store.takeover import GIVEN_BACK, LEASE, PER_ACCOUNT, QUEUE, TOTALS, policy_of
from tests.waiting import stand_still_now, until_found

CLAIMS = int(os.environ.get("FAIRLANE_TAKEOVER_CLAIMS", "150"))
PROCESSES = int(os.environ.get("FAIRLANE_TAKEOVER_PROCESSES", "3"))
ACCOUNTS = 12
TROUBLE_EVERY = 12
"""Claims between two troubles."""
ROOT = Path(__file__).resolve().parent.parent.parent
WATCHDOG = 120 + CLAIMS / 5
"""Seconds after which processes that hang have failed. Never the measure of anything."""
LONGEST_GOING = 1.0
"""Seconds for which processes go on before it is looked again whether a crash would lose something."""
CRASHES = 40
"""At most: each takes as long as hundreds of claims."""
UNFLUSHED = {"wal_writer_delay": "10s", "wal_writer_flush_after": "1GB"}
"""What does not wait for the disk stays in memory until something is durable: a crash finds more to lose."""


class Fleet:
    def __init__(self, database: Database, store: Store, folder: Path) -> None:
        self.database = database
        self.store = store
        self.chance = random.Random(CLAIMS)
        self.ledger = ClaimLedger(folder, int(LEASE.total_seconds() * 1e9))
        self.troubles: Counter[str] = Counter()
        self.jobs: list[UUID] = []
        self._cancelled: list[UUID] = []
        self._version = 0
        session = "terminate" if database.kind == "postgres" else "kill"
        self._troubles = itertools.cycle(["kill", "policy", "crash", session, "cancel", "crash", "checkpoint"])
        self._started = 0
        self._running: dict[asyncio.Task[int], Process] = {}

    async def start(self) -> None:
        self._started += 1
        ledger = self.ledger.folder / str(self._started)
        given = (self.database.kind, self.database.url, str(self._started), str(ledger))
        process = await asyncio.create_subprocess_exec(sys.executable, "-m", "tests.store.takeover", *given, cwd=ROOT)
        self._running[asyncio.create_task(process.wait())] = process

    async def run(self) -> None:
        due = TROUBLE_EVERY
        try:
            for _ in range(PROCESSES):
                await self.start()
            while self._running:
                done, _ = await asyncio.wait(self._running, timeout=0.005, return_when=asyncio.FIRST_COMPLETED)
                for each in done:
                    assert self._running.pop(each).returncode in (0, -signal.SIGKILL), "its error is on stderr"
                await self._look()
                self.ledger.read()
                if self.ledger.claims >= due:
                    due = self.ledger.claims + TROUBLE_EVERY
                    await self._trouble()
        finally:
            await self._kill_all()

    async def _kill_all(self) -> None:
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await asyncio.gather(*self._running)
        self._running.clear()

    async def _trouble(self) -> None:
        what = next(self._troubles)
        if what == "crash" and self.troubles["crash"] >= CRASHES:
            what = "kill"
        self.troubles[what] += 1
        match what:
            case "kill" if self._running:
                self.chance.choice(list(self._running.values())).kill()
                await self.start()
            case "terminate":
                async with self.database.transaction() as mine:
                    await mine.tx.execute(
                        "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() "
                        "and application_name = 'fairlane' order by random() limit 2"
                    )
            case "cancel":
                job = self.chance.choice(self.jobs)
                await _again(lambda: self.store.cancel(job))
                self._cancelled.append(job)
            case "policy":
                declared = await _again(lambda: self.store.apply(policy_of(self.chance.choice(TOTALS))))
                self._version = declared.version
            case "crash" if self.database.kind == "postgres":
                await self._crash()
            case "crash":
                await self._lose_power()
            case _:
                await _again(lambda: boards.checkpoint(self.store, QUEUE))

    async def _crash(self) -> None:
        """A backend is killed, so that the server starts again from what is flushed. Nobody goes on before we know what
        the database holds then; whoever claimed last remembers more."""
        async with self._standing_still():
            at = time.monotonic_ns()
            victim, other = await asyncpg.connect(self.database.url), await asyncpg.connect(self.database.url)
            os.kill(victim.get_server_pid(), signal.SIGKILL)
            # Until the server has noticed, it still lets people in.
            await until_found(lambda: _is_gone(other))
            await until_found(lambda: _answers(self.database.url))
            self.ledger.crash(at, await self.running())

    async def _lose_power(self) -> None:
        async with self._standing_still():
            await self._kill_all()
        at = time.monotonic_ns()
        loss = PowerLoss(Path(self.database.url))
        await self.database.close()
        loss.happen(self._is_durable)
        self.store = await self.database.open()
        self.ledger.crash(at, await self.running())
        self.ledger.end_all(at)
        for _ in range(PROCESSES):
            await self.start()

    def _is_durable(self, file: sqlite3.Connection) -> bool:
        """Whether it holds all that was acknowledged as durable."""
        states = {UUID(bytes=job): State(state) for job, state in file.execute("select id, state from jobs")}
        asked = {UUID(bytes=job) for (job,) in file.execute("select id from jobs where cancel_requested")}
        ((version,),) = file.execute("select version from queues")
        ended = {State.CANCELLED, State.DONE}
        return (
            all(states.get(job) is State.DONE for job in self.ledger.done())
            and all(job in asked or states.get(job) in ended for job in self._cancelled)
            and version >= self._version
        )

    @contextlib.asynccontextmanager
    async def _standing_still(self) -> AsyncIterator[None]:
        """Everybody is stopped, wherever they are: every other time at any moment, else once somebody has claimed what
        nobody has flushed yet."""
        stopped: list[Process] = []
        going = 0.001

        async def is_worth_it() -> bool:
            # Longer every time: processes that are stopped again at once never come to claim on a busy machine.
            nonlocal going
            _go_on(stopped)
            await asyncio.wait(self._running, timeout=going)
            going = min(1.5 * going, LONGEST_GOING)
            stopped[:] = [each for each in self._running.values() if stand_still_now(each.pid)]
            self.ledger.read()
            return not stopped or not is_held or (self.ledger.has_tail() and await self._is_unflushed())

        hold, is_held = self.ledger.folder / "hold", self.troubles["crash"] % 2 == 1
        try:
            if is_held:
                hold.touch()
            await until_found(is_worth_it, WATCHDOG)
            yield
        finally:
            hold.unlink(missing_ok=True)
            _go_on(stopped)

    async def _is_unflushed(self) -> bool:
        if self.database.kind == "sqlite-file":
            return True
        async with self.database.transaction(begin=False) as mine:
            return bool(await mine.tx.fetchval("select pg_current_wal_insert_lsn() > pg_current_wal_flush_lsn()"))

    async def _look(self) -> None:
        """By what the database holds to run, no limit is exceeded. (While it is lowered, what runs goes on.)"""
        running = Counter({lane: count for lane, state, count in await self.states() if state == State.RUNNING})
        assert max(running.values(), default=0) <= PER_ACCOUNT
        assert running.total() <= max(TOTALS)

    async def states(self) -> list[Any]:
        return await self._select("select lane, state, count(*) from jobs group by lane, state")

    async def running(self) -> set[Token]:
        """The claims that the database holds."""
        found = await self._select("select id, lease from jobs where state = 2")
        return {(_uuid(job), _uuid(lease)) for job, lease in found}

    async def ended(self) -> list[tuple[UUID, bool]]:
        """Every job that has ended, and whether it is done."""
        found = await self._select("select id, state from jobs where state in (3, 5)")
        return [(_uuid(job), State(state) is State.DONE) for job, state in found]

    async def _select(self, statement: str) -> list[Any]:
        async with self.database.transaction(begin=False) as mine:
            if self.database.kind == "postgres":
                await mine.tx.execute("set search_path to fairlane")
                return [tuple(row) for row in await mine.tx.fetch(statement)]
            return list(mine.tx.execute(statement))


def _uuid(value: Any) -> UUID:
    return value if isinstance(value, UUID) else UUID(bytes=value)


def _go_on(processes: list[Process]) -> None:
    for each in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each.pid, signal.SIGCONT)


async def _is_gone(connection: asyncpg.Connection[Any]) -> bool:
    try:
        await connection.execute("select 1")
    except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
        return True
    return False


async def _answers(url: str) -> bool:
    try:
        connection = await asyncpg.connect(url)
    except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
        return False
    await connection.close()
    return True


async def _again(act: Any) -> Any:
    """Until nobody ends our session in the middle of it."""
    while True:
        try:
            doing: Awaitable[Any] = act()
            return await doing
        except StoreUnavailable:
            continue


@pytest.fixture(params=["sqlite-file", "postgres"])
async def own_database(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Database]:
    """One that can be crashed: its server is nobody else's."""
    if request.param == "sqlite-file":
        database = Database("sqlite-file", str(tmp_path / "jobs.db"))
        yield database
        await database.close()
        return
    with ThrowawayPostgres(fsync=False, settings=UNFLUSHED) as server:
        database = Database("postgres", server.url())
        await database.connect().migrate()
        yield database
        await database.close()


@pytest.mark.slow
async def test_processes_take_over_from_one_another_and_are_killed_and_so_is_the_database(
    own_database: Database, tmp_path: Path
) -> None:
    store = await own_database.open()
    await store.declare(policy_of(TOTALS[0]))
    folder = tmp_path / "ledger"
    folder.mkdir()
    fleet = Fleet(own_database, store, folder)
    jobs = [
        job
        for number in range(CLAIMS * 2)
        for job in new_jobs(policy_of(TOTALS[0]), {"account": number % ACCOUNTS}, max_attempts=100)
    ]
    await store.enqueue(jobs)
    fleet.jobs = [job.id for job in jobs]
    async with asyncio.timeout(WATCHDOG):
        await fleet.run()
    ledger, ended, states = fleet.ledger, await fleet.ended(), Counter[State]()
    for _, state, count in await fleet.states():
        states[State(state)] += count
    happened = f"{ledger.claims:,} claims, {dict(fleet.troubles)}, {ledger.lost} claims lost"
    print(f"\n{own_database.kind}: {happened}, {dict(states)}")
    assert ledger.claims >= CLAIMS
    assert ledger.lost, "no crash has lost a claim: this shows nothing"
    assert {job for job, _ in ended} == set(fleet.jobs), "a job is lost"
    ledger.check_ends(ended)
    ledger.check_fences()
    assert ledger.most_at_once(lambda held: held.token[0]) == 1, "a job was held twice"
    assert ledger.most_at_once(lambda held: held.account) <= PER_ACCOUNT
    assert ledger.most_at_once(lambda held: None) <= max(TOTALS)
    store = fleet.store
    await _again(lambda: boards.fold(store, QUEUE))
    board = await boards.catch_up(store, QUEUE)
    found = await boards.said(store, QUEUE)
    assert boards.differences(board, found) == []
    assert [row for row in found.now.lanes if row.ready or row.in_flight] == []
    assert [row for row in found.now.gates if row.in_flight or row.waiting or row.awake] == []
    assert await store.counts(QUEUE) == QueueCounts(ready=0, running=0, parked_lanes=0, bells=0)
    accounts = {job.id: job.keys["account"] for job in jobs}
    ran = [
        (account, each.outcome)
        for job, account in accounts.items()
        for each in await store.attempts(job)
        # Given back unstarted; if somebody had asked for that meanwhile, cancelled.
        if each.outcome != "released" and each.error != GIVEN_BACK.reason
    ]
    await check_stats(store, ran)


async def check_stats(store: Store, ran: list[tuple[str | None, str]]) -> None:
    """Whoever adds up, and whoever was killed over it: every run that has ended is in the stats once."""
    while (await store.tally(QUEUE)).more:
        pass
    ended = Counter(account for account, _ in ran)
    failed = Counter(account for account, outcome in ran if outcome in ("failed", "lost"))
    page = await store.list_keys([QUEUE], ("account",), limit=ACCOUNTS + 1)
    shown = {figures.key[0]: figures for _, figures in page.keys}
    assert {key: (each.waiting, each.running) for key, each in shown.items()} == dict.fromkeys(shown, (0, 0))
    assert {key: each.done for key, each in shown.items()} == ended
    assert {key: each.failed for key, each in shown.items()} == {key: failed[key] for key in shown}
    assert all(sum(hour.done for hour in each.hours) == each.done for each in shown.values())
    minutes = (await store.minutes([QUEUE], 0))[QUEUE]
    assert sum(each.ended for each in minutes) == ended.total()
    assert sum(each.failed for each in minutes) == failed.total()
