"""An engine made of paper: a list of messages, and a worker that runs one when it is told to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fairlane.clock import ManualClock
from fairlane.forward import Forwarded, Forwarder, Message
from fairlane.forward.dispatcher import Dispatcher, Dispatching
from fairlane.worker.options import WorkerOptions
from tests.worker.harness import WatchedStore, running, turns


class PaperForwarder(Forwarder):
    """Publishes into `messages`, unless it is told to refuse."""

    engine = "Paper"

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.messages: list[Message] = []
        self.refusal: Exception | None = None
        self.never_taken: list[Any] = []
        """First arguments whose messages the broker refuses, whoever else gets through."""
        self.asked = 0
        """How often the broker was asked for something."""

    def name_of(self, target: Any) -> str:
        name: str = target.__name__
        return name

    def function_of(self, target: Any) -> Callable[..., Any]:
        function: Callable[..., Any] = target
        return function

    def install(self, forwarded: Forwarded) -> None: ...

    async def publish(self, message: Message) -> None:
        self.asked += 1
        if self.refusal is not None:
            raise self.refusal
        if message.args and message.args[0] in self.never_taken:
            raise ValueError("too large")
        self.messages.append(message)

    async def reach(self) -> None:
        self.asked += 1
        if self.refusal is not None:
            raise self.refusal

    async def deliver(self, message: Message) -> Any:
        """What an engine's worker does with a message."""
        delivery = await self.deliveries.begin(message.token, [message.task])
        if delivery is None:
            return None
        try:
            with delivery.entered():
                value = delivery.task.function(*delivery.args, **delivery.kwargs)
        except Exception as error:
            await self.deliveries.failed(delivery, error)
            return error
        await self.deliveries.done(delivery, value)
        return value


@asynccontextmanager
async def dispatching(forwarder: Forwarder, **options: Any) -> AsyncIterator[Dispatcher]:
    """A dispatcher that runs during the block, and is stopped and waited for after it."""
    async with running(await Dispatching(forwarder).worker(WorkerOptions(**options))) as dispatcher:
        yield dispatcher


async def heartbeat(store: WatchedStore, clock: ManualClock) -> None:
    """A third of a lease goes by, and leases are renewed, or their renewal fails."""
    before = store.ended["renew"]
    await turns()
    clock.advance("11s")
    await store.finished("renew", before + 1)
