"""Waiting for work without a worker: one ear for all queues of an app, and one waiter woken for each job.

A nudge says that something may have changed, never what. So nobody is woken by a nudge: it makes us look how many jobs
could start, and as many waiters return. A look registers the ear in the same transaction, so that a job either is seen
by the look or nudges the ear: whoever comes to wait looks first, and nothing that arrived before is missed.

A waiter that was woken has not claimed yet, and the next look finds its job again. Until the claim, that job is its own
(`_Line.woken`); a waiter that does not come to claim loses it to another after a moment.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterable

from fairlane.clock import SECOND, Clock
from fairlane.errors import StoreUnavailable
from fairlane.store.protocol import Listener, Looked, Store, WorkerIdentity
from fairlane.worker.timing import Outage, first_of, jittered, pause

__all__ = ["Ear"]

CLAIMS_WITHIN = SECOND
"""A waiter that was woken and has not claimed by then does not count: another may be woken for its job."""
POLL = 30 * SECOND
"""The last resort."""
LONGEST_LOOK = 0.05
LONGEST_OVERDUE = 1.0
"""Seconds, at most, until another look at a time that has come and opened nothing."""


class _Line:
    """Those who wait for one queue, in the order in which they came."""

    def __init__(self, queue: str, clock: Clock) -> None:
        self.queue = queue
        self.waiters: deque[asyncio.Future[bool]] = deque()
        self.changed = asyncio.Event()
        self.watcher: asyncio.Task[None] | None = None
        self.is_registered = False
        self.looks = 0
        self._clock = clock
        self._woken: deque[int] = deque()

    @property
    def woken(self) -> int:
        """Waiters that are on their way to claim."""
        since = self._clock.monotonic() - CLAIMS_WITHIN
        while self._woken and self._woken[0] <= since:
            self._woken.popleft()
        return len(self._woken)

    def wake(self, count: int) -> None:
        while count > 0 and self.waiters:
            waiter = self.waiters.popleft()
            if not waiter.done():
                waiter.set_result(True)
                self._woken.append(self._clock.monotonic())
                count -= 1

    def arrived(self) -> None:
        """One that was woken has claimed, or will not."""
        if self._woken:
            self._woken.popleft()
        self.changed.set()

    def end(self, answer: bool | Exception) -> None:
        """Send everybody away."""
        while self.waiters:
            waiter = self.waiters.popleft()
            if waiter.done():
                continue
            if isinstance(answer, Exception):
                waiter.set_exception(answer)
            else:
                waiter.set_result(answer)


class Ear:
    """What hears for all queues of an app in this process."""

    def __init__(self, store: Store, clock: Clock, identity: WorkerIdentity) -> None:
        self.identity = identity
        self._store = store
        self._clock = clock
        self._lines: dict[str, _Line] = {}
        self._outage = Outage(self._look_everywhere)
        self._listener: Listener | None = None
        self._is_open = asyncio.Event()
        self._listening: asyncio.Task[None] | None = None
        self._is_closed = False

    async def wait(self, queue: str, timeout: int | None) -> bool:
        """Return True once a job of the queue can start that no other waiter was woken for; False at the end of time.

        `timeout` is in microseconds.
        """
        if self._is_closed:
            return False
        line = self._lines.setdefault(queue, _Line(queue, self._clock))
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        line.waiters.append(waiter)
        line.changed.set()
        self._watch(line)
        timer = None if timeout is None else asyncio.ensure_future(self._give_up(waiter, timeout))
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None and waiter.result():
                # Woken and cancelled at once: its job wakes another, here or elsewhere.
                line.arrived()
                line.is_registered = True
                self._watch(line)
            raise
        finally:
            if timer is not None:
                timer.cancel()
            if waiter in line.waiters:
                line.waiters.remove(waiter)

    def claimed(self, queue: str) -> None:
        """A claim of this process has ended, whatever it brought."""
        if (line := self._lines.get(queue)) is not None:
            line.arrived()

    async def close(self) -> None:
        """Send the waiters away, and stop listening."""
        self._is_closed = True
        for line in self._lines.values():
            line.end(False)
        await self._stop([line.watcher for line in self._lines.values()])
        await self._stop([self._listening])

    async def _stop(self, tasks: Iterable[asyncio.Task[None] | None]) -> None:
        running = [task for task in tasks if task is not None]
        for task in running:
            # Not in the middle of a statement, as that costs its connection.
            self._outage.cancel(task)
        await asyncio.gather(*running, return_exceptions=True)

    async def _give_up(self, waiter: asyncio.Future[bool], timeout: int) -> None:
        await pause(self._clock, timeout)
        if not waiter.done():
            waiter.set_result(False)

    # Looking.

    def _watch(self, line: _Line) -> None:
        if self._listening is None:
            self._listening = asyncio.create_task(self._listen(), name="fairlane ear")
        if line.watcher is None:
            line.watcher = asyncio.create_task(self._serve(line), name=f"fairlane waiters of {line.queue}")

    async def _serve(self, line: _Line) -> None:
        """Look and wake for as long as somebody waits; then leave, so that nudges go to those who still do."""
        try:
            while line.waiters or line.is_registered:
                await self._is_open.wait()
                line.changed.clear()
                # Before the look: a claim that lands during it sets `changed`, and we look again.
                on_their_way = line.woken if line.waiters else 0
                looked = await self._look(line, len(line.waiters) + on_their_way)
                line.wake(looked.claimable - on_their_way)
                if line.waiters:
                    await self._until_the_next_look(line, looked)
        except Exception as error:
            line.end(error)
        finally:
            line.watcher = None

    async def _look(self, line: _Line, want: int) -> Looked:
        async def once() -> Looked:
            if self._listener is None:
                raise StoreUnavailable("the ear has lost its connection")
            return await self._store.look(line.queue, want, worker=self.identity, listener=self._listener)

        line.is_registered = True
        looked = await self._outage.ride_out(once, "waiting")
        line.is_registered = looked.claimable < want
        return looked

    async def _until_the_next_look(self, line: _Line, looked: Looked) -> None:
        due = jittered(POLL)
        if looked.next_due is not None:
            due = min(due, looked.next_due - looked.now)
        if line.woken:
            due = min(due, CLAIMS_WITHIN)
        if looked.look_again or due <= 0:
            # Not by the app's clock: what we wait for takes place in the world.
            longest = LONGEST_LOOK if looked.look_again else LONGEST_OVERDUE
            moment = min(0.001 * 2 ** min(line.looks, 20), longest)
            line.looks += 1
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(line.changed.wait(), moment)
        else:
            line.looks = 0
            await first_of(line.changed.wait(), pause(self._clock, due))

    def _look_everywhere(self) -> None:
        for line in self._lines.values():
            line.changed.set()

    # Listening.

    async def _listen(self) -> None:
        try:
            while True:
                listener = await self._outage.ride_out(lambda: self._store.listen(self.identity), "listening")
                await self._hear(listener)
        except Exception as error:
            # Nobody would ever hear anything: those who wait are told, and the next to wait tries again.
            for line in self._lines.values():
                line.end(error)
        finally:
            self._listening = None

    async def _hear(self, listener: Listener) -> None:
        """Listen until the ear is lost. What came while nobody listened is found by looking."""
        self._listener = listener
        self._is_open.set()
        self._look_everywhere()
        try:
            while True:
                if await listener.wait(None):
                    self._look_everywhere()
        except StoreUnavailable:
            return
        finally:
            self._is_open.clear()
            self._listener = None
            with contextlib.suppress(StoreUnavailable):
                await listener.close()
