"""The handle of a job: what a producer holds in its hand after `enqueue`."""

from __future__ import annotations

from collections.abc import Collection, Coroutine, Mapping, Sequence
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar, cast
from uuid import UUID

import msgspec

from fairlane.clock import duration_of
from fairlane.codec import Codec
from fairlane.errors import JobCancelled, JobFailed, JobNotFound, ReplayRefused, ResultTimeout
from fairlane.job import AttemptRecord, JobRecord, NewJob, Outcome, State
from fairlane.parameters import known_options
from fairlane.policy.backlog import FullBacklog, Verdicts
from fairlane.policy.unique import Conflict, OnReplayConflict, checked_on_replay_conflict
from fairlane.scheduler.explain import Explanation, explain
from fairlane.store import records
from fairlane.store.protocol import Store
from fairlane.store.rows import no_such_job

R = TypeVar("R")
T = TypeVar("T")


class JobSource(Protocol):
    """What a handle asks of the app that made it."""

    async def opened(self) -> Store: ...

    def codec_of(self, task: str) -> Codec | None: ...

    def known_tasks(self) -> Collection[str]: ...

    @property
    def forwarded(self) -> Collection[str]: ...

    def run_blocking(self, work: Coroutine[Any, Any, T]) -> T: ...


class Job(msgspec.Struct, Generic[R], eq=False, gc=False):
    """A stored job. It holds nothing but the id: every question goes to the database."""

    # Many thousands of them may come back at once. They are in no circle, and the collector need not look at them.
    id: UUID
    _source: JobSource
    outcome: Outcome | None = None
    """What became of the enqueue that returned this handle; `None` if it comes from elsewhere."""
    backlog: FullBacklog | None = None
    """The backlog that was full when it was enqueued; `None` if there was room."""

    def __repr__(self) -> str:
        return f"<job {self.id}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Job) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    @property
    def is_over_backlog(self) -> bool:
        """Whether more jobs waited than should when it was enqueued: its producer had better slow down."""
        return self.backlog is not None

    async def record(self) -> JobRecord:
        """Everything that is known about the job, or `JobNotFound`."""
        return await (await self._source.opened()).job(self.id)

    async def attempts(self) -> list[AttemptRecord]:
        """Every attempt so far, in order."""
        return await (await self._source.opened()).run(records.attempts(self.id))

    async def status(self) -> State:
        """Where the job is in its life."""
        return (await self.record()).state

    async def explain(self) -> Explanation:
        """Everything that holds the job: until when, and who. Looking changes nothing."""
        store = await self._source.opened()
        facts = await store.ask(lambda moment: moment.examine(job=self.id))
        return explain(facts, self._source.known_tasks(), self._source.forwarded)

    async def cancel(self) -> State:
        """Cancel the job if it waits, ask it to stop if it runs. Returns the state it is in now."""
        return await (await self._source.opened()).cancel(self.id)

    @known_options
    async def replay(self, *, on_conflict: OnReplayConflict = "reject") -> State:
        """Put the job back into its queue. `ReplayRefused` unless it is dead or cancelled. Returns the state it is in.

        If another job holds its unique key, that is refused too; with `on_conflict="replace"` a holder that waits is
        cancelled, and only one that runs refuses.
        """
        store = await self._source.opened()
        (handled,) = await store.replay([self.id], on_conflict=checked_on_replay_conflict(on_conflict))
        if handled.was is None:
            raise no_such_job(self.id)
        if handled.skipped is not None:
            remedy = "" if handled.holder is None else await _remedy(store, handled.holder, on_conflict)
            raise ReplayRefused(self.id, handled.skipped, handled.holder, remedy)
        return await self.status()

    @known_options
    async def result(self, timeout: timedelta | str | float | None = None) -> R:
        """What the task returned, once it has. `JobFailed`, `JobCancelled` or `ResultTimeout` say otherwise."""
        time = None if timeout is None else duration_of("result: timeout", timeout)
        store = await self._source.opened()
        if time is not None and time <= 0:
            record = await store.job(self.id)
        else:
            record = await store.wait_until_ended(self.id, None if time is None else await store.now() + time)
        if not record.state.is_final:
            raise ResultTimeout(
                f"job {self.id} ({record.task}) is still {record.state} after {_shown(timeout)}; it goes on all the "
                f"same. Ask what holds it with `fairlane explain {self.id}` (and --app or --url, where FAIRLANE_URL "
                "does not name the database) or job.explain()"
            )
        return self._read(record)

    def status_sync(self) -> State:
        """`status` for code that is not async."""
        return self._source.run_blocking(self.status())

    def explain_sync(self) -> Explanation:
        """`explain` for code that is not async."""
        return self._source.run_blocking(self.explain())

    def cancel_sync(self) -> State:
        """`cancel` for code that is not async."""
        return self._source.run_blocking(self.cancel())

    @known_options
    def result_sync(self, timeout: timedelta | str | float | None = None) -> R:
        """`result` for code that is not async: it blocks its thread, and no other, until the job has ended."""
        return self._source.run_blocking(self.result(timeout))

    def _read(self, record: JobRecord) -> R:
        what = f"job {self.id} ({record.task})"
        match record.state:
            case State.DEAD:
                attempts = f"{record.attempt} of {record.max_attempts} attempts"
                raise JobFailed(f"{what} failed after {attempts}: {record.error}")
            case State.CANCELLED:
                raise JobCancelled(f"{what} was cancelled: {record.error or 'before it ran'}")
        codec = self._source.codec_of(record.task)
        value: Any = codec.decode_result(record.result) if codec else record.result
        return cast(R, value)


async def _remedy(store: Store, holder: UUID, on_conflict: OnReplayConflict) -> str:
    """What helps where this job holds the unique key of one that was to be replayed."""
    try:
        state = (await store.job(holder)).state
    except JobNotFound:
        state = None
    if state is None or state.is_final:
        return "that job has ended, and the window of its key lasts: replay once that has passed"
    if state is State.RUNNING:
        return (
            "that job runs, and no replay stops it: wait for it to end, or ask it to stop "
            f"(`fairlane jobs cancel {holder}`), and replay then"
        )
    if on_conflict == "replace":
        return "that job waits again by now: replay once more"
    return "wait for that job to end, or replay with on_conflict='replace', which cancels it while it waits"


class Enqueued(list[Job[R]]):
    """What became of a bulk: one handle for each call, in order, each with its outcome.

    A call that met a unique key has the handle of the job that holds it.
    """

    @property
    def stored(self) -> list[Job[R]]:
        """The new jobs."""
        return [job for job in self if job.outcome is not None and job.outcome.is_stored]

    @property
    def duplicates(self) -> list[Job[R]]:
        """The jobs that stand for calls which were not stored."""
        return [job for job in self if job.outcome is Outcome.DUPLICATE]

    @property
    def refused(self) -> list[Job[R]]:
        """The jobs because of which calls were refused."""
        return [job for job in self if job.outcome is Outcome.REFUSED]

    @property
    def full(self) -> list[Job[R]]:
        """Those that were not stored because a backlog was full. No job has their ids."""
        return [job for job in self if job.outcome is Outcome.FULL]

    @property
    def over_backlog(self) -> list[Job[R]]:
        """Those that met a full backlog, stored or not: whoever enqueues had better slow down."""
        return [job for job in self if job.is_over_backlog]

    def __repr__(self) -> str:
        refused = len(self.refused) + len(self.full)
        return f"<{len(self.stored)} enqueued, {len(self.duplicates)} duplicates, {refused} refused>"


def handles_of(
    jobs: Sequence[NewJob], conflicts: Mapping[UUID, Conflict], verdicts: Verdicts, source: JobSource
) -> Enqueued[Any]:
    """What became of these jobs, as their producer is told."""
    if not (conflicts or verdicts.told or verdicts.refused):
        return Enqueued(Job(job.id, source, Outcome.ENQUEUED) for job in jobs)
    handles: Enqueued[Any] = Enqueued()
    for job in jobs:
        if (refusal := verdicts.refused.get(job.id)) is not None:
            handles.append(Job(job.id, source, Outcome.FULL, refusal))
            continue
        conflict = conflicts.get(job.id)
        outcome = Outcome.ENQUEUED if conflict is None else conflict.outcome
        stands = job.id if conflict is None or outcome.is_stored else conflict.holder
        handles.append(Job(stands, source, outcome, verdicts.told.get(job.id) if outcome.is_stored else None))
    return handles


class Foreseen(msgspec.Struct, frozen=True):
    """What an enqueue would do."""

    outcome: Outcome
    holder: UUID | None = None
    """The job that holds the unique key."""
    payload_differs: bool = False


def _shown(timeout: timedelta | str | float | None) -> str:
    return f"{timeout:g} s" if isinstance(timeout, int | float) else str(timeout)
