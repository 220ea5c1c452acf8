"""What Celery's own means come to inside a forwarded task, and what its API is taken to say; no broker needed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import msgspec
import pytest
from celery import Celery
from celery.exceptions import Ignore, Reject
from kombu.exceptions import OperationalError

from fairlane import App, Concurrency, ConfigurationError, InvalidJob, State
from fairlane.forward import Token
from fairlane.forward.celery import CeleryForwarder
from fairlane.handle import Job
from fairlane.job import Claim
from fairlane.store.protocol import WorkerIdentity


@pytest.fixture
def app() -> Iterator[App]:
    app = App("sqlite://")
    app.queue("emails", limits=Concurrency(2))
    yield app
    app.close_sync()


@pytest.fixture
def celery() -> Celery:
    return Celery("shop", broker="memory://", set_as_current=False)


@pytest.fixture
def forwarder(app: App, celery: Celery) -> CeleryForwarder:
    return CeleryForwarder(app, celery)


def claimed(app: App) -> Claim:
    """The one claim that a dispatcher gets now."""

    async def claim() -> Claim:
        store = await app.opened()
        dispatcher = WorkerIdentity.of_dispatcher("dispatcher:1")
        return (await store.claim("emails", lambda: 1, worker=dispatcher, lease=timedelta(seconds=30))).claims[0]

    return app.run_blocking(claim())


def delivered(app: App, target: Any) -> Any:
    """What Celery's worker does with the message of the next job, as far as its task is concerned."""
    claim = claimed(app)
    headers = {"fairlane": str(Token(claim.id, claim.lease))}
    target.push_request(id=str(claim.id), headers=headers, called_directly=False, is_eager=False)
    try:
        return target.run()
    finally:
        target.pop_request()


def state_of(job: Job[Any]) -> State:
    return job.status_sync()


def raising(celery: Celery, error: Exception) -> Any:
    @celery.task(name="raising")  # type: ignore[untyped-decorator]  # Celery has no types
    def task() -> None:
        raise error

    return task


def test_a_retry_of_celerys_own_that_its_broker_refuses_is_left_to_the_policy(
    app: App, celery: Celery, forwarder: CeleryForwarder, monkeypatch: pytest.MonkeyPatch
) -> None:
    @celery.task(name="fragile", bind=True)  # type: ignore[untyped-decorator]  # Celery has no types
    def fragile(self: Any) -> None:
        self.retry(countdown=0, exc=ValueError("not yet"))

    def away(*_: Any, **__: Any) -> None:
        raise OperationalError("the broker is away")

    job = forwarder.task(fragile, queue="emails", retries="engine").enqueue_sync()
    monkeypatch.setattr(celery, "send_task", away)
    with pytest.raises(Ignore):
        delivered(app, fragile)
    record = app.run_blocking(job.record())
    assert record.state is State.SCHEDULED
    assert "the broker is away" in (record.error or "")


def test_an_argument_of_another_type_than_its_annotation_ends_the_job_when_it_runs(
    app: App, celery: Celery, forwarder: CeleryForwarder
) -> None:
    @celery.task(name="count")  # type: ignore[untyped-decorator]  # Celery has no types
    def count(number: int) -> None: ...

    task = forwarder.task(count, queue="emails")
    job = task.enqueue_sync("seven")
    with pytest.raises(Ignore):
        delivered(app, count)
    assert state_of(job) is State.DEAD


@pytest.mark.parametrize(
    ("requeue", "state"), [(True, State.SCHEDULED), (False, State.DEAD)], ids=["to come again", "for good"]
)
def test_a_message_that_its_task_rejects_is_not_done(
    app: App, celery: Celery, forwarder: CeleryForwarder, requeue: bool, state: State
) -> None:
    target = raising(celery, Reject("not here", requeue=requeue))
    job = forwarder.task(target, queue="emails").enqueue_sync()
    with pytest.raises(Ignore):
        delivered(app, target)
    assert state_of(job) is state


def test_one_task_of_celerys_may_be_several_of_fairlanes(
    app: App, celery: Celery, forwarder: CeleryForwarder, caplog: pytest.LogCaptureFixture
) -> None:
    @celery.task(name="seven")  # type: ignore[untyped-decorator]  # Celery has no types
    def seven() -> int:
        return 7

    slow = forwarder.task(seven, queue="emails", name="slow seven", retries="engine")
    fast = forwarder.task(seven, queue="emails", name="fast seven")
    with caplog.at_level(logging.WARNING):
        for task in (slow, fast):
            job = task.enqueue_sync()
            assert delivered(app, seven) == 7
            assert state_of(job) is State.DONE
    assert caplog.messages == []


def test_a_token_of_another_task_runs_nothing(app: App, celery: Celery, forwarder: CeleryForwarder) -> None:
    @celery.task(name="seven")  # type: ignore[untyped-decorator]  # Celery has no types
    def seven() -> int:
        return 7

    other = raising(celery, AssertionError("the wrong function ran"))
    job = forwarder.task(seven, queue="emails").enqueue_sync()
    forwarder.task(other, queue="emails")
    with pytest.raises(InvalidJob, match=r"is one of 'seven', .* a message for 'raising'"):
        delivered(app, other)
    assert state_of(job) is State.RUNNING


def test_headers_that_a_task_hands_on_are_not_those_of_its_job(
    app: App, celery: Celery, forwarder: CeleryForwarder
) -> None:
    @celery.task(name="headers", bind=True)  # type: ignore[untyped-decorator]  # Celery has no types
    def headers(self: Any) -> list[str]:
        return list(self.request.headers)

    forwarder.task(headers, queue="emails").enqueue_sync()
    assert delivered(app, headers) == []


@pytest.mark.parametrize("pool", ["gevent", "prefork"])
def test_a_worker_whose_threads_are_green_does_not_start(celery: Celery, forwarder: CeleryForwarder, pool: str) -> None:
    """Celery makes these steps of a worker, before it starts anything."""
    (step,) = [each for each in celery.steps["worker"] if each.__module__ == CeleryForwarder.__module__]
    worker = SimpleNamespace(pool_cls=SimpleNamespace(is_green=pool == "gevent"))
    refused = pytest.raises(ConfigurationError, match=r"gevent, eventlet.*--pool prefork")
    with refused if pool == "gevent" else nullcontext():
        step(worker)


@pytest.mark.parametrize("driver", ["amqp", "redis"])
def test_what_is_more_urgent_to_fairlane_is_never_less_urgent_to_celery(
    forwarder: CeleryForwarder, driver: str
) -> None:
    vars(forwarder)["_driver"] = driver
    levels = [forwarder._level(priority) for priority in range(-100, 101)]
    assert levels == sorted(levels, reverse=driver != "amqp")
    assert forwarder._level(0) == 0  # which is none
    assert set(levels) == set(range(10))
    assert [forwarder._level(forwarder._priority(level)) for level in range(10)] == list(range(10))


def test_arguments_that_do_not_fit_the_task_here_do_not_hold_up_the_dispatcher(
    app: App, celery: Celery, forwarder: CeleryForwarder, monkeypatch: pytest.MonkeyPatch
) -> None:
    @celery.task(name="seven")  # type: ignore[untyped-decorator]  # Celery has no types
    def seven() -> int:
        return 7

    sent: list[tuple[Any, ...]] = []
    monkeypatch.setattr(celery, "send_task", lambda *given, **_: sent.append(given))
    job = forwarder.task(seven, queue="emails").enqueue_sync()
    message = forwarder.message(claimed(app), {})
    assert message.id == job.id
    forwarder.publish_blocking(message)
    forwarder.publish_blocking(msgspec.structs.replace(message, args=["of another version"]))
    assert [given[:2] for given in sent] == [("seven", []), ("seven",)]


def test_a_routed_task_may_be_the_last_of_a_chain(app: App, celery: Celery, forwarder: CeleryForwarder) -> None:
    @forwarder.route(queue="emails")
    @celery.task(name="after")  # type: ignore[untyped-decorator]  # Celery has no types
    def after(number: int) -> int:
        return number + 1

    # As Celery's worker calls it when the task before has ended.
    ended = str(uuid4())
    result = after.s().apply_async((1,), chain=[], parent_id=ended, root_id=ended, priority=0)
    assert claimed(app).id == UUID(result.id)
    with pytest.raises(InvalidJob, match="chain="):
        after.s().apply_async((1,), chain=[after.s()], parent_id=ended, root_id=ended)
