"""What operators do on PostgreSQL: overrides, forced starts, and the record of every action."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from uuid import UUID, uuid4

import msgspec

from fairlane.clock import Instant
from fairlane.job import State
from fairlane.policy.overrides import Amendment, Override, amend
from fairlane.policy.policy import Policy
from fairlane.scheduler.rebuild import carried_gates, rebuild
from fairlane.scheduler.snapshot import Need
from fairlane.store.auditing import EXPIRY, AuditEntry, Note, describe_overrides
from fairlane.store.operators import FORCE, Handled
from fairlane.store.postgres.connections import STATEMENTS
from fairlane.store.postgres.scheduling import Loaded, Scheduling

if TYPE_CHECKING:
    from fairlane.store.postgres.connections import Connection

__all__ = ["apply", "entries", "expire", "force", "record", "record_jobs"]

EVERYONE = 1 << 20


async def apply(scheduling: Scheduling, put: Sequence[Override], remove: Sequence[str], note: Note) -> Amendment:
    """Set and remove overrides, wake whoever may start now, and record it."""
    policy, now = await scheduling.in_force()
    ended = policy.overrides.expired(now)
    if ended:
        await _end(scheduling, policy, ended, now)
        policy, now = await scheduling.in_force()
    amendment = amend(policy, put, remove)
    if amendment.changes:
        await _remake(scheduling, policy, amendment, now)
        await _store(scheduling, policy, amendment, note, now)
    return amendment


async def expire(scheduling: Scheduling, loaded: Loaded) -> None:
    """End the overrides whose time has come. The plan has done without them already."""
    await _end(scheduling, loaded.policy, loaded.expired, loaded.snapshot.now)


async def _end(scheduling: Scheduling, policy: Policy, ended: Sequence[Override], now: Instant) -> None:
    amendment = amend(policy, [], [each.id for each in ended])
    await _remake(scheduling, policy, amendment, now)
    await _store(scheduling, policy, amendment, Note(actor=EXPIRY, action="expire"), now)


async def _remake(scheduling: Scheduling, policy: Policy, amendment: Amendment, now: Instant) -> None:
    """Where every lane may start now: make flows and gates anew."""
    if not amendment.rebuilds:
        return
    loaded, folded = await scheduling.fold_all()
    flows, lanes, gates = await scheduling.take_all()
    kept = await scheduling.kept_places(policy)
    rebuilt = rebuild(policy.overridden(amendment.overrides), now, folded.queue, flows, lanes, gates, kept)
    await scheduling.write(loaded, rebuilt.plan)


async def _store(scheduling: Scheduling, policy: Policy, amendment: Amendment, note: Note, now: Instant) -> None:
    connection, queue = scheduling.connection, scheduling.queue
    before, after = amendment.before, amendment.after
    await connection.execute(STATEMENTS["delete_overrides"], queue.id, [each.id for each in before])
    documents = [msgspec.json.encode(each).decode() for each in after]
    await connection.execute(STATEMENTS["put_overrides"], queue.id, [each.id for each in after], documents)
    found = await scheduling.ask(Need(gates=amendment.wakes))
    carried = carried_gates(policy.overridden(amendment.overrides), now, found.gates)
    await connection.execute(
        STATEMENTS["wake_gates"],
        [each.id for each in carried],
        now,
        [each.tat for each in carried],
        [each.memo for each in carried],
    )
    # A name that no other state of any queue has: whoever knows it knows these overrides.
    await connection.execute(STATEMENTS["update_amended"], queue.id, uuid4().hex, amendment.overrides.expires_at)
    target = "; ".join(each.describe() for each in after or before)
    await record(connection, note, now, policy.queue, target, describe_overrides(before), describe_overrides(after))
    await connection.execute(STATEMENTS["nudge"], queue.id, EVERYONE, None)


async def force(connection: Connection, given: Sequence[UUID], now: Instant | None) -> list[Handled]:
    """Let waiting jobs start next, whatever their limits say."""
    listed = FORCE.bounded(given)
    found = await connection.fetch(STATEMENTS["force"], now, listed)
    return FORCE.handled(listed, {row["id"]: State(row["state"]) for row in found})


async def record(
    connection: Connection,
    note: Note,
    now: Instant | None,
    queue: str | None,
    target: str,
    before: str | None,
    after: str | None,
) -> None:
    """Leave an entry in the audit."""
    await connection.execute(
        STATEMENTS["insert_audit"], now, note.actor, note.action, queue, target, before, after, note.reason
    )


async def record_jobs(
    connection: Connection, note: Note | None, now: Instant | None, handled: Sequence[Handled]
) -> None:
    """The same for an action on jobs: those that it touched, with the state they were in."""
    touched = {str(each.job): str(each.was) for each in handled if each.skipped is None}
    if note is not None and touched:
        before = msgspec.json.encode(touched).decode()
        await record(connection, note, now, note.queue, f"{len(touched)} job{'s' * (len(touched) > 1)}", before, None)


async def entries(connection: Connection, queue: str | None, before: int, limit: int) -> list[AuditEntry]:
    """The audit, the newest first."""
    found = (
        await connection.fetch(STATEMENTS["select_audit"], before, limit)
        if queue is None
        else await connection.fetch(STATEMENTS["select_audit_of_queue"], before, limit, queue)
    )
    return [AuditEntry(*row) for row in found]
