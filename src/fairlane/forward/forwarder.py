"""A forwarder: joins an App and an engine's app. Each engine derives its own from this.

An engine's forwarder says how its tasks are named and called (`name_of`, `function_of`), how they are made to adopt
their jobs (`install`), and how a message is published (`publish_blocking`, or `publish` for an async client). One whose
own API is routed through Fairlane as well, task by task or by patterns of names, also says which tasks it knows
(`targets`), and asks `routed` of every message that it is to send.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeVar
from uuid import UUID

import msgspec

from fairlane.app import App
from fairlane.clock import microseconds
from fairlane.codec import Codec
from fairlane.declaration_checks import is_async, key_source
from fairlane.errors import ConfigurationError, DuplicateJob, InvalidJob, UndecodablePayload
from fairlane.forward.delivery import Deliveries
from fairlane.forward.messages import Carried, Message, Token, Unpublishable
from fairlane.job import ENGINES_MESSAGE, Claim
from fairlane.policy.partitions import whole_of
from fairlane.policy.unique import Unique
from fairlane.scheduler.settlement import Backoff
from fairlane.task import (
    MOST_ATTEMPTS,
    AsyncTask,
    Call,
    Duration,
    Job,
    KeySource,
    Raised,
    SyncTask,
    Task,
    TaskOptions,
    as_unique,
)

log = logging.getLogger("fairlane.forward")

T = TypeVar("T")
Retries = Literal["policy", "engine"]

PUBLISHERS = 16
"""Messages that are published at the same time, by a client that blocks."""
ANSWER_WITHIN = 10.0
"""Seconds in which a broker has to answer. One that takes a message later has taken it twice, of which one runs."""


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A task of the engine whose jobs Fairlane admits."""

    task: Task[..., Any]
    target: Any
    """The engine's own task."""
    retries: Retries
    is_bounded: bool = False
    """`max_attempts` was given with it, and the engine's own number is not asked for."""

    def refuse(self, given: AbstractSet[str], engine: str, its: str = "task") -> None:
        """Options of a call that say how the engine tries again do nothing where the policy says it."""
        if self.retries == "policy" and given:
            raise InvalidJob(
                f"{its} {self.task.name!r} goes through Fairlane, whose policy says how it is tried again: "
                f"{', '.join(sorted(given))} would do nothing; give max_attempts and backoff to route(…), or leave "
                f"retries to {engine}: retries='engine'"
            )


class Forwarder(ABC):
    """Has an engine run what Fairlane admits."""

    engine = "the engine"
    """What people call it."""

    def __init__(
        self,
        app: App,
        *,
        retries: Retries = "engine",
        lease: Duration = "30s",
        republish_after: Duration = "5m",
        queues: Mapping[str, str] | None = None,
        unbounded: bool = False,
        show_arguments: bool | None = None,
    ) -> None:
        if not isinstance(app, App):
            raise ConfigurationError(
                f"{type(self).__name__} is given {app!r} where a Fairlane App belongs; the App comes first: "
                f"{type(self).__name__}(app, …)"
            )
        self.app = app
        self.retries = _checked_retries(retries)
        self.lease = _checked_time("lease", lease)
        """For how long the engine's worker holds a job without a sign of life."""
        self.republish_after = _checked_time("republish_after", republish_after)
        """When a message that was not delivered is published again, for the first time."""
        self.unbounded = unbounded
        """Whether a queue may have no limit of its own on what the engine holds."""
        self.deliveries = Deliveries(app, self.lease)
        self.forwarded: dict[str, Forwarded] = {}
        """By the name of the Fairlane task."""
        self.names: dict[str, list[str]] = {}
        """The Fairlane tasks of each task of the engine, by its name."""
        self._queues = dict(queues or {})
        # What is stored encrypted must not lie in the broker in plain text.
        self._shows = app.codec is None if show_arguments is None else show_arguments
        self._threads: ThreadPoolExecutor | None = None
        self.unanswered: set[Future[None]] = set()
        """What a client that blocks has asked its broker: its threads cannot be stopped."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.app!r}>"

    # What an engine says.

    def check(self, target: Any) -> None:  # noqa: B027  # an engine of one's own need not
        """Raise `ConfigurationError` if this is no task of the engine."""

    @abstractmethod
    def name_of(self, target: Any) -> str:
        """The name of an engine's task."""

    @abstractmethod
    def function_of(self, target: Any) -> Callable[..., Any]:
        """The function of an engine's task as its author wrote it, without the task itself as an argument."""

    @abstractmethod
    def install(self, forwarded: Forwarded) -> None:
        """Make a task of the engine adopt its jobs. Called once for each, when it is declared."""

    def runs_of(self, target: Any, options: Mapping[str, Any]) -> int:
        """How often the engine runs a job at most, by its own retry settings: those of the task, and the options that a
        routed call was given. An engine that does not say has the number that tasks have."""
        return TaskOptions().max_attempts

    def publish_blocking(self, message: Message) -> None:
        """As `publish`; called in a thread."""
        raise NotImplementedError(f"{type(self).__name__} has neither `publish` nor `publish_blocking`")

    def reach_blocking(self) -> None:  # noqa: B027  # an engine whose client tells nothing is taken at its word
        """Raise if the broker cannot be reached; called in a thread."""

    async def publish(self, message: Message) -> None:
        """Hand a message to the broker, and return once it has it. `Unpublishable`: its job dies. Any other error: the
        broker refuses or is away, and the job goes back to its place. Never try again in here, and never for long.

        An engine whose client is async overrides this."""
        await self._asked(self.publish_blocking, message)

    async def reach(self) -> None:
        """Raise if the broker cannot be reached."""
        await self._asked(self.reach_blocking)

    async def close(self) -> None:
        """Let go of what publishing needed."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None

    # What programs declare.

    def task(
        self,
        target: Any,
        *,
        queue: str,
        name: str | None = None,
        max_attempts: int | None = None,
        backoff: Backoff | None = None,
        retry_on: Raised | None = None,
        dead_on: Raised | None = None,
        priority: int = 0,
        keys: KeySource | Iterable[str] = None,
        unique: Unique | object | None = None,
        retries: Retries | None = None,
    ) -> Task[..., Any]:
        """A Fairlane task whose jobs this engine's task runs. Its function needs no change.

        The engine's own retry settings hold. `max_attempts`, `backoff`, `retry_on` or `dead_on` replace them by the
        policy of Fairlane's own workers, unless `retries="engine"` is given as well. Then `max_attempts` is what
        operators see instead of the engine's own number of runs, and bounds lost ones. There is no `timeout=`: the
        engine's own time limits hold.
        """
        self.check(target)
        task_name = name or self.name_of(target)
        function = self.function_of(target)
        retrying = {"max_attempts": max_attempts, "backoff": backoff, "retry_on": retry_on, "dead_on": dead_on}
        said: dict[str, Any] = {option: value for option, value in retrying.items() if value is not None}
        who = _checked_retries(retries) if retries is not None else "policy" if said else self.retries
        if who == "engine" and max_attempts is None:
            said["max_attempts"] = self.runs_of(target, {})
        options = TaskOptions(**said, priority=priority, keys=key_source(keys), unique=as_unique(unique))
        kind: type[Task[..., Any]] = AsyncTask if is_async(function) else SyncTask
        task = kind(self.app, task_name, queue, function, options, None, self.app.codec)
        self.app.registry.add(task)
        self.app.forwarded.add(queue)
        forwarded = Forwarded(task, target, who, max_attempts is not None)
        self.forwarded[task_name] = forwarded
        self.names.setdefault(self.name_of(target), []).append(task_name)
        self.install(forwarded)
        return task

    def task_of(self, target: Any) -> Task[..., Any]:
        """The Fairlane task of a task of the engine: what `route` leaves unsaid, as in
        `await forwarder.task_of(send_invoice).enqueue(…)`."""
        self.check(target)
        name = self.name_of(target)
        if name not in self.names:
            raise ConfigurationError(
                f"{name!r} is not forwarded; declare it with forwarder.task(…) or forwarder.route(…)"
            )
        first, *_ = self.names[name]
        return self.forwarded[first].task

    # What the dispatcher asks.

    def prepare(self) -> None:  # noqa: B027  # most engines need nothing but the module that the forwarder is in
        """Make every task known that this forwarder forwards; called once, before a dispatcher starts."""

    def message(self, claim: Claim, carried: Carried) -> Message:
        """What is to be published for a claim; `Unpublishable` where that cannot be said."""
        forwarded = self.forwarded[claim.task]
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        if self._shows:
            try:
                args, kwargs = forwarded.task.codec.plain_call(claim.payload)
            except UndecodablePayload as error:
                raise Unpublishable(str(error)) from error
        return Message(
            token=Token(claim.id, claim.lease),
            task=claim.task,
            target=forwarded.target,
            queue=self._queues.get(whole_of(claim.queue)),
            args=args,
            kwargs=kwargs,
            is_hidden=not self._shows,
            priority=claim.priority,
            attempt=claim.attempt,
            headers=carried.headers,
            own=carried.own,
            retries=claim.attempt - 1 if forwarded.retries == "policy" else carried.retries,
        )

    async def _asked(self, call: Callable[..., None], *given: Any) -> None:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(PUBLISHERS, thread_name_prefix="fairlane-publisher")
        asked = self._threads.submit(call, *given)
        self.unanswered.add(asked)
        asked.add_done_callback(self.unanswered.discard)
        async with answering():
            await asyncio.wrap_future(asked)


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

    task_type: type = object
    """What the engine's own tasks are, and how people declare one."""
    declared_with = "@app.task"
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

    def check(self, target: Any) -> None:
        if not isinstance(target, self.task_type):
            what = f"{type(target).__name__} {getattr(target, '__name__', None) or repr(target)}"
            raise ConfigurationError(
                f"{what} is no task of {self.engine}; declare it with {self.declared_with}, below @forwarder.route(…) "
                "if it has that"
            )

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
            if name in self._routed or name in self.names or self.is_built_in(name):
                return self._routed.get(name)
            found = next((each for each in self._patterns if fnmatchcase(name, each.pattern)), None)
            target = None if found is None else self.targets().get(name) or self.stand_in(name)
            if found is None or target is None:
                return None
            found.has_fitted = True
            return self._route(target, found.queue, found.options)

    def task_of(self, target: Any) -> Task[..., Any]:
        self.check(target)
        self.routed(self.name_of(target))
        return super().task_of(target)

    def _route(self, target: Any, queue: str, options: Mapping[str, Any]) -> Task[..., Any]:
        task = self.task(target, queue=queue, **options)
        task.codec = self.routed_codec(task.name, task.function, None, self.app.codec)
        self._routed[self.name_of(target)] = task
        return task

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
        context = {**(call.options.context or {}), ENGINES_MESSAGE: routed.own}

        def named(id: UUID | None) -> Call[Any]:
            return Call(call.task, call.args, call.kwargs, replace(call.options, context=context, id=id))

        try:
            return await self.app.enqueue_one(named(as_uuid(routed.id)))
        except DuplicateJob:
            return await self.app.enqueue_one(named(None))


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


def runs_with(retries: int | None) -> int:
    """How many runs so many retries are, at most; `None`: as many as it takes."""
    return MOST_ATTEMPTS if retries is None else max(1, min(retries + 1, MOST_ATTEMPTS))


@asynccontextmanager
async def answering() -> AsyncIterator[None]:
    """What is asked of a broker. Many clients would wait for one that hangs for ever, and nobody would hear of it."""
    limit = asyncio.timeout(ANSWER_WITHIN)
    try:
        async with limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise TimeoutError(f"the broker has not answered for {ANSWER_WITHIN:g} s") from error


def _checked_retries(retries: Retries) -> Retries:
    if retries not in ("policy", "engine"):
        raise ConfigurationError(f"retries={retries!r} is unknown; use 'policy' or 'engine'")
    return retries


def _checked_time(name: str, given: Duration) -> timedelta:
    amount = microseconds(given)
    if amount <= 0:
        raise ConfigurationError(f"{name}={given!r} is not a time above 0")
    return timedelta(microseconds=amount)
