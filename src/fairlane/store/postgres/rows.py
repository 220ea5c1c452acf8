"""Rows of the PostgreSQL tables as the scheduler's values, and back as columns for `unnest`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
    "new_flows",
    "new_gates",
    "new_lanes",
    "releases",
    "touched_flows",
    "touched_gates",
    "touched_lanes",
]

Row = Sequence[Any]
Columns = tuple[list[Any], ...]
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
    columns = (row[name] for name in ("released", "ended", "ran", "charged", "unstarted", "refund"))
    return [Release(*values) for values in zip(*columns, strict=True)]


def touched_flows(rows: Iterable[FlowRow], places: Mapping[bytes, Place]) -> Columns:
    """What changes in a flow that is stored already."""
    values = [(places[f.id], f.vtime, f.tie, f.cost, f.debt, f.open, f.shut, f.standing, f.gate) for f in rows]
    return _columns(values, 9)


def touched_lanes(rows: Iterable[LaneRow], places: Mapping[bytes, Place]) -> Columns:
    values = [(places[r.id], r.ready, r.in_flight, r.floor, r.rank, r.standing, r.gate, r.tag) for r in rows]
    return _columns(values, 8)


def touched_gates(rows: Iterable[GateRow], places: Mapping[bytes, Place]) -> Columns:
    return _columns([(places[g.id], g.in_flight, g.tat, g.waiting, g.awake, g.wake_at) for g in rows], 6)


def new_flows(rows: Iterable[FlowRow]) -> Columns:
    values = [
        (f.id, encode(f.key), f.weight, f.vtime, f.tie, f.cost, f.debt, f.open, f.shut, f.standing, f.gate)
        for f in rows
    ]
    return _columns(values, 11)


def new_lanes(rows: Iterable[LaneRow]) -> Columns:
    values = [
        (r.id, r.flow, r.priority, encode(r.keys), r.ready, r.in_flight, r.floor, r.rank, r.standing, r.gate, r.tag)
        for r in rows
    ]
    return _columns(values, 11)


def new_gates(rows: Iterable[GateRow]) -> Columns:
    values = [(g.id, g.limit, encode(g.key), g.in_flight, g.tat, g.waiting, g.awake, g.wake_at) for g in rows]
    return _columns(values, 8)


def _columns(rows: list[tuple[Any, ...]], width: int) -> Columns:
    if not rows:
        return tuple([] for _ in range(width))
    return tuple(map(list, zip(*rows, strict=True)))
