"""What every store does. The contract suite in `tests/store` is the definition; this is its shape.

Stores load and write. What may run, what a claim costs and how it ends is decided in `policy` and `scheduler`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar
from uuid import UUID, uuid4

import msgspec

from fairlane.clock import Instant, microseconds
from fairlane.errors import InvalidPolicy
from fairlane.job import Claim, JobRecord, NewJob, State
from fairlane.policy.overrides import Override, OverrideChange
from fairlane.policy.partitions import as_divided
from fairlane.policy.policy import Policy
from fairlane.policy.unique import NO_KEYS, Conflict, Holder, OnReplayConflict
from fairlane.scheduler.settlement import DISPATCHER, Settlement
from fairlane.scheduler.snapshot import Pace
from fairlane.store import operators, policies, records, stats_sums, upkeep
from fairlane.store.audit import Note
from fairlane.store.boards import QueueTime
from fairlane.store.health import Health
from fairlane.store.operators import Handled
from fairlane.store.procedures import Procedure, Work
from fairlane.store.records import QueueCounts as QueueCounts
from fairlane.store.rows import Declared
from fairlane.store.stats import Moment, of_one_moment
from fairlane.store.stats_values import AddedUp
from fairlane.store.upkeep import Pruned as Pruned
from fairlane.store.upkeep import Retention as Retention

T = TypeVar("T")

FOLD_AT_MOST = 1_000
"""Arrival events folded by one claim: activating a lane has a cost, and releases must not wait behind a flood."""
RELEASES_AT_MOST = 4_000
"""Release events folded by one claim."""
PROMOTE_AT_MOST = 1_000
"""Scheduled jobs that one claim makes ready."""
LANES_PER_SCANNED_FLOW = 2
LAST_CLAIMS = 5_000
"""Claims that are added up together when a worker stops."""
EVER = 1 << 62
AT_CHECKPOINT = 1_000
"""Claims that may wait for a worker to add them up before a claimer does. Workers do so every few seconds."""


Landings = dict[UUID, dict[UUID, Conflict]]
"""By job that is done, what its follow-ups have met, as `Store.enqueue` returns it."""


class WorkerIdentity(msgspec.Struct, frozen=True):
    """A worker process: `id` is random, `name` is for people (`host:pid`)."""

    id: UUID
    name: str

    @classmethod
    def of_dispatcher(cls, name: str) -> WorkerIdentity:
        """One that hands its jobs to an engine and runs none. It goes wherever an id goes: in the id itself."""
        return cls(UUID(int=uuid4().int & ~(0xF << 76) | DISPATCHER << 76), name)


class Claimed(msgspec.Struct, frozen=True):
    """What one claim brought, in the order in which the plan started them."""

    claims: list[Claim]
    lease: UUID
    next_due: Instant | None
    """When something opens by itself: a scheduled job, a rate, a lease's end. `None`: nothing in sight."""
    more: bool
    """Work that could start was left behind, or lane events were not all folded: claim again at once if slots are
    free."""
    look_again: bool
    """The waiter was registered while a producer's transaction may have been open: claim again shortly."""
    vtime: float | None = None
    """The queue's virtual time, once these jobs have started. `None`: somebody else has claimed for us."""
    is_limited: bool | None = None
    """The queue has limits: what is claimed and has not started holds slots and tokens. `None`: as far as is known."""
    folded: int = 0
    """Lane events that this claim has folded."""
    at: Instant = 0
    """Queue time of the claim; 0: not known."""
    paces: dict[UUID, Pace] = {}
    """Of jobs that pass a smooth rate, when each may start."""
    terms: object = None
    """What it was claimed by, the same object for as long as nobody changes the policy. `None`: not known."""
    opens_by_ends: bool | None = None
    """Whether the end of a job may let another of this queue start. `None`: as far as is known."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody wants of a claim: see `Store.claim`."""

    want: Callable[[], int]
    worker: WorkerIdentity
    lease: timedelta
    listener: Listener | None = None
    start_lag: int = 0
    ahead: int | None = None
    others: Sequence[str] = ()
    chose: Callable[[Choice], None] | None = None


class Choice(msgspec.Struct, frozen=True):
    """Of which queue a claim has the lock, and how far it was before."""

    queue: str
    taken: frozenset[str]
    """Those whose lock was taken: another process claims there now."""
    vtimes: dict[str, float]
    """The virtual times of all that were to choose from."""


class Adopted(msgspec.Struct, frozen=True):
    """A claim that has passed from one process to another."""

    claim: Claim
    """With its new lease."""
    at: QueueTime


class Looked(msgspec.Struct, frozen=True):
    """What a look at a queue found. Nothing was started."""

    claimable: int
    """Jobs that could start now, as far as was asked."""
    now: Instant
    """The store's time of the look."""
    next_due: Instant | None
    """As in `Claimed`."""
    look_again: bool
    """Something may have been missed: lane events that were not all folded, a producer's open transaction."""


class Renewed(msgspec.Struct, frozen=True):
    """What a renewal found."""

    gone: list[UUID]
    """Leases that no longer exist: whatever ran under them is lost, and must stop."""
    cancelled: list[UUID]
    """Jobs of these leases whose cancellation was asked for."""


class Reaped(msgspec.Struct, frozen=True):
    """What the reaper did."""

    settled: list[Settlement]
    next_due: Instant | None
    """When the next lease runs out, as far as is known now."""
    tasks: dict[UUID, str] = {}
    """The task of each job."""


class Listener(Protocol):
    """A worker's listener, one per process: it hears what concerns the queues it waits for and the jobs it runs."""

    async def wait(self, until: Instant | None) -> bool:
        """Return True at a nudge (work to claim, a job to cancel, a schedule to fire), False once `until` has come."""
        ...

    def schedules_changed(self) -> bool:
        """Whether an operator has resumed or triggered a schedule since this was last asked: that is a nudge too."""
        ...

    async def close(self) -> None:
        """Stop listening and withdraw from every queue it was registered for."""
        ...


class Store(Protocol):
    """A durable home for jobs. Every method is one transaction, or says otherwise."""

    async def run(self, work: Work[T], tx: Any = None) -> T:
        """Carry out a procedure: whatever is asked and done beside the life of a job. With the caller's transaction
        `tx`, within that."""
        ...

    async def job(self, job: UUID) -> JobRecord:
        """The job as it stands, or `JobNotFound`."""
        return await self.run(records.job(job))

    async def open(self) -> None:
        """Connect and check the schema (`SchemaOutOfDate`, `SchemaTooNew`)."""
        ...

    async def close(self) -> None: ...

    async def migrate(self) -> list[str]:
        """Bring the schema up to date; safe from many processes at once. Returns the names of what was applied."""
        ...

    async def now(self) -> Instant:
        """Queue time, which limits, leases and due times are measured by. It never goes back (see `boards.py`)."""
        return (await self.time()).now

    async def time(self) -> QueueTime:
        """Queue time, and the clock that schedules and times of day go by."""
        ...

    async def keep_time(self) -> QueueTime:
        """The same, stored: if the clock is set back, queue time goes on from here. So it does from claims, renewals
        and workers' reports."""
        ...

    async def declare(self, policy: Policy) -> Declared:
        """Make a queue known. The first declaration is stored; whether a later one wins is the store's rule: here it is
        drift, and the stored one wins. The number of partitions, and the keys that divide it, are never changed by it:
        the rest applies to those stored."""
        return await self._declared(policy)

    async def apply(self, policy: Policy, note: Note | None = None, *, accept_missing_keys: bool = False) -> Declared:
        """Put a policy in force, divided as the queue is divided. Lanes, flows and gates are rebuilt from what is in
        flight; every lane is woken.

        Overrides stay as they are. `InvalidPolicy` where waiting jobs lack a key that it looks at, unless that is
        accepted.
        """
        declared = await self._declared(policy, note)
        if declared.is_drift:
            replacing = policies.replace(policy.queue, policy, note, accept_missing_keys=accept_missing_keys)
            declared = await self.run(replacing)
            await self._add_all_up(policy.queue)
        return declared

    async def _declared(self, policy: Policy, note: Note | None = None) -> Declared:
        found = await self.policy(policy.queue)
        # A queue that shares limits is asked about even where it is known: others may not agree with it any more.
        if found is None or policy.shared_limits:
            await self.run(policies.insert(policy if found is None else as_divided(found.policy, policy), note))
        if found is None:
            found = await self.policy(policy.queue)
            assert found is not None
        try:
            is_drift = found.policy.digest != as_divided(found.policy, policy).digest
        except InvalidPolicy:
            is_drift = True
        return Declared(found.policy, found.version, is_drift)

    async def count_ready(self, policy: Policy, gates: Sequence[bytes], tx: Any = None) -> dict[bytes, int]:
        """How many jobs are ready, by these gates of a queue's backlogs, with those that no claim has seen yet.

        With the caller's transaction, its own jobs are among them. It scans no backlog: lane events that have piled up
        are folded, as a claim would.
        """
        counts, is_partial = await self.run(records.count_ready(policy, gates), tx)
        if is_partial:
            await self.run(upkeep.fold(policy.queue), tx)
            counts, _ = await self.run(records.count_ready(policy, gates), tx)
        return counts

    async def policy(self, queue: str) -> Declared | None:
        """The policy in force, with what operators have changed."""
        return await self.run(policies.in_force(queue))

    async def change_overrides(
        self, queues: Sequence[str], put: Sequence[Override], remove: Sequence[str], note: Note
    ) -> list[OverrideChange]:
        """Set and remove overrides: see `policies.change_overrides`."""
        return await self.run(policies.change_overrides(queues, put, remove, note))

    async def enqueue(
        self, jobs: Sequence[NewJob], tx: Any = None, progress: Callable[[int], None] | None = None
    ) -> dict[UUID, Conflict]:
        """Store jobs and append the events of their lanes; durable on return, or with the caller's transaction `tx`.

        All or none: `DuplicateJob` if one has an id that a job has already. A store that tries again after a lost
        connection knows its own jobs, and stores them once. Returned is what met a unique key that another job holds,
        by the id of the new one; each is decided as if it were enqueued alone. `progress` is called with how many are
        stored.
        """
        ...

    async def foresee(self, jobs: Sequence[NewJob]) -> dict[UUID, Conflict]:
        """What `enqueue` would return for these jobs now. Looking changes nothing."""
        ...

    async def claim(
        self,
        queue: str,
        want: Callable[[], int],
        *,
        worker: WorkerIdentity,
        lease: timedelta,
        listener: Listener | None = None,
        start_lag: int = 0,
        ahead: int | None = None,
        others: Sequence[str] = (),
        chose: Callable[[Choice], None] | None = None,
    ) -> Claimed:
        """Start up to `want()` jobs, asked once the lock is held. No two callers ever get the same job, and no limit is
        ever exceeded. Due jobs are promoted first. With a listener: it is registered when slots stay free.

        `start_lag` is how many microseconds after the claim its jobs will have started: rates are kept by then. With
        `ahead`, so many more may be started that wait for their instant: the caller keeps to `Claimed.paces`.

        Where the claim lock of `queue` is taken, the first of `others` whose lock is free is claimed from instead; if
        there is none, `queue` is waited for. `chose` is called before `want`; it is not called by a
        store of one writer, which has no choice, nor where another process has claimed for this one.
        """
        ...

    def _holds(self, lease: UUID, claims: Sequence[Claim]) -> None:
        """This process holds these claims under a lease."""
        return

    async def look(self, queue: str, want: int, *, worker: WorkerIdentity, listener: Listener) -> Looked:
        """How many jobs could start now, up to `want`; none is started. A listener that finds fewer is registered, as
        by a claim; else it is withdrawn. With a `want` of 0 it only withdraws, and its wake-up goes to another."""
        ...

    async def settle(
        self,
        settlements: Sequence[Settlement],
        *,
        is_repeated: bool = False,
        tx: Any = None,
        landed: Landings | None = None,
    ) -> list[UUID]:
        """End claims, durably; those of jobs that are done, also with the caller's transaction `tx`. Returns the jobs
        whose claim was lost: nothing of their settlement was applied.

        A job that dies does so with what it has declared for that (`NewJob.on_dead`), in the same transaction.
        `is_repeated`: the same settlements were given before, and nobody heard whether they landed. What they ended
        is then not lost. So are settlements that were given with a `tx` before: nobody heard whether it committed.

        `landed` is filled with what `enqueue` would return for the follow-ups of each job that is done, by that job.
        What an earlier try has recorded is not in it.
        """
        ...

    async def renew(self, leases: Sequence[UUID], lease: timedelta) -> Renewed:
        """Hold these leases for `lease` from now on."""
        ...

    async def adopt(
        self,
        job: UUID,
        lease: UUID,
        own: UUID,
        *,
        tasks: Sequence[str],
        worker: WorkerIdentity,
        lease_for: timedelta,
    ) -> Adopted | None:
        """Take over a claim that stands under this lease, under a new lease with the id `own`: its holder has lost
        it, and nothing else changes. `None`: it does not stand any more, another has been faster, or its task is none
        of these. Asked again with the same `own`, it answers the same: whether it landed need not be known."""
        duration = microseconds(lease_for)
        adopted = await self.run(records.adopt(job, lease, own, worker.id, worker.name, duration, list(tasks)))
        if adopted is None:
            return None
        self._holds(own, [adopted[0]])
        return Adopted(*adopted)

    async def claims_beside(self, worker: UUID, leases: Collection[UUID]) -> list[Claim]:
        """The claims of a worker that stand under other leases than these: what was handed to it and it has not heard
        of. Of each, only what a settlement needs."""
        ...

    async def wake_another(self, queue: str, worker: UUID) -> None:
        """Wake one of those who wait for work in a queue, other than this worker, which may have been woken and cannot
        come."""
        ...

    async def reap(self, limit: int = 1_000, *, ended_by: Instant | None = None) -> Reaped:
        """End the claims of leases that ran out (by now, or by `ended_by` if that is earlier). The jobs keep their
        place. A loss is charged to a job that ran alone, which may die of it; others come under suspicion."""
        ...

    async def prune(self, retention: Retention, limit: int = 1_000) -> Pruned:
        """Remove finished jobs past their time: see `upkeep.prune`."""
        return await self.run(upkeep.prune(retention, limit))

    async def collect(self, queue: str, limit: int = 1_000) -> Pruned:
        """Remove idle lanes, flows and gates: see `upkeep.collect`."""
        return await self.run(upkeep.collect(queue, limit))

    async def cancel(self, job: UUID, note: Note | None = None) -> State:
        """Cancel a waiting job at once, ask a running one to stop: see `operators.cancel`."""
        return await self.run(operators.cancel(job, note))

    async def counts(self, queue: str) -> QueueCounts:
        return await self.run(records.counts(queue))

    async def listen(self, worker: WorkerIdentity) -> Listener:
        """Open this worker's listener."""
        ...

    async def wait_until_ended(self, job: UUID, until: Instant | None) -> JobRecord:
        """The job once it is done, dead or cancelled, or as it stands when `until` has come; or `JobNotFound`.

        The process that ends the job announces it; looking from time to time is only the last resort.
        """
        ...

    async def replay(
        self,
        jobs: Sequence[UUID],
        delay: int | None = None,
        note: Note | None = None,
        *,
        on_conflict: OnReplayConflict = "reject",
        earlier: Mapping[bytes, Holder] = NO_KEYS,
        dry_run: bool = False,
    ) -> list[Handled]:
        """Put dead and cancelled jobs back: see `operators.replay`. With `dry_run`, only the report is made."""
        if dry_run:
            return await self.run(operators.foresee_replay(jobs, on_conflict, earlier))
        return await self.run(operators.replay(jobs, delay, note, on_conflict, earlier))

    async def ask(self, question: Callable[[Moment], Procedure[T]]) -> T:
        """Answer a question from one snapshot, as of one moment: whatever it asks, and however much. It may be asked
        again from the beginning, if the database breaks off. What there is to ask are the methods of `Moment`."""
        return await self.run(of_one_moment(question))

    async def add_up(self, queue: str, limit: int = 500, rest: int = 0) -> AddedUp:
        """Add up to `limit` claims of a queue to its stats, unless somebody else is at it; forget what is old.

        Nothing is done if somebody was at it within the last `rest` microseconds, and no more than `limit` wait.
        """
        work = await self.run(stats_sums.work_of(queue, limit, rest))
        return stats_sums.NOTHING if work is None else await self.run(stats_sums.add_up(work, limit))

    async def conclude(self, queue: str) -> None:
        """Fold what has happened and add it up: the last claimer of the queue stops, and there may be no other."""
        await self.run(upkeep.fold(queue))
        await self._add_all_up(queue)

    async def _add_all_up(self, queue: str) -> None:
        """Add up all journal entries, and count keys that the policy looks at for the first time."""
        while (await self.add_up(queue, LAST_CLAIMS)).more:
            pass

    async def _add_some_up(self, queue: str) -> None:
        """The tables of a queue were written. Perhaps no worker is there to add up, and nobody but those who claim."""
        if (await self.add_up(queue, AT_CHECKPOINT, EVER)).more:
            await self._add_all_up(queue)

    async def health(self, *, brief: bool = False) -> Health:
        """The condition of the database itself, as far as it is visible. `brief`: only what changes quickly and is
        cheap to look up: old snapshots, connections, space."""
        ...
