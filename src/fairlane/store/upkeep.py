"""Upkeep of the tables: removing what is past its time, and holding gates against the jobs that run."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from fairlane.clock import SECOND, Instant
from fairlane.policy.gates import VALUES_LAST
from fairlane.policy.policy import Policy
from fairlane.scheduler.board import wakeups_for_all
from fairlane.scheduler.journal import Delta, Removed
from fairlane.scheduler.rebuild import (
    Miscount,
    WaitingLane,
    corrected,
    expected_gates,
    miscounted,
    rebuild,
    recounted,
)
from fairlane.scheduler.resident import ResidentBoard
from fairlane.scheduler.snapshot import GateRow, SharedGateRow
from fairlane.store.audit import RECOUNT, describe_miscounts, record
from fairlane.store.procedures import (
    EVERYONE,
    MEMORY,
    NOW,
    TIME,
    Procedure,
    Terms,
    answered,
    locked,
    locked_sweep,
    on_board,
    query,
    run_by,
    snapshot,
    value,
)
from fairlane.store.rows import decode_keys, gate_row

CLOCKS_DIFFER_BY = 3_600 * SECOND
"""An ended session is remembered for so much longer than it would have lasted: sessions expire by other clocks."""
EVER = 2**63 - 1
"""A time that every job ended before."""
ALL = 2**31 - 1


class Retention(msgspec.Struct, frozen=True):
    """How long finished jobs stay, in microseconds, and how many of them."""

    done: int = 24 * 3_600 * 1_000_000
    """Done and cancelled jobs, with results and history."""
    dead: int = 7 * 24 * 3_600 * 1_000_000
    keep: int | None = None
    """At most so many done and cancelled jobs, and at most so many dead ones; the oldest go first. Counted apart: no
    flood of good jobs washes a dead letter away."""


class Pruned(msgspec.Struct, frozen=True):
    """What upkeep removed."""

    jobs: int
    lanes: int = 0
    flows: int = 0
    gates: int = 0
    more: bool = False


class Counted(msgspec.Struct, frozen=True):
    """Gates held against the jobs that run."""

    found: list[Miscount]
    """Those that are wrong."""
    more: bool
    """There are gates that have not been looked at: the next call goes on from there."""


@run_by(Terms(writes=True, is_together=True, is_durable=False, is_repeated=False))
def prune(retention: Retention, limit: int = 1_000) -> Procedure[Pruned]:
    """Remove finished jobs past their time, or beyond the number to keep, with their history: at most `limit` jobs,
    however they were settled. Where somebody else is at it, there is nothing to do. Whatever a crash loses of it is
    only done again."""
    time = yield TIME
    if not (yield from value("take_turn_at_pruning")):
        return Pruned(0)
    removed, more = 0, False
    for is_dead, kept in ((False, retention.done), (True, retention.dead)):
        left = limit - removed
        if left <= 0:
            return Pruned(removed, more=True)
        filed, gone = yield from _prune(is_dead, time.now - kept, left)
        removed += gone
        more = more or filed >= left
        left = limit - removed
        if retention.keep is not None and left > 0:
            beyond: int = yield from value("count_beyond", is_dead, retention.keep, left)
            if beyond:
                removed += (yield from _prune(is_dead, EVER, beyond))[1]
            more = more or beyond >= left
    yield query("prune_uniques", time.now, limit)
    yield query("prune_ended_sessions", time.wall - CLOCKS_DIFFER_BY)
    return Pruned(removed, more=more)


def _prune(is_dead: bool, until: Instant, limit: int) -> Procedure[tuple[int, int]]:
    """How many jobs were named by what was taken off the files, and how many of them were removed."""
    ((jobs, filed),) = yield query("prune", is_dead, until, limit)
    yield query("forget_jobs", jobs)
    return filed, len(jobs)


@locked_sweep
def collect(queue: str, limit: int = 1_000) -> Procedure[Pruned]:
    """Remove idle lanes, flows and gates: nothing in flight or waiting, tokens full, the tag behind the cursor. Each
    call walks a stretch of each table, and the next one goes on from there."""
    reached = (yield MEMORY).setdefault("collect", {})
    *own, shared_from = reached.get(queue, [b""] * 4)
    loaded = yield on_board(queue, "load")
    yield on_board(queue, "checkpoint", loaded)
    number, now = (yield on_board(queue, "number")), (yield NOW)
    found = yield query("collect_idle", number, *own, limit, now, VALUES_LAST)
    ((flows, lanes, gates, ends, ready, running),) = found
    if flows or lanes or gates:
        yield on_board(queue, "note_removed", loaded, Removed(flows, lanes, gates), ready, running)
    ((end, seen, shared),) = yield query("collect_shared_gates", number, shared_from, limit, now)
    reached[queue] = [*ends, end if seen >= limit else b""]
    more = any(reached[queue])
    return Pruned(0, lanes=len(lanes), flows=len(flows), gates=len(gates) + shared, more=more)


@locked_sweep
def fold(queue: str) -> Procedure[None]:
    """Fold what has happened in a queue, and write its tables."""
    yield on_board(queue, "checkpoint", (yield on_board(queue, "fold_all")))


# What gates count.


@snapshot
def count_gates(queue: str, limit: int = 1_000) -> Procedure[Counted]:
    """Hold the next gates of a queue, its own and those it shares, against the jobs that run. Looking changes nothing,
    takes no lock, and is right whatever goes on meanwhile: it counts in one snapshot."""
    reached = (yield MEMORY).setdefault("count_gates", {})
    after, shared_after = reached.get(queue, (b"", b""))
    loaded = yield on_board(queue, "load")
    stored = yield query("walk_gates", (yield on_board(queue, "number")), after, limit)
    own = loaded.board.over(Delta(gates=[gate_row(*row) for row in stored])).gates
    found = yield from _miscounts(queue, loaded.board, loaded.policy, own)
    shared = yield from _shared_gates(queue, loaded.policy, shared_after, limit)
    found += [each for each, _ in (yield from _shared_miscounts(queue, shared))]
    ends = (
        stored[-1][0] if len(stored) == limit else b"",
        shared[-1].id if len(shared) == limit else b"",
    )
    reached[queue] = ends
    return Counted(found, more=any(ends))


def miscounts_at(queue: str, policy: Policy, gates: Sequence[bytes], most: int) -> Procedure[list[Miscount]]:
    """The same for these gates, a queue's own and shared ones; nothing, where more jobs run than may be looked at."""
    if not gates or (yield from value("count_held")) > most:
        return []
    board = (yield on_board(queue, "load")).board
    own = (yield from answered(queue, board.find(gates=gates))).gates
    found = (yield from _miscounts(queue, board, policy, own, only=gates)) if own else []
    shared = (yield on_board(queue, "sharing.select", gates)) if policy.shared_limits else []
    return found + [each for each, _ in (yield from _shared_miscounts(queue, shared))]


@locked
def recount(queue: str) -> Procedure[list[Miscount]]:
    """Count every gate of a queue again from the jobs that run, and wake whoever may start now. Returns those that were
    wrong; where there are any, it is recorded."""
    loaded = yield on_board(queue, "fold_all")
    policy, now, number = loaded.policy, loaded.now, (yield on_board(queue, "number"))
    stored = yield query("walk_gates", number, b"", ALL)
    gates = loaded.board.over(Delta(gates=[gate_row(*row) for row in stored])).gates
    found = yield from _miscounts(queue, loaded.board, policy, gates)
    if found:
        holds = yield from _holds(queue, loaded.board)
        yield on_board(queue, "to_tables", loaded)
        flows, lanes, gates = yield on_board(queue, "select_all")
        kept = yield on_board(queue, "kept_places", policy)
        rebuilt = rebuild(policy, now, loaded.state, flows, corrected(lanes, holds), gates, kept)
        yield on_board(queue, "replace", rebuilt, now)
    wrong = yield from _shared_miscounts(queue, (yield from _shared_gates(queue, policy, b"", ALL)))
    if mended := [row for _, row in wrong]:
        yield on_board(queue, "sharing.put", mended, wakeups_for_all(mended))
    found += [each for each, _ in wrong]
    if found:
        yield from record(RECOUNT, now, queue, *describe_miscounts(found))
        yield query("nudge", number, EVERYONE, None)
        yield query("nudge_sharers", number, EVERYONE)
    return found


def _miscounts(
    queue: str, board: ResidentBoard, policy: Policy, gates: list[GateRow], *, only: Collection[bytes] | None = None
) -> Procedure[list[Miscount]]:
    """Which of these gates, or of others that a running job holds, count wrong; of no others than `only`."""
    holds, kept = (yield from _holds(queue, board)), (yield on_board(queue, "kept_places", policy))
    expected = expected_gates(policy, holds, kept)
    if only is not None:
        expected = [row for row in expected if row.id in only]
    others = yield from answered(
        queue, board.find(gates=sorted({row.id for row in expected} - {row.id for row in gates}))
    )
    return miscounted(policy, expected, [*gates, *others.gates])


def _holds(queue: str, board: ResidentBoard) -> Procedure[list[WaitingLane]]:
    """What runs, and what has ended and is not folded, by lane."""
    found = yield query("select_holds", (yield on_board(queue, "number")))
    ended = [lane for lane, _, keys, _ in found if keys is None]
    lanes = {row.id: row for row in (yield from answered(queue, board.find(lanes=ended))).lanes}
    holds = []
    for lane, priority, keys, number in found:
        if keys is not None:
            holds.append(WaitingLane(lane, priority, decode_keys(keys), in_flight=number))
        elif (row := lanes.get(lane)) is not None:
            holds.append(WaitingLane(lane, row.priority, row.keys, in_flight=number))
    return holds


def _shared_gates(queue: str, policy: Policy, after: bytes, limit: int) -> Procedure[list[SharedGateRow]]:
    """A stretch of the gates of the limits that a queue shares."""
    found: list[SharedGateRow] = (yield on_board(queue, "sharing.walk", after, limit)) if policy.shared_limits else []
    return found


def _shared_miscounts(queue: str, gates: list[SharedGateRow]) -> Procedure[list[tuple[Miscount, SharedGateRow]]]:
    found = (yield query("select_shared_holds", (yield on_board(queue, "number")))) if gates else ()
    return recounted(queue, gates, found)
