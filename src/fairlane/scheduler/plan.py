"""The plan: who starts now. A pure function of a snapshot; it serves every store.

It takes the flow with the lowest virtual time, in it the open lane whose head ranks first, asks all gates of that lane,
starts one job or parks what a shut gate stops, and goes on. It is a generator: it asks for rows as it needs them and
returns what is to be written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable
from heapq import heappop, heappush, heapreplace
from math import ceil, inf
from typing import NamedTuple
from uuid import UUID

from fairlane.clock import Instant
from fairlane.job import Claim
from fairlane.policy.limits import UNBOUNDED, Rate
from fairlane.policy.policy import Level
from fairlane.scheduler.board import IDLE, PARKED, READY, Board, Flow, Gate, Lane, ask_for_shared, fold_shared, order_of
from fairlane.scheduler.journal import (
    by_rank_within_flows,
    fold_arrivals,
    fold_releases,
    forget_awake,
    free_room,
    leave_if_empty,
    settle_debt,
    sleepers,
    stats,
    tag_of,
    wake,
    woken_gates,
)
from fairlane.scheduler.snapshot import (
    AHEAD,
    LEAD,
    Ask,
    GateWakeup,
    Head,
    Pace,
    Plan,
    QueueRow,
    Snapshot,
    Start,
    Supply,
    distance,
)

Planning = Generator[Ask, Supply, Plan]

IDLE_VISITS = 4
"""Visits that start nothing, per job asked for, before the plan stops and leaves the rest to the next claim."""

MORE_IDLE_VISITS = 1_000
"""And so many more: as many lanes as a claim folds may stand behind one gate, and others wait behind them."""

WIDEST_SCAN = 512
"""A scan that meets nobody who can start is followed by one of twice its width, up to this."""

FEW_HEADS = 4
"""Turns that a flow may get in one claim although nobody has counted them out."""

SIBLINGS = 4
"""Parked lanes looked at beyond those that are woken, for one of the same flow whose head ranks before theirs."""


def plan_claims(snapshot: Snapshot, want: int) -> Planning:
    """Fold the lane events, then start up to `want` jobs: never beyond a limit, always the lowest virtual time
    first."""
    plan = Working(snapshot, want)
    steps = plan.steps()
    return (yield from ask_for_shared(plan.board, steps) if snapshot.policy.shared_limits else steps)


class _Instant(NamedTuple):
    """When a job is planned to start, and the smooth rates that it passes then."""

    earliest: Instant
    at: Instant
    """What it is charged for: if it can start before it arrives, the time of its arrival."""
    passed: list[tuple[Gate, Rate]]

    @property
    def latest(self) -> Instant:
        """Until when it may start. Where instants follow each other evenly, until the last one of this claim: whoever
        is late moves the others. A window counts each start from its own instant."""
        return min((self.at if rate.rolling else gate.planned or self.at) + rate.slack for gate, rate in self.passed)


class Working:
    def __init__(self, snapshot: Snapshot, want: int) -> None:
        self.snapshot = snapshot
        self.policy = snapshot.policy
        self.now = snapshot.now
        self.want = want
        self.board = Board(snapshot.policy, snapshot.now, snapshot.queue)
        self.starts: list[Start] = []
        self.heap: list[tuple[float, int, bytes, Flow]] = []
        self.scan_ended = snapshot.scan.ended
        self.frontier: tuple[float, int] = snapshot.scan.reached or (snapshot.queue.cursor, snapshot.queue.cursor_tie)
        self.vtime = snapshot.queue.vtime
        self.join_at = self.vtime
        self.asked: set[bytes] = set()
        self.left_behind = False
        self.scan_width = 16
        self.spare = snapshot.spare_heads
        self.forced: set[int] = set()
        """Positions of jobs that were started out of turn; the store still names them among the heads of lanes."""
        self.wakeups: list[GateWakeup] = []
        self.paces = snapshot.ahead is not None and any(each.is_of_starts for each in snapshot.policy.limits)
        """Whoever claims starts jobs at their instants: smooth rates are charged for those."""
        self.ahead = snapshot.ahead or 0
        """How many more may be started that are to wait for theirs."""
        self.soonest = snapshot.now + snapshot.lag
        """By when what is started now will have started."""
        self.instants: dict[int, _Instant] = {}
        """When starts are planned that pass a smooth rate, by their place among the starts."""
        self.shares = bool(snapshot.policy.shared_limits)
        self.wanted_now = want
        self.is_smooth = False
        """A smooth rate holds for the whole queue."""
        self.is_full = False
        """There is no slot for the next job in turn."""
        self.is_spoken_for = False
        """Nor would one help: it starts later, and as many wait for their instants as may."""

    def room(self, gate: Gate) -> int:
        """How many jobs may pass: now, or at instants that are near enough to be handed out."""
        rate = gate.smooth if self.paces else None
        if rate is None:
            return gate.room(self.now)
        room = rate.room_at(gate, self.soonest)
        if self.ahead <= 0 or gate.name not in self.policy.paceable:
            return room
        if room <= 0 and gate.planned is None and rate.starts_at(gate, self.soonest) > self.now + LEAD:
            return 0
        return rate.room_by(gate, self.soonest, self.now + AHEAD)

    def steps(self) -> Planning:
        yield from self.fold()
        return (yield from self.go_on())

    def go_on(self) -> Planning:
        """Once everything is folded: start what can start."""
        yield from self.wake_due()
        yield from self.force()
        yield from self.serve()
        return self.result()

    def ask(self, ask: Ask) -> Generator[Ask, Supply, Supply]:
        """Ask for pieces, and put them on the board."""
        supply = yield ask
        self.board.add_flows(supply.flows)
        self.board.add_lanes(supply.lanes)
        self.board.add_gates(supply.gates)
        return supply

    def fold(self) -> Generator[Ask, Supply, None]:
        board, snapshot = self.board, self.snapshot
        board.add_lanes(snapshot.lanes)
        board.add_flows(snapshot.scan.flows)
        board.add_lanes(snapshot.scan.lanes)
        self._reach(snapshot.scan.lanes)
        board.add_gates(snapshot.due_gates)
        new_flows = {
            flow_id
            for event in snapshot.arrivals
            if event.lane not in board.lanes
            and (flow_id := self.policy.flow_of(event.priority, event.keys)) not in board.flows
        }
        gates = self._unasked_gates(board.lanes.values()) + self._unasked(g for g, _ in self.policy.queue_gates)
        for event in snapshot.arrivals:
            if event.given:
                gates += self._unasked(g for g, _ in self.policy.gates_of(event.priority, event.keys))
        gates += self._unasked(woken_gates(self.policy, snapshot.arrivals))
        board.add_shared(snapshot.shared)
        gates += self._unasked(board.own_gates(snapshot.shared))
        if new_flows or gates or board.has_unknown_shared():
            yield from self.ask(Ask(flows=tuple(sorted(new_flows)), gates=tuple(gates)))
        fold_shared(board, snapshot.shared_releases)
        self.vtime = fold_releases(board, snapshot.releases, snapshot.policy_since, self.vtime)
        # Once the corrections are in: a tag that a wrong guess has carried away is no place to join.
        ready = [flow.vtime + flow.debt for flow in board.flows.values() if flow.standing == READY]
        self.join_at = max(0.0, min(ready, default=self.vtime))
        fold_arrivals(board, snapshot.arrivals, self.join_at, self.spare)

    def wake_due(self) -> Generator[Ask, Supply, bool]:
        """Wake as many parked lanes as there is room for; say whether any was woken."""
        asks = [
            (gate, min(gate.waiting, room))
            for gate in self.board.gates.values()
            if gate.waiting and (room := free_room(gate, self.room(gate), self.now)) > 0
        ]
        if not asks:
            return False
        # What this leaves asleep although there is room wakes up again: see `_set_alarm`.
        most = ceil(2 * self.want / len(asks)) + 1
        # The store does not know whom this plan has woken: ask for as many more as it has named before.
        spare = SIBLINGS if self.policy.fair else 0
        yield from self.ask(Ask(parked=tuple((gate.id, min(count, most) + gate.known + spare) for gate, count in asks)))
        asleep = sleepers(self.board, {gate.id for gate, _ in asks})
        woken = False
        for gate, count in asks:
            lanes, flows = asleep[gate.id]
            lanes = by_rank_within_flows(lanes)
            gate.known += len(lanes) + len(flows)
            wake(self.board, gate, lanes[: min(count, most)], flows[: min(count, most)], self.join_at)
            woken = woken or bool(lanes or flows)
            if not lanes and not flows:
                # Nobody waits here, whatever the count says; a count that is wrong must not be asked again for ever.
                gate.waiting, gate.dirty = 0, True
        return woken

    def force(self) -> Generator[Ask, Supply, None]:
        """Start what an operator has asked for. No gate is asked, and every gate is charged, as is its flow."""
        for each in self.snapshot.forced:
            lane = self.board.lanes.get(each.lane)
            if lane is None or len(self.starts) >= self.want:
                # Its lane event is not folded yet, or there is no slot for it: the next claim will see to it.
                continue
            yield from self._learn_gates(lane, self.want)
            self.board.gates_of(lane)
            self.forced.add(each.head.position)
            lane.skip(each.head.position)
            self._charge(lane, each.head)
            leave_if_empty(self.board, lane)

    def serve(self) -> Generator[Ask, Supply, None]:
        board = self.board
        self.heap = [(board.tag(f), f.tie, f.id, f) for f in board.flows.values() if f.standing == READY]
        self.heap.sort()
        for entry in self.heap:
            entry[3].queued = True
        room = min((self.room(gate) for gate in board.queue_gates()), default=UNBOUNDED)
        self.is_smooth = any(gate.smooth is not None for gate in board.queue_gates())
        self.wanted_now = self.want - len(self.starts)
        budget = min(self.wanted_now + (self.ahead if self.paces and self.want > 0 else 0), room)
        visits = IDLE_VISITS * self.want + MORE_IDLE_VISITS
        if budget > 0:
            most = min(budget, self.want)
            yield from self._prepare(self._first(most), most)
        while budget > 0 and visits > 0 and not self.is_full:
            # Flows that the scan has not met may have their turn before the first of those that it has.
            if not self.scan_ended and (not self.heap or self.heap[0][:2] > self.frontier):
                yield from self._scan(budget)
                continue
            if not self.heap:
                # No flow is ready: whoever was woken and not visited sits in a parked flow, and its room is free.
                forget_awake(self.board)
                if (yield from self.wake_due()):
                    self._requeue_woken()
                    yield from self._prepare(self._first(budget), budget)
                    visits -= 1
                    continue
                break
            flow = self.heap[0][3]
            if self._lacks_rows(flow):
                yield from self._provide(flow, budget)
            if self._visit(flow):
                budget -= 1
            else:
                visits -= 1
            if flow.standing == READY:
                heapreplace(self.heap, (board.tag(flow), flow.tie, flow.id, flow))
            else:
                heappop(self.heap)
                flow.queued = False
        self._pass_over()
        is_left = bool(self.heap or not self.scan_ended) and not self.is_spoken_for
        self.left_behind = is_left and (budget > 0 or room > self.want)

    def _paced(self) -> list[Start]:
        """The starts, with the bounds that those have to keep which pass a smooth rate."""
        if not self.instants:
            return self.starts
        starts = self.starts.copy()
        for place, instant in self.instants.items():
            start = starts[place]
            pace = Pace(start.at, instant.latest, tuple((gate.id, rate) for gate, rate in instant.passed))
            starts[place] = Start(start.head, start.lane, start.charge, start.shared, start.at, pace)
        return starts

    def _visit(self, flow: Flow) -> bool:
        """Start one job of this flow, or find out why not. What is to be known of it is on the board."""
        if flow.gate is not None:
            self._answered(flow.gate)
            flow.gate, flow.dirty = None, True
        if flow.debt:
            settle_debt(self.board, flow)
        if flow.loaded == 0:
            # Every lane that was counted open has turned out to be gone.
            flow.open, flow.standing, flow.dirty = 0, IDLE, True
            return False
        lane = flow.lanes[0][2]
        head = lane.heads[lane.next_head] if lane.next_head < len(lane.heads) else None
        is_smooth, now = self.is_smooth, self.now
        if self.policy.has_keyed_gates and (lane.ready > 0 or head is not None):
            # Cancelled to the last job it is not parked: it would be woken in place of a lane that has some.
            for gate in lane.gates if lane.gates is not None else self.board.gates_of(lane):
                if gate.smooth is not None:
                    is_smooth = True
                if (gate.room(now) if gate.smooth is None else self.room(gate)) <= 0:
                    self._park(lane, gate)
                    return False
        if head is None:
            self._close(lane)
            return False
        if flow.open > 1:
            rank = self.policy.rank(head.ready_at, lane.priority)
            order = order_of(rank, head.position)
            if order > lane.order and flow.has_before(order):
                lane.rank, lane.head, lane.dirty = rank, head.position, True
                flow.reorder(lane)
                return False
        instant = self._instant(lane) if is_smooth and self.paces else None
        is_ahead = instant is not None and instant.at > self.soonest
        if (self.ahead if is_ahead else self.wanted_now) <= 0:
            self.is_full, self.is_spoken_for = True, is_ahead
            return False
        if is_ahead:
            self.ahead -= 1
        else:
            self.wanted_now -= 1
        self._start(lane, head, instant)
        return True

    def _instant(self, lane: Lane) -> _Instant | None:
        """When the next job of a lane starts, if it passes a smooth rate. All gates of the lane have room for it."""
        earliest, passed = self.now, []
        for gate in [*self.board.gates_of(lane), *self.board.queue_gates()]:
            if (rate := gate.smooth) is not None:
                passed.append((gate, rate))
                opens = rate.starts_at(gate, self.now)
                if opens > self.now and gate.planned is None:
                    opens += distance(rate)
                earliest = max(earliest, opens)
        return _Instant(earliest, max(earliest, self.soonest), passed) if passed else None

    def _lacks_rows(self, flow: Flow) -> bool:
        """Whether the store must be asked before this flow can be visited."""
        if flow.loaded < flow.open and flow.is_blind():
            return True
        if not flow.lanes:
            return False
        lane = flow.lanes[0][2]
        if lane.gates is None and self.policy.has_keyed_gates:
            return True
        return len(lane.heads) - lane.next_head <= 1 and lane.lacks_heads

    def _provide(self, flow: Flow, budget: int) -> Generator[Ask, Supply, None]:
        """Ask for what a visit looks at: its first lane, the gates of that and, if they have room, its next job."""
        if flow.is_blind():
            yield from self._load([flow], budget)
        if not flow.lanes:
            return
        lane = flow.lanes[0][2]
        if lane.gates is None:
            yield from self._learn_gates(lane, budget)
        if not lane.lacks_heads:
            return
        if lane.ready <= 0 or all(self.room(gate) > 0 for gate in self.board.gates_of(lane)):
            # Whoever else will soon run out is asked for in the same breath.
            others = [
                front
                for other in self.board.flows.values()
                if other.queued and other is not flow
                if other.lanes and (front := other.lanes[0][2]).known_heads < self.spare // 2
            ]
            lanes = [lane, *others][:budget]
            yield from self._load_heads(lanes, [ceil(budget / len(lanes)) + 1] * len(lanes))

    def _pass_over(self) -> None:
        """Whoever owes and was passed by pays now: left where it stands, every scan would meet it again."""
        for _, _, _, flow in self.heap if self.starts else ():
            if self.board.tag(flow) > flow.vtime and flow.vtime < self.vtime:
                settle_debt(self.board, flow)

    def _charge(self, lane: Lane, head: Head, instant: _Instant | None = None) -> None:
        """Start a job: every limit and its flow are charged for it."""
        flow = lane.flow
        charge = self.board.charge(flow)
        at = self.now
        if instant is not None:
            self.instants[len(self.starts)] = instant
            at = instant.earliest
        gates, of_queue = lane.gates, self.board.queue_gates()
        for gate in [*gates, *of_queue] if gates and of_queue else gates or of_queue:
            if instant is not None and (rate := gate.smooth) is not None:
                gate.plan(rate, instant.at, self.now)
            else:
                gate.charge(self.now)
        flow.vtime += charge / flow.weight
        flow.tie = self.board.next_tie()
        lane.ready -= 1
        lane.in_flight += 1
        flow.dirty = lane.dirty = True
        shared = self.board.passed_by(lane) if self.shares else ()
        self.starts.append(Start(head, lane.id, charge, shared, at))

    def _start(self, lane: Lane, head: Head, instant: _Instant | None) -> None:
        flow = lane.flow
        if flow.vtime > self.vtime:
            self.vtime = flow.vtime
        self._charge(lane, head, instant)
        lane.next_head += 1
        lane.floor = head.position + 1
        if lane.gate is not None:
            self._unwake(lane)
        if lane.next_head >= len(lane.heads) and (lane.exhausted or lane.ready <= 0):
            self._close(lane)
            return
        # A lane that is alone in its flow keeps its old order: it is a lower bound, and the row need not move.
        if lane.next_head < len(lane.heads) and flow.open + flow.shut > 1:
            following = lane.heads[lane.next_head]
            lane.rank, lane.head = self.policy.rank(following.ready_at, lane.priority), following.position
            flow.reorder(lane)

    def _park(self, lane: Lane, gate: Gate) -> None:
        """The first lane of its flow waits on a gate."""
        flow = lane.flow
        if gate.bound.level is Level.FLOW:
            flow.standing, flow.gate = PARKED, gate.id
            for _, _, other in flow.lanes:
                self._unwake(other)
        else:
            flow.pop()
            self._unwake(lane)
            lane.standing, lane.gate, lane.tag = PARKED, gate.id, tag_of(self.board, lane)
            lane.dirty = True
            flow.open -= 1
            flow.shut += 1
            if flow.open <= 0:
                flow.standing = IDLE
        flow.dirty = True
        gate.waiting += 1
        gate.denied += 1
        gate.dirty = True

    def _close(self, lane: Lane) -> None:
        """The first lane of its flow has no more ready jobs. Whatever makes one ready appends a lane event."""
        flow = lane.flow
        flow.pop()
        self._unwake(lane)
        lane.standing, lane.dirty = IDLE, True
        flow.open -= 1
        flow.dirty = True
        if flow.open <= 0:
            flow.standing = IDLE

    def _unwake(self, lane: Lane) -> None:
        if lane.gate is not None:
            self._answered(lane.gate)
            lane.gate, lane.dirty = None, True

    def _answered(self, gate_id: bytes) -> None:
        gate = self.board.gates.get(gate_id)
        if gate is not None and gate.awake > 0:
            gate.awake -= 1
            gate.dirty = True

    def _push(self, flow: Flow) -> None:
        flow.queued = True
        heappush(self.heap, (self.board.tag(flow), flow.tie, flow.id, flow))

    def _requeue_woken(self) -> None:
        for flow in self.board.flows.values():
            if flow.standing == READY and not flow.queued:
                self._push(flow)

    def _scan(self, budget: int) -> Generator[Ask, Supply, None]:
        count, (vtime, tie) = max(budget, self.scan_width), self.frontier
        self.scan_width = min(2 * self.scan_width, WIDEST_SCAN)
        scan = (yield Ask(scan=(vtime, tie + 1, count))).scan  # strictly after: tie-breakers are whole numbers
        self.scan_ended = scan.ended
        fresh = [flow for flow in scan.flows if flow.id not in self.board.flows]
        self.board.add_flows(scan.flows)
        self.board.add_lanes(scan.lanes)
        self._reach(scan.lanes)
        self.frontier = scan.reached or self.frontier
        for flow in fresh:
            self._push(flow)
        yield from self._prepare(fresh[:budget], budget)

    def _first(self, count: int) -> list[Flow]:
        """The flows whose turns are next."""
        return [entry[3] for entry in sorted(self.heap)[:count]]

    def _prepare(self, first: list[Flow], budget: int) -> Generator[Ask, Supply, None]:
        """Load what turns of these flows will look at, `budget` at the most, in as few questions as possible."""
        known = [self._known_turns(flow) for flow in first]
        # Twice as many turns as fall to each on average, which is mostly one.
        if first and min(known) <= min(FEW_HEADS, 2 * budget // len(first)):
            short = [flow for flow, turns in zip(first, known, strict=True) if turns <= self.spare]
            if short:
                # The turns of the others are theirs.
                yield from self._load(short, ceil(budget * len(short) / len(first)))

    def _known_turns(self, flow: Flow) -> float:
        """How many turns of a flow need no rows that are not on the board."""
        if flow.open != 1 or len(flow.lanes) != 1:
            return 0
        lane = flow.lanes[0][2]
        if lane.gates is None and self.policy.has_keyed_gates and self._has_unasked_gates(lane):
            return 0
        known = len(lane.heads) - lane.next_head
        return inf if lane.exhausted or 0 < lane.ready <= known else known

    def _load(self, flows: list[Flow], budget: int) -> Generator[Ask, Supply, None]:
        quota = turns(self.board, flows, budget)
        partial = [flow for flow in flows if flow.reach < inf and flow.in_reach() < min(quota[flow.id], flow.open)]
        if partial:
            # The store does not know what this plan has parked: ask for as many more as are on the board already.
            asks = {flow.id: quota[flow.id] + flow.known for flow in partial}
            supply = yield from self.ask(Ask(ready=tuple(asks.items())))
            self._reach(supply.lanes)
            found = Counter(lane.flow.id for lane in supply.lanes)
            for flow in partial:
                if found[flow.id] < asks[flow.id]:
                    flow.reach = inf
        lanes: list[Lane] = []
        counts: list[int] = []
        for flow in flows:
            front = [entry[2] for entry in sorted(flow.lanes)[: quota[flow.id]]]
            each = ceil(quota[flow.id] / len(front)) + (len(front) > 1) if front else 0
            lanes += front
            counts += [each] * len(front)
        yield from self._load_heads(lanes, counts)

    def _reach(self, lanes: Iterable[Lane]) -> None:
        """These were the first ready lanes of their flows: whoever went before the last of them is on the board."""
        for lane in lanes:
            if lane.flow.loaded >= lane.flow.open:
                continue  # there are no others
            assert lane.entry is not None
            order: int = lane.entry[1][0]  # as it was when the claim began
            if order > lane.flow.reach:
                lane.flow.reach = order

    def _load_heads(self, lanes: list[Lane], counts: list[int]) -> Generator[Ask, Supply, None]:
        """The gates of these lanes; and, unless each has as many known jobs as will start, the jobs that follow."""
        gates = self._unasked_gates(lanes)
        asks: list[tuple[Lane, int]] = []
        is_short = False
        for lane, count in zip(lanes, counts, strict=True):
            known = len(lane.heads) - lane.next_head
            if lane.exhausted or known >= count + self.spare * 3 // 4:
                continue
            if self.paces and lane.gates:
                count = min(count, min(map(self.room, lane.gates)))
            is_short = is_short or known < min(count, lane.ready) or lane.lacks_heads
            # What is left over is kept for later claims. What was started out of turn is named once more.
            more = min(count + self.spare, lane.ready) - known
            if more > 0 or known <= 0:
                asks.append((lane, max(1, more) + len(self.forced)))
        if not is_short:
            asks = []
        if not asks and not gates:
            return
        heads = tuple((lane.id, lane.after_heads, n) for lane, n in asks)
        supply = yield from self.ask(Ask(gates=tuple(gates), heads=heads))
        for lane, count in asks:
            found = supply.heads.get(lane.id, [])
            lane.exhausted = len(found) < count
            if self.forced:
                found = [head for head in found if head.position not in self.forced]
            lane.heads += found

    def _learn_gates(self, lane: Lane, budget: int) -> Generator[Ask, Supply, None]:
        """Ask for the gates of a lane before they are passed: one that was not asked for would look new, and open."""
        if self._has_unasked_gates(lane):
            siblings = [entry[2] for entry in lane.flow.lanes[:budget]]
            yield from self.ask(Ask(gates=tuple(self._unasked_gates([lane, *siblings]))))

    def _has_unasked_gates(self, lane: Lane) -> bool:
        return any(gate not in self.asked and gate not in self.board.gates for gate, _ in self.board.passes(lane))

    def _unasked_gates(self, lanes: Iterable[Lane]) -> list[bytes]:
        if not self.policy.has_keyed_gates:
            return []
        passes = self.board.passes
        return self._unasked([gate_id for lane in lanes if lane.gates is None for gate_id, _ in passes(lane)])

    def _unasked(self, gate_ids: Iterable[bytes]) -> list[bytes]:
        fresh, asked, known = [], self.asked, self.board.gates
        for gate_id in gate_ids:
            if gate_id not in asked and gate_id not in known:
                asked.add(gate_id)
                fresh.append(gate_id)
        return fresh

    def result(self) -> Plan:
        board, lag = self.board, self.snapshot.lag
        self._unspeak()
        for gate in board.gates.values():
            if lag and (gate.before is not None or gate.shared is not None):
                gate.postpone(self.now, lag)
            if gate.waiting or gate.wake_at is not None or gate.shared is not None or gate.is_of_queue:
                self._set_alarm(gate)
        self._leave_others()
        queue = QueueRow(self.vtime, *self._cursor(), board.tie, board.cost)
        return Plan(
            self._paced(),
            queue,
            [flow for flow in board.flows.values() if flow.dirty],
            [lane for lane in board.lanes.values() if lane.dirty],
            [gate for gate in board.gates.values() if gate.dirty],
            self.left_behind,
            [
                *(shared.row() for shared in board.shared.values() if shared.dirty),
                *(board.retired[gate] for gate in sorted(board.freed)),
            ],
            self.wakeups,
            stats(self.snapshot, board, self.starts),
        )

    def _leave_others(self) -> None:
        """Shared gates that a release has freed and at which nothing of this queue waits: others may wait there."""
        if not self.board.shared:
            return
        passed = {gate.shared.id for gate in self.board.gates.values() if gate.shared is not None}
        for shared in self.board.shared.values():
            if shared.dirty and shared.id not in passed:
                self.wakeups += shared.leave(self.now, waits=False, is_eager=False)

    def _unspeak(self) -> None:
        """A later claim may park the flow of a woken lane without seeing the lane: such a lane reserves no room."""
        if self.policy.stops_flows:
            for lane in self.board.lanes.values():
                if lane.gate is not None and lane.standing == READY and lane.flow.open > 1:
                    self._unwake(lane)

    def _cursor(self) -> tuple[float, int]:
        ready = [(flow.vtime, flow.tie) for flow in self.board.flows.values() if flow.standing == READY]
        if not self.scan_ended:
            ready.append(self.frontier)
        return min(ready, default=(self.vtime, self.board.tie))

    def _set_alarm(self, gate: Gate) -> None:
        """When this gate must be looked at although nothing is released."""
        room = self.room(gate)
        stops_queue = gate.is_of_queue and bool(self.heap or not self.scan_ended)
        waits = room <= 0 and bool(gate.waiting or stops_queue)
        gate.denied += waits and stops_queue
        if gate.shared is not None:
            is_eager = self.snapshot.listens and len(self.starts) < self.want
            self.wakeups += gate.shared.leave(self.now, waits=waits, is_eager=is_eager)
        early = 0
        if waits and self.paces and (rate := gate.smooth) is not None:
            is_near = rate.starts_at(gate, self.soonest) <= self.now + LEAD
            early = LEAD if gate.name in self.policy.paceable and not is_near else self.snapshot.lag
        if gate.set_alarm(self.now, room, waits=waits, early=early):
            self.left_behind = True


def turns(board: Board, flows: list[Flow], budget: int) -> dict[bytes, int]:
    """How many of the next `budget` turns fall to each flow, and one to spare where that is only a guess."""
    shares = [flow.weight / board.charge(flow) for flow in flows]
    each = budget / sum(shares)
    # Turns of a flow that a gate stops fall to the others; among several lanes the next head decides who is next.
    guess = board.policy.has_keyed_gates
    return {
        flow.id: ceil(each * share) + (guess or flow.open + flow.shut > 1)
        for flow, share in zip(flows, shares, strict=True)
    }


def paces_of(claims: Iterable[Claim], starts: Iterable[Start]) -> dict[UUID, Pace]:
    """The paces of claims, given the starts that they were made from."""
    return {claim.id: start.pace for claim, start in zip(claims, starts, strict=False) if start.pace is not None}
