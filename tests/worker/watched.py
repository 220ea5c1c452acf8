"""Fixtures of workers and of dispatchers: an app in memory, the store beneath it, and their time."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from fairlane import App
from fairlane.clock import ManualClock
from tests.worker.harness import WatchedStore, watched_app

__all__ = ["store", "watched"]


@pytest.fixture
async def watched(clock: ManualClock) -> AsyncIterator[tuple[App, WatchedStore]]:
    app, store = watched_app(clock)
    yield app, store
    store.restore()
    await app.close()


@pytest.fixture
def store(watched: tuple[App, WatchedStore]) -> WatchedStore:
    """The app's store, which tells what is asked of it."""
    return watched[1]
