"""Jobs that producers of one process hand in one by one, stored together where they meet.

A commit costs the server more than the row that it makes durable. So whoever comes while others are being stored joins
the next statement; whoever comes alone is stored at once. Nobody waits for a timer, and everybody hears of their own
job only, once it is durable.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence

from fairlane.errors import DuplicateJob, InvalidJob
from fairlane.job import NewJob
from fairlane.store.postgres import jobs
from fairlane.store.postgres.connections import Connection, Connections
from fairlane.store.postgres.timing import StoreClock

STATEMENTS_AT_ONCE = 2
"""While the server carries out one, the next is made."""
JOBS_AT_ONCE = 200
BYTES_AT_ONCE = 1 << 20

Waiter = asyncio.Future[None]


class Gathering:
    """Where jobs meet on their way to the server."""

    def __init__(self, connections: Connections, clock: StoreClock, queues: Mapping[str, int]) -> None:
        self._connections = connections
        self._clock = clock
        self._queues = queues
        self._waiting: deque[tuple[NewJob, Waiter]] = deque()
        self._under_way = 0
        self._is_starting = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def store(self, job: NewJob) -> None:
        """Store a job of a queue whose number is known; it is durable when this returns."""
        waiter: Waiter = asyncio.get_running_loop().create_future()
        self._waiting.append((job, waiter))
        if not self._is_starting and self._under_way < STATEMENTS_AT_ONCE:
            # It begins once everybody has run who is about to: those who are told together come back together.
            self._is_starting = True
            self._under_way += 1
            started = asyncio.create_task(self._run())
            self._tasks.add(started)
            started.add_done_callback(self._tasks.discard)
        await waiter

    async def _run(self) -> None:
        self._is_starting = False
        together: list[tuple[NewJob, Waiter]] = []
        try:
            while together := self._take():
                await self._write(together)
        finally:
            self._under_way -= 1
            for _, waiter in together:
                waiter.cancel()  # we were cancelled, and they will hear nothing

    def _take(self) -> list[tuple[NewJob, Waiter]]:
        """Those who wait, as many as one statement may hold."""
        taken: list[tuple[NewJob, Waiter]] = []
        size = 0
        while self._waiting and len(taken) < JOBS_AT_ONCE and size < BYTES_AT_ONCE:
            job, waiter = self._waiting.popleft()
            if not waiter.done():  # else its producer was cancelled meanwhile
                taken.append((job, waiter))
                size += len(job.payload)
        return taken

    async def _write(self, together: Sequence[tuple[NewJob, Waiter]]) -> None:
        """Store these jobs, in one transaction if nothing speaks against any of them, and tell their producers."""
        was_tried = False

        async def attempt(connection: Connection, is_repeated: bool) -> None:
            nonlocal was_tried
            was_tried = is_repeated
            await self._insert(connection, [job for job, _ in together], is_repeated=is_repeated)

        try:
            await self._connections.again(attempt)
        except (DuplicateJob, InvalidJob) as error:
            if len(together) == 1:
                _tell(together[0][1], error)
                return
            # The fault of one of them. Whether an earlier try of all has committed, each can tell for itself.
            for job, waiter in together:
                await self._write_alone(job, waiter, was_tried=was_tried)
        except Exception as error:
            for _, waiter in together:
                _tell(waiter, error)
        else:
            for _, waiter in together:
                _tell(waiter)

    async def _write_alone(self, job: NewJob, waiter: Waiter, *, was_tried: bool) -> None:
        async def attempt(connection: Connection, is_repeated: bool) -> None:
            await self._insert(connection, [job], is_repeated=was_tried or is_repeated)

        try:
            await self._connections.again(attempt)
        except Exception as error:
            _tell(waiter, error)
        else:
            _tell(waiter)

    async def _insert(self, connection: Connection, batch: Sequence[NewJob], *, is_repeated: bool) -> None:
        now = self._clock.parameter()
        await jobs.insert(connection, batch, self._queues, now, is_callers=False, is_repeated=is_repeated)


def _tell(waiter: Waiter, error: Exception | None = None) -> None:
    if waiter.done():
        return  # cancelled; its job is stored all the same, or not
    if error is None:
        waiter.set_result(None)
    else:
        waiter.set_exception(error)
