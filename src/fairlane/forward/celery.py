"""Celery runs what Fairlane admits.

A forwarded task's `run` is wrapped, as Celery itself wraps it for `autoretry_for`: it adopts the job of its message,
runs, and settles it. A message without a token is Celery's own, and runs as ever.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeVar

from fairlane.clock import as_datetime
from fairlane.errors import ConfigurationError, Dead, InvalidJob, Retry, Signal
from fairlane.forward.delivering import Delivery
from fairlane.forward.forwarder import Forwarded, Forwarder
from fairlane.forward.messages import Message, Unpublishable
from fairlane.forward.tokens import HEADER
from fairlane.task import Task
from fairlane.worker.context import current_run

try:
    import celery.exceptions
    from celery.app.task import Task as CeleryTask
    from kombu.exceptions import EncodeError
except ImportError:
    raise ConfigurationError("Celery is not installed; run `pip install 'fairlane[celery]'`") from None

if TYPE_CHECKING:
    from fairlane.app import App

__all__ = ["CeleryForwarder"]

T = TypeVar("T")

ONCE_MORE = {"max_retries": 1, "interval_start": 0, "interval_step": 0, "interval_max": 0}
"""A connection from Celery's pool may have died since it was used last: one fresh one is tried."""
REACH_WITHIN = 5.0
"""Seconds in which a broker has to answer whether it is there."""
OWN_AFFAIRS = {"add_to_parent", "connection", "producer", "retry", "retry_policy"}
"""Options of `apply_async` that say how Celery publishes, which it does not then."""


class CeleryForwarder(Forwarder):
    """Has Celery's workers run the jobs of an app. Create it in the module that they import.

    Pools that run tasks in processes, in threads or alone are served; those of green threads are not.
    """

    engine = "Celery"

    def __init__(self, app: App, celery: celery.Celery, **options: Any) -> None:
        super().__init__(app, **options)
        self.celery = celery

    # What Celery says.

    def name_of(self, target: Any) -> str:
        name: str = target.name
        return name

    def function_of(self, target: Any) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(target, "_orig_run", target.run)
        return function

    def install(self, forwarded: Forwarded) -> None:
        target = forwarded.target
        run, retry = target.run, target.retry
        function = run if forwarded.retries == "engine" else self.function_of(target)

        @functools.wraps(run)
        def adopting(*args: Any, **kwargs: Any) -> Any:
            token = (target.request.headers or {}).get(HEADER)
            if token is None:
                return run(*args, **kwargs)
            delivery = self.deliveries.begin_sync(token)
            if delivery is None:
                raise celery.exceptions.Ignore("stale: this job was delivered before, or its claim has ended")
            # What Celery copies into a retry message of its own: the token that brought us here is used up.
            target.request.headers[HEADER] = str(delivery.token)
            if forwarded.retries == "policy":
                # Each attempt is a message of its own, which Celery takes for the first; tasks count on this.
                target.request.retries = delivery.claim.attempt - 1
            return self._run(forwarded, delivery, function)

        @functools.wraps(retry)
        def retrying(*args: Any, **options: Any) -> Any:
            if forwarded.retries == "engine" or not isinstance(current_run.get(None), Delivery):
                return retry(*args, **options)
            return _retry_by_policy(*args, **options)

        target.run, target.retry = adopting, retrying

    def _run(self, forwarded: Forwarded, delivery: Delivery, function: Callable[..., Any]) -> Any:
        is_engines = forwarded.retries == "engine"
        try:
            with delivery.entered():
                value = function(*delivery.args, **delivery.kwargs)
        except celery.exceptions.Retry as retry:
            if is_engines:
                self.deliveries.handed_on_sync(
                    delivery, _until(retry, as_datetime(self.app.clock.now())) + self.republish_after
                )
            else:
                self.deliveries.failed_sync(delivery, retry)
            raise
        except (celery.exceptions.Ignore, celery.exceptions.Reject) as left:
            # The task says that it has taken care of itself.
            self.deliveries.done_sync(delivery, None)
            raise celery.exceptions.Ignore(str(left)) from left
        except Signal as signal:
            self.deliveries.failed_sync(delivery, signal)
            if isinstance(signal, Dead):
                raise
            raise celery.exceptions.Ignore(str(signal)) from signal
        except BaseException as error:
            self.deliveries.failed_sync(delivery, error, is_final=is_engines)
            raise
        self.deliveries.done_sync(delivery, value)
        return value

    # What the dispatcher asks.

    def publish_blocking(self, message: Message) -> None:
        options: dict[str, Any] = {
            "task_id": str(message.id),
            "queue": message.queue,
            "headers": message.carried,
            "retry": True,
            "retry_policy": ONCE_MORE,
        }
        if message.priority:
            options["priority"] = self._priority(message.priority)
        try:
            if message.is_hidden:
                self.celery.send_task(message.target.name, **options)
            else:
                # The class's own: the task's may have been routed through us.
                CeleryTask.apply_async(message.target, list(message.args), dict(message.kwargs), **options)
        except EncodeError as error:
            raise Unpublishable(f"Celery cannot write its message: {error}") from error

    def reach_blocking(self) -> None:
        with self.celery.connection_for_write() as connection:
            connection.ensure_connection(max_retries=1, interval_start=0, interval_step=0, timeout=REACH_WITHIN)

    def _priority(self, priority: int) -> int:
        """From -100 … 100 to Celery's 0 … 9. RabbitMQ serves the highest first, all others the lowest."""
        level = round((priority + 100) * 9 / 200)
        return level if self._driver == "amqp" else 9 - level

    @functools.cached_property
    def _driver(self) -> str:
        driver: str = self.celery.connection_for_write().transport.driver_type
        return driver

    # What programs that call Celery's API get.

    def route(self, *, queue: str, **options: Any) -> Callable[[T], T]:
        """Send a Celery task's own `delay` and `apply_async` through Fairlane: put this above it. The options are those
        of `task`."""

        def routed(target: T) -> T:
            self._route(target, self.task(target, queue=queue, **options))
            return target

        return routed

    def route_all(self, queue: str, pattern: str, **options: Any) -> list[Task[..., Any]]:
        """Route every task whose name fits a pattern, such as `shop.tasks.*`. Call it once they are imported."""
        self.celery.finalize(auto=True)
        found = [task for name, task in self.celery.tasks.items() if fnmatchcase(name, pattern)]
        fitting = [task for task in found if task.name not in self.forwarded and not task.name.startswith("celery.")]
        if not fitting:
            raise ConfigurationError(f"route_all: no task of {self.celery!r} fits {pattern!r}; import them first")
        for task in fitting:
            self._route(task, self.task(task, queue=queue, **options))
        return [self.forwarded[task.name].task for task in fitting]

    def _route(self, target: Any, task: Task[..., Any]) -> None:
        apply_async = target.apply_async

        @functools.wraps(apply_async)
        def through_fairlane(args: Any = None, kwargs: Any = None, task_id: Any = None, **options: Any) -> Any:
            headers = options.get("headers") or {}
            if HEADER in headers:
                return apply_async(args, kwargs, task_id=task_id, **options)  # a retry of Celery's own
            if task_id is not None:
                options["task_id"] = task_id
            bound = task.using(**_mapped(task.name, options))
            job = bound.enqueue_sync(*(args or ()), **(kwargs or {}))
            return target.AsyncResult(str(job.id))

        target.apply_async = through_fairlane


def _mapped(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """What `apply_async` was given, as `using` takes it."""
    mapped: dict[str, Any] = {}
    for option, value in options.items():
        if value is None or option in OWN_AFFAIRS:
            continue
        match option:
            case "countdown":
                mapped["delay"] = timedelta(seconds=value)
            case "eta":
                mapped["run_at"] = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
            case "priority":
                mapped["priority"] = value
            case "task_id":
                mapped["id"] = value
            case _:
                raise InvalidJob(
                    f"task {name!r} is routed through Fairlane, where {option}={value!r} has no meaning; leave it out, "
                    f"or publish with Celery itself: celery.send_task({name!r}, …)"
                )
    return mapped


def _retry_by_policy(
    args: Any = None,
    kwargs: Any = None,
    exc: BaseException | None = None,
    throw: bool = True,
    eta: datetime | None = None,
    countdown: float | None = None,
    max_retries: int | None = None,
    **options: Any,
) -> Retry:
    """`self.retry(…)` in a task whose retries are the policy's. How often is said by `max_attempts`."""
    reason = "" if exc is None else f"{type(exc).__name__}: {exc}"
    at = eta if eta is None or eta.tzinfo is not None else eta.replace(tzinfo=UTC)
    retry = Retry(countdown if at is None else None, at=at, reason=reason)
    if throw:
        raise retry from exc
    return retry


def _until(retry: celery.exceptions.Retry, now: datetime) -> timedelta:
    """How long Celery waits before it tries again."""
    when: Any = retry.when
    if isinstance(when, datetime):
        aware = when if when.tzinfo is not None else when.replace(tzinfo=UTC)
        return max(timedelta(0), aware - now)
    return timedelta(seconds=when or 0)
