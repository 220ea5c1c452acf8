"""The only place that reads the time.

An instant is a whole number of microseconds since 1970 (UTC). Whole numbers, because a gate that reopens at a rounded
time may be found a moment too early and then be lost; microseconds, because that is what PostgreSQL keeps.
`datetime` and `timedelta` are what users give and get.
"""

from __future__ import annotations

import asyncio
import re
import time
from datetime import UTC, datetime, timedelta
from typing import Protocol

from fairlane.errors import ConfigurationError
from fairlane.parameters import checked, shown

Instant = int
SECOND = 1_000_000
MAX_DURATION = 9 * 10**18
"""The longest duration that a database can hold."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_UNITS = {"us": 1, "ms": 1_000, "s": SECOND, "m": 60 * SECOND, "h": 3_600 * SECOND, "d": 86_400 * SECOND}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s|m|h|d)\s*")


class Clock(Protocol):
    """A source of time, and a way to wait for a time."""

    def now(self) -> Instant:
        """The wall clock."""
        ...

    def monotonic(self) -> Instant:
        """A clock for measuring durations: it never goes back."""
        ...

    async def sleep_until(self, moment: Instant) -> None:
        """Return once `now()` has reached `moment`, or would have if the clock had not been set back meanwhile."""
        ...


class SystemClock:
    """The machine's clock."""

    def now(self) -> Instant:
        return time.time_ns() // 1_000

    def monotonic(self) -> Instant:
        return time.monotonic_ns() // 1_000

    async def sleep_until(self, moment: Instant) -> None:
        # In slices of at most a minute, to notice that a laptop slept or that the clock was set forward. Setting the
        # clock back makes no wait longer.
        ends_at = self.monotonic() + moment - self.now()
        while (left := min(moment - self.now(), ends_at - self.monotonic())) > 0:  # noqa: ASYNC110 - it waits for time
            await asyncio.sleep(min(left / SECOND, 60.0))


class ManualClock:
    """A clock that moves only when it is set. Sleepers wake in the order of their times."""

    @checked()
    def __init__(self, start: datetime | None = None) -> None:
        self._now = as_instant(start) if start is not None else as_instant(datetime(2030, 1, 1, tzinfo=UTC))
        self._set_back = 0
        self._sleepers: list[tuple[Instant, asyncio.Future[None]]] = []
        """By the monotonic clock."""

    def now(self) -> Instant:
        return self._now

    def monotonic(self) -> Instant:
        return self._now + self._set_back

    def advance(self, by: timedelta | str | float) -> None:
        """Move time forward, and wake all who sleep until then."""
        self.set(self._now + microseconds(by))

    @checked()
    def set(self, moment: Instant) -> None:
        """Set the clock to `moment`. It can go back too, which is a case worth testing: no time passes for those who
        sleep."""
        self._set_back += max(0, self._now - moment)
        self._now = moment
        reached = self.monotonic()
        due = [future for at, future in sorted(self._sleepers, key=lambda sleeper: sleeper[0]) if at <= reached]
        self._sleepers = [(at, future) for at, future in self._sleepers if at > reached]
        for future in due:
            if not future.done():
                future.get_loop().call_soon_threadsafe(_wake, future)

    async def sleep_until(self, moment: Instant) -> None:
        ends_at = moment + self._set_back
        while self.monotonic() < ends_at:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            entry = (ends_at, future)
            self._sleepers.append(entry)
            try:
                await future
            finally:
                if entry in self._sleepers:
                    self._sleepers.remove(entry)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def as_instant(moment: datetime) -> Instant:
    """The instant of an aware `datetime`, exactly."""
    if not isinstance(moment, datetime):
        raise ConfigurationError(f"{shown(moment)} is not a datetime; give an aware one, such as datetime.now(UTC)")
    if moment.tzinfo is None:
        raise ConfigurationError(
            f"{moment.isoformat()} has no timezone; give an aware datetime, such as datetime.now(UTC)"
        )
    return (moment - _EPOCH) // _MICROSECOND


def as_datetime(moment: Instant) -> datetime:
    """The aware `datetime` (UTC) of an instant, exactly; beyond the range of `datetime`, the last or the first one."""
    try:
        return _EPOCH + moment * _MICROSECOND
    except OverflowError:
        return datetime.max.replace(tzinfo=UTC) if moment > 0 else datetime.min.replace(tzinfo=UTC)


def microseconds(duration: timedelta | str | float) -> int:
    """A duration given as `timedelta`, as text (`"10m"`, `"1h30m"`), or in seconds."""
    if isinstance(duration, str):
        return parse_duration(duration)
    try:
        if isinstance(duration, bool):  # a number for Python
            raise TypeError
        found = duration // _MICROSECOND if isinstance(duration, timedelta) else round(duration * SECOND)
    except (OverflowError, ValueError, TypeError):
        raise ConfigurationError(f"{shown(duration)} is not a duration; write 90, '1m30s' or timedelta(…)") from None
    if abs(found) > MAX_DURATION:
        raise ConfigurationError(f"{shown(duration)} is longer than any database can hold; give a shorter time")
    return found


def duration_of(name: str, duration: timedelta | str | float) -> int:
    """`microseconds` for a parameter, whose name is given in errors."""
    try:
        return microseconds(duration)
    except ConfigurationError as error:
        raise ConfigurationError(f"{name}: {error}") from None


def checked_time(name: str, duration: timedelta | str | float) -> int:
    """A time of at least 0, in microseconds."""
    amount = duration_of(name, duration)
    if amount < 0:
        raise ConfigurationError(f"{name}={duration!r} is not a time of at least 0; give one, such as '24h'")
    return amount


def parse_duration(text: str) -> int:
    """`"250ms"`, `"10m"`, `"1h30m"`, `"7d"` in microseconds."""
    total, end = 0.0, 0
    stripped = text.strip()
    for part in _DURATION.finditer(stripped):
        if part.start() != end:
            break
        total += float(part[1]) * _UNITS[part[2]]
        end = part.end()
    if not stripped or end != len(stripped):
        raise ConfigurationError(
            f"{text[:100]!r} is not a duration; write a number and a unit, such as 250ms, 10m or 1h30m"
        )
    if total > MAX_DURATION:
        longest = lasting(MAX_DURATION / SECOND)
        raise ConfigurationError(f"{text[:100]!r} is too long; the longest duration is {longest}")
    return round(total)


def duration_text(duration: int) -> str:
    """Microseconds as the shortest text that `parse_duration` reads back exactly."""
    unit = next(unit for unit in ("d", "h", "m", "s", "ms", "us") if duration % _UNITS[unit] == 0)
    return f"{duration // _UNITS[unit]}{unit}"


def lasting(seconds: float) -> str:
    """A duration in a suitable unit: 3.2 s, 45 s, 12 min, 5 h, 3 d."""
    for least, size, unit in ((172_800, 86_400, "d"), (7_200, 3_600, "h"), (100, 60, "min")):
        if seconds >= least:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def measured(seconds: float) -> str:
    """A duration to be compared with others: 532 ms, 8.44 s, 1,240 s."""
    if seconds < 1:
        return f"{seconds * 1_000:.0f} ms"
    return f"{seconds:.2f} s" if seconds < 100 else f"{seconds:,.0f} s"


def iso_text(moment: Instant | None) -> str | None:
    """An instant as ISO 8601 text, for JSON."""
    return None if moment is None else as_datetime(moment).isoformat()
