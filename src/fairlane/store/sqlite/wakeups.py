"""Waking workers on one machine: a Unix datagram per waiter, sent once the job is committed.

A waiter registers in the transaction of the claim that found too little. There is one writer at a time, so a producer
either commits before that claim, which then sees its job, or after it, and then sees the waiter: no wake-up is lost
between the two. `PRAGMA data_version`, looked at once a second, covers a producer that dies before it has sent.

Waiting for jobs to end: a mailbox for each process, nudged once the end of a job is committed.
A waiter registers in a transaction that also looks at the job. There is one writer at a time, so whoever ends the job
either commits before that, which is then seen, or after it, and then sees the waiter. A nudge says no more than that it
is worth a look: a full mailbox loses nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from pathlib import Path
from uuid import UUID, uuid4

from fairlane.clock import Clock, Instant
from fairlane.errors import StoreUnavailable
from fairlane.job import JobRecord
from fairlane.store.protocol import WorkerIdentity
from fairlane.store.results import Waits
from fairlane.store.sqlite.database import Database, Transaction
from fairlane.waits import first_of

WORK = b"!"
SCHEDULES = b"s"
"""What a nudge says."""
LOOK_EVERY = 1_000_000
"""Microseconds between looks at `data_version`: the last resort."""


def _address(worker: UUID) -> str:
    name = f"fairlane-{worker.hex}"
    # Linux has names without a file: nothing to clean up after a kill, and no folder whose path is too long.
    return f"\0{name}" if sys.platform == "linux" else str(Path(tempfile.gettempdir()) / f"{name}.sock")


def nudge(worker: UUID, what: bytes = WORK) -> bool:
    """Wake a worker; False when it is gone."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        try:
            sender.sendto(what, _address(worker))
        except BlockingIOError:
            return True  # its mailbox is full of nudges it has not read yet
        except OSError:
            return False
    return True


def is_listening(owner: UUID) -> bool:
    """Whether a mailbox is there to be nudged."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        try:
            sender.connect(_address(owner))
        except OSError:
            return False
    return True


def take_waiters(tx: Transaction, queues: Mapping[int, int]) -> list[UUID]:
    """For each queue, as many waiters as jobs became claimable."""
    return [UUID(bytes=worker) for queue, count in queues.items() for (worker,) in tx.all("take_waiters", queue, count)]


class Mailbox:
    """Where one listener is nudged, in the loop that it was made in."""

    def __init__(self, owner: UUID, on_nudge: Callable[[bytes], None]) -> None:
        self._on_nudge = on_nudge
        self._path = _address(owner)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(self._path)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._read)

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while what := self._socket.recv(16):
                self._on_nudge(what)

    def close(self) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        if not self._path.startswith("\0"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)


class SqliteListener:
    """The listener of one worker process."""

    def __init__(self, worker: WorkerIdentity, database: Database, clock: Clock) -> None:
        self.worker = worker
        self._database = database
        self._clock = clock
        self._nudged = asyncio.Event()
        self._seen = 0
        self._has_schedules_changed = False
        self._mailbox = Mailbox(worker.id, self._on_nudge)

    def _on_nudge(self, what: bytes) -> None:
        self._has_schedules_changed |= what == SCHEDULES
        self._nudged.set()

    def schedules_changed(self) -> bool:
        """Whether an operator has acted on a schedule since this was last asked."""
        changed, self._has_schedules_changed = self._has_schedules_changed, False
        return changed

    async def wait(self, until: Instant | None) -> bool:
        """Return True at a nudge, False once `until` has come."""
        await first_of(self._nudged.wait(), self._alarm(until))
        nudged = self._nudged.is_set()
        self._nudged.clear()
        return nudged

    async def _alarm(self, until: Instant | None) -> None:
        """End at `until`, or let another process's write end the wait."""
        if self._database.path is None:
            await self._sleep(until)
            return
        self._seen = self._seen or await self._database.data_version()
        while True:
            look_at = self._clock.now() + LOOK_EVERY
            await self._sleep(look_at if until is None else min(until, look_at))
            if until is not None and self._clock.now() >= until:
                return
            version = await self._database.data_version()
            if version != self._seen:
                self._seen = version
                self._nudged.set()
                return

    async def _sleep(self, until: Instant | None) -> None:
        if until is None:
            await asyncio.get_running_loop().create_future()
        else:
            await self._clock.sleep_until(until)

    async def close(self) -> None:
        """Stop listening. Registrations go with the first nudge that finds nobody."""
        self._mailbox.close()


class ResultListener(Waits):
    """Listens for everyone in this process who waits for a job to end."""

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


def take_result_waiters(tx: Transaction, jobs: Collection[UUID]) -> set[UUID]:
    """The waiters of those of these jobs that have ended; they are to be nudged once that is committed."""
    if not jobs or not tx.value("has_result_waiters"):
        return set()
    return {UUID(bytes=waiter) for job in jobs for (waiter,) in tx.all("take_result_waiters", job.bytes)}


def forget_deaf_waiters(tx: Transaction) -> None:
    """Remove what dead processes have registered."""
    for (waiter,) in tx.all("select_result_waiters"):
        if not is_listening(UUID(bytes=waiter)):
            tx.run("delete_result_waiter", waiter)
