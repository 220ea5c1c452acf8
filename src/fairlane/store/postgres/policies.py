"""Policies on PostgreSQL: the first declaration of a queue is stored and wins, until another one is applied."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fairlane.policy.policy import Policy
from fairlane.scheduler.rebuild import rebuild
from fairlane.scheduler.snapshot import Plan
from fairlane.store.postgres.claims import Scheduling
from fairlane.store.postgres.connections import STATEMENTS
from fairlane.store.protocol import Declared

if TYPE_CHECKING:
    from fairlane.store.postgres.connections import Connection

__all__ = ["declare", "in_force", "replace"]

EVERYONE = 1 << 20


async def declare(connection: Connection, policy: Policy) -> Declared:
    await connection.execute(STATEMENTS["insert_queue"], policy.queue, policy.encoded, policy.digest)
    row = await connection.fetchrow(STATEMENTS["select_policy"], policy.queue)
    assert row is not None
    is_drift = row["digest"] != policy.digest
    return Declared(Policy.decode(row["policy"]) if is_drift else policy, row["version"], is_drift)


async def in_force(connection: Connection, queue: str) -> Declared | None:
    row = await connection.fetchrow(STATEMENTS["select_policy"], queue)
    return None if row is None else Declared(Policy.decode(row["policy"]), row["version"], is_drift=False)


async def replace(scheduling: Scheduling, policy: Policy) -> Declared:
    """Put another policy in force: flows and gates are made anew from the lanes."""
    found = await in_force(scheduling.connection, policy.queue)
    if found is not None and found.policy.digest == policy.digest:
        return found  # somebody else was faster
    loaded, folded = await scheduling.fold_all()
    flows, lanes, gates = await scheduling.take_all()
    rebuilt = rebuild(policy, loaded.snapshot.now, folded.queue, flows, lanes, gates)
    await scheduling.write(loaded, Plan([], rebuilt.queue, rebuilt.flows, rebuilt.lanes, rebuilt.gates, more=False))
    connection, queue = scheduling.connection, scheduling.queue.id
    version = await connection.fetchval(
        STATEMENTS["update_policy"], queue, policy.encoded, policy.digest, loaded.snapshot.now
    )
    await connection.execute(STATEMENTS["nudge"], queue, EVERYONE, None)
    return Declared(policy, version, is_drift=False)
