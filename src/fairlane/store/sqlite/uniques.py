"""Unique keys on SQLite: who holds them, decided by the core inside the transaction that takes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from uuid import UUID

from fairlane.clock import Instant
from fairlane.job import NewJob, State, Until
from fairlane.policy.unique import Admission, Ended, Holder, OnReplayConflict, Readmission, admit, digest_of, readmit
from fairlane.store.sqlite.database import Transaction


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


def readmitted(
    tx: Transaction,
    jobs: Sequence[UUID],
    now: Instant,
    on_conflict: OnReplayConflict,
    earlier: Mapping[bytes, Holder],
) -> Readmission:
    """Which of these jobs may come back, as far as their unique keys are concerned."""
    asked = ((job, tx.one("select_unique_job", job.bytes)) for job in jobs)
    ended = [Ended(job, row[0], Until(row[1]), digest_of(row[2])) for job, row in asked if row is not None]
    found = {each.key: _holder(tx, each.key) for each in ended}
    holders = {key: holder for key, holder in found.items() if holder is not None}
    return readmit(ended, holders, now, on_conflict, earlier)


def take_back(tx: Transaction, readmission: Readmission) -> None:
    """Write down that jobs which are put back have their keys again."""
    tx.run_many(
        "take_unique",
        [(key, each.job.bytes, each.digest, int(each.until), None) for key, each in readmission.taken.items()],
    )


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
