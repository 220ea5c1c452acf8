"""A claim on SQLite: inside one write transaction, load what the plan asks for and write what it decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeVar
from uuid import UUID, uuid4

import msgspec

from fairlane.clock import Instant
from fairlane.job import Claim
from fairlane.policy.policy import Policy
from fairlane.scheduler.plan import plan_claims
from fairlane.scheduler.rebuild import rebuild
from fairlane.scheduler.snapshot import (
    Arrival,
    FlowRow,
    Head,
    LaneRow,
    Need,
    Plan,
    QueueRow,
    Release,
    Snapshot,
    Start,
    Supply,
)
from fairlane.store.protocol import FOLD_AT_MOST, Claimed, WorkerIdentity
from fairlane.store.sqlite import rows
from fairlane.store.sqlite.database import Transaction

__all__ = ["QueueInForce", "claim", "fold_all", "load_queue", "next_due", "queue_number", "replace_policy"]

T = TypeVar("T")

PROMOTE_AT_MOST = 1_000
RELEASES_AT_MOST = 4_000
LANES_PER_SCANNED_FLOW = 2


class QueueInForce(msgspec.Struct, frozen=True):
    """A queue's row: its number, its policy in force, its scheduling state."""

    id: int
    policy: Policy
    version: int
    state: QueueRow


_policies: dict[str, Policy] = {}


def load_queue(tx: Transaction, name: str) -> QueueInForce | None:
    row = tx.one("select_queue", name)
    if row is None:
        return None
    number, text, digest, version, *state = row
    key = f"{name}/{digest}"
    policy = _policies.get(key)
    if policy is None:
        policy = _policies[key] = Policy.decode(text)
    return QueueInForce(number, policy, version, QueueRow(*state))


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
) -> Claimed:
    """Start up to `want` jobs."""
    _promote(tx, queue.id, now)
    arrivals, releases, all_folded = _drain(tx, queue.id)
    plan = _plan(tx, queue, want, now, arrivals, releases)
    lease = uuid4()
    claims = _start(tx, queue.policy.queue, plan.starts, lease, worker, now)
    if claims:
        held = msgspec.json.encode([start.head.ref for start in plan.starts]).decode()
        tx.run("insert_lease", lease.bytes, worker.id.bytes, lease_expires_at, now, len(claims), held)
    _write(tx, queue.id, plan)
    due = next_due(tx, queue.id) if len(claims) < want else None
    return Claimed(claims, lease, due, plan.more or not all_folded, look_again=False)


def next_due(tx: Transaction, queue: int) -> Instant | None:
    """When something opens by itself."""
    times = (tx.value("next_due_job", queue), tx.value("next_alarm", queue), tx.value("next_lease_end"))
    return min((time for time in times if time is not None), default=None)


def fold_all(tx: Transaction, queue: QueueInForce, now: Instant) -> QueueInForce:
    """Fold every bell, start nothing."""
    while True:
        arrivals, releases, all_folded = _drain(tx, queue.id)
        if arrivals or releases:
            _write(tx, queue.id, _plan(tx, queue, 0, now, arrivals, releases))
            queue = load_queue(tx, queue.policy.queue) or queue
        if all_folded:
            return queue


def replace_policy(tx: Transaction, queue: QueueInForce, policy: Policy, now: Instant) -> None:
    """Put another policy in force: flows and gates are made anew from the lanes."""
    queue = fold_all(tx, queue, now)
    rebuilt = rebuild(
        policy,
        now,
        queue.state,
        [rows.flow(row) for row in tx.all("select_all_flows", queue.id)],
        [rows.lane(row) for row in tx.all("select_all_lanes", queue.id)],
        [rows.gate(row) for row in tx.all("select_all_gates", queue.id)],
    )
    for statement in ("delete_flows", "delete_lanes", "delete_gates"):
        tx.run(statement, queue.id)
    tx.run("update_policy", policy.encoded, policy.digest, queue.id)
    _write(tx, queue.id, Plan([], rebuilt.queue, rebuilt.flows, rebuilt.lanes, rebuilt.gates, False))


def _promote(tx: Transaction, queue: int, now: Instant) -> None:
    """Scheduled jobs that are due join their lanes at the end, and ring."""
    due = tx.all("select_due_jobs", queue, now, PROMOTE_AT_MOST)
    if not due:
        return
    last: int = tx.value("take_positions", len(due))
    first = last - len(due) + 1
    tx.run_many("promote_job", [(first + n, now, row[0]) for n, row in enumerate(due)])
    counts = Counter(lane for _, lane, _, _ in due)
    heads = {lane: (queue, lane, priority, keys, counts[lane], first + n, now)
             for n, (_, lane, priority, keys) in reversed(list(enumerate(due)))}
    tx.run_many("insert_arrival", list(heads.values()))


def _drain(tx: Transaction, queue: int) -> tuple[list[Arrival], list[Release], bool]:
    releases = tx.all("select_releases", queue, RELEASES_AT_MOST)
    if releases:
        tx.run("delete_releases", queue, releases[-1][0])
    arrivals = tx.all("select_arrivals", queue, FOLD_AT_MOST)
    if arrivals:
        tx.run("delete_arrivals", queue, arrivals[-1][0])
    all_folded = len(arrivals) < FOLD_AT_MOST and len(releases) < RELEASES_AT_MOST
    return [rows.arrival(row) for row in arrivals], [rows.release(row) for row in releases], all_folded


def _plan(
    tx: Transaction,
    queue: QueueInForce,
    want: int,
    now: Instant,
    arrivals: list[Arrival],
    releases: list[Release],
) -> Plan:
    planning = plan_claims(_snapshot(tx, queue, want, now, arrivals, releases), want)
    try:
        need = next(planning)
        while True:
            need = planning.send(_supply(tx, queue.id, need))
    except StopIteration as stop:
        plan: Plan = stop.value
        return plan


def _snapshot(
    tx: Transaction,
    queue: QueueInForce,
    want: int,
    now: Instant,
    arrivals: list[Arrival],
    releases: list[Release],
) -> Snapshot:
    lanes = _by_id(tx, "select_lane", {bell.lane for bell in (*releases, *arrivals)}, rows.lane)
    count = max(want, 1)
    scanned = [
        rows.flow(row) for row in tx.all("scan_flows", queue.id, queue.state.cursor, queue.state.cursor_tie, count)
    ]
    flows = {flow.id: flow for flow in scanned}
    for flow in _by_id(tx, "select_flow", {lane.flow for lane in lanes} - set(flows), rows.flow):
        flows[flow.id] = flow
    for found in scanned:
        lanes += [rows.lane(row) for row in tx.all("select_ready_lanes", found.id, LANES_PER_SCANNED_FLOW)]
    due = [rows.gate(row) for row in tx.all("select_due_gates", queue.id, now, count)]
    return Snapshot(
        queue.policy,
        now,
        queue.state,
        arrivals,
        releases,
        lanes,
        list(flows.values()),
        [flow.id for flow in scanned],
        len(scanned) < count,
        due,
    )


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
        scanned = [rows.flow(row) for row in tx.all("scan_flows", queue, vtime, tie + 1, count)]
        for found in scanned:
            lanes += [rows.lane(row) for row in tx.all("select_ready_lanes", found.id, LANES_PER_SCANNED_FLOW)]
    heads = {
        lane: [Head(position, position, at) for position, at in tx.all("select_heads", lane, floor, count)]
        for lane, floor, count in need.heads
    }
    return Supply(flows + scanned, gates, lanes, heads, [flow.id for flow in scanned])


def _start(
    tx: Transaction, queue: str, starts: list[Start], lease: UUID, worker: WorkerIdentity, now: Instant
) -> list[Claim]:
    claims = []
    for start in starts:
        row = tx.one("claim_job", now, lease.bytes, worker.name, start.charge, start.head.ref)
        if row is None:
            raise AssertionError(f"job at position {start.head.ref} was ready when it was planned and is not any more")
        job, task, priority, keys, payload, attempt, most, enqueued_at, cancel = row
        claims.append(
            Claim(
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
        )
    return claims


def _write(tx: Transaction, queue: int, plan: Plan) -> None:
    tx.run_many("upsert_flow", [rows.flow_parameters(row, queue) for row in plan.flows])
    tx.run_many("upsert_lane", [rows.lane_parameters(row, queue) for row in plan.lanes])
    tx.run_many("upsert_gate", [rows.gate_parameters(row, queue) for row in plan.gates])
    state = plan.queue
    tx.run("update_queue", state.vtime, state.cursor, state.cursor_tie, state.tie, state.cost, queue)
