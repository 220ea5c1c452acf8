"""Removing what is past its time on PostgreSQL, a bounded number at a time."""

from __future__ import annotations

from fairlane.clock import Instant
from fairlane.policy.numbers import VALUES_LAST
from fairlane.scheduler.journal import Removed
from fairlane.store.postgres.connections import STATEMENTS, Connection
from fairlane.store.postgres.scheduling import Scheduling
from fairlane.store.protocol import CLOCKS_DIFFER_BY, Pruned, Retention
from fairlane.store.queue_time import QueueTime

EVER = 2**63 - 1
"""A time that every job ended before."""


class Walk:
    """How far collection has come in the lanes, flows, gates and shared gates of each queue; then it starts over."""

    def __init__(self) -> None:
        self.reached: dict[int, tuple[bytes, bytes, bytes, bytes]] = {}


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
    await connection.execute(STATEMENTS["forget_jobs"], row["jobs"])
    return row["filed"], len(row["jobs"])


async def collect(scheduling: Scheduling, walk: Walk, now: Instant | None, limit: int) -> Pruned:
    """Walk a stretch of the lanes, the flows and the gates, and remove what is idle."""
    connection, queue = scheduling.connection, scheduling.queue.id
    *own, shared_from = walk.reached.get(queue, (b"", b"", b"", b""))
    loaded = await scheduling.load(0)
    await scheduling.checkpoint(loaded)
    row = await connection.fetchrow(STATEMENTS["collect_idle"], queue, *own, limit, now, VALUES_LAST)
    assert row is not None
    removed = Removed(row["flows"], row["lanes"], row["gates"])
    if removed.flows or removed.lanes or removed.gates:
        await scheduling.note_removed(loaded, removed, row["ready"], row["running"])
    await connection.execute(STATEMENTS["lock_shared_limits"], queue, [])
    shared = await connection.fetchrow(STATEMENTS["collect_shared_gates"], queue, shared_from, limit, now)
    assert shared is not None
    reached = (*row["reached"], shared["reached"] if shared["seen"] >= limit else b"")
    walk.reached[queue] = reached
    return Pruned(
        0,
        lanes=len(removed.lanes),
        flows=len(removed.flows),
        gates=len(removed.gates) + shared["removed"],
        more=any(reached),
    )
