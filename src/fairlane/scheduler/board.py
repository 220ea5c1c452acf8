"""The working set of one claim: flows, lanes and gates as they are while the plan is made.

Rows come in frozen and go out frozen; in between they are these small mutable pieces. A row that was not touched is not
written. A row that comes in twice keeps its first, already worked-on form.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from typing import Any

import msgspec

from fairlane.clock import Instant
from fairlane.policy.backlog import Backlog
from fairlane.policy.gates import Limit
from fairlane.policy.keys import Keys, select
from fairlane.policy.policy import BoundLimit, Policy
from fairlane.policy.sequence import Sequence
from fairlane.scheduler.snapshot import FlowRow, GateRow, Head, LaneRow, QueueRow, Release, Standing

__all__ = ["Board", "Flow", "Gate", "Lane"]

FIRST_GUESS = 0.1
"""The run time in seconds that is assumed before any job of a queue has ended."""

LEAST_CHARGE = 1e-6
"""Jobs that take no time still take turns."""

IDLE, READY, PARKED = int(Standing.IDLE), int(Standing.READY), int(Standing.PARKED)


class Gate:
    """One limit for one key, being worked on."""

    __slots__ = (
        "awake",
        "bound",
        "dirty",
        "id",
        "in_flight",
        "key",
        "known",
        "limit",
        "memo",
        "tat",
        "value",
        "waiting",
        "wake_at",
    )

    def __init__(self, row: GateRow, bound: BoundLimit, limit: Limit) -> None:
        self.id = row.id
        self.bound = bound
        self.limit = limit
        self.memo: Any = None if row.memo is None else msgspec.json.decode(row.memo)
        self.value = row.value
        self.key = row.key
        self.in_flight = row.in_flight
        self.tat = row.tat
        self.waiting = row.waiting
        self.awake = row.awake
        self.wake_at = row.wake_at
        self.known = 0
        self.dirty = False

    def room(self, now: Instant) -> int:
        return self.limit.room_at(self, now)

    def charge(self, now: Instant, count: int = 1) -> None:
        self.limit.take(self, now, count)
        self.dirty = True

    def free(self, release: Release, now: Instant, held: int | None, task: str | None) -> None:
        """Take note of claims that ended."""
        if self.limit.free(self, release, now, held, task):
            self.dirty = True

    def resume(self, count: int) -> None:
        """Give back places that jobs have kept in a sequence."""
        if count and isinstance(self.bound.limit, Sequence):
            self.bound.limit.resume(self, count)
            self.dirty = True

    def arrive(self, count: int) -> None:
        """Count jobs that wait."""
        if isinstance(self.bound.limit, Backlog):
            self.bound.limit.arrive(self, count)
            self.dirty = True

    def opens_at(self) -> Instant | None:
        return self.limit.opens_again_at(self)

    def row(self) -> GateRow:
        return GateRow(
            self.id,
            self.bound.name,
            self.key,
            self.in_flight,
            self.tat,
            self.waiting,
            self.awake,
            self.wake_at,
            None if self.memo is None else msgspec.json.encode(self.memo).decode(),
            self.value,
        )


class Lane:
    """One lane, being worked on. `heads` are the jobs loaded so far that have not been started."""

    __slots__ = (
        "dirty",
        "exhausted",
        "floor",
        "flow",
        "gate",
        "gates",
        "heads",
        "id",
        "in_flight",
        "keys",
        "next_head",
        "priority",
        "rank",
        "ready",
        "standing",
        "tag",
    )

    def __init__(self, row: LaneRow, flow: Flow) -> None:
        self.id = row.id
        self.flow = flow
        flow.known += 1
        self.priority = row.priority
        self.keys = row.keys
        self.ready = row.ready
        self.in_flight = row.in_flight
        self.floor = row.floor
        self.rank = row.rank
        self.standing = row.standing
        self.gate = row.gate
        self.tag = row.tag
        self.gates: list[Gate] | None = None
        self.heads: list[Head] = []
        self.next_head = 0
        self.exhausted = False
        self.dirty = False

    def row(self) -> LaneRow:
        return LaneRow(
            self.id,
            self.flow.id,
            self.priority,
            self.keys,
            self.ready,
            self.in_flight,
            self.floor,
            self.rank,
            self.standing,
            self.gate,
            self.tag,
        )


class Flow:
    """One flow, being worked on. `lanes` are its ready lanes on the board, by rank; `known` counts all its lanes there.

    Below the rank `reach` every ready lane is on the board; beyond it the store may hold one that ranks before these.
    """

    __slots__ = (
        "cost",
        "debt",
        "dirty",
        "gate",
        "id",
        "key",
        "known",
        "lanes",
        "loaded",
        "open",
        "own_weight",
        "queued",
        "reach",
        "shut",
        "standing",
        "tie",
        "vtime",
        "weight",
    )

    def __init__(self, row: FlowRow, weight: float) -> None:
        self.id = row.id
        self.key = row.key
        self.own_weight = row.weight
        self.weight = weight
        self.vtime = row.vtime
        self.tie = row.tie
        self.cost = row.cost
        self.debt = row.debt
        self.open = row.open
        self.shut = row.shut
        self.standing = row.standing
        self.gate = row.gate
        self.lanes: list[tuple[int, bytes, Lane]] = []
        self.loaded = 0
        self.known = 0
        self.reach = -math.inf
        self.queued = False
        self.dirty = False

    def row(self) -> FlowRow:
        return FlowRow(
            self.id,
            self.key,
            self.own_weight,
            self.vtime,
            self.tie,
            self.cost,
            self.debt,
            self.open,
            self.shut,
            self.standing,
            self.gate,
        )

    def push(self, lane: Lane) -> None:
        """Let a ready lane take part in this plan."""
        heappush(self.lanes, (lane.rank, lane.id, lane))
        self.loaded += 1

    def pop(self) -> Lane:
        self.loaded -= 1
        return heappop(self.lanes)[2]

    def most(self) -> float:
        """How many jobs it can start, as far as the board shows."""
        return sum(lane.ready for _, _, lane in self.lanes) if self.loaded >= self.open else math.inf

    def is_blind(self) -> bool:
        """Whether a lane that is not on the board may rank before all that are."""
        if self.loaded >= self.open or self.reach == math.inf:
            return False
        return not self.lanes or self.lanes[0][0] > self.reach

    def has_before(self, rank: int) -> bool:
        """Whether, the lane in hand aside, one ranks before this: on the board, or perhaps beyond it."""
        if self.lanes and self.lanes[0][0] < rank:
            return True
        return self.loaded + 1 < self.open and rank > self.reach

    def in_reach(self) -> int:
        """How many lanes on the board can be served in order without asking for more."""
        return self.loaded if self.loaded >= self.open else sum(entry[0] <= self.reach for entry in self.lanes)

    def lowered(self) -> None:
        """A lane's rank has changed in place."""
        self.lanes = [(lane.rank, lane.id, lane) for _, _, lane in self.lanes]
        heapify(self.lanes)


class Board:
    """All pieces on the table, by id."""

    def __init__(self, policy: Policy, now: Instant, queue: QueueRow) -> None:
        self.policy = policy
        self.now = now
        self.tie = queue.tie
        self.cost = queue.cost
        self.flows: dict[bytes, Flow] = {}
        self.lanes: dict[bytes, Lane] = {}
        self.gates: dict[bytes, Gate] = {}
        self._queue_gates: list[Gate] | None = None
        self.charges_time = policy.charges_time

    def clear(self) -> None:
        """Let flows go of their lanes, which hold their flows: cycles would be left to Python's collector."""
        for flow in self.flows.values():
            flow.lanes.clear()

    def next_tie(self) -> int:
        self.tie += 1
        return self.tie

    def charge(self, flow: Flow) -> float:
        """What starting one job costs its flow: one, or the best guess at its run time."""
        if not self.charges_time:
            return 1.0
        guess = flow.cost or self.cost or FIRST_GUESS
        return guess if guess > LEAST_CHARGE else LEAST_CHARGE

    def add_flows(self, rows: Iterable[FlowRow]) -> None:
        for row in rows:
            if row.id not in self.flows:
                self.flows[row.id] = Flow(row, self.policy.weight_at(row.key, row.weight))

    def add_lanes(self, rows: Iterable[LaneRow]) -> None:
        """Put lanes on the table (their flows are there already); those that are ready take part in the plan."""
        for row in rows:
            if row.id not in self.lanes:
                lane = self.lanes[row.id] = Lane(row, self.flows[row.flow])
                if lane.standing == READY:
                    lane.flow.push(lane)

    def new_lane(self, lane_id: bytes, priority: int, keys: dict[str, str | None], floor: int) -> Lane:
        """A lane seen for the first time; its flow too, if the store knew none."""
        flow_id = self.policy.flow_of(priority, keys)
        if flow_id not in self.flows:
            key = list(self.policy.flow_key(priority, keys))
            weight = self.policy.weight_of(priority, keys)
            self.add_flows([FlowRow(flow_id, key, weight, 0.0, 0, 0.0, 0.0, 0, 0, IDLE, None)])
        row = LaneRow(lane_id, flow_id, priority, keys, 0, 0, floor, 0, IDLE, None, 0.0)
        lane = self.lanes[lane_id] = Lane(row, self.flows[flow_id])
        lane.dirty = True
        return lane

    def add_gates(self, rows: Iterable[GateRow]) -> None:
        for row in rows:
            # A gate of a limit that the policy no longer has is left alone; upkeep removes it.
            if row.id not in self.gates and (bound := self.policy.bound_named(row.limit)) is not None:
                self.gates[row.id] = self._gate(row, bound)

    def gate_ids(self, lane: Lane) -> list[bytes]:
        return [gate_id for gate_id, _ in self.policy.gates_of(lane.priority, lane.keys)]

    def gates_of(self, lane: Lane) -> list[Gate]:
        """The keyed gates of a lane; those that the store did not know are new and open."""
        if lane.gates is None:
            if not self.policy.has_keyed_gates:
                lane.gates = []
                return lane.gates
            lane.gates = [
                self.gate(gate_id, bound, select(bound.limit.by, lane.keys, lane.priority))
                for gate_id, bound in self.policy.gates_of(lane.priority, lane.keys)
            ]
        return lane.gates

    def sequence_gate(self, priority: int, keys: Keys) -> Gate | None:
        """The gate at which the jobs of a lane wait for one another, if they run in sequence."""
        found = self.policy.sequence_gate(priority, keys)
        return None if found is None else self.gate(*found, select(found[1].limit.by, keys, priority))

    def backlog_gates(self, priority: int, keys: Keys) -> list[Gate]:
        """Where the ready jobs of a lane are counted."""
        found = self.policy.backlog_gates(priority, keys)
        return [self.gate(gate_id, bound, select(bound.limit.by, keys, priority)) for gate_id, bound in found]

    def queue_gates(self) -> list[Gate]:
        """The gates of the whole queue. Asked for once the store has told of them."""
        if self._queue_gates is None:
            self._queue_gates = [self.gate(gate_id, bound, ()) for gate_id, bound in self.policy.queue_gates]
        return self._queue_gates

    def gate(self, gate_id: bytes, bound: BoundLimit, key: tuple[str | None, ...]) -> Gate:
        found = self.gates.get(gate_id)
        if found is None:
            found = self.gates[gate_id] = self._gate(GateRow(gate_id, bound.name, list(key), 0, 0, 0, 0, None), bound)
        return found

    def _gate(self, row: GateRow, bound: BoundLimit) -> Gate:
        return Gate(row, bound, self.policy.limit_at(bound, tuple(row.key), row.value))
