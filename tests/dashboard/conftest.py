from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from fairlane import App
from fairlane.clock import ManualClock
from tests.dashboard.harness import TOKEN, VIEWER_TOKEN, Site, a_shop


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


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
