"""What operators do on PostgreSQL: overrides, forced starts, and the record of every action."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID, uuid4

import msgspec

from fairlane.clock import Instant
from fairlane.job import State
from fairlane.policy.overrides import Amendment, Override, amend
from fairlane.policy.policy import Policy
from fairlane.scheduler.rebuild import carried_gates, rebuild
from fairlane.scheduler.resident import Ask
from fairlane.store.auditing import EXPIRY, Note, describe_amendments, record
from fairlane.store.operators import FORCE, Handled
from fairlane.store.postgres.connections import STATEMENTS, Connection, perform
from fairlane.store.postgres.scheduling import Loaded, Scheduling
from fairlane.store.protocol import EVERYONE


async def apply(
    schedulings: Sequence[Scheduling], put: Sequence[Override], remove: Sequence[str], note: Note
) -> list[Amendment]:
    """Set and remove overrides of queues in one transaction, wake whoever may start now, and record it once."""
    found = [await _without_ended(each) for each in schedulings]
    # All are asked before any is changed: what one partition refuses is refused.
    amendments = [amend(policy, put, remove) for policy, _ in found]
    for scheduling, (policy, now), amendment in zip(schedulings, found, amendments, strict=True):
        if amendment.changes:
            await _store(scheduling, policy, amendment, now)
    policy, now = found[0]
    await _record(schedulings[0].connection, note, now, policy.queue, amendments)
    return amendments


async def _without_ended(scheduling: Scheduling) -> tuple[Policy, Instant]:
    """What is in force, and the time, once the overrides are gone whose time has come."""
    policy, now = await scheduling.in_force()
    ended = policy.overrides.expired(now)
    if not ended:
        return policy, now
    await _end(scheduling, policy, ended, now)
    return await scheduling.in_force()


async def expire(scheduling: Scheduling, loaded: Loaded) -> None:
    """End the overrides whose time has come."""
    await _end(scheduling, loaded.policy, loaded.expired, loaded.now)


async def _end(scheduling: Scheduling, policy: Policy, ended: Sequence[Override], now: Instant) -> None:
    amendment = amend(policy, [], [each.id for each in ended])
    await _store(scheduling, policy, amendment, now)
    note = Note(actor=EXPIRY, action="expire")
    await _record(scheduling.connection, note, now, policy.queue, [amendment])


async def _store(scheduling: Scheduling, policy: Policy, amendment: Amendment, now: Instant) -> None:
    """Store overrides, and let whoever may start now look: where that may be every lane, the board is made anew."""
    connection, queue = scheduling.connection, scheduling.queue
    changed = policy.overridden(amendment.overrides)
    loaded = await scheduling.fold_all() if amendment.rebuilds else await scheduling.load(0)
    await scheduling.to_tables(loaded)
    if amendment.rebuilds:
        board, kept = await scheduling.select_all(), await scheduling.kept_places(policy)
        await scheduling.replace(rebuild(changed, now, loaded.opened.state, *board, kept), now)
    before, after = amendment.before, amendment.after
    await connection.execute(STATEMENTS["delete_overrides"], queue.id, [each.id for each in before])
    documents = [msgspec.json.encode(each).decode() for each in after]
    await connection.execute(STATEMENTS["put_overrides"], queue.id, [each.id for each in after], documents)
    found = await scheduling.ask(Ask(gates=list(amendment.wakes)))
    await scheduling.put_gates(carried_gates(changed, now, found.gates), now)
    # A name that no other state of any queue has: whoever knows it knows these overrides.
    await connection.execute(STATEMENTS["update_amended"], queue.id, uuid4().hex, amendment.overrides.expires_at)
    await connection.execute(STATEMENTS["nudge"], queue.id, EVERYONE, None)
    await connection.execute(STATEMENTS["tell_holders"], queue.id)


async def _record(
    connection: Connection, note: Note, now: Instant, queue: str, amendments: Sequence[Amendment]
) -> None:
    if any(each.changes for each in amendments):
        await perform(connection, record(note, now, queue, *describe_amendments(amendments)))


async def force(connection: Connection, given: Sequence[UUID], now: Instant | None) -> list[Handled]:
    """Let waiting jobs start next, whatever their limits say."""
    listed = FORCE.bounded(given)
    found = await connection.fetch(STATEMENTS["force"], now, listed)
    return FORCE.handled(listed, {row["id"]: State(row["state"]) for row in found})
