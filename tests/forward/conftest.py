from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.forward.brokers import ThrowawayBroker, ThrowawayRabbit, ThrowawayRedis

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
