"""A shop on Dramatiq: what its workers, the dispatcher and the tests import."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dramatiq
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import AsyncIO, CurrentMessage
from dramatiq.results import Results
from dramatiq.results.backends.stub import StubBackend

from fairlane import App, Backoff, Cancel, Concurrency, Snooze, Task, context
from fairlane.forward.dramatiq import DramatiqForwarder

QUEUE = "emails"
AT_ONCE = Backoff(0)


@dataclass
class Shop:
    app: App
    broker: dramatiq.Broker
    forwarder: DramatiqForwarder
    tasks: dict[str, Task[..., Any]]
    actors: dict[str, dramatiq.Actor[..., Any]]


def make(url: str, broker_url: str, folder: Path) -> Shop:
    app = App(url)
    app.queue(QUEUE, limits=[Concurrency(8)])
    broker = connected(broker_url)
    broker.add_middleware(AsyncIO())
    broker.add_middleware(CurrentMessage())
    broker.add_middleware(Results(backend=StubBackend()))  # type: ignore[no-untyped-call]
    forwarder = DramatiqForwarder(app, broker, lease="5s", routes={"by_a_pattern": QUEUE})
    shop = Shop(app, broker, forwarder, {}, {})

    def forwarded(function: Any, retries: Any = "policy", actor: dict[str, Any] | None = None, **options: Any) -> None:
        made = dramatiq.actor(broker=broker, queue_name=QUEUE, **(actor or {}))(function)
        name = function.__name__
        shop.actors[name] = made
        shop.tasks[name] = forwarder.task(made, queue=QUEUE, backoff=AT_ONCE, retries=retries, **options)

    def ran(name: str) -> None:
        with (folder / name).open("a") as file:
            file.write("ran\n")

    def add(first: int, second: int = 1) -> int:
        return first + second

    async def added_async(first: int, second: int) -> list[Any]:
        return [first + second, str(context().id)]

    def fails_twice() -> int:
        if context().attempt < 3:
            raise ConnectionError("the mail server is away")
        return context().attempt

    def always_fails() -> None:
        raise ConnectionError("the mail server is away")

    def throws() -> None:
        raise KeyError("no such template")

    def snoozes_once() -> str:
        marker = folder / f"snoozed-{context().id}"
        if not marker.exists():
            marker.touch()
            raise Snooze(0)
        return f"attempt {context().attempt}"

    def cancels() -> None:
        raise Cancel("the order was withdrawn")

    def too_old() -> None:
        ran("too_old")

    def sends_itself_again() -> None:
        ran("sends_itself_again")
        message = CurrentMessage.get_current_message()
        assert message is not None
        type(broker).enqueue(broker, message.copy())  # as a broker that delivers it twice

    def retried_by_dramatiq() -> list[int]:
        message = CurrentMessage.get_current_message()
        assert message is not None
        tries = int(message.options.get("retries", 0))
        if tries < 2:
            raise ConnectionError("the mail server is away")
        return [tries, context().attempt]

    def given_up_by_dramatiq() -> None:
        ran("given_up_by_dramatiq")
        raise ConnectionError("the mail server is away")

    own_retries = {"max_retries": 2, "min_backoff": 1, "max_backoff": 1}
    forwarded(add)
    forwarded(added_async)
    forwarded(fails_twice, max_attempts=5)
    forwarded(always_fails, max_attempts=2)
    forwarded(throws, actor={"throws": KeyError}, max_attempts=5)
    forwarded(snoozes_once)
    forwarded(cancels)
    forwarded(too_old, actor={"max_age": -1})
    forwarded(sends_itself_again)
    forwarded(retried_by_dramatiq, retries="engine", actor=own_retries)
    forwarded(given_up_by_dramatiq, retries="engine", actor=own_retries)

    @forwarder.route(queue=QUEUE)
    @dramatiq.actor(broker=broker, queue_name=QUEUE)
    def routed(first: int, second: int) -> int:
        return first * second

    @forwarder.route(queue=QUEUE)
    @dramatiq.actor(broker=broker, queue_name=QUEUE, max_retries=3, min_backoff=1, max_backoff=1)
    def fails_at_its_own_count() -> None:
        ran("fails_at_its_own_count")
        raise ConnectionError("the mail server is away")

    @forwarder.route(queue=QUEUE)
    @dramatiq.actor(broker=broker, queue_name=QUEUE)
    def reads_options(names: list[str]) -> list[Any]:
        message = CurrentMessage.get_current_message()
        assert message is not None
        return [message.options.get(name) for name in names]

    @dramatiq.actor(broker=broker, queue_name=QUEUE)
    def sent_past_fairlane() -> None:
        ran("sent_past_fairlane")

    @dramatiq.actor(broker=broker, queue_name=QUEUE)
    def by_a_pattern(first: int, second: int) -> list[Any]:
        return [first * second, str(context().id)]

    for made in (by_a_pattern, routed, fails_at_its_own_count, reads_options, sent_past_fairlane):
        shop.actors[made.actor_name] = made
    return shop


def connected(url: str) -> dramatiq.Broker:
    if url.startswith("redis"):
        return RedisBroker(url=url)  # type: ignore[no-untyped-call]
    return RabbitmqBroker(url=url, confirm_delivery=True, max_priority=10)


if "SHOP_BROKER" in os.environ:
    shop = make(os.environ["FAIRLANE_URL"], os.environ["SHOP_BROKER"], Path(os.environ["SHOP_FOLDER"]))
    broker, forwarder = shop.broker, shop.forwarder
