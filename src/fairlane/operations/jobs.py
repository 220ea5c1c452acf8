"""Jobs as operators see and handle them.

An action is over jobs named one by one, or over a filter. It can be looked at before it is taken (`dry_run`), it is
bounded (`limit`), it works in batches of one transaction each, recorded as one entry of the audit with who and why, and
it reports what was done, what was not, and why.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any
from uuid import UUID, uuid4

import msgspec

from fairlane.clock import iso_text
from fairlane.errors import ConfigurationError, JobNotFound
from fairlane.job import AttemptRecord, JobRecord, State
from fairlane.operations.requests import find_jobs
from fairlane.policy.unique import Holder, OnReplayConflict, checked_on_replay_conflict
from fairlane.redaction import Part, Redactor
from fairlane.store import operators, records
from fairlane.store.audit import Note
from fairlane.store.operators import BUSY, CANCEL, FORCE, PURGE, REPLAY, RETRY, Action, Handled, JobFilter, JobPage
from fairlane.store.protocol import Store

LIMIT = 1_000
"""Jobs that an action touches unless told otherwise."""
BATCH = 200
"""Jobs of one transaction: small enough that nobody waits long for it."""
CANCELLED_TOGETHER = 50
"""The same where each is a statement of its own, and whoever claims one of them meanwhile waits."""
SAMPLE = 10

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

    @property
    def replaced(self) -> tuple[UUID, ...]:
        """Waiting jobs that were cancelled, or would be, because they held the unique keys of those."""
        return tuple(each.replaced for each in self.done if each.replaced is not None)

    @property
    def held(self) -> int:
        """How many were skipped because another job holds their unique key."""
        return sum(each.holder is not None for each in self.skipped)


async def list_jobs(
    store: Store,
    wanted: JobFilter,
    limit: int = 100,
    after: str | None = None,
    *,
    looks: int | None = None,
    redactor: Redactor | None = None,
    on_progress: OnProgress | None = None,
) -> JobPage:
    """Jobs that fit, the newest first: as many as asked for, however many have to be looked at to find them.

    With `looks`, in so many looks of `LOOK_AT_MOST` jobs at most; then a page may be short and yet not the last one.
    """
    if limit < 1:
        raise ConfigurationError(f"limit={limit} leaves nothing to show; give a number above 0")
    if looks is not None and looks < 1:
        raise ConfigurationError(f"looks={looks} leaves nothing to look at; give a number above 0, or leave it out")
    found: list[JobRecord] = []
    for look in count(1):
        page = await find_jobs(store, wanted, after, limit - len(found))
        found += page.jobs
        after = page.after
        if after is None or len(found) >= limit or look == looks:
            break
        if on_progress is not None:
            on_progress(len(found))
    return JobPage([redacted_error(redactor, each) for each in found], after)


async def show_job(store: Store, job: UUID, redactor: Redactor | None = None) -> JobDetails:
    """Everything about one job, or `JobNotFound`. Of its call, its result and its errors, what may be seen."""
    record = await store.job(job)
    attempts = await store.run(records.attempts(job))
    call, result = redacted(redactor, record)
    if redactor is not None:
        attempts = [msgspec.structs.replace(each, error=redactor.error(each.error, record)) for each in attempts]
    return JobDetails(record=redacted_error(redactor, record), attempts=tuple(attempts), call=call, result=result)


def redacted(redactor: Redactor | None, record: JobRecord) -> tuple[Any, Any]:
    """What may be seen of a job's call and of its result."""
    call, result = readable(record.payload), readable(record.result)
    if redactor is None:
        return call, result
    return redactor.shown(Part.CALL, call, record), redactor.shown(Part.RESULT, result, record)


def redacted_error(redactor: Redactor | None, record: JobRecord) -> JobRecord:
    """The job with what may be seen of its last error."""
    if redactor is None or record.error is None:
        return record
    return msgspec.structs.replace(record, error=redactor.error(record.error, record))


async def replay_jobs(
    store: Store,
    selection: Selection,
    *,
    actor: str,
    reason: str = "",
    delay: int | None = None,
    on_conflict: OnReplayConflict = "reject",
    limit: int = LIMIT,
    dry_run: bool = False,
    on_progress: OnProgress | None = None,
) -> Report:
    """Put dead jobs back, cancelled ones too if they are named or asked for; at once, or in `delay` microseconds.

    A job whose unique key another job holds is skipped; with `on_conflict="replace"` only if that one runs, and one
    that waits is cancelled. Of several with the same key one comes back, however many transactions that takes.
    """
    act = _Act(actor, "replay", reason, selection)
    chosen = checked_on_replay_conflict(on_conflict)
    taken: dict[bytes, Holder] = {}

    async def do(jobs: list[JobRecord]) -> list[Handled]:
        ids = [each.id for each in jobs]
        handled = await store.replay(ids, delay, act.note(jobs), on_conflict=chosen, earlier=taken, dry_run=dry_run)
        taken.update(each.took for each in handled if each.took is not None)
        return handled

    errand = _Errand(store, REPLAY, do, on_progress, can_foresee=True)
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
    act = _Act(actor, "purge", reason, selection)

    async def do(jobs: list[JobRecord]) -> list[Handled]:
        return await store.run(operators.purge([each.id for each in jobs], act.note(jobs)))

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
    act = _Act(actor, "retry", reason, selection)

    async def do(jobs: list[JobRecord]) -> list[Handled]:
        return await store.run(operators.retry_now([each.id for each in jobs], act.note(jobs)))

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
    """Cancel jobs that wait, ask those that run to stop."""
    act = _Act(actor, "cancel", reason, selection)

    async def do(jobs: list[JobRecord]) -> list[Handled]:
        handled = await store.run(operators.cancel_jobs([each.id for each in jobs], act.note(jobs)))
        # One at a time it can be waited for: nobody waits for us then.
        busy = [each.job for each in handled if each.skipped == BUSY]
        alone = [await store.run(operators.cancel_jobs([job], act.note(jobs), waits=True)) for job in busy]
        return [each for each in handled if each.skipped != BUSY] + [each for one in alone for each in one]

    errand = _Errand(store, CANCEL, do, on_progress, CANCELLED_TOGETHER)
    return await errand.run(_narrowed(CANCEL, selection, None), limit, dry_run)


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
    act = _Act(actor, "force", reason, jobs)

    async def do(batch: list[JobRecord]) -> list[Handled]:
        return await store.run(operators.force([each.id for each in batch], act.note(batch)))

    return await _Errand(store, FORCE, do, on_progress).run(jobs, limit, dry_run)


class _Act:
    """One action, however many transactions it takes: all of them are one entry of the audit."""

    def __init__(self, actor: str, action: str, reason: str, selection: Selection) -> None:
        self._note = Note(actor=actor, action=action, reason=reason, about=_said(selection), act=uuid4())
        self._parts = count()
        self._queue = selection.queue if isinstance(selection, JobFilter) else None

    def note(self, jobs: Sequence[JobRecord]) -> Note:
        """What its next transaction leaves in the audit: with the queue of its jobs, if they are of one."""
        queues = {each.queue for each in jobs}
        queue = self._queue or (queues.pop() if len(queues) == 1 else None)
        return msgspec.structs.replace(self._note, queue=queue, part=next(self._parts))


def _said(selection: Selection) -> str:
    """Which jobs were asked for, in words."""
    if not isinstance(selection, JobFilter):
        return str(selection[0]) if len(selection) == 1 else ""
    given = {name: getattr(selection, name) for name in ("queue", "task", "state")}
    words = [f"{name}={value}" for name, value in given.items() if value is not None]
    words += [f"{name}={value}" for name, value in selection.keys.items()]
    for name in ("enqueued_since", "enqueued_until", "finished_since", "finished_until"):
        at = getattr(selection, name)
        words += [] if at is None else [f"{name}={iso_text(at)}"]
    return " ".join(words) or "all"


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

    def __init__(
        self,
        store: Store,
        action: Action,
        do: Do,
        on_progress: OnProgress | None,
        batch: int | None = None,
        *,
        can_foresee: bool = False,
    ) -> None:
        self._store = store
        self._can_foresee = can_foresee
        """Asked for a dry run, the store itself says what it would do: more than the state of a job decides."""
        self._action = action
        self._do = do
        self._on_progress = on_progress
        self._batch = batch or BATCH

    async def run(self, selection: Selection, limit: int, dry_run: bool) -> Report:
        if limit < 1:
            raise ConfigurationError(f"limit={limit} leaves nothing to do; give a number above 0")
        report = Report(action=self._action.done, is_dry_run=dry_run, done=(), skipped=(), sample=(), more=False)
        walk = self._walk(selection, limit) if isinstance(selection, JobFilter) else self._named(selection, limit)
        async for batch, absent, more in walk:
            handled = (
                self._action.handled([each.id for each in batch], {each.id: each.state for each in batch})
                if dry_run and not self._can_foresee
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
            page = await find_jobs(self._store, wanted, after, min(self._batch, left))
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
        for start in range(0, min(limit, len(named)), self._batch):
            batch: list[JobRecord] = []
            absent: list[UUID] = []
            for job in named[start : min(start + self._batch, limit)]:
                try:
                    batch.append(await self._store.job(job))
                except JobNotFound:
                    absent.append(job)
            is_last = start + self._batch >= min(limit, len(named))
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
