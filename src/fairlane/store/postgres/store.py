"""The PostgreSQL store: what every store does, on one database for a whole fleet."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, TypedDict, TypeVar, cast
from uuid import UUID
from weakref import WeakKeyDictionary

from asyncpg import Record
from asyncpg.pool import PoolConnectionProxy

from fairlane.clock import Clock, Instant, microseconds
from fairlane.errors import ConfigurationError
from fairlane.job import Claim, JobRecord, NewJob, State
from fairlane.policy.backlog import add_bells
from fairlane.policy.overrides import Amendment, Override
from fairlane.policy.policy import Policy
from fairlane.policy.unique import NO_KEYS, Conflict, Holder, OnReplayConflict
from fairlane.scheduler.rebuild import Miscount, WaitingLane, refuse_to_strand
from fairlane.scheduler.settlement import Settlement
from fairlane.scheduler.snapshot import GateRow
from fairlane.store import audit
from fairlane.store.audit import Note
from fairlane.store.boards import QueueTime
from fairlane.store.health import Traces
from fairlane.store.operators import CANCEL, Handled
from fairlane.store.postgres import jobs, operators, policies, reads, upkeep
from fairlane.store.postgres.caller_transactions import OwnJson, borrowed, check_types, reads_own_json, speaking
from fairlane.store.postgres.claim_lock import QueueHandle, Scheduling
from fairlane.store.postgres.claims import Asked, Claimer
from fairlane.store.postgres.connections import (
    STATEMENTS,
    Connection,
    Connections,
    StoreClock,
    hang_up,
)
from fairlane.store.postgres.jobs import Gathering
from fairlane.store.postgres.procedures import Driver, perform
from fairlane.store.postgres.reads import Stats
from fairlane.store.postgres.results import ResultListener
from fairlane.store.postgres.settlements import Settler, claims_beside, storable
from fairlane.store.postgres.wakeups import PostgresListener
from fairlane.store.procedures import Procedure, Terms, Work, look, query
from fairlane.store.protocol import (
    UNFOLDED_AT_MOST,
    Adopted,
    Choice,
    Claimed,
    Counted,
    Landings,
    Listener,
    Looked,
    Pruned,
    QueueCounts,
    Reaped,
    Rehomed,
    Renewed,
    Retention,
    Store,
    WorkerIdentity,
)
from fairlane.store.results import forever
from fairlane.store.rows import Declared, claim_of, decode_keys
from fairlane.store.scripts import Schema

T = TypeVar("T")
SCHEMA = Schema.of("postgresql")


class Snapshot(TypedDict, total=False):
    """How a transaction is begun."""

    isolation: Literal["repeatable_read"]
    readonly: bool


class PostgresStore(Stats, Store):
    """Jobs in a PostgreSQL database, in a schema of their own. Its time is the database's, unless a clock is given."""

    def __init__(
        self,
        url: str,
        *,
        clock: Clock | None = None,
        durable_claims: bool = False,
        application_name: str = "fairlane",
    ) -> None:
        connections, given = Connections(url, application_name), StoreClock(clock)
        super().__init__(connections, given, Claimer(connections, given, self._add_some_up, durable=durable_claims))
        self._settler = Settler(self._connections, self._clock, self._queue_number, self._claimer.carriage)
        self._queue_numbers: dict[str, int] = {}
        self._gathering = Gathering(self._connections, self._clock, self._queue_numbers)
        self._walk = upkeep.Walk()
        self._counted: dict[str, tuple[bytes, bytes]] = {}
        """How far gates have been held against jobs, by queue."""
        self._memory: dict[Any, Any] = {}
        self._database: Record | None = None
        self._known: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
        """Connections of callers that were found to be to our database, and whether they write JSON in another way."""
        self._results = ResultListener(self._connections)

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

    async def now(self) -> Instant:
        return (await self.time()).now

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

    async def declare(self, policy: Policy) -> Declared:
        """The first declaration is stored; a different one later is drift, and the stored one wins."""
        return await self._ask(lambda connection: policies.declare(connection, policy))

    async def apply(self, policy: Policy, note: Note | None = None, *, accept_missing_keys: bool = False) -> Declared:
        now = self._clock.parameter()
        declared = await self._ask(lambda connection: policies.declare(connection, policy, note, now))
        if not declared.is_drift:
            return declared
        async with self._claimer.locked(await self._claimer.queue(policy.queue), durable=True) as scheduling:
            applied = await policies.replace(scheduling, policy, note, accept_missing_keys=accept_missing_keys)
        await self._add_all_up(policy.queue)
        return applied

    async def divide(
        self, policy: Policy, version: int, gates: Sequence[GateRow] = (), note: Note | None = None
    ) -> bool:
        if version == 0:
            now = self._clock.parameter()
            return await self._ask(lambda connection: policies.insert(connection, policy, note, now))
        async with self._claimer.locked(await self._claimer.queue(policy.queue), durable=True) as scheduling:
            return await policies.divide(scheduling, policy, version, note, gates)

    async def rehome(self, queue: str, limit: int = 1_000) -> Rehomed:
        handle = await self._claimer.queue(queue)
        async with self._claimer.locked(handle, durable=True) as scheduling:
            return await policies.rehome(scheduling, self._queue_number, limit)

    async def lanes(self, queue: str, *, keeps: bool = False) -> list[WaitingLane]:
        handle = await self._claimer.queue(queue)
        async with self._claimer.locked(handle, durable=False, keeps=keeps) as scheduling:
            await scheduling.checkpoint(await scheduling.fold_all())
            used, later = await policies.select_lanes(scheduling.connection, handle.id)
        return used + later

    async def gates_of_strays(self, queue: str, was: int) -> list[tuple[str, GateRow]]:
        handle = await self._claimer.queue(queue)
        found = await self.policy(queue)
        assert found is not None
        async with self._claimer.locked(handle, durable=False) as scheduling:
            await scheduling.checkpoint(await scheduling.load())
            return await policies.select_gates_of_strays(scheduling.connection, handle.id, found.policy, was)

    async def amend(
        self, queues: Sequence[str], put: Sequence[Override], remove: Sequence[str], note: Note
    ) -> list[Amendment]:
        handles = [await self._claimer.queue(queue) for queue in queues]
        async with self._claimer.locked_together(handles) as schedulings:
            return await operators.apply(schedulings, put, remove, note)

    async def check_waiting(self, policy: Policy) -> None:
        handle = await self._claimer.queue(policy.queue)
        refuse_to_strand(policy, await self._ask(lambda connection: reads.waiting_lanes(connection, handle)))

    async def policy(self, queue: str) -> Declared | None:
        return await self._ask(lambda connection: policies.in_force(connection, queue))

    async def enqueue(
        self, new: Sequence[NewJob], tx: Any = None, progress: Callable[[int], None] | None = None
    ) -> dict[UUID, Conflict]:
        if not new:
            return {}
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
            await self._gathering.store(new[0])
            if progress is not None:
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
            return cast("Connection", OwnJson(connection)) if self._known[known] else connection
        if self._database is None:
            self._database = await self._ask(lambda own: own.fetchrow(STATEMENTS["select_database"]))
        here, there = self._database, await connection.fetchrow(STATEMENTS["select_database"])
        assert here is not None
        assert there is not None
        if any(here[name] != there[name] for name in ("name", "schema", "server")):
            raise ConfigurationError(
                f"tx= is a connection to the database {there['name']!r}, which is not the one that this app uses "
                f"({here['name']!r}); jobs are stored beside your rows only where both are in one database"
            )
        check_types(here, there)
        has_own_json = reads_own_json(connection, here, there)
        if not is_proxy:
            self._known[known] = has_own_json
        return cast("Connection", OwnJson(connection)) if has_own_json else connection

    async def count_ready(self, policy: Policy, gates: Sequence[bytes], tx: Any = None) -> dict[bytes, int]:
        queue = await self._claimer.queue(policy.queue)
        counting = _count_ready(queue.id, policy, gates)
        counts, is_partial = await self.run(counting, tx)
        if is_partial:
            # In a transaction of our own, also where the caller has one: the state of a queue is nobody's to roll back.
            async with self._claimer.locked(queue, durable=False) as scheduling:
                await scheduling.fold_all()
            counts, _ = await self.run(counting, tx)
        return counts

    async def foresee(self, new: Sequence[NewJob]) -> dict[UUID, Conflict]:
        now = self._clock.parameter()
        return (await self._ask(lambda connection: jobs.foreseen(connection, new, now))).conflicts

    async def claim(
        self,
        queue: str,
        want: Callable[[], int],
        *,
        worker: WorkerIdentity,
        lease: timedelta,
        listener: Listener | None = None,
        start_lag: int = 0,
        ahead: int | None = None,
        others: Sequence[str] = (),
        chose: Callable[[Choice], None] | None = None,
    ) -> Claimed:
        if listener is not None and not isinstance(listener, PostgresListener):
            raise ConfigurationError(f"listener={type(listener).__name__} is not of this store; take it from listen()")
        asked = Asked(want, worker, microseconds(lease), listener, start_lag, ahead, chose)
        queues = [await self._claimer.queue(name) for name in (queue, *others)]
        claimed = await self._claimer.claim(queues, asked)
        self._settler.claimed(claimed.lease, claimed.claims)
        return claimed

    async def look(self, queue: str, want: int, *, worker: WorkerIdentity, listener: Listener) -> Looked:
        if not isinstance(listener, PostgresListener):
            raise ConfigurationError(f"listener={type(listener).__name__} is not of this store; take it from listen()")
        handle = await self._claimer.queue(queue)
        return await self._claimer.look(handle, want, worker, listener)

    async def settle(
        self,
        settlements: Sequence[Settlement],
        *,
        is_repeated: bool = False,
        tx: Any = None,
        landed: Landings | None = None,
    ) -> list[UUID]:
        told = {} if landed is None else landed
        if tx is not None:
            async with self._lent(tx) as connection:
                return await self._settler.settle_in(connection, settlements, told)
        return await self._settler.settle(settlements, told, was_tried=is_repeated)

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

    async def adopt(
        self,
        job: UUID,
        lease: UUID,
        own: UUID,
        *,
        tasks: Sequence[str],
        worker: WorkerIdentity,
        lease_for: timedelta,
    ) -> Adopted | None:
        row = await self._connections.again(
            lambda connection, _: connection.fetchrow(
                STATEMENTS["adopt"],
                self._clock.parameter(),
                job,
                lease,
                own,
                worker.id,
                worker.name,
                microseconds(lease_for),
                list(tasks),
            )
        )
        if row is None:
            return None
        *columns, claimed_at, queue, now, ahead = row
        claim = claim_of(columns, own, queue, claimed_at)
        self._settler.claimed(own, [claim])
        return Adopted(claim, self._clock.given() or QueueTime(now, ahead))

    async def held(self, claims: Sequence[tuple[UUID, UUID]]) -> list[UUID]:
        async with self._connections.session() as connection:
            rows = await connection.fetch(
                STATEMENTS["select_held"], [job for job, _ in claims], [lease for _, lease in claims]
            )
        return [job for (job,) in rows]

    async def claims_beside(self, worker: UUID, leases: Collection[UUID]) -> list[Claim]:
        return await self._ask(lambda connection: claims_beside(connection, worker, leases))

    async def wake_another(self, queue: str, worker: UUID) -> None:
        handle = await self._claimer.queue(queue)
        async with self._connections.session() as connection:
            await connection.execute(STATEMENTS["nudge"], handle.id, 1, worker)

    async def reap(self, limit: int = 1_000, *, ended_by: Instant | None = None) -> Reaped:
        return await self._settler.reap(limit, ended_by)

    async def prune(self, retention: Retention, limit: int = 1_000) -> Pruned:
        time = await self.time()
        async with self._connections.session() as connection, connection.transaction():
            return await upkeep.prune(connection, retention, time, limit)

    async def collect(self, queue: str, limit: int = 1_000) -> Pruned:
        async with self._claimer.locked(await self._claimer.queue(queue), durable=False) as scheduling:
            return await upkeep.collect(scheduling, self._walk, self._clock.parameter(), limit)

    async def count_gates(self, queue: str, limit: int = 1_000) -> Counted:
        handle = await self._claimer.queue(queue)

        async def look(connection: Connection) -> Counted:
            async with connection.transaction(isolation="repeatable_read", readonly=True):
                found = await policies.in_force(connection, queue)
                assert found is not None
                scheduling = Scheduling(connection, handle, self._clock.parameter())
                reached = self._counted.get(queue, (b"", b""))
                counted, self._counted[queue] = await upkeep.count(scheduling, found.policy, reached, limit)
                return counted

        return await self._ask(look)

    async def recount(self, queue: str) -> list[Miscount]:
        async with self._claimer.locked(await self._claimer.queue(queue), durable=True) as scheduling:
            return await upkeep.recount(scheduling)

    async def cancel(self, job: UUID, note: Note | None = None) -> State:
        async def attempt(connection: Connection, _: bool) -> State:
            now = self._clock.parameter()
            async with connection.transaction():
                was, state = await jobs.cancel(connection, job, now)
                await perform(connection, audit.record_jobs(note, now, CANCEL.handled([job], {job: was})))
            return state

        return await self._connections.again(attempt)

    async def report_progress(self, claim: Claim, fraction: float, message: str | None) -> None:
        async with self._connections.session() as connection:
            await connection.execute(STATEMENTS["update_progress"], claim.id, claim.lease, fraction, storable(message))

    async def wait_until_ended(self, job: UUID, until: Instant | None) -> JobRecord:
        record = await self.job(job)
        if record.state.is_final:
            return record
        alarm = forever if until is None else lambda: self._clock.sleep_until(until)
        return await self._results.ended(job, lambda: self.job(job), alarm)

    async def counts(self, queue: str) -> QueueCounts:
        handle = await self._claimer.queue(queue)
        row = await self._ask(lambda connection: connection.fetchrow(STATEMENTS["select_counts"], handle.id))
        assert row is not None
        return QueueCounts(*row)

    async def traces(self, queue: str, flows: Sequence[bytes], gates: Sequence[bytes]) -> Traces:
        handle = await self._claimer.queue(queue)

        async def look(connection: Connection) -> Traces:
            async with connection.transaction(isolation="repeatable_read", readonly=True):
                board = (await Scheduling(connection, handle, self._clock.parameter()).load()).board
                row = await connection.fetchrow(STATEMENTS["select_traces"], handle.id, flows, gates)
            assert row is not None
            known = {each for each in (*flows, *gates) if each in board.flows or each in board.gates}
            return Traces(frozenset({*row["flows"], *row["gates"], *known}), row["listeners"])

        return await self._ask(look)

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
            driver = Driver(connection, self._clock, memory=self._memory)
            if not terms.is_together or tx is not None:
                return await driver.perform(work.make())
            snapshot: Snapshot = {} if terms.writes else {"isolation": "repeatable_read", "readonly": True}
            async with connection.transaction(**snapshot):
                return await driver.perform(work.make())

        if tx is not None:
            async with self._lent(tx) as connection:
                return await attempt(connection, False)
        if terms.locks:
            handles = [await self._claimer.queue(queue) for queue in work.queues]
            async with self._locked(handles, terms) as schedulings:
                locked = {each.queue.name: each for each in schedulings}
                driver = Driver(schedulings[0].connection, self._clock, locked, self._memory)
                return await driver.perform(work.make())
        if terms.is_repeated:
            return await self._connections.again(attempt)
        async with self._connections.session() as connection:
            return await attempt(connection, False)

    @contextlib.asynccontextmanager
    async def _locked(self, queues: Sequence[QueueHandle], terms: Terms) -> AsyncIterator[list[Scheduling]]:
        """A transaction that holds the claim locks of these queues."""
        if len(queues) == 1:
            async with self._claimer.locked(queues[0], durable=terms.is_durable, keeps=terms.keeps) as scheduling:
                yield [scheduling]
        else:
            async with self._claimer.locked_together(queues) as schedulings:
                yield schedulings

    @contextlib.asynccontextmanager
    async def _lent(self, tx: Any) -> AsyncIterator[Connection]:
        """The caller's connection, or one of ours."""
        if tx is not None:
            connection = await borrowed(tx)
            with speaking():
                yield await self._understood(connection)
            return
        async with self._connections.session() as own:
            yield own

    async def replay(
        self,
        jobs: Sequence[UUID],
        delay: int | None = None,
        note: Note | None = None,
        *,
        on_conflict: OnReplayConflict = "reject",
        earlier: Mapping[bytes, Holder] = NO_KEYS,
        dry_run: bool = False,
    ) -> list[Handled]:
        if dry_run:
            now = self._clock.parameter()
            return await self._ask(
                lambda connection: operators.foresee_replay(connection, jobs, now, on_conflict, earlier)
            )
        return await self._handle(
            lambda connection, now: operators.replay(connection, jobs, delay, now, on_conflict, earlier), note
        )

    async def cancel_jobs(self, jobs: Sequence[UUID], note: Note, *, waits: bool = False) -> list[Handled]:
        return await self._handle(lambda connection, now: operators.cancel(connection, jobs, now, waits=waits), note)

    async def purge(self, jobs: Sequence[UUID], note: Note | None = None) -> list[Handled]:
        return await self._handle(lambda connection, _: operators.purge(connection, jobs), note)

    async def retry_now(self, jobs: Sequence[UUID], note: Note | None = None) -> list[Handled]:
        return await self._handle(lambda connection, now: operators.retry_now(connection, jobs, now), note)

    async def force(self, jobs: Sequence[UUID], note: Note) -> list[Handled]:
        return await self._handle(lambda connection, now: operators.force(connection, jobs, now), note)

    async def _handle(
        self, action: Callable[[Connection, Instant | None], Awaitable[list[Handled]]], note: Note | None
    ) -> list[Handled]:
        """Do something with jobs, and record it, in one transaction."""

        async def attempt(connection: Connection, _: bool) -> list[Handled]:
            now = self._clock.parameter()
            async with connection.transaction():
                handled = await action(connection, now)
                await perform(connection, audit.record_jobs(note, now, handled))
            return handled

        return await self._connections.again(attempt)


@look
def _count_ready(queue: int, policy: Policy, gates: Sequence[bytes]) -> Procedure[tuple[dict[bytes, int], bool]]:
    """Ready jobs by gate, and whether so many bells wait that they should be folded: not all of them were counted."""
    found = yield query("count_ready", queue, gates, UNFOLDED_AT_MOST + 1)
    counts = dict.fromkeys(gates, 0) | {row["gate"]: row["count"] for row in found if row["gate"] is not None}
    bells = [(row["priority"], decode_keys(row["keys"]), row["count"]) for row in found if row["gate"] is None]
    return add_bells(policy, counts, bells), len(bells) > UNFOLDED_AT_MOST
