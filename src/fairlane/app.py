"""The composition root: an app knows what a program declares and its database, and puts them together."""

from __future__ import annotations

import asyncio
import getpass
import inspect
import logging
import os
import re
import socket
import threading
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import TracebackType
from typing import Any, Literal, ParamSpec, Protocol, TypeVar, cast, overload
from uuid import UUID, uuid4

from fairlane.clock import Clock, Instant, SystemClock, microseconds
from fairlane.codec import Codec, PayloadCodec
from fairlane.cron.recurrence import Missed
from fairlane.cron.runner import Firing
from fairlane.cron.schedules import Schedule, declared_schedule
from fairlane.declaration_checks import (
    check_function,
    check_keys,
    check_name,
    check_options,
    check_task_place,
    checked_count,
    checked_size,
    checked_time,
    folder_of,
    is_async,
    key_source,
    name_of,
    names,
    width_of,
)
from fairlane.effects import Values
from fairlane.enqueue import Producing, Stamp
from fairlane.errors import (
    BacklogFull,
    ConfigurationError,
    InvalidJob,
    InvalidPolicy,
    PayloadDiffers,
    StoreUnavailable,
    UniqueConflict,
    UnknownQueue,
)
from fairlane.events import Event
from fairlane.handle import Enqueued, Foreseen, Job, handles_of
from fairlane.job import Outcome
from fairlane.loop_thread import BackgroundLoop, CallerThread, refuse_inside_a_loop
from fairlane.manual_claims import Ear
from fairlane.operations import Operations
from fairlane.operations.metrics import limits_waited_for
from fairlane.parameters import check_value, checked, known_options, shown
from fairlane.policy.division import divided
from fairlane.policy.fair import Fair
from fairlane.policy.gates import Limit
from fairlane.policy.keys import normalize_by
from fairlane.policy.policy import Policy, check_agreement, checked_limits, refuse_pointless
from fairlane.policy.retry import Backoff
from fairlane.policy.unique import Unique
from fairlane.queue import Hand, Queue, QueueSource, partitions_served
from fairlane.redaction import Redact, guard_loggers
from fairlane.store.protocol import Retention, Store, WorkerIdentity
from fairlane.task import (
    AsyncTask,
    BoundTask,
    Call,
    Duration,
    KeySource,
    Producer,
    Progress,
    Raised,
    Registry,
    SyncTask,
    Task,
    TaskOptions,
    as_unique,
    not_a_call,
    one_by_one,
)
from fairlane.telemetry.telemetry import Telemetry
from fairlane.worker.options import WorkerOptions
from fairlane.worker.runs import Middleware, around_enqueue, wrapping_enqueues
from fairlane.worker.upkeep import keep_up
from fairlane.worker.worker import Worker, name_of_process

P = ParamSpec("P")
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


log = logging.getLogger("fairlane.app")
guard_loggers()

H = TypeVar("H", bound=Callable[[Any], object])
R = TypeVar("R")
W = TypeVar("W")

STREAMED_AT_ONCE = 5_000


class App(Declarations):
    """A program's queues and tasks, and the database they live in. It opens itself at first use."""

    @known_options
    def __init__(
        self,
        url: str | None = None,
        *,
        clock: Clock | None = None,
        durable_claims: bool = False,
        retention: Duration = "24h",
        dead_retention: Duration = "7d",
        retention_count: int | None = None,
        max_payload: int = 256 * 1024,
        codec: PayloadCodec | None = None,
        redact: Redact | None = None,
    ) -> None:
        super().__init__()
        check_value("App", "url", url, str | None)
        if url == "":  # a variable that is not set, as a rule: jobs in a file that nobody looks at would be a surprise
            raise ConfigurationError("App: url='' names no database; give its URL, or leave it out for FAIRLANE_URL")
        check_value("App", "clock", clock, Clock | None)
        check_value("App", "durable_claims", durable_claims, bool)
        check_value("App", "codec", codec, PayloadCodec | None)
        check_value("App", "redact", redact, Redact | None)
        self.codec = codec
        self.redact = redact
        beside = folder_of(inspect.currentframe())
        self.url = url or os.environ.get("FAIRLANE_URL") or f"sqlite:///{beside / 'fairlane.db'}"
        self.clock: Clock = clock or SystemClock()
        self.max_payload = checked_size(max_payload)
        self.retention = Retention(
            done=checked_time("retention", retention),
            dead=checked_time("dead_retention", dead_retention),
            keep=checked_count(retention_count),
        )
        self.values = Values(self)
        self.operations = Operations(self)
        self._durable_claims = durable_claims
        self.telemetry = Telemetry(self.operations.metrics)
        self._make_store = store_factory(self.url, self.clock, durable_claims)
        self._connection: Connection | None = None
        self._opening = asyncio.Lock()
        self._background: BackgroundLoop | None = None
        self._retired: BackgroundLoop | None = None
        self._blocking = threading.Lock()
        self._inherited: list[object] = []

    def __repr__(self) -> str:
        return f"<App {without_password(self.url)}>"

    @overload
    def on_event(self, handler: H, /) -> H: ...
    @overload
    def on_event(self, *kinds: type[Event]) -> Callable[[H], H]: ...
    def on_event(self, *kinds: Any) -> Any:
        """Call a function, async or not, for each event of this process, or only for these kinds; see `events`.

        Add handlers before the worker starts. They can neither stop nor delay a job.
        """
        return self.telemetry.on_event(*kinds)

    @property
    def actor(self) -> str:
        """Who acts where an operation names nobody: FAIRLANE_ACTOR, else user@host."""
        return actor_of_process()

    # Opening and closing.

    def make_store(self) -> Store:
        """A store of this app's database, not opened: for tools that look at it without declaring anything."""
        return self._make_store()

    @checked()
    def move_to(self, url: str, clock: Clock | None = None) -> None:
        """Use another database from now on, and another clock: for tests, before the app is used or after it was
        closed. What is open stays where it is until then."""
        self._make_store = store_factory(url, clock or self.clock, self._durable_claims)
        self.url, self.clock = url, clock or self.clock

    async def opened(self) -> Store:
        """The open store; the first caller opens it, checks the app and declares its queues."""
        return (await self._connected()).store

    async def _connected(self) -> Connection:
        loop = asyncio.get_running_loop()
        self._refuse_if_retired(loop)
        connection = self._connection
        if connection is None:
            async with self._opening:
                connection = self._connection or await self._open(loop)
                self._connection = connection
        if connection.loop is not loop:
            ended = " that has ended" if connection.loop.is_closed() else ""
            raise ConfigurationError(
                f"this App was opened in another event loop{ended}; use `async with app:`, so that it is closed with "
                f"the loop it was opened in, or make one App per loop"
            )
        return connection

    async def _open(self, loop: asyncio.AbstractEventLoop) -> Connection:
        self.check()
        store = self._make_store()
        await store.open()
        self.telemetry.measured()
        producing = Producing(store, self.clock, self._declared, self.max_payload, self.telemetry)
        connection = Connection(store, loop, hand_of(store, self.clock), producing)
        try:
            for partitions in self._declarations():
                await producing.declare(partitions)
            self._refuse_if_retired(loop)
        except BaseException:
            await store.close()
            raise
        return connection

    def _refuse_if_retired(self, loop: asyncio.AbstractEventLoop) -> None:
        # A blocking call that was about to begin must not open the app again in a loop that is being stopped.
        if self._retired is not None and loop is self._retired.loop:
            raise StoreUnavailable("the app was closed while this call waited; call again, and it opens itself")

    async def close(self) -> None:
        """Close the database. The app opens itself again when it is used again."""
        with self._blocking:
            self._leave_to_parent()
            connection, self._connection = self._connection, None
            background, self._background = self._background, None
            self._retired = background
        self._opening = asyncio.Lock()
        if background is not None:
            if connection is not None:
                await asyncio.wrap_future(background.submit(connection.close()))
            background.stop()
        elif connection is not None:
            await connection.close()

    def open_sync(self) -> None:
        """Open the database now, for code that is not async: on SQLite, before a transaction of its own begins."""
        self.run_blocking(self.opened())

    def close_sync(self) -> None:
        """`close` for code that is not async."""
        asyncio.run(self.close())

    async def __aenter__(self) -> App:
        await self.opened()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def migrate(self) -> list[str]:
        """Bring the database's schema up to date. Returns the names of the migrations that were applied."""
        store = self._make_store()
        try:
            return await store.migrate()
        finally:
            await store.close()

    # Producing.

    @known_options
    async def enqueue_many(
        self, calls: Iterable[Call[R]], tx: Any = None, progress: Progress | None = None
    ) -> Enqueued[R]:
        """Store these calls as jobs, all or none; durable when this returns, or with the caller's transaction.

        Each has the outcome that it would have alone: a call whose unique key is held is a duplicate, or refused, and
        the others are stored all the same. `progress` is told how many have been stored, and how many there are;
        if it fails, that is logged and the jobs are stored all the same.
        """
        return await self._store_calls(list(one_by_one(calls, "enqueue_many")), tx, progress)

    async def _store_calls(
        self, listed: list[Call[R]], tx: Any, progress: Progress | None = None, *, pace: bool = False
    ) -> Enqueued[R]:
        check_value("enqueue_many", "progress", progress, Progress | None, error=InvalidJob)
        for call in listed:
            if not isinstance(call, Call):
                raise not_a_call(call)
            if call.options.tx is not None and call.options.tx is not tx:
                raise InvalidJob(f"{call!r} names a transaction of its own; give tx= to enqueue_many, for all of them")
        around = wrapping_enqueues(self.middlewares)
        if not around:
            return await self._store_bulk(listed, tx, progress, pace)
        return await around_enqueue(around, listed, lambda calls: self._store_bulk(calls, tx, progress, pace))

    async def _store_bulk(
        self, calls: Sequence[Call[R]], tx: Any, progress: Progress | None, pace: bool
    ) -> Enqueued[R]:
        connection = await self._connected()
        return handles_of(*await connection.producing.stored(calls, tx, progress, pace=pace), self)

    @checked(unchecked=["calls"])
    async def enqueue_stream(
        self, calls: Iterable[Call[R]], *, batch: int = STREAMED_AT_ONCE, tx: Any = None, pace: bool = False
    ) -> AsyncIterator[Enqueued[R]]:
        """Store calls as they come, a batch at a time: any number of them, in constant memory.

        Each batch is stored, all or none, when it is handed out; with `tx`, all of them with the caller's transaction.
        With `pace`, each batch waits until no backlog that it joins is full; so none of it is too many by more than a
        batch, and none of it is refused.
        """
        if pace and tx is not None:
            raise ConfigurationError(
                "enqueue_stream: pace=True waits for workers, which see nothing of tx= before it commits; give one of "
                "the two"
            )
        if batch < 1:
            raise ConfigurationError(f"enqueue_stream: batch={batch} is not a number of jobs; give one of at least 1")
        coming = one_by_one(calls, "enqueue_stream")
        while listed := list(islice(coming, batch)):
            yield await self._store_calls(listed, tx, pace=pace)

    async def enqueue_one(self, call: Call[R]) -> Job[R]:
        """Store one call; `UniqueConflict` or `BacklogFull` if it is refused."""
        around = wrapping_enqueues(self.middlewares)
        if not around:
            return await self._store_one(call)

        async def inside(calls: Sequence[Call[R]]) -> Enqueued[R]:
            (given,) = calls
            return Enqueued([await self._store_one(given)])

        (job,) = await around_enqueue(around, [call], inside)
        return job

    async def _store_one(self, call: Call[R]) -> Job[R]:
        connection = await self._connected()
        jobs, conflicts, verdicts = await connection.producing.stored([call], call.options.tx)
        for full in verdicts.refused.values():
            raise BacklogFull(full.queue, full.key, full.ready, full.max)
        for conflict in conflicts.values():
            if conflict.outcome is Outcome.REFUSED:
                kind = PayloadDiffers if conflict.differs else UniqueConflict
                raise kind(call.task.name, conflict.holder)
        return handles_of(jobs, conflicts, verdicts, self)[0]

    async def foresee(self, call: Call[R]) -> Foreseen:
        """What enqueueing this call would do now."""
        return await (await self._connected()).producing.foreseen(call)

    @known_options
    def enqueue_many_sync(self, calls: Iterable[Call[R]], tx: Any = None) -> Enqueued[R]:
        """`enqueue_many` for code that is not async."""
        return self.run_blocking(self.enqueue_many(calls, tx))

    def job(self, job: UUID | str) -> Job[Any]:
        """The handle of a job whose id is known."""
        try:
            return Job(job if isinstance(job, UUID) else UUID(job), self)
        except (ValueError, TypeError, AttributeError):
            raise InvalidJob(f"job={shown(job)} is not the id of a job; give a UUID, or one as text") from None

    def known_tasks(self) -> list[str]:
        """The names of the tasks of this app."""
        return [task.name for task in self.registry]

    def codec_of(self, task: str) -> Codec | None:
        """How a task's calls and results are stored; `None` for a task of another program."""
        found = self.registry.find(task)
        return None if found is None else found.codec

    @checked()
    def run_blocking(self, work: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine of this app from code that is not async, in the loop that the app was opened in."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            raise refuse_inside_a_loop(work)
        with self._blocking, CallerThread() as caller:
            running = asyncio.run_coroutine_threadsafe(work, self._loop_of_threads())
        return caller.wait_for(running)

    def is_open_in(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether this app was opened in that event loop: what blocks it there would wait for itself."""
        return self._connection is not None and self._connection.loop is loop

    def _loop_of_threads(self) -> asyncio.AbstractEventLoop:
        """Where work for threads is done; asked for under the lock."""
        self._leave_to_parent()
        if self._connection is not None and self._connection.loop.is_running():
            return self._connection.loop
        self._background = self._background or BackgroundLoop()
        return self._background.loop

    def _leave_to_parent(self) -> None:
        """After a fork: the thread and its connection stay with the parent. They are kept and not closed, for whatever
        we did to them would come from the parent, as far as the database can see."""
        if self._background is not None and not self._background.is_ours:
            self._inherited.append((self._background, self._connection))
            self._background = self._connection = None
            self._opening = asyncio.Lock()

    # Working.

    @checked()
    async def worker(self, options: WorkerOptions | None = None) -> Worker:
        """A worker for this app's tasks, in this process: `await (await app.worker()).run()`. Queues that a forwarder
        dispatches are served only by name."""
        own = [name for name in self.queue_names if name not in self.forwarded]
        return await self.make_worker(Worker, (options or WorkerOptions()).serving(own))

    async def make_worker(self, kind: Callable[..., W], options: WorkerOptions) -> W:
        """A worker of some kind: for forwarders, not for programs."""
        connection = await self._connected()
        served = await partitions_served(connection.store, [share.name for share in options.shares], self.queue_names)
        return kind(
            connection.store,
            self.registry,
            options,
            self.clock,
            served=served,
            retention=self.retention,
            max_result=self.max_payload,
            stamp=connection.producing.stamp,
            middlewares=self.middlewares,
            firing=self._firing(connection),
            telemetry=self.telemetry,
            look_again=connection.producing.look_again,
            make_store=None if is_in_memory(self.url) else self._make_store,
            waited_for=partial(limits_waited_for, connection.store),
        )

    def _firing(self, connection: Connection, only: Collection[str] | None = None) -> Firing | None:
        fired = [each for each in self.schedules.values() if only is None or each.name in only]
        return Firing(connection.store, fired, connection.producing.admitted) if fired else None

    @checked()
    async def fire_schedules(self, only: Collection[str] | None = None) -> Instant | None:
        """Fire what is due of this app's schedules, or of those named in `only`, as its workers do by themselves: for
        programs without one, and for tests. Returns when the next slot comes."""
        firing = self._firing(await self._connected(), only)
        if firing is None:
            return None
        await firing.declare()
        return await firing.look()

    async def stamper(self) -> Stamp:
        """What makes jobs of calls, here and now: for claims that are held, not for programs."""
        producing = (await self._connected()).producing
        await producing.look_again()
        return producing.stamp

    async def hand(self, policies: Sequence[Policy]) -> Hand:
        """What a queue claims with by hand: for its methods, not for programs."""
        connection = await self._connected()
        if policies[0].queue not in connection.producing.policies:
            await connection.producing.declare(policies)
        await connection.producing.look_again()
        return connection.hand

    def in_force(self, queue: str) -> Policy | None:
        """The policy of a queue as this app has last seen it in the database: for its methods, not for programs."""
        return None if self._connection is None else self._connection.producing.policies.get(queue)

    async def wait_for_room(self, policies: Sequence[Policy], keys: Mapping[str, object], timeout: int | None) -> bool:
        """Wait until no backlog of these keys is full: for the methods of a queue, not for programs."""
        await self.hand(policies)
        producing = (await self._connected()).producing
        return await producing.wait_for_room(policies[0].queue, keys, timeout)

    async def upkeep(self) -> bool:
        """One bounded round of what workers do by themselves, for programs without one; whether there is more to do.

        Claims whose lease ran out are ended, finished jobs past their time and idle scheduling state removed.
        """
        return await keep_up(await self.opened(), self.retention, self.queue_names)


HOST = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^:\[\]]*)(:(?P<port>[0-9]*))?")


@dataclass(slots=True)
class Connection:
    """An open store, the event loop that it belongs to, and what an app does with it."""

    store: Store
    loop: asyncio.AbstractEventLoop
    hand: Hand
    producing: Producing

    async def close(self) -> None:
        await self.producing.telemetry.hooks.flush()
        await self.hand.ear.close()
        await self.store.close()


def store_factory(url: str, clock: Clock, durable_claims: bool) -> Callable[[], Store]:
    """How to make the store of a URL; checked now, made later."""
    scheme, separator, rest = url.partition("://")
    if separator and scheme == "sqlite":
        path = rest.removeprefix("/") or None
        if path is not None and not rest.startswith("/"):
            raise ConfigurationError(
                f"{shown(url)} names a host; a SQLite file is written sqlite:///relative.db or sqlite:////absolute.db"
            )

        def sqlite() -> Store:
            from fairlane.store.sqlite import SqliteStore

            return SqliteStore(path, clock=clock, durable_claims=durable_claims)

        return sqlite
    if separator and scheme in ("postgresql", "postgres"):
        _check_hosts(url, rest)

        def postgres() -> Store:
            from fairlane.store.postgres import PostgresStore

            # The machine's own clock is no better than the database's, and differs from machine to machine.
            own = None if isinstance(clock, SystemClock) else clock
            return PostgresStore(url, clock=own, durable_claims=durable_claims)

        return postgres
    raise ConfigurationError(
        f"{shown(without_password(url))} is not a database URL that Fairlane knows; possible are sqlite:///file.db, "
        f"sqlite:// (in memory) and postgresql://user@host/database"
    )


def is_in_memory(url: str) -> bool:
    """Whether nobody but the store that was made for this URL can see what is in it."""
    return url in ("sqlite://", "sqlite:///")


def _check_hosts(url: str, rest: str) -> None:
    """Refuse what no driver can connect to. There may be several hosts, or none, or the folder of a socket."""
    hosts = rest.partition("?")[0].partition("/")[0].rpartition("@")[2]
    for host in hosts.split(","):
        found = HOST.fullmatch(host)
        if found is None or int(found["port"] or 0) > 65_535:
            raise ConfigurationError(
                f"{without_password(url)!r} is not a database URL: {host!r} is neither a host nor a host and a port "
                "from 1 to 65535; write postgresql://user@host:5432/database"
            )


def hand_of(store: Store, clock: Clock) -> Hand:
    """With what this process claims by hand."""
    name = name_of_process()
    # The ear has an id of its own: a claim that fills its slots withdraws its worker, and the ear waits for others.
    return Hand(store, WorkerIdentity(uuid4(), name), Ear(store, clock, WorkerIdentity(uuid4(), name)))


def actor_of_process() -> str:
    """Who acts where nobody is named: FAIRLANE_ACTOR, else user@host."""
    if named := os.environ.get("FAIRLANE_ACTOR", "").strip():
        return named
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may run under a number that has no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


_SECRETS = re.compile(r"(?<=[?&])((?:ssl)?password)=[^&]*", re.IGNORECASE)


def without_password(url: str) -> str:
    """A URL that may be shown."""
    head, at, tail = url.rpartition("@")
    scheme, separator, login = head.partition("://")
    shown = f"{scheme}{separator}{login.partition(':')[0]}{at}{tail}" if at else url
    return _SECRETS.sub(r"\1=…", shown)
