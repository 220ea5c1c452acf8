"""Waiting for jobs to end: the waits of this process, and how one goes. Each store has its own way to announce ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from typing import Any
from uuid import UUID

from fairlane.job import JobRecord

LOOK_EVERY = 10.0
"""Seconds between looks at a job: the last resort, if the process that ended it died before it announced that."""


class Awaited:
    """The jobs whose end is awaited in this process."""

    def __init__(self) -> None:
        self._waits: dict[UUID, set[asyncio.Event]] = {}

    def __contains__(self, job: UUID) -> bool:
        return job in self._waits

    def __bool__(self) -> bool:
        return bool(self._waits)

    @property
    def jobs(self) -> list[UUID]:
        return list(self._waits)

    @contextlib.contextmanager
    def waiting_for(self, job: UUID) -> Iterator[asyncio.Event]:
        """What is set whenever it is worth a look."""
        event = asyncio.Event()
        self._waits.setdefault(job, set()).add(event)
        try:
            yield event
        finally:
            self._waits[job].discard(event)
            if not self._waits[job]:
                del self._waits[job]

    def tell(self, jobs: Iterable[UUID]) -> None:
        """Wake the waits for these jobs."""
        for job in jobs:
            for event in self._waits.get(job, ()):
                event.set()


async def forever() -> None:
    """An alarm that never goes off."""
    await asyncio.get_running_loop().create_future()


async def see_end(
    look: Callable[[], Awaitable[JobRecord]], event: asyncio.Event, alarm: Callable[[], Coroutine[Any, Any, None]]
) -> JobRecord:
    """Look whenever the event is set, until the job has ended or `alarm` has; returns the job as it stands then."""
    timer = asyncio.ensure_future(alarm())
    timer.add_done_callback(lambda _: event.set())
    try:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(event.wait(), LOOK_EVERY)
            event.clear()
            # Asked before the look: what has ended by then counts, however late the look is.
            is_due = timer.done()
            record = await look()
            if is_due or record.state.is_final:
                return record
    finally:
        timer.cancel()
        await asyncio.gather(timer, return_exceptions=True)
