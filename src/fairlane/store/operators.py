"""Actions of operators on jobs, and listings of jobs. A report says what was done with each job, or why nothing was."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any
from uuid import UUID

import msgspec

from fairlane.clock import Instant
from fairlane.errors import ConfigurationError
from fairlane.job import JobRecord, State, Until
from fairlane.parameters import check_fields
from fairlane.policy.unique import NO_KEYS, Ended, Holder, OnReplayConflict, Readmission, readmit
from fairlane.store.audit import Note, record_jobs
from fairlane.store.procedures import NOW, Each, Procedure, query, snapshot, transaction
from fairlane.store.rows import encode, no_such_job, queue_number, record_of, uuid_of

AT_ONCE = 1_000
"""Jobs that one action handles: it is one transaction, and holds the jobs it changes."""
LOOK_AT_MOST = 10_000
"""Jobs that one page of a listing looks at, whatever the filter lets through."""
STRETCH = 1_000
"""Jobs of a walk that are looked at together."""
ENTRIES = 100
"""Entries of finished jobs that are read together; one may name as many jobs as were settled together."""
LAST = 2**63 - 1
LAST_ID = UUID(int=2**128 - 1)
BUSY = "somebody else is changing it at this moment"
NO_READMISSION = Readmission({}, {}, {}, {})
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
        keys: Readmission = NO_READMISSION,
    ) -> list[Handled]:
        """The report: `found` has the state of each job that there is. Jobs that are `busy` were left alone, and so
        were jobs whose unique key another one holds."""
        replaced = {new: old for old, new in keys.replaced.items()}
        handled = []
        for job in dict.fromkeys(jobs):
            was, holder = found.get(job), keys.held.get(job)
            if was is None:
                each = Handled(job, None, _NO_SUCH_JOB)
            elif not self.applies_to(was):
                possible = " and ".join(str(state) for state in self.states)
                each = Handled(job, was, f"it is {was}; only {possible} jobs can be {self.done}")
            elif holder is not None:
                each = Handled(job, was, f"job {holder} holds its unique key", holder)
            elif job in busy:
                each = Handled(job, was, BUSY)
            else:
                each = Handled(job, was, took=keys.back.get(job), replaced=replaced.get(job))
            handled.append(each)
        return handled

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
    def decode(cls, text: str, *, by_end: bool) -> Cursor:
        """The place that an earlier page named."""
        job, *end = text.split(".")
        try:
            numbers = [int(each) for each in end]
            # A forged cursor may have numbers that no database can hold.
            if len(numbers) != (2 if by_end else 0) or any(abs(each) >= 1 << 63 for each in numbers):
                raise ValueError
            return cls(UUID(hex=job), *numbers)
        except ValueError:
            raise ConfigurationError(
                f"after={text!r} is no place in this listing; give what its last page said"
            ) from None


@snapshot
def foresee_replay(
    jobs: Sequence[UUID], on_conflict: OnReplayConflict = "reject", earlier: Mapping[bytes, Holder] = NO_KEYS
) -> Procedure[list[Handled]]:
    """What `replay` would report now."""
    listed = REPLAY.bounded(jobs)
    readmission = yield from _readmitted(listed, on_conflict, earlier, takes=False)
    return REPLAY.handled(listed, (yield from _states(listed)), keys=readmission)


@transaction
def replay(
    jobs: Sequence[UUID],
    delay: int | None = None,
    note: Note | None = None,
    on_conflict: OnReplayConflict = "reject",
    earlier: Mapping[bytes, Holder] = NO_KEYS,
) -> Procedure[list[Handled]]:
    """Put dead and cancelled jobs back at the end of their lanes, now or after so many microseconds.

    Attempts are counted afresh and the history stays. A job whose unique key another job holds is skipped, or takes the
    place of that one if it waits (`on_conflict`). Keys that `earlier` transactions of the same action took are held, by
    jobs that are not replaced.
    """
    listed, now = REPLAY.bounded(jobs), (yield NOW)
    # Keys before jobs, as an enqueue has it: no two wait crosswise.
    readmission = yield from _readmitted(listed, on_conflict, earlier, takes=True)
    held = readmission.held
    gone: dict[UUID, State] = {}
    for old, new in readmission.replaced.items():
        gone[old], state = yield from _cancel(old, now, only_waiting=True, reason=f"replaced by job {new}")
        if state is not State.CANCELLED:
            held[new] = old  # it has started since we looked, and goes on alone
    taken = {key: each for key, each in readmission.taken.items() if each.job not in held}
    if taken:
        owners = [
            list(each) for each in zip(*((each.job, each.digest, each.until) for each in taken.values()), strict=True)
        ]
        yield query("take_uniques", list(taken), *owners, [None] * len(taken), False)
    # A job that was just cancelled in favor of another stays cancelled, even if it was given too.
    back = [job for job in listed if job not in held and job not in gone]
    entries = yield from _lock_entries(back)
    states = _states_in((yield query("replay", now, back, delay)))
    yield query("unfile_jobs", [job for job, state in states.items() if REPLAY.applies_to(state)], *entries)
    states |= (yield from _states(list(held))) | gone
    handled = REPLAY.handled(listed, states, keys=readmission)
    yield from record_jobs(note, now, handled)
    return handled


def _readmitted(
    jobs: Sequence[UUID], on_conflict: OnReplayConflict, earlier: Mapping[bytes, Holder], *, takes: bool
) -> Procedure[Readmission]:
    """Which of these jobs may come back, as far as their unique keys are concerned.

    If they are to come back (`takes`), the keys stay locked until the transaction ends.
    """
    listed = list(jobs)
    found = yield query("select_unique_jobs", listed)
    if not found:
        return NO_READMISSION
    keys = sorted({key for _, key, _, _ in found})
    if takes:
        yield query("lock_uniques", keys)
        # Read them again: the transaction that held the lock may have put some of them back.
        found = yield query("select_unique_jobs", listed)
    ended = [Ended(uuid_of(job), key, Until(until), digest) for job, key, until, digest in found]
    known = yield query("select_holders", keys, (yield NOW))
    holders = {
        key: Holder(uuid_of(job), digest, Until(until), at, None if state is None else State(state), bool(has_started))
        for _, key, job, digest, until, at, state, has_started in known
        if job is not None
    }
    return readmit(ended, holders, known[0][0], on_conflict, earlier)


def _states(jobs: Sequence[UUID]) -> Procedure[dict[UUID, State]]:
    """The states of those of these jobs that there are."""
    return _states_in((yield Each("select_states", [(job,) for job in jobs])) if jobs else ())


def _states_in(found: Iterable[Sequence[Any]]) -> dict[UUID, State]:
    return {uuid_of(row[0]): State(row[1]) for row in found}


def _lock_entries(jobs: Sequence[UUID]) -> Procedure[tuple[list[bool], list[int]]]:
    found = yield query("lock_entries", list(jobs))
    return [is_dead for is_dead, _ in found], [entry for _, entry in found]


@transaction
def cancel(job: UUID, note: Note | None = None) -> Procedure[State]:
    """Cancel a waiting job at once, ask a running one to stop. Returns the state it is in now, or `JobNotFound`."""
    now = yield NOW
    was, state = yield from _cancel(job, now)
    yield from record_jobs(note, now, CANCEL.handled([job], {job: was}))
    return state


def _cancel(
    job: UUID, now: Instant | None, *, only_waiting: bool = False, reason: str | None = None
) -> Procedure[tuple[State, State]]:
    """The same. Returns its state before and now."""
    found = yield query("cancel_job", job, now, only_waiting, reason)
    if not found:
        raise no_such_job(job)
    was, state, *_ = found[0]
    return State(was), State(state)


@transaction
def cancel_jobs(jobs: Sequence[UUID], note: Note, *, waits: bool = False) -> Procedure[list[Handled]]:
    """Cancel jobs that wait, ask those that run to stop. A job that another transaction is changing is skipped, unless
    `waits` is set: with several jobs, two transactions might wait for each other."""
    listed, now = CANCEL.bounded(jobs), (yield NOW)
    present = list((yield from _states(listed)))
    idle = present if waits else [uuid_of(job) for (job,) in (yield query("lock_idle", present))]
    found = dict.fromkeys(present, State.READY)
    for job in idle:
        found[job], _ = yield from _cancel(job, now)
    handled = CANCEL.handled(listed, found, set(present) - set(idle))
    yield from record_jobs(note, now, handled)
    return handled


@transaction
def purge(jobs: Sequence[UUID], note: Note | None = None) -> Procedure[list[Handled]]:
    """Remove done, dead and cancelled jobs for good, with their history."""
    listed = PURGE.bounded(jobs)
    entries = yield from _lock_entries(listed)
    states = _states_in((yield query("purge", listed)))
    gone = [job for job, state in states.items() if PURGE.applies_to(state)]
    yield query("unfile_jobs", gone, *entries)
    yield query("forget_jobs", gone)
    handled = PURGE.handled(listed, states)
    yield from record_jobs(note, (yield NOW), handled)
    return handled


@transaction
def retry_now(jobs: Sequence[UUID], note: Note | None = None) -> Procedure[list[Handled]]:
    """Let scheduled jobs be due now, whether they wait for a backoff or for their time."""
    listed, now = RETRY.bounded(jobs), (yield NOW)
    found = yield query("retry_now", now, listed)
    handled = RETRY.handled(listed, _states_in(found), {uuid_of(row[0]) for row in found if row[2]})
    yield from record_jobs(note, now, handled)
    return handled


@transaction
def force(jobs: Sequence[UUID], note: Note) -> Procedure[list[Handled]]:
    """Let waiting jobs start next, in the slots that come free, whatever their limits say. Every limit counts them, and
    so does the turn of their flow."""
    listed, now = FORCE.bounded(jobs), (yield NOW)
    handled = FORCE.handled(listed, _states_in((yield query("force", now, listed))))
    yield from record_jobs(note, now, handled)
    return handled


@snapshot
def find_jobs(filter: JobFilter, after: str | None = None, limit: int = 100) -> Procedure[JobPage]:
    """A page of the jobs that fit, the newest first: by id, or by their end where `filter.state` is final.

    While jobs come, change and go, paging on brings no job twice that stays as it is, and leaves none out.
    """
    # The index that serves the filter is walked a stretch at a time, until the page is full or enough was looked at.
    queue = None if filter.queue is None else (yield from queue_number(filter.queue))
    place = None if after is None else Cursor.decode(after, by_end=filter.is_by_end)
    found: list[JobRecord] = []
    looked_at = 0
    while looked_at < LOOK_AT_MOST:
        stretch = yield from _stretch(filter, queue, place, min(STRETCH, LOOK_AT_MOST - looked_at))
        if not stretch:
            return JobPage(found, None)
        found += yield from _fitting(stretch, filter, queue, limit - len(found))
        if len(found) >= limit:
            last = next(each for each in stretch if each.job == found[-1].id)
            return JobPage(found, last.encode())
        place = stretch[-1]
        looked_at += len(stretch)
    assert place is not None
    return JobPage(found, place.encode())


def _stretch(wanted: JobFilter, queue: int | None, place: Cursor | None, count: int) -> Procedure[list[Cursor]]:
    """The next places of the walk that serves a filter."""
    before = None if place is None else place.job
    match wanted.state:
        case State.DONE | State.DEAD | State.CANCELLED as state:
            return (yield from _stretch_of_ended(wanted, state, place, count))
        case State.RUNNING:
            walked = yield query("walk_running_jobs", before, count)
        case _ if queue is not None:
            walked = yield query("walk_jobs_of_queue", before, count, queue)
        case _:
            walked = yield query("walk_jobs", before, count)
    return [Cursor(uuid_of(job)) for (job,) in walked]


def _stretch_of_ended(wanted: JobFilter, state: State, place: Cursor | None, count: int) -> Procedure[list[Cursor]]:
    until = LAST if wanted.finished_until is None else wanted.finished_until
    start = place or Cursor(LAST_ID, until, 0 if wanted.finished_until is not None else LAST)
    while True:
        asked = (int(state), start.at, start.entry, wanted.finished_since or 0, ENTRIES)
        entries = yield query("walk_finished", *asked)
        # On PostgreSQL an entry names the jobs that ended together, on SQLite each by itself.
        found = [
            Cursor(job, at, entry)
            for at, entry, named in entries
            for job in (sorted(named, reverse=True) if isinstance(named, list) else [uuid_of(named)])
        ]
        # The entry that an earlier page has come to may name jobs that are still to be looked at.
        found = [each for each in found if (each.at, each.entry) != (start.at, start.entry) or each.job < start.job]
        if found or len(entries) < ENTRIES:
            return found[:count]
        start = Cursor(UUID(int=0), entries[-1][0], entries[-1][1])


def _fitting(stretch: Sequence[Cursor], wanted: JobFilter, queue: int | None, limit: int) -> Procedure[list[JobRecord]]:
    found = yield query(
        "select_fitting",
        [each.job for each in stretch],
        queue,
        wanted.task,
        None if wanted.state is None else int(wanted.state),
        encode(wanted.keys),
        wanted.enqueued_since,
        wanted.enqueued_until,
        wanted.finished_since,
        wanted.finished_until,
        limit,
    )
    return [record_of(row) for row in found]
