"""Gauges: how full limits are, for people who look. A gate is asked as a claim asks it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from fairlane.clock import Instant
from fairlane.policy.gates import GateState, Limit
from fairlane.policy.keys import shared_gate_id
from fairlane.policy.numbers import Origin
from fairlane.policy.policy import BoundLimit, Policy
from fairlane.policy.reasons import Reason
from fairlane.scheduler.board import Board, gate_of
from fairlane.scheduler.snapshot import GateRow, QueueRow, SharedGateRow

__all__ = ["Gauge", "gauges", "origin_at", "origin_of_weight", "shared_gates_of"]

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
    in_force: Limit
    """The limit with the number that holds for this key."""
    origin: Origin
    """Where that number came from."""
    gate: GateState


def gauges(
    policy: Policy,
    now: Instant,
    wanted: Sequence[tuple[BoundLimit, Key]],
    known: Iterable[GateRow],
    shared: Iterable[SharedGateRow] = (),
) -> list[Gauge]:
    """Every limit for the key it was asked for. A gate that no store knows is new, and open."""
    board = Board(policy, now, QueueRow(0.0, 0.0, 0, 0, 0.0))
    board.add_gates(gate for row in known if (gate := gate_of(policy, row)) is not None)
    gates = [(board.gate(policy.gate_of(bound, key), bound, key), key) for bound, key in wanted]
    board.add_shared(shared)
    found = []
    for gate, key in gates:
        room = gate.room(now)
        state = gate.shared or gate
        why = gate.limit.why(state, now)
        opens_at = gate.opens_at(now) if room <= 0 else None
        origin = origin_at(policy, gate.bound, key, gate.value)
        said = (why.reason, why.used, why.bound, max(0, room), opens_at, why.words)
        found.append(Gauge(gate.name, key, *said, gate.limit, origin, state))
    return found


def origin_at(policy: Policy, bound: BoundLimit, key: Sequence[str | None], value: float | None) -> Origin:
    """Where the number of a limit at one key came from; `value` is what jobs have brought to its gate."""
    scope = tuple(sorted(zip(bound.limit.by, key, strict=True)))
    if (bound.name, scope) in policy.overrides.limits:
        return Origin.OVERRIDE
    if bound.from_job is None:
        return Origin.POLICY
    return Origin.DEFAULT if value is None else Origin.JOB


def origin_of_weight(policy: Policy, key: Sequence[str | None], *, is_brought: bool) -> Origin:
    """Where the weight of a flow came from, a boost aside."""
    assert policy.fair is not None, "without Fair nothing has a weight"
    if tuple(sorted(zip(policy.fair.by, key, strict=True))) in policy.overrides.weights:
        return Origin.OVERRIDE
    if policy.fair.from_job is None:
        return Origin.POLICY
    return Origin.JOB if is_brought else Origin.DEFAULT


def shared_gates_of(wanted: Iterable[tuple[BoundLimit, Key]]) -> list[bytes]:
    """The shared gates behind these."""
    return [shared_gate_id(bound.name, key) for bound, key in wanted if bound.is_shared]
