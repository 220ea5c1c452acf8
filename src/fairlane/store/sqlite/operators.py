"""The operator's side of SQLite: listing jobs, putting dead ones back, removing them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID, uuid4

import msgspec

from fairlane.clock import Instant
from fairlane.job import State
from fairlane.policy.overrides import Amendment, Override, amend
from fairlane.policy.unique import Holder, OnReplayConflict
from fairlane.scheduler.rebuild import carried_gates
from fairlane.store.audit import EXPIRY, Note, describe_amendments, record
from fairlane.store.operators import FORCE, PURGE, REPLAY, RETRY, Handled
from fairlane.store.sqlite import claims, jobs, rows
from fairlane.store.sqlite.database import Row, Transaction
from fairlane.store.sqlite.procedures import perform


def foresee_replay(
    tx: Transaction,
    given: Sequence[UUID],
    now: Instant,
    on_conflict: OnReplayConflict,
    earlier: Mapping[bytes, Holder],
) -> list[Handled]:
    """What `replay` would report now."""
    found = _found(tx, REPLAY.bounded(given))
    readmission = jobs.readmitted(tx, sorted(found), now, on_conflict, earlier)
    return REPLAY.handled(given, _states(found), readmission=readmission)


def replay(
    tx: Transaction,
    given: Sequence[UUID],
    delay: int | None,
    now: Instant,
    on_conflict: OnReplayConflict,
    earlier: Mapping[bytes, Holder],
) -> tuple[list[Handled], dict[int, int]]:
    """Put ended jobs back. Returns the report, and how many to wake by queue."""
    found = _found(tx, REPLAY.bounded(given))
    readmission = jobs.readmitted(tx, sorted(found), now, on_conflict, earlier)
    freed = [
        jobs.cancel(tx, old, now, only_waiting=True, reason=f"replaced by job {new}").frees
        for old, new in readmission.replaced.items()
    ]
    jobs.take_back(tx, readmission)
    # In the order of their enqueue, which their ids keep.
    back = [
        (job, row)
        for job, row in sorted(found.items())
        if REPLAY.applies_to(State(row[1])) and job not in readmission.held
    ]
    due_at = now + delay if delay is not None and delay > 0 else None
    state = State.READY if due_at is None else State.SCHEDULED
    place: int = tx.value("take_positions", len(back)) - len(back)
    bells: dict[bytes, list[Any]] = {}
    counts: Counter[bytes] = Counter()
    woken: Counter[int] = Counter()
    for job, row in back:
        place += 1
        position, _, queue, lane, priority, lane_keys, numbers, given_by, *attempt = row
        if attempt[1] is not None:
            tx.run("insert_attempt", job.bytes, *attempt)
        tx.run("replay_job", place, int(state), now, due_at, position)
        bell = bells.setdefault(lane, [queue, lane, priority, lane_keys, 0, place, now, None, 0, None])
        if given_by is not None and given_by > (bell[9] or 0):
            bell[7], bell[9] = numbers, given_by
        counts[lane] += 1
        woken[queue] += 1
    if state is State.READY:
        tx.run_many("insert_arrival", [(*bell[:4], counts[lane], *bell[5:]) for lane, bell in bells.items()])
    # One to hold the timer is enough for those that are due later.
    ready = Counter({queue: count if state is State.READY else 1 for queue, count in woken.items()})
    ready.update(queue for queue in freed if queue is not None)
    return REPLAY.handled(given, _states(found), readmission=readmission), dict(ready)


def purge(tx: Transaction, given: Sequence[UUID]) -> list[Handled]:
    found = _found(tx, PURGE.bounded(given))
    gone = [(job, row[0]) for job, row in found.items() if PURGE.applies_to(State(row[1]))]
    tx.run_many("delete_attempts", [(job.bytes,) for job, _ in gone])
    jobs.forget(tx, [job.bytes for job, _ in gone])
    tx.run_many("delete_job", [(position,) for _, position in gone])
    return PURGE.handled(given, _states(found))


def retry_now(tx: Transaction, given: Sequence[UUID], now: Instant) -> tuple[list[Handled], dict[int, int]]:
    """Let scheduled jobs be due now. Returns the report, and how many to wake by queue."""
    found = _found(tx, RETRY.bounded(given))
    hurried = [row for row in found.values() if RETRY.applies_to(State(row[1]))]
    tx.run_many("hurry_job", [(now, row[0]) for row in hurried])
    return RETRY.handled(given, _states(found)), dict(Counter(row[2] for row in hurried))


def _found(tx: Transaction, given: Sequence[UUID]) -> dict[UUID, Row]:
    looked_up = ((job, tx.one("select_ended", job.bytes)) for job in given)
    return {job: row for job, row in looked_up if row is not None}


def _states(found: dict[UUID, Row]) -> dict[UUID, State]:
    return {job: State(row[1]) for job, row in found.items()}


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
        perform(tx, record(note, now, found[0].policy.queue, *describe_amendments(amendments)))
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
    perform(tx, record(note, now, queue.policy.queue, *describe_amendments([amendment])))
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
