"""Taskiq runs what Fairlane admits.

A middleware records which message the current asyncio task processes. The function of a task is wrapped: it adopts the
job of that message, runs, and settles it. A skipped message ends as `NoResultError`, so no result is stored for it.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import json
import logging
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from fairlane.errors import ConfigurationError, FairlaneError, Signal
from fairlane.forward.delivery import HEADER, Delivery
from fairlane.forward.forwarder import Forwarded, Forwarder, Message, answering, elsewhere, runs_with, written
from fairlane.task import is_async
from fairlane.worker.runs import Stop

try:
    import anyio
    from taskiq import (
        AsyncBroker,
        AsyncTaskiqDecoratedTask,
        BrokerMessage,
        SimpleRetryMiddleware,
        SmartRetryMiddleware,
        TaskiqMessage,
        TaskiqMiddleware,
        TaskiqResult,
    )
    from taskiq.exceptions import NoResultError, SendTaskError
    from taskiq.kicker import AsyncKicker
except ImportError:
    raise ConfigurationError("Taskiq is not installed; run `pip install 'fairlane[taskiq]'`") from None

if TYPE_CHECKING:
    from fairlane.app import App
    from fairlane.task import Task

__all__ = ["TaskiqForwarder"]

log = logging.getLogger("fairlane.forward")

OF_RETRIES = {"max_retries", "retry_on_error"}
"""Labels of a message that have no effect if the policy decides on retries."""


class TaskiqForwarder(Forwarder):
    """Lets Taskiq's workers run the jobs of an app. Create it in the module that they import.

    A broker of Taskiq is a queue: without `queues=` all messages go to the default queue of the broker.
    """

    engine = "Taskiq"
    task_type = AsyncTaskiqDecoratedTask
    declared_with = "@broker.task"

    def __init__(self, app: App, broker: AsyncBroker, **options: Any) -> None:
        super().__init__(app, **options)
        if not isinstance(broker, AsyncBroker):
            raise ConfigurationError(f"TaskiqForwarder is given {broker!r} where a broker of Taskiq belongs")
        self.broker = broker
        watch = _Watch(self)
        watch.set_broker(broker)
        # The first in the list is the last to be called after an error: by then Taskiq has decided on a retry.
        broker.middlewares.insert(0, watch)
        self._kick = broker.kick
        broker.kick = self._kicked  # type: ignore[assignment,method-assign]
        self._is_publishing: contextvars.ContextVar[bool] = contextvars.ContextVar("is_publishing", default=False)
        self._starting = asyncio.Lock()
        self._has_started = False

    # What Taskiq says.

    def name_of(self, target: Any) -> str:
        return str(target.task_name)

    def function_of(self, target: Any) -> Callable[..., Any]:
        function: Callable[..., Any] = target.original_func
        return function

    def runs_of(self, target: Any, options: Mapping[str, Any]) -> int:
        labels = {**target.labels, **options}
        retrying = (SimpleRetryMiddleware, SmartRetryMiddleware)
        found = next((each for each in self.broker.middlewares if isinstance(each, retrying)), None)
        if found is None:
            return 1
        retries = labels.get("retry_on_error")
        if str(found.default_retry_label if retries is None else retries).lower() != "true":
            return 1
        # Taskiq counts the first run among its retries.
        return runs_with(int(labels.get("max_retries", found.default_retry_count)) - 1)

    def targets(self) -> Mapping[str, Any]:
        return self.broker.get_all_tasks()

    def stand_in(self, name: str) -> Any:
        return AsyncTaskiqDecoratedTask(self.broker, name, elsewhere, {})

    def install(self, forwarded: Forwarded) -> None:
        function = forwarded.target.original_func
        wrap = self._adopting if is_async(function) else self._adopting_in_a_thread
        forwarded.target.original_func = wrap(forwarded, function)

    async def publish(self, message: Message) -> None:
        await self._connect()
        labels: dict[str, Any] = dict(message.carried)
        if message.queue is not None:
            labels["queue_name"] = message.queue
        if message.priority:
            labels["priority"] = max(0, message.priority)
        if message.retries:
            labels["_retries"] = message.retries
        async with answering():
            if message.own is None:
                await self._publish_new(message, labels)
                return
            stored = TaskiqMessage(**{**json.loads(message.own), "args": message.args, "kwargs": message.kwargs})
            if message.retries:
                labels["_retries"] += int(stored.labels.get("_retries", 0))
            whole = stored.model_copy(update={"labels": {**stored.labels, **labels}})
            await self._kick(self.broker.formatter.dumps(whole))

    async def _publish_new(self, message: Message, labels: dict[str, Any]) -> None:
        """Publish a job that was enqueued with Fairlane's API: Taskiq writes its message now."""
        target = message.target
        kicker: AsyncKicker[..., Any] = AsyncKicker(target.task_name, self.broker, {**target.labels, **labels})
        before = self._is_publishing.set(True)
        try:
            await kicker.with_task_id(str(message.id)).kiq(*message.args, **message.kwargs)
        except SendTaskError as error:
            raise (error.__cause__ or error) from None  # what the broker said
        finally:
            self._is_publishing.reset(before)

    async def reach(self) -> None:
        await self._connect()
        if (pool := getattr(self.broker, "connection_pool", None)) is not None:  # Redis, whose start connects nowhere
            from redis.asyncio import Redis

            async with answering(), Redis(connection_pool=pool) as client:
                await client.ping()

    async def _connect(self) -> None:
        """Start the broker as a client, if it is not started, and raise if its connection is lost: RabbitMQ's client
        would make us wait until it has reconnected."""
        async with self._starting:
            if not self._has_started:
                await self.broker.startup()
                self._has_started = True
        connection = getattr(self.broker, "write_conn", None)
        if connection is not None and not connection.connected.is_set():
            raise ConnectionError(f"{connection} is lost")

    async def close(self) -> None:
        await super().close()
        if self._has_started:
            self._has_started = False
            await self.broker.shutdown()

    # The worker's side.

    def _adopting(self, forwarded: Forwarded, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        async def run(*args: Any, **kwargs: Any) -> Any:
            message = self.deliveries.take(forwarded.target.task_name)
            if message is None:  # called by hand, or sent past Fairlane
                return await function(*args, **kwargs)
            delivery = await self._begun(forwarded, message, cancellable=True)
            try:
                with delivery.entered():
                    value = await function(*delivery.args, **{**kwargs, **delivery.kwargs})
            except BaseException as error:
                # Taskiq's time limit would cancel anything awaited from here on.
                with anyio.CancelScope(shield=True):
                    leave = await self._raised(forwarded, message, delivery, error)
                raise leave from None
            with anyio.CancelScope(shield=True):
                await self.deliveries.done(delivery, value)
            return value

        return run

    def _adopting_in_a_thread(self, forwarded: Forwarded, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            message = self.deliveries.take(forwarded.target.task_name)
            if message is None:
                return function(*args, **kwargs)
            delivery = self.app.run_blocking(self._begun(forwarded, message))
            try:
                with delivery.entered():
                    value = function(*delivery.args, **{**kwargs, **delivery.kwargs})
            except BaseException as error:
                raise self.app.run_blocking(self._raised(forwarded, message, delivery, error)) from None
            self.deliveries.done_sync(delivery, value)
            return value

        return run

    async def _begun(self, forwarded: Forwarded, message: TaskiqMessage, *, cancellable: bool = False) -> Delivery:
        token = message.labels[HEADER]
        delivery = await self.deliveries.begin(token, self.names[message.task_name], cancellable=cancellable)
        if delivery is None:
            raise NoResultError
        if forwarded.retries == "engine":
            self.deliveries.retryable[token] = delivery
        else:
            message.labels["retry_on_error"] = False
        return delivery

    async def _raised(
        self, forwarded: Forwarded, message: TaskiqMessage, delivery: Delivery, error: BaseException
    ) -> BaseException:
        """Record what was raised, and return what to raise to Taskiq."""
        task = asyncio.current_task()
        assert task is not None
        was_cancelled = isinstance(error, asyncio.CancelledError) and task.cancelling() > 0
        if was_cancelled and delivery.stop is not None:
            # Only we have cancelled it: Taskiq goes on with its next message.
            task.uncancel()
            await self.deliveries.failed(delivery, error)
            return NoResultError()
        if forwarded.retries == "engine" and not isinstance(error, Signal):
            return error  # whether Taskiq tries again it says later, to the middleware
        if was_cancelled and (limit := message.labels.get("timeout")) is not None:
            await self.deliveries.failed(delivery, TimeoutError(f"it ran longer than its label timeout={limit!r}"))
            return error
        if was_cancelled:
            delivery.stop = Stop.SHUTDOWN
        await self.deliveries.failed(delivery, error)
        # Under the policy this was one attempt: the job has its outcome, and no result is stored for the message.
        return error if was_cancelled else NoResultError()

    # Existing calls.

    def _route(self, target: Any, queue: str, options: Mapping[str, Any]) -> Task[..., Any]:
        task, plain = super()._route(target, queue, options), target.kicker

        def kicker() -> AsyncKicker[..., Any]:
            made = plain()  # a shared task learns its broker only then
            return _Kicker(made.task_name, made.broker, dict(made.labels), made.return_type)

        target.kicker = kicker
        return task

    async def _kicked(self, sent: BrokerMessage) -> None:
        """`broker.kick`, which every message goes through; routed messages are stored by Fairlane."""
        token = sent.labels.get(HEADER, "")
        task = None if self._is_publishing.get() else self.routed(sent.task_name, is_copy=bool(token))
        if task is None:
            return await self._kick(sent)
        message = self.broker.formatter.loads(sent.message)
        labels = {name: value for name, value in message.labels.items() if name != HEADER}
        if (delivery := self.deliveries.retryable.pop(token, None)) is not None:
            wait = timedelta(seconds=float(labels.get("delay", 0)))
            return await self.deliveries.retried(delivery, "retried by Taskiq", wait)
        own_labels = {name: str(value) for name, value in self.forwarded[task.name].target.labels.items()}
        given = {name for name, value in labels.items() if own_labels.get(name) != str(value)}
        self.forwarded[task.name].refuse(given & OF_RETRIES)
        using: dict[str, Any] = {}
        if (delay := labels.pop("delay", None)) is not None:
            using["delay"] = timedelta(seconds=float(delay))
        if (priority := labels.pop("priority", None)) is not None:
            using["priority"] = int(priority)
        stored = message.model_copy(update={"labels": labels, "args": [], "kwargs": {}})
        own = written(task.name, stored.model_dump(), labels)
        await self.enqueue_routed(
            task, message.args, message.kwargs, id=message.task_id, own=own, using=using, options=labels
        )
        return None


class _Kicker(AsyncKicker[Any, Any]):
    """Raises the reason why Fairlane refused a call, instead of a send error."""

    async def kiq(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return await super().kiq(*args, **kwargs)
        except SendTaskError as error:
            if isinstance(error.__cause__, FairlaneError):
                raise error.__cause__ from None
            raise


class _Watch(TaskiqMiddleware):
    """Records which message the current asyncio task processes, and whether Taskiq retries it."""

    def __init__(self, forwarder: TaskiqForwarder) -> None:
        super().__init__()
        self._forwarder = forwarder
        self._deliveries = forwarder.deliveries

    def startup(self) -> None:
        """Called when modules are imported, before the worker listens."""
        self._forwarder.route_registered()

    async def pre_execute(self, message: TaskiqMessage) -> TaskiqMessage:
        is_forwarded = HEADER in message.labels
        if is_forwarded:
            # In this loop: blocking functions use it from their threads.
            await self._deliveries.open()
        self._deliveries.processes(message.task_name, message if is_forwarded else None)
        return message

    async def on_error(self, message: TaskiqMessage, result: TaskiqResult[Any], exception: BaseException) -> None:
        delivery = self._deliveries.retryable.pop(message.labels.get(HEADER, ""), None)
        if delivery is None or isinstance(exception, NoResultError):
            return
        if isinstance(result.error, NoResultError):
            # It is retried through a schedule source: as a separate job, once that sends it.
            await self._deliveries.done(delivery, None)
        else:
            await self._deliveries.failed(delivery, exception, is_final=True)

    async def post_execute(self, message: TaskiqMessage, result: TaskiqResult[Any]) -> None:
        self._deliveries.retryable.pop(message.labels.get(HEADER, ""), None)
