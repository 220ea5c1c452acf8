"""Rows of the PostgreSQL tables as the scheduler's values, and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from uuid import UUID

import msgspec

from fairlane.clock import Instant
from fairlane.job import Claim
from fairlane.scheduler.snapshot import Arrival, FlowRow, GateRow, Head, LaneRow, Release
from fairlane.store.job_rows import decode_given, decode_key, decode_keys

__all__ = [
    "Found",
    "Place",
    "claim_of",
    "decode_given",
    "decode_key",
    "decode_keys",
    "encode",
    "is_only_served",
    "new_flow",
    "new_gate",
    "new_lane",
    "served_flow",
    "storable",
    "touched_flow",
    "touched_gate",
    "touched_lane",
]

Row = Sequence[Any]
Place = tuple[int, int]
"""A row's `ctid`: block and line. It holds for as long as nobody else may write the row."""


def encode(value: object) -> str:
    return msgspec.json.encode(value).decode()


def claim_of(row: Row, lease: UUID, queue: str, claimed_at: Instant) -> Claim:
    """A job that was handed out, by its columns from `id` to `suspicion`: those of `fairlane.granted`."""
    job, task, priority, keys, payload, attempt, most, enqueued_at, cancel, suspicion = row
    return Claim(
        job,
        lease,
        queue,
        task,
        priority,
        decode_keys(keys),
        payload,
        attempt,
        most,
        enqueued_at,
        claimed_at,
        cancel,
        suspicion,
    )


def storable(text: str | None) -> str | None:
    """A text as PostgreSQL can keep it: whatever a handler raised, its job must be settled."""
    if text is None:
        return None
    return text.replace("\x00", "\ufffd").encode(errors="replace").decode()


HOUSED_FROM = 17
"""The first of the columns that only a flow has which houses its lane."""
MEMO = GIVEN = 18
GATE_DUE, DUE = 23, 24
HEAD = 23
"""Some of those, which gates, arrivals and the queue borrow."""
RELEASED_FROM = 26
"""The first of the columns that only releases have."""


class Found:
    """What `load` or `supply` has found, sorted by kind. The shape of its rows is drawn in `claims.sql`."""

    def __init__(self, records: Iterable[Any]) -> None:
        self.queue: Row = ()
        self.flows: list[FlowRow] = []
        self.lanes: list[LaneRow] = []
        self.gates: list[GateRow] = []
        self.arrivals: list[Arrival] = []
        self.releases: list[Release] = []
        self.scanned: list[bytes] = []
        self.heads: list[tuple[int, Head]] = []
        self.places: dict[bytes, Place] = {}
        self.housed: dict[bytes, LaneRow | None] = {}
        """By flow, for those that have not spilled: the lane in the flow's row."""
        for record in records:
            kind, place, id_, kin, gate, name, keys, f1, f2, f3, f4, i1, i2, i3, i4, i5, i6 = record[:HOUSED_FROM]
            match kind:
                case "f" | "s":
                    if kind == "s":
                        self.scanned.append(id_)
                    if id_ in self.places:
                        continue  # a bell names a lane of a flow that was scanned as well
                    self.places[id_] = place
                    self.flows.append(FlowRow(id_, decode_key(keys), f1, f2, i1, f3, f4, i2, i3, i4, gate, i6))
                    if not i5:
                        self._house(id_, kin, record[HOUSED_FROM:RELEASED_FROM])
                case "r":
                    self.releases += _releases(*record[RELEASED_FROM:])
                case "h":
                    self.heads.append((i1, Head(place, i2, i3)))
                case "l":
                    self.places[id_] = place
                    self.lanes.append(
                        LaneRow(id_, kin, i1, decode_keys(keys), i2, i3, i4, i5, i6, gate, f1, record[HEAD])
                    )
                case "g":
                    self.places[id_] = place
                    self.gates.append(GateRow(id_, name, decode_key(keys), i1, i2, i3, i4, i5, record[MEMO], f1, i6))
                case "a":
                    given = decode_given(record[GIVEN])
                    self.arrivals.append(Arrival(id_, i1, decode_keys(keys), i2, i3, i4, given, i5 or 0, i6 or 0))
                case _:
                    dues = record[GATE_DUE], record[DUE]
                    self.queue = (place, name, keys, f1, f2, f3, i1, i2, i3, i4, i5, i6, *dues)

    def _house(self, flow: bytes, lane: bytes | None, columns: Row) -> None:
        if lane is None:
            self.housed[flow] = None
            return
        gate, keys, tag, priority, ready, in_flight, floor, rank, standing = columns
        self.housed[flow] = row = LaneRow(
            lane, flow, priority, decode_keys(keys), ready, in_flight, floor, rank, standing, gate, tag, floor
        )
        self.lanes.append(row)


def _releases(lanes: list[bytes], counts: list[int], charges: list[float]) -> Iterable[Release]:
    many = len(lanes)
    ended, ran, unstarted, *rest = (counts[first : first + many] for first in range(0, len(counts), many))
    return map(Release, lanes, ended, ran, charges[:many], unstarted, charges[many:], *rest)


NO_LANE = (None,) * 10


def touched_flow(row: FlowRow, place: Place, lane: LaneRow | None, *, spilled: bool, moves_in: bool = False) -> Row:
    """What changes in a flow that is stored already, and in the lane that its row houses."""
    flow = (place, row.vtime, row.tie, row.cost, row.debt, row.open, row.shut, row.standing, row.gate, spilled)
    if lane is None:
        return flow + NO_LANE
    if moves_in:
        return flow + _new_housed(lane)
    return (
        *flow,
        None,
        None,
        None,
        lane.ready,
        lane.in_flight,
        lane.floor,
        lane.rank,
        lane.standing,
        lane.gate,
        lane.tag,
    )


def is_only_served(flow: FlowRow, served: FlowRow, lane: LaneRow, its: LaneRow) -> bool:
    """Whether a flow and its housed lane stand as they stood: `served_flow` says all that has changed."""
    return (
        flow.standing == served.standing
        and lane.standing == its.standing
        and flow.gate == served.gate
        and lane.gate == its.gate
        and lane.rank == its.rank
        and flow.open == served.open
        and flow.shut == served.shut
        and lane.tag == its.tag
        and flow.weight == served.weight
        and flow.given_by == served.given_by
    )


def served_flow(row: FlowRow, place: Place, lane: LaneRow) -> Row:
    return (place, row.vtime, row.tie, row.cost, row.debt, lane.ready, lane.in_flight, lane.floor)


def touched_lane(row: LaneRow, place: Place) -> Row:
    return (place, row.ready, row.in_flight, row.floor, row.rank, row.standing, row.gate, row.tag, row.head)


def touched_gate(row: GateRow, place: Place) -> Row:
    return (place, row.in_flight, row.tat, row.waiting, row.awake, row.wake_at, row.memo, row.value, row.given_by)


FIRST_VERSION = (0, 0)


def new_flow(row: FlowRow, queue: int, lane: LaneRow | None, now: Instant) -> Row:
    """A flow and its only lane, or one that has spilled."""
    return (
        queue,
        row.id,
        encode(row.key),
        row.weight,
        row.vtime,
        row.tie,
        row.cost,
        row.debt,
        row.open,
        row.shut,
        row.standing,
        row.gate,
        *FIRST_VERSION,
        lane is None,
        *(NO_LANE if lane is None else _new_housed(lane)),
        row.given_by,
        now if row.given_by else 0,
    )


def _new_housed(lane: LaneRow) -> tuple[Any, ...]:
    return (
        lane.id,
        lane.priority,
        encode(lane.keys),
        lane.ready,
        lane.in_flight,
        lane.floor,
        lane.rank,
        lane.standing,
        lane.gate,
        lane.tag,
    )


def new_lane(row: LaneRow, queue: int) -> Row:
    return (
        queue,
        row.id,
        row.flow,
        row.priority,
        encode(row.keys),
        row.ready,
        row.in_flight,
        row.floor,
        row.rank,
        row.standing,
        row.gate,
        row.tag,
        *FIRST_VERSION,
        row.head,
    )


def new_gate(row: GateRow, queue: int) -> Row:
    return (
        queue,
        row.id,
        row.limit,
        encode(row.key),
        row.in_flight,
        row.tat,
        row.waiting,
        row.awake,
        row.wake_at,
        *FIRST_VERSION,
        row.memo,
        row.value,
        row.given_by,
    )
