"""Boards behind the protocol: what a store remembers, what the database says, and whether that is the same (J01)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fairlane.clock import SystemClock
from fairlane.policy import Policy
from fairlane.scheduler.board import PARKED, READY, gate_of, order_of
from fairlane.scheduler.journal import Delta, Mark
from fairlane.scheduler.resident import ResidentBoard
from fairlane.scheduler.snapshot import FlowRow, GateRow, LaneRow
from fairlane.store.boards import QueueClock
from fairlane.store.postgres import PostgresStore
from fairlane.store.postgres.claims import Scheduling
from fairlane.store.postgres.connections import perform
from fairlane.store.protocol import Store
from fairlane.store.sqlite import SqliteStore, claims
from fairlane.store.sqlite.database import Transaction
from fairlane.store.sqlite.procedures import Driver

__all__ = [
    "Said",
    "catch_up",
    "checkpoint",
    "compare",
    "differences",
    "fold",
    "forget",
    "miscounts",
    "remembered",
    "said",
    "seal",
]


@dataclass(frozen=True)
class Said:
    """What the database says of a queue's board, at one moment."""

    policy: Policy
    mark: Mark
    stored: int
    tables: Delta
    now: Delta
    """The tables, overlaid by the journal."""
    ready: Mapping[bytes, list[int]]
    """Positions of the ready jobs of each lane."""
    running: Mapping[bytes, int]
    """How many jobs of each lane run."""
    events: int
    """What nobody has folded yet."""


async def said(store: Store, name: str) -> Said:
    match store:
        case SqliteStore():
            return await store._database.read(lambda tx: _said_by_file(tx, name))
        case PostgresStore():
            handle = await store._claimer.queue(name)
            async with store._connections.session() as connection, connection.transaction(isolation="repeatable_read"):
                return await _said_by_server(Scheduling(connection, handle, store._clock.parameter()))
    raise AssertionError(f"{store!r} is not a store that is known here")


async def _said_by_server(scheduling: Scheduling) -> Said:
    connection, queue = scheduling.connection, scheduling.queue.id
    # Jobs first: where this is no snapshot, whatever becomes ready or ends after that has a lane event.
    ready = await connection.fetch(
        "select lane, position from fairlane.jobs where queue_id = $1 and state = 1 order by position", queue
    )
    running = await connection.fetch(
        "select lane, count(*) from fairlane.jobs where queue_id = $1 and state = 2 group by lane", queue
    )
    loaded = await scheduling.load()
    tables = Delta(*await perform(connection, scheduling.select_all()))
    now, events = loaded.board.over(tables), len(loaded.arrivals) + len(loaded.releases)
    counts = dict(map(tuple, running))
    return Said(loaded.policy, loaded.mark, loaded.stored, tables, now, _by_lane(ready), counts, events)


def _said_by_file(tx: Transaction, name: str) -> Said:
    scheduling = claims.Scheduling(tx, name, 0, is_looking=True)
    loaded = scheduling.load()
    queue = loaded.queue
    tables = Delta(*Driver(tx, QueueClock(SystemClock()), {}).perform(scheduling.select_all()))
    found = tx.connection.execute(
        "select lane, position from jobs where queue = ? and state = 1 order by position", (queue.id,)
    )
    events = tx.connection.execute(
        "select (select count(*) from arrivals where queue = ?1) + (select count(*) from releases where queue = ?1)",
        (queue.id,),
    ).fetchone()[0]
    running = tx.connection.execute(
        "select lane, count(*) from jobs where queue = ? and state = 2 group by lane", (queue.id,)
    )
    ready = _by_lane(found)
    now = loaded.board.over(tables)
    return Said(queue.policy, queue.mark, queue.stored, tables, now, ready, dict(running), events)


def _by_lane(found: Iterable[Any]) -> dict[bytes, list[int]]:
    ready: defaultdict[bytes, list[int]] = defaultdict(list)
    for lane, position in found:
        ready[lane].append(position)
    return ready


async def remembered(store: Store, name: str) -> ResidentBoard | None:
    """The board that a store holds in memory."""
    match store:
        case SqliteStore():
            number = await store._database.read(lambda tx: claims.load_queue(tx, name).id)
            return store._database.boards.get(number)
        case PostgresStore():
            return store._claimer.boards.get((await store._claimer.queue(name)).id)
    raise AssertionError(f"{store!r} is not a store that is known here")


async def forget(store: Store, name: str) -> None:
    match store:
        case SqliteStore():
            number = await store._database.read(lambda tx: claims.load_queue(tx, name).id)
            store._database.boards.drop(number)
        case PostgresStore():
            store._claimer.boards.drop((await store._claimer.queue(name)).id)


async def fold(store: Store, name: str) -> None:
    """Fold every lane event, and leave the tables as they are."""
    match store:
        case SqliteStore():
            now = await store.now()
            await store._database.write(lambda tx: claims.Scheduling(tx, name, now).fold_all(), durable=False)
        case PostgresStore():
            async with store._claimer.locked(await store._claimer.queue(name), durable=False) as (scheduling,):
                await scheduling.fold_all()


async def catch_up(store: Store, name: str) -> ResidentBoard:
    """Have a store's board be as of now."""
    match store:
        case SqliteStore():
            await store._database.write(lambda tx: claims.Scheduling(tx, name, 0).load().board, durable=False)
        case PostgresStore():
            async with store._claimer.locked(await store._claimer.queue(name), durable=False) as (scheduling,):
                await scheduling.load()
    board = await remembered(store, name)
    assert board is not None
    return board


async def compare(store: Store, name: str) -> list[str]:
    """In what a store's board is not what the database says, once it has caught up; whoever else is at work."""
    match store:
        case SqliteStore():

            def compare(tx: Transaction) -> list[str]:
                return differences(claims.Scheduling(tx, name, 0).load().board, _said_by_file(tx, name))

            return await store._database.write(compare, durable=False)
        case PostgresStore():
            handle = await store._claimer.queue(name)
            async with store._claimer.locked(handle, durable=False) as (scheduling,):
                board = (await scheduling.load()).board
                looking = Scheduling(scheduling.connection, handle, store._clock.parameter())
                return differences(board, await _said_by_server(looking))
    raise AssertionError(f"{store!r} is not a store that is known here")


async def checkpoint(store: Store, name: str) -> None:
    """As a store does it by itself, after a second."""
    match store:
        case SqliteStore():
            await store._checkpoint(await store._database.read(lambda tx: claims.load_queue(tx, name).id))
        case PostgresStore():
            await store._claimer.checkpoint((await store._claimer.queue(name)).id)


async def seal(store: Store, name: str) -> None:
    """Let the tables hold the board, and everybody forget it."""
    match store:
        case SqliteStore():
            await store._database.write(lambda tx: _seal(tx, name), durable=False)
        case PostgresStore():
            async with store._claimer.locked(await store._claimer.queue(name), durable=False) as (scheduling,):
                await perform(scheduling.connection, scheduling.to_tables(await scheduling.load()))


def _seal(tx: Transaction, name: str) -> None:
    scheduling = claims.Scheduling(tx, name, 0)
    Driver(tx, QueueClock(SystemClock()), {}).perform(scheduling.to_tables(scheduling.load()))


def differences(board: ResidentBoard, found: Said) -> list[str]:
    """In what a board, which claims to be of this moment, is not what the database says. With what it must be sure of:
    that it lacks nothing of what it says is all, and knows everything that the tables do not hold."""
    assert board.mark == found.mark, "it is of another moment"
    now: tuple[dict[bytes, Any], ...] = (
        {row.id: row for row in found.now.flows},
        {row.id: row for row in found.now.lanes},
        # Gates of limits that are no more, or not for their key, are left alone.
        {row.id: row for row in found.now.gates if gate_of(board.policy, row) is not None},
    )
    held: tuple[dict[bytes, FlowRow | LaneRow | GateRow], ...] = (
        {each: flow.row() for each, flow in board.flows.items()},
        {each: lane.row() for each, lane in board.lanes.items()},
        {each: gate.row() for each, gate in board.gates.items()},
    )
    stored: tuple[dict[bytes, Any], ...] = (
        {row.id: row for row in found.tables.flows},
        {row.id: row for row in found.tables.lanes},
        {row.id: row for row in found.tables.gates},
    )
    wrong: list[str] = []
    for kind, is_now, is_held, is_stored, changed in zip(
        ("flow", "lane", "gate"), now, held, stored, board.changed, strict=True
    ):
        wrong += [
            f"{kind} {each.hex()}: {row} is remembered, {is_now.get(each)} is so"
            for each, row in is_held.items()
            if row != is_now.get(each)
        ]
        wrong += [
            f"{kind} {each.hex()} is not in the tables as it is, and not to be written: {row} is so"
            for each, row in is_now.items()
            if row != is_stored.get(each) and each not in changed
        ]
        if board.is_whole and is_now.keys() != is_held.keys():
            wrong.append(f"of {len(is_now)} {kind}s, {len(is_held)} are held, and that is said to be all")
    wrong += [
        f"flow {row.id.hex()} is ready at {row.vtime}, and not held"
        for row in found.now.flows
        if row.standing == READY and (row.vtime, row.tie) < board._complete and row.id not in board.flows
    ]
    wrong += [
        f"gate {row.id.hex()} is to be woken at {row.wake_at}, and not held"
        for row in now[2].values()
        if row.wake_at is not None and row.wake_at <= board._alarmed and row.id not in board.gates
    ]
    return wrong + _disorder(board) + _wrong_heads(board, found)


def miscounts(found: Said) -> list[str]:
    """In what a board is not what its jobs make it, counted anew. Every lane event is to be folded."""
    assert not found.events, "there are lane events that nobody has folded"
    lanes = {row.id: row for row in found.now.lanes}
    wrong = [
        f"lane {each.hex()} has jobs, and is not on the board" for each in {*found.ready, *found.running} - lanes.keys()
    ]
    in_flight: Counter[bytes] = Counter()
    for row in lanes.values():
        ready, running = found.ready.get(row.id, []), found.running.get(row.id, 0)
        for gate, bound in (*found.policy.gates_of(row.priority, row.keys), *found.policy.queue_gates):
            in_flight[gate] += running if bound.limit.counts_in_flight else 0
        if (row.ready, row.in_flight) != (len(ready), running):
            wrong.append(f"{row}: {len(ready)} are ready, and {running} run")
        # Not its head: of two jobs that are enqueued at once, the one with the lower position may have come later, and
        # lanes are ordered by when before they are by position.
        if ready and (row.standing not in (READY, PARKED) or row.floor > ready[0]):
            wrong.append(f"{row}: its first job, at {ready[0]}, is passed by")
    stand = Counter((row.flow, row.standing) for row in lanes.values())
    waiting = Counter(row.gate for row in lanes.values() if row.standing == PARKED)
    waiting += Counter(row.gate for row in found.now.flows if row.standing == PARKED)
    wrong += [
        f"{row}: {stand[row.id, READY]} of its lanes are ready, {stand[row.id, PARKED]} are parked"
        for row in found.now.flows
        if (row.open, row.shut) != (stand[row.id, READY], stand[row.id, PARKED])
    ]
    gates = {row.id: row for row in found.now.gates if gate_of(found.policy, row) is not None}
    wrong += [
        f"{row}: {in_flight[row.id]} run, {waiting[row.id]} wait"
        for row in gates.values()
        if (row.in_flight, row.waiting) != (in_flight[row.id], waiting[row.id])
    ]
    return wrong + [
        f"gate {gate.hex()} is not on the board: {n} run" for gate, n in in_flight.items() if n and gate not in gates
    ]


def _disorder(board: ResidentBoard) -> list[str]:
    """In what its orders are not those of its pieces."""
    flows, lanes = board.flows.values(), board.lanes.values()
    orders = {
        "ready flows": (
            board._ready,
            sorted((flow.vtime, flow.tie, flow.id) for flow in flows if flow.standing == READY),
        ),
        "alarms": (
            board._alarms,
            sorted((gate.wake_at, gate.id) for gate in board.gates.values() if gate.wake_at is not None),
        ),
        "ready lanes": (
            sorted(entry[:2] for flow in flows for entry in flow.ready),
            sorted((order_of(lane.rank, lane.head), lane.id) for lane in lanes if lane.standing == READY),
        ),
        "parked lanes": (
            _all(board._parked_lanes),
            sorted((lane.gate, (lane.tag, lane.head, lane.id)) for lane in lanes if lane.standing == PARKED),
        ),
        "parked flows": (
            _all(board._parked_flows),
            sorted((flow.gate, (flow.vtime, flow.tie, flow.id)) for flow in flows if flow.standing == PARKED),
        ),
    }
    return [f"{name}: {is_now}, and not {must_be}" for name, (is_now, must_be) in orders.items() if is_now != must_be]


def _all(places: Mapping[Any, Any]) -> list[Any]:
    return sorted((place, entry) for place, order in places.items() for entry in order)


def _wrong_heads(board: ResidentBoard, found: Said) -> list[str]:
    """Kept heads are all ready jobs from a lane's floor to the last of them. (With lane events that nobody has folded,
    they need not be.)"""
    wrong = []
    for lane in board.lanes.values() if not found.events else ():
        kept = [head.position for head in lane.heads[lane.next_head :]]
        ready = [position for position in found.ready.get(lane.id, []) if position >= lane.floor]
        if kept != ready[: len(kept)]:
            wrong.append(f"lane {lane.id.hex()} keeps the heads {kept} from {lane.floor} on, and {ready} are ready")
        if lane.exhausted and len(kept) < len(ready):
            wrong.append(f"lane {lane.id.hex()} keeps {kept}, says that is all, and {ready} are ready")
    return wrong
