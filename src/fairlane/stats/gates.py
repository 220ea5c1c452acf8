"""Gauges: how full limits are, for people who look. A gate is asked as a claim asks it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from fairlane.clock import Instant
from fairlane.policy.gates import GateState, Origin, Reason
from fairlane.policy.keys import Keys, select
from fairlane.policy.limits import Limit
from fairlane.policy.overrides import Override
from fairlane.policy.policy import BoundLimit, Policy
from fairlane.scheduler.board import Board, Flow, Gate, Lane, fold_shared, gate_of
from fairlane.scheduler.journal import fold_releases
from fairlane.scheduler.snapshot import (
    FlowRow,
    GateRow,
    GateStats,
    LaneRow,
    QueueRow,
    Release,
    SharedGateRow,
    SharedRelease,
)

Key = tuple[str | None, ...]
Brought = dict[Key, tuple[float, int]]
"""By key, a number that a job brought, and the position that the job had at its enqueue."""
LaneKeys = tuple[dict[str, str | None], int]
"""The keys of a lane, and its priority."""


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


class Ends(msgspec.Struct, frozen=True):
    """Ends of claims that no claim has folded: those of a queue, and those at gates that queues share."""

    releases: list[Release] = []
    lanes: dict[bytes, LaneKeys] = {}
    """The keys and priorities of their lanes, where they are known."""
    policy_since: Instant = 0
    shared: list[SharedRelease] = []


class Came(msgspec.Struct, frozen=True):
    """What arrivals that no claim has folded change at one gate."""

    count: int = 0
    """Jobs, less those that ceased to wait."""
    resumed: int = 0
    """Jobs that had kept their place in a sequence until now."""
    number: tuple[float, int] | None = None
    """The number that the last of them brought, and the position that this job had at its enqueue."""


NO_ENDS = Ends()
NONE_CAME: Mapping[bytes, Came] = {}


def board_now(
    policy: Policy,
    now: Instant,
    known: Iterable[GateRow],
    wanted: Iterable[tuple[BoundLimit, Key]] = (),
    shared: Iterable[SharedGateRow] = (),
    ends: Ends = NO_ENDS,
    came: Mapping[bytes, Came] = NONE_CAME,
) -> Board:
    """Gates as they are now: as they are stored, with everything folded that has ended since, and then with what has
    arrived at each gate. A wanted gate that is not stored is new."""
    board = Board(policy, now, QueueRow(0.0, 0.0, 0, 0, 0.0))
    board.add_gates(gate for row in known if (gate := gate_of(policy, row)) is not None)
    for bound, key in wanted:
        board.gate(policy.gate_of(bound, key), bound, key)
    board.add_shared(shared)
    fold_shared(board, ends.shared)
    flow = Flow(FlowRow(b"", [], 1.0, 0.0, 0, 0.0, 0.0, 0, 0, 0, None), 1.0)
    for lane, (keys, priority) in ends.lanes.items():
        board.lanes[lane] = Lane(LaneRow(lane, flow.id, priority, keys, 0, 0, 0, 0, 0, None, 0.0), flow)
    fold_releases(board, ends.releases, ends.policy_since, 0.0)
    for gate_id, arrivals in came.items():
        if (gate := board.gates.get(gate_id)) is not None:
            gate.resume(arrivals.resumed)
            gate.arrive(arrivals.count)
            if arrivals.number is not None:
                gate.bring(*arrivals.number, policy, now)
    return board


def gauges(board: Board, wanted: Iterable[tuple[BoundLimit, Key]]) -> list[Gauge]:
    """Every limit for the key it was asked for, from a board that was made for these."""
    policy, now = board.policy, board.now
    found = []
    for bound, key in wanted:
        gate = board.gates[policy.gate_of(bound, key)]
        room = gate.room(now)
        state = gate.shared or gate
        why = gate.limit.why(state, now)
        opens_at = gate.opens_at(now) if room <= 0 else None
        origin = origin_at(policy, gate.bound, key, gate.value)
        values = (why.reason, why.used, why.bound, max(0, room), opens_at, why.words)
        found.append(Gauge(gate.name, key, *values, gate.limit, origin, state))
    return found


def gates_in_doubt(
    policy: Policy, ends: Ends, ended: Iterable[Override], resumed: Iterable[Key]
) -> list[tuple[BoundLimit, Key]]:
    """Gates of keys that may not be as the last claim has left them: claims have ended there, places in a sequence are
    free (`resumed`), an operator has stopped a key, or has had something changed until now (`ended`)."""
    found = [*policy.stopped, *(place for each in ended if (place := policy.place_of(each)) is not None and place[1])]
    if policy.sequence is not None:
        found += [(policy.sequence, key) for key in resumed]
    for lane in {release.lane for release in ends.releases} & ends.lanes.keys():
        keys, priority = ends.lanes[lane]
        found += [(bound, select(bound.limit.by, keys, priority)) for _, bound in policy.gates_of(priority, keys)]
    return found


def is_in_doubt(gate: GateRow, now: Instant) -> bool:
    """A gate that is in use, or whose number is 0, may be shut although nobody waits on it: no claim has come to those
    behind it since. And one on which somebody waits may have opened by time, or may have room that somebody else was
    woken for."""
    if gate.waiting > 0:
        return gate.awake > 0 or (gate.wake_at is not None and gate.wake_at <= now)
    return gate.in_flight > 0 or gate.tat > now or gate.value == 0


def held_now(board: Board, wanted: Iterable[tuple[BoundLimit, Key]]) -> list[GateStats]:
    """Of these gates, those that would hold jobs back although nobody waits on them, and those that would hold none
    back although somebody does: no claim has looked since."""
    found = []
    for gate in (board.gates[board.policy.gate_of(*each)] for each in wanted):
        is_shut = gate.room(board.now) <= 0
        if is_shut != (gate.waiting > 0):
            found.append(GateStats(gate.name, gate.key, is_shut, 0))
    return found


def first_shut(board: Board, priority: int, keys: Keys) -> Gate | None:
    """The gate that holds a lane back, if one does: the first without room, as for a claim."""
    for gate_id, bound in board.policy.gates_of(priority, keys):
        gate = board.gate(gate_id, bound, select(bound.limit.by, keys, priority))
        if gate.room(board.now) <= 0:
            return gate
    return None


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
