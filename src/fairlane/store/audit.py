"""Who did what, when and why: what every operator's action leaves behind, in its own transaction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from uuid import UUID

import msgspec

from fairlane.clock import Instant
from fairlane.policy.overrides import OverrideChange
from fairlane.scheduler.rebuild import Miscount
from fairlane.store.procedures import Procedure, query
from fairlane.store.rows import encode

if TYPE_CHECKING:
    from fairlane.store.operators import Handled

LAST_ENTRY = 1 << 62
"""Greater than the id of every entry."""
EXPIRY = "expiry"
"""The actor of overrides that end when their time has come."""
UPKEEP = "upkeep"
"""The actor of maintenance: corrected counts, and changes that an operator began and workers finish."""


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator says about an action."""

    actor: str
    action: str
    """A verb: `pause`, `replay`, `policy apply`."""
    reason: str = ""
    queue: str | None = None
    """Of an action on jobs, where all of them are of one queue."""
    about: str = ""
    """Of an action on jobs: a description of the selected jobs, as the operator gave it."""
    act: UUID | None = None
    """What the transactions of one action on many jobs have in common: together they are one entry."""
    part: int = 0
    """Which of them this is."""


RECOUNT = Note(actor=UPKEEP, action="recount")
"""For gates that are counted again because their count was wrong."""
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


def describe_amendments(amendments: Sequence[OverrideChange]) -> tuple[str, str | None, str | None]:
    """What one action changed, before and after, as the audit keeps it; what partitions have in common, only once."""
    before = list(dict.fromkeys(each for override_change in amendments for each in override_change.before))
    after = list(dict.fromkeys(each for override_change in amendments for each in override_change.after))
    target = "; ".join(dict.fromkeys(each.describe(has_ended=not after) for each in after or before))
    return target, encode(before) if before else None, encode(after) if after else None


def describe_miscounts(found: Sequence[Miscount]) -> tuple[str, str, str]:
    """Gates that were counted anew: how many, what they said, and what they say now."""
    target = f"{len(found)} gate{'s' * (len(found) > 1)}: {found[0].words}"
    named = found[:MOST_NAMED]
    before = [{"limit": each.limit, "key": each.key, "in_flight": each.counted} for each in named]
    after = [{"limit": each.limit, "key": each.key, "in_flight": each.running} for each in named]
    return target, encode(before), encode(after)


def entry_of(row: Sequence[Any]) -> AuditEntry:
    """A row of the audit, its target in words; of an action on jobs, how many there were in all of its parts."""
    *fields, jobs = row
    entry = AuditEntry(*fields)
    if jobs is None:
        return entry
    about = f": {entry.target}" if entry.target else ""
    return msgspec.structs.replace(entry, target=f"{jobs:,} job{'s' * (jobs != 1)}{about}")


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
    values = (note.actor, note.action, queue, target, before, after, note.reason)
    yield query("insert_audit", now, *values, note.act, note.part, jobs)


def record_jobs(note: Note | None, now: Instant | None, handled: Sequence[Handled]) -> Procedure[None]:
    """The same for an action on jobs: those that it touched, with the state they were in."""
    touched = {str(each.job): str(each.was) for each in handled if each.skipped is None}
    replaced = {str(each.replaced): f"cancelled for {each.job}" for each in handled if each.replaced is not None}
    if note is not None and touched:
        before = encode(touched | replaced)
        yield from record(note, now, note.queue, note.about, before, None, len(touched))
