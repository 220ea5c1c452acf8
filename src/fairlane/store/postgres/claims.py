"""A claim on PostgreSQL: under the queue's claim lock, read what has happened, plan on the board in memory, write.

Two round trips, and one more when the next jobs of a lane have to be looked up: the first takes the lock for the
session and reads, the second writes in a transaction of its own, with which the lock ends. Where several statements
belong together, a transaction is around them. Claims have their own connection: a settlement never queues behind one.

Where many workers want one queue's lock, whoever holds it claims for all who wait: sixty-four workers with four slots
each would take it one after the other, for four jobs a time, and hold it over four round trips each while the others
keep the processors busy. Asking in public (see `fairlane.enter`) costs whoever is alone one round trip more, so it is
done only once the wait for the lock was longer than the work under it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any
from uuid import UUID, uuid4

from msgspec.structs import replace

from fairlane.clock import Instant
from fairlane.job import Claim
from fairlane.scheduler.plan import paces_of
from fairlane.store import policies
from fairlane.store.boards import PLANS_AT_MOST, Boards, Checkpoints, Raced
from fairlane.store.postgres.claim_lock import Holder, Loaded, QueueHandle, Scheduling, deal
from fairlane.store.postgres.connections import STATEMENTS, Connection, Connections, Session, StoreClock, hang_up
from fairlane.store.postgres.procedures import perform_locked
from fairlane.store.postgres.settlements import Carriage, Passenger
from fairlane.store.postgres.wakeups import Watch, observe_producers
from fairlane.store.protocol import Asked, Choice, Claimed, Listener, Looked, WorkerIdentity
from fairlane.store.rows import cancelled_too_fast, claim_of, no_such_queue

SLOTS_AT_MOST = 1_000
"""How many jobs one claim starts for all its holders, and the most that a request can name."""
NUMBERS = 1 << 22
"""Requests of one session, each with a number of its own."""
SMOOTHING = 0.2
RISING = 1.1
"""By how much the quickest load is taken to be slower with every claim that was not as quick."""
REQUESTED = 5
"""Columns of `fairlane.request`."""


class Claimer:
    """Makes the claims of one process, one at a time."""

    def __init__(
        self, connections: Connections, clock: StoreClock, add_up: Callable[[str], Awaitable[None]], *, durable: bool
    ) -> None:
        """`add_up` is called with the name of a queue, now and then, if claims were made."""
        self._connections = connections
        self._clock = clock
        self._durable = durable
        self._mutex = asyncio.Lock()
        self._connection: Session | None = None
        self._queues: dict[str, QueueHandle] = {}
        self._crowding: defaultdict[int, Crowding] = defaultdict(Crowding)
        self._seat = Seat()
        self.carriage = Carriage()
        self.boards = Boards()
        self._checkpoints = Checkpoints(self.boards, self.checkpoint, lambda queue: add_up(self._handle(queue).name))

    async def close(self) -> None:
        """Write what the tables do not hold, and hang up."""
        await self._checkpoints.close()
        await self._hang_up()

    async def _hang_up(self) -> None:
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
                raise no_such_queue(name)
            self._queues[name] = QueueHandle(name, *row)
        return self._queues[name]

    async def claim(self, queues: Sequence[QueueHandle], asked: Asked) -> Claimed:
        """Start jobs of the first queue; where its lock is taken, of the next whose lock is free."""
        watches = {queue.id: Watch(queue.id, asked.listener) for queue in queues}
        first = queues[0].id
        # Whoever is registered as a waiter withdraws in the claim that fills its slots: its own.
        crowding = self._crowding[first]
        is_together = self.carriage.is_in_service = crowding.is_dense and not watches[first].is_registered
        self.carriage.may_wait = not crowding.is_limited
        self.carriage.depart()
        try:
            for _ in range(PLANS_AT_MOST):
                try:
                    if is_together:
                        return await self._claim_together(queues[0], asked, watches[first])
                    return await self._claim_alone(queues, asked, watches)
                except Raced:
                    is_together = False
        finally:
            self.carriage.arrive()
        raise cancelled_too_fast(queues[0].name)

    async def _claim_alone(self, queues: Sequence[QueueHandle], asked: Asked, watches: dict[int, Watch]) -> Claimed:
        clock = asyncio.get_running_loop().time
        async with self._mutex, self._session() as connection:
            asked_at = clock()
            await observe_producers(connection, watches.values())
            first, *others = queues
            scheduling = self._scheduling(connection, first, is_of_session=True)
            loaded = await scheduling.load(self._clock.expected(), locks=True, me=asked.worker.id, others=others)
            # The load itself waits for the lock; most of the time it is free, and reading takes as long as the plan.
            locked_at, queue = clock(), scheduling.queue.id
            if asked.chose is not None:
                asked.chose(_choice(scheduling.queue, queues, loaded))
            claimed = await self._claim(scheduling, loaded, [Holder.of(asked)], asked, watches[queue])
            self._crowding[queue].alone(locked_at - asked_at, clock() - locked_at)
        return claimed

    async def _claim_together(self, queue: QueueHandle, asked: Asked, watch: Watch) -> Claimed:
        """Ask in public, and get what somebody else has claimed for us, or the lock and everybody's requests."""
        async with self._mutex, self._session() as connection:
            want, worker = asked.want(), asked.worker
            if want <= 0:
                # Nobody has a slot. What waits for its instant is held all the same, by terms that may have changed.
                terms, _ = await self._scheduling(connection, queue).in_force()
                return Claimed([], uuid4(), None, more=False, look_again=False, terms=terms)
            with self.carriage.boarded() as passenger:
                entered = await self._seat.enter(connection, queue, want, worker, asked.duration, passenger)
            lease, claims, requests = entered
            crowding = self._crowding[queue.id]
            if claims:
                self._clock.observe(claims[0].claimed_at)
                # Left short, we look for ourselves: only who claims alone can register as a waiter.
                is_short = len(claims) < want
                crowding.is_dense = not is_short
                return Claimed(claims, lease, None, more=is_short, look_again=False)
            crowding.led(len(requests))
            holders = [Holder.of(asked), *requests]
            scheduling = self._scheduling(connection, queue, is_of_session=True)
            loaded = await scheduling.load(self._clock.expected(), me=worker.id)
            return await self._claim(scheduling, loaded, holders, asked, watch)

    def _scheduling(self, connection: Connection, queue: QueueHandle, *, is_of_session: bool = False) -> Scheduling:
        now, boards, is_durable = self._clock.parameter(), self.boards, self._durable
        return Scheduling(connection, queue, now, boards, is_of_session=is_of_session, is_durable=is_durable)

    async def _claim(
        self, scheduling: Scheduling, loaded: Loaded, holders: list[Holder], asked: Asked, watch: Watch
    ) -> Claimed:
        """Claim for everybody; what the first holder gets is returned."""
        me, policy = holders[0], loaded.policy
        self._clock.kept(loaded.now)
        if me.asked <= 0:
            await scheduling.leave()
            return Claimed([], uuid4(), None, more=False, look_again=False, terms=policy)
        if loaded.needs_transaction or loaded.expired:
            await scheduling.begin()
        if loaded.expired:
            # First there is to be a board without them, for everybody; then the claim is planned anew.
            await perform_locked(scheduling, policies.end_overrides(loaded.policy, loaded.expired, loaded.now))
            await scheduling.connection.execute("commit")
            raise Raced
        want = max(me.asked, min(SLOTS_AT_MOST, sum(holder.asked for holder in holders)))
        await scheduling.see_to(loaded, want)
        # What waits for its instant is for whoever holds the lock: others keep no pace.
        ahead = asked.ahead if len(holders) == 1 else None
        self._crowding[scheduling.queue.id].is_limited = bool(policy.limits or policy.overrides.all)
        plan = await scheduling.plan(loaded, want, lag=asked.start_lag, listens=watch.listens, ahead=ahead)
        is_paced = any(start.pace is not None for start in plan.starts)
        is_filled = deal(len(plan.starts), holders).count(1) >= me.asked and not is_paced
        more = plan.more or not loaded.all_folded
        alarm = loaded.board.next_alarm() if not is_filled or watch.is_registered else None
        ending = watch.ending(me.worker, is_filled=is_filled)
        leaves_alarms = watch.is_leaving and (alarm is not None or loaded.due is not None)
        if loaded.others_wait and is_filled and (more or leaves_alarms):
            ending = replace(ending, nudges=1)
        is_of_session = scheduling.is_of_session
        claims = await scheduling.write(loaded, plan, holders, ending)
        if loaded.forced:
            await scheduling.connection.execute(STATEMENTS["forget_forced"], scheduling.queue.id)
        if not is_of_session:
            await scheduling.connection.execute("commit")
        watch.committed()
        self._checkpoints.soon(scheduling.queue.id)
        # Who found nothing waits for leases to end as well.
        return Claimed(
            claims,
            me.lease,
            None if is_filled else _earliest(alarm, loaded.due, scheduling.lease_due),
            more,
            watch.looks_again,
            plan.queue.vtime,
            bool(policy.limits),
            len(loaded.arrivals) + len(loaded.releases),
            loaded.now,
            paces_of(claims, plan.starts),
            policy,
            policy.opens_by_ends,
        )

    async def checkpoint(self, queue: int) -> None:
        """Write what the tables of a queue do not hold."""
        async with self.locked(self._handle(queue), durable=False) as scheduling:
            await scheduling.checkpoint(await scheduling.load())

    async def look(self, queue: QueueHandle, want: int, worker: WorkerIdentity, listener: Listener) -> Looked:
        """Count the jobs that could start, up to `want`. With 0, the listener withdraws and its wakeup is passed on."""
        watch = Watch(queue.id, listener)
        async with self.locked(queue, durable=False) as scheduling:
            if want > 0:
                looked = await _look(scheduling, want, worker, watch)
            else:
                looked = Looked(0, 0, None, look_again=False)
                watch.ending(worker.id, is_filled=True)
                await scheduling.connection.execute(STATEMENTS["withdraw_waiter"], queue.id, worker.id)
                await scheduling.connection.execute(STATEMENTS["nudge"], queue.id, 1, worker.id)
        watch.committed()
        return looked

    def _handle(self, queue: int) -> QueueHandle:
        return next(each for each in self._queues.values() if each.id == queue)

    @contextlib.asynccontextmanager
    async def locked(self, queue: QueueHandle, *, durable: bool, keeps: bool = True) -> AsyncIterator[Scheduling]:
        """A transaction that holds the queue's claim lock, ended with the block: committed if it `keeps` anything."""
        async with self._mutex, self._session() as connection:
            await connection.execute(queue.take_lock if durable else queue.take_lock_unflushed)
            yield self._scheduling(connection, queue)
            if not keeps:
                self.boards.drop(queue.id)
            await connection.execute("commit" if keeps else "rollback")

    @contextlib.asynccontextmanager
    async def locked_together(self, queues: Sequence[QueueHandle]) -> AsyncIterator[list[Scheduling]]:
        """One transaction that holds the claim locks of several queues, committed at the end of the block."""
        # The lowest number first, and all before anything else is locked: so that no two ever deadlock.
        first, *others = sorted(queues, key=lambda queue: queue.id)
        async with self._mutex, self._session() as connection:
            await connection.execute(first.take_lock)
            for queue in others:
                await connection.execute(STATEMENTS["take_another_lock"], queue.id)
            if others:
                await connection.execute(STATEMENTS["lock_shared_limits_of"], [queue.id for queue in queues])
            yield [self._scheduling(connection, queue) for queue in queues]
            await connection.execute("commit")

    @contextlib.asynccontextmanager
    async def _session(self) -> AsyncIterator[Connection]:
        """The connection that claims, whose transaction and locks are gone if the block is left by an error."""
        connection = await self._connected()
        try:
            with self._connections.in_use(connection):
                try:
                    yield connection
                except Raced:
                    if connection.is_in_transaction():
                        await connection.execute("rollback")
                    raise
        except Raced:
            raise
        except BaseException:
            # Whatever it was doing, the server forgets it with the session; the next claim connects again.
            await self._hang_up()
            raise

    async def _connected(self) -> Session:
        if self._seat.is_used_up:
            await self._hang_up()
        if self._connection is None or self._connection.is_closed():
            self._connection = await self._connections.connect()
            self._seat = Seat()
            with self._connections.in_use(self._connection):
                await self._connection.execute(STATEMENTS["guard_claims"])
                await self._connection.prepare(STATEMENTS["learn_types"])
        return self._connection


def _earliest(*moments: Instant | None) -> Instant | None:
    return min((each for each in moments if each is not None), default=None)


def _choice(chosen: QueueHandle, queues: Sequence[QueueHandle], loaded: Loaded) -> Choice:
    names = {queue.id: queue.name for queue in queues}
    taken = frozenset(names[queue] for queue, _, is_taken in loaded.others if is_taken)
    vtimes = {names[queue]: vtime for queue, vtime, _ in loaded.others}
    return Choice(chosen.name, taken, vtimes | {chosen.name: loaded.state.vtime})


async def _look(scheduling: Scheduling, want: int, worker: WorkerIdentity, watch: Watch) -> Looked:
    connection = scheduling.connection
    await observe_producers(connection, [watch])
    await connection.execute(STATEMENTS["begin_look"])
    loaded = await scheduling.load()
    await scheduling.see_to(loaded, want)
    plan = await scheduling.plan(loaded, want, listens=True)
    is_filled = len(plan.starts) >= want
    alarm = None if is_filled else loaded.board.next_alarm()
    ending = watch.ending(worker.id, is_filled=is_filled)
    if plan.starts:
        # Nothing of it is written: the board in memory is forgotten too.
        await connection.execute(STATEMENTS["undo_look"])
        if ending.ear is not None:
            await connection.execute(STATEMENTS["register_waiter"], scheduling.queue.id, worker.id, ending.ear)
        elif ending.waiter is not None:
            await connection.execute(STATEMENTS["withdraw_waiter"], scheduling.queue.id, worker.id)
    else:
        # As a claim that starts nothing: what is shut is parked, and rings when it opens.
        await scheduling.write(loaded, plan, (), ending)
    is_partial = not is_filled and (plan.more or not loaded.all_folded)
    due = None if is_filled else _earliest(alarm, loaded.due, scheduling.lease_due)
    return Looked(len(plan.starts), loaded.now, due, watch.looks_again or is_partial)


class Crowding:
    """Whether a queue's lock is sought after, by what our own claims have seen."""

    def __init__(self) -> None:
        self.is_dense = False
        self.is_limited = True
        """Its jobs wait for limits, as far as we know."""
        self._held = 0.0
        self._quickest = math.inf

    def alone(self, loading: float, held: float) -> None:
        """A claim took so long to get the lock and to load, then held it for so long; both in seconds."""
        self._quickest = min(loading, self._quickest * RISING)
        self._held += (held - self._held) * SMOOTHING
        self.is_dense = loading - self._quickest > self._held

    def led(self, requests: int) -> None:
        """A claim that asked in public came to lead, and found so many who waited."""
        self.is_dense = requests > 0


class Seat:
    """The place of one session among those who ask in public. It goes with the session: its base never changes."""

    def __init__(self) -> None:
        self._base = uuid4()
        self._number = 0
        self._registered: tuple[WorkerIdentity, int] | None = None

    @property
    def is_used_up(self) -> bool:
        """Every number has been used; a session of its own begins afresh."""
        return self._number + 1 >= NUMBERS

    async def enter(
        self,
        connection: Connection,
        queue: QueueHandle,
        want: int,
        worker: WorkerIdentity,
        duration: int,
        passenger: Passenger | None = None,
    ) -> tuple[UUID, list[Claim], list[Holder]]:
        """Ask for jobs; come back with them, or with the queue's lock and the requests of those who wait.

        The passenger is settled first. Returned with them: the lease of what was claimed for us.
        """
        if self._registered != (worker, duration):  # to whom this session belongs
            await connection.execute(STATEMENTS["register_claimer"], self._base, worker.id, worker.name, duration)
            self._registered = (worker, duration)
        self._number += 1
        lease = UUID(int=self._base.int >> 32 << 32 | self._number)
        request = queue.id << 32 | self._number << 10 | min(want, SLOTS_AT_MOST)
        requests: Sequence[Any]
        grants: Sequence[Any]
        if passenger is not None:
            done = passenger.done
            given = (done.now, done.settlements, done.emptied, queue.id, request, lease)
            row = await connection.fetchrow(STATEMENTS["settle_and_enter"], *given)
            assert row is not None
            lost, requests, grants = row
            passenger.arrived(lost)
        else:
            # Columns of requests, then those of `fairlane.granted`: every row has either.
            found = await connection.fetch(STATEMENTS["enter"], queue.id, request, lease)
            requests = [row[:REQUESTED] for row in found if row["id"] is None]
            grants = [row[REQUESTED:] for row in found if row["id"] is not None]
        claims = [claim_of(row[:-1], lease, queue.name, row[-1]) for row in grants or ()]
        return lease, claims, [Holder(*row) for row in requests or ()]
