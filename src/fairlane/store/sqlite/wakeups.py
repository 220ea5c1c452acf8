"""Waking workers on one machine: a Unix datagram per waiter, sent once the job is committed.

A waiter registers in the transaction of the claim that found too little. There is one writer at a time, so a producer
either commits before that claim, which then sees its job, or after it, and then sees the waiter: no wake-up is lost
between the two. `PRAGMA data_version`, looked at once a second, covers a producer that dies before it has sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from uuid import UUID

from fairlane.clock import Clock, Instant
from fairlane.store.protocol import WorkerIdentity
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
    """The ear of one worker process."""

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
