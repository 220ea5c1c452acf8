"""Removing what is past its time on SQLite, a bounded number at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from typing import Any

import msgspec

from fairlane.clock import Instant
from fairlane.job import State
from fairlane.policy.gates import VALUES_LAST
from fairlane.policy.policy import Policy
from fairlane.scheduler.board import rings_for_all
from fairlane.scheduler.journal import Delta, Removed
from fairlane.scheduler.rebuild import (
    HeldLane,
    Miscount,
    SharedHold,
    expected_gates,
    miscounted,
    recounted,
)
from fairlane.scheduler.snapshot import GateRow, KeptPlaces, SharedGateRow
from fairlane.store import audit
from fairlane.store.audit import RECOUNT, describe_miscounts
from fairlane.store.boards import QueueTime
from fairlane.store.protocol import CLOCKS_DIFFER_BY, Counted, Pruned, Retention
from fairlane.store.rows import decode_keys
from fairlane.store.sqlite import claims, jobs, rows, shared_limits
from fairlane.store.sqlite.database import Row, Transaction
from fairlane.store.sqlite.procedures import perform


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
    jobs.forget(tx, [job for _, job in found])
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


ALL = -1


def count(
    tx: Transaction, queue: claims.QueueInForce, reached: tuple[bytes, bytes], limit: int
) -> tuple[Counted, tuple[bytes, bytes]]:
    """Look at a stretch of a queue's gates; where the next one begins."""
    own = tx.all("walk_all_gates", queue.id, reached[0], limit)
    shared = tx.all("walk_all_shared_gates", queue.id, reached[1], limit)
    found = _own(tx, queue, queue.policy, _gates(tx, queue, own))
    found += [each for each, _ in _shared(tx, queue, [rows.shared_gate(row) for row in shared])]
    ends = [stretch[-1][0] if len(stretch) == limit else b"" for stretch in (own, shared)]
    return Counted(found, more=any(ends)), (ends[0], ends[1])


def at_gates(
    tx: Transaction, queue: claims.QueueInForce, policy: Policy, gates: Sequence[bytes], most: int
) -> list[Miscount]:
    """The same for these gates, a queue's own and shared ones; nothing, where more jobs run than may be looked at."""
    if not gates or tx.value("count_held") > most:
        return []
    shared = shared_limits.select_gates(tx, gates)
    return _own(tx, queue, policy, only=set(gates)) + [each for each, _ in _shared(tx, queue, shared)]


def recount(tx: Transaction, queue: claims.QueueInForce, now: Instant) -> list[Miscount]:
    """Count every gate of a queue again from the jobs that run, and say which were wrong."""
    queue = claims.fold_all(tx, queue, now)
    gates = _gates(tx, queue, tx.all("walk_all_gates", queue.id, b"", ALL))
    found = _own(tx, queue, queue.policy, gates)
    if found:
        claims.remake(tx, queue, queue.policy, now, _holds(tx, queue))
    shared = [rows.shared_gate(row) for row in tx.all("walk_all_shared_gates", queue.id, b"", ALL)]
    wrong = _shared(tx, queue, shared)
    mended = [row for _, row in wrong]
    encoded = [msgspec.json.encode(row.contenders).decode() for row in mended]
    tx.run_many("put_shared_counts", [(row.in_flight, text, row.id) for row, text in zip(mended, encoded, strict=True)])
    shared_limits.ring(tx, rings_for_all(mended))
    found += [each for each, _ in wrong]
    if found:
        perform(tx, audit.record(RECOUNT, now, queue.policy.queue, *describe_miscounts(found)))
    return found


def _own(
    tx: Transaction,
    queue: claims.QueueInForce,
    policy: Policy,
    gates: Sequence[GateRow] = (),
    *,
    only: Set[bytes] | None = None,
) -> list[Miscount]:
    """Which of these gates, or of those that a running job holds, count wrong; of no others than `only`."""
    kept = [] if policy.sequence is None else [*claims.kept_places(tx, queue.id), *_unfolded_places(tx, queue)]
    expected = expected_gates(policy, _holds(tx, queue), kept)
    if only is not None:
        expected = {gate: counted for gate, counted in expected.items() if gate in only}
    wanted = expected.keys() if only is None else only
    others = claims.tail_of(tx, queue).find(gates=sorted(wanted - {row.id for row in gates}))
    return miscounted(policy, expected, [*gates, *claims.answer(tx, queue, others).gates])


def _gates(tx: Transaction, queue: claims.QueueInForce, stored: Sequence[rows.Row]) -> list[GateRow]:
    """Gates of the tables as they are now, and others that have changed."""
    return claims.tail_of(tx, queue).over(Delta(gates=[rows.gate(row) for row in stored])).gates


def _holds(tx: Transaction, queue: claims.QueueInForce) -> list[HeldLane]:
    ended: Counter[bytes] = Counter()
    for (text,) in tx.all("select_unfolded", queue.id):
        for bell in rows.releases(text):
            ended[bell.lane] += bell.ended + bell.unstarted
    holds = [
        HeldLane(lane, priority, decode_keys(keys), number + ended.pop(lane, 0))
        for lane, priority, keys, number in tx.all("select_holds", queue.id)
    ]
    lanes = claims.answer(tx, queue, claims.tail_of(tx, queue).find(lanes=ended)).lanes
    return holds + [HeldLane(lane.id, lane.priority, lane.keys, ended[lane.id]) for lane in lanes]


def _unfolded_places(tx: Transaction, queue: claims.QueueInForce) -> list[KeptPlaces]:
    """What bells that nobody has folded will say of places: those given back are still counted, new ones are not."""
    places = [
        KeptPlaces(priority, decode_keys(keys), resumed)
        for priority, keys, resumed in tx.all("select_unfolded_places", queue.id)
    ]
    bells = [bell for (text,) in tx.all("select_unfolded", queue.id) for bell in rows.releases(text) if bell.kept]
    found = claims.answer(tx, queue, claims.tail_of(tx, queue).find(lanes={bell.lane for bell in bells})).lanes
    lanes = {lane.id: lane for lane in found}
    return places + [
        KeptPlaces(lanes[bell.lane].priority, lanes[bell.lane].keys, -bell.kept) for bell in bells if bell.lane in lanes
    ]


def _shared(
    tx: Transaction, queue: claims.QueueInForce, gates: list[SharedGateRow]
) -> list[tuple[Miscount, SharedGateRow]]:
    if not gates:
        return []
    running = [
        SharedHold(gate, name, 1)
        for name, shared in tx.all("select_shared_holders")
        for gate in rows.split_shared(shared)
    ]
    left = [SharedHold(*row) for row in tx.all("select_unfolded_shared", queue.id)]
    return recounted(queue.policy.queue, gates, [*running, *left])
