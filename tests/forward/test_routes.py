"""One place that routes all tasks: patterns of names, whenever the tasks come, in each engine's own means."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import dramatiq
import pytest
from celery import Celery
from dramatiq.brokers.stub import StubBroker
from taskiq import InMemoryBroker, async_shared_broker
from taskiq.kicker import AsyncKicker

from fairlane import App, Concurrency
from fairlane.errors import ConfigurationError, InvalidJob, JobNotFound
from fairlane.forward import Forwarder
from fairlane.forward.celery import CeleryForwarder
from fairlane.forward.dramatiq import DramatiqForwarder
from fairlane.forward.taskiq import TaskiqForwarder


@pytest.fixture
def app(tmp_path: Path) -> Iterator[App]:
    app = App(f"sqlite:///{tmp_path}/shop.db")
    for queue in ("mails", "rest"):
        app.queue(queue, limits=Concurrency(2))
    yield app
    app.close_sync()


def note(number: int) -> None:
    """Never run."""


Send = Callable[[int], str]
"""Sends a message as the engine does, and returns its id."""


class OnCelery:
    def __init__(self, app: App, **options: Any) -> None:
        self.engine = Celery("shop", broker="memory://", set_as_current=False)
        self.forwarder: Forwarder = CeleryForwarder(app, self.engine, **options)

    def declare(self, name: str) -> tuple[Any, Send]:
        target = self.engine.task(name=name, shared=False)(note)
        return target, lambda number: str(target.delay(number).id)


class OnDramatiq:
    def __init__(self, app: App, **options: Any) -> None:
        self.engine = StubBroker()
        self.forwarder: Forwarder = DramatiqForwarder(app, self.engine, **options)

    def declare(self, name: str) -> tuple[Any, Send]:
        actor = dramatiq.actor(broker=self.engine, actor_name=name)(note)
        return actor, lambda number: actor.send(number).message_id


class OnTaskiq:
    def __init__(self, app: App, **options: Any) -> None:
        self.app = app
        self.engine = InMemoryBroker()
        self.forwarder: Forwarder = TaskiqForwarder(app, self.engine, **options)

    def declare(self, name: str) -> tuple[Any, Send]:
        target: Any = self.engine.task(name)(note)

        def send(number: int) -> str:
            return str(self.app.run_blocking(target.kiq(number)).task_id)

        return target, send


ENGINES: dict[str, Callable[..., Any]] = {"Celery": OnCelery, "Dramatiq": OnDramatiq, "Taskiq": OnTaskiq}


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return ENGINES[request.param]


def queue_of(app: App, id: str) -> str:
    return app.run_blocking(app.job(id).record()).queue


def test_a_pattern_routes_tasks_that_come_before_and_after_it_and_the_first_that_fits_counts(
    app: App, engine: Callable[..., Any]
) -> None:
    shop = engine(app)
    _, before = shop.declare("mail.before")
    shop.forwarder.route_all("mails", "mail.*")
    shop.forwarder.route_all("rest")
    _, after = shop.declare("mail.after")
    _, other = shop.declare("bill")
    assert [queue_of(app, send(1)) for send in (before, after, other)] == ["mails", "mails", "rest"]
    assert app.forwarded == {"mails", "rest"}


def test_routes_are_given_with_the_forwarder(app: App, engine: Callable[..., Any]) -> None:
    shop = engine(app, routes={"mail.*": "mails"})
    target, send = shop.declare("mail.send")
    assert queue_of(app, send(1)) == "mails"
    assert shop.forwarder.task_of(target).queue == "mails"


def test_what_a_task_says_itself_goes_before_every_pattern(app: App, engine: Callable[..., Any]) -> None:
    shop = engine(app, routes={"*": "rest"})
    target, send = shop.declare("mail.send")
    shop.forwarder.route(queue="mails")(target)
    assert queue_of(app, send(1)) == "mails"


def test_options_of_a_pattern_are_those_of_its_tasks(app: App, engine: Callable[..., Any]) -> None:
    shop = engine(app)
    shop.forwarder.route_all("mails", priority=7)
    _, send = shop.declare("mail.send")
    assert app.run_blocking(app.job(send(1)).record()).priority == 7


def test_a_task_that_fits_no_pattern_is_sent_as_ever(app: App) -> None:
    shop = OnDramatiq(app, routes={"mail.*": "mails"})
    _, send = shop.declare("bill")
    sent = send(1)
    with pytest.raises(JobNotFound):
        app.job(sent).status_sync()
    assert shop.engine.queues["default"].qsize() == 1


def test_calls_of_many_threads_route_a_task_once(
    app: App, engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = engine(app, routes={"*": "mails"})
    target, _ = shop.declare("mail.send")
    declare, routes = shop.forwarder.task, shop.forwarder.routed
    with ThreadPoolExecutor(1) as elsewhere:
        others = []

        def held_up(*given: Any, **named: Any) -> Any:
            """Another thread asks just now, and is as far as it gets before this one goes on."""
            is_asking = threading.Event()

            def ask() -> Any:
                is_asking.set()
                return routes("mail.send")

            others.append(elsewhere.submit(ask))
            assert is_asking.wait(60)
            return declare(*given, **named)

        monkeypatch.setattr(shop.forwarder, "task", held_up)
        found = shop.forwarder.task_of(target)
        assert [each.result(60) for each in others] == [found]


# What a dispatcher knows.


def test_a_dispatcher_imports_the_modules_that_the_forwarder_names(
    app: App, engine: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"tasks_{uuid4().hex}"
    (tmp_path / f"{name}.py").write_text("from tests.forward import test_routes\ntest_routes.imported()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    shop = engine(app, routes={"mail.*": "mails"}, imports=[name])
    monkeypatch.setitem(globals(), "imported", lambda: shop.declare("mail.send"))
    shop.forwarder.prepare()
    assert list(shop.forwarder.forwarded) == ["mail.send"]


def test_a_pattern_that_fits_nothing_is_told_with_the_tasks_there_are(app: App, engine: Callable[..., Any]) -> None:
    shop = engine(app, routes={"male.*": "mails"})
    shop.declare("mail.send")
    said = r"of (Celery|Dramatiq|Taskiq) fits 'male\.\*'; its tasks are: .*mail\.send.*imports=\["
    with pytest.raises(ConfigurationError, match=said):
        shop.forwarder.prepare()


# Taskiq's own ways to have a task.


@pytest.fixture
async def taskiq(app: App) -> AsyncIterator[OnTaskiq]:
    async with app:
        yield OnTaskiq(app, routes={"*": "mails"})


async def test_a_shared_task_is_routed_where_its_default_broker_is(app: App, taskiq: OnTaskiq) -> None:
    async_shared_broker.default_broker(taskiq.engine)
    shared: Any = async_shared_broker.task("shared")(note)
    for _ in range(2):  # the first call routes it
        sent = await shared.kiq(1)
        assert (await app.job(sent.task_id).record()).queue == "mails"
    del async_shared_broker.global_task_registry["shared"]


async def test_a_task_that_is_known_by_its_name_alone_is_routed(app: App, taskiq: OnTaskiq) -> None:
    kicker: AsyncKicker[..., Any] = AsyncKicker("elsewhere", taskiq.engine, {})
    sent = await kicker.kiq(1)
    record = await app.job(sent.task_id).record()
    assert (record.queue, record.task) == ("mails", "elsewhere")


async def test_once_the_broker_has_started_a_refusal_says_why(taskiq: OnTaskiq) -> None:
    target, _ = taskiq.declare("mail.send")
    await taskiq.engine.startup()
    with pytest.raises(InvalidJob, match="missing"):
        await target.kiq()
    await asyncio.shield(taskiq.engine.shutdown())
