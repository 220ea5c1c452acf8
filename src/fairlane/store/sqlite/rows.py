"""Rows of the SQLite tables as the scheduler's values, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import msgspec

from fairlane.clock import Instant
from fairlane.job import Claim
from fairlane.scheduler.snapshot import Arrival, Contender, FlowRow, GateRow, LaneRow, Release, SharedGateRow
from fairlane.store.rows import decode_given, decode_key, decode_keys

Row = tuple[Any, ...]


def encode_given(given: dict[str, float]) -> str:
    return msgspec.json.encode(given).decode()


def encode_keys(keys: dict[str, str | None]) -> str:
    return msgspec.json.encode(keys).decode()


def claim_of(row: Sequence[Any], lease: UUID, queue: str, claimed_at: Instant) -> Claim:
    """A job that was handed out, by its columns from `id` to `suspicion`."""
    job, task, priority, keys, payload, attempt, most, enqueued_at, cancel, suspicion = row
    return Claim(
        UUID(bytes=job),
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
        bool(cancel),
        suspicion,
    )


def flow(row: Row) -> FlowRow:
    return FlowRow(row[0], decode_key(row[1]), *row[2:])


def flow_parameters(row: FlowRow, queue: int, now: Instant) -> Row:
    return (
        queue,
        row.id,
        msgspec.json.encode(row.key).decode(),
        row.weight,
        row.vtime,
        row.tie,
        row.cost,
        row.debt,
        row.open,
        row.shut,
        row.standing,
        row.gate,
        row.given_by,
        now if row.given_by else 0,
    )


def lane(row: Row) -> LaneRow:
    return LaneRow(row[0], row[1], row[2], decode_keys(row[3]), *row[4:])


def lane_parameters(row: LaneRow, queue: int) -> Row:
    return (
        queue,
        row.id,
        row.flow,
        row.priority,
        encode_keys(row.keys),
        row.ready,
        row.in_flight,
        row.floor,
        row.rank,
        row.standing,
        row.gate,
        row.tag,
        row.head,
    )


def gate(row: Row) -> GateRow:
    return GateRow(row[0], row[1], decode_key(row[2]), *row[3:])


def gate_parameters(row: GateRow, queue: int) -> Row:
    return (
        queue,
        row.id,
        row.limit,
        msgspec.json.encode(row.key).decode(),
        row.in_flight,
        row.tat,
        row.waiting,
        row.awake,
        row.wake_at,
        row.memo,
        row.value,
        row.given_by,
    )


def arrival(row: Row) -> Arrival:
    _, lane_id, priority, keys, count, floor, since, given, resumed, given_by = row
    return Arrival(lane_id, priority, decode_keys(keys), count, floor, since, decode_given(given), resumed, given_by)


class Released(msgspec.Struct, array_like=True, gc=False):
    """A release bell as it is stored, or is being added up. The figures are those of `scheduler.Release`."""

    lane: str
    """In hexadecimal."""
    ended: int = 0
    ran: int = 0
    charged: float = 0.0
    unstarted: int = 0
    refund: float = 0.0
    since: Instant = 0
    failed: int = 0
    neutral: int = 0
    latest: Instant = 0
    kept: int = 0
    lost: int = 0
    signal: int | None = None


_encode = msgspec.json.Encoder().encode
_decode_released = msgspec.json.Decoder(list[Released]).decode


def encode_released(bells: list[Released]) -> str:
    """The release bells of one settlement, as one text."""
    return _encode(bells).decode()


def releases(text: str) -> list[Release]:
    return [
        Release(
            bytes.fromhex(bell.lane),
            bell.ended,
            bell.ran,
            bell.charged,
            bell.unstarted,
            bell.refund,
            bell.since,
            bell.failed,
            bell.neutral,
            bell.latest,
            bell.kept,
            bell.lost,
            bell.signal,
        )
        for bell in _decode_released(text)
    ]


def shared_gate(row: Row) -> SharedGateRow:
    id_, limit, key, in_flight, tat, contenders, *rest = row
    waiting = msgspec.json.decode(contenders, type=list[Contender])
    return SharedGateRow(id_, limit, decode_key(key), in_flight, tat, waiting, *rest)


def shared_gate_parameters(row: SharedGateRow) -> Row:
    return (
        row.id,
        row.limit,
        msgspec.json.encode(row.key).decode(),
        row.in_flight,
        row.tat,
        msgspec.json.encode(row.contenders).decode(),
        row.memo,
        row.value,
    )


def join_shared(gates: tuple[bytes, ...]) -> str | None:
    """The shared gates of a running job, as one text."""
    return b"".join(gates).hex() or None


def split_shared(text: str | None) -> tuple[bytes, ...]:
    raw = bytes.fromhex(text or "")
    return tuple(raw[n : n + 16] for n in range(0, len(raw), 16))
