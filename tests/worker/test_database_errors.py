"""Errors of the database in the loops of a worker: what is not the program's own fault is ridden out, in every loop."""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from fairlane import App, Concurrency, State
from fairlane import waits as timing
from fairlane.clock import ManualClock
from fairlane.errors import StoreUnavailable, WorkerDied
from fairlane.forward import Message
from fairlane.store.faults import Fault, of_sqlite, of_sqlstate, remedy_for
from fairlane.store.sqlite import SqliteStore
from fairlane.worker import WorkerOptions, upkeep
from tests.forward.paper import PaperForwarder, dispatching
from tests.waiting import PATIENCE, until, until_found
from tests.worker.harness import WatchedStore, reaches, working

LOOPS = (
    "settling",
    "leases",
    "listening",
    "claiming",
    "reaping",
    "pruning",
    "collecting",
    "auditing",
    "schedules",
    "partitions",
    "adding up",
    "reporting",
)
OURS = {"21", "22", "23", "3F", "42", "44", "54"}
"""Classes that say that the program, or what it was given, is wrong."""
CODES = sorted(
    each.sqlstate
    for each in vars(asyncpg.exceptions).values()
    if isinstance(each, type) and issubclass(each, asyncpg.PostgresError) and each.sqlstate
)
RIDDEN_OUT = [code for code in CODES if code[:2] not in OURS and code != "00000"] + ["42501", "42P05", "ZZ999"]
ONE_OF_EACH_CLASS = sorted({code[:2]: code for code in reversed(RIDDEN_OUT)}.values())
IS_THOROUGH = bool(os.environ.get("FAIRLANE_EVERY_SQLSTATE"))
"""Every code in every loop takes an hour."""
TIMES = 3
ASKS = ("execute", "fetch", "fetchrow", "fetchval", "add_listener")


class Injector:
    """Has the server itself raise an error where a loop asks it something: some times in each loop that was named."""

    def __init__(self) -> None:
        self._code = ""
        self._due: Counter[str] = Counter()
        self.raised: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()
        """What each loop was told since."""

    def arm(self, code: str, loops: tuple[str, ...] = LOOPS) -> None:
        self._code, self._due = code, Counter(dict.fromkeys(loops, TIMES))
        self.raised.clear()
        self.answered.clear()

    def wrapped(self, method: Any) -> Any:
        async def ask(connection: asyncpg.Connection[Any], *given: Any, **named: Any) -> Any:
            task = asyncio.current_task()
            loop = "" if task is None else task.get_name().removeprefix("fairlane-")
            # In a session that is still being set up, whatever goes wrong is about the way to the server.
            if self._due[loop] and getattr(connection, "backend", 1):
                self._due[loop] -= 1
                self.raised[loop] += 1
                await self._raise(connection)
            answer = await method(connection, *given, **named)
            if self.raised[loop] == TIMES:
                self.answered[loop] += 1
            return answer

        return ask

    async def _raise(self, connection: asyncpg.Connection[Any]) -> None:
        raising = f"do $$ begin raise exception 'injected' using errcode = '{self._code}'; end $$"
        await asyncpg.Connection.execute.__wrapped__(connection, raising)  # type: ignore[attr-defined]


@pytest.fixture
def injector(monkeypatch: pytest.MonkeyPatch) -> Injector:
    injector = Injector()
    for module in (timing, upkeep):  # nobody else has to come back
        monkeypatch.setattr(module, "REJOINED_WITHIN", 0.05, raising=False)
    for name in ASKS:
        original = getattr(asyncpg.Connection, name)
        wrapped = injector.wrapped(original)
        wrapped.__wrapped__ = original
        monkeypatch.setattr(asyncpg.Connection, name, wrapped)
    return injector


GOING: ContextVar[asyncio.Event] = ContextVar("GOING")


@pytest.fixture
async def app(postgres_url: str, clock: ManualClock) -> AsyncIterator[App]:
    app = App(postgres_url, clock=clock)
    app.queue("webhooks", limits=[Concurrency(5)])

    @app.task(queue="webhooks", name="deliver")
    async def deliver(number: int) -> int:
        await GOING.get().wait()
        return number

    app.schedule(deliver.call(0), every="1h", name="hourly")
    yield app
    await app.close()


async def work_through(app: App, clock: ManualClock, injector: Injector, code: str, loops: tuple[str, ...]) -> None:
    """Run some jobs while the server raises the error once in each of these loops."""
    deliver = app.registry.find("deliver")
    assert deliver is not None
    jobs = [await deliver.enqueue(number) for number in range(5)]
    injector.arm(code, loops)
    going = asyncio.Event()
    GOING.set(going)
    async with working(app, lease="10m", concurrency=2) as worker:

        def is_over(*loops: str) -> bool:
            clock.advance("1s")  # every loop comes round
            return all(injector.answered[loop] for loop in loops) or not worker.health().is_well

        # Leases are renewed while something runs, and settled once it has ended.
        await until(lambda: is_over(*(loop for loop in loops if loop != "settling")))
        going.set()
        await until(lambda: is_over(*loops))
        assert worker.health().is_well, worker.health().loops
        for job in jobs:
            await reaches(job, State.DONE)
        await until(lambda: worker.health().is_connected)
    assert worker.left_unsettled == 0
    assert [len(await job.attempts()) for job in jobs] == [1] * 5


# L22
@pytest.mark.parametrize("code", RIDDEN_OUT if IS_THOROUGH else ONE_OF_EACH_CLASS)
async def test_no_loop_ends_and_no_outcome_is_lost_by_an_error_that_is_not_the_programs_fault(
    app: App, clock: ManualClock, injector: Injector, code: str
) -> None:
    await work_through(app, clock, injector, code, LOOPS)


# L22
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("code", RIDDEN_OUT if IS_THOROUGH else ["40001", "55P03", "55000"])
async def test_each_loop_survives_every_such_error(
    app: App, clock: ManualClock, injector: Injector, code: str, loop: str
) -> None:
    await work_through(app, clock, injector, code, (loop,))


# L22
@pytest.mark.parametrize("code", ["42601", "42P01", "42883", "22003", "23514", "54000"])
async def test_an_error_that_is_the_programs_own_fault_ends_the_worker_loudly(
    app: App, injector: Injector, caplog: pytest.LogCaptureFixture, code: str
) -> None:
    injector.arm(code, ("claiming",))
    worker = await app.worker(WorkerOptions())
    with caplog.at_level(logging.CRITICAL), pytest.raises(WorkerDied, match=r"claiming: .*injected"):
        async with asyncio.timeout(PATIENCE):
            await worker.run()
    assert "the worker's loop 'claiming' died" in caplog.text


@pytest.mark.parametrize("code", CODES)
def test_only_what_is_known_to_be_the_programs_fault_is_its_fault(code: str) -> None:
    is_ours = code[:2] in OURS and code not in ("42501", "42P05")
    assert (of_sqlstate(code) is Fault.OURS) is is_ours
    assert remedy_for(code)


@pytest.mark.parametrize("code", [None, "", "ZZ999", "57P99", "08P99"])
def test_a_code_that_nobody_has_seen_is_an_outage(code: str | None) -> None:
    assert of_sqlstate(code) is Fault.AWAY
    assert remedy_for(code)


def sqlite_error(kind: type[sqlite3.Error], code: int | None) -> sqlite3.Error:
    error = kind("injected")
    if code is not None:
        error.sqlite_errorcode = code
    return error


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (sqlite_error(sqlite3.OperationalError, sqlite3.SQLITE_BUSY), Fault.AWAY),
        (sqlite_error(sqlite3.OperationalError, sqlite3.SQLITE_BUSY_SNAPSHOT), Fault.AWAY),
        (sqlite_error(sqlite3.OperationalError, sqlite3.SQLITE_LOCKED), Fault.AWAY),
        (sqlite_error(sqlite3.OperationalError, sqlite3.SQLITE_FULL), Fault.AWAY),
        (sqlite_error(sqlite3.OperationalError, sqlite3.SQLITE_IOERR_WRITE), Fault.AWAY),
        (sqlite_error(sqlite3.OperationalError, sqlite3.SQLITE_READONLY), Fault.AWAY),
        (sqlite_error(sqlite3.OperationalError, sqlite3.SQLITE_CANTOPEN), Fault.AWAY),
        (sqlite_error(sqlite3.DatabaseError, sqlite3.SQLITE_CORRUPT), Fault.AWAY),
        (OSError("the lock file"), Fault.AWAY),
        (sqlite_error(sqlite3.OperationalError, sqlite3.SQLITE_ERROR), Fault.OURS),
        (sqlite_error(sqlite3.IntegrityError, sqlite3.SQLITE_CONSTRAINT_UNIQUE), Fault.OURS),
        (sqlite_error(sqlite3.DataError, sqlite3.SQLITE_TOOBIG), Fault.OURS),
        (sqlite_error(sqlite3.ProgrammingError, None), Fault.OURS),
        (StoreUnavailable("told already"), None),
        (KeyError("no error of a database"), None),
    ],
)
def test_an_error_of_sqlite_is_judged_by_its_code(error: Exception, fault: Fault | None) -> None:
    assert of_sqlite(error) is fault


# L22
@pytest.mark.parametrize("code", [sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL])
async def test_a_sqlite_worker_rides_out_what_its_disk_does(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    app = App(f"sqlite:///{tmp_path / 'jobs.db'}", clock=clock)

    @app.task
    async def work() -> int:
        return 1

    async with app, working(app, concurrency=2) as worker:
        store = await app.opened()
        assert isinstance(store, SqliteStore)
        real, failures = store._database._set_durable, [0]

        def fail(connection: sqlite3.Connection, durable: bool) -> None:
            failures[0] += 1
            kind = sqlite3.DatabaseError if code == sqlite3.SQLITE_CORRUPT else sqlite3.OperationalError
            raise sqlite_error(kind, code)

        monkeypatch.setattr(store._database, "_set_durable", fail)
        with pytest.raises(StoreUnavailable, match="refused: injected"):
            await work.enqueue()

        def has_failed() -> bool:
            clock.advance("10s")
            return failures[0] > 5

        await until(has_failed)
        assert worker.health().is_well, worker.health().loops
        assert not worker.health().is_connected
        monkeypatch.setattr(store._database, "_set_durable", real)
        await reaches(await work.enqueue(), State.DONE)


# L22
async def test_tables_that_another_session_locks_cost_no_outcome_under_a_lock_timeout(postgres_url: str) -> None:
    admin = await asyncpg.connect(postgres_url)
    name = await admin.fetchval("select current_database()")
    await admin.execute(f"alter database {name} set lock_timeout = '50ms'")
    app, going = App(postgres_url), asyncio.Event()

    @app.task
    async def work(number: int) -> int:
        await going.wait()
        return number

    async with app, working(app, concurrency=10, lease="1s") as worker:
        jobs = [await work.enqueue(number) for number in range(7)]
        for job in jobs:
            await reaches(job, State.RUNNING)
        async with admin.transaction():
            await admin.execute("lock table fairlane.jobs, fairlane.leases in access exclusive mode")
            going.set()
            await until(lambda: worker.health().unsettled == 7)
            await until(lambda: not worker.health().is_connected)
            await until(lambda: "renewing leases" in worker._outage._failing)
            assert worker.health().is_well, worker.health().loops
        for job in jobs:
            await reaches(job, State.DONE)
        assert worker.health().is_well, worker.health().loops
    assert (worker.left_unsettled, [len(await job.attempts()) for job in jobs]) == (0, [1] * 7)
    await app.close()
    await admin.close()


# L22
async def test_a_database_that_admits_nobody_for_a_while_ends_no_loop(postgres_url: str) -> None:
    app = App(postgres_url)

    @app.task
    async def work() -> int:
        return 1

    admin = await asyncpg.connect(postgres_url.rpartition("/")[0] + "/postgres")
    name = postgres_url.rpartition("/")[2]
    async with app, working(app) as worker:
        await until(lambda: worker.health().loops.get("reporting") == "running")
        await reaches(await work.enqueue(), State.DONE)
        await admin.execute(f"alter database {name} allow_connections false")
        await admin.execute("select pg_terminate_backend(pid) from pg_stat_activity where datname = $1", name)
        await until(lambda: not worker.health().is_connected)
        with pytest.raises(StoreUnavailable, match=r"SQLSTATE 55000.*allow_connections true"):
            await work.enqueue()
        assert worker.health().is_well, worker.health().loops
        await admin.execute(f"alter database {name} allow_connections true")

        async def runs() -> bool:
            try:
                await reaches(await work.enqueue(), State.DONE)
            except StoreUnavailable:
                return False
            return True

        await until_found(runs)
        assert worker.health().is_well, worker.health().loops
    await admin.close()


# L22, L09
async def test_an_outcome_that_the_database_refuses_for_long_does_not_keep_the_others_from_being_recorded(
    watched: tuple[App, WatchedStore], clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    (app, store), going = watched, asyncio.Event()

    @app.task
    async def work(number: int) -> int:
        await going.wait()
        return number

    async with app, working(app, concurrency=10) as worker:
        jobs = [await work.enqueue(number) for number in range(9)]
        bad, real = jobs[4].id, store.real.settle

        async def settle(settlements: Any, **named: Any) -> Any:
            if any(each.job == bad for each in settlements):
                raise StoreUnavailable("a block of the disk cannot be read")
            return await real(settlements, **named)

        store.real.settle = settle  # type: ignore[method-assign]
        going.set()
        for job in jobs:
            if job.id != bad:
                await reaches(job, State.DONE)
        await until(lambda: worker.health().unsettled == 1)
        assert not worker.health().is_connected
        store.real.settle = real  # type: ignore[method-assign]
        await reaches(jobs[4], State.DONE)
        await until(lambda: worker.health().is_connected)
    assert worker.left_unsettled == 0


# L22
async def test_an_outcome_is_sent_again_until_its_lease_is_gone(
    watched: tuple[App, WatchedStore], clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    app, store = watched

    @app.task
    async def work() -> int:
        return 1

    async with app:
        job = await work.enqueue()
        store.lose("settle")
        async with working(app, concurrency=1) as worker:
            await store.called("settle", 3)
            assert worker.health().unsettled == 1
            real = store.real.renew

            async def renew(leases: Any, lease: Any) -> Any:
                renewed = await real(leases, lease)
                return type(renewed)(list(leases), renewed.cancelled)

            store.real.renew = renew  # type: ignore[method-assign]

            def is_gone() -> bool:
                clock.advance("10s")
                return worker.health().unsettled == 0

            await until(is_gone)
            store.restore()
    assert f"job {job.id}: its outcome (done) could not be recorded before its lease was gone" in caplog.text


def double(number: int) -> int:
    return 2 * number


async def message_of(forwarder: PaperForwarder, job: UUID) -> Message:
    await until(lambda: any(message.id == job for message in forwarder.messages))
    return next(message for message in forwarder.messages if message.id == job)


# L22
@pytest.mark.parametrize("code", ["08006", "40001", "55P03", "55000", "ZZ999"])
async def test_a_dispatcher_survives_such_an_error_in_each_of_its_loops(
    postgres_url: str, clock: ManualClock, injector: Injector, code: str
) -> None:
    app = App(postgres_url, clock=clock)
    app.queue("emails", limits=[Concurrency(2)])
    forwarder = PaperForwarder(app)
    task = forwarder.task(double, queue="emails")
    async with app:
        jobs = [await task.enqueue(number) for number in range(4)]
        loops = ("claiming", "leases", "listening", "messages", "reaping")
        injector.arm(code, loops)
        async with dispatching(forwarder, lease="10m") as dispatcher:

            def is_over() -> bool:
                clock.advance("1s")
                return all(injector.answered[loop] for loop in loops) or not dispatcher.health().is_well

            await until(is_over)
            assert dispatcher.health().is_well, dispatcher.health().loops
            for number, job in enumerate(jobs):
                assert await forwarder.deliver(await message_of(forwarder, job.id)) == 2 * number
                assert await job.status() is State.DONE
