"""Claims that pass from one process to another, on SQLite."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from uuid import UUID

import msgspec

from fairlane.clock import microseconds
from fairlane.store.protocol import Adopted, WorkerIdentity
from fairlane.store.queue_time import QueueClock
from fairlane.store.sqlite import rows
from fairlane.store.sqlite.database import Database, Transaction

__all__ = ["Adopter"]


class Adopter:
    """The part of the SQLite store that adopts."""

    _database: Database
    _clock: QueueClock

    async def adopt(
        self,
        job: UUID,
        lease: UUID,
        own: UUID,
        *,
        tasks: Sequence[str],
        worker: WorkerIdentity,
        lease_for: timedelta,
    ) -> Adopted | None:
        def work(tx: Transaction) -> Adopted | None:
            found = tx.one("select_adoptable", job.bytes, lease.bytes, own.bytes)
            if found is None:
                return None
            *columns, claimed_at, queue, position, under = found
            claim = rows.claim_of(columns, own, queue, claimed_at)
            if claim.task not in tasks:
                return None
            at = self._clock.time()
            now = at.now
            ends_at = now + microseconds(lease_for)
            if under == own.bytes:
                tx.run("renew_lease", ends_at, now, own.bytes)
            else:
                held = msgspec.json.encode([position]).decode()
                tx.run("insert_lease", own.bytes, worker.id.bytes, ends_at, now, 1, held)
                tx.run("adopt_job", own.bytes, worker.name, position)
                if tx.value("drop_claims", 1, lease.bytes) == 0:
                    tx.run("delete_lease", lease.bytes)
                    tx.run("delete_cancellations", lease.bytes)
            return Adopted(claim, at)

        return await self._database.write(work, durable=True)
