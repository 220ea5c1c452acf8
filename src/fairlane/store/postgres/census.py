"""The census on PostgreSQL: in one snapshot to look, under the locks of a queue and its shared limits to mend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from fairlane.policy.policy import Policy
from fairlane.scheduler.board import rings_for_all
from fairlane.scheduler.journal import Delta
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
from fairlane.store import auditing
from fairlane.store.auditing import RECOUNT, describe_miscounts
from fairlane.store.postgres import rows
from fairlane.store.postgres.connections import STATEMENTS, perform
from fairlane.store.postgres.scheduling import Scheduling
from fairlane.store.protocol import EVERYONE, Counted

ALL = 2**31 - 1


async def count(
    scheduling: Scheduling, policy: Policy, reached: tuple[bytes, bytes], limit: int
) -> tuple[Counted, tuple[bytes, bytes]]:
    """Look at a stretch of a queue's gates; where the next one begins. In a transaction with one snapshot."""
    connection, queue = scheduling.connection, scheduling.queue.id
    own = await connection.fetch(STATEMENTS["walk_gates"], queue, reached[0], limit)
    board = (await scheduling.load(0)).board
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
    board = (await scheduling.load(0)).board
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
        rebuilt = rebuild(policy, now, loaded.opened.state, flows, corrected(lanes, holds), gates, kept)
        await scheduling.replace(rebuilt, now)
    if policy.shared_limits:
        rows_of_limits = await connection.fetch(STATEMENTS["walk_shared_gates"], scheduling.queue.id, b"", ALL)
        wrong = await _shared(scheduling, [scheduling.sharing.gate(row) for row in rows_of_limits])
        mended = [row for _, row in wrong]
        if mended:
            await scheduling.sharing.put(mended, rings_for_all(mended))
        found += [each for each, _ in wrong]
    if found:
        await perform(connection, auditing.record(RECOUNT, now, policy.queue, *describe_miscounts(found)))
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
            holds.append(HeldLane(lane, priority, dict(rows.decode_keys(keys)), number))
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
