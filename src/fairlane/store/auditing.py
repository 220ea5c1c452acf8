"""Who did what, when and why: what every operator's action leaves behind, in its own transaction."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fairlane.clock import Instant
from fairlane.policy.overrides import Amendment, Override
from fairlane.store.operators import Handled

__all__ = ["EXPIRY", "AuditEntry", "Note", "describe_amendments", "describe_handled"]

EXPIRY = "expiry"
"""Who ends an override whose time has come."""


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator says about an action."""

    actor: str
    action: str
    """A verb: `pause`, `replay`, `policy apply`."""
    reason: str = ""
    queue: str | None = None
    """Of an action on jobs, where all of them are of one queue."""


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
    target = "; ".join(dict.fromkeys(each.describe() for each in after or before))
    return target, _encoded(before), _encoded(after)


def describe_handled(handled: Sequence[Handled]) -> tuple[str, str] | None:
    """How many jobs one action touched, and in which state each of them was; `None`: it touched none."""
    touched = {str(each.job): str(each.was) for each in handled if each.skipped is None}
    if not touched:
        return None
    return f"{len(touched)} job{'s' * (len(touched) > 1)}", msgspec.json.encode(touched).decode()


def _encoded(overrides: tuple[Override, ...]) -> str | None:
    return msgspec.json.encode(overrides).decode() if overrides else None
