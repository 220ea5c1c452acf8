"""The operator's side of SQLite: listing jobs, putting dead ones back, removing them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from fairlane.clock import Instant
from fairlane.job import State
from fairlane.policy.unique import Holder, OnReplayConflict
from fairlane.store.operators import PURGE, REPLAY, RETRY, Handled
from fairlane.store.sqlite import jobs, uniques
from fairlane.store.sqlite.database import Row, Transaction


def foresee_replay(
    tx: Transaction,
    given: Sequence[UUID],
    now: Instant,
    on_conflict: OnReplayConflict,
    earlier: Mapping[bytes, Holder],
) -> list[Handled]:
    """What `replay` would report now."""
    found = _found(tx, REPLAY.bounded(given))
    readmission = uniques.readmitted(tx, sorted(found), now, on_conflict, earlier)
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
    readmission = uniques.readmitted(tx, sorted(found), now, on_conflict, earlier)
    freed = [
        jobs.cancel(tx, old, now, only_waiting=True, reason=f"replaced by job {new}").frees
        for old, new in readmission.replaced.items()
    ]
    uniques.take_back(tx, readmission)
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
    uniques.forget(tx, [job.bytes for job, _ in gone])
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
