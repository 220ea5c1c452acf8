"""Paced starts: what opens within a moment is claimed together, each job with the instant at which it may start.

A smooth rate gives a job every so often, and what is not taken at its time is lost. A claim for each of them would be
late each time. So a claim may own the next starts of a gate, and whoever holds it makes them: at their instants or
later, never closer together than the limit allows, and none after the last one, where the next claim's starts begin.
"""

from __future__ import annotations

from typing import Any

import msgspec

from fairlane.clock import SECOND, Instant
from fairlane.policy.limits import PLANNED_AHEAD, Rate

__all__ = ["AHEAD", "LEAD", "Pace", "Passed", "distance"]

AHEAD = PLANNED_AHEAD
"""How far ahead starts are handed out."""
LEAD = AHEAD // 2
"""A gate is looked at again when its next start is so near: one claim for every so much of a rate, not one a job."""
CLOCKS = SECOND // 500
"""By how much the clocks of two processes may disagree about an instant. Where that matters, a claim's first start
keeps so much distance from the last one of the claim before it."""

KEPT = 2 * AHEAD
"""Gates that nothing has passed for so long, beyond what they remember, are forgotten."""


class Pace(msgspec.Struct, frozen=True):
    """When a claimed job may start."""

    at: Instant
    latest: Instant
    """Never after this: the starts of another claim may follow."""
    gates: tuple[tuple[bytes, Rate], ...]
    """The gates that it was planned for."""

    def moved(self, by: int) -> Pace:
        """The same by another clock."""
        return Pace(self.at + by, self.latest + by, self.gates)


def distance(rate: Rate) -> int:
    """What the first start of a claim keeps from the last start of another, beyond what the rate asks for."""
    return 0 if rate.rolling else max(0, CLOCKS - rate.slack)


class _Gate:
    """A gate as it was really passed. What a limit looks at, and nothing else."""

    __slots__ = ("in_flight", "memo", "tat", "waiting")

    def __init__(self) -> None:
        self.in_flight = self.waiting = 0
        self.tat: Instant = 0
        self.memo: Any = None


class Passed:
    """The starts that one process has really made, by gate. However late they were, the next one keeps its distance."""

    def __init__(self) -> None:
        self._gates: dict[bytes, _Gate] = {}
        self._forget_at: Instant = 0

    def opens_at(self, pace: Pace) -> Instant:
        """From when on a job may start, given what has started before it. Not before it was planned to."""
        opens = pace.at
        for gate_id, rate in pace.gates:
            gate = self._gates.get(gate_id)
            if gate is not None:
                opens = max(opens, rate.starts_at(gate, pace.at) - (0 if rate.rolling else rate.slack))
        return opens

    def note(self, pace: Pace, now: Instant) -> None:
        """It has started."""
        for gate_id, rate in pace.gates:
            gate = self._gates.get(gate_id)
            if gate is None:
                gate = self._gates[gate_id] = _Gate()
            rate.take(gate, now, 1)
        if now >= self._forget_at:
            self._forget_at = now + KEPT
            self._gates = {each: gate for each, gate in self._gates.items() if gate.tat + KEPT > now}
