"""Rows of the PostgreSQL tables as the scheduler's values, and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from uuid import UUID

import msgspec

from fairlane.clock import Instant
from fairlane.job import Claim
from fairlane.scheduler.journal import Mark
from fairlane.scheduler.resident import Found
from fairlane.scheduler.snapshot import Arrival, Ask, FlowRow, GateRow, Head, LaneRow, QueueRow, Release
from fairlane.store.rows import decode_given, decode_key, decode_keys

Row = Sequence[Any]
Place = tuple[int, int]
"""A row's `ctid`: block and line."""


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


class Opened:
    """How a claim begins: what `open_claim` has found, sorted by kind. The shape of its rows is drawn with it."""

    def __init__(self, records: Iterable[Any]) -> None:
        self.changes: list[tuple[Mark, bytes]] = []
        self.arrivals: list[Arrival] = []
        self.releases: list[Release] = []
        self.others: list[tuple[int, float, bool]] = []
        """Queues that could have been opened as well, with their virtual time, and whether their lock was taken."""
        for record in records:
            kind, id_, name, keys, f1, f2, f3, i1, i2, i3, i4, i5, i6, i7, i8, token, place, *released = record
            match kind:
                case b"r":
                    self.releases += _releases(*released)
                case b"a":
                    given = decode_given(name)
                    self.arrivals.append(
                        Arrival(id_, i1, decode_keys(keys), i2, i3, i4, given, i5 or 0, i6 or 0, place)
                    )
                case b"j":
                    self.changes.append((Mark(i1, token), id_))
                case b"o":
                    self.others.append((i1, f1, bool(i2)))
                case _:
                    self.digest = name
                    self.state = QueueRow(f1, f2, i2, i3, f3)
                    self.now: Instant = i1
                    self.mark = Mark(i4, token)
                    self.attention: int = i5
                    self.others_wait = bool(i6)
                    self.due: Instant | None = i7
                    self.stored: int = i8
                    self._bounds(*keys.split())

    def _bounds(
        self, oldest: str, applied_at: str, xid: str, floor: str, release: str, snapshot: str, forgets: str
    ) -> None:
        self.policy_since = int(applied_at)
        self.forgets = forgets == "1"
        """What was known of the board is not true any more."""
        self.has_all = xid == release == "-"
        """Nothing has happened that was not read."""
        self.bounds = (
            oldest,
            snapshot,
            None if xid == "-" else xid,
            None if floor == "-" else int(floor),
            None if release == "-" else release,
        )
        """Up to where events were read, as `write_claim` takes it."""


def _releases(lanes: list[bytes], counts: list[int], charges: list[float]) -> Iterable[Release]:
    many = len(lanes)
    ended, ran, unstarted, *rest = (counts[first : first + many] for first in range(0, len(counts), many))
    return map(Release, lanes, ended, ran, charges[:many], unstarted, charges[many:], *rest)


def found(records: Iterable[Any], ask: Ask) -> Found:
    """What `ask_tables` or `select_board` has found, sorted by kind. The shape of its rows is drawn in `board.sql`."""
    flows: list[FlowRow] = []
    lanes: list[LaneRow] = []
    gates: list[GateRow] = []
    heads: dict[bytes, list[Head]] = {lane: [] for lane, _, _ in ask.heads}
    asked = [heads[lane] for lane, _, _ in ask.heads]
    scanned = 0
    for kind, place, id_, kin, gate, name, keys, f1, f2, f3, f4, i1, i2, i3, i4, i5, i6, i7, memo in records:
        match kind:
            case "h":
                asked[i1 - 1].append(Head(place, i2, i3))
            case "l":
                lanes.append(LaneRow(id_, kin, i1, decode_keys(keys), i2, i3, i4, i5, i6, gate, f1, i7))
            case "g":
                gates.append(GateRow(id_, name, decode_key(keys), i1, i2, i3, i4, i5, memo, f1, i6))
            case _:
                scanned += kind == "s"
                flows.append(FlowRow(id_, decode_key(keys), f1, f2, i1, f3, f4, i2, i3, i4, gate, i5))
    return Found(flows, lanes, gates, heads, [], scanned)


def flow_parameters(row: FlowRow, queue: int, now: Instant) -> Row:
    given = row.given_by
    numbers = (row.weight, row.vtime, row.tie, row.cost, row.debt, row.open, row.shut, row.standing)
    return (queue, row.id, encode(row.key), *numbers, row.gate, given, now if given else 0)


def lane_parameters(row: LaneRow, queue: int) -> Row:
    numbers = (row.ready, row.in_flight, row.floor, row.rank, row.standing, row.gate, row.tag, row.head)
    return (queue, row.id, row.flow, row.priority, encode(row.keys), *numbers)


def gate_parameters(row: GateRow, queue: int) -> Row:
    numbers = (row.in_flight, row.tat, row.waiting, row.awake, row.wake_at, row.memo, row.value, row.given_by)
    return (queue, row.id, row.limit, encode(row.key), *numbers)
