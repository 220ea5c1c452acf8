"""When a schedule fires: instants from a cron line in a timezone, or from an interval. No clock, no store.

A slot is an instant at which a schedule is to fire. A line of fixed times ("30 2 * * *") fires once for each of them:
where a clock change leaves one out, at the moment the clock jumps to; where one comes twice, the first time. A line
that repeats within the hours ("*/30 * * * *") follows the time that really passes, through every change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from fairlane.clock import SECOND, Instant, as_datetime, as_instant, duration_text, microseconds
from fairlane.errors import ConfigurationError

__all__ = [
    "AT_ONCE",
    "GRACE",
    "Cron",
    "Due",
    "Every",
    "Missed",
    "Recurrence",
    "check_missed",
    "due_slots",
    "recurrence_of",
]

Missed = Literal["skip", "once", "all"]
"""What becomes of slots that nobody was there to fire: none of them, the last one, or every one."""

GRACE = 60 * SECOND
"""A slot that is fired within this time is late, and not missed."""
AT_ONCE = 100
"""Slots of one schedule that are fired together."""
DAY = 86_400 * SECOND
SHORTEST, LONGEST = SECOND, 366 * DAY
_NAMED = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
_WINDOWS = tuple(days * 86_400 * SECOND for days in (1 / 24, 1, 32, 400, 1_500))


@dataclass(frozen=True, slots=True)
class Cron:
    """A cron line of five fields, in a timezone."""

    line: str
    timezone: str = "UTC"

    def __post_init__(self) -> None:
        what = f"schedule {self.line!r}"
        if self.line.startswith("@") and self.line not in _NAMED:
            raise ConfigurationError(f"{what} is unknown; use five fields, or one of {', '.join(sorted(_NAMED))}")
        if len(self._fields.split()) != 5:
            raise ConfigurationError(
                f"{what} does not have five fields: minute, hour, day, month, weekday, as in '0 9 * * 1-5'"
            )
        try:
            ZoneInfo(self.timezone)
        except (ValueError, OSError, TypeError):  # ZoneInfoNotFoundError is a KeyError, and below
            raise ConfigurationError(f"{what}: timezone={self.timezone!r} is none") from None
        except KeyError:
            raise ConfigurationError(
                f"{what}: timezone={self.timezone!r} is unknown; use a name such as Europe/Berlin, and where the "
                f"system has none of them, `pip install tzdata`"
            ) from None
        try:
            CronSim(self._fields, as_datetime(0))
        except CronSimError as error:
            raise ConfigurationError(f"{what} is no cron line: {error}") from None
        if self.next_after(as_instant(as_datetime(0))) is None:
            raise ConfigurationError(f"{what} never comes, not in fifty years")

    @property
    def _fields(self) -> str:
        return _NAMED.get(self.line, self.line)

    def next_after(self, moment: Instant) -> Instant | None:
        """The first slot later than `moment`; `None` if there is none for fifty years."""
        for slot in CronSim(self._fields, as_datetime(moment).astimezone(ZoneInfo(self.timezone))):
            # In an hour that comes twice, a fixed time of the first turn is found again from the second. In one that is
            # left out, all its fixed times are the same moment.
            if (at := as_instant(slot)) > moment:
                return at
        return None

    def describe(self) -> str:
        return f"{self.line} ({self.timezone})"

    def in_words(self) -> str:
        """For people: `At 09:00 on Monday through Friday, Europe/Berlin`."""
        return f"{CronSim(self._fields, as_datetime(0)).explain()}, {self.timezone}"

    def document(self) -> dict[str, Any]:
        return {"cron": self.line, "timezone": self.timezone}


@dataclass(frozen=True, slots=True)
class Every:
    """An interval. Its slots are its multiples since 1970 (UTC), so that all programs agree on them."""

    interval: int

    def __post_init__(self) -> None:
        if not SHORTEST <= self.interval <= LONGEST:
            raise ConfigurationError(
                f"every={duration_text(self.interval)!r} does not lie between {duration_text(SHORTEST)} and "
                f"{duration_text(LONGEST)}"
            )

    def next_after(self, moment: Instant) -> Instant:
        return (moment // self.interval + 1) * self.interval

    def describe(self) -> str:
        return f"every {duration_text(self.interval)}"

    def in_words(self) -> str:
        """For people: `Every 15m, counted from midnight UTC`; of what does not divide a day, since 1970."""
        since = "midnight UTC" if DAY % self.interval == 0 else "1970, UTC"
        return f"Every {duration_text(self.interval)}, counted from {since}"

    def document(self) -> dict[str, Any]:
        return {"every": duration_text(self.interval)}


Recurrence = Cron | Every


def recurrence_of(document: dict[str, Any]) -> Recurrence:
    """What `document()` has written."""
    return (
        Every(microseconds(document["every"])) if "every" in document else Cron(document["cron"], document["timezone"])
    )


def check_missed(missed: object) -> Missed:
    for known in get_args(Missed):
        if missed == known:
            chosen: Missed = known
            return chosen
    raise ConfigurationError(f"missed={missed!r} is unknown; use 'skip', 'once' or 'all'")


@dataclass(frozen=True, slots=True)
class Due:
    """What a look at a schedule comes to."""

    slots: tuple[Instant, ...]
    """To be fired now, the oldest first."""
    next_at: Instant | None
    """The next slot, once these are fired. Not later than now: there are more to fire."""


def due_slots(recurrence: Recurrence, next_at: Instant | None, now: Instant, missed: Missed) -> Due:
    """Which slots to fire now, where `next_at` is the first that was not."""
    if next_at is None or next_at > now:
        return Due((), next_at)
    if missed == "all":
        slots = [next_at]
        while len(slots) < AT_ONCE and (slot := recurrence.next_after(slots[-1])) is not None and slot <= now:
            slots.append(slot)
        return Due(tuple(slots), recurrence.next_after(slots[-1]))
    last = _last_until(recurrence, next_at, now)
    is_fired = missed == "once" or now - last <= GRACE
    return Due((last,) if is_fired else (), recurrence.next_after(last))


def _last_until(recurrence: Recurrence, first: Instant, now: Instant) -> Instant:
    """The last slot from `first` on that is not later than now. Not one by one: there may be years of minutes."""
    if isinstance(recurrence, Every):
        return max(first, now // recurrence.interval * recurrence.interval)
    last = first
    for window in _WINDOWS:
        slot = recurrence.next_after(max(first, now - round(window)) - 1)
        while slot is not None and slot <= now:
            last, slot = slot, recurrence.next_after(slot)
        if last > first or now - window <= first:
            break
    return last
