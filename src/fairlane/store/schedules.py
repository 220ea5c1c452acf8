"""Schedules as every store keeps them. Moving a schedule on and firing its slot is one transaction."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any
from uuid import UUID

import msgspec

from fairlane.clock import Instant
from fairlane.job import NewJob, Outcome
from fairlane.policy.unique import Conflict
from fairlane.store.audit import Note, record
from fairlane.store.procedures import NOW, Enqueue, Procedure, Work, is_done, look, note, query, transaction, value
from fairlane.store.rows import uuid_of

ORPHANED_AFTER = 180 * 1_000_000
"""Microseconds after which a schedule that no worker has said to have is nobody's."""


class ScheduleRow(msgspec.Struct, frozen=True):
    """A schedule as it stands."""

    name: str
    digest: bytes
    """Tells one declaration from another."""
    document: str
    """The declaration, as JSON."""
    next_at: Instant | None
    """The first slot that was not fired."""
    is_paused: bool
    triggers: int
    """How often an operator has triggered it."""
    triggered: int
    """How many of these have been fired."""
    last_slot: Instant | None
    last_job: UUID | None
    last_fired_at: Instant | None
    declared_at: Instant
    """When a worker last said that it has this declaration."""

    def is_orphaned(self, now: Instant) -> bool:
        """No worker has it any more, so that nobody fires it."""
        return now - self.declared_at > ORPHANED_AFTER

    def declaration(self) -> dict[str, Any]:
        """The declaration."""
        found: dict[str, Any] = msgspec.json.decode(self.document)
        return found


class Fired(msgspec.Struct, frozen=True):
    """What a firing makes of a schedule."""

    next_at: Instant | None
    triggered: int
    slot: Instant | None = None
    """What was fired last; `None`: nothing, slots were only left out."""
    job: UUID | None = None
    """Its job; `None`: its queue refused it."""

    def standing(self, conflicts: Mapping[UUID, Conflict]) -> UUID | None:
        """The job that stands for the slot: its own, or the one that holds its unique key; none if that refuses it."""
        met = None if self.job is None else conflicts.get(self.job)
        if met is None or met.outcome.is_stored:
            return self.job
        return met.holder if met.outcome is Outcome.DUPLICATE else None


@look
def schedules(names: Collection[str] | None = None) -> Procedure[list[ScheduleRow]]:
    """All of them, or those of these names; by name."""
    asked = query("select_schedules") if names is None else query("select_schedules_named", list(names))
    return [_row(row) for row in (yield asked)]


@transaction
def put_schedule(
    name: str, digest: bytes, document: str, next_at: Instant | None, *, instead_of: bytes | None
) -> Procedure[bool]:
    """Store a declaration, new or instead of the one with this digest; False if it is another one by now."""
    given = ((yield NOW), name, digest, document, next_at)
    if instead_of is None:
        return (yield from is_done("insert_schedule", *given))
    return (yield from is_done("replace_schedule", *given, instead_of))


@note
def keep_schedules(digests: dict[str, bytes], worker: UUID | None = None) -> Procedure[None]:
    """Say that a worker has these declarations. Others of the same names are left alone. From now on its listener is
    woken when an operator resumes or triggers a schedule."""
    yield query("keep_schedules", (yield NOW), list(digests), list(digests.values()), worker)


@transaction
def fire_schedule(row: ScheduleRow, fired: Fired, jobs: Sequence[NewJob]) -> Procedure[bool]:
    """Move a schedule on from how it stands in `row`, and store the jobs; all or nothing. False, and nothing is done,
    if it stands otherwise by now: somebody else has fired."""
    after = (fired.next_at, fired.triggered, fired.slot, fired.job)
    before = (row.name, row.digest, row.next_at, row.triggered, row.is_paused)
    if not (yield query("fire_schedule", (yield NOW), *after, *before)):
        return False
    conflicts = (yield Enqueue(jobs)) if jobs else {}
    if (standing := fired.standing(conflicts)) != fired.job:
        yield query("name_last_job", row.name, standing)
    return True


def change_schedule(
    name: str, entry: Note, *, is_paused: bool | None = None, next_at: Instant | None = None
) -> Work[ScheduleRow | None]:
    """Pause or resume a schedule (from `next_at` on), or trigger it once if neither is given; recorded. Returns how
    it stands now; `None`: there is none of this name."""
    return _change_schedule(name, entry, is_paused, next_at, [])


@transaction
def _change_schedule(
    name: str, entry: Note, is_paused: bool | None, next_at: Instant | None, tried: list[str]
) -> Procedure[ScheduleRow | None]:
    found = yield query("lock_schedule", name)
    if not found:
        return None
    row = _row(found[0])
    # The transaction that tried before has released the lock, so it has ended. A second trigger would be a second job.
    if tried and (yield from value("has_committed", tried[-1])):
        return row
    tried.append((yield from value("this_transaction")))
    paused, due, triggers = row.is_paused, row.next_at, row.triggers + 1
    if is_paused is not None:
        paused, due, triggers = is_paused, row.next_at if is_paused else next_at, row.triggers
    changed = yield query("change_schedule", row.name, paused, due, triggers)
    yield from record(entry, (yield NOW), entry.queue, f"schedule {row.name}", None, None)
    yield query("announce_schedules")
    return _row(changed[0])


def _row(row: Sequence[Any]) -> ScheduleRow:
    values = list(row)
    values[4], values[8] = bool(row[4]), None if row[8] is None else uuid_of(row[8])
    return ScheduleRow(*values)
