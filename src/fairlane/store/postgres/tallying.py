"""Adding up what claims have told, on PostgreSQL: one transaction over a bounded number of tallies."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Literal

from fairlane.clock import Instant
from fairlane.policy.policy import Policy
from fairlane.scheduler.resident import ResidentBoard
from fairlane.scheduler.snapshot import LaneRow
from fairlane.store import key_rows
from fairlane.store.adding_up import OLDEST_LANES, STRETCH, AddingUp, Changed, FiguresRow, Oldest, Pace
from fairlane.store.figures import Tallied
from fairlane.store.key_rows import Kept
from fairlane.store.postgres import rows
from fairlane.store.postgres.connections import CONFLICTS, STATEMENTS
from fairlane.store.postgres.scheduling import QueueHandle, Scheduling

if TYPE_CHECKING:
    from fairlane.store.postgres.connections import Connection

__all__ = ["tally"]

Isolation = Literal["read_committed", "repeatable_read"]

NOTHING = Tallied(0, 0, more=False)
LANES_AT_ONCE = 500
"""Lanes, or gates, that are read together where all are counted: some 10 ms, in which a worker does nothing else."""


async def tally(
    connection: Connection, queue: QueueHandle, now: Instant | None, limit: int, rest: int, pace: Pace
) -> Tallied:
    """Add up to `limit` tallies, unless somebody else is at it, or was within `rest` microseconds."""
    row = await connection.fetchrow(STATEMENTS["look_before_tallying"], queue.id, now, limit + 1)
    assert row is not None
    policy = await Scheduling(connection, queue, now).policy_of(row["digest"])
    is_kept_otherwise = Kept.decode(row["kept"]) != Kept.by(policy)
    has_work = row["claims"] or row["has_old"] or is_kept_otherwise
    if not has_work or (0 <= row["now"] - row["passed_at"] < rest and row["claims"] <= limit):
        return NOTHING
    # Where keys are counted anew, lanes, gates and claims must be of one moment.
    isolation: Isolation = "repeatable_read" if is_kept_otherwise else "read_committed"
    try:
        async with connection.transaction(isolation=isolation):
            await connection.execute(STATEMENTS["guard_tallying"])
            if not await connection.fetchval(STATEMENTS["take_turn_at_tallying"], queue.id):
                return NOTHING
            board = (await Scheduling(connection, queue, now).load(0)).board
            one = _Pass(connection, queue.id, policy, row["now"], board)
            return await one.run(limit, pace, is_anew=is_kept_otherwise)
    except CONFLICTS:
        return Tallied(0, 0, more=True)  # somebody else was done between our first look and our turn


class _Pass:
    """One transaction that adds up."""

    def __init__(self, connection: Connection, queue: int, policy: Policy, now: Instant, board: ResidentBoard) -> None:
        self._board = board
        self._connection = connection
        self._queue = queue
        self._policy = policy
        self._now = now

    async def run(self, limit: int, pace: Pace, *, is_anew: bool) -> Tallied:
        found = await self._connection.fetchrow(STATEMENTS["select_queue_figures"], self._queue)
        adding = AddingUp(self._policy, self._now, FiguresRow() if found is None else FiguresRow(*found), limit)
        if adding.is_kept_otherwise and not is_anew:
            return Tallied(0, 0, more=True)  # the policy has changed since we looked
        more = await self._fold(adding)
        if adding.is_kept_otherwise:
            while more:
                more = await self._fold(adding)
            await self._count_anew(adding)
        refreshed = await self._connection.fetch(
            STATEMENTS["select_key_figures_to_refresh"], self._queue, self._now, STRETCH
        )
        await self._write(adding.refreshed(refreshed))
        await self._connection.execute(STATEMENTS["delete_old_minutes"], self._queue, adding.minutes_from)
        if not more:
            await self._find_oldest(adding, pace)
        row = adding.row()
        await self._connection.execute(
            STATEMENTS["put_queue_figures"],
            self._queue,
            row.tallied,
            row.tallied_at,
            row.kept,
            row.held,
            row.oldest_ready_at,
            self._now,
        )
        return adding.did(more=more or len(refreshed) >= STRETCH)

    async def _fold(self, adding: AddingUp) -> bool:
        """Add some tallies; say whether there are more."""
        connection, queue = self._connection, self._queue
        more = True
        while more and (room := adding.room):
            found = await connection.fetch(STATEMENTS["select_told"], queue, adding.tallied, room)
            more = len(found) == room
            for number, entries in found:
                if not adding.room:
                    more = True
                    break
                adding.read(number, entries)
                if adding.is_out_of_breath:
                    await asyncio.sleep(0)
        if not adding.has_read:
            return False
        for places in adding.places:
            known = await connection.fetch(STATEMENTS["select_key_figures"], queue, *key_rows.place_parameters(places))
            await self._write(adding.changed(places, known))
        known_minutes = await connection.fetch(STATEMENTS["select_minutes_at"], queue, adding.minutes)
        minutes = adding.changed_minutes(text for (text,) in known_minutes)
        await connection.execute(
            STATEMENTS["put_minutes"], queue, [minute for minute, _ in minutes], [figures for _, figures in minutes]
        )
        await connection.execute(STATEMENTS["delete_told"], queue, adding.tallied)
        adding.written()
        return more

    async def _write(self, changed: Changed) -> None:
        if changed.put or changed.gone[0]:
            await self._connection.execute(STATEMENTS["put_key_figures"], self._queue, changed.put, *changed.gone)

    async def _count_anew(self, adding: AddingUp) -> None:
        """Every tally that this transaction sees is in: what lanes say, and what their claims have told, agree."""
        connection, queue = self._connection, self._queue
        await connection.execute(STATEMENTS["forget_scopes"], queue, adding.scopes)
        if adding.new_scopes:
            await self._count(adding)
        adding.count_held_anew()
        scope = key = ""
        while held := await connection.fetch(STATEMENTS["select_held_keys"], queue, scope, key, STRETCH):
            await self._write(adding.still_held(held))
            scope, key = held[-1]["scope"], held[-1]["key"]

    async def _count(self, adding: AddingUp) -> None:
        connection, queue, counting = self._connection, self._queue, adding.counting()
        _, changed_lanes, changed_gates = map(list, self._board.changed)
        counting.add(self._board.changed_rows().lanes)
        counting.add_gates((gate.limit, gate.key) for gate in self._board.changed_rows().gates if gate.waiting > 0)
        lanes = await connection.cursor(STATEMENTS["walk_lanes_in_use"], queue, changed_lanes)
        while found := await lanes.fetch(LANES_AT_ONCE):
            counting.add(_lane(row) for row in found)
        gates = await connection.cursor(STATEMENTS["walk_gates_in_use"], queue, changed_gates)
        while found := await gates.fetch(LANES_AT_ONCE):
            counting.add_gates((limit, rows.decode_key(key)) for limit, key in found)
        for scope in adding.new_scopes:
            key = ""
            while known := await connection.fetch(STATEMENTS["walk_key_figures"], queue, scope, key, STRETCH):
                await self._write(counting.corrected(known))
                key = known[-1]["key"]
        for changed in counting.unknown:
            await self._write(changed)

    async def _find_oldest(self, adding: AddingUp, pace: Pace) -> None:
        clock = asyncio.get_running_loop().time
        started = clock()
        if not adding.tallies or not pace.is_rested(started):
            return
        connection = self._connection
        step, changed = self._policy.priority_step, self._board.changed_rows().lanes
        lanes = await connection.fetch(
            STATEMENTS["select_oldest_lanes"], self._queue, step, OLDEST_LANES, list(self._board.changed[1])
        )
        ready = [(lane.id, lane.floor, lane.rank + lane.priority * step) for lane in changed if lane.ready > 0]
        oldest = Oldest(sorted([*map(tuple, lanes), *ready], key=lambda lane: lane[2]))
        while asked := oldest.ask():
            heads = await connection.fetch(STATEMENTS["select_heads"], [(lane, floor, 1) for lane, floor in asked])
            oldest.hear(head["ready_at"] for head in heads)
        adding.oldest_ready_at = oldest.ready_at
        pace.took(started, clock())


def _lane(row: tuple[int, str, int, int]) -> LaneRow:
    priority, keys, ready, in_flight = row
    return LaneRow(b"", b"", priority, rows.decode_keys(keys), ready, in_flight, 0, 0, 0, None, 0.0)
