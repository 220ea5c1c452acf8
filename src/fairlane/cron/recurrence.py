"""When a schedule fires: by a cron line in a timezone, or by an interval. Without a clock or a store.

A slot is a moment at which a schedule is to fire. A line of fixed times ("30 2 * * *") fires once for each of them: if
a clock change skips a time, at the moment of the change; if a time comes twice, the first time. A line that repeats
within an hour ("*/30 * * * *") follows the time that really passes, through every change.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import Any, Literal
from zoneinfo import ZoneInfo, available_timezones

from cronsim import CronSim, CronSimError

from fairlane.clock import SECOND, Instant, as_datetime, as_instant, duration_text, microseconds
from fairlane.errors import ConfigurationError
from fairlane.parameters import shown

Missed = Literal["skip", "once", "all"]
"""Which missed slots are fired later: none, the last one, or all."""

GRACE = 60 * SECOND
"""A slot that is fired within this time is late, not missed."""
AT_ONCE = 100
"""Slots of one schedule that are fired together, at most."""
DAY = 86_400 * SECOND
LONGEST_SHOWN = 100
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
_NOT_PLACES = {"factory", "localtime", "posixrules"}
_NOT_PLACES_BELOW = ("posix/", "right/")
"""Files that are not places: this machine's setting, and the same places with leap seconds."""
_WINDOWS = tuple(days * 86_400 * SECOND for days in (1 / 24, 1, 32, 400, 1_500))


@dataclass(frozen=True, slots=True)
class Cron:
    """A cron line of five fields, in a timezone."""

    line: str
    timezone: str = "UTC"

    def __post_init__(self) -> None:
        what = f"schedule {shown(self.line)}"
        if self.line.startswith("@") and self.line not in _NAMED:
            raise ConfigurationError(f"{what} is unknown; use five fields, or one of {', '.join(sorted(_NAMED))}")
        if len(self._fields.split()) != 5:
            raise ConfigurationError(
                f"{what} does not have five fields: minute, hour, day, month, weekday, as in '0 9 * * 1-5'"
            )
        _check_timezone(what, self.timezone)
        try:
            CronSim(self._fields, as_datetime(0))
        except CronSimError as error:
            raise ConfigurationError(f"{what} is no cron line: {error}") from None
        if self.next_after(as_instant(as_datetime(0))) is None:
            raise ConfigurationError(f"{what} never comes, not in fifty years")

    @property
    def _fields(self) -> str:
        return _NAMED.get(self.line, self.line)

    @property
    def _is_fixed(self) -> bool:
        minute, hour, *_ = self._fields.split()
        return not minute.startswith("*") and not hour.startswith("*")

    def next_after(self, moment: Instant) -> Instant | None:
        """The first slot later than `moment`; `None` if there is none for fifty years."""
        zone = ZoneInfo(self.timezone)
        return self._next_fixed(moment, zone) if self._is_fixed else self._next_repeated(moment, zone)

    # cronsim reads the line and finds the next time that a clock on a wall would show; when that is, we say. (Its own
    # steps through clock changes are of whole hours, and lose slots where the change is half of one, or at midnight.)

    def _next_fixed(self, moment: Instant, zone: ZoneInfo) -> Instant | None:
        for wall in CronSim(self._fields, _wall(moment + _offset(zone, moment))):
            # In an hour that comes twice, a time of the first turn is found again from the second. In one that is left
            # out, all its times are the same moment.
            if (at := _first_time(zone, wall)) > moment:
                return at
        return None

    def _next_repeated(self, moment: Instant, zone: ZoneInfo) -> Instant | None:
        """Step from clock change to clock change: between two of them, local time has a fixed offset."""
        since = moment
        while True:
            offset = _offset(zone, since)
            wall = next(CronSim(self._fields, _wall(moment + offset)), None)
            if wall is None:
                return None
            at = as_instant(wall.replace(tzinfo=UTC)) - offset
            if (change := _first_change(zone, since, at)) is None:
                return at
            since, moment = change, change - 1

    def describe(self) -> str:
        return f"{self.line} ({self.timezone})"

    def in_words(self) -> str:
        """For people: `At 09:00 on Monday through Friday, Europe/Berlin`."""
        return f"{CronSim(self._fields, as_datetime(0)).explain()}, {self.timezone}"

    def document(self) -> dict[str, Any]:
        return {"cron": self.line, "timezone": self.timezone}


def _check_timezone(what: str, timezone: object) -> None:
    """Refuse what is not a place: a schedule fires at the same time on every machine, whatever its local setting."""
    remedy = "use a name such as 'Europe/Berlin', or leave timezone= out for UTC"
    wrong = f"{what}: timezone={shown(timezone)}"
    if not isinstance(timezone, str):
        name = getattr(timezone, "key", None)  # of a ZoneInfo
        raise ConfigurationError(f"{wrong} is not the name of one; {f'write {name!r}' if name else remedy}")
    if timezone.lower() in _NOT_PLACES or timezone.lower().startswith(_NOT_PLACES_BELOW):
        raise ConfigurationError(f"{wrong} is not a place, and not the same on every machine; {remedy}")
    try:
        ZoneInfo(timezone)
    except KeyError:
        known = {name.lower(): name for name in available_timezones()}
        # What is short is much alike: CEST and EST.
        alike = 0.8 if "/" in timezone else 1.0
        if similar := get_close_matches(timezone.strip().lower()[:LONGEST_SHOWN], known, n=1, cutoff=alike):
            remedy = f"did you mean {known[similar[0]]!r}?"
        raise ConfigurationError(
            f"{wrong} is unknown; {remedy} (where the system has none at all, `pip install tzdata`)"
        ) from None
    except (ValueError, OSError):
        raise ConfigurationError(f"{wrong} is not the name of one; {remedy}") from None


def _wall(moment: Instant) -> datetime:
    """A moment, with an offset added, as local time."""
    return as_datetime(moment).replace(tzinfo=None)


def _offset(zone: ZoneInfo, moment: Instant) -> int:
    """How far local time is ahead of UTC."""
    offset = as_datetime(moment).astimezone(zone).utcoffset()
    assert offset is not None
    return microseconds(offset)


def _first_time(zone: ZoneInfo, wall: datetime) -> Instant:
    """When local time first shows this; if it is skipped, when the clocks jump over it."""
    before, after = (as_instant(wall.replace(tzinfo=zone, fold=fold)) for fold in (0, 1))
    if before <= after:
        return before
    # It is left out: read with the offset before the change it lies behind it, with that after the change before it.
    change = _first_change(zone, after, before)
    assert change is not None
    return change


def _first_change(zone: ZoneInfo, since: Instant, until: Instant) -> Instant | None:
    """The first clock change after `since` and not after `until`."""
    offset, low = _offset(zone, since), since
    while low < until:
        high = min(low + DAY, until)  # no place has set its clocks twice on a day
        if _offset(zone, high) != offset:
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if _offset(zone, middle) == offset else (low, middle)
            return high
        low = high
    return None


@dataclass(frozen=True, slots=True)
class Every:
    """An interval. Its slots are its multiples since 1970 (UTC), so that all programs agree on them."""

    interval: int

    def __post_init__(self) -> None:
        if not SHORTEST <= self.interval <= LONGEST:
            raise ConfigurationError(
                f"{duration_text(self.interval)!r} does not lie between {duration_text(SHORTEST)} and "
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
    """The inverse of `document()`."""
    return (
        Every(microseconds(document["every"])) if "every" in document else Cron(document["cron"], document["timezone"])
    )


@dataclass(frozen=True, slots=True)
class Due:
    """What is due of a schedule."""

    slots: tuple[Instant, ...]
    """To fire now, the oldest first."""
    next_at: Instant | None
    """The next slot once these are fired. If it is not later than now, there are more to fire."""


def due_slots(recurrence: Recurrence, next_at: Instant | None, now: Instant, missed: Missed) -> Due:
    """Which slots to fire now; `next_at` is the first that was not fired."""
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
    """The last slot from `first` on that is not later than now. Not slot by slot: there may be years of minutes."""
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
