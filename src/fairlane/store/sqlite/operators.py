"""The operator's side of SQLite: listing jobs, putting dead ones back, removing them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

import msgspec

from fairlane.clock import Instant
from fairlane.job import JobRecord, State
from fairlane.policy.unique import Holder, OnReplayConflict
from fairlane.store.operators import LOOK_AT_MOST, PURGE, REPLAY, RETRY, Cursor, Handled, JobFilter, JobPage
from fairlane.store.sqlite import jobs, rows, uniques
from fairlane.store.sqlite.database import Row, Transaction

__all__ = ["find", "foresee_replay", "purge", "replay", "retry_now"]

STRETCH = 1_000
"""Jobs of a walk that are looked at together."""
LAST = 2**63 - 1
AFTER_EVERY_ID = b"\xff" * 17


def find(tx: Transaction, wanted: JobFilter, queue: int | None, after: str | None, limit: int) -> JobPage:
    """Walk the index that serves this filter, a stretch at a time, until the page is full or enough was looked at."""
    place = Cursor.decode(after, by_end=wanted.is_by_end)
    found: list[JobRecord] = []
    looked_at = 0
    while looked_at < LOOK_AT_MOST:
        stretch = _stretch(tx, wanted, queue, place, min(STRETCH, LOOK_AT_MOST - looked_at))
        if not stretch:
            return JobPage(found, None)
        found += _fitting(tx, [position for position, _ in stretch], wanted, queue, limit - len(found))
        if len(found) >= limit:
            last = next(each for _, each in stretch if each.job == found[-1].id)
            return JobPage(found, last.encode())
        place = stretch[-1][1]
        looked_at += len(stretch)
    assert place is not None
    return JobPage(found, place.encode())


def _stretch(
    tx: Transaction, wanted: JobFilter, queue: int | None, place: Cursor | None, count: int
) -> list[tuple[int, Cursor]]:
    """The next jobs of the walk that serves a filter: their positions, and their places in it."""
    before = AFTER_EVERY_ID if place is None else place.job.bytes
    match wanted.state:
        case State.DONE | State.DEAD | State.CANCELLED:
            # Without a place: before the first position of the end of the span.
            at, position = (LAST if wanted.finished_until is None else wanted.finished_until), 0
            if place is not None and place.at is not None:
                at, position = place.at, place.entry
            ended = tx.all("walk_finished", int(wanted.state), at, position, wanted.finished_since or 0, count)
            return [(position, Cursor(UUID(bytes=job), at, position)) for position, job, at in ended]
        case State.RUNNING:
            walked = tx.all("walk_running_jobs", before, count)
        case _ if queue is not None:
            walked = tx.all("walk_jobs_of_queue", before, count, queue)
        case _:
            walked = tx.all("walk_jobs", before, count)
    return [(position, Cursor(UUID(bytes=job))) for position, job in walked]


def _fitting(
    tx: Transaction, positions: Sequence[int], wanted: JobFilter, queue: int | None, limit: int
) -> list[JobRecord]:
    found = tx.all(
        "select_fitting",
        msgspec.json.encode(positions).decode(),
        queue,
        wanted.task,
        None if wanted.state is None else int(wanted.state),
        rows.encode_keys(wanted.keys),
        wanted.enqueued_since,
        wanted.enqueued_until,
        wanted.finished_since,
        wanted.finished_until,
        limit,
    )
    return [jobs.record_of(row) for row in found]


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
