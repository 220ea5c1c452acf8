"""Unique keys on PostgreSQL: who holds them, decided by the core inside the transaction that takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from fairlane.clock import Instant
from fairlane.job import NewJob, State, Until
from fairlane.policy.unique import Admission, Ended, Holder, OnReplayConflict, Readmission, admit, readmit
from fairlane.store.postgres.connections import STATEMENTS, Connection


async def admitted(connection: Connection, jobs: Sequence[NewJob], now: Instant | None) -> Admission:
    """What may be stored of these jobs. Their keys stay locked until the transaction ends."""
    if keys := _keys(jobs):
        await connection.execute(STATEMENTS["lock_uniques"], keys)
    return await foreseen(connection, jobs, now)


async def foreseen(connection: Connection, jobs: Sequence[NewJob], now: Instant | None) -> Admission:
    """The same as things stand, without taking anything."""
    keys = _keys(jobs)
    found = await connection.fetch(STATEMENTS["select_holders"], keys, now) if keys else []
    holders = {row["id"]: _holder(row) for row in found if row["job"] is not None}
    return admit(jobs, holders, found[0]["now"] if found else now or 0)


async def take(connection: Connection, admission: Admission) -> None:
    """Write down who has the keys now."""
    taken = [(key, job) for key, job in admission.taken.items() if job.unique is not None]
    if not taken:
        return
    await connection.execute(
        STATEMENTS["take_uniques"],
        [key for key, _ in taken],
        [job.id for _, job in taken],
        [job.unique.digest for _, job in taken if job.unique],
        [job.unique.until for _, job in taken if job.unique],
        [job.unique.expires_at(admission.now) for _, job in taken if job.unique],
        True,
    )


async def readmitted(
    connection: Connection,
    jobs: Sequence[UUID],
    now: Instant | None,
    on_conflict: OnReplayConflict,
    earlier: Mapping[bytes, Holder],
    *,
    takes: bool = True,
) -> Readmission:
    """Which of these jobs may come back, as far as their unique keys are concerned.

    If they are to come back (`takes`), the keys stay locked until the transaction ends.
    """
    rows = await connection.fetch(STATEMENTS["select_unique_jobs"], jobs)
    if not rows:
        return Readmission({}, {}, {}, {})
    keys = sorted({row["key"] for row in rows})
    if takes:
        await connection.execute(STATEMENTS["lock_uniques"], keys)
        # What they are by now: whoever had the lock may have put some of them back.
        rows = await connection.fetch(STATEMENTS["select_unique_jobs"], jobs)
    found = await connection.fetch(STATEMENTS["select_holders"], keys, now)
    holders = {row["id"]: _holder(row) for row in found if row["job"] is not None}
    ended = [Ended(row["job"], row["key"], Until(row["until"]), row["digest"]) for row in rows]
    return readmit(ended, holders, found[0]["now"], on_conflict, earlier)


async def take_back(connection: Connection, readmission: Readmission) -> None:
    """Write down that jobs which are put back have their keys again."""
    taken = readmission.taken
    await connection.execute(
        STATEMENTS["take_uniques"],
        list(taken),
        [each.job for each in taken.values()],
        [each.digest for each in taken.values()],
        [each.until for each in taken.values()],
        [None] * len(taken),
        False,
    )


def _keys(jobs: Sequence[NewJob]) -> list[bytes]:
    return sorted({job.unique.id for job in jobs if job.unique is not None})


def _holder(row: Any) -> Holder:
    state = None if row["state"] is None else State(row["state"])
    return Holder(row["job"], row["digest"], Until(row["until"]), row["expires_at"], state, row["has_started"])
