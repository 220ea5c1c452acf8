"""What people see of queues, keys and workers on SQLite: one snapshot, nothing written."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from uuid import UUID

from fairlane.clock import Instant
from fairlane.job import JobRecord
from fairlane.policy.by import By
from fairlane.scheduler.figures import DAY, MINUTE, KeyFigures, Minute
from fairlane.scheduler.snapshot import GateRow, Head, LaneRow, LaneTally, Need, SharedGateRow, Supply
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
from fairlane.store.sqlite import claims, jobs, rows, sharing
from fairlane.store.sqlite.database import Transaction

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


def survey(tx: Transaction, queues: Sequence[str]) -> list[QueueFigures]:
    found = tx.all("survey", key_rows.encode(queues), COUNTED_AT_MOST)
    dead: dict[str, int] = dict(tx.all("count_newest_dead", COUNTED_AT_MOST))
    are_all = sum(dead.values()) < COUNTED_AT_MOST
    return [
        QueueFigures(
            queue=name,
            ready=ready,
            running=running,
            parked_lanes=parked,
            unseen=unseen,
            bells=bells,
            scheduled=Counted(scheduled, scheduled < COUNTED_AT_MOST),
            dead=Counted(dead.get(name, 0), are_all),
            held=key_rows.decode_held(held),
            oldest_ready_at=oldest_ready_at,
            next_due_at=next_due_at,
            tallied_at=tallied_at,
            untallied=untallied,
        )
        for (
            name,
            ready,
            running,
            parked,
            unseen,
            bells,
            scheduled,
            next_due_at,
            untallied,
            tallied_at,
            held,
            oldest_ready_at,
        ) in found
    ]


def minutes(tx: Transaction, queues: Sequence[str], since: Instant) -> dict[str, list[Minute]]:
    found: dict[str, list[Minute]] = {name: [] for name in queues}
    for name, figures in tx.all("select_minutes", key_rows.encode(queues), since // MINUTE):
        found[name].append(key_rows.decode_minute(figures))
    return found


def list_keys(
    tx: Transaction,
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
        keys = {key for (key,) in tx.all("find_keys", key_rows.encode(queues), key_scope(by), sought, key_rows.FEW + 1)}
        if len(keys) <= key_rows.FEW:
            named = [(key_scope(by), key) for key in keys]
            few = tx.all("select_keys_named", key_rows.encode(queues), key_rows.encode(named))
            return key_rows.page_of(map(_named, few), sort, place, limit, held_only=held_only)
    statement = key_rows.listing(sort, held_only=held_only)
    start = key_rows.start_of(place)
    found = [
        _named(row)
        for queue in queues
        for row in tx.all(statement, queue, key_scope(by), sought, held_only, *start, limit + 1)
    ]
    found.sort(key=lambda each: KeyPlace.of(sort, *each).order)
    after = KeyPlace.of(sort, *found[limit - 1]).encode() if len(found) > limit else None
    return KeyPage(found[:limit], after)


def _named(row: rows.Row) -> tuple[str, KeyFigures]:
    return row[0], key_rows.key_figures(row[1:])


def keys_named(
    tx: Transaction, queues: Sequence[str], places: Sequence[tuple[By, tuple[str | None, ...]]]
) -> list[tuple[str, KeyFigures]]:
    named = list(zip(*key_rows.place_parameters(places), strict=True))
    found = tx.all("select_keys_named", key_rows.encode(queues), key_rows.encode(named))
    return [_named(row) for row in found]


def list_held(tx: Transaction, queues: Sequence[str], limit: int) -> list[tuple[str, KeyFigures]]:
    found = tx.all("list_held_keys", key_rows.encode(queues), limit)
    return [_named(row) for row in found]


def lanes_of(tx: Transaction, flow: bytes, limit: int) -> list[LaneRow]:
    return [rows.lane(row) for row in tx.all("select_all_lanes_of_flow", flow, limit, LANES_AT_MOST)]


def scheduled_by_lane(tx: Transaction, queues: Sequence[str]) -> LanesCounted:
    found = tx.all("select_scheduled_by_lane", key_rows.encode(queues), COUNTED_AT_MOST)
    lanes = [LaneTally(rows.decode_keys(keys), priority, count) for priority, keys, count in found]
    return LanesCounted(lanes, sum(lane.arrived for lane in lanes) < COUNTED_AT_MOST)


def unseen_by_lane(tx: Transaction, queues: Sequence[str]) -> LanesCounted:
    found = tx.all("select_unseen", key_rows.encode(queues), LANES_AT_MOST)
    lanes: dict[tuple[int, str], LaneTally] = {}
    for priority, keys, count in found:
        lanes.setdefault((priority, keys), LaneTally(rows.decode_keys(keys), priority)).arrived += count
    return LanesCounted(list(lanes.values()), len(found) < LANES_AT_MOST)


def gates_named(
    tx: Transaction, gates: Sequence[bytes], shared: Sequence[bytes]
) -> tuple[list[GateRow], list[SharedGateRow]]:
    found = tx.all("select_gates", len(gates), b"".join(gates)) if gates else []
    return [rows.gate(row) for row in found], sharing.select_gates(tx, shared)


def next_jobs(
    tx: Transaction, queue: claims.QueueInForce, now: Instant, keys: Mapping[str, str | None], limit: int
) -> list[JobRecord]:
    policy = queue.policy
    flow = policy.flow_of(int(keys.get("priority") or 0), keys)
    arrivals = [
        bell
        for bell in map(rows.arrival, tx.all("select_arrivals", queue.id, LANES_AT_MOST))
        if policy.flow_of(bell.priority, bell.keys) == flow
    ]
    forced = claims.forced_jobs(tx, queue.id, limit)
    named = {bell.lane for bell in arrivals} | {each.lane for each in forced}
    lanes = [lane for lane in queue.known.lanes(tx, sorted(named)) if lane.flow == flow]
    found = next(iter(queue.known.flows(tx, [flow])), None)
    its_own = {lane.id for lane in lanes} | {bell.lane for bell in arrivals}
    forced = [each for each in forced if each.lane in its_own]
    heads = _answered(tx, upcoming(policy, now, found, lanes, arrivals, forced, limit))
    records = tx.all("select_jobs_at", key_rows.encode([head.position for head in heads]))
    return [jobs.record_of(record) for record in records]


def _answered(tx: Transaction, asking: Generator[Need, Supply, list[Head]]) -> list[Head]:
    try:
        need = next(asking)
        while True:
            lanes = [
                rows.lane(row) for flow, count in need.lanes for row in tx.all("select_lanes_of_flow", flow, count)
            ]
            need = asking.send(Supply(lanes=lanes, heads=claims.heads_of(tx, need.heads)))
    except StopIteration as stop:
        found: list[Head] = stop.value
        return found


def report(tx: Transaction, worker: UUID, said: WorkerReport | None, now: Instant) -> None:
    if said is None:
        tx.run("delete_worker", worker.bytes)
    else:
        tx.run("forget_workers", now - DAY)
        tx.run("put_worker", worker.bytes, now, key_rows.encode(said))


def workers(tx: Transaction, now: Instant) -> list[WorkerSeen]:
    found = tx.all("select_workers", now - DAY)
    return [key_rows.worker_seen(UUID(bytes=worker), seen_at, text) for worker, seen_at, text in found]
