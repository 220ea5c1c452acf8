"""What Celery's own means come to inside a forwarded task, and what its API is taken to say; no broker needed."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import msgspec
import pytest
from celery import Celery, chain
from celery._state import _task_stack
from celery.exceptions import Ignore, Reject
from celery.exceptions import Retry as CeleryRetry
from celery.signals import import_modules
from kombu.exceptions import OperationalError

from fairlane import App, Backoff, Concurrency, State
from fairlane.errors import ConfigurationError, InvalidJob
from fairlane.forward import Token
from fairlane.forward.celery import CeleryForwarder
from fairlane.job import Claim
from fairlane.store import records
from fairlane.store.protocol import WorkerIdentity
from fairlane.task import Job
from tests.forward.brokers import free_port


@pytest.fixture
def app() -> Iterator[App]:
    app = App("sqlite://")
    app.queue("emails", limits=Concurrency(2))
    yield app
    app.close_sync()


@pytest.fixture
def celery() -> Celery:
    return made()


def made() -> Celery:
    """An app with a queue of its own: those of one process share the broker in memory."""
    celery = Celery("shop", broker="memory://", set_as_current=False)
    celery.conf.task_default_queue = f"celery-{uuid4()}"
    return celery


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


def delivered(app: App, target: Any, **request: Any) -> Any:
    """What Celery's worker does with the message of the next job, as far as its task is concerned."""
    claim = claimed(app)
    headers = {"fairlane": str(Token(claim.id, claim.lease))}
    target.push_request(id=str(claim.id), headers=headers, called_directly=False, is_eager=False, **request)
    _task_stack.push(target)
    try:
        return target.run()
    finally:
        _task_stack.pop()
        target.pop_request()


def state_of(job: Job[Any]) -> State:
    return job.status_sync()


def raising(celery: Celery, error: Exception) -> Any:
    @celery.task(name="raising", shared=False)  # type: ignore[untyped-decorator]  # Celery has no types
    def task() -> None:
        raise error

    return task


def test_a_retry_of_celerys_own_that_its_broker_refuses_is_left_to_the_policy(
    app: App, celery: Celery, forwarder: CeleryForwarder, monkeypatch: pytest.MonkeyPatch
) -> None:
    @celery.task(name="fragile", bind=True, shared=False)  # type: ignore[untyped-decorator]  # Celery has no types
    def fragile(self: Any) -> None:
        self.retry(countdown=0, exc=ValueError("not yet"))

    def away(*_: Any, **__: Any) -> None:
        raise OperationalError("the broker is away")

    job = forwarder.task(fragile, queue="emails", retries="engine").enqueue_sync()
    monkeypatch.setattr(celery, "send_task", away)
    with pytest.raises(CeleryRetry):
        delivered(app, fragile)
    record = app.run_blocking(job.record())
    assert record.state is State.SCHEDULED
    assert "the broker is away" in (record.error or "")


def test_an_argument_of_another_type_than_its_annotation_ends_the_job_when_it_runs(
    app: App, celery: Celery, forwarder: CeleryForwarder
) -> None:
    @celery.task(name="count", shared=False)  # type: ignore[untyped-decorator]  # Celery has no types
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
    @celery.task(name="seven", shared=False)  # type: ignore[untyped-decorator]  # Celery has no types
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
    @celery.task(name="seven", shared=False)  # type: ignore[untyped-decorator]  # Celery has no types
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
    @celery.task(name="headers", bind=True, shared=False)  # type: ignore[untyped-decorator]  # Celery has no types
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
    @celery.task(name="seven", shared=False)  # type: ignore[untyped-decorator]  # Celery has no types
    def seven() -> int:
        return 7

    sent: list[tuple[Any, ...]] = []
    monkeypatch.setattr(celery, "send_task", lambda *given, **_: sent.append(given))
    job = forwarder.task(seven, queue="emails").enqueue_sync()
    message = forwarder.message(claimed(app), None, 0)
    assert message.id == job.id
    forwarder.publish_blocking(message)
    forwarder.publish_blocking(msgspec.structs.replace(message, args=["of another version"]))
    assert [given[:2] for given in sent] == [("seven", []), ("seven",)]


# What Celery's own calls come to.


@pytest.fixture
def plain() -> Celery:
    """As the other, without Fairlane."""
    return made()


def adds(celery: Celery) -> Any:
    @celery.task(name="shop.add", shared=False)  # type: ignore[untyped-decorator]  # Celery has no types
    def add(x: int, y: Any) -> Any:
        return x

    return add


def received(celery: Celery, queue: str | None = None) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """The one message that lies at the broker: headers, properties, body."""
    with celery.connection_for_read() as connection:
        message = connection.default_channel.basic_get(queue or celery.conf.task_default_queue, no_ack=True)
        assert message is not None
        message.accept = {"application/json", "application/x-python-serialize"}
        properties = {name: message.properties.get(name) for name in ("correlation_id", "reply_to", "priority")}
        return dict(message.headers), {**properties, "type": message.content_type}, message.decode()


def published(app: App, forwarder: CeleryForwarder) -> None:
    """What the dispatcher does with the next job."""

    async def context_of(claim: Claim) -> str | None:
        store = await app.opened()
        return (await store.run(records.contexts([claim.id]))).get(claim.id)

    claim = claimed(app)
    forwarder.publish_blocking(forwarder.message(claim, app.run_blocking(context_of(claim)), 0))


CALLS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda add: add.apply_async((1, 2)),
    "dates": lambda add: add.apply_async((1, datetime(2030, 1, 1, tzinfo=UTC))),
    "bytes and UUIDs": lambda add: add.apply_async((1,), {"y": [b"x", UUID(int=7)]}),
    "options": lambda add: add.apply_async(
        (1, 2),
        expires="2100-01-01T00:00:00+00:00",
        time_limit=9,
        soft_time_limit=5,
        shadow="nightly",
        ignore_result=True,
        headers={"tenant": "acme"},
        argsrepr="(…)",
        compression="zlib",
        serializer="pickle",
        task_id="order-7",
        reply_to="somebody",
        stamped_headers=["stamp"],
        stamp="blue",
    ),
    "another queue": lambda add: add.apply_async((1, 2), queue="other"),
    "callbacks": lambda add: add.apply_async((1, 2), link=add.s(3), link_error=add.si(4, 5)),
    "chain": lambda add: chain(add.s(1, 2), add.s(3), add.s(4).set(countdown=5)).apply_async(task_id="first"),
    "member of a group": lambda add: add.apply_async((1, 2), group_id="g", group_index=3, chord=add.s(1)),
    "child": lambda add: add.apply_async((1, 2), root_id="root", parent_id="parent"),
    "by name": lambda add: add.app.send_task("shop.add", (1, 2)),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_routed_message_is_published_as_celery_wrote_it(
    app: App, celery: Celery, plain: Celery, forwarder: CeleryForwarder, call: str
) -> None:
    """E2: nothing is lost and nothing added but the token, whatever an option may be called."""
    forwarder.route(queue="emails")(add := adds(celery))
    queue = "other" if call == "another queue" else None
    for target in (adds(plain), add):
        CALLS[call](target)
    published(app, forwarder)
    wanted, found = received(plain, queue), received(celery, queue)
    assert found[0].pop("fairlane")
    assert without_ids(found) == without_ids(wanted)


def without_ids(message: Any) -> str:
    """A message in which those that Celery makes up are all the same."""
    text = json.dumps(message, default=repr, sort_keys=True)
    return re.sub(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", "ID", text)


def test_a_call_needs_neither_the_broker_nor_the_result_backend(app: App) -> None:
    """With both away, jobs are stored and wait. Celery subscribes to a result when it sends; here, when it is asked."""
    away = f"redis://127.0.0.1:{free_port()}/0"
    celery = Celery("shop", broker=away, backend=away, set_as_current=False)
    forwarder = CeleryForwarder(app, celery, routes={"*": "emails"})

    @celery.task(name="note", shared=False)  # type: ignore[untyped-decorator]  # Celery has no types
    def note() -> None:
        """Never run."""

    result = note.delay()
    assert forwarder.app.job(UUID(result.id)).status_sync() is State.READY
    assert not result.ignored
    assert celery.backend.result_consumer._pubsub is None
    # A process that has waited for another result is connected: what was never subscribed to is not unsubscribed.
    connected = celery.backend.result_consumer._pubsub = Unsubscribed()
    celery.backend.remove_pending_result(result)  # as Celery does when the result is collected
    assert connected.keys == []


class Unsubscribed:
    """Stands for a connection to Redis, and keeps what it was asked."""

    def __init__(self) -> None:
        self.keys: list[bytes] = []

    def unsubscribe(self, key: bytes) -> None:
        self.keys.append(key)


def test_what_an_encrypted_job_says_is_stored_in_no_other_place(celery: Celery) -> None:
    class Reversed:
        def encode(self, document: bytes) -> bytes:
            return document[::-1]

        def decode(self, stored: bytes) -> bytes:
            return stored[::-1]

    app = App("sqlite://", codec=Reversed())
    app.queue("emails", limits=Concurrency(2))
    forwarder = CeleryForwarder(app, celery)
    forwarder.route(queue="emails")(add := adds(celery))
    sent = add.apply_async((1, "secret"), link=add.s("also secret"))

    async def stored() -> str:
        return str(await (await app.opened()).run(records.contexts([UUID(sent.id)])))

    assert "secret" not in app.run_blocking(stored())
    published(app, forwarder)
    headers, _, body = received(celery)
    assert (body[:2], headers["argsrepr"]) == ([[], {}], "(hidden)")
    assert body[2]["callbacks"][0]["args"] == ["also secret"]
    app.close_sync()


def test_an_option_that_cannot_be_stored_is_refused_by_its_name(celery: Celery, forwarder: CeleryForwarder) -> None:
    forwarder.route(queue="emails")(add := adds(celery))
    with pytest.raises(InvalidJob, match=r"task 'shop\.add': headers=.* has no JSON form.* leave it out"):
        add.apply_async((1, 2), headers={"lock": object()})


def test_a_pattern_takes_tasks_that_are_registered_after_it(app: App, celery: Celery) -> None:
    """E1: in a project's celery.py, autodiscovery comes later."""
    forwarder = CeleryForwarder(app, celery, routes={"shop.*": "emails"})
    assert app.forwarded == {"emails"}
    add = adds(celery)
    assert claimed_after(app, add.delay(1, 2)).task == "shop.add"
    assert forwarder.task_of(add).queue == "emails"
    # Where the task itself is not known, its name is enough.
    assert claimed_after(app, celery.send_task("shop.elsewhere", (1,), {"y": 2})).task == "shop.elsewhere"


def claimed_after(app: App, sent: Any) -> Claim:
    claim = claimed(app)
    assert claim.id == UUID(sent.id)
    return claim


def test_a_dispatcher_finds_the_tasks_that_celerys_worker_would_import(app: App, celery: Celery) -> None:
    """E1: it forwarded none."""
    # (Not `shop.*`: tasks of a docs page that ran in this process are shared with every Celery app.)
    forwarder = CeleryForwarder(app, celery, routes={"shop.add*": "emails"})

    def discover(**told: Any) -> None:
        adds(celery)

    import_modules.connect(discover, sender=celery)
    forwarder.prepare()
    assert list(forwarder.forwarded) == ["shop.add"]


def test_a_pattern_that_fits_no_task_is_told_with_those_there_are(app: App, celery: Celery) -> None:
    forwarder = CeleryForwarder(app, celery, routes={"stop.*": "emails"})
    adds(celery)
    with pytest.raises(ConfigurationError, match=r"fits 'stop\.\*'; its tasks are: .*shop\.add"):
        forwarder.prepare()


def test_a_failure_that_the_policy_retries_is_no_failure_to_celery(
    app: App, celery: Celery, forwarder: CeleryForwarder
) -> None:
    """E2: `AsyncResult` said FAILURE while a retry was pending."""
    target = raising(celery, ValueError("not yet"))
    job = forwarder.task(target, queue="emails", max_attempts=2, backoff=Backoff(0)).enqueue_sync()
    with pytest.raises(CeleryRetry):
        delivered(app, target)
    with pytest.raises(ValueError, match="not yet"):
        delivered(app, target)
    assert state_of(job) is State.DEAD


def test_a_task_whose_worker_is_told_to_stop_has_not_failed(
    app: App, celery: Celery, forwarder: CeleryForwarder
) -> None:
    target = raising(celery, SystemExit(0))  # type: ignore[arg-type]
    job = forwarder.task(target, queue="emails").enqueue_sync()
    with pytest.raises(SystemExit):
        delivered(app, target)
    # Celery may be about to say that it ended the task itself: until its lease has ended, it does not come again.
    assert state_of(job) is State.RUNNING


def test_a_retry_with_other_arguments_is_another_job(app: App, celery: Celery, forwarder: CeleryForwarder) -> None:
    @forwarder.route(queue="emails")
    @celery.task(name="shop.halve", bind=True, shared=False)  # type: ignore[untyped-decorator]  # Celery has no types
    def halve(self: Any, number: int) -> Any:
        raise self.retry(args=(number // 2,), countdown=0)

    first = halve.delay(8)
    with pytest.raises(CeleryRetry):
        delivered(app, halve, args=[8], kwargs={})
    assert app.job(first.id).status_sync() is State.DONE
    published(app, forwarder)
    headers, _, body = received(celery)
    assert (headers["id"], headers["retries"], body[0]) == (first.id, 1, [4])
