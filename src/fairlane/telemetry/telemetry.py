"""What an app tells of itself: its event handlers, its metrics, its traces, and what went wrong with them."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, cast
from uuid import UUID

from fairlane.clock import Instant
from fairlane.errors import ConfigurationError
from fairlane.events import Event, JobsEnqueued
from fairlane.job import NewJob
from fairlane.parameters import shown
from fairlane.policy.unique import Conflict
from fairlane.telemetry.fleet import FleetSource
from fairlane.telemetry.metrics import Failures, Metrics
from fairlane.telemetry.opentelemetry import export
from fairlane.telemetry.tracing import Tracing, provider_of

log = logging.getLogger("fairlane.telemetry")


WAITING_AT_MOST = 10_000
HANDLED_WITHIN = 10.0
"""Seconds for which an async handler may take over one event."""
FLUSHED_WITHIN = 5.0
"""Seconds for which closing waits for handlers that have events waiting."""

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
        """Let it hear of these kinds of events, and of those that belong to them; of all, if none is named."""
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
        """Whether anybody listens to it: else it need not be made."""
        return bool(self._all) and bool(self._listeners(kind))

    def emit(self, event: Event) -> None:
        """Hand an event to those who want it. Never waits, never raises."""
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
    """One handler, and what waits for it."""

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
    def __init__(self, handler: Handler, kinds: tuple[type[Event], ...], failures: Failures) -> None:
        super().__init__(handler, kinds, failures)
        self._waiting: queue.Queue[Event | Callable[[], object]] = queue.Queue(WAITING_AT_MOST)
        self._thread: threading.Thread | None = None

    def put(self, event: Event) -> None:
        # A thread that is not alive belongs to the process that we were forked from.
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name=f"fairlane-events-{self._name}", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait(event)
        except queue.Full:
            self._dropped()

    def _run(self) -> None:
        while True:
            event = self._waiting.get()
            try:
                if isinstance(event, Event):
                    self._handler(event)
                else:
                    event()
            except BaseException as error:  # a handler that exits has failed, like any other
                self._failed(error)

    async def flush(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            return
        loop, reached = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            loop.call_soon_threadsafe(reached.set)

        try:
            async with asyncio.timeout(FLUSHED_WITHIN):
                self._waiting.put_nowait(tell)
                await reached.wait()
        except (TimeoutError, queue.Full):
            self._dropped()


class _InLoop(_Listener):
    def __init__(self, handler: Handler, kinds: tuple[type[Event], ...], failures: Failures) -> None:
        super().__init__(handler, kinds, failures)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: asyncio.Queue[Event] = asyncio.Queue(WAITING_AT_MOST)
        self._task: asyncio.Task[None] | None = None

    def put(self, event: Event) -> None:
        loop = asyncio.get_running_loop()
        if self._task is None or self._task.done() or self._loop is not loop:
            self._loop = loop
            self._waiting = asyncio.Queue(WAITING_AT_MOST)
            # In a context of its own: it was not the job of this moment that asked for all of them.
            self._task = loop.create_task(
                self._run(self._waiting), name=f"fairlane-events-{self._name}", context=contextvars.Context()
            )
        try:
            self._waiting.put_nowait(event)
        except asyncio.QueueFull:
            self._dropped()

    async def _run(self, waiting: asyncio.Queue[Event]) -> None:
        while True:
            event = await waiting.get()
            try:
                async with asyncio.timeout(HANDLED_WITHIN):
                    await cast(Awaitable[object], self._handler(event))
            except BaseException as error:
                self._failed(error)
                if isinstance(error, asyncio.CancelledError) and self._is_over():
                    raise
            finally:
                waiting.task_done()

    def _is_over(self) -> bool:
        """Whether it was not the handler that was cancelled, or cancelled itself, but whoever calls it."""
        task = asyncio.current_task()
        return task is None or task.cancelling() > 0

    async def flush(self) -> None:
        task = self._task
        if task is None or task.done() or self._loop is not asyncio.get_running_loop():
            return
        try:
            async with asyncio.timeout(FLUSHED_WITHIN):
                await self._waiting.join()
        except TimeoutError:
            self._dropped()
        self._task = None
        task.cancel()


class Telemetry:
    """One for each app."""

    def __init__(self, fleet: FleetSource | None = None) -> None:
        self.failures = Failures()
        self.hooks = Hooks(self.failures)
        self.tracing = Tracing(self.failures)
        self.metrics: Metrics | None = None
        """`None` while nobody reads them."""
        self.fleet = fleet
        """What the database tells of the whole fleet."""
        self._exported_to: Any = None

    def on_event(self, *given: Any) -> Any:
        """As a decorator, bare or with kinds of events, or as a call with a handler."""
        if len(given) == 1 and not inspect.isclass(given[0]):
            return self._added(given[0], ())
        return lambda handler: self._added(handler, given)

    def _added(self, handler: Handler, kinds: Sequence[object]) -> Handler:
        self.hooks.add(handler, kinds)
        return handler

    def measured(self, *, wanted: bool = False) -> Metrics | None:
        """The metrics, if they are wanted here, or by an OpenTelemetry SDK that the program has set up."""
        provider = provider_of("metrics", "meter")
        if self.metrics is None and (wanted or provider is not None):
            self.metrics = Metrics(self.failures)
        if self.metrics is not None and provider is not None and provider is not self._exported_to:
            self._exported_to = provider
            export(self.metrics, provider)
        return self.metrics

    @property
    def is_exported(self) -> bool:
        """Whether OpenTelemetry has the metrics."""
        return self._exported_to is not None

    @property
    def is_watched(self) -> bool:
        """Whether anybody wants to know what a worker does."""
        return bool(self.hooks) or self.metrics is not None or self.tracing.tracer() is not None

    def enqueued(self, jobs: Sequence[NewJob], conflicts: Mapping[UUID, Conflict], now: Callable[[], Instant]) -> None:
        """Tell of jobs that were stored, but for those that met another in their place."""
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
                self.metrics.enqueued.add((name, task), len(ids))
            if is_heard:
                self.hooks.emit(JobsEnqueued(at=now(), queue=name, task=task, jobs=tuple(ids)))
