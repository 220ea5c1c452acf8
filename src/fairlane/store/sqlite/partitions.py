"""Partitions on SQLite: moving jobs to where they belong."""

from __future__ import annotations

from collections import Counter

from fairlane.clock import Instant
from fairlane.scheduler.journal import Delta
from fairlane.scheduler.rebuild import StrayLane, WaitingLane, gates_of_strays, stray_lanes, weights_of_strays
from fairlane.scheduler.snapshot import GateRow
from fairlane.store.protocol import Rehomed
from fairlane.store.rows import decode_keys
from fairlane.store.sqlite import claims, rows
from fairlane.store.sqlite.database import Transaction


def rehome(tx: Transaction, queue: claims.QueueInForce, limit: int, now: Instant) -> tuple[Rehomed, dict[int, int]]:
    """Move up to `limit` ready and as many scheduled jobs that belong elsewhere. With it: how many to wake by queue."""
    if queue.policy.partition is None or not queue.policy.partition.is_guarded:
        return Rehomed(0, 0, 0), {}
    claims.checkpoint(tx, claims.fold_all(tx, queue, now), now)
    strays, later = (stray_lanes(queue.policy, lanes) for lanes in _select_lanes(tx, queue.id))
    moving = _Moving(tx, queue.id)
    left = limit
    for stray in strays:
        left -= moving.ready(stray, max(0, left))
    left = limit
    for stray in later:
        left -= moving.scheduled(stray, max(0, left))
    moved = moving.moved.total()
    waiting = sum(stray.was.ready for stray in (*strays, *later)) - moved
    return Rehomed(moved, max(0, waiting), sum(stray.was.in_flight for stray in strays)), dict(moving.moved)


class _Moving:
    """Jobs on their way: they keep their positions, and ring in both queues."""

    def __init__(self, tx: Transaction, queue: int) -> None:
        self._tx = tx
        self._queue = queue
        self.moved: Counter[int] = Counter()

    def ready(self, stray: StrayLane, limit: int) -> int:
        found = self._tx.all("select_ready_of_lane", stray.was.id, stray.was.floor, limit)
        if found:
            to = self._move(stray, [(row[0], row[1]) for row in found])
            first, since = found[0][0], min(row[2] for row in found)
            given_by, given = max(((row[4], row[3]) for row in found if row[3] is not None), default=(None, None))
            self._ring(stray, self._queue, stray.was.id, (-len(found), first, since, None, 0, None))
            self._ring(stray, to, stray.lane, (len(found), first, since, given, 0, given_by))
        return len(found)

    def scheduled(self, stray: StrayLane, limit: int) -> int:
        """Whoever keeps a place in a sequence gives it back here and takes it there."""
        found = self._tx.all("select_scheduled_of_lane", self._queue, stray.was.id, limit)
        if found:
            to = self._move(stray, [(row[0], row[1]) for row in found])
            if kept := sum(row[3] for row in found):
                self._ring(stray, self._queue, stray.was.id, (0, found[0][0], found[0][2], None, kept, None))
                self._ring(stray, to, stray.lane, (0, found[0][0], found[0][2], None, -kept, None))
        return len(found)

    def _move(self, stray: StrayLane, jobs: list[tuple[int, bytes]]) -> int:
        to = claims.queue_number(self._tx, stray.queue)
        self._tx.run_many("move_job", [(to, stray.lane, position) for position, _ in jobs])
        self._tx.run_many("move_forced", [(to, job) for _, job in jobs])
        self.moved[to] += len(jobs)
        return to

    def _ring(self, stray: StrayLane, queue: int, lane: bytes, bell: tuple[object, ...]) -> None:
        self._tx.run("insert_arrival", queue, lane, stray.was.priority, rows.encode(stray.was.keys), *bell)


def folded_lanes(tx: Transaction, queue: claims.QueueInForce, now: Instant) -> list[WaitingLane]:
    """All of them, once every bell is folded."""
    claims.checkpoint(tx, claims.fold_all(tx, queue, now), now)
    used, later = _select_lanes(tx, queue.id)
    return used + later


def _select_lanes(tx: Transaction, queue: int) -> tuple[list[WaitingLane], list[WaitingLane]]:
    """Lanes of jobs that are ready or run, as far as bells have been folded; and those of scheduled jobs."""
    lanes = [rows.lane(row) for row in tx.all("select_all_lanes", queue)]
    used = [
        WaitingLane(lane.id, lane.priority, dict(lane.keys), lane.ready, lane.in_flight, lane.floor)
        for lane in lanes
        if lane.ready > 0 or lane.in_flight > 0
    ]
    found = tx.all("select_scheduled_lanes", queue)
    return used, [WaitingLane(lane, priority, decode_keys(keys), count) for lane, priority, keys, count in found]


def select_gates_of_strays(tx: Transaction, queue: claims.QueueInForce, was: int) -> list[tuple[str, GateRow]]:
    gates = [rows.gate(row) for row in tx.all("select_all_gates", queue.id)]
    flows = [rows.flow(row) for row in tx.all("select_all_flows", queue.id)]
    now = claims.tail_of(tx, queue).over(Delta(flows, gates=gates))
    flows, gates = now.flows, now.gates
    return gates_of_strays(queue.policy, was, gates) + weights_of_strays(queue.policy, was, flows)
