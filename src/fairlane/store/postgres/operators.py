"""The operator's side of PostgreSQL: listing jobs, putting dead ones back, removing them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING
from uuid import UUID

import msgspec

from fairlane.clock import Instant
from fairlane.job import JobRecord, State
from fairlane.policy.unique import Holder, OnReplayConflict
from fairlane.store.operators import CANCEL, LOOK_AT_MOST, PURGE, REPLAY, RETRY, Cursor, Handled, JobFilter, JobPage
from fairlane.store.postgres import jobs, rows, uniques
from fairlane.store.postgres.connections import STATEMENTS

if TYPE_CHECKING:
    from fairlane.store.postgres.connections import Connection

__all__ = ["cancel", "find", "foresee_replay", "purge", "replay", "retry_now"]

STRETCH = 1_000
"""Jobs of a walk that are looked at together."""
ENTRIES = 100
"""Entries of finished jobs that are read together; one may name as many jobs as were settled together."""
LAST = 2**63 - 1
LAST_ID = UUID(int=2**128 - 1)


async def find(connection: Connection, wanted: JobFilter, queue: int | None, after: str | None, limit: int) -> JobPage:
    """Walk the index that serves this filter, a stretch at a time, until the page is full or enough was looked at."""
    place = Cursor.decode(after, by_end=wanted.is_by_end)
    found: list[JobRecord] = []
    looked_at = 0
    # On one snapshot: what is looked at and where the walk has come to belong together.
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        while looked_at < LOOK_AT_MOST:
            stretch = await _stretch(connection, wanted, queue, place, min(STRETCH, LOOK_AT_MOST - looked_at))
            if not stretch:
                return JobPage(found, None)
            found += await _fitting(connection, stretch, wanted, queue, limit - len(found))
            if len(found) >= limit:
                last = next(each for each in stretch if each.job == found[-1].id)
                return JobPage(found, last.encode())
            place = stretch[-1]
            looked_at += len(stretch)
    assert place is not None
    return JobPage(found, place.encode())


async def _stretch(
    connection: Connection, wanted: JobFilter, queue: int | None, place: Cursor | None, count: int
) -> list[Cursor]:
    """The next places of the walk that serves a filter."""
    before = None if place is None else place.job
    match wanted.state:
        case State.DONE | State.DEAD | State.CANCELLED:
            return await _stretch_of_ended(connection, wanted, place, count)
        case State.RUNNING:
            walked = await connection.fetch(STATEMENTS["walk_running_jobs"], before, count)
        case _ if queue is not None:
            walked = await connection.fetch(STATEMENTS["walk_jobs_of_queue"], before, count, queue)
        case _:
            walked = await connection.fetch(STATEMENTS["walk_jobs"], before, count)
    return [Cursor(job) for (job,) in walked]


async def _stretch_of_ended(
    connection: Connection, wanted: JobFilter, place: Cursor | None, count: int
) -> list[Cursor]:
    until = LAST if wanted.finished_until is None else wanted.finished_until
    start = place or Cursor(LAST_ID, until, 0 if wanted.finished_until is not None else LAST)
    while True:
        entries = await connection.fetch(
            STATEMENTS["walk_finished"],
            int(wanted.state is State.DEAD),
            start.at,
            start.entry,
            wanted.finished_since or 0,
            ENTRIES,
        )
        found = [Cursor(job, at, entry) for at, entry, named in entries for job in sorted(named, reverse=True)]
        # The entry that an earlier page has come to may name jobs that are still to be looked at.
        found = [each for each in found if (each.at, each.entry) != (start.at, start.entry) or each.job < start.job]
        if found or len(entries) < ENTRIES:
            return found[:count]
        start = Cursor(UUID(int=0), entries[-1]["at"], entries[-1]["id"])


async def _fitting(
    connection: Connection, stretch: Sequence[Cursor], wanted: JobFilter, queue: int | None, limit: int
) -> list[JobRecord]:
    found = await connection.fetch(
        STATEMENTS["select_fitting"],
        [each.job for each in stretch],
        queue,
        wanted.task,
        wanted.state,
        rows.encode(wanted.keys),
        wanted.enqueued_since,
        wanted.enqueued_until,
        wanted.finished_since,
        wanted.finished_until,
        limit,
    )
    return [jobs.record_of(row) for row in found]


async def foresee_replay(
    connection: Connection,
    given: Sequence[UUID],
    now: Instant | None,
    on_conflict: OnReplayConflict,
    earlier: Mapping[bytes, Holder],
) -> list[Handled]:
    """What `replay` would report now."""
    listed = REPLAY.bounded(given)
    readmission = await uniques.readmitted(connection, listed, now, on_conflict, earlier, takes=False)
    return REPLAY.handled(listed, await _states(connection, listed), readmission=readmission)


async def replay(
    connection: Connection,
    given: Sequence[UUID],
    delay: int | None,
    now: Instant | None,
    on_conflict: OnReplayConflict,
    earlier: Mapping[bytes, Holder],
) -> list[Handled]:
    listed = REPLAY.bounded(given)
    async with connection.transaction():
        # Keys before jobs, as an enqueue has it: no two wait crosswise.
        readmission = await uniques.readmitted(connection, listed, now, on_conflict, earlier)
        held = readmission.held
        for old, new in readmission.replaced.items():
            _, state = await jobs.cancel(connection, old, now, only_waiting=True, reason=f"replaced by job {new}")
            if state is not State.CANCELLED:
                held[new] = old  # it has started since we looked, and goes on alone
        taken = {key: each for key, each in readmission.taken.items() if each.job not in held}
        if taken:
            await uniques.take_back(connection, msgspec.structs.replace(readmission, taken=taken))
        back = [job for job in listed if job not in held]
        entries = await _lock_entries(connection, back)
        found = await connection.fetch(STATEMENTS["replay"], now, back, delay, *entries)
        states = {row["id"]: State(row["state"]) for row in found} | await _states(connection, list(held))
    return REPLAY.handled(listed, states, readmission=readmission)


async def _states(connection: Connection, listed: Sequence[UUID]) -> dict[UUID, State]:
    found = await connection.fetch(STATEMENTS["select_states"], listed) if listed else ()
    return {row["id"]: State(row["state"]) for row in found}


async def cancel(
    connection: Connection, given: Sequence[UUID], now: Instant | None, *, waits: bool = False
) -> list[Handled]:
    listed = CANCEL.bounded(given)
    present = [job for (job,) in await connection.fetch(STATEMENTS["select_present"], listed)]
    idle = present if waits else [job for (job,) in await connection.fetch(STATEMENTS["lock_idle"], present)]
    found = {job: (await jobs.cancel(connection, job, now))[0] for job in idle}
    busy = set(present) - set(idle)
    return CANCEL.handled(listed, found | dict.fromkeys(busy, State.READY), busy)


async def purge(connection: Connection, given: Sequence[UUID]) -> list[Handled]:
    listed = PURGE.bounded(given)
    async with connection.transaction():
        entries = await _lock_entries(connection, listed)
        found = await connection.fetch(STATEMENTS["purge"], listed, *entries)
    return PURGE.handled(listed, {row["id"]: State(row["state"]) for row in found})


async def _lock_entries(connection: Connection, listed: Sequence[UUID]) -> tuple[list[bool], list[int]]:
    found = await connection.fetch(STATEMENTS["lock_entries"], listed)
    return [row["is_dead"] for row in found], [row["id"] for row in found]


async def retry_now(connection: Connection, given: Sequence[UUID], now: Instant | None) -> list[Handled]:
    listed = RETRY.bounded(given)
    found = await connection.fetch(STATEMENTS["retry_now"], now, listed)
    busy = {row["id"] for row in found if row["is_busy"]}
    return RETRY.handled(listed, {row["id"]: State(row["state"]) for row in found}, busy)
