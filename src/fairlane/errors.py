"""Every error that Fairlane raises, in one tree.

```
FairlaneError
├── ConfigurationError      a setting, a URL or a declaration that cannot work
│   ├── InvalidPolicy       a policy that contradicts itself; named where it is declared
│   ├── InvalidOverride     an override that the policy in force has no place for
│   └── SchemaError         the database and this program do not fit each other
│       ├── SchemaOutOfDate the database is behind: run `fairlane migrate`
│       └── SchemaTooNew    the program is behind: upgrade it
├── InvalidJob              a job that cannot be stored as it was given
│   ├── DuplicateJob        an id that a job has already; nothing of that enqueue was stored
│   ├── UniqueConflict      a unique key that another job holds, and `on_conflict="reject"`
│   │   └── PayloadDiffers  the same unique key with another payload, and `same_payload=True`
│   ├── BacklogFull         as many jobs wait as `Backlog(when_full="reject")` holds
│   ├── InvalidKey          a key that has no canonical form, is missing, or is too long
│   └── PayloadTooLarge     arguments or a result beyond the limit
├── InvalidValue            a key or a value that the key-value store cannot hold
├── UnknownTask             a name that no task of this app answers to
├── UnknownQueue            a name that no queue of this app or store answers to
├── UnknownSchedule         a name that no schedule of this store answers to
├── JobNotFound             no such job, or retention has removed it
├── ReplayRefused           `replay()` of a job that cannot be put back, or whose unique key another job holds
├── JobFailed               `result()` of a job that ended dead
├── JobCancelled            `result()` of a job that was cancelled
├── ResultTimeout           `result(timeout=…)` of a job that has not ended yet
├── ClaimLost               a settlement of a claim that is gone; nothing was applied
├── AlreadySettled          a second settlement of a claim that this program has settled itself
├── UndecodablePayload      stored arguments or a stored result that do not fit the task
├── StoreUnavailable        the database cannot be reached, or does not do for now what it was asked
├── StoreLost               the database's file was deleted, moved or replaced beneath this program
└── WorkerDied              a loop of a worker ended by itself; the worker stopped
```

`Snooze`, `Retry`, `Dead` and `Cancel` are not errors: a handler raises them to say how its job goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID


class FairlaneError(Exception):
    """The base of all errors that Fairlane raises."""


class ConfigurationError(FairlaneError, ValueError):
    """A setting, a URL or a declaration that cannot work."""


class InvalidPolicy(ConfigurationError):
    """A policy that contradicts itself."""


class InvalidOverride(ConfigurationError):
    """An override that the policy in force has no place for."""


class SchemaError(ConfigurationError):
    """The database and this program do not fit each other."""


class SchemaOutOfDate(SchemaError):
    """The database is behind this program."""


class SchemaTooNew(SchemaError):
    """This program is behind the database."""


class InvalidJob(FairlaneError, ValueError):
    """A job that cannot be stored as it was given."""


@dataclass(eq=False, repr=False)
class DuplicateJob(InvalidJob):
    """An id that a job has already. Nothing of that enqueue was stored."""

    job: UUID

    def __str__(self) -> str:
        return (
            f"there is a job {self.job} already, and nothing of this enqueue was stored; "
            "give each job an id of its own, or none"
        )


@dataclass(eq=False, repr=False)
class UniqueConflict(InvalidJob):
    """Another job holds the unique key. Nothing of that enqueue was stored."""

    task: str
    job: UUID
    """The job that holds the key."""

    def __str__(self) -> str:
        return (
            f"task {self.task!r}: job {self.job} holds this unique key, and nothing of this enqueue was stored; "
            "wait for it to end, or enqueue with on_conflict='return' or 'replace'"
        )


@dataclass(eq=False, repr=False)
class BacklogFull(InvalidJob):
    """As many jobs of the key wait as its backlog holds. Nothing of that enqueue was stored."""

    queue: str
    key: Mapping[str, str | None]
    """The key whose backlog is full; empty for the whole queue."""
    ready: int
    max: int

    def __str__(self) -> str:
        key = "".join(f", {name}={'None' if value is None else value}" for name, value in self.key.items())
        return (
            f"queue {self.queue!r}{key}: {self.ready:,} jobs wait, and its backlog holds {self.max:,}; nothing of this "
            "enqueue was stored. Wait for room (`await queue.pace(…)`) and enqueue again"
        )


class PayloadDiffers(UniqueConflict):
    """The same unique key with another payload."""

    def __str__(self) -> str:
        return (
            f"task {self.task!r}: job {self.job} holds this unique key with other arguments, and nothing of this "
            "enqueue was stored; a key names one call: give another call another key"
        )


class InvalidKey(InvalidJob):
    """A key that has no canonical form, is missing, or is too long."""


class PayloadTooLarge(InvalidJob):
    """Arguments or a result beyond the limit."""


class InvalidValue(FairlaneError, ValueError):
    """A key or a value that the key-value store cannot hold."""


class UnknownTask(FairlaneError, LookupError):
    """There is no task with this name in this app."""


class UnknownQueue(FairlaneError, LookupError):
    """There is no queue with this name in this app or store."""


class UnknownSchedule(FairlaneError, LookupError):
    """There is no schedule with this name in this store."""


class JobNotFound(FairlaneError, LookupError):
    """No such job, or retention has removed it."""


@dataclass(eq=False, repr=False)
class ReplayRefused(FairlaneError):
    """The job was not put back, and nothing has changed."""

    job: UUID
    reason: str
    holder: UUID | None = None
    """The job that holds its unique key, if that is why."""
    remedy: str = ""
    """What to do, by the state of that job a moment later."""

    def __str__(self) -> str:
        return f"job {self.job} was not replayed: {self.reason}" + (f"; {self.remedy}" if self.remedy else "")


class JobFailed(FairlaneError):
    """The job ended dead; the message carries its last error."""


class JobCancelled(FairlaneError):
    """The job was cancelled."""


class ResultTimeout(FairlaneError, TimeoutError):
    """The job has not ended within the timeout; it goes on."""


class ClaimLost(FairlaneError):
    """The claim is gone, and nothing of this settlement was applied."""

    def __init__(self, jobs: Iterable[UUID]) -> None:
        self.jobs = tuple(jobs)
        super().__init__(self.jobs)

    def __str__(self) -> str:
        named = ", ".join(map(str, self.jobs))
        return (
            f"the claim of job {named} is gone: its lease ran out, and the job may run elsewhere; nothing was recorded "
            "for it. Stop working on it, and renew claims well within their lease"
        )


@dataclass(eq=False, repr=False)
class AlreadySettled(FairlaneError):
    """This program has settled the claim itself; a claim ends once."""

    job: UUID

    def __str__(self) -> str:
        return f"you have settled this claim of job {self.job} already; a claim ends once, and the first end counts"


class UndecodablePayload(FairlaneError):
    """Stored bytes that do not fit the task's signature."""


class StoreUnavailable(FairlaneError, ConnectionError):
    """The database cannot be reached, or temporarily refuses requests."""

    def __init__(self, message: str = "", remedy: str = "") -> None:
        super().__init__(f"{message}; {remedy}" if remedy else message)
        self.problem = message
        """What is wrong, without the remedy."""
        self.remedy = remedy
        """What an operator can do about it, where that is known."""


class StoreLost(FairlaneError):
    """The file of a SQLite database was deleted, moved or replaced while this program had it open. Waiting does not
    bring it back: what was written since then is lost."""


class WorkerDied(FairlaneError):
    """A loop of a worker died, and the worker stopped because of it."""


class Signal(Exception):
    """Raised by a handler to say how its job goes on, so that its return type stays true."""

    def __init__(self, reason: str, otherwise: str, delay: timedelta | str | float = 0) -> None:
        # An invalid signal is refused where the handler raises it. Both modules import the errors above.
        from fairlane.clock import duration_of
        from fairlane.parameters import check_value

        what = type(self).__name__
        check_value(what, "reason", reason, str, any_text=True)
        if duration_of(f"{what}: delay", delay) < 0:
            raise ConfigurationError(f"{what}: delay={delay!r} lies in the past; give a time from now on, or none")
        super().__init__(reason or otherwise)
        self.reason = reason


class Snooze(Signal):
    """Run this job again later; the attempt does not count."""

    def __init__(self, delay: timedelta | str | float, reason: str = "") -> None:
        super().__init__(reason, f"snoozed for {delay}", delay)
        self.delay = delay


class Retry(Signal):
    """Run this job again: after `delay`, at `at`, or when its backoff says."""

    def __init__(
        self, delay: timedelta | str | float | None = None, *, at: datetime | None = None, reason: str = ""
    ) -> None:
        super().__init__(reason, "retry asked for by the handler", 0 if delay is None else delay)
        if at is not None:
            from fairlane.clock import as_instant

            as_instant(at)
        self.delay = delay
        self.at = at


class Dead(Signal):
    """Set this job aside for good, with the reason."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason, "declared dead by the handler")


class Cancel(Signal):
    """End this job as cancelled."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason, "cancelled by the handler")
