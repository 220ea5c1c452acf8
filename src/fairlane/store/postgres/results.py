"""Waiting for jobs to end on PostgreSQL: one session listens for all who wait in this process.

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
from collections.abc import Awaitable, Callable
from uuid import UUID, uuid4

from fairlane.clock import Instant
from fairlane.errors import StoreUnavailable
from fairlane.job import JobRecord
from fairlane.store.postgres.connections import STATEMENTS, Connection, Connections, Session, hang_up
from fairlane.store.postgres.wakeups import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    PULSE_EVERY,
    Registration,
    has_pulse,
    listening,
)
from fairlane.store.results import Waits

log = logging.getLogger("fairlane.store.postgres")

FIRST_LOOK, LONGEST_LOOK = 0.002, 0.25
"""Seconds before another look while a settlement that was under way goes on; doubled each time."""
IDLE_AFTER = 60.0
"""Seconds without a wait after which the session ends: from then on settlements look for nobody."""


class ResultListener(Waits):
    """The ear of everyone in this process who waits for a job to end."""

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
        self._ear = 0

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
                self._uncertain.append((Registration(self._ear), new))
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
        waiter, ear = uuid4(), secrets.randbits(62) + 1
        heard = {"": self._on_announcement}
        connection = await listening(self._connections, "open_results", ear, waiter, heard, self._on_end)
        self._connection, self._id, self._ear = connection, waiter, ear
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
