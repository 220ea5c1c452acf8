"""Drains: when all jobs that wait will have started, as limits allow it and as it really goes.

What a limit allows is reckoned from its gate as it stands: the instant at which the n-th job from now may start if all
before it start as soon as they may. What really goes is what was seen while jobs waited. Whatever is slower decides, so
that no estimate lies before what the limits allow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from heapq import heappop, heappush, nsmallest
from math import inf
from typing import TypeVar

import msgspec

from fairlane.clock import SECOND, Instant
from fairlane.policy.gates import GateState
from fairlane.policy.limits import UNBOUNDED, Concurrency, Limit
from fairlane.scheduler.journal import MAX_LAG
from fairlane.scheduler.plan import SIBLINGS
from fairlane.stats.keys import MINUTE, Minute

T = TypeVar("T")

TURNAROUND = 8_000
"""Microseconds between the end of a run and the next start in its place: a settlement and a claim take that long."""
LONG_ENOUGH = 10 * SECOND
"""Starts must go on for so long before they show how fast things go."""
OLD_ENOUGH = SECOND
"""What has only just begun does not show how long runs take."""
ASSUMED = (100_000, SECOND)
"""Run times to try where none is known, and runs are taken to be short."""
ANY = (100_000, 24 * 3_600 * SECOND)
"""Run times to try where none is known: what is the same for both depends on limits alone."""
RECENT = 5
"""Minutes that show how fast things go now."""


def run_time_of(known: int, ages: Sequence[int]) -> int:
    """Microseconds that a run takes: what those that ended took, but no less than those that still go on have taken in
    the mean. 0: nothing is known, since none has ended; how old those are that go on does not say when they will."""
    mean = sum(ages) // len(ages) if ages else 0
    return max(known, mean) if known and mean >= OLD_ENOUGH else known


def at_any_run_time(run_time: int, estimate: Callable[[int], T], assumed: tuple[int, int] = ASSUMED) -> T | None:
    """The estimate for a run time; where none is known (0), the one that holds for any. `None`: it depends on it."""
    if run_time:
        return estimate(run_time)
    short, long = map(estimate, assumed)
    return short if short == long else None


class Seen(msgspec.Struct, frozen=True):
    """How the last minutes of a queue went, as far as they are added up."""

    minutes: list[Minute]
    until: Instant

    def pace(self, since: Instant | None) -> float | None:
        """Starts a second in the whole minutes since then, up to the last few, from the first to the last of them;
        `None`: too little was seen.

        To be asked of a time in which jobs waited: a queue that has nothing to do does not show how fast it can go.
        """
        if since is None:
            return None
        first = max(-(-since // MINUTE), self.until // MINUTE - RECENT)
        seen = [each for each in self.minutes if each.number >= first]
        within = [each.claimed_in for each in seen if each.claimed_in is not None]
        passed = max(each.last for each in within) - min(each.first for each in within) if within else 0
        started = sum(each.started for each in seen)
        return started * SECOND / passed if started and passed >= LONG_ENOUGH else None


def drains_at(gates: Iterable[tuple[Limit, GateState, int]], now: Instant, run_time: int) -> Instant | None:
    """When each of these gates has let as many jobs start as it is given with; `run_time` is 0 if it is not known.
    `None`: there is no such gate, it depends on a run time that is not known, or somebody has to act first."""
    # A pause that is over is no limit.
    passed = [each for each in gates if each[0].is_declared or each[0].room_at(each[1], now) <= 0]
    if any(limit.nth_at(gate, now, 1, run_time + TURNAROUND) is None for limit, gate, _ in passed):
        return None
    return at_any_run_time(run_time, lambda assumed: _all_drained(passed, now, assumed + TURNAROUND), ANY)


def _all_drained(passed: list[tuple[Limit, GateState, int]], now: Instant, turn: int) -> Instant | None:
    """When each gate has let as many through as it has to. Where places come round again, whatever held up the first
    that took them has held up all who follow."""
    times = []
    for at, (limit, gate, nth) in enumerate(passed):
        opens = limit.nth_at(gate, now, nth, turn)
        if opens is None:
            continue
        place, later = limit.round_of(gate, now, nth, turn)
        others = [(each, its, min(n, place)) for other, (each, its, n) in enumerate(passed) if other != at]
        first = _all_drained(others, now, turn) if later else None
        times.append(max(opens, (first or now) + later))
    return max(times, default=None)


MOST_STARTS = 2_000
"""Starts that one attempt makes; if they do not suffice, the next one makes them in larger bundles."""
LARGER = 8


class Passed(GateState):
    """A gate that jobs have to pass, as it was when this was made: the plan may go on with it."""

    __slots__ = ("_found", "is_of_queue", "limit", "parked", "sharers", "turnaround")

    def __init__(self, limit: Limit, gate: GateState, sharers: int = 1) -> None:
        self.limit = limit
        self.sharers = sharers
        """Queues that wait for a shared one, this one included: each start here goes with one in every other."""
        self._found = gate.in_flight, gate.tat, deepcopy(gate.memo)
        self.begin()

    def begin(self) -> None:
        """Take part in another attempt."""
        in_flight, tat, memo = self._found
        super().__init__(in_flight, tat, deepcopy(memo))
        self.is_of_queue = False
        self.turnaround = 0
        """Microseconds between the end of a run and the next start in its place."""
        self.parked: dict[Entrants, tuple[float, float, int]] = {}
        """The lanes that wait here, each with its place."""

    def room(self, now: Instant) -> int:
        return self.limit.room_at(self, now) if self.limit.is_foreseen else UNBOUNDED

    def wake(self) -> Entrants:
        """Let one lane go on: that of the flow whose turn it was when it came here, and of that flow the first. Nobody
        is parked at a gate of the whole queue: there it counts whose turn it is now."""
        if self.is_of_queue:
            lane = min(self.parked, key=lambda each: (each.flow.turn, each.is_subject, each.order, self.parked[each]))
        else:
            first = nsmallest(1 + SIBLINGS, self.parked, key=self.parked.__getitem__)
            lane = min((each for each in first if each.flow is first[0].flow), key=lambda each: each.order)
        del self.parked[lane]
        return lane


@dataclass(eq=False, slots=True)
class Contestant:
    """A flow that takes turns."""

    tag: float
    step: float
    """What a turn adds to its virtual time."""
    run_time: int
    """Microseconds that one of its jobs runs; 0: not known."""
    turn: float = 0.0
    """Its virtual time, in an attempt."""
    lanes: list[tuple[float, bool, int, Entrants]] = field(default_factory=list)
    """Those that may start a job, in an attempt."""
    is_queued: bool = False

    def begin(self) -> None:
        self.turn, self.lanes, self.is_queued = self.tag, [], False


@dataclass(eq=False, slots=True)
class Entrants:
    """The jobs of one lane."""

    flow: Contestant
    jobs: int
    gates: tuple[bytes, ...]
    """Those of the whole queue are passed by everybody, and not named."""
    first: float = -inf
    """Where its first job stands among those of its flow."""
    ahead: int | None = None
    """So many of its jobs go before the subject by their order; `None`: all."""
    parked: tuple[bytes, float] | None = None
    """The gate that it waits at, and the virtual time of its flow when it came there."""
    is_pool: bool = False
    """Its jobs are some of those that nobody has looked at."""
    is_subject: bool = False
    """The subject is its last job."""
    left: int = 0
    started: int = 0
    order: float = 0.0
    """Where its next job stands in its flow: between its first and the subject, or behind that."""


class Contest(msgspec.Struct, frozen=True):
    """Everybody who may go before a job, and what they have to pass."""

    lanes: list[Entrants]
    """The subject's own lane first: of that, only the jobs before it."""
    position: float
    """Where the subject stands among the jobs of its flow."""
    gates: Mapping[bytes, Passed]
    of_queue: tuple[bytes, ...]
    pool: int
    """Jobs that nobody has looked at."""
    slots: int
    running: int


def rehearse(contest: Contest, now: Instant, run_time: int) -> tuple[Instant, int]:
    """When the subject starts, and how many jobs start before it, if what runs now has just begun and nothing joins.

    `run_time` is that of flows of which none is known. A gate that nothing opens, neither time nor the end of a run, is
    taken to be open when everything else has stopped.
    """
    bundle = 1
    while (found := _Attempt(contest, now, run_time, bundle).play()) is None:
        bundle *= LARGER
    return found


class _Attempt:
    """A rehearsal that starts jobs in bundles of one size."""

    def __init__(self, contest: Contest, now: Instant, run_time: int, bundle: int) -> None:
        self.contest, self.now, self.run_time, self.bundle = contest, now, run_time, bundle
        self.pool = -(-contest.pool // bundle)
        self.ends: list[tuple[Instant, int, Passed, int]] = []
        self.flows: list[tuple[float, bool, int, Contestant]] = []
        self.starts = self.order = 0
        self.cursor = -inf
        slots = Passed(Concurrency(contest.slots), GateState(contest.running))
        for gate in contest.gates.values():
            gate.begin()
        self.of_queue = [*(contest.gates[each] for each in contest.of_queue), slots]
        self.own, *others = contest.lanes
        for gate in (*self._gates(self.own), *self.of_queue):
            # Where only others pass, nobody is taken to be slower than can be known: they would be less in the way.
            gate.turnaround = TURNAROUND
        for gate in self.of_queue:
            gate.is_of_queue = True
        for lane in contest.lanes:
            lane.flow.begin()
        # Its own place follows those before it, and in bundles the place after that says when it has started.
        self._enter(self.own, self.own.jobs // bundle + 1 + (bundle > 1))
        for lane in others:
            self._enter(lane, -(-lane.jobs // bundle))
        ended = now + (self.own.flow.run_time or run_time) + TURNAROUND
        for gate in (*contest.gates.values(), slots):
            if gate.in_flight > 0 and gate.limit.counts_in_flight:
                self.ends.append((ended, len(self.ends), gate, gate.in_flight))
        self.order += len(self.ends)

    def _gates(self, lane: Entrants) -> list[Passed]:
        gates = self.contest.gates
        return [gates[each] for each in lane.gates if each in gates]

    def _enter(self, lane: Entrants, jobs: int) -> None:
        lane.left, lane.started, lane.order = jobs, 0, self._order(lane, 0)
        if lane.parked is not None and lane.parked[0] in self.contest.gates and jobs > 0:
            self._park(lane, self.contest.gates[lane.parked[0]], lane.parked[1])
        else:
            self._join(lane)

    def _order(self, lane: Entrants, started: int) -> float:
        position = self.contest.position
        ahead = -(-(lane.jobs if lane.ahead is None else lane.ahead) // self.bundle)
        if started >= ahead:
            return position if lane.is_subject else inf
        return lane.first + ((position - lane.first) / ahead * started if lane.first > -inf else 0.0)

    def _join(self, lane: Entrants) -> None:
        """Let a lane take part again. Where it is a tie, the subject comes last."""
        if lane.left <= 0:
            return
        self.order += 1
        flow = lane.flow
        heappush(flow.lanes, (lane.order, lane.is_subject, self.order, lane))
        if not flow.is_queued:
            flow.turn = max(flow.turn, self.cursor - MAX_LAG * flow.step * self.bundle)
            self._queue(flow)

    def _queue(self, flow: Contestant) -> None:
        flow.is_queued = True
        heappush(self.flows, (flow.turn, flow is self.own.flow, self.order, flow))

    def play(self) -> tuple[Instant, int] | None:
        while self.starts < MOST_STARTS:
            if self.flows:
                if self._turn():
                    return self.now, (self.starts - 1) * self.bundle
            elif not self._go_on():
                return self.now, self.starts * self.bundle
        return None

    def _turn(self) -> bool:
        """The flow whose turn it is starts a job, or has a lane less that could; whether it was the subject."""
        flow = self.flows[0][3]
        if not flow.lanes:
            heappop(self.flows)
            flow.is_queued = False
            return False
        lane = flow.lanes[0][3]
        gates = [*self._gates(lane), *self.of_queue]
        shut = next((gate for gate in gates if gate.room(self.now) <= 0), None)
        if shut is not None:
            heappop(flow.lanes)
            self._park(lane, shut, flow.turn)
            return False
        if lane.is_pool:
            if self.pool <= 0:
                heappop(flow.lanes)
                return False
            self.pool -= 1
        return self._start(lane, gates)

    def _park(self, lane: Entrants, gate: Passed, turn: float) -> None:
        self.order += 1
        gate.parked[lane] = (turn, lane.order, self.order)

    def _start(self, lane: Entrants, gates: list[Passed]) -> bool:
        flow = lane.flow
        self.starts += 1
        lane.left -= 1
        lane.started += 1
        lane.order = self._order(lane, lane.started)
        if lane.is_subject and not lane.left:
            return True
        turn = flow.run_time or self.run_time
        for gate in gates:
            if not gate.limit.is_foreseen:
                continue
            held = gate.limit.take_many(gate, self.now, self.bundle * gate.sharers, turn + gate.turnaround)
            if held is not None:
                self.order += 1
                heappush(self.ends, (held[0], self.order, gate, held[1]))
        self.cursor = max(self.cursor, flow.turn)
        heappop(flow.lanes)
        heappop(self.flows)
        flow.is_queued = False
        flow.turn += flow.step * self.bundle
        self._join(lane)
        if not flow.is_queued and flow.lanes:
            self.order += 1
            self._queue(flow)
        return False

    def _go_on(self) -> bool:
        """Let those try who were turned away and for whom there is room; if there are none, let time pass until there
        may be. Whether anything is left that can happen."""
        while True:
            waited_for = [gate for gate in (*self.contest.gates.values(), self.of_queue[-1]) if gate.parked]
            woken = [gate.wake() for gate in waited_for for _ in range(min(len(gate.parked), gate.room(self.now)))]
            if woken:
                for lane in woken:
                    self._join(lane)
                return True
            opening = (gate.limit.opens_again_at(gate) for gate in waited_for)
            moments = [at for at in opening if at is not None and at > self.now]
            moments += [self.ends[0][0]] if self.ends else []
            if not moments:
                return False
            self.now = min(moments)
            while self.ends and self.ends[0][0] <= self.now:
                *_, gate, places = heappop(self.ends)
                gate.in_flight = max(0, gate.in_flight - places)
