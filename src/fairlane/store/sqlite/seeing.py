"""What people see of queues, keys and workers on SQLite: one snapshot, nothing written."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from uuid import UUID

from fairlane.clock import Instant
from fairlane.job import JobRecord
from fairlane.policy.by import By
from fairlane.scheduler.figures import DAY, MINUTE, KeyFigures, Minute, Pending, Recent, changes_of_held
from fairlane.scheduler.journal import Tail
from fairlane.scheduler.resident import Ask, Found
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
from fairlane.store.sqlite import claims, jobs, rows, sharing
from fairlane.store.sqlite.database import Transaction
from fairlane.store.sqlite.policies import all_in_force

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
    "weights_named",
    "workers",
]


KEY = 2
"""The column of a list that has the key."""


def survey(tx: Transaction, queues: Sequence[str], now: Instant) -> list[QueueFigures]:
    found = tx.all("survey", key_rows.encode(queues), COUNTED_AT_MOST)
    dead: dict[str, int] = dict(tx.all("count_newest_dead", COUNTED_AT_MOST))
    are_all = sum(dead.values()) < COUNTED_AT_MOST
    recents = recents_of(tx, queues, now)
    stored = _stored_of(tx, recents)
    surveyed = []
    for row in found:
        name, ready, running, parked, unseen, bells, scheduled, next_due_at, counted_at, held, oldest_ready_at = row
        recent, before = recents[name], stored[name]
        ready = max(0, ready + unseen)
        known = [each for each in (oldest_ready_at, recent.pending.oldest) if each is not None and ready]
        surveyed.append(
            QueueFigures(
                queue=name,
                ready=ready,
                running=max(0, running - recent.pending.ended),
                parked_lanes=parked,
                unseen=max(0, unseen),
                bells=bells,
                scheduled=Counted(scheduled, scheduled < COUNTED_AT_MOST),
                dead=Counted(dead.get(name, 0), are_all),
                held=key_rows.add_held(key_rows.decode_held(held), changes_of_held(before, recent.over(before))),
                oldest_ready_at=min(known, default=None),
                next_due_at=next_due_at,
                counted_at=counted_at,
                uncounted=recent.claims,
            )
        )
    return surveyed


def recents_of(tx: Transaction, queues: Sequence[str], now: Instant) -> dict[str, Recent]:
    """What is not in the stored stats of queues."""
    in_force = all_in_force(tx)
    known = [name for name in queues if name in in_force]
    told: dict[str, list[bytes]] = {name: [] for name in known}
    for name, entries in tx.all("select_told_of", key_rows.encode(known)):
        told[name].append(entries)
    arrivals: dict[str, list[LaneTally]] = {name: [] for name in known}
    oldest: dict[str, Instant] = {}
    for name, priority, keys, count, since in tx.all("select_pending_arrivals", key_rows.encode(known)):
        arrivals[name].append(LaneTally(rows.decode_keys(keys), priority, count))
        if since is not None:
            oldest[name] = min(since, oldest.get(name, since))
    releases = _pending_releases(tx, known)
    return {
        name: Recent(
            in_force[name].policy,
            map(decode_tally, told[name]),
            Pending(arrivals[name], releases.get(name, []), oldest.get(name)),
            now,
        )
        for name in known
    }


def _pending_releases(tx: Transaction, queues: Sequence[str]) -> dict[str, list[tuple[Instant, LaneTally]]]:
    """Claims that have ended and that no claim has seen, by queue and lane."""
    ended: dict[tuple[str, bytes], list[int]] = {}
    for name, text in tx.all("select_unfolded_of", key_rows.encode(queues)):
        for bell in rows.releases(text):
            sums = ended.setdefault((name, bell.lane), [0, 0, 0, 0, 0])
            for nth, more in enumerate((bell.ended, bell.failed, bell.unstarted, bell.ran)):
                sums[nth] += more
            sums[4] = max(sums[4], bell.latest)
    if not ended:
        return {}
    tails = _tails(tx, sorted({name for name, _ in ended}))
    stored = {
        lane: (rows.decode_keys(keys), priority)
        for lane, priority, keys in tx.all("select_keys_of_lanes", len(ended), b"".join(lane for _, lane in ended))
    }
    found: dict[str, list[tuple[Instant, LaneTally]]] = {}
    for (name, lane), sums in ended.items():
        changed = tails[name].lanes.get(lane)
        of = stored.get(lane) if changed is None else (changed.keys, changed.priority)
        if of is not None:
            found.setdefault(name, []).append(key_rows.release_tally(*of, *sums))
    return found


def _tails(tx: Transaction, queues: Sequence[str]) -> dict[str, Tail]:
    """What the tables of these queues may not hold."""
    deltas: dict[str, list[bytes]] = {name: [] for name in queues}
    for name, delta in tx.all("select_tails", key_rows.encode(queues)):
        deltas[name].append(delta)
    return {name: Tail(each) for name, each in deltas.items()}


def _stored_of(tx: Transaction, recents: Mapping[str, Recent], by: By | None = None) -> dict[str, list[KeyFigures]]:
    """What is stored of the keys that they concern, by queue; of one scope, if one is given."""
    wanted = [
        (name, key_scope(place[0]), key_rows.key_text(place[1]))
        for name, recent in recents.items()
        for place in recent.places
        if by is None or place[0] == by
    ]
    stored: dict[str, list[KeyFigures]] = {name: [] for name in recents}
    for name, *row in tx.all("select_keys_of", key_rows.encode(wanted)) if wanted else ():
        stored[name].append(key_rows.key_figures(row))
    return stored


def minutes(tx: Transaction, queues: Sequence[str], since: Instant, now: Instant) -> dict[str, list[Minute]]:
    found: dict[str, list[Minute]] = {name: [] for name in queues}
    for name, figures in tx.all("select_minutes", key_rows.encode(queues), since // MINUTE):
        found[name].append(key_rows.decode_minute(figures))
    for name, recent in recents_of(tx, queues, now).items():
        found[name] = [each for each in recent.over_minutes(found[name]) if each.minute >= since // MINUTE]
    return found


def list_keys(
    tx: Transaction,
    queues: Sequence[str],
    by: By,
    sort: KeySort,
    search: str,
    place: KeyPlace | None,
    limit: int,
    now: Instant,
    *,
    held_only: bool,
) -> KeyPage:
    sought = key_rows.sought(search)
    if sought is None:
        return KeyPage([], None)
    changed, scope = _changed(tx, queues, now, by), key_scope(by)
    names = {key_rows.key_text(figures.key) for _, figures in changed}
    changed = key_rows.matching(changed, sought)
    if sought:
        some = tx.all("find_keys", key_rows.encode(queues), scope, sought, key_rows.FEW + 1)
        if len(some) <= key_rows.FEW:
            named = [(scope, key) for (key,) in some if key not in names]
            few = tx.all("select_keys_named", key_rows.encode(queues), key_rows.encode(named))
            return key_rows.page_of([*map(_named, few), *changed], sort, place, limit, held_only=held_only)
    statement, start = key_rows.listing(sort, held_only=held_only), key_rows.start_of(place)
    found = [
        _named(row)
        for name in queues
        for row in tx.some(statement, limit + 1, names, name, scope, sought, held_only, *start, -1, at=KEY)
    ]
    return key_rows.page_of([*found, *changed], sort, place, limit, held_only=held_only)


def _changed(
    tx: Transaction, queues: Sequence[str], now: Instant, by: By | None = None
) -> list[tuple[str, KeyFigures]]:
    """Keys of which the stored stats do not say everything, as they are now."""
    recents = recents_of(tx, queues, now)
    stored = _stored_of(tx, recents, by)
    return [
        (name, figures)
        for name, recent in recents.items()
        for figures in recent.over(stored[name])
        if by is None or figures.by == by
    ]


def _named(row: rows.Row) -> tuple[str, KeyFigures]:
    return row[0], key_rows.key_figures(row[1:])


def keys_named(
    tx: Transaction, queues: Sequence[str], places: Sequence[tuple[By, tuple[str | None, ...]]], now: Instant
) -> list[tuple[str, KeyFigures]]:
    named = list(zip(*key_rows.place_parameters(places), strict=True))
    stored: dict[str, list[KeyFigures]] = {name: [] for name in queues}
    for name, figures in map(_named, tx.all("select_keys_named", key_rows.encode(queues), key_rows.encode(named))):
        stored[name].append(figures)
    return [
        (name, figures)
        for name, recent in recents_of(tx, queues, now).items()
        for figures in key_rows.named_now(stored[name], recent, places)
    ]


def list_held(tx: Transaction, queues: Sequence[str], limit: int, now: Instant) -> list[tuple[str, KeyFigures]]:
    changed = _changed(tx, queues, now)
    names = {(name, figures.by, figures.key) for name, figures in changed}
    stored = tx.all("list_held_keys", key_rows.encode(queues), limit + len(changed))
    found = [each for each in map(_named, stored) if (each[0], each[1].by, each[1].key) not in names]
    return key_rows.most_held([*found, *changed], limit)


def lanes_of(tx: Transaction, queue: claims.QueueInForce, flow: bytes, limit: int) -> list[LaneRow]:
    board = claims.tail_of(tx, queue)
    stored = [rows.lane(row) for row in tx.some("select_all_lanes_of_flow", LANES_AT_MOST, board.changed[1], flow)]
    changed = [lane.row() for lane in board.lanes.values() if lane.flow.id == flow]
    return sorted([*stored, *changed], key=lambda lane: (-lane.ready, lane.rank))[:limit]


def scheduled_by_lane(tx: Transaction, queues: Sequence[str]) -> LanesCounted:
    found = tx.all("select_scheduled_by_lane", key_rows.encode(queues), COUNTED_AT_MOST)
    lanes = [LaneTally(rows.decode_keys(keys), priority, count) for priority, keys, count in found]
    return LanesCounted(lanes, sum(lane.arrived for lane in lanes) < COUNTED_AT_MOST)


def gates_named(
    tx: Transaction, gates: Mapping[str, Sequence[bytes]], shared: Sequence[bytes]
) -> tuple[list[GateRow], list[SharedGateRow]]:
    tails = _tails(tx, list(gates))
    wanted = [(name, gate) for name, named in gates.items() for gate in named]
    others = [gate for name, gate in wanted if gate not in tails[name].gates]
    stored = tx.all("select_gates_named", len(others), b"".join(others)) if others else []
    changed = [row for name, gate in wanted if (row := tails[name].gates.get(gate)) is not None]
    return [*map(rows.gate, stored), *changed], sharing.select_gates(tx, shared)


def weights_named(tx: Transaction, flows: Mapping[str, Sequence[bytes]]) -> dict[bytes, FlowWeight]:
    tails = _tails(tx, list(flows))
    wanted = [(name, flow) for name, named in flows.items() for flow in named]
    others = [flow for name, flow in wanted if flow not in tails[name].flows]
    stored = tx.all("select_weights_named", len(others), b"".join(others)) if others else []
    found = {flow: FlowWeight(weight, given_by > 0) for flow, weight, given_by in stored}
    changed = [row for name, flow in wanted if (row := tails[name].flows.get(flow)) is not None]
    return found | {row.id: FlowWeight(row.weight, row.given_by > 0) for row in changed}


def next_jobs(
    tx: Transaction, queue: claims.QueueInForce, now: Instant, keys: Mapping[str, str | None], limit: int
) -> list[JobRecord]:
    policy, board = queue.policy, claims.tail_of(tx, queue)
    flow = policy.flow_of(int(keys.get("priority") or 0), keys)
    arrivals = [
        bell
        for bell in map(rows.arrival, tx.all("select_arrivals", queue.id, LANES_AT_MOST))
        if policy.flow_of(bell.priority, bell.keys) == flow
    ]
    forced = claims.forced_jobs(tx, queue.id, limit)
    named = {bell.lane for bell in arrivals} | {each.lane for each in forced}
    known = claims.answer(tx, queue, board.find(flows=[flow], lanes=sorted(named)))
    lanes = [lane.row() for lane in board.lanes.values() if lane.flow.id == flow]
    its_own = {lane.id for lane in lanes} | {bell.lane for bell in arrivals}
    forced = [each for each in forced if each.lane in its_own]
    found = known.flows[0] if known.flows else None
    heads = _answered(tx, upcoming(policy, now, found, lanes, arrivals, forced, limit))
    records = tx.all("select_jobs_at", key_rows.encode([head.position for head in heads]))
    return [jobs.record_of(record) for record in records]


def _answered(tx: Transaction, asking: Generator[Ask, Found, list[Head]]) -> list[Head]:
    try:
        ask = next(asking)
        while True:
            lanes = [
                rows.lane(row)
                for flow, count in ask.ready
                for row in tx.some("select_lanes_of_flow", count, ask.but_not[1], flow)
            ]
            ask = asking.send(Found(lanes=lanes, heads=claims.heads_of(tx, ask.heads)))
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
