"""What people see of queues, keys and workers on PostgreSQL. Looking takes no lock and writes nothing."""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from uuid import UUID

from fairlane.clock import Instant
from fairlane.job import JobRecord
from fairlane.policy.by import By
from fairlane.scheduler.figures import DAY, MINUTE, KeyFigures, Minute, Pending, Recent, changes_of_held
from fairlane.scheduler.journal import Tail
from fairlane.scheduler.resident import Ask, Found, ResidentBoard
from fairlane.scheduler.snapshot import GateRow, Head, LaneRow, LaneTally, SharedGateRow
from fairlane.scheduler.tally import decode_tally
from fairlane.scheduler.upcoming import upcoming
from fairlane.store import key_rows
from fairlane.store.figures import (
    COUNTED_AT_MOST,
    LANES_AT_MOST,
    Counted,
    FlowWeight,
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
from fairlane.store.postgres.policies import all_in_force
from fairlane.store.postgres.scheduling import QueueHandle, Scheduling
from fairlane.store.postgres.sharing import Sharing

if TYPE_CHECKING:
    from fairlane.store.postgres.connections import Connection

__all__ = [
    "gates_named",
    "keys_named",
    "lanes_in",
    "lanes_of",
    "list_held",
    "list_keys",
    "minutes",
    "next_jobs",
    "report",
    "scheduled_by_lane",
    "survey",
    "weights_named",
    "workers",
]


async def survey(connection: Connection, handles: Sequence[QueueHandle], now: Instant | None) -> list[QueueFigures]:
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        found = await connection.fetch(STATEMENTS["survey"], [each.name for each in handles], COUNTED_AT_MOST)
        dead: dict[str | None, int] = dict(
            map(tuple, await connection.fetch(STATEMENTS["count_newest_dead"], COUNTED_AT_MOST))
        )
        # Where very many have come that no claim has seen, by which keys they are held is not asked.
        many = {row["name"] for row in found if row["bells"] > COUNTED_AT_MOST}
        recents = await recents_of(connection, handles, now, but_not=many)
        before = await _stored_of(connection, recents, handles)
    surveyed = []
    for row in found:
        recent, known = recents[row["name"]], before[row["name"]]
        held = key_rows.add_held(key_rows.decode_held(row["held"]), changes_of_held(known, recent.over(known)))
        ready = max(0, row["ready"] + row["unseen"])
        oldest = [each for each in (row["oldest_ready_at"], row["oldest"]) if each is not None and ready]
        surveyed.append(
            QueueFigures(
                queue=row["name"],
                ready=ready,
                running=max(0, row["running"] - row["ended"]),
                parked_lanes=row["parked"],
                unseen=max(0, row["unseen"]),
                bells=row["bells"],
                scheduled=Counted(row["scheduled"], row["scheduled"] < COUNTED_AT_MOST),
                dead=Counted(dead.get(row["name"], 0), dead[None] < COUNTED_AT_MOST),
                held=held,
                oldest_ready_at=min(oldest, default=None),
                next_due_at=row["next_due_at"],
                counted_at=row["counted_at"],
                uncounted=recent.claims,
            )
        )
    return surveyed


async def recents_of(
    connection: Connection, handles: Sequence[QueueHandle], now: Instant | None, but_not: Collection[str] = ()
) -> dict[str, Recent]:
    """What is not in the stored stats of queues; of some of them, without what no claim has seen."""
    ids, names = [each.id for each in handles], {each.id: each.name for each in handles}
    in_force = await all_in_force(connection)
    time = await connection.fetchrow(STATEMENTS["select_time"], now)
    assert time is not None
    told: dict[str, list[bytes]] = {name: [] for name in names.values()}
    for queue, entries in await connection.fetch(STATEMENTS["select_told_of"], ids):
        told[names[queue]].append(entries)
    looked = [each.id for each in handles if each.name not in but_not]
    arrived = await connection.fetch(STATEMENTS["select_pending_arrivals"], looked)
    ended = await connection.fetch(STATEMENTS["select_pending_releases"], looked)
    tails = await _tails(connection, [queue for queue, *_, keys in ended if keys is None])
    pending = {name: Pending([], []) for name in names.values()}
    for queue, priority, keys, count, _ in arrived:
        pending[names[queue]].arrivals.append(LaneTally(rows.decode_keys(keys), priority, count))
    for queue, lane, *counts, priority, keys in ended:
        found = tails[queue].lanes.get(lane) if keys is None else None
        if keys is not None or found is not None:
            of = (rows.decode_keys(keys), priority) if found is None else (found.keys, found.priority)
            pending[names[queue]].releases.append(key_rows.release_tally(*of, *counts))
    return {
        name: Recent(in_force[name].policy, map(decode_tally, told[name]), pending[name], time["now"])
        for name in names.values()
    }


async def _tails(connection: Connection, queues: Sequence[int]) -> dict[int, Tail]:
    """What the tables of these queues may not hold."""
    deltas: dict[int, list[bytes]] = {queue: [] for queue in queues}
    for queue, delta in await connection.fetch(STATEMENTS["select_tails"], list(deltas)) if deltas else ():
        deltas[queue].append(delta)
    return {queue: Tail(each) for queue, each in deltas.items()}


async def _stored_of(
    connection: Connection, recents: Mapping[str, Recent], handles: Sequence[QueueHandle], by: By | None = None
) -> dict[str, list[KeyFigures]]:
    """What is stored of the keys that they concern, by queue; of one scope, if one is given."""
    wanted = [
        (handle.id, place)
        for handle in handles
        for place in recents[handle.name].places
        if by is None or place[0] == by
    ]
    stored: dict[str, list[KeyFigures]] = {handle.name: [] for handle in handles}
    names = {handle.id: handle.name for handle in handles}
    if wanted:
        scopes, keys = key_rows.place_parameters(place for _, place in wanted)
        found = await connection.fetch(STATEMENTS["select_keys_of"], [queue for queue, _ in wanted], scopes, keys)
        for queue, *row in found:
            stored[names[queue]].append(key_rows.key_figures(row))
    return stored


async def _changed(
    connection: Connection, handles: Sequence[QueueHandle], now: Instant | None, by: By | None = None
) -> list[tuple[str, KeyFigures]]:
    """Keys of which the stored stats do not say everything, as they are now."""
    recents = await recents_of(connection, handles, now)
    stored = await _stored_of(connection, recents, handles, by)
    return [
        (name, figures)
        for name, recent in recents.items()
        for figures in recent.over(stored[name])
        if by is None or figures.by == by
    ]


async def minutes(
    connection: Connection, handles: Sequence[QueueHandle], since: Instant, now: Instant | None
) -> dict[str, list[Minute]]:
    found: dict[str, list[Minute]] = {each.name: [] for each in handles}
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        for name, figures in await connection.fetch(STATEMENTS["select_minutes"], list(found), since // MINUTE):
            found[name].append(key_rows.decode_minute(figures))
        recents = await recents_of(connection, handles, now)
    for name, recent in recents.items():
        found[name] = [each for each in recent.over_minutes(found[name]) if each.minute >= since // MINUTE]
    return found


async def list_keys(
    connection: Connection,
    handles: Sequence[QueueHandle],
    by: By,
    sort: KeySort,
    search: str,
    place: KeyPlace | None,
    limit: int,
    now: Instant | None,
    *,
    held_only: bool,
) -> KeyPage:
    sought = key_rows.sought(search)
    if sought is None:
        return KeyPage([], None)
    queues, scope = [each.name for each in handles], key_scope(by)
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        changed = await _changed(connection, handles, now, by)
        names = [key_rows.key_text(figures.key) for _, figures in changed]
        changed = key_rows.matching(changed, sought)
        if sought:
            some = await connection.fetch(STATEMENTS["find_keys"], queues, scope, sought, key_rows.FEW + 1)
            if len(some) <= key_rows.FEW:
                keys = list({key for (key,) in some} - set(names))
                found = await connection.fetch(STATEMENTS["select_keys_named"], queues, [scope] * len(keys), keys)
                return key_rows.page_of([*map(_named, found), *changed], sort, place, limit, held_only=held_only)
        statement, start = key_rows.listing(sort, held_only=held_only), key_rows.start_of(place)
        found = await connection.fetch(
            STATEMENTS[statement], queues, scope, sought, held_only, *start, limit + 1, names
        )
    return key_rows.page_of([*map(_named, found), *changed], sort, place, limit, held_only=held_only)


def _named(row: Sequence[Any]) -> tuple[str, KeyFigures]:
    return row[0], key_rows.key_figures(row[1:])


async def keys_named(
    connection: Connection,
    handles: Sequence[QueueHandle],
    places: Sequence[tuple[By, tuple[str | None, ...]]],
    now: Instant | None,
) -> list[tuple[str, KeyFigures]]:
    scopes, keys = key_rows.place_parameters(places)
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        named = await connection.fetch(STATEMENTS["select_keys_named"], [each.name for each in handles], scopes, keys)
        recents = await recents_of(connection, handles, now)
    stored: dict[str, list[KeyFigures]] = {each.name: [] for each in handles}
    for name, figures in map(_named, named):
        stored[name].append(figures)
    return [
        (name, figures)
        for name, recent in recents.items()
        for figures in key_rows.named_now(stored[name], recent, places)
    ]


async def list_held(
    connection: Connection, handles: Sequence[QueueHandle], limit: int, now: Instant | None
) -> list[tuple[str, KeyFigures]]:
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        changed = await _changed(connection, handles, now)
        names = [f"{key_scope(figures.by)} {key_rows.key_text(figures.key)}" for _, figures in changed]
        found = await connection.fetch(STATEMENTS["list_held_keys"], [each.name for each in handles], limit, names)
    return key_rows.most_held([*map(_named, found), *changed], limit)


async def lanes_of(connection: Connection, handle: QueueHandle, flow: bytes, limit: int) -> list[LaneRow]:
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        scheduling = Scheduling(connection, handle, None)
        return await lanes_in(scheduling, (await scheduling.load(0)).board, flow, limit)


async def lanes_in(scheduling: Scheduling, board: ResidentBoard, flow: bytes, limit: int) -> list[LaneRow]:
    """The lanes of a flow, those that most jobs wait in first."""
    found = await scheduling.connection.fetch(
        STATEMENTS["select_all_lanes_of_flow"], flow, limit, LANES_AT_MOST, list(board.changed[1])
    )
    changed = [lane.row() for lane in board.lanes.values() if lane.flow.id == flow]
    return sorted([*map(_lane, found), *changed], key=lambda lane: (-lane.ready, lane.rank))[:limit]


async def scheduled_by_lane(connection: Connection, queues: Sequence[str]) -> LanesCounted:
    found = await connection.fetch(STATEMENTS["select_scheduled_by_lane"], queues, COUNTED_AT_MOST)
    lanes = [LaneTally(rows.decode_keys(keys), priority, count) for priority, keys, count in found]
    return LanesCounted(lanes, sum(lane.arrived for lane in lanes) < COUNTED_AT_MOST)


async def gates_named(
    connection: Connection, gates: Sequence[tuple[QueueHandle, Sequence[bytes]]], shared: Sequence[bytes]
) -> tuple[list[GateRow], list[SharedGateRow]]:
    wanted = [(handle.id, gate) for handle, named in gates for gate in named]
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        tails = await _tails(connection, [handle.id for handle, _ in gates])
        others = [(queue, gate) for queue, gate in wanted if gate not in tails[queue].gates]
        stored = await connection.fetch(STATEMENTS["select_gates_named"], *_in_step(others))
        found = [GateRow(row[0], row[1], rows.decode_key(row[2]), *row[3:]) for row in stored]
        found += [row for queue, gate in wanted if (row := tails[queue].gates.get(gate)) is not None]
        return found, await Sharing(connection, 0).select(shared)


async def weights_named(
    connection: Connection, flows: Sequence[tuple[QueueHandle, Sequence[bytes]]]
) -> dict[bytes, FlowWeight]:
    wanted = [(handle.id, flow) for handle, named in flows for flow in named]
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        tails = await _tails(connection, [handle.id for handle, _ in flows])
        others = [(queue, flow) for queue, flow in wanted if flow not in tails[queue].flows]
        stored = await connection.fetch(STATEMENTS["select_weights_named"], *_in_step(others))
    found = {flow: FlowWeight(weight, given_by > 0) for flow, weight, given_by in stored}
    changed = [row for queue, flow in wanted if (row := tails[queue].flows.get(flow)) is not None]
    return found | {row.id: FlowWeight(row.weight, row.given_by > 0) for row in changed}


def _in_step(wanted: Sequence[tuple[int, bytes]]) -> tuple[list[int], list[bytes]]:
    return [queue for queue, _ in wanted], [each for _, each in wanted]


async def next_jobs(
    connection: Connection, handle: QueueHandle, now: Instant | None, keys: Mapping[str, str | None], limit: int
) -> list[JobRecord]:
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        scheduling = Scheduling(connection, handle, now)
        loaded = await scheduling.load(0)
        board, policy = loaded.board, loaded.policy
        flow = policy.flow_of(int(keys.get("priority") or 0), keys)
        arrivals = [bell for bell in loaded.arrivals if policy.flow_of(bell.priority, bell.keys) == flow]
        forced = await scheduling.forced(limit)
        named = {bell.lane for bell in arrivals} | {each.lane for each in forced}
        known = await scheduling.answer(board.find(flows=[flow], lanes=sorted(named)))
        lanes = [lane.row() for lane in board.lanes.values() if lane.flow.id == flow]
        its_own = {lane.id for lane in lanes} | {bell.lane for bell in arrivals}
        forced = [each for each in forced if each.lane in its_own]
        found = known.flows[0] if known.flows else None
        heads = await _answered(scheduling, upcoming(policy, loaded.now, found, lanes, arrivals, forced, limit))
        records = await connection.fetch(STATEMENTS["select_jobs_at"], [head.ref for head in heads])
    return [jobs.record_of(record) for record in records]


async def _answered(scheduling: Scheduling, asking: Generator[Ask, Found, list[Head]]) -> list[Head]:
    try:
        ask = next(asking)
        while True:
            lanes = [
                _lane(row)
                for flow, count in ask.ready
                for row in await scheduling.connection.fetch(
                    STATEMENTS["select_lanes_of_flow"], flow, count, ask.but_not[1]
                )
            ]
            heads = (await scheduling.ask(Ask(heads=ask.heads))).heads
            ask = asking.send(Found(lanes=lanes, heads=heads))
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
