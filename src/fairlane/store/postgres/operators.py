"""The operator's side of PostgreSQL: listing jobs, putting dead ones back, removing them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from uuid import UUID

import msgspec

from fairlane.clock import Instant
from fairlane.job import State
from fairlane.policy.unique import Holder, OnReplayConflict
from fairlane.store.operators import (
    CANCEL,
    PURGE,
    REPLAY,
    RETRY,
    Action,
    Handled,
)
from fairlane.store.postgres import jobs, uniques
from fairlane.store.postgres.connections import STATEMENTS, Connection


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
        gone: dict[UUID, State] = {}
        for old, new in readmission.replaced.items():
            gone[old], state = await jobs.cancel(
                connection, old, now, only_waiting=True, reason=f"replaced by job {new}"
            )
            if state is not State.CANCELLED:
                held[new] = old  # it has started since we looked, and goes on alone
        taken = {key: each for key, each in readmission.taken.items() if each.job not in held}
        if taken:
            await uniques.take_back(connection, msgspec.structs.replace(readmission, taken=taken))
        # Who has just been cancelled in favour of another stays so, although it may have been given too.
        back = [job for job in listed if job not in held and job not in gone]
        entries = await _lock_entries(connection, back)
        states = _states_in(await connection.fetch(STATEMENTS["replay"], now, back, delay))
        await connection.execute(STATEMENTS["unfile_jobs"], _handled(REPLAY, states), *entries)
        states |= await _states(connection, list(held)) | gone
    return REPLAY.handled(listed, states, readmission=readmission)


async def _states(connection: Connection, listed: Sequence[UUID]) -> dict[UUID, State]:
    return _states_in(await connection.fetch(STATEMENTS["select_states"], listed) if listed else ())


def _states_in(found: Iterable[Any]) -> dict[UUID, State]:
    return {row["id"]: State(row["state"]) for row in found}


def _handled(action: Action, states: Mapping[UUID, State]) -> list[UUID]:
    return [job for job, state in states.items() if action.applies_to(state)]


async def cancel(
    connection: Connection, given: Sequence[UUID], now: Instant | None, *, waits: bool = False
) -> list[Handled]:
    listed = CANCEL.bounded(given)
    present = list(await _states(connection, listed))
    idle = present if waits else [job for (job,) in await connection.fetch(STATEMENTS["lock_idle"], present)]
    found = {job: (await jobs.cancel(connection, job, now))[0] for job in idle}
    busy = set(present) - set(idle)
    return CANCEL.handled(listed, found | dict.fromkeys(busy, State.READY), busy)


async def purge(connection: Connection, given: Sequence[UUID]) -> list[Handled]:
    listed = PURGE.bounded(given)
    async with connection.transaction():
        entries = await _lock_entries(connection, listed)
        states = _states_in(await connection.fetch(STATEMENTS["purge"], listed))
        gone = _handled(PURGE, states)
        await connection.execute(STATEMENTS["unfile_jobs"], gone, *entries)
        await connection.execute(STATEMENTS["forget_jobs"], gone)
    return PURGE.handled(listed, states)


async def _lock_entries(connection: Connection, listed: Sequence[UUID]) -> tuple[list[bool], list[int]]:
    found = await connection.fetch(STATEMENTS["lock_entries"], listed)
    return [row["is_dead"] for row in found], [row["id"] for row in found]


async def retry_now(connection: Connection, given: Sequence[UUID], now: Instant | None) -> list[Handled]:
    listed = RETRY.bounded(given)
    found = await connection.fetch(STATEMENTS["retry_now"], now, listed)
    busy = {row["id"] for row in found if row["is_busy"]}
    return RETRY.handled(listed, _states_in(found), busy)
