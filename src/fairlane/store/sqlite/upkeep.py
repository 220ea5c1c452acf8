"""Removing what is past its time on SQLite, a bounded number at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fairlane.clock import Instant
from fairlane.job import State
from fairlane.policy.numbers import VALUES_LAST
from fairlane.scheduler.journal import Removed
from fairlane.store.protocol import CLOCKS_DIFFER_BY, Pruned, Retention
from fairlane.store.queue_time import QueueTime
from fairlane.store.sqlite import claims, uniques
from fairlane.store.sqlite.database import Row, Transaction


class Walk:
    """How far collection has come, by queue and table; it starts over at the end."""

    def __init__(self) -> None:
        self._reached: dict[tuple[int, str], bytes] = {}

    def stretch(
        self, tx: Transaction, queue: int, table: str, limit: int, *parameters: object
    ) -> tuple[list[Row], bool]:
        """The idle rows of the next stretch of a table, and whether more follow."""
        seen = tx.all(f"walk_{table}", self._reached.get((queue, table), b""), queue, limit, *parameters)
        more = len(seen) == limit
        self._reached[queue, table] = seen[-1][0] if more else b""
        return [row for row in seen if row[-1]], more


def prune(tx: Transaction, retention: Retention, time: QueueTime, limit: int) -> Pruned:
    """Remove finished jobs past their time, then those beyond the number to keep, with their history."""
    removed = 0
    for state, kept in (
        (State.DONE, retention.done),
        (State.CANCELLED, retention.done),
        (State.DEAD, retention.dead),
    ):
        removed += _remove(tx, tx.all("select_finished", int(state), time.now - kept, limit - removed))
    if retention.keep is not None:
        for states in ((State.DONE, State.CANCELLED), (State.DEAD, State.DEAD)):
            removed += _remove(tx, _beyond(tx, states, retention.keep, limit - removed))
    tx.run("delete_expired_uniques", time.now, limit)
    tx.run("prune_ended_sessions", time.wall - CLOCKS_DIFFER_BY)
    return Pruned(removed, more=removed >= limit)


def _beyond(tx: Transaction, states: tuple[State, State], keep: int, limit: int) -> list[tuple[Any, ...]]:
    """The oldest finished jobs beyond those to keep."""
    first, second = map(int, states)
    count: int = tx.value("count_beyond", first, second, keep, limit)
    return tx.all("select_oldest_finished", first, second, count)


def _remove(tx: Transaction, found: Sequence[tuple[Any, ...]]) -> int:
    tx.run_many("delete_attempts", [(job,) for _, job in found])
    uniques.forget(tx, [job for _, job in found])
    tx.run_many("delete_job", [(position,) for position, _ in found])
    return len(found)


def collect(tx: Transaction, queue: claims.QueueInForce, walk: Walk, now: Instant, limit: int) -> Pruned:
    """Walk a stretch of the lanes, flows and gates, and remove what is idle."""
    queue = claims.checkpoint(tx, queue, now)
    lanes, more_lanes = walk.stretch(tx, queue.id, "lanes", limit)
    tx.run_many("delete_lane", [(queue.id, row[0]) for row in lanes])
    flows, more_flows = walk.stretch(tx, queue.id, "flows", limit, now, VALUES_LAST)
    tx.run_many("delete_flow", [(queue.id, row[0]) for row in flows])
    gates, more_gates = walk.stretch(tx, queue.id, "gates", limit, now, VALUES_LAST)
    tx.run_many("delete_gate", [(queue.id, row[0]) for row in gates])
    shared, more_shared = walk.stretch(tx, queue.id, "shared_gates", limit, now)
    tx.run_many("delete_shared_gate", [row[:1] for row in shared])
    if lanes or flows or gates:
        removed = Removed([row[0] for row in flows], [row[0] for row in lanes], [row[0] for row in gates])
        claims.note_removed(tx, queue, removed, sum(row[1] for row in lanes), sum(row[2] for row in lanes))
    more = more_lanes or more_flows or more_gates or more_shared
    return Pruned(0, lanes=len(lanes), flows=len(flows), gates=len(gates) + len(shared), more=more)
