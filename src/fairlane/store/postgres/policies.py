"""Policies on PostgreSQL: the first declaration of a queue is stored and wins, until another one is applied."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from fairlane.clock import Instant
from fairlane.errors import InvalidPolicy
from fairlane.policy.division import as_divided
from fairlane.policy.policy import Policy
from fairlane.scheduler.rebuild import (
    StrayLane,
    WaitingLane,
    gates_of_strays,
    imported,
    rebuild,
    refuse_to_strand,
    shared_tokens,
    stray_lanes,
    tokens_of_its_own,
    tokens_to_share,
    weights_of_strays,
)
from fairlane.scheduler.snapshot import FlowRow, GateRow
from fairlane.store import audit
from fairlane.store.audit import Note
from fairlane.store.postgres import shared_limits
from fairlane.store.postgres.claim_lock import Scheduling, select_overrides
from fairlane.store.postgres.connections import STATEMENTS, Connection
from fairlane.store.postgres.procedures import perform
from fairlane.store.protocol import EVERYONE, Rehomed
from fairlane.store.rows import Declared, decode_key, decode_keys

INSERTED = "INSERT 0 1"


async def insert(connection: Connection, policy: Policy, note: Note | None = None, now: Instant | None = None) -> bool:
    """Make a queue known, unless it is; whether it was new."""
    async with connection.transaction():
        if policy.shared_limits:
            is_new = await shared_limits.declare(connection, policy)
        else:
            done = await connection.execute(STATEMENTS["insert_queue"], policy.queue, policy.encoded, policy.digest)
            is_new = done == INSERTED
        if note is not None and is_new:
            await perform(connection, audit.record(note, now, policy.queue, "version 1", None, policy.encoded))
    return is_new


async def declare(
    connection: Connection, policy: Policy, note: Note | None = None, now: Instant | None = None
) -> Declared:
    """The first declaration is stored; of a later one is said whether it differs."""
    found = await in_force(connection, policy.queue)
    if found is None:
        await insert(connection, policy, note, now)
        found = await in_force(connection, policy.queue)
        assert found is not None
    try:
        policy = as_divided(found.policy, policy)
    except InvalidPolicy:
        return Declared(found.policy, found.version, is_drift=True)
    if policy.shared_limits:
        await insert(
            connection, policy
        )  # it is there; refused if other queues do not agree on what it shares with them
    return Declared(found.policy, found.version, found.policy.digest != policy.digest)


async def in_force(connection: Connection, queue: str) -> Declared | None:
    row = await connection.fetchrow(STATEMENTS["select_policy"], queue)
    if row is None:
        return None
    policy = Policy.decode(row["policy"]).overridden(await select_overrides(connection, row["id"]))
    if policy.shared_limits:
        documents = await connection.fetch(STATEMENTS["select_shared_limits"], queue)
        policy = shared_limits.resolved(policy, [document for _, document in documents])
    return Declared(policy, row["version"], is_drift=False)


async def replace(scheduling: Scheduling, policy: Policy, note: Note | None, *, accept_missing_keys: bool) -> Declared:
    """Put another policy in force, divided as the queue is. Overrides stay."""
    found = await in_force(scheduling.connection, policy.queue)
    assert found is not None
    policy = as_divided(found.policy, policy)
    if found.policy.digest == policy.digest:
        return found  # somebody else was faster
    return await _put_in_force(scheduling, found, policy, note, accept_missing_keys=accept_missing_keys)


async def divide(
    scheduling: Scheduling, policy: Policy, version: int, note: Note | None, coming: Sequence[GateRow]
) -> bool:
    """Put the policy of a partition in force, with gates from other partitions, if this version still is."""
    found = await in_force(scheduling.connection, policy.queue)
    if found is None or found.version != version:
        return False
    await _put_in_force(scheduling, found, policy, note, accept_missing_keys=True, coming=coming)
    return True


async def _put_in_force(
    scheduling: Scheduling,
    found: Declared,
    policy: Policy,
    note: Note | None,
    *,
    accept_missing_keys: bool,
    coming: Sequence[GateRow] = (),
) -> Declared:
    """Flows and gates are made anew from the lanes."""
    connection, queue = scheduling.connection, scheduling.queue.id
    await shared_limits.put_in_force(connection, queue, policy)
    loaded = await scheduling.fold_all()
    await scheduling.to_tables(loaded)
    flows, lanes, gates = await scheduling.select_all()
    if not accept_missing_keys:
        refuse_to_strand(policy, lanes)
    policy = policy.overridden(found.policy.overrides)
    kept = await scheduling.kept_places(policy)
    tokens = tokens_to_share(found.policy, policy, gates)
    gates = imported(policy.queue, gates, coming)
    for name, bound in shared_tokens(found.policy, policy).items():
        spent = await scheduling.sharing.gates_of(bound.limit.name or "")
        gates += tokens_of_its_own(policy.queue, name, spent)
    rebuilt = rebuild(policy, loaded.now, loaded.state, flows, lanes, gates, kept)
    await scheduling.replace(rebuilt, loaded.now)
    await shared_limits.take_over(scheduling.sharing, connection, policy, loaded.now)
    await scheduling.sharing.put_tokens(tokens)
    version = await connection.fetchval(STATEMENTS["update_policy"], queue, policy.encoded, policy.digest, loaded.now)
    if note is not None:
        target, before = f"version {version}", found.policy.encoded
        await perform(connection, audit.record(note, loaded.now, policy.queue, target, before, policy.encoded))
    await connection.execute(STATEMENTS["nudge"], queue, EVERYONE, None)
    await connection.execute(STATEMENTS["nudge_sharers"], queue, EVERYONE)
    await connection.execute(STATEMENTS["tell_holders"], queue)
    return Declared(policy, version, is_drift=False)


Number = Callable[[str], Awaitable[int]]
"""The number of a queue by its name."""


async def rehome(scheduling: Scheduling, number: Number, limit: int) -> Rehomed:
    """Move up to `limit` ready and as many scheduled jobs that belong elsewhere."""
    policy, _ = await scheduling.in_force()
    if policy.partition is None or not policy.partition.is_guarded:
        return Rehomed(0, 0, 0)
    await scheduling.checkpoint(await scheduling.fold_all())
    connection, queue = scheduling.connection, scheduling.queue.id
    strays, later = (stray_lanes(policy, lanes) for lanes in await select_lanes(connection, queue))
    moved = Counter(await _move_ready(connection, number, strays, limit))
    moved.update(await _move_scheduled(connection, queue, number, later, limit))
    for to, count in moved.items():
        await connection.execute(STATEMENTS["nudge"], to, count, None)
    waiting = sum(stray.was.ready for stray in (*strays, *later)) - moved.total()
    return Rehomed(moved.total(), max(0, waiting), sum(stray.was.in_flight for stray in strays))


async def _move_ready(connection: Connection, number: Number, strays: list[StrayLane], limit: int) -> dict[int, int]:
    chosen: list[tuple[StrayLane, int]] = []
    for stray in strays:
        if limit > 0 and stray.was.ready > 0:
            chosen.append((stray, min(stray.was.ready, limit)))
            limit -= stray.was.ready
    if not chosen:
        return {}
    found = await connection.fetch(
        STATEMENTS["move_ready_jobs"],
        [stray.was.id for stray, _ in chosen],
        [stray.was.floor for stray, _ in chosen],
        [most for _, most in chosen],
        [await number(stray.queue) for stray, _ in chosen],
        [stray.lane for stray, _ in chosen],
    )
    return dict(map(tuple, found))


async def _move_scheduled(
    connection: Connection, queue: int, number: Number, strays: list[StrayLane], limit: int
) -> dict[int, int]:
    if not strays:
        return {}
    found = await connection.fetch(
        STATEMENTS["move_scheduled_jobs"],
        queue,
        [stray.was.id for stray in strays],
        [await number(stray.queue) for stray in strays],
        [stray.lane for stray in strays],
        limit,
    )
    return dict(map(tuple, found))


async def select_lanes(connection: Connection, queue: int) -> tuple[list[WaitingLane], list[WaitingLane]]:
    """Lanes of jobs that are ready or run, as far as bells have been folded; and those of scheduled jobs."""
    used = await connection.fetch(STATEMENTS["select_lanes_in_use"], queue)
    later = await connection.fetch(STATEMENTS["select_scheduled_lanes"], queue)
    return _lanes(used), _lanes(later)


def _lanes(found: Sequence[Any]) -> list[WaitingLane]:
    return [WaitingLane(row[0], row[1], decode_keys(row[2]), *row[3:]) for row in found]


async def select_gates_of_strays(
    connection: Connection, queue: int, policy: Policy, was: int
) -> list[tuple[str, GateRow]]:
    found = await connection.fetch(STATEMENTS["select_gates_of_queue"], queue)
    gates = [GateRow(row[0], row[1], msgspec.json.decode(row[2], type=list[str | None]), *row[3:]) for row in found]
    weighed = await connection.fetch(STATEMENTS["select_weights_of_queue"], queue)
    flows = [
        FlowRow(flow, decode_key(key), weight, 0.0, 0, 0.0, 0.0, 0, 0, 0, None, given_by)
        for flow, key, weight, given_by in weighed
    ]
    return gates_of_strays(policy, was, gates) + weights_of_strays(policy, was, flows)
