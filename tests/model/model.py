"""A queue that is too simple to be wrong: jobs, keys and values in dictionaries, limits counted from what runs.

It does not schedule. It says what a store may have started, what it must have started, when it has to look again, and
what every other action makes of every job.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from fairlane.clock import Instant
from fairlane.job import BuiltEffects, Claim, JobRecord, NewJob, Outcome, State, UniqueKey, Until
from fairlane.policy import Concurrency, Limit, Policy, Rate
from fairlane.policy.policy import BoundLimit
from fairlane.policy.unique import Conflict, OnReplayConflict
from fairlane.scheduler.settlement import Settlement
from fairlane.store.protocol import Retention

__all__ = ["Batch", "Model", "ModelJob"]


def plain(limit: Limit) -> Concurrency | Rate:
    """A limit whose state is a count or an instant: those that the model knows."""
    assert isinstance(limit, Concurrency | Rate)
    return limit


def room_of(limit: Limit, in_flight: int, tat: Instant, now: Instant) -> int:
    """How many jobs it lets start, given how many run and, for a rate, the arrival time of GCRA."""
    own = plain(limit)
    return max(0, own.max - in_flight) if isinstance(own, Concurrency) else own.room(tat, now)


def charged(limit: Limit, tat: Instant, at: Instant) -> Instant:
    return limit.charged(tat, at, 1) if isinstance(limit, Rate) else tat


def carried_over(limit: Limit, tat: Instant, now: Instant) -> Instant:
    return limit.carried_over(tat, now) if isinstance(limit, Rate) else tat


Batch = int
"""What was claimed in one step. Each store has its own leases for it; they end at the same time."""


@dataclass
class ModelJob:
    new: NewJob
    state: State
    order: int
    """Its place in its lane: when it joined it last."""
    due: Instant | None = None
    attempt: int = 0
    batch: Batch | None = None
    has_started: bool = False
    cancel_requested: bool = False
    replays: int = 0
    enqueued_at: Instant = 0
    claimed_at: Instant | None = None
    finished_at: Instant | None = None
    worker: str | None = None
    error: str | None = None
    result: bytes | None = None
    history: list[str] = field(default_factory=list)
    """How each of its runs ended."""

    @property
    def waits(self) -> bool:
        return self.state < State.RUNNING

    @property
    def record(self) -> JobRecord:
        """What a store must tell of it."""
        return JobRecord(
            id=self.new.id,
            queue=self.new.queue,
            task=self.new.task,
            state=self.state,
            priority=self.new.priority,
            keys=self.new.keys,
            payload=self.new.payload,
            attempt=self.attempt,
            max_attempts=self.new.max_attempts,
            enqueued_at=self.enqueued_at,
            due_at=self.due,
            claimed_at=self.claimed_at,
            finished_at=self.finished_at,
            worker=self.worker,
            error=self.error,
            result=self.result,
            progress=None,
            progress_message=None,
            cancel_requested=self.cancel_requested,
            replays=self.replays,
        )

    def end(self, state: State, now: Instant) -> None:
        self.state, self.due, self.finished_at, self.batch = state, None, now, None

    def cancel_waiting(self, reason: str | None, now: Instant) -> None:
        """No run ended it: the last one, if any, is history."""
        self.end(State.CANCELLED, now)
        self.cancel_requested, self.error = True, reason
        self.claimed_at = self.worker = None


@dataclass
class Taken:
    """Who took a unique key last."""

    job: UUID
    key: UniqueKey
    expires_at: Instant | None


@dataclass
class Model:
    policy: Policy
    jobs: dict[UUID, ModelJob] = field(default_factory=dict)
    removed: list[NewJob] = field(default_factory=list)
    uniques: dict[bytes, Taken] = field(default_factory=dict)
    values: dict[str, bytes] = field(default_factory=dict)
    tokens: dict[bytes, Instant] = field(default_factory=dict)
    """The theoretical arrival time of each rate's gate if nothing given back were refunded: the latest it can be."""
    starts: dict[bytes, list[tuple[Instant, UUID, Batch]]] = field(default_factory=dict)
    """When, and by which claim, a job passed each rate's gate; what was given back unstarted is taken out again."""
    bases: dict[bytes, Instant] = field(default_factory=dict)
    """What a gate brought along from an earlier policy."""
    ends: dict[Batch, Instant] = field(default_factory=dict)
    places: int = 0

    def in_state(self, state: State) -> list[ModelJob]:
        return [job for job in self.jobs.values() if job.state is state]

    # Producers.

    def enqueue(self, batch: Sequence[NewJob], now: Instant) -> dict[UUID, Conflict] | UUID:
        """What becomes of jobs that are enqueued together: the conflicts, or an id that is taken, and nothing else."""
        conflicts: dict[UUID, Conflict] = {}
        fresh: list[NewJob] = []
        taken = dict(self.uniques)
        replaced: dict[UUID, UUID] = {}
        ours: set[bytes] = set()
        for new in batch:
            last = taken.get(new.unique.id) if new.unique is not None else None
            if last is not None and last.job == new.id and (new.id in self.jobs or _has(fresh, new.id)):
                return new.id
            if last is not None and self._holds(last, fresh, now):
                conflict = self._conflict(last, new, fresh)
                if conflict is not None:
                    conflicts[new.id] = conflict
                    if conflict.outcome is not Outcome.REPLACED:
                        continue
                    if last.key.id in ours:
                        # Both came together: the first was never there, and whatever it stood for goes for the last.
                        fresh = [each for each in fresh if each.id != last.job]
                        conflicts[last.job] = Conflict(Outcome.DUPLICATE, new.id)
                        for other, met in conflicts.items():
                            if met.holder == last.job and not met.outcome.is_stored:
                                conflicts[other] = Conflict(met.outcome, new.id, met.differs)
                        replaced = {old: new.id if by == last.job else by for old, by in replaced.items()}
                    else:
                        replaced[last.job] = new.id
            fresh.append(new)
            if new.unique is not None:
                taken[new.unique.id] = Taken(new.id, new.unique, new.unique.expires_at(now))
                ours.add(new.unique.id)
        named = Counter(new.id for new in fresh)
        for new in fresh:
            if new.id in self.jobs or named[new.id] > 1:
                return new.id
        self.uniques = taken
        for old, by in replaced.items():
            self.jobs[old].cancel_waiting(f"replaced by job {by}", now)
        for new in fresh:
            self.jobs[new.id] = self._joining(new, now)
        return conflicts

    def _joining(self, new: NewJob, now: Instant) -> ModelJob:
        is_later = new.delay is not None and new.delay > 0
        job = ModelJob(new, State.SCHEDULED if is_later else State.READY, self._next_place(), enqueued_at=now)
        job.due = now + (new.delay or 0) if is_later else None
        return job

    def _next_place(self) -> int:
        self.places += 1
        return self.places

    def _holds(self, last: Taken, fresh: Sequence[NewJob], now: Instant) -> bool:
        """Whether whoever took a key last still has it."""
        if last.key.until is Until.WINDOW:
            return last.expires_at is not None and last.expires_at > now
        if _has(fresh, last.job):
            return True
        job = self.jobs.get(last.job)
        if job is None or job.state.is_final:
            return False
        return not (last.key.until is Until.STARTED and job.has_started)

    def _conflict(self, holder: Taken, new: NewJob, fresh: Sequence[NewJob]) -> Conflict | None:
        assert new.unique is not None
        if new.unique.same_payload and holder.key.digest != new.unique.digest:
            return Conflict(Outcome.REFUSED, holder.job, differs=True)
        match new.unique.on_conflict:
            case "return":
                return Conflict(Outcome.DUPLICATE, holder.job)
            case "reject":
                return Conflict(Outcome.REFUSED, holder.job)
            case "replace":
                job = self.jobs.get(holder.job)
                waits = _has(fresh, holder.job) or (job is not None and job.waits)
                return Conflict(Outcome.REPLACED, holder.job) if waits else None

    # Claims.

    def promote(self, now: Instant, only: Collection[UUID] | None = None) -> None:
        """Jobs that are due join their lanes at the end, in the order of their times."""
        due = [
            job
            for job in self.in_state(State.SCHEDULED)
            if job.due is not None and job.due <= now and (only is None or job.new.id in only)
        ]
        for job in sorted(due, key=lambda each: (each.due, each.order)):
            job.state, job.due, job.order = State.READY, None, self._next_place()

    def started(self, claims: Iterable[Claim], batch: Batch, worker: str, expires_at: Instant, now: Instant) -> None:
        """Check one claim of a store, job by job, in its order."""
        for claim in claims:
            job = self.jobs[claim.id]
            assert job.state is State.READY, f"{claim.id} was {job.state} and was started"
            assert (claim.attempt, claim.claimed_at) == (job.attempt + 1, now)
            self._check_order(job)
            for gate, bound in self._gates(job.new):
                room = room_of(bound.limit, self._in_flight(gate), self._replayed(gate, bound), now)
                assert room > 0, f"{bound.limit!r} was exceeded by {claim.id} {claim.keys}"
            for gate, bound in self._gates(job.new):
                self.tokens[gate] = charged(bound.limit, self.tokens.get(gate, 0), now)
                self.starts.setdefault(gate, []).append((now, claim.id, batch))
            job.state, job.attempt, job.batch, job.has_started = State.RUNNING, claim.attempt, batch, True
            job.claimed_at, job.worker = now, worker
            self.ends[batch] = expires_at

    def _check_order(self, job: ModelJob) -> None:
        ahead = [
            other for other in self.in_state(State.READY) if other.new.lane == job.new.lane and other.order < job.order
        ]
        assert not ahead, f"{job.new.id} was started before {ahead[0].new.id}, which is ahead of it in its lane"

    def left_behind(self, now: Instant) -> list[ModelJob]:
        """Jobs that are ready and that no limit stops."""
        return [
            job
            for job in self.in_state(State.READY)
            if all(self._room(gate, bound, now) > 0 for gate, bound in self._gates(job.new))
        ]

    def opens_at(self, now: Instant) -> Instant | None:
        """The first instant at which a job can start although nothing is enqueued or released."""
        times = [job.due for job in self.in_state(State.SCHEDULED) if job.due is not None]
        for job in self.in_state(State.READY):
            shut = [(gate, bound) for gate, bound in self._gates(job.new) if self._room(gate, bound, now) <= 0]
            if not any(bound.limit.counts_in_flight for _, bound in shut):
                rates = [(gate, bound.limit) for gate, bound in shut if isinstance(bound.limit, Rate)]
                times.append(max((rate.opens_at(self.tokens.get(gate, 0)) or now for gate, rate in rates), default=now))
        return min(times, default=None)

    def in_flight(self) -> Counter[bytes]:
        """What each gate that counts must say once all lane events are folded."""
        return Counter(
            gate
            for job in self.in_state(State.RUNNING)
            for gate, bound in self._gates(job.new)
            if bound.limit.counts_in_flight
        )

    def holds(self, job: UUID, batch: Batch) -> bool:
        """Whether a claim still stands."""
        return job in self.jobs and self.jobs[job].batch == batch

    def settled(self, settlement: Settlement, now: Instant) -> None:
        job = self.jobs[settlement.job]
        assert job.state is State.RUNNING
        if settlement.unstarted:
            for gate, bound in self._gates(job.new):
                known = self.starts.setdefault(gate, [])
                self.starts[gate] = [each for each in known if each[1:] != (settlement.job, job.batch)]
                if len(self.starts[gate]) == len(known) and isinstance(bound.limit, Rate):
                    # It started under another policy; at most, all that it took comes back.
                    self.bases[gate] = bound.limit.refunded(self.bases.get(gate, 0), 1)
        job.attempt -= 0 if settlement.counts_attempt else 1
        job.result, job.error = settlement.result, settlement.error
        if settlement.to.is_final:
            job.history.append(settlement.outcome)
            job.end(settlement.to, now)
        elif job.cancel_requested:
            job.history.append("cancelled")
            job.end(State.CANCELLED, now)
        else:
            job.history.append(settlement.outcome)
            job.state, job.batch = settlement.to, None
            job.due = now + (settlement.delay or 0) if settlement.to is State.SCHEDULED else None

    def effects(self, effects: BuiltEffects) -> None:
        for key in effects.deletes:
            self.values.pop(key, None)
        self.values |= effects.puts

    def expired(self, now: Instant) -> set[UUID]:
        """The jobs that a reaper must take back."""
        running = self.in_state(State.RUNNING)
        return {job.new.id for job in running if job.batch is not None and self.ends[job.batch] <= now}

    # Operators.

    def cancel(self, job: ModelJob, now: Instant) -> State:
        """The state that it is in then."""
        if job.state.is_final:
            return job.state
        if job.waits:
            job.cancel_waiting(None, now)
        job.cancel_requested = True
        return job.state

    def replay(
        self, jobs: Sequence[ModelJob], delay: int | None, on_conflict: OnReplayConflict, now: Instant
    ) -> list[ModelJob]:
        """As if they had just been enqueued, in the order of their ids, but for those whose key is held. Returned are
        those that came back."""
        back: list[ModelJob] = []
        for job in sorted(jobs, key=lambda each: each.new.id):
            if job.new.unique is not None and not self._asks_again(job, on_conflict, back, now):
                continue
            back.append(job)
            fresh = self._joining(job.new, now)
            fresh.state = State.SCHEDULED if delay else State.READY
            fresh.due = now + delay if delay else None
            fresh.replays, fresh.history, fresh.enqueued_at = job.replays + 1, job.history, job.enqueued_at
            self.jobs[job.new.id] = fresh
        return back

    def _asks_again(self, job: ModelJob, on_conflict: OnReplayConflict, back: Sequence[ModelJob], now: Instant) -> bool:
        """Whether the key of a job that is to come back is its own again."""
        key = job.new.unique
        assert key is not None
        last = self.uniques.get(key.id)
        if last is not None and last.job == job.new.id and last.expires_at is not None and last.expires_at > now:
            return True
        if last is not None and last.job != job.new.id:
            holder = self.jobs.get(last.job)
            is_alive = holder is not None and not holder.state.is_final
            if self._holds(last, (), now) or (key.until is Until.WINDOW and is_alive):
                if holder is None or on_conflict == "reject" or not holder.waits:
                    return False
                if any(each.new.id == last.job for each in back):
                    return False
                holder.cancel_waiting(f"replaced by job {job.new.id}", now)
        self.uniques[key.id] = Taken(job.new.id, key, None)
        return True

    def remove(self, jobs: Iterable[ModelJob]) -> None:
        for job in jobs:
            self.removed.append(self.jobs.pop(job.new.id).new)

    def past(self, retention: Retention, now: Instant) -> list[ModelJob]:
        """What pruning must remove."""
        kept = {State.DONE: retention.done, State.CANCELLED: retention.done, State.DEAD: retention.dead}
        return [
            job
            for job in self.jobs.values()
            if job.finished_at is not None and job.finished_at <= now - kept[job.state]
        ]

    def apply(self, policy: Policy, now: Instant) -> None:
        """A limit that goes takes its tokens with it; what runs is counted again by looking."""
        bases = {gate: self._replayed(gate, bound) for new in self._ever() for gate, bound in self._gates(new)}
        tokens, self.policy = self.tokens, policy
        # A gate's name holds its limit's: one that both policies know is found again, with what it has spent.
        now_known = {gate: plain(bound.limit) for new in self._ever() for gate, bound in self._gates(new)}
        self.bases = {gate: carried_over(limit, bases.get(gate, 0), now) for gate, limit in now_known.items()}
        self.tokens = {gate: carried_over(limit, tokens.get(gate, 0), now) for gate, limit in now_known.items()}
        self.starts = {}

    def _ever(self) -> Iterator[NewJob]:
        """Every job there was: what it spent at a gate stays spent when it is removed."""
        yield from (job.new for job in self.jobs.values())
        yield from self.removed

    def _room(self, gate: bytes, bound: BoundLimit, now: Instant) -> int:
        return room_of(bound.limit, self._in_flight(gate), self.tokens.get(gate, 0), now)

    def _replayed(self, gate: bytes, bound: BoundLimit) -> Instant:
        """The theoretical arrival time, counted again from what was really started."""
        tat = self.bases.get(gate, 0)
        for at, _, _ in self.starts.get(gate, ()):
            tat = charged(bound.limit, tat, at)
        return tat

    def _in_flight(self, gate: bytes) -> int:
        return sum(gate in (own for own, _ in self._gates(job.new)) for job in self.in_state(State.RUNNING))

    def _gates(self, new: NewJob) -> Iterator[tuple[bytes, BoundLimit]]:
        yield from self.policy.gates_of(new.priority, new.lane_keys)
        yield from self.policy.queue_gates


def _has(jobs: Sequence[NewJob], job: UUID) -> bool:
    return any(each.id == job for each in jobs)
