"""A queue's scheduling state in memory: what a store keeps in tables, in dictionaries.

It answers the plan's questions the way a store does, and counts the rows it hands out. Simulations and property tests
run the same plan on it that the stores run.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping

from fairlane.clock import Instant
from fairlane.policy.keys import lane_id
from fairlane.policy.policy import Policy
from fairlane.scheduler.plan import plan_claims
from fairlane.scheduler.snapshot import (
    Arrival,
    FlowRow,
    GateRow,
    Head,
    LaneRow,
    Need,
    Plan,
    QueueRow,
    Release,
    Snapshot,
    Standing,
    Start,
    Supply,
)

__all__ = ["MemoryQueue"]


class MemoryQueue:
    """One queue: jobs are their positions."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.queue = QueueRow(0.0, 0.0, 0, 0, 0.0)
        self.flows: dict[bytes, FlowRow] = {}
        self.lanes: dict[bytes, LaneRow] = {}
        self.gates: dict[bytes, GateRow] = {}
        self.jobs: dict[bytes, list[Head]] = {}
        self.arrivals: list[Arrival] = []
        self.releases: list[Release] = []
        self.rows_read = 0
        self._position = 0
        self._claimed_at: dict[int, Instant] = {}

    def enqueue(self, now: Instant, keys: Mapping[str, str | None], count: int = 1, priority: int = 0) -> list[Head]:
        """Append jobs to their lane, and ring its bell."""
        lane = lane_id(self.policy.queue, priority, keys)
        heads = [Head(self._next_position(), self._position, now) for _ in range(count)]
        self.jobs.setdefault(lane, []).extend(heads)
        self.arrivals.append(Arrival(lane, priority, dict(keys), count, heads[0].position, now))
        return heads

    def settle(self, start: Start, ran: int) -> None:
        """End a claim that ran for so many microseconds."""
        self.releases.append(Release(start.lane, 1, ran, start.charge, 0, 0.0))

    def give_back(self, start: Start) -> None:
        """End a claim that never started; its job keeps its place."""
        since = self._claimed_at[start.head.position]
        self.releases.append(Release(start.lane, 0, 0, 0.0, 1, start.charge, since, kept=1))
        self.resume(start)

    def retry(self, start: Start, ran: int) -> None:
        """End a claim whose job will be back: `resume` lets it join again, `abandon` says that it will not."""
        self.releases.append(Release(start.lane, 1, ran, start.charge, 0, 0.0, kept=1))

    def resume(self, start: Start) -> None:
        """A job is ready again, in its old place."""
        insort(self.jobs[start.lane], start.head, key=_position)
        self._ring_again(start, 1)

    def abandon(self, start: Start) -> None:
        """A job that was to be back was cancelled."""
        self._ring_again(start, 0)

    def _ring_again(self, start: Start, count: int) -> None:
        row, head = self.lanes[start.lane], start.head
        self.arrivals.append(Arrival(start.lane, row.priority, row.keys, count, head.position, head.ready_at, 1))

    def claim(self, now: Instant, want: int) -> Plan:
        """Plan and apply one claim."""
        planning = plan_claims(self._snapshot(now, want), want)
        supply: Supply | None = None
        while True:
            try:
                need = next(planning) if supply is None else planning.send(supply)
            except StopIteration as stop:
                plan: Plan = stop.value
                self._apply(plan)
                self._claimed_at.update((start.head.position, now) for start in plan.starts)
                return plan
            supply = self._supply(need)
            self.rows_read += len(supply.flows) + len(supply.lanes) + len(supply.gates)
            self.rows_read += sum(len(heads) for heads in supply.heads.values())

    def in_flight(self) -> int:
        """How many claims have not ended, bells not yet folded included."""
        folded = sum(lane.in_flight for lane in self.lanes.values())
        return folded - sum(bell.ended + bell.unstarted for bell in self.releases)

    def waiting(self) -> int:
        """How many jobs are ready."""
        return sum(len(heads) for heads in self.jobs.values())

    def next_alarm(self) -> Instant | None:
        """When a gate has to be looked at again."""
        return min((gate.wake_at for gate in self.gates.values() if gate.wake_at is not None), default=None)

    def _next_position(self) -> int:
        self._position += 1
        return self._position

    def _snapshot(self, now: Instant, want: int) -> Snapshot:
        arrivals, self.arrivals = self.arrivals[:1_000], self.arrivals[1_000:]
        releases, self.releases = self.releases, []
        touched = dict.fromkeys([*(bell.lane for bell in releases), *(bell.lane for bell in arrivals)])
        lanes = [self.lanes[lane] for lane in touched if lane in self.lanes]
        count = max(want, 1)
        scanned = self._scan((self.queue.cursor, self.queue.cursor_tie), count, inclusive=True)
        flows = {row.flow: self.flows[row.flow] for row in lanes} | {row.id: row for row in scanned}
        lanes += [lane for flow in scanned for lane in self._ready_lanes(flow.id, 2)]
        due = self._due(now, count)
        self.rows_read += len(arrivals) + len(releases) + len(lanes) + len(flows) + len(due)
        return Snapshot(
            self.policy,
            now,
            self.queue,
            arrivals,
            releases,
            lanes,
            list(flows.values()),
            [flow.id for flow in scanned],
            len(scanned) < count,
            due,
        )

    def _due(self, now: Instant, count: int) -> list[GateRow]:
        due = [gate for gate in self.gates.values() if gate.wake_at is not None and gate.wake_at <= now]
        return sorted(due, key=lambda gate: (gate.wake_at or 0, gate.id))[:count]

    def _scan(self, after: tuple[float, int], count: int, *, inclusive: bool = False) -> list[FlowRow]:
        ready = [flow for flow in self.flows.values() if flow.standing == Standing.READY]
        ready.sort(key=lambda flow: (flow.vtime, flow.tie))
        behind = [flow for flow in ready if (flow.vtime, flow.tie) < (self.queue.cursor, self.queue.cursor_tie)]
        assert not behind, "a ready flow lies behind the cursor"
        return [f for f in ready if (f.vtime, f.tie) > after or (inclusive and (f.vtime, f.tie) == after)][:count]

    def _ready_lanes(self, flow: bytes, count: int) -> list[LaneRow]:
        lanes = [lane for lane in self.lanes.values() if lane.flow == flow and lane.standing == Standing.READY]
        return sorted(lanes, key=lambda lane: lane.rank)[:count]

    def _parked(self, gate: bytes, count: int) -> tuple[list[FlowRow], list[LaneRow]]:
        lanes = [lane for lane in self.lanes.values() if lane.gate == gate and lane.standing == Standing.PARKED]
        flows = [flow for flow in self.flows.values() if flow.gate == gate and flow.standing == Standing.PARKED]
        lanes = sorted(lanes, key=lambda lane: lane.tag)[:count]
        flows = sorted(flows, key=lambda flow: (flow.vtime, flow.tie))[:count]
        return flows + [self.flows[lane.flow] for lane in lanes], lanes

    def _supply(self, need: Need) -> Supply:
        flows = [self.flows[flow] for flow in need.flows if flow in self.flows]
        lanes = [lane for flow, count in need.lanes for lane in self._ready_lanes(flow, count)]
        for gate, count in need.parked:
            parked_flows, parked_lanes = self._parked(gate, count)
            flows += parked_flows
            lanes += parked_lanes
        scanned: list[FlowRow] = []
        if need.scan is not None:
            vtime, tie, count = need.scan
            scanned = self._scan((vtime, tie), count)
            flows += scanned
            lanes += [lane for flow in scanned for lane in self._ready_lanes(flow.id, 2)]
        heads = {lane: _from(self.jobs.get(lane, []), floor, count) for lane, floor, count in need.heads}
        gates = [self.gates[gate] for gate in need.gates if gate in self.gates]
        return Supply(flows, gates, lanes, heads, [flow.id for flow in scanned])

    def _apply(self, plan: Plan) -> None:
        self.queue = plan.queue
        self.flows.update((row.id, row) for row in plan.flows)
        self.lanes.update((row.id, row) for row in plan.lanes)
        self.gates.update((row.id, row) for row in plan.gates)
        for start in plan.starts:
            jobs = self.jobs[start.lane]
            del jobs[bisect_left(jobs, start.head.position, key=_position)]


def _position(head: Head) -> int:
    return head.position


def _from(jobs: list[Head], position: int, count: int) -> list[Head]:
    first = bisect_left(jobs, position, key=_position)
    return jobs[first : first + count]
