"""Queue time on PostgreSQL: by the database's clock, or by the one the store was given."""

from __future__ import annotations

from fairlane.clock import Clock, Instant, SystemClock
from fairlane.store.queue_time import UNKNOWN, Expected, QueueClock, QueueTime, Witness


class StoreClock:
    """What statements take as their time (`parameter()`: nothing, where the database is to say), and waiting for it."""

    def __init__(self, given: Clock | None) -> None:
        self._given = None if given is None else QueueClock(given)
        self._local = SystemClock()
        self._offset = 0
        self._witness = Witness(self._local)

    def parameter(self) -> Instant | None:
        return None if self._given is None else self._given.now()

    def given(self) -> QueueTime | None:
        """Queue time, unless the database is to say."""
        return None if self._given is None else self._given.time()

    def learn(self, ahead: int, latest: Instant) -> None:
        """What is stored. The database goes by it by itself, a clock that was given is to do so too."""
        if self._given is not None:
            self._given.learn(ahead, latest)

    def expected(self) -> Expected:
        """What queue time should be, from what this process has seen. To be asked before the database is."""
        return UNKNOWN if self._given is not None else self._witness.expected()

    def observe(self, now: Instant) -> None:
        """The database says that queue time is `now`: a wait on this machine ends by it."""
        self._offset = now - self._local.now()

    def kept(self, now: Instant) -> None:
        """The same, where it has compared that with what was expected."""
        self.observe(now)
        self._witness.saw(now)

    def estimate(self) -> Instant:
        """The time as far as it can be told without asking: for ids, which only have to rise about with it."""
        return self._local.now() + self._offset if self._given is None else self._given.now()

    async def sleep_until(self, moment: Instant) -> None:
        if self._given is not None:
            await self._given.sleep_until(moment)
        else:
            await self._local.sleep_until(moment - self._offset)
