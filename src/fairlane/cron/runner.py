"""The runner of schedules: each worker looks when the next slot of its schedules is due, and the first one fires it.

A slot is fired in one transaction, which advances the schedule and stores the job; the job's id follows from the
schedule and the slot. So a slot is fired once, however many workers there are and whichever of them crash.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from uuid import UUID

from fairlane.clock import SECOND, Clock, Instant, as_datetime
from fairlane.cron.recurrence import Due, due_slots
from fairlane.cron.schedules import Schedule, job_of_slot, job_of_trigger
from fairlane.errors import DuplicateJob, FairlaneError, InvalidJob, StoreUnavailable
from fairlane.job import NewJob
from fairlane.store import schedules
from fairlane.store.protocol import Store
from fairlane.store.schedules import Fired, ScheduleRow
from fairlane.task import Call
from fairlane.waits import Outage, StoreTime, first_of, pause

log = logging.getLogger("fairlane.worker")

LOOK_EVERY = 30 * SECOND
"""For what nobody announces: a declaration whose other workers are gone, or a slot that could not be fired."""
SHORTEST_WAIT = SECOND // 1_000
KEPT_FOR = 60 * SECOND
"""The time between two signs of life of this worker's schedules."""

Produce = Callable[[Sequence[Call[Any]]], Awaitable[list[NewJob]]]
"""Makes jobs of calls, except for those that a full backlog refuses."""


class Firing:
    """Fires the schedules of one program."""

    def __init__(self, store: Store, schedules: Sequence[Schedule], produce: Produce) -> None:
        self._store = store
        self._schedules = {each.name: each for each in schedules}
        self._digests = {each.name: each.digest for each in schedules}
        self._produce = produce
        self._kept_at: Instant | None = None
        self._is_due = asyncio.Event()

    def look_now(self) -> None:
        """An operator has resumed or triggered a schedule, or may have."""
        self._is_due.set()

    async def run(self, worker: UUID, outage: Outage, clock: Clock, time: StoreTime) -> None:
        """Fire slots when they come."""
        await outage.ride_out(self.declare, "declaring schedules")
        while True:
            next_at = await outage.ride_out(lambda: self.look(worker), "firing schedules")
            wait = LOOK_EVERY if next_at is None else min(LOOK_EVERY, next_at - time.now())
            # Or until there is a reason to look since the last look began.
            await first_of(pause(clock, max(wait, SHORTEST_WAIT)), self._is_due.wait())

    async def declare(self) -> None:
        """Put this program's declarations in force, in place of any others."""
        rows = {row.name: row for row in await self._store.run(schedules.schedules(self._schedules))}
        wall = (await self._store.time()).wall
        for name in self._schedules:
            await self._declare(name, rows.get(name), wall)

    async def look(self, worker: UUID | None = None) -> Instant | None:
        """Fire what is due by the wall clock. Returns when the next slot of these schedules is due, as far as is known,
        in queue time."""
        self._is_due.clear()
        time = await self._store.time()
        # Before what stands is read: what an operator does after that is announced to this worker.
        await self._keep(time.now, worker)
        soonest: Instant | None = None
        for row in await self._store.run(schedules.schedules(self._schedules)):
            schedule = self._schedules[row.name]
            if row.digest != self._digests[row.name]:
                # Another program of the same name is newer. If it is gone, ours is what there is.
                if row.is_orphaned(time.now):
                    await self._declare(row.name, row, time.wall)
                continue
            next_at = await self._fire(schedule, row, time.wall)
            if next_at is not None and (soonest is None or next_at < soonest):
                soonest = next_at
        return None if soonest is None else soonest + time.ahead

    async def _keep(self, now: Instant, worker: UUID | None) -> None:
        if self._kept_at is None or now - self._kept_at >= KEPT_FOR or now < self._kept_at:
            await self._store.run(schedules.keep_schedules(self._digests, worker))
            self._kept_at = now

    async def _declare(self, name: str, row: ScheduleRow | None, now: Instant) -> None:
        schedule, digest = self._schedules[name], self._digests[name]
        if row is not None and row.digest == digest:
            return
        next_at = schedule.recurrence.next_after(now)
        if row is not None and row.declaration()["recurrence"] == schedule.recurrence.document():
            next_at = row.next_at  # what it does has changed, and not when
        instead_of = None if row is None else row.digest
        if await self._store.run(
            schedules.put_schedule(name, digest, schedule.document(), next_at, instead_of=instead_of)
        ):
            what = "new" if row is None else "changed"
            log.info("schedule %r is %s: %s", name, what, schedule.recurrence.describe())

    async def _fire(self, schedule: Schedule, row: ScheduleRow, now: Instant) -> Instant | None:
        """Fire what is due of one schedule. Returns its next slot, or now if there is more to fire."""
        due = Due((), row.next_at)
        if not row.is_paused:
            due = due_slots(schedule.recurrence, row.next_at, now, schedule.missed)
        triggers = range(row.triggered + 1, row.triggers + 1)
        if due.next_at == row.next_at and not triggers:
            return None if row.is_paused else row.next_at
        calls = [schedule.call_for(job_of_slot(row.name, slot), slot) for slot in due.slots]
        calls += [schedule.call_for(job_of_trigger(row.name, each, now), now) for each in triggers]
        try:
            jobs = await self._jobs_of(calls)
            if not await self._move(row, self._fired(row, due, now, jobs), jobs):
                return now  # somebody else has fired; how it stands now is seen at the next look
        except StoreUnavailable:
            raise
        except FairlaneError as error:
            log.error("schedule %r cannot be fired, and is tried again: %s", row.name, error)
            return None
        self._tell(schedule, row, due, now, len(triggers))
        return None if row.is_paused else due.next_at

    async def _jobs_of(self, calls: Sequence[Call[Any]]) -> list[NewJob]:
        try:
            return await self._produce(calls)
        except FairlaneError:
            raise
        except Exception as error:
            # A function of the program, such as that of a unique key. Others have schedules here, and all have jobs.
            raise InvalidJob(f"{calls[0].task.name!r} cannot be enqueued: {type(error).__name__}: {error}") from error

    def _fired(self, row: ScheduleRow, due: Due, now: Instant, jobs: Sequence[NewJob]) -> Fired:
        """The state of the schedule after this. A trigger is fired last, and its time counts as its slot."""
        slot, job = None, None
        if row.triggers > row.triggered:
            slot, job = now, job_of_trigger(row.name, row.triggers, now)
        elif due.slots:
            slot, job = due.slots[-1], job_of_slot(row.name, due.slots[-1])
        is_admitted = any(each.id == job for each in jobs)
        return Fired(due.next_at, row.triggers, slot, job if is_admitted else None)

    async def _move(self, row: ScheduleRow, fired: Fired, jobs: Sequence[NewJob]) -> bool:
        try:
            return await self._store.run(schedules.fire_schedule(row, fired, jobs))
        except DuplicateJob as error:
            log.warning("schedule %r: the job of a slot is stored already (%s)", row.name, error)
            return await self._move(row, fired, [job for job in jobs if job.id != error.job])

    def _tell(self, schedule: Schedule, row: ScheduleRow, due: Due, now: Instant, triggers: int) -> None:
        if triggers:
            log.info("schedule %r was triggered", row.name)
        if row.next_at is not None and due.slots != (row.next_at,) and due.next_at != row.next_at:
            log.warning(
                "schedule %r: slots since %s were missed (missed=%r); %d fired now",
                row.name,
                as_datetime(row.next_at).isoformat(),
                schedule.missed,
                len(due.slots),
            )
