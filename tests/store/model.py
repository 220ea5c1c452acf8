"""A queue that is too simple to be wrong: jobs in a dictionary, limits counted from what runs.

It does not schedule. It says what a store may have started, what it must have started, and when it has to look again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from uuid import UUID

from fairlane.clock import Instant
from fairlane.job import Claim, JobRecord, NewJob, State
from fairlane.policy import Concurrency, Limit, Policy, Rate
from fairlane.policy.policy import BoundLimit
from fairlane.scheduler.settlement import Settlement

__all__ = ["ModelJob", "ModelQueue", "plain"]


def plain(limit: Limit) -> Concurrency | Rate:
    """A limit whose state is a count or an instant: those that the model knows."""
    assert isinstance(limit, Concurrency | Rate)
    return limit


@dataclass
class ModelJob:
    new: NewJob
    state: State
    due: Instant = 0
    attempt: int = 0
    lease: UUID | None = None
    order: int = 0
    """Its place in its lane, as long as it has never been put off."""
    was_put_off: bool = False


@dataclass
class ModelQueue:
    policy: Policy
    jobs: dict[UUID, ModelJob] = field(default_factory=dict)
    tokens: dict[bytes, Instant] = field(default_factory=dict)
    """The theoretical arrival time of each rate's gate if nothing given back were refunded: the latest it can be."""
    starts: dict[bytes, list[tuple[Instant, UUID, UUID]]] = field(default_factory=dict)
    """When, and by which claim, a job passed each rate's gate; what was given back unstarted is taken out again."""
    bases: dict[bytes, Instant] = field(default_factory=dict)
    """What a gate brought along from an earlier policy."""
    leases: dict[UUID, Instant] = field(default_factory=dict)

    def enqueue(self, new: NewJob, now: Instant) -> None:
        put_off = new.delay is not None and new.delay > 0
        job = ModelJob(new, State.SCHEDULED if put_off else State.READY, order=len(self.jobs), was_put_off=put_off)
        job.due = now + (new.delay or 0)
        self.jobs[new.id] = job

    def in_state(self, state: State) -> list[ModelJob]:
        return [job for job in self.jobs.values() if job.state is state]

    def promote(self, now: Instant) -> None:
        for job in self.in_state(State.SCHEDULED):
            if job.due <= now:
                job.state = State.READY

    def started(self, claims: Iterable[Claim], expires_at: Instant, now: Instant) -> None:
        """Check one claim of a store, job by job, in its order."""
        for claim in claims:
            job = self.jobs[claim.id]
            assert job.state is State.READY, f"{claim.id} was {job.state} and was started"
            assert claim.attempt == job.attempt + 1
            self._check_order(job)
            for gate, bound in self._gates(job):
                room = plain(bound.limit).room(self._in_flight(gate), self._replayed(gate, bound), now)
                assert room > 0, f"{bound.limit!r} was exceeded by {claim.id} {claim.keys}"
            for gate, bound in self._gates(job):
                self.tokens[gate] = plain(bound.limit).charged(self.tokens.get(gate, 0), now, 1)
                self.starts.setdefault(gate, []).append((now, claim.id, claim.lease))
            job.state, job.attempt, job.lease = State.RUNNING, claim.attempt, claim.lease
            self.leases[claim.lease] = expires_at

    def _check_order(self, job: ModelJob) -> None:
        if job.was_put_off:
            return
        ahead = [
            other
            for other in self.in_state(State.READY)
            if other.new.lane == job.new.lane and not other.was_put_off and other.order < job.order
        ]
        assert not ahead, f"{job.new.id} was started before {ahead[0].new.id}, which is ahead of it in its lane"

    def left_behind(self, now: Instant) -> list[ModelJob]:
        """Jobs that are ready and that no limit stops."""
        return [
            job
            for job in self.in_state(State.READY)
            if all(self._room(gate, bound, now) > 0 for gate, bound in self._gates(job))
        ]

    def opens_at(self, now: Instant) -> Instant | None:
        """The first instant at which a job can start although nothing is enqueued or released."""
        times = [job.due for job in self.in_state(State.SCHEDULED)]
        for job in self.in_state(State.READY):
            shut = [(gate, bound) for gate, bound in self._gates(job) if self._room(gate, bound, now) <= 0]
            if not any(bound.limit.counts_in_flight for _, bound in shut):
                times += [max(plain(bound.limit).opens_at(self.tokens.get(gate, 0)) or now for gate, bound in shut)]
        return min(times, default=None)

    def settled(self, settlement: Settlement, now: Instant) -> None:
        job = self.jobs[settlement.job]
        assert job.state is State.RUNNING
        if settlement.unstarted:
            for gate, bound in self._gates(job):
                known = self.starts.setdefault(gate, [])
                self.starts[gate] = [each for each in known if each[1:] != (settlement.job, settlement.lease)]
                if len(self.starts[gate]) == len(known):
                    # It started under another policy; at most, all that it took comes back.
                    self.bases[gate] = plain(bound.limit).refunded(self.bases.get(gate, 0), 1)
        job.state, job.lease = settlement.to, None
        job.attempt -= 0 if settlement.counts_attempt else 1
        if settlement.to is State.SCHEDULED:
            job.due = now + (settlement.delay or 0)
            job.was_put_off = True

    def replayed(self, job: ModelJob, delay: int | None, now: Instant) -> None:
        """As if it had just been enqueued, but behind everything that has been in its lane."""
        job.state = State.SCHEDULED if delay else State.READY
        job.due, job.attempt, job.was_put_off = now + (delay or 0), 0, True

    def adopt(self, record: JobRecord) -> None:
        """Take over what the store decided where it is free to decide: a cancelled job may be ended at once."""
        assert record.state in (self.jobs[record.id].state, State.CANCELLED)
        self.jobs[record.id].state = record.state

    def expired(self, now: Instant) -> set[UUID]:
        """The jobs that a reaper must take back."""
        return {
            job.new.id for job in self.in_state(State.RUNNING) if job.lease is not None and self.leases[job.lease] < now
        }

    def apply(self, policy: Policy, now: Instant) -> None:
        """A limit that goes takes its tokens with it; what runs is counted again by looking."""
        bases = {gate: self._replayed(gate, bound) for job in self.jobs.values() for gate, bound in self._gates(job)}
        tokens, self.policy = self.tokens, policy
        # A gate's name holds its limit's: one that both policies know is found again, with what it has spent.
        now_known = {gate: plain(bound.limit) for job in self.jobs.values() for gate, bound in self._gates(job)}
        self.bases = {gate: limit.carried_over(bases.get(gate, 0), now) for gate, limit in now_known.items()}
        self.tokens = {gate: limit.carried_over(tokens.get(gate, 0), now) for gate, limit in now_known.items()}
        self.starts = {}

    def _room(self, gate: bytes, bound: BoundLimit, now: Instant) -> int:
        return plain(bound.limit).room(self._in_flight(gate), self.tokens.get(gate, 0), now)

    def _replayed(self, gate: bytes, bound: BoundLimit) -> Instant:
        """The theoretical arrival time, counted again from what was really started."""
        tat = self.bases.get(gate, 0)
        for at, _, _ in self.starts.get(gate, ()):
            tat = plain(bound.limit).charged(tat, at, 1)
        return tat

    def _in_flight(self, gate: bytes) -> int:
        return sum(gate in (own for own, _ in self._gates(job)) for job in self.in_state(State.RUNNING))

    def _gates(self, job: ModelJob) -> Iterator[tuple[bytes, BoundLimit]]:
        yield from self.policy.gates_of(job.new.priority, job.new.lane_keys)
        yield from self.policy.queue_gates
