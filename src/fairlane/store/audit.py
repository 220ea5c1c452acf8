"""Who did what, when and why: what every operator's action leaves behind, in its own transaction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from uuid import UUID

import msgspec

from fairlane.clock import Instant
from fairlane.policy.overrides import Amendment, Override
from fairlane.scheduler.rebuild import Miscount
from fairlane.store.procedures import Procedure, query

if TYPE_CHECKING:
    from fairlane.store.operators import Handled

TARGET = 5
"""Its place in a row."""
LAST_ENTRY = 1 << 62
"""What lies behind every entry."""
EXPIRY = "expiry"
"""Who ends an override whose time has come."""
UPKEEP = "upkeep"
"""Who goes on with what an operator has begun and left."""


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator says about an action."""

    actor: str
    action: str
    """A verb: `pause`, `replay`, `policy apply`."""
    reason: str = ""
    queue: str | None = None
    """Of an action on jobs, where all of them are of one queue."""
    about: str = ""
    """Of an action on jobs: which, in the words of whoever asked for it."""
    act: UUID | None = None
    """What the transactions of one action on many jobs have in common: together they are one entry."""
    part: int = 0
    """Which of them this is."""


RECOUNT = Note(actor=UPKEEP, action="recount")
"""Who counts gates anew that did not count what ran."""
MOST_NAMED = 100
"""Gates that one entry names."""


class AuditEntry(msgspec.Struct, frozen=True):
    """One action, as it was recorded. `before` and `after` are JSON."""

    id: int
    at: Instant
    actor: str
    action: str
    queue: str | None
    target: str
    before: str | None
    after: str | None
    reason: str


def describe_amendments(amendments: Sequence[Amendment]) -> tuple[str, str | None, str | None]:
    """What one action changed, before and after, as the audit keeps it: what partitions have in common is told once."""
    before = tuple(dict.fromkeys(each for amendment in amendments for each in amendment.before))
    after = tuple(dict.fromkeys(each for amendment in amendments for each in amendment.after))
    target = "; ".join(dict.fromkeys(each.describe(has_ended=not after) for each in after or before))
    return target, _encoded(before), _encoded(after)


def describe_miscounts(found: Sequence[Miscount]) -> tuple[str, str, str]:
    """Gates that were counted anew: how many, what they said, and what they say now."""
    target = f"{len(found)} gate{'s' * (len(found) > 1)}: {found[0].words}"
    named = found[:MOST_NAMED]
    before = [{"limit": each.limit, "key": each.key, "in_flight": each.counted} for each in named]
    after = [{"limit": each.limit, "key": each.key, "in_flight": each.running} for each in named]
    return target, msgspec.json.encode(before).decode(), msgspec.json.encode(after).decode()


def describe_handled(handled: Sequence[Handled]) -> tuple[int, str] | None:
    """How many jobs one action touched, and in which state each of them was; `None`: it touched none."""
    touched = {str(each.job): str(each.was) for each in handled if each.skipped is None}
    replaced = {str(each.replaced): f"cancelled for {each.job}" for each in handled if each.replaced is not None}
    return (len(touched), msgspec.json.encode(touched | replaced).decode()) if touched else None


def entry_of(row: Sequence[Any]) -> AuditEntry:
    """A row of the audit, its target in words; of an action on jobs, how many there were in all of its parts."""
    *fields, jobs = row
    if jobs is not None:
        about = fields[TARGET]
        fields[TARGET] = f"{jobs:,} job{'s' * (jobs != 1)}{f': {about}' if about else ''}"
    return AuditEntry(*fields)


def record(
    note: Note,
    now: Instant | None,
    queue: str | None,
    target: str,
    before: str | None,
    after: str | None,
    jobs: int | None = None,
) -> Procedure[None]:
    """Leave an entry in the audit."""
    said = (note.actor, note.action, queue, target, before, after, note.reason)
    yield query("insert_audit", now, *said, note.act, note.part, jobs)


def record_jobs(note: Note | None, now: Instant | None, handled: Sequence[Handled]) -> Procedure[None]:
    """The same for an action on jobs: those that it touched, with the state they were in."""
    told = describe_handled(handled)
    if note is not None and told is not None:
        count, before = told
        yield from record(note, now, note.queue, note.about, before, None, count)


def _encoded(overrides: tuple[Override, ...]) -> str | None:
    return msgspec.json.encode(overrides).decode() if overrides else None
