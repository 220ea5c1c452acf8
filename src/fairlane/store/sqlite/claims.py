"""A claim on SQLite: inside one write transaction, load what the plan asks for and write what it decides."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, TypeVar
from uuid import UUID, uuid4

import msgspec

from fairlane.clock import Instant
from fairlane.job import Claim
from fairlane.policy.kinds import read_limit
from fairlane.policy.overrides import Override, Overrides
from fairlane.policy.policy import Policy
from fairlane.scheduler.plan import plan_claims
from fairlane.scheduler.rebuild import rebuild, refuse_to_strand
from fairlane.scheduler.snapshot import (
    Arrival,
    FlowRow,
    Forced,
    Head,
    KeptPlaces,
    LaneRow,
    Need,
    Plan,
    QueueRow,
    Release,
    Snapshot,
    Start,
    Supply,
)
from fairlane.store.protocol import FOLD_AT_MOST, Claimed, Looked, WorkerIdentity
from fairlane.store.sqlite import rows, sharing
from fairlane.store.sqlite.database import Transaction

__all__ = [
    "QueueInForce",
    "answer",
    "check_waiting",
    "claim",
    "fold_all",
    "load_queue",
    "look",
    "next_due",
    "peek",
    "queue_number",
    "remake",
    "replace_policy",
    "select_overrides",
]

T = TypeVar("T")

PROMOTE_AT_MOST = 1_000
RELEASES_AT_MOST = 4_000
LANES_PER_SCANNED_FLOW = 2


class QueueInForce(msgspec.Struct, frozen=True):
    """A queue's row: its number, its policy in force, its scheduling state."""

    id: int
    policy: Policy
    version: int
    applied_at: Instant
    state: QueueRow


_policies: dict[str, Policy] = {}
MOST_POLICIES = 1_000
"""Policies that are kept decoded."""


def load_queue(tx: Transaction, name: str) -> QueueInForce | None:
    row = tx.one("select_queue", name)
    if row is None:
        return None
    number, text, digest, version, applied_at, amended, *state = row
    key = f"{name}/{digest}/{amended}"
    policy = _policies.get(key)
    if policy is None:
        if len(_policies) >= MOST_POLICIES:
            _policies.clear()
        policy = _policies[key] = Policy.decode(text).overridden(select_overrides(tx, number))
    if policy.shared_limits:
        policy = _resolved(tx, policy, number, key)
    return QueueInForce(number, policy, version, applied_at, QueueRow(*state))


def _resolved(tx: Transaction, policy: Policy, queue: int, key: str) -> Policy:
    """The policy with its shared limits as they are in force."""
    documents = sharing.limits_in_force(tx, queue)
    key = "/".join([key, *documents.values()])
    if key not in _policies:
        in_force = {name: read_limit(msgspec.json.decode(text)) for name, text in documents.items()}
        _policies[key] = policy.with_shared(in_force)
    return _policies[key]


def select_overrides(tx: Transaction, queue: int) -> Overrides:
    """What operators have changed."""
    found = tx.all("select_overrides", queue)
    return Overrides(tuple(msgspec.json.decode(text, type=Override) for (text,) in found))


def queue_number(tx: Transaction, name: str) -> int:
    """The number of a queue that is known."""
    number: int = (tx.one("select_queue", name) or (0,))[0]
    return number


def claim(
    tx: Transaction,
    queue: QueueInForce,
    want: int,
    *,
    now: Instant,
    worker: WorkerIdentity,
    lease_expires_at: Instant,
    lag: int = 0,
    listens: bool = False,
) -> tuple[Claimed, dict[int, int]]:
    """Start up to `want` jobs. Returned with them: in which other queues somebody is to be woken."""
    _promote(tx, queue, now)
    bells = _drain(tx, queue.id)
    forced = _forced(tx, queue.id, want)
    plan = _plan(tx, queue, want, now, bells, forced, lag, listens=listens)
    lease = uuid4()
    claims = _start(tx, queue.policy.queue, plan.starts, lease, worker, now)
    if claims:
        held = msgspec.json.encode([start.head.ref for start in plan.starts]).decode()
        tx.run("insert_lease", lease.bytes, worker.id.bytes, lease_expires_at, now, len(claims), held)
    _write(tx, queue, plan)
    if forced:
        tx.run("forget_forced", queue.id)
    due = next_due(tx, queue.id) if len(claims) < want else None
    more = plan.more or not bells.are_all
    claimed = Claimed(claims, lease, due, more, look_again=False, is_limited=bool(queue.policy.limits))
    return claimed, sharing.rung(tx, plan)


def look(tx: Transaction, queue: QueueInForce, want: int, *, now: Instant) -> tuple[Looked, dict[int, int]]:
    """How many jobs could start now, up to `want`; and in which other queues somebody is to be woken."""
    tx.run("begin_look")
    _promote(tx, queue, now)
    bells = _drain(tx, queue.id)
    plan = _plan(tx, queue, want, now, bells, listens=True)
    rung: dict[int, int] = {}
    if plan.starts:
        tx.run("undo_look")
    else:
        # As a claim that starts nothing: what is shut is parked, and rings when it opens.
        _write(tx, queue, plan)
        rung = sharing.rung(tx, plan)
    is_filled = len(plan.starts) >= want
    is_partial = not is_filled and (plan.more or not bells.are_all)
    return Looked(len(plan.starts), now, None if is_filled else next_due(tx, queue.id), is_partial), rung


def next_due(tx: Transaction, queue: int) -> Instant | None:
    """When something opens by itself."""
    times = (
        tx.value("next_due_job", queue),
        tx.value("next_alarm", queue),
        tx.value("next_lease_end"),
        tx.value("next_override_end", queue),
    )
    return min((time for time in times if time is not None), default=None)


def fold_all(tx: Transaction, queue: QueueInForce, now: Instant) -> QueueInForce:
    """Fold every bell, start nothing."""
    while True:
        bells = _drain(tx, queue.id)
        if bells.arrivals or bells.releases:
            _write(tx, queue, _plan(tx, queue, 0, now, bells))
            queue = load_queue(tx, queue.policy.queue) or queue
        if bells.are_all:
            return queue


def replace_policy(
    tx: Transaction, queue: QueueInForce, policy: Policy, now: Instant, *, accept_missing_keys: bool
) -> None:
    """Put another policy in force; `InvalidPolicy` where waiting jobs lack a key that it looks at."""
    remake(tx, queue, policy.overridden(queue.policy.overrides), now, accept_missing_keys=accept_missing_keys)
    tx.run("update_policy", policy.encoded, policy.digest, now, queue.id)
    sharing.put_in_force(tx, queue.id, policy, now)
    sharing.count_running(tx, queue.id, policy)


def check_waiting(tx: Transaction, queue: QueueInForce, policy: Policy) -> None:
    """Refuse what `replace_policy` would refuse because of jobs that wait, as far as bells have been folded."""
    refuse_to_strand(policy, [rows.lane(row) for row in tx.all("select_all_lanes", queue.id)])


def remake(
    tx: Transaction, queue: QueueInForce, policy: Policy, now: Instant, *, accept_missing_keys: bool = True
) -> None:
    """Make flows and gates anew from the lanes, as this policy has them; every lane with ready jobs is woken."""
    queue = fold_all(tx, queue, now)
    lanes = [rows.lane(row) for row in tx.all("select_all_lanes", queue.id)]
    if not accept_missing_keys:
        refuse_to_strand(policy, lanes)
    rebuilt = rebuild(
        policy,
        now,
        queue.state,
        [rows.flow(row) for row in tx.all("select_all_flows", queue.id)],
        lanes,
        [rows.gate(row) for row in tx.all("select_all_gates", queue.id)],
        [] if policy.sequence is None else _kept_places(tx, queue.id),
    )
    for statement in ("delete_flows", "delete_lanes", "delete_gates"):
        tx.run(statement, queue.id)
    _write(tx, queue, Plan([], rebuilt.queue, rebuilt.flows, rebuilt.lanes, rebuilt.gates, False))


def _kept_places(tx: Transaction, queue: int) -> list[KeptPlaces]:
    found = tx.all("count_kept_places", queue)
    return [KeptPlaces(priority, rows.decode_keys(keys), count) for priority, keys, count in found]


def _promote(tx: Transaction, queue: QueueInForce, now: Instant) -> None:
    """Scheduled jobs that are due join their lanes, and ring: at the end, or in the place they kept in a sequence."""
    due = tx.all("select_due_jobs", queue.id, now, PROMOTE_AT_MOST)
    if not due:
        return
    place: int = tx.value("take_positions", len(due)) - len(due)
    in_sequence = queue.policy.sequence is not None
    promoted = []
    bells: dict[bytes, list[Any]] = {}
    for position, lane, priority, keys, keeps_place, ready_at, given in due:
        place += 1
        joins = (position, ready_at) if in_sequence and keeps_place else (place, now)
        promoted.append((*joins, position))
        bell = bells.setdefault(lane, [queue.id, lane, priority, keys, 0, *joins, None, 0])
        bell[4] += 1
        bell[5:7] = min(tuple(bell[5:7]), joins)
        bell[7] = given or bell[7]
        bell[8] += keeps_place
    tx.run_many("promote_job", promoted)
    tx.run_many("insert_arrival", list(bells.values()))


class _Bells(msgspec.Struct, frozen=True):
    """What a claim folds: the bells, and the lanes and flows that they name."""

    arrivals: list[Arrival]
    releases: list[Release]
    lanes: list[LaneRow]
    flows: list[FlowRow]
    are_all: bool
    last: tuple[int, int] = (0, 0)
    """The last release and the last arrival that were read."""


def _drain(tx: Transaction, queue: int) -> _Bells:
    """Read the bells, and take them down."""
    bells = _read_bells(tx, queue)
    if bells.last != (0, 0):
        tx.run("delete_releases", queue, bells.last[0])
        tx.run("delete_arrivals", queue, bells.last[1])
    return bells


def _read_bells(tx: Transaction, queue: int) -> _Bells:
    releases = tx.all("select_releases", queue, RELEASES_AT_MOST)
    arrivals = tx.all("select_arrivals", queue, FOLD_AT_MOST)
    if not releases and not arrivals:
        return _Bells([], [], [], [], are_all=True)
    last = (releases[-1][0] if releases else 0, arrivals[-1][0] if arrivals else 0)
    lanes = [rows.lane(row) for row in tx.all("select_rung_lanes", queue, *last)]
    flows = [rows.flow(row) for row in tx.all("select_rung_flows", queue, *last)]
    return _Bells(
        [rows.arrival(row) for row in arrivals],
        [rows.release(row) for row in releases],
        lanes,
        flows,
        are_all=len(arrivals) < FOLD_AT_MOST and len(releases) < RELEASES_AT_MOST,
        last=last,
    )


def _forced(tx: Transaction, queue: int, want: int) -> list[Forced]:
    """Jobs that an operator wants to start next."""
    found = tx.all("select_forced", queue, want)
    return [Forced(lane, Head(position, position, ready_at)) for lane, position, ready_at in found]


def _plan(
    tx: Transaction,
    queue: QueueInForce,
    want: int,
    now: Instant,
    bells: _Bells,
    forced: Sequence[Forced] = (),
    lag: int = 0,
    *,
    listens: bool = False,
) -> Plan:
    snapshot = _snapshot(tx, queue, want, now, bells, forced, lag, listens=listens)
    if queue.policy.shared_limits:
        snapshot = sharing.fold_into(tx, queue.id, snapshot)
    return answer(tx, queue.id, plan_claims(snapshot, want))


def answer(tx: Transaction, queue: int, asking: Generator[Need, Supply, T]) -> T:
    """Give whoever asks for rows what it needs, until it has come to a result."""
    supply: Supply | None = None
    while True:
        try:
            need = next(asking) if supply is None else asking.send(supply)
        except StopIteration as stop:
            result: T = stop.value
            return result
        supply = _supply(tx, queue, need)


def peek(tx: Transaction, queue: QueueInForce, want: int, now: Instant, lanes: Iterable[bytes]) -> Snapshot:
    """What a claim would start from, with these lanes too. The bells stay where they are."""
    expired = queue.policy.overrides.expired(now)
    if expired:
        policy = queue.policy.overridden(queue.policy.overrides.without(expired))
        queue = msgspec.structs.replace(queue, policy=policy)
    bells = _read_bells(tx, queue.id)
    forced = _forced(tx, queue.id, want)
    known = {lane.id for lane in bells.lanes}
    bells.lanes.extend(_by_id(tx, "select_lane", {lane for lane in lanes if lane not in known}, rows.lane))
    flows = {flow.id for flow in bells.flows}
    bells.flows.extend(_by_id(tx, "select_flow", {lane.flow for lane in bells.lanes} - flows, rows.flow))
    return sharing.look_into(tx, queue.id, _snapshot(tx, queue, want, now, bells, forced))


def _snapshot(
    tx: Transaction,
    queue: QueueInForce,
    want: int,
    now: Instant,
    bells: _Bells,
    forced: Sequence[Forced],
    lag: int = 0,
    *,
    listens: bool = False,
) -> Snapshot:
    count = max(want, 1)
    scanned, lanes = _scan(tx, queue.id, queue.state.cursor, queue.state.cursor_tie, count)
    named = _by_id(tx, "select_lane", {each.lane for each in forced}, rows.lane)
    lanes += named
    flows = _by_id(tx, "select_flow", {lane.flow for lane in named}, rows.flow)
    due = [rows.gate(row) for row in tx.all("select_due_gates", queue.id, now, count)]
    return Snapshot(
        queue.policy,
        now,
        queue.state,
        bells.arrivals,
        bells.releases,
        bells.lanes + lanes,
        bells.flows + flows + scanned,
        [flow.id for flow in scanned],
        len(scanned) < count,
        due,
        queue.applied_at,
        forced,
        lag,
        listens=listens,
    )


def _scan(tx: Transaction, queue: int, vtime: float, tie: int, count: int) -> tuple[list[FlowRow], list[LaneRow]]:
    flows = [rows.flow(row) for row in tx.all("scan_flows", queue, vtime, tie, count)]
    if not flows:
        return [], []
    found = tx.all("scan_lanes", queue, vtime, tie, count, LANES_PER_SCANNED_FLOW)
    return flows, [rows.lane(row) for row in found]


def _by_id(tx: Transaction, statement: str, ids: Iterable[bytes], read: Callable[[rows.Row], T]) -> list[T]:
    return [read(row) for each in sorted(ids) if (row := tx.one(statement, each)) is not None]


def _supply(tx: Transaction, queue: int, need: Need) -> Supply:
    flows: list[FlowRow] = _by_id(tx, "select_flow", need.flows, rows.flow)
    gates = _by_id(tx, "select_gate", need.gates, rows.gate)
    lanes: list[LaneRow] = []
    for flow, count in need.lanes:
        lanes += [rows.lane(row) for row in tx.all("select_ready_lanes", flow, count)]
    for gate, count in need.parked:
        parked = [rows.lane(row) for row in tx.all("select_parked_lanes", gate, count)]
        flows += _by_id(tx, "select_flow", {lane.flow for lane in parked}, rows.flow)
        flows += [rows.flow(row) for row in tx.all("select_parked_flows", gate, count)]
        lanes += parked
    scanned: list[FlowRow] = []
    if need.scan is not None:
        vtime, tie, count = need.scan
        # Strictly after: tie-breakers are whole numbers.
        scanned, first = _scan(tx, queue, vtime, tie + 1, count)
        lanes += first
    heads = {
        lane: [Head(position, position, at) for position, at in tx.all("select_heads", lane, floor, count)]
        for lane, floor, count in need.heads
    }
    shared = sharing.select_gates(tx, need.shared)
    return Supply(flows + scanned, gates, lanes, heads, [flow.id for flow in scanned], shared)


def _start(
    tx: Transaction, queue: str, starts: list[Start], lease: UUID, worker: WorkerIdentity, now: Instant
) -> list[Claim]:
    if not starts:
        return []
    planned = msgspec.json.encode(
        [(start.head.ref, start.charge, rows.join_shared(start.shared)) for start in starts]
    ).decode()
    found = {row[0]: row[1:] for row in tx.all("claim_jobs", now, lease.bytes, worker.name, planned)}
    return [_claim(queue, found[start.head.ref], lease, now) for start in starts]


def _claim(queue: str, row: rows.Row, lease: UUID, now: Instant) -> Claim:
    job, task, priority, keys, payload, attempt, most, enqueued_at, cancel = row
    return Claim(
        UUID(bytes=job),
        lease,
        queue,
        task,
        priority,
        rows.decode_keys(keys),
        payload,
        attempt,
        most,
        enqueued_at,
        now,
        bool(cancel),
    )


def _write(tx: Transaction, queue: QueueInForce, plan: Plan) -> None:
    tx.run_many("upsert_flow", [rows.flow_parameters(row, queue.id) for row in plan.flows])
    tx.run_many("upsert_lane", [rows.lane_parameters(row, queue.id) for row in plan.lanes])
    tx.run_many("upsert_gate", [rows.gate_parameters(row, queue.id) for row in plan.gates])
    state = plan.queue
    tx.run("update_queue", state.vtime, state.cursor, state.cursor_tie, state.tie, state.cost, queue.id)
    if plan.shared or plan.rings:
        sharing.write(tx, queue.policy, plan)
