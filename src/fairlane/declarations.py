"""What a program declares: its queues, its tasks, and what goes around them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Literal, ParamSpec, Protocol, TypeVar, cast, overload

from fairlane.clock import microseconds
from fairlane.codec import PayloadCodec
from fairlane.cron.recurrence import Missed
from fairlane.cron.schedules import Schedule, declared_schedule
from fairlane.declaration_checks import (
    check_function,
    check_keys,
    check_name,
    check_options,
    check_task_place,
    is_async,
    key_source,
    name_of,
    names,
    width_of,
)
from fairlane.errors import ConfigurationError, InvalidPolicy, UnknownQueue
from fairlane.parameters import known_options, shown
from fairlane.policy.division import divided
from fairlane.policy.fair import Fair
from fairlane.policy.gates import Limit
from fairlane.policy.keys import normalize_by
from fairlane.policy.policy import Policy, check_agreement, checked_limits, refuse_pointless
from fairlane.policy.retry import Backoff
from fairlane.policy.unique import Unique
from fairlane.queue import Queue, QueueSource
from fairlane.task import (
    AsyncTask,
    BoundTask,
    Call,
    Duration,
    KeySource,
    Producer,
    Raised,
    Registry,
    SyncTask,
    Task,
    TaskOptions,
    as_unique,
)
from fairlane.worker.runs import Middleware

P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M", bound=Middleware)

DEFAULT_QUEUE = "default"
_BACKOFF = Backoff()


class TaskDecorator(Protocol):
    """What `app.task(…)` returns."""

    @overload
    def __call__(  # type: ignore[overload-overlap]  # a coroutine function matches both; the first one wins
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> AsyncTask[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> SyncTask[P, R]: ...


class Declarations:
    """The queues and tasks of an app. What is declared here is known to the database once the app is opened."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.codec: PayloadCodec | None = None
        """What arguments and results are stored as, beyond JSON."""
        self.queues: dict[str, Queue] = {}
        self.forwarded: set[str] = set()
        """Queues whose jobs an engine runs: a forwarder has declared tasks there."""
        self.schedules: dict[str, Schedule] = {}
        self.middlewares: list[Middleware] = []
        """What goes around runs and enqueues, the outermost first."""

    @known_options
    def queue(
        self,
        name: str,
        *,
        fair: Fair | None = None,
        limits: Limit | Iterable[Limit] = (),
        keys: Iterable[str] = (),
        priority_step: Duration = "60s",
        partitions: int | None = None,
        partition_by: str | Iterable[str] = (),
        per_partition: Limit | Iterable[Limit] = (),
    ) -> Queue:
        """Declare a queue and its policy. Without one, a queue is first come, first served.

        With `partitions`, it is divided into so many queues with a claim lock each, by the keys that `partition_by`
        names. Limits hold for all of them together; those of `per_partition` hold in each by itself.
        """
        policy = Policy(name, fair, cast(tuple[Limit, ...], limits), names(keys), _step(name, priority_step))
        check_name(name, self.queues)
        what = f"queue {name!r}"
        by = normalize_by(what, names(partition_by), "partition_by")
        own = checked_limits(what, "per_partition", per_partition)
        refuse_pointless(what, policy.limits)
        refuse_pointless(what, own)
        parts = divided(policy, width_of(name, partitions, by, own), by, own)
        check_agreement(parts[0], [queue.partitions[0] for queue in self.queues.values()])
        self.queues[name] = Queue(policy, parts, cast(QueueSource, self))
        return self.queues[name]

    @overload
    def task(  # type: ignore[overload-overlap]  # as above
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> AsyncTask[P, R]: ...
    @overload
    def task(self, function: Callable[P, R], /) -> SyncTask[P, R]: ...
    @overload
    def task(
        self,
        /,
        *,
        queue: str = DEFAULT_QUEUE,
        name: str | None = None,
        max_attempts: int = 5,
        backoff: Backoff = _BACKOFF,
        retry_on: Raised = (Exception,),
        dead_on: Raised = (),
        timeout: Duration | None = None,
        priority: int = 0,
        keys: KeySource | Iterable[str] = None,
        unique: Unique | object | None = None,
        executor: Literal["thread", "process"] = "thread",
    ) -> TaskDecorator: ...
    def task(
        self,
        function: Callable[..., Any] | None = None,
        /,
        *,
        queue: str = DEFAULT_QUEUE,
        name: str | None = None,
        **options: Any,
    ) -> Any:
        """Register a function, async or not, as a task. It stays callable as before."""
        frame = inspect.currentframe()
        caller = frame.f_back if frame else None
        # Annotations of a function that is defined inside another one may name its neighbours there.
        local_names = dict(caller.f_locals) if caller and caller.f_code.co_name != "<module>" else None
        check_options("task", options, ("queue", "name", *TaskOptions.__dataclass_fields__))
        if "keys" in options:
            options["keys"] = key_source(options["keys"])
        options["unique"] = as_unique(options.get("unique"))
        checked = TaskOptions(**options)
        check_task_place(name, queue)

        def register(function: Any) -> Task[..., Any]:
            if isinstance(function, Task):
                function = function.function
            check_function(function, name)
            kind: type[Task[..., Any]] = AsyncTask if is_async(function) else SyncTask
            chosen = name_of(function) if name is None else name
            task = kind(cast(Producer, self), chosen, queue, function, checked, local_names, self.codec)
            self.registry.add(task)
            return task

        return register if function is None else register(function)

    @overload
    def schedule(
        self,
        cron: str,
        what: Task[..., Any] | BoundTask[..., Any] | Call[Any],
        /,
        *args: Any,
        timezone: str = "UTC",
        missed: Missed = "once",
        name: str | None = None,
    ) -> Schedule: ...
    @overload
    def schedule(
        self,
        what: Task[..., Any] | BoundTask[..., Any] | Call[Any],
        /,
        *args: Any,
        every: Duration,
        missed: Missed = "once",
        name: str | None = None,
    ) -> Schedule: ...
    def schedule(
        self,
        *given: Any,
        every: Duration | None = None,
        timezone: str = "UTC",
        missed: Missed = "once",
        name: str | None = None,
        **unknown: Any,
    ) -> Schedule:
        """Enqueue a task, or a call of one, again and again: by a cron line in a timezone, or `every` so often.

        Any worker of this app fires it, each slot once. `missed` says what becomes of slots that no worker was there
        for: none of them, the last one, or all. Its name is the task's, unless it is given.
        """
        remedy = "arguments by name go into a call: app.schedule(…, task.call({}=…))"
        check_options("schedule", unknown, ("every", "timezone", "missed", "name"), remedy)
        schedule = declared_schedule(given, every, timezone, missed, name)
        if schedule.name in self.schedules:
            raise ConfigurationError(f"schedule {schedule.name!r} is declared twice; give one of them another name=")
        if self.registry.find(schedule.call.task.name) is not schedule.call.task:
            raise ConfigurationError(f"{schedule!r}: {schedule.call.task!r} is a task of another app")
        self.schedules[schedule.name] = schedule
        return schedule

    def middleware(self, middleware: M) -> M:
        """Put something around every run and every enqueue of this app. What is added first is the outermost."""
        if not isinstance(middleware, Middleware):
            raise ConfigurationError(
                f"middleware: {shown(middleware)} is not a Middleware; make an object of a class derived from it"
            )
        self.middlewares.append(middleware)
        return middleware

    def check(self) -> None:
        """Refuse what cannot work as a whole: a limit by a key that no task provides, a task of an unknown queue."""
        for task in self.registry:
            if task.queue != DEFAULT_QUEUE and task.queue not in self.queues:
                raise UnknownQueue(f"task {task.name!r}: declare its queue with app.queue({task.queue!r}, …)")
            task.codec.check_types()
        for queue in self.queues.values():
            check_keys(queue.partitions[0], self.registry.of_queue(queue.name))

    @property
    def queue_names(self) -> list[str]:
        """The queues of this app: those declared, and `default` where it is used."""
        return [policies[0].queue for policies in self._declarations()]

    @property
    def declared_policies(self) -> dict[str, Policy]:
        """What this app declares, by queue; a queue of several partitions by each of them."""
        return {policy.queue: policy for queue in self.queues.values() for policy in queue.partitions}

    def _declared(self, name: str) -> tuple[Policy, ...]:
        if name in self.queues:
            return self.queues[name].partitions
        return (Policy(DEFAULT_QUEUE),) if name == DEFAULT_QUEUE else ()

    def _declarations(self) -> list[tuple[Policy, ...]]:
        declared = [queue.partitions for queue in self.queues.values()]
        if DEFAULT_QUEUE not in self.queues and (not declared or self.registry.of_queue(DEFAULT_QUEUE)):
            declared.append((Policy(DEFAULT_QUEUE),))
        return declared


def _step(queue: str, step: Duration) -> int:
    try:
        return microseconds(step)
    except ConfigurationError as error:
        raise InvalidPolicy(f"queue {queue!r}: priority_step: {error}") from None
