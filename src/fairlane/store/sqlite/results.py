"""Waiting for jobs to end on SQLite: a mailbox for each process, nudged once the end of a job is committed.

A waiter registers in a transaction that also looks at the job. There is one writer at a time, so whoever ends the job
either commits before that, which is then seen, or after it, and then sees the waiter. A nudge says no more than that it
is worth a look: a full mailbox loses nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Iterable
from uuid import UUID, uuid4

from fairlane.clock import Instant
from fairlane.errors import StoreUnavailable
from fairlane.job import JobRecord
from fairlane.store.results import Waits
from fairlane.store.sqlite.database import Database, Transaction
from fairlane.store.sqlite.wakeups import Mailbox, is_listening


class ResultListener(Waits):
    """The ear of everyone in this process who waits for a job to end."""

    def __init__(
        self,
        database: Database,
        look: Callable[[UUID], Awaitable[JobRecord]],
        sleep_until: Callable[[Instant], Awaitable[None]],
    ) -> None:
        super().__init__(look, sleep_until)
        self._database = database
        self._id = uuid4()
        self._nudged = asyncio.Event()
        self._mailbox: Mailbox | None = None
        self._looking: asyncio.Task[None] | None = None

    async def _register(self, job: UUID, look: asyncio.Event) -> None:
        if self._mailbox is None:
            self._mailbox = Mailbox(self._id, lambda _: self._nudged.set())
            self._looking = asyncio.create_task(self._look_when_nudged(), name="fairlane results")
        # A registration stays until the job ends, also if nobody waits any more: that is a nudge too many, at most.
        if await self._database.write(lambda tx: _register(tx, job, self._id), durable=False):
            look.set()

    async def close(self) -> None:
        """Stop listening."""
        self._is_closed = True
        if self._mailbox is None or self._looking is None:
            return
        self._looking.cancel()
        await asyncio.gather(self._looking, return_exceptions=True)
        self._mailbox.close()
        self._mailbox = None
        with contextlib.suppress(StoreUnavailable):
            await self._database.write(lambda tx: tx.run("delete_result_waiter", self._id.bytes), durable=False)

    async def _look_when_nudged(self) -> None:
        while True:
            await self._nudged.wait()
            self._nudged.clear()
            jobs = list(self._waits)
            try:
                self.let_look(await self._database.read(lambda tx, jobs=jobs: _ended(tx, jobs)))  # type: ignore[misc]
            except Exception:
                self.let_look(jobs)  # they look for themselves, and get the error


def _register(tx: Transaction, job: UUID, waiter: UUID) -> bool:
    """Whether the job has ended already; else its waiter is registered."""
    if tx.value("has_ended", job.bytes):
        return True
    tx.run("register_result_waiter", job.bytes, waiter.bytes)
    return False


def _ended(tx: Transaction, jobs: Iterable[UUID]) -> list[UUID]:
    return [job for job in jobs if tx.value("has_ended", job.bytes)]


def take_waiters(tx: Transaction, jobs: Collection[UUID]) -> set[UUID]:
    """The waiters of those of these jobs that have ended; they are to be nudged once that is committed."""
    if not jobs or not tx.value("has_result_waiters"):
        return set()
    return {UUID(bytes=waiter) for job in jobs for (waiter,) in tx.all("take_result_waiters", job.bytes)}


def forget_deaf_waiters(tx: Transaction) -> None:
    """Remove what dead processes have registered."""
    for (waiter,) in tx.all("select_result_waiters"):
        if not is_listening(UUID(bytes=waiter)):
            tx.run("delete_result_waiter", waiter)
