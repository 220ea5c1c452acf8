"""Unique keys on SQLite: who holds them, decided by the core inside the transaction that takes them."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from fairlane.clock import Instant
from fairlane.job import NewJob, State, Until
from fairlane.policy.unique import Admission, Holder, admit
from fairlane.store.sqlite.database import Transaction

__all__ = ["admitted", "take"]


def admitted(tx: Transaction, jobs: Sequence[NewJob], now: Instant) -> Admission:
    """What may be stored of these jobs."""
    keys = {job.unique.id for job in jobs if job.unique is not None}
    found = {key: _holder(tx, key) for key in keys}
    return admit(jobs, {key: holder for key, holder in found.items() if holder is not None}, now)


def take(tx: Transaction, admission: Admission) -> None:
    """Write down who has the keys now."""
    tx.run_many(
        "take_unique",
        [
            (key, job.id.bytes, job.unique.digest, int(job.unique.until), job.unique.expires_at(admission.now))
            for key, job in admission.taken.items()
            if job.unique is not None
        ],
    )


def _holder(tx: Transaction, key: bytes) -> Holder | None:
    row = tx.one("select_holder", key)
    if row is None:
        return None
    job, digest, until, expires_at, state, has_started = row
    found = None if state is None else State(state)
    return Holder(UUID(bytes=job), digest, Until(until), expires_at, found, bool(has_started))
