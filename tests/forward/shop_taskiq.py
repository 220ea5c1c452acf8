"""A shop on Taskiq: what its workers, the dispatcher and the tests import."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from taskiq import AsyncTaskiqDecoratedTask, Context, SimpleRetryMiddleware, TaskiqDepends, TaskiqMiddleware
from taskiq.abc.broker import AsyncBroker
from taskiq_aio_pika import AioPikaBroker
from taskiq_redis import ListQueueBroker

from fairlane import App, Backoff, Cancel, Concurrency, Snooze, Task, context
from fairlane.forward.taskiq import TaskiqForwarder

QUEUE = "emails"
AT_ONCE = Backoff(0)


@dataclass
class Shop:
    app: App
    broker: AsyncBroker
    forwarder: TaskiqForwarder
    tasks: dict[str, Task[..., Any]]
    targets: dict[str, AsyncTaskiqDecoratedTask[..., Any]]


def make(url: str, broker_url: str, folder: Path) -> Shop:
    app = App(url)
    app.queue(QUEUE, limits=[Concurrency(8)])
    broker = connected(broker_url)
    retrying: TaskiqMiddleware = SimpleRetryMiddleware(default_retry_count=3, default_retry_label=True)
    broker.add_middlewares(retrying)
    forwarder = TaskiqForwarder(app, broker, lease="5s", routes={"by_a_pattern": QUEUE})
    shop = Shop(app, broker, forwarder, {}, {})

    def forwarded(function: Any, retries: Any = "policy", labels: dict[str, Any] | None = None, **options: Any) -> None:
        name = function.__name__
        target = broker.task(name, **(labels or {}))(function)
        shop.targets[name] = target
        shop.tasks[name] = forwarder.task(target, queue=QUEUE, backoff=AT_ONCE, retries=retries, **options)

    def ran(name: str) -> None:
        with (folder / name).open("a") as file:
            file.write("ran\n")

    async def add(first: int, second: int = 1) -> int:
        return first + second

    def added_in_a_thread(first: int, second: int) -> list[Any]:
        return [first + second, str(context().id)]

    async def fails_twice() -> int:
        if context().attempt < 3:
            raise ConnectionError("the mail server is away")
        return context().attempt

    def always_fails() -> None:
        raise ConnectionError("the mail server is away")

    async def snoozes_once() -> str:
        marker = folder / f"snoozed-{context().id}"
        if not marker.exists():
            marker.touch()
            raise Snooze(0)
        return f"attempt {context().attempt}"

    async def cancels() -> None:
        raise Cancel("the order was withdrawn")

    async def depends(number: int, delivered: Context = TaskiqDepends()) -> list[Any]:  # noqa: B008
        return [number, delivered.message.task_id]

    async def sends_itself_again(delivered: Context = TaskiqDepends()) -> None:  # noqa: B008
        ran("sends_itself_again")
        await type(broker).kick(broker, broker.formatter.dumps(delivered.message))  # as one that delivers it twice

    async def retried_by_taskiq(delivered: Context = TaskiqDepends()) -> list[int]:  # noqa: B008
        tries = int(delivered.message.labels.get("_retries", 0))
        if tries < 2:
            raise ConnectionError("the mail server is away")
        return [tries, context().attempt]

    async def is_too_slow() -> None:
        await asyncio.get_running_loop().create_future()

    async def given_up_by_taskiq() -> None:
        ran("given_up_by_taskiq")
        raise ConnectionError("the mail server is away")

    async def never_ends() -> None:
        ran("never_ends")
        await asyncio.get_running_loop().create_future()

    forwarded(never_ends)
    forwarded(is_too_slow, labels={"timeout": 0.01}, max_attempts=1)
    forwarded(add)
    forwarded(added_in_a_thread)
    forwarded(fails_twice, max_attempts=5)
    forwarded(always_fails, max_attempts=2)
    forwarded(snoozes_once)
    forwarded(cancels)
    forwarded(depends)
    forwarded(sends_itself_again)
    forwarded(retried_by_taskiq, retries="engine")
    forwarded(given_up_by_taskiq, retries="engine")

    @forwarder.route(queue=QUEUE)
    @broker.task("routed")
    async def routed(first: int, second: int) -> int:
        return first * second

    @forwarder.route(queue=QUEUE)
    @broker.task("fails_at_its_own_count", retry_on_error=True, max_retries=4)
    async def fails_at_its_own_count() -> None:
        ran("fails_at_its_own_count")
        raise ConnectionError("the mail server is away")

    @forwarder.route(queue=QUEUE)
    @broker.task("fails_once_and_for_all", retry_on_error=False)
    async def fails_once_and_for_all() -> None:
        ran("fails_once_and_for_all")
        raise ConnectionError("the mail server is away")

    @forwarder.route(queue=QUEUE)
    @broker.task("reads_labels")
    async def reads_labels(names: list[str], delivered: Context = TaskiqDepends()) -> list[Any]:  # noqa: B008
        return [delivered.message.labels.get(name) for name in names]

    @broker.task("sent_past_fairlane")
    async def sent_past_fairlane() -> None:
        ran("sent_past_fairlane")

    @broker.task("by_a_pattern")
    async def by_a_pattern(first: int, second: int) -> list[Any]:
        return [first * second, str(context().id)]

    for each in (routed, fails_at_its_own_count, fails_once_and_for_all, reads_labels, sent_past_fairlane):
        shop.targets[each.task_name] = each
    shop.targets["by_a_pattern"] = by_a_pattern
    return shop


def connected(url: str) -> AsyncBroker:
    if url.startswith("redis"):
        return ListQueueBroker(url, socket_timeout=None)
    return AioPikaBroker(url, reconnect_interval=0.2)


if "SHOP_BROKER" in os.environ:
    shop = make(os.environ["FAIRLANE_URL"], os.environ["SHOP_BROKER"], Path(os.environ["SHOP_FOLDER"]))
    broker, forwarder = shop.broker, shop.forwarder
