"""A claim on SQLite: inside one write transaction, read what has happened, plan on the board in memory, write."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TypeVar
from uuid import UUID, uuid4

import msgspec
from msgspec.structs import astuple

from fairlane.clock import Instant
from fairlane.job import SUSPECT_FROM, Claim
from fairlane.policy.overrides import Overrides
from fairlane.policy.policy import Policy
from fairlane.scheduler.journal import (
    FORMAT,
    Delta,
    Mark,
    Removed,
    decode_delta,
    encode_delta,
    encode_removed,
    encode_tally,
    moves,
)
from fairlane.scheduler.plan import paces_of
from fairlane.scheduler.rebuild import Rebuilt
from fairlane.scheduler.resident import Found, ResidentBoard
from fairlane.scheduler.snapshot import (
    Arrival,
    Ask,
    Events,
    Forced,
    GateRow,
    Head,
    Plan,
    QueueRow,
    Release,
    Start,
)
from fairlane.store.boards import MOST_WHOLE, Raced, as_read
from fairlane.store.protocol import (
    FOLD_AT_MOST,
    LANES_PER_SCANNED_FLOW,
    PROMOTE_AT_MOST,
    RELEASES_AT_MOST,
    Asked,
    Claimed,
    Looked,
    WorkerIdentity,
)
from fairlane.store.rows import (
    claim_of,
    decode_limit,
    decode_overrides,
    encode,
    flow_parameters,
    gate_parameters,
    journal_too_new,
    lane_parameters,
)
from fairlane.store.sqlite import rows, shared_limits
from fairlane.store.sqlite.database import Transaction

T = TypeVar("T")


class QueueInForce(msgspec.Struct, frozen=True):
    """A queue's row: its number, its policy in force, its scheduling state, and how far its board has come."""

    id: int
    policy: Policy
    version: int
    applied_at: Instant
    mark: Mark
    stored: int
    base: int
    format: int
    state: QueueRow


_policies: dict[str, Policy] = {}
MOST_POLICIES = 1_000
"""Policies that are kept decoded."""


def load_queue(tx: Transaction, name: str) -> QueueInForce | None:
    row = tx.one("select_queue", name)
    if row is None:
        return None
    number, text, digest, version, applied_at, amended, seq, token, stored, base, format, *state = row
    key = f"{name}/{digest}/{amended}"
    stored_policy = _known_policy(key, lambda: Policy.decode(text).overridden(select_overrides(tx, number)))
    policy = stored_policy
    if policy.shared_limits:
        limits = shared_limits.limits_in_force(tx, number)
        policy = _known_policy(
            "/".join([key, *limits.values()]),
            lambda: stored_policy.with_shared({name: decode_limit(limit) for name, limit in limits.items()}),
        )
    mark = Mark(seq, UUID(bytes=token))
    return QueueInForce(number, policy, version, applied_at, mark, stored, base, format, QueueRow(*state))


def _known_policy(key: str, make: Callable[[], Policy]) -> Policy:
    if key not in _policies:
        if len(_policies) >= MOST_POLICIES:
            _policies.clear()
        _policies[key] = make()
    return _policies[key]


def select_overrides(tx: Transaction, queue: int) -> Overrides:
    """What operators have changed."""
    return decode_overrides(text for (text,) in tx.all("select_overrides", queue))


def queue_number(tx: Transaction, name: str) -> int:
    """The number of a queue that is known."""
    number: int = tx.value("select_queue_id", name) or 0
    return number


# The board.


def board_of(tx: Transaction, queue: QueueInForce) -> ResidentBoard:
    """The board as it is now: what memory knows and what has changed since, or the tables and the journal."""
    board = tx.boards.get(queue.id)
    mark = None if board is None else board.mark
    # If a crash has lost a checkpoint and not the changes before it, we know too little of what is unwritten.
    if board is not None and mark is not None and queue.stored >= board.stored and _knows(tx, queue, mark):
        after = mark.seq
    else:
        # The tables hold the changes before. Laid over them again, a removal would take away what has come back since.
        board, after = _read_board(tx, queue), queue.stored
    _catch_up(tx, queue, board, after)
    if board.policy is not queue.policy:
        board.rebind(queue.policy)
    tx.boards.put(queue.id, board)
    return board


def tail_of(tx: Transaction, queue: QueueInForce) -> ResidentBoard:
    """What the tables do not hold, for those who only look: a board that asks them for the rest."""
    board = ResidentBoard(queue.policy)
    _catch_up(tx, queue, board, queue.stored)
    return board


def _knows(tx: Transaction, queue: QueueInForce, mark: Mark) -> bool:
    """Whether a board with this mark is of the past of this queue, as far as the journal goes."""
    if mark == queue.mark:
        return True
    return mark.seq >= queue.base and bool(tx.value("has_delta", queue.id, mark.seq, mark.token.bytes))


def _catch_up(tx: Transaction, queue: QueueInForce, board: ResidentBoard, after: int) -> None:
    if queue.format != FORMAT:
        raise journal_too_new(queue.policy.queue, queue.format)
    if after < queue.mark.seq:
        for seq, token, delta in tx.all("select_deltas", queue.id, after):
            board.apply(decode_delta(delta), Mark(seq, UUID(bytes=token)))
    board.mark = queue.mark
    board.wrote(queue.stored)


def _read_board(tx: Transaction, queue: QueueInForce) -> ResidentBoard:
    found = Found(
        [rows.flow(row) for row in tx.some("select_all_flows", MOST_WHOLE + 1, (), queue.id)],
        [rows.lane(row) for row in tx.some("select_all_lanes", MOST_WHOLE + 1, (), queue.id)],
        [rows.gate(row) for row in tx.some("select_all_gates", MOST_WHOLE + 1, (), queue.id)],
    )
    return as_read(queue.policy, found, MOST_WHOLE)


def answer(tx: Transaction, queue: QueueInForce, asking: Generator[Ask, Found, T]) -> T:
    """Give whoever asks what the tables know, until it has come to a result."""
    try:
        ask = next(asking)
        while True:
            ask = asking.send(found(tx, queue.id, ask))
    except StopIteration as stop:
        result: T = stop.value
        return result


def found(tx: Transaction, queue: int, ask: Ask) -> Found:
    """What the tables hold of it."""
    heads, shared = heads_of(tx, ask.heads), shared_limits.select_gates(tx, ask.shared)
    if not ask.is_of_board:
        return Found(heads=heads, shared=shared)
    known_flows, known_lanes, known_gates = map(frozenset, ask.but_not)
    flows = []
    if ask.scan is not None:
        vtime, tie, count = ask.scan
        flows = [rows.flow(row) for row in tx.some("scan_flows", count, known_flows, queue, vtime, tie)]
    scanned = len(flows)
    lanes = [rows.lane(row) for row in _by_id(tx, "select_lanes", queue, ask.lanes)]
    for flow, count in (*ask.ready, *((row.id, LANES_PER_SCANNED_FLOW) for row in flows)):
        lanes += [rows.lane(row) for row in tx.some("select_ready_lanes", count, known_lanes, flow)]
    for gate, count in ask.parked:
        lanes += [rows.lane(row) for row in tx.some("select_parked_lanes", count, known_lanes, gate)]
        flows += [rows.flow(row) for row in tx.some("select_parked_flows", count, known_flows, gate)]
    others = {*ask.flows, *(lane.flow for lane in lanes)} - {row.id for row in flows}
    flows += [rows.flow(row) for row in _by_id(tx, "select_flows", queue, sorted(others))]
    gates = [rows.gate(row) for row in _by_id(tx, "select_gates", queue, ask.gates)]
    if ask.alarms is not None:
        after, count = ask.alarms
        gates += [rows.gate(row) for row in tx.some("select_alarms", count, known_gates, queue, after)]
    return Found(flows, lanes, gates, heads, shared, scanned)


def _by_id(tx: Transaction, statement: str, queue: int, ids: Sequence[bytes]) -> list[rows.Row]:
    return tx.all(statement, queue, len(ids), b"".join(ids)) if ids else []


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
        ids, floors = b"".join([lane for lane, _ in lanes]), encode([floor for _, floor in lanes])
        for number, position, at in tx.all("select_heads_of_lanes", ids, floors, count):
            heads[lanes[number][0]].append(Head(position, position, at))
    return heads


def checkpoint(tx: Transaction, queue: QueueInForce, now: Instant) -> QueueInForce:
    """Write what the tables do not hold; returns the queue's row as it is then."""
    board = board_of(tx, queue)
    _put(tx, queue.id, board.changed_rows(), now)
    tx.run("store_journal", queue.mark.seq, queue.id)
    tx.run("delete_deltas", queue.id)
    board.wrote(queue.mark.seq)
    tx.boards.written(queue.id)
    return msgspec.structs.replace(queue, base=queue.stored, stored=queue.mark.seq)


def to_tables(tx: Transaction, queue: QueueInForce, now: Instant) -> None:
    """Write what the tables do not hold, and let everybody forget the rest: they are going to be worked on."""
    _put(tx, queue.id, board_of(tx, queue).changed_rows(), now)
    tx.run("seal_journal", uuid4().bytes, queue.id)
    tx.boards.drop(queue.id)


def put_gates(tx: Transaction, queue: int, gates: Sequence[GateRow], now: Instant) -> None:
    """Store gates that the tables held otherwise."""
    _put(tx, queue, Delta(gates=list(gates)), now)


def _put(tx: Transaction, queue: int, delta: Delta, now: Instant) -> None:
    tx.run_many("upsert_flow", [flow_parameters(row, queue, now) for row in delta.flows])
    tx.run_many("upsert_lane", [lane_parameters(row, queue) for row in delta.lanes])
    tx.run_many("upsert_gate", [gate_parameters(row, queue) for row in delta.gates])


def note_removed(tx: Transaction, queue: QueueInForce, removed: Removed, ready: int, running: int) -> None:
    """Collection has removed these from the tables: whoever holds them in memory lets them go."""
    mark = Mark(queue.mark.seq + 1, uuid4())
    _note(tx, queue.id, queue.state, (-ready, -running, 0), mark, encode_removed(removed))
    board_of(tx, queue).apply(Delta(removed=removed), mark)


# Claims.


def claim(tx: Transaction, queue: QueueInForce, want: int, asked: Asked, now: Instant) -> Claimed:
    """Start up to `want` jobs."""
    _promote(tx, queue, now)
    bells = _drain(tx, queue)
    forced = forced_jobs(tx, queue.id, want)
    listens = asked.listener is not None
    plan = _plan(tx, queue, want, now, bells, forced, asked.start_lag, asked.ahead, listens=listens)
    lease, policy = uuid4(), queue.policy
    claims = start(tx, policy.queue, plan.starts, lease, asked.worker)
    if claims:
        held = encode([start.head.ref for start in plan.starts])
        tx.run("insert_lease", lease.bytes, asked.worker.id.bytes, now + asked.duration, now, len(claims), held)
    _write(tx, queue, plan, bells, now)
    if forced:
        tx.run("forget_forced", queue.id)
    paces = paces_of(claims, plan.starts)
    due = _next_due(tx, queue) if len(claims) < want or paces else None
    return Claimed(
        claims,
        lease,
        due,
        plan.more or not bells.are_all,
        look_again=False,
        vtime=plan.queue.vtime,
        is_limited=bool(policy.limits),
        folded=len(bells.arrivals) + len(bells.releases),
        at=now,
        paces=paces,
        terms=policy,
        opens_by_ends=policy.opens_by_ends,
    )


def look(tx: Transaction, queue: QueueInForce, want: int, *, now: Instant) -> Looked:
    """How many jobs could start now, up to `want`."""
    tx.run("begin_look")
    _promote(tx, queue, now)
    bells = _drain(tx, queue)
    plan = _plan(tx, queue, want, now, bells, listens=True)
    is_filled = len(plan.starts) >= want
    due = None if is_filled else _next_due(tx, queue)
    if plan.starts:
        # Nothing of it is written: the board in memory is forgotten too.
        tx.run("undo_look")
    else:
        # As a claim that starts nothing: what is shut is parked, and rings when it opens.
        _write(tx, queue, plan, bells, now)
    return Looked(len(plan.starts), now, due, look_again=not is_filled and (plan.more or not bells.are_all))


def _next_due(tx: Transaction, queue: QueueInForce) -> Instant | None:
    """When something opens by itself, once a plan is made."""
    board = tx.boards.get(queue.id)
    times = (
        tx.value("next_due_job", queue.id),
        None if board is None else board.next_alarm(),
        tx.value("next_lease_end"),
        tx.value("next_override_end", queue.id),
    )
    return min((time for time in times if time is not None), default=None)


def fold_all(tx: Transaction, queue: QueueInForce, now: Instant) -> QueueInForce:
    """Fold every bell, start nothing."""
    while True:
        bells = _drain(tx, queue)
        if bells.arrivals or bells.releases:
            _write(tx, queue, _plan(tx, queue, 0, now, bells), bells, now)
            queue = load_queue(tx, queue.policy.queue) or queue
        if bells.are_all:
            return queue


def replace_board(tx: Transaction, queue: int, rebuilt: Rebuilt, now: Instant) -> None:
    """Put another board in the place of the one that the tables hold."""
    for statement in ("delete_flows", "delete_lanes", "delete_gates"):
        tx.run(statement, queue)
    _put(tx, queue, Delta(rebuilt.flows, rebuilt.lanes, rebuilt.gates), now)
    state = rebuilt.queue
    tx.run("replace_state", state.vtime, state.cursor, state.cursor_tie, state.tie, state.cost, *rebuilt.totals, queue)
    if rebuilt.tally is not None:
        tx.run("note_told", queue, encode_tally(rebuilt.tally))


def _promote(tx: Transaction, queue: QueueInForce, now: Instant) -> None:
    """Scheduled jobs that are due join their lanes, and ring: at the end, or in the place they kept in a sequence or
    while they waited to run alone."""
    due = tx.all("select_due_jobs", queue.id, now, PROMOTE_AT_MOST)
    if not due:
        return
    place: int = tx.value("take_positions", len(due)) - len(due)
    in_sequence = queue.policy.sequence is not None
    promoted = []
    bells: dict[bytes, rows.Bell] = {}
    for position, lane, priority, keys, keeps_place, ready_at, given, given_by, suspicion in due:
        place += 1
        # A suspect that is scheduled was given back: had it run, it would be cleared.
        keeps = keeps_place and (in_sequence or suspicion >= SUSPECT_FROM)
        joins = (position, ready_at) if keeps else (place, now)
        promoted.append((*joins, position))
        bell = bells.get(lane)
        if bell is None:
            bell = bells[lane] = rows.Bell(queue.id, lane, priority, keys, 0, *joins)
        bell.count += 1
        bell.floor, bell.since = min((bell.floor, bell.since), joins)
        bell.resumed += keeps_place
        if given is not None and given_by > (bell.given_by or 0):
            bell.given, bell.given_by = given, given_by
    tx.run_many("promote_job", promoted)
    tx.run_many("insert_arrival", [astuple(bell) for bell in bells.values()])


class _Bells(msgspec.Struct, frozen=True):
    """What a claim folds."""

    arrivals: list[Arrival]
    releases: list[Release]
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
    releases = [bell for _, text in released for bell in rows.releases(text)]
    are_all = len(arrived) < FOLD_AT_MOST and len(releases) < RELEASES_AT_MOST
    last = (released[-1][0] if released else 0, arrived[-1][0] if arrived else 0)
    return _Bells([rows.arrival(row) for row in arrived], releases, are_all, last)


def forced_jobs(tx: Transaction, queue: int, want: int) -> list[Forced]:
    """Jobs that an operator wants to start next."""
    found = tx.all("select_forced", queue, want)
    return [Forced(lane, Head(position, position, ready_at)) for lane, position, ready_at in found]


def _events(queue: QueueInForce, now: Instant, bells: _Bells, forced: Sequence[Forced]) -> Events:
    return Events(now, queue.state, bells.arrivals, bells.releases, list(forced), queue.applied_at)


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
    """Plan on the board in memory: it is written, or forgotten."""
    board = board_of(tx, queue)
    board.mark = None
    events = _events(queue, now, bells, forced)
    if queue.policy.shared_limits:
        events = shared_limits.fold_into(tx, queue.id, events)
    return answer(tx, queue, board.claim(events, want, lag=lag, listens=listens, ahead=ahead))


def _write(tx: Transaction, queue: QueueInForce, plan: Plan, bells: _Bells, now: Instant) -> None:
    board = tx.boards.get(queue.id)
    assert board is not None, "what is written was planned on the board in memory"
    if plan.flows or plan.lanes or plan.gates or bells.last != (0, 0) or plan.queue != queue.state:
        mark, delta = Mark(queue.mark.seq + 1, uuid4()), encode_delta(plan)
        board.note(plan, mark)
        told = None if plan.tally is None else encode_tally(plan.tally)
        _note(tx, queue.id, plan.queue, moves(plan), mark, delta, told)
    else:
        board.mark = queue.mark
    if backlogs := [gate.row() for gate in plan.gates if gate.bound.limit.is_of_producers]:
        put_gates(tx, queue.id, backlogs, now)  # producers read them
    if plan.shared or plan.rings:
        shared_limits.write(tx, queue.policy, plan)


def _note(
    tx: Transaction,
    queue: int,
    state: QueueRow,
    moves: tuple[int, int, int],
    mark: Mark,
    delta: bytes,
    told: bytes | None = None,
) -> None:
    """Append a change to the journal."""
    numbers = (state.vtime, state.cursor, state.cursor_tie, state.tie, state.cost)
    tx.run("note_change", *numbers, *moves, mark.seq, mark.token.bytes, queue)
    tx.run("insert_delta", queue, mark.seq, mark.token.bytes, delta, told)
    tx.boards.noted(queue, len(delta))


MOST_KINDS = 4
"""Kinds of starts, by what they are charged, that are written by a statement each: more are written together."""


def start(tx: Transaction, queue: str, starts: list[Start], lease: UUID, worker: WorkerIdentity) -> list[Claim]:
    """Hand jobs to a worker, in the order of the plan; `Raced` if one of them is not ready any more."""
    if not starts:
        return []
    alike: dict[tuple[float, tuple[bytes, ...], Instant], list[int]] = {}
    for each in starts:
        alike.setdefault((each.charge, each.shared, each.at), []).append(each.head.ref)
    started: list[rows.Row] = []
    if len(alike) <= MOST_KINDS:
        for (charge, shared, at), positions in alike.items():
            passed = rows.join_shared(shared)
            started += tx.all("claim_alike", at, lease.bytes, worker.name, encode(positions), charge, passed)
    else:
        planned = [(each.head.ref, each.charge, rows.join_shared(each.shared), each.at) for each in starts]
        started = tx.all("claim_jobs", lease.bytes, worker.name, encode(planned))
    found = {row[0]: row[1:] for row in started}
    if len(found) < len(starts):
        # Cancelled since its lane's next jobs were looked up, and the bell of it is not folded yet.
        raise Raced
    return [claim_of(found[each.head.ref], lease, queue, each.at) for each in starts]
