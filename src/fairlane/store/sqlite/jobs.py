"""Jobs on SQLite: storing them, looking at them, cancelling them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from uuid import UUID

from msgspec.structs import astuple

from fairlane.clock import Instant
from fairlane.errors import DuplicateJob
from fairlane.job import NewJob, State, Until
from fairlane.policy.unique import Admission, Conflict, Holder, admit
from fairlane.store.rows import encode, no_such_job, no_such_queue
from fairlane.store.rows import record_of as record_of
from fairlane.store.sqlite.database import Transaction
from fairlane.store.sqlite.rows import LaneEvent
from fairlane.store.sqlite.wakeups import WORK


def insert(tx: Transaction, jobs: Sequence[NewJob], now: Instant) -> dict[UUID, Conflict]:
    """Store jobs and append one lane event per lane; `DuplicateJob` if an id is taken.

    Returns what met a unique key that another job holds.
    """
    if all(job.unique is None for job in jobs):
        _store(tx, jobs, now)
        return {}
    admission = admitted(tx, jobs, now)
    if admission.own:
        raise DuplicateJob(min(admission.own))
    if admission.stored:
        _store(tx, admission.stored, now)
    for old, new in admission.replaced.items():
        cancel(tx, old, now, only_waiting=True, reason=f"replaced by job {new}")
    take(tx, admission)
    return admission.conflicts


def _store(tx: Transaction, jobs: Sequence[NewJob], now: Instant) -> None:
    numbers: dict[str, int] = {name: tx.value("select_queue_id", name) for name in {job.queue for job in jobs}}
    for name, number in numbers.items():
        if number is None:
            raise no_such_queue(name)
    last: int = tx.value("take_positions", len(jobs))
    first = last - len(jobs) + 1
    job_rows = []
    events: dict[tuple[bytes, State], LaneEvent] = {}
    woken: dict[int, int] = {}
    ahead: int = tx.value("select_time") if any(job.run_at is not None for job in jobs) else 0
    for position, job in enumerate(jobs, first):
        queue = numbers[job.queue]
        lane_keys = encode(job.lane_keys)
        given = None if job.given is None else encode(job.given)
        # A time of day goes by the wall clock.
        due_at = job.run_at + ahead if job.run_at is not None else now + (job.delay or 0)
        state = State.READY if due_at <= now else State.SCHEDULED
        due = (
            None if state is State.READY else due_at,
            job.on_dead,
            given,
            None if given is None else position,
            job.context,
        )
        stored = (int(state), job.max_attempts, now, now, *due)
        keys = (lane_keys, encode(job.keys), job.payload)
        job_rows.append((position, job.id.bytes, queue, job.task, job.priority, job.lane, *keys, *stored))
        woken.setdefault(queue, 0)
        # Where nothing becomes ready, only the numbers that jobs bring are reported: they hold from now on.
        if state is State.READY or given is not None:
            event = events.get((job.lane, state))
            if event is None:
                event = events[job.lane, state] = LaneEvent(queue, job.lane, job.priority, lane_keys, 0, position, now)
            if state is State.READY:
                event.count += 1
                woken[queue] += 1
            if given is not None:
                event.given, event.given_by = given, position
    try:
        tx.run_many("insert_job", job_rows)
    except sqlite3.IntegrityError as error:
        # In the caller's transaction, which goes on, nothing of this enqueue may stay behind.
        tx.run("delete_jobs_between", first - 1, last)
        if (taken := _taken(tx, jobs)) is None:
            raise
        raise DuplicateJob(taken) from error
    tx.run_many("insert_arrival", [astuple(event) for event in events.values()])
    # A scheduled job wakes one waiter too: it has to learn until when to sleep.
    tx.woken.update({queue: count or 1 for queue, count in woken.items()})


def _taken(tx: Transaction, jobs: Sequence[NewJob]) -> UUID | None:
    """The first id that is stored already, or is there twice in the jobs themselves."""
    seen: set[UUID] = set()
    for job in jobs:
        if job.id in seen or tx.one("select_state", job.id.bytes) is not None:
            return job.id
        seen.add(job.id)
    return None


def cancel(
    tx: Transaction, job: UUID, now: Instant, *, only_waiting: bool = False, reason: str | None = None
) -> tuple[State, State]:
    """Cancel what waits; what runs is asked to stop, or left alone. Returns its state before and now."""
    row = tx.one("select_state", job.bytes)
    if row is None:
        raise no_such_job(job)
    position, queue, lane, priority, lane_keys, number, ready_at, lease, keeps_place = row
    state = State(number)
    if state.is_final or (only_waiting and state is State.RUNNING):
        return state, state
    if state is State.RUNNING:
        tx.run("request_cancel", position)
        tx.run("insert_cancellation", lease, job.bytes)
        if (worker := tx.value("select_lease_worker", lease)) is not None:
            tx.nudged[UUID(bytes=worker)] = WORK
        return state, state
    tx.run("cancel_waiting", now, reason, position)
    tx.ended.append(job)
    if state is State.READY:
        tx.run("insert_arrival", queue, lane, priority, lane_keys, -1, position, ready_at, None, 0, None)
    if keeps_place:  # in a sequence: another job of it may start now
        tx.run("insert_arrival", queue, lane, priority, lane_keys, 0, position, ready_at, None, 1, None)
        tx.woken[queue] += 1
    return state, State.CANCELLED


def admitted(tx: Transaction, jobs: Sequence[NewJob], now: Instant) -> Admission:
    """What may be stored of these jobs."""
    return admit(jobs, _holders(tx, {job.unique.id for job in jobs if job.unique is not None}), now)


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


def _holders(tx: Transaction, keys: Iterable[bytes]) -> dict[bytes, Holder]:
    """Who has taken these unique keys."""
    holders = {}
    for key in keys:
        if (row := tx.one("select_holder", key)) is not None:
            job, digest, until, expires_at, state, has_started = row
            found = None if state is None else State(state)
            holders[key] = Holder(UUID(bytes=job), digest, Until(until), expires_at, found, bool(has_started))
    return holders
