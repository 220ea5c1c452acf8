"""Schedules on PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fairlane.clock import Instant
from fairlane.job import NewJob
from fairlane.store.auditing import Note
from fairlane.store.postgres import amending, jobs
from fairlane.store.postgres.connections import STATEMENTS, Connections
from fairlane.store.postgres.timing import StoreClock
from fairlane.store.schedules import ScheduleRow

if TYPE_CHECKING:
    from fairlane.store.postgres.connections import Connection

__all__ = ["ScheduleKeeper"]


class ScheduleKeeper:
    """The part of the PostgreSQL store that keeps schedules."""

    _connections: Connections
    _clock: StoreClock

    async def schedules(self) -> list[ScheduleRow]:
        found = await self._connections.again(lambda connection, _: connection.fetch(STATEMENTS["select_schedules"]))
        return [ScheduleRow(*row) for row in found]

    async def put_schedule(
        self, name: str, digest: bytes, document: str, next_at: Instant | None, *, instead_of: bytes | None
    ) -> bool:
        async def attempt(connection: Connection, _: bool) -> bool:
            given = (self._clock.parameter(), name, digest, document, next_at)
            if instead_of is None:
                return await connection.fetchval(STATEMENTS["insert_schedule"], *given) is not None
            return await connection.fetchval(STATEMENTS["replace_schedule"], *given, instead_of) is not None

        return await self._connections.again(attempt)

    async def keep_schedules(self, digests: dict[str, bytes]) -> None:
        given = (self._clock.parameter(), list(digests), list(digests.values()))
        await self._connections.again(lambda connection, _: connection.execute(STATEMENTS["keep_schedules"], *given))

    async def fire_schedule(
        self, row: ScheduleRow, next_at: Instant | None, triggered: int, slot: Instant | None, new: Sequence[NewJob]
    ) -> bool:
        queues = {job.queue: await self._queue_number(job.queue) for job in new}

        async def attempt(connection: Connection, _: bool) -> bool:
            now = self._clock.parameter()
            last = new[-1].id if new else None
            before = (row.name, row.digest, row.next_at, row.triggered, row.is_paused)
            async with connection.transaction():
                moved = await connection.fetchval(
                    STATEMENTS["fire_schedule"], now, next_at, triggered, slot, last, *before
                )
                if moved is None:
                    return False
                if new:
                    # As in a caller's transaction: it ends later than the statement.
                    await jobs.insert(connection, new, queues, now, is_callers=True)
            return True

        return await self._connections.again(attempt)

    async def amend_schedule(
        self, name: str, note: Note, *, is_paused: bool | None = None, next_at: Instant | None = None
    ) -> ScheduleRow | None:
        async def attempt(connection: Connection, _: bool) -> ScheduleRow | None:
            async with connection.transaction():
                found = await connection.fetchrow(STATEMENTS["lock_schedule"], name)
                if found is None:
                    return None
                row = ScheduleRow(*found)
                paused, due, triggers = row.is_paused, row.next_at, row.triggers + 1
                if is_paused is not None:
                    paused, due, triggers = is_paused, row.next_at if is_paused else next_at, row.triggers
                changed = await connection.fetchrow(STATEMENTS["amend_schedule"], name, paused, due, triggers)
                assert changed is not None
                target = f"schedule {name}"
                await amending.record(connection, note, self._clock.parameter(), note.queue, target, None, None)
            return ScheduleRow(*changed)

        return await self._connections.again(attempt)

    async def _queue_number(self, name: str) -> int:
        raise NotImplementedError  # the store's own
