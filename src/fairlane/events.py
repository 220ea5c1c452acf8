"""What happens to jobs and workers, as values: handlers of `app.on_event` get them.

They are a closed set: `EVENTS` has every kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import dataclass_transform
from uuid import UUID

from fairlane.clock import Instant
from fairlane.job import FollowUp, State


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened in this process. Each kind is a frozen dataclass."""

    at: Instant
    """When, in microseconds since 1970, by this process's estimate of the store's clock."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)


class JobEvent(Event):
    """Something happened to jobs of one queue."""

    queue: str


class JobsEnqueued(JobEvent):
    """Jobs of one task were stored by one call. With a caller's transaction, they exist once it commits."""

    task: str
    jobs: tuple[UUID, ...]


class JobsClaimed(JobEvent):
    """One claim returned these jobs, in the order in which they start. An empty claim is not an event."""

    worker: str
    jobs: tuple[UUID, ...]
    took: timedelta


class JobStarted(JobEvent):
    """A handler is about to be called."""

    worker: str
    job: UUID
    task: str
    keys: Mapping[str, str | None]
    attempt: int
    waited: timedelta
    """Time since it was enqueued, including a delay that its producer asked for, and earlier attempts."""


class JobEnded(JobEvent):
    """A handler has ended. Its outcome is being recorded; `ClaimsLost` follows if the database refuses it."""

    worker: str
    job: UUID
    task: str
    keys: Mapping[str, str | None]
    attempt: int
    max_attempts: int
    outcome: str
    """`done`, `failed`, `retry`, `snoozed`, `dead`, `cancelled`, `lost`; `claim lost` where nothing is recorded."""
    state: State | None
    """The new state of the job; `None` if nothing is recorded."""
    ran: timedelta
    error: str | None
    """As stored with the attempt: one line, then the traceback."""


class WorkerEvent(Event):
    """Something happened to this worker."""

    worker: str


class ClaimsLost(WorkerEvent):
    """These jobs were taken over because their leases expired. They run again; nothing of these runs is recorded."""

    jobs: tuple[UUID, ...]


class FollowUpsNotStored(WorkerEvent):
    """A job is done, and these of its follow-ups were not stored, because other jobs hold their unique keys."""

    job: UUID
    follow_ups: tuple[FollowUp, ...]


class GatesRecounted(WorkerEvent):
    """Gates of a queue did not match the running jobs, and this worker has recounted them."""

    queue: str
    gates: int


class JobsReaped(WorkerEvent):
    """Leases of workers that are gone expired, and this worker ended their claims."""

    jobs: tuple[UUID, ...]


class WorkerStarted(WorkerEvent):
    """A worker starts to serve these queues."""

    queues: tuple[str, ...]


class WorkerStopping(WorkerEvent):
    """It claims nothing more, and waits for running jobs."""

    running: int


class WorkerStopped(WorkerEvent):
    """It has ended."""

    left_running: int
    left_unsettled: int


class LeasesRenewed(WorkerEvent):
    """It has renewed the leases of the jobs that it holds."""

    leases: int
    gone: int
    """Leases that no longer existed: other workers have taken over their jobs."""


class LoopDied(WorkerEvent):
    """One of its loops died. It becomes unhealthy, waits for running jobs, and raises `WorkerDied`."""

    loop: str
    cause: str


class StoreLost(WorkerEvent):
    """The database cannot be reached, or refuses requests. Running jobs go on."""

    doing: str
    error: str


class StoreReturned(WorkerEvent):
    """The database answers again."""


EVENTS: tuple[type[Event], ...] = (*JobEvent.__subclasses__(), *WorkerEvent.__subclasses__())
"""Every kind of event."""
