"""Routes: what programs ask of an engine's own API becomes jobs of Fairlane's, task by task or by patterns of names.

An engine's forwarder says which tasks it knows (`targets`), and asks `routed` of every message that it is to send.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, TypeVar
from uuid import UUID

import msgspec

from fairlane.app import App
from fairlane.codec import Codec
from fairlane.errors import ConfigurationError, DuplicateJob, InvalidJob
from fairlane.forward.forwarder import Forwarder
from fairlane.forward.messages import engines_own
from fairlane.task import Call, Job, Task

__all__ = ["RoutedCall", "RoutedCodec", "RoutingForwarder", "as_uuid", "unwritable"]

log = logging.getLogger("fairlane.forward")

T = TypeVar("T")


class RoutedCall(msgspec.Struct, frozen=True):
    """A call of the engine's own API that goes through Fairlane."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    using: Mapping[str, Any]
    """When it may run, and how urgent it is, as `task.using` takes it."""
    id: str
    """That of the engine's message."""
    own: str
    """The message, as the engine wrote it, without its arguments."""
    options: Mapping[str, Any] = {}
    """Those of the call, or the labels, by the engine's names."""


class RoutedCodec(Codec):
    """A routed call's arguments are what the engine would give: annotations say something to people, not to it. A
    result that has no JSON form is left to the engine's own backend."""

    def decode_call(self, payload: bytes) -> tuple[Sequence[Any], dict[str, Any]]:
        return self.plain_call(payload)

    def encode_result(self, value: Any, max_bytes: int) -> bytes | None:
        try:
            return super().encode_result(value, max_bytes)
        except InvalidJob as error:
            log.debug("%s; it is left to the engine's result backend", error)
            return None


@dataclass(slots=True)
class _Route:
    """What `route_all` was told."""

    queue: str
    pattern: str
    options: Mapping[str, Any]
    has_fitted: bool = False


class RoutingForwarder(Forwarder):
    """A forwarder through which an engine's own calls go too.

    `routes={"shop.*": "shop", "*": "default"}` routes every task whose name fits a pattern to a queue of Fairlane's,
    whenever it is registered; the first that fits counts. `imports` are the modules with tasks that a dispatcher
    imports, if the module of the forwarder does not.
    """

    routed_codec: type[RoutedCodec] = RoutedCodec

    def __init__(
        self, app: App, *, routes: Mapping[str, str] | None = None, imports: Iterable[str] = (), **options: Any
    ) -> None:
        super().__init__(app, **options)
        self._imports = [imports] if isinstance(imports, str) else list(imports)
        self._routed: dict[str, Task[..., Any]] = {}
        """By the name of the engine's task: what its own calls become."""
        self._patterns: list[_Route] = []
        # Calls come from many threads, and the first of them routes its task.
        self._routing = threading.RLock()
        for pattern, queue in (routes or {}).items():
            self.route_all(queue, pattern)

    # What an engine says.

    @abstractmethod
    def targets(self) -> Mapping[str, Any]:
        """The engine's own tasks that are known by now, by their names."""

    def is_built_in(self, name: str) -> bool:
        """Whether it is a task that the engine brings along, which patterns leave alone."""
        return False

    def stand_in(self, name: str) -> Any | None:
        """A task for one that is sent by its name where nothing else of it is known; `None`: it is sent as ever."""
        return None

    # What programs declare.

    def route(self, *, queue: str, **options: Any) -> Callable[[T], T]:
        """Send the engine's own calls of a task through Fairlane: put this above it. The options are those of
        `task`."""

        def routed(target: T) -> T:
            self._route(target, queue, options)
            return target

        return routed

    def route_all(self, queue: str, pattern: str = "*", **options: Any) -> None:
        """Route every task whose name fits a pattern, such as `shop.tasks.*`, whether it is registered by now or comes
        later. The options are those of `task`; a pattern that was given earlier goes first, and a task that was
        declared with `task` or `route` keeps to that."""
        self._patterns.append(_Route(queue, pattern, options))
        self.app.forwarded.add(queue)

    def route_registered(self) -> None:
        """Route what fits a pattern and is registered by now."""
        if self._patterns:
            for name in list(self.targets()):
                self.routed(name)

    def routed(self, name: str) -> Task[..., Any] | None:
        """The Fairlane task that a task of the engine is routed to, if it is."""
        if name in self._routed or not self._patterns:
            return self._routed.get(name)
        with self._routing:
            return self._route_by_pattern(name)

    def task_of(self, target: Any) -> Task[..., Any]:
        self.check(target)
        self.routed(self.name_of(target))
        return super().task_of(target)

    def _route(self, target: Any, queue: str, options: Mapping[str, Any]) -> Task[..., Any]:
        task = self.task(target, queue=queue, **options)
        task.codec = self.routed_codec(task.name, task.function, None, self.app.codec)
        self._routed[self.name_of(target)] = task
        return task

    def _route_by_pattern(self, name: str) -> Task[..., Any] | None:
        if name in self._routed or name in self.names or self.is_built_in(name):
            return self._routed.get(name)
        found = next((each for each in self._patterns if fnmatchcase(name, each.pattern)), None)
        target = None if found is None else self.targets().get(name) or self.stand_in(name)
        if found is None or target is None:
            return None
        found.has_fitted = True
        return self._route(target, found.queue, found.options)

    # What the dispatcher asks.

    def prepare(self) -> None:
        """Make every task known that is routed, and refuse a pattern that fits none."""
        for module in self._imports:
            importlib.import_module(module)
        self.route_registered()
        for route in self._patterns:
            if not route.has_fitted:
                known = ", ".join(sorted(name for name in self.targets() if not self.is_built_in(name))) or "none"
                raise ConfigurationError(
                    f"no task of {self.engine} fits {route.pattern!r}; its tasks are: {known}. Correct the pattern, or "
                    f"name the modules of more tasks: {type(self).__name__}(…, imports=['shop.tasks'])"
                )

    # What the engine's own API was given: stored with the message that the engine wrote for it.

    def enqueue_routed_blocking(self, task: Task[..., Any], routed: RoutedCall) -> Job[Any]:
        """As `enqueue_routed`. It blocks in an event loop too, as the engine's own call blocks there to publish."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return self.app.run_blocking(self.enqueue_routed(task, routed))
        if self.app.is_open_in(loop):
            raise ConfigurationError(
                f"task {task.name!r} is routed through Fairlane, and the App was opened in this event loop, which the "
                f"call would block; await forwarder.task_of(…).enqueue(…) instead"
            )
        with ThreadPoolExecutor(1) as elsewhere:
            return elsewhere.submit(lambda: self.app.run_blocking(self.enqueue_routed(task, routed))).result()

    async def enqueue_routed(self, task: Task[..., Any], routed: RoutedCall) -> Job[Any]:
        """Store a routed call. Its job has the id of the engine's message, where that is a UUID that no job has yet:
        engines send one id more than once."""
        using, forwarded = dict(routed.using), self.forwarded[task.name]
        if forwarded.retries == "engine" and not forwarded.is_bounded:
            using["max_attempts"] = self.runs_of(forwarded.target, routed.options)
        call = task.using(**using).call(*routed.args, **routed.kwargs)
        context = {**(call.options.context or {}), **engines_own(routed.own)}
        call = Call(call.task, call.args, call.kwargs, replace(call.options, context=context, id=as_uuid(routed.id)))
        try:
            return await self.app.enqueue_one(call)
        except DuplicateJob:
            call = Call(call.task, call.args, call.kwargs, replace(call.options, id=None))
            return await self.app.enqueue_one(call)


def as_uuid(text: str) -> UUID | None:
    """The UUID that is written so; an id of another form is the engine's own, and its job has another."""
    try:
        return UUID(text)
    except ValueError:
        return None


def unwritable(task: str, given: Mapping[str, Any], write: Callable[[Any], object], error: Exception) -> InvalidJob:
    """The message of a routed call cannot be stored; which of its options is to blame."""
    for name, value in given.items():
        try:
            write(value)
        except (TypeError, ValueError):
            return InvalidJob(
                f"task {task!r}: {name}={value!r} has no JSON form, and cannot be stored with the job; give plain "
                f"values, or leave it out"
            )
    return InvalidJob(f"task {task!r}: the engine's message for it cannot be stored as JSON: {error}")
