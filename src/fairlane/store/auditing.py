"""Who did what, when and why: what every operator's action leaves behind, in its own transaction."""

from __future__ import annotations

import msgspec

from fairlane.clock import Instant
from fairlane.policy.overrides import Override

__all__ = ["EXPIRY", "AuditEntry", "Note", "describe_overrides"]

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


def describe_overrides(overrides: tuple[Override, ...]) -> str | None:
    """Overrides as the audit keeps them; `None` where there was none."""
    return msgspec.json.encode(overrides).decode() if overrides else None
