"""Live pages: the main part is rendered again at an interval, and sent when it has changed.

However many visitors of one role have a page open, it is rendered once an interval: their streams wake at the same
moment, the first one renders, and the others share the result.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Receive, Scope, Send

from fairlane.clock import SECOND, Clock, Instant
from fairlane.dashboard.access import Visitor
from fairlane.dashboard.html import fingerprint

INTERVALS = (2, 5, 15)
LONGEST_STREAM = 15 * 60 * SECOND
"""After that the browser reconnects, and is authenticated again."""
KEEP_ALIVE = 30 * SECOND
"""How often a comment is sent, so that no proxy takes the stream for dead."""
MOST_STREAMS = 500
MOST_OF_VIEWERS = 400
"""The rest is kept for operators."""
MOST_OF_ONE = 20
"""Streams of one session, or of all programs with one token."""
_LINE_END = re.compile(r"\r\n|\r|\n")
"""The line ends at which the browser splits what it gets."""

Render = Callable[[], Awaitable[str]]
IsOver = Callable[[], Awaitable[bool]]
"""Whether the session that asked for a stream has ended."""


@dataclass(slots=True)
class _Shared:
    """A page that is open somewhere."""

    lookers: int = 0
    tick: int = -1
    making: asyncio.Task[tuple[str, str]] | None = None
    """Its HTML, and a fingerprint of that."""


class Live:
    """The pages that are open now, and their streams."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.renders = 0
        self.open: Counter[tuple[str, bool]] = Counter()
        """Streams of each visitor, and whether they may act."""
        self._shared: dict[tuple[object, ...], _Shared] = {}
        self.stopped = asyncio.Event()
        """Set when the server stops: every stream ends."""

    @property
    def streams(self) -> int:
        return self.open.total()

    def refusal(self, visitor: Visitor) -> tuple[int, str] | None:
        """The status and the reason if this visitor gets no stream now; `None` if they get one."""
        if self.open[_key(visitor)] >= MOST_OF_ONE:
            return 429, f"{MOST_OF_ONE} pages are open in this session; close some"
        of_viewers = sum(count for (_, may_act), count in self.open.items() if not may_act)
        if self.streams >= MOST_STREAMS or (not visitor.may_act and of_viewers >= MOST_OF_VIEWERS):
            return 503, "too many pages are open; try again shortly"
        return None

    @contextmanager
    def looking(self, key: tuple[object, ...], visitor: Visitor) -> Iterator[None]:
        """Count a visitor of a page, for as long as it is open."""
        shared = self._shared.setdefault(key, _Shared())
        self.open[_key(visitor)] += 1
        shared.lookers += 1
        try:
            yield
        finally:
            self.open[_key(visitor)] -= 1
            self.open += Counter()  # forgets those who have none left
            shared.lookers -= 1
            if not shared.lookers:
                del self._shared[key]

    async def rendered(self, key: tuple[object, ...], tick: int, render: Render) -> tuple[str, str]:
        """What the page shows at this tick, and its fingerprint. The first visitor renders it for all."""
        shared = self._shared[key]
        if shared.making is None or shared.tick != tick:
            shared.tick = tick
            self.renders += 1
            shared.making = asyncio.create_task(_fingerprinted(render))
        # Whoever goes away meanwhile does not take it away from the others.
        return await asyncio.shield(shared.making)


async def _fingerprinted(render: Render) -> tuple[str, str]:
    html = await render()
    return html, fingerprint(html)


@dataclass(slots=True, kw_only=True)
class EventStream:
    """A stream of events that ends when the visitor goes, their session ends, or the server stops."""

    live: Live
    key: tuple[object, ...]
    """The page. Visitors of the same page with the same interval share what is rendered."""
    render: Render
    every: int
    """Seconds."""
    seen: str
    visitor: Visitor
    is_over: IsOver
    _ends_at: Instant = field(init=False)
    _last_sign: Instant = field(init=False)

    def __post_init__(self) -> None:
        now = self._last_sign = self.live.clock.now()
        self._ends_at = min(now + LONGEST_STREAM, self.visitor.expires_at or now + LONGEST_STREAM)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")]
        # Before anything is awaited: of many who ask at once, no more may join than there is room for.
        with self.live.looking((*self.key, self.every), self.visitor):
            ends = [asyncio.create_task(until_gone(receive)), asyncio.create_task(self.live.stopped.wait())]
            try:
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                await send({"type": "http.response.body", "body": b": here\n\n", "more_body": True})
                while await self._waited(ends) and (event := await self._news()) is not None:
                    if event:
                        await send({"type": "http.response.body", "body": event, "more_body": True})
            finally:
                for each in ends:
                    each.cancel()
        if not ends[0].done():
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _waited(self, ends: list[asyncio.Task[Any]]) -> bool:
        """Wait for the next tick; `False` if the stream is over."""
        clock = self.live.clock
        every = self.every * SECOND
        next_tick = (clock.now() // every + 1) * every
        if next_tick >= self._ends_at:
            return False
        sleep = asyncio.create_task(clock.sleep_until(next_tick))
        try:
            await asyncio.wait([sleep, *ends], return_when=asyncio.FIRST_COMPLETED)
        finally:
            sleep.cancel()
        return not any(each.done() for each in ends)

    async def _news(self) -> bytes | None:
        """The event to send, empty if there is nothing new; `None` if the session has ended."""
        now = self.live.clock.now()
        try:
            html, version = await self.live.rendered((*self.key, self.every), now // (self.every * SECOND), self.render)
            # Asked last: nothing that was read after the end of a session is sent to it.
            if await self.is_over():
                return None
        except Exception as error:
            # What was asked for is gone, or the database is away: the page says so when it is asked for again.
            version, event = "", b"event: trouble\ndata: " + type(error).__name__.encode() + b"\n\n"
        else:
            if version == self.seen and now - self._last_sign < KEEP_ALIVE:
                return b""
            data = "\n".join(f"data: {line}" for line in _LINE_END.split(html))
            event = b": here\n\n" if version == self.seen else f"id: {version}\n{data}\n\n".encode()
        self.seen, self._last_sign = version, now
        return event


def _key(visitor: Visitor) -> tuple[str, bool]:
    # A program may say any name; its token it cannot choose.
    return visitor.session or f"token of a {visitor.role}", visitor.may_act


async def until_gone(receive: Receive) -> None:
    """Return when the visitor has gone away; the body was read before."""
    while (await receive())["type"] != "http.disconnect":
        pass
