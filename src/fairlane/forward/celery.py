"""Celery runs what Fairlane admits.

A forwarded task's `run` is wrapped, as Celery itself wraps it for `autoretry_for`: it adopts the job of its message,
runs, and settles it. A message without a token is Celery's own, and runs as ever.

A routed call goes through Celery's own `send_task`, up to the point where Celery would publish. The finished message,
with its headers, its callbacks and its place in a chain, group or chord, is stored with the job. The dispatcher
publishes it as it is, with the token added. So Fairlane interprets nothing but the time at which it may run and its
priority, and what Celery knows of a task (retries, results, canvas, time limits, expiry) stays Celery's.
"""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from fairlane.clock import as_datetime
from fairlane.errors import (
    Cancel,
    ConfigurationError,
    Dead,
    Retry,
    Signal,
    UndecodablePayload,
)
from fairlane.forward.delivery import Delivery
from fairlane.forward.forwarder import Forwarded, RoutedCall, RoutedCodec, RoutingForwarder, runs_with, unwritable
from fairlane.forward.messages import HEADER, Message, Token, Unpublishable
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
"""A connection from Celery's pool may have died since it was used last: one fresh one is tried."""
REACH_WITHIN = 5.0
"""Seconds in which a broker has to answer whether it is there."""
HIGHEST_LEVEL, HIGHEST_PRIORITY = 9, 100
REVOKED = "fairlane-revoked"
"""The header of a message whose job is not to run, but to be cancelled. Its value is the reason."""
POSITIONAL = ("task_id", "producer", "connection", "router", "result_cls")
"""Parameters of `Celery.send_task` behind its `eta`, in their order."""
CELERYS_OWN = {"connection", "producer", "result_cls", "router", "task_type"}
"""What Celery's own callers give to `send_task`."""
NOT_KEPT = {"declare", "expiration", "priority", "retry", "retry_policy"}
"""What a stored message leaves out: how to publish is decided then. RabbitMQ would drop a message that has expired
without a word (`expiration`); Celery's worker revokes it by its header `expires`, and says so."""


_to_json: Callable[[Any], str] = kombu_json.dumps
"""As Celery writes it: with marks for dates, UUIDs, decimals and bytes."""
_from_json: Callable[[str], Any] = kombu_json.loads
_class_of: Callable[[Any], type] = symbol_by_name
"""A class, or the one that is named `module:class`."""


class _CeleryCodec(RoutedCodec):
    """Dates, UUIDs, decimals and bytes are such again, by the marks of Celery's JSON."""

    def encode_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], max_bytes: int) -> bytes:
        return super().encode_call(_marked(tuple(args)), _marked(dict(kwargs)), max_bytes)

    def decode_call(self, payload: bytes) -> tuple[Sequence[Any], dict[str, Any]]:
        try:
            args, kwargs = _from_json(_to_json(self.plain_call(payload)))
        except ValueError as error:
            raise UndecodablePayload(f"the arguments do not fit task {self.name!r}: {error}") from error
        return args, kwargs


def _marked(value: Any) -> Any:
    """A value in which what Celery's JSON has a mark for has it."""
    match value:
        case None | str() | bool() | int() | float():
            return value
        case dict():
            return {name: _marked(each) for name, each in value.items()}
        case list():
            return [_marked(each) for each in value]
        case tuple():
            return tuple(map(_marked, value))
    try:
        return json.loads(_to_json(value))
    except TypeError:
        return value  # it may have another form: a dataclass, a model


class CeleryForwarder(RoutingForwarder):
    """Has Celery's workers run the jobs of an app. Create it in the module that they import.

    Pools that run tasks in processes, in threads or alone are served; those of green threads are not.
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
        """As their authors wrote them, by the name of Celery's task."""
        celery.steps["worker"].add(_step_of(self))
        signals.task_revoked.connect(self._revoked)
        celery.send_task = self._sending(celery.send_task)

    # What Celery says.

    def name_of(self, target: Any) -> str:
        name: str = target.name
        return name

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
        tasks: Mapping[str, Any] = self.celery.tasks
        return tasks

    def is_built_in(self, name: str) -> bool:
        return name.startswith("celery.")

    def stand_in(self, name: str) -> Any:
        def elsewhere(*args: Any, **kwargs: Any) -> None:
            """Nothing of this task is known here but its name."""

        stands_for = CeleryTask()
        stands_for.name, stands_for.run = name, elsewhere
        return stands_for

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
            # It is used up with this; tasks that publish others, and retries, hand their headers on.
            token = headers.pop(HEADER, None)
            if token is None:
                return run(*args, **kwargs)
            delivery = self.deliveries.begin_sync(token, self.names[target.name])
            reason = headers.get(REVOKED)
            if delivery is None:
                if reason is not None:  # while it ran: what held it is gone, and it must not come again
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
                # With other arguments it is another job, which could not be stored.
                raise Retry(reason=f"its retry could not be sent: {refused.reason}") from refused

        adopting.adopts_for = self  # type: ignore[attr-defined]
        target.run, target.retry = adopting, retrying
        target.Request = type("Request", (_Request, _class_of(target.Request)), {"forwarder": self})

    def _run(self, target: Any, is_engines: bool, delivery: Delivery, function: Callable[..., Any]) -> Any:
        try:
            with delivery.entered():
                value = function(*delivery.args, **delivery.kwargs)
        except celery.exceptions.Retry as retry:
            when: Any = retry.when
            if isinstance(when, datetime):
                aware = when if when.tzinfo is not None else when.replace(tzinfo=UTC)
                wait = max(timedelta(0), aware - as_datetime(self.app.clock.now()))
            else:
                wait = timedelta(seconds=when or 0)
            self._retried(delivery, str(retry), wait)
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
        except BaseException as error:
            # A worker that is told to stop raises what is no Exception: that is no failure of the task's.
            is_lost = is_engines and not isinstance(error, Exception)
            became = self.deliveries.failed_sync(delivery, error, is_final=is_engines, is_lost=is_lost)
            if not isinstance(error, Exception):
                raise
            raise self._for_celery(target, became, error) from error
        if delivery.retry_in is not None or delivery.was_sent_again:  # self.retry(throw=False)
            self._retried(delivery, "retry(throw=False)", timedelta(0))
        else:
            self.deliveries.done_sync(delivery, value)
        return value

    def _retried(self, delivery: Delivery, reason: str, otherwise: timedelta) -> None:
        if delivery.was_sent_again:
            self.deliveries.done_sync(delivery, None)  # with other arguments, it is another job
        else:
            delay = otherwise if delivery.retry_in is None else delivery.retry_in
            self.deliveries.retried_sync(delivery, reason, delay)

    def _for_celery(self, target: Any, became: State | None, error: Exception) -> Any:
        """What Celery is to see, so that its result says what has become of the job."""
        match became:
            case State.SCHEDULED | State.READY:
                # RETRY: it comes again.
                return celery.exceptions.Retry(str(error), None if isinstance(error, Signal) else error)
            case State.CANCELLED:
                request = target.request
                stores = not request.ignore_result
                target.backend.mark_as_revoked(request.id, str(error), request=request, store_result=stores)
                return celery.exceptions.Ignore(str(error))
            case None:
                return celery.exceptions.Ignore("its claim was lost: it runs elsewhere, or has")
        return error

    # A message that is revoked, by `celery.control.revoke` or by Flower, or that has expired, is thrown away by whoever
    # is given it.

    def _revoked(self, sender: Any, request: Any, expired: Any = False, **told: Any) -> None:
        token = (request.headers or {}).get(HEADER)
        if token is not None and sender.name in self.names:
            self.send_end(sender.name, token, request.delivery_info, "expired" if expired else "revoked")

    def send_end(self, name: str, token: str, delivery_info: Mapping[str, Any], reason: str) -> None:
        """Have a worker cancel a job. Not in here: this may be the process that Celery forks others from, and no
        connection must be open in it."""
        headers = {HEADER: token, REVOKED: reason}
        self.celery.send_task(name, queue=delivery_info["routing_key"], headers=headers, retry_policy=ONCE_MORE)

    # What the dispatcher asks.

    def prepare(self) -> None:
        """Import the tasks as Celery's own worker does, which sets up Django where the project uses it."""
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
        """A job that was enqueued with Fairlane's API: Celery writes its message now."""
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
                # Arguments that do not fit the task as it is here may fit it where it is delivered; if not, it fails
                # there.
                is_shown = False
        if is_shown:
            CeleryTask.apply_async(message.target, list(message.args), dict(message.kwargs), **options)
        else:
            self.celery.send_task(message.target.name, **options)

    def _publish_stored(self, message: Message, own: str) -> None:
        """A routed call: its message is there."""
        stored = _from_json(self._unsealed(own))
        # Dates and the like come back as such: a serializer other than JSON has its own form for them.
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

    def _sending(self, send_task: Callable[..., Any]) -> Callable[..., Any]:
        """`send_task`, which every call of Celery's comes to, with what is routed kept for Fairlane."""

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
                    delivery.retry_in = self._wait(countdown, eta)
                    return self.celery.AsyncResult(options["task_id"])
                delivery.was_sent_again = True
                task = delivery.task
            if task is None:
                return send_task(name, args, kwargs, countdown, eta, **options)
            return self._store(send_task, task, (name, args, kwargs), self._due(countdown, eta), options)

        return sending

    def _retries_itself(self, name: str, options: Mapping[str, Any]) -> Delivery | None:
        """The job that runs here, if this is Celery's `self.retry(…)` of it."""
        delivery, target = current_run.get(None), self.celery.current_worker_task
        if not isinstance(delivery, Delivery) or target is None or target.name != name:
            return None
        is_retry = options.get("task_id") == target.request.id and options.get("retries", 0) > target.request.retries
        return delivery if is_retry else None

    def _due(self, countdown: Any, eta: Any) -> dict[str, Any]:
        """When it is to run, as `using` takes it."""
        if countdown:
            return {"delay": timedelta(seconds=countdown)}
        return {"run_at": maybe_make_aware(maybe_iso8601(eta), self.celery.timezone)} if eta else {}

    def _wait(self, countdown: Any, eta: Any) -> timedelta:
        due = self._due(countdown, eta)
        wait: timedelta = due.get("delay", timedelta(0))
        if "run_at" in due:
            wait = max(wait, due["run_at"] - as_datetime(self.app.clock.now()))
        return wait

    def _store(
        self,
        send_task: Callable[..., Any],
        task: Task[..., Any],
        call: tuple[Any, ...],
        using: dict[str, Any],
        options: dict[str, Any],
    ) -> Any:
        """Have Celery write the message, and enqueue it instead of publishing it."""
        _let_subscribe_later(self.celery.backend)
        publishing = {"producer": None, "connection": None, "retry": False, "retry_policy": None}
        with self.celery.connection_for_write() as unconnected:
            written = _Written(unconnected)
            result = send_task(*call, **{**options, **publishing, "producer": written})
        if not isinstance(written.body, tuple):
            raise ConfigurationError(
                "Celery's task_protocol = 1 cannot be routed; remove that setting, 2 is the default"
            )
        args, kwargs, embed = written.body
        if level := written.options.get("priority"):
            using["priority"] = self._priority(int(level))
        own = self._sealed(_as_text(task.name, written.headers, written.options, embed, options))
        id = written.headers["id"]
        job = self.enqueue_routed_blocking(task, RoutedCall(args, kwargs, using, id, own))
        # A job of the same unique key was there already, perhaps.
        return type(result)(str(job.id)) if task.options.unique is not None else result

    def _sealed(self, text: str) -> str:
        codec = self.app.codec
        return text if codec is None else base64.b64encode(codec.encode(text.encode())).decode()

    def _unsealed(self, stored: str) -> str:
        codec = self.app.codec
        return stored if codec is None else codec.decode(base64.b64decode(stored)).decode()


class _Request:
    """What Celery's worker knows of a message while a process of its pool runs the task. It says what has become of the
    job where that process can say nothing any more."""

    forwarder: CeleryForwarder

    def on_timeout(self, soft: bool, timeout: float) -> None:
        super().on_timeout(soft, timeout)  # type: ignore[misc]
        request: Any = self
        if not soft and (token := request.request_dict.get(HEADER)) is not None:
            # To Celery it has failed, and does not come again.
            reason = f"ended by its time limit of {timeout} s"
            self.forwarder.send_end(request.task.name, token, request.delivery_info, reason)

    def on_failure(self, exc_info: Any, *given: Any, **named: Any) -> Any:
        request: Any = self
        lost = exc_info.exception
        lost = getattr(lost, "exc", lost)  # what came from a process of the pool may be wrapped
        if not isinstance(lost, celery.exceptions.WorkerLostError) or HEADER not in request.request_dict:
            return super().on_failure(exc_info, *given, **named)  # type: ignore[misc]
        # The process was killed, and nobody renews the job's lease: it comes again, while it has attempts left.
        task_ready(request)
        request.acknowledge()
        if request.store_errors:
            request.task.backend.mark_as_retry(request.id, lost, request=request._context)
        return None


class _Written:
    """Takes the place of a producer, and keeps what Celery would have published."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        """Not connected, unless a result backend wants to listen at the broker."""
        self.body: Any = None
        self.headers: dict[str, Any] = {}
        self.options: dict[str, Any] = {}

    @property
    def channel(self) -> Any:
        return self.connection.default_channel

    def publish(self, body: Any, *, headers: dict[str, Any] | None = None, **options: Any) -> None:
        if self.body is None:  # what follows is an event that tells of it
            self.body, self.headers, self.options = body, dict(headers or {}), options


def _let_subscribe_later(backend: Any) -> None:
    """Celery subscribes to a result in Redis before it publishes, and tries for 20 s if Redis is away. Whoever asks for
    a result subscribes first and then looks, so nothing is missed, and a call needs nothing but the database."""
    subscribe = backend.on_task_call
    is_redis = any(each.__module__ == "celery.backends.redis" for each in type(backend).__mro__)
    if not is_redis or getattr(subscribe, "knows_written", False):
        return  # other backends do nothing there, or, as that of RPC, declare where results are to go

    @functools.wraps(subscribe)
    def on_task_call(producer: Any, task_id: str) -> None:
        if not isinstance(producer, _Written):
            subscribe(producer, task_id)

    on_task_call.knows_written = True  # type: ignore[attr-defined]
    backend.on_task_call = on_task_call
    if not hasattr(backend.result_consumer, "_pending_unsubscribe"):
        _unsubscribe_if_subscribed(backend.result_consumer)


def _unsubscribe_if_subscribed(consumer: Any) -> None:
    """Older Celery unsubscribes in the destructor of every result, and tries for 20 s if Redis is away, also where
    nobody has subscribed."""
    unsubscribe = consumer.cancel_for

    @functools.wraps(unsubscribe)
    def cancel_for(task_id: str) -> None:
        if consumer._get_key_for_task(task_id) in consumer.subscribed_to:
            unsubscribe(task_id)

    consumer.cancel_for = cancel_for


def _as_text(
    task: str, headers: Mapping[str, Any], options: Mapping[str, Any], embed: Any, given: Mapping[str, Any]
) -> str:
    """A message without its arguments, which are the job's."""
    exchange = options.get("exchange")
    kept = {name: value for name, value in options.items() if value is not None and name not in NOT_KEPT}
    if exchange is not None:
        kept["exchange"] = getattr(exchange, "name", exchange)
    declare = [each.name for each in options.get("declare") or () if hasattr(each, "routing_key")]
    try:
        return _to_json({"headers": headers, "options": kept, "declare": declare, "embed": embed})
    except (TypeError, ValueError) as error:
        said = {name: value for name, value in given.items() if name not in CELERYS_OWN}
        raise unwritable(task, said, _to_json, error) from error


def _step_of(forwarder: CeleryForwarder) -> type[bootsteps.Step]:
    """What Celery's worker does before it starts anything, once it has imported all tasks."""

    class Adopting(bootsteps.Step):  # type: ignore[misc]  # Celery has no types
        """Ends a worker whose green threads would block each other while they wait for their jobs."""

        def __init__(self, parent: Any, **options: Any) -> None:
            super().__init__(parent, **options)
            if getattr(parent.pool_cls, "is_green", False):
                raise ConfigurationError(
                    "forwarded tasks cannot run in a pool of green threads (gevent, eventlet); start this worker with "
                    "--pool prefork, threads or solo"
                )
            forwarder.route_registered()

    return Adopting


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
