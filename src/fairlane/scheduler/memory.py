"""A queue's scheduling state in memory: what a store keeps in tables, in dictionaries.

It answers the plan's questions the way a store does, from the indexes that a store has, and counts the rows it hands
out. Simulations and property tests run the same plan on it that the stores run. Rows are kept as they come: a field
that only the plan knows is no business of a store.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fairlane.clock import Instant
from fairlane.policy.keys import lane_id
from fairlane.policy.policy import Policy
from fairlane.scheduler.ordered import Ordered, OrderedByPlace
from fairlane.scheduler.plan import plan_claims
from fairlane.scheduler.rebuild import rebuild
from fairlane.scheduler.settlement import Verdict
from fairlane.scheduler.snapshot import (
    Arrival,
    FlowRow,
    GateRow,
    Head,
    KeptPlaces,
    LaneRow,
    Need,
    Plan,
    QueueRow,
    Release,
    SharedGateRow,
    SharedRelease,
    Snapshot,
    Standing,
    Start,
    Supply,
)

__all__ = ["MemoryQueue", "SharedMemory"]


class SharedMemory:
    """What several queues share: the gates of limits that have a name."""

    def __init__(self) -> None:
        self.gates: dict[bytes, SharedGateRow] = {}
        self.releases: list[SharedRelease] = []
        self.rung: dict[str, set[bytes]] = {}


FOLDED_AT_ONCE = 1_000
"""Arrivals that one claim folds."""
TIDY_AFTER = 1_000
"""Jobs that are gone from the front of a lane before their places are given up."""

READY, PARKED = int(Standing.READY), int(Standing.PARKED)


class MemoryQueue:
    """One queue. Unless its producer says what they are, jobs are their positions."""

    def __init__(self, policy: Policy, shared: SharedMemory | None = None) -> None:
        self.policy = policy
        self.shared = shared or SharedMemory()
        self.queue = QueueRow(0.0, 0.0, 0, 0, 0.0)
        self.flows: dict[bytes, FlowRow] = {}
        self.lanes: dict[bytes, LaneRow] = {}
        self.gates: dict[bytes, GateRow] = {}
        self.jobs: dict[bytes, LaneJobs] = {}
        self.arrivals: list[Arrival] = []
        self.releases: list[Release] = []
        self.rows_read = 0
        self._position = 0
        self._claimed_at: dict[int, Instant] = {}
        self._index()

    def enqueue(
        self,
        now: Instant,
        keys: Mapping[str, str | None],
        count: int = 1,
        priority: int = 0,
        given: dict[str, float] | None = None,
        refs: Sequence[Any] | None = None,
    ) -> list[Head]:
        """Append jobs to their lane, and ring its bell."""
        lane = lane_id(self.policy.queue, priority, keys)
        first = self._position + 1
        self._position += count
        heads = [Head(n if refs is None else refs[n - first], n, now) for n in range(first, first + count)]
        self._jobs_of(lane).extend(heads)
        self.arrivals.append(Arrival(lane, priority, dict(keys), count, first, now, given, 0, self._position))
        return heads

    def withdraw(self, now: Instant, lane: bytes, position: int) -> None:
        """Cancel a job that waits."""
        self.jobs[lane].remove(position)
        row = self.lanes.get(lane)
        known = next((bell for bell in self.arrivals if bell.lane == lane), row)
        assert known is not None, "a lane that nobody has heard of has no jobs"
        self.arrivals.append(Arrival(lane, known.priority, known.keys, -1, position, now))

    def settle(self, start: Start, ran: int, verdict: Verdict = Verdict.GOOD) -> None:
        """End a claim that ran for so many microseconds."""
        failed, neutral = int(verdict is Verdict.FAILED), int(verdict is Verdict.NEUTRAL)
        latest = self._claimed_at[start.head.position]
        self.releases.append(Release(start.lane, 1, ran, start.charge, 0, 0.0, 0, failed, neutral, latest))
        self._leave_shared(start, ended=1, ran=ran)
        del self._claimed_at[start.head.position]

    def give_back(self, start: Start, *, is_spent: bool = False) -> None:
        """End a claim that never started; its job keeps its place."""
        claimed_at = 0 if is_spent else self._claimed_at[start.head.position]
        self.releases.append(Release(start.lane, 0, 0, 0.0, 1, start.charge, claimed_at, kept=1))
        self._leave_shared(start, unstarted=1)
        del self._claimed_at[start.head.position]
        self.resume(start)

    def retry(self, start: Start, ran: int) -> None:
        """End a claim whose job will be back: `resume` lets it join again, `abandon` says that it will not."""
        self.releases.append(Release(start.lane, 1, ran, start.charge, 0, 0.0, kept=1))
        self._leave_shared(start, ended=1, ran=ran)
        del self._claimed_at[start.head.position]

    def resume(self, start: Start) -> None:
        """A job is ready again, in its old place."""
        self._jobs_of(start.lane).put_back(start.head)
        self._ring_again(start, 1)

    def abandon(self, start: Start) -> None:
        """A job that was to be back was cancelled."""
        self._ring_again(start, 0)

    def _ring_again(self, start: Start, count: int) -> None:
        row, head = self.lanes[start.lane], start.head
        bell = Arrival(start.lane, row.priority, row.keys, count, head.position, head.ready_at, resumed=1)
        self.arrivals.append(bell)

    def _leave_shared(self, start: Start, *, ended: int = 0, ran: int = 0, unstarted: int = 0) -> None:
        task, since = self.lanes[start.lane].keys.get("task") or "", self._claimed_at[start.head.position]
        self.shared.releases += [
            SharedRelease(gate, self.policy.queue, task, ended, ran, unstarted, since, 0, 0, since)
            for gate in start.shared
        ]

    def claim(self, now: Instant, want: int, *, listens: bool = False, ahead: int | None = None, lag: int = 0) -> Plan:
        """Plan and apply one claim."""
        planning = plan_claims(self._snapshot(now, want, listens, ahead, lag), want)
        supply: Supply | None = None
        while True:
            try:
                need = next(planning) if supply is None else planning.send(supply)
            except StopIteration as stop:
                plan: Plan = stop.value
                self._apply(plan)
                self._claimed_at.update((start.head.position, start.at) for start in plan.starts)
                return plan
            supply = self._supply(need)
            self.rows_read += len(supply.flows) + len(supply.lanes) + len(supply.gates)
            self.rows_read += sum(map(len, supply.heads.values()))

    def apply(self, policy: Policy, now: Instant, kept: Iterable[KeptPlaces] = ()) -> None:
        """Put another policy in force. `kept` are places in a sequence that jobs keep."""
        state = (self.flows.values(), self.lanes.values(), self.gates.values())
        built = rebuild(policy, now, self.queue, *state, kept)
        self.policy, self.queue = policy, built.queue
        self.flows = {row.id: row for row in built.flows}
        self.lanes = {row.id: row for row in built.lanes}
        self.gates = {row.id: row for row in built.gates}
        self._index()

    def in_flight(self) -> int:
        """How many claims have not ended, bells not yet folded included."""
        folded = sum(lane.in_flight for lane in self.lanes.values())
        return folded - sum(bell.ended + bell.unstarted for bell in self.releases)

    def waiting(self) -> int:
        """How many jobs are ready."""
        return sum(len(jobs) for jobs in self.jobs.values())

    def next_alarm(self) -> Instant | None:
        """When a gate has to be looked at again."""
        least = self._alarms.least()
        return least[0] if least else None

    def _jobs_of(self, lane: bytes) -> LaneJobs:
        jobs = self.jobs.get(lane)
        if jobs is None:
            jobs = self.jobs[lane] = LaneJobs()
        return jobs

    # What the plan asks for.

    def _snapshot(
        self, now: Instant, want: int, listens: bool = False, ahead: int | None = None, lag: int = 0
    ) -> Snapshot:
        arrivals, self.arrivals = self.arrivals[:FOLDED_AT_ONCE], self.arrivals[FOLDED_AT_ONCE:]
        releases, self.releases = self.releases, []
        touched = dict.fromkeys([*(bell.lane for bell in releases), *(bell.lane for bell in arrivals)])
        lanes = [self.lanes[lane] for lane in touched if lane in self.lanes]
        count = max(want, 1)
        cursor = (self.queue.cursor, self.queue.cursor_tie)
        least = self._ready_flows.least()
        assert least is None or least[:2] >= cursor, "a ready flow lies behind the cursor"
        scanned = self._ready_flows.since(cursor, count)
        flows = dict.fromkeys([*(row.flow for row in lanes), *scanned])
        lanes += self._first_lanes(scanned)
        shared = self.shared.releases if self.policy.shared_limits else []
        if shared:
            self.shared.releases = []
        rung = self.shared.rung.pop(self.policy.queue, set())
        due = [self.gates[gate] for gate in self._alarms.before((now + 1,), count)]
        due += [self.gates[gate] for gate in sorted(rung) if gate in self.gates]
        self.rows_read += len(arrivals) + len(releases) + len(lanes) + len(flows) + len(due)
        return Snapshot(
            self.policy,
            now,
            self.queue,
            arrivals,
            releases,
            lanes,
            [self.flows[flow] for flow in flows],
            scanned,
            len(scanned) < count,
            due,
            shared=[self.shared.gates[gate] for gate in sorted({bell.gate for bell in shared})],
            shared_releases=shared,
            listens=listens,
            ahead=ahead,
            lag=lag,
        )

    def _supply(self, need: Need) -> Supply:
        flows = [self.flows[flow] for flow in need.flows if flow in self.flows]
        gates = [self.gates[gate] for gate in need.gates if gate in self.gates]
        lanes = [self.lanes[lane] for flow, count in need.lanes for lane in self._ready_lanes.first(flow, count)]
        for gate, count in need.parked:
            parked = [self.lanes[lane] for lane in self._parked_lanes.first(gate, count)]
            flows += [self.flows[flow] for flow in self._parked_flows.first(gate, count)]
            flows += [self.flows[row.flow] for row in parked]
            lanes += parked
        scanned: list[bytes] = []
        if need.scan is not None:
            vtime, tie, count = need.scan
            scanned = self._ready_flows.since((vtime, tie + 1), count)
            flows += [self.flows[flow] for flow in scanned]
            lanes += self._first_lanes(scanned)
        heads = {lane: jobs.since(at, n) for lane, at, n in need.heads if (jobs := self.jobs.get(lane)) is not None}
        shared = [self.shared.gates[gate] for gate in need.shared if gate in self.shared.gates]
        return Supply(flows, gates, lanes, heads, scanned, shared)

    def _first_lanes(self, flows: list[bytes]) -> list[LaneRow]:
        return [self.lanes[lane] for flow in flows for lane in self._ready_lanes.first(flow, 2)]

    # What it writes.

    def _apply(self, plan: Plan) -> None:
        self.queue = plan.queue
        for flow in plan.flows:
            self._move_flow(self.flows.get(flow.id), flow)
            self.flows[flow.id] = flow
        for lane in plan.lanes:
            self._move_lane(self.lanes.get(lane.id), lane)
            self.lanes[lane.id] = lane
        for gate in plan.gates:
            self._move_gate(self.gates.get(gate.id), gate)
            self.gates[gate.id] = gate
        self.shared.gates.update((row.id, row) for row in plan.shared)
        for ring in plan.rings:
            self.shared.rung.setdefault(ring.queue, set()).update(() if ring.gate is None else (ring.gate,))
        for start in plan.starts:
            self.jobs[start.lane].remove(start.head.position)

    def _index(self) -> None:
        """Build the indexes from the rows."""
        self._ready_flows = Ordered()
        self._ready_lanes: OrderedByPlace[bytes] = OrderedByPlace()
        self._parked_flows: OrderedByPlace[bytes | None] = OrderedByPlace()
        self._parked_lanes: OrderedByPlace[bytes | None] = OrderedByPlace()
        self._alarms = Ordered()
        for flow in self.flows.values():
            self._move_flow(None, flow)
        for lane in self.lanes.values():
            self._move_lane(None, lane)
        for gate in self.gates.values():
            self._move_gate(None, gate)

    def _move_flow(self, old: FlowRow | None, new: FlowRow) -> None:
        entry = (new.vtime, new.tie, new.id)
        if old is not None:
            was = (old.vtime, old.tie, old.id)
            if was == entry and old.standing == new.standing and old.gate == new.gate:
                return
            if old.standing == READY:
                self._ready_flows.drop(was)
            elif old.standing == PARKED:
                self._parked_flows.drop(old.gate, was)
        if new.standing == READY:
            self._ready_flows.put(entry)
        elif new.standing == PARKED:
            self._parked_flows.put(new.gate, entry)

    def _move_lane(self, old: LaneRow | None, new: LaneRow) -> None:
        if old is not None:
            if (old.rank, old.head, old.standing, old.gate, old.tag) == (
                new.rank,
                new.head,
                new.standing,
                new.gate,
                new.tag,
            ):
                return
            if old.standing == READY:
                self._ready_lanes.drop(old.flow, (old.rank, old.head, old.id))
            elif old.standing == PARKED:
                self._parked_lanes.drop(old.gate, (old.tag, old.head, old.id))
        if new.standing == READY:
            self._ready_lanes.put(new.flow, (new.rank, new.head, new.id))
        elif new.standing == PARKED:
            self._parked_lanes.put(new.gate, (new.tag, new.head, new.id))

    def _move_gate(self, old: GateRow | None, new: GateRow) -> None:
        was = None if old is None else old.wake_at
        if was != new.wake_at:
            if was is not None:
                self._alarms.drop((was, new.id))
            if new.wake_at is not None:
                self._alarms.put((new.wake_at, new.id))


class LaneJobs:
    """The ready jobs of a lane, in the order of their positions. Most of them leave at the front."""

    __slots__ = ("_first", "_heads")

    def __init__(self) -> None:
        self._heads: list[Head] = []
        self._first = 0

    def __len__(self) -> int:
        return len(self._heads) - self._first

    def extend(self, heads: list[Head]) -> None:
        self._heads += heads

    def put_back(self, head: Head) -> None:
        insort(self._heads, head, lo=self._first, key=_position)

    def remove(self, position: int) -> None:
        at = self._find(position)
        if at > self._first:
            del self._heads[at]
            return
        self._first += 1
        if self._first >= TIDY_AFTER or self._first == len(self._heads):
            del self._heads[: self._first]
            self._first = 0

    def since(self, position: int, count: int) -> list[Head]:
        """The first `count` at or above a position."""
        at = self._find(position)
        return self._heads[at : at + count]

    def _find(self, position: int) -> int:
        heads, first = self._heads, self._first
        if first < len(heads) and heads[first].position >= position:
            return first
        return bisect_left(heads, position, lo=first, key=_position)


def _position(head: Head) -> int:
    return head.position
