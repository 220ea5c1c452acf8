"""How much each limit of a policy was used: for how long its gates had no room, and who waited on them."""

from __future__ import annotations

from dataclasses import dataclass

from fairlane.clock import Instant
from fairlane.policy.policy import Policy
from fairlane.scheduler.board import Board, Gate
from fairlane.scheduler.snapshot import Plan, SharedGateRow

__all__ = ["GateUse", "Saturation"]


@dataclass(slots=True)
class GateUse:
    """One gate over a whole simulation. Times are in microseconds."""

    limit: str
    key: tuple[str | None, ...]
    full: int = 0
    """For how long it had no room for one more."""
    held_up: int = 0
    """For how long it had none while somebody waited for it."""
    waited: int = 0
    """The same for every lane that waited, added up; a whole flow counts as one."""
    is_full: bool = False
    waiting: int = 0
    since: Instant = 0
    opens_at: Instant | None = None

    def advance(self, now: Instant) -> None:
        """Time has passed since it was last looked at."""
        # What opens by time was open from then on, whenever the next claim came.
        until = now if self.opens_at is None else min(now, self.opens_at)
        passed = max(0, until - self.since)
        if self.is_full:
            self.full += passed
            self.waited += self.waiting * passed
            if self.waiting:
                self.held_up += passed
        self.since = now


class Saturation:
    """Follows the gates from claim to claim."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._gates = {gate_id: GateUse(bound.name, ()) for gate_id, bound in policy.queue_gates}
        self._of_queue = list(self._gates.values())
        self._own: dict[bytes, Gate] = {}
        self._shared: dict[bytes, SharedGateRow] = {}
        """The two halves of shared gates, as they were last written."""
        self.full = 0
        """How many gates have no room."""

    def note(self, now: Instant, plan: Plan, *, is_held_up: bool) -> None:
        """A claim was made. `is_held_up`: jobs that are ready were left."""
        board = Board(self._policy, now, plan.queue)
        board.add_gates(plan.gates)
        self._add_shared(board, plan)
        for gate in board.gates.values():
            use = self._gates.get(gate.id)
            if use is None:
                use = self._gates[gate.id] = GateUse(gate.bound.name, tuple(gate.key))
            use.advance(now)
            # What opens by time is known to be shut only while somebody waits for it.
            is_known = gate.limit.counts_in_flight or gate.wake_at is not None
            self.full -= use.is_full
            use.is_full = is_known and gate.room(now) <= 0
            self.full += use.is_full
            use.waiting, use.opens_at = gate.waiting, gate.wake_at
        for use in self._of_queue:
            # Nobody is parked on a gate of the whole queue: whoever is ready while it is full waits for it.
            use.advance(now)
            use.waiting = int(is_held_up)

    def _add_shared(self, board: Board, plan: Plan) -> None:
        """Both halves of every shared gate of which one has changed."""
        self._shared.update((row.id, row) for row in plan.shared)
        self._own.update((gate.id, gate) for gate in board.gates.values() if gate.shared is not None)
        for row in plan.shared:
            bound, key = self._policy.bound_named(row.limit), tuple(row.key)
            if bound is not None:
                own = self._policy.gate_of(bound, key)
                board.add_gates([self._own[own]] if own in self._own else [])
                board.gate(own, bound, key)
        board.add_shared([self._shared[each] for each in board.shared if each in self._shared])

    def result(self, ended_at: Instant) -> list[GateUse]:
        """Every gate that was ever touched."""
        for use in self._gates.values():
            use.advance(ended_at)
        return list(self._gates.values())
