"""Adding up what claims have told, on SQLite: one write transaction over a bounded number of tallies."""

from __future__ import annotations

from time import monotonic

import msgspec

from fairlane.clock import Instant
from fairlane.scheduler.resident import ResidentBoard
from fairlane.scheduler.snapshot import LaneRow
from fairlane.store import key_rows
from fairlane.store.adding_up import OLDEST_LANES, STRETCH, AddingUp, Changed, FiguresRow, Oldest, Pace
from fairlane.store.figures import Tallied
from fairlane.store.key_rows import Kept
from fairlane.store.sqlite import rows
from fairlane.store.sqlite.claims import QueueInForce, tail_of
from fairlane.store.sqlite.database import Transaction

__all__ = ["has_work", "tally"]

LANES_AT_ONCE = 2_000
MOST_TALLIES = 100
"""Added up in one transaction, whatever was asked for: nobody can claim or settle meanwhile."""


def has_work(tx: Transaction, queue: QueueInForce, now: Instant, limit: int, rest: int) -> bool:
    """Whether there is anything to do that nobody was at within `rest` microseconds."""
    found = tx.one("look_before_tallying", queue.id, now, limit + 1)
    assert found is not None
    kept, passed_at, has_old, claims = found
    if not (has_old or claims) and Kept.decode(kept) == Kept.by(queue.policy):
        return False
    return claims > limit or not 0 <= now - passed_at < rest


def tally(tx: Transaction, queue: QueueInForce, now: Instant, limit: int, pace: Pace) -> Tallied:
    """Add up to `limit` tallies. The write lock is held meanwhile: what lanes say, and what is told of them, agree."""
    adding = _adding(tx, queue, now, min(limit, MOST_TALLIES))
    more = _fold(tx, queue.id, adding)
    if adding.is_kept_otherwise:
        while more:
            more = _fold(tx, queue.id, adding)
        adding.count_one_scope()
        _count_anew(tx, queue, adding)
    refreshed = tx.all("select_key_figures_to_refresh", queue.id, now, STRETCH)
    _write(tx, queue.id, adding.refreshed(refreshed))
    tx.run("delete_old_minutes", queue.id, adding.minutes_from)
    if not more:
        _find_oldest(tx, queue, adding, pace)
    _put(tx, queue.id, adding.row(), now)
    return adding.did(more=more or len(refreshed) >= STRETCH)


def _adding(tx: Transaction, queue: QueueInForce, now: Instant, limit: int) -> AddingUp:
    found = tx.one("select_queue_figures", queue.id)
    return AddingUp(queue.policy, now, FiguresRow() if found is None else FiguresRow(*found), limit)


def _put(tx: Transaction, queue: int, row: FiguresRow, now: Instant) -> None:
    tx.run("put_queue_figures", queue, row.tallied, row.tallied_at, row.kept, row.held, row.oldest_ready_at, now)


def _fold(tx: Transaction, queue: int, adding: AddingUp) -> bool:
    """Add some tallies; say whether there are more."""
    more = True
    while more and (room := adding.room):
        found = tx.all("select_told", queue, adding.tallied, room)
        more = len(found) == room
        for number, entries in found:
            if not adding.room:
                more = True
                break
            adding.read(number, entries)
    if not adding.has_read:
        return False
    for places in adding.places:
        named = list(zip(*key_rows.place_parameters(places), strict=True))
        _write(tx, queue, adding.changed(places, tx.all("select_key_figures", queue, key_rows.encode(named))))
    known = tx.all("select_minutes_at", queue, key_rows.encode(adding.minutes))
    minutes = adding.changed_minutes(text for (text,) in known)
    tx.run_many("put_minute", [(queue, minute, figures) for minute, figures in minutes])
    tx.run("delete_told", queue, adding.tallied)
    adding.written()
    return more


def _write(tx: Transaction, queue: int, changed: Changed) -> None:
    tx.run_many("put_key_figure", [(queue, *row) for row in changed.put])
    tx.run_many("delete_key_figure", [(queue, *place) for place in zip(*changed.gone, strict=True)])


def _count_anew(tx: Transaction, queue: QueueInForce, adding: AddingUp) -> None:
    tx.run("forget_scopes", queue.id, key_rows.encode(adding.scopes))
    if adding.new_scopes:
        _count(tx, queue.id, adding, tail_of(tx, queue))
    adding.count_held_anew()
    scope = key = ""
    while held := tx.all("select_held_keys", queue.id, scope, key, STRETCH):
        _write(tx, queue.id, adding.still_held(held))
        scope, key, *_ = held[-1]


def _count(tx: Transaction, queue: int, adding: AddingUp, board: ResidentBoard) -> None:
    counting, (_, known_lanes, known_gates) = adding.counting(), board.changed
    counting.add(board.changed_rows().lanes)
    counting.add_gates((gate.limit, gate.key) for gate in board.changed_rows().gates if gate.waiting > 0)
    after = b""
    while found := tx.all("walk_lanes_in_use", queue, after, LANES_AT_ONCE):
        counting.add(
            LaneRow(lane, b"", priority, rows.decode_keys(keys), ready, in_flight, 0, 0, 0, None, 0.0)
            for lane, priority, keys, ready, in_flight in found
            if lane not in known_lanes
        )
        after = found[-1][0]
    after = b""
    while found := tx.all("walk_gates_in_use", queue, after, LANES_AT_ONCE):
        counting.add_gates((limit, rows.decode_key(key)) for gate, limit, key in found if gate not in known_gates)
        after = found[-1][0]
    for scope in adding.new_scopes:
        key = ""
        while known := tx.all("walk_key_figures", queue, scope, key, STRETCH):
            _write(tx, queue, counting.corrected(known))
            key = known[-1][1]
    for changed in counting.unknown:
        _write(tx, queue, changed)


def _find_oldest(tx: Transaction, queue: QueueInForce, adding: AddingUp, pace: Pace) -> None:
    started = monotonic()
    if not adding.tallies or not pace.is_rested(started):
        return
    step, board = queue.policy.priority_step, tail_of(tx, queue)
    lanes = tx.some("select_oldest_lanes", OLDEST_LANES, board.changed[1], queue.id, step)
    changed = [lane for lane in board.changed_rows().lanes if lane.ready > 0]
    ready = [(lane.id, lane.floor, lane.rank + lane.priority * step) for lane in changed]
    oldest = Oldest(sorted([*lanes, *ready], key=lambda lane: lane[2]))
    while asked := oldest.ask():
        floors = msgspec.json.encode([floor for _, floor in asked]).decode()
        heads = tx.all("select_heads_of_lanes", b"".join(lane for lane, _ in asked), floors, 1)
        oldest.hear(ready_at for _, _, ready_at in heads)
    adding.oldest_ready_at = oldest.ready_at
    pace.took(started, monotonic())
