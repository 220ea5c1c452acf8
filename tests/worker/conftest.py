from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from fairlane import App, ManualClock
from tests.worker.harness import WatchedStore, watched_app


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def watched(clock: ManualClock) -> AsyncIterator[tuple[App, WatchedStore]]:
    app, store = watched_app(clock)
    yield app, store
    store.restore()
    await app.close()


@pytest.fixture
def app(watched: tuple[App, WatchedStore]) -> App:
    """An app without queues and tasks, on a database in memory, whose time moves only when the test says so."""
    return watched[0]


@pytest.fixture
def store(watched: tuple[App, WatchedStore]) -> WatchedStore:
    """The app's store, which tells what is asked of it."""
    return watched[1]
