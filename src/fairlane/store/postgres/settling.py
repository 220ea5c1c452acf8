"""Ending claims on PostgreSQL: fenced by their lease, with their bells in the same transaction."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING
from uuid import UUID

from fairlane.job import Claim, State
from fairlane.scheduler.settlement import Lost, Settlement
from fairlane.scheduler.settlement import settle as decide
from fairlane.store.postgres import jobs, values
from fairlane.store.postgres.connections import STATEMENTS, Connections
from fairlane.store.postgres.rows import storable
from fairlane.store.postgres.timing import StoreClock
from fairlane.store.protocol import Reaped

if TYPE_CHECKING:
    from fairlane.store.postgres.connections import Connection

__all__ = ["Settler"]

LEASES_AT_MOST = 100
"""Leases that one reaping looks at."""


class Settler:
    """Settles and reaps.

    It remembers which leases of this process still hold jobs, so that a lease goes with its last settlement without
    asking the database. What it does not know of, the reaper drops once its time has passed.
    """

    def __init__(
        self, connections: Connections, clock: StoreClock, queue_number: Callable[[str], Awaitable[int]]
    ) -> None:
        self._connections = connections
        self._clock = clock
        self._queue_number = queue_number
        self._held: dict[UUID, set[UUID]] = {}

    def claimed(self, lease: UUID, claims: Iterable[Claim]) -> None:
        """Remember what a lease holds."""
        if held := {claim.id for claim in claims}:
            self._held[lease] = held

    def gone(self, leases: Iterable[UUID]) -> None:
        """Forget leases that no longer exist."""
        for lease in leases:
            self._held.pop(lease, None)

    async def settle(self, settlements: Sequence[Settlement], *, was_tried: bool = False) -> list[UUID]:
        """Apply what still holds its lease; returns the jobs whose claim was lost."""
        if not settlements:
            return []
        if len(settlements) > 1 and any(each.effects for each in settlements):
            # Each lands with its own effects: what one of them is refused for is no concern of the others.
            plain = [each for each in settlements if not each.effects]
            lost = await self.settle(plain, was_tried=was_tried)
            for each in settlements:
                if each.effects:
                    lost += await self.settle([each], was_tried=was_tried)
            return lost
        ended = defaultdict(set)
        for each in settlements:
            ended[each.lease].add(each.job)
        emptied = [lease for lease, those in ended.items() if lease in self._held and self._held[lease] <= those]
        attempt = self._try_with_effects if settlements[0].effects else self._try
        lost = await self._connections.again(
            lambda connection, is_repeated: attempt(connection, settlements, emptied, is_repeated or was_tried)
        )
        for lease, those in ended.items():
            if lease in self._held:
                self._held[lease] -= those
        self.gone(emptied)
        return lost

    async def _try_with_effects(
        self, connection: Connection, settlements: Sequence[Settlement], emptied: list[UUID], is_repeated: bool
    ) -> list[UUID]:
        """One settlement and its effects, all or nothing."""
        (settlement,) = settlements
        effects, now = settlement.effects, self._clock.parameter()
        assert effects is not None
        queues = {name: await self._queue_number(name) for name in {job.queue for job in effects.jobs}}
        async with connection.transaction():
            given = [_settled_row(settlement)]
            lost: list[UUID] = await connection.fetchval(STATEMENTS["settle"], now, given, emptied, False)
            if lost:
                # If an earlier try committed, it did so with the effects.
                return await self._truly_lost(connection, settlements, lost) if is_repeated else lost
            if effects.jobs:
                await jobs.insert(connection, effects.jobs, queues, now, is_callers=False)
            await values.write(connection, effects.puts, effects.deletes)
        return []

    async def _try(
        self, connection: Connection, settlements: Sequence[Settlement], emptied: list[UUID], is_repeated: bool
    ) -> list[UUID]:
        if all(each.to is State.DONE for each in settlements):
            lost = await _settle_done(connection, self._clock.parameter(), settlements, emptied)
        else:
            lost = await _settle(connection, self._clock.parameter(), settlements, emptied, is_reaper=False)
        return await self._truly_lost(connection, settlements, lost) if lost and is_repeated else lost

    async def _truly_lost(
        self, connection: Connection, settlements: Sequence[Settlement], lost: list[UUID]
    ) -> list[UUID]:
        """Of these, what is not our own work, from before the connection broke."""
        leases = {each.job: each.lease for each in settlements}
        rows = await connection.fetch(STATEMENTS["select_settled"], lost, [leases[job] for job in lost])
        own = {row[0] for row in rows}
        return [job for job in lost if job not in own]

    async def reap(self, limit: int) -> Reaped:
        """End the claims of leases that ran out."""
        return await self._connections.again(lambda connection, _: self._reap(connection, limit))

    async def _reap(self, connection: Connection, limit: int) -> Reaped:
        async with connection.transaction():
            await connection.execute(STATEMENTS["do_not_wait_for_the_disk"])
            await connection.execute(STATEMENTS["delete_deaf_waiters"])
            await connection.execute(STATEMENTS["delete_gone_claimers"])
            await connection.execute(STATEMENTS["delete_deaf_result_listeners"])
            await connection.execute(STATEMENTS["delete_orphaned_cancellations"])
            now = self._clock.parameter()
            expired = await connection.fetch(STATEMENTS["lock_expired_leases"], now, LEASES_AT_MOST)
            renewed_at: dict[UUID, int] = {}
            for row in expired:
                if limit > 0:
                    renewed_at[row["id"]] = row["renewed_at"]
                    limit -= row["jobs"]
            settlements: list[Settlement] = []
            if renewed_at:
                leases = list(renewed_at)
                for row in await connection.fetch(STATEMENTS["select_abandoned"], leases):
                    claim = _abandoned(row)
                    ran = max(0, renewed_at[claim.lease] - claim.claimed_at)
                    settlements.append(decide(claim, Lost("its worker stopped renewing the lease"), ran))
                lost = set(await _settle(connection, now, settlements, leases, is_reaper=True))
                settlements = [each for each in settlements if each.job not in lost]
            return Reaped(settlements, await connection.fetchval(STATEMENTS["next_lease_end"]))


def _abandoned(row: Sequence[object]) -> Claim:
    job, lease, attempt, most, claimed_at = row
    # Only what the decision looks at; the payload stays where it is.
    return Claim(job, lease, "", "", 0, {}, b"", attempt, most, claimed_at, claimed_at, False)  # type: ignore[arg-type]


async def _settle_done(
    connection: Connection, now: int | None, settlements: Sequence[Settlement], emptied: list[UUID]
) -> list[UUID]:
    given = [(each.job, each.lease, each.ran, each.result) for each in settlements]
    lost: list[UUID] = await connection.fetchval(STATEMENTS["settle_done"], now, given, emptied)
    return lost


async def _settle(
    connection: Connection,
    now: int | None,
    settlements: Sequence[Settlement],
    emptied: list[UUID],
    *,
    is_reaper: bool,
) -> list[UUID]:
    given = [_settled_row(each) for each in settlements]
    lost: list[UUID] = await connection.fetchval(STATEMENTS["settle"], now, given, emptied, is_reaper)
    return lost


def _settled_row(each: Settlement) -> tuple[object, ...]:
    asked = each.if_asked_to_cancel()
    return (
        each.job,
        each.lease,
        each.to,
        each.outcome,
        asked.to,
        asked.outcome,
        each.ran,
        each.delay,
        each.result,
        storable(each.error),
        each.counts_attempt,
        each.unstarted,
        each.verdict,
    )
