"""A program that claims by hand, through the public API, on a database of any kind."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

from fairlane import (
    App,
    Fair,
    HeldClaim,
    Job,
    Queue,
)
from fairlane.clock import Clock
from fairlane.policy import Limit
from fairlane.store.protocol import Looked
from tests.store.harness import Database, soon


def url_of(database: Database) -> str:
    match database.kind:
        case "sqlite-memory":
            return "sqlite://"
        case "sqlite-file":
            return f"sqlite:///{database.url}"
        case "postgres":
            return database.url


class Shop:
    """A program: an app, its queue and its task."""

    def __init__(self, database: Database, clock: Clock | None, *limits: Limit, fair: Fair | None = None) -> None:
        self.app = App(url_of(database), clock=clock, max_payload=1_000)
        self.running = self.held = self.most = self.looking = 0
        self.last_look: Looked | None = None
        self.queue: Queue = self.app.queue("webhooks", fair=fair, limits=limits, keys=["account"])

        async def deliver(number: int, account: str = "acme") -> int:
            self.running += 1
            self.most = max(self.most, self.running + self.held)
            await asyncio.sleep(0)
            self.running -= 1
            return 2 * number

        self.deliver = self.app.task(queue="webhooks", name="deliver", max_attempts=3)(deliver)

    async def open(self) -> Shop:
        """Open the app, and watch how its ear looks."""
        store = await self.app.opened()
        real = store.look

        async def look(*args: Any, **options: Any) -> Looked:
            self.looking += 1
            try:
                self.last_look = await real(*args, **options)
                return self.last_look
            finally:
                self.looking -= 1

        store.look = look  # type: ignore[method-assign]
        return self

    async def enqueue(self, count: int = 1, account: str = "acme") -> list[Job[int]]:
        return await self.app.enqueue_many([self.deliver.call(n, account) for n in range(count)])


async def open_shop(
    stack: AsyncExitStack, database: Database, clock: Clock | None, *limits: Limit, fair: Fair | None = None
) -> Shop:
    shop = Shop(database, clock, *limits, fair=fair)
    await stack.enter_async_context(shop.app)
    return await shop.open()


def ids(these: list[HeldClaim] | list[Job[int]]) -> list[Any]:
    return [each.id for each in these]


async def all_quiet(shop: Shop) -> None:
    """Let whatever is on its way arrive: a few trips to the database and back."""
    store = await shop.app.opened()
    for _ in range(30):
        await store.counts("webhooks")
        await asyncio.sleep(0)


async def is_idle(shop: Shop) -> None:
    """Return once the ear of this process is registered, and nobody looks any more."""

    async def looked() -> None:
        while True:
            await all_quiet(shop)
            if not shop.looking and shop.last_look is not None and not shop.last_look.look_again:
                return

    await soon(looked())


async def waiting(shop: Shop, count: int = 1, timeout: str | None = None) -> list[asyncio.Task[bool]]:
    """So many waiters, all asleep."""
    tasks = [asyncio.create_task(shop.queue.wait(timeout)) for _ in range(count)]
    await all_quiet(shop)
    await is_idle(shop)
    assert not any(task.done() for task in tasks)
    return tasks
