"""Removing what is past its time on SQLite, a bounded number at a time."""

from __future__ import annotations

from fairlane.clock import Instant
from fairlane.job import State
from fairlane.store.protocol import Pruned, Retention
from fairlane.store.sqlite.database import Transaction

__all__ = ["Walk", "collect", "prune"]


class Walk:
    """How far collection has come, by queue; it starts over at the end."""

    def __init__(self) -> None:
        self.lanes: dict[int, bytes] = {}
        self.gates: dict[int, bytes] = {}


def prune(tx: Transaction, retention: Retention, now: Instant, limit: int) -> Pruned:
    """Remove finished jobs past their time, with their history."""
    removed = 0
    for state, kept in (
        (State.DONE, retention.done),
        (State.CANCELLED, retention.done),
        (State.DEAD, retention.dead),
    ):
        found = tx.all("select_finished", int(state), now - kept, limit - removed)
        tx.run_many("delete_attempts", [(job,) for _, job in found])
        tx.run_many("delete_job", [(position,) for position, _ in found])
        removed += len(found)
    return Pruned(removed, more=removed >= limit)


def collect(tx: Transaction, queue: int, walk: Walk, now: Instant, limit: int) -> Pruned:
    """Walk a stretch of the lanes and gates, and remove what is idle."""
    stretch = tx.all("walk_lanes", walk.lanes.get(queue, b""), queue, limit)
    walk.lanes[queue] = stretch[-1][0] if len(stretch) == limit else b""
    idle = [(lane, flow) for lane, flow, is_idle in stretch if is_idle]
    tx.run_many("delete_lane", [(lane,) for lane, _ in idle])
    flows = sum(tx.run("delete_idle_flow", flow) for flow in {flow for _, flow in idle})
    gates_seen = tx.all("walk_gates", walk.gates.get(queue, b""), queue, limit, now)
    walk.gates[queue] = gates_seen[-1][0] if len(gates_seen) == limit else b""
    gates = [(gate,) for gate, is_idle in gates_seen if is_idle]
    tx.run_many("delete_gate", gates)
    more = len(stretch) == limit or len(gates_seen) == limit
    return Pruned(0, lanes=len(idle), flows=flows, gates=len(gates), more=more)
