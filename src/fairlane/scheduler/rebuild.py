"""A changed policy: which flows and gates its lanes have now.

Gates are counted again from what is in flight, so a limit that was added counts jobs that started before it, and a
release always finds the gate that holds it. Every lane with ready jobs is woken. Where the number of partitions has
changed, what belongs to another one moves there: lanes with their jobs, and what their gates have counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from fairlane.clock import Instant
from fairlane.errors import InvalidPolicy
from fairlane.policy.keys import Keys, gate_id, key_words, lane_id, select, shared_gate_id
from fairlane.policy.limits import KINDS, Limit
from fairlane.policy.partitions import Partition, logical, partition_name, partition_of
from fairlane.policy.policy import WEIGHT, BoundLimit, Policy
from fairlane.scheduler.board import IDLE, READY, Board, Flow, Gate, SharedGate, gate_of
from fairlane.scheduler.journal import lag
from fairlane.scheduler.snapshot import (
    ClaimStats,
    Contender,
    FlowRow,
    GateRow,
    GateStats,
    KeptPlaces,
    LaneRow,
    QueueRow,
    SharedGateRow,
)


class Rebuilt(msgspec.Struct, frozen=True):
    """The whole scheduling state of a queue, to be written in place of the old one."""

    queue: QueueRow
    flows: list[FlowRow]
    lanes: list[LaneRow]
    gates: list[GateRow]
    stats: ClaimStats | None = None
    """Every lane is woken, so nobody is held back any more."""

    @property
    def totals(self) -> tuple[int, int, int]:
        """What the queue counts: ready jobs, running jobs, parked lanes."""
        return sum(lane.ready for lane in self.lanes), sum(lane.in_flight for lane in self.lanes), 0


class WaitingLane(msgspec.Struct, frozen=True):
    """A lane with jobs that wait or run."""

    id: bytes
    priority: int
    keys: dict[str, str | None]
    ready: int = 0
    in_flight: int = 0
    floor: int = 0


def carried_gates(policy: Policy, now: Instant, gates: Iterable[GateRow]) -> list[GateRow]:
    """Gates whose limit an operator has changed: what they hold under the limit that is in force now. Whoever waits on
    one is looked at."""
    carried = []
    for row in gates:
        bound = policy.bound_named(row.limit)
        if bound is not None and bound.is_shared:
            # What it holds is with the gate that queues share.
            carried += [replace(row, wake_at=now)] if row.waiting else []
            continue
        limit = None if bound is None else policy.limit_at(bound, tuple(row.key), row.value)
        if bound is not None and limit is not None:
            gate = Gate(row, bound, limit)
            if not limit.counts_in_flight:
                # What was spent is measured by the old bound. What was learned stays for when the override ends.
                limit.carry_over(gate, now)
            if gate.waiting:
                gate.wake_at = now
            carried.append(gate.row())
    return carried


def refuse_to_strand(policy: Policy, lanes: Iterable[LaneRow | WaitingLane]) -> None:
    """Refuse a policy under which jobs in these lanes would not be what it takes them for.

    It may look at keys that they do not carry: they would all share one. Or it may promise an order between lanes that
    were told apart.
    """
    waiting = [lane for lane in lanes if lane.ready > 0]
    apart = sum(lane.ready for lane in waiting if set(lane.keys) - set(policy.lane_keys))
    if policy.sequence is not None and apart:
        raise InvalidPolicy(
            f"queue {policy.queue!r}: {apart:,} waiting jobs were enqueued without {policy.sequence.limit!r}, in lanes "
            "by task, priority and keys; under it they would run one at a time, but in no strict order. Let them run "
            f"first, or say that you accept it: {_accepting(policy)}"
        )
    scopes = [policy.fair, *policy.limits]
    # The lanes of a sequence do not know their task.
    needed = {*policy.keys_of_job, *(name for each in scopes if each for name in each.by)} - {"priority"}
    missing = {name: sum(lane.ready for lane in waiting if name not in lane.keys) for name in sorted(needed)}
    name, jobs = max(missing.items(), key=lambda item: item[1], default=("", 0))
    if jobs:
        lacking = f"{jobs:,} waiting jobs do" if jobs > 1 else "a waiting job does"
        raise InvalidPolicy(
            f"queue {policy.queue!r}: {lacking} not carry the key {name!r} that this policy looks at; under it they "
            f"would all count as one key (None). Let them run first, or say that you accept it: {_accepting(policy)}"
        )


def _accepting(policy: Policy) -> str:
    """The command that puts such a policy in force all the same."""
    place = policy.partition
    if place is None or place.was is None:
        return "`fairlane policy apply module:app --accept-missing-keys`"
    by = "".join(f" --by {name}" for name in place.by)
    return f"`fairlane partition {place.of} --to {place.width}{by} --accept-missing-keys`"


def rebuild(
    policy: Policy,
    now: Instant,
    queue: QueueRow,
    flows: Iterable[FlowRow],
    lanes: Iterable[LaneRow],
    gates: Iterable[GateRow],
    kept: Iterable[KeptPlaces] = (),
) -> Rebuilt:
    """State under the new policy. Flows keep their virtual time and gates their tokens if both policies know them.

    `kept` are places that jobs keep which do not run: only a policy with a sequence asks for them.
    """
    board, known_flows, gates = Board(policy, now, queue), {row.id: row for row in flows}, list(gates)
    let_go = [GateStats(row.limit, row.key, is_held=False, denied=0) for row in gates if row.waiting > 0]
    for gate_row in gates:
        # Tokens stay spent, also of a key that has no lane any more.
        if (bound := policy.bound_named(gate_row.limit)) is not None:
            value, given_by = (gate_row.value, gate_row.given_by) if bound.from_job else (None, 0)
            if (known := gate_of(policy, _emptied(gate_row, value, given_by))) is not None:
                board.add_gates([known])
                if known.shared is None:
                    known.limit.carry_over(known, now)
    if WEIGHT in policy.brought:
        _keep_weights(board, queue, known_flows.values(), gates)
    for row in sorted(lanes, key=lambda row: row.id):
        flow_id = policy.flow_of(row.priority, row.keys)
        if flow_id not in board.flows and (old := known_flows.get(flow_id)) is not None:
            weight = old.weight if WEIGHT in policy.brought else policy.weight_of(row.priority, row.keys)
            _add_flow(board, replace(old, weight=weight, open=0, shut=0, standing=IDLE, gate=None, given_by=0))
        is_new_flow = flow_id not in board.flows
        lane = board.new_lane(row.id, row.priority, dict(row.keys), row.floor)
        if is_new_flow:
            # At zero it would be owed all the service that the queue has ever given.
            lane.flow.vtime = queue.vtime
        lane.ready, lane.in_flight, lane.rank, lane.head = row.ready, row.in_flight, row.rank, row.head
        for passed, bound in (*policy.gates_of(row.priority, row.keys), *policy.queue_gates):
            gate = board.gate(passed, bound, select(bound.limit.by, row.keys, row.priority))
            if bound.limit.counts_in_flight and not bound.is_shared:
                gate.in_flight += row.in_flight
            gate.arrive(row.ready)
        if row.ready > 0 or row.standing != IDLE:
            lane.standing = READY
            lane.flow.open += 1
            if lane.flow.standing != READY:
                lane.flow.standing = READY
                lane.flow.vtime = max(lane.flow.vtime, queue.vtime - lag(board, lane.flow))
                lane.flow.tie = board.next_tie()
    for places in kept:
        if (held := policy.sequence_gate(places.priority, places.keys)) is not None:
            board.gate(*held).in_flight += places.count
    ready = [(flow.vtime, flow.tie) for flow in board.flows.values() if flow.standing == READY]
    cursor = min(ready, default=(queue.vtime, board.tie))
    return Rebuilt(
        QueueRow(queue.vtime, *cursor, board.tie, queue.cost),
        [flow.row() for flow in board.flows.values()],
        [lane.row() for lane in board.lanes.values()],
        [gate.row() for gate in board.gates.values()],
        ClaimStats(now, 0, 0, [], let_go) if let_go else None,
    )


def _emptied(row: GateRow, value: float | None, given_by: int) -> GateRow:
    """What a gate has spent, without those whom it counted."""
    return replace(row, in_flight=0, waiting=0, awake=0, wake_at=None, value=value, given_by=given_by)


def _add_flow(board: Board, row: FlowRow) -> None:
    board.add_flows([Flow(row, board.policy.weight_at(row.key, row.weight))])


def _keep_weights(board: Board, queue: QueueRow, flows: Iterable[FlowRow], gates: Iterable[GateRow]) -> None:
    """Flows whose weight a job has brought keep it, also while they have no lane.

    What comes from another partition (`weights_of_misrouted`) holds here unless a later job has brought another.
    """
    policy = board.policy
    for old in flows:
        if old.given_by and old.id == policy.flow_of_key(old.key):
            _add_flow(board, replace(old, open=0, shut=0, standing=IDLE, gate=None))
    for row in gates:
        if row.limit == WEIGHT and row.value is not None:
            flow_id = policy.flow_of_key(row.key)
            if flow_id not in board.flows:
                _add_flow(board, FlowRow(flow_id, row.key, 1.0, queue.vtime, 0, 0.0, 0.0, 0, 0, IDLE, None))
            board.flows[flow_id].weigh(row.value, row.given_by, policy)


class Claimed(msgspec.Struct, frozen=True):
    """A running job, and the shared gates that it is counted by; `ref` is whatever its store finds it by."""

    ref: Any
    priority: int
    keys: dict[str, str | None]
    shared: tuple[bytes, ...]


def uncounted(policy: Policy, running: Iterable[Claimed]) -> list[tuple[Claimed, list[SharedGateRow]]]:
    """The running jobs that started before a shared limit was theirs, and the gates (as new) that must count them."""
    found = []
    for job in running:
        gates = [
            SharedGateRow(gate, bound.name, list(key), 0, 0, [])
            for gate, bound, key in policy.shared_gates_of(job.priority, job.keys)
            if bound.limit.counts_in_flight and gate not in job.shared
        ]
        if gates:
            found.append((job, gates))
    return found


def counted_in(
    queue: str, jobs: Iterable[tuple[Claimed, list[SharedGateRow]]], known: Iterable[SharedGateRow]
) -> list[SharedGateRow]:
    """Those gates once the jobs of a queue are counted; `known` are the ones that are stored already."""
    rows = {row.id: row for row in known}
    for _, gates in jobs:
        for gate in gates:
            row = rows.get(gate.id, gate)
            by_queue = {each.queue: each for each in row.contenders}
            own = by_queue.pop(queue, Contender(queue, 0))
            contenders = [*by_queue.values(), replace(own, taken=own.taken + 1)]
            rows[gate.id] = replace(row, in_flight=row.in_flight + 1, contenders=contenders)
    return list(rows.values())


def carried_over(rows: Iterable[SharedGateRow], limit: Limit, now: Instant) -> list[SharedGateRow]:
    """The gates of a shared limit whose bound has changed."""
    gates = [SharedGate(row, limit, "") for row in rows]
    for gate in gates:
        limit.carry_over(gate, now)
    return [gate.row() for gate in gates]


class Miscount(msgspec.Struct, frozen=True):
    """A gate that does not count what runs."""

    queue: str
    """Where it was found; a shared gate belongs to others as well."""
    limit: str
    key: tuple[str | None, ...]
    counted: int
    running: int

    @property
    def words(self) -> str:
        """As people read it."""
        by = self.limit.partition(":")[2].partition("@")[0].partition("#")[0]
        where = key_words(dict(zip(by.split(","), self.key, strict=False))) if self.key else "the whole queue"
        return f"{self.limit} of {where} counts {self.counted}, and {self.running} run"


def expected_gates(policy: Policy, holds: Iterable[WaitingLane], kept: Iterable[KeptPlaces] = ()) -> list[GateRow]:
    """The gates of a queue's own limits that must hold anything, given what runs in lanes, or has ended there and is
    not folded, and what keeps places."""
    rows = rebuild(policy, 0, QueueRow(0.0, 0.0, 0, 0, 0.0), (), corrected((), holds), (), kept).gates
    return [row for row in rows if row.in_flight]


def miscounted(policy: Policy, expected: Collection[GateRow], gates: Iterable[GateRow]) -> list[Miscount]:
    """Of these gates of a queue's own limits, those that are wrong. What is expected and not among them is missing."""
    counts, known = {row.id: row.in_flight for row in expected}, set()
    found = []
    for row in gates:
        known.add(row.id)
        count, bound = counts.get(row.id, 0), policy.bound_named(row.limit)
        if bound is None or bound.is_shared or not bound.limit.counts_in_flight:
            continue
        if row.in_flight != count and policy.limit_at(bound, tuple(row.key), row.value) is not None:
            found.append(Miscount(policy.queue, row.limit, tuple(row.key), row.in_flight, count))
    missing = [row for row in expected if row.id not in known]
    return found + [Miscount(policy.queue, row.limit, tuple(row.key), 0, row.in_flight) for row in missing]


def corrected(lanes: Iterable[LaneRow], holds: Iterable[WaitingLane]) -> list[LaneRow]:
    """A queue's lanes with what they hold, as they must be: a board that is made from them is right."""
    held = {each.id: each for each in holds}
    rows = [replace(row, in_flight=held.pop(row.id).in_flight if row.id in held else 0) for row in lanes]
    return rows + [
        LaneRow(each.id, b"", each.priority, each.keys, 0, each.in_flight, 0, 0, IDLE, None, 0.0)
        for each in held.values()
    ]


def counts_in_flight(row: SharedGateRow) -> bool:
    """Whether a shared gate counts what runs: its name says of what kind its limit is, or was."""
    kind = KINDS.get(row.limit.partition(":")[0])
    return kind is not None and bool(kind.counts_in_flight)


def recounted(
    queue: str, rows: Iterable[SharedGateRow], holds: Iterable[tuple[bytes, str, int]]
) -> list[tuple[Miscount, SharedGateRow]]:
    """Of these shared gates, those that are wrong, each as it must be. `holds` are counts of running jobs, by gate and
    queue."""
    held: dict[bytes, Counter[str]] = {}
    for gate, holder, count in holds:
        held.setdefault(gate, Counter())[holder] += count
    found = []
    for row in rows:
        if not counts_in_flight(row):
            continue
        by_queue = held.get(row.id, Counter())
        if row.in_flight == by_queue.total() and {each.queue: each.taken for each in row.contenders if each.taken} == {
            name: count for name, count in by_queue.items() if count
        }:
            continue
        known = {each.queue: each for each in row.contenders}
        contenders = [
            replace(known.get(name) or Contender(name, 0), taken=by_queue[name]) for name in sorted({*known, *by_queue})
        ]
        miscount = Miscount(queue, row.limit, tuple(row.key), row.in_flight, by_queue.total())
        staying = [each for each in contenders if each.waits or each.taken > 0]
        found.append((miscount, replace(row, in_flight=by_queue.total(), contenders=staying)))
    return found


class MisroutedLane(msgspec.Struct, frozen=True):
    """A lane whose jobs do not belong here, and the lane that they join."""

    was: WaitingLane
    queue: str
    lane: bytes


def misrouted_lanes(policy: Policy, lanes: Iterable[WaitingLane]) -> list[MisroutedLane]:
    """The lanes among these whose jobs belong to another partition."""
    place = policy.partition
    if place is None or not place.is_guarded:
        return []
    homes = ((lane, _home(place, lane.id, lane.keys)) for lane in lanes if place.misrouted(lane.keys))
    return [MisroutedLane(lane, queue, lane_id(queue, lane.priority, lane.keys)) for lane, queue in homes]


def _home(place: Partition, lane: bytes, keys: Keys) -> str:
    home = place.home_of(keys)
    # Where any partition will do, a lane moves as a whole: its order stays.
    return partition_name(place.of, partition_of((lane.hex(),), place.width) if home is None else home)


def gates_of_misrouted(policy: Policy, was: int, gates: Iterable[GateRow]) -> list[tuple[str, GateRow]]:
    """Gates of keys that have lived here, when there were `was` partitions, and move to another one; each with the
    queue that it goes to. It is the same once this partition has learned that the change is over."""
    place = policy.partition
    if place is None:
        return []
    # A key may have lived here long ago as well: only its last home knows what it has spent.
    lived_here = replace(place, width=was)
    found = []
    for row in gates:
        bound = policy.bound_named(row.limit)
        if bound is None or bound.is_shared or not place.determines(bound.limit.by) or policy.is_own(bound):
            continue
        keys = dict(zip(bound.limit.by, row.key, strict=True))
        if place.misrouted(keys) and not lived_here.misrouted(keys):
            found.append((_home(place, row.id, keys), row))
    return found


def weights_of_misrouted(policy: Policy, was: int, flows: Iterable[FlowRow]) -> list[tuple[str, GateRow]]:
    """Weights that jobs have brought for keys that move to another partition. They go with the gates, as if they were
    the bounds of some: in force there, unless a later job has brought another (`rebuild`)."""
    place = policy.partition
    if place is None or WEIGHT not in policy.brought or not place.determines(policy.fair_by):
        return []
    lived_here = replace(place, width=was)
    found = []
    for flow in flows:
        keys = dict(zip(policy.fair_by, flow.key, strict=True))
        if flow.given_by and place.misrouted(keys) and not lived_here.misrouted(keys):
            row = GateRow(flow.id, WEIGHT, flow.key, 0, 0, 0, 0, None, None, flow.weight, flow.given_by)
            found.append((_home(place, flow.id, keys), row))
    return found


def imported(queue: str, own: Iterable[GateRow], others: Iterable[GateRow]) -> list[GateRow]:
    """The gates of a partition with those that come from others: what a key has spent there, it has spent. The number
    that was brought last holds, wherever it was."""
    rows = {row.id: row for row in own}
    for other in others:
        gate = gate_id(queue, other.limit, tuple(other.key))
        known = rows.get(gate, other)
        newest = known if known.given_by > other.given_by else other
        rows[gate] = _emptied(replace(other, id=gate), newest.value, newest.given_by)
    return list(rows.values())


def tokens_to_share(before: Policy, after: Policy, gates: Iterable[GateRow]) -> list[SharedGateRow]:
    """What a plain queue has spent of limits that its partitions share from now on. What runs is counted anew."""
    if before.partition is not None or after.partition is None:
        return []
    shared = _renamed(logical(after)[0], after)
    return [
        SharedGateRow(shared_gate_id(name, tuple(row.key)), name, row.key, 0, row.tat, [], row.memo, row.value)
        for row in gates
        if row.limit in shared
        for name in (shared[row.limit].name,)
    ]


def shared_tokens(before: Policy, after: Policy) -> Mapping[str, BoundLimit]:
    """The limits whose tokens partitions have shared and a plain queue has to itself from now on, by their names then;
    each as it was shared."""
    if before.partition is None or after.partition is not None:
        return {}
    return _renamed(logical(before)[0], before)


def tokens_of_its_own(queue: str, limit: str, rows: Iterable[SharedGateRow]) -> list[GateRow]:
    """What partitions have spent of a shared limit, as gates of the plain queue that is left of them."""
    return [
        GateRow(gate_id(queue, limit, tuple(row.key)), limit, row.key, 0, row.tat, 0, 0, None, row.memo, row.value)
        for row in rows
    ]


def _renamed(whole: Policy, part: Policy) -> dict[str, BoundLimit]:
    """Limits with tokens by the names that they have in a plain queue, as partitions share them."""
    pairs = zip(whole.bound, part.bound, strict=False)
    return {
        plain.name: shared for plain, shared in pairs if plain.name != shared.name and not shared.limit.counts_in_flight
    }
