"""A claim on PostgreSQL: under the queue's claim lock, load what the plan asks for and write what it decides.

Four round trips (lock, load, write, commit) and one more for each question of the plan, on a connection of its own: a
settlement never queues behind a claim.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import asyncpg
import msgspec

from fairlane.clock import Instant
from fairlane.errors import StoreUnavailable, UnknownQueue
from fairlane.job import Claim
from fairlane.policy.policy import Policy
from fairlane.scheduler.plan import plan_claims
from fairlane.scheduler.snapshot import Arrival, FlowRow, GateRow, Head, LaneRow, Need, Plan, QueueRow, Snapshot, Supply
from fairlane.store.postgres import rows
from fairlane.store.postgres.connections import STATEMENTS, Connections, translating
from fairlane.store.postgres.timing import StoreClock
from fairlane.store.postgres.wakeups import PostgresListener, Registration
from fairlane.store.protocol import FOLD_AT_MOST, Claimed, WorkerIdentity

if TYPE_CHECKING:
    from fairlane.store.postgres.connections import Connection

__all__ = ["Claimer", "QueueHandle", "Scheduling"]

PROMOTE_AT_MOST = 1_000
RELEASES_AT_MOST = 4_000
LANES_PER_SCANNED_FLOW = 2
PLANS_AT_MOST = 50
"""How often a claim is planned anew because a job it had planned was cancelled meanwhile."""

_policies: dict[str, Policy] = {}


class QueueHandle(msgspec.Struct, frozen=True):
    """A queue's number, and how a transaction that holds its claim lock begins."""

    name: str
    id: int
    take_lock: str
    take_lock_unflushed: str


class Loaded(msgspec.Struct, frozen=True):
    """What a claim starts from, and what it owes the queue's row."""

    snapshot: Snapshot
    arrivals_from: str
    releases_from: str
    all_folded: bool
    others_wait: bool


class Raced(Exception):
    """A job was cancelled between the plan and the write."""


class Scheduling:
    """One transaction that holds a queue's claim lock."""

    def __init__(self, connection: Connection, queue: QueueHandle, now: Instant | None) -> None:
        self.connection = connection
        self.queue = queue
        self._now = now
        self._stored_flows: set[bytes] = set()
        self._stored_lanes: set[bytes] = set()
        self._stored_gates: set[bytes] = set()

    async def load(self, want: int, *, me: UUID | None = None) -> Loaded:
        """Drain the bells, promote what is due, and read what the plan starts from."""
        count = max(want, 1)
        row = await self.connection.fetchrow(
            STATEMENTS["load"],
            self.queue.id,
            self._now,
            count,
            RELEASES_AT_MOST,
            FOLD_AT_MOST,
            LANES_PER_SCANNED_FLOW,
            me,
        )
        assert row is not None
        arrivals = [rows.arrival(bell) for bell in row["arrivals"]]
        lanes, flows, scanned = self._lanes(row["lanes"]), self._flows(row["flows"]), self._flows(row["scanned"])
        all_folded = len(arrivals) < FOLD_AT_MOST and row["release_rows"] < RELEASES_AT_MOST
        if row["has_due"]:
            promoted = await self._promote(row["now"])
            all_folded = all_folded and sum(bell.count for bell in promoted) < PROMOTE_AT_MOST
            arrivals += promoted
            more = await self.connection.fetchrow(
                STATEMENTS["select_lanes"], self.queue.id, [bell.lane for bell in promoted]
            )
            assert more is not None
            lanes += self._lanes(more["lanes"])
            flows += self._flows(more["flows"])
        snapshot = Snapshot(
            await self._policy(row["digest"]),
            row["now"],
            QueueRow(row["vtime"], row["cursor"], row["cursor_tie"], row["tie"], row["cost"]),
            arrivals,
            rows.releases(row),
            lanes,
            flows + scanned,
            [flow.id for flow in scanned],
            len(scanned) < count,
            self._gates(row["due_gates"]),
        )
        return Loaded(snapshot, row["arrivals_from"], row["releases_from"], all_folded, row["others_wait"])

    async def plan(self, snapshot: Snapshot, want: int) -> Plan:
        """Ask the plan, and answer what it asks."""
        planning = plan_claims(snapshot, want)
        try:
            need = next(planning)
            while True:
                need = planning.send(await self._supply(need))
        except StopIteration as stop:
            plan: Plan = stop.value
            return plan

    async def fold_all(self) -> tuple[Loaded, Plan]:
        """Fold every bell, start nothing."""
        while True:
            loaded = await self.load(0)
            plan = await self.plan(loaded.snapshot, 0)
            await self.write(loaded, plan)
            if loaded.all_folded:
                return loaded, plan

    async def take_all(self) -> tuple[list[FlowRow], list[LaneRow], list[GateRow]]:
        """Everything that bells were folded into, removed from the tables."""
        row = await self.connection.fetchrow(STATEMENTS["select_state"], self.queue.id)
        assert row is not None
        taken = self._flows(row["flows"]), self._lanes(row["lanes"]), self._gates(row["gates"])
        await self.connection.execute(STATEMENTS["delete_state"], self.queue.id)
        for stored in (self._stored_flows, self._stored_lanes, self._stored_gates):
            stored.clear()
        return taken

    async def write(
        self,
        loaded: Loaded,
        plan: Plan,
        lease: UUID | None = None,
        worker: WorkerIdentity | None = None,
        duration: int = 0,
    ) -> list[Claim]:
        """Start the jobs of a plan and store what it changed; `Raced` if a job is not ready any more."""
        now, state = loaded.snapshot.now, plan.queue
        lease = lease or uuid4()
        flows, lanes, gates = self._stored(plan)
        await self._insert(plan)
        ids = [start.head.ref for start in plan.starts]
        started = await self.connection.fetch(
            STATEMENTS["write"],
            self.queue.id,
            state.vtime,
            state.cursor,
            state.cursor_tie,
            state.tie,
            state.cost,
            loaded.arrivals_from,
            loaded.releases_from,
            *rows.touched_flows(flows),
            *rows.touched_lanes(lanes),
            *rows.touched_gates(gates),
            ids,
            [start.charge for start in plan.starts],
            now,
            lease,
            worker.id if worker else None,
            worker.name if worker else None,
            now + duration,
        )
        if len(started) < len(ids):
            raise Raced
        by_id = {row[0]: row for row in started}
        return [self._claim(by_id[each], lease, now) for each in ids]

    def _claim(self, row: Any, lease: UUID, now: Instant) -> Claim:
        job, task, priority, keys, payload, attempt, most, enqueued_at, cancel = row
        return Claim(
            job,
            lease,
            self.queue.name,
            task,
            priority,
            rows.decode_keys(keys),
            payload,
            attempt,
            most,
            enqueued_at,
            now,
            cancel,
        )

    def _stored(self, plan: Plan) -> tuple[list[FlowRow], list[LaneRow], list[GateRow]]:
        return (
            [row for row in plan.flows if row.id in self._stored_flows],
            [row for row in plan.lanes if row.id in self._stored_lanes],
            [row for row in plan.gates if row.id in self._stored_gates],
        )

    async def _insert(self, plan: Plan) -> None:
        flows = [row for row in plan.flows if row.id not in self._stored_flows]
        lanes = [row for row in plan.lanes if row.id not in self._stored_lanes]
        gates = [row for row in plan.gates if row.id not in self._stored_gates]
        if flows or lanes or gates:
            await self.connection.execute(
                STATEMENTS["insert_state"],
                self.queue.id,
                *rows.new_flows(flows),
                *rows.new_lanes(lanes),
                *rows.new_gates(gates),
            )

    async def _promote(self, now: Instant) -> list[Arrival]:
        found = await self.connection.fetch(STATEMENTS["promote"], self.queue.id, now, PROMOTE_AT_MOST)
        return [Arrival(lane, priority, rows.decode_keys(keys), *rest) for lane, priority, keys, *rest in found]

    async def _policy(self, digest: str) -> Policy:
        if digest not in _policies:
            row = await self.connection.fetchrow(STATEMENTS["select_policy"], self.queue.name)
            assert row is not None
            _policies[digest] = Policy.decode(row["policy"])
        return _policies[digest]

    async def _supply(self, need: Need) -> Supply:
        scan = need.scan or (0.0, 0, 0)
        row = await self.connection.fetchrow(
            STATEMENTS["supply"],
            self.queue.id,
            need.flows,
            need.gates,
            [gate for gate, _ in need.parked],
            [count for _, count in need.parked],
            [flow for flow, _ in need.lanes],
            [count for _, count in need.lanes],
            [lane for lane, _, _ in need.heads],
            [floor for _, floor, _ in need.heads],
            [count for _, _, count in need.heads],
            *scan,
            LANES_PER_SCANNED_FLOW,
        )
        assert row is not None
        heads: dict[bytes, list[Head]] = {lane: [] for lane, _, _ in need.heads}
        if row["head_nth"] is not None:
            found = [heads[lane] for lane, _, _ in need.heads]
            columns = (row["head_nth"], row["head_id"], row["head_position"], row["head_ready_at"])
            for nth, *head in zip(*columns, strict=True):
                found[nth - 1].append(Head(*head))
        scanned = self._flows(row["scanned"])
        return Supply(
            self._flows(row["flows"]) + scanned,
            self._gates(row["gates"]),
            self._lanes(row["lanes"]),
            heads,
            [flow.id for flow in scanned],
        )

    def _flows(self, records: list[Any]) -> list[FlowRow]:
        found = [rows.flow(record) for record in records]
        self._stored_flows.update([row.id for row in found])
        return found

    def _lanes(self, records: list[Any]) -> list[LaneRow]:
        found = [rows.lane(record) for record in records]
        self._stored_lanes.update([row.id for row in found])
        return found

    def _gates(self, records: list[Any]) -> list[GateRow]:
        found = [rows.gate(record) for record in records]
        self._stored_gates.update([row.id for row in found])
        return found


class Claimer:
    """Makes the claims of one process, one at a time."""

    def __init__(self, connections: Connections, clock: StoreClock, *, durable: bool) -> None:
        self._connections = connections
        self._clock = clock
        self._durable = durable
        self._mutex = asyncio.Lock()
        self._connection: asyncpg.Connection[Any] | None = None
        self._queues: dict[str, QueueHandle] = {}

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.terminate()

    async def queue(self, name: str) -> QueueHandle:
        """A queue by its name, or `UnknownQueue`. Numbers never change, so they are asked for once."""
        if name not in self._queues:
            async with self._connections.session() as connection:
                row = await connection.fetchrow(STATEMENTS["select_queue_id"], name)
            if row is None:
                raise UnknownQueue(
                    f"queue {name!r} is not known to this database; declare it with app.queue({name!r}, …)"
                )
            self._queues[name] = QueueHandle(name, *row)
        return self._queues[name]

    async def claim(
        self,
        queue: QueueHandle,
        want: Callable[[], int],
        worker: WorkerIdentity,
        duration: int,
        listener: PostgresListener | None,
    ) -> Claimed:
        """Start up to `want()` jobs."""
        watch = _Watch(queue.id, listener)
        for _ in range(PLANS_AT_MOST):
            try:
                async with self.locked(queue, durable=self._durable) as scheduling:
                    claimed = await self._claim(scheduling, want(), worker, duration, watch)
            except Raced:
                continue
            watch.committed()
            return claimed
        raise StoreUnavailable(
            f"queue {queue.name!r}: jobs were cancelled faster than they could be claimed; try again"
        )

    async def _claim(
        self, scheduling: Scheduling, want: int, worker: WorkerIdentity, duration: int, watch: _Watch
    ) -> Claimed:
        lease = uuid4()
        if want <= 0:
            return Claimed([], lease, None, more=False, look_again=False)
        connection, queue = scheduling.connection, scheduling.queue
        await watch.look(connection)
        loaded = await scheduling.load(want, me=worker.id)
        now = loaded.snapshot.now
        self._clock.observe(now)
        plan = await scheduling.plan(loaded.snapshot, want)
        claims = await scheduling.write(loaded, plan, lease, worker, duration)
        is_filled = len(claims) >= want
        more = plan.more or not loaded.all_folded
        due = None if is_filled else await connection.fetchval(STATEMENTS["next_due"], queue.id, now)
        look_again = await watch.update(connection, worker, is_filled=is_filled)
        if loaded.others_wait and is_filled and (more or watch.is_leaving):
            await connection.execute(STATEMENTS["nudge"], queue.id, 1, worker.id)
        return Claimed(claims, lease, due, more, look_again)

    @contextlib.asynccontextmanager
    async def locked(self, queue: QueueHandle, *, durable: bool) -> AsyncIterator[Scheduling]:
        """A transaction that holds the queue's claim lock, committed at the end of the block."""
        async with self._mutex:
            connection = await self._connected()
            try:
                with translating(connection):
                    await connection.execute(queue.take_lock if durable else queue.take_lock_unflushed)
                    yield Scheduling(connection, queue, self._clock.parameter())
                    await connection.execute("commit")
            except Raced:
                await connection.execute("rollback")
                raise
            except BaseException:
                # Whatever it was doing, the server forgets it with the session; the next claim connects again.
                await self.close()
                raise

    async def _connected(self) -> asyncpg.Connection[Any]:
        if self._connection is None or self._connection.is_closed():
            self._connection = await self._connections.connect()
            with translating(self._connection):
                await self._connection.execute(STATEMENTS["guard_claims"])
        return self._connection


class _Watch:
    """How one claim leaves its listener: waiting for work in the queue, or not."""

    def __init__(self, queue: int, listener: PostgresListener | None) -> None:
        self._queue = queue
        self._listener = listener
        self._before = listener.registration(queue) if listener else None
        self._after = self._before
        self._heard = listener.heard(queue) if listener else 0

    @property
    def is_leaving(self) -> bool:
        """It waited and does not any more: whatever it was to wait for needs another waiter."""
        return self._before is not None and self._after is None

    async def look(self, connection: Connection) -> None:
        """Before the bells are drained: which producers may not have seen the registration?"""
        if self._before is not None and not self._before.is_certain:
            found = await connection.fetch(STATEMENTS["select_producers"])
            self._before.observe(row[0] for row in found)

    async def update(self, connection: Connection, worker: WorkerIdentity, *, is_filled: bool) -> bool:
        """Register or withdraw; say whether to look again."""
        if self._listener is None:
            return False
        self._after = None
        if is_filled:
            if self._before is not None:
                await connection.execute(STATEMENTS["withdraw_waiter"], self._queue, worker.id)
            return False
        if self._before is not None:
            self._after = self._before
            return not self._before.is_certain
        ear = self._listener.ear
        if ear is None:
            return False
        await connection.execute(STATEMENTS["register_waiter"], self._queue, worker.id, ear)
        self._after = Registration(ear)
        return True

    def committed(self) -> None:
        if self._listener is None:
            return
        if self._after is None:
            if self._before is not None:
                self._listener.withdrawn(self._queue, self._heard)
        elif self._after is not self._before:
            self._listener.registered(self._queue, self._after)
