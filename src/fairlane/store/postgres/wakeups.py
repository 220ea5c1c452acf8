"""Waking workers: each listens on a channel of its own, and is notified only while it waits.

A worker registers as a waiter in the claim that left slots free, and withdraws in the one that filled them. Whoever
makes work claimable notifies one waiter per job, and nobody where nobody waits: NOTIFY takes a global lock at commit.
What can go wrong between the two is closed here:

- A producer that did not see the registration commits after the waiter has looked. The waiter looks again until every
  transaction that was open when it registered has ended (`Registration.producers`).
- A nudge reaches a worker that has just filled its slots. It passes the nudge on.
- A worker dies. Its session held the lock that its registration names (`alive_lock`), so nobody speaks to it any more.
- The connection breaks. The worker is nudged when it is back, as it may have missed something, and registers anew.

Waiting for jobs to end: one session listens for all who wait in this process.
Whoever ends jobs notifies those who wait for them, and looks for them only while somebody listens at all. Waits are
registered in batches, by one loop, on the session that listens. What can go wrong is closed here:

- A settlement that did not see the registration commits after the look. So the loop looks again until every
  transaction that was settling when the registration was committed has ended (`Registration`).
- The connection breaks. What was awaited is registered anew, with the look that belongs to it.
- The process dies. Its session held the lock that its row names, so nobody speaks to it, and a reaper removes its rows.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from uuid import UUID, uuid4

import msgspec

from fairlane.clock import Instant
from fairlane.errors import ConfigurationError, StoreUnavailable
from fairlane.job import JobRecord
from fairlane.store.postgres.connections import STATEMENTS, Connection, Connections, Session, StoreClock, hang_up
from fairlane.store.protocol import Listener, WorkerIdentity
from fairlane.store.results import Waits
from fairlane.waits import first_of

log = logging.getLogger("fairlane.store.postgres")

EVERYBODY = "fairlane"
SCHEDULES = "schedules"
"""Said to everybody instead of a queue's number."""
FIRST_PAUSE = 0.05
LONGEST_PAUSE = 5.0
PULSE_EVERY, PULSE_WITHIN = 10.0, 5.0
"""Seconds between two signs of life that a listening session is asked for, and for which one is waited for. A
connection that has silently died says nothing, and neither does one on which nothing happens."""
LEAVE_WITHIN = 5.0
"""Seconds for which a listener that ends tries to say so."""


async def has_pulse(connection: Session) -> bool:
    """Ask a session that listens for a sign of life; one that gives none is ended."""
    try:
        async with asyncio.timeout(PULSE_WITHIN):
            await connection.execute(STATEMENTS["pulse"])
    except Exception as error:
        log.warning("a session that listens gives no sign of life and is ended: %s", str(error) or "silence")
        connection.terminate()
        return False
    return True


async def listening(
    connections: Connections,
    statement: str,
    alive_lock: int,
    owner: UUID,
    hear: Mapping[str, Callable[[Connection, int, str, object], None]],
    on_end: Callable[[Connection], None],
) -> Session:
    """A session that holds the lock `alive_lock` and listens: on the channel that the statement names (""), and on
    others."""
    connection = await connections.connect()
    try:
        connection.add_termination_listener(on_end)
        with connections.in_use(connection):
            own = await connection.fetchval(STATEMENTS[statement], alive_lock, owner, column=1)
            for channel, callback in hear.items():
                await connection.add_listener(channel or own, callback)
    except BaseException:
        await hang_up(connection)
        raise
    return connection


class Registration:
    """A listener that waits for work in one queue."""

    __slots__ = ("alive_lock", "producers")

    def __init__(self, alive_lock: int) -> None:
        self.alive_lock = alive_lock
        self.producers: set[str] | None = None
        """Transactions that may not have seen it, still open; `None` until it has been looked at for the first time."""

    def observe(self, open_now: Iterable[str]) -> None:
        found = set(open_now)
        self.producers = found if self.producers is None else self.producers & found

    @property
    def is_certain(self) -> bool:
        """Whether every producer from now on sees it."""
        return self.producers is not None and not self.producers


class PostgresListener:
    """The listener of one worker process."""

    def __init__(self, worker: WorkerIdentity, connections: Connections, clock: StoreClock) -> None:
        self.worker = worker
        self._connections = connections
        self._clock = clock
        self._registrations: dict[int, Registration] = {}
        self._queues: set[int] = set()
        self._heard: Counter[int] = Counter()
        self._nudged = asyncio.Event()
        self._has_schedules_changed = False
        self._ended = asyncio.Event()
        self._connection: Session | None = None
        self._alive_lock = 0
        self._listening: asyncio.Task[None] | None = None
        self._passing: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        await self._connect()
        self._listening = asyncio.create_task(self._stay_connected(), name="fairlane listener")

    # -- what the worker asks -----------------------------------------------------------------------------------

    async def wait(self, until: Instant | None) -> bool:
        """Return True at a nudge, False once `until` has come."""
        alarms = [] if until is None else [self._clock.sleep_until(until)]
        await first_of(self._nudged.wait(), *alarms)
        nudged = self._nudged.is_set()
        self._nudged.clear()
        return nudged

    def schedules_changed(self) -> bool:
        """Whether an operator has acted on a schedule since this was last asked."""
        changed, self._has_schedules_changed = self._has_schedules_changed, False
        return changed

    async def close(self) -> None:
        """Stop listening, withdraw from every queue, and leave the watch to another."""
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)
        # Whatever is heard from now on is passed on: we take no more work.
        self._registrations.clear()
        with contextlib.suppress(StoreUnavailable, TimeoutError):
            async with (
                asyncio.timeout(LEAVE_WITHIN),
                self._connections.session() as connection,
                connection.transaction(),
            ):
                await connection.execute(STATEMENTS["withdraw_worker"], self.worker.id)
                for queue in sorted(self._queues):
                    await connection.execute(STATEMENTS["nudge"], queue, 1, self.worker.id)
        if self._connection is not None:
            await hang_up(self._connection)
        # One nudge a queue would do for what was heard before the withdrawal, as whoever leaves work behind passes a
        # wake-up on. What was heard after it is about work that this nudge may have come too early for.
        if self._passing:
            await asyncio.wait(self._passing, timeout=LEAVE_WITHIN)

    # -- what a claim asks --------------------------------------------------------------------------------------

    def registration(self, queue: int) -> Registration | None:
        """How this listener stands in a queue."""
        self._queues.add(queue)
        return self._registrations.get(queue)

    def heard(self, queue: int) -> int:
        """How many nudges for a queue have come so far."""
        return self._heard[queue]

    @property
    def alive_lock(self) -> int | None:
        """The lock that says that it listens; nothing while its connection is down."""
        return self._alive_lock or None

    def registered(self, queue: int, registration: Registration) -> None:
        """A claim has committed the registration."""
        # A connection that broke meanwhile has taken the listener with it: the next claim registers again.
        if registration.alive_lock == self._alive_lock:
            self._registrations[queue] = registration

    def withdrawn(self, queue: int, heard_before: int) -> None:
        """A claim has filled the slots. What was heard during it may be about work that it did not see."""
        self._registrations.pop(queue, None)
        if self.heard(queue) != heard_before:
            self._pass_on(queue)

    # -- what the server says -----------------------------------------------------------------------------------

    def _on_own_channel(self, _connection: Connection, _pid: int, _channel: str, payload: object) -> None:
        if not isinstance(payload, str) or not payload.isdigit():
            self._nudged.set()
            return
        if not self._hear(int(payload)):
            self._pass_on(int(payload))

    def _on_everybodys_channel(self, _connection: Connection, _pid: int, _channel: str, payload: object) -> None:
        if payload == SCHEDULES:
            self._has_schedules_changed = True
            self._nudged.set()
            return
        self._hear(int(str(payload)))

    def _hear(self, queue: int) -> bool:
        """A nudge for a queue has come; whether it is for us."""
        self._heard[queue] += 1
        is_ours = queue in self._registrations
        if is_ours:
            self._nudged.set()
        return is_ours

    def _pass_on(self, queue: int) -> None:
        task = asyncio.create_task(self._nudge_another(queue))
        self._passing.add(task)
        task.add_done_callback(self._passing.discard)

    async def _nudge_another(self, queue: int) -> None:
        try:
            async with self._connections.session() as connection:
                await connection.execute(STATEMENTS["nudge"], queue, 1, self.worker.id)
        except StoreUnavailable:
            # Whoever listens is nudged when it is connected again.
            log.debug("a nudge for queue %d could not be passed on", queue)

    # -- staying connected --------------------------------------------------------------------------------------

    async def _connect(self) -> None:
        alive_lock, ended = secrets.randbits(62) + 1, asyncio.Event()
        hear = {"": self._on_own_channel, EVERYBODY: self._on_everybodys_channel}
        connection = await listening(
            self._connections, "listen", alive_lock, self.worker.id, hear, lambda _: ended.set()
        )
        self._connection, self._ended, self._alive_lock = connection, ended, alive_lock

    async def _stay_connected(self) -> None:
        while True:
            await self._watch()
            self._alive_lock = 0
            self._registrations.clear()
            await self._reconnect()
            self._has_schedules_changed = True  # nobody knows what was said meanwhile
            self._nudged.set()

    async def _watch(self) -> None:
        """Return once the connection has ended, which those that die in silence must be helped to."""
        while not self._ended.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PULSE_EVERY):
                    await self._ended.wait()
            if self._connection is not None and not self._ended.is_set():
                await has_pulse(self._connection)

    async def _reconnect(self) -> None:
        pause = FIRST_PAUSE
        while True:
            try:
                return await self._connect()
            except Exception as error:
                if not isinstance(error, StoreUnavailable):
                    log.exception("a listener cannot connect; trying again in %.1f s", pause)
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE)


class Ending(msgspec.Struct, frozen=True):
    """How a claim leaves whoever made it: waiting for work with this lock, or (without one) not; and whom it wakes."""

    waiter: UUID | None = None
    alive_lock: int | None = None
    nudges: int = 0


async def observe_producers(connection: Connection, watches: Iterable[Watch]) -> None:
    """Before the lane events are drained: which producers may not have seen a registration?

    Those that have ended by now are seen by whatever drains next, be it this claim or, where it goes elsewhere, a later
    one.
    """
    uncertain = [watch.uncertain for watch in watches if watch.uncertain is not None]
    if uncertain:
        producers = [row[0] for row in await connection.fetch(STATEMENTS["select_producers"])]
        for registration in uncertain:
            registration.observe(producers)


class Watch:
    """How one claim leaves its listener: waiting for work in the queue, or not."""

    def __init__(self, queue: int, listener: Listener | None) -> None:
        if listener is not None and not isinstance(listener, PostgresListener):
            raise ConfigurationError(f"listener={type(listener).__name__} is not of this store; take it from listen()")
        self._queue = queue
        self._listener = own = listener
        self._before = own.registration(queue) if own else None
        self._after = self._before
        self._heard = own.heard(queue) if own else 0
        self.looks_again = False
        """A producer may not have seen the registration: look again."""

    @property
    def listens(self) -> bool:
        """Whether it can be woken."""
        return self._listener is not None and self._listener.alive_lock is not None

    @property
    def is_registered(self) -> bool:
        return self._before is not None

    @property
    def uncertain(self) -> Registration | None:
        """The registration, if a producer may not have seen it."""
        return None if self._before is None or self._before.is_certain else self._before

    def ending(self, worker: UUID, *, is_filled: bool) -> Ending:
        """Whether the claim registers its listener, or withdraws it."""
        if self._listener is None:
            return Ending()
        self._after = None
        if is_filled:
            return Ending(worker) if self._before is not None else Ending()
        alive_lock = self._listener.alive_lock
        if self._before is not None:
            self._after = self._before
        elif alive_lock is not None:
            self._after = Registration(alive_lock)
        self.looks_again = self._after is not None and not self._after.is_certain
        return Ending() if self._after is self._before or alive_lock is None else Ending(worker, alive_lock)

    @property
    def is_leaving(self) -> bool:
        """It waited, and does not any more."""
        return self._before is not None and self._after is None

    def committed(self) -> None:
        if self._listener is None or self._after is self._before:
            return
        if self._after is None:
            self._listener.withdrawn(self._queue, self._heard)
        else:
            self._listener.registered(self._queue, self._after)


FIRST_LOOK, LONGEST_LOOK = 0.002, 0.25
"""Seconds before another look while a settlement that was under way goes on; doubled each time."""
IDLE_AFTER = 60.0
"""Seconds without a wait after which the session ends: from then on settlements look for nobody."""


class ResultListener(Waits):
    """Listens for everyone in this process who waits for a job to end."""

    def __init__(
        self,
        connections: Connections,
        look: Callable[[UUID], Awaitable[JobRecord]],
        sleep_until: Callable[[Instant], Awaitable[None]],
    ) -> None:
        super().__init__(look, sleep_until)
        self._connections = connections
        self._new: set[UUID] = set()
        self._registered: set[UUID] = set()
        self._withdrawn: set[UUID] = set()
        self._uncertain: list[tuple[Registration, set[UUID]]] = []
        self._asked = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None
        self._connection: Session | None = None
        self._id = UUID(int=0)
        self._alive_lock = 0

    async def close(self) -> None:
        """Stop listening, for good or until `open`."""
        self._is_closed = True
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
            self._serving = None
        await self._disconnect()

    async def _register(self, job: UUID, look: asyncio.Event) -> None:
        if self._serving is None:
            self._serving = asyncio.create_task(self._serve(), name="fairlane results")
        # Also where somebody waits for it already: it may have been announced a moment ago.
        self._new.add(job)
        self._asked.set()

    def _withdraw(self, job: UUID) -> None:
        if job in self._registered:
            self._withdrawn.add(job)
            self._asked.set()

    # The loop.

    async def _serve(self) -> None:
        trouble, pause = FIRST_PAUSE, FIRST_LOOK
        while True:
            await self._due(pause)
            pause = FIRST_LOOK if self._new else min(2 * pause, LONGEST_LOOK)
            try:
                await self._register_and_look()
                trouble = FIRST_PAUSE
            except Exception as error:
                if not isinstance(error, StoreUnavailable):
                    log.exception("results cannot be listened for; trying again in %.1f s", trouble)
                await self._disconnect()
                await asyncio.sleep(trouble)
                trouble = min(2 * trouble, LONGEST_PAUSE)

    async def _due(self, pause: float) -> None:
        """Return when there is something to register, to withdraw or to look at."""
        patience = pause if self._uncertain else PULSE_EVERY if self._waits else IDLE_AFTER
        try:
            async with asyncio.timeout(patience):
                await self._asked.wait()
        except TimeoutError:
            if not self._uncertain and not self._waits:
                await self._disconnect()
            elif not self._uncertain and self._connection is not None:
                await has_pulse(self._connection)
        self._asked.clear()

    async def _register_and_look(self) -> None:
        new = {job for job in self._new if job in self._waits}
        gone = {job for job in self._withdrawn if job not in self._waits}
        self._new.clear()
        self._withdrawn.clear()
        if not new and not gone and not self._uncertain:
            return
        connection = self._connection or await self._connect()
        with self._connections.in_use(connection):
            if gone:
                self._registered -= gone
                await connection.execute(STATEMENTS["withdraw_results"], self._id, list(gone))
            if new:
                self._registered |= new
                self._uncertain.append((Registration(self._alive_lock), new))
                await connection.execute(STATEMENTS["await_results"], self._id, list(new))
            if self._uncertain:
                await self._look(connection)

    async def _look(self, connection: Connection) -> None:
        # Asked before the look: who is not among them any more has committed, and the look sees it.
        settlers = [row[0] for row in await connection.fetch(STATEMENTS["select_settlers"])]
        for registration, _ in self._uncertain:
            registration.observe(settlers)
        jobs = {job for _, registered in self._uncertain for job in registered if job in self._waits}
        self.let_look(row[0] for row in await connection.fetch(STATEMENTS["select_ended"], list(jobs)))
        self._uncertain = [each for each in self._uncertain if not each[0].is_certain]

    # The session.

    async def _connect(self) -> Session:
        waiter, alive_lock = uuid4(), secrets.randbits(62) + 1
        heard = {"": self._on_announcement}
        connection = await listening(self._connections, "open_results", alive_lock, waiter, heard, self._on_end)
        self._connection, self._id, self._alive_lock = connection, waiter, alive_lock
        return connection

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        self._start_over()
        if connection is not None:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(connection.execute(STATEMENTS["close_results"], self._id), LONGEST_PAUSE)
            await hang_up(connection)

    def _on_announcement(self, _connection: Connection, _pid: int, _channel: str, payload: object) -> None:
        self.let_look([UUID(str(payload))])

    def _on_end(self, connection: Connection) -> None:
        if connection is self._connection:
            self._connection = None
            self._start_over()

    def _start_over(self) -> None:
        """Nothing is registered any more: whatever is awaited must be, with the look that belongs to it."""
        self._registered.clear()
        self._withdrawn.clear()
        self._uncertain.clear()
        self._new.update(self._waits)
        if self._new:
            self._asked.set()
