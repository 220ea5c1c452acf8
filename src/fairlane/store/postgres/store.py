"""The PostgreSQL store: what every store does, on one database for a whole fleet."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Generator, Sequence
from datetime import timedelta
from inspect import isawaitable
from operator import attrgetter
from typing import Any, Literal, TypeVar
from uuid import UUID
from weakref import WeakSet

from asyncpg import Record
from asyncpg.pool import PoolConnectionProxy

from fairlane.clock import Clock, Instant, microseconds
from fairlane.errors import ConfigurationError
from fairlane.job import Claim, JobRecord, NewJob
from fairlane.policy.unique import Conflict
from fairlane.scheduler.settlement import Settlement
from fairlane.store import policies
from fairlane.store.boards import QueueTime
from fairlane.store.health import ConnectionLimit, Health, HorizonHolder, PostgresHealth, TableHealth
from fairlane.store.postgres import jobs
from fairlane.store.postgres.caller_transactions import callers_connection, check_types, speaking
from fairlane.store.postgres.claims import Claimer, QueueHandle, Scheduling
from fairlane.store.postgres.connections import (
    STATEMENTS,
    Connection,
    Connections,
    StoreClock,
    answer,
    driven,
    hang_up,
    perform,
)
from fairlane.store.postgres.jobs import InsertBatcher
from fairlane.store.postgres.settlements import Settler, claims_beside
from fairlane.store.postgres.wakeups import PostgresListener, ResultListener
from fairlane.store.procedures import Enqueue, OnBoard, Procedure, Question, StoreValue, Work
from fairlane.store.protocol import (
    Asked,
    Claimed,
    Landings,
    Listener,
    Looked,
    Reaped,
    Renewed,
    Store,
    WorkerIdentity,
)
from fairlane.store.rows import no_such_queue
from fairlane.store.scripts import Schema

T = TypeVar("T")

Isolation = Literal["repeatable_read"] | None
HOLDERS = 10
"""Of old snapshots, the longest held."""
SCHEMA = Schema.of("postgresql")


class Driver:
    """Answers a procedure on one connection; with the boards of queues whose claim locks it holds."""

    def __init__(
        self,
        connection: Connection,
        clock: StoreClock,
        locked: Sequence[Scheduling],
        numbers: dict[str, int],
        memory: dict[Any, Any],
    ) -> None:
        self._connection = connection
        self._clock = clock
        self._boards = {board.queue.name: board for board in locked}
        self._numbers = numbers
        """Of queues that are known: they never change."""
        self._memory = memory
        self._moment: Instant | None = None
        """Whatever is asked after the time is of that time."""

    async def perform(self, procedure: Procedure[T]) -> T:
        return await driven(procedure, self.answer)

    async def answer(self, asked: Question) -> Any:
        connection = self._connection
        match asked:
            case Enqueue(new):
                queues = {name: await self._number(name) for name in {job.queue for job in new}}
                # As in a caller's transaction: it ends later than the statement.
                return await jobs.insert(connection, new, queues, self._now, is_callers=True)
            case OnBoard(queue, "number"):
                return await self._number(queue)
            case OnBoard(queue, action, parameters):
                found: Any = attrgetter(action)(await self._board(queue))(*parameters)
                if isinstance(found, Generator):
                    return await self.perform(found)
                return await found if isawaitable(found) else found
            case StoreValue("now"):
                return self._now
            case StoreValue("time"):
                return await self._time()
            case StoreValue():
                return self._memory
        return await answer(connection, asked)

    @property
    def _now(self) -> Instant | None:
        return self._clock.parameter() if self._moment is None else self._moment

    async def _time(self) -> QueueTime:
        time = self._clock.given()
        if time is None:
            time = QueueTime(*await self._connection.fetchrow(STATEMENTS["select_time"], None) or (0, 0))
        self._moment = time.now
        return time

    async def _board(self, queue: str) -> Scheduling:
        """A look at a queue's board, where its lock is not held."""
        if queue not in self._boards:
            number = await self._number(queue) if queue else 0
            handle = QueueHandle(queue, number, "", "", "", "")
            self._boards[queue] = Scheduling(self._connection, handle, self._now)
        return self._boards[queue]

    async def _number(self, queue: str) -> int:
        if queue not in self._numbers:
            number: int | None = await self._connection.fetchval(STATEMENTS["select_queue_id"], queue)
            if number is None:
                raise no_such_queue(queue)
            self._numbers[queue] = number
        return self._numbers[queue]


class PostgresStore(Store):
    """Jobs in a PostgreSQL database, in a schema of their own. Its time is the database's, unless a clock is given."""

    def __init__(
        self,
        url: str,
        *,
        clock: Clock | None = None,
        durable_claims: bool = False,
        application_name: str = "fairlane",
    ) -> None:
        self._connections = Connections(url, application_name)
        self._clock = StoreClock(clock)
        self._claimer = Claimer(
            self._connections,
            self._clock,
            durable=durable_claims,
            add_up=self._add_some_up,
            end_overrides=lambda queue: self.run(policies.end_expired(queue)),
        )
        self._settler = Settler(self._connections, self._clock, self._queue_number, self._claimer.piggyback)
        self._queue_numbers: dict[str, int] = {}
        self._batcher = InsertBatcher(self._connections, self._clock, self._queue_numbers)
        self._memory: dict[Any, Any] = {}
        self._database: Record | None = None
        self._known: WeakSet[Any] = WeakSet()
        """Connections of callers that were found to be to our database."""
        self._results = ResultListener(self._connections, self.job, self._clock.sleep_until)

    async def open(self) -> None:
        await self._connections.open()
        self._results.open()
        try:
            async with self._connections.session() as connection:
                await perform(connection, SCHEMA.require_current().make())
                if self._clock.given() is not None:
                    stored = await connection.fetchrow(STATEMENTS["select_stored_time"])
                    assert stored is not None
                    self._clock.learn(*stored)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        await self._results.close()
        await self._claimer.close()
        await self._connections.close()
        self._results.dismiss()

    async def migrate(self) -> list[str]:
        connection = await self._connections.connect()
        try:
            with self._connections.in_use(connection):
                async with connection.transaction():
                    return await perform(connection, SCHEMA.migrate().make())
        finally:
            await hang_up(connection)

    async def _ask(self, question: Callable[[Connection], Awaitable[T]]) -> T:
        """Ask what may be asked twice: a session that the server has ended meanwhile is not the caller's concern."""
        return await self._connections.again(lambda connection, _: question(connection))

    async def time(self) -> QueueTime:
        return self._clock.given() or await self._asked("select_time", None)

    async def keep_time(self) -> QueueTime:
        given = self._clock.given()
        if given is not None:
            await self._asked("keep_given_time", given.now, given.ahead)
            return given
        found = await self._asked("keep_time", *self._clock.expected())
        self._clock.kept(found.now)
        return found

    async def _asked(self, statement: str, *given: Instant | None) -> QueueTime:
        found = await self._ask(lambda connection: connection.fetchrow(STATEMENTS[statement], *given))
        assert found is not None
        self._clock.observe(found["now"])
        return QueueTime(*found)

    async def enqueue(
        self, new: Sequence[NewJob], tx: Any = None, progress: Callable[[int], None] | None = None
    ) -> dict[UUID, Conflict]:
        if not new:
            return {}
        progress = progress or (lambda _: None)
        queues = self._queue_numbers
        for job in new:
            if job.queue not in queues:
                queues[job.queue] = await self._queue_number(job.queue)
        now = self._clock.parameter()
        if tx is not None:
            async with self._lent(tx) as connection:
                return await jobs.insert(connection, new, queues, now, is_callers=True, progress=progress)
        # A unique key or an id of one's own may have to wait for another transaction, and others not with it.
        if len(new) == 1 and new[0].unique is None and not new[0].is_named:
            await self._batcher.store(new[0])
            progress(1)
            return {}
        return await self._connections.again(
            lambda connection, is_repeated: jobs.insert(
                connection, new, queues, now, is_callers=False, is_repeated=is_repeated, progress=progress
            )
        )

    async def _understood(self, connection: Connection) -> Connection:
        """A caller's connection, if it is to our database: jobs in another one would be stored, and never found."""
        known = getattr(connection, "driver", connection)
        is_proxy = isinstance(known, PoolConnectionProxy)  # from a pool: a new one at every use
        if not is_proxy and known in self._known:
            return connection
        if self._database is None:
            self._database = await self._ask(lambda own: own.fetchrow(STATEMENTS["select_database"]))
        here, there = self._database, await connection.fetchrow(STATEMENTS["select_database"])
        assert here is not None
        assert there is not None
        if here[:3] != there[:3]:
            raise ConfigurationError(
                f"tx= is a connection to the database {there[0]!r}, which is not the one that this app uses "
                f"({here[0]!r}); jobs are stored beside your rows only where both are in one database"
            )
        check_types(here[3:], there[3:])
        if not is_proxy:
            self._known.add(known)
        return connection

    async def foresee(self, new: Sequence[NewJob]) -> dict[UUID, Conflict]:
        now = self._clock.parameter()
        return (await self._ask(lambda connection: jobs.foreseen(connection, new, now))).conflicts

    async def claim(self, queue: str, want: Callable[[], int], **options: Any) -> Claimed:
        asked = Asked(want=want, **options)
        queues = [await self._claimer.queue(name) for name in (queue, *asked.others)]
        claimed = await self._claimer.claim(queues, asked)
        self._settler.claimed(claimed.lease, claimed.claims)
        return claimed

    def _holds(self, lease: UUID, claims: Sequence[Claim]) -> None:
        self._settler.claimed(lease, claims)

    async def look(self, queue: str, want: int, *, worker: WorkerIdentity, listener: Listener) -> Looked:
        return await self._claimer.look(await self._claimer.queue(queue), want, worker, listener)

    async def settle(
        self,
        settlements: Sequence[Settlement],
        *,
        is_repeated: bool = False,
        tx: Any = None,
        landed: Landings | None = None,
    ) -> list[UUID]:
        landed = {} if landed is None else landed
        if tx is None:
            return await self._settler.settle(settlements, landed, was_tried=is_repeated)
        async with self._lent(tx) as connection:
            return await self._settler.settle_in(connection, settlements, landed)

    async def renew(self, leases: Sequence[UUID], lease: timedelta) -> Renewed:
        given = (self._clock.parameter(), leases, microseconds(lease), *self._clock.expected())
        async with self._connections.session() as connection:
            row = await connection.fetchrow(STATEMENTS["renew"], *given)
        assert row is not None
        self._clock.kept(row["now"])
        held = set(row["held"])
        gone = [each for each in leases if each not in held]
        self._settler.gone(gone)
        return Renewed(gone, row["cancelled"])

    async def claims_beside(self, worker: UUID, leases: Collection[UUID]) -> list[Claim]:
        return await self._ask(lambda connection: claims_beside(connection, worker, leases))

    async def wake_another(self, queue: str, worker: UUID) -> None:
        handle = await self._claimer.queue(queue)
        async with self._connections.session() as connection:
            await connection.execute(STATEMENTS["nudge"], handle.id, 1, worker)

    async def reap(self, limit: int = 1_000, *, ended_by: Instant | None = None) -> Reaped:
        return await self._settler.reap(limit, ended_by)

    async def health(self, *, brief: bool = False) -> Health:
        async def look(connection: Connection) -> Health:
            limits = await connection.fetch(STATEMENTS["select_connection_limits"])
            holders = await connection.fetch(STATEMENTS["select_horizon_holders"], HOLDERS)
            tables = [] if brief else await connection.fetch(STATEMENTS["select_tables"])
            return PostgresHealth(
                settings={} if brief else dict(await connection.fetch(STATEMENTS["select_settings"])),
                connections=[ConnectionLimit(**row) for row in limits],
                tables=[TableHealth(**row) for row in tables],
                holders=[HorizonHolder(**row) for row in holders],
            )

        return await self._ask(look)

    async def wait_until_ended(self, job: UUID, until: Instant | None) -> JobRecord:
        return await self._results.ended(job, until)

    async def _queue_number(self, name: str) -> int:
        return (await self._claimer.queue(name)).id

    async def listen(self, worker: WorkerIdentity) -> Listener:
        async with self._connections.session() as connection:
            await connection.prepare(STATEMENTS["learn_types"])
        listener = PostgresListener(worker, self._connections, self._clock)
        await listener.open()
        return listener

    async def run(self, work: Work[T], tx: Any = None) -> T:
        terms = work.terms

        async def attempt(connection: Connection, _: bool) -> T:
            driver = Driver(connection, self._clock, (), self._queue_numbers, self._memory)
            if not terms.is_together or tx is not None:
                return await driver.perform(work.make())
            isolation: Isolation = "repeatable_read" if terms.is_of_one_moment or not terms.writes else None
            async with connection.transaction(isolation=isolation, readonly=not terms.writes):
                return await driver.perform(work.make())

        if terms.locks:
            # Never in the caller's transaction: the state of a queue is nobody's to roll back.
            handles = [await self._claimer.queue(queue) for queue in work.queues]
            async with self._claimer.locked(*handles, durable=terms.is_durable, keeps=terms.keeps) as schedulings:
                connection = schedulings[0].connection
                driver = Driver(connection, self._clock, schedulings, self._queue_numbers, self._memory)
                return await driver.perform(work.make())
        if tx is not None:
            async with self._lent(tx) as connection:
                return await attempt(connection, False)
        if terms.is_repeated:
            return await self._connections.again(attempt)
        async with self._connections.session() as connection:
            return await attempt(connection, False)

    @contextlib.asynccontextmanager
    async def _lent(self, tx: Any) -> AsyncIterator[Connection]:
        """The caller's connection."""
        connection = await callers_connection(tx)
        with speaking():
            yield await self._understood(connection)
