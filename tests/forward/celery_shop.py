"""What the tests of Celery run: an app, Celery's app, and tasks as their authors wrote them."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery

import fairlane
from fairlane import App, Backoff, Concurrency
from fairlane.forward.celery import CeleryForwarder

app = App(os.environ.get("FAIRLANE_URL", "sqlite://"))
app.queue("emails", limits=Concurrency(4))

celery = Celery("celery_shop", broker=os.environ.get("CELERY_BROKER", "memory://"))
celery.conf.task_default_queue = "unrelated"
celery.conf.broker_connection_retry_on_startup = True
celery.conf.worker_hijack_root_logger = False

forwarder = CeleryForwarder(app, celery, republish_after="5s")


@celery.task(name="double")  # type: ignore[untyped-decorator]  # Celery has no types
def double(number: int) -> int:
    return 2 * number


@celery.task(name="who", bind=True)  # type: ignore[untyped-decorator]  # Celery has no types
def who(self: Any, name: str) -> dict[str, Any]:
    context = fairlane.context()
    context.put("greeted", name)
    return {
        "attempt": context.attempt,
        "job": str(context.id),
        "id": self.request.id,
        "queue": self.request.delivery_info["routing_key"],
        "args": list(self.request.args),
    }


@celery.task(name="stumble", bind=True)  # type: ignore[untyped-decorator]  # Celery has no types
def stumble(self: Any, times: int) -> int:
    """Fails so many times."""
    attempt = fairlane.context().attempt
    if attempt <= times:
        raise ValueError(f"attempt {attempt}")
    return attempt


@celery.task(name="again", bind=True, max_retries=10)  # type: ignore[untyped-decorator]  # Celery has no types
def again(self: Any, times: int) -> int:
    """Asks Celery for so many retries."""
    if self.request.retries < times:
        self.retry(countdown=0, exc=ValueError("not yet"))
    return fairlane.context().attempt


@celery.task(name="engines", bind=True, max_retries=3)  # type: ignore[untyped-decorator]  # Celery has no types
def engines(self: Any, times: int) -> list[int]:
    """Asks Celery for so many retries, which Celery makes."""
    if self.request.retries < times:
        self.retry(countdown=0, exc=ValueError("not yet"))
    return [fairlane.context().attempt, self.request.retries]


@forwarder.route(queue="emails")
@celery.task(name="routed")  # type: ignore[untyped-decorator]  # Celery has no types
def routed(number: int) -> int:
    return number + 1


@forwarder.route(queue="emails")
@celery.task(name="headed", bind=True)  # type: ignore[untyped-decorator]  # Celery has no types
def headed(self: Any) -> Any:
    return self.request.headers["locale"]


SOON = Backoff("1ms", cap="1ms")
doubling = forwarder.task(double, queue="emails")
asking = forwarder.task(who, queue="emails")
stumbling = forwarder.task(stumble, queue="emails", max_attempts=3, backoff=SOON)
trying_again = forwarder.task(again, queue="emails", max_attempts=5)
by_engine = forwarder.task(engines, queue="emails")
