"""A claim on SQLite: inside one write transaction, read what has happened, plan on the board in memory, write."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from uuid import UUID, uuid4

import msgspec
from msgspec.structs import astuple

from fairlane.clock import Instant, microseconds
from fairlane.job import SUSPECT_FROM, Claim
from fairlane.policy.policy import Policy
from fairlane.scheduler import rebuild
from fairlane.scheduler.journal import FORMAT, Mark, decode_delta, encode_delta, encode_stats, moves
from fairlane.scheduler.plan import paces_of
from fairlane.scheduler.resident import Found, ResidentBoard
from fairlane.scheduler.snapshot import (
    Arrival,
    Ask,
    Events,
    Forced,
    GateWakeup,
    Head,
    Plan,
    QueueRow,
    Release,
    SharedGateRow,
    SharedRelease,
    Start,
)
from fairlane.store import boards
from fairlane.store.boards import MOST_WHOLE, Raced, as_read
from fairlane.store.procedures import driven
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
    decode_keys,
    decode_policy,
    encode,
    flow_of,
    gate_of,
    gate_parameters,
    journal_too_new,
    lane_of,
    no_such_queue,
)
from fairlane.store.sqlite import rows
from fairlane.store.sqlite.database import Transaction


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


def load_queue(tx: Transaction, name: str) -> QueueInForce:
    """A queue by its name, or `UnknownQueue`."""
    row = tx.one("select_queue", name)
    if row is None:
        raise no_such_queue(name)
    number, text, version, applied_at, amended, seq, token, stored, base, format, *state = row
    overrides = tuple(document for (document,) in tx.all("select_overrides", number)) if amended else ()
    policy = decode_policy(text, overrides, ())
    if policy.shared_limits:
        shared = tuple(document for _, document in tx.all("select_shared_limits", number))
        policy = decode_policy(text, overrides, shared)
    mark = Mark(seq, UUID(bytes=token))
    return QueueInForce(number, policy, version, applied_at, mark, stored, base, format, QueueRow(*state))


class Loaded(boards.Loaded):
    """A queue as a claim finds it. Its events and its board are read once they are asked for."""

    def __init__(self, tx: Transaction, queue: QueueInForce, now: Instant, *, is_looking: bool) -> None:
        self._tx = tx
        self.queue = queue
        self._is_looking = is_looking
        self.now = now
        self.policy = queue.policy
        self.policy_since = queue.applied_at
        self.state = queue.state
        self.mark = queue.mark
        self.forced: list[Forced] = []

    @cached_property
    def _arrived(self) -> list[rows.Row]:
        return self._tx.all("select_arrivals", self.queue.id, FOLD_AT_MOST)

    @cached_property
    def _released(self) -> list[rows.Row]:
        return self._tx.all("select_releases", self.queue.id, RELEASES_AT_MOST)

    @cached_property
    def arrivals(self) -> list[Arrival]:  # type: ignore[override]
        return [rows.arrival(row) for row in self._arrived]

    @cached_property
    def releases(self) -> list[Release]:  # type: ignore[override]
        return [event for _, text in self._released for event in rows.releases(text)]

    @property
    def all_folded(self) -> bool:
        """Nothing has happened that was not read."""
        return len(self.arrivals) < FOLD_AT_MOST and len(self.releases) < RELEASES_AT_MOST

    @property
    def has_events(self) -> bool:
        return bool(self._arrived or self._released)

    def take_events(self) -> None:
        """The events that were read are folded."""
        if self._released:
            self._tx.run("delete_releases", self.queue.id, self._released[-1][0])
        if self._arrived:
            self._tx.run("delete_arrivals", self.queue.id, self._arrived[-1][0])

    @cached_property
    def board(self) -> ResidentBoard:  # type: ignore[override]
        """The board as it is now: what memory knows and what has changed since, or the tables and the journal."""
        tx, queue = self._tx, self.queue
        if queue.format != FORMAT:
            raise journal_too_new(queue.policy.queue, queue.format)
        board, after = None if self._is_looking else tx.boards.get(queue.id), queue.stored
        mark = None if board is None else board.mark
        # If a crash has lost a checkpoint and not the changes before it, we know too little of what is unwritten.
        if board is not None and mark is not None and queue.stored >= board.stored and self._knows(mark):
            after = mark.seq
        elif self._is_looking:
            board = ResidentBoard(queue.policy)  # who only looks asks for little
        else:
            # The tables hold the changes before. Laid over them again, a removal would take away what has come back.
            board = self._read_board()
        if after < queue.mark.seq:
            for seq, token, delta in tx.all("select_deltas", queue.id, after):
                board.apply(decode_delta(delta), Mark(seq, UUID(bytes=token)))
        board.mark = queue.mark
        board.wrote(queue.stored)
        if board.policy is not queue.policy:
            board.rebind(queue.policy)
        if not self._is_looking:
            tx.boards.put(queue.id, board)
        return board

    def _knows(self, mark: Mark) -> bool:
        """Whether a board with this mark is of the past of this queue, as far as the journal goes."""
        if mark == self.mark:
            return True
        queue = self.queue
        return mark.seq >= queue.base and bool(self._tx.value("has_delta", queue.id, mark.seq, mark.token.bytes))

    def _read_board(self) -> ResidentBoard:
        tx, queue, most = self._tx, self.queue, MOST_WHOLE + 1
        stored = Found(
            [flow_of(row) for row in tx.some("select_all_flows", most, (), queue.id)],
            [lane_of(row) for row in tx.some("select_all_lanes", most, (), queue.id)],
            [gate_of(row) for row in tx.some("select_all_gates", most, (), queue.id)],
        )
        return as_read(queue.policy, stored, MOST_WHOLE)


class Sharing:
    """Limits that a queue shares with others. There is one writer at a time: they need no lock beside the queue's."""

    def __init__(self, tx: Transaction, queue: int) -> None:
        self._tx = tx
        self._queue = queue
        self._names: dict[str, str | None] = {}

    def fold_into(self, events: Events) -> Events:
        """What a plan is to know of them: what was released there, and where others have left room."""
        woken = [gate for (gate,) in self._tx.all("take_gate_wakeups", self._queue)]
        return msgspec.structs.replace(self._released(events, takes=True), woken=woken)

    def look(self, policy: Policy, events: Events) -> tuple[Policy, Events]:
        """The same for those who only look: what has happened stays where it is."""
        return policy, self._released(events, takes=False)

    def _released(self, events: Events, *, takes: bool) -> Events:
        releases = []
        for limit, _ in self._tx.all("select_shared_limits", self._queue):
            found = self._tx.all("select_shared_releases", limit, RELEASES_AT_MOST)
            if found and takes:
                self._tx.run("delete_shared_releases", limit, found[-1][0])
            releases += [SharedRelease(*row[1:]) for row in found]
        shared = self.select({release.gate for release in releases})
        return msgspec.structs.replace(events, shared=shared, shared_releases=releases)

    def select(self, gates: Iterable[bytes]) -> list[SharedGateRow]:
        """Shared gates by id, where they exist."""
        found = (self._tx.one("select_shared_gate", gate) for gate in sorted(gates))
        return [rows.shared_gate(row) for row in found if row is not None]

    def walk(self, after: bytes, limit: int) -> list[SharedGateRow]:
        """A stretch of the gates of these limits."""
        return [rows.shared_gate(row) for row in self._tx.all("walk_shared_gates", self._queue, after, limit)]

    def gates_of(self, limit: str) -> list[SharedGateRow]:
        """All gates of a shared limit, by its name."""
        return [rows.shared_gate(row) for row in self._tx.all("select_shared_gates_of_limit", limit)]

    def learn_numbers(self, policy: Policy) -> None:
        self._names = {bound.name: bound.limit.name for bound in policy.shared_limits}

    def put(self, gates: Sequence[SharedGateRow], wakeups: Collection[GateWakeup]) -> None:
        """Store these gates, and let other queues look at theirs: one waiter each, who passes on what is left."""
        tx, names = self._tx, self._names
        known = [row for row in gates if row.limit in names]
        tx.run_many("upsert_shared_gate", [(*rows.shared_gate_parameters(row), names[row.limit]) for row in known])
        # Those whose limit has another scope now are there, or nobody could have left them.
        retired = [row for row in gates if row.limit not in names]
        tx.run_many("put_shared_counts", [(row.in_flight, rows.encode(row.contenders), row.id) for row in retired])
        tx.run_many(
            "insert_gate_wakeup", [(wakeup.gate, wakeup.queue) for wakeup in wakeups if wakeup.gate is not None]
        )
        tx.woken.update(
            {tx.value("select_queue_id", queue): 1 for queue in sorted({wakeup.queue for wakeup in wakeups})}
        )

    def running(self) -> list[rebuild.Claimed]:
        """The jobs of the queue that run, and the gates that count them."""
        return [
            rebuild.Claimed(position, priority, decode_keys(keys), rows.split_shared(shared))
            for position, priority, keys, shared in self._tx.all("select_claimed_of_queue", self._queue)
        ]

    def mark(self, found: Sequence[tuple[rebuild.Claimed, Sequence[SharedGateRow]]]) -> None:
        """These jobs hold these gates too."""
        marks = [(rows.join_shared((*job.shared, *(gate.id for gate in gates))), job.ref) for job, gates in found]
        self._tx.run_many("mark_shared", marks)


class Scheduling(boards.HeldBoard):
    """A queue's board in a write transaction, or (`is_looking`) in one that leaves it as it is."""

    def __init__(self, tx: Transaction, name: str, now: Instant, *, is_looking: bool = False) -> None:
        self._tx = tx
        self.name = name
        self._now = now
        self._is_looking = is_looking
        self.boards = boards.Boards() if is_looking else tx.boards

    @property
    def queue(self) -> QueueInForce:
        """Its row as it is by now, or `UnknownQueue`."""
        return load_queue(self._tx, self.name)

    @cached_property
    def number(self) -> int:  # type: ignore[override]
        return self.queue.id

    @cached_property
    def sharing(self) -> Sharing:
        return Sharing(self._tx, self.number)

    def load(self) -> Loaded:
        queue = self.queue
        self.number = queue.id
        return Loaded(self._tx, queue, self._now, is_looking=self._is_looking)

    def in_force(self) -> tuple[Policy, Instant]:
        return self.queue.policy, self._now

    def ask(self, ask: Ask) -> Found:
        """What the tables hold of it."""
        return _found(self._tx, self.number if ask.is_of_board else 0, ask)

    def forced(self, want: int) -> list[Forced]:
        """Jobs that an operator wants to start next."""
        found = self._tx.all("select_forced", self.number, want)
        return [Forced(lane, Head(position, position, ready_at)) for lane, position, ready_at in found]

    def plan(self, loaded: Loaded, want: int, *, lag: int = 0, ahead: int | None = None, listens: bool = False) -> Plan:
        """Fold what has happened and start up to `want` jobs, on the board in memory: it is written, or forgotten."""
        loaded.forced = self.forced(want) if want else []
        board, events = loaded.board, loaded.events(loaded.forced)
        board.mark = None
        if loaded.policy.shared_limits:
            events = self.sharing.fold_into(events)
        return driven(board.claim(events, want, lag=lag, listens=listens, ahead=ahead), self.ask)

    def write(self, loaded: Loaded, plan: Plan) -> None:
        """Note what a plan has changed."""
        tx, board, state = self._tx, loaded.board, plan.queue
        loaded.take_events()
        if plan.flows or plan.lanes or plan.gates or loaded.has_events or state != loaded.state:
            mark, delta = Mark(loaded.mark.seq + 1, uuid4()), encode_delta(plan)
            board.note(plan, mark)
            stats = None if plan.stats is None else encode_stats(plan.stats)
            tx.run("note_change", *astuple(state), *moves(plan), mark.seq, mark.token.bytes, self.number)
            tx.run("insert_delta", self.number, mark.seq, mark.token.bytes, delta, stats)
            tx.boards.noted(self.number, len(delta))
        else:
            board.mark = loaded.mark
        # Producers read these: the tables have them as they are.
        if backlogs := [gate.row() for gate in plan.gates if gate.bound.limit.is_of_producers]:
            tx.run_many("put_gates", [gate_parameters(row, self.number) for row in backlogs])
        if plan.shared or plan.wakeups:
            self.sharing.learn_numbers(loaded.policy)
            self.sharing.put(plan.shared, plan.wakeups)

    def fold_all(self) -> Loaded:
        """Fold everything that has happened, start nothing."""
        while True:
            loaded = self.load()
            if loaded.has_events:
                self.write(loaded, self.plan(loaded, 0))
            if loaded.all_folded:
                return self.load()

    def next_due(self, loaded: Loaded) -> Instant | None:
        """When something opens by itself, once a plan is made."""
        tx = self._tx
        times = (
            tx.value("next_due_job", self.number),
            loaded.board.next_alarm(),
            tx.value("next_lease_end"),
            tx.value("next_override_end", self.number),
        )
        return min((time for time in times if time is not None), default=None)


def _found(tx: Transaction, queue: int, ask: Ask) -> Found:
    """What the tables hold of it."""
    heads, shared = heads_of(tx, ask.heads), Sharing(tx, queue).select(ask.shared)
    if not ask.is_of_board:
        return Found(heads=heads, shared=shared)
    known_flows, known_lanes, known_gates = map(frozenset, ask.but_not)
    flows = []
    if ask.scan is not None:
        vtime, tie, count = ask.scan
        flows = [flow_of(row) for row in tx.some("scan_flows", count, known_flows, queue, vtime, tie)]
    scanned = len(flows)
    lanes = [lane_of(row) for row in _by_id(tx, "select_lanes", queue, ask.lanes)]
    for flow, count in (*ask.ready, *((row.id, LANES_PER_SCANNED_FLOW) for row in flows)):
        lanes += [lane_of(row) for row in tx.some("select_ready_lanes", count, known_lanes, flow)]
    for gate, count in ask.parked:
        lanes += [lane_of(row) for row in tx.some("select_parked_lanes", count, known_lanes, gate)]
        flows += [flow_of(row) for row in tx.some("select_parked_flows", count, known_flows, gate)]
    others = {*ask.flows, *(lane.flow for lane in lanes)} - {row.id for row in flows}
    flows += [flow_of(row) for row in _by_id(tx, "select_flows", queue, sorted(others))]
    gates = [gate_of(row) for row in _by_id(tx, "select_gates", queue, ask.gates)]
    if ask.alarms is not None:
        after, count = ask.alarms
        gates += [gate_of(row) for row in tx.some("select_alarms", count, known_gates, queue, after)]
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


def claim(tx: Transaction, scheduling: Scheduling, loaded: Loaded, want: int, asked: Asked) -> Claimed:
    """Start up to `want` jobs."""
    now = loaded.now
    _promote(tx, loaded.queue, now)
    listens, policy, lease = asked.listener is not None, loaded.policy, uuid4()
    plan = scheduling.plan(loaded, want, lag=asked.start_lag, ahead=asked.ahead, listens=listens)
    claims = start(tx, policy.queue, plan.starts, lease, asked.worker)
    if claims:
        held = encode([start.head.ref for start in plan.starts])
        ends_at = now + microseconds(asked.lease)
        tx.run("insert_lease", lease.bytes, asked.worker.id.bytes, ends_at, now, len(claims), held)
    scheduling.write(loaded, plan)
    if loaded.forced:
        tx.run("forget_forced", scheduling.number)
    paces = paces_of(claims, plan.starts)
    due = scheduling.next_due(loaded) if len(claims) < want or paces else None
    return Claimed(
        claims,
        lease,
        due,
        plan.more or not loaded.all_folded,
        look_again=False,
        vtime=plan.queue.vtime,
        is_limited=bool(policy.limits),
        folded=len(loaded.arrivals) + len(loaded.releases),
        at=now,
        paces=paces,
        terms=policy,
        opens_by_ends=policy.opens_by_ends,
    )


def look(tx: Transaction, scheduling: Scheduling, loaded: Loaded, want: int) -> Looked:
    """How many jobs could start now, up to `want`."""
    tx.run("begin_look")
    _promote(tx, loaded.queue, loaded.now)
    plan = scheduling.plan(loaded, want, listens=True)
    is_filled = len(plan.starts) >= want
    due = None if is_filled else scheduling.next_due(loaded)
    if plan.starts:
        # Nothing of it is written: the board in memory is forgotten too.
        tx.run("undo_look")
    else:
        # As a claim that starts nothing: what is shut is parked, and wakes the waiter when it opens.
        scheduling.write(loaded, plan)
    return Looked(len(plan.starts), loaded.now, due, look_again=not is_filled and (plan.more or not loaded.all_folded))


def _promote(tx: Transaction, queue: QueueInForce, now: Instant) -> None:
    """Scheduled jobs that are due join their lanes, with a lane event: at the end, or in the place they kept in a
    sequence or while they waited to run alone."""
    due = tx.all("select_due_jobs", queue.id, now, PROMOTE_AT_MOST)
    if not due:
        return
    place: int = tx.value("take_positions", len(due)) - len(due)
    in_sequence = queue.policy.sequence is not None
    promoted = []
    events: dict[bytes, rows.LaneEvent] = {}
    for position, lane, priority, keys, keeps_place, ready_at, given, given_by, suspicion in due:
        place += 1
        # A suspect that is scheduled was given back: had it run, it would be cleared.
        keeps = keeps_place and (in_sequence or suspicion >= SUSPECT_FROM)
        joins = (position, ready_at) if keeps else (place, now)
        promoted.append((*joins, position))
        event = events.get(lane)
        if event is None:
            event = events[lane] = rows.LaneEvent(queue.id, lane, priority, keys, 0, *joins)
        event.count += 1
        event.floor, event.since = min((event.floor, event.since), joins)
        event.resumed += keeps_place
        if given is not None and given_by > (event.given_by or 0):
            event.given, event.given_by = given, given_by
    tx.run_many("promote_job", promoted)
    tx.run_many("insert_arrival", [astuple(event) for event in events.values()])


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
        # Cancelled since its lane's next jobs were looked up, and the lane event of it is not folded yet.
        raise Raced
    return [claim_of(found[each.head.ref], lease, queue, each.at) for each in starts]
