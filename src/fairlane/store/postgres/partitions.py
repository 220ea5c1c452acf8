"""Partitions on PostgreSQL: moving jobs to where they belong, under the claim lock of the queue that they leave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from fairlane.policy.policy import Policy
from fairlane.scheduler.misrouted import StrayLane, WaitingLane, gates_of_strays, stray_lanes, weights_of_strays
from fairlane.scheduler.snapshot import FlowRow, GateRow
from fairlane.store.postgres import rows
from fairlane.store.postgres.connections import STATEMENTS, Connection
from fairlane.store.postgres.scheduling import Scheduling
from fairlane.store.protocol import Rehomed

Number = Callable[[str], Awaitable[int]]
"""The number of a queue by its name."""


async def rehome(scheduling: Scheduling, number: Number, limit: int) -> Rehomed:
    """Move up to `limit` ready and as many scheduled jobs that belong elsewhere."""
    policy, _ = await scheduling.in_force()
    if policy.partition is None or not policy.partition.is_guarded:
        return Rehomed(0, 0, 0)
    await scheduling.checkpoint(await scheduling.fold_all())
    connection, queue = scheduling.connection, scheduling.queue.id
    strays, later = (stray_lanes(policy, lanes) for lanes in await select_lanes(connection, queue))
    moved = Counter(await _move_ready(connection, number, strays, limit))
    moved.update(await _move_scheduled(connection, queue, number, later, limit))
    for to, count in moved.items():
        await connection.execute(STATEMENTS["nudge"], to, count, None)
    waiting = sum(stray.was.ready for stray in (*strays, *later)) - moved.total()
    return Rehomed(moved.total(), max(0, waiting), sum(stray.was.in_flight for stray in strays))


async def _move_ready(connection: Connection, number: Number, strays: list[StrayLane], limit: int) -> dict[int, int]:
    chosen: list[tuple[StrayLane, int]] = []
    for stray in strays:
        if limit > 0 and stray.was.ready > 0:
            chosen.append((stray, min(stray.was.ready, limit)))
            limit -= stray.was.ready
    if not chosen:
        return {}
    found = await connection.fetch(
        STATEMENTS["move_ready_jobs"],
        [stray.was.id for stray, _ in chosen],
        [stray.was.floor for stray, _ in chosen],
        [most for _, most in chosen],
        [await number(stray.queue) for stray, _ in chosen],
        [stray.lane for stray, _ in chosen],
    )
    return dict(map(tuple, found))


async def _move_scheduled(
    connection: Connection, queue: int, number: Number, strays: list[StrayLane], limit: int
) -> dict[int, int]:
    if not strays:
        return {}
    found = await connection.fetch(
        STATEMENTS["move_scheduled_jobs"],
        queue,
        [stray.was.id for stray in strays],
        [await number(stray.queue) for stray in strays],
        [stray.lane for stray in strays],
        limit,
    )
    return dict(map(tuple, found))


async def select_lanes(connection: Connection, queue: int) -> tuple[list[WaitingLane], list[WaitingLane]]:
    """Lanes of jobs that are ready or run, as far as bells have been folded; and those of scheduled jobs."""
    used = await connection.fetch(STATEMENTS["select_lanes_in_use"], queue)
    later = await connection.fetch(STATEMENTS["select_scheduled_lanes"], queue)
    return _lanes(used), _lanes(later)


def _lanes(found: Sequence[Any]) -> list[WaitingLane]:
    return [WaitingLane(row[0], row[1], rows.decode_keys(row[2]), *row[3:]) for row in found]


async def select_gates_of_strays(
    connection: Connection, queue: int, policy: Policy, was: int
) -> list[tuple[str, GateRow]]:
    found = await connection.fetch(STATEMENTS["select_gates_of_queue"], queue)
    gates = [GateRow(row[0], row[1], msgspec.json.decode(row[2], type=list[str | None]), *row[3:]) for row in found]
    weighed = await connection.fetch(STATEMENTS["select_weights_of_queue"], queue)
    flows = [
        FlowRow(flow, rows.decode_key(key), weight, 0.0, 0, 0.0, 0.0, 0, 0, 0, None, given_by)
        for flow, key, weight, given_by in weighed
    ]
    return gates_of_strays(policy, was, gates) + weights_of_strays(policy, was, flows)
