"""An engine retries by its own settings, and operators read its numbers: runs made, and how many there may be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dramatiq
import pytest
from celery import Celery
from celery.exceptions import Retry as CeleryRetry
from click.testing import CliRunner
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import Retries
from taskiq import InMemoryBroker, SimpleRetryMiddleware, SmartRetryMiddleware

from fairlane import App, Concurrency, State
from fairlane.cli.program import program
from fairlane.clock import ManualClock
from fairlane.forward.celery import CeleryForwarder
from fairlane.forward.dramatiq import DramatiqForwarder
from fairlane.forward.taskiq import TaskiqForwarder
from fairlane.task import MOST_ATTEMPTS
from tests.forward.test_celery_tasks import delivered


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/shop.db"


@pytest.fixture
def app(url: str) -> Iterator[App]:
    app = App(url)
    app.queue("emails", limits=Concurrency(2))
    yield app
    app.close_sync()


def made() -> Celery:
    return Celery("shop", broker="memory://", set_as_current=False)


def test_operators_read_the_runs_that_celery_made_and_its_own_maximum(app: App, url: str) -> None:
    """E2: it was 1 of 5, and three entries that were all attempt 1."""
    celery = made()
    forwarder = CeleryForwarder(app, celery)

    @forwarder.route(queue="emails")
    @celery.task(name="fragile", bind=True, max_retries=2, shared=False)  # type: ignore[untyped-decorator]
    def fragile(self: Any) -> None:
        self.retry(countdown=0, exc=ConnectionError("the mail server is away"))

    job = app.job(fragile.delay().id)
    for retries in range(2):
        with pytest.raises(CeleryRetry):
            delivered(app, fragile, retries=retries, args=[], kwargs={})
    with pytest.raises(ConnectionError):
        delivered(app, fragile, retries=2, args=[], kwargs={})
    record = app.run_blocking(job.record())
    assert (record.state, record.attempt, record.max_attempts) == (State.DEAD, 3, 3)
    attempts = app.run_blocking(job.attempts())
    assert [(each.attempt, each.outcome) for each in attempts] == [(1, "retry"), (2, "retry"), (3, "dead")]
    listed, shown = (
        CliRunner().invoke(program, ["jobs", *said, "--url", url]).output for said in (["list"], ["show", str(job.id)])
    )
    assert " 3/3 " in listed
    assert "3 of 3" in shown


CELERYS: dict[str, tuple[dict[str, Any], int]] = {
    "as it comes": ({}, 4),
    "none": ({"max_retries": 0}, 1),
    "of its own": ({"max_retries": 7}, 8),
    "unlimited": ({"max_retries": None}, MOST_ATTEMPTS),
    "of autoretry": ({"autoretry_for": (OSError,), "retry_kwargs": {"max_retries": 6}}, 7),
}


@pytest.mark.parametrize("case", CELERYS)
def test_a_job_may_run_as_often_as_its_celery_task_says(app: App, case: str) -> None:
    options, runs = CELERYS[case]
    celery = made()

    @celery.task(name="send", shared=False, **options)  # type: ignore[untyped-decorator]  # Celery has no types
    def target() -> None:
        """Never run."""

    assert CeleryForwarder(app, celery).task(target, queue="emails").options.max_attempts == runs


DRAMATIQS: dict[str, tuple[list[Any], dict[str, Any], dict[str, Any], int]] = {
    "without the middleware": ([], {}, {}, 1),
    "as it comes": ([Retries()], {}, {}, 21),
    "of the broker": ([Retries(max_retries=4)], {}, {}, 5),
    "of the actor": ([Retries()], {"max_retries": 3}, {}, 4),
    "of the message": ([Retries()], {"max_retries": 3}, {"max_retries": 1}, 2),
    "unlimited": ([Retries()], {"max_retries": None}, {}, MOST_ATTEMPTS),
    "asked each time": ([Retries()], {"retry_when": lambda retries, error: False}, {}, MOST_ATTEMPTS),
}


@pytest.mark.parametrize("case", DRAMATIQS)
def test_a_job_may_run_as_often_as_its_actor_or_message_says(app: App, case: str) -> None:
    middleware, options, given, runs = DRAMATIQS[case]
    broker = StubBroker(middleware=middleware)
    actor = dramatiq.actor(broker=broker, actor_name="send", **options)(lambda: None)
    DramatiqForwarder(app, broker).route(queue="emails")(actor)
    message = actor.send_with_options(**given)
    assert app.run_blocking(app.job(message.message_id).record()).max_attempts == runs


TASKIQS: dict[str, tuple[list[Callable[[], Any]], dict[str, Any], dict[str, Any], int]] = {
    "without a middleware": ([], {"retry_on_error": True, "max_retries": 4}, {}, 1),
    "as it comes": ([SimpleRetryMiddleware], {}, {}, 1),
    "of the broker": ([lambda: SmartRetryMiddleware(7, default_retry_label=True)], {}, {}, 7),
    "of the task": ([SmartRetryMiddleware], {"retry_on_error": True, "max_retries": 4}, {}, 4),
    "of the message": ([SimpleRetryMiddleware], {"retry_on_error": True}, {"max_retries": 2}, 2),
    "not this one": ([SimpleRetryMiddleware], {"retry_on_error": True}, {"retry_on_error": "False"}, 1),
}


@pytest.mark.parametrize("case", TASKIQS)
async def test_a_job_may_run_as_often_as_the_labels_of_its_message_say(app: App, case: str) -> None:
    middlewares, labels, given, runs = TASKIQS[case]
    broker = InMemoryBroker().with_middlewares(*(make() for make in middlewares))
    forwarder = TaskiqForwarder(app, broker)

    @forwarder.route(queue="emails")
    @broker.task("send", **labels)
    async def send() -> None:
        """Never run."""

    sent = await send.kicker().with_labels(**given).kiq()
    assert (await app.job(sent.task_id).record()).max_attempts == runs
    await app.close()


def test_a_number_that_was_given_is_not_replaced_by_the_engines(app: App) -> None:
    broker = StubBroker()
    actor = dramatiq.actor(broker=broker, actor_name="send")(lambda: None)
    DramatiqForwarder(app, broker).route(queue="emails", max_attempts=3, retries="engine")(actor)
    assert app.run_blocking(app.job(actor.send().message_id).record()).max_attempts == 3


def test_a_run_that_ends_with_its_worker_costs_a_task_without_retries_nothing(url: str) -> None:
    """Which is no failure of the task's. A task that ends its worker each time is dead in the end all the same."""
    celery, clock = made(), ManualClock()
    app = App(url, clock=clock)
    app.queue("emails")

    @celery.task(name="stopped", max_retries=0, shared=False)  # type: ignore[untyped-decorator]  # Celery has no types
    def stopped() -> None:
        raise SystemExit(0)

    job = CeleryForwarder(app, celery).task(stopped, queue="emails").enqueue_sync()
    seen = []
    for _ in range(3):
        with pytest.raises(SystemExit):
            delivered(app, stopped)
        assert job.status_sync() is State.RUNNING
        clock.advance("1h")
        app.run_blocking(app.upkeep())
        record = app.run_blocking(job.record())
        seen.append((record.state, record.attempt))
    app.close_sync()
    assert seen == [(State.READY, 0), (State.READY, 0), (State.DEAD, 1)]
