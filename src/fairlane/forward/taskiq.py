"""Taskiq runs what Fairlane admits.

A middleware notes which message the current asyncio task is at; the task's function is wrapped, so that it adopts the
job of that message, runs, and settles it. A message that is skipped ends as `NoResultError`: nothing is stored for it.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID

from fairlane.declaring import is_async
from fairlane.errors import ConfigurationError, InvalidJob, Signal
from fairlane.forward.delivering import Delivery
from fairlane.forward.forwarder import Forwarded, Forwarder, answering, not_a_task
from fairlane.forward.messages import Message
from fairlane.forward.tokens import HEADER
from fairlane.worker.outcomes import Stop

try:
    import anyio
    from taskiq import AsyncBroker, AsyncTaskiqDecoratedTask, TaskiqMessage, TaskiqMiddleware, TaskiqResult
    from taskiq.exceptions import NoResultError, SendTaskError
    from taskiq.kicker import AsyncKicker
    from taskiq.task import AsyncTaskiqTask
except ImportError:
    raise ConfigurationError("Taskiq is not installed; run `pip install 'fairlane[taskiq]'`") from None

if TYPE_CHECKING:
    from fairlane.app import App
    from fairlane.task import Task

__all__ = ["TaskiqForwarder"]

log = logging.getLogger("fairlane.forward")

OF_RETRIES = {"max_retries", "retry_on_error"}
"""Labels of a message that mean nothing where the policy decides."""
T = TypeVar("T", bound="AsyncTaskiqDecoratedTask[..., Any]")


class TaskiqForwarder(Forwarder):
    """Has Taskiq's workers run the jobs of an app. Create it in the module that they import.

    A broker of Taskiq is a queue: without `queues=` all messages go where the broker sends what has no label.
    """

    engine = "Taskiq"

    def __init__(self, app: App, broker: AsyncBroker, **options: Any) -> None:
        super().__init__(app, **options)
        if not isinstance(broker, AsyncBroker):
            raise ConfigurationError(f"TaskiqForwarder is given {broker!r} where a broker of Taskiq belongs")
        self.broker = broker
        self._watch = _Watch(self)
        self._watch.set_broker(broker)
        # First in the list is last to hear of an error: by then Taskiq has decided whether it retries.
        broker.middlewares.insert(0, self._watch)
        self._starting = asyncio.Lock()
        self._has_started = False

    # What Taskiq says.

    def check(self, target: Any) -> None:
        if not isinstance(target, AsyncTaskiqDecoratedTask):
            raise not_a_task("Taskiq", target, "declare it with @broker.task, below @forwarder.route(…) if it has that")

    def name_of(self, target: Any) -> str:
        name: str = target.task_name
        return name

    def function_of(self, target: Any) -> Callable[..., Any]:
        function: Callable[..., Any] = target.original_func
        return function

    def install(self, forwarded: Forwarded) -> None:
        function = forwarded.target.original_func
        wrap = self._adopting if is_async(function) else self._adopting_in_a_thread
        forwarded.target.original_func = wrap(forwarded, function)

    async def publish(self, message: Message) -> None:
        await self._start()
        self._check_connection()
        labels = {**message.target.labels, **message.carried}
        if message.queue in self._queues.values():
            labels["queue_name"] = message.queue
        if message.priority:
            labels["priority"] = max(0, message.priority)
        kicker: AsyncKicker[..., Any] = AsyncKicker(message.target.task_name, self.broker, labels)
        try:
            async with answering():
                await kicker.with_task_id(str(message.id)).kiq(*message.args, **message.kwargs)
        except SendTaskError as error:
            raise (error.__cause__ or error) from None  # what the broker said

    async def reach(self) -> None:
        await self._start()
        self._check_connection()
        if (pool := getattr(self.broker, "connection_pool", None)) is not None:  # Redis, whose start connects nowhere
            from redis.asyncio import Redis

            async with answering(), Redis(connection_pool=pool) as client:
                await client.ping()

    def _check_connection(self) -> None:
        """RabbitMQ's client connects again by itself, and would have us wait for it."""
        connection = getattr(self.broker, "write_conn", None)
        if connection is not None and not connection.connected.is_set():
            raise ConnectionError(f"{connection} is lost")

    async def _start(self) -> None:
        """Start the broker as a client, where it has not been."""
        async with self._starting:
            if not self._has_started:
                await self.broker.startup()
                self._has_started = True

    async def close(self) -> None:
        await super().close()
        if self._has_started:
            self._has_started = False
            await self.broker.shutdown()

    # The worker's side.

    def _adopting(self, forwarded: Forwarded, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        async def run(*args: Any, **kwargs: Any) -> Any:
            message = self._watch.take(forwarded.target.task_name)
            if message is None:  # called by hand, or sent past Fairlane
                return await function(*args, **kwargs)
            tasks = self.names[message.task_name]
            delivery = _ours(await self.deliveries.begin(message.labels[HEADER], tasks, cancellable=True))
            self._prepare(forwarded, message, delivery)
            try:
                with delivery.entered():
                    value = await function(*delivery.args, **{**kwargs, **delivery.kwargs})
            except BaseException as error:
                # Taskiq's time limit cancels whatever is awaited from now on.
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
            message = self._watch.take(forwarded.target.task_name)
            if message is None:
                return function(*args, **kwargs)
            delivery = _ours(self.deliveries.begin_sync(message.labels[HEADER], self.names[message.task_name]))
            self._prepare(forwarded, message, delivery)
            try:
                with delivery.entered():
                    value = function(*delivery.args, **{**kwargs, **delivery.kwargs})
            except BaseException as error:
                raise self.app.run_blocking(self._raised(forwarded, message, delivery, error)) from None
            self.deliveries.done_sync(delivery, value)
            return value

        return run

    def _prepare(self, forwarded: Forwarded, message: TaskiqMessage, delivery: Delivery) -> None:
        if forwarded.retries == "engine":
            # The token that came with the message is used up: a retry carries the one of this delivery.
            message.labels[HEADER] = str(delivery.token)
            self._watch.expect_an_end(message, delivery)
        else:
            message.labels["retry_on_error"] = False

    async def _raised(
        self, forwarded: Forwarded, message: TaskiqMessage, delivery: Delivery, error: BaseException
    ) -> BaseException:
        """Record what was raised, and say what Taskiq is to see."""
        task = asyncio.current_task()
        assert task is not None
        was_cancelled = isinstance(error, asyncio.CancelledError) and task.cancelling() > 0
        if was_cancelled and delivery.stop is not None:
            # We have cancelled it, and nobody else: Taskiq goes on with its next message.
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
        # Under the policy this was one attempt: its end is told by the job, and no result is stored for the message.
        return error if was_cancelled else NoResultError()

    # Existing calls.

    def route(self, **options: Any) -> Callable[[T], T]:
        """Above `@broker.task`: its `kiq()` and `kicker()` go through Fairlane from now on. Takes what `task` takes."""

        def routed(target: T) -> T:
            task = self.task(target, **options)

            def kicker() -> AsyncKicker[..., Any]:
                return _RoutedKicker(self, task, target)

            target.kicker = kicker  # type: ignore[method-assign]
            return target

        return routed


def _ours(delivery: Delivery | None) -> Delivery:
    if delivery is None:
        raise NoResultError
    return delivery


class _Watch(TaskiqMiddleware):
    """Knows which message the current asyncio task is at, and whether Taskiq tries it again."""

    def __init__(self, forwarder: TaskiqForwarder) -> None:
        super().__init__()
        self._forwarder = forwarder
        self._message: contextvars.ContextVar[TaskiqMessage | None] = contextvars.ContextVar("message", default=None)
        self._ending: dict[str, Delivery] = {}
        """What runs here and may be tried again by Taskiq, by its token."""

    def take(self, task: str) -> TaskiqMessage | None:
        """The message that is run here, if it is a forwarded one for that task; once."""
        message = self._message.get()
        self._message.set(None)
        return message if message is not None and message.task_name == task else None

    def expect_an_end(self, message: TaskiqMessage, delivery: Delivery) -> None:
        self._ending[message.labels[HEADER]] = delivery

    async def pre_execute(self, message: TaskiqMessage) -> TaskiqMessage:
        is_forwarded = HEADER in message.labels
        if is_forwarded:
            # In this loop: functions that block reach it from their threads.
            await self._forwarder.deliveries.open()
        self._message.set(message if is_forwarded else None)
        return message

    async def pre_send(self, message: TaskiqMessage) -> TaskiqMessage:
        delivery = self._ending.pop(message.labels.get(HEADER, ""), None)
        if delivery is not None:
            # Before it is sent: whoever adopts it takes the claim from us.
            waits = timedelta(seconds=float(message.labels.get("delay", 0)))
            await self._forwarder.deliveries.handed_on(delivery, waits + self._forwarder.republish_after)
        return message

    async def on_error(self, message: TaskiqMessage, result: TaskiqResult[Any], exception: BaseException) -> None:
        delivery = self._ending.pop(message.labels.get(HEADER, ""), None)
        if delivery is None or isinstance(exception, NoResultError):
            return
        if isinstance(result.error, NoResultError):
            # It is tried again through a schedule source, of which we hear no more than this.
            await self._forwarder.deliveries.handed_on(delivery, self._forwarder.republish_after)
        else:
            await self._forwarder.deliveries.failed(delivery, exception, is_final=True)

    async def post_execute(self, message: TaskiqMessage, result: TaskiqResult[Any]) -> None:
        self._ending.pop(message.labels.get(HEADER, ""), None)


class _RoutedKicker(AsyncKicker[Any, Any]):
    """Sends a call through Fairlane."""

    def __init__(
        self, forwarder: TaskiqForwarder, task: Task[..., Any], target: AsyncTaskiqDecoratedTask[..., Any]
    ) -> None:
        super().__init__(target.task_name, target.broker, dict(target.labels), target.return_type)
        self._task = task
        self._forwarded = forwarder.forwarded[task.name]
        self._own_labels = dict(target.labels)

    async def kiq(self, *args: Any, **kwargs: Any) -> Any:
        if HEADER in self.labels:
            return await super().kiq(*args, **kwargs)
        job = await self._task.using(**self._using()).enqueue(*args, **kwargs)
        return AsyncTaskiqTask(str(job.id), self.broker.result_backend, self.return_type)

    def _using(self) -> dict[str, Any]:
        """What Taskiq's labels are called in Fairlane; what it does not know travels with the message."""
        using: dict[str, Any] = {}
        given = {name: value for name, value in self.labels.items() if self._own_labels.get(name) != value}
        self._forwarded.refuse(given.keys() & OF_RETRIES, "Taskiq")
        if (delay := given.pop("delay", None)) is not None:
            using["delay"] = timedelta(seconds=float(delay))
        if (priority := given.pop("priority", None)) is not None:
            using["priority"] = int(priority)
        if self.custom_task_id is not None:
            using["id"] = _as_uuid(self.task_name, self.custom_task_id)
        if given:
            using["context"] = {"headers": given}
        return using


def _as_uuid(task: str, given: str) -> UUID:
    try:
        return UUID(given)
    except ValueError:
        raise InvalidJob(f"task {task!r} goes through Fairlane, whose ids are UUIDs; {given!r} is none") from None
