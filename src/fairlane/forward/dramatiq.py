"""Dramatiq runs what Fairlane admits.

A middleware records which message a thread of the worker processes. The function of an actor is wrapped: it adopts the
job of that message, runs, and settles it. What Dramatiq must neither retry nor dead-letter ends as `SkipMessage`.

`broker.enqueue`, which `send`, pipelines, groups and retries all go through, stores routed messages as jobs, with their
options. They are published unchanged.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from fairlane.errors import ConfigurationError, Dead, Retry, Signal
from fairlane.forward.delivery import HEADER, Delivery
from fairlane.forward.forwarder import Forwarded, Forwarder, Message, runs_with, written
from fairlane.task import MOST_ATTEMPTS

try:
    import dramatiq
    from dramatiq.middleware import Middleware, Retries, SkipMessage
    from dramatiq.results import Results
except ImportError:
    raise ConfigurationError("Dramatiq is not installed; run `pip install 'fairlane[dramatiq]'`") from None

if TYPE_CHECKING:
    from fairlane.app import App

__all__ = ["DramatiqForwarder"]

log = logging.getLogger("fairlane.forward")

M = TypeVar("M", bound=Middleware)

HIGHEST_PRIORITY = 100
OF_RETRIES = {"max_backoff", "max_retries", "min_backoff", "on_failure", "on_retry_exhausted", "retry_when", "throws"}
"""Options of a message that have no effect if the policy decides on retries."""


class DramatiqForwarder(Forwarder):
    """Lets Dramatiq's workers run the jobs of an app. Create it in the module that they import."""

    engine = "Dramatiq"
    task_type = dramatiq.Actor
    declared_with = "@dramatiq.actor"

    def __init__(self, app: App, broker: dramatiq.Broker, **options: Any) -> None:
        super().__init__(app, **options)
        if not isinstance(broker, dramatiq.Broker):
            raise ConfigurationError(f"DramatiqForwarder is given {broker!r} where a broker of Dramatiq belongs")
        self.broker = broker
        # The first in the list is the last to be called after a message: by then Dramatiq has decided on a retry.
        broker.middleware.insert(0, _Watch(self))
        self._has_warned = False
        self._publish = broker.enqueue
        broker.enqueue = self._enqueue  # type: ignore[method-assign]

    # What Dramatiq says.

    def name_of(self, target: Any) -> str:
        return str(target.actor_name)

    def function_of(self, target: Any) -> Callable[..., Any]:
        # Dramatiq wraps async functions in blocking ones.
        function: Callable[..., Any] = getattr(target.fn, "__wrapped__", target.fn)
        return function

    def runs_of(self, target: Any, options: Mapping[str, Any]) -> int:
        retries = self._middleware(Retries)
        if retries is None:
            return 1
        if target.options.get("retry_when", retries.retry_when) is not None:
            return MOST_ATTEMPTS  # it decides each time, and the number does not count
        return runs_with(options.get("max_retries", target.options.get("max_retries", retries.max_retries)))

    def _middleware(self, kind: type[M]) -> M | None:
        return next((each for each in self.broker.middleware if isinstance(each, kind)), None)

    def targets(self) -> Mapping[str, Any]:
        return self.broker.actors

    def install(self, forwarded: Forwarded) -> None:
        # Its workers consume the queues that exist when they start.
        if (queue := self._queues.get(forwarded.task.queue)) is not None:
            self.broker.declare_queue(queue)
        forwarded.target.fn = self._adopting(forwarded, forwarded.target.fn)

    def publish_blocking(self, message: Message) -> None:
        self._warn_of_unconfirmed_messages()
        own = {} if message.own is None else json.loads(message.own)
        options = {**own.get("options", {}), **message.carried}
        if message.retries:
            options["retries"] = options.get("retries", 0) + message.retries
        most: int | None = getattr(self.broker, "max_priority", None)
        if most is not None and message.priority:
            # From 0 to the maximum of the broker: RabbitMQ has nothing below none.
            options["broker_priority"] = max(0, -(-message.priority * most // HIGHEST_PRIORITY))
        self._publish(
            dramatiq.Message(
                queue_name=message.queue or own.get("queue") or message.target.queue_name,
                actor_name=message.target.actor_name,
                args=tuple(message.args),
                kwargs=dict(message.kwargs),
                options=options,
                message_id=own.get("id") or str(message.id),
            )
        )

    def reach_blocking(self) -> None:
        if (client := getattr(self.broker, "client", None)) is not None:  # Redis
            client.ping()
        elif (parameters := getattr(self.broker, "parameters", None)) is not None:  # RabbitMQ
            import pika

            pika.BlockingConnection(parameters).close()

    def _warn_of_unconfirmed_messages(self) -> None:
        if not self._has_warned and getattr(self.broker, "confirm_delivery", True) is False:
            log.warning(
                "RabbitmqBroker was made without confirm_delivery=True: a message that RabbitMQ never got is noticed "
                "only when it was not delivered for %s (republish_after)",
                self.republish_after,
            )
        self._has_warned = True

    # The worker's side.

    def _adopting(self, forwarded: Forwarded, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            message = self.deliveries.take(forwarded.target.actor_name)
            if message is None:  # called by hand, or sent past Fairlane
                return function(*args, **kwargs)
            delivery = self._begun(message)
            try:
                with delivery.entered():
                    value = function(*delivery.args, **delivery.kwargs)
            except BaseException as error:
                if forwarded.retries == "engine" and not isinstance(error, Signal):
                    # Whether Dramatiq tries again it says later, to the middleware.
                    self.deliveries.retryable[message.options[HEADER]] = delivery
                    raise
                if isinstance(error, dramatiq.errors.Retry):
                    delay = None if error.delay is None else timedelta(milliseconds=error.delay)
                    error = Retry(delay, reason=str(error))
                throws = message.options.get("throws") or forwarded.target.options.get("throws") or ()
                self.deliveries.failed_sync(delivery, error, is_final=isinstance(error, throws))
                raise _skipped(message, "it failed, and Fairlane says how it goes on") from None
            self.deliveries.done_sync(delivery, value)
            return self._returned(message, value)

        return run

    def _begun(self, message: Any) -> Delivery:
        try:
            delivery = self.deliveries.begin_sync(message.options[HEADER], self.names[message.actor_name])
        except Exception:
            # The claim stays with the dispatcher, which publishes another message.
            log.exception("message %s: its job could not be adopted; it is skipped", message.message_id)
            raise _skipped(message, "its job could not be adopted") from None
        if delivery is None:
            raise _skipped(message, "its token is stale")
        return delivery

    def set_aside(self, message: Any) -> None:
        """Record that Dramatiq will not run it; otherwise it would be published again, in vain."""
        with contextlib.suppress(SkipMessage):
            self.deliveries.failed_sync(self._begun(message), Dead("Dramatiq has set its message aside unread"))

    def _returned(self, message: Any, value: Any) -> Any:
        """What to return to Dramatiq, which warns about every value that it has no use for."""
        actor = self.broker.get_actor(message.actor_name)
        results = self._middleware(Results)
        by_default = results is not None and actor.options.get("store_results", results.store_results)
        has_use = "pipe_target" in message.options or message.options.get("store_results", by_default)
        return value if has_use else None

    # Existing calls.

    def _enqueue(self, message: Any, *, delay: int | None = None) -> Any:
        """`broker.enqueue`, which every message goes through; routed messages are stored by Fairlane."""
        token = message.options.get(HEADER, "")
        if (delivery := self.deliveries.retryable.pop(token, None)) is not None:
            # The last line of the traceback that Dramatiq keeps with a message that it retries.
            lines = (message.options.get("traceback") or "retried by Dramatiq").strip().splitlines()
            self.deliveries.retried_sync(delivery, lines[-1], timedelta(milliseconds=delay or 0))
            return message
        if (task := self.routed(message.actor_name, is_copy=bool(token))) is None:
            return self._publish(message, delay=delay)
        options = {name: value for name, value in message.options.items() if name != HEADER}
        self.forwarded[task.name].refuse(options.keys() & OF_RETRIES)
        using: dict[str, Any] = {} if delay is None else {"delay": timedelta(milliseconds=delay)}
        if (priority := options.pop("broker_priority", None)) is not None:
            most = getattr(self.broker, "max_priority", None) or HIGHEST_PRIORITY
            using["priority"] = min(HIGHEST_PRIORITY, priority * HIGHEST_PRIORITY // most)
        id = message.message_id
        own = written(task.name, {"options": options, "id": id, "queue": message.queue_name}, options)
        job = self.enqueue_routed_blocking(
            task, message.args, message.kwargs, id=id, own=own, using=using, options=options
        )
        if (queue := self._queues.get(task.queue)) is not None:
            message = message.copy(queue_name=queue)  # its result is looked up under this
        # There may already be a job with the same unique key.
        return message.copy(message_id=str(job.id)) if task.options.unique is not None else message


def _skipped(message: Any, why: str) -> SkipMessage:
    # Dramatiq would store the result `None` for a skipped message, over the real one.
    message.options["store_results"] = False
    return SkipMessage(why)


class _Watch(Middleware):
    """Records which message each thread processes, and whether Dramatiq retries it."""

    def __init__(self, forwarder: DramatiqForwarder) -> None:
        self._forwarder = forwarder
        self._deliveries = forwarder.deliveries

    def before_worker_boot(self, broker: Any, worker: Any) -> None:
        """Called when modules are imported, before the worker consumes anything."""
        self._forwarder.route_registered()

    def before_process_message(self, broker: Any, message: Any) -> None:
        is_forwarded = HEADER in message.options
        self._deliveries.processes(message.actor_name, message if is_forwarded else None)
        if is_forwarded:
            self._forwarder.routed(message.actor_name)  # it may have been declared after the worker had started

    def after_process_message(
        self, broker: Any, message: Any, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        self._deliveries.take()
        delivery = self._deliveries.retryable.pop(message.options.get(HEADER, ""), None)
        if delivery is not None and exception is not None:
            # Dramatiq has given up, and dead-letters the message.
            self._deliveries.failed_sync(delivery, exception, is_final=True)

    def after_skip_message(self, broker: Any, message: Any) -> None:
        if self._deliveries.take() is not None and message.failed:
            # It never reached its actor, and Dramatiq has dead-lettered it: it may have been too old.
            self._forwarder.set_aside(message)
