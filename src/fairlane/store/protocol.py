"""What every store does. The contract suite in `tests/store` is the definition; this is its shape.

Stores load and write. What may run, what a claim costs and how it ends is decided in `policy` and `scheduler`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar
from uuid import UUID, uuid4

import msgspec

from fairlane.clock import SECOND, Instant
from fairlane.job import Claim, JobRecord, NewJob, State
from fairlane.policy.overrides import Amendment, Override
from fairlane.policy.policy import Policy
from fairlane.policy.unique import NO_KEYS, Conflict, Holder, OnReplayConflict
from fairlane.scheduler.rebuild import Miscount, WaitingLane
from fairlane.scheduler.settlement import DISPATCHER, Settlement
from fairlane.scheduler.snapshot import GateRow, Pace
from fairlane.store import records
from fairlane.store.audit import Note
from fairlane.store.boards import QueueTime
from fairlane.store.health import Traces
from fairlane.store.operators import Handled
from fairlane.store.procedures import Work
from fairlane.store.rows import Declared
from fairlane.store.stats_sums import StatsKeeper
from fairlane.store.stats_values import WorkerReport

T = TypeVar("T")

FOLD_AT_MOST = 1_000
"""Arrival bells folded by one claim: activating a lane has a cost, and releases must not wait behind a flood."""
RELEASES_AT_MOST = 4_000
"""Release bells folded by one claim."""
PROMOTE_AT_MOST = 1_000
"""Scheduled jobs that one claim makes ready."""
LANES_PER_SCANNED_FLOW = 2
EVERYONE = 1 << 20
"""More than ever wait for a queue's jobs."""
CLOCKS_DIFFER_BY = 3_600 * SECOND
"""An ended session is remembered for so much longer than it would have lasted: sessions expire by other clocks."""
UNFOLDED_AT_MOST = 200
"""Bells of arrivals that a producer adds up by itself. More of them are folded first: perhaps nobody claims."""


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
    """Work that could start was left behind, or bells were not all folded: claim again at once if slots are free."""
    look_again: bool
    """The waiter was registered while a producer's transaction may have been open: claim again shortly."""
    vtime: float | None = None
    """The queue's virtual time, once these jobs have started. `None`: somebody else has claimed for us."""
    is_limited: bool | None = None
    """The queue has limits: what is claimed and has not started holds slots and tokens. `None`: as far as is known."""
    folded: int = 0
    """Bells that this claim has folded."""
    at: Instant = 0
    """Queue time of the claim; 0: not known."""
    paces: dict[UUID, Pace] = {}
    """Of jobs that pass a smooth rate, when each may start."""
    terms: object = None
    """What it was claimed by, the same object for as long as nobody changes the policy. `None`: not known."""
    opens_by_ends: bool | None = None
    """Whether the end of a job may let another of this queue start. `None`: as far as is known."""


class Choice(msgspec.Struct, frozen=True):
    """Of which queue a claim has the lock, and how far it was before."""

    queue: str
    taken: frozenset[str]
    """Those whose lock was taken: whoever holds it claims there now."""
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
    """Something may have been missed: bells that were not all folded, a producer's open transaction."""


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


class Pruned(msgspec.Struct, frozen=True):
    """What upkeep removed."""

    jobs: int
    lanes: int = 0
    flows: int = 0
    gates: int = 0
    more: bool = False


class Counted(msgspec.Struct, frozen=True):
    """Gates held against the jobs that run."""

    found: list[Miscount]
    """Those that are wrong."""
    more: bool
    """There are gates that have not been looked at: the next call goes on from there."""


class Rehomed(msgspec.Struct, frozen=True):
    """What became of the jobs of a partition that belong to another one."""

    moved: int
    waiting: int
    """Those that are still here, ready or scheduled."""
    running: int
    """Those that run: they end here, wherever they belong."""


class Retention(msgspec.Struct, frozen=True):
    """How long finished jobs stay, in microseconds, and how many of them."""

    done: int = 24 * 3_600 * 1_000_000
    """Done and cancelled jobs, with results and history."""
    dead: int = 7 * 24 * 3_600 * 1_000_000
    keep: int | None = None
    """At most so many done and cancelled jobs, and at most so many dead ones; the oldest go first. Counted apart: no
    flood of good jobs washes a dead letter away."""


class QueueCounts(msgspec.Struct, frozen=True):
    """How many jobs of a queue are where. `ready` and `running` come from folded bells, not from a scan."""

    ready: int
    running: int
    parked_lanes: int
    bells: int
    """Bells that no claim has folded yet."""


class Listener(Protocol):
    """A worker's ear. One per process; it hears what concerns the queues it waits for and the jobs it runs."""

    async def wait(self, until: Instant | None) -> bool:
        """Return True at a nudge (work to claim, a job to cancel, a schedule to fire), False once `until` has come."""
        ...

    def schedules_changed(self) -> bool:
        """Whether an operator has resumed or triggered a schedule since this was last asked: that is a nudge too."""
        ...

    async def close(self) -> None:
        """Stop listening and withdraw from every queue it was registered for."""
        ...


class Store(StatsKeeper, Protocol):
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
        """Queue time, which limits, leases and due times are measured by. It never goes back (see `queue_time.py`)."""
        ...

    async def time(self) -> QueueTime:
        """Queue time, and the clock that schedules and times of day go by."""
        ...

    async def keep_time(self) -> QueueTime:
        """The same, stored: if the clock is set back, queue time goes on from here. So it does from claims, renewals
        and workers' reports."""
        ...

    async def declare(self, policy: Policy) -> Declared:
        """Make a queue known. The first declaration is stored; whether a later one wins is the store's rule. The
        number of partitions, and the keys that divide it, are never changed by it: the rest applies to those stored."""
        ...

    async def apply(self, policy: Policy, note: Note | None = None, *, accept_missing_keys: bool = False) -> Declared:
        """Put a policy in force, divided as the queue is divided. Lanes, flows and gates are rebuilt from what is in
        flight; every lane is woken.

        Overrides stay as they are. `InvalidPolicy` where waiting jobs lack a key that it looks at, unless that is
        accepted.
        """
        ...

    async def count_ready(self, policy: Policy, gates: Sequence[bytes], tx: Any = None) -> dict[bytes, int]:
        """How many jobs are ready, by these gates of a queue's backlogs, with those that no claim has seen yet.

        With the caller's transaction, its own jobs are among them. It scans no backlog: bells that have piled up are
        folded, as a claim would.
        """
        ...

    async def check_waiting(self, policy: Policy) -> None:
        """Refuse what `apply` would refuse because of the jobs that wait, as far as claims have seen them."""
        ...

    async def policy(self, queue: str) -> Declared | None:
        """The policy in force, with what operators have changed."""
        ...

    async def amend(
        self, queues: Sequence[str], put: Sequence[Override], remove: Sequence[str], note: Note
    ) -> list[Amendment]:
        """Set and remove overrides of all partitions of a queue, in one transaction with one entry of the audit, under
        the first name; in force at every claimer's next claim. `InvalidOverride` where one has no place. One whose time
        has come ends by itself, and whoever it held back is looked at then."""
        ...

    async def enqueue(
        self, jobs: Sequence[NewJob], tx: Any = None, progress: Callable[[int], None] | None = None
    ) -> dict[UUID, Conflict]:
        """Store jobs and ring their lanes' bells; durable on return, or with the caller's transaction `tx`.

        All or none: `DuplicateJob` if one has an id that a job has already. A store that tries again after a lost
        connection knows its own jobs, and stores them once. Returned is what met a unique key that another job holds,
        by the id of the new one; each is decided as if it were enqueued alone. `progress` is told how many are stored.
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
        there is none, `queue` is waited for. `chose` is told before `want` is asked; a store of one writer has nothing
        to choose, and is silent, and so is one that was handed what somebody else has claimed.
        """
        ...

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
        """Take over a claim that stands under this lease, under a new lease with the id `own`: whoever held it has lost
        it, and nothing else changes. `None`: it does not stand any more, another has been faster, or its task is none
        of these. Asked again with the same `own`, it answers the same: whether it landed need not be known."""
        ...

    async def held(self, claims: Sequence[tuple[UUID, UUID]]) -> list[UUID]:
        """Of these (job, lease) pairs, the jobs whose claim still stands: asked after a lost connection."""
        ...

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
        """Remove finished jobs past their time, or beyond the number to keep, with their history: at most `limit` jobs,
        however they were settled."""
        ...

    async def collect(self, queue: str, limit: int = 1_000) -> Pruned:
        """Remove idle lanes, flows and gates: nothing in flight or waiting, tokens full, the tag behind the cursor."""
        ...

    async def count_gates(self, queue: str, limit: int = 1_000) -> Counted:
        """Hold the next gates of a queue, its own and those it shares, against the jobs that run. Looking changes
        nothing, takes no lock, and is right whatever goes on meanwhile: it counts in one snapshot."""
        ...

    async def recount(self, queue: str) -> list[Miscount]:
        """Count every gate of a queue again from the jobs that run, and wake whoever may start now. Returns those that
        were wrong; where there are any, it is recorded."""
        ...

    async def cancel(self, job: UUID, note: Note | None = None) -> State:
        """Cancel a waiting job at once, ask a running one to stop. Returns the state it is in now, or `JobNotFound`."""
        ...

    async def report_progress(self, claim: Claim, fraction: float, message: str | None) -> None:
        """Note how far a running job is; a claim that is gone reports nothing."""
        ...

    async def counts(self, queue: str) -> QueueCounts: ...

    async def listen(self, worker: WorkerIdentity) -> Listener:
        """Open this worker's ear."""
        ...

    async def wait_until_ended(self, job: UUID, until: Instant | None) -> JobRecord:
        """The job once it is done, dead or cancelled, or as it stands when `until` has come; or `JobNotFound`.

        Whoever ends the job tells, in whatever process; looking from time to time is only the last resort.
        """
        ...

    # The operator's side of a job's life. Each action is one transaction over at most `AT_ONCE` jobs, and reports on
    # every one of them: on those that it skipped too, and why.

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
        """Put dead and cancelled jobs back at the end of their lanes, now or after so many microseconds.

        Attempts are counted afresh and the history stays. A job whose unique key another job holds is skipped, or takes
        the place of that one if it waits (`on_conflict`). Keys that `earlier` transactions of the same action took are
        held, by jobs that are not replaced. With `dry_run`, only the report is made.
        """
        ...

    async def cancel_jobs(self, jobs: Sequence[UUID], note: Note, *, waits: bool = False) -> list[Handled]:
        """Cancel jobs that wait, ask those that run to stop. Who is busy with one of them is waited for only if it is
        said: with several jobs, two might wait for each other."""
        ...

    async def purge(self, jobs: Sequence[UUID], note: Note | None = None) -> list[Handled]:
        """Remove done, dead and cancelled jobs for good, with their history."""
        ...

    async def retry_now(self, jobs: Sequence[UUID], note: Note | None = None) -> list[Handled]:
        """Let scheduled jobs be due now, whether they wait for a backoff or for their time."""
        ...

    async def force(self, jobs: Sequence[UUID], note: Note) -> list[Handled]:
        """Let waiting jobs start next, in the slots that come free, whatever their limits say. Every limit counts them,
        and so does the turn of their flow."""
        ...

    async def traces(self, queue: str, flows: Sequence[bytes], gates: Sequence[bytes]) -> Traces:
        """What there is of a queue to see besides its counts; each flow and gate is looked up by its id."""
        ...

    # Partitions. The state of each is its own; jobs go from one to another as facts do, by bells: they have left here,
    # and come there.

    async def divide(
        self, policy: Policy, version: int, gates: Sequence[GateRow] = (), note: Note | None = None
    ) -> bool:
        """Put the policy of a partition in force, whatever number of partitions there was; with gates that come from
        other partitions. Whether waiting jobs lack a key is asked before, of all partitions: it refuses nothing.

        False, and nothing is changed, if another version is in force than the one given; 0: the queue is not known.
        """
        ...

    async def rehome(self, queue: str, limit: int = 1_000) -> Rehomed:
        """Move waiting jobs of a partition to where they belong: about `limit` of them, each in its place."""
        ...

    async def gates_of_strays(self, queue: str, was: int) -> list[tuple[str, GateRow]]:
        """The gates of keys that were at home here, when there were `was` partitions, and belong to another one now;
        each with the name of that one."""
        ...

    async def lanes(self, queue: str, *, keeps: bool = False) -> list[WaitingLane]:
        """The lanes of jobs that wait or run, and those that scheduled jobs will join, once bells are folded as a claim
        would: which changes nothing unless it `keeps` what it has folded."""
        ...

    async def report(self, worker: WorkerIdentity, report: WorkerReport | None) -> None:
        """Note what a worker says of itself; `None` takes it back."""
        ...
