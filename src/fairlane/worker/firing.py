"""Firing schedules: every worker that declares one looks when its next slot comes, and whoever is first fires it.

A slot is fired in one transaction that moves the schedule on and stores the job, whose id follows from the schedule and
the slot. So it is fired once, however many workers there are and whatever of them crashes.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fairlane.clock import SECOND, Clock, Instant, as_datetime
from fairlane.errors import DuplicateJob, FairlaneError, StoreUnavailable
from fairlane.job import NewJob
from fairlane.policy.recurrence import Due, due_slots
from fairlane.scheduled import Schedule, job_of_slot, job_of_trigger
from fairlane.store.protocol import Store
from fairlane.store.schedules import ScheduleRow
from fairlane.task import Call
from fairlane.worker.timing import Outage, pause

__all__ = ["Firing", "fire_schedules"]

log = logging.getLogger("fairlane.worker")

LOOK_EVERY = 5 * SECOND
"""For what no slot announces: an operator who resumes or triggers, another worker's newer declaration."""
SHORTEST_WAIT = SECOND // 1_000
KEPT_FOR = 60 * SECOND
"""Between two signs that this worker has its schedules."""

Produce = Callable[[Sequence[Call[Any]]], Awaitable[list[NewJob]]]
"""Makes jobs of calls; of those that a full backlog refuses, none."""


class Firing:
    """The schedules of one program, at work."""

    def __init__(self, store: Store, schedules: Sequence[Schedule], produce: Produce) -> None:
        self._store = store
        self._schedules = {each.name: each for each in schedules}
        self._digests = {each.name: each.digest for each in schedules}
        self._produce = produce
        self._kept_at: Instant | None = None

    async def declare(self) -> None:
        """Let this program's declarations be in force, whatever others there were."""
        rows = {row.name: row for row in await self._store.schedules()}
        now = await self._store.now()
        for name in self._schedules:
            await self._declare(name, rows.get(name), now)

    async def look(self) -> Instant | None:
        """Fire what is due. Returns when the next slot of these schedules comes, as far as is known."""
        now = await self._store.now()
        await self._keep(now)
        soonest: Instant | None = None
        for row in await self._store.schedules():
            schedule = self._schedules.get(row.name)
            if schedule is None:
                continue
            if row.digest != self._digests[row.name]:
                # Another program of the same name is newer. If it is gone, ours is what there is.
                if row.is_orphaned(now):
                    await self._declare(row.name, row, now)
                continue
            next_at = await self._fire(schedule, row, now)
            if next_at is not None and (soonest is None or next_at < soonest):
                soonest = next_at
        return soonest

    async def _keep(self, now: Instant) -> None:
        if self._kept_at is None or now - self._kept_at >= KEPT_FOR or now < self._kept_at:
            await self._store.keep_schedules(self._digests)
            self._kept_at = now

    async def _declare(self, name: str, row: ScheduleRow | None, now: Instant) -> None:
        schedule, digest = self._schedules[name], self._digests[name]
        if row is not None and row.digest == digest:
            return
        next_at = schedule.recurrence.next_after(now)
        if row is not None and row.told()["recurrence"] == schedule.recurrence.document():
            next_at = row.next_at  # what it does has changed, and not when
        instead_of = None if row is None else row.digest
        if await self._store.put_schedule(name, digest, schedule.document(), next_at, instead_of=instead_of):
            what = "new" if row is None else "changed"
            log.info("schedule %r is %s: %s", name, what, schedule.recurrence.describe())

    async def _fire(self, schedule: Schedule, row: ScheduleRow, now: Instant) -> Instant | None:
        """Fire what is due of one schedule. Returns its next slot, or now if there is more to do."""
        due = Due((), row.next_at)
        if not row.is_paused:
            due = due_slots(schedule.recurrence, row.next_at, now, schedule.missed)
        triggers = range(row.triggered + 1, row.triggers + 1)
        if due.next_at == row.next_at and not triggers:
            return None if row.is_paused else row.next_at
        calls = [schedule.call_for(job_of_slot(row.name, slot), slot) for slot in due.slots]
        calls += [schedule.call_for(job_of_trigger(row.name, each, now), now) for each in triggers]
        try:
            jobs = await self._produce(calls)
            last = due.slots[-1] if due.slots else None
            if not await self._move(row, due.next_at, last, jobs):
                return now  # somebody else has fired; how it stands now is seen at the next look
        except StoreUnavailable:
            raise
        except FairlaneError as error:
            log.error("schedule %r cannot be fired, and is tried again: %s", row.name, error)
            return None
        self._tell(schedule, row, due, now, len(triggers))
        return None if row.is_paused else due.next_at

    async def _move(
        self, row: ScheduleRow, next_at: Instant | None, slot: Instant | None, jobs: Sequence[NewJob]
    ) -> bool:
        try:
            return await self._store.fire_schedule(row, next_at, row.triggers, slot, jobs)
        except DuplicateJob as error:
            log.warning("schedule %r: the job of a slot is stored already (%s)", row.name, error)
            left = [job for job in jobs if job.id != error.job]
            return await self._move(row, next_at, slot, left)

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


async def fire_schedules(firing: Firing, outage: Outage, clock: Clock, offset: Callable[[], int]) -> None:
    """Fire slots when they come. `offset` is what the store's clock is ahead of ours."""
    await outage.ride_out(firing.declare, "declaring schedules")
    while True:
        next_at = await outage.ride_out(firing.look, "firing schedules")
        wait = LOOK_EVERY
        if next_at is not None:
            wait = min(wait, next_at - offset() - clock.now())
        await pause(clock, max(wait, SHORTEST_WAIT))
