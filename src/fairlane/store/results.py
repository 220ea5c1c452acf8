"""Waiting for jobs to end: who in this process waits for which, and how one wait goes. Each store has its way."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from uuid import UUID

from fairlane.clock import Instant
from fairlane.errors import StoreUnavailable
from fairlane.job import JobRecord

LOOK_EVERY = 10.0
"""Seconds between looks at a job of which nothing is heard: the last resort, if who ended it died before saying so."""


class Waits:
    """The jobs whose end is awaited in this process."""

    def __init__(
        self, look: Callable[[UUID], Awaitable[JobRecord]], sleep_until: Callable[[Instant], Awaitable[None]]
    ) -> None:
        self._look_at = look
        self._sleep_until = sleep_until
        self._waits: dict[UUID, set[asyncio.Event]] = {}
        self._is_closed = False

    def open(self) -> None:
        self._is_closed = False

    async def ended(self, job: UUID, until: Instant | None) -> JobRecord:
        """The job once it has ended, or as it stands at `until`."""
        record = await self._look_at(job)
        if record.state.is_final:
            return record
        if self._is_closed:
            raise StoreUnavailable("the store is closed; open it first")
        look = asyncio.Event()
        self._waits.setdefault(job, set()).add(look)
        try:
            await self._register(job, look)
            return await self._see_end(job, look, until)
        finally:
            self._waits[job].discard(look)
            if not self._waits[job]:
                del self._waits[job]
                self._withdraw(job)

    async def _register(self, job: UUID, look: asyncio.Event) -> None:
        """From now on whoever ends the job lets us look; if it has ended already, we do so at once."""

    def _withdraw(self, job: UUID) -> None:
        """Nobody waits for this job any more."""

    async def _see_end(self, job: UUID, look: asyncio.Event, until: Instant | None) -> JobRecord:
        timer = None if until is None else asyncio.ensure_future(self._sleep_until(until))
        if timer is not None:
            timer.add_done_callback(lambda _: look.set())
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY):
                        await look.wait()
                look.clear()
                # Asked before the look: what has ended by then counts, however late the look is.
                is_due = timer is not None and timer.done()
                record = await self._look_at(job)
                if is_due or record.state.is_final:
                    return record
        finally:
            if timer is not None:
                timer.cancel()
                await asyncio.gather(timer, return_exceptions=True)

    def let_look(self, jobs: Iterable[UUID]) -> None:
        """Let whoever waits for these jobs look."""
        for job in jobs:
            for look in self._waits.get(job, ()):
                look.set()

    def dismiss(self) -> None:
        """Let whoever still waits find the store closed."""
        self.let_look(list(self._waits))
