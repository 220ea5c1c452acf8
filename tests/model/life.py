"""One life of a queue, lived by a store and by the model at once.

Every step is a method with plain arguments, so that a sequence of steps that showed a fault can be written down and
lived again. After every step, the store and the model must tell the same of every job.

Which of the jobs that may start does start is the store's choice: between lanes there is a share, and no order. The
model follows it there. Nothing else is left to choose.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import timedelta
from functools import wraps
from typing import Any, Concatenate, Literal, ParamSpec
from uuid import UUID

import msgspec

from fairlane.clock import ManualClock
from fairlane.errors import DuplicateJob
from fairlane.job import BuiltEffects, Claim, NewJob, State
from fairlane.policy.unique import Conflict, OnReplayConflict, Unique, unique_key
from fairlane.scheduler.settlement import (
    Done,
    settle,
)
from fairlane.store import operators, records
from fairlane.store.operators import PURGE, REPLAY, RETRY, Handled, JobFilter
from fairlane.store.protocol import QueueCounts, Retention, Store
from tests.model.home import Home
from tests.model.model import Batch, Model, ModelJob
from tests.model.steps import POLICIES, QUEUE, Call, End, Tx
from tests.store.harness import ASKED_IN_VAIN, SECOND, claim_once, new_jobs, worker_named

__all__ = ["Life"]

P = ParamSpec("P")


@dataclass
class Held:
    """A claim in hand; it may have been lost since."""

    claim: Claim
    batch: Batch

    @property
    def job(self) -> UUID:
        return self.claim.id


def _step(
    method: Callable[Concatenate[Life, P], Coroutine[Any, Any, None]],
) -> Callable[Concatenate[Life, P], Coroutine[Any, Any, None]]:
    """What is taken by the store and by the model, and compared."""

    @wraps(method)
    async def taken(self: Life, /, *args: P.args, **kwargs: P.kwargs) -> None:
        given = [*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())]
        self.told.append(f"await life.{method.__name__}({', '.join(given)})")
        await method(self, *args, **kwargs)
        self.steps += 1
        await self.compare()

    return taken


@dataclass
class Life:
    home: Home
    clock: ManualClock
    family: str
    held: list[Held] = field(default_factory=list)
    steps: int = 0
    told: list[str] = field(default_factory=list)
    """The steps so far, as they are written in `lives_kept.py`."""
    batches: int = 0

    def __post_init__(self) -> None:
        self.model = Model(POLICIES[self.family][0])

    @property
    def now(self) -> int:
        return self.clock.now()

    @property
    def store(self) -> Store:
        return self.home.store

    async def begin(self) -> None:
        await self.home.open()
        await self.store.declare(self.model.policy)

    # Producers.

    @_step
    async def enqueue(self, calls: Sequence[Call], tx: Tx = "none") -> None:
        jobs = self._jobs(calls)
        # Nobody else can connect to a database in memory.
        is_lonely = self.home.database.kind == "sqlite-memory"
        if tx == "rolled back":
            if not is_lonely:
                await _enqueue_in_transaction(self.home, jobs, commit=False)
            return
        expected = self.model.enqueue(jobs, self.now)
        if tx == "none" or is_lonely:
            got = await _enqueue(self.store, jobs)
        else:
            got = await _enqueue_in_transaction(self.home, jobs, commit=True)
        if isinstance(expected, UUID):
            assert isinstance(got, UUID), f"the id {expected} was taken twice"
        else:
            assert got == expected

    @_step
    async def foresee(self, calls: Sequence[Call]) -> None:
        jobs = self._jobs(calls)
        expected = deepcopy(self.model).enqueue(jobs, self.now)
        if not isinstance(expected, UUID):  # a dry run looks at keys, not at ids
            assert await self.store.foresee(jobs) == expected

    def _jobs(self, calls: Sequence[Call]) -> list[NewJob]:
        return [self._job(call) for call in calls]

    def _job(self, call: Call) -> NewJob:
        keys = {"account": call.account, "endpoint": call.endpoint}
        (job,) = new_jobs(
            self.model.policy, keys, priority=call.priority, payload=b"%d" % call.payload, delay=call.delay
        )
        known = sorted([*self.model.jobs, *(each.id for each in self.model.removed)])
        if call.known is not None and known:
            job = msgspec.structs.replace(job, id=known[call.known % len(known)])
        if (key := call.unique) is not None:
            until: Literal["started", "done"] = "started" if key.until == "started" else "done"
            unique = Unique(
                key.name,
                until=until,
                window=8 if key.until == "window" else None,
                on_conflict=key.on_conflict,
                same_payload=key.same_payload,
            )
            job = msgspec.structs.replace(job, unique=unique_key(unique, job.task, (), {}, job.payload))
        return job

    # Workers.

    @_step
    async def claim(self, want: int = 1, seconds: int = 30, worker: int = 0) -> None:
        # No lease ends at a whole second: a reaper is never asked about the very instant.
        lease = timedelta(seconds=seconds, microseconds=7)
        self.batches += 1
        self.model.promote(self.now)
        claims, next_due = await self._claim_all(want, lease, f"worker:{worker}")
        expires_at = self.now + lease // timedelta(microseconds=1)
        self.model.started(claims, self.batches, f"worker:{worker}", expires_at, self.now)
        self.held += [Held(each, self.batches) for each in claims]
        if len(claims) == want:
            return
        assert self.model.left_behind(self.now) == [], "a job that no limit stops was left behind"
        opens_at = self.model.opens_at(self.now)
        if opens_at is not None:
            assert next_due is not None, f"something opens at {opens_at}, and nobody will look"
            assert next_due <= opens_at
        await self._check_counts()

    async def _claim_all(self, want: int, lease: timedelta, worker: str) -> tuple[list[Claim], int | None]:
        """Claim for as long as the store says that there is more; and when to look again."""
        claims: list[Claim] = []
        in_vain = 0
        while True:
            brought = await claim_once(self.store, QUEUE, want - len(claims), worker=worker_named(worker), lease=lease)
            claims += brought.claims
            if len(claims) == want or not brought.more:
                return claims, brought.next_due
            in_vain = 0 if brought.claims else in_vain + 1
            assert in_vain < ASKED_IN_VAIN, "the store promises more and brings nothing"

    async def _check_counts(self) -> None:
        """What the store has counted, once it has folded all that there was."""
        counts = await self.store.counts(QUEUE)
        ready, running = len(self.model.in_state(State.READY)), len(self.model.in_state(State.RUNNING))
        assert (counts.ready, counts.running, counts.events) == (ready, running, 0)
        assert await self.home.counted() == dict(self.model.in_flight()), "the gates count what does not run"

    @_step
    async def settle(self, ends: Sequence[End]) -> None:
        if not self.held:
            return
        # At most one claim of a job: the answer names jobs, and cannot tell a stale claim from a newer one of the same.
        picked = {self.held[end.which % len(self.held)].job: end for end in ends}
        chosen = [(self.held[end.which % len(self.held)], end) for end in picked.values()]
        await self._settle_plainly([each for each in chosen if not each[1].has_effects])
        for held, end in chosen:
            if end.has_effects:
                await self._settle_with_effects(held, end)
        for held, _ in chosen:
            await self._check_history(held.job)

    async def _settle_plainly(self, chosen: Sequence[tuple[Held, End]]) -> None:
        lost = {held.job for held, _ in chosen if not self.model.holds(held.job, held.batch)}
        settlements = [settle(held.claim, end.outcome, end.ran) for held, end in chosen]
        assert Counter(await self.store.settle(settlements)) == Counter(lost)
        for settlement in settlements:
            if settlement.job not in lost:
                self.model.settled(settlement, self.now)
        for held, _ in chosen:
            self.held.remove(held)

    async def _settle_with_effects(self, held: Held, end: End) -> None:
        effects = BuiltEffects(
            tuple(self._jobs(end.follow_ups)),
            {} if end.put is None else {f"key-{end.put}": b"%d" % self.steps},
            () if end.delete is None else (f"key-{end.delete}",),
        )

        settlement = settle(held.claim, Done(b"1", effects), end.ran)
        stands = self.model.holds(held.job, held.batch)
        after, refused = deepcopy(self.model), False
        if stands:
            after.settled(settlement, self.now)
            refused = isinstance(after.enqueue(effects.jobs, self.now), UUID)
            after.effects(effects)
        try:
            assert await self.store.settle([settlement]) == ([] if stands else [held.job])
        except DuplicateJob:
            assert refused, "effects were refused whose ids are free"
        else:
            assert not refused, "a follow-up was stored whose id is taken"
            self.model = after
            self.held.remove(held)
        await self._check_values()

    async def _check_values(self) -> None:
        assert dict(await self.store.run(records.scan_values("key-", "key.", 1_000))) == self.model.values

    async def _check_history(self, job: UUID) -> None:
        if job in self.model.jobs:
            outcomes = [each.outcome for each in await self.store.run(records.attempts(job))]
            running = ["running"] if self.model.jobs[job].state is State.RUNNING else []
            assert outcomes == self.model.jobs[job].history + running

    @_step
    async def renew(self, which: int = 0) -> None:
        if not self.held:
            return
        batch = self.held[which % len(self.held)].batch
        together = [each for each in self.held if each.batch == batch]
        standing = {each.job: each.claim.lease for each in together if self.model.holds(each.job, batch)}
        renewed = await self.store.renew(sorted({each.claim.lease for each in together}), timedelta(seconds=20))
        assert not {*standing.values()} & {*renewed.gone}, "a lease is gone that stands"
        asked = {job for job in standing if self.model.jobs[job].cancel_requested}
        assert asked <= {*renewed.cancelled}, "a cancellation was not told"
        held = await self.store.run(records.held([(each.job, each.claim.lease) for each in together]))
        assert Counter(held) == Counter(standing.keys())
        if standing:
            self.model.ends[batch] = self.now + 20 * SECOND

    # Time, and what happens by itself.

    @_step
    async def pass_time(self, microseconds: int) -> None:
        self.clock.set(self.now + microseconds)

    @_step
    async def reap(self) -> None:
        expected = self.model.expired(self.now)
        settled = (await self.store.reap()).settled
        assert Counter(each.job for each in settled) == Counter(expected)
        for each in settled:
            self.model.settled(each, self.now)
            await self._check_history(each.job)

    @_step
    async def prune(self, done: int = 0, dead: int = 0) -> None:
        retention = Retention(done=done, dead=dead)
        expected = self.model.past(retention, self.now)
        assert (await self.store.prune(retention)).jobs == len(expected)
        self.model.remove(expected)

    @_step
    async def collect(self, limit: int = 1_000) -> None:
        await self.store.collect(QUEUE, limit=limit)

    @_step
    async def crash(self) -> None:
        await self.home.crash()
        await self.store.declare(self.model.policy)

    # Operators.

    @_step
    async def apply(self, which: int) -> None:
        policies = POLICIES[self.family]
        policy = policies[which % len(policies)]
        await self.store.apply(policy)
        self.model.apply(policy, self.now)

    @_step
    async def cancel(self, which: int) -> None:
        jobs = list(self.model.jobs.values())
        if not jobs:
            return
        job = jobs[which % len(jobs)]
        expected = self.model.cancel(job, self.now)
        assert await self.store.cancel(job.new.id) is expected
        await self._check_history(job.new.id)

    @_step
    async def replay(
        self, which: Sequence[int], delay: int | None = None, on_conflict: OnReplayConflict = "reject"
    ) -> None:
        jobs = self._picked(which)
        before = [(job.new.id, job.state) for job in jobs]
        missing = UUID(int=7)
        ids = [*(job.new.id for job in jobs), missing]
        foreseen = await self.store.replay(ids, delay, on_conflict=on_conflict, dry_run=True)
        handled = await self.store.replay(ids, delay, on_conflict=on_conflict)
        ended = [job for job in jobs if REPLAY.applies_to(job.state)]
        back = {job.new.id for job in self.model.replay(ended, delay, on_conflict, self.now)}
        expected = [(job, state, job in back) for job, state in before] + [(missing, None, False)]
        assert [(each.job, each.was, each.skipped is None) for each in handled] == expected
        assert foreseen == handled, "a dry run has said something else"

    @_step
    async def purge(self, which: Sequence[int]) -> None:
        jobs = self._picked(which)
        gone = [job for job in jobs if PURGE.applies_to(job.state)]
        await self._check_handled(jobs, gone, lambda ids: self.store.run(operators.purge(ids)))
        self.model.remove(gone)

    @_step
    async def retry_now(self, which: Sequence[int]) -> None:
        # What is due already may have been promoted by whoever held the queue's lock.
        jobs = [job for job in self._picked(which) if job.due is None or job.due > self.now]
        hurried = [job for job in jobs if RETRY.applies_to(job.state)]
        await self._check_handled(jobs, hurried, lambda ids: self.store.run(operators.retry_now(ids)))
        for job in hurried:
            job.due = self.now

    def _picked(self, which: Sequence[int]) -> list[ModelJob]:
        jobs = list(self.model.jobs.values())
        return [jobs[each] for each in dict.fromkeys(each % len(jobs) for each in which)] if jobs else []

    async def _check_handled(
        self,
        jobs: Sequence[ModelJob],
        done: Sequence[ModelJob],
        act: Callable[[list[UUID]], Awaitable[list[Handled]]],
    ) -> None:
        missing = UUID(int=7)
        expected = [(job.new.id, job.state, job in done) for job in jobs] + [(missing, None, False)]
        handled = await act([*(job.new.id for job in jobs), missing])
        assert [(each.job, each.was, each.skipped is None) for each in handled] == expected

    # What must be so.

    async def compare(self) -> None:
        """The store and the model tell the same of every job."""
        page = await self.store.run(operators.find_jobs(JobFilter(queue=QUEUE), limit=10_000))
        found = {each.id: each for each in page.jobs}
        # Whoever holds the queue's lock may let due jobs join their lanes; the next claim must.
        self.model.promote(self.now, {job for job, record in found.items() if record.state is State.READY})
        assert found.keys() == self.model.jobs.keys()
        for job in self.model.jobs.values():
            assert found[job.new.id] == job.record

    async def come_to_rest(self) -> None:
        """Let everything that is left run; nothing is lost, and nothing is counted as running (A14)."""
        await self.apply(0)
        for _ in range(300):
            await self.claim(want=50)
            await self.settle([End(which) for which in range(len(self.held))])
            if all(job.state.is_final for job in self.model.jobs.values()):
                break
            await self.pass_time(2 * SECOND)
            await self.reap()
        assert [job for job in self.model.jobs.values() if not job.state.is_final] == []
        await self.claim(want=1)
        for job in self.model.jobs:
            await self._check_history(job)
        await self._check_values()
        assert await self.store.counts(QUEUE) == QueueCounts(ready=0, running=0, parked_lanes=0, events=0)
        assert await self.home.counted() == {}
        assert await self.home.keys_of_nobody() == []

    async def end(self) -> None:
        await self.home.database.close()


async def _enqueue(store: Store, jobs: Sequence[NewJob], tx: Any = None) -> dict[UUID, Conflict] | UUID:
    try:
        return await store.enqueue(jobs, tx=tx)
    except DuplicateJob as error:
        return error.job


async def _enqueue_in_transaction(home: Home, jobs: Sequence[NewJob], *, commit: bool) -> dict[UUID, Conflict] | UUID:
    async with home.database.transaction() as producer:
        answer = await _enqueue(home.store, jobs, producer.tx)
        # A statement that failed has ended the transaction on PostgreSQL; on SQLite it goes on without it.
        if commit and not (isinstance(answer, UUID) and home.database.kind == "postgres"):
            await producer.commit()
        else:
            await producer.rollback()
    return answer
