"""The store's time: the database's clock, or the one it was given."""

from __future__ import annotations

from fairlane.clock import Clock, Instant, SystemClock

__all__ = ["StoreClock"]


class StoreClock:
    """What statements take as their time (`parameter()`: nothing, where the database is to say), and waiting for it."""

    def __init__(self, given: Clock | None) -> None:
        self._given = given
        self._local = SystemClock()
        self._ahead = 0

    def parameter(self) -> Instant | None:
        return None if self._given is None else self._given.now()

    def observe(self, now: Instant) -> None:
        """The database says that it is now `now`: a wait on this machine ends by its clock."""
        self._ahead = now - self._local.now()

    def estimate(self) -> Instant:
        """The time as far as it can be told without asking: for ids, which only have to rise about with it."""
        return self._local.now() + self._ahead if self._given is None else self._given.now()

    async def sleep_until(self, moment: Instant) -> None:
        if self._given is not None:
            await self._given.sleep_until(moment)
        else:
            await self._local.sleep_until(moment - self._ahead)
