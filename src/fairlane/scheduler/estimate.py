"""Drains: when all jobs that wait will have started, as limits allow it and as it really goes.

What a limit allows is reckoned from its gate as it stands: the instant at which the n-th job from now may start if all
before it start as soon as they may. What really goes is what was seen while jobs waited. Whatever is slower decides, so
that no estimate lies before what the limits allow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from heapq import heappop, heappush, nsmallest
from math import inf
from typing import NamedTuple, TypeVar

import msgspec

from fairlane.clock import SECOND, Instant
from fairlane.policy.gates import GateState
from fairlane.policy.limits import UNBOUNDED, Concurrency, Limit
from fairlane.scheduler.plan import SIBLINGS
from fairlane.stats.keys import MINUTE, Minute

T = TypeVar("T")

TURNAROUND = 8_000
"""Microseconds between the end of a run and the next start in its place: a settlement and a claim take that long."""
TELLING = 10 * SECOND
"""Starts must go on for so long before they say how fast things go."""
OLD_ENOUGH = SECOND
"""What has only just begun says nothing of how long runs take."""
ASSUMED = (100_000, SECOND)
"""Run times to try where none is known, and runs are taken to be short."""
ANY = (100_000, 24 * 3_600 * SECOND)
"""Run times to try where none is known: what is the same for both depends on limits alone."""
RECENT = 5
"""Minutes that say how fast things go now."""


def run_time_of(known: int, ages: Sequence[int]) -> int:
    """Microseconds that a run takes: what those that ended took, but no less than those that still go on have taken in
    the mean. 0: nothing is known, since none has ended; how old those are that go on does not say when they will."""
    mean = sum(ages) // len(ages) if ages else 0
    return max(known, mean) if known and mean >= OLD_ENOUGH else known


def at_any_run_time(run_time: int, told: Callable[[int], T], assumed: tuple[int, int] = ASSUMED) -> T | None:
    """What is told for a run time; where none is known (0), what is told for any. `None`: it depends on it."""
    if run_time:
        return told(run_time)
    short, long = map(told, assumed)
    return short if short == long else None


class Seen(msgspec.Struct, frozen=True):
    """How the last minutes of a queue went, as far as they are added up."""

    minutes: list[Minute]
    until: Instant

    def pace(self, since: Instant | None) -> float | None:
        """Starts a second in the whole minutes since then, up to the last few, from the first to the last of them;
        `None`: too little was seen.

        To be asked of a time in which jobs waited: how fast a queue goes that has nothing to do says nothing.
        """
        if since is None:
            return None
        first = max(-(-since // MINUTE), self.until // MINUTE - RECENT)
        seen = [(each.started, each.claimed_in) for each in self.minutes if each.number >= first]
        within = [each for _, each in seen if each is not None]
        passed = max(each.last for each in within) - min(each.first for each in within) if within else 0
        started = sum(count for count, _ in seen)
        return started * SECOND / passed if started and passed >= TELLING else None


def drains_at(gates: Iterable[tuple[Limit, GateState, int]], now: Instant, run_time: int) -> Instant | None:
    """When each of these gates has let as many jobs start as it is given with; `run_time` is 0 if it is not known.
    `None`: no gate says so, it depends on a run time that is not known, or somebody has to act first."""
    # A pause that is over is no limit.
    passed = [each for each in gates if each[0].is_declared or each[0].room_at(each[1], now) <= 0]
    if any(limit.nth_at(gate, now, 1, run_time + TURNAROUND) is None for limit, gate, _ in passed):
        return None
    return at_any_run_time(run_time, lambda assumed: _together(passed, now, assumed + TURNAROUND), ANY)


def _together(passed: list[tuple[Limit, GateState, int]], now: Instant, turn: int) -> Instant | None:
    """When each gate has let as many through as it has to. Where places come round again, whatever held up the first
    that took them has held up all who follow."""
    times = []
    for at, (limit, gate, nth) in enumerate(passed):
        opens = limit.nth_at(gate, now, nth, turn)
        if opens is None:
            continue
        place, later = limit.round_of(gate, now, nth, turn)
        others = [(each, its, min(n, place)) for other, (each, its, n) in enumerate(passed) if other != at]
        first = _together(others, now, turn) if later else None
        times.append(max(opens, (first or now) + later))
    return max(times, default=None)


MOST_STARTS = 2_000
"""Starts that one attempt makes; if they do not suffice, the next one makes them in larger bundles."""
LARGER = 8
MOST_LAG = 1_000
"""How many of its own jobs a flow that waits at gates may fall behind the others."""


class Passed(msgspec.Struct, frozen=True):
    """A gate that jobs have to pass."""

    limit: Limit
    gate: GateState
    sharers: int = 1
    """Queues that wait for a shared one, this one included: each start here goes with one in every other."""


class Entrants(msgspec.Struct, frozen=True):
    """The jobs of one lane."""

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


class Contestant(msgspec.Struct, frozen=True):
    """A flow that takes turns."""

    tag: float
    step: float
    """What a turn adds to its virtual time."""
    run_time: int
    """Microseconds that one of its jobs runs; 0: not known, to be filled in before a rehearsal."""
    lanes: list[Entrants]


class Contest(msgspec.Struct, frozen=True):
    """Everybody who may go before a job, and what they have to pass."""

    own: Contestant
    """The subject's flow, its own lane first: of that, only the jobs before it."""
    position: float
    """Where the subject stands among the jobs of its flow."""
    rivals: list[Contestant]
    gates: Mapping[bytes, Passed]
    of_queue: tuple[bytes, ...]
    pool: int
    """Jobs that nobody has looked at."""
    slots: int
    running: int


class Told(NamedTuple):
    """When the subject starts, and how many jobs of the queue start before it."""

    at: Instant
    before: int


def rehearse(contest: Contest, now: Instant) -> Told:
    """When the subject starts, if what runs now has just begun and nothing joins. A gate that nothing opens, neither
    time nor the end of a run, is taken to be open when everything else has stopped."""
    bundle = 1
    while (told := _Stage(contest, now, bundle).play()) is None:
        bundle *= LARGER
    return told


class _Gate(GateState):
    """A gate in a rehearsal."""

    def __init__(self, passed: Passed, bundle: int) -> None:
        super().__init__(passed.gate.in_flight, passed.gate.tat, deepcopy(passed.gate.memo))
        self.limit = passed.limit
        self.width = passed.sharers * bundle
        """What one start takes."""
        self.is_of_queue = False
        self.turnaround = 0
        """Microseconds between the end of a run and the next start in its place."""
        self.parked: dict[_Lane, tuple[float, float, int]] = {}
        """Who waits here, each with its place."""

    def room(self, now: Instant) -> int:
        return self.limit.room_at(self, now) if self.limit.is_foreseen else UNBOUNDED

    def take(self, now: Instant, run_time: int) -> tuple[Instant, int] | None:
        """Charge a start; say until when it holds how many places of those that runs hold."""
        if not self.limit.is_foreseen:
            return None
        return self.limit.take_many(self, now, self.width, run_time + self.turnaround)

    def wake(self) -> _Lane:
        """Let one lane go on: that of the flow whose turn it was when it came here, and of that flow the first. Nobody
        is parked at a gate of the whole queue: there it counts whose turn it is now."""
        if self.is_of_queue:
            lane = min(self.parked, key=lambda each: (each.flow.tag, each.is_subject, each.order, self.parked[each]))
        else:
            first = nsmallest(1 + SIBLINGS, self.parked, key=self.parked.__getitem__)
            lane = min((each for each in first if each.flow is first[0].flow), key=lambda each: each.order)
        del self.parked[lane]
        return lane


class _Lane:
    """A lane in a rehearsal."""

    def __init__(
        self, entrants: Entrants, flow: _Flow, gates: list[_Gate], position: float, bundle: int, jobs: int
    ) -> None:
        self.entrants, self.flow, self.gates = entrants, flow, gates
        self.left, self.started, self.is_subject = jobs, 0, False
        ahead = entrants.jobs if entrants.ahead is None else entrants.ahead
        self._ahead = -(-ahead // bundle)
        self._first, self._position = entrants.first, position
        self._each = (position - entrants.first) / self._ahead if self._ahead and entrants.first > -inf else 0.0

    @property
    def order(self) -> float:
        """Where its next job stands in its flow: between its first and the subject, or behind that."""
        if self.started < self._ahead:
            return self._first + self._each * self.started
        return self._position if self.is_subject else inf


class _Flow:
    """A flow in a rehearsal."""

    def __init__(self, contestant: Contestant, bundle: int, *, is_own: bool) -> None:
        self.tag, self.step, self.run_time = contestant.tag, contestant.step * bundle, contestant.run_time
        self.lanes: list[tuple[float, bool, int, _Lane]] = []
        self.is_own, self.is_queued = is_own, False


class _Stage:
    """One attempt."""

    def __init__(self, contest: Contest, now: Instant, bundle: int) -> None:
        self.contest, self.now, self.bundle = contest, now, bundle
        self.gates = {each: _Gate(passed, bundle) for each, passed in contest.gates.items()}
        slots = _Gate(Passed(Concurrency(contest.slots), GateState(contest.running)), bundle)
        self.of_queue = [*(self.gates[each] for each in contest.of_queue), slots]
        self.pool = -(-contest.pool // bundle)
        self.ends: list[tuple[Instant, int, list[tuple[_Gate, int]]]] = []
        self.flows: list[tuple[float, bool, int, _Flow]] = []
        self.starts = self.order = 0
        self.cursor = -inf
        self.subject: _Lane | None = None
        for gate in (*(self.gates[each] for each in contest.own.lanes[0].gates if each in self.gates), *self.of_queue):
            # Where only others pass, nobody is taken to be slower than can be known: they would be less in the way.
            gate.turnaround = TURNAROUND
        for gate in self.of_queue:
            gate.is_of_queue = True
        for flow in (contest.own, *contest.rivals):
            self._enter(flow, is_own=flow is contest.own)
        holding = [(gate, gate.in_flight) for gate in (*self.gates.values(), slots) if gate.in_flight > 0]
        if counted := [(gate, held) for gate, held in holding if gate.limit.counts_in_flight]:
            heappush(self.ends, (now + contest.own.run_time + TURNAROUND, 0, counted))

    def _enter(self, contestant: Contestant, *, is_own: bool) -> None:
        bundle = self.bundle
        flow = _Flow(contestant, bundle, is_own=is_own)
        for nth, each in enumerate(contestant.lanes):
            jobs = -(-each.jobs // bundle)
            if is_own and not nth:
                # Its own place follows those before it, and in bundles the place after that says when it has started.
                jobs = each.jobs // bundle + 1 + (bundle > 1)
            gates = [self.gates[gate] for gate in each.gates if gate in self.gates]
            lane = _Lane(each, flow, gates, self.contest.position, bundle, jobs)
            if is_own and not nth:
                self.subject, lane.is_subject = lane, True
            if each.parked is not None and each.parked[0] in self.gates and lane.left > 0:
                self._park(lane, self.gates[each.parked[0]], each.parked[1])
            else:
                self._join(lane)

    def _join(self, lane: _Lane) -> None:
        """Let a lane take part again. Where it is a tie, the subject comes last."""
        if lane.left <= 0:
            return
        self.order += 1
        flow = lane.flow
        heappush(flow.lanes, (lane.order, lane is self.subject, self.order, lane))
        if not flow.is_queued:
            flow.tag = max(flow.tag, self.cursor - MOST_LAG * flow.step)
            self._queue(flow)

    def _queue(self, flow: _Flow) -> None:
        flow.is_queued = True
        heappush(self.flows, (flow.tag, flow.is_own, self.order, flow))

    def play(self) -> Told | None:
        while self.starts < MOST_STARTS:
            if self.flows:
                if self._turn():
                    return Told(self.now, (self.starts - 1) * self.bundle)
            elif not self._go_on():
                return Told(self.now, self.starts * self.bundle)
        return None

    def _turn(self) -> bool:
        """The flow whose turn it is starts a job, or has a lane less that could; whether it was the subject."""
        flow = self.flows[0][3]
        if not flow.lanes:
            heappop(self.flows)
            flow.is_queued = False
            return False
        lane = flow.lanes[0][3]
        shut = next((gate for gate in (*lane.gates, *self.of_queue) if gate.room(self.now) <= 0), None)
        if shut is not None:
            heappop(flow.lanes)
            self._park(lane, shut, flow.tag)
            return False
        return self._start(flow, lane)

    def _park(self, lane: _Lane, gate: _Gate, tag: float) -> None:
        self.order += 1
        gate.parked[lane] = (tag, lane.order, self.order)

    def _start(self, flow: _Flow, lane: _Lane) -> bool:
        if lane.entrants.is_pool:
            if self.pool <= 0:
                heappop(flow.lanes)
                return False
            self.pool -= 1
        self.starts += 1
        lane.left -= 1
        lane.started += 1
        if lane is self.subject and not lane.left:
            return True
        for gate in (*lane.gates, *self.of_queue):
            if (taken := gate.take(self.now, flow.run_time)) is not None:
                self.order += 1
                heappush(self.ends, (taken[0], self.order, [(gate, taken[1])]))
        self.cursor = max(self.cursor, flow.tag)
        heappop(flow.lanes)
        heappop(self.flows)
        flow.is_queued = False
        flow.tag += flow.step
        self._join(lane)
        if not flow.is_queued and flow.lanes:
            self.order += 1
            self._queue(flow)
        return False

    def _go_on(self) -> bool:
        """Let those try who were turned away and for whom there is room; if there are none, let time pass until there
        may be. Whether anything is left that can happen."""
        while True:
            if self._wake():
                return True
            moments = [
                at
                for gate in self._waited_for()
                if (at := gate.limit.opens_again_at(gate)) is not None and at > self.now
            ]
            moments += [self.ends[0][0]] if self.ends else []
            if not moments:
                return False
            self.now = min(moments)
            while self.ends and self.ends[0][0] <= self.now:
                for gate, places in heappop(self.ends)[2]:
                    gate.in_flight = max(0, gate.in_flight - places)

    def _waited_for(self) -> Iterable[_Gate]:
        return [gate for gate in (*self.gates.values(), self.of_queue[-1]) if gate.parked]

    def _wake(self) -> bool:
        is_any = False
        for gate in self._waited_for():
            for _ in range(min(len(gate.parked), gate.room(self.now))):
                is_any = True
                self._join(gate.wake())
        return is_any
