"""Schedules on PostgreSQL."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING
from uuid import UUID

from fairlane.clock import Instant
from fairlane.job import NewJob
from fairlane.store.auditing import Note
from fairlane.store.postgres import amending, jobs
from fairlane.store.postgres.connections import STATEMENTS, Connections
from fairlane.store.postgres.timing import StoreClock
from fairlane.store.schedules import Fired, ScheduleRow

if TYPE_CHECKING:
    from fairlane.store.postgres.connections import Connection

__all__ = ["ScheduleKeeper"]


class ScheduleKeeper:
    """The part of the PostgreSQL store that keeps schedules."""

    _connections: Connections
    _clock: StoreClock

    async def schedules(self, names: Collection[str] | None = None) -> list[ScheduleRow]:
        asked = ("select_schedules",) if names is None else ("select_schedules_named", list(names))

        async def attempt(connection: Connection, _: bool) -> list[ScheduleRow]:
            statement, *given = asked
            return [ScheduleRow(*row) for row in await connection.fetch(STATEMENTS[statement], *given)]

        return await self._connections.again(attempt)

    async def put_schedule(
        self, name: str, digest: bytes, document: str, next_at: Instant | None, *, instead_of: bytes | None
    ) -> bool:
        async def attempt(connection: Connection, _: bool) -> bool:
            given = (self._clock.parameter(), name, digest, document, next_at)
            if instead_of is None:
                return await connection.fetchval(STATEMENTS["insert_schedule"], *given) is not None
            return await connection.fetchval(STATEMENTS["replace_schedule"], *given, instead_of) is not None

        return await self._connections.again(attempt)

    async def keep_schedules(self, digests: dict[str, bytes], worker: UUID | None = None) -> None:
        # Every listener is told: who it is need not be known.
        given = (self._clock.parameter(), list(digests), list(digests.values()))
        await self._connections.again(lambda connection, _: connection.execute(STATEMENTS["keep_schedules"], *given))

    async def fire_schedule(self, row: ScheduleRow, fired: Fired, new: Sequence[NewJob]) -> bool:
        queues = {job.queue: await self._queue_number(job.queue) for job in new}

        async def attempt(connection: Connection, _: bool) -> bool:
            now = self._clock.parameter()
            before = (row.name, row.digest, row.next_at, row.triggered, row.is_paused)
            async with connection.transaction():
                after = (fired.next_at, fired.triggered, fired.slot, fired.job)
                if await connection.fetchval(STATEMENTS["fire_schedule"], now, *after, *before) is None:
                    return False
                if new:
                    # As in a caller's transaction: it ends later than the statement.
                    conflicts = await jobs.insert(connection, new, queues, now, is_callers=True)
                    if (standing := fired.standing(conflicts)) != fired.job:
                        await connection.execute(STATEMENTS["name_last_job"], row.name, standing)
            return True

        return await self._connections.again(attempt)

    async def amend_schedule(
        self, name: str, note: Note, *, is_paused: bool | None = None, next_at: Instant | None = None
    ) -> ScheduleRow | None:
        tried: str | None = None

        async def attempt(connection: Connection, is_repeated: bool) -> ScheduleRow | None:
            nonlocal tried
            async with connection.transaction():
                found = await connection.fetchrow(STATEMENTS["lock_schedule"], name)
                if found is None:
                    return None
                row = ScheduleRow(*found)
                # Whoever tried has let the lock go, and so has ended. A second trigger would be a second job.
                if is_repeated and tried and await connection.fetchval(STATEMENTS["has_committed"], tried):
                    return row
                tried = await connection.fetchval(STATEMENTS["this_transaction"])
                paused, due, triggers = row.is_paused, row.next_at, row.triggers + 1
                if is_paused is not None:
                    paused, due, triggers = is_paused, row.next_at if is_paused else next_at, row.triggers
                changed = await connection.fetchrow(STATEMENTS["amend_schedule"], name, paused, due, triggers)
                assert changed is not None
                target = f"schedule {name}"
                await amending.record(connection, note, self._clock.parameter(), note.queue, target, None, None)
                await connection.execute(STATEMENTS["announce_schedules"])
            return ScheduleRow(*changed)

        return await self._connections.again(attempt)

    async def _queue_number(self, name: str) -> int:
        raise NotImplementedError  # the store's own
