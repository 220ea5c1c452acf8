"""A claim on PostgreSQL: under the queue's claim lock, load what the plan asks for and write what it decides.

Four round trips (lock, load, write, commit) and one more for each question of the plan, on a connection of its own: a
settlement never queues behind a claim.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import asyncpg
import msgspec

from fairlane.clock import Instant
from fairlane.errors import StoreUnavailable, UnknownQueue
from fairlane.job import Claim
from fairlane.policy.policy import Policy
from fairlane.scheduler.plan import plan_claims
from fairlane.scheduler.snapshot import (
    Arrival,
    FlowRow,
    GateRow,
    Head,
    LaneRow,
    Need,
    Plan,
    QueueRow,
    Snapshot,
    Supply,
)
from fairlane.store.postgres import rows
from fairlane.store.postgres.connections import STATEMENTS, Connections, hang_up, translating
from fairlane.store.postgres.housing import Housing
from fairlane.store.postgres.timing import StoreClock
from fairlane.store.postgres.together import SLOTS_AT_MOST, Crowding, Holder, Seat, deal
from fairlane.store.postgres.wakeups import PostgresListener, Registration
from fairlane.store.protocol import FOLD_AT_MOST, Claimed, WorkerIdentity

if TYPE_CHECKING:
    from fairlane.store.postgres.connections import Connection

__all__ = ["Claimer", "QueueHandle", "Scheduling", "Watch"]

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
    take_over: str
    take_over_unflushed: str


class Loaded(msgspec.Struct, frozen=True):
    """What a claim starts from, and what it owes the queue's state."""

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
        self._place: rows.Place = (0, 0)
        self._housing = Housing(queue.id)

    async def load(self, want: int, *, me: UUID | None = None) -> Loaded:
        """Drain the bells, promote what is due, and read what the plan starts from."""
        self._housing.forget()
        count = max(want, 1)
        found = await self._find(
            "load", self.queue.id, self._now, count, RELEASES_AT_MOST, FOLD_AT_MOST, LANES_PER_SCANNED_FLOW, me
        )
        place, digest, bounds, vtime, cursor, cost, now, cursor_tie, tie, release_rows, has_due, others_wait = (
            found.queue
        )
        self._place = place
        all_folded = len(found.arrivals) < FOLD_AT_MOST and release_rows < RELEASES_AT_MOST
        if has_due:
            promoted = await self._promote(now)
            all_folded = all_folded and sum(bell.count for bell in promoted) < PROMOTE_AT_MOST
            found.arrivals += promoted
            named = await self._ask(Need(), [bell.lane for bell in promoted])
            found.lanes += named.lanes
            found.flows += named.flows
        arrivals_from, releases_from, policy_since = bounds.split()
        snapshot = Snapshot(
            await self._policy(digest),
            now,
            QueueRow(vtime, cursor, cursor_tie, tie, cost),
            found.arrivals,
            found.releases,
            found.lanes,
            found.flows,
            found.scanned,
            len(found.scanned) < count,
            found.gates,
            int(policy_since),
        )
        return Loaded(snapshot, arrivals_from, releases_from, all_folded, bool(others_wait))

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

    async def write(self, loaded: Loaded, plan: Plan, holders: Sequence[Holder] = ()) -> list[Claim]:
        """Start the jobs of a plan and store what it changed; `Raced` if a job is not ready any more.

        The jobs are dealt to the holders. Returned is what the first of them gets.
        """
        now, state = loaded.snapshot.now, plan.queue
        changes = self._housing.changes(plan)
        if changes.new_flows or changes.new_lanes or changes.new_gates:
            await self.connection.execute(
                STATEMENTS["insert_state"], changes.new_flows, changes.new_lanes, changes.new_gates
            )
        started = await self.connection.fetch(
            STATEMENTS["write"],
            self.queue.id,
            state.vtime,
            state.cursor,
            state.cursor_tie,
            state.tie,
            state.cost,
            *self._housing.totals(plan),
            loaded.arrivals_from,
            loaded.releases_from,
            changes.flows,
            changes.lanes,
            changes.gates,
            [
                (start.head.ref, start.head.position, start.charge, holder)
                for start, holder in zip(plan.starts, deal(len(plan.starts), holders), strict=True)
            ],
            now,
            self._place,
            [holder.lease for holder in holders],
            [holder.worker for holder in holders],
            [holder.name for holder in holders],
            [now + holder.duration for holder in holders],
        )
        if plan.starts and (not started or started[0]["total"] < len(plan.starts)):
            raise Raced
        by_position = {row[0]: row for row in started}
        own = plan.starts[: len(started)]
        return [self._claim(by_position[start.head.position], holders[0].lease, now) for start in own]

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
        found = await self._find("take_state", self.queue.id)
        self._housing.forget()
        self._place = found.queue[0]
        return found.flows, found.lanes, found.gates

    def _claim(self, row: Any, lease: UUID, now: Instant) -> Claim:
        _, job, task, priority, keys, payload, attempt, most, enqueued_at, cancel, _ = row
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

    async def _promote(self, now: Instant) -> list[Arrival]:
        found = await self.connection.fetch(STATEMENTS["promote"], self.queue.id, now, PROMOTE_AT_MOST)
        return [
            Arrival(lane, priority, rows.decode_keys(keys), count, floor, since, rows.decode_given(given))
            for lane, priority, keys, count, floor, since, given in found
        ]

    async def _policy(self, digest: str) -> Policy:
        if digest not in _policies:
            row = await self.connection.fetchrow(STATEMENTS["select_policy"], self.queue.name)
            assert row is not None
            _policies[digest] = Policy.decode(row["policy"])
        return _policies[digest]

    async def _supply(self, need: Need) -> Supply:
        if not (need.flows or need.gates or need.parked or need.lanes or need.scan):
            found = await self.connection.fetch(STATEMENTS["select_heads"], need.heads)
            return Supply(heads=_by_lane(need, [(nth, Head(*head)) for nth, *head in found]))
        answer = await self._ask(need)
        return Supply(answer.flows, answer.gates, answer.lanes, _by_lane(need, answer.heads), answer.scanned)

    async def _ask(self, need: Need, lanes: Sequence[bytes] = ()) -> rows.Found:
        """What the plan needs, and lanes by id with their flows."""
        return await self._find(
            "supply",
            self.queue.id,
            need.flows,
            need.gates,
            [gate for gate, _ in need.parked],
            [count for _, count in need.parked],
            [flow for flow, _ in need.lanes],
            [count for _, count in need.lanes],
            need.heads,
            *(need.scan or (0.0, 0, 0)),
            LANES_PER_SCANNED_FLOW,
            lanes,
        )

    async def _find(self, statement: str, *args: Any) -> rows.Found:
        found = rows.Found(await self.connection.fetch(STATEMENTS[statement], *args))
        self._housing.remember(found)
        return found


def _by_lane(need: Need, found: Iterable[tuple[int, Head]]) -> dict[bytes, list[Head]]:
    """Heads under their lanes; each comes with the number of the question that it answers."""
    heads: dict[bytes, list[Head]] = {lane: [] for lane, _, _ in need.heads}
    asked = [heads[lane] for lane, _, _ in need.heads]
    for nth, head in found:
        asked[nth - 1].append(head)
    return heads


class Claimer:
    """Makes the claims of one process, one at a time."""

    def __init__(self, connections: Connections, clock: StoreClock, *, durable: bool) -> None:
        self._connections = connections
        self._clock = clock
        self._durable = durable
        self._mutex = asyncio.Lock()
        self._connection: asyncpg.Connection[Any] | None = None
        self._queues: dict[str, QueueHandle] = {}
        self._crowding: defaultdict[int, Crowding] = defaultdict(Crowding)
        self._seat = Seat()

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await hang_up(connection)

    async def queue(self, name: str) -> QueueHandle:
        """A queue by its name, or `UnknownQueue`. Numbers never change, so they are asked for once."""
        if name not in self._queues:
            row = await self._connections.again(
                lambda connection, _: connection.fetchrow(STATEMENTS["select_queue_id"], name)
            )
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
        watch = Watch(queue.id, listener)
        # Whoever is registered as a waiter withdraws in the claim that fills its slots: its own.
        is_together = self._crowding[queue.id].is_dense and not watch.is_registered
        for _ in range(PLANS_AT_MOST):
            try:
                if is_together:
                    claimed = await self._claim_together(queue, want, worker, duration, watch)
                else:
                    claimed = await self._claim_alone(queue, want, worker, duration, watch)
            except Raced:
                is_together = False
                continue
            watch.committed()
            return claimed
        raise StoreUnavailable(
            f"queue {queue.name!r}: jobs were cancelled faster than they could be claimed; try again"
        )

    async def _claim_alone(
        self, queue: QueueHandle, want: Callable[[], int], worker: WorkerIdentity, duration: int, watch: Watch
    ) -> Claimed:
        clock = asyncio.get_running_loop().time
        async with self._mutex, self._session() as connection:
            asked_at = clock()
            await connection.execute(queue.take_lock if self._durable else queue.take_lock_unflushed)
            locked_at = clock()
            me = Holder(uuid4(), want(), worker.id, worker.name, duration)
            claimed = await self._claim(connection, queue, [me], watch)
            await connection.execute("commit")
            self._crowding[queue.id].alone(locked_at - asked_at, clock() - locked_at)
        return claimed

    async def _claim_together(
        self, queue: QueueHandle, want: Callable[[], int], worker: WorkerIdentity, duration: int, watch: Watch
    ) -> Claimed:
        """Ask in public, and get what somebody else has claimed for us, or the lock and everybody's requests."""
        async with self._mutex, self._session() as connection:
            asked = want()
            if asked <= 0:
                return Claimed([], uuid4(), None, more=False, look_again=False)
            entry = await self._seat.enter(connection, queue.id, queue.name, asked, worker, duration)
            if entry.claims:
                self._clock.observe(entry.claims[0].claimed_at)
                # Left short, we look for ourselves: only who claims alone can register as a waiter.
                is_short = len(entry.claims) < asked
                self._crowding[queue.id].is_dense = not is_short
                return Claimed(entry.claims, entry.lease, None, more=is_short, look_again=False)
            self._crowding[queue.id].led(len(entry.requests))
            await connection.execute(queue.take_over if self._durable else queue.take_over_unflushed)
            me = Holder(uuid4(), want(), worker.id, worker.name, duration)
            claimed = await self._claim(connection, queue, [me, *entry.requests], watch)
            await connection.execute("commit")
        return claimed

    async def _claim(self, connection: Connection, queue: QueueHandle, holders: list[Holder], watch: Watch) -> Claimed:
        """Claim for everybody; what the first holder gets is returned."""
        me, scheduling = holders[0], Scheduling(connection, queue, self._clock.parameter())
        if me.asked <= 0:
            return Claimed([], me.lease, None, more=False, look_again=False)
        want = max(me.asked, min(SLOTS_AT_MOST, sum(holder.asked for holder in holders)))
        await watch.look(connection)
        loaded = await scheduling.load(want, me=me.worker)
        now = loaded.snapshot.now
        self._clock.observe(now)
        plan = await scheduling.plan(loaded.snapshot, want)
        claims = await scheduling.write(loaded, plan, holders)
        is_filled = len(claims) >= me.asked
        more = plan.more or not loaded.all_folded
        due = None if is_filled else await connection.fetchval(STATEMENTS["next_due"], queue.id, now)
        look_again = await watch.update(connection, me.worker, is_filled=is_filled)
        if loaded.others_wait and is_filled and (more or await watch.hands_over(connection)):
            await connection.execute(STATEMENTS["nudge"], queue.id, 1, me.worker)
        return Claimed(claims, me.lease, due, more, look_again)

    @contextlib.asynccontextmanager
    async def locked(self, queue: QueueHandle, *, durable: bool) -> AsyncIterator[Scheduling]:
        """A transaction that holds the queue's claim lock, committed at the end of the block."""
        async with self._mutex, self._session() as connection:
            await connection.execute(queue.take_lock if durable else queue.take_lock_unflushed)
            yield Scheduling(connection, queue, self._clock.parameter())
            await connection.execute("commit")

    @contextlib.asynccontextmanager
    async def _session(self) -> AsyncIterator[Connection]:
        """The connection that claims, whose transaction and locks are gone if the block is left by an error."""
        connection = await self._connected()
        try:
            with translating(connection):
                yield connection
        except Raced:
            await connection.execute("rollback")
            raise
        except BaseException:
            # Whatever it was doing, the server forgets it with the session; the next claim connects again.
            await self.close()
            raise

    async def _connected(self) -> asyncpg.Connection[Any]:
        if self._seat.is_used_up:
            await self.close()
        if self._connection is None or self._connection.is_closed():
            self._connection = await self._connections.connect()
            self._seat = Seat()
            with translating(self._connection):
                await self._connection.execute(STATEMENTS["guard_claims"])
                await self._connection.prepare(STATEMENTS["learn_types"])
        return self._connection


class Watch:
    """How one claim leaves its listener: waiting for work in the queue, or not."""

    def __init__(self, queue: int, listener: PostgresListener | None) -> None:
        self._queue = queue
        self._listener = listener
        self._before = listener.registration(queue) if listener else None
        self._after = self._before
        self._heard = listener.heard(queue) if listener else 0

    @property
    def is_registered(self) -> bool:
        return self._before is not None

    async def look(self, connection: Connection) -> None:
        """Before the bells are drained: which producers may not have seen the registration?"""
        if self._before is not None and not self._before.is_certain:
            found = await connection.fetch(STATEMENTS["select_producers"])
            self._before.observe(row[0] for row in found)

    async def update(self, connection: Connection, worker: UUID, *, is_filled: bool) -> bool:
        """Register or withdraw; say whether to look again."""
        if self._listener is None:
            return False
        self._after = None
        if is_filled:
            if self._before is not None:
                await connection.execute(STATEMENTS["withdraw_waiter"], self._queue, worker)
            return False
        if self._before is not None:
            self._after = self._before
            return not self._before.is_certain
        ear = self._listener.ear
        if ear is None:
            return False
        await connection.execute(STATEMENTS["register_waiter"], self._queue, worker, ear)
        self._after = Registration(ear)
        return True

    async def hands_over(self, connection: Connection) -> bool:
        """Whether it waited, does not any more, and leaves something to watch that opens by itself."""
        if self._before is None or self._after is not None:
            return False
        has_alarms: bool = await connection.fetchval(STATEMENTS["has_alarms"], self._queue)
        return has_alarms

    def committed(self) -> None:
        if self._listener is None:
            return
        if self._after is None:
            if self._before is not None:
                self._listener.withdrawn(self._queue, self._heard)
        elif self._after is not self._before:
            self._listener.registered(self._queue, self._after)
