"""Policies on PostgreSQL: the first declaration of a queue is stored and wins, until another one is applied."""

from __future__ import annotations

from collections.abc import Sequence

from fairlane.clock import Instant
from fairlane.errors import InvalidPolicy
from fairlane.policy.division import as_divided
from fairlane.policy.policy import Policy
from fairlane.scheduler.misrouted import imported, shared_tokens, tokens_of_its_own, tokens_to_share
from fairlane.scheduler.rebuild import rebuild, refuse_to_strand
from fairlane.scheduler.snapshot import GateRow
from fairlane.store import auditing
from fairlane.store.auditing import Note
from fairlane.store.decoding import Declared
from fairlane.store.postgres import sharing
from fairlane.store.postgres.connections import STATEMENTS, Connection, perform
from fairlane.store.postgres.scheduling import Scheduling, select_overrides
from fairlane.store.protocol import EVERYONE

INSERTED = "INSERT 0 1"


async def insert(connection: Connection, policy: Policy, note: Note | None = None, now: Instant | None = None) -> bool:
    """Make a queue known, unless it is; whether it was new."""
    async with connection.transaction():
        if policy.shared_limits:
            is_new = await sharing.declare(connection, policy)
        else:
            done = await connection.execute(STATEMENTS["insert_queue"], policy.queue, policy.encoded, policy.digest)
            is_new = done == INSERTED
        if note is not None and is_new:
            await perform(connection, auditing.record(note, now, policy.queue, "version 1", None, policy.encoded))
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
        policy = sharing.resolved(policy, [document for _, document in documents])
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
    await sharing.put_in_force(connection, queue, policy)
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
    rebuilt = rebuild(policy, loaded.now, loaded.opened.state, flows, lanes, gates, kept)
    await scheduling.replace(rebuilt, loaded.now)
    await sharing.take_over(scheduling.sharing, connection, policy, loaded.now)
    await scheduling.sharing.put_tokens(tokens)
    version = await connection.fetchval(STATEMENTS["update_policy"], queue, policy.encoded, policy.digest, loaded.now)
    if note is not None:
        target, before = f"version {version}", found.policy.encoded
        await perform(connection, auditing.record(note, loaded.now, policy.queue, target, before, policy.encoded))
    await connection.execute(STATEMENTS["nudge"], queue, EVERYONE, None)
    await connection.execute(STATEMENTS["nudge_sharers"], queue, EVERYONE)
    await connection.execute(STATEMENTS["tell_holders"], queue)
    return Declared(policy, version, is_drift=False)
