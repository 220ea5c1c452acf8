"""What operators do on SQLite: overrides, forced starts, and the record of every action."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID, uuid4

import msgspec

from fairlane.clock import Instant
from fairlane.job import State
from fairlane.policy.overrides import Amendment, Override, amend
from fairlane.scheduler.rebuild import carried_gates
from fairlane.store.auditing import EXPIRY, Note, describe_amendments, record
from fairlane.store.operators import FORCE, Handled
from fairlane.store.sqlite import claims, rows
from fairlane.store.sqlite.database import Transaction


def apply(
    tx: Transaction,
    queues: Sequence[claims.QueueInForce],
    put: Sequence[Override],
    remove: Sequence[str],
    note: Note,
    now: Instant,
) -> list[Amendment]:
    """Set and remove overrides of queues, wake whoever may start now, and record it once."""
    found = [expire(tx, queue, now) for queue in queues]
    # All are asked before any is changed: what one partition refuses is refused.
    amendments = [amend(queue.policy, put, remove) for queue in found]
    for queue, amendment in zip(found, amendments, strict=True):
        if amendment.changes:
            _store(tx, queue, amendment, now)
    if any(each.changes for each in amendments):
        tx.perform(record(note, now, found[0].policy.queue, *describe_amendments(amendments)))
    return amendments


def _store(tx: Transaction, queue: claims.QueueInForce, amendment: Amendment, now: Instant) -> None:
    for gone in amendment.before:
        tx.run("delete_override", queue.id, gone.id)
    for override in amendment.after:
        tx.run("put_override", queue.id, override.id, msgspec.json.encode(override).decode())
    changed = queue.policy.overridden(amendment.overrides)
    if amendment.rebuilds:
        claims.remake(tx, queue, changed, now)
    else:
        claims.to_tables(tx, queue, now)
    held = [rows.gate(row) for gate in amendment.wakes if (row := tx.one("select_gate", queue.id, gate)) is not None]
    claims.put_gates(tx, queue.id, carried_gates(changed, now, held), now)
    # A name that no other state of any queue has: whoever knows it knows these overrides.
    tx.run("update_amended", uuid4().hex, amendment.overrides.expires_at, queue.id)


def expire(tx: Transaction, queue: claims.QueueInForce, now: Instant) -> claims.QueueInForce:
    """End the overrides whose time has come."""
    expired = queue.policy.overrides.expired(now)
    if not expired:
        return queue
    amendment = amend(queue.policy, [], [each.id for each in expired])
    _store(tx, queue, amendment, now)
    note = Note(actor=EXPIRY, action="expire")
    tx.perform(record(note, now, queue.policy.queue, *describe_amendments([amendment])))
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
