"""Policies on PostgreSQL: the first declaration of a queue is stored and wins, until another one is applied."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fairlane.policy.policy import Policy
from fairlane.scheduler.rebuild import rebuild, refuse_to_strand
from fairlane.scheduler.snapshot import Plan
from fairlane.store.auditing import Note
from fairlane.store.postgres import amending
from fairlane.store.postgres.connections import STATEMENTS
from fairlane.store.postgres.scheduling import Scheduling, select_overrides
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
    stored = Policy.decode(row["policy"]) if is_drift else policy
    return Declared(stored.overridden(await select_overrides(connection, row["id"])), row["version"], is_drift)


async def in_force(connection: Connection, queue: str) -> Declared | None:
    row = await connection.fetchrow(STATEMENTS["select_policy"], queue)
    if row is None:
        return None
    policy = Policy.decode(row["policy"]).overridden(await select_overrides(connection, row["id"]))
    return Declared(policy, row["version"], is_drift=False)


async def replace(scheduling: Scheduling, policy: Policy, note: Note | None, *, accept_missing_keys: bool) -> Declared:
    """Put another policy in force: flows and gates are made anew from the lanes. Overrides stay."""
    found = await in_force(scheduling.connection, policy.queue)
    assert found is not None
    if found.policy.digest == policy.digest:
        return found  # somebody else was faster
    loaded, folded = await scheduling.fold_all()
    flows, lanes, gates = await scheduling.take_all()
    if not accept_missing_keys:
        refuse_to_strand(policy, lanes)
    policy = policy.overridden(found.policy.overrides)
    kept = await scheduling.kept_places(policy)
    rebuilt = rebuild(policy, loaded.snapshot.now, folded.queue, flows, lanes, gates, kept)
    await scheduling.write(loaded, Plan([], rebuilt.queue, rebuilt.flows, rebuilt.lanes, rebuilt.gates, more=False))
    connection, queue = scheduling.connection, scheduling.queue.id
    version = await connection.fetchval(
        STATEMENTS["update_policy"], queue, policy.encoded, policy.digest, loaded.snapshot.now
    )
    if note is not None:
        target, before = f"version {version}", found.policy.encoded
        await amending.record(connection, note, loaded.snapshot.now, policy.queue, target, before, policy.encoded)
    await connection.execute(STATEMENTS["nudge"], queue, EVERYONE, None)
    return Declared(policy, version, is_drift=False)
