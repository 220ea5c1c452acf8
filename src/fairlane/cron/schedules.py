"""Schedules as a program declares them, and how they are fired: each worker looks when the next slot of its schedules
is due, and the first one fires it.

A slot is fired in one transaction, which advances the schedule and stores the job; the job's id follows from the
schedule and the slot. So a slot is fired once, however many workers there are and whichever of them crash.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args
from uuid import UUID

import msgspec

from fairlane.clock import SECOND, Clock, Instant, as_datetime, microseconds
from fairlane.cron.recurrence import Cron, Due, Every, Missed, Recurrence, due_slots
from fairlane.errors import ConfigurationError, DuplicateJob, FairlaneError, InvalidJob, StoreUnavailable
from fairlane.job import NewJob
from fairlane.parameters import is_storable, shown
from fairlane.store import schedules
from fairlane.store.protocol import Store
from fairlane.store.schedules import Fired, ScheduleRow
from fairlane.task import BoundTask, Call, Duration, Task
from fairlane.waits import Outage, StoreTime, first_of, pause

LONGEST_NAME = 200
LARGEST_CALL = 1 << 20


@dataclass(frozen=True, slots=True)
class Schedule:
    """A call that is enqueued on a recurrence, as this program declares it."""

    name: str
    recurrence: Recurrence
    missed: Missed
    call: Call[Any]

    def __repr__(self) -> str:
        return f"<schedule {self.name!r}: {self.recurrence.describe()}>"

    def document(self) -> str:
        """What the database stores: enough to show the schedule, and to compute when it is due."""
        call, codec = self.call, self.call.task.codec
        payload = codec.encode_call(call.args, call.kwargs, LARGEST_CALL)
        options = call.options
        document = {
            "recurrence": self.recurrence.document(),
            "missed": self.missed,
            "task": call.task.name,
            "queue": options.queue_of(call.task),
            "call": None if codec.is_sealed else msgspec.Raw(payload),
            "priority": options.priority,
            "max_attempts": options.max_attempts,
            "keys": options.keys,
            "context": options.context,
        }
        return msgspec.json.encode(document).decode()

    @property
    def digest(self) -> bytes:
        """The same for the same declaration, in every program."""
        call, codec = self.call, self.call.task.codec
        # What seals a call may do so in another way each time.
        sealed = codec.unsealed_call(call.args, call.kwargs) if codec.is_sealed else b""
        return hashlib.sha256(self.document().encode() + sealed).digest()

    def call_for(self, job: UUID, slot: Instant) -> Call[Any]:
        """The call of one slot, with an id that only this slot can have."""
        return self.call.using(id=job, context={"schedule": self.name, "slot": as_datetime(slot).isoformat()})


def declared_schedule(
    given: tuple[Any, ...], every: Duration | None, timezone: str, missed: str, name: str | None
) -> Schedule:
    """The schedule that `app.schedule(…)` declares, checked."""
    recurrence: Recurrence
    if every is None:
        line, *rest = given or (None,)
        if not isinstance(line, str):
            got = f", not {shown(line)}" if given else ""
            raise ConfigurationError(f"schedule: give a cron line first, such as '0 9 * * 1-5', or every='15m'{got}")
        recurrence = Cron(line.strip(), timezone)
    else:
        rest = list(given)
        if rest and isinstance(rest[0], str):
            raise ConfigurationError(f"schedule: {rest[0]!r} and every={every!r} both say when; leave one of them out")
        if timezone != "UTC":
            raise ConfigurationError(f"schedule: every={every!r} is the same in every timezone; leave timezone= out")
        try:
            recurrence = Every(microseconds(every))
        except ConfigurationError as error:
            raise ConfigurationError(f"schedule: every: {error}") from None
    if not rest:
        raise ConfigurationError("schedule: say what is to be enqueued: a task, or a call of one")
    what, *args = rest
    call = _call(what, args)
    chosen: object = call.task.name if name is None else name
    if not isinstance(chosen, str) or not chosen.strip() or len(chosen) > LONGEST_NAME or not is_storable(chosen):
        raise ConfigurationError(
            f"schedule: name={shown(chosen)} is no name; give a text of up to {LONGEST_NAME} characters, "
            "such as 'daily-report'"
        )
    if missed not in get_args(Missed):
        raise ConfigurationError(f"schedule: missed={shown(missed)} is unknown; use 'skip', 'once' or 'all'")
    schedule = Schedule(chosen, recurrence, cast(Missed, missed), call)
    schedule.document()
    return schedule


def _call(what: object, args: list[Any]) -> Call[Any]:
    match what:
        case Call() if not args:
            call = what
        case Task() | BoundTask():
            call = what.call(*args)
        case Call():
            raise ConfigurationError("schedule: a call has its arguments already; give it alone")
        case _:
            raise ConfigurationError(
                f"schedule: {shown(what)} is neither a task nor a call of one; write @app.task above the function, and "
                "give that, or its .call(…)"
            )
    options = call.options
    for option in ("tx", "id", "run_at"):
        if getattr(options, option) is not None:
            raise ConfigurationError(f"schedule: {call!r} is enqueued many times; leave {option}= out")
    for name in ("schedule", "slot"):
        if name in (options.context or {}):
            raise ConfigurationError(
                f"schedule: context: {name!r} is what each job finds its own {name} under; give yours another name"
            )
    return call


def job_of_slot(name: str, slot: Instant) -> UUID:
    """The id of the job of one slot: the same wherever it is computed, so that it can be stored only once."""
    return _id(f"slot\0{name}\0{slot}", slot)


def job_of_trigger(name: str, number: int, at: Instant) -> UUID:
    """The id of the job of one operator's trigger."""
    return _id(f"trigger\0{name}\0{number}", at)


def _id(text: str, at: Instant) -> UUID:
    # The form of version 7: ids rise with time, and an index on them is filled at its end.
    digest = int.from_bytes(hashlib.sha256(f"fairlane/{text}".encode()).digest()[:10])
    milliseconds = (at // 1_000) & ((1 << 48) - 1)
    return UUID(int=milliseconds << 80 | 0x7 << 76 | (digest >> 62 & 0xFFF) << 64 | 0b10 << 62 | digest & (1 << 62) - 1)


log = logging.getLogger("fairlane.worker")

LOOK_EVERY = 30 * SECOND
"""For what nobody announces: a declaration whose other workers are gone, or a slot that could not be fired."""
SHORTEST_WAIT = SECOND // 1_000
KEPT_FOR = 60 * SECOND
"""The time between two signs of life of this worker's schedules."""

Produce = Callable[[Sequence[Call[Any]]], Awaitable[list[NewJob]]]
"""Makes jobs of calls, except for those that a full backlog refuses."""


class CronRunner:
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
            # A trigger is fired last, and its time counts as its slot.
            slot = now if triggers else due.slots[-1] if due.slots else None
            job = calls[-1].options.id if calls else None
            is_admitted = any(each.id == job for each in jobs)
            fired = Fired(due.next_at, row.triggers, slot, job if is_admitted else None)
            if not await self._move(row, fired, jobs):
                return now  # somebody else has fired; how it stands now is seen at the next look
        except StoreUnavailable:
            raise
        except FairlaneError as error:
            log.error("schedule %r cannot be fired, and is tried again: %s", row.name, error)
            return None
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
        return None if row.is_paused else due.next_at

    async def _jobs_of(self, calls: Sequence[Call[Any]]) -> list[NewJob]:
        try:
            return await self._produce(calls)
        except FairlaneError:
            raise
        except Exception as error:
            # A function of the program, such as that of a unique key. Others have schedules here, and all have jobs.
            raise InvalidJob(f"{calls[0].task.name!r} cannot be enqueued: {type(error).__name__}: {error}") from error

    async def _move(self, row: ScheduleRow, fired: Fired, jobs: Sequence[NewJob]) -> bool:
        try:
            return await self._store.run(schedules.fire_schedule(row, fired, jobs))
        except DuplicateJob as error:
            log.warning("schedule %r: the job of a slot is stored already (%s)", row.name, error)
            return await self._move(row, fired, [job for job in jobs if job.id != error.job])
