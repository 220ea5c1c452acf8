"""What a forwarder is given by mistake is named, with what belongs there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import dramatiq
import pytest
from celery import Celery
from dramatiq.brokers.stub import StubBroker
from taskiq import InMemoryBroker

from fairlane import App, Backoff, Concurrency, State
from fairlane.errors import ConfigurationError, InvalidJob
from fairlane.forward import Forwarder
from fairlane.forward.celery import CeleryForwarder
from fairlane.forward.dramatiq import DramatiqForwarder
from fairlane.forward.taskiq import TaskiqForwarder

ENGINES: dict[str, tuple[Callable[..., Forwarder], Callable[[], Any]]] = {
    "Celery": (CeleryForwarder, lambda: Celery("shop", broker="memory://", set_as_current=False)),
    "Dramatiq": (DramatiqForwarder, StubBroker),
    "Taskiq": (TaskiqForwarder, InMemoryBroker),
}


@pytest.fixture
def app() -> Iterator[App]:
    app = App("sqlite://")
    app.queue("emails", limits=Concurrency(2))
    yield app
    app.close_sync()


def send(number: int) -> None: ...


@pytest.mark.parametrize("engine", ENGINES)
def test_an_app_and_an_engine_that_change_places_are_told_apart(engine: str, app: App) -> None:
    make, engines = ENGINES[engine]
    with pytest.raises(ConfigurationError, match="the App comes first"):
        make(engines(), app)
    with pytest.raises(
        ConfigurationError, match=rf"{engine}Forwarder is given .* of {engine} belongs|a Celery app belongs"
    ):
        make(app, app)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_function_is_no_task_of_an_engine(engine: str, app: App) -> None:
    make, engines = ENGINES[engine]
    forwarder = make(app, engines())
    with pytest.raises(ConfigurationError, match=f"function send is no task of {engine}; declare it with @"):
        forwarder.task(send, queue="emails")
    with pytest.raises(ConfigurationError, match=r"App <App .* is no task of"):
        forwarder.task(app, queue="emails")


@pytest.mark.parametrize("engine", ENGINES)
def test_who_retries_is_said_by_the_options_that_are_given(engine: str, app: App) -> None:
    """E2: without any, the engine's own settings hold."""
    make, engines = ENGINES[engine]
    forwarder = make(app, broker := engines())

    def send(number: int) -> None: ...

    declare = {
        "Celery": lambda: broker.task(send, name="send", shared=False),
        "Taskiq": lambda: broker.task("send")(send),
    }
    target = declare.get(engine, lambda: dramatiq.actor(broker=broker)(send))()
    assert forwarder.forwarded[forwarder.task(target, queue="emails").name].retries == "engine"
    said: dict[str, Any] = {"max_attempts": 3, "backoff": Backoff(0), "retry_on": KeyError, "dead_on": KeyError}
    for option, value in said.items():
        task = forwarder.task(target, queue="emails", name=option, **{option: value})
        assert forwarder.forwarded[task.name].retries == "policy"
    both = forwarder.task(target, queue="emails", name="both", max_attempts=3, retries="engine")
    assert (forwarder.forwarded[both.name].retries, both.options.max_attempts) == ("engine", 3)


async def test_a_routed_call_blocks_an_event_loop_as_celerys_own_does(app: App) -> None:
    """E1: views of FastAPI call `delay` as they are."""
    celery = Celery("shop", broker="memory://", set_as_current=False)
    routed = CeleryForwarder(app, celery).route(queue="emails")(celery.task(name="send", shared=False)(send))
    id = routed.delay(1).id
    await asyncio.to_thread(lambda: app.job(id).status_sync())
    await asyncio.to_thread(app.close_sync)


async def test_a_routed_call_in_the_loop_that_the_app_was_opened_in_says_what_to_await(app: App) -> None:
    celery = Celery("shop", broker="memory://", set_as_current=False)
    forwarder = CeleryForwarder(app, celery)
    routed = forwarder.route(queue="emails")(celery.task(name="send", shared=False)(send))
    await app.opened()
    with pytest.raises(ConfigurationError, match=r"await forwarder\.task_of\(…\)\.enqueue\(…\) instead"):
        routed.delay(1)
    job = await forwarder.task_of(routed).enqueue(1)
    assert (await job.record()).task == "send"
    await app.close()


async def test_a_routed_actor_in_the_loop_that_the_app_was_opened_in_says_what_to_await(app: App) -> None:
    broker = StubBroker()
    forwarder = DramatiqForwarder(app, broker)
    routed = forwarder.route(queue="emails")(dramatiq.actor(broker=broker)(send))
    await app.opened()
    with pytest.raises(ConfigurationError, match="'send' is routed through Fairlane, and the App was opened in this"):
        routed.send(1)
    assert (await (await forwarder.task_of(routed).enqueue(1)).record()).task == "send"
    await app.close()


def test_an_argument_of_another_type_is_taken_by_enqueue_and_one_too_few_is_not(app: App) -> None:
    celery = Celery("shop", broker="memory://", set_as_current=False)
    task = CeleryForwarder(app, celery).task(celery.task(name="send", shared=False)(send), queue="emails")
    assert task.enqueue_sync("no number").status_sync() is State.READY
    with pytest.raises(InvalidJob, match="missing"):
        task.enqueue_sync()
