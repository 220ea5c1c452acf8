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
from fairlane.errors import Cancel, ConfigurationError, Dead, InvalidJob, Retry, Signal
from fairlane.forward.delivering import Delivery
from fairlane.forward.forwarder import Forwarded, Forwarder, not_a_task
from fairlane.forward.messages import Message, Unpublishable
from fairlane.forward.tokens import HEADER
from fairlane.task import Task
from fairlane.worker.context import current_run

try:
    import celery.exceptions
    from celery import Celery, bootsteps, signals
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
HIGHEST_LEVEL, HIGHEST_PRIORITY = 9, 100
REVOKED = "fairlane-revoked"
"""The header of a message whose job is not to run, but to be cancelled."""
OWN_AFFAIRS = {"add_to_parent", "connection", "parent_id", "producer", "retry", "retry_policy", "root_id"}
"""Options of `apply_async` that say how Celery publishes, which it does not then, or on whose behalf."""


class CeleryForwarder(Forwarder):
    """Has Celery's workers run the jobs of an app. Create it in the module that they import.

    Pools that run tasks in processes, in threads or alone are served; those of green threads are not.
    """

    engine = "Celery"

    def __init__(self, app: App, celery: celery.Celery, **options: Any) -> None:
        super().__init__(app, **options)
        if not isinstance(celery, Celery):
            raise ConfigurationError(f"CeleryForwarder is given {celery!r} where a Celery app belongs")
        self.celery = celery
        self._functions: dict[str, Callable[..., Any]] = {}
        """As their authors wrote them, by the name of Celery's task."""
        celery.steps["worker"].add(_NoGreenThreads)
        signals.task_revoked.connect(self._revoked)

    # What Celery says.

    def check(self, target: Any) -> None:
        if not isinstance(target, CeleryTask):
            raise not_a_task("Celery", target, "declare it with @celery.task, below @forwarder.route(…) if it has that")

    def name_of(self, target: Any) -> str:
        name: str = target.name
        return name

    def function_of(self, target: Any) -> Callable[..., Any]:
        if target.name not in self._functions:
            self._functions[target.name] = getattr(target, "_orig_run", target.run)
        return self._functions[target.name]

    def install(self, forwarded: Forwarded) -> None:
        target = forwarded.target
        if getattr(target.run, "adopts_for", None) is self:
            return  # it is also another task of Fairlane's: which one, its jobs say
        run, retry = target.run, target.retry

        def of(delivery: Delivery) -> Forwarded:
            return self.forwarded.get(delivery.claim.task, forwarded)

        @functools.wraps(run)
        def adopting(*args: Any, **kwargs: Any) -> Any:
            headers = target.request.headers or {}
            token = headers.get(HEADER)
            if token is None:
                return run(*args, **kwargs)
            delivery = self.deliveries.begin_sync(token, self.names[target.name])
            if delivery is None:
                raise celery.exceptions.Ignore("stale: this job was delivered before, or its claim has ended")
            if REVOKED in headers:
                self.deliveries.failed_sync(delivery, Cancel("revoked in Celery"))
                raise celery.exceptions.Ignore("revoked")
            is_engines = of(delivery).retries == "engine"
            if is_engines:
                # What Celery copies into a retry message of its own: the token that brought us here is used up.
                headers[HEADER] = str(delivery.token)
            else:
                # It is used up, and tasks that publish others hand their headers on.
                del headers[HEADER]
                # Each attempt is a message of its own, which Celery takes for the first; tasks count on this.
                target.request.retries = delivery.claim.attempt - 1
            return self._run(of(delivery), delivery, run if is_engines else self.function_of(target))

        @functools.wraps(retry)
        def retrying(*args: Any, **options: Any) -> Any:
            delivery = current_run.get(None)
            if not isinstance(delivery, Delivery):
                return retry(*args, **options)
            if of(delivery).retries == "policy":
                return _retry_by_policy(*args, **options)
            try:
                return retry(*args, **options)
            except celery.exceptions.Reject as refused:
                # Its message is not on its way, and nothing else would bring the job back.
                raise Retry(reason=f"Celery could not publish its retry: {refused.reason}") from refused

        adopting.adopts_for = self  # type: ignore[attr-defined]
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
        except celery.exceptions.Ignore as left:
            # The task says that it has taken care of itself.
            self.deliveries.done_sync(delivery, None)
            raise celery.exceptions.Ignore(str(left)) from left
        except celery.exceptions.Reject as rejected:
            # It comes again, or is set aside: with its job, not with its message.
            reason = f"rejected: {rejected.reason}"
            self.deliveries.failed_sync(delivery, Retry(0, reason=reason) if rejected.requeue else Dead(reason))
            raise celery.exceptions.Ignore(reason) from rejected
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

    # A message that is revoked, by `celery.control.revoke` or by Flower, is thrown away by whoever is given it.

    def _revoked(self, sender: Any, request: Any, **told: Any) -> None:
        token = (request.headers or {}).get(HEADER)
        if token is not None and sender.name in self.names:
            # Not in here: this may be the process that Celery forks others from, and no connection must be open in it.
            headers = {HEADER: token, REVOKED: True}
            queue = request.delivery_info["routing_key"]
            self.celery.send_task(sender.name, queue=queue, headers=headers, retry_policy=ONCE_MORE)

    # What the dispatcher asks.

    def publish_blocking(self, message: Message) -> None:
        options: dict[str, Any] = {
            "task_id": str(message.id),
            "queue": message.queue,
            "headers": message.carried,
            "retry": True,
            "retry_policy": ONCE_MORE,
        }
        if level := self._level(message.priority):
            options["priority"] = level
        try:
            # Arguments that do not fit the task as it is here may fit it where it is delivered; if not, it fails there.
            if message.is_hidden or not _fits(message):
                self.celery.send_task(message.target.name, **options)
            else:
                # The class's own: the task's may have been routed through us.
                CeleryTask.apply_async(message.target, list(message.args), dict(message.kwargs), **options)
        except EncodeError as error:
            raise Unpublishable(f"Celery cannot write its message: {error}") from error

    def reach_blocking(self) -> None:
        with self.celery.connection_for_write() as connection:
            connection.ensure_connection(max_retries=1, interval_start=0, interval_step=0, timeout=REACH_WITHIN)

    def _level(self, priority: int) -> int:
        """Of Celery's 0 … 9, where 0 is as good as none. RabbitMQ serves the highest first, and has nothing below none;
        all others serve the lowest first, and have nothing above."""
        above = priority if self._driver == "amqp" else -priority
        return max(0, -(-above * HIGHEST_LEVEL // HIGHEST_PRIORITY))

    def _priority(self, level: int) -> int:
        """What a level of Celery's is called in Fairlane."""
        above = min(HIGHEST_PRIORITY, level * HIGHEST_PRIORITY // HIGHEST_LEVEL)
        return above if self._driver == "amqp" else -above

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
            self.refuse_inside_a_loop(task, "apply_async")
            bound = task.using(**self._mapped(task.name, options))
            job = bound.enqueue_sync(*(args or ()), **(kwargs or {}))
            return target.AsyncResult(str(job.id))

        target.apply_async = through_fairlane

    def _mapped(self, name: str, options: dict[str, Any]) -> dict[str, Any]:
        """What `apply_async` was given, as `using` takes it."""
        mapped: dict[str, Any] = {}
        for option, value in options.items():
            if value is None or value == [] or option in OWN_AFFAIRS:
                continue
            match option:
                case "countdown":
                    mapped["delay"] = timedelta(seconds=value)
                case "eta":
                    mapped["run_at"] = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
                case "priority":
                    mapped["priority"] = self._priority(value)
                case "task_id":
                    mapped["id"] = value
                case "headers":
                    mapped["context"] = {"headers": dict(value)}
                case _:
                    raise InvalidJob(
                        f"task {name!r} is routed through Fairlane, where {option}={value!r} has no meaning; leave it "
                        f"out, or publish with Celery itself: celery.send_task({name!r}, …)"
                    )
        return mapped


class _NoGreenThreads(bootsteps.Step):  # type: ignore[misc]  # Celery has no types
    """Ends a worker before it begins: its green threads would block each other while they wait for their jobs."""

    def __init__(self, parent: Any, **options: Any) -> None:
        super().__init__(parent, **options)
        if getattr(parent.pool_cls, "is_green", False):
            raise ConfigurationError(
                "forwarded tasks cannot run in a pool of green threads (gevent, eventlet); start this worker with "
                "--pool prefork, threads or solo"
            )


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


def _fits(message: Message) -> bool:
    """Whether Celery, which looks at the arguments of its tasks, lets these pass."""
    if message.target.typing:
        try:
            message.target.__header__(*message.args, **message.kwargs)
        except TypeError:
            return False
    return True


def _until(retry: celery.exceptions.Retry, now: datetime) -> timedelta:
    """How long Celery waits before it tries again."""
    when: Any = retry.when
    if isinstance(when, datetime):
        aware = when if when.tzinfo is not None else when.replace(tzinfo=UTC)
        return max(timedelta(0), aware - now)
    return timedelta(seconds=when or 0)
