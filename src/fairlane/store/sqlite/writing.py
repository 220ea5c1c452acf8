"""Storing what a plan has changed. Where only figures have changed, no index is written: SQLite writes every index that
an update names a column of, whether its value is another one or not."""

from __future__ import annotations

from fairlane.clock import Instant
from fairlane.scheduler.snapshot import FlowRow, GateRow, LaneRow, Plan
from fairlane.store.sqlite import rows
from fairlane.store.sqlite.database import Transaction
from fairlane.store.sqlite.known import Known

__all__ = ["write_rows"]


def write_rows(tx: Transaction, queue: int, known: Known, plan: Plan, now: Instant) -> tuple[int, int, int]:
    """Store the flows, lanes and gates of a plan, and remember them. Returns by how much that changes how many jobs are
    ready and run, and how many lanes are parked."""
    # Whatever a plan has changed of a stored lane, it has been given before, and is known.
    totals = plan.moves([old for row in plan.lanes if (old := known.lane(row.id)) is not None])
    _write_flows(tx, queue, known, plan.flows, now)
    _write_lanes(tx, queue, known, plan.lanes)
    _write_gates(tx, queue, known, plan.gates)
    known.note(plan)
    return totals


def _write_flows(tx: Transaction, queue: int, known: Known, flows: list[FlowRow], now: Instant) -> None:
    figures, turns, others = [], [], []
    for row in flows:
        old = known.flow(row.id)
        if old is None or _stands_elsewhere(old, row) or _weighs_otherwise(old, row):
            others.append(rows.flow_parameters(row, queue, now))
        elif old.vtime != row.vtime or old.tie != row.tie:
            turns.append((row.vtime, row.tie, row.cost, row.debt, row.id))
        else:
            figures.append((row.cost, row.debt, row.id))
    tx.run_many("update_flow_figures", figures)
    tx.run_many("update_flow_turn", turns)
    tx.run_many("upsert_flow", others)


def _stands_elsewhere(old: FlowRow, row: FlowRow) -> bool:
    return old.standing != row.standing or old.gate != row.gate or old.open != row.open or old.shut != row.shut


def _weighs_otherwise(old: FlowRow, row: FlowRow) -> bool:
    return old.weight != row.weight or old.given_by != row.given_by


def _write_lanes(tx: Transaction, queue: int, known: Known, lanes: list[LaneRow]) -> None:
    figures, others = [], []
    for row in lanes:
        old = known.lane(row.id)
        if (
            old is None
            or old.standing != row.standing
            or old.rank != row.rank
            or old.head != row.head
            or old.gate != row.gate
            or old.tag != row.tag
            or old.flow != row.flow
        ):
            others.append(rows.lane_parameters(row, queue))
        else:
            figures.append((row.ready, row.in_flight, row.floor, row.id))
    tx.run_many("update_lane_figures", figures)
    tx.run_many("upsert_lane", others)


def _write_gates(tx: Transaction, queue: int, known: Known, gates: list[GateRow]) -> None:
    figures, others = [], []
    for row in gates:
        old = known.gate(row.id)
        if old is None or old.wake_at != row.wake_at:
            others.append(rows.gate_parameters(row, queue))
        else:
            figures.append((row.in_flight, row.tat, row.waiting, row.awake, row.memo, row.value, row.given_by, row.id))
    tx.run_many("update_gate_figures", figures)
    tx.run_many("upsert_gate", others)
