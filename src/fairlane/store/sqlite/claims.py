"""A claim on SQLite: inside one write transaction, load what the plan asks for and write what it decides."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import Any, TypeVar
from uuid import uuid4

import msgspec

from fairlane.clock import Instant
from fairlane.policy.overrides import Overrides
from fairlane.policy.policy import Policy
from fairlane.scheduler.census import HeldLane, corrected
from fairlane.scheduler.plan import plan_claims
from fairlane.scheduler.rebuild import rebuild, refuse_to_strand
from fairlane.scheduler.snapshot import (
    Arrival,
    FlowRow,
    Forced,
    GateRow,
    Head,
    KeptPlaces,
    LaneRow,
    Need,
    Plan,
    QueueRow,
    Release,
    Snapshot,
    Supply,
)
from fairlane.scheduler.strays import imported, shared_tokens, tokens_of_its_own, tokens_to_share
from fairlane.scheduler.tally import encode_tally
from fairlane.store.decoding import decode_limit, decode_overrides
from fairlane.store.protocol import (
    FOLD_AT_MOST,
    LANES_PER_SCANNED_FLOW,
    PROMOTE_AT_MOST,
    RELEASES_AT_MOST,
    Claimed,
    Looked,
    WorkerIdentity,
    paces_of,
)
from fairlane.store.sqlite import rows, sharing
from fairlane.store.sqlite.database import Transaction
from fairlane.store.sqlite.known import Known
from fairlane.store.sqlite.starting import start
from fairlane.store.sqlite.writing import write_rows

__all__ = [
    "QueueInForce",
    "answer",
    "check_waiting",
    "claim",
    "fold_all",
    "forced_jobs",
    "heads_of",
    "kept_places",
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

MOST_ONE_BY_ONE = 4
"""Flows whose lanes are read by a statement each: more are read together."""


class QueueInForce(msgspec.Struct, frozen=True):
    """A queue's row: its number, its policy in force, its scheduling state."""

    id: int
    policy: Policy
    version: int
    applied_at: Instant
    state: QueueRow
    known: Known


_policies: dict[str, Policy] = {}
MOST_POLICIES = 1_000
"""Policies that are kept decoded."""


def load_queue(tx: Transaction, name: str) -> QueueInForce | None:
    row = tx.one("select_queue", name)
    if row is None:
        return None
    number, text, digest, version, applied_at, amended, revision, *state = row
    key = f"{name}/{digest}/{amended}"
    policy = _policies.get(key)
    if policy is None:
        if len(_policies) >= MOST_POLICIES:
            _policies.clear()
        policy = _policies[key] = Policy.decode(text).overridden(select_overrides(tx, number))
    if policy.shared_limits:
        policy = _resolved(tx, policy, number, key)
    return QueueInForce(number, policy, version, applied_at, QueueRow(*state), tx.known_of(number, revision))


def _resolved(tx: Transaction, policy: Policy, queue: int, key: str) -> Policy:
    """The policy with its shared limits as they are in force."""
    documents = sharing.limits_in_force(tx, queue)
    key = "/".join([key, *documents.values()])
    if key not in _policies:
        in_force = {name: decode_limit(text) for name, text in documents.items()}
        _policies[key] = policy.with_shared(in_force)
    return _policies[key]


def select_overrides(tx: Transaction, queue: int) -> Overrides:
    """What operators have changed."""
    return decode_overrides(text for (text,) in tx.all("select_overrides", queue))


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
    ahead: int | None = None,
    listens: bool = False,
) -> tuple[Claimed, dict[int, int]]:
    """Start up to `want` jobs. Returned with them: in which other queues somebody is to be woken."""
    _promote(tx, queue, now)
    bells = _drain(tx, queue)
    forced = forced_jobs(tx, queue.id, want)
    plan = _plan(tx, queue, want, now, bells, forced, lag, ahead, listens=listens)
    lease = uuid4()
    claims = start(tx, queue.policy.queue, plan.starts, lease, worker)
    if claims:
        held = msgspec.json.encode([start.head.ref for start in plan.starts]).decode()
        tx.run("insert_lease", lease.bytes, worker.id.bytes, lease_expires_at, now, len(claims), held)
    _write(tx, queue, plan, now)
    if forced:
        tx.run("forget_forced", queue.id)
    paces = paces_of(claims, plan.starts)
    due = next_due(tx, queue.id) if len(claims) < want or paces else None
    more = plan.more or not bells.are_all
    folded = len(bells.arrivals) + len(bells.releases)
    claimed = Claimed(claims, lease, due, more, False, plan.queue.vtime, bool(queue.policy.limits), folded)
    opens_by_ends = queue.policy.opens_by_ends
    claimed = msgspec.structs.replace(claimed, at=now, paces=paces, terms=queue.policy, opens_by_ends=opens_by_ends)
    return claimed, sharing.rung(tx, plan)


def look(tx: Transaction, queue: QueueInForce, want: int, *, now: Instant) -> tuple[Looked, dict[int, int]]:
    """How many jobs could start now, up to `want`; and in which other queues somebody is to be woken."""
    tx.run("begin_look")
    _promote(tx, queue, now)
    bells = _drain(tx, queue)
    plan = _plan(tx, queue, want, now, bells, listens=True)
    rung: dict[int, int] = {}
    if plan.starts:
        tx.run("undo_look")
    else:
        # As a claim that starts nothing: what is shut is parked, and rings when it opens.
        _write(tx, queue, plan, now)
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
        bells = _drain(tx, queue)
        if bells.arrivals or bells.releases:
            _write(tx, queue, _plan(tx, queue, 0, now, bells), now)
            queue = load_queue(tx, queue.policy.queue) or queue
        if bells.are_all:
            return queue


def replace_policy(
    tx: Transaction,
    queue: QueueInForce,
    policy: Policy,
    now: Instant,
    *,
    accept_missing_keys: bool,
    coming: Sequence[GateRow] = (),
) -> None:
    """Put another policy in force; `InvalidPolicy` where waiting jobs lack a key that it looks at."""
    in_force = policy.overridden(queue.policy.overrides)
    gates = [rows.gate(row) for row in tx.all("select_all_gates", queue.id)]
    tokens = tokens_to_share(queue.policy, policy, gates)
    for name, bound in shared_tokens(queue.policy, policy).items():
        coming = [*coming, *tokens_of_its_own(policy.queue, name, sharing.gates_of(tx, bound))]
    remake(tx, queue, in_force, now, accept_missing_keys=accept_missing_keys, coming=coming)
    tx.run("update_policy", policy.encoded, policy.digest, now, queue.id)
    sharing.put_in_force(tx, queue.id, policy, now)
    sharing.count_running(tx, queue.id, policy)
    sharing.put_tokens(tx, policy, tokens)


def check_waiting(tx: Transaction, queue: QueueInForce, policy: Policy) -> None:
    """Refuse what `replace_policy` would refuse because of jobs that wait, as far as bells have been folded."""
    refuse_to_strand(policy, [rows.lane(row) for row in tx.all("select_all_lanes", queue.id)])


def remake(
    tx: Transaction,
    queue: QueueInForce,
    policy: Policy,
    now: Instant,
    *,
    accept_missing_keys: bool = True,
    coming: Sequence[GateRow] = (),
    holds: Sequence[HeldLane] | None = None,
) -> None:
    """Make flows and gates anew from the lanes, as this policy has them; every lane with ready jobs is woken. With
    `holds`, lanes count those."""
    queue = fold_all(tx, queue, now)
    lanes = [rows.lane(row) for row in tx.all("select_all_lanes", queue.id)]
    if holds is not None:
        lanes = corrected(lanes, holds)
    if not accept_missing_keys:
        refuse_to_strand(policy, lanes)
    rebuilt = rebuild(
        policy,
        now,
        queue.state,
        [rows.flow(row) for row in tx.all("select_all_flows", queue.id)],
        lanes,
        imported(policy.queue, [rows.gate(row) for row in tx.all("select_all_gates", queue.id)], coming),
        [] if policy.sequence is None else kept_places(tx, queue.id),
    )
    for statement in ("delete_flows", "delete_lanes", "delete_gates"):
        tx.run(statement, queue.id)
    queue.known.forget()
    tx.run("forget_totals", queue.id)
    _write(tx, queue, rebuilt.plan, now)
    queue.known.forget()


def kept_places(tx: Transaction, queue: int) -> list[KeptPlaces]:
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
    for position, lane, priority, keys, keeps_place, ready_at, given, given_by in due:
        place += 1
        joins = (position, ready_at) if in_sequence and keeps_place else (place, now)
        promoted.append((*joins, position))
        bell = bells.setdefault(lane, [queue.id, lane, priority, keys, 0, *joins, None, 0, None])
        bell[4] += 1
        bell[5:7] = min(tuple(bell[5:7]), joins)
        bell[8] += keeps_place
        if given is not None and given_by > (bell[9] or 0):
            bell[7], bell[9] = given, given_by
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


def _drain(tx: Transaction, queue: QueueInForce) -> _Bells:
    """Read the bells, and take them down."""
    bells = _read_bells(tx, queue)
    if bells.last != (0, 0):
        tx.run("delete_releases", queue.id, bells.last[0])
        tx.run("delete_arrivals", queue.id, bells.last[1])
    return bells


def _read_bells(tx: Transaction, queue: QueueInForce) -> _Bells:
    released = tx.all("select_releases", queue.id, RELEASES_AT_MOST)
    arrived = tx.all("select_arrivals", queue.id, FOLD_AT_MOST)
    if not released and not arrived:
        return _Bells([], [], [], [], are_all=True)
    releases = [bell for _, text in released for bell in rows.releases(text)]
    arrivals = [rows.arrival(row) for row in arrived]
    rung = {bell.lane for bell in releases} | {bell.lane for bell in arrivals}
    lanes = queue.known.lanes(tx, sorted(rung))
    return _Bells(
        arrivals,
        releases,
        lanes,
        queue.known.flows(tx, sorted({lane.flow for lane in lanes})),
        are_all=len(arrivals) < FOLD_AT_MOST and len(releases) < RELEASES_AT_MOST,
        last=(released[-1][0] if released else 0, arrived[-1][0] if arrived else 0),
    )


def forced_jobs(tx: Transaction, queue: int, want: int) -> list[Forced]:
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
    ahead: int | None = None,
    *,
    listens: bool = False,
) -> Plan:
    snapshot = _snapshot(tx, queue, want, now, bells, forced, lag, ahead, listens=listens)
    if queue.policy.shared_limits:
        snapshot = sharing.fold_into(tx, queue.id, snapshot)
    return answer(tx, queue, plan_claims(snapshot, want))


def answer(tx: Transaction, queue: QueueInForce, asking: Generator[Need, Supply, T]) -> T:
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
    if expired := queue.policy.overrides.expired(now):
        queue = msgspec.structs.replace(queue, policy=queue.policy.without(expired))
    bells = _read_bells(tx, queue)
    forced = forced_jobs(tx, queue.id, want)
    rung = {lane.id for lane in bells.lanes}
    bells.lanes.extend(queue.known.lanes(tx, sorted({lane for lane in lanes if lane not in rung})))
    flows = {flow.id for flow in bells.flows}
    bells.flows.extend(queue.known.flows(tx, sorted({lane.flow for lane in bells.lanes} - flows)))
    return sharing.look_into(tx, queue.id, _snapshot(tx, queue, want, now, bells, forced))


def _snapshot(
    tx: Transaction,
    queue: QueueInForce,
    want: int,
    now: Instant,
    bells: _Bells,
    forced: Sequence[Forced],
    lag: int = 0,
    ahead: int | None = None,
    *,
    listens: bool = False,
) -> Snapshot:
    count = max(want, 1)
    scanned, lanes = _scan(tx, queue, queue.state.cursor, queue.state.cursor_tie, count)
    named = queue.known.lanes(tx, sorted({each.lane for each in forced}))
    lanes += named
    flows = queue.known.flows(tx, sorted({lane.flow for lane in named}))
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
        ahead=ahead,
    )


def _scan(
    tx: Transaction, queue: QueueInForce, vtime: float, tie: int, count: int
) -> tuple[list[FlowRow], list[LaneRow]]:
    """Flows that take turns, from there on, and the first lanes of each."""
    ids = [flow for (flow,) in tx.all("scan_flows", queue.id, vtime, tie, count)]
    flows = queue.known.flows(tx, ids)
    lanes: list[LaneRow] = []
    unknown = []
    for flow in flows:
        first = queue.known.first_lanes(flow, LANES_PER_SCANNED_FLOW)
        if first is None:
            unknown.append(flow.id)
        else:
            lanes += first
    if len(unknown) > MOST_ONE_BY_ONE:
        lanes = [rows.lane(row) for row in tx.all("scan_lanes", queue.id, vtime, tie, count, LANES_PER_SCANNED_FLOW)]
        queue.known.add_lanes(lanes)
    else:
        lanes += _ready_lanes(tx, queue, [(each, LANES_PER_SCANNED_FLOW) for each in unknown])
    return flows, lanes


def _ready_lanes(tx: Transaction, queue: QueueInForce, asked: Iterable[tuple[bytes, int]]) -> list[LaneRow]:
    found = [rows.lane(row) for flow, count in asked for row in tx.all("select_ready_lanes", flow, count)]
    queue.known.add_lanes(found)
    return found


def _supply(tx: Transaction, queue: QueueInForce, need: Need) -> Supply:
    flows = queue.known.flows(tx, need.flows)
    gates = queue.known.gates(tx, need.gates)
    lanes = _ready_lanes(tx, queue, need.lanes)
    for gate, count in need.parked:
        parked = [rows.lane(row) for row in tx.all("select_parked_lanes", gate, count)]
        queue.known.add_lanes(parked)
        flows += queue.known.flows(tx, sorted({lane.flow for lane in parked}))
        flows += [rows.flow(row) for row in tx.all("select_parked_flows", gate, count)]
        lanes += parked
    scanned: list[FlowRow] = []
    if need.scan is not None:
        vtime, tie, count = need.scan
        # Strictly after: tie-breakers are whole numbers.
        scanned, first = _scan(tx, queue, vtime, tie + 1, count)
        lanes += first
    heads = heads_of(tx, need.heads)
    shared = sharing.select_gates(tx, need.shared)
    return Supply(flows + scanned, gates, lanes, heads, [flow.id for flow in scanned], shared)


def heads_of(tx: Transaction, asked: Iterable[tuple[bytes, int, int]]) -> dict[bytes, list[Head]]:
    """The first ready jobs of lanes. As many as are wanted of each is one number to a statement."""
    alike: dict[int, list[tuple[bytes, int]]] = {}
    for lane, floor, count in asked:
        alike.setdefault(count, []).append((lane, floor))
    heads: dict[bytes, list[Head]] = {}
    for count, lanes in alike.items():
        if len(lanes) == 1:
            lane, floor = lanes[0]
            heads[lane] = [Head(position, position, at) for position, at in tx.all("select_heads", lane, floor, count)]
            continue
        for lane, _ in lanes:
            heads[lane] = []
        floors = msgspec.json.encode([floor for _, floor in lanes]).decode()
        found = tx.all("select_heads_of_lanes", b"".join([lane for lane, _ in lanes]), floors, count)
        for number, position, at in found:
            heads[lanes[number][0]].append(Head(position, position, at))
    return heads


def _write(tx: Transaction, queue: QueueInForce, plan: Plan, now: Instant) -> None:
    totals = write_rows(tx, queue.id, queue.known, plan, now)
    state = plan.queue
    tx.run("update_queue", state.vtime, state.cursor, state.cursor_tie, state.tie, state.cost, *totals, queue.id)
    if plan.tally is not None:
        tx.run("insert_tally", queue.id, plan.tally.at, encode_tally(plan.tally))
    if plan.shared or plan.rings:
        sharing.write(tx, queue.policy, plan)
