"""Jobs on SQLite: storing them, looking at them, cancelling them."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable, Sequence
from uuid import UUID

import msgspec

from fairlane.clock import Instant
from fairlane.errors import DuplicateJob
from fairlane.job import NewJob, State, Until
from fairlane.policy.unique import (
    Admission,
    Conflict,
    Holder,
    admit,
)
from fairlane.store.rows import no_such_job, no_such_queue
from fairlane.store.rows import record_of as record_of
from fairlane.store.sqlite import rows
from fairlane.store.sqlite.database import Transaction


def insert(tx: Transaction, jobs: Sequence[NewJob], now: Instant) -> tuple[dict[int, int], dict[UUID, Conflict]]:
    """Store jobs and ring one bell per lane; `DuplicateJob` if an id is taken.

    Returns how many to wake by queue, and what met a unique key that another job holds.
    """
    if all(job.unique is None for job in jobs):
        return _store(tx, jobs, now), {}
    admission = admitted(tx, jobs, now)
    if admission.own:
        raise DuplicateJob(min(admission.own))
    woken = _store(tx, admission.stored, now) if admission.stored else {}
    for old, new in admission.replaced.items():
        freed = cancel(tx, old, now, only_waiting=True, reason=f"replaced by job {new}").frees
        if freed is not None:
            woken[freed] = woken.get(freed, 0) + 1
    take(tx, admission)
    return woken, admission.conflicts


def _store(tx: Transaction, jobs: Sequence[NewJob], now: Instant) -> dict[int, int]:
    numbers = {name: _queue_number(tx, name) for name in {job.queue for job in jobs}}
    last: int = tx.value("take_positions", len(jobs))
    position = last - len(jobs)
    job_rows = []
    bells: dict[bytes, list[object]] = {}
    numbers_only: dict[bytes, list[object]] = {}
    counts: Counter[bytes] = Counter()
    ready: Counter[int] = Counter()
    scheduled: set[int] = set()
    ahead: int = tx.value("select_time") if any(job.run_at is not None for job in jobs) else 0
    for job in jobs:
        position += 1
        queue = numbers[job.queue]
        lane_keys = rows.encode_keys(job.lane_keys)
        given = None if job.given is None else rows.encode_given(job.given)
        due_at = _due_at(job, now, ahead)
        state = State.READY if due_at is None else State.SCHEDULED
        job_rows.append(
            (
                position,
                job.id.bytes,
                queue,
                job.task,
                job.priority,
                job.lane,
                lane_keys,
                rows.encode_keys(job.keys),
                job.payload,
                int(state),
                job.max_attempts,
                now,
                now,
                due_at,
                job.on_dead,
                given,
                None if given is None else position,
                job.context,
            )
        )
        if state is State.READY:
            bell = bells.setdefault(job.lane, _bell(queue, job, lane_keys, position, now))
            counts[job.lane] += 1
            ready[queue] += 1
        else:
            # Nothing is ready in its lane, but its numbers hold from now on.
            bell = numbers_only.setdefault(job.lane, _bell(queue, job, lane_keys, position, now))
            scheduled.add(queue)
        if given is not None:
            bell[7], bell[9] = given, position
    for lane, bell in bells.items():
        bell[4] = counts[lane]
    bells_rung = [*bells.values(), *(bell for bell in numbers_only.values() if bell[7] is not None)]
    try:
        tx.run_many("insert_job", job_rows)
    except sqlite3.IntegrityError as error:
        # In the caller's transaction, which goes on, nothing of this enqueue may stay behind.
        tx.run("delete_jobs_between", last - len(jobs), last)
        if (taken := _taken(tx, jobs)) is None:
            raise
        raise DuplicateJob(taken) from error
    tx.run_many("insert_arrival", bells_rung)
    # A scheduled job wakes one waiter too: it has to learn until when to sleep.
    return {queue: ready[queue] or 1 for queue in {*ready, *scheduled}}


def _bell(queue: int, job: NewJob, lane_keys: str, position: int, now: Instant) -> list[object]:
    return [queue, job.lane, job.priority, lane_keys, 0, position, now, None, 0, None]


def _taken(tx: Transaction, jobs: Sequence[NewJob]) -> UUID | None:
    """The first id that is stored already, or is there twice in the jobs themselves."""
    seen: set[UUID] = set()
    for job in jobs:
        if job.id in seen or tx.one("select_state", job.id.bytes) is not None:
            return job.id
        seen.add(job.id)
    return None


def _due_at(job: NewJob, now: Instant, ahead: int) -> Instant | None:
    """In queue time. A time of day goes by the wall clock."""
    at = job.run_at + ahead if job.run_at is not None else now + job.delay if job.delay is not None else now
    return at if at > now else None


def _queue_number(tx: Transaction, name: str) -> int:
    row = tx.one("select_queue", name)
    if row is None:
        raise no_such_queue(name)
    number: int = row[0]
    return number


class Cancelled(msgspec.Struct, frozen=True):
    """What a cancel came to."""

    was: State
    state: State
    worker: UUID | None = None
    """Who runs it, and is to be told."""
    frees: int | None = None
    """The queue in which it has kept a place in a sequence: somebody may start now."""


def cancel(
    tx: Transaction, job: UUID, now: Instant, *, only_waiting: bool = False, reason: str | None = None
) -> Cancelled:
    """Cancel what waits; what runs is asked to stop, or left alone."""
    row = tx.one("select_state", job.bytes)
    if row is None:
        raise no_such_job(job)
    position, queue, lane, priority, lane_keys, number, ready_at, lease, keeps_place = row
    state = State(number)
    if state.is_final or (only_waiting and state is State.RUNNING):
        return Cancelled(state, state)
    if state is State.RUNNING:
        tx.run("request_cancel", position)
        tx.run("insert_cancellation", lease, job.bytes)
        worker = tx.value("select_lease_worker", lease)
        return Cancelled(state, state, None if worker is None else UUID(bytes=worker))
    tx.run("cancel_waiting", now, reason, position)
    if state is State.READY:
        tx.run("insert_arrival", queue, lane, priority, lane_keys, -1, position, ready_at, None, 0, None)
    if not keeps_place:
        return Cancelled(state, State.CANCELLED)
    tx.run("insert_arrival", queue, lane, priority, lane_keys, 0, position, ready_at, None, 1, None)
    return Cancelled(state, State.CANCELLED, frees=queue)


def admitted(tx: Transaction, jobs: Sequence[NewJob], now: Instant) -> Admission:
    """What may be stored of these jobs."""
    keys = {job.unique.id for job in jobs if job.unique is not None}
    found = {key: _holder(tx, key) for key in keys}
    return admit(jobs, {key: holder for key, holder in found.items() if holder is not None}, now)


def take(tx: Transaction, admission: Admission) -> None:
    """Write down who has the keys now."""
    taken = [(key, job.id.bytes, job.unique) for key, job in admission.taken.items() if job.unique is not None]
    tx.run_many(
        "take_unique",
        [(key, job, unique.digest, int(unique.until), unique.expires_at(admission.now)) for key, job, unique in taken],
    )
    tx.run_many("insert_unique_job", [(job, key, int(unique.until)) for key, job, unique in taken])


def forget(tx: Transaction, jobs: Iterable[bytes]) -> None:
    """These jobs are gone, and their keys are free; a window outlives its job."""
    gone = [(job,) for job in jobs]
    tx.run_many("delete_uniques_of_job", gone)
    tx.run_many("delete_unique_job", gone)


def _holder(tx: Transaction, key: bytes) -> Holder | None:
    row = tx.one("select_holder", key)
    if row is None:
        return None
    job, digest, until, expires_at, state, has_started = row
    found = None if state is None else State(state)
    return Holder(UUID(bytes=job), digest, Until(until), expires_at, found, bool(has_started))
