from __future__ import annotations

import asyncio
from collections.abc import Iterator
from uuid import uuid4

import pytest

from fairlane import App, Concurrency
from fairlane.testing.postgres import ThrowawayPostgres
from tests.forward.brokers import ThrowawayBroker, ThrowawayRabbit, ThrowawayRedis
from tests.forward.members import Place
from tests.forward.paper import PaperForwarder
from tests.worker.harness import WatchedStore
from tests.worker.watched import store, watched

__all__ = ["store", "watched"]

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


@pytest.fixture(scope="module", params=["redis", "rabbitmq"])
def place(
    request: pytest.FixtureRequest,
    postgres: ThrowawayPostgres,
    postgres_template: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Place]:
    """Where a shop is that a whole module shares, with each of the two brokers."""
    name = f"forward_{uuid4().hex}"
    url = asyncio.run(postgres.create_database(name, template=postgres_template))
    yield Place(url, request.getfixturevalue(request.param), tmp_path_factory.mktemp("shop"))
    asyncio.run(postgres.drop_database(name))


# An app, its store, and an engine of paper.


@pytest.fixture
def app(watched: tuple[App, WatchedStore]) -> App:
    watched[0].queue("emails", limits=Concurrency(2))
    return watched[0]


@pytest.fixture
def forwarder(app: App) -> PaperForwarder:
    return PaperForwarder(app)
