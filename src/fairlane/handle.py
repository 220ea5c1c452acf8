"""The handle of a job: what a producer holds in its hand after `enqueue`."""

from __future__ import annotations

from collections.abc import Collection, Coroutine
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar, cast
from uuid import UUID

import msgspec

from fairlane.clock import microseconds
from fairlane.codec import Codec
from fairlane.errors import JobCancelled, JobFailed, ResultTimeout
from fairlane.job import AttemptRecord, JobRecord, Outcome, State
from fairlane.scheduler.explain import Explanation, explain
from fairlane.store.protocol import Store

__all__ = ["Enqueued", "Foreseen", "Job", "JobSource"]

R = TypeVar("R")
T = TypeVar("T")


class JobSource(Protocol):
    """What a handle asks of the app that made it."""

    async def opened(self) -> Store: ...

    def codec_of(self, task: str) -> Codec | None: ...

    def known_tasks(self) -> Collection[str]: ...

    def run_blocking(self, work: Coroutine[Any, Any, T]) -> T: ...


class Job(Generic[R]):
    """A stored job. It holds nothing but the id: every question goes to the database."""

    __slots__ = ("_source", "id", "outcome")

    def __init__(self, job: UUID, source: JobSource, outcome: Outcome | None = None) -> None:
        self.id = job
        self._source = source
        self.outcome = outcome
        """What became of the enqueue that returned this handle; `None` if it comes from elsewhere."""

    def __repr__(self) -> str:
        return f"<job {self.id}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Job) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    async def record(self) -> JobRecord:
        """Everything that is known about the job, or `JobNotFound`."""
        return await (await self._source.opened()).job(self.id)

    async def attempts(self) -> list[AttemptRecord]:
        """Every attempt so far, in order."""
        return await (await self._source.opened()).attempts(self.id)

    async def status(self) -> State:
        """Where the job is in its life."""
        return (await self.record()).state

    async def explain(self) -> Explanation:
        """Everything that holds the job: until when, and who. Looking changes nothing."""
        return explain(await (await self._source.opened()).examine(job=self.id), self._source.known_tasks())

    async def cancel(self) -> State:
        """Cancel the job if it waits, ask it to stop if it runs. Returns the state it is in now."""
        return await (await self._source.opened()).cancel(self.id)

    async def replay(self) -> State:
        """Put the job back into its queue if it is dead or cancelled. Returns the state it is in now."""
        await (await self._source.opened()).replay([self.id])
        return await self.status()

    async def result(self, timeout: timedelta | str | float | None = None) -> R:
        """What the task returned, once it has. `JobFailed`, `JobCancelled` or `ResultTimeout` say otherwise."""
        store = await self._source.opened()
        time = None if timeout is None else microseconds(timeout)
        if time is not None and time <= 0:
            record = await store.job(self.id)
        else:
            record = await store.wait_until_ended(self.id, None if time is None else await store.now() + time)
        if not record.state.is_final:
            what = f"job {self.id} ({record.task})"
            raise ResultTimeout(f"{what} is still {record.state} after {_shown(timeout)}; it goes on all the same")
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

    def __repr__(self) -> str:
        return f"<{len(self.stored)} enqueued, {len(self.duplicates)} duplicates, {len(self.refused)} refused>"


class Foreseen(msgspec.Struct, frozen=True):
    """What an enqueue would do."""

    outcome: Outcome
    holder: UUID | None = None
    """The job that holds the unique key."""
    payload_differs: bool = False


def _shown(timeout: timedelta | str | float | None) -> str:
    return f"{timeout:g} s" if isinstance(timeout, int | float) else str(timeout)
