"""What this process knows of a queue's rows: those that it has read or written, while nobody else has written any.

Flows, lanes and gates are written by whoever holds the claim lock, who raises the revision of the queue with it. A
claimer that finds the revision as it left it need not read again what it has written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

from fairlane.scheduler.snapshot import FlowRow, GateRow, LaneRow, Plan, Standing
from fairlane.store.sqlite import rows

if TYPE_CHECKING:
    from fairlane.store.sqlite.database import Transaction

__all__ = ["Known"]

RowT = TypeVar("RowT", FlowRow, LaneRow, GateRow)

MOST_ROWS = 10_000
"""Rows of a kind that are kept from one claim to the next: a few megabytes."""
READY = int(Standing.READY)


class Known:
    """Rows of one queue by their ids, as they are at one revision."""

    __slots__ = ("_flows", "_gates", "_lanes", "_ready", "revision")

    def __init__(self, revision: int) -> None:
        self.revision = revision
        self.forget()

    def forget(self) -> None:
        self._flows: dict[bytes, FlowRow] = {}
        self._lanes: dict[bytes, LaneRow] = {}
        self._gates: dict[bytes, GateRow] = {}
        self._ready: dict[bytes, set[bytes]] = {}
        """By flow, those of its lanes here that take turns."""

    def is_too_much(self) -> bool:
        return max(len(self._flows), len(self._lanes), len(self._gates)) > MOST_ROWS

    def flow(self, flow_id: bytes) -> FlowRow | None:
        return self._flows.get(flow_id)

    def lane(self, lane_id: bytes) -> LaneRow | None:
        return self._lanes.get(lane_id)

    def gate(self, gate_id: bytes) -> GateRow | None:
        return self._gates.get(gate_id)

    def flows(self, tx: Transaction, ids: Iterable[bytes]) -> list[FlowRow]:
        """Flows by id, where they exist. Those that are named in order come in order."""
        return _fetched(tx, "select_flows", ids, self._flows, rows.flow)

    def gates(self, tx: Transaction, ids: Iterable[bytes]) -> list[GateRow]:
        return _fetched(tx, "select_gates", ids, self._gates, rows.gate)

    def lanes(self, tx: Transaction, ids: Iterable[bytes]) -> list[LaneRow]:
        named = list(ids)
        missing = [each for each in named if each not in self._lanes]
        self.add_lanes(_select(tx, "select_lanes", missing, rows.lane))
        return [row for each in named if (row := self._lanes.get(each)) is not None]

    def add_lanes(self, lanes: Iterable[LaneRow]) -> None:
        for row in lanes:
            self._lanes[row.id] = row
            if row.standing == READY:
                self._ready.setdefault(row.flow, set()).add(row.id)
            elif (ready := self._ready.get(row.flow)) is not None:
                ready.discard(row.id)

    def first_lanes(self, flow: FlowRow, most: int) -> list[LaneRow] | None:
        """Its lanes that take turns, the lowest rank first; `None` where not all are known, or they are more."""
        ready = self._ready.get(flow.id, ())
        if flow.open > most or len(ready) != flow.open:
            return None
        return sorted((self._lanes[each] for each in ready), key=_order)

    def note(self, plan: Plan) -> None:
        """These rows are written, and the revision is raised."""
        self._flows.update((row.id, row) for row in plan.flows)
        self._gates.update((row.id, row) for row in plan.gates)
        self.add_lanes(plan.lanes)
        self.revision += 1


def _order(lane: LaneRow) -> tuple[int, int, bytes]:
    return lane.rank, lane.head, lane.id


def _fetched(
    tx: Transaction,
    statement: str,
    ids: Iterable[bytes],
    known: dict[bytes, RowT],
    read: Callable[[rows.Row], RowT],
) -> list[RowT]:
    named = list(ids)
    missing = [each for each in named if each not in known]
    known.update((row.id, row) for row in _select(tx, statement, missing, read))
    return [row for each in named if (row := known.get(each)) is not None]


def _select(tx: Transaction, statement: str, ids: list[bytes], read: Callable[[rows.Row], RowT]) -> list[RowT]:
    return [read(row) for row in tx.all(statement, len(ids), b"".join(ids))] if ids else []
