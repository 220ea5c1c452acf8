"""A database in memory and a clock that is moved by hand, for the app of a program and for as long as a test lasts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fairlane.app import App
from fairlane.clock import ManualClock
from fairlane.testing.checking import check_app, check_clock

__all__ = ["in_memory"]


@asynccontextmanager
async def in_memory(app: App, clock: ManualClock | None = None) -> AsyncIterator[ManualClock]:
    """Let an app use an empty database in memory, and the clock that this gives, inside the block."""
    check_app("in_memory", app)
    check_clock("in_memory", clock)
    url, own = app.url, app.clock
    chosen = clock or ManualClock()
    await app.close()
    app.move_to("sqlite://", chosen)
    try:
        yield chosen
    finally:
        await app.close()
        app.move_to(url, own)
