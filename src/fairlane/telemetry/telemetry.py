"""What an app reports about itself: events, metrics, traces, and failures of these.

An event handler gets its events one at a time, in the order in which they happened in this process, each at most once,
from a queue of its own, so that it cannot hold up a job, a loop or another handler. A handler that is not async runs in
a thread of its own; an async one runs in the event loop, for at most `HANDLED_WITHIN`. Errors are counted and logged.
If more than `WAITING_AT_MOST` events wait for a handler, new ones are dropped and counted.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import queue
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar, cast
from uuid import UUID

from fairlane.clock import Instant
from fairlane.errors import ConfigurationError
from fairlane.events import Event, JobsEnqueued
from fairlane.job import NewJob
from fairlane.parameters import shown
from fairlane.policy.unique import Conflict
from fairlane.telemetry.metrics import Failures, FleetSource, Metrics

if TYPE_CHECKING:
    from fairlane.telemetry.opentelemetry import Spans

T = TypeVar("T")

Carried = dict[str, str]
"""A span's context as W3C text: `traceparent`, and `tracestate` if there is one."""

OPENTELEMETRY = "fairlane.telemetry.opentelemetry"
"""The module that imports OpenTelemetry, which a plain installation lacks: loaded once a program has set up an SDK."""


def provider_of(signal: str, kind: str) -> Any | None:
    """The provider that the program has set up for `trace` or `metrics`; `None` if it has none."""
    module = sys.modules.get(f"opentelemetry.{signal}")
    if module is None:
        return None
    provider = getattr(module, f"get_{kind}_provider")()
    # The API's own stand-ins for one that nobody has set up.
    return None if type(provider).__module__.startswith(f"opentelemetry.{signal}") else provider


log = logging.getLogger("fairlane.telemetry")


WAITING_AT_MOST = 10_000
HANDLED_WITHIN = 10.0
"""Seconds that an async handler may take for one event."""
FLUSHED_WITHIN = 5.0
"""Seconds that closing waits for handlers that still have events."""

Handler = Callable[[Any], object]
"""Takes an event; may be async."""


class Hooks:
    """The handlers of an app."""

    def __init__(self, failures: Failures) -> None:
        self._failures = failures
        self._all: list[_Listener] = []
        self._by_kind: dict[type[Event], Sequence[_Listener]] = {}

    def __bool__(self) -> bool:
        return bool(self._all)

    def add(self, handler: Handler, kinds: Sequence[object]) -> None:
        """Call this handler for these kinds of events and their subclasses; for all events if none is given."""
        heard = tuple(kind for kind in kinds if inspect.isclass(kind) and issubclass(kind, Event))
        if len(heard) < len(kinds):
            raise ConfigurationError(f"on_event: not all of {shown(kinds)} are kinds of events; see fairlane.events")
        if not callable(handler):
            raise ConfigurationError(f"on_event: {shown(handler)} cannot be called; give a function of an event")
        is_async = inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(
            getattr(handler, "__call__", None)  # noqa: B004 - an object with an async __call__ is a handler too
        )
        kind_of = _InLoop if is_async else _InThread
        self._all.append(kind_of(handler, heard or (Event,), self._failures))
        self._by_kind.clear()

    def wants(self, kind: type[Event]) -> bool:
        """Whether any handler wants it; if not, it need not be made."""
        return bool(self._all) and bool(self._listeners(kind))

    def emit(self, event: Event) -> None:
        """Hand an event to the handlers that want it. Never waits, never raises."""
        for listener in self._listeners(type(event)):
            listener.put(event)

    async def flush(self) -> None:
        """Wait until every event has been handled, within reason."""
        await asyncio.gather(*(listener.flush() for listener in self._all))

    def _listeners(self, kind: type[Event]) -> Sequence[_Listener]:
        found = self._by_kind.get(kind)
        if found is None:
            found = self._by_kind[kind] = [each for each in self._all if issubclass(kind, each.kinds)]
        return found


class _Listener(ABC):
    """One handler, and the events that wait for it."""

    def __init__(self, handler: Handler, kinds: tuple[type[Event], ...], failures: Failures) -> None:
        self.kinds = kinds
        self._handler = handler
        self._name = getattr(handler, "__qualname__", None) or repr(handler)
        self._failures = failures

    @abstractmethod
    def put(self, event: Event) -> None: ...

    @abstractmethod
    async def flush(self) -> None: ...

    def _dropped(self) -> None:
        self._failures.note("dropped", f"the event handler {self._name} is too slow, events are dropped")

    def _failed(self, error: BaseException) -> None:
        self._failures.note("handler", f"the event handler {self._name} failed", error)


class _InThread(_Listener):
    _thread: threading.Thread | None = None
    _waiting: queue.Queue[Callable[[], object]]

    def put(self, event: Event) -> None:
        # A thread that is not alive belongs to the process that we were forked from.
        if self._thread is None or not self._thread.is_alive():
            self._waiting = queue.Queue(WAITING_AT_MOST)
            self._thread = threading.Thread(target=self._run, name=f"fairlane-events-{self._name}", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait(partial(self._handler, event))
        except queue.Full:
            self._dropped()

    def _run(self) -> None:
        while True:
            try:
                self._waiting.get()()
            except BaseException as error:  # a handler that exits has failed, like any other
                self._failed(error)

    async def flush(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            return
        loop, reached = asyncio.get_running_loop(), asyncio.Event()
        try:
            async with asyncio.timeout(FLUSHED_WITHIN):
                self._waiting.put_nowait(partial(loop.call_soon_threadsafe, reached.set))
                await reached.wait()
        except (TimeoutError, queue.Full):
            self._dropped()


class _InLoop(_Listener):
    _task: asyncio.Task[None] | None = None
    _waiting: asyncio.Queue[Event]

    @property
    def _is_running(self) -> bool:
        """Whether its task takes events, in the event loop that runs here."""
        return self._task is not None and not self._task.done() and self._task.get_loop() is asyncio.get_running_loop()

    def put(self, event: Event) -> None:
        if not self._is_running:
            self._waiting = asyncio.Queue(WAITING_AT_MOST)
            # In a context of its own: it was not the job of this moment that asked for all of them.
            self._task = asyncio.get_running_loop().create_task(
                self._run(self._waiting), name=f"fairlane-events-{self._name}", context=contextvars.Context()
            )
        try:
            self._waiting.put_nowait(event)
        except asyncio.QueueFull:
            self._dropped()

    async def _run(self, waiting: asyncio.Queue[Event]) -> None:
        task = asyncio.current_task()
        while True:
            event = await waiting.get()
            try:
                async with asyncio.timeout(HANDLED_WITHIN):
                    await cast(Awaitable[object], self._handler(event))
            except BaseException as error:
                self._failed(error)
                # A handler may cancel itself, but this task may also have been cancelled.
                if isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling() > 0):
                    raise
            finally:
                waiting.task_done()

    async def flush(self) -> None:
        if self._task is None or not self._is_running:
            return
        try:
            async with asyncio.timeout(FLUSHED_WITHIN):
                await self._waiting.join()
        except TimeoutError:
            self._dropped()
        self._task.cancel()


class Telemetry:
    """One for each app."""

    def __init__(self, fleet: FleetSource | None = None) -> None:
        self.failures = Failures()
        self.hooks = Hooks(self.failures)
        self._tracer_provider: Any = None
        self._spans: Spans | None = None
        self.metrics: Metrics | None = None
        """`None` as long as nobody reads them."""
        self.fleet = fleet
        """Reads what the database says about the whole fleet."""
        self._exported_to: Any = None

    def on_event(self, *given: Any) -> Any:
        """Use it as a decorator, bare or with kinds of events, or call it with a handler."""
        if len(given) == 1 and not inspect.isclass(given[0]):
            return self._added(given[0], ())
        return lambda handler: self._added(handler, given)

    def _added(self, handler: Handler, kinds: Sequence[object]) -> Handler:
        self.hooks.add(handler, kinds)
        return handler

    def spans(self) -> Spans | None:
        """Makes spans; `None` while no SDK is set up."""
        if (module := sys.modules.get("opentelemetry.trace")) is None:
            return None
        provider = module.get_tracer_provider()
        if provider is not self._tracer_provider:
            self._tracer_provider, self._spans = provider, None
            if provider_of("trace", "tracer") is not None:
                self._spans = import_module(OPENTELEMETRY).Spans(provider, self.failures)
        return self._spans

    def carried(self) -> Carried | None:
        """The context of the current span, to travel with a job."""
        spans = self.spans()
        return None if spans is None else spans.carried()

    def measured(self, *, wanted: bool = False) -> Metrics | None:
        """The metrics, if they are wanted here or by an OpenTelemetry SDK that the program has set up."""
        provider = provider_of("metrics", "meter")
        if self.metrics is None and (wanted or provider is not None):
            self.metrics = Metrics(self.failures)
        if self.metrics is not None and provider is not None and provider is not self._exported_to:
            self._exported_to = provider
            import_module(OPENTELEMETRY).export(self.metrics, provider)
        return self.metrics

    @property
    def is_exported(self) -> bool:
        """Whether the metrics are exported to OpenTelemetry."""
        return self._exported_to is not None

    def enqueued(self, jobs: Sequence[NewJob], conflicts: Mapping[UUID, Conflict], now: Callable[[], Instant]) -> None:
        """Report jobs that were stored, except for those that met another under their unique key."""
        is_heard = self.hooks.wants(JobsEnqueued)
        if self.metrics is None and not is_heard:
            return
        groups: dict[tuple[str, str], list[UUID]] = {}
        for job in jobs:
            conflict = conflicts.get(job.id) if conflicts else None
            if conflict is None or conflict.outcome.is_stored:
                groups.setdefault((job.queue, job.task), []).append(job.id)
        for (name, task), ids in groups.items():
            if self.metrics is not None:
                self.metrics.add("fairlane_jobs_enqueued_total", (name, task), len(ids))
            if is_heard:
                self.hooks.emit(JobsEnqueued(at=now(), queue=name, task=task, jobs=tuple(ids)))
