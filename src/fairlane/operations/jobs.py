"""Jobs as operators see and handle them.

An action is over jobs named one by one, or over a filter. It can be looked at before it is taken (`dry_run`), it is
bounded (`limit`), it works in batches of one transaction each, recorded with who and why, and it reports what was done,
what was not, and why.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any
from uuid import UUID

import msgspec

from fairlane.errors import ConfigurationError, JobNotFound
from fairlane.job import AttemptRecord, JobRecord, State
from fairlane.store.auditing import Note
from fairlane.store.finding import find_jobs
from fairlane.store.operators import CANCEL, FORCE, PURGE, REPLAY, RETRY, Action, Handled, JobFilter, JobPage
from fairlane.store.protocol import Store

__all__ = [
    "LIMIT",
    "JobDetails",
    "Redact",
    "Report",
    "Selection",
    "cancel_jobs",
    "force_jobs",
    "list_jobs",
    "purge_jobs",
    "readable",
    "replay_jobs",
    "retry_jobs",
    "show_job",
]

LIMIT = 1_000
"""Jobs that an action touches unless told otherwise."""
BATCH = 200
"""Jobs of one transaction: small enough that nobody waits long for it."""
SAMPLE = 10

HIDDEN = "(hidden: redact failed, and the log says why)"
log = logging.getLogger("fairlane.operations")

Redact = Callable[[JobRecord, Any], Any]
"""Given a job and its call (`[args, kwargs]`), or its result: what of it may be seen."""
Selection = Sequence[UUID] | JobFilter
"""Jobs named one by one, or all that fit."""
OnProgress = Callable[[int], None]
Do = Callable[[list[JobRecord]], Awaitable[list[Handled]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDetails:
    """One job, with all that is known of it."""

    record: JobRecord
    attempts: tuple[AttemptRecord, ...]
    call: Any
    """The payload as JSON (`[args, kwargs]`); text where it is none."""
    result: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What an action did, or would do."""

    action: str
    is_dry_run: bool
    done: tuple[Handled, ...]
    """Those that were touched, or would be."""
    skipped: tuple[Handled, ...]
    sample: tuple[JobRecord, ...]
    """The first of those that were touched, as they were before."""
    more: bool
    """The limit was reached, and there are others that fit."""


async def list_jobs(
    store: Store,
    wanted: JobFilter,
    limit: int = 100,
    after: str | None = None,
    *,
    looks: int | None = None,
    on_progress: OnProgress | None = None,
) -> JobPage:
    """Jobs that fit, the newest first: as many as asked for, however many have to be looked at to find them.

    With `looks`, in so many looks of `LOOK_AT_MOST` jobs at most; then a page may be short and yet not the last one.
    """
    found: list[JobRecord] = []
    for look in count(1):
        page = await find_jobs(store, wanted, after, limit - len(found))
        found += page.jobs
        after = page.after
        if after is None or len(found) >= limit or look == looks:
            break
        if on_progress is not None:
            on_progress(len(found))
    return JobPage(found, after)


async def show_job(store: Store, job: UUID, redact: Redact | None = None) -> JobDetails:
    """Everything about one job, or `JobNotFound`. Of its call and its result, what `redact` lets be seen."""
    record = await store.job(job)
    attempts = tuple(await store.attempts(job))
    call, result = redacted(redact, record)
    return JobDetails(record=record, attempts=attempts, call=call, result=result)


def redacted(redact: Redact | None, record: JobRecord) -> tuple[Any, Any]:
    """What may be seen of a job's call and of its result."""
    call, result = readable(record.payload), readable(record.result)
    if redact is None:
        return call, result
    try:
        return redact(record, call), None if record.result is None else redact(record, result)
    except Exception:
        # What it failed on may be the secret itself.
        log.exception("redact failed for job %s", record.id)
        return HIDDEN, None if record.result is None else HIDDEN


async def replay_jobs(
    store: Store,
    selection: Selection,
    *,
    actor: str,
    reason: str = "",
    delay: int | None = None,
    limit: int = LIMIT,
    dry_run: bool = False,
    on_progress: OnProgress | None = None,
) -> Report:
    """Put dead jobs back, cancelled ones too if they are named or asked for; at once, or in `delay` microseconds."""
    note = Note(actor=actor, action="replay", reason=reason)

    async def do(jobs: list[JobRecord]) -> list[Handled]:
        return await store.replay([each.id for each in jobs], delay, _about(note, jobs))

    errand = _Errand(store, REPLAY, do, on_progress)
    return await errand.run(_narrowed(REPLAY, selection, State.DEAD), limit, dry_run)


async def purge_jobs(
    store: Store,
    selection: Selection,
    *,
    actor: str,
    reason: str = "",
    limit: int = LIMIT,
    dry_run: bool = False,
    on_progress: OnProgress | None = None,
) -> Report:
    """Remove dead jobs for good, done and cancelled ones too if they are named or asked for."""
    note = Note(actor=actor, action="purge", reason=reason)

    async def do(jobs: list[JobRecord]) -> list[Handled]:
        return await store.purge([each.id for each in jobs], _about(note, jobs))

    errand = _Errand(store, PURGE, do, on_progress)
    return await errand.run(_narrowed(PURGE, selection, State.DEAD), limit, dry_run)


async def retry_jobs(
    store: Store,
    selection: Selection,
    *,
    actor: str,
    reason: str = "",
    limit: int = LIMIT,
    dry_run: bool = False,
    on_progress: OnProgress | None = None,
) -> Report:
    """Let scheduled jobs be due now, whether they wait for a backoff or for their time."""
    note = Note(actor=actor, action="retry", reason=reason)

    async def do(jobs: list[JobRecord]) -> list[Handled]:
        return await store.retry_now([each.id for each in jobs], _about(note, jobs))

    errand = _Errand(store, RETRY, do, on_progress)
    return await errand.run(_narrowed(RETRY, selection, State.SCHEDULED), limit, dry_run)


async def cancel_jobs(
    store: Store,
    selection: Selection,
    *,
    actor: str,
    reason: str = "",
    limit: int = LIMIT,
    dry_run: bool = False,
    on_progress: OnProgress | None = None,
) -> Report:
    """Cancel jobs that wait, ask those that run to stop. A transaction each: whoever claims meanwhile need not wait."""
    note = Note(actor=actor, action="cancel", reason=reason)

    async def do(jobs: list[JobRecord]) -> list[Handled]:
        found: dict[UUID, State] = {}
        for each in jobs:
            try:
                state = await store.cancel(each.id, _about(note, [each]))
            except JobNotFound:
                continue
            # It may have ended between the look and the touch; then it says so.
            ended = state in (State.DONE, State.DEAD)
            found[each.id] = state if ended or state is State.RUNNING else each.state
        return CANCEL.handled([each.id for each in jobs], found)

    return await _Errand(store, CANCEL, do, on_progress).run(_narrowed(CANCEL, selection, None), limit, dry_run)


async def force_jobs(
    store: Store,
    jobs: Sequence[UUID],
    *,
    actor: str,
    reason: str = "",
    limit: int = LIMIT,
    dry_run: bool = False,
    on_progress: OnProgress | None = None,
) -> Report:
    """Let waiting jobs start next, whatever their limits say; every limit counts them. Only jobs that are named."""
    note = Note(actor=actor, action="force", reason=reason)

    async def do(batch: list[JobRecord]) -> list[Handled]:
        return await store.force([each.id for each in batch], _about(note, batch))

    return await _Errand(store, FORCE, do, on_progress).run(jobs, limit, dry_run)


def _about(note: Note, jobs: Sequence[JobRecord]) -> Note:
    """The note with the queue of these jobs, if they are of one."""
    queues = {each.queue for each in jobs}
    return msgspec.structs.replace(note, queue=queues.pop() if len(queues) == 1 else None)


def _narrowed(action: Action, selection: Selection, usual: State | None) -> Selection:
    """A filter that can bring only what the action is for."""
    if not isinstance(selection, JobFilter):
        return selection
    if selection.state is None:
        return msgspec.structs.replace(selection, state=usual)
    if not action.applies_to(selection.state):
        possible = ", ".join(str(state) for state in action.states)
        raise ConfigurationError(f"{selection.state} jobs cannot be {action.done}; possible are: {possible}")
    return selection


class _Errand:
    """One action over many jobs."""

    def __init__(self, store: Store, action: Action, do: Do, on_progress: OnProgress | None) -> None:
        self._store = store
        self._action = action
        self._do = do
        self._on_progress = on_progress

    async def run(self, selection: Selection, limit: int, dry_run: bool) -> Report:
        if limit < 1:
            raise ConfigurationError(f"limit={limit} leaves nothing to do; give a number above 0")
        report = Report(action=self._action.done, is_dry_run=dry_run, done=(), skipped=(), sample=(), more=False)
        walk = self._walk(selection, limit) if isinstance(selection, JobFilter) else self._named(selection, limit)
        async for batch, absent, more in walk:
            handled = (
                self._action.handled([each.id for each in batch], {each.id: each.state for each in batch})
                if dry_run
                else await self._do(batch)
            )
            report = _with(report, batch, [*handled, *absent], more)
            if self._on_progress is not None:
                self._on_progress(len(report.done))
        return report

    async def _walk(self, wanted: JobFilter, limit: int) -> AsyncIterator[tuple[list[JobRecord], list[Handled], bool]]:
        """Batches of what fits. Those that come meanwhile are newer than where the walk begins, and stay out of it."""
        after: str | None = None
        left = limit
        while left > 0:
            page = await find_jobs(self._store, wanted, after, min(BATCH, left))
            batch = [each for each in page.jobs if self._action.applies_to(each.state)]
            left -= len(batch)
            after = page.after
            more = left <= 0 and after is not None and await self._has_more(wanted, after)
            if batch:
                yield batch, [], more
            if after is None:
                return

    async def _has_more(self, wanted: JobFilter, after: str) -> bool:
        page = await find_jobs(self._store, wanted, after, 1)
        # Where a bounded look found nothing and has not come to the end, more cannot be ruled out.
        return bool(page.jobs) or page.after is not None

    async def _named(
        self, jobs: Sequence[UUID], limit: int
    ) -> AsyncIterator[tuple[list[JobRecord], list[Handled], bool]]:
        named = list(dict.fromkeys(jobs))
        for start in range(0, min(limit, len(named)), BATCH):
            batch: list[JobRecord] = []
            absent: list[UUID] = []
            for job in named[start : min(start + BATCH, limit)]:
                try:
                    batch.append(await self._store.job(job))
                except JobNotFound:
                    absent.append(job)
            is_last = start + BATCH >= min(limit, len(named))
            yield batch, self._action.handled(absent, {}), is_last and len(named) > limit


def _with(report: Report, batch: list[JobRecord], handled: list[Handled], more: bool) -> Report:
    done = tuple(each for each in handled if each.skipped is None)
    touched = {each.job for each in done}
    sample = (*report.sample, *(each for each in batch if each.id in touched))[:SAMPLE]
    skipped = tuple(each for each in handled if each.skipped is not None)
    return replace(
        report, done=report.done + done, skipped=report.skipped + skipped, sample=sample, more=report.more or more
    )


def readable(stored: bytes | None) -> Any:
    """JSON as what it says, anything else as text; bytes that are neither, as how many there are."""
    if stored is None:
        return None
    try:
        return msgspec.json.decode(stored)
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        return stored.decode()
    except UnicodeDecodeError:
        return f"({len(stored):,} bytes that are no text)"
