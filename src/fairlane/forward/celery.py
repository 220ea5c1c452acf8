"""Celery runs what Fairlane admits.

The `run` of a forwarded task is wrapped, as Celery itself does for `autoretry_for`: it adopts the job of its message,
runs, and settles it. A message without a token is Celery's own, and runs as usual.

A routed call goes through Celery's own `send_task`, up to the point where Celery would publish. The finished message,
with its headers, its callbacks and its place in a chain, group or chord, is stored with the job. The dispatcher
publishes it unchanged, with the token added. So Fairlane interprets only the time at which it may run and its priority;
everything else that Celery knows about a task (retries, results, canvas, time limits, expiry) stays with Celery.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from fairlane.clock import as_datetime
from fairlane.errors import Cancel, ConfigurationError, Dead, Retry, Signal, UndecodablePayload
from fairlane.forward.delivery import HEADER, Delivery, Token
from fairlane.forward.forwarder import (
    Forwarded,
    Forwarder,
    Message,
    RoutedCodec,
    Unpublishable,
    elsewhere,
    runs_with,
    written,
)
from fairlane.job import State
from fairlane.task import Task
from fairlane.worker.runs import current_run

try:
    import celery.exceptions
    from celery import Celery, bootsteps, signals
    from celery.app.task import Task as CeleryTask
    from celery.utils.time import maybe_iso8601, maybe_make_aware
    from celery.worker.state import task_ready
    from kombu.exceptions import EncodeError
    from kombu.utils import json as kombu_json
    from kombu.utils.imports import symbol_by_name
except ImportError:
    raise ConfigurationError("Celery is not installed; run `pip install 'fairlane[celery]'`") from None

if TYPE_CHECKING:
    from fairlane.app import App

__all__ = ["CeleryForwarder"]

ONCE_MORE = {"max_retries": 1, "interval_start": 0, "interval_step": 0, "interval_max": 0}
"""A connection in Celery's pool may have died since it was last used: try one new connection."""
REACH_WITHIN = 5.0
"""Seconds for the broker to answer a connection check."""
HIGHEST_LEVEL, HIGHEST_PRIORITY = 9, 100
REVOKED = "fairlane-revoked"
"""The header of a message whose job is to be cancelled and not run. Its value is the reason."""
POSITIONAL = ("task_id", "producer", "connection", "router", "result_cls")
"""Parameters of `Celery.send_task` after `eta`, in order."""
CELERYS_OWN = {"connection", "producer", "result_cls", "router", "task_type"}
"""Arguments of `send_task` that come from Celery itself."""
NOT_KEPT = {"declare", "expiration", "priority", "retry", "retry_policy"}
"""What is not stored with a message, because it is decided when it is published. With `expiration`, RabbitMQ would drop
an expired message silently; Celery's worker revokes it by its `expires` header, and says so."""


_to_json: Callable[[Any], str] = kombu_json.dumps
"""As Celery writes it: with marks for dates, UUIDs, decimals and bytes."""
_from_json: Callable[[str], Any] = kombu_json.loads
_class_of: Callable[[Any], type] = symbol_by_name
"""A class, or the one that is named `module:class`."""


class _CeleryCodec(RoutedCodec):
    """Keeps dates, UUIDs, decimals and bytes, by the type marks of Celery's JSON."""

    def encode_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], max_bytes: int) -> bytes:
        with contextlib.suppress(TypeError):  # they may have another JSON form: a dataclass, a model
            args, kwargs = json.loads(_to_json([args, kwargs]))
        return super().encode_call(tuple(args), dict(kwargs), max_bytes)

    def decode_call(self, payload: bytes) -> tuple[Sequence[Any], dict[str, Any]]:
        try:
            args, kwargs = _from_json(_to_json(self.plain_call(payload)))
        except ValueError as error:
            raise UndecodablePayload(f"the arguments do not fit task {self.name!r}: {error}") from error
        return args, kwargs


class CeleryForwarder(Forwarder):
    """Lets Celery's workers run the jobs of an app. Create it in the module that they import.

    The pools `prefork`, `threads` and `solo` are supported; green threads are not.
    """

    engine = "Celery"
    task_type = CeleryTask
    declared_with = "@celery.task"
    routed_codec = _CeleryCodec

    def __init__(self, app: App, celery: celery.Celery, **options: Any) -> None:
        super().__init__(app, **options)
        if not isinstance(celery, Celery):
            raise ConfigurationError(f"CeleryForwarder is given {celery!r} where a Celery app belongs")
        self.celery = celery
        self._functions: dict[str, Callable[..., Any]] = {}
        """The functions as their authors wrote them, by the name of Celery's task."""
        celery.steps["worker"].add(type("Adopting", (_Step,), {"forwarder": self, "__module__": __name__}))
        signals.task_revoked.connect(self._revoked)
        celery.send_task = self._sending(celery.send_task)

    # What Celery says.

    def name_of(self, target: Any) -> str:
        return str(target.name)

    def function_of(self, target: Any) -> Callable[..., Any]:
        if target.name not in self._functions:
            self._functions[target.name] = getattr(target, "_orig_run", target.run)
        return self._functions[target.name]

    def runs_of(self, target: Any, options: Mapping[str, Any]) -> int:
        retries = target.max_retries
        if getattr(target, "autoretry_for", ()):
            retries = getattr(target, "retry_kwargs", {}).get("max_retries", retries)
        return runs_with(retries)

    def targets(self) -> Mapping[str, Any]:
        return dict(self.celery.tasks)

    def is_built_in(self, name: str) -> bool:
        return name.startswith("celery.")

    def stand_in(self, name: str) -> Any:
        stands_for = CeleryTask()
        stands_for.name, stands_for.run = name, elsewhere
        return stands_for

    def install(self, forwarded: Forwarded) -> None:
        target = forwarded.target
        if getattr(target.run, "adopts_for", None) is self:
            return  # it is forwarded as several tasks of Fairlane: its jobs say which
        run, retry = target.run, target.retry

        def of(delivery: Delivery) -> Forwarded:
            return self.forwarded.get(delivery.claim.task, forwarded)

        @functools.wraps(run)
        def adopting(*args: Any, **kwargs: Any) -> Any:
            headers = target.request.headers or {}
            # Removed now, because retries and tasks that publish others pass their headers on.
            token = headers.pop(HEADER, None)
            if token is None:
                return run(*args, **kwargs)
            delivery = self.deliveries.begin_sync(token, self.names[target.name])
            reason = headers.get(REVOKED)
            if delivery is None:
                if reason is not None:  # revoked while it ran: what held it is gone, and it must not run again
                    self.app.job(Token.parse(token).job).cancel_sync()
                raise celery.exceptions.Ignore("stale: this job was delivered before, or its claim has ended")
            if reason is not None:
                self.deliveries.failed_sync(delivery, Cancel(f"{reason} in Celery"))
                raise celery.exceptions.Ignore(reason)
            is_engines = of(delivery).retries == "engine"
            return self._run(target, is_engines, delivery, run if is_engines else self.function_of(target))

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
                # With other arguments it is a separate job, which could not be stored.
                raise Retry(reason=f"its retry could not be sent: {refused.reason}") from refused

        adopting.adopts_for = self  # type: ignore[attr-defined]
        target.run, target.retry = adopting, retrying
        target.Request = type("Request", (_Request, _class_of(target.Request)), {"forwarder": self})

    def _run(self, target: Any, is_engines: bool, delivery: Delivery, function: Callable[..., Any]) -> Any:
        try:
            with delivery.entered():
                value = function(*delivery.args, **delivery.kwargs)
        except celery.exceptions.Retry as retry:
            self._retried(delivery, str(retry))
            raise
        except celery.exceptions.Ignore as left:
            # The task says that it needs no further handling.
            self.deliveries.done_sync(delivery, None)
            raise celery.exceptions.Ignore(str(left)) from left
        except celery.exceptions.Reject as rejected:
            # It is retried or dead: through its job, not through its message.
            reason = f"rejected: {rejected.reason}"
            self.deliveries.failed_sync(delivery, Retry(0, reason=reason) if rejected.requeue else Dead(reason))
            raise celery.exceptions.Ignore(reason) from rejected
        except BaseException as error:
            # A worker that is asked to stop raises what is not an Exception: the task has not failed.
            is_lost = is_engines and not isinstance(error, Exception)
            became = self.deliveries.failed_sync(delivery, error, is_final=is_engines, is_lost=is_lost)
            if not isinstance(error, Exception):
                raise
            raise self._for_celery(target, became, error) from error
        if delivery.retry_in is not None or delivery.was_sent_again:  # self.retry(throw=False)
            self._retried(delivery, "retry(throw=False)")
        else:
            self.deliveries.done_sync(delivery, value)
        return value

    def _retried(self, delivery: Delivery, reason: str) -> None:
        if delivery.was_sent_again:
            self.deliveries.done_sync(delivery, None)  # with other arguments, it is a separate job
        else:
            self.deliveries.retried_sync(delivery, reason, delivery.retry_in or timedelta(0))

    def _for_celery(self, target: Any, became: State | None, error: Exception) -> Any:
        """What to raise to Celery, so that its result says what became of the job."""
        match became:
            case State.SCHEDULED | State.READY:
                # RETRY: it will run again.
                return celery.exceptions.Retry(str(error), None if isinstance(error, Signal) else error)
            case State.CANCELLED:
                request = target.request
                stores = not request.ignore_result
                target.backend.mark_as_revoked(request.id, str(error), request=request, store_result=stores)
                return celery.exceptions.Ignore(str(error))
            case None:
                return celery.exceptions.Ignore("its claim was lost: it runs elsewhere, or has")
        return error

    # A message that was revoked, by `celery.control.revoke` or by Flower, or that has expired, is dropped by the worker
    # that receives it.

    def _revoked(self, sender: Any, request: Any, expired: Any = False, **named: Any) -> None:
        token = (request.headers or {}).get(HEADER)
        if token is not None and sender.name in self.names:
            self.send_end(sender.name, token, request.delivery_info, "expired" if expired else "revoked")

    def send_end(self, name: str, token: str, delivery_info: Mapping[str, Any], reason: str) -> None:
        """Have a worker cancel a job. Not in this process: Celery may fork others from it, and no connection must be
        open in it."""
        headers = {HEADER: token, REVOKED: reason}
        self.celery.send_task(name, queue=delivery_info["routing_key"], headers=headers, retry_policy=ONCE_MORE)

    # What the dispatcher asks.

    def prepare(self) -> None:
        """Import the tasks as Celery's own worker does, which also sets up Django if the project uses it."""
        self.celery.loader.import_default_modules()
        self.celery.finalize(auto=True)
        super().prepare()

    def publish_blocking(self, message: Message) -> None:
        try:
            if message.own is None:
                self._publish_new(message)
            else:
                self._publish_stored(message, message.own)
        except EncodeError as error:
            raise Unpublishable(f"Celery cannot write its message: {error}") from error

    def _publish_new(self, message: Message) -> None:
        """Publish a job that was enqueued with Fairlane's API: Celery writes its message now."""
        options: dict[str, Any] = {
            "task_id": str(message.id),
            "headers": message.carried,
            "retries": message.retries,
            "retry": True,
            "retry_policy": ONCE_MORE,
        }
        if message.queue is not None:
            options["queue"] = message.queue
        if level := self._level(message.priority):
            options["priority"] = level
        is_shown = not message.is_hidden
        if is_shown and message.target.typing:
            try:
                message.target.__header__(*message.args, **message.kwargs)
            except TypeError:
                # Arguments that do not fit the task here may fit it where it is delivered; otherwise it fails there.
                is_shown = False
        if is_shown:
            CeleryTask.apply_async(message.target, list(message.args), dict(message.kwargs), **options)
        else:
            self.celery.send_task(message.target.name, **options)

    def _publish_stored(self, message: Message, own: str) -> None:
        """Publish a routed call, whose message is stored."""
        codec = self.app.codec
        stored = _from_json(own if codec is None else codec.decode(base64.b64decode(own)).decode())
        # Dates and the like are restored: a serializer other than JSON has its own form for them.
        args, kwargs = _from_json(_to_json([message.args, message.kwargs]))
        headers = {**stored["headers"], **message.carried}
        headers["retries"] = (headers.get("retries") or 0) + message.retries
        if message.is_hidden:
            headers["argsrepr"] = headers["kwargsrepr"] = "(hidden)"
        options, declared = stored["options"], stored["declare"]
        if message.queue is not None:
            options = {**options, "exchange": "", "routing_key": message.queue}
            declared = [message.queue]
        if level := self._level(message.priority):
            options["priority"] = level
        with self.celery.producer_or_acquire() as producer:
            producer.publish(
                (args, kwargs, stored["embed"]),
                headers=headers,
                declare=[self.celery.amqp.queues[name] for name in declared],
                retry=True,
                retry_policy=ONCE_MORE,
                **options,
            )

    def reach_blocking(self) -> None:
        with self.celery.connection_for_write() as connection:
            connection.ensure_connection(max_retries=1, interval_start=0, interval_step=0, timeout=REACH_WITHIN)

    def _level(self, priority: int) -> int:
        """Celery's priority, 0 to 9, where 0 means none. RabbitMQ serves the highest first, and has nothing below none;
        all other brokers serve the lowest first, and have nothing above none."""
        above = priority if self._driver == "amqp" else -priority
        return max(0, -(-above * HIGHEST_LEVEL // HIGHEST_PRIORITY))

    def _priority(self, level: int) -> int:
        """The priority in Fairlane for a priority of Celery."""
        above = min(HIGHEST_PRIORITY, level * HIGHEST_PRIORITY // HIGHEST_LEVEL)
        return above if self._driver == "amqp" else -above

    @functools.cached_property
    def _driver(self) -> str:
        driver: str = self.celery.connection_for_write().transport.driver_type
        return driver

    # What programs that call Celery's API get.

    def _sending(self, send_task: Callable[..., Any]) -> Callable[..., Any]:
        """`send_task`, which every call in Celery goes through; routed calls are stored by Fairlane."""

        @functools.wraps(send_task)
        def sending(
            name: str,
            args: Any = None,
            kwargs: Any = None,
            countdown: Any = None,
            eta: Any = None,
            *more: Any,
            **given: Any,
        ) -> Any:
            options = {**dict(zip(POSITIONAL, more, strict=False)), **given}
            is_ours = HEADER in (options.get("headers") or {})
            delivery = None if is_ours else self._retries_itself(name, options)
            task = None if is_ours else self.routed(name)
            if delivery is not None:
                request = self.celery.current_worker_task.request
                if list(args or ()) == list(request.args or ()) and dict(kwargs or {}) == dict(request.kwargs or {}):
                    due = self._due(countdown, eta)
                    now = as_datetime(self.app.clock.now())
                    delivery.retry_in = due.get("delay") or max(timedelta(0), due.get("run_at", now) - now)
                    return self.celery.AsyncResult(options["task_id"])
                delivery.was_sent_again = True
                task = delivery.task
            if task is None:
                return send_task(name, args, kwargs, countdown, eta, **options)
            return self._store(send_task, task, (name, args, kwargs), self._due(countdown, eta), options)

        return sending

    def _retries_itself(self, name: str, options: Mapping[str, Any]) -> Delivery | None:
        """The job that runs here, if this call is Celery's `self.retry(…)` of it."""
        delivery, target = current_run.get(None), self.celery.current_worker_task
        if not isinstance(delivery, Delivery) or target is None or target.name != name:
            return None
        is_retry = options.get("task_id") == target.request.id and options.get("retries", 0) > target.request.retries
        return delivery if is_retry else None

    def _due(self, countdown: Any, eta: Any) -> dict[str, Any]:
        """When it may run, as options of `using`."""
        if countdown:
            return {"delay": timedelta(seconds=countdown)}
        return {"run_at": maybe_make_aware(maybe_iso8601(eta), self.celery.timezone)} if eta else {}

    def _store(
        self,
        send_task: Callable[..., Any],
        task: Task[..., Any],
        call: tuple[Any, ...],
        using: dict[str, Any],
        options: dict[str, Any],
    ) -> Any:
        """Let Celery write the message, and enqueue it instead of publishing it."""
        _let_subscribe_later(self.celery.backend)
        publishing = {"producer": None, "connection": None, "retry": False, "retry_policy": None}
        with self.celery.connection_for_write() as unconnected:
            made = _Written(unconnected)
            result = send_task(*call, **{**options, **publishing, "producer": made})
        if not isinstance(made.body, tuple):
            raise ConfigurationError(
                "Celery's task_protocol = 1 cannot be routed; remove that setting, 2 is the default"
            )
        args, kwargs, embed = made.body
        if level := made.options.get("priority"):
            using["priority"] = self._priority(int(level))
        own = {
            "headers": made.headers,
            "options": made.stored_options(),
            "declare": [each.name for each in made.options.get("declare") or () if hasattr(each, "routing_key")],
            "embed": embed,
        }
        given = {name: value for name, value in options.items() if name not in CELERYS_OWN}
        text = written(task.name, own, given, _to_json)
        if (codec := self.app.codec) is not None:
            text = base64.b64encode(codec.encode(text.encode())).decode()
        job = self.enqueue_routed_blocking(task, args, kwargs, id=made.headers["id"], own=text, using=using)
        # There may already be a job with the same unique key.
        return type(result)(str(job.id)) if task.options.unique is not None else result


class _Request:
    """What Celery's worker knows of a message while a process of its pool runs the task. It reports the end of the job
    if that process no longer can."""

    forwarder: CeleryForwarder

    def on_timeout(self, soft: bool, timeout: float) -> None:
        super().on_timeout(soft, timeout)  # type: ignore[misc]
        request: Any = self
        if not soft and (token := request.request_dict.get(HEADER)) is not None:
            # For Celery it has failed, and is not retried.
            reason = f"ended by its time limit of {timeout} s"
            self.forwarder.send_end(request.task.name, token, request.delivery_info, reason)

    def on_failure(self, exc_info: Any, *given: Any, **named: Any) -> Any:
        request: Any = self
        lost = exc_info.exception
        lost = getattr(lost, "exc", lost)  # errors from a process of the pool may be wrapped
        if not isinstance(lost, celery.exceptions.WorkerLostError) or HEADER not in request.request_dict:
            return super().on_failure(exc_info, *given, **named)  # type: ignore[misc]
        # The process was killed, and nothing renews the lease of the job: it runs again, while it has attempts left.
        task_ready(request)
        request.acknowledge()
        if request.store_errors:
            request.task.backend.mark_as_retry(request.id, lost, request=request._context)
        return None


class _Written:
    """Stands in for a producer, and keeps what Celery would have published."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        """Not connected, unless a result backend listens at the broker."""
        self.body: Any = None
        self.headers: dict[str, Any] = {}
        self.options: dict[str, Any] = {}

    @property
    def channel(self) -> Any:
        return self.connection.default_channel

    def publish(self, body: Any, *, headers: dict[str, Any] | None = None, **options: Any) -> None:
        if self.body is None:  # what follows is only an event about it
            self.body, self.headers, self.options = body, dict(headers or {}), options

    def stored_options(self) -> dict[str, Any]:
        """The options to publish it with, as they are stored."""
        kept = {name: value for name, value in self.options.items() if value is not None and name not in NOT_KEPT}
        if (exchange := kept.get("exchange")) is not None:
            kept["exchange"] = getattr(exchange, "name", exchange)
        return kept


def _let_subscribe_later(backend: Any) -> None:
    """Before it publishes, Celery subscribes to the result in Redis, and tries for 20 s if Redis is away. Reading a
    result subscribes first and then looks, so nothing is missed, and a routed call needs only the database."""
    subscribe = backend.on_task_call
    is_redis = any(each.__module__ == "celery.backends.redis" for each in type(backend).__mro__)
    if not is_redis or getattr(subscribe, "knows_written", False):
        return  # other backends do nothing there, or, like RPC, declare the queue of results

    @functools.wraps(subscribe)
    def on_task_call(producer: Any, task_id: str) -> None:
        if not isinstance(producer, _Written):
            subscribe(producer, task_id)

    on_task_call.knows_written = True  # type: ignore[attr-defined]
    backend.on_task_call = on_task_call
    consumer = backend.result_consumer
    if hasattr(consumer, "_pending_unsubscribe"):
        return
    # Older versions of Celery unsubscribe in the destructor of every result, and try for 20 s if Redis is away, even if
    # nothing has subscribed.
    unsubscribe = consumer.cancel_for

    @functools.wraps(unsubscribe)
    def cancel_for(task_id: str) -> None:
        if consumer._get_key_for_task(task_id) in consumer.subscribed_to:
            unsubscribe(task_id)

    consumer.cancel_for = cancel_for


class _Step(bootsteps.Step):  # type: ignore[misc]  # Celery has no types
    """What Celery's worker runs at its start, after it has imported all tasks. It stops a worker with green threads,
    which would block each other while they wait for their jobs."""

    forwarder: CeleryForwarder

    def __init__(self, parent: Any, **options: Any) -> None:
        super().__init__(parent, **options)
        if getattr(parent.pool_cls, "is_green", False):
            raise ConfigurationError(
                "forwarded tasks cannot run in a pool of green threads (gevent, eventlet); start this worker with "
                "--pool prefork, threads or solo"
            )
        self.forwarder.route_registered()


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
    """`self.retry(…)` in a task whose retries are up to the policy: `max_attempts` limits them."""
    reason = "" if exc is None else f"{type(exc).__name__}: {exc}"
    at = eta if eta is None or eta.tzinfo is not None else eta.replace(tzinfo=UTC)
    retry = Retry(countdown if at is None else None, at=at, reason=reason)
    if throw:
        raise retry from exc
    return retry
