"""Claims that pass from one process to another, on SQLite."""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID, uuid4

import msgspec

from fairlane.clock import Clock, microseconds
from fairlane.store.protocol import Adopted, WorkerIdentity
from fairlane.store.sqlite import rows
from fairlane.store.sqlite.database import Database, Transaction

__all__ = ["Adopter"]


class Adopter:
    """The part of the SQLite store that adopts."""

    _database: Database
    _clock: Clock

    async def adopt(self, job: UUID, lease: UUID, *, worker: WorkerIdentity, lease_for: timedelta) -> Adopted | None:
        def work(tx: Transaction) -> Adopted | None:
            found = tx.one("select_adoptable", job.bytes, lease.bytes)
            if found is None:
                return None
            *columns, claimed_at, queue, position = found
            now, own = self._clock.now(), uuid4()
            held = msgspec.json.encode([position]).decode()
            ends_at = now + microseconds(lease_for)
            tx.run("insert_lease", own.bytes, worker.id.bytes, ends_at, now, 1, held)
            tx.run("adopt_job", own.bytes, worker.name, position)
            if tx.value("drop_claims", 1, lease.bytes) == 0:
                tx.run("delete_lease", lease.bytes)
                tx.run("delete_cancellations", lease.bytes)
            return Adopted(rows.claim_of(columns, own, queue, claimed_at), now)

        return await self._database.write(work, durable=True)
