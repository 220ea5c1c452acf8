"""What a handler can ask about the job it runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID

from fairlane.effects import Effects, checked_key
from fairlane.errors import Cancel, ConfigurationError, StoreUnavailable
from fairlane.job import Landed
from fairlane.loop_thread import CallerThread, refuse_inside_a_loop
from fairlane.parameters import checked
from fairlane.task import Call
from fairlane.worker.runs import storable

if TYPE_CHECKING:
    from fairlane.worker.runs import RunningJob


T = TypeVar("T")

current_run: ContextVar[RunningJob] = ContextVar("fairlane_run")


def context() -> JobContext:
    """The job that is running here: in its handler, in tasks the handler started, and in a thread's handler."""
    run = current_run.get(None)
    if run is None:
        raise ConfigurationError("no job is running here; context() works inside a task that a worker runs")
    return JobContext(run)


class JobContext:
    """The running job, seen from its handler."""

    __slots__ = ("_run",)

    def __init__(self, run: RunningJob) -> None:
        self._run = run

    @property
    def id(self) -> UUID:
        return self._run.claim.id

    @property
    def attempt(self) -> int:
        """Counts from 1."""
        return self._run.claim.attempt

    @property
    def max_attempts(self) -> int:
        return self._run.claim.max_attempts

    @property
    def keys(self) -> Mapping[str, str | None]:
        return self._run.claim.keys

    @property
    def queue(self) -> str:
        return self._run.claim.queue

    @property
    def task(self) -> str:
        return self._run.claim.task

    @property
    def cancelled(self) -> bool:
        """The job should stop: it was cancelled, timed out, was lost to another worker, or its worker shuts down."""
        return self._run.stop is not None

    def raise_if_cancelled(self) -> None:
        """For handlers in threads, which nobody can interrupt: call this from time to time."""
        if self._run.stop is not None:
            raise Cancel(self._run.stop.value)

    def enqueue(self, *calls: Call[Any]) -> None:
        """Store these calls as jobs when this one is done, in the same transaction; never if it is not."""
        self._run.add(Effects(enqueue=calls))

    def put(self, key: str, value: Any) -> None:
        """Set a value of the key-value store when this job is done, in the same transaction."""
        self._run.add(Effects(put={checked_key(key): value}))

    def delete(self, key: str) -> None:
        """Remove a key of the key-value store when this job is done, in the same transaction."""
        self._run.add(Effects(delete=[key]))

    async def ack(self, result: Any = None, *, tx: Any) -> Landed:
        """End this job as done in your own transaction `tx`: it is done, with this result and its effects, when you
        commit. `ClaimLost`: it may run elsewhere; roll back. Returned is what became of each effect.

        After a rollback the job goes on, and ends as its handler does. After the commit it has ended, whatever the
        handler returns or raises.
        """
        return await self._run.ack(result, tx)

    def ack_sync(self, result: Any = None, *, tx: Any) -> Landed:
        """`ack` for a handler in a thread, which uses its connection in that thread."""
        return self._blocking(self.ack(result, tx=tx))

    @checked(any_text=["message"])
    async def progress(self, fraction: float, message: str = "") -> None:
        """Note how far the job is, from 0 to 1. A database that cannot be reached does not fail the job."""
        if not 0 <= fraction <= 1:
            raise ConfigurationError(
                f"progress: fraction={fraction!r} does not lie between 0 and 1; give one that does"
            )
        run = self._run
        try:
            await run.home.store.report_progress(run.claim, float(fraction), storable(message) or None)
        except StoreUnavailable as error:
            run.home.log.warning("job %s: its progress was not noted: %s", run.claim.id, error)

    def progress_sync(self, fraction: float, message: str = "") -> None:
        """`progress` for a handler in a thread."""
        self._blocking(self.progress(fraction, message))

    def _blocking(self, work: Coroutine[Any, Any, T]) -> T:
        home = self._run.home
        if threading.get_ident() == home.thread:
            raise refuse_inside_a_loop(work)
        with CallerThread() as caller:
            running = asyncio.run_coroutine_threadsafe(work, home.loop)
        return caller.wait_for(running)
