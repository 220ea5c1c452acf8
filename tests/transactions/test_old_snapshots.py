"""A caller whose snapshot is older than a worker's registration: what it frees wakes the worker all the same."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Literal

import asyncpg
import pytest

from fairlane import App, Concurrency
from fairlane.clock import ManualClock
from tests.transactions.test_matrix import is_idle
from tests.waiting import until
from tests.worker.harness import working


@pytest.fixture
async def app(postgres_url: str) -> AsyncIterator[App]:
    """An app whose time stands still: nobody looks from time to time."""
    app = App(postgres_url, clock=ManualClock())
    yield app
    await app.close()


@pytest.mark.parametrize("isolation", ["read_committed", "repeatable_read", "serializable"])
async def test_an_ack_from_an_old_snapshot_wakes_who_waits_for_the_slot(
    app: App, postgres_url: str, isolation: Literal["read_committed", "repeatable_read", "serializable"]
) -> None:
    queue = app.queue("one", limits=[Concurrency(1)])
    ran: list[int] = []

    @app.task(queue="one")
    async def work(n: int) -> None:
        ran.append(n)

    await work.enqueue(1)
    await work.enqueue(2)
    (claim,) = await queue.claim(1, lease="1h")
    caller = await asyncpg.connect(postgres_url)
    transaction = caller.transaction(isolation=isolation)
    await transaction.start()
    await caller.fetch("select count(*) from fairlane.waiters")  # the snapshot, if there is one for all of it
    async with working(app, queues=["one"]):
        await is_idle(app, "one")
        await claim.ack(tx=caller)
        assert ran == []
        await transaction.commit()
        await until(lambda: ran == [2])
    await caller.close()
