"""What operators do on SQLite: overrides, forced starts, and the record of every action."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID, uuid4

import msgspec

from fairlane.clock import Instant
from fairlane.job import State
from fairlane.policy.overrides import Amendment, Override, amend
from fairlane.scheduler.rebuild import carried_gates
from fairlane.store.auditing import EXPIRY, AuditEntry, Note, describe_overrides
from fairlane.store.operators import FORCE, Handled
from fairlane.store.sqlite import claims, rows
from fairlane.store.sqlite.database import Transaction

__all__ = ["apply", "entries", "expire", "force", "record", "record_jobs"]


def apply(
    tx: Transaction,
    queue: claims.QueueInForce,
    put: Sequence[Override],
    remove: Sequence[str],
    note: Note,
    now: Instant,
) -> Amendment:
    """Set and remove overrides, wake whoever may start now, and record it."""
    amendment = amend(queue.policy, put, remove)
    if not amendment.changes:
        return amendment
    for each in remove:
        tx.run("delete_override", queue.id, each)
    for override in amendment.after:
        tx.run("put_override", queue.id, override.id, msgspec.json.encode(override).decode())
    if amendment.rebuilds:
        claims.remake(tx, queue, queue.policy.overridden(amendment.overrides), now)
    held = [rows.gate(row) for gate in amendment.wakes if (row := tx.one("select_gate", gate)) is not None]
    for gate in carried_gates(queue.policy.overridden(amendment.overrides), now, held):
        tx.run("wake_gate", gate.tat, gate.memo, now if gate.waiting > 0 else gate.wake_at, gate.id)
    # A name that no other state of any queue has: whoever knows it knows these overrides.
    tx.run("update_amended", uuid4().hex, amendment.overrides.expires_at, queue.id)
    target = "; ".join(each.describe() for each in amendment.after or amendment.before)
    before, after = describe_overrides(amendment.before), describe_overrides(amendment.after)
    record(tx, note, now, queue.policy.queue, target, before, after)
    return amendment


def expire(tx: Transaction, queue: claims.QueueInForce, now: Instant) -> claims.QueueInForce:
    """End the overrides whose time has come."""
    expired = queue.policy.overrides.expired(now)
    if not expired:
        return queue
    note = Note(actor=EXPIRY, action="expire")
    apply(tx, queue, [], [each.id for each in expired], note, now)
    return claims.load_queue(tx, queue.policy.queue) or queue


def force(tx: Transaction, given: Sequence[UUID], now: Instant) -> tuple[list[Handled], dict[int, int]]:
    """Let waiting jobs start next, whatever their limits say. Returns the report, and how many to wake by queue."""
    listed = FORCE.bounded(given)
    found = {job: row for job in listed if (row := tx.one("select_ended", job.bytes)) is not None}
    states = {job: State(row[1]) for job, row in found.items()}
    woken: dict[int, int] = {}
    for job, row in found.items():
        if FORCE.applies_to(states[job]):
            if states[job] is State.SCHEDULED:
                tx.run("hurry_job", now, row[0])
            tx.run("force_job", job.bytes, row[2])
            woken[row[2]] = woken.get(row[2], 0) + 1
    return FORCE.handled(listed, states), woken


def record(
    tx: Transaction, note: Note, now: Instant, queue: str | None, target: str, before: str | None, after: str | None
) -> None:
    """Leave an entry in the audit."""
    tx.run("insert_audit", now, note.actor, note.action, queue, target, before, after, note.reason)


def record_jobs(tx: Transaction, note: Note | None, now: Instant, handled: Sequence[Handled]) -> None:
    """The same for an action on jobs: those that it touched, with the state they were in."""
    touched = {str(each.job): str(each.was) for each in handled if each.skipped is None}
    if note is not None and touched:
        before = msgspec.json.encode(touched).decode()
        record(tx, note, now, note.queue, f"{len(touched)} job{'s' * (len(touched) > 1)}", before, None)


def entries(tx: Transaction, queue: str | None, before: int, limit: int) -> list[AuditEntry]:
    """The audit, the newest first."""
    found = (
        tx.all("select_audit", before, limit)
        if queue is None
        else tx.all("select_audit_of_queue", before, limit, queue)
    )
    return [AuditEntry(*row) for row in found]
