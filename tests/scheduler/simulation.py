"""A fleet on a virtual clock: slots, run times per key, and the plan in between.

`Bench` drives one queue step by step and keeps a ledger beside it. `Fleet` runs it by itself: it claims while slots are
free, settles at the end of each run, and follows the alarms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from heapq import heappop, heappush
from itertools import count

from fairlane.clock import SECOND, Instant
from fairlane.policy import Policy
from fairlane.scheduler.snapshot import Head, Plan, Release, Start
from fairlane.simulation.memory import MemoryQueue
from tests.scheduler.ledger import LaneKey, Ledger, Run

EPOCH = 1_900_000_000 * SECOND


class Bench:
    """A queue, its clock and its ledger."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.queue = MemoryQueue(policy)
        self.ledger = Ledger(policy)
        self.now: Instant = EPOCH
        self.names: dict[bytes, LaneKey] = {}
        self.claimed: dict[int, Start] = {}

    def enqueue(self, keys: Mapping[str, str | None], count: int = 1, priority: int = 0) -> list[Head]:
        mine = {name: keys[name] for name in self.policy.keys_of_job}
        lane = (priority, tuple(sorted(mine.items())))
        self.names[self.ledger.lane_id(lane)] = lane
        heads = self.queue.enqueue(self.now, mine, count, priority)
        for head in heads:
            self.ledger.arrive(lane, head.position, self.now)
        return heads

    def claim(self, want: int, check: Callable[[LaneKey], None] | None = None) -> Plan:
        plan = self.queue.claim(self.now, want)
        self.ledger.fold(self.now)
        assert len(plan.starts) <= want
        for start in plan.starts:
            lane = self.names[start.lane]
            if check is not None:
                check(lane)
            self.ledger.start(lane, start.head.position, self.now)
            self.claimed[start.head.position] = start
        return plan

    def settle(self, position: int, ran: int) -> Run:
        self.queue.settle(self.claimed.pop(position), ran)
        return self.ledger.end(position, self.now)

    def give_back(self, position: int) -> None:
        self.queue.give_back(self.claimed.pop(position))
        run = self.ledger.end(position, self.now, given_back=True)
        self.ledger.arrive(run.lane, position, run.enqueued_at)

    def reap(self, position: int, ran: int) -> None:
        """The worker is gone: the claim ends, and its job is ready again in its old place."""
        start = self.claimed.pop(position)
        self.queue.give_back(start)
        run = self.ledger.end(position, self.now)
        self.queue.releases[-1] = Release(start.lane, 1, ran, start.charge, 0, 0.0, latest=run.at, kept=1, lost=1)
        self.ledger.arrive(run.lane, position, run.enqueued_at)

    def withdraw(self, lane: LaneKey, position: int) -> None:
        """A waiting job is cancelled."""
        self.ledger.withdraw(lane, position)
        self.queue.withdraw(self.now, self.ledger.lane_id(lane), position)

    def apply(self, policy: Policy) -> None:
        """Put another policy in force, the way a store does."""
        self.queue.apply(policy, self.now)
        self.policy = self.ledger.policy = policy


class Fleet(Bench):
    """Workers with `slots` in all. `run_time` says how long a job of a lane runs, in microseconds."""

    def __init__(
        self,
        policy: Policy,
        *,
        slots: int,
        run_time: Callable[[LaneKey], int],
        claim_at_most: int = 1_000,
    ) -> None:
        super().__init__(policy)
        self.slots = slots
        self.run_time = run_time
        self.claim_at_most = claim_at_most
        self.ends: list[tuple[Instant, int, int, int]] = []
        self.order = count()
        self.claims = 0
        self.refill = False
        """Whether every start is followed by another job of its lane: all lanes stay busy."""

    def run(self, until: Instant | None = None) -> None:
        """Go on until nothing can happen any more, or until a time."""
        while True:
            self._fill()
            moments = [self.ends[0][0]] if self.ends else []
            if len(self.claimed) < self.slots and (alarm := self.queue.next_alarm()) is not None:
                moments.append(max(alarm, self.now))
            if not moments or (until is not None and min(moments) > until):
                break
            self.now = min(moments)
            self._end_due()
        if until is not None:
            self.now = until

    def _fill(self) -> None:
        fruitless = 0
        while fruitless < 50:
            free = min(self.slots - len(self.claimed), self.claim_at_most)
            if free <= 0:
                return
            self.claims += 1
            plan = self.claim(free)
            fruitless = 0 if plan.starts or self.queue.arrivals else fruitless + 1
            for start in plan.starts:
                lane = self.names[start.lane]
                took = self.run_time(lane)
                heappush(self.ends, (self.now + took, next(self.order), start.head.position, took))
                if self.refill:
                    self.enqueue(dict(lane[1]), priority=lane[0])
            alarm = self.queue.next_alarm()
            if not (plan.more or self.queue.arrivals or (alarm is not None and alarm <= self.now)):
                return
        raise AssertionError("fifty claims at one instant started nothing, and still more is asked for")

    def _end_due(self) -> None:
        while self.ends and self.ends[0][0] <= self.now:
            _, _, position, took = heappop(self.ends)
            self.settle(position, took)

    def service(self, key: str, since: Instant, until: Instant) -> dict[str | None, int]:
        """Worker-microseconds that each value of a key has had between two instants."""
        had: dict[str | None, int] = {}
        for run in self.ledger.runs:
            end = until if run.ended_at is None else min(run.ended_at, until)
            value = dict(run.lane[1])[key]
            had[value] = had.get(value, 0) + max(0, end - max(run.at, since))
        return had
