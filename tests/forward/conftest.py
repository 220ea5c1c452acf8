from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from fairlane import App, Concurrency, ManualClock
from tests.forward.brokers import ThrowawayBroker, ThrowawayRabbit, ThrowawayRedis
from tests.forward.paper import PaperForwarder
from tests.worker.harness import WatchedStore, watched_app

# One server for each xdist worker that runs a test on it. A test that stops its broker starts one of its own.


@pytest.fixture(scope="session")
def redis() -> Iterator[ThrowawayRedis]:
    with ThrowawayRedis() as broker:
        yield broker


@pytest.fixture(scope="session")
def rabbitmq() -> Iterator[ThrowawayRabbit]:
    with ThrowawayRabbit() as broker:
        yield broker


@pytest.fixture(params=["redis", "rabbitmq"])
def broker(request: pytest.FixtureRequest) -> ThrowawayBroker:
    """Each of the two."""
    server: ThrowawayBroker = request.getfixturevalue(request.param)
    return server


# An app, its store, and an engine of paper.


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def watched(clock: ManualClock) -> AsyncIterator[tuple[App, WatchedStore]]:
    app, store = watched_app(clock)
    app.queue("emails", limits=Concurrency(2))
    yield app, store
    store.restore()
    await app.close()


@pytest.fixture
def app(watched: tuple[App, WatchedStore]) -> App:
    return watched[0]


@pytest.fixture
def store(watched: tuple[App, WatchedStore]) -> WatchedStore:
    return watched[1]


@pytest.fixture
def forwarder(app: App) -> PaperForwarder:
    return PaperForwarder(app)
