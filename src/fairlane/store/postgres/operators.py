"""The operator's side of PostgreSQL: listing jobs, putting dead ones back, removing them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from uuid import UUID, uuid4

import msgspec

from fairlane.clock import Instant
from fairlane.job import State
from fairlane.policy.overrides import Amendment, Override, amend
from fairlane.policy.policy import Policy
from fairlane.policy.unique import Holder, OnReplayConflict
from fairlane.scheduler.rebuild import carried_gates, rebuild
from fairlane.scheduler.resident import Ask
from fairlane.store.audit import EXPIRY, Note, describe_amendments, record
from fairlane.store.operators import (
    CANCEL,
    FORCE,
    PURGE,
    REPLAY,
    RETRY,
    Action,
    Handled,
)
from fairlane.store.postgres import jobs
from fairlane.store.postgres.claim_lock import Loaded, Scheduling
from fairlane.store.postgres.connections import STATEMENTS, Connection
from fairlane.store.postgres.procedures import perform
from fairlane.store.protocol import EVERYONE


async def foresee_replay(
    connection: Connection,
    given: Sequence[UUID],
    now: Instant | None,
    on_conflict: OnReplayConflict,
    earlier: Mapping[bytes, Holder],
) -> list[Handled]:
    """What `replay` would report now."""
    listed = REPLAY.bounded(given)
    readmission = await jobs.readmitted(connection, listed, now, on_conflict, earlier, takes=False)
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
        readmission = await jobs.readmitted(connection, listed, now, on_conflict, earlier)
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
            await jobs.take_back(connection, msgspec.structs.replace(readmission, taken=taken))
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


async def apply(
    schedulings: Sequence[Scheduling], put: Sequence[Override], remove: Sequence[str], note: Note
) -> list[Amendment]:
    """Set and remove overrides of queues in one transaction, wake whoever may start now, and record it once."""
    found = [await _without_ended(each) for each in schedulings]
    # All are asked before any is changed: what one partition refuses is refused.
    amendments = [amend(policy, put, remove) for policy, _ in found]
    for scheduling, (policy, now), amendment in zip(schedulings, found, amendments, strict=True):
        if amendment.changes:
            await _store(scheduling, policy, amendment, now)
    policy, now = found[0]
    await _record(schedulings[0].connection, note, now, policy.queue, amendments)
    return amendments


async def _without_ended(scheduling: Scheduling) -> tuple[Policy, Instant]:
    """What is in force, and the time, once the overrides are gone whose time has come."""
    policy, now = await scheduling.in_force()
    ended = policy.overrides.expired(now)
    if not ended:
        return policy, now
    await _end(scheduling, policy, ended, now)
    return await scheduling.in_force()


async def expire(scheduling: Scheduling, loaded: Loaded) -> None:
    """End the overrides whose time has come."""
    await _end(scheduling, loaded.policy, loaded.expired, loaded.now)


async def _end(scheduling: Scheduling, policy: Policy, ended: Sequence[Override], now: Instant) -> None:
    amendment = amend(policy, [], [each.id for each in ended])
    await _store(scheduling, policy, amendment, now)
    note = Note(actor=EXPIRY, action="expire")
    await _record(scheduling.connection, note, now, policy.queue, [amendment])


async def _store(scheduling: Scheduling, policy: Policy, amendment: Amendment, now: Instant) -> None:
    """Store overrides, and let whoever may start now look: where that may be every lane, the board is made anew."""
    connection, queue = scheduling.connection, scheduling.queue
    changed = policy.overridden(amendment.overrides)
    loaded = await scheduling.fold_all() if amendment.rebuilds else await scheduling.load()
    await scheduling.to_tables(loaded)
    if amendment.rebuilds:
        board, kept = await scheduling.select_all(), await scheduling.kept_places(policy)
        await scheduling.replace(rebuild(changed, now, loaded.state, *board, kept), now)
    before, after = amendment.before, amendment.after
    await connection.execute(STATEMENTS["delete_overrides"], queue.id, [each.id for each in before])
    documents = [msgspec.json.encode(each).decode() for each in after]
    await connection.execute(STATEMENTS["put_overrides"], queue.id, [each.id for each in after], documents)
    found = await scheduling.ask(Ask(gates=list(amendment.wakes)))
    await scheduling.put_gates(carried_gates(changed, now, found.gates), now)
    # A name that no other state of any queue has: whoever knows it knows these overrides.
    await connection.execute(STATEMENTS["update_amended"], queue.id, uuid4().hex, amendment.overrides.expires_at)
    await connection.execute(STATEMENTS["nudge"], queue.id, EVERYONE, None)
    await connection.execute(STATEMENTS["tell_holders"], queue.id)


async def _record(
    connection: Connection, note: Note, now: Instant, queue: str, amendments: Sequence[Amendment]
) -> None:
    if any(each.changes for each in amendments):
        await perform(connection, record(note, now, queue, *describe_amendments(amendments)))


async def force(connection: Connection, given: Sequence[UUID], now: Instant | None) -> list[Handled]:
    """Let waiting jobs start next, whatever their limits say."""
    listed = FORCE.bounded(given)
    found = await connection.fetch(STATEMENTS["force"], now, listed)
    return FORCE.handled(listed, {row["id"]: State(row["state"]) for row in found})
