"""The journal: what a claim folds into the board of a queue, and the delta that it leaves of it.

Everyone appends facts; only the holder of the claim lock folds them. Releases come first: a flood of arrivals must not
delay the slots that finished jobs have freed.

The tables hold the board as it was at some change, and the deltas since then lead to how it is now. A delta holds whole
rows: laid over the tables twice, it says the same. Each has a number and a random token. A number alone would not do: a
database that crashes may lose the last changes, and their numbers are given out again.

Beside its delta each claim leaves its stats: who arrived, started and ended, and whom a limit held back. Stats are the
sum of these (`stats/keys.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from heapq import nsmallest
from uuid import UUID

import msgspec

from fairlane.clock import Instant
from fairlane.policy.limits import smoothed
from fairlane.policy.policy import WEIGHT, Policy
from fairlane.scheduler.board import (
    IDLE,
    PARKED,
    READY,
    Board,
    Flow,
    Gate,
    Lane,
    flow_fields,
    gate_fields,
    lane_fields,
    order_of,
)
from fairlane.scheduler.snapshot import (
    AHEAD,
    Arrival,
    ClaimStats,
    FlowRow,
    GateRow,
    GateStats,
    Head,
    LaneRow,
    LaneStats,
    Plan,
    Release,
    Snapshot,
    Start,
)

MAX_LAG = 1_000
"""How many of its own jobs a parked flow may fall behind. It keeps its turn; it does not save up a siege."""


def fold_releases(board: Board, releases: Iterable[Release], policy_since: Instant, vtime: float) -> float:
    """Free what ended claims held, and correct what their flows were charged. Returns the queue's virtual time: it goes
    back with the flow that has carried it away on a wrong guess."""
    ready = nsmallest(2, ((flow.vtime + flow.debt, flow.id) for flow in board.flows.values() if flow.standing == READY))
    lanes, charges_time, has_limits = board.lanes, board.charges_time, bool(board.policy.limits)
    releases = list(releases)
    if has_limits and any(release.failed or release.unstarted for release in releases):
        releases.sort(key=_order)
    for release in releases:
        lane = lanes.get(release.lane)
        if lane is None:
            continue
        flow, ended = lane.flow, release.ended
        lane.in_flight = max(0, lane.in_flight - ended - release.unstarted)
        lane.dirty = flow.dirty = True
        if has_limits:
            _free_gates(board, lane, release, policy_since)
        correction = -release.refund
        if ended:
            ran = release.ran / 1e6
            if not release.lost:
                flow.cost = smoothed(flow.cost, ran / ended, ended)
                board.cost = smoothed(board.cost, ran / ended, ended)
            if charges_time:
                correction += ran - release.charged
        flow.debt += correction / flow.weight
        # A flow that owes pays at its next turn. One that was overcharged by more than a job moves back at once: left
        # at its old tag it would miss turns that are its own.
        if flow.debt < 0.0 and flow.debt < -board.charge(flow) / flow.weight:
            before = flow.vtime
            _move_back(board, flow, next((tag for tag, flow_id in ready if flow_id != flow.id), -math.inf))
            if before >= vtime:
                vtime = min(vtime, flow.vtime)
    return vtime


def _order(release: Release) -> tuple[bool, Instant]:
    """Of runs that are reported together, those that went well are heard first: failures beside them are no row. And of
    jobs that were to start one after the other, the last: a rate takes back what nothing follows."""
    return release.failed > 0, -release.since


def _free_gates(board: Board, lane: Lane, release: Release, policy_since: Instant) -> None:
    now, task, held = board.now, lane.keys.get("task"), None
    gates, of_queue = board.gates_of(lane), board.queue_gates()
    for gate in [*gates, *of_queue] if of_queue else gates:
        if release.unstarted:
            # A claim from before the policy came into force was charged by other limits than these. One that was to
            # start shortly after the change may have been planned before it.
            known_since = policy_since if gate.smooth is None else policy_since + AHEAD
            held = max(0, now - release.since) if release.since > known_since else None
        gate.free(release, now, held, task)


def _move_back(board: Board, flow: Flow, others: float) -> None:
    # Alone, it may have carried the cursor along on a guess that was far too high, and others have joined there.
    earliest = min(flow.vtime, others - lag(board, flow))
    settle_debt(board, flow)
    flow.vtime = max(flow.vtime, earliest)


def settle_debt(board: Board, flow: Flow) -> None:
    """Move a flow's tag by what it owes or is owed."""
    flow.vtime = max(0.0, flow.vtime + flow.debt)
    flow.tie = board.next_tie()
    flow.debt = 0.0
    flow.dirty = True


def woken_gates(policy: Policy, arrivals: Iterable[Arrival]) -> Iterator[bytes]:
    """Gates that arrivals change, whether their lanes are known or not."""
    for event in arrivals:
        for gate_id, *_ in policy.woken_gates(event.priority, event.keys, resumed=event.resumed > 0):
            yield gate_id


def fold_arrivals(board: Board, arrivals: Iterable[Arrival], join_at: float, heads: int = 0) -> None:
    """Make lanes ready for the jobs that arrived, and let their flows take turns.

    Up to so many heads of a lane are learned here, without asking the store: where all its jobs are known.
    """
    for event in arrivals:
        for place in board.policy.woken_gates(event.priority, event.keys, resumed=event.resumed > 0):
            gate = board.gate(*place)
            gate.resume(event.resumed)
            gate.arrive(event.count)
        lane = board.lanes.get(event.lane)
        if event.count == 0 and not event.given:
            continue
        if lane is None:
            if event.count < 0:
                continue
            lane = board.new_lane(event.lane, event.priority, event.keys, event.floor)
        if event.given:
            _bring(board, lane, event.given, event.given_by)
        lane.ready += event.count
        lane.dirty = True
        if event.count < 0 or (lane.heads and event.floor <= lane.heads[-1].position):
            lane.forget_heads()  # one of them is gone, or somebody has joined among them
        elif event.count > 0:
            lane.exhausted = False
        if event.ref is not None and lane.known_heads == lane.ready - 1 < heads:
            lane.heads.append(Head(event.ref, event.floor, event.since))
        if event.count > 0:
            lane.floor = min(lane.floor, event.floor)
            _enter(board, lane, board.policy.rank(event.since, event.priority), event.floor, join_at)
        elif event.count < 0:
            leave_if_empty(board, lane)


def _bring(board: Board, lane: Lane, given: Mapping[str, float], given_by: int) -> None:
    """Put the numbers that a job brought along in force, each unless a job that was enqueued later has brought one.

    A lane event may come late (its job was delayed, retried, replayed or moved, or its transaction stayed open), so
    when the number was given decides, and not when it comes: bringing a number again is harmless.
    """
    brought = board.policy.brought
    for gate in (*board.gates_of(lane), *board.queue_gates()):
        name = gate.bound.name
        if name in brought and name in given:
            gate.bring(given[name], given_by, board.policy, board.now)
    if WEIGHT in brought and WEIGHT in given:
        lane.flow.weigh(given[WEIGHT], given_by, board.policy)


def leave_if_empty(board: Board, lane: Lane) -> None:
    """The last job of a lane that waits at a gate, alone or with its whole flow, may be gone: neither must be woken in
    place of one that has jobs."""
    flow = lane.flow
    if lane.ready > 0:
        return
    if lane.standing == PARKED and _leave(board, lane.gate):
        flow.shut -= 1
        flow.dirty = True
    elif lane.standing == READY and flow.standing == PARKED and (flow.open > 1 or _leave(board, flow.gate)):
        flow.drop(lane)
        flow.open -= 1
        if not flow.open:
            flow.standing, flow.gate = IDLE, None
        flow.dirty = True
    else:
        return
    lane.standing, lane.gate, lane.dirty = IDLE, None, True


def _leave(board: Board, gate_id: bytes | None) -> bool:
    gate = board.gates.get(gate_id) if gate_id else None
    if gate is None:
        return False
    gate.waiting, gate.dirty = max(0, gate.waiting - 1), True
    gate.known += 1  # the store will still name it
    return True


def _enter(board: Board, lane: Lane, rank: int, head: int, join_at: float) -> None:
    flow = lane.flow
    if lane.standing == IDLE:
        lane.standing = READY
        lane.rank, lane.head = rank, head
        flow.open += 1
        flow.dirty = True
        flow.push(lane)
        _rejoin(board, flow, join_at)
    elif order_of(rank, head) < lane.order:
        lane.rank, lane.head = rank, head
        if lane.standing == READY:
            flow.lowered()
        elif lane.standing == PARKED and board.policy.fair is None:
            lane.tag = tag_of(board, lane)


def tag_of(board: Board, lane: Lane) -> float:
    """Where a lane stands among those that its gate will wake: by its flow's turn, or by rank if nobody takes turns."""
    return lane.flow.vtime if board.policy.fair else float(lane.rank)


def _rejoin(board: Board, flow: Flow, join_at: float) -> None:
    if flow.standing == IDLE:
        # Idling earns no credit. A flow whose lanes were only parked has not idled: it keeps its tag, and so its turn.
        _take_turns(board, flow, join_at - (lag(board, flow) if flow.shut else 0.0))


def lag(board: Board, flow: Flow) -> float:
    """The most virtual time that a flow may stand behind the others."""
    return MAX_LAG * board.charge(flow) / flow.weight


def _take_turns(board: Board, flow: Flow, earliest: float) -> None:
    flow.vtime = max(flow.vtime + flow.debt, earliest, 0.0)
    flow.debt = 0.0
    flow.tie = board.next_tie()
    flow.standing = READY
    flow.dirty = True


def wake(board: Board, gate: Gate, lanes: Iterable[Lane], flows: Iterable[Flow], join_at: float) -> None:
    """Let parked lanes or flows take turns again, because their gate has room for them."""
    for lane in lanes:
        if lane.standing != PARKED or lane.gate != gate.id:
            continue
        flow = lane.flow
        _rejoin(board, flow, join_at)
        flow.shut -= 1
        flow.open += 1
        flow.dirty = True
        flow.push(lane)
        lane.standing = READY
        lane.dirty = True
        # The room is spoken for until the lane has been visited; inside a parked flow nobody will visit it soon.
        _count_awake(gate, spoken_for=flow.standing == READY)
        if flow.standing == PARKED:
            lane.gate = None
    for flow in flows:
        if flow.standing == PARKED and flow.gate == gate.id:
            _take_turns(board, flow, join_at - lag(board, flow))
            _count_awake(gate, spoken_for=True)


def _count_awake(gate: Gate, *, spoken_for: bool) -> None:
    gate.waiting -= 1
    gate.awake += 1 if spoken_for else 0
    gate.dirty = True


def free_room(gate: Gate, room: int, now: Instant) -> int:
    """Of this room, what no woken lane will use."""
    if gate.wake_at is not None and gate.wake_at <= now:
        gate.wake_at, gate.dirty = None, True
        if gate.awake >= room:
            # Whoever was woken for this room has had its time.
            gate.awake = 0
    return room - gate.awake


def forget_awake(board: Board) -> None:
    """Whoever was woken has had its time."""
    for gate in board.gates.values():
        if gate.awake:
            gate.awake, gate.dirty = 0, True


def sleepers(board: Board, gates: set[bytes]) -> dict[bytes, tuple[list[Lane], list[Flow]]]:
    """Who is parked on these gates, the lowest tag first."""
    found: dict[bytes, tuple[list[Lane], list[Flow]]] = {gate: ([], []) for gate in gates}
    for lane in board.lanes.values():
        if lane.standing == PARKED and lane.gate in gates:
            found[lane.gate][0].append(lane)
    for flow in board.flows.values():
        if flow.standing == PARKED and flow.gate in gates:
            found[flow.gate][1].append(flow)
    for lanes, flows in found.values():
        lanes.sort(key=lambda lane: (lane.tag, lane.head, lane.id))
        flows.sort(key=lambda flow: (flow.vtime, flow.tie))
    return found


def by_rank_within_flows(lanes: list[Lane]) -> list[Lane]:
    """Each flow keeps its places among those that a gate wakes, and fills them by the rank of its lanes' heads."""
    ranked = iter(sorted(lanes, key=lambda lane: (lane.flow.id, lane.order, lane.id)))
    places = sorted(range(len(lanes)), key=lambda n: (lanes[n].flow.id, n))
    order = dict(zip(places, ranked, strict=True))
    return [order[n] for n in range(len(lanes))]


FORMAT = 1
"""How deltas are written. Another number for every change of theirs, so that no program reads what it does not know."""


class Mark(msgspec.Struct, frozen=True, gc=False):
    """A state of the board: the number of the change that led to it, and its token."""

    seq: int
    token: UUID


class Removed(msgspec.Struct, frozen=True, array_like=True):
    """Ids of idle pieces that collection has taken off the board and out of the tables."""

    flows: list[bytes] = []
    lanes: list[bytes] = []
    gates: list[bytes] = []


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """Pieces as one change has left them."""

    flows: list[FlowRow] = []
    lanes: list[LaneRow] = []
    gates: list[GateRow] = []
    removed: Removed = Removed()


class Tail:
    """What some deltas, in their order, leave of the pieces that they touched, by id; `None`: it was removed."""

    def __init__(self, deltas: Iterable[bytes] = ()) -> None:
        self.flows: dict[bytes, FlowRow | None] = {}
        self.lanes: dict[bytes, LaneRow | None] = {}
        self.gates: dict[bytes, GateRow | None] = {}
        for each in deltas:
            delta = decode_delta(each)
            self.flows.update((row.id, row) for row in delta.flows)
            self.lanes.update((row.id, row) for row in delta.lanes)
            self.gates.update((row.id, row) for row in delta.gates)
            self.flows.update(dict.fromkeys(delta.removed.flows))
            self.lanes.update(dict.fromkeys(delta.removed.lanes))
            self.gates.update(dict.fromkeys(delta.removed.gates))


_encode = msgspec.msgpack.Encoder().encode
decode_delta = msgspec.msgpack.Decoder(Delta).decode


def encode_delta(plan: Plan) -> bytes:
    """What a plan has changed. A lane comes with its flow: whoever applies the delta may not have that."""
    flows = plan.flows
    if others := {lane.flow.id: lane.flow for lane in plan.lanes if not lane.flow.dirty}:
        flows = [*flows, *others.values()]
    # Tuples instead of rows: they are made for every piece that every claim touches.
    lanes, gates = map(lane_fields, plan.lanes), map(gate_fields, plan.gates)
    return _encode((list(map(flow_fields, flows)), list(lanes), list(gates)))


def moves(plan: Plan) -> tuple[int, int, int]:
    """How far a plan moves what a queue counts: ready jobs, running jobs, parked lanes."""
    ready = running = parked = 0
    for lane in plan.lanes:
        had, held, was_parked = lane.was
        ready += lane.ready - had
        running += lane.in_flight - held
        parked += (lane.standing == PARKED) - was_parked
    return ready, running, parked


def encode_removed(removed: Removed) -> bytes:
    return _encode(Delta(removed=removed))


def stats(snapshot: Snapshot, board: Board, starts: Iterable[Start]) -> ClaimStats | None:
    """What a claim that is planned so will have done; `None`: it did nothing."""
    now, waited, longest = snapshot.now, 0, 0
    lanes: dict[bytes, LaneStats] = {}
    for start in starts:
        counts = lanes.get(start.lane) or _of(board.lanes[start.lane], lanes)
        counts.started += 1
        wait = now - start.head.ready_at
        if wait > 0:
            counts.waited += wait
            waited += wait
            if wait > longest:
                longest = wait
    for event in snapshot.arrivals:
        # As it was folded: what is taken from a lane that nobody knows is taken from nobody.
        if event.count and (lane := board.lanes.get(event.lane)) is not None:
            counts = _of(lane, lanes)
            counts.arrived += event.count
            if event.count > 0 and event.since > counts.newest:
                counts.newest = event.since
    for release in snapshot.releases:
        if (lane := board.lanes.get(release.lane)) is not None:
            counts = lanes.get(release.lane) or _of(lane, lanes)
            add_release(counts, release)
    gates = [
        GateStats(gate.name, gate.key, gate.waiting > 0, gate.denied)
        for gate in board.gates.values()
        if gate.waiting or gate.waited or gate.denied
    ]
    return ClaimStats(now, waited, longest, list(lanes.values()), gates) if lanes or gates else None


def add_release(counts: LaneStats, release: Release) -> None:
    """Add the ends of claims to what is counted of their lane."""
    counts.ended += release.ended
    counts.failed += release.failed
    counts.unstarted += release.unstarted
    counts.lost += release.lost
    counts.ran += 0 if release.lost else release.ran
    counts.latest = max(counts.latest, release.latest)


def _of(lane: Lane, lanes: dict[bytes, LaneStats]) -> LaneStats:
    found = lanes.get(lane.id)
    if found is None:
        found = lanes[lane.id] = LaneStats(lane.keys, lane.priority)
    return found


encode_stats = msgspec.msgpack.Encoder().encode
decode_stats = msgspec.msgpack.Decoder(ClaimStats).decode
