"""A claim on PostgreSQL: under the queue's claim lock, read what has happened, plan on the board in memory, write.

Two round trips, and one more when the next jobs of a lane have to be looked up: the first takes the lock for the
session and reads, the second writes in a transaction of its own, with which the lock ends. Where several statements
belong together, a transaction is around them. Claims have their own connection: a settlement never queues behind one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING
from uuid import UUID, uuid4

import msgspec

from fairlane.scheduler.snapshot import paces_of
from fairlane.store import policies
from fairlane.store.boards import PLANS_AT_MOST, Boards, Checkpoints, Raced
from fairlane.store.postgres.claim_lock import (
    SLOTS_AT_MOST,
    Carriage,
    Crowding,
    Ending,
    Holder,
    Loaded,
    QueueHandle,
    Scheduling,
    Seat,
    deal,
)
from fairlane.store.postgres.connections import STATEMENTS, Connections, Session, StoreClock, hang_up
from fairlane.store.postgres.procedures import perform_locked
from fairlane.store.postgres.wakeups import PostgresListener, Registration
from fairlane.store.protocol import Choice, Claimed, Looked, WorkerIdentity
from fairlane.store.rows import cancelled_too_fast, no_such_queue

if TYPE_CHECKING:
    from fairlane.store.postgres.connections import Connection
    from fairlane.store.postgres.wakeups import PostgresListener


class Asked(msgspec.Struct, frozen=True):
    """What somebody wants of a claim."""

    want: Callable[[], int]
    worker: WorkerIdentity
    duration: int
    """How long the lease lasts, in microseconds."""
    listener: PostgresListener | None
    start_lag: int
    ahead: int | None
    chose: Callable[[Choice], None] | None

    def holder(self) -> Holder:
        """Who asks, for as many as there is room for now."""
        return Holder(uuid4(), self.want(), self.worker.id, self.worker.name, self.duration)


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
        watches = {queue.id: Watch(queue.id, asked.listener, asked.start_lag, asked.ahead) for queue in queues}
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
            await look(connection, watches.values())
            first, *others = queues
            scheduling = self._scheduling(connection, first, is_of_session=True)
            loaded = await scheduling.load(1, self._clock.expected(), locks=True, me=asked.worker.id, others=others)
            # The load itself waits for the lock; most of the time it is free, and reading takes as long as the plan.
            locked_at, queue = clock(), scheduling.queue.id
            if asked.chose is not None:
                asked.chose(_choice(scheduling.queue, queues, loaded))
            claimed = await self._claim(scheduling, loaded, [asked.holder()], watches[queue])
            self._crowding[queue].alone(locked_at - asked_at, clock() - locked_at)
        return claimed

    async def _claim_together(self, queue: QueueHandle, asked: Asked, watch: Watch) -> Claimed:
        """Ask in public, and get what somebody else has claimed for us, or the lock and everybody's requests."""
        async with self._mutex, self._session() as connection:
            want, worker = asked.want(), asked.worker
            if want <= 0:
                return await self._claim_nothing(self._scheduling(connection, queue))
            with self.carriage.boarded() as passenger:
                entry = await self._seat.enter(
                    connection, queue.id, queue.name, want, worker, asked.duration, passenger
                )
            crowding = self._crowding[queue.id]
            if entry.claims:
                self._clock.observe(entry.claims[0].claimed_at)
                # Left short, we look for ourselves: only who claims alone can register as a waiter.
                is_short = len(entry.claims) < want
                crowding.is_dense = not is_short
                return Claimed(entry.claims, entry.lease, None, more=is_short, look_again=False)
            crowding.led(len(entry.requests))
            me = asked.holder()
            scheduling = self._scheduling(connection, queue, is_of_session=True)
            loaded = await scheduling.load(1, self._clock.expected(), me=worker.id)
            return await self._claim(scheduling, loaded, [me, *entry.requests], watch)

    def _scheduling(self, connection: Connection, queue: QueueHandle, *, is_of_session: bool = False) -> Scheduling:
        return Scheduling(
            connection,
            queue,
            self._clock.parameter(),
            self.boards,
            is_of_session=is_of_session,
            is_durable=self._durable,
        )

    async def _claim(self, scheduling: Scheduling, loaded: Loaded, holders: list[Holder], watch: Watch) -> Claimed:
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
        loaded = await scheduling.see_to(loaded, want)
        # What waits for its instant is for whoever holds the lock: others keep no pace.
        ahead = watch.ahead if len(holders) == 1 else None
        self._crowding[scheduling.queue.id].is_limited = bool(policy.limits or policy.overrides.all)
        plan = await scheduling.plan(loaded, want, lag=watch.start_lag, listens=watch.listens, ahead=ahead)
        is_paced = any(start.pace is not None for start in plan.starts)
        is_filled = deal(len(plan.starts), holders).count(1) >= me.asked and not is_paced
        more = plan.more or not loaded.all_folded
        alarm = loaded.board.next_alarm() if not is_filled or watch.is_registered else None
        ending = watch.ending(me.worker, is_filled=is_filled)
        leaves_alarms = watch.is_leaving and (alarm is not None or loaded.opened.due is not None)
        if loaded.opened.others_wait and is_filled and (more or leaves_alarms):
            ending = msgspec.structs.replace(ending, nudges=1)
        in_transaction = scheduling.is_in_transaction
        claims = await scheduling.write(loaded, plan, holders, ending)
        if loaded.forced:
            await scheduling.connection.execute(STATEMENTS["forget_forced"], scheduling.queue.id)
        if in_transaction:
            await scheduling.connection.execute("commit")
        watch.committed()
        self._checkpoints.soon(scheduling.queue.id)
        # Who found nothing waits for leases to end as well.
        dues = [alarm, loaded.opened.due, scheduling.lease_due]
        return Claimed(
            claims,
            me.lease,
            None if is_filled else min((due for due in dues if due is not None), default=None),
            more,
            watch.looks_again,
            plan.queue.vtime,
            bool(policy.limits),
            len(loaded.arrivals) + len(loaded.opened.releases),
            loaded.now,
            paces_of(claims, plan.starts),
            policy,
            policy.opens_by_ends,
        )

    async def _claim_nothing(self, scheduling: Scheduling) -> Claimed:
        """Nobody has a slot. What waits for its instant is held all the same, by terms that may have changed."""
        terms, _ = await scheduling.in_force()
        return Claimed([], uuid4(), None, more=False, look_again=False, terms=terms)

    async def checkpoint(self, queue: int) -> None:
        """Write what the tables of a queue do not hold."""
        async with self.locked(self._handle(queue), durable=False) as scheduling:
            await scheduling.checkpoint(await scheduling.load(0))

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


def _choice(chosen: QueueHandle, queues: Sequence[QueueHandle], loaded: Loaded) -> Choice:
    names = {queue.id: queue.name for queue in queues}
    opened = loaded.opened
    others = [(names[queue], vtime, is_taken) for queue, vtime, is_taken in opened.others]
    taken = frozenset(name for name, _, is_taken in others if is_taken)
    return Choice(chosen.name, taken, {name: vtime for name, vtime, _ in others} | {chosen.name: opened.state.vtime})


async def look(connection: Connection, watches: Iterable[Watch]) -> None:
    """Before the bells are drained: which producers may not have seen a registration?

    Those that have ended by now are seen by whatever drains next, be it this claim or, where it goes elsewhere, a later
    one.
    """
    uncertain = [watch for watch in watches if watch.is_uncertain]
    if uncertain:
        producers = [row[0] for row in await connection.fetch(STATEMENTS["select_producers"])]
        for watch in uncertain:
            watch.observe(producers)


class Watch:
    """How one claim leaves its listener: waiting for work in the queue, or not."""

    def __init__(
        self, queue: int, listener: PostgresListener | None, start_lag: int = 0, ahead: int | None = None
    ) -> None:
        self.start_lag = start_lag
        self.ahead = ahead
        self._queue = queue
        self._listener = listener
        self._before = listener.registration(queue) if listener else None
        self._after = self._before
        self._heard = listener.heard(queue) if listener else 0
        self.looks_again = False
        """A producer may not have seen the registration: look again."""

    @property
    def listens(self) -> bool:
        """Whether it can be woken."""
        return self._listener is not None and self._listener.ear is not None

    @property
    def is_registered(self) -> bool:
        return self._before is not None

    @property
    def is_uncertain(self) -> bool:
        """A producer may not have seen the registration."""
        return self._before is not None and not self._before.is_certain

    def observe(self, producers: Sequence[str]) -> None:
        """These may not have seen the registration, if they are older than it."""
        assert self._before is not None
        self._before.observe(producers)

    def ending(self, worker: UUID, *, is_filled: bool) -> Ending:
        """Whether the claim registers its listener, or withdraws it."""
        if self._listener is None:
            return Ending()
        self._after = None
        if is_filled:
            return Ending(worker) if self._before is not None else Ending()
        if self._before is not None:
            self._after = self._before
            self.looks_again = not self._before.is_certain
            return Ending()
        ear = self._listener.ear
        if ear is None:
            return Ending()
        self._after = Registration(ear)
        self.looks_again = True
        return Ending(worker, ear)

    @property
    def is_leaving(self) -> bool:
        """It waited, and does not any more."""
        return self._before is not None and self._after is None

    def committed(self) -> None:
        if self._listener is None:
            return
        if self._after is None:
            if self._before is not None:
                self._listener.withdrawn(self._queue, self._heard)
        elif self._after is not self._before:
            self._listener.registered(self._queue, self._after)


async def look_at(
    claimer: Claimer, queue: QueueHandle, want: int, worker: WorkerIdentity, listener: PostgresListener
) -> Looked:
    """How many jobs could start now, up to `want`."""
    watch = Watch(queue.id, listener)
    async with claimer.locked(queue, durable=False) as scheduling:
        looked = await _look(scheduling, want, worker, watch)
    watch.committed()
    return looked


async def stop_looking(
    claimer: Claimer, queue: QueueHandle, worker: WorkerIdentity, listener: PostgresListener
) -> Looked:
    """Withdraw the listener, and let another have its wake-up."""
    watch = Watch(queue.id, listener)
    async with claimer.locked(queue, durable=False) as scheduling:
        connection = scheduling.connection
        watch.ending(worker.id, is_filled=True)
        await connection.execute(STATEMENTS["withdraw_waiter"], queue.id, worker.id)
        await connection.execute(STATEMENTS["nudge"], queue.id, 1, worker.id)
    watch.committed()
    return Looked(0, 0, None, look_again=False)


async def _look(scheduling: Scheduling, want: int, worker: WorkerIdentity, watch: Watch) -> Looked:
    connection = scheduling.connection
    await look(connection, [watch])
    await connection.execute(STATEMENTS["begin_look"])
    loaded = await scheduling.see_to(await scheduling.load(want), want)
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
    dues = () if is_filled else (alarm, loaded.opened.due, scheduling.lease_due)
    is_partial = not is_filled and (plan.more or not loaded.all_folded)
    due = min((each for each in dues if each is not None), default=None)
    return Looked(len(plan.starts), loaded.now, due, watch.looks_again or is_partial)
