"""Removing what is past its time on PostgreSQL, a bounded number at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from fairlane.clock import Instant
from fairlane.policy.gates import VALUES_LAST
from fairlane.policy.policy import Policy
from fairlane.scheduler.board import rings_for_all
from fairlane.scheduler.journal import Delta, Removed
from fairlane.scheduler.rebuild import (
    HeldLane,
    Miscount,
    SharedHold,
    corrected,
    expected_gates,
    miscounted,
    rebuild,
    recounted,
)
from fairlane.scheduler.resident import ResidentBoard
from fairlane.scheduler.snapshot import GateRow, SharedGateRow
from fairlane.store import audit
from fairlane.store.audit import RECOUNT, describe_miscounts
from fairlane.store.boards import QueueTime
from fairlane.store.postgres.claim_lock import Scheduling
from fairlane.store.postgres.connections import STATEMENTS, Connection
from fairlane.store.postgres.procedures import perform
from fairlane.store.protocol import CLOCKS_DIFFER_BY, EVERYONE, Counted, Pruned, Retention
from fairlane.store.rows import decode_keys

EVER = 2**63 - 1
"""A time that every job ended before."""


class Walk:
    """How far collection has come in the lanes, flows, gates and shared gates of each queue; then it starts over."""

    def __init__(self) -> None:
        self.reached: dict[int, tuple[bytes, bytes, bytes, bytes]] = {}


async def prune(connection: Connection, retention: Retention, time: QueueTime, limit: int) -> Pruned:
    """Remove finished jobs past their time, then those beyond the number to keep, with their history.

    Where somebody else is at it, there is nothing to do.
    """
    await connection.execute(STATEMENTS["guard_pruning"])
    if not await connection.fetchval(STATEMENTS["take_turn_at_pruning"]):
        return Pruned(0)
    removed, more = 0, False
    for is_dead, kept in ((False, retention.done), (True, retention.dead)):
        left = limit - removed
        if left <= 0:
            return Pruned(removed, more=True)
        filed, gone = await _prune(connection, is_dead, time.now - kept, left)
        removed += gone
        more = more or filed >= left
        left = limit - removed
        if retention.keep is not None and left > 0:
            beyond: int = await connection.fetchval(STATEMENTS["count_beyond"], is_dead, retention.keep, left)
            if beyond:
                removed += (await _prune(connection, is_dead, EVER, beyond))[1]
            more = more or beyond >= left
    await connection.execute(STATEMENTS["prune_uniques"], time.now, limit)
    await connection.execute(STATEMENTS["prune_ended_sessions"], time.wall - CLOCKS_DIFFER_BY)
    return Pruned(removed, more=more)


async def _prune(connection: Connection, is_dead: bool, until: Instant, limit: int) -> tuple[int, int]:
    """How many jobs were named by what was taken off the files, and how many of them were removed."""
    row = await connection.fetchrow(STATEMENTS["prune"], is_dead, until, limit)
    assert row is not None
    await connection.execute(STATEMENTS["forget_jobs"], row["jobs"])
    return row["filed"], len(row["jobs"])


async def collect(scheduling: Scheduling, walk: Walk, now: Instant | None, limit: int) -> Pruned:
    """Walk a stretch of the lanes, the flows and the gates, and remove what is idle."""
    connection, queue = scheduling.connection, scheduling.queue.id
    *own, shared_from = walk.reached.get(queue, (b"", b"", b"", b""))
    loaded = await scheduling.load()
    await scheduling.checkpoint(loaded)
    row = await connection.fetchrow(STATEMENTS["collect_idle"], queue, *own, limit, now, VALUES_LAST)
    assert row is not None
    removed = Removed(row["flows"], row["lanes"], row["gates"])
    if removed.flows or removed.lanes or removed.gates:
        await scheduling.note_removed(loaded, removed, row["ready"], row["running"])
    await connection.execute(STATEMENTS["lock_shared_limits"], queue, [])
    shared = await connection.fetchrow(STATEMENTS["collect_shared_gates"], queue, shared_from, limit, now)
    assert shared is not None
    reached = (*row["reached"], shared["reached"] if shared["seen"] >= limit else b"")
    walk.reached[queue] = reached
    return Pruned(
        0,
        lanes=len(removed.lanes),
        flows=len(removed.flows),
        gates=len(removed.gates) + shared["removed"],
        more=any(reached),
    )


ALL = 2**31 - 1


async def count(
    scheduling: Scheduling, policy: Policy, reached: tuple[bytes, bytes], limit: int
) -> tuple[Counted, tuple[bytes, bytes]]:
    """Look at a stretch of a queue's gates; where the next one begins. In a transaction with one snapshot."""
    connection, queue = scheduling.connection, scheduling.queue.id
    own = await connection.fetch(STATEMENTS["walk_gates"], queue, reached[0], limit)
    board = (await scheduling.load()).board
    gates = board.over(Delta(gates=[_gate(row) for row in own])).gates
    found = await _own(scheduling, board, policy, gates)
    shared: list[Any] = []
    if policy.shared_limits:
        shared = await connection.fetch(STATEMENTS["walk_shared_gates"], queue, reached[1], limit)
        found += [each for each, _ in await _shared(scheduling, [scheduling.sharing.gate(row) for row in shared])]
    ends = [stretch[-1]["id"] if len(stretch) == limit else b"" for stretch in (own, shared)]
    return Counted(found, more=any(ends)), (ends[0], ends[1])


async def at_gates(scheduling: Scheduling, policy: Policy, gates: Sequence[bytes], most: int) -> list[Miscount]:
    """The same for these gates, a queue's own and shared ones; nothing, where more jobs run than may be looked at."""
    if not gates or await scheduling.connection.fetchval(STATEMENTS["count_held"]) > most:
        return []
    board = (await scheduling.load()).board
    own = (await scheduling.answer(board.find(gates=gates))).gates
    shared = await scheduling.sharing.select(gates) if policy.shared_limits else []
    found = await _own(scheduling, board, policy, own) if own else []
    return found + [each for each, _ in await _shared(scheduling, shared)]


async def recount(scheduling: Scheduling) -> list[Miscount]:
    """Under the claim lock: count every gate of a queue again from the jobs that run, and say which were wrong."""
    loaded = await scheduling.fold_all()
    policy, now, connection, board = loaded.policy, loaded.now, scheduling.connection, loaded.board
    stored = await connection.fetch(STATEMENTS["walk_gates"], scheduling.queue.id, b"", ALL)
    gates = board.over(Delta(gates=[_gate(row) for row in stored])).gates
    found = await _own(scheduling, board, policy, gates)
    if found:
        holds = await _holds(scheduling, board)
        await scheduling.to_tables(loaded)
        flows, lanes, gates = await scheduling.select_all()
        kept = await scheduling.kept_places(policy)
        rebuilt = rebuild(policy, now, loaded.state, flows, corrected(lanes, holds), gates, kept)
        await scheduling.replace(rebuilt, now)
    if policy.shared_limits:
        rows_of_limits = await connection.fetch(STATEMENTS["walk_shared_gates"], scheduling.queue.id, b"", ALL)
        wrong = await _shared(scheduling, [scheduling.sharing.gate(row) for row in rows_of_limits])
        mended = [row for _, row in wrong]
        if mended:
            await scheduling.sharing.put(mended, rings_for_all(mended))
        found += [each for each, _ in wrong]
    if found:
        await perform(connection, audit.record(RECOUNT, now, policy.queue, *describe_miscounts(found)))
        await connection.execute(STATEMENTS["nudge"], scheduling.queue.id, EVERYONE, None)
        await connection.execute(STATEMENTS["nudge_sharers"], scheduling.queue.id, EVERYONE)
    return found


async def _own(scheduling: Scheduling, board: ResidentBoard, policy: Policy, gates: list[GateRow]) -> list[Miscount]:
    expected = expected_gates(policy, await _holds(scheduling, board), await scheduling.kept_places(policy))
    known = {row.id for row in gates}
    others = await scheduling.answer(board.find(gates=[gate for gate in expected if gate not in known]))
    return miscounted(policy, expected, [*gates, *others.gates])


async def _holds(scheduling: Scheduling, board: ResidentBoard) -> list[HeldLane]:
    found = await scheduling.connection.fetch(STATEMENTS["select_holds"], scheduling.queue.id)
    ended = [lane for lane, _, keys, _ in found if keys is None]
    lanes = {row.id: row for row in (await scheduling.answer(board.find(lanes=ended))).lanes}
    holds = []
    for lane, priority, keys, number in found:
        if keys is not None:
            holds.append(HeldLane(lane, priority, dict(decode_keys(keys)), number))
        elif (row := lanes.get(lane)) is not None:
            holds.append(HeldLane(lane, row.priority, row.keys, number))
    return holds


async def _shared(scheduling: Scheduling, gates: list[SharedGateRow]) -> list[tuple[Miscount, SharedGateRow]]:
    if not gates:
        return []
    found = await scheduling.connection.fetch(STATEMENTS["select_shared_holds"], scheduling.queue.id)
    return recounted(scheduling.queue.name, gates, [SharedHold(*row) for row in found])


def _gate(row: Any) -> GateRow:
    id_, limit, key, *rest = row
    return GateRow(id_, limit, msgspec.json.decode(key, type=list[str | None]), *rest)
