"""The pieces of a queue's board, and the working set of one claim.

Flows, lanes and gates stay in memory between claims (see `resident.py`). A claim takes those that it looks at, changes
them in place, and marks what it has changed: only that is written. A claim that fails drops the board.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable
from heapq import heapify, heappop, heappush, heapreplace
from operator import attrgetter
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from fairlane.clock import Instant
from fairlane.policy.gates import GateState
from fairlane.policy.keys import gate_id, select, shared_gate_id
from fairlane.policy.limits import PLANNED_AHEAD, Limit, Rate
from fairlane.policy.policy import BoundLimit, Level, Policy
from fairlane.scheduler.snapshot import (
    Ask,
    Contender,
    FlowRow,
    GateRow,
    GateWakeup,
    Head,
    LaneRow,
    QueueRow,
    Release,
    SharedGateRow,
    SharedRelease,
    Standing,
    Supply,
)

FIRST_GUESS = 0.1
"""The run time in seconds that is assumed before any job of a queue has ended."""

LEAST_CHARGE = 1e-6
"""Jobs that take no time still take turns."""

RECHECK = 100_000
"""Microseconds after which room that a woken lane has not used is offered again."""

Entry = tuple[Any, ...]
"""What a list of pieces is ordered by, and last the piece or its id."""

IDLE, READY, PARKED = int(Standing.IDLE), int(Standing.READY), int(Standing.PARKED)


class Gate(GateState):
    """One limit for one key. It stays in memory; what concerns one claim alone is begun anew with each."""

    def __init__(self, row: GateRow, bound: BoundLimit, limit: Limit) -> None:
        super().__init__(row.in_flight, row.tat, _decoded(row.memo), row.waiting)
        self.id = row.id
        self.name = row.limit
        self.key = row.key
        self.bound = bound
        self.is_of_queue = bound.level is Level.QUEUE
        self._obey(limit)
        self.alarm: Instant | None = None
        """Where the index of alarms has it."""
        self.is_resident = False
        """It is the one that memory has of its limit and key, and no other queue's: lanes may keep it."""
        self.awake = row.awake
        self.wake_at = row.wake_at
        self.value = row.value
        self.given_by = row.given_by
        self.begin()

    def begin(self) -> None:
        """Take part in another claim."""
        self.shared: SharedGate | None = None
        self.known = 0
        """How many of those who wait on it the store has named to the plan."""
        self.before: Instant | None = None
        """What `tat` was before the first start of this claim."""
        self.waited = self.waiting
        """How many waited on it when this claim began."""
        self.denied = 0
        """How often it has turned somebody away in this claim."""
        self.planned: Instant | None = None
        """The last start that this claim plans for its own instant."""
        self.dirty = False

    def room(self, now: Instant) -> int:
        return self.limit.room_at(self, now) if self.shared is None else self.shared.room(now)

    def charge(self, now: Instant, count: int = 1) -> None:
        if self.shared is not None:
            self.shared.charge(now, count)
            return
        if self.before is None:
            self.before = self.tat
        self.limit.take(self, now, count)
        self.dirty = True

    def _obey(self, limit: Limit) -> None:
        self.limit = limit
        self.smooth = None if self.bound.is_shared else limit.paced
        """Its limit, if that is a rate whose starts are worth planning one by one, and its queue's own."""

    def plan(self, rate: Rate, at: Instant, now: Instant) -> None:
        """Charge a job for the instant at which it is to start."""
        rate.take_at(self, at, now)
        self.planned, self.dirty = at, True

    def free(self, release: Release, now: Instant, held: int | None, task: str | None) -> None:
        """Take note of claims that ended. Of a shared gate its own lane events tell."""
        if self.shared is None and self.limit.free(self, release, now, held, task):
            self.dirty = True

    def resume(self, count: int) -> None:
        """Give back places that jobs have kept in a sequence."""
        if count and self.bound.limit.resume(self, count):
            self.dirty = True

    def arrive(self, count: int) -> None:
        """Count jobs that wait."""
        if self.bound.limit.arrive(self, count):
            self.dirty = True

    def bring(self, value: float, given_by: int, policy: Policy, now: Instant) -> None:
        """Put a number in force, unless a job that was enqueued later has brought one already."""
        if given_by <= self.given_by:
            return
        self.given_by, self.dirty = given_by, True
        limit = policy.limit_at(self.bound, tuple(self.key), value)
        if limit is not None and value != self.value:
            before, self.value = self.tat, value
            self._obey(limit)
            limit.carry_over(self, now)
            if (rate := self.smooth) is not None and not rate.rolling:
                # Nobody gives back what was planned by the number before: those starts are made.
                self.tat = max(self.tat, min(before, now + PLANNED_AHEAD + rate.interval))
        # What says no more than a gate without jobs would, and says when the number came: it is kept from then on.
        self.tat = max(self.tat, now)

    def postpone(self, now: Instant, lag: int) -> None:
        """What was charged starts so much later."""
        charged = self.shared or self
        if charged.before is not None:
            charged.limit.postpone(charged, charged.before, now, lag)

    def set_alarm(self, now: Instant, room: int, *, waits: bool, early: int = 0) -> bool:
        """Note when it must be looked at although nothing is released, so much before it opens; say whether that is at
        once: there is room for somebody who has not been woken."""
        alarm, is_now = None, False
        if waits:
            alarm = self.opens_at(now)
            if alarm is not None:
                alarm -= early
        elif self.waiting and room > self.awake:
            alarm, is_now = now, True
        elif self.waiting and room > 0:
            alarm = self.wake_at if self.wake_at is not None and self.wake_at > now else now + RECHECK
        if alarm != self.wake_at:
            self.wake_at, self.dirty = alarm, True
        return is_now

    def opens_at(self, now: Instant) -> Instant | None:
        return self.limit.opens_again_at(self) if self.shared is None else self.shared.opens_at(now)

    @property
    def stored_memo(self) -> str | None:
        return _encoded(self.memo)

    def row(self) -> GateRow:
        return GateRow(*gate_fields(self))


gate_fields = attrgetter(
    "id", "name", "key", "in_flight", "tat", "waiting", "awake", "wake_at", "stored_memo", "value", "given_by"
)
"""What a row keeps of a gate, as a tuple: it is made of every gate that a claim changes."""


def _decoded(memo: str | None) -> Any:
    return None if memo is None else msgspec.json.decode(memo)


def _encoded(memo: Any) -> str | None:
    return None if memo is None else msgspec.json.encode(memo).decode()


class Lane:
    """One lane. `heads` are its first ready jobs that are known and not started: every one from its floor to the last
    of them."""

    def __init__(self, row: LaneRow, flow: Flow) -> None:
        self.id = row.id
        self.flow = flow
        self.priority = row.priority
        self.keys = row.keys
        self.passes: list[tuple[bytes, BoundLimit]] | None = None
        self.gates: list[Gate] | None = None
        """The keyed gates that its jobs pass, where they are known."""
        self.entry: tuple[list[Entry], Entry] | None = None
        """The list that has it, and its place there."""
        self.next_head: int = 0
        self.take_over(row)
        self.begin()

    def take_over(self, row: LaneRow) -> None:
        """Be as stored."""
        self.ready = row.ready
        self.in_flight = row.in_flight
        self.floor = row.floor
        self.rank = row.rank
        self.standing = row.standing
        self.gate = row.gate
        self.tag = row.tag
        self.head = row.head
        self.forget_heads()

    def begin(self) -> None:
        self.was = (self.ready, self.in_flight, self.standing == PARKED)
        self.dirty = False
        if self.next_head:
            del self.heads[: self.next_head]
            self.next_head = 0

    def forget_heads(self) -> None:
        self.heads: list[Head] = []
        self.next_head = 0
        self.exhausted = False

    def skip(self, position: int) -> None:
        """A job was started out of turn."""
        self.heads = [head for head in self.heads[self.next_head :] if head.position != position]
        self.next_head = 0

    def row(self) -> LaneRow:
        return LaneRow(*lane_fields(self))

    @property
    def order(self) -> int:
        """Where it stands among the lanes of its flow: by the rank of its head, and of equals by its position."""
        return order_of(self.rank, self.head)

    @property
    def known_heads(self) -> int:
        return len(self.heads) - self.next_head

    @property
    def after_heads(self) -> int:
        """From which position on its next jobs are not known."""
        return self.heads[-1].position + 1 if self.next_head < len(self.heads) else self.floor

    @property
    def lacks_heads(self) -> bool:
        """Whether the store must be asked for its next job, or, where other lanes may go first, for the one after."""
        known = len(self.heads) - self.next_head
        if self.exhausted or known > 1:
            return False
        return known <= 0 or (self.ready > 1 and self.flow.open + self.flow.shut > 1)


lane_fields = attrgetter(
    "id", "flow.id", "priority", "keys", "ready", "in_flight", "floor", "rank", "standing", "gate", "tag", "head"
)
"""What a row keeps of a lane."""


def order_of(rank: int, position: int) -> int:
    """A rank and a position as one number: positions order what ranks alike."""
    return rank << 63 | position


class Flow:
    """One flow. `lanes` are its ready lanes that a claim looks at, by order; `known` counts all its lanes there.

    Up to the order `reach` every ready lane is among them; beyond it there may be one that goes before these.
    """

    def __init__(self, row: FlowRow, weight: float) -> None:
        self.id = row.id
        self.key = row.key
        self.entry: tuple[list[Entry], Entry] | None = None
        """The list that has it, and its place there."""
        self.ready: list[Entry] = []
        """Its ready lanes in memory, by order, as they were when the claim began: all of them, if they are `opened`."""
        self.used = 0
        """The last change of the board that it had a part in."""
        self.take_over(row, weight)
        self.begin()

    def take_over(self, row: FlowRow, weight: float) -> None:
        self.own_weight = row.weight
        self.weight = weight
        self.vtime = row.vtime
        self.tie = row.tie
        self.cost = row.cost
        self.debt = row.debt
        self.open = self.opened = row.open
        self.shut = row.shut
        self.standing = row.standing
        self.gate = row.gate
        self.given_by = row.given_by

    def begin(self) -> None:
        self.lanes: list[tuple[int, bytes, Lane]] = []
        self.loaded = 0
        self.known = 0
        self.reach = -math.inf
        self.queued = False
        self.dirty = False

    def row(self) -> FlowRow:
        return FlowRow(*flow_fields(self))

    def weigh(self, weight: float, given_by: int, policy: Policy) -> None:
        """Take a weight, unless a job that was enqueued later has brought one already."""
        if given_by > self.given_by:
            self.own_weight, self.given_by, self.dirty = weight, given_by, True
            self.weight = policy.weight_at(self.key, weight)

    def push(self, lane: Lane) -> None:
        """Let a ready lane take part in this plan."""
        heappush(self.lanes, (lane.order, lane.id, lane))
        self.loaded += 1

    def pop(self) -> None:
        self.loaded -= 1
        heappop(self.lanes)

    def drop(self, lane: Lane) -> None:
        """A lane takes no more part in it."""
        self.loaded -= 1
        self.lanes = [entry for entry in self.lanes if entry[2] is not lane]
        heapify(self.lanes)

    def reorder(self, lane: Lane) -> None:
        """The order of the first lane has changed."""
        heapreplace(self.lanes, (lane.order, lane.id, lane))

    @property
    def lacks_lanes(self) -> bool:
        """Whether memory holds fewer of its ready lanes than it has."""
        return len(self.ready) < self.opened

    def is_blind(self) -> bool:
        """Whether a lane that is not on the board may go before all that are."""
        if self.loaded >= self.open or self.reach == math.inf:
            return False
        return not self.lanes or self.lanes[0][0] > self.reach

    def has_before(self, order: int) -> bool:
        """Whether, the first lane aside, one goes before this: on the board, or perhaps beyond it."""
        if any(entry[0] < order for entry in self.lanes[1:3]):  # its children in the heap
            return True
        return self.loaded < self.open and order > self.reach

    def in_reach(self) -> int:
        """How many lanes on the board can be served in order without asking for more."""
        return self.loaded if self.loaded >= self.open else sum(entry[0] <= self.reach for entry in self.lanes)

    def lowered(self) -> None:
        """A lane's order has changed in place."""
        self.lanes = [(lane.order, lane.id, lane) for _, _, lane in self.lanes]
        heapify(self.lanes)


flow_fields = attrgetter(
    "id", "key", "own_weight", "vtime", "tie", "cost", "debt", "open", "shut", "standing", "gate", "given_by"
)
"""What a row keeps of a flow."""


class Board:
    """All pieces on the table, by id."""

    def __init__(self, policy: Policy, now: Instant, queue: QueueRow) -> None:
        self.policy = policy
        self.now = now
        self.tie = queue.tie
        self.cost = queue.cost
        self.flows: dict[bytes, Flow] = {}
        self.lanes: dict[bytes, Lane] = {}
        self.gates: dict[bytes, Gate] = {}
        self._queue_gates: list[Gate] | None = None
        self.charges_time = policy.charges_time
        self.shared: dict[bytes, SharedGate] = {}
        self._shared_behind = {gate: shared_gate_id(b.name, ()) for gate, b in policy.queue_gates if b.is_shared}
        """By a gate of this queue's own, the gate that it shares."""
        self._asked_shared: set[bytes] = set()
        self.retired: dict[bytes, SharedGateRow] = {}
        """Shared gates whose limit had another kind or scope when claims passed them: nobody asks them, and they are
        freed all the same, for the day when that limit is back."""
        self.freed: set[bytes] = set()
        """Those of them that have changed."""

    def next_tie(self) -> int:
        self.tie += 1
        return self.tie

    def charge(self, flow: Flow) -> float:
        """What starting one job costs its flow: one, or the best guess at its run time."""
        if not self.charges_time:
            return 1.0
        guess = flow.cost or self.cost or FIRST_GUESS
        return guess if guess > LEAST_CHARGE else LEAST_CHARGE

    def tag(self, flow: Flow) -> float:
        """When it is a flow's turn: at its virtual time, or when that will be once it is put right.

        Who owes no more than a job pays after its turn: run times are guesses, and half of all flows owe a little. Were
        they to pay before, every other flow that a claim looks at would be looked at in vain.
        """
        debt = flow.debt
        if not debt or 0.0 < debt <= self.charge(flow) / flow.weight:
            return flow.vtime
        return max(0.0, flow.vtime + debt)

    def add_flows(self, flows: Iterable[Flow]) -> None:
        for flow in flows:
            if flow.id not in self.flows:
                flow.begin()
                self.flows[flow.id] = flow

    def add_lanes(self, lanes: Iterable[Lane]) -> None:
        """Put lanes on the table, with their flows; those that are ready take part in the plan."""
        for lane in lanes:
            if lane.id not in self.lanes:
                flow = lane.flow
                if flow.id not in self.flows:
                    flow.begin()
                    self.flows[flow.id] = flow
                lane.begin()
                self.lanes[lane.id] = lane
                if lane.gates is not None:
                    self._keep_gates(lane, lane.gates)
                flow.known += 1
                if lane.standing == READY:
                    flow.push(lane)

    def _keep_gates(self, lane: Lane, gates: list[Gate]) -> None:
        """Put the gates of a lane on the table, unless one of them has been replaced since they were looked up."""
        known = self.gates
        for gate in gates:
            if not gate.is_resident:
                lane.gates = None
                return
            if gate.id not in known:
                gate.begin()
                known[gate.id] = gate

    def new_lane(self, lane_id: bytes, priority: int, keys: dict[str, str | None], floor: int) -> Lane:
        """A lane seen for the first time; its flow too, if nobody knew it."""
        flow_id = self.policy.flow_of(priority, keys)
        flow = self.flows.get(flow_id)
        if flow is None:
            key = list(self.policy.flow_key(priority, keys))
            weight = self.policy.weight_of(priority, keys)
            row = FlowRow(flow_id, key, weight, 0.0, 0, 0.0, 0.0, 0, 0, IDLE, None)
            flow = self.flows[flow_id] = Flow(row, self.policy.weight_at(key, weight))
            flow.dirty = True
        lane = Lane(LaneRow(lane_id, flow_id, priority, keys, 0, 0, floor, 0, IDLE, None, 0.0, floor), flow)
        self.lanes[lane_id] = lane
        flow.known += 1
        lane.dirty = True
        return lane

    def add_gates(self, gates: Iterable[Gate]) -> None:
        for gate in gates:
            if gate.id not in self.gates:
                gate.begin()
                if gate.bound.is_shared:
                    gate.shared = self._shared(gate.bound, tuple(gate.key))
                self.gates[gate.id] = gate

    def add_shared(self, rows: Iterable[SharedGateRow]) -> None:
        for row in rows:
            bound = self.policy.bound_named(row.limit)
            shared = None if bound is None else self._shared(bound, tuple(row.key))
            if shared is None:
                self.retired.setdefault(row.id, row)
            elif not shared.is_known:
                shared.take_over(row)
                shared.is_known = True

    def own_gates(self, shared: Iterable[SharedGateRow]) -> list[bytes]:
        """This queue's own gates, by which its lanes pass these shared ones."""
        bounds = ((self.policy.bound_named(row.limit), row) for row in shared)
        return [self.policy.gate_of(bound, tuple(row.key)) for bound, row in bounds if bound is not None]

    def unknown_shared(self, gates: Iterable[bytes]) -> tuple[bytes, ...]:
        """The shared gates behind these and behind those on the board that the store was not asked for yet."""
        wanted = {self._shared_behind[gate] for gate in gates if gate in self._shared_behind}
        wanted.update(shared.id for shared in self.shared.values() if not shared.is_known)
        wanted -= self._asked_shared
        self._asked_shared |= wanted  # what the store does not find now is new
        return tuple(sorted(wanted))

    def has_unknown_shared(self) -> bool:
        return any(not shared.is_known and shared.id not in self._asked_shared for shared in self.shared.values())

    def passed_by(self, lane: Lane) -> tuple[bytes, ...]:
        """The shared gates that a job of this lane passes."""
        if not self.policy.shared_limits:
            return ()
        return tuple([gate.shared.id for gate in (*(lane.gates or ()), *self.queue_gates()) if gate.shared])

    def _shared(self, bound: BoundLimit, key: tuple[str | None, ...]) -> SharedGate | None:
        if not bound.is_shared:
            return None
        shared_id = shared_gate_id(bound.name, key)
        found = self.shared.get(shared_id)
        if found is None:
            row = SharedGateRow(shared_id, bound.name, list(key), 0, 0, [])
            limit = self.policy.limit_at(bound, key)
            # What an operator has changed holds in all partitions alike: room that is left is dealt by it.
            declared = limit if limit is not None and self.policy.is_crossing(bound) else bound.limit
            found = self.shared[shared_id] = SharedGate(row, declared, self.policy.queue, limit)
        return found

    def passes(self, lane: Lane) -> list[tuple[bytes, BoundLimit]]:
        """The keyed gates that its jobs pass, by id, with their limits."""
        # Asked for several times in a claim, and always the same.
        if lane.passes is None:
            lane.passes = self.policy.gates_of(lane.priority, lane.keys)
        if self.policy.keyed_shared_limits:
            for gate, bound in lane.passes:
                if bound.is_shared and gate not in self._shared_behind:
                    key = select(bound.limit.by, lane.keys, lane.priority)
                    self._shared_behind[gate] = shared_gate_id(bound.name, key)
        return lane.passes

    def gates_of(self, lane: Lane) -> list[Gate]:
        """The keyed gates of a lane; those that the store did not know are new and open."""
        if lane.gates is None:
            if not self.policy.has_keyed_gates:
                lane.gates = []
                return lane.gates
            lane.gates = [
                self.gates.get(gate_id) or self.gate(gate_id, bound, select(bound.limit.by, lane.keys, lane.priority))
                for gate_id, bound in self.passes(lane)
            ]
        return lane.gates

    def queue_gates(self) -> list[Gate]:
        """The gates of the whole queue. Asked for once the store has named them."""
        if self._queue_gates is None:
            self._queue_gates = [self.gate(gate_id, bound, ()) for gate_id, bound in self.policy.queue_gates]
        return self._queue_gates

    def gate(self, gate_id: bytes, bound: BoundLimit, key: tuple[str | None, ...]) -> Gate:
        found = self.gates.get(gate_id)
        if found is None:
            limit = self.policy.limit_at(bound, key) or bound.limit
            found = self.gates[gate_id] = Gate(GateRow(gate_id, bound.name, list(key), 0, 0, 0, 0, None), bound, limit)
            found.shared = self._shared(bound, key)
        return found


def gate_of(policy: Policy, row: GateRow) -> Gate | None:
    """A gate as it is stored. `None`: its limit is no more, or not for this key; such a gate is left alone."""
    bound = policy.bound_named(row.limit)
    limit = None if bound is None else policy.limit_at(bound, tuple(row.key), row.value)
    return None if bound is None or limit is None else Gate(row, bound, limit)


T = TypeVar("T")

KEEP = 50_000
"""Microseconds for which a queue's part of the room is kept for it once it has been woken."""


def deal(room: int, taken: list[int]) -> list[int]:
    """Divide room so that whoever has taken the fewest catches up first; of equals, the first goes first."""
    order = sorted(range(len(taken)), key=lambda n: (taken[n], n))
    level = taken[order[0]] if order else 0
    rising = 0
    for nth in order:
        # Those below rise together until they reach the next.
        if (taken[nth] - level) * rising > room:
            break
        room -= (taken[nth] - level) * rising
        level = taken[nth]
        rising += 1
    dealt = [0] * len(taken)
    for place, nth in enumerate(sorted(order[:rising])):
        dealt[nth] = level - taken[nth] + room // rising + (place < room % rising)
    return dealt


class SharedGate(GateState):
    """What all queues share of one limit for one key, being worked on."""

    def __init__(self, row: SharedGateRow, declared: Limit, queue: str, limit: Limit | None = None) -> None:
        self.id = row.id
        self.declared = declared
        self.limit = limit or declared
        """What holds for this queue, if an operator has changed it there."""
        self.before: Instant | None = None
        self.queue = queue
        self.is_known = False
        self.dirty = False
        self.take_over(row)

    def take_over(self, row: SharedGateRow) -> None:
        self.name = row.limit
        self.key = row.key
        self.in_flight, self.tat, self.memo = row.in_flight, row.tat, _decoded(row.memo)
        self.value = row.value
        self.contenders = {each.queue: each for each in row.contenders}
        self.waiting = self._count_waiting()
        own = self.contenders.get(self.queue)
        self.was_woken = own is not None and own.until is not None
        self.taken = own.taken if own is not None else 0 if self.limit.counts_in_flight else None

    def row(self) -> SharedGateRow:
        contenders, memo = [self.contenders[queue] for queue in sorted(self.contenders)], _encoded(self.memo)
        return SharedGateRow(self.id, self.name, self.key, self.in_flight, self.tat, contenders, memo, self.value)

    def room(self, now: Instant) -> int:
        """How much is open to this queue: all, less what others wait for and have not had their part of."""
        room = self.limit.room_at(self, now)
        rivals = self._rivals(now)
        if room <= 0 or not rivals:
            return room
        taken = [each.taken for each in rivals]
        # Who has not waited until now is owed nothing.
        own = min(taken) if self.taken is None else self.taken
        # Of equals, the one that was woken goes first: two who give way to each other would leave the slot empty.
        return deal(room, [own, *taken])[0] if self.was_woken else deal(room, [*taken, own])[-1]

    def charge(self, now: Instant, count: int) -> None:
        if self.taken is None:
            self.taken = min((each.taken for each in self._rivals(now)), default=0)
        self.taken += count
        if self.before is None:
            self.before = self.tat
        self.limit.take(self, now, count)
        self.dirty = True

    def free(self, release: SharedRelease, now: Instant) -> None:
        """Take note of claims that ended, in whatever queue."""
        if self.limit.free(self, release.ending, now, max(0, now - release.since), release.task):
            self.dirty = True
        if self.limit.counts_in_flight:
            ended = release.ended + release.unstarted
            if release.queue == self.queue:
                self.taken = max(0, (self.taken or 0) - ended)
            elif (other := self.contenders.get(release.queue)) is not None:
                self._keep(replace(other, taken=max(0, other.taken - ended)))

    def opens_at(self, now: Instant) -> Instant | None:
        """For a gate that is shut for this queue: when to look again although nothing is released."""
        if self.limit.room_at(self, now) <= 0:
            return self.limit.opens_again_at(self)
        return min((each.until for each in self._rivals(now) if each.until is not None), default=now + KEEP)

    def leave(self, now: Instant, *, waits: bool, is_eager: bool) -> list[GateWakeup]:
        """End this queue's turn: say whether it waits for more, and wake the others for what is left."""
        before = dict(self.contenders)
        self.contenders.pop(self.queue, None)
        for each in list(self.contenders.values()):
            if each.until is not None and each.until <= now:
                # It did not come. Its wakeup still makes it look when it does.
                self._keep(Contender(each.queue, each.taken))
        others = [each for each in self.contenders.values() if each.waits]
        parts = deal(max(0, self.declared.room_at(self, now)), [each.taken for each in others])
        wakeups = []
        for each, part in zip(others, parts, strict=True):
            if part <= 0 or each.until is not None:
                continue
            wakeups.append(_ring(each.queue, self.name, self.key))
            # Where nobody is to come soon, its lanes are looked at when somebody does.
            self._keep(replace(each, until=now + KEEP) if each.is_eager else Contender(each.queue, each.taken))
        taken = min((each.taken for each in others), default=0) if self.taken is None else self.taken
        self._keep(Contender(self.queue, taken, waits, waits and is_eager))
        self.waiting = self._count_waiting()
        self.dirty = self.dirty or self.contenders != before
        return wakeups

    def _keep(self, contender: Contender) -> None:
        """Remember a queue for as long as it waits or holds slots."""
        if contender.waits or (self.limit.counts_in_flight and contender.taken > 0):
            self.contenders[contender.queue] = contender
        else:
            self.contenders.pop(contender.queue, None)

    def _count_waiting(self) -> int:
        return sum(each.waits for each in self.contenders.values())

    def _rivals(self, now: Instant) -> list[Contender]:
        """The other queues that wait and are likely to come for their part."""
        return [
            each
            for queue, each in self.contenders.items()
            if queue != self.queue and each.waits and (each.is_eager if each.until is None else each.until > now)
        ]


def wakeups_for_all(rows: Iterable[SharedGateRow]) -> list[GateWakeup]:
    """Rings for every queue that waits at these gates: their bound has changed."""
    return [_ring(each.queue, row.limit, row.key) for row in rows for each in row.contenders if each.waits]


def _ring(queue: str, limit: str, key: Iterable[str | None]) -> GateWakeup:
    return GateWakeup(queue, gate_id(queue, limit, tuple(key)) if key else None)


def fold_shared(board: Board, releases: Iterable[SharedRelease]) -> None:
    """Free what claims of any queue held that have ended."""
    for release in releases:
        if (gate := board.shared.get(release.gate)) is not None:
            gate.free(release, board.now)
        elif (row := board.retired.get(release.gate)) is not None and row.in_flight > 0:
            board.retired[row.id] = _left(row, release)
            board.freed.add(row.id)


def _left(row: SharedGateRow, release: SharedRelease) -> SharedGateRow:
    """A gate of which only the count is known, once these claims have left it."""
    ended = release.ended + release.unstarted
    contenders = [
        replace(each, taken=max(0, each.taken - ended)) if each.queue == release.queue else each
        for each in row.contenders
    ]
    staying = [each for each in contenders if each.waits or each.taken > 0]
    return replace(row, in_flight=max(0, row.in_flight - ended), contenders=staying)


def ask_for_shared(board: Board, steps: Generator[Ask, Supply, T]) -> Generator[Ask, Supply, T]:
    """Let the plan ask as ever; whenever it asks for a gate that is shared, ask for the other half as well."""
    supply: Supply | None = None
    while True:
        try:
            need = next(steps) if supply is None else steps.send(supply)
        except StopIteration as stop:
            result: T = stop.value
            return result
        supply = yield replace(need, shared=board.unknown_shared(need.gates))
        board.add_shared(supply.shared)
