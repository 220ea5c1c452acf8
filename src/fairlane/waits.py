"""Waiting, in the three ways a worker waits: for a moment, for a while, and for a database to come back."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from fairlane.clock import SECOND, Clock, Instant, SystemClock
from fairlane.errors import ConfigurationError, StoreUnavailable

log = logging.getLogger("fairlane.worker")

T = TypeVar("T")

FIRST_RETRY, LONGEST_RETRY = 0.05, 5.0
REJOINED_WITHIN = LONGEST_RETRY + 1.0
"""Seconds after which everybody who waited for the database has asked it again, once it is back."""
DRIFT = 10_000
"""Clocks run apart by one part in so many, at the most."""
ANSWER_WITHIN = 2.0
"""Seconds for which a loop that is to end still waits for the answer to what it has asked the store."""


def pause(clock: Clock, duration: int) -> Coroutine[Any, Any, None]:
    """Wait for so many microseconds from now, also where the wall clock is set back: leases must be renewed in time."""
    if isinstance(clock, SystemClock):
        return asyncio.sleep(duration / SECOND)
    return clock.sleep_until(clock.now() + duration)


async def first_of(*waits: Coroutine[Any, Any, Any]) -> None:
    """Wait for whichever ends first; the others are cancelled."""
    tasks = [asyncio.ensure_future(each) for each in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def jittered(duration: int) -> int:
    """Up to a quarter more or less: workers that started together must not do their upkeep together."""
    return round(duration * random.uniform(0.75, 1.25))


def back_off(tries: int) -> float:
    """Seconds until the database is asked again after so many failures. Not by the app's clock: an outage takes place
    in the world."""
    return min(FIRST_RETRY * 2.0 ** min(tries, 20), LONGEST_RETRY) * random.uniform(0.5, 1.0)


class Alarm:
    """One timer for many moments, by the monotonic clock: it rings at the earliest. Whoever is rung looks what is due,
    and sets it again."""

    def __init__(self, clock: Clock, ring: Callable[[], None]) -> None:
        self._clock = clock
        self._ring = ring
        self._at: Instant | None = None
        self._sleeper: asyncio.Task[None] | None = None

    def set(self, moment: Instant) -> None:
        if self._at is not None and self._at <= moment:
            return
        self.close()
        self._at = moment
        # In a context of its own: it rings for many, and not for the run that happened to set it.
        self._sleeper = asyncio.get_running_loop().create_task(
            self._sleep(moment), name="fairlane-alarm", context=contextvars.Context()
        )

    async def _sleep(self, moment: Instant) -> None:
        await pause(self._clock, max(0, moment - self._clock.monotonic()))
        self._at = self._sleeper = None
        self._ring()

    def close(self) -> None:
        if self._sleeper is not None:
            self._sleeper.cancel()
        self._at = self._sleeper = None


class StoreTime:
    """Queue time beside our monotonic clock: what to add to ours, from answers that say when they were given.

    Each answer says that the difference lies between two numbers, as far apart as it took. All together they say more:
    it lies where those spans overlap, which soon is a fraction of a round trip.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.offset = 0
        self.ahead = 0
        """How far queue time is ahead of the store's clock."""
        self._least, self._most = -math.inf, math.inf
        self._seen: Instant | None = None

    def now(self) -> Instant:
        """Queue time."""
        return self._clock.monotonic() + self.offset

    def wall(self) -> Instant:
        """What the store's clock shows."""
        return self.now() - self.ahead

    def hear(self, asked: Instant, there: Instant, heard: Instant) -> None:
        """Between these two instants by our clock, the store's said `there`."""
        is_first = self._seen is None
        drift = 0 if self._seen is None else max(0, heard - self._seen) // DRIFT
        self._seen = heard
        least, most = max(self._least - drift, there - heard), min(self._most + drift, there - asked)
        if least > most:
            # The store's clock was set.
            least, most = there - heard, there - asked
        self._least, self._most = least, most
        # A long answer says little, and moves nothing that it does not contradict.
        if is_first or not least <= self.offset <= most:
            self.offset = int(least + most) // 2


class Outage:
    """Rides out a database that does not answer or refuses: waits longer each time, and tells once it is back."""

    def __init__(
        self,
        on_return: Callable[[], None] = lambda: None,
        on_loss: Callable[[str, StoreUnavailable], None] = lambda what, error: None,
    ) -> None:
        self._on_return = on_return
        self._on_loss = on_loss
        self._asking: set[asyncio.Task[Any]] = set()
        self._cancel_then: set[asyncio.Task[Any]] = set()
        self._failing: set[str] = set()
        self._back_at = -REJOINED_WITHIN

    @property
    def is_lost(self) -> bool:
        """Whether anything that was last asked of the database has failed."""
        return bool(self._failing)

    async def ride_out(self, call: Callable[[], Awaitable[T]], what: str, unless: asyncio.Event | None = None) -> T:
        """Call until it succeeds, or until `unless` is set. Errors other than a lost database are the caller's."""
        tries = 0
        while True:
            try:
                return await self.once(call, what)
            except StoreUnavailable as error:
                if isinstance(error, ConfigurationError):
                    raise  # no wait corrects a URL
                tries += 1
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for((unless or asyncio.Event()).wait(), back_off(tries))
                if unless is not None and unless.is_set():
                    raise

    async def once(self, call: Callable[[], Awaitable[T]], what: str) -> T:
        """Call it, and note whether the database was there."""
        try:
            result = await self._ask(call)
        except StoreUnavailable as error:
            self._lost(what, error)
            raise
        self._returned(what)
        return result

    async def others_are_back(self) -> None:
        """Return once others who waited for the database as well have had time to find it."""
        if (wait := self._back_at + REJOINED_WITHIN - time.monotonic()) > 0:
            await asyncio.sleep(wait)

    async def _ask(self, call: Callable[[], Awaitable[T]]) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._asking.add(task)
        try:
            return await call()
        except StoreUnavailable as error:
            if task.cancelling():  # to leave a session that does not answer fails as well: that must not keep us
                raise asyncio.CancelledError from error
            raise
        finally:
            self._asking.discard(task)
            if task in self._cancel_then:
                self._cancel_then.discard(task)
                task.cancel()  # at its next wait: what the store has answered is taken first

    def cancel(self, task: asyncio.Task[Any]) -> None:
        """Cancel a task; one that has asked the store, once it has its answer, if that comes soon.

        A statement that is broken off costs its connection and a request to the server that may outlive the event
        loop; and what it had committed (claims, say) would be known to nobody.
        """
        if task in self._asking:
            self._cancel_then.add(task)
            asyncio.get_running_loop().call_later(ANSWER_WITHIN, self._break_off, task)
        else:
            task.cancel()

    def _break_off(self, task: asyncio.Task[Any]) -> None:
        if task in self._cancel_then:
            self._cancel_then.discard(task)
            task.cancel()

    def _lost(self, what: str, error: StoreUnavailable) -> None:
        level = logging.DEBUG if what in self._failing else logging.WARNING
        log.log(level, "the database fails at %s: %s; running jobs go on, trying again", what, error)
        was_lost = self.is_lost
        self._failing.add(what)
        if not was_lost:
            self._on_loss(what, error)

    def _returned(self, what: str) -> None:
        if what not in self._failing:
            return
        # Of what was asked for one reason: the database may still refuse the rest.
        self._failing.discard(what)
        self._back_at = time.monotonic()
        log.warning("the database is back at %s", what)
        self._on_return()
