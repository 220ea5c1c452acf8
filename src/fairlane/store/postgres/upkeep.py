"""Removing what is past its time on PostgreSQL, a bounded number at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fairlane.clock import Instant
from fairlane.policy.numbers import VALUES_LAST
from fairlane.store.postgres.connections import STATEMENTS
from fairlane.store.postgres.scheduling import Scheduling
from fairlane.store.protocol import CLOCKS_DIFFER_BY, Pruned, Retention
from fairlane.store.queue_time import QueueTime

if TYPE_CHECKING:
    from asyncpg import Record

    from fairlane.store.postgres.connections import Connection

__all__ = ["Walk", "collect", "prune"]


EVER = 2**63 - 1
"""A time that every job ended before."""


class Walk:
    """How far collection has come, by table and queue; it starts over at the end."""

    def __init__(self) -> None:
        self._reached: dict[tuple[str, int], bytes] = {}

    async def stretch(self, scheduling: Scheduling, table: str, limit: int, *args: object) -> tuple[Record, bool]:
        """Remove what is idle in the next stretch; say what that was, and whether there is more to see."""
        place = (table, scheduling.queue.id)
        row = await scheduling.connection.fetchrow(
            STATEMENTS[f"collect_{table}"], scheduling.queue.id, self._reached.get(place, b""), limit, *args
        )
        assert row is not None
        more = row["seen"] >= limit
        self._reached[place] = row["reached"] if more else b""
        return row, more


async def prune(connection: Connection, retention: Retention, time: QueueTime, limit: int) -> Pruned:
    """Remove finished jobs past their time, then those beyond the number to keep, with their history.

    Where somebody else is at it, there is nothing to do.
    """
    await connection.execute(STATEMENTS["guard_pruning"])
    if not await connection.fetchval(STATEMENTS["take_turn_at_pruning"]):
        return Pruned(0)
    removed, more = 0, False
    for is_dead, kept in ((False, retention.done), (True, retention.dead)):
        left = limit - removed
        if left <= 0:
            return Pruned(removed, more=True)
        filed, gone = await _prune(connection, is_dead, time.now - kept, left)
        removed += gone
        more = more or filed >= left
        left = limit - removed
        if retention.keep is not None and left > 0:
            beyond: int = await connection.fetchval(STATEMENTS["count_beyond"], is_dead, retention.keep, left)
            if beyond:
                removed += (await _prune(connection, is_dead, EVER, beyond))[1]
            more = more or beyond >= left
    await connection.execute(STATEMENTS["prune_uniques"], time.now, limit)
    await connection.execute(STATEMENTS["prune_ended_sessions"], time.wall - CLOCKS_DIFFER_BY)
    return Pruned(removed, more=more)


async def _prune(connection: Connection, is_dead: bool, until: Instant, limit: int) -> tuple[int, int]:
    """How many jobs were named by what was taken off the files, and how many of them were removed."""
    row = await connection.fetchrow(STATEMENTS["prune"], is_dead, until, limit)
    assert row is not None
    return row["filed"], row["jobs"]


async def collect(scheduling: Scheduling, walk: Walk, now: Instant | None, limit: int) -> Pruned:
    """Walk a stretch of the lanes, the flows and the gates, and remove what is idle."""
    lanes, more_lanes = await walk.stretch(scheduling, "lanes", limit)
    flows, more_flows = await walk.stretch(scheduling, "flows", limit, now, VALUES_LAST)
    gates, more_gates = await walk.stretch(scheduling, "gates", limit, now, VALUES_LAST)
    await scheduling.connection.execute(STATEMENTS["lock_shared_limits"], scheduling.queue.id, [])
    shared, more_shared = await walk.stretch(scheduling, "shared_gates", limit, now)
    return Pruned(
        0,
        lanes=lanes["removed"] + flows["lanes"],
        flows=flows["removed"],
        gates=gates["removed"] + shared["removed"],
        more=more_lanes or more_flows or more_gates or more_shared,
    )
