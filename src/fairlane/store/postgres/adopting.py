"""Claims that pass from one process to another, on PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from uuid import UUID

from fairlane.clock import microseconds
from fairlane.store.postgres import rows
from fairlane.store.postgres.connections import STATEMENTS, Connections
from fairlane.store.postgres.settling import Settler
from fairlane.store.postgres.timing import StoreClock
from fairlane.store.protocol import Adopted, WorkerIdentity
from fairlane.store.queue_time import QueueTime

__all__ = ["Adopter"]


class Adopter:
    """The part of the PostgreSQL store that adopts."""

    _connections: Connections
    _clock: StoreClock
    _settler: Settler

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
        row = await self._connections.again(
            lambda connection, _: connection.fetchrow(
                STATEMENTS["adopt"],
                self._clock.parameter(),
                job,
                lease,
                own,
                worker.id,
                worker.name,
                microseconds(lease_for),
                list(tasks),
            )
        )
        if row is None:
            return None
        *columns, claimed_at, queue, now, ahead = row
        claim = rows.claim_of(columns, own, queue, claimed_at)
        self._settler.claimed(own, [claim])
        return Adopted(claim, self._clock.given() or QueueTime(now, ahead))
