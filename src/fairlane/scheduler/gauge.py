"""Gauges: how full limits are, for people who look. A gate is asked as a claim asks it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from fairlane.clock import Instant
from fairlane.policy.keys import shared_gate_id
from fairlane.policy.policy import BoundLimit, Policy
from fairlane.policy.reasons import Reason
from fairlane.scheduler.board import Board
from fairlane.scheduler.snapshot import GateRow, QueueRow, SharedGateRow

__all__ = ["Gauge", "gauges", "shared_gates_of"]

Key = tuple[str | None, ...]


class Gauge(msgspec.Struct, frozen=True):
    """One limit for one key: how much of it is used."""

    limit: str
    key: Key
    reason: Reason
    """What it would hold a job back for."""
    used: float
    bound: float
    """`used` of `bound`: 3 of 5 in flight, 20 of 100 starts."""
    room: int
    """How many jobs it would let start now."""
    opens_at: Instant | None
    """Without room: when it has some by itself; `None`: not by time."""
    words: str


def gauges(
    policy: Policy,
    now: Instant,
    wanted: Sequence[tuple[BoundLimit, Key]],
    known: Iterable[GateRow],
    shared: Iterable[SharedGateRow] = (),
) -> list[Gauge]:
    """Every limit for the key it was asked for. A gate that no store knows is new, and open."""
    board = Board(policy, now, QueueRow(0.0, 0.0, 0, 0, 0.0))
    board.add_gates(known)
    gates = [(board.gate(policy.gate_of(bound, key), bound, key), key) for bound, key in wanted]
    board.add_shared(shared)
    found = []
    for gate, key in gates:
        room = gate.room(now)
        why = gate.limit.why(gate.shared or gate, now)
        opens_at = gate.opens_at(now) if room <= 0 else None
        found.append(Gauge(gate.name, key, why.reason, why.used, why.bound, max(0, room), opens_at, why.words))
    return found


def shared_gates_of(wanted: Iterable[tuple[BoundLimit, Key]]) -> list[bytes]:
    """The shared gates behind these."""
    return [shared_gate_id(bound.name, key) for bound, key in wanted if bound.is_shared]
