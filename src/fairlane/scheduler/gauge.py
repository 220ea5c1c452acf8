"""Gauges: how full limits are, for people who look. A gate is asked as a claim asks it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from fairlane.clock import Instant
from fairlane.policy import sequence
from fairlane.policy.gates import GateState, Limit
from fairlane.policy.keys import select, shared_gate_id
from fairlane.policy.numbers import Origin
from fairlane.policy.overrides import Kind, Override, PauseGate, pause_name
from fairlane.policy.policy import BoundLimit, Policy
from fairlane.policy.reasons import Reason
from fairlane.scheduler.board import Board, gate_of
from fairlane.scheduler.figures import Pending
from fairlane.scheduler.snapshot import GateRow, GateTally, QueueRow, SharedGateRow

__all__ = [
    "Gauge",
    "Touched",
    "freed_slots",
    "gauges",
    "held_now",
    "origin_at",
    "origin_of_weight",
    "shared_gates_of",
    "touched_gates",
    "without",
]

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


def freed_slots(policy: Policy, pending: Pending) -> Counter[bytes]:
    """By gate, how many of the claims that it counts have ended and are not folded. Of gates that queues share, and of
    sequences, in which a job may keep its place, nothing is said."""
    freed: Counter[bytes] = Counter()
    for _, lane in pending.releases:
        for gate, bound in (*policy.gates_of(lane.priority, lane.keys), *policy.queue_gates):
            if bound.limit.counts_in_flight and not bound.is_shared and not isinstance(bound.limit, sequence.Sequence):
                freed[gate] += lane.ended + lane.unstarted
    return freed


def without(freed: Mapping[bytes, int], rows: Iterable[GateRow]) -> list[GateRow]:
    """Gates as they are once these slots are free."""
    return [
        msgspec.structs.replace(row, in_flight=max(0, row.in_flight - freed[row.id])) if row.id in freed else row
        for row in rows
    ]


class Touched(msgspec.Struct):
    """A gate of one key, and how many of its jobs have come that no claim has seen."""

    bound: BoundLimit
    key: Key
    arrived: int = 0


def touched_gates(policy: Policy, pending: Pending, ended: Iterable[Override] = ()) -> dict[bytes, Touched]:
    """By id, the gates of all keys of which no claim has seen everything, or which these overrides were about; without
    those that queues share."""
    found: dict[bytes, Touched] = {}
    for each in ended:
        values = dict(each.scope)
        limit = policy.bound_named(pause_name(tuple(values)) if each.kind is Kind.PAUSE else each.limit or "")
        if limit is not None and not limit.is_shared and values and set(limit.limit.by) == set(values):
            key = tuple(values[name] for name in limit.limit.by)
            found[policy.gate_of(limit, key)] = Touched(limit, key)
    for lane in (*pending.arrivals, *(released for _, released in pending.releases)):
        for gate, bound in policy.gates_of(lane.priority, lane.keys):
            if not bound.is_shared:
                key = select(bound.limit.by, lane.keys, lane.priority)
                touched = found.setdefault(gate, Touched(bound, key))
                touched.arrived += lane.arrived
    return found


def held_now(
    policy: Policy, now: Instant, touched: Mapping[bytes, Touched], known: Iterable[GateRow]
) -> list[GateTally]:
    """Which limits of keys hold somebody back now, and which do no more, where the last claim has left it otherwise:
    claims have ended since, jobs have come, or time has passed. `known` are gates as they are now."""
    rows = {row.id: row for row in known}
    # A gate that no store knows is open, unless it is a pause.
    pauses = {id_ for id_, each in touched.items() if isinstance(each.bound.limit, PauseGate)}
    wanted = [(each.bound, each.key) for id_, each in touched.items() if id_ in rows or id_ in pauses]
    named = [(policy.bound_named(row.limit), tuple(row.key)) for row in rows.values() if row.id not in touched]
    wanted += [(bound, key) for bound, key in named if bound is not None and not bound.is_shared]
    told = []
    for gauge, (bound, key) in zip(gauges(policy, now, wanted, rows.values()), wanted, strict=True):
        seen = touched.get(policy.gate_of(bound, key))
        if gauge.room > 0 or (seen is not None and seen.arrived > 0):
            told.append(GateTally(bound.name, list(key), gauge.room <= 0, 0))
    return told


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
