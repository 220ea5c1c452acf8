"""A queue in memory: the board that every claimer holds, with the jobs beside it. It serves `simulate` and tests.

There are no tables and no transactions: what the board does not hold does not exist.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any
from uuid import UUID

from fairlane.clock import Instant
from fairlane.policy.keys import lane_id
from fairlane.policy.policy import Policy
from fairlane.scheduler.journal import Delta, Mark
from fairlane.scheduler.rebuild import rebuild
from fairlane.scheduler.resident import Found, ResidentBoard
from fairlane.scheduler.settlement import Verdict
from fairlane.scheduler.snapshot import (
    Arrival,
    Events,
    FlowRow,
    GateRow,
    Head,
    KeptPlaces,
    LaneRow,
    Plan,
    QueueRow,
    Release,
    SharedGateRow,
    SharedRelease,
    Start,
)


class SharedMemory:
    """What several queues share: the gates of limits that have a name."""

    def __init__(self) -> None:
        self.gates: dict[bytes, SharedGateRow] = {}
        self.releases: list[SharedRelease] = []
        self.woken: dict[str, set[bytes]] = {}


FOLDED_AT_ONCE = 1_000
"""Arrivals that one claim folds."""
TIDY_AFTER = 1_000
"""Jobs that are gone from the front of a lane before their places are given up."""
NEVER_LOST = UUID(int=0)
"""The token of every state: nothing here is ever lost."""


class MemoryQueue:
    """One queue. Unless its producer says what they are, jobs are their positions."""

    def __init__(self, policy: Policy, shared: SharedMemory | None = None) -> None:
        self.policy = policy
        self.shared = shared or SharedMemory()
        self.queue = QueueRow(0.0, 0.0, 0, 0, 0.0)
        self.board = ResidentBoard(policy, Mark(0, NEVER_LOST), is_whole=True)
        self.jobs: defaultdict[bytes, LaneJobs] = defaultdict(LaneJobs)
        self.arrivals: list[Arrival] = []
        self.releases: list[Release] = []
        self._position = self.heads_read = self.questions = 0
        self._claimed_at: dict[int, Instant] = {}

    @property
    def rows_read(self) -> int:
        """Pieces and jobs that claims have looked at."""
        return self.board.looked_at + self.heads_read

    @property
    def flows(self) -> dict[bytes, FlowRow]:
        return {each.id: each.row() for each in self.board.flows.values()}

    @property
    def lanes(self) -> dict[bytes, LaneRow]:
        return {each.id: each.row() for each in self.board.lanes.values()}

    @property
    def gates(self) -> dict[bytes, GateRow]:
        return {each.id: each.row() for each in self.board.gates.values()}

    def enqueue(
        self,
        now: Instant,
        keys: Mapping[str, str | None],
        count: int = 1,
        priority: int = 0,
        given: dict[str, float] | None = None,
        refs: Sequence[Any] | None = None,
    ) -> list[Head]:
        """Append jobs to their lane, and append its lane event."""
        lane = lane_id(self.policy.queue, priority, keys)
        first = self._position + 1
        self._position += count
        heads = [Head(n if refs is None else refs[n - first], n, now) for n in range(first, first + count)]
        self.jobs[lane].extend(heads)
        ref = heads[0].ref if count == 1 else None
        self.arrivals.append(Arrival(lane, priority, dict(keys), count, first, now, given, 0, self._position, ref))
        return heads

    def withdraw(self, now: Instant, lane: bytes, position: int) -> None:
        """Cancel a job that waits."""
        self.jobs[lane].remove(position)
        row = self.board.lanes.get(lane)
        known = next((event for event in self.arrivals if event.lane == lane), row)
        assert known is not None, "a lane that nobody has heard of has no jobs"
        self.arrivals.append(Arrival(lane, known.priority, known.keys, -1, position, now))

    def settle(self, start: Start, ran: int, verdict: Verdict = Verdict.GOOD) -> None:
        """End a claim that ran for so many microseconds."""
        failed, neutral = int(verdict is Verdict.FAILED), int(verdict is Verdict.NEUTRAL)
        latest = self._claimed_at[start.head.position]
        self._end(start, Release(start.lane, 1, ran, start.charge, 0, 0.0, 0, failed, neutral, latest))

    def give_back(self, start: Start, *, is_spent: bool = False) -> None:
        """End a claim that never started; its job keeps its place."""
        claimed_at = 0 if is_spent else self._claimed_at[start.head.position]
        self._end(start, Release(start.lane, 0, 0, 0.0, 1, start.charge, claimed_at, kept=1))
        self.resume(start)

    def retry(self, start: Start, ran: int) -> None:
        """End a claim whose job will be back: `resume` lets it join again, `abandon` says that it will not."""
        latest = self._claimed_at[start.head.position]
        self._end(start, Release(start.lane, 1, ran, start.charge, 0, 0.0, latest=latest, kept=1))

    def _end(self, start: Start, event: Release) -> None:
        since, task = self._claimed_at.pop(start.head.position), self.board.lanes[start.lane].keys.get("task") or ""
        self.releases.append(event)
        self.shared.releases += [
            SharedRelease(gate, self.policy.queue, task, event.ended, event.ran, event.unstarted, since, 0, 0, since)
            for gate in start.shared
        ]

    def resume(self, start: Start) -> None:
        """A job is ready again, in its old place."""
        self.jobs[start.lane].put_back(start.head)
        self._wake_again(start, 1)

    def abandon(self, start: Start) -> None:
        """A job that was to be back was cancelled."""
        self._wake_again(start, 0)

    def _wake_again(self, start: Start, count: int) -> None:
        row, head = self.board.lanes[start.lane], start.head
        event = Arrival(start.lane, row.priority, row.keys, count, head.position, head.ready_at, resumed=1)
        self.arrivals.append(event)

    def claim(self, now: Instant, want: int, *, listens: bool = False, ahead: int | None = None, lag: int = 0) -> Plan:
        """Plan and apply one claim."""
        claiming = self.board.claim(self._drain(now), want, listens=listens, ahead=ahead, lag=lag)
        found: Found | None = None
        while True:
            try:
                ask = next(claiming) if found is None else claiming.send(found)
            except StopIteration as stop:
                plan: Plan = stop.value
                self._apply(plan)
                self._claimed_at.update((start.head.position, start.at) for start in plan.starts)
                return plan
            heads = {lane: jobs.since(at, n) for lane, at, n in ask.heads if (jobs := self.jobs.get(lane)) is not None}
            shared = [self.shared.gates[gate] for gate in ask.shared if gate in self.shared.gates]
            self.heads_read += sum(map(len, heads.values()))
            self.questions += 1
            found = Found(heads=heads, shared=shared)

    def apply(self, policy: Policy, now: Instant, kept: Iterable[KeptPlaces] = ()) -> None:
        """Put another policy in force. `kept` are places in a sequence that jobs keep."""
        rows = (self.flows.values(), self.lanes.values(), self.gates.values())
        built = rebuild(policy, now, self.queue, *rows, kept)
        self.policy, self.queue = policy, built.queue
        self.board = ResidentBoard(policy, is_whole=True)
        self.board.apply(Delta(built.flows, built.lanes, built.gates), Mark(0, NEVER_LOST))

    def in_flight(self) -> int:
        """How many claims have not ended, lane events not yet folded included."""
        folded = sum(lane.in_flight for lane in self.board.lanes.values())
        return folded - sum(event.ended + event.unstarted for event in self.releases)

    def waiting(self) -> int:
        """How many jobs are ready."""
        return sum(len(jobs) for jobs in self.jobs.values())

    def next_alarm(self) -> Instant | None:
        """When a gate has to be looked at again."""
        return self.board.next_alarm()

    def _drain(self, now: Instant) -> Events:
        arrivals, self.arrivals = self.arrivals[:FOLDED_AT_ONCE], self.arrivals[FOLDED_AT_ONCE:]
        releases, self.releases = self.releases, []
        shared = self.shared.releases if self.policy.shared_limits else []
        if shared:
            self.shared.releases = []
        return Events(
            now,
            self.queue,
            arrivals,
            releases,
            shared=[self.shared.gates[gate] for gate in sorted({event.gate for event in shared})],
            shared_releases=shared,
            woken=sorted(self.shared.woken.pop(self.policy.queue, set())),
        )

    def _apply(self, plan: Plan) -> None:
        self.queue = plan.queue
        self.board.note(plan, Mark(0, NEVER_LOST))
        self.shared.gates.update((row.id, row) for row in plan.shared)
        for wakeup in plan.wakeups:
            self.shared.woken.setdefault(wakeup.queue, set()).update(() if wakeup.gate is None else (wakeup.gate,))
        for start in plan.starts:
            self.jobs[start.lane].remove(start.head.position)


BY_POSITION = attrgetter("position")


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
        insort(self._heads, head, lo=self._first, key=BY_POSITION)

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
        return bisect_left(heads, position, lo=first, key=BY_POSITION)
