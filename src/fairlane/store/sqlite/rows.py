"""Rows of the SQLite tables as the scheduler's values, and back."""

from __future__ import annotations

import msgspec

from fairlane.clock import Instant
from fairlane.scheduler.snapshot import Arrival, Contender, Release, SharedGateRow
from fairlane.store.rows import Row as Row
from fairlane.store.rows import claim_of as claim_of
from fairlane.store.rows import decode_given, decode_key, decode_keys
from fairlane.store.rows import encode as encode


class LaneEvent(msgspec.Struct):
    """An arrival that is being added up, as `insert_arrival` takes it. The figures are those of `scheduler.Arrival`."""

    queue: int
    lane: bytes
    priority: int
    keys: str
    count: int
    floor: int
    since: Instant
    given: str | None = None
    resumed: int = 0
    given_by: int | None = None


def arrival(row: Row) -> Arrival:
    _, lane, priority, keys, count, floor, since, given, resumed, given_by = row
    return Arrival(lane, priority, decode_keys(keys), count, floor, since, decode_given(given), resumed, given_by)


def releases(text: str) -> list[Release]:
    """What one settlement has released in a queue; lanes are stored in hexadecimal."""
    return [Release(bytes.fromhex(lane), *stats) for lane, *stats in msgspec.json.decode(text)]


def shared_gate(row: Row) -> SharedGateRow:
    gate, limit, key, in_flight, tat, contenders, *rest = row
    waiting = msgspec.json.decode(contenders, type=list[Contender])
    return SharedGateRow(gate, limit, decode_key(key), in_flight, tat, waiting, *rest)


def shared_gate_parameters(row: SharedGateRow) -> Row:
    gate, limit, key, in_flight, tat, contenders, *rest = msgspec.structs.astuple(row)
    return (gate, limit, encode(key), in_flight, tat, encode(contenders), *rest)


def join_shared(gates: tuple[bytes, ...]) -> str | None:
    """The shared gates of a running job, as one text."""
    return b"".join(gates).hex() or None


def split_shared(text: str | None) -> tuple[bytes, ...]:
    raw = bytes.fromhex(text or "")
    return tuple(raw[n : n + 16] for n in range(0, len(raw), 16))
