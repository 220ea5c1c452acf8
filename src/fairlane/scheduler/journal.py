"""The journal: what each change of a queue's board has left of the pieces that it touched, one delta a change.

The tables hold the board as it was at some change, and the deltas since then lead to how it is now. A delta holds whole
rows: laid over the tables twice, it says the same. Each has a number and a random token. A number alone would not do: a
database that crashes may lose the last changes, and their numbers are given out again.

Beside its delta each claim leaves a tally: who arrived, started and ended, and whom a limit held back. Stats are the
sum of these (`stats/keys.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from uuid import UUID

import msgspec

from fairlane.scheduler.board import Board, Lane, flow_fields, gate_fields, lane_fields
from fairlane.scheduler.snapshot import FlowRow, GateRow, GateTally, LaneRow, LaneTally, Plan, Snapshot, Start, Tally

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
    # Tuples instead of rows: they are made for every piece that every claim touches.
    lanes, gates = map(lane_fields, plan.lanes), map(gate_fields, plan.gates)
    return _encode((list(map(flow_fields, flows)), list(lanes), list(gates)))


def encode_removed(removed: Removed) -> bytes:
    return _encode(Delta(removed=removed))


def tally(snapshot: Snapshot, board: Board, starts: Iterable[Start]) -> Tally | None:
    """What a claim that is planned so will have done; `None`: nothing worth telling."""
    now, waited, longest = snapshot.now, 0, 0
    lanes: dict[bytes, LaneTally] = {}
    for start in starts:
        told = lanes.get(start.lane) or _of(board.lanes[start.lane], lanes)
        told.started += 1
        wait = now - start.head.ready_at
        if wait > 0:
            told.waited += wait
            waited += wait
            if wait > longest:
                longest = wait
    for bell in snapshot.arrivals:
        # As it was folded: what is taken from a lane that nobody knows is taken from nobody.
        if bell.count and (lane := board.lanes.get(bell.lane)) is not None:
            told = _of(lane, lanes)
            told.arrived += bell.count
            if bell.count > 0 and bell.since > told.newest:
                told.newest = bell.since
    for release in snapshot.releases:
        if (lane := board.lanes.get(release.lane)) is not None:
            told = lanes.get(release.lane) or _of(lane, lanes)
            told.release(release)
    gates = [
        GateTally(gate.name, gate.key, gate.waiting > 0, gate.denied)
        for gate in board.gates.values()
        if gate.waiting or gate.waited or gate.denied
    ]
    return Tally(now, waited, longest, list(lanes.values()), gates) if lanes or gates else None


def _of(lane: Lane, lanes: dict[bytes, LaneTally]) -> LaneTally:
    found = lanes.get(lane.id)
    if found is None:
        found = lanes[lane.id] = LaneTally(lane.keys, lane.priority)
    return found


encode_tally = msgspec.msgpack.Encoder().encode
decode_tally = msgspec.msgpack.Decoder(Tally).decode
