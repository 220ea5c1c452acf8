from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from fairlane import App
from fairlane.clock import ManualClock
from tests.dashboard.harness import TOKEN, VIEWER_TOKEN, Site, a_shop
from tests.dashboard.world import World, open_world


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
async def shop(clock: ManualClock, stack: AsyncExitStack) -> App:
    """An app with a queue and a task, on a database in memory."""
    return await stack.enter_async_context(a_shop("sqlite://", clock))


@pytest.fixture
async def site(shop: App, clock: ManualClock, stack: AsyncExitStack) -> Site:
    """Its dashboard, mounted below /ops of another app."""
    return await stack.enter_async_context(Site.of(shop, clock, token=TOKEN, viewer_token=VIEWER_TOKEN))


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest) -> str:
    """An empty database of each kind."""
    return "sqlite://" if request.param == "sqlite" else request.getfixturevalue("postgres_url")


@pytest.fixture
async def world(database_url: str, clock: ManualClock, stack: AsyncExitStack) -> World:
    """Jobs in every state, and the JSON API over them; every answer is held to `openapi.json`."""
    return await open_world(stack, database_url, clock)
