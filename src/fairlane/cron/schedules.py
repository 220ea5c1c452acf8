"""Schedules as a program declares them, and the job that each of their slots is."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import msgspec

from fairlane.clock import Instant, as_datetime, microseconds
from fairlane.cron.recurrence import Cron, Every, Missed, Recurrence, check_missed, check_timezone
from fairlane.errors import ConfigurationError
from fairlane.parameters import is_storable, shown
from fairlane.task import BoundTask, Call, Duration, Task

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
        told = {
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
        return msgspec.json.encode(told).decode()

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
    check_timezone(timezone)
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
    schedule = Schedule(_checked_name(name, call), recurrence, check_missed(missed), call)
    schedule.document()
    return schedule


def _checked_name(name: object, call: Call[Any]) -> str:
    chosen = call.task.name if name is None else name
    if isinstance(chosen, str) and chosen.strip() and len(chosen) <= LONGEST_NAME and is_storable(chosen):
        return chosen
    raise ConfigurationError(
        f"schedule: name={shown(chosen)} is no name; give a text of up to {LONGEST_NAME} characters, "
        "such as 'daily-report'"
    )


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
