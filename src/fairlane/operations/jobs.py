"""Jobs as operators see and handle them.

An action is over jobs named one by one, or over a filter. It can be looked at before it is taken (`dry_run`), it is
bounded (`limit`), it works in batches of one transaction each, recorded as one entry of the audit with who and why, and
it reports what was done, what was not, and why.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Unpack
from uuid import UUID, uuid4

import msgspec

from fairlane.clock import checked_time, iso_text
from fairlane.errors import ConfigurationError, JobNotFound
from fairlane.job import AttemptRecord, JobRecord, State
from fairlane.operations.explanations import facts_of_job, forwarded_at
from fairlane.operations.requests import find_jobs
from fairlane.operations.section import BulkOptions, ChangeOptions, Duration, OnProgress, Section
from fairlane.parameters import checked_methods
from fairlane.policy.unique import Holder, OnReplayConflict, checked_on_replay_conflict
from fairlane.redaction import Part, Redactor
from fairlane.scheduler.explain import Explanation, explain
from fairlane.store import operators, records
from fairlane.store.audit import Note
from fairlane.store.operators import BUSY, CANCEL, FORCE, PURGE, REPLAY, RETRY, Action, Handled, JobFilter, JobPage
from fairlane.store.procedures import Work
from fairlane.store.protocol import Store

LIMIT = 1_000
"""Jobs that an action touches by default."""
BATCH = 200
"""Jobs of one transaction: small enough that nobody waits long for it."""
CANCELLED_TOGETHER = 50
"""The same where each is a statement of its own, and whoever claims one of them meanwhile waits."""
SAMPLE = 10

EXPORTED_AT_ONCE = 200
"""Jobs of one page of an export: their payloads are in memory together."""

Selection = Sequence[UUID] | JobFilter
"""Jobs named one by one, or all that fit."""
Do = Callable[[Store, list[UUID], Iterator[Note]], Awaitable[list[Handled]]]
"""Acts on jobs; each transaction takes a note of its own."""
Batch = tuple[list[JobRecord], list[Handled], bool]
"""Jobs to act on, those that do not exist, and whether there are more beyond the limit."""


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


@checked_methods
class Jobs(Section):
    """`app.operations.jobs`: look at jobs, cancel, retry, replay, purge and force them."""

    async def show(self, job: UUID) -> JobDetails:
        """Everything about one job, or `JobNotFound`. Of its call, its result and its errors, what may be seen."""
        store, redactor = await self._store(), self._redactor
        record = await store.job(job)
        attempts = await store.run(records.attempts(job))
        call, result = redacted(redactor, record)
        if redactor is not None:
            attempts = [msgspec.structs.replace(each, error=redactor.error(each.error, record)) for each in attempts]
        return JobDetails(record=redacted_error(redactor, record), attempts=tuple(attempts), call=call, result=result)

    async def explain(self, job: UUID, *, tasks: Collection[str] | None = None) -> Explanation:
        """Everything that holds a job, or `JobNotFound`. With `tasks`, also whether its task is one of them."""
        store = await self._store()
        facts, seen = await store.ask(lambda moment: facts_of_job(moment, job))
        return explain(facts, tasks, await forwarded_at(store, facts, self._source.forwarded), seen)

    async def export(
        self, filter: JobFilter, *, after: str | None = None, limit: int | None = None
    ) -> AsyncIterator[JobPage]:
        """Every job that fits, or the first `limit`, the newest first. Each page says where to go on after it; an empty
        one is there to say how far the look has come."""
        if limit is not None and limit < 1:
            raise ConfigurationError(f"limit={limit} leaves nothing to export; give a number above 0, or leave it out")
        store, left = await self._store(), limit
        while True:
            page = await find_jobs(store, filter, after, min(EXPORTED_AT_ONCE, left or EXPORTED_AT_ONCE))
            yield page
            after = page.after
            if left is not None:
                left -= len(page.jobs)
            if after is None or left == 0:
                return

    async def cancel(self, selection: Selection, **options: Unpack[BulkOptions]) -> Report:
        """Cancel jobs that wait, ask those that run to stop."""

        async def cancel(store: Store, jobs: list[UUID], notes: Iterator[Note]) -> list[Handled]:
            handled = await store.run(operators.cancel_jobs(jobs, next(notes)))
            # One at a time it can be waited for: nobody waits for us then.
            busy = [each.job for each in handled if each.skipped == BUSY]
            alone = [await store.run(operators.cancel_jobs([job], next(notes), waits=True)) for job in busy]
            return [each for each in handled if each.skipped != BUSY] + [each for one in alone for each in one]

        return await self._act(CANCEL, "cancel", cancel, selection, batch=CANCELLED_TOGETHER, **options)

    async def retry(self, selection: Selection, **options: Unpack[BulkOptions]) -> Report:
        """Let scheduled jobs be due now, whether they wait for a backoff or for their time."""
        return await self._act(RETRY, "retry", _by(operators.retry_now), selection, State.SCHEDULED, **options)

    async def replay(
        self,
        selection: Selection,
        *,
        delay: Duration | None = None,
        on_conflict: OnReplayConflict = "reject",
        **options: Unpack[BulkOptions],
    ) -> Report:
        """Put dead jobs back, cancelled ones too if they are named or asked for.

        A job whose unique key another job holds is skipped (`report.held` counts them); with `on_conflict="replace"`
        only if that one runs, and one that waits is cancelled. Of several with the same key one comes back, however
        many transactions that takes.
        """
        wait = None if delay is None else checked_time("delay", delay)
        chosen = checked_on_replay_conflict(on_conflict)
        dry_run = options.get("dry_run", False)
        taken: dict[bytes, Holder] = {}

        async def replay(store: Store, jobs: list[UUID], notes: Iterator[Note]) -> list[Handled]:
            note = next(notes)
            handled = await store.replay(jobs, wait, note, on_conflict=chosen, earlier=taken, dry_run=dry_run)
            taken.update(each.took for each in handled if each.took is not None)
            return handled

        return await self._act(REPLAY, "replay", replay, selection, State.DEAD, can_foresee=True, **options)

    async def purge(self, selection: Selection, **options: Unpack[BulkOptions]) -> Report:
        """Remove dead jobs for good, done and cancelled ones too if they are named or asked for."""
        return await self._act(PURGE, "purge", _by(operators.purge), selection, State.DEAD, **options)

    async def force(self, ids: Sequence[UUID], **options: Unpack[BulkOptions]) -> Report:
        """Let waiting jobs start next, whatever their limits say; every limit counts them."""
        return await self._act(FORCE, "force", _by(operators.force), ids, **options)

    async def _act(
        self,
        action: Action,
        verb: str,
        do: Do,
        selection: Selection,
        usual: State | None = None,
        *,
        batch: int | None = None,
        can_foresee: bool = False,
        limit: int = LIMIT,
        on_progress: OnProgress | None = None,
        **options: Unpack[ChangeOptions],
    ) -> Report:
        """One action over many jobs: however many transactions it takes, they are one entry of the audit. With
        `can_foresee`, `do` itself says what a dry run would do: more than the state of a job decides."""
        store, intent = await self._store(), self._intent(**options)
        if limit < 1:
            raise ConfigurationError(f"limit={limit} leaves nothing to do; give a number above 0")
        if isinstance(selection, JobFilter):
            chosen = _narrowed(selection, action, usual)
            queue, walk = chosen.queue, _walk(store, action, chosen, limit, batch or BATCH)
        else:
            queue, walk = None, _named(store, action, selection, limit, batch or BATCH)
        note = msgspec.structs.replace(intent.note(verb), about=_about(selection), act=uuid4())
        parts = count()
        done: list[Handled] = []
        skipped: list[Handled] = []
        sample: list[JobRecord] = []
        more = False
        async for found, absent, has_more in walk:
            more = has_more
            ids = [each.id for each in found]
            if intent.dry_run and not can_foresee:
                handled = action.handled(ids, {each.id: each.state for each in found})
            else:
                # An entry has the queue of its jobs, if they are of one.
                queues = {queue or each.queue for each in found}
                signed = msgspec.structs.replace(note, queue=queues.pop() if len(queues) == 1 else None)
                handled = await do(store, ids, (msgspec.structs.replace(signed, part=part) for part in parts))
            touched = {each.job for each in handled if each.skipped is None}
            done += [each for each in handled if each.skipped is None]
            skipped += [each for each in (*handled, *absent) if each.skipped is not None]
            sample = [*sample, *(each for each in found if each.id in touched)][:SAMPLE]
            if on_progress is not None:
                on_progress(len(done))
        return Report(
            action=action.done,
            is_dry_run=intent.dry_run,
            done=tuple(done),
            skipped=tuple(skipped),
            sample=tuple(sample),
            more=more,
        )

    # Last: below it, `list` in an annotation would be this method.
    async def list(
        self,
        filter: JobFilter,
        limit: int = 100,
        after: str | None = None,
        *,
        looks: int | None = None,
        on_progress: OnProgress | None = None,
    ) -> JobPage:
        """Jobs that fit, the newest first: as many as asked for, however many have to be looked at to find them.

        With `looks`, in so many looks of `LOOK_AT_MOST` jobs at most; then a page may be short and yet not the last.
        """
        if limit < 1:
            raise ConfigurationError(f"limit={limit} leaves nothing to show; give a number above 0")
        if looks is not None and looks < 1:
            raise ConfigurationError(f"looks={looks} leaves nothing to look at; give a number above 0, or leave it out")
        store = await self._store()
        found: list[JobRecord] = []
        for look in count(1):
            page = await find_jobs(store, filter, after, limit - len(found))
            found += page.jobs
            after = page.after
            if after is None or len(found) >= limit or look == looks:
                break
            if on_progress is not None:
                on_progress(len(found))
        return JobPage([redacted_error(self._redactor, each) for each in found], after)


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


def _by(procedure: Callable[[list[UUID], Note], Work[list[Handled]]]) -> Do:
    return lambda store, jobs, notes: store.run(procedure(jobs, next(notes)))


def _narrowed(selection: JobFilter, action: Action, usual: State | None) -> JobFilter:
    """A filter that can bring only what the action is for."""
    if selection.state is None:
        return msgspec.structs.replace(selection, state=usual)
    if not action.applies_to(selection.state):
        possible = ", ".join(str(state) for state in action.states)
        raise ConfigurationError(f"{selection.state} jobs cannot be {action.done}; possible are: {possible}")
    return selection


async def _walk(store: Store, action: Action, wanted: JobFilter, limit: int, size: int) -> AsyncIterator[Batch]:
    """Batches of what fits. Those that come meanwhile are newer than where the walk begins, and stay out of it."""
    after: str | None = None
    left = limit
    while left > 0:
        page = await find_jobs(store, wanted, after, min(size, left))
        batch = [each for each in page.jobs if action.applies_to(each.state)]
        left -= len(batch)
        after = page.after
        more = False
        if left <= 0 and after is not None:
            page = await find_jobs(store, wanted, after, 1)
            # Where a bounded look found nothing and has not come to the end, more cannot be ruled out.
            more = bool(page.jobs) or page.after is not None
        if batch:
            yield batch, [], more
        if after is None:
            return


async def _named(store: Store, action: Action, jobs: Sequence[UUID], limit: int, size: int) -> AsyncIterator[Batch]:
    named = list(dict.fromkeys(jobs))
    for start in range(0, min(limit, len(named)), size):
        batch: list[JobRecord] = []
        absent: list[UUID] = []
        for job in named[start : min(start + size, limit)]:
            try:
                batch.append(await store.job(job))
            except JobNotFound:
                absent.append(job)
        yield batch, action.handled(absent, {}), len(named) > limit


def _about(selection: Selection) -> str:
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
