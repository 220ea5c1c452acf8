"""One after the other: a job of a sequence starts once the one before it has ended for good."""

from __future__ import annotations

from dataclasses import dataclass

from fairlane.clock import Instant
from fairlane.errors import InvalidOverride, InvalidPolicy
from fairlane.parameters import known_options, shown
from fairlane.policy.gates import GateState, Reason, Release, Why
from fairlane.policy.keys import By, normalize_by
from fairlane.policy.limits import Limit


@known_options
@dataclass(frozen=True, slots=True, init=False)
class Sequence(Limit):
    """Jobs of one key run strictly one after the other, in the order of their enqueue.

    A gate holds one place, from a job's start to its final end: done, dead or cancelled. A job that waits for a retry,
    or was snoozed, keeps it, so that nothing of its key starts before it has run again.

    >>> Sequence(by="document")
    Sequence(by='document')
    """

    by: By

    kind = "sequence"
    is_woken_by_arrivals = True

    def __init__(self, *, by: str | tuple[str, ...]) -> None:
        what = f"Sequence(by={shown(by)})"
        names = normalize_by(what, by)
        if not names:
            raise InvalidPolicy(f"{what}: name the key whose jobs follow one another, such as by='document'")
        if "priority" in names:
            raise InvalidPolicy(f"{what}: in a sequence the order of enqueue decides, not priority; leave it out")
        self._set(by=names)

    def __repr__(self) -> str:
        return f"Sequence(by={self.by[0]!r})" if len(self.by) == 1 else f"Sequence(by={self.by!r})"

    def room_at(self, gate: GateState, now: Instant) -> int:
        return 0 if gate.in_flight > 0 else 1

    def free(self, gate: GateState, ending: Release, now: Instant, held: int | None, task: str | None) -> bool:
        gate.in_flight = max(0, gate.in_flight - (ending.ended + ending.unstarted - ending.kept))
        return True

    def resume(self, gate: GateState, count: int) -> bool:
        gate.in_flight = max(0, gate.in_flight - count)
        return True

    def why(self, gate: GateState, now: Instant) -> Why:
        return Why(Reason.SEQUENCE, gate.in_flight, 1)

    def describe(self, where: str) -> str:
        return f"Strictly one after the other {where}"

    def with_bound(self, bound: float) -> Sequence:
        raise InvalidOverride(
            f"{self!r} has no number to change: its jobs run one after the other. Start a job out of order by force, "
            "or suspend the policy"
        )
