"""A forwarder: joins an App and an engine's app. Each engine derives its own from this.

An engine's forwarder says how its tasks are named and called (`name_of`, `function_of`), how they are made to adopt
their jobs (`install`), and how a message is published (`publish_blocking`, or `publish` for an async client).
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from fairlane.app import App
from fairlane.clock import microseconds
from fairlane.declaration_checks import is_async, key_source
from fairlane.errors import ConfigurationError, InvalidJob, UndecodablePayload
from fairlane.forward.delivery import Deliveries
from fairlane.forward.messages import Carried, Message, Token, Unpublishable
from fairlane.job import Claim
from fairlane.policy.partitions import whole_of
from fairlane.policy.unique import Unique
from fairlane.scheduler.settlement import Backoff
from fairlane.task import (
    MOST_ATTEMPTS,
    AsyncTask,
    Duration,
    KeySource,
    Raised,
    SyncTask,
    Task,
    TaskOptions,
    as_unique,
)

__all__ = [
    "Forwarded",
    "Forwarder",
    "Retries",
    "answering",
    "not_a_task",
    "runs_with",
]

log = logging.getLogger("fairlane.forward")

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
        """Hand a message to the broker, as `Engine.publish` says; called in a thread."""
        raise NotImplementedError(f"{type(self).__name__} has neither `publish` nor `publish_blocking`")

    def reach_blocking(self) -> None:  # noqa: B027  # an engine whose client tells nothing is taken at its word
        """Raise if the broker cannot be reached; called in a thread."""

    async def publish(self, message: Message) -> None:
        """As `Engine` says. An engine whose client is async overrides this."""
        await self._asked(self.publish_blocking, message)

    async def reach(self) -> None:
        """As `Engine` says."""
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
        said: dict[str, Any] = {
            "max_attempts": max_attempts,
            "backoff": backoff,
            "retry_on": retry_on,
            "dead_on": dead_on,
        }
        said = {option: value for option, value in said.items() if value is not None}
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
        """What is to be published for a claim."""
        forwarded = self.forwarded[claim.task]
        args, kwargs = self._plain(forwarded.task, claim) if self._shows else ([], {})
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

    def _plain(self, task: Task[..., Any], claim: Claim) -> tuple[list[Any], dict[str, Any]]:
        try:
            return task.codec.plain_call(claim.payload)
        except UndecodablePayload as error:
            raise Unpublishable(str(error)) from error

    async def _asked(self, call: Callable[..., None], *given: Any) -> None:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(PUBLISHERS, thread_name_prefix="fairlane-publisher")
        asked = self._threads.submit(call, *given)
        self.unanswered.add(asked)
        asked.add_done_callback(self.unanswered.discard)
        async with answering():
            await asyncio.wrap_future(asked)


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


def not_a_task(engine: str, given: Any, remedy: str) -> ConfigurationError:
    """What was given is no task of the engine."""
    what = f"{type(given).__name__} {getattr(given, '__name__', None) or repr(given)}"
    return ConfigurationError(f"{what} is no task of {engine}; {remedy}")


def _checked_retries(retries: Retries) -> Retries:
    if retries not in ("policy", "engine"):
        raise ConfigurationError(f"retries={retries!r} is unknown; use 'policy' or 'engine'")
    return retries


def _checked_time(name: str, given: Duration) -> timedelta:
    amount = microseconds(given)
    if amount <= 0:
        raise ConfigurationError(f"{name}={given!r} is not a time above 0")
    return timedelta(microseconds=amount)
