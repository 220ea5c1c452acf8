"""A queue on a virtual clock: the plan that every store runs, over jobs whose run times are known.

A fleet is its slots and one claimer, as a worker is. The claimer asks for as many jobs as slots are free; a claim takes
`claim_time`, the jobs that it brings start when it is back, and the next claim begins no sooner. A job that ends frees
its slot at once, and what limits have counted for it once it is settled: settlements go in batches, one at a time, and
each takes `settle_time`. So a slot stands idle for a claim's time between two jobs, and a key that has used up its
concurrency for a settlement's and a claim's.

Nothing here is left to chance: who fails, and how long each job runs, is said by the jobs.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush

import msgspec

from fairlane.clock import Instant
from fairlane.policy.policy import Policy
from fairlane.scheduler.board import Board, Gate
from fairlane.scheduler.settlement import Verdict
from fairlane.scheduler.snapshot import Head, Plan, SharedGateRow, Start
from fairlane.simulation.memory import MemoryQueue

STEP = 1
"""Microseconds that pass at least between two claims of which the first started nothing: time always goes on."""


class JobKind(msgspec.Struct, frozen=True, eq=False):
    """What jobs of one lane and class have in common."""

    label: str
    """The class that it is counted in."""
    keys: dict[str, str | None]
    """In canonical form, the task among them; jobs may carry more than the policy looks at."""
    priority: int = 0


class SimulatedJob(msgspec.Struct, frozen=True, gc=False):
    """One job: when it is ready, how long each of its runs takes, and what follows a run that fails."""

    kind: JobKind
    at: Instant
    run_time: int
    retries: tuple[int, ...] = ()
    """The delay after each run that fails and is tried again, in microseconds."""
    dies: bool = False
    """Its last run fails too."""
    numbers: dict[str, float] | None = None
    """What it brings along, by the name of the limit; `weight` is the fair share's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The workers: how many jobs they run at once, and how long a claim and a settlement take them (microseconds)."""

    slots: int
    claim_time: int
    settle_time: int


@dataclass(slots=True)
class Recording:
    """What happened: one entry for every run, in the order of their starts."""

    policy: Policy
    slots: int
    began_at: Instant = 0
    ended_at: Instant = 0
    kinds: list[JobKind] = field(default_factory=list)
    kind_of: array[int] = field(default_factory=lambda: array("q"))
    """The kind of each run, as its place in `kinds`."""
    ready_at: array[int] = field(default_factory=lambda: array("q"))
    started_at: array[int] = field(default_factory=lambda: array("q"))
    finished_at: array[int] = field(default_factory=lambda: array("q"))
    """May lie behind `ended_at`: a run that the end of the simulation has cut off."""
    left: list[tuple[int, Instant]] = field(default_factory=list)
    """Jobs that wait at the end: their kind, and since when."""
    jobs: int = 0
    without_numbers: int = 0
    """Jobs that lack a number which the policy takes from its jobs."""
    weights: dict[tuple[str | None, ...], float] = field(default_factory=dict)
    """The weights that flows had at the end, by their key."""
    retried: int = 0
    dead: int = 0
    claims: int = 0
    gates: list[GateUse] = field(default_factory=list)


class _Waiting(msgspec.Struct, frozen=True, gc=False):
    """A job in its lane: what `Head.ref` holds."""

    job: SimulatedJob
    attempt: int


def play(
    policy: Policy,
    jobs: Iterable[SimulatedJob],
    fleet: Fleet,
    *,
    until: Instant | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Recording:
    """Run jobs (in the order of `at`) under a policy until none can start any more, or until an instant."""
    return _Play(policy, jobs, fleet, until, on_progress).run()


class _Play:
    def __init__(
        self,
        policy: Policy,
        jobs: Iterable[SimulatedJob],
        fleet: Fleet,
        until: Instant | None,
        on_progress: Callable[[int], None] | None,
    ) -> None:
        self.queue = MemoryQueue(policy)
        self.policy = policy
        self.fleet = fleet
        self.until = until
        self.on_progress = on_progress
        self.record = Recording(policy, fleet.slots)
        self.saturation = Saturation(policy)
        self.coming = iter(jobs)
        self.next_job = next(self.coming, None)
        self.again: list[tuple[Instant, int, SimulatedJob, int]] = []
        """Retries that wait for their time."""
        self.ends: list[tuple[Instant, int, Start]] = []
        self.unsettled: list[Start] = []
        """Ended, and not yet on the way to the store."""
        self.settling: list[Start] = []
        self.settled_at: Instant = 0
        self.wants_more = False
        """The last claim brought all that it asked for, so there may be more: a free slot is a reason to ask."""
        self.ready = 0
        self.order = 0
        self.now: Instant = self.next_job.at if self.next_job is not None else 0
        self.claimer_free_at: Instant = self.now
        self.has_reason = False
        """Something has happened that a claim has not seen."""
        self.places: dict[JobKind, int] = {}
        self.lane_keys: list[dict[str, str | None]] = []

    def run(self) -> Recording:
        self.record.began_at = self.now
        while (moment := self._next_moment()) is not None and (self.until is None or moment <= self.until):
            self._go_to(moment)
            alarm = self.queue.next_alarm()
            is_due = self.has_reason or (alarm is not None and alarm <= self.now)
            if is_due and self.now >= self.claimer_free_at and self._may_claim():
                self._claim()
        if self.until is not None and self.until > self.now:
            self._go_to(self.until)
        return self._end()

    def _go_to(self, moment: Instant) -> None:
        self.now = moment
        self._let_end()
        self._let_arrive()

    def _end(self) -> Recording:
        record = self.record
        if self.until is not None:
            self._forget_starts_from(self.until)
        record.left += [(self._place(head.ref.job.kind), head.ready_at) for head in self._waiting()]
        last = max(max(record.finished_at, default=record.began_at), max((at for _, at in record.left), default=0))
        record.ended_at = last if self.until is None else self.until
        record.gates = self.saturation.result(record.ended_at)
        record.weights = {tuple(flow.key): flow.weight for flow in self.queue.flows.values()}
        return record

    def _next_moment(self) -> Instant | None:
        """When something happens next. What comes while the claimer is away is seen when it is back."""
        if self.has_reason and self._may_claim():
            return max(self.now, self.claimer_free_at)
        moments = [self.ends[0][0]] if self.ends else []
        if self.next_job is not None:
            moments.append(self.next_job.at)
        if self.again:
            moments.append(self.again[0][0])
        if self.settling:
            moments.append(self.settled_at)
        if self._may_claim() and (alarm := self.queue.next_alarm()) is not None:
            moments.append(max(alarm, self.claimer_free_at))
        return max(self.now, min(moments)) if moments else None

    def _may_claim(self) -> bool:
        # With nothing to start, only to see that a limit has room again: how long it had none is measured.
        return len(self.ends) < self.fleet.slots and (self.ready > 0 or self.saturation.full > 0)

    def _let_arrive(self) -> None:
        now, job = self.now, self.next_job
        while job is not None and job.at <= now:
            # Jobs that come together for one lane append one lane event, as those of a bulk do.
            kind, at = job.kind, job.at
            together = [_Waiting(job, 1)]
            while (job := next(self.coming, None)) is not None and job.kind is kind and job.at == at:
                together.append(_Waiting(job, 1))
            self.record.jobs += len(together)
            self._enqueue(kind, at, together, self._brought(together) if self.policy.brought else None)
            if job is not None and job.at < at:
                raise ValueError(f"the jobs of a simulation come in the order of their times: {job} follows {at}")
        self.next_job = job
        while self.again and self.again[0][0] <= now:
            at, _, failed, attempt = heappop(self.again)
            self._enqueue(failed.kind, at, [_Waiting(failed, attempt)])

    def _brought(self, together: list[_Waiting]) -> dict[str, float] | None:
        """The numbers that the newest of these jobs bring along, of those that the policy asks for."""
        wanted = self.policy.brought
        given: dict[str, float] = {}
        for waiting in together:
            numbers = waiting.job.numbers or {}
            given |= {name: numbers[name] for name in wanted if name in numbers}
            self.record.without_numbers += not wanted.keys() <= numbers.keys()
        return given or None

    def _enqueue(
        self, kind: JobKind, at: Instant, together: list[_Waiting], given: dict[str, float] | None = None
    ) -> None:
        keys = self.lane_keys[self._place(kind)]
        self.queue.enqueue(at, keys, len(together), kind.priority, given, together)
        self.ready += len(together)
        self.has_reason = True

    def _place(self, kind: JobKind) -> int:
        place = self.places.get(kind)
        if place is None:
            place = self.places[kind] = len(self.record.kinds)
            self.record.kinds.append(kind)
            self.lane_keys.append({name: kind.keys.get(name) for name in self.policy.lane_keys})
        return place

    def _let_end(self) -> None:
        ends, now = self.ends, self.now
        while ends and ends[0][0] <= now:
            ended_at, _, start = heappop(ends)
            self._let_settle(ended_at)
            self.unsettled.append(start)
            self.has_reason = self.has_reason or self.wants_more
            if not self.settling:
                self._send_settlements(ended_at)
        self._let_settle(now)

    def _send_settlements(self, moment: Instant) -> None:
        self.settling, self.unsettled = self.unsettled, []
        self.settled_at = moment + self.fleet.settle_time

    def _let_settle(self, now: Instant) -> None:
        """Whatever reached the store by now is settled; what has piled up meanwhile is sent after it."""
        while self.settling and self.settled_at <= now:
            for start in self.settling:
                self._settle(start)
            self.has_reason = True
            self._send_settlements(self.settled_at)

    def _settle(self, start: Start) -> None:
        waiting: _Waiting = start.head.ref
        job = waiting.job
        is_retried = waiting.attempt <= len(job.retries)
        verdict = Verdict.FAILED if is_retried or job.dies else Verdict.GOOD
        self.queue.settle(start, job.run_time, verdict)
        if is_retried:
            self.record.retried += 1
            self.order += 1
            due = self.settled_at + job.retries[waiting.attempt - 1]
            heappush(self.again, (due, self.order, job, waiting.attempt + 1))
        elif job.dies:
            self.record.dead += 1

    def _claim(self) -> None:
        record, now = self.record, self.now
        want = self.fleet.slots - len(self.ends)
        plan = self.queue.claim(now, want)
        record.claims += 1
        starts_at = now + self.fleet.claim_time
        for start in plan.starts:
            waiting: _Waiting = start.head.ref
            ends_at = starts_at + waiting.job.run_time
            heappush(self.ends, (ends_at, len(record.kind_of), start))
            record.kind_of.append(self.places[waiting.job.kind])
            record.ready_at.append(start.head.ready_at)
            record.started_at.append(starts_at)
            record.finished_at.append(ends_at)
        self.ready -= len(plan.starts)
        self.saturation.note(now, plan, is_held_up=self.ready > 0)
        self.claimer_free_at = starts_at if plan.starts else max(starts_at, now + STEP)
        self.wants_more = len(plan.starts) >= want
        self.has_reason = plan.more or bool(self.queue.arrivals)
        if self.on_progress is not None:
            self.on_progress(len(record.kind_of))

    def _forget_starts_from(self, moment: Instant) -> None:
        """What starts only at the end has not started."""
        record = self.record
        while record.started_at and record.started_at[-1] >= moment:
            record.left.append((record.kind_of.pop(), record.ready_at.pop()))
            record.started_at.pop()
            record.finished_at.pop()

    def _waiting(self) -> Iterable[Head]:
        return (head for jobs in self.queue.jobs.values() for head in jobs.since(0, len(jobs)))


@dataclass(slots=True)
class GateUse:
    """One gate over a whole simulation. Times are in microseconds."""

    limit: str
    key: tuple[str | None, ...]
    full: int = 0
    """For how long it had no room for one more."""
    held_up: int = 0
    """For how long it had none while jobs waited for it."""
    waited: int = 0
    """The same for every lane that waited, added up; a whole flow counts as one."""
    is_full: bool = False
    waiting: int = 0
    since: Instant = 0
    opens_at: Instant | None = None

    def advance(self, now: Instant) -> None:
        """Time has passed since it was last looked at."""
        # What opens by time was open from then on, whenever the next claim came.
        until = now if self.opens_at is None else min(now, self.opens_at)
        passed = max(0, until - self.since)
        if self.is_full:
            self.full += passed
            self.waited += self.waiting * passed
            if self.waiting:
                self.held_up += passed
        self.since = now


class Saturation:
    """Follows the gates from claim to claim."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._gates = {gate_id: GateUse(bound.name, ()) for gate_id, bound in policy.queue_gates}
        self._of_queue = list(self._gates.values())
        self._own: dict[bytes, Gate] = {}
        self._shared: dict[bytes, SharedGateRow] = {}
        """The two halves of shared gates, as they were last written."""
        self.full = 0
        """How many gates have no room."""

    def note(self, now: Instant, plan: Plan, *, is_held_up: bool) -> None:
        """A claim was made. `is_held_up`: jobs that are ready were left."""
        board = Board(self._policy, now, plan.queue)
        board.add_gates(plan.gates)
        self._add_shared(board, plan)
        for gate in board.gates.values():
            use = self._gates.get(gate.id)
            if use is None:
                use = self._gates[gate.id] = GateUse(gate.bound.name, tuple(gate.key))
            use.advance(now)
            # What opens by time is known to be shut only while somebody waits for it.
            is_known = gate.limit.counts_in_flight or gate.wake_at is not None
            self.full -= use.is_full
            use.is_full = is_known and gate.room(now) <= 0
            self.full += use.is_full
            use.waiting, use.opens_at = gate.waiting, gate.wake_at
        for use in self._of_queue:
            # Nobody is parked on a gate of the whole queue: whoever is ready while it is full waits for it.
            use.advance(now)
            use.waiting = int(is_held_up)

    def _add_shared(self, board: Board, plan: Plan) -> None:
        """Both halves of every shared gate of which one has changed."""
        self._shared.update((row.id, row) for row in plan.shared)
        self._own.update((gate.id, gate) for gate in board.gates.values() if gate.shared is not None)
        for row in plan.shared:
            bound, key = self._policy.bound_named(row.limit), tuple(row.key)
            if bound is not None:
                own = self._policy.gate_of(bound, key)
                board.add_gates([self._own[own]] if own in self._own else [])
                board.gate(own, bound, key)
        board.add_shared([self._shared[each] for each in board.shared if each in self._shared])

    def result(self, ended_at: Instant) -> list[GateUse]:
        """Every gate that was ever touched."""
        for use in self._gates.values():
            use.advance(ended_at)
        return list(self._gates.values())
