"""Pages that follow what happens: the main part is rendered again at an interval, and sent where it has changed.

However many look at the same page with the same role, it is rendered once an interval: their streams wake at the same
moments, the first one renders, and the others take what it made.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope, Send

from fairlane.clock import SECOND, Clock, Instant
from fairlane.dashboard.rendering import fingerprint

__all__ = ["INTERVALS", "EventStream", "Live", "Rendered"]

INTERVALS = (2, 5, 15)
LONGEST_STREAM = 15 * 60 * SECOND
"""After that the browser comes again, and is asked again who it is."""
KEEP_ALIVE = 30 * SECOND
"""A sign of life, so that nothing between us and the browser takes the stream for dead."""
MOST_STREAMS = 500
_LINE_END = re.compile(r"\r\n|\r|\n")
"""As the browser splits what it gets."""

Render = Callable[[], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class Rendered:
    """The main part of a page, and what tells it from another one."""

    html: str
    version: str


@dataclass(slots=True)
class _Shared:
    """One page that somebody looks at."""

    lookers: int = 0
    tick: int = -1
    making: asyncio.Task[Rendered] | None = None


class Live:
    """The pages that are looked at now, and the streams to those who look."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.renders = 0
        self.streams = 0
        self._shared: dict[tuple[object, ...], _Shared] = {}
        self._stopped: asyncio.Event | None = None

    @property
    def stopped(self) -> asyncio.Event:
        # Made at first use: the loop that serves is not the one, if any, in which the dashboard was put together.
        if self._stopped is None:
            self._stopped = asyncio.Event()
        return self._stopped

    @property
    def is_full(self) -> bool:
        return self.streams >= MOST_STREAMS

    def stop(self) -> None:
        """End every stream: whoever serves them wants to stop."""
        self.stopped.set()

    def join(self, key: tuple[object, ...]) -> None:
        self.streams += 1
        self._shared.setdefault(key, _Shared()).lookers += 1

    def leave(self, key: tuple[object, ...]) -> None:
        self.streams -= 1
        shared = self._shared[key]
        shared.lookers -= 1
        if not shared.lookers:
            del self._shared[key]

    async def rendered(self, key: tuple[object, ...], tick: int, render: Render) -> Rendered:
        """What the page shows at this tick; made by whoever comes first."""
        shared = self._shared[key]
        if shared.making is None or shared.tick != tick:
            shared.tick = tick
            shared.making = asyncio.create_task(self._make(render))
        # Whoever goes away meanwhile does not take it away from the others.
        return await asyncio.shield(shared.making)

    async def _make(self, render: Render) -> Rendered:
        self.renders += 1
        html = await render()
        return Rendered(html, fingerprint(html))


class EventStream:
    """An answer that goes on until the visitor goes, their session ends, or the server stops."""

    def __init__(
        self, live: Live, key: tuple[object, ...], render: Render, *, every: int, seen: str, ends_at: Instant | None
    ) -> None:
        self._live = live
        self._key = (*key, every)
        self._render = render
        self._every = every * SECOND
        self._seen = seen
        now = live.clock.now()
        self._ends_at = min(now + LONGEST_STREAM, ends_at or now + LONGEST_STREAM)
        self._last_sign = now

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b": here\n\n", "more_body": True})
        self._live.join(self._key)
        ends = [asyncio.create_task(_gone(receive)), asyncio.create_task(self._live.stopped.wait())]
        try:
            while await self._waited(ends):
                if event := await self._news():
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        finally:
            for each in ends:
                each.cancel()
            self._live.leave(self._key)
        if not ends[0].done():
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _waited(self, ends: list[asyncio.Task[Any]]) -> bool:
        """Until the next tick; `False`: it is over."""
        clock = self._live.clock
        next_tick = (clock.now() // self._every + 1) * self._every
        if next_tick >= self._ends_at:
            return False
        sleep = asyncio.create_task(clock.sleep_until(next_tick))
        try:
            await asyncio.wait([sleep, *ends], return_when=asyncio.FIRST_COMPLETED)
        finally:
            sleep.cancel()
        return not any(each.done() for each in ends)

    async def _news(self) -> bytes | None:
        """The event to send, if there is something to tell."""
        now = self._live.clock.now()
        try:
            rendered = await self._live.rendered(self._key, now // self._every, self._render)
        except Exception as error:
            # What was asked for is gone, or the database is away: the page says so when it is asked for again.
            self._seen = ""
            self._last_sign = now
            return b"event: trouble\ndata: " + type(error).__name__.encode() + b"\n\n"
        if rendered.version == self._seen:
            if now - self._last_sign < KEEP_ALIVE:
                return None
            self._last_sign = now
            return b": here\n\n"
        self._seen = rendered.version
        self._last_sign = now
        data = "\n".join(f"data: {line}" for line in _LINE_END.split(rendered.html))
        return f"id: {rendered.version}\n{data}\n\n".encode()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
