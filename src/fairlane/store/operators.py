"""What operators ask of a store, as values: which jobs, what was done with each, and why something was not."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from uuid import UUID

import msgspec

from fairlane.clock import Instant
from fairlane.errors import ConfigurationError
from fairlane.job import JobRecord, State
from fairlane.parameters import check_fields
from fairlane.policy.unique import Holder, Readmission

__all__ = [
    "AT_ONCE",
    "BUSY",
    "CANCEL",
    "FORCE",
    "LOOK_AT_MOST",
    "PURGE",
    "REPLAY",
    "RETRY",
    "Action",
    "Cursor",
    "Handled",
    "JobFilter",
    "JobPage",
]

AT_ONCE = 1_000
"""Jobs that one action handles: it is one transaction, and holds the jobs it changes."""
LOOK_AT_MOST = 10_000
"""Jobs that one page of a listing looks at, whatever the filter lets through."""
BUSY = "somebody else is changing it at this moment"
_NO_SUCH_JOB = "there is no such job: it was never stored, or its retention has passed"


class JobFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which jobs. What is not given does not matter; `since` belongs to the span, `until` does not."""

    queue: str | None = None
    task: str | None = None
    state: State | None = None
    keys: dict[str, str | None] = {}
    """In canonical form; a job may carry more."""
    enqueued_since: Instant | None = None
    enqueued_until: Instant | None = None
    finished_since: Instant | None = None
    finished_until: Instant | None = None

    def __post_init__(self) -> None:
        check_fields(self, "JobFilter")

    @property
    def is_by_end(self) -> bool:
        """It lists jobs that have ended, in the order of that."""
        return self.state is not None and self.state.is_final


class JobPage(msgspec.Struct, frozen=True):
    """Some jobs of a listing."""

    jobs: list[JobRecord]
    after: str | None
    """Where to go on; `None`: this was the end. A short page, even an empty one, may have a place to go on from: what a
    single call looks at is bounded."""


class Handled(msgspec.Struct, frozen=True):
    """What an action made of one job."""

    job: UUID
    was: State | None
    """The state that it was found in; `None`: there is no such job."""
    skipped: str | None = None
    """Why nothing was done; `None`: it was done."""
    holder: UUID | None = None
    """The job that holds its unique key, if that is why."""
    took: tuple[bytes, Holder] | None = None
    """The unique key that it was put back with, and who holds that now."""
    replaced: UUID | None = None
    """The waiting job that was cancelled in its favor, because it held that key."""


class Action(msgspec.Struct, frozen=True):
    """Something that can be done with jobs in certain states."""

    done: str
    """The past participle."""
    states: tuple[State, ...]

    def applies_to(self, state: State) -> bool:
        return state in self.states

    def handled(
        self,
        jobs: Sequence[UUID],
        found: Mapping[UUID, State],
        busy: Collection[UUID] = (),
        readmission: Readmission | None = None,
    ) -> list[Handled]:
        """The report: `found` has the state of each job that there is; whoever is `busy` was left alone, and so was
        each job whose unique key another holds, as the `readmission` says."""
        keys = readmission or Readmission({}, {}, {}, {})
        handled = [self._handled(job, found.get(job), job in busy, keys.held.get(job)) for job in dict.fromkeys(jobs)]
        if not keys.back:
            return handled
        replaced = {new: old for old, new in keys.replaced.items()}
        return [
            each
            if each.skipped is not None
            else msgspec.structs.replace(each, took=keys.back.get(each.job), replaced=replaced.get(each.job))
            for each in handled
        ]

    def _handled(self, job: UUID, was: State | None, is_busy: bool, holder: UUID | None) -> Handled:
        if was is None:
            return Handled(job, None, _NO_SUCH_JOB)
        if not self.applies_to(was):
            possible = " and ".join(str(state) for state in self.states)
            return Handled(job, was, f"it is {was}; only {possible} jobs can be {self.done}")
        if holder is not None:
            return Handled(job, was, f"job {holder} holds its unique key", holder)
        return Handled(job, was, BUSY if is_busy else None)

    def bounded(self, jobs: Sequence[UUID]) -> list[UUID]:
        """These jobs, each once; refused if there are too many for one transaction."""
        if len(jobs) > AT_ONCE:
            raise ConfigurationError(f"{len(jobs):,} jobs cannot be {self.done} at once; give at most {AT_ONCE:,}")
        return list(dict.fromkeys(jobs))


CANCEL = Action("cancelled", (State.SCHEDULED, State.READY, State.RUNNING))
REPLAY = Action("replayed", (State.DEAD, State.CANCELLED))
PURGE = Action("purged", (State.DONE, State.DEAD, State.CANCELLED))
RETRY = Action("made due", (State.SCHEDULED,))
FORCE = Action("forced to start", (State.SCHEDULED, State.READY))


class Cursor(msgspec.Struct, frozen=True, array_like=True):
    """A place in a listing: a job's id, and where it is listed by its end, that and the entry that names it."""

    job: UUID
    at: Instant | None = None
    entry: int = 0

    def encode(self) -> str:
        end = "" if self.at is None else f".{self.at}.{self.entry}"
        return f"{self.job.hex}{end}"

    @classmethod
    def decode(cls, text: str | None, *, by_end: bool) -> Cursor | None:
        """The place that an earlier page named, or `None` for the start."""
        if text is None:
            return None
        job, *end = text.split(".")
        try:
            numbers = [int(each) for each in end]
            # Who makes a cursor up may write numbers into it that no database can hold.
            if len(numbers) != (2 if by_end else 0) or any(abs(each) >= 1 << 63 for each in numbers):
                raise ValueError
            return cls(UUID(hex=job), *numbers)
        except ValueError:
            raise ConfigurationError(
                f"after={text!r} is no place in this listing; give what its last page said"
            ) from None
