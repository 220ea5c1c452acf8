"""Queue time, which limits, leases and due times are measured by: the store's clock, except that it never goes back.

If the clock is set back (a restored machine, a bad time server), what was computed from later readings would stay in
the future for as long as the step was large: rates closed, leases of dead workers alive. So the database stores the
latest instant, and an offset that is raised when the clock is found behind it: queue time goes on from that instant at
the clock's own pace. It makes no difference whether the step back or a step forward before it was the mistake.

A process that has seen queue time also knows how much has passed since: nothing is lost while nobody looks.
PostgreSQL reads its own clock, in SQL: `fairlane.instant` and `fairlane.keep_instant`.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import msgspec

from fairlane.clock import Clock, Instant

KEPT_EVERY = 100_000
"""Microseconds after which the latest instant is stored again."""


class QueueTime(msgspec.Struct, frozen=True):
    """Queue time, and the clock beside it."""

    now: Instant
    """Queue time."""
    ahead: int = 0
    """How far queue time is ahead of the store's clock, in microseconds."""

    @property
    def wall(self) -> Instant:
        """The store's clock: schedules and other times of day go by it."""
        return self.now - self.ahead


class Expected(NamedTuple):
    """What queue time should be."""

    least: Instant
    """If it is less, the clock was set back. Clocks that nobody sets run apart by far less than one percent."""
    now: Instant


UNKNOWN = Expected(0, 0)


class Witness:
    """What one process has seen of queue time, and how long ago by its monotonic clock, which nobody sets."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: Instant = 0
        self._seen_at = 0

    def saw(self, now: Instant) -> None:
        self._seen, self._seen_at = now, self._clock.monotonic()

    def expected(self) -> Expected:
        """What queue time is by now. To be asked before the clock that it is compared with."""
        if not self._seen:
            return UNKNOWN
        passed = self._clock.monotonic() - self._seen_at
        return Expected(self._seen + passed * 99 // 100, self._seen + passed)


class QueueClock:
    """A clock that never goes back. What it knows is to be stored, and it learns what others have stored."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._witness = Witness(clock)
        self._latest: Instant = 0
        self._ahead = 0
        # The event loop and the store's thread both ask. Half of what one of them has seen, beside half of what the
        # other has, looks like a step back.
        self._mutex = threading.Lock()

    def now(self) -> Instant:
        return self.time().now

    def learn(self, ahead: int, latest: Instant) -> None:
        """Go by what is stored, if that is later."""
        with self._mutex:
            self._ahead = max(self._ahead, ahead)
            self._latest = max(self._latest, latest)

    def time(self) -> QueueTime:
        with self._mutex:
            # The clock is read last: what passes before it is read is no step back.
            least = max(self._latest, (expected := self._witness.expected()).least)
            now = self._clock.now() + self._ahead
            if now < least:
                correct = max(self._latest, expected.now)
                self._ahead += correct - now
                now = correct
            self._latest = now
            self._witness.saw(now)
            return QueueTime(now, self._ahead)

    def monotonic(self) -> Instant:
        return self._clock.monotonic()

    async def sleep_until(self, moment: Instant) -> None:
        await self._clock.sleep_until(self._clock.now() + moment - self.now())
