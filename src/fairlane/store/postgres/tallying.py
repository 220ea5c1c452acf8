"""Adding up what claims have told, on PostgreSQL: one transaction over a bounded number of tallies."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Literal

from fairlane.clock import Instant
from fairlane.policy.policy import Policy
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
LANES_AT_ONCE = 2_000
"""Lanes that are read together, where all are counted."""


async def tally(
    connection: Connection, queue: QueueHandle, now: Instant | None, limit: int, rest: int, pace: Pace
) -> Tallied:
    """Add up to `limit` tallies, unless somebody else is at it, or was within `rest` microseconds."""
    row = await connection.fetchrow(STATEMENTS["look_before_tallying"], queue.id, now, limit)
    assert row is not None
    policy = await Scheduling(connection, queue, now).policy_of(row["digest"])
    is_kept_otherwise = Kept.decode(row["kept"]) != Kept.by(policy)
    has_work = row["has_tallies"] or row["has_old"] or is_kept_otherwise
    if not has_work or (0 <= row["now"] - row["passed_at"] < rest and not row["is_behind"]):
        return NOTHING
    # Where keys are counted anew, lanes and tallies must be of one moment.
    isolation: Isolation = "repeatable_read" if is_kept_otherwise else "read_committed"
    try:
        async with connection.transaction(isolation=isolation):
            await connection.execute(STATEMENTS["guard_tallying"])
            if not await connection.fetchval(STATEMENTS["take_turn_at_tallying"], queue.id):
                return NOTHING
            return await _Pass(connection, queue.id, policy, row["now"]).run(limit, pace, anew=is_kept_otherwise)
    except CONFLICTS:
        return Tallied(0, 0, more=True)  # somebody else was done between our first look and our turn


class _Pass:
    """One transaction that adds up."""

    def __init__(self, connection: Connection, queue: int, policy: Policy, now: Instant) -> None:
        self._connection = connection
        self._queue = queue
        self._policy = policy
        self._now = now

    async def run(self, limit: int, pace: Pace, *, anew: bool) -> Tallied:
        found = await self._connection.fetchrow(STATEMENTS["select_queue_figures"], self._queue)
        adding = AddingUp(self._policy, self._now, FiguresRow() if found is None else FiguresRow(*found), limit)
        if adding.is_kept_otherwise and not anew:
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
        connection, queue, before = self._connection, self._queue, adding.tallied
        more = True
        while more and (room := adding.room):
            found = await connection.fetch(STATEMENTS["select_tallies"], queue, adding.tallied, room)
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
        await connection.execute(STATEMENTS["delete_tallies"], queue, before, adding.tallied)
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
            counting = adding.counting()
            walk = await connection.cursor(STATEMENTS["walk_lanes_in_use"], queue)
            while found := await walk.fetch(LANES_AT_ONCE):
                counting.add(_lane(row) for row in found)
            await connection.execute(STATEMENTS["forget_counts"], queue, adding.new_scopes)
            for counted in counting.rows:
                await connection.execute(STATEMENTS["put_counts"], queue, *map(list, zip(*counted, strict=True)))
        adding.count_held_anew()
        scope = key = ""
        while held := await connection.fetch(STATEMENTS["select_held_keys"], queue, scope, key, STRETCH):
            await self._write(adding.still_held(held))
            scope, key = held[-1]["scope"], held[-1]["key"]

    async def _find_oldest(self, adding: AddingUp, pace: Pace) -> None:
        clock = asyncio.get_running_loop().time
        started = clock()
        if not adding.tallies or not pace.is_rested(started):
            return
        connection = self._connection
        lanes = await connection.fetch(
            STATEMENTS["select_oldest_lanes"], self._queue, self._policy.priority_step, OLDEST_LANES
        )
        oldest = Oldest(lanes)
        while asked := oldest.ask():
            heads = await connection.fetch(STATEMENTS["select_heads"], [(lane, floor, 1) for lane, floor in asked])
            oldest.hear(head["ready_at"] for head in heads)
        adding.oldest_ready_at = oldest.ready_at
        pace.took(started, clock())


def _lane(row: tuple[int, str, int, int]) -> LaneRow:
    priority, keys, ready, in_flight = row
    return LaneRow(b"", b"", priority, rows.decode_keys(keys), ready, in_flight, 0, 0, 0, None, 0.0)
