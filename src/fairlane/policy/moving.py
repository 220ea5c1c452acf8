"""Where the lanes wait whose keys belong to another partition: a gate that is always shut.

A lane that is held back by it never starts a job: that is what keeps limits and sequences exact while a key moves, and
when a producer knows an older width. Its jobs go on where they belong, or here once the policy says so.
"""

from __future__ import annotations

from typing import Any

from fairlane.clock import Instant
from fairlane.errors import InvalidOverride
from fairlane.policy.by import By
from fairlane.policy.gates import CountsNothing, GateState, Limit
from fairlane.policy.reasons import Reason, Why

__all__ = ["MOVING", "MovingGate"]

MOVING = "moving:"
"""The name of its gates; no other limit has it."""


class MovingGate(CountsNothing):
    """A gate without room. It counts nothing."""

    __slots__ = ()

    by: By = ()
    identity = MOVING

    def __repr__(self) -> str:
        return "MovingGate()"

    def room_at(self, gate: GateState, now: Instant) -> int:
        return 0

    def why(self, gate: GateState, now: Instant) -> Why:
        return Why(Reason.MOVING, 0, 0)

    def with_bound(self, bound: float) -> Limit:
        raise InvalidOverride("a key that moves has no number")

    def to_document(self) -> dict[str, Any]:
        return {"kind": "moving", "by": []}
