"""Rows of the PostgreSQL tables as the scheduler's values, and back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec

from fairlane.scheduler.snapshot import Arrival, FlowRow, GateRow, LaneRow, Release

__all__ = [
    "Place",
    "arrival",
    "decode_keys",
    "encode",
    "flow",
    "gate",
    "lane",
    "new_flow",
    "new_gate",
    "new_lane",
    "releases",
    "storable",
    "touched_flow",
    "touched_gate",
    "touched_lane",
]

Row = Sequence[Any]
Place = tuple[int, int]
"""A row's `ctid`: block and line. It holds for as long as nobody else may write the row."""


@lru_cache(maxsize=65_536)
def decode_keys(text: str) -> dict[str, str | None]:
    """Keys by name. The same text gives the same mapping: nobody writes to it."""
    return msgspec.json.decode(text, type=dict[str, str | None])


@lru_cache(maxsize=65_536)
def _decode_key(text: str) -> list[str | None]:
    return msgspec.json.decode(text, type=list[str | None])


def encode(value: object) -> str:
    return msgspec.json.encode(value).decode()


def storable(text: str | None) -> str | None:
    """A text as PostgreSQL can keep it: whatever a handler raised, its job must be settled."""
    if text is None:
        return None
    return text.replace("\x00", "\ufffd").encode(errors="replace").decode()


# Columns are taken by number, up to the last one that this version knows: a later migration may append some.


def flow(row: Row) -> FlowRow:
    return FlowRow(row[1], _decode_key(row[2]), *row[3:12])


def lane(row: Row) -> LaneRow:
    return LaneRow(row[1], row[2], row[3], decode_keys(row[4]), *row[5:12])


def gate(row: Row) -> GateRow:
    return GateRow(row[1], row[2], _decode_key(row[3]), *row[4:9])


def arrival(row: Row) -> Arrival:
    _, _, count, floor, since, priority, lane, keys = row[:8]
    return Arrival(lane, priority, decode_keys(keys), count, floor, since)


def releases(row: Any) -> list[Release]:
    """From columns that run in step."""
    if row["released"] is None:
        return []
    columns = (row[name] for name in ("released", "ended", "ran", "charged", "unstarted", "refund", "since"))
    return [Release(*values) for values in zip(*columns, strict=True)]


def touched_flow(row: FlowRow, place: Place) -> Row:
    """What changes in a flow that is stored already."""
    return (place, row.vtime, row.tie, row.cost, row.debt, row.open, row.shut, row.standing, row.gate)


def touched_lane(row: LaneRow, place: Place) -> Row:
    return (place, row.ready, row.in_flight, row.floor, row.rank, row.standing, row.gate, row.tag)


def touched_gate(row: GateRow, place: Place) -> Row:
    return (place, row.in_flight, row.tat, row.waiting, row.awake, row.wake_at)


def new_flow(row: FlowRow, queue: int) -> Row:
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
    )
