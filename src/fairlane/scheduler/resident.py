"""The board of a queue as it stays in the memory of whoever claims.

It answers the plan from memory and asks the tables only for what it does not hold. It may hold a part of the tables: it
knows up to which virtual time it has every ready flow, up to which time every alarm, and, by the counts that flows and
gates keep, whether it has all of their lanes. Pieces that have changed since the tables were last written are always
held; what the tables say of those is ignored.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Generator, Iterable, Sequence
from dataclasses import replace
from math import inf
from operator import attrgetter
from typing import TypeVar
from uuid import UUID

import msgspec
from msgspec.structs import astuple

from fairlane.clock import Instant
from fairlane.policy.overrides import NO_OVERRIDES
from fairlane.policy.policy import Policy
from fairlane.scheduler.board import IDLE, PARKED, READY, Entry, Flow, Gate, Lane, gate_of, order_of
from fairlane.scheduler.journal import Delta, Mark
from fairlane.scheduler.plan import plan_claims
from fairlane.scheduler.snapshot import (
    Arrival,
    Ask,
    Events,
    FlowRow,
    Forced,
    GateRow,
    Head,
    LaneRow,
    Plan,
    QueueRow,
    Scan,
    SharedGateRow,
    Snapshot,
    Supply,
)

T = TypeVar("T")

MOST_RESIDENT = 20_000
"""Flows that are held from one claim to the next, and up to twice as many lanes and gates: some two kilobytes each."""
SPARE_HEADS, MOST_HEADS = 16, 65_536
"""Jobs of a lane that are kept for its next turns, and of all lanes together: some two hundred bytes each."""
LANES_PER_FLOW = 2
"""Lanes of a flow that a scan brings along."""
ALARMS_AT_ONCE = 1_000
BEGINNING = (-inf, 0)
END = (inf, 0)
EVER = 1 << 62
FEW = 16
"""One in so many is found and moved by itself. If it is more, the whole list is put in order at once."""


class Found(msgspec.Struct, frozen=True):
    """What the tables hold of it."""

    flows: list[FlowRow] = []
    lanes: list[LaneRow] = []
    gates: list[GateRow] = []
    heads: dict[bytes, list[Head]] = {}
    shared: list[SharedGateRow] = []
    scanned: int = 0
    """How many of the flows were found by the scan: the first of them, in its order."""


class ResidentBoard:
    """Flows, lanes and gates of one queue, by id and in the orders in which the plan takes them."""

    def __init__(self, policy: Policy, mark: Mark | None = None, *, is_whole: bool = False) -> None:
        self.policy = policy
        self.mark = mark
        self.stored = 0
        """The last change that the tables hold."""
        self.flows: dict[bytes, Flow] = {}
        self.lanes: dict[bytes, Lane] = {}
        self.gates: dict[bytes, Gate] = {}
        self.changed: tuple[dict[bytes, int], dict[bytes, int], dict[bytes, int]] = ({}, {}, {})
        """Flows, lanes and gates that differ from the tables, each with the last change that touched it."""
        self.looked_at = 0
        """Pieces that plans were given."""
        # Plain lists, kept in order: for tens of thousands of entries that costs less than any tree in Python.
        self._ready: list[Entry] = []
        self._alarms: list[Entry] = []
        self._parked_lanes: defaultdict[bytes | None, list[Entry]] = defaultdict(list)
        self._parked_flows: defaultdict[bytes | None, list[Entry]] = defaultdict(list)
        self._parked = self._parked_lanes, self._parked_flows
        self.is_whole = is_whole
        """Everything that is stored of the queue is here."""
        self._complete: tuple[float, int] = END if is_whole else BEGINNING
        """Every ready flow before this (virtual time, tie-breaker) is here."""
        self._alarmed: Instant = EVER if is_whole else -1
        """Every gate whose alarm is set for this time or before is here."""

    # What a claim does.

    def claim(
        self, events: Events, want: int, *, lag: int = 0, listens: bool = False, ahead: int | None = None
    ) -> Generator[Ask, Found, Plan]:
        """Fold what has happened, then start up to `want` jobs."""
        snapshot = yield from self.snapshot(events, want, lag=lag, listens=listens, ahead=ahead)
        plan = yield from self.answer(plan_claims(snapshot, want))
        for gate in plan.gates:
            if not gate.is_resident or gate.alarm != gate.wake_at:
                self._place_gate(gate)  # now: the next alarm is asked for before the plan is written
        return plan

    def snapshot(
        self,
        events: Events,
        want: int,
        lanes: Iterable[bytes] = (),
        *,
        lag: int = 0,
        listens: bool = False,
        ahead: int | None = None,
    ) -> Generator[Ask, Found, Snapshot]:
        """What the plan starts from, with these lanes too."""
        count, queue = max(want, 1), events.queue
        named = dict.fromkeys(event.lane for event in events.releases)
        named.update(dict.fromkeys(event.lane for event in events.arrivals))
        named.update(dict.fromkeys(each.lane for each in events.forced))
        named.update(dict.fromkeys(lanes))
        cursor = (queue.cursor, queue.cursor_tie)
        if not self.is_whole:
            ask = Ask(
                lanes=[lane for lane in named if lane not in self.lanes],
                gates=[gate for gate in events.woken if gate not in self.gates],
                scan=self._scan_of_tables(cursor, count),
                alarms=(self._alarmed, ALARMS_AT_ONCE) if self._alarmed <= events.now else None,
                but_not=self._known_better(),
            )
            if ask.is_of_board:
                self.adopt((yield ask), ask)
        due = [self.gates[gate] for at, gate in self._alarms[:count] if at <= events.now]
        due += [self.gates[gate] for gate in events.woken if gate in self.gates]
        found_lanes = [self.lanes[lane] for lane in named if lane in self.lanes]
        scan = yield from self._scan(cursor, count)
        self.looked_at += len(events.arrivals) + len(events.releases) + len(found_lanes) + len(due)
        return Snapshot(
            *astuple(events),
            policy=self.policy,
            lanes=found_lanes,
            scan=scan,
            due_gates=due,
            lag=lag,
            listens=listens,
            ahead=ahead,
            spare_heads=min(SPARE_HEADS, MOST_HEADS // max(1, len(self.lanes))),
        )

    def answer(self, asking: Generator[Ask, Supply, T]) -> Generator[Ask, Found, T]:
        """Answer the questions of a generator until it returns its result."""
        try:
            wanted = next(asking)
            while True:
                wanted = asking.send((yield from self._supply(wanted)))
        except StopIteration as stop:
            result: T = stop.value
            return result

    def note(self, plan: Plan, mark: Mark) -> None:
        """A plan is being written, as the change that leads to this state."""
        seq, (flows, lanes, gates) = mark.seq, self.changed
        gone: list[Entry] = []
        moved: list[Entry] = []
        for flow in plan.flows:
            flow.used = flows[flow.id] = seq
            flow.opened = flow.open
            entry, place = flow.entry, (flow.vtime, flow.tie, flow.id)
            if flow.standing != READY or entry is None or entry[0] is not self._ready:
                self._place_flow(flow)
            elif entry[1] != place:
                # Most of those that it touched have had their turn: they are moved together.
                gone.append(entry[1])
                moved.append(place)
                flow.entry = (self._ready, place)
        self._move_ready(gone, moved)
        for lane in plan.lanes:
            lanes[lane.id] = seq
            self._place_lane(lane)
        for gate in plan.gates:
            gates[gate.id] = seq
        self.mark = mark

    def next_alarm(self) -> Instant | None:
        """When a gate has to be looked at, or more alarms have to be looked up."""
        least = self._alarms[0] if self._alarms else None
        if self._alarmed < EVER and (least is None or least[0] > self._alarmed):
            return None if self._alarmed < 0 else self._alarmed
        return None if least is None else least[0]

    # What others have done.

    def apply(self, delta: Delta, mark: Mark) -> None:
        """Apply a change that somebody else made, or that the tables do not hold yet."""
        seq, (flows, lanes, gates) = mark.seq, self.changed
        for row in delta.flows:
            if (flow := self.flows.get(row.id)) is not None:
                flow.take_over(row, self.policy.weight_at(row.key, row.weight))
            else:
                flow = self._new_flow(row)
            flow.used = flows[row.id] = seq
            self._place_flow(flow)
        for lane_row in delta.lanes:
            if (lane := self.lanes.get(lane_row.id)) is not None:
                lane.take_over(lane_row)  # and without its heads: one of them may be somebody else's
            lanes[lane_row.id] = seq
            self._place_lane(lane or Lane(lane_row, self.flows[lane_row.flow]))
        for gate_row in delta.gates:
            gates[gate_row.id] = seq
            self._replace_gate(gate_row)
        for changed, gone in zip(
            self.changed, (delta.removed.flows, delta.removed.lanes, delta.removed.gates), strict=True
        ):
            for each in gone:
                changed.pop(each, None)
        for flow_id in delta.removed.flows:
            if (flow := self.flows.pop(flow_id, None)) is not None:
                _place(flow, None, ())
        for lane_id in delta.removed.lanes:
            if (lane := self.lanes.pop(lane_id, None)) is not None:
                _place(lane, None, ())
        for gate_id in delta.removed.gates:
            self._drop_gate(gate_id)
        self.mark = mark

    def wrote(self, stored: int) -> None:
        """The tables hold every change up to this one."""
        if stored > self.stored:
            self.stored = stored
            for changed in self.changed:
                for each in [each for each, seq in changed.items() if seq <= stored]:
                    del changed[each]

    @property
    def unwritten(self) -> int:
        """How many pieces have changed since the tables were written."""
        return sum(map(len, self.changed))

    def changed_rows(self) -> Delta:
        """The rows of those pieces."""
        return self._rows(*self.changed)

    def _rows(self, flows: Iterable[bytes], lanes: Iterable[bytes], gates: Iterable[bytes]) -> Delta:
        return Delta(
            [self.flows[each].row() for each in flows if each in self.flows],
            [self.lanes[each].row() for each in lanes if each in self.lanes],
            [self.gates[each].row() for each in gates if each in self.gates],
        )

    def rebind(self, policy: Policy) -> None:
        """The same policy with another number of a limit that queues share."""
        self.policy = policy
        for flow in self.flows.values():
            flow.weight = policy.weight_at(flow.key, flow.own_weight)
        for lane in self.lanes.values():
            lane.passes = lane.gates = None
        for row in [gate.row() for gate in self.gates.values()]:
            self._replace_gate(row)

    # For those who look.

    def find(
        self, flows: Iterable[bytes] = (), lanes: Iterable[bytes] = (), gates: Iterable[bytes] = ()
    ) -> Generator[Ask, Found, Delta]:
        """Pieces by their ids, where they exist."""
        named = list(flows), list(lanes), list(gates)
        ask = Ask(
            flows=[each for each in named[0] if each not in self.flows],
            lanes=[each for each in named[1] if each not in self.lanes],
            gates=[each for each in named[2] if each not in self.gates],
        )
        if ask.is_of_board and not self.is_whole:
            self.adopt((yield ask), ask)
        return self._rows(*named)

    def over(self, tables: Delta) -> Delta:
        """What these rows of the tables are now; and whatever else has changed."""
        changed, (flows, lanes, gates) = self.changed_rows(), self.changed
        return Delta(
            [*(row for row in tables.flows if row.id not in flows), *changed.flows],
            [*(row for row in tables.lanes if row.id not in lanes), *changed.lanes],
            [*(row for row in tables.gates if row.id not in gates), *changed.gates],
        )

    def changed_flows_before(self, since: tuple[float, int], until: tuple[float, int]) -> int:
        """How many ready flows that have changed have their turn between these."""
        entries = self._ready[bisect_left(self._ready, since) : bisect_left(self._ready, until)]
        return sum(entry[2] in self.changed[0] for entry in entries)

    # What the plan asks for.

    def _supply(self, wanted: Ask) -> Generator[Ask, Found, Supply]:
        found = Found()
        ask = self._missing(wanted)
        if ask is not None:
            found = yield ask
            self.adopt(found, ask)
        lanes = [lane for flow, count in wanted.ready for _, _, lane in self.flows[flow].ready[:count]]
        flows = [self.flows[flow] for flow in wanted.flows if flow in self.flows]
        for gate, count in wanted.parked:
            lanes += [self.lanes[entry[-1]] for entry in self._parked_lanes.get(gate, ())[:count]]
            flows += [self.flows[entry[-1]] for entry in self._parked_flows.get(gate, ())[:count]]
        scan = Scan()
        if wanted.scan is not None:
            vtime, tie, count = wanted.scan
            scan = yield from self._scan((vtime, tie), count)
        gates = [self.gates[gate] for gate in wanted.gates if gate in self.gates]
        self.looked_at += len(flows) + len(gates) + len(lanes)
        return Supply(flows, gates, lanes, found.heads, scan, found.shared)

    def _missing(self, wanted: Ask) -> Ask | None:
        """The part of a question that only the tables can answer."""
        heads, shared = wanted.heads, wanted.shared
        if self.is_whole:
            return Ask(heads=heads, shared=shared) if heads or shared else None
        ask = Ask(
            flows=[flow for flow in wanted.flows if flow not in self.flows],
            gates=[gate for gate in wanted.gates if gate not in self.gates],
            ready=[(flow, count) for flow, count in wanted.ready if self.flows[flow].lacks_lanes],
            parked=[
                (gate, count)
                for gate, count in wanted.parked
                if len(self._parked_lanes.get(gate, ())) + len(self._parked_flows.get(gate, ()))
                < self.gates[gate].waited
            ],
            heads=heads,
            shared=shared,
            but_not=self._known_better(),
        )
        return ask if ask.is_of_board or heads or shared else None

    def _known_better(self) -> tuple[list[bytes], list[bytes], list[bytes]]:
        flows, lanes, gates = self.changed
        return list(flows), list(lanes), list(gates)

    def _scan_of_tables(self, since: tuple[float, int], count: int) -> tuple[float, int, int] | None:
        """From where on the tables are to be scanned too; `None`: memory has enough."""
        entries = self._ready_since(since, count)
        if self._complete == END or (len(entries) == count and entries[-1][:2] < self._complete):
            return None
        return (*max(since, self._complete), count)

    def _scan(self, since: tuple[float, int], count: int) -> Generator[Ask, Found, Scan]:
        """Ready flows from there on, as they stood when the claim began."""
        if (scan := self._scan_of_tables(since, count)) is not None:
            ask = Ask(scan=scan, but_not=self._known_better())
            self.adopt((yield ask), ask)
        entries = self._ready_since(since, count)
        flows = [self.flows[entry[-1]] for entry in entries]
        lacking = [(flow.id, LANES_PER_FLOW) for flow in flows if flow.lacks_lanes and not self.is_whole]
        if lacking:
            ask = Ask(ready=lacking, but_not=self._known_better())
            self.adopt((yield ask), ask)
        lanes = [lane for flow in flows for _, _, lane in flow.ready[:LANES_PER_FLOW]]
        self.looked_at += len(flows) + len(lanes)
        return Scan(flows, lanes, entries[-1][:2] if entries else None, len(entries) < count)

    def adopt(self, found: Found, ask: Ask) -> None:
        """Take rows of the tables in, unless their pieces are here or were changed since."""
        for row in found.flows:
            if row.id not in self.flows:
                self._place_flow(self._new_flow(row))
        for lane_row in found.lanes:
            if lane_row.id not in self.lanes:
                self._place_lane(Lane(lane_row, self.flows[lane_row.flow]))
        for gate_row in found.gates:
            if gate_row.id not in self.gates and gate_row.id not in self.changed[2]:
                self._replace_gate(gate_row)
        if ask.scan is not None:
            if found.scanned < ask.scan[2]:
                self._complete = END
            else:
                last = found.flows[found.scanned - 1]
                self._complete = (last.vtime, last.tie + 1)
        if ask.alarms is not None:
            after, count = ask.alarms
            alarms = sorted(row.wake_at for row in found.gates if row.wake_at is not None and row.wake_at > after)
            # Gates that were named may be among them, and be set for later; and of those that are set for the same time
            # as the last one, some may have been left out.
            self._alarmed = EVER if len(alarms) < count else alarms[count - 1] - 1

    # Where pieces are.

    def _new_flow(self, row: FlowRow) -> Flow:
        return Flow(row, self.policy.weight_at(row.key, row.weight))

    def _place_flow(self, flow: Flow) -> None:
        self.flows[flow.id] = flow
        entries = None
        if flow.standing != IDLE:
            entries = self._ready if flow.standing == READY else self._parked_flows[flow.gate]
        _place(flow, entries, (flow.vtime, flow.tie, flow.id))

    def _place_lane(self, lane: Lane) -> None:
        self.lanes[lane.id] = lane
        if lane.standing == READY:
            entries, order, entry = lane.flow.ready, order_of(lane.rank, lane.head), lane.entry
            # Mostly it is there already: a lane that is alone in its flow keeps its order.
            if entry is None or entry[0] is not entries or entry[1][0] != order:
                _place(lane, entries, (order, lane.id, lane))
        elif lane.standing == PARKED:
            _place(lane, self._parked_lanes[lane.gate], (lane.tag, lane.head, lane.id))
        else:
            _place(lane, None, ())

    def _ready_since(self, bound: tuple[float, int], count: int) -> list[Entry]:
        """The first `count` ready flows at or after a bound."""
        start = bisect_left(self._ready, bound)
        return self._ready[start : start + count]

    def _move_ready(self, gone: list[Entry], put: list[Entry]) -> None:
        if len(gone) * FEW < len(self._ready):
            for entry in gone:
                _drop(self._ready, entry)
            for entry in put:
                insort(self._ready, entry)
            return
        left = set(gone)
        # In place: flows know the list that they are in.
        self._ready[:] = [entry for entry in self._ready if entry not in left]
        self._ready += put
        self._ready.sort()

    def _place_gate(self, gate: Gate) -> None:
        self.gates[gate.id] = gate
        gate.is_resident = not gate.bound.is_shared
        if gate.alarm != gate.wake_at:
            if gate.alarm is not None:
                _drop(self._alarms, (gate.alarm, gate.id))
            if gate.wake_at is not None:
                insort(self._alarms, (gate.wake_at, gate.id))
            gate.alarm = gate.wake_at

    def _replace_gate(self, row: GateRow) -> None:
        self._drop_gate(row.id)
        gate = gate_of(self.policy, row)
        if gate is not None:
            self._place_gate(gate)

    def _drop_gate(self, gate_id: bytes) -> None:
        gate = self.gates.pop(gate_id, None)
        if gate is not None:
            gate.is_resident = False
            if gate.alarm is not None:
                _drop(self._alarms, (gate.alarm, gate_id))
        for parked in self._parked:
            if not parked.get(gate_id, True):
                del parked[gate_id]

    def _drop_flow(self, flow: Flow) -> None:
        _place(flow, None, ())
        del self.flows[flow.id]

    def _drop_lane(self, lane: Lane) -> None:
        _place(lane, None, ())
        del self.lanes[lane.id]

    # Bounds.

    def shrink(self, most: int = MOST_RESIDENT) -> None:
        """Let go of what is least likely to be needed soon, where more is held than `most`. What has changed stays."""
        if len(self.flows) > most:
            self._forget_flows(most * 3 // 4)
        if len(self.lanes) > 2 * most:
            self._forget_lanes(most)
        if len(self.gates) > 2 * most:
            self._forget_gates(most)

    def _forget_flows(self, most: int) -> None:
        changed_flows, changed_lanes, _ = self.changed
        kept = {entry[-1] for entry in self._ready[: most // 2]}
        kept.update(changed_flows)
        kept.update(self.lanes[each].flow.id for each in changed_lanes)
        others = sorted((flow for flow in self.flows.values() if flow.id not in kept), key=attrgetter("used"))
        gone = others[: max(0, len(self.flows) - most)]
        if not gone:
            return
        self.is_whole = False
        left = {flow.id for flow in gone}
        for lane in [lane for lane in self.lanes.values() if lane.flow.id in left]:
            self._drop_lane(lane)
        for flow in gone:
            if flow.entry is not None and flow.entry[0] is self._ready:
                self._complete = min(self._complete, flow.entry[1][:2])
            self._drop_flow(flow)

    def _forget_lanes(self, most: int) -> None:
        """The idle ones first, and of the others those that stand last. Flows and gates know how many they have."""
        gone = [lane for lane in self.lanes.values() if lane.id not in self.changed[1]]
        gone.sort(key=lambda lane: (lane.standing == IDLE, lane.order), reverse=True)
        for lane in gone[: max(0, len(self.lanes) - most)]:
            self.is_whole = False
            self._drop_lane(lane)

    def _forget_gates(self, most: int) -> None:
        passed = {gate for lane in self.lanes.values() for gate, _ in lane.passes or ()}
        passed.update(self.changed[2])
        gone = [gate for gate in self.gates.values() if gate.id not in passed]
        for gate in gone[: max(0, len(self.gates) - most)]:
            self.is_whole = False
            if gate.alarm is not None:
                self._alarmed = min(self._alarmed, gate.alarm - 1)
            self._drop_gate(gate.id)


def _place(piece: Flow | Lane, entries: list[Entry] | None, entry: Entry) -> None:
    """Have a flow or a lane in this list, or in none, and in no other one."""
    if piece.entry is not None:
        known, place = piece.entry
        if known is entries and place == entry:
            return
        _drop(known, place)
    piece.entry = None
    if entries is not None:
        insort(entries, entry)
        piece.entry = (entries, entry)


def _drop(entries: list[Entry], entry: Entry) -> None:
    del entries[bisect_left(entries, entry)]


def upcoming(
    policy: Policy,
    now: Instant,
    flow: FlowRow | None,
    lanes: Iterable[LaneRow],
    arrivals: Sequence[Arrival],
    forced: Sequence[Forced],
    count: int,
) -> Generator[Ask, Found, list[Head]]:
    """Up to `count` heads. `lanes` are those of the flow that the arrivals name, and perhaps more.

    Asked for are heads of lanes, and lanes of the flow: READY or PARKED, the lowest rank first.
    """
    board = ResidentBoard(replace(policy, limits=(), overrides=NO_OVERRIDES, partition=None))
    flows = []
    if flow is not None:
        # What is parked now would start too.
        in_use = flow.open + flow.shut
        standing = READY if in_use > 0 else IDLE
        flows.append(msgspec.structs.replace(flow, open=in_use, shut=0, standing=standing, gate=None, debt=0.0))
    board.apply(Delta(flows, [*map(_opened, lanes)]), Mark(1, UUID(int=0)))
    events = Events(now, QueueRow(0.0, 0.0, 0, 0, 0.0), list(arrivals), forced=list(forced))
    claiming = board.claim(events, count)
    try:
        ask = next(claiming)
        while True:
            found = Found()
            if ask.ready or ask.heads:
                found = yield Ask(ready=ask.ready, heads=ask.heads, but_not=ask.but_not)
            ask = claiming.send(Found(lanes=[*map(_opened, found.lanes)], heads=found.heads))
    except StopIteration as stop:
        plan: Plan = stop.value
        return [start.head for start in plan.starts]


def _opened(lane: LaneRow) -> LaneRow:
    standing = IDLE if lane.standing == IDLE else READY
    return msgspec.structs.replace(lane, standing=standing, gate=None)
