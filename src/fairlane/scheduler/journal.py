"""The journal: what each change of a queue's board has left of the pieces that it touched, one delta a change.

The tables hold the board as it was at some change, and the deltas since then lead to how it is now. A delta holds whole
rows: laid over the tables twice, it says the same. Each has a number and a random token. A number alone would not do: a
database that crashes may lose the last changes, and their numbers are given out again.
"""

from __future__ import annotations

from collections.abc import Iterable
from uuid import UUID

import msgspec

from fairlane.scheduler.board import Flow, Gate, Lane
from fairlane.scheduler.snapshot import FlowRow, GateRow, LaneRow, Plan

FORMAT = 1
"""How deltas are written. Another number for every change of theirs, so that no program reads what it does not know."""


class Mark(msgspec.Struct, frozen=True, gc=False):
    """A state of the board: the number of the change that led to it, and its token."""

    seq: int
    token: UUID


class Removed(msgspec.Struct, frozen=True, array_like=True):
    """Ids of idle pieces that collection has taken off the board and out of the tables."""

    flows: list[bytes] = []
    lanes: list[bytes] = []
    gates: list[bytes] = []


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """Pieces as one change has left them."""

    flows: list[FlowRow] = []
    lanes: list[LaneRow] = []
    gates: list[GateRow] = []
    removed: Removed = Removed()


class Tail:
    """What some deltas, in their order, leave of the pieces that they touched, by id; `None`: it was removed."""

    def __init__(self, deltas: Iterable[bytes] = ()) -> None:
        self.flows: dict[bytes, FlowRow | None] = {}
        self.lanes: dict[bytes, LaneRow | None] = {}
        self.gates: dict[bytes, GateRow | None] = {}
        for each in deltas:
            delta = decode_delta(each)
            self.flows.update((row.id, row) for row in delta.flows)
            self.lanes.update((row.id, row) for row in delta.lanes)
            self.gates.update((row.id, row) for row in delta.gates)
            self.flows.update(dict.fromkeys(delta.removed.flows))
            self.lanes.update(dict.fromkeys(delta.removed.lanes))
            self.gates.update(dict.fromkeys(delta.removed.gates))


_encode = msgspec.msgpack.Encoder().encode
decode_delta = msgspec.msgpack.Decoder(Delta).decode


def encode_delta(plan: Plan) -> bytes:
    """What a plan has changed. A lane comes with its flow: whoever applies the delta may not have that."""
    flows = plan.flows
    if others := {lane.flow.id: lane.flow for lane in plan.lanes if not lane.flow.dirty}:
        flows = [*flows, *others.values()]
    return _encode((list(map(_flow, flows)), list(map(_lane, plan.lanes)), list(map(_gate, plan.gates))))


def encode_removed(removed: Removed) -> bytes:
    return _encode(Delta(removed=removed))


# Tuples instead of rows: they are made for every piece that every claim touches.


def _flow(flow: Flow) -> tuple[object, ...]:
    return (
        flow.id,
        flow.key,
        flow.own_weight,
        flow.vtime,
        flow.tie,
        flow.cost,
        flow.debt,
        flow.open,
        flow.shut,
        flow.standing,
        flow.gate,
        flow.given_by,
    )


def _lane(lane: Lane) -> tuple[object, ...]:
    return (
        lane.id,
        lane.flow.id,
        lane.priority,
        lane.keys,
        lane.ready,
        lane.in_flight,
        lane.floor,
        lane.rank,
        lane.standing,
        lane.gate,
        lane.tag,
        lane.head,
    )


def _gate(gate: Gate) -> tuple[object, ...]:
    return (
        gate.id,
        gate.name,
        gate.key,
        gate.in_flight,
        gate.tat,
        gate.waiting,
        gate.awake,
        gate.wake_at,
        None if gate.memo is None else msgspec.json.encode(gate.memo).decode(),
        gate.value,
        gate.given_by,
    )
