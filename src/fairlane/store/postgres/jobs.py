"""Jobs on PostgreSQL: storing them, looking at them, cancelling them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from uuid import UUID

import asyncpg

from fairlane.clock import Instant
from fairlane.errors import DuplicateJob, InvalidJob
from fairlane.job import NewJob, State
from fairlane.policy.unique import Conflict
from fairlane.store.job_rows import no_such_job
from fairlane.store.job_rows import record_of as record_of
from fairlane.store.postgres import copying, rows, uniques
from fairlane.store.postgres.borrowing import OwnJson
from fairlane.store.postgres.connections import STATEMENTS, Connection

AT_ONCE = 5_000
"""Jobs that one statement stores; more of them go in several, in one transaction."""
COPIED_FROM = 250
COPIED_PER_LANE = 3
"""So many jobs at least, and so many a lane, are copied in: below, round trips and bells cost more than is gained."""


async def insert(
    connection: Connection,
    jobs: Sequence[NewJob],
    queues: Mapping[str, int],
    now: Instant | None,
    *,
    is_callers: bool,
    is_repeated: bool = False,
    progress: Callable[[int], None] | None = None,
) -> dict[UUID, Conflict]:
    """Store jobs, ring their lanes' bells and wake whoever waits for them; `DuplicateJob` if an id is taken.

    Returns what met a unique key that another job holds.
    """
    tell = progress or _tell_nobody
    is_unique = any(job.unique is not None for job in jobs)
    if not is_unique and len(jobs) <= AT_ONCE:
        await _store(connection, jobs, queues, now, is_callers=is_callers, is_repeated=is_repeated)
        tell(len(jobs))
        return {}
    async with contextlib.nullcontext() if is_callers else connection.transaction():
        admission = await uniques.admitted(connection, jobs, now)
        stored = admission.stored
        if admission.own and not is_repeated:
            raise DuplicateJob(min(admission.own))
        # All were stored together, or none: one of them tells of the others.
        if admission.own or (is_repeated and await _are_stored(connection, stored[:1], queues)):
            return admission.conflicts
        for old, new in admission.replaced.items():
            _, found = await cancel(connection, old, now, only_waiting=True, reason=f"replaced by job {new}")
            if found is not State.CANCELLED:
                del admission.conflicts[new]  # it has started since we looked, and goes on beside the new one
        await uniques.take(connection, admission)
        for first in range(0, len(stored), AT_ONCE):
            some = stored[first : first + AT_ONCE]
            # They are enqueued at the instant at which their keys were decided on: windows are counted from it.
            at = admission.now if is_unique else now
            await _store(connection, some, queues, at, is_callers=is_callers, is_repeated=False)
            tell(first + len(some))
    if len(stored) < len(jobs):
        tell(len(jobs))  # those that were not stored have been decided on too
    return admission.conflicts


def _tell_nobody(_: int) -> None:
    pass


async def _store(
    connection: Connection,
    jobs: Sequence[NewJob],
    queues: Mapping[str, int],
    now: Instant | None,
    *,
    is_callers: bool,
    is_repeated: bool,
) -> None:
    try:
        if len(jobs) == 1 and not isinstance(connection, OwnJson):
            (job,) = jobs
            beside = (job.on_dead, _given(job), job.context)
            await connection.execute(STATEMENTS["store_job"], now, is_callers, *_columns(job, queues), *beside)
        elif isinstance(connection, OwnJson) or _are_copied(jobs):
            async with contextlib.nullcontext() if connection.is_in_transaction() else connection.transaction():
                await copying.copy_in(connection, jobs, queues, now, is_callers=is_callers)
        else:
            columns = [_columns(job, queues) for job in jobs]
            several = ([job.on_dead for job in jobs], [_given(job) for job in jobs], [job.context for job in jobs])
            arrays = [each if any(each) else [] for each in several]
            await connection.execute(STATEMENTS["enqueue"], now, is_callers, columns, *arrays)
    except (asyncpg.DataError, UnicodeEncodeError) as error:
        raise InvalidJob(f"a job cannot be stored as it was given: {error}") from error
    except asyncpg.UniqueViolationError as error:
        # One statement stores all or nothing. If the answer to an earlier try was not heard and all are there as they
        # were given, it was we who stored them.
        if not (is_repeated and await _are_stored(connection, jobs, queues)):
            raise DuplicateJob(_taken(jobs, error)) from error


def _are_copied(jobs: Sequence[NewJob]) -> bool:
    return len(jobs) >= COPIED_FROM and len(jobs) >= COPIED_PER_LANE * len({job.lane for job in jobs})


async def _are_stored(connection: Connection, jobs: Sequence[NewJob], queues: Mapping[str, int]) -> bool:
    """Whether all of these are there exactly as given. Of none that is not so: nothing tells us that we came before."""
    found: bool = await connection.fetchval(STATEMENTS["are_stored"], [_columns(job, queues) for job in jobs])
    return bool(jobs) and found


def _taken(jobs: Sequence[NewJob], error: asyncpg.UniqueViolationError) -> UUID:
    """The id that the server complains of. Asking for it is no choice: the caller's transaction has failed."""
    complaint = error.detail or ""
    return next((job.id for job in jobs if str(job.id) in complaint), jobs[0].id)


def _columns(job: NewJob, queues: Mapping[str, int]) -> tuple[object, ...]:
    return (
        job.id,
        queues[job.queue],
        job.task,
        job.priority,
        job.lane,
        None if job.lane_keys == {**job.keys, "task": job.task} else rows.encode(job.lane_keys),
        rows.encode(job.keys),
        job.payload,
        job.max_attempts,
        job.delay,
        job.run_at,
    )


def _given(job: NewJob) -> str | None:
    return None if job.given is None else rows.encode(job.given)


async def cancel(
    connection: Connection, job: UUID, now: Instant | None, *, only_waiting: bool = False, reason: str | None = None
) -> tuple[State, State]:
    """Cancel what waits; what runs is asked to stop, or left alone. Returns its state before and now."""
    row = await connection.fetchrow(STATEMENTS["cancel_job"], job, now, only_waiting, reason)
    if row is None:
        raise no_such_job(job)
    return State(row["was"]), State(row["state"])
