"""Schedules on SQLite."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any
from uuid import UUID

from fairlane.clock import Instant
from fairlane.job import NewJob
from fairlane.store import key_rows
from fairlane.store.auditing import Note
from fairlane.store.queue_time import QueueClock
from fairlane.store.schedules import ORPHANED_AFTER, Fired, ScheduleRow
from fairlane.store.sqlite import amending, jobs
from fairlane.store.sqlite.database import Database, Transaction
from fairlane.store.sqlite.wakeups import SCHEDULES, nudge, take_waiters

__all__ = ["ScheduleKeeper"]


class ScheduleKeeper:
    """The part of the SQLite store that keeps schedules."""

    _database: Database
    _clock: QueueClock

    async def schedules(self, names: Collection[str] | None = None) -> list[ScheduleRow]:
        def work(tx: Transaction) -> list[ScheduleRow]:
            if names is None:
                return [_row(row) for row in tx.all("select_schedules")]
            return [_row(row) for row in tx.all("select_schedules_named", key_rows.encode(list(names)))]

        return await self._database.read(work)

    async def put_schedule(
        self, name: str, digest: bytes, document: str, next_at: Instant | None, *, instead_of: bytes | None
    ) -> bool:
        def work(tx: Transaction) -> bool:
            now = self._clock.now()
            if instead_of is None:
                return tx.run("insert_schedule", name, digest, document, next_at, now) > 0
            return tx.run("replace_schedule", digest, document, next_at, now, name, instead_of) > 0

        return await self._database.write(work, durable=True)

    async def keep_schedules(self, digests: dict[str, bytes], worker: UUID | None = None) -> None:
        def work(tx: Transaction) -> None:
            now = self._clock.now()
            tx.run("forget_schedule_holders", now - ORPHANED_AFTER)
            if worker is not None:
                tx.run("put_schedule_holder", worker.bytes, now)
            tx.run_many("keep_schedule", [(now, name, digest) for name, digest in digests.items()])

        await self._database.write(work, durable=False)

    async def fire_schedule(self, row: ScheduleRow, fired: Fired, new: Sequence[NewJob]) -> bool:
        def work(tx: Transaction) -> list[UUID] | None:
            now = self._clock.now()
            after = (fired.next_at, fired.triggered, fired.slot, _bytes(fired.job))
            before = (row.name, row.digest, row.next_at, row.triggered, int(row.is_paused))
            if not tx.run("fire_schedule", *after, now, *before):
                return None
            ready, conflicts = jobs.insert(tx, new, now) if new else ({}, {})
            if (standing := fired.standing(conflicts)) != fired.job:
                tx.run("name_last_job", _bytes(standing), row.name)
            return take_waiters(tx, ready)

        waiters = await self._database.write(work, durable=True)
        await self._nudge(waiters or [])
        return waiters is not None

    async def amend_schedule(
        self, name: str, note: Note, *, is_paused: bool | None = None, next_at: Instant | None = None
    ) -> ScheduleRow | None:
        def work(tx: Transaction) -> tuple[ScheduleRow, list[UUID]] | None:
            found = tx.one("select_schedule", name)
            if found is None:
                return None
            row = _row(found)
            paused, due, triggers = row.is_paused, row.next_at, row.triggers + 1
            if is_paused is not None:
                paused, due, triggers = is_paused, row.next_at if is_paused else next_at, row.triggers
            tx.run("amend_schedule", int(paused), due, triggers, name)
            amending.record(tx, note, self._clock.now(), note.queue, f"schedule {name}", None, None)
            holders = [UUID(bytes=worker) for (worker,) in tx.all("select_schedule_holders")]
            return _row(tx.one("select_schedule", name) or found), holders

        amended = await self._database.write(work, durable=True)
        if amended is None:
            return None
        changed, holders = amended
        for worker in holders:
            # Who does not listen yet looks once it does; who is gone is forgotten in time.
            nudge(worker, SCHEDULES)
        return changed

    async def _nudge(self, workers: Sequence[UUID]) -> None:
        raise NotImplementedError  # the store's own


def _bytes(job: UUID | None) -> bytes | None:
    return None if job is None else job.bytes


def _row(row: Sequence[Any]) -> ScheduleRow:
    values = list(row)
    values[4], values[8] = bool(row[4]), None if row[8] is None else UUID(bytes=row[8])
    return ScheduleRow(*values)
