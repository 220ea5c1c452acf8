"""Processes take a queue over from one another, under tight limits, and are killed wherever they are (J01, J02).

So is the database. PostgreSQL loses what was not flushed, and the processes remember it; of a SQLite file only a crash
of the host loses anything, and nobody is left to remember.

`FAIRLANE_TAKEOVER_CLAIMS=10000 FAIRLANE_TAKEOVER_PROCESSES=8 pytest -s -o faulthandler_timeout=0
tests/store/test_takeover.py` does it at length.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from fairlane.errors import DuplicateJob, StoreUnavailable
from fairlane.job import State
from fairlane.policy import Concurrency, Policy
from fairlane.store import records
from fairlane.store.protocol import QueueCounts, Store
from fairlane.testing.postgres import ThrowawayPostgres
from tests.model import boards
from tests.store.claim_ledger import ClaimLedger, Limits
from tests.store.harness import Database, new_jobs
from tests.store.lost_power import PowerLoss
from tests.store.nursery import Nursery
from tests.store.takeover import CLOSING, GIVEN_BACK, HOLD, LEASE, QUEUE, TOTALS, policy_of
from tests.store.witness import attend, ended_in, read_moves, set_fault, uuid_of
from tests.waiting import until_found

CLAIMS = int(os.environ.get("FAIRLANE_TAKEOVER_CLAIMS", "300"))
PROCESSES = int(os.environ.get("FAIRLANE_TAKEOVER_PROCESSES", "4"))
ACCOUNTS = 12
WARNING_EVERY = 12
"""Claims between two warnings."""
FEED_EVERY, FEED = 20, 100
"""Claims between two looks whether jobs are short, and how many are enqueued then: more than these can have taken."""
REST = 0.01
"""Seconds between two looks at what processes have written."""
PROGRESS_EVERY = 10.0
"""Seconds between two lines about a long run."""
WATCHDOG = 120 + CLAIMS / 5
"""Seconds after which processes that hang have failed. Never the measure of anything."""
LONGEST_GOING = 1.0
"""Seconds for which processes go on before it is looked again whether a crash would lose something."""
POWER_LOSSES = 40
"""At most: each kills everybody, and takes as long as hundreds of claims."""
USED_AGAIN = 4
"""Claims after a crash: it has lost no more, as a rule."""
CANCELS = "select id, state, cancel_requested from jobs"
UNFLUSHED = {"wal_writer_delay": "10s", "wal_writer_flush_after": "1GB"}
"""What does not wait for the disk stays in memory until something is durable: a crash finds more to lose."""


class Fleet:
    def __init__(self, database: Database, store: Store, nursery: Nursery, folder: Path) -> None:
        self.database = database
        self.store = store
        self.chance = random.Random(CLAIMS)
        self.ledger = ClaimLedger(int(LEASE.total_seconds() * 1e9))
        self.warnings: Counter[str] = Counter()
        self.accounts: dict[UUID, str] = {}
        """Of every job, in the order in which they were enqueued."""
        self.cancelled: set[UUID] = set()
        self.starts = 0
        self.boards_checked = 0
        self._nursery = nursery
        self._folder = folder
        self._version = 0
        self._fed_at = 0
        session = "terminate" if database.kind == "postgres" else "kill"
        self._warnings = itertools.cycle(["kill", "policy", "crash", session, "fault", "cancel", "crash", "checkpoint"])
        self._phases = itertools.cycle(["claiming", "settling", "claiming", "at something else"])

    def start(self) -> None:
        self.starts += 1
        path = self._folder / str(self.starts)
        pid = self._nursery.start(self.database.kind, self.database.url, str(self.starts), str(path))
        self.ledger.follow(pid, path)

    async def run(self) -> None:
        due, began = WARNING_EVERY, time.monotonic()
        told = began
        for _ in range(PROCESSES):
            self.start()
        while self._nursery.alive:
            await self._nursery.until_one_ends(REST)
            self._bury()
            self.ledger.read()
            if self.ledger.claims >= CLAIMS:
                (self._folder / CLOSING).touch()
                continue
            await self._feed()
            if self.ledger.claims >= due:
                due = self.ledger.claims + WARNING_EVERY
                await self._trouble()
            if time.monotonic() > told + PROGRESS_EVERY:
                told = time.monotonic()
                print(f"{told - began:.0f} s: {self}", flush=True)

    def __str__(self) -> str:
        ledger = self.ledger
        return (
            f"{self.database.kind}: {ledger.claims:,} of {CLAIMS:,} claims ({ledger.asks:,} asked), "
            f"{len(self.accounts):,} jobs, {self.starts} processes, {self.boards_checked} boards checked, "
            + ", ".join(f"{count} {what}" for what, count in sorted(self.warnings.items()))
        )

    def _bury(self) -> None:
        for pid, status in self._nursery.ended().items():
            self.ledger.leave(pid)
            assert status in (0, -signal.SIGKILL), "its error is on stderr"

    async def _feed(self) -> None:
        if self.ledger.claims < self._fed_at + FEED_EVERY:
            return
        self._fed_at = self.ledger.claims
        counts = await _again(lambda: self.store.counts(QUEUE))
        if counts.ready < FEED:
            await self.enqueue(FEED)

    async def enqueue(self, count: int) -> None:
        began = time.monotonic_ns()
        policy, first = policy_of(TOTALS[0]), len(self.accounts)
        jobs = [
            job
            for number in range(first, first + count)
            for job in new_jobs(policy, {"account": number % ACCOUNTS}, max_attempts=100)
        ]
        with contextlib.suppress(DuplicateJob):  # it has landed, and nobody heard of it
            await _again(lambda: self.store.enqueue(jobs))
        self.accounts |= {job.id: str(job.keys["account"]) for job in jobs}
        self.ledger.durable.append((began, time.monotonic_ns()))

    async def _trouble(self) -> None:
        what = next(self._warnings)
        if what == "crash" and self.database.kind == "sqlite-file" and self.warnings["crash"] >= POWER_LOSSES:
            what = "kill"
        self.warnings[what] += 1
        match what:
            case "kill":
                await self._kill(next(self._phases))
                self.start()
            case "terminate":
                async with self.database.transaction() as mine:
                    await mine.tx.execute(
                        "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() "
                        "and application_name = 'fairlane' order by random() limit 2"
                    )
            case "fault":
                await self._fail()
            case "cancel":
                job = self.chance.choice(list(self.accounts)[-2 * FEED :])
                await _again(lambda: self.store.cancel(job))
                self.cancelled.add(job)
            case "policy":
                declared = await _again(lambda: self.store.apply(policy_of(self.chance.choice(TOTALS))))
                self._version = declared.version
            case "crash" if self.database.kind == "postgres":
                await self._crash()
            case "crash":
                await self._lose_power()
            case _:
                await _again(lambda: boards.checkpoint(self.store, QUEUE))

    async def _kill(self, phase: str) -> None:
        """Kill somebody in the middle of a claim, or of a settlement."""

        async def is_killed() -> bool:
            await self._feed()  # everybody goes on meanwhile
            pid = self.chance.choice(sorted(self._nursery.alive))
            is_there = self._nursery.stop(pid) and self.ledger.phase(pid) == phase
            if is_there:
                self._nursery.kill(pid)
                self.warnings[f"kill while {phase}"] += 1
            self._nursery.go_on(pid)
            return is_there

        await until_found(is_killed, WATCHDOG)

    async def _fail(self) -> None:
        """Claims fail after their plan and before their commit, until a few have."""
        enough = self.ledger.failures + 3

        async def have_failed() -> bool:
            self.ledger.read()
            return self.ledger.failures >= enough

        await set_fault(self.database, self.chance.choice([1, 2]))
        try:
            await until_found(have_failed, WATCHDOG)
        finally:
            await set_fault(self.database, None)

    async def _crash(self) -> None:
        """A backend is killed, so that the server starts again from what is flushed. Nobody goes on before that;
        whoever claimed last remembers more than the database."""
        async with self._standing_still():
            self.ledger.crashes.append(time.monotonic_ns())
            victim, other = await asyncpg.connect(self.database.url), await asyncpg.connect(self.database.url)
            os.kill(victim.get_server_pid(), signal.SIGKILL)
            # Until the server has noticed, it still lets people in.
            await until_found(lambda: _is_gone(other))
            await until_found(lambda: _answers(self.database.url))
            if self.warnings["crash"] % 4 >= 2:
                await self.check_board()
            if self.warnings["crash"] % 3:  # else whoever remembers too much may be the first to claim
                await self._go_on_without(self.ledger.last_claimer())

    async def _go_on_without(self, late: int) -> None:
        """The numbers of changes that were lost are used again before the one who remembers them comes back."""
        (self._folder / HOLD).unlink(missing_ok=True)
        self._go_on([pid for pid in self._nursery.alive if pid != late])
        enough = self.ledger.claims + USED_AGAIN

        async def are_used_again() -> bool:
            self.ledger.read()
            return self.ledger.claims >= enough

        await until_found(are_used_again, WATCHDOG)

    async def _lose_power(self) -> None:
        async with self._standing_still():
            self._nursery.kill_all()
        self._bury()
        self.ledger.crashes.append(time.monotonic_ns())
        loss = PowerLoss(Path(self.database.url))
        await self.database.close()
        loss.happen(self._is_durable)
        self.store = await self.database.open()
        await self.check_board()
        for _ in range(PROCESSES):
            self.start()

    def _is_durable(self, file: sqlite3.Connection) -> bool:
        """Whether it holds all that was acknowledged as durable."""
        found = {UUID(bytes=job): (State(state), bool(asked)) for job, state, asked in file.execute(CANCELS)}
        ((version,),) = file.execute("select version from queues")
        return (
            self.accounts.keys() <= found.keys()
            and self.ledger.settled() <= ended_in(file)
            and all(found[job][0].is_final or found[job][1] for job in self.cancelled)
            and version >= self._version
        )

    @contextlib.asynccontextmanager
    async def _standing_still(self) -> AsyncIterator[None]:
        """Everybody is stopped, wherever they are: every other time at any moment, else once somebody has claimed what
        nobody has flushed yet."""
        stopped: list[int] = []
        going = 0.001

        async def is_worth_it() -> bool:
            # Longer every time: processes that are stopped again at once never come to claim on a busy machine.
            nonlocal going
            self._go_on(stopped)
            await self._nursery.until_one_ends(going)
            going = min(1.5 * going, LONGEST_GOING)
            stopped[:] = [pid for pid in sorted(self._nursery.alive) if self._nursery.stop(pid)]
            self.ledger.read()
            return not is_held or (self.ledger.has_tail() and await self._is_unflushed())

        hold, is_held = self._folder / HOLD, self.warnings["crash"] % 2 == 1
        try:
            if is_held:
                hold.touch()
            await until_found(is_worth_it, WATCHDOG)
            yield
        finally:
            hold.unlink(missing_ok=True)
            self._go_on(stopped)

    def _go_on(self, pids: list[int]) -> None:
        for pid in pids:
            self._nursery.go_on(pid)

    async def _is_unflushed(self) -> bool:
        if self.database.kind == "sqlite-file":
            return True
        async with self.database.transaction(begin=False) as mine:
            return bool(await mine.tx.fetchval("select pg_current_wal_insert_lsn() > pg_current_wal_flush_lsn()"))

    async def check_board(self) -> boards.Said:
        """While nobody else is at it: the board that we remember is what the database says, and that is what a count of
        the jobs gives."""
        await _again(lambda: boards.fold(self.store, QUEUE))
        board = await _again(lambda: boards.catch_up(self.store, QUEUE))
        found: boards.Said = await _again(lambda: boards.said(self.store, QUEUE))
        wrong = boards.differences(board, found) + boards.miscounts(found)
        assert not wrong, "\n".join(wrong)
        self.boards_checked += 1
        return found

    async def states(self) -> dict[UUID, State]:
        """Every job that the database has."""
        jobs = "jobs" if self.database.kind == "sqlite-file" else "fairlane.jobs"
        async with self.database.transaction(begin=False) as mine:
            statement = f"select id, state from {jobs}"
            found = mine.tx.execute(statement) if jobs == "jobs" else await mine.tx.fetch(statement)
            return {uuid_of(job): State(state) for job, state in found}


def limits_of(policy: str) -> Limits:
    by_account, total = (each for each in Policy.decode(policy).limits if isinstance(each, Concurrency))
    return int(by_account.max), int(total.max)


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
    await attend(own_database)
    folder = tmp_path / "ledger"
    folder.mkdir()
    with Nursery("tests.store.takeover", "run") as nursery:
        fleet = Fleet(own_database, store, nursery, folder)
        await fleet.enqueue(2 * FEED)
        async with asyncio.timeout(WATCHDOG):
            await fleet.run()
    ledger, store, moves, states = fleet.ledger, fleet.store, await read_moves(own_database), await fleet.states()
    account = ledger.check(moves, fleet.accounts, limits_of)
    print(f"\n{fleet}\n{account}, {dict(Counter(states.values()))}")
    assert ledger.claims >= CLAIMS
    assert account.lost, "no crash has lost a claim: this shows nothing"
    assert states.keys() == fleet.accounts.keys(), "a job is lost"
    done = {move.job for move in moves if move.state == State.DONE}
    assert {job for job, state in states.items() if state is State.DONE} == done
    cancelled = states.keys() - done
    assert {states[job] for job in cancelled} <= {State.CANCELLED}
    assert cancelled <= fleet.cancelled
    found = await fleet.check_board()
    assert [row for row in found.now.lanes if row.ready or row.in_flight] == []
    assert [row for row in found.now.gates if row.in_flight or row.waiting or row.awake] == []
    assert await store.counts(QUEUE) == QueueCounts(ready=0, running=0, parked_lanes=0, events=0)
    ran: list[tuple[str | None, str]] = [
        (account, each.outcome)
        for job, account in fleet.accounts.items()
        for each in await store.run(records.attempts(job))
        # Given back unstarted; if somebody had asked for that meanwhile, cancelled.
        if each.outcome != "released" and each.error != GIVEN_BACK.reason
    ]
    await check_stats(store, ran)


async def check_stats(store: Store, ran: list[tuple[str | None, str]]) -> None:
    """Whoever adds up, and whoever was killed over it: every run that has ended is in the stats once."""
    while (await store.add_up(QUEUE)).more:
        pass
    ended = Counter(account for account, _ in ran)
    failed = Counter(account for account, outcome in ran if outcome in ("failed", "lost"))
    page = await store.ask(lambda moment: moment.list_keys([QUEUE], ("account",), limit=ACCOUNTS + 1))
    shown = {stats.key[0]: stats for _, stats in page.keys}
    assert {key: (each.waiting, each.running) for key, each in shown.items()} == dict.fromkeys(shown, (0, 0))
    assert {key: each.ended for key, each in shown.items()} == ended
    assert {key: each.failed for key, each in shown.items()} == {key: failed[key] for key in shown}
    assert all(sum(hour.ended for hour in each.hours) == each.ended for each in shown.values())
    minutes = (await store.ask(lambda moment: moment.minutes([QUEUE], 0)))[QUEUE]
    assert sum(each.ended for each in minutes) == ended.total()
    assert sum(each.failed for each in minutes) == failed.total()
