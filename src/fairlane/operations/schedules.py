"""Schedules as operators see and handle them."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Unpack
from uuid import UUID

import msgspec

from fairlane.clock import Instant
from fairlane.cron.recurrence import recurrence_of
from fairlane.errors import UnknownSchedule
from fairlane.job import JobRecord, State
from fairlane.operations.jobs import redacted
from fairlane.operations.section import ChangeOptions, Section
from fairlane.parameters import checked_methods
from fairlane.redaction import Redactor
from fairlane.store import schedules
from fairlane.store.boards import QueueTime
from fairlane.store.schedules import ScheduleRow

NO_JOB = UUID(int=0)
"""The id of a job that is yet to be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleView:
    """A schedule as it stands."""

    now: Instant
    """When it was looked at, by the clock on the wall, which slots go by."""
    name: str
    state: str
    """`active`, `paused`, or `orphaned`: no worker declares it any more, so it does not fire."""
    is_paused: bool
    """An orphaned one may be paused besides."""
    recurrence: str
    words: str
    """The same for people: `At 09:00 on Monday through Friday, Europe/Berlin`."""
    missed: str
    task: str
    queue: str
    call: Any
    """Its arguments, as JSON has them: `[args, kwargs]`; `None` where the app's codec keeps them secret."""
    next_at: Instant | None
    """Its next slot; `None` while it is not to fire."""
    resumes_at: Instant | None
    """The first slot that it would fire if it were resumed now; `None` where it is not paused."""
    last_slot: Instant | None
    """What was fired last: a slot, or the moment of a trigger."""
    last_job: UUID | None
    """The job that stands for it; `None` where there is none, as its queue's rules refused it."""
    last_fired_at: Instant | None
    declared_at: Instant
    """When a worker last said that it has it."""
    triggers_waiting: int
    """Triggers of operators that no worker has fired yet."""
    job: JobRecord
    """The job to come, as far as it is known: what `redact` is asked about."""

    @property
    def triggers_in_words(self) -> str:
        """How many triggers no worker has taken yet; empty: all were."""
        waiting = self.triggers_waiting
        return f"{waiting:,} {'trigger waits' if waiting == 1 else 'triggers wait'} for a worker" if waiting else ""


@checked_methods
class Schedules(Section):
    """`app.operations.schedules`: what is enqueued again and again, and when."""

    async def pause(self, name: str, **options: Unpack[ChangeOptions]) -> ScheduleView:
        """Fire a schedule no more, until it is resumed. Slots that come meanwhile are not made up for."""
        return await self._change_overrides(name, "pause schedule", is_paused=True, **options)

    async def resume(self, name: str, **options: Unpack[ChangeOptions]) -> ScheduleView:
        """Let a schedule fire again, from its next slot on."""
        return await self._change_overrides(name, "resume schedule", is_paused=False, **options)

    async def trigger(self, name: str, **options: Unpack[ChangeOptions]) -> ScheduleView:
        """Let a worker fire a schedule once, at once and beside its slots; also while it is paused."""
        return await self._change_overrides(name, "trigger schedule", is_paused=None, **options)

    async def _change_overrides(
        self, name: str, action: str, *, is_paused: bool | None, **options: Unpack[ChangeOptions]
    ) -> ScheduleView:
        intent = self._intent(**options)
        store = await self._store()
        rows = {row.name: row for row in await store.run(schedules.schedules())}
        time = await store.time()
        row = rows.get(name)
        if row is None:
            similar = get_close_matches(name, rows, n=1)
            hint = f"did you mean {similar[0]!r}?" if similar else f"there are: {', '.join(rows) or 'none'}"
            raise UnknownSchedule(f"there is no schedule {name!r}; {hint} (workers declare them when they start)")
        if not intent.dry_run and row.is_paused is not is_paused:
            declared = row.declaration()
            next_at = recurrence_of(declared["recurrence"]).next_after(time.wall)
            note = msgspec.structs.replace(intent.note(action), queue=declared["queue"])
            changed = await store.run(schedules.change_schedule(name, note, is_paused=is_paused, next_at=next_at))
            row = changed or row
        return _view(row, time, self._redactor)

    # Last: below it, `list` in an annotation would be this method.
    async def list(self) -> list[ScheduleView]:
        """Every schedule, by name: when it is due, what it enqueues, and what it enqueued last. Of their calls, what
        `redact` lets be seen."""
        store = await self._store()
        time = await store.time()
        return [_view(row, time, self._redactor) for row in await store.run(schedules.schedules())]


def _view(row: ScheduleRow, time: QueueTime, redactor: Redactor | None) -> ScheduleView:
    declared = row.declaration()
    recurrence = recurrence_of(declared["recurrence"])
    state = "orphaned" if row.is_orphaned(time.now) else "paused" if row.is_paused else "active"
    job = _job_to_come(row, declared)
    return ScheduleView(
        now=time.wall,
        name=row.name,
        state=state,
        is_paused=row.is_paused,
        recurrence=recurrence.describe(),
        words=recurrence.in_words(),
        missed=declared["missed"],
        task=declared["task"],
        queue=declared["queue"],
        call=None if declared["call"] is None else redacted(redactor, job)[0],
        next_at=row.next_at if state == "active" else None,
        resumes_at=recurrence.next_after(time.wall) if row.is_paused else None,
        last_slot=row.last_slot,
        last_job=row.last_job,
        last_fired_at=row.last_fired_at,
        declared_at=row.declared_at,
        triggers_waiting=row.triggers - row.triggered,
        job=job,
    )


def _job_to_come(row: ScheduleRow, declared: dict[str, Any]) -> JobRecord:
    return JobRecord(
        id=NO_JOB,
        queue=declared["queue"],
        task=declared["task"],
        state=State.SCHEDULED,
        priority=declared["priority"] or 0,
        keys={name: None if value is None else str(value) for name, value in (declared["keys"] or {}).items()},
        payload=msgspec.json.encode(declared["call"]),
        attempt=0,
        max_attempts=declared["max_attempts"] or 1,
        enqueued_at=row.declared_at,
        due_at=row.next_at,
        claimed_at=None,
        finished_at=None,
        worker=None,
        error=None,
        result=None,
        progress=None,
        progress_message=None,
        cancel_requested=False,
        context={**(declared["context"] or {}), "schedule": row.name},
    )
