"""A forwarder: joins an App and an engine's app. Each engine derives its own from this.

An engine's forwarder says how its tasks are named and called (`name_of`, `function_of`), how they are made to adopt
their jobs (`install`), and how a message is published (`publish_blocking`, or `publish` for an async client). One whose
own API is routed through Fairlane as well, task by task or by patterns of names, also says which tasks it knows
(`targets`), and asks `routed` of every message that it is to send.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeVar
from uuid import UUID

import msgspec

from fairlane.app import App
from fairlane.clock import microseconds
from fairlane.codec import Codec
from fairlane.errors import ConfigurationError, DuplicateJob, FairlaneError, InvalidJob, UndecodablePayload
from fairlane.forward.delivery import HEADER, Deliveries, Token
from fairlane.job import ENGINES_MESSAGE, Claim, stored_in, trace_of
from fairlane.parameters import check_value
from fairlane.policy.partitions import whole_of
from fairlane.policy.unique import Unique
from fairlane.task import (
    MOST_ATTEMPTS,
    Backoff,
    Call,
    Duration,
    Job,
    KeySource,
    Raised,
    Task,
    TaskOptions,
    as_unique,
    key_source,
    make_task,
)

log = logging.getLogger("fairlane.forward")

T = TypeVar("T")
Retries = Literal["policy", "engine"]

PUBLISHERS = 16
"""How many messages a blocking client publishes at the same time."""
ANSWER_WITHIN = 10.0
"""Seconds for the broker to answer. A message that it accepts later is published twice, and runs once."""


class Unpublishable(FairlaneError):
    """This message can never be published: its job dies. Any other error is a refusal of the broker."""


class Message(msgspec.Struct, frozen=True):
    """One claimed job on its way to the engine."""

    token: Token
    task: str
    """The name of the Fairlane task."""
    target: Any
    """The engine's own task."""
    queue: str | None
    """The engine's queue, if the forwarder maps the job's queue to one; otherwise the engine chooses."""
    args: Sequence[Any]
    """Plain JSON values, for the engine's tools; the function gets what is stored with the job. Empty if hidden."""
    kwargs: Mapping[str, Any]
    is_hidden: bool
    """Whether the arguments are left out of the message: they are stored encrypted, or the forwarder hides them."""
    priority: int
    """Fairlane's priority, from -100 to 100; 0 means none."""
    headers: Mapping[str, Any]
    """Headers from the producer, for the engine's worker."""
    own: str | None
    """The message that the engine wrote for a routed call, as its forwarder stored it."""
    retries: int
    """How often the engine has retried it so far."""

    @property
    def id(self) -> UUID:
        """The id of the job. The engine's message has the same id, if the engine lets us choose it."""
        return self.token.job

    @property
    def carried(self) -> dict[str, Any]:
        """All headers, the token included."""
        return {**self.headers, HEADER: str(self.token)}


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A task of the engine that is run through Fairlane."""

    task: Task[..., Any]
    target: Any
    """The engine's own task."""
    retries: Retries
    is_bounded: bool = False
    """Whether `max_attempts` was given, so that the engine's own limit is not used."""

    def refuse(self, given: AbstractSet[str]) -> None:
        """Refuse options about retries by the engine, if the policy decides on retries."""
        if self.retries == "policy" and given:
            raise InvalidJob(
                f"task {self.task.name!r} is retried by Fairlane's policy: {', '.join(sorted(given))} would do "
                f"nothing; give max_attempts and backoff to route(…), or leave retries to its engine: retries='engine'"
            )


class RoutedCodec(Codec):
    """Routed calls get their arguments as the engine would pass them: annotations are ignored. A result without a JSON
    form is left to the result backend of the engine."""

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
    """A call of `route_all`."""

    queue: str
    pattern: str
    options: Mapping[str, Any]
    has_fitted: bool = False


class Forwarder(ABC):
    """Lets an engine run the jobs that Fairlane admits, and routes calls of the engine's own API through Fairlane.

    `routes={"shop.*": "shop", "*": "default"}` routes every task whose name matches a pattern to a queue of Fairlane,
    whenever it is registered; the first match wins. `imports` are modules with tasks for the dispatcher to import, if
    the module of the forwarder does not.
    """

    engine = "the engine"
    """The name of the engine, in messages."""
    task_type: type = object
    """The class of the engine's own tasks, and how one is declared."""
    declared_with = "@app.task"
    routed_codec: type[RoutedCodec] = RoutedCodec

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
        routes: Mapping[str, str] | None = None,
        imports: Iterable[str] = (),
    ) -> None:
        if not isinstance(app, App):
            raise ConfigurationError(
                f"{type(self).__name__} is given {app!r} where a Fairlane App belongs; the App comes first: "
                f"{type(self).__name__}(app, …)"
            )
        self.app = app
        check_value(type(self).__name__, "retries", retries, Retries)
        self.retries = retries
        self.lease = _checked_time("lease", lease)
        """How long a worker of the engine holds a job without renewing its lease."""
        self.republish_after = _checked_time("republish_after", republish_after)
        """After this time, a message that was not delivered is published again for the first time."""
        self.unbounded = unbounded
        """Whether queues may be without a limit on how many jobs the engine holds."""
        self.deliveries = Deliveries(app, self.lease)
        self.forwarded: dict[str, Forwarded] = {}
        """By the name of the Fairlane task."""
        self.names: dict[str, list[str]] = {}
        """The Fairlane tasks of each task of the engine, by its name."""
        self._queues = dict(queues or {})
        # What is stored encrypted must not be published in plain text.
        self._shows = app.codec is None if show_arguments is None else show_arguments
        self._threads: ThreadPoolExecutor | None = None
        self.unanswered: set[Future[None]] = set()
        """Requests of a blocking client that the broker has not answered: their threads cannot be stopped."""
        self._imports = [imports] if isinstance(imports, str) else list(imports)
        self._routed: dict[str, Task[..., Any]] = {}
        """The Fairlane tasks that calls are routed to, by the name of the engine's task."""
        self._patterns: list[_Route] = []
        # Calls come from many threads; the first one of a task routes it.
        self._routing = threading.RLock()
        for pattern, queue in (routes or {}).items():
            self.route_all(queue, pattern)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.app!r}>"

    # What an engine says.

    def check(self, target: Any) -> None:
        """Raise `ConfigurationError` if this is no task of the engine."""
        if not isinstance(target, self.task_type):
            what = f"{type(target).__name__} {getattr(target, '__name__', None) or repr(target)}"
            raise ConfigurationError(
                f"{what} is no task of {self.engine}; declare it with {self.declared_with}, below @forwarder.route(…) "
                "if it has that"
            )

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
        """How often the engine runs a job at most, by the retry settings of the task and the options of a routed call.
        The default is that of Fairlane's own tasks."""
        return TaskOptions().max_attempts

    def targets(self) -> Mapping[str, Any]:
        """The engine's own tasks known so far, by name."""
        return {}

    def is_built_in(self, name: str) -> bool:
        """Whether it is a task of the engine itself, to which patterns do not apply."""
        return False

    def stand_in(self, name: str) -> Any | None:
        """A task for a name that is sent but not registered here; `None`: it is sent as usual."""
        return None

    def publish_blocking(self, message: Message) -> None:
        """As `publish`; called in a thread."""
        raise NotImplementedError(f"{type(self).__name__} has neither `publish` nor `publish_blocking`")

    def reach_blocking(self) -> None:  # noqa: B027  # optional
        """As `reach`; called in a thread. A client that cannot be asked is assumed to be connected."""

    async def publish(self, message: Message) -> None:
        """Hand a message to the broker, and return once it has it. `Unpublishable`: its job dies. Any other error: the
        broker refuses or is away, and the job goes back to its place. Never try again in here, and never for long.

        An engine whose client is async overrides this."""
        await self._asked(self.publish_blocking, message)

    async def reach(self) -> None:
        """Raise if the broker cannot be reached."""
        await self._asked(self.reach_blocking)

    async def close(self) -> None:
        """Release what publishing needed."""
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
        """A Fairlane task whose jobs are run by this task of the engine. Its function needs no change.

        The retry settings of the engine apply. `max_attempts`, `backoff`, `retry_on` or `dead_on` replace them by those
        of Fairlane's own workers, unless `retries="engine"` is given as well; then `max_attempts` is shown to operators
        instead of the engine's limit, and bounds runs that are lost. There is no `timeout=`: the time limits of the
        engine apply.
        """
        self.check(target)
        task_name = name or self.name_of(target)
        function = self.function_of(target)
        retrying = {"max_attempts": max_attempts, "backoff": backoff, "retry_on": retry_on, "dead_on": dead_on}
        said: dict[str, Any] = {option: value for option, value in retrying.items() if value is not None}
        check_value("task", "retries", retries, Retries | None)
        who: Retries = retries or ("policy" if said else self.retries)
        if who == "engine" and max_attempts is None:
            said["max_attempts"] = self.runs_of(target, {})
        options = TaskOptions(**said, priority=priority, keys=key_source(keys), unique=as_unique(unique))
        task = make_task(self.app, task_name, queue, function, options)
        self.app.registry.add(task)
        self.app.forwarded.add(queue)
        forwarded = Forwarded(task, target, who, max_attempts is not None)
        self.forwarded[task_name] = forwarded
        self.names.setdefault(self.name_of(target), []).append(task_name)
        self.install(forwarded)
        return task

    def task_of(self, target: Any) -> Task[..., Any]:
        """The Fairlane task of a task of the engine, to use Fairlane's own API:
        `await forwarder.task_of(send_invoice).enqueue(…)`."""
        self.check(target)
        name = self.name_of(target)
        self.routed(name)
        if name not in self.names:
            raise ConfigurationError(
                f"{name!r} is not forwarded; declare it with forwarder.task(…) or forwarder.route(…)"
            )
        first, *_ = self.names[name]
        return self.forwarded[first].task

    def route(self, *, queue: str, **options: Any) -> Callable[[T], T]:
        """A decorator that routes the engine's own calls of a task through Fairlane, with the options of `task`."""

        def routed(target: T) -> T:
            self._route(target, queue, options)
            return target

        return routed

    def route_all(self, queue: str, pattern: str = "*", **options: Any) -> None:
        """Route every task whose name matches a pattern, such as `shop.tasks.*`, whether it is registered now or later.
        The options are those of `task`. Earlier patterns win, and so do declarations with `task` or `route`."""
        self._patterns.append(_Route(queue, pattern, options))
        self.app.forwarded.add(queue)

    def route_registered(self) -> None:
        """Route registered tasks that match a pattern."""
        if self._patterns:
            for name in list(self.targets()):
                self.routed(name)

    def routed(self, name: str, *, is_copy: bool = False) -> Task[..., Any] | None:
        """The Fairlane task that a task of the engine is routed to; `None` if it is not. `is_copy`: it is asked for a
        copy of a message that was delivered, which stays with Fairlane."""
        if is_copy and name in self.names and name not in self._routed:
            return self.forwarded[self.names[name][0]].task
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

    def _route(self, target: Any, queue: str, options: Mapping[str, Any]) -> Task[..., Any]:
        task = self.task(target, queue=queue, **options)
        task.codec = self.routed_codec(task.name, task.function, None, self.app.codec)
        self._routed[self.name_of(target)] = task
        return task

    # What the dispatcher asks.

    def prepare(self) -> None:
        """Import and route all tasks, and refuse patterns that match none."""
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

    def message(self, claim: Claim, context: str | None, retries: int) -> Message:
        """The message to publish for a claim with this stored context; `Unpublishable` if there cannot be one. It
        carries the headers in `context={"headers": {…}}` and the span that the job was enqueued in."""
        forwarded = self.forwarded[claim.task]
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        if self._shows:
            try:
                args, kwargs = forwarded.task.codec.plain_call(claim.payload)
            except UndecodablePayload as error:
                raise Unpublishable(str(error)) from error
        stored = stored_in(context or "{}")
        headers, own = stored.get("headers"), stored.get(ENGINES_MESSAGE)
        return Message(
            token=Token(claim.id, claim.lease),
            task=claim.task,
            target=forwarded.target,
            queue=self._queues.get(whole_of(claim.queue)),
            args=args,
            kwargs=kwargs,
            is_hidden=not self._shows,
            priority=claim.priority,
            headers={**(headers if isinstance(headers, dict) else {}), **(trace_of(context or "{}") or {})},
            own=own if isinstance(own, str) else None,
            retries=claim.attempt - 1 if forwarded.retries == "policy" else retries,
        )

    async def _asked(self, call: Callable[..., None], *given: Any) -> None:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(PUBLISHERS, thread_name_prefix="fairlane-publisher")
        asked = self._threads.submit(call, *given)
        self.unanswered.add(asked)
        asked.add_done_callback(self.unanswered.discard)
        async with answering():
            await asyncio.wrap_future(asked)

    # Calls of the engine's own API, stored with the message that the engine wrote for them.

    def enqueue_routed_blocking(self, task: Task[..., Any], *call: Any, **options: Any) -> Job[Any]:
        """As `enqueue_routed`. It blocks even in an event loop, as the engine's own call would to publish."""

        def enqueue() -> Job[Any]:
            return self.app.run_blocking(self.enqueue_routed(task, *call, **options))

        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return enqueue()
        if self.app.is_open_in(loop):
            raise ConfigurationError(
                f"task {task.name!r} is routed through Fairlane, and the App was opened in this event loop, which the "
                f"call would block; await forwarder.task_of(…).enqueue(…) instead"
            )
        with ThreadPoolExecutor(1) as elsewhere:
            return elsewhere.submit(enqueue).result()

    async def enqueue_routed(
        self,
        task: Task[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        id: str,
        own: str,
        using: dict[str, Any],
        options: Mapping[str, Any] | None = None,
    ) -> Job[Any]:
        """Store a routed call: `own` is the message as the engine wrote it, without its arguments, `using` when it may
        run and its priority, as options of `task.using`, and `options` are those of the call, by the engine's names.

        Its job has the id of the engine's message, if that is a UUID that no job has yet: engines send the same id more
        than once.
        """
        forwarded = self.forwarded[task.name]
        if forwarded.retries == "engine" and not forwarded.is_bounded:
            using["max_attempts"] = self.runs_of(forwarded.target, options or {})
        call = task.using(**using).call(*args, **kwargs)
        context = {**(call.options.context or {}), ENGINES_MESSAGE: own}

        def named(id: UUID | None) -> Call[Any]:
            return Call(
                call.task, call.args, call.kwargs, msgspec.structs.replace(call.options, context=context, id=id)
            )

        try:
            wanted = UUID(id)
        except ValueError:
            wanted = None
        try:
            return await self.app.enqueue_one(named(wanted))
        except DuplicateJob:
            return await self.app.enqueue_one(named(None))


def written(task: str, message: Any, given: Mapping[str, Any], write: Callable[[Any], str] = json.dumps) -> str:
    """The engine's message for a routed call as text. If it cannot be stored, the error names the option to blame."""
    try:
        return write(message)
    except (TypeError, ValueError) as error:
        for name, value in given.items():
            try:
                write(value)
            except (TypeError, ValueError):
                raise InvalidJob(
                    f"task {task!r}: {name}={value!r} has no JSON form, and cannot be stored with the job; give plain "
                    f"values, or leave it out"
                ) from error
        raise InvalidJob(f"task {task!r}: the engine's message for it cannot be stored as JSON: {error}") from error


def elsewhere(*args: Any, **kwargs: Any) -> None:
    """Stands for the function of a task of which only the name is known here."""


def runs_with(retries: int | None) -> int:
    """The number of runs for this number of retries; `None` means no limit."""
    return MOST_ATTEMPTS if retries is None else max(1, min(retries + 1, MOST_ATTEMPTS))


@asynccontextmanager
async def answering() -> AsyncIterator[None]:
    """Limit the time of a request to the broker: many clients would wait for ever for one that hangs."""
    limit = asyncio.timeout(ANSWER_WITHIN)
    try:
        async with limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise TimeoutError(f"the broker has not answered for {ANSWER_WITHIN:g} s") from error


def _checked_time(name: str, given: Duration) -> timedelta:
    amount = microseconds(given)
    if amount <= 0:
        raise ConfigurationError(f"{name}={given!r} is not a time above 0")
    return timedelta(microseconds=amount)
