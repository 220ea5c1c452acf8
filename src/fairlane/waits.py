"""Waiting for a time, for a duration, and for the database to come back."""

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
"""Seconds after the database is back by which everything that waited for it has tried again."""
DRIFT = 10_000
"""Clocks drift apart by one part in this many, at most."""
ANSWER_WITHIN = 2.0
"""Seconds for which a loop that is stopping still waits for an answer of the store."""


def pause(clock: Clock, duration: int) -> Coroutine[Any, Any, None]:
    """Wait this many microseconds, even if the wall clock is set back: leases must be renewed in time."""
    if isinstance(clock, SystemClock):
        return asyncio.sleep(duration / SECOND)
    return clock.sleep_until(clock.now() + duration)


async def first_of(*waits: Awaitable[Any]) -> None:
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
    """One timer for many due times, on the monotonic clock. It rings at the earliest; its owner then does what is due,
    and sets it again."""

    def __init__(self, clock: Clock, wakeup: Callable[[], None]) -> None:
        self._clock = clock
        self._ring = wakeup
        self._at: Instant | None = None
        self._sleeper: asyncio.Task[None] | None = None

    def set(self, moment: Instant) -> None:
        if self._at is not None and self._at <= moment:
            return
        self.close()
        self._at = moment
        # In a context of its own: it does not belong to the run that happened to set it.
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
    """The offset of the store's clock from our monotonic clock, from answers that carry the store's time.

    Each answer gives an interval for the offset, as wide as the answer took. The offset lies where all of them overlap,
    which is soon much less than a round trip.
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
        """The store's clock said `there` between these two instants of ours."""
        is_first = self._seen is None
        drift = 0 if self._seen is None else max(0, heard - self._seen) // DRIFT
        self._seen = heard
        least, most = max(self._least - drift, there - heard), min(self._most + drift, there - asked)
        if least > most:
            # The store's clock was set.
            least, most = there - heard, there - asked
        self._least, self._most = least, most
        # A slow answer says little: it changes the offset only if it contradicts it.
        if is_first or not least <= self.offset <= most:
            self.offset = int(least + most) // 2


class Outage:
    """Rides out an outage of the database: retries with growing pauses, and reports when it is back."""

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
        """Whether any kind of request failed when it was last made."""
        return bool(self._failing)

    async def ride_out(self, call: Callable[[], Awaitable[T]], what: str, unless: asyncio.Event | None = None) -> T:
        """Call until it succeeds, or until `unless` is set. Errors other than an outage are raised."""
        tries = 0
        while True:
            try:
                return await self.once(call, what)
            except StoreUnavailable as error:
                if isinstance(error, ConfigurationError):
                    raise  # waiting does not correct a URL
                tries += 1
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for((unless or asyncio.Event()).wait(), back_off(tries))
                if unless is not None and unless.is_set():
                    raise

    async def once(self, call: Callable[[], Awaitable[T]], what: str) -> T:
        """Call it once, and note whether the database answered."""
        try:
            result = await self._ask(call)
        except StoreUnavailable as error:
            self._lost(what, error)
            raise
        self._returned(what)
        return result

    async def others_are_back(self) -> None:
        """Return once everything else that waited for the database has had time to reconnect."""
        if (wait := self._back_at + REJOINED_WITHIN - time.monotonic()) > 0:
            await asyncio.sleep(wait)

    async def _ask(self, call: Callable[[], Awaitable[T]]) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._asking.add(task)
        try:
            return await call()
        except StoreUnavailable as error:
            if task.cancelling():  # leaving a session that does not answer fails too; that must not keep us
                raise asyncio.CancelledError from error
            raise
        finally:
            self._asking.discard(task)
            if task in self._cancel_then:
                self._cancel_then.discard(task)
                task.cancel()  # at its next wait: the answer of the store is processed first

    def cancel(self, task: asyncio.Task[Any]) -> None:
        """Cancel a task; if it waits for the store, then once it has the answer, if that comes soon.

        A statement that is interrupted costs its connection and a cancel request that may outlive the event loop; and
        nobody would know of what it had committed, such as claims.
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
        # Only for this kind of request: the database may still refuse others.
        self._failing.discard(what)
        self._back_at = time.monotonic()
        log.warning("the database is back at %s", what)
        self._on_return()
