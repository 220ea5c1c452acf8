"""What people see of queues, keys and workers on PostgreSQL. Looking takes no lock and writes nothing."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from uuid import UUID

from fairlane.clock import Instant
from fairlane.job import JobRecord
from fairlane.policy.by import By
from fairlane.scheduler.figures import DAY, MINUTE, KeyFigures, Minute
from fairlane.scheduler.snapshot import (
    Arrival,
    Forced,
    GateRow,
    Head,
    LaneRow,
    LaneTally,
    Need,
    SharedGateRow,
    Supply,
)
from fairlane.scheduler.upcoming import upcoming
from fairlane.store import key_rows
from fairlane.store.figures import (
    COUNTED_AT_MOST,
    LANES_AT_MOST,
    Counted,
    KeyPage,
    KeySort,
    LanesCounted,
    QueueFigures,
    WorkerReport,
    WorkerSeen,
    key_scope,
)
from fairlane.store.key_rows import KeyPlace
from fairlane.store.postgres import jobs, rows
from fairlane.store.postgres.connections import STATEMENTS
from fairlane.store.postgres.scheduling import QueueHandle, Scheduling
from fairlane.store.postgres.sharing import Sharing

if TYPE_CHECKING:
    from fairlane.store.postgres.connections import Connection

__all__ = [
    "gates_named",
    "keys_named",
    "lanes_of",
    "list_held",
    "list_keys",
    "minutes",
    "next_jobs",
    "report",
    "scheduled_by_lane",
    "survey",
    "unseen_by_lane",
    "workers",
]


async def survey(connection: Connection, queues: Sequence[str]) -> list[QueueFigures]:
    found = await connection.fetch(STATEMENTS["survey"], queues, COUNTED_AT_MOST)
    dead: dict[str | None, int] = dict(
        map(tuple, await connection.fetch(STATEMENTS["count_newest_dead"], COUNTED_AT_MOST))
    )
    return [
        QueueFigures(
            queue=row["name"],
            ready=row["ready"],
            running=row["running"],
            parked_lanes=row["parked"],
            unseen=row["unseen"],
            bells=min(row["bells"], COUNTED_AT_MOST),
            scheduled=Counted(row["scheduled"], row["scheduled"] < COUNTED_AT_MOST),
            dead=Counted(dead.get(row["name"], 0), dead[None] < COUNTED_AT_MOST),
            held=key_rows.decode_held(row["held"]),
            oldest_ready_at=row["oldest_ready_at"],
            next_due_at=row["next_due_at"],
            tallied_at=row["tallied_at"],
            untallied=row["untallied"],
        )
        for row in found
    ]


async def minutes(connection: Connection, queues: Sequence[str], since: Instant) -> dict[str, list[Minute]]:
    found: dict[str, list[Minute]] = {name: [] for name in queues}
    for name, figures in await connection.fetch(STATEMENTS["select_minutes"], queues, since // MINUTE):
        found[name].append(key_rows.decode_minute(figures))
    return found


async def list_keys(
    connection: Connection,
    queues: Sequence[str],
    by: By,
    sort: KeySort,
    search: str,
    place: KeyPlace | None,
    limit: int,
    *,
    held_only: bool,
) -> KeyPage:
    sought = key_rows.sought(search)
    if sought is None:
        return KeyPage([], None)
    if sought:
        names = await connection.fetch(STATEMENTS["find_keys"], queues, key_scope(by), sought, key_rows.FEW + 1)
        if len(names) <= key_rows.FEW:
            keys = list({key for (key,) in names})
            found = await connection.fetch(STATEMENTS["select_keys_named"], queues, [key_scope(by)] * len(keys), keys)
            return key_rows.page_of(map(_named, found), sort, place, limit, held_only=held_only)
    statement = key_rows.listing(sort, held_only=held_only)
    start = key_rows.start_of(place)
    found = await connection.fetch(STATEMENTS[statement], queues, key_scope(by), sought, held_only, *start, limit + 1)
    listed = [_named(row) for row in found[:limit]]
    after = KeyPlace.of(sort, *listed[-1]).encode() if len(found) > limit else None
    return KeyPage(listed, after)


def _named(row: Sequence[Any]) -> tuple[str, KeyFigures]:
    return row[0], key_rows.key_figures(row[1:])


async def keys_named(
    connection: Connection, queues: Sequence[str], places: Sequence[tuple[By, tuple[str | None, ...]]]
) -> list[tuple[str, KeyFigures]]:
    scopes, keys = key_rows.place_parameters(places)
    found = await connection.fetch(STATEMENTS["select_keys_named"], queues, scopes, keys)
    return [_named(row) for row in found]


async def list_held(connection: Connection, queues: Sequence[str], limit: int) -> list[tuple[str, KeyFigures]]:
    found = await connection.fetch(STATEMENTS["list_held_keys"], queues, limit)
    return [_named(row) for row in found]


async def lanes_of(connection: Connection, flow: bytes, limit: int) -> list[LaneRow]:
    found = await connection.fetch(STATEMENTS["select_all_lanes_of_flow"], flow, limit, LANES_AT_MOST)
    return [_lane(row) for row in found]


async def scheduled_by_lane(connection: Connection, queues: Sequence[str]) -> LanesCounted:
    found = await connection.fetch(STATEMENTS["select_scheduled_by_lane"], queues, COUNTED_AT_MOST)
    lanes = [LaneTally(rows.decode_keys(keys), priority, count) for priority, keys, count in found]
    return LanesCounted(lanes, sum(lane.arrived for lane in lanes) < COUNTED_AT_MOST)


async def unseen_by_lane(connection: Connection, queues: Sequence[str]) -> LanesCounted:
    found = await connection.fetch(STATEMENTS["select_unseen"], queues, LANES_AT_MOST)
    lanes: dict[tuple[int, str], LaneTally] = {}
    for priority, keys, count in found:
        lanes.setdefault((priority, keys), LaneTally(rows.decode_keys(keys), priority)).arrived += count
    return LanesCounted(list(lanes.values()), len(found) < LANES_AT_MOST)


async def gates_named(
    connection: Connection, gates: Sequence[bytes], shared: Sequence[bytes]
) -> tuple[list[GateRow], list[SharedGateRow]]:
    found = await connection.fetch(STATEMENTS["select_gates_named"], gates)
    own = [GateRow(row[0], row[1], rows.decode_key(row[2]), *row[3:]) for row in found]
    return own, await Sharing(connection, 0).select(shared)


async def next_jobs(
    connection: Connection, handle: QueueHandle, now: Instant | None, keys: Mapping[str, str | None], limit: int
) -> list[JobRecord]:
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        row = await connection.fetchrow(STATEMENTS["peek_queue"], handle.id, now)
        assert row is not None
        scheduling = Scheduling(connection, handle, now)
        policy = await scheduling.policy_of(row["digest"])
        flow = policy.flow_of(int(keys.get("priority") or 0), keys)
        arrived = await connection.fetch(STATEMENTS["peek_arrivals"], handle.id, row["arrivals_from"], LANES_AT_MOST)
        arrivals = [
            Arrival(lane, priority, rows.decode_keys(its), count, floor, since, None, resumed)
            for lane, priority, its, count, floor, since, _, resumed, _ in arrived
            if policy.flow_of(priority, rows.decode_keys(its)) == flow
        ]
        forced = [
            Forced(lane, Head(*head))
            for lane, *head in await connection.fetch(STATEMENTS["select_forced"], handle.id, limit)
        ]
        named = {bell.lane for bell in arrivals} | {each.lane for each in forced}
        known = await scheduling.ask(Need(flows=(flow,)), sorted(named))
        lanes = [lane for lane in known.lanes if lane.flow == flow]
        found = next((each for each in known.flows if each.id == flow), None)
        its_own = {lane.id for lane in lanes} | {bell.lane for bell in arrivals}
        forced = [each for each in forced if each.lane in its_own]
        heads = await _answered(connection, upcoming(policy, row["now"], found, lanes, arrivals, forced, limit))
        records = await connection.fetch(STATEMENTS["select_jobs_at"], [head.ref for head in heads])
    return [jobs.record_of(record) for record in records]


async def _answered(connection: Connection, asking: Generator[Need, Supply, list[Head]]) -> list[Head]:
    try:
        need = next(asking)
        while True:
            lanes = [
                _lane(row)
                for flow, count in need.lanes
                for row in await connection.fetch(STATEMENTS["select_lanes_of_flow"], flow, count)
            ]
            heads: dict[bytes, list[Head]] = {lane: [] for lane, _, _ in need.heads}
            for nth, *head in await connection.fetch(STATEMENTS["select_heads"], need.heads) if need.heads else ():
                heads[need.heads[nth - 1][0]].append(Head(*head))
            need = asking.send(Supply(lanes=lanes, heads=heads))
    except StopIteration as stop:
        found: list[Head] = stop.value
        return found


def _lane(row: Sequence[Any]) -> LaneRow:
    lane, flow, priority, keys, *rest = row
    return LaneRow(lane, flow, priority, rows.decode_keys(keys), *rest)


async def report(connection: Connection, worker: UUID, said: WorkerReport | None, now: Instant | None) -> None:
    if said is None:
        await connection.execute(STATEMENTS["delete_worker"], worker)
    else:
        await connection.execute(STATEMENTS["put_worker"], now, worker, rows.storable(key_rows.encode(said)), DAY)


async def workers(connection: Connection, now: Instant | None) -> list[WorkerSeen]:
    found = await connection.fetch(STATEMENTS["select_workers"], now, DAY)
    return [key_rows.worker_seen(worker, seen_at, text) for worker, seen_at, text in found]
