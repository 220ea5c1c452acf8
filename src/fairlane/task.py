"""Tasks: Python functions with a name, a queue and options; the calls that producers make of them; and the handles of
the jobs that come of those.

A single job and a bulk of thousands take the same path, from `Call` to the store; so they have the same options,
defaults and checks. `enqueue` has exactly the task's own parameters, and everything else goes through `using`.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Generic, Literal, ParamSpec, Protocol, TypeVar, cast, get_type_hints
from uuid import UUID

import msgspec
from msgspec.structs import asdict, replace

from fairlane.clock import SECOND, Instant, as_instant, duration_of, microseconds
from fairlane.codec import Codec, PayloadCodec
from fairlane.effects import ABSENT, Effects, ValueSource, became
from fairlane.errors import (
    ConfigurationError,
    FairlaneError,
    InvalidJob,
    InvalidPolicy,
    JobCancelled,
    JobFailed,
    JobNotFound,
    ReplayRefused,
    ResultTimeout,
    UnknownTask,
)
from fairlane.job import RESERVED, AttemptRecord, JobRecord, NewJob, Outcome, State
from fairlane.loop_thread import blocking
from fairlane.parameters import (
    check_value,
    check_whole,
    checked,
    is_storable,
    known_options,
    refuse_unknown_options,
    shown,
)
from fairlane.policy.backlog import FullBacklog, Verdicts
from fairlane.policy.keys import MAX_KEY_BYTES, NAME, normalize_by
from fairlane.policy.partitions import MOST_PARTITIONS
from fairlane.policy.unique import Conflict, OnReplayConflict, Unique, checked_on_replay_conflict
from fairlane.redaction import Redact
from fairlane.scheduler.explain import Explanation, explain
from fairlane.store import records
from fairlane.store.protocol import Store
from fairlane.store.rows import no_such_job

P = ParamSpec("P")
R = TypeVar("R")

Duration = timedelta | str | float
KeySource = tuple[str, ...] | Callable[..., Mapping[str, object]] | None
Raised = type[BaseException] | tuple[type[BaseException], ...]
Progress = Callable[[int, int], None]
"""Called with how many jobs of a bulk have been stored, and how many there are."""

LOWEST_PRIORITY, HIGHEST_PRIORITY = -100, 100
MOST_ATTEMPTS = 10_000
BOUNDS = {
    "max_attempts": (1, MOST_ATTEMPTS, "give one"),
    "partition": (0, MOST_PARTITIONS - 1, "give that of a partition"),
}
"""The least and the most of a number of a job, and what to do about another."""
IN_EVERY_CONTEXT = ("queue", "task", "priority")
"""What a policy's functions get for every job, in addition to its context and keys."""
_QUEUE_NAME = re.compile(rf"{NAME}\Z")
LONGEST_DELAY = 100 * 366 * 24 * 3_600 * SECOND


def as_unique(given: object) -> Unique | None:
    return given if given is None or isinstance(given, Unique) else Unique(given)


@dataclass(frozen=True, slots=True, init=False)
class Backoff:
    """Exponential backoff: `first`, then times `factor` each attempt, up to `cap`; then a jitter on top.

    The jitter comes after the cap: jobs that have all reached it would otherwise come back as one herd.
    """

    first: int
    factor: float
    cap: int
    jitter: float

    @checked(unchecked=["first", "cap"])
    def __init__(
        self,
        first: timedelta | str | float = "1s",
        *,
        factor: float = 2.0,
        cap: timedelta | str | float = "1h",
        jitter: float = 0.2,
    ) -> None:
        what = f"Backoff({shown(first)}, factor={factor!r}, cap={shown(cap)}, jitter={jitter!r})"
        try:
            start, most = microseconds(first), microseconds(cap)
        except ConfigurationError as error:
            raise ConfigurationError(f"{what}: {error}") from None
        if start < 0 or most < start:
            raise ConfigurationError(f"{what}: `first` is at least 0, and `cap` at least `first`")
        if not 1.0 <= factor <= 100.0:
            raise ConfigurationError(f"{what}: `factor` lies between 1 and 100")
        if not 0.0 <= jitter <= 1.0:
            raise ConfigurationError(f"{what}: `jitter` is a fraction between 0 and 1")
        for name, value in (("first", start), ("factor", float(factor)), ("cap", most), ("jitter", float(jitter))):
            object.__setattr__(self, name, value)

    def delay(self, attempt: int, chance: float) -> int:
        """Microseconds until the next attempt, after `attempt` have failed; `chance` in [0, 1) picks the jitter."""
        # The exponent is bounded before it is raised: attempt 5,000 is a cap, not an overflow.
        exponent = min(max(attempt, 1) - 1, 64)
        delay = min(float(self.cap), self.first * self.factor**exponent)
        return round(delay * (1.0 + self.jitter * chance))

    def __repr__(self) -> str:
        first, cap = f"{self.first / SECOND:g}s", f"{self.cap / SECOND:g}s"
        return f"Backoff({first!r}, factor={self.factor:g}, cap={cap!r}, jitter={self.jitter:g})"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions:
    """How the jobs of a task run."""

    max_attempts: int = 5
    backoff: Backoff = Backoff()
    retry_on: Raised = (Exception,)
    """Exceptions that are retried. Any other exception ends the job."""
    dead_on: Raised = ()
    """Exceptions that end the job at once, even if `retry_on` covers them."""
    timeout: Duration | None = None
    priority: int = 0
    keys: KeySource = None
    unique: Unique | None = None
    executor: Literal["thread", "process"] = "thread"
    """Where a function that is not async runs: in a thread of the worker, or in a process of its own."""

    def checked(self, what: str) -> TaskOptions:
        check_value(what, "backoff", self.backoff, Backoff)
        check_value(what, "executor", self.executor, Literal["thread", "process"])
        check_value(what, "priority", self.priority, int)
        bounded = {"priority": self.priority, "max_attempts": self.max_attempts}
        check_bounds(what, bounded, ConfigurationError)
        kinds: Any
        for name, kinds in (("retry_on", self.retry_on), ("dead_on", self.dead_on)):
            for each in kinds if isinstance(kinds, tuple) else (kinds,):
                if not inspect.isclass(each) or not issubclass(each, BaseException):
                    raise ConfigurationError(
                        f"{what}: {name}={shown(kinds)} is not an exception type, or a tuple of them; give such as "
                        "ConnectionError"
                    )
        if self.timeout is not None and duration_of(f"{what}: timeout", self.timeout) <= 0:
            raise ConfigurationError(f"{what}: timeout={self.timeout!r} is not a time above 0; None means no timeout")
        return self


def check_bounds(what: str, options: Mapping[str, Any], error: type[FairlaneError]) -> None:
    """Refuse numbers that no job can have."""
    for name, (least, most, remedy) in BOUNDS.items():
        if name in options:
            check_whole(f"{what}: {name}", options[name], least, most, remedy, error)
    priority = options.get("priority", 0)
    if not LOWEST_PRIORITY <= priority <= HIGHEST_PRIORITY:  # in the words of `store_job`, for producers in SQL
        raise error(
            f"{what}: priority={shown(priority)} is outside of {LOWEST_PRIORITY} … {HIGHEST_PRIORITY}; give one inside"
        )


class EnqueueOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of one job; `None` means the default of its task."""

    tx: Any = None
    queue: str | None = None
    priority: int | None = None
    max_attempts: int | None = None
    keys: Mapping[Any, object] | None = None
    delay: int | None = None
    run_at: Instant | None = None
    id: UUID | None = None
    unique: Unique | None = None
    on_dead: Effects | None = None
    context: Mapping[str, Any] | None = None
    partition: int | None = None
    partition_key: object = ABSENT
    """The value that its partition is chosen by, instead of its keys; `None` means the first partition."""

    def queue_of(self, task: Task[..., Any]) -> str:
        """Where a job of this task goes."""
        return task.queue if self.queue is None else self.queue

    def given(self) -> dict[str, Any]:
        """The options that are not left to the task."""
        return {name: value for name, value in asdict(self).items() if value is not _NOT_GIVEN[name]}

    def check(self, what: str) -> None:
        """Refuse what no job can have."""
        given = self.given()
        for name, value in given.items():
            check_value(what, name, value, _KINDS[name], error=InvalidJob)
        check_bounds(what, given, InvalidJob)
        if self.queue == "":
            raise InvalidJob(f"{what}: queue='' is not the name of a queue; give that of one, or leave it out")
        if self.delay is not None and self.run_at is not None:
            raise InvalidJob(f"{what}: give delay= or run_at=, not both")
        if self.partition is not None and self.partition_key is not ABSENT:
            raise InvalidJob(f"{what}: give partition= or partition_key=, not both")
        for name in self.context or ():
            if name.startswith(RESERVED):
                raise InvalidJob(f"{what}: context: {shown(name)} is a name of Fairlane's own; begin it otherwise")
            if name in IN_EVERY_CONTEXT:
                raise InvalidJob(
                    f"{what}: context: {name!r} is what a policy's functions find the job's own {name} under; give "
                    "yours another name"
                )

    def over(self, base: EnqueueOptions) -> EnqueueOptions:
        """These options, with those of `base` as defaults. An id belongs to one job and is never inherited."""
        given = self.given()
        for pair in (("delay", "run_at"), ("partition", "partition_key")):
            if not given.keys().isdisjoint(pair):
                given = {name: getattr(self, name) for name in pair} | given
        for name in given.keys() & {"keys", "context"}:
            given[name] = {**(getattr(base, name) or {}), **given[name]} or None
        return replace(base, **{"id": None, **given})


DEFAULTS = EnqueueOptions()
_NOT_GIVEN = asdict(DEFAULTS)
_KINDS = get_type_hints(EnqueueOptions)


class Call(msgspec.Struct, Generic[R], eq=False, gc=False):
    """A call of a task that has not been enqueued yet: what `enqueue_many` takes."""

    # There may be many thousands of them. They are never part of a cycle, so the garbage collector can skip them.
    task: Task[..., R]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    options: EnqueueOptions = DEFAULTS

    def __repr__(self) -> str:
        given = [*map(repr, self.args), *(f"{name}={value!r}" for name, value in self.kwargs.items())]
        return f"Call({self.task.name}({', '.join(given)}))"

    def using(self, **options: Any) -> Call[R]:
        """The same call with these options, which are those of `task.using`; other options are kept."""
        return BoundTask(self.task, self.options).using(**options).call(*self.args, **self.kwargs)


def one_by_one(calls: Iterable[Call[R]], taker: str) -> Iterator[Call[R]]:
    """The calls of a bulk. Refuse what a plain `for` cannot iterate over, such as an async generator."""
    try:
        if isinstance(calls, str | bytes | Mapping):
            raise TypeError
        return iter(calls)
    except TypeError as error:
        remedy = "give a list of calls, or a generator"
        if hasattr(calls, "__aiter__"):
            remedy = "collect its calls into a list, all or a batch at a time, and give that to enqueue_many"
        raise InvalidJob(
            f"{taker} takes calls from a plain iterable, not from a value of type {type(calls).__name__}; {remedy}"
        ) from error


def not_a_call(given: object, taker: str = "enqueue_many") -> InvalidJob:
    return InvalidJob(f"{taker} takes calls, not a {type(given).__name__}; write task.call(…) for each")


class Producer(ValueSource, Protocol):
    """What tasks and the handles of their jobs need from their app."""

    redact: Redact | None
    codec: PayloadCodec | None

    @property
    def forwarded(self) -> Collection[str]: ...

    async def enqueue_many(
        self, calls: Iterable[Call[R]], tx: Any = None, progress: Progress | None = None
    ) -> Enqueued[R]: ...

    async def enqueue_one(self, call: Call[R]) -> Job[R]: ...

    async def foresee(self, call: Call[R]) -> Foreseen: ...

    def codec_of(self, task: str) -> Codec | None: ...

    def known_tasks(self) -> Collection[str]: ...


class BoundTask(Generic[P, R]):
    """A task together with options for the jobs enqueued through it."""

    def __init__(self, task: Task[P, R], options: EnqueueOptions) -> None:
        self._task = task
        self._options = options

    def __repr__(self) -> str:
        return f"{self._task!r}.using({self._options})"

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        """This call as a value for `enqueue_many`, checked against the parameters of the function."""
        self._task.codec.check_call(args, kwargs)
        return Call(self._task, args, kwargs, self._options)

    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """Store one job. It is durable when this returns, or when the transaction given as `tx` commits."""
        return await self._task.producer.enqueue_one(self.call(*args, **kwargs))

    async def dry_run(self, *args: P.args, **kwargs: P.kwargs) -> Foreseen:
        """What `enqueue` would do now. The call is checked in full, but nothing is stored."""
        return await self._task.producer.foresee(self.call(*args, **kwargs))

    @known_options
    async def enqueue_many(self, calls: Iterable[Call[R]], progress: Progress | None = None) -> Enqueued[R]:
        """Store these calls of this task, all or none. Options given to `using` are the defaults of each call."""
        listed = list(one_by_one(calls, "enqueue_many"))
        for call in listed:
            if not isinstance(call, Call):
                raise not_a_call(call)
            if call.task is not self._task:
                raise InvalidJob(
                    f"{call!r} is not a call of task {self._task.name!r}; use app.enqueue_many for a mixture"
                )
        if self._options is not DEFAULTS:
            # Calls without options of their own share one value, so that their jobs can be built together.
            own = replace(self._options, id=None)
            options = (own if call.options is DEFAULTS else call.options.over(own) for call in listed)
            listed = [Call(call.task, call.args, call.kwargs, each) for call, each in zip(listed, options, strict=True)]
        return await self._task.producer.enqueue_many(listed, self._options.tx, progress)

    def enqueue_sync(self, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """`enqueue` for code that is not async."""
        return self._task.producer.run_blocking(self.enqueue(*args, **kwargs))

    def enqueue_many_sync(self, calls: Iterable[Call[R]]) -> Enqueued[R]:
        """`enqueue_many` for code that is not async."""
        return self._task.producer.run_blocking(self.enqueue_many(calls))

    @known_options
    def using(
        self,
        *,
        tx: Any = None,
        priority: int | None = None,
        delay: Duration | None = None,
        run_at: datetime | None = None,
        keys: Mapping[str, object] | None = None,
        queue: str | None = None,
        max_attempts: int | None = None,
        id: UUID | str | None = None,
        unique: Unique | object | None = None,
        on_dead: Effects | None = None,
        context: Mapping[str, Any] | None = None,
        partition: int | None = None,
        partition_key: object = ABSENT,
    ) -> BoundTask[P, R]:
        """The same task with these options for its jobs; other options are kept.

        `id` is for one job: `DuplicateJob` if there is one already. `unique` is a `Unique(…)`; a value or a function of
        the arguments means `Unique(value)`. `on_dead` lands if the job dies, in the transaction in which it does.
        `context` is stored with the job; a policy's functions are given it.

        In a partitioned queue the job's keys say where it goes, unless `partition` names the partition, or
        `partition_key` a value to find it by instead; with `None` it goes to the first.
        """
        what = f"task {self._task.name!r}"
        chosen = EnqueueOptions(
            tx=tx,
            queue=queue,
            priority=priority,
            max_attempts=max_attempts,
            keys=keys,
            delay=None if delay is None else _delay(what, delay),
            run_at=None if run_at is None else _run_at(what, run_at),
            id=self._options.id if id is None else as_id(f"{what}: id", id),
            unique=as_unique(unique),
            on_dead=on_dead.copy() if isinstance(on_dead, Effects) else on_dead,
            context=context,
            partition=partition,
            partition_key=partition_key,
        )
        chosen.check(what)
        return BoundTask(self._task, chosen.over(self._options))


class Task(BoundTask[P, R]):
    """A registered function. Calling it runs it here and now; enqueuing it stores a job."""

    __name__: str
    is_async = False

    def __init__(
        self,
        producer: Producer,
        name: str,
        queue: str,
        function: Callable[P, Any],
        options: TaskOptions,
        local_names: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(self, DEFAULTS)
        what = f"task {name!r}"
        self.producer = producer
        self.name = name
        self.queue = queue
        self.function = function
        self.options = options.checked(what)
        if options.executor == "process":
            place = getattr(function, "__qualname__", "")
            if self.is_async:
                raise ConfigurationError(f"{what}: executor='process' is for functions that are not async; write `def`")
            if not place or "<" in place:
                raise ConfigurationError(
                    f"{what}: executor='process' needs a function that a process can import; define it at a module's "
                    "top"
                )
        self.codec = Codec(name, function, local_names, producer.codec)
        self.timeout = None if options.timeout is None else microseconds(options.timeout)
        functools.update_wrapper(cast(Callable[..., Any], self), function, updated=())

    def __repr__(self) -> str:
        return f"<task {self.name}>"

    def can_provide(self, key: str) -> bool:
        """Whether jobs of this task can carry a key that is not given at each enqueue."""
        source = self.options.keys
        if callable(source):
            return True
        return key in (self.codec.parameters if source is None else source)


class AsyncTask(Task[P, R]):
    """A task whose function is `async def`."""

    is_async = True

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        result: Coroutine[Any, Any, R] = self.function(*args, **kwargs)
        return result


class SyncTask(Task[P, R]):
    """A task whose function blocks; workers run it in a thread."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = self.function(*args, **kwargs)
        return result


def task_options(given: dict[str, Any]) -> TaskOptions:
    """The options of a task as they are declared."""
    refuse_unknown_options("task", given, ("queue", "name", *TaskOptions.__dataclass_fields__))
    own = {"keys": key_source(given.get("keys")), "unique": as_unique(given.get("unique"))}
    return TaskOptions(**{**given, **own})


def make_task(
    app: Producer,
    name: str,
    queue: str,
    function: Any,
    options: TaskOptions,
    local_names: Mapping[str, Any] | None = None,
) -> Task[..., Any]:
    """A task of an app. `local_names` is what annotations of a function within a function may refer to."""
    kind: type[Task[..., Any]] = AsyncTask if is_async(function) else SyncTask
    return kind(app, name, queue, function, options, local_names)


def key_source(keys: KeySource | Iterable[str]) -> KeySource:
    """The source of keys in one form: names, a function, or `None`."""
    if keys is None or callable(keys):
        return keys
    try:
        return normalize_by("task", listed(keys), "keys")
    except InvalidPolicy:
        raise ConfigurationError(
            f"task: keys={shown(keys)} is neither names nor a function; give keys=['account'], or a function of the "
            "task's arguments that returns a mapping"
        ) from None


def listed(given: object) -> Any:
    """One name or several, from any iterable. Whether they are names is checked elsewhere."""
    is_listed = isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping)
    return tuple(given) if is_listed else given  # type: ignore[arg-type]


def check_task_place(name: object, queue: object) -> None:
    """Refuse invalid names of a task or of its queue."""
    is_text = isinstance(name, str) and bool(name.strip()) and is_storable(name)
    if name is not None and not (is_text and len(str(name).encode()) <= MAX_KEY_BYTES):
        raise ConfigurationError(
            f"task: name={shown(name)} is not a name; give text of 1 to {MAX_KEY_BYTES} bytes, such as 'shop.deliver', "
            "or leave it out"
        )
    if not isinstance(queue, str) or _QUEUE_NAME.match(queue) is None:
        raise ConfigurationError(
            f"task: queue={shown(queue)} is not the name of a queue; give that of one, such as queue='webhooks'"
        )


def check_function(function: Any, name: str | None) -> None:
    """Refuse what a worker could not call: a task is a plain function."""
    what = f"task: {shown(function)}"
    place = getattr(function, "__qualname__", None)
    if inspect.isclass(function):
        raise ConfigurationError(f"{what} is a class; a task is a function: write one that makes what it needs")
    if isinstance(function, staticmethod | classmethod):
        kind = type(function).__name__
        raise ConfigurationError(f"{what} is a {kind}; define the function at a module's top, outside of the class")
    if inspect.ismethod(function):
        raise ConfigurationError(
            f"{what} is bound to an object, which no worker has; write a function that makes or finds the object"
        )
    if not callable(function):
        raise ConfigurationError(f"{what} is not a function; write @app.task above one")
    if place is None:
        raise ConfigurationError(f"{what} is not a plain function; write one that calls it: def work(…): return …")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigurationError(f"task: {place} is a generator; a task returns one value: return a list, or enqueue")
    if place.endswith("<lambda>") and name is None:
        raise ConfigurationError(f"task: function {place} has no name of its own; write a def, or give name=")
    if _is_method(function, place):
        raise ConfigurationError(
            f"task: {place} is a method, and a worker has no object to call it on; define the function at a module's "
            "top, and give it what it needs as arguments"
        )


def _is_method(function: Any, place: str) -> bool:
    """Whether it is defined in a class and takes an object of it."""
    owner = place.rpartition(".")[0]
    if not owner or owner.endswith("<locals>"):
        return False
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is not None and code.co_varnames[: code.co_argcount][:1] in (("self",), ("cls",))


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it returns a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def name_of(function: Callable[..., Any]) -> str:
    """`module.qualname`. For a script that runs as `__main__`, the name that it would be imported by."""
    module = function.__module__
    if module == "__main__":
        main = sys.modules["__main__"]
        spec = getattr(main, "__spec__", None)
        module = spec.name if spec else Path(getattr(main, "__file__", None) or "__main__").stem
    return f"{module}.{function.__qualname__}"


class Registry:
    """The tasks of an app by name."""

    def __init__(self) -> None:
        self._tasks: dict[str, Task[..., Any]] = {}
        self.find = self._tasks.get
        """The task with this name, or `None`."""

    def add(self, task: Task[..., Any]) -> None:
        known = self._tasks.get(task.name)
        if known is not None:
            raise ConfigurationError(
                f"task {task.name!r} is defined twice, in {_place(known.function)} and in {_place(task.function)}; "
                f"give one of them another name="
            )
        self._tasks[task.name] = task

    def __getitem__(self, name: str) -> Task[..., Any]:
        task = self._tasks.get(name)
        if task is None:
            raise UnknownTask(f"no task is named {shown(name)}; known are: {', '.join(sorted(self._tasks)) or 'none'}")
        return task

    def __iter__(self) -> Iterator[Task[..., Any]]:
        return iter(self._tasks.values())

    def __len__(self) -> int:
        return len(self._tasks)

    def of_queue(self, queue: str) -> Sequence[Task[..., Any]]:
        return [task for task in self._tasks.values() if task.queue == queue]


def _delay(what: str, delay: Duration) -> int:
    try:
        amount = microseconds(delay)
    except ConfigurationError as error:
        raise InvalidJob(f"{what}: delay: {error}") from None
    if amount < 0:
        raise InvalidJob(f"{what}: delay={delay!r} lies in the past; leave it out to run at once")
    if amount > LONGEST_DELAY:
        raise InvalidJob(f"{what}: delay={delay!r} is longer than a hundred years")
    return amount


def as_id(what: str, given: UUID | str) -> UUID:
    try:
        return given if isinstance(given, UUID) else UUID(str(given))
    except ValueError:
        raise InvalidJob(f"{what}={shown(given)} is not a UUID; give one, such as uuid.uuid4()") from None


def _run_at(what: str, run_at: datetime) -> Instant:
    if not isinstance(run_at, datetime):
        raise InvalidJob(f"{what}: run_at={shown(run_at)} is not a datetime; for a duration use delay=")
    try:
        return as_instant(run_at)
    except ConfigurationError as error:
        raise InvalidJob(f"{what}: run_at: {error}") from None


def _place(function: Callable[..., Any]) -> str:
    try:
        code = inspect.unwrap(function).__code__
    except AttributeError:
        return repr(function)
    return f"{code.co_filename}:{code.co_firstlineno}"


class Job(msgspec.Struct, Generic[R], eq=False, gc=False):
    """A handle of a stored job. It holds only the id: every question goes to the database."""

    # There may be many thousands of them. They are never part of a cycle, so the garbage collector can skip them.
    id: UUID
    _source: Producer
    outcome: Outcome | None = None
    """The outcome of the enqueue that returned this handle; `None` if the handle was not returned by an enqueue."""
    backlog: FullBacklog | None = None
    """The backlog that was full when the job was enqueued; `None` if there was room."""

    def __repr__(self) -> str:
        return f"<job {self.id}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Job) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    @property
    def is_over_backlog(self) -> bool:
        """Whether its backlog was full when it was enqueued: the producer should slow down."""
        return self.backlog is not None

    async def record(self) -> JobRecord:
        """The job as it is stored, or `JobNotFound`."""
        return await (await self._source.opened()).job(self.id)

    async def attempts(self) -> list[AttemptRecord]:
        """Every attempt so far, in order."""
        return await (await self._source.opened()).run(records.attempts(self.id))

    async def status(self) -> State:
        """The current state of the job."""
        return (await self.record()).state

    async def explain(self) -> Explanation:
        """Everything that the job waits for: what, until when, and who holds it. Read-only."""
        store = await self._source.opened()
        facts = await store.ask(lambda moment: moment.examine(job=self.id))
        return explain(facts, self._source.known_tasks(), self._source.forwarded)

    async def cancel(self) -> State:
        """Cancel the job if it waits; ask it to stop if it runs. Returns its state."""
        return await (await self._source.opened()).cancel(self.id)

    @known_options
    async def replay(self, *, on_conflict: OnReplayConflict = "reject") -> State:
        """Put the job back into its queue. `ReplayRefused` unless it is dead or cancelled. Returns the state it is in.

        If another job holds its unique key, that is refused too; with `on_conflict="replace"` a holder that waits is
        cancelled, and only one that runs refuses.
        """
        store = await self._source.opened()
        (handled,) = await store.replay([self.id], on_conflict=checked_on_replay_conflict(on_conflict))
        if handled.was is None:
            raise no_such_job(self.id)
        if handled.skipped is not None:
            remedy = "" if handled.holder is None else await _remedy(store, handled.holder, on_conflict)
            raise ReplayRefused(self.id, handled.skipped, handled.holder, remedy)
        return await self.status()

    @known_options
    async def result(self, timeout: timedelta | str | float | None = None) -> R:
        """What the task returned, once it has. `JobFailed`, `JobCancelled` or `ResultTimeout` say otherwise."""
        time = None if timeout is None else duration_of("result: timeout", timeout)
        store = await self._source.opened()
        if time is not None and time <= 0:
            record = await store.job(self.id)
        else:
            record = await store.wait_until_ended(self.id, None if time is None else await store.now() + time)
        if not record.state.is_final:
            waited = f"{timeout:g} s" if isinstance(timeout, int | float) else timeout
            raise ResultTimeout(
                f"job {self.id} ({record.task}) is still {record.state} after {waited}; it goes on all the "
                f"same. Ask what holds it with `fairlane explain {self.id}` (and --app or --url, where FAIRLANE_URL "
                "does not name the database) or job.explain()"
            )
        return self._read(record)

    status_sync = blocking(status)
    explain_sync = blocking(explain)
    cancel_sync = blocking(cancel)
    result_sync = blocking(result)

    def _read(self, record: JobRecord) -> R:
        what = f"job {self.id} ({record.task})"
        match record.state:
            case State.DEAD:
                attempts = f"{record.attempt} of {record.max_attempts} attempts"
                raise JobFailed(f"{what} failed after {attempts}: {record.error}")
            case State.CANCELLED:
                raise JobCancelled(f"{what} was cancelled: {record.error or 'before it ran'}")
        codec = self._source.codec_of(record.task)
        value: Any = codec.decode_result(record.result) if codec else record.result
        return cast(R, value)


async def _remedy(store: Store, holder: UUID, on_conflict: OnReplayConflict) -> str:
    """What to do if this job holds the unique key of a job that should be replayed."""
    try:
        state = (await store.job(holder)).state
    except JobNotFound:
        state = None
    if state is None or state.is_final:
        return "that job has ended, and the window of its key lasts: replay once that has passed"
    if state is State.RUNNING:
        return (
            "that job runs, and no replay stops it: wait for it to end, or ask it to stop "
            f"(`fairlane jobs cancel {holder}`), and replay then"
        )
    if on_conflict == "replace":
        return "that job waits again by now: replay once more"
    return "wait for that job to end, or replay with on_conflict='replace', which cancels it while it waits"


class Enqueued(list[Job[R]]):
    """The result of a bulk enqueue: a handle for each call, in order, each with its outcome.

    A call whose unique key was taken has the handle of the job that holds the key.
    """

    @property
    def stored(self) -> list[Job[R]]:
        """The new jobs."""
        return [job for job in self if job.outcome is not None and job.outcome.is_stored]

    @property
    def duplicates(self) -> list[Job[R]]:
        """The existing jobs that stand for calls that were not stored."""
        return [job for job in self if job.outcome is Outcome.DUPLICATE]

    @property
    def refused(self) -> list[Job[R]]:
        """The existing jobs whose unique keys caused calls to be refused."""
        return [job for job in self if job.outcome is Outcome.REFUSED]

    @property
    def full(self) -> list[Job[R]]:
        """Calls that were not stored because a backlog was full. There are no jobs with these ids."""
        return [job for job in self if job.outcome is Outcome.FULL]

    @property
    def over_backlog(self) -> list[Job[R]]:
        """Calls that found a full backlog, stored or not: the producer should slow down."""
        return [job for job in self if job.is_over_backlog]

    def __repr__(self) -> str:
        refused = len(self.refused) + len(self.full)
        return f"<{len(self.stored)} enqueued, {len(self.duplicates)} duplicates, {refused} refused>"


def handles_of(
    jobs: Sequence[NewJob], conflicts: Mapping[UUID, Conflict], verdicts: Verdicts, source: Producer
) -> Enqueued[Any]:
    """The handles of these jobs, each with its outcome."""
    if not (conflicts or verdicts.told or verdicts.refused):
        return Enqueued(Job(job.id, source, Outcome.ENQUEUED) for job in jobs)
    handles: Enqueued[Any] = Enqueued()
    for job in jobs:
        if (refusal := verdicts.refused.get(job.id)) is not None:
            handles.append(Job(job.id, source, Outcome.FULL, refusal))
            continue
        outcome, stands = became(job.id, conflicts)
        handles.append(Job(stands, source, outcome, verdicts.told.get(job.id) if outcome.is_stored else None))
    return handles


class Foreseen(msgspec.Struct, frozen=True):
    """What an enqueue would do."""

    outcome: Outcome
    holder: UUID | None = None
    """The job that holds the unique key."""
    payload_differs: bool = False
