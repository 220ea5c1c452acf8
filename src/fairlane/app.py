"""The composition root: an app connects what a program declares with its database."""

from __future__ import annotations

import asyncio
import getpass
import inspect
import logging
import os
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, Literal, ParamSpec, Protocol, TypeVar, cast, overload
from urllib.parse import urlsplit
from uuid import UUID, uuid4

from fairlane import parameters
from fairlane.clock import Clock, Instant, SystemClock, checked_time, microseconds
from fairlane.codec import Codec, PayloadCodec
from fairlane.cron.recurrence import Missed
from fairlane.cron.schedules import CronRunner, Schedule, declared_schedule
from fairlane.effects import Values
from fairlane.enqueue import BuildJob, Producing
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
from fairlane.job import Outcome
from fairlane.loop_thread import BackgroundLoop, CallerThread, blocking, refuse_inside_a_loop
from fairlane.operations import Operations
from fairlane.operations.metrics import limits_waited_for
from fairlane.parameters import check_value, check_whole, checked, known_options, refuse_unknown_options, shown
from fairlane.policy.fair import Fair
from fairlane.policy.keys import normalize_by
from fairlane.policy.limits import Limit
from fairlane.policy.partitions import divided
from fairlane.policy.policy import Policy, check_agreement, checked_limits, refuse_pointless
from fairlane.policy.unique import Unique
from fairlane.queue import (
    Connection,
    Queue,
    QueueListener,
    QueueSource,
    check_keys,
    check_name,
    partitions_served,
    width_of,
)
from fairlane.redaction import Redact, guard_loggers, without_secrets
from fairlane.store.protocol import Retention, Store, WorkerIdentity
from fairlane.task import (
    AsyncTask,
    Backoff,
    BoundTask,
    Call,
    Duration,
    Enqueued,
    Foreseen,
    Job,
    KeySource,
    Producer,
    Progress,
    Raised,
    Registry,
    SyncTask,
    Task,
    as_id,
    check_function,
    check_task_place,
    handles_of,
    listed,
    make_task,
    name_of,
    not_a_call,
    one_by_one,
    task_options,
)
from fairlane.telemetry.telemetry import Telemetry
from fairlane.worker.options import WorkerOptions
from fairlane.worker.runs import Middleware, around_enqueue, wrapping
from fairlane.worker.runtime import Program
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
    """The queues and tasks of an app. The database learns of them when the app is opened."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.codec: PayloadCodec | None = None
        """Compresses or encrypts stored arguments and results."""
        self.queues: dict[str, Queue] = {}
        self.forwarded: set[str] = set()
        """Queues whose jobs are run by an engine, through a forwarder."""
        self.schedules: dict[str, Schedule] = {}
        self.middlewares: list[Middleware] = []
        """Middlewares around runs and enqueues, outermost first."""

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

        With `partitions`, it is divided by the keys in `partition_by` into that many queues, each with a claim lock of
        its own. Limits apply to all of them together; those in `per_partition` apply to each by itself.
        """
        try:
            step = microseconds(priority_step)
        except ConfigurationError as error:
            raise InvalidPolicy(f"queue {name!r}: priority_step: {error}") from None
        policy = Policy(name, fair, cast(tuple[Limit, ...], limits), listed(keys), step)
        check_name(name, self.queues)
        what = f"queue {name!r}"
        by = normalize_by(what, listed(partition_by), "partition_by")
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
        """Register a function, async or not, as a task. It can still be called directly."""
        frame = inspect.currentframe()
        caller = frame.f_back if frame else None
        # Annotations of a function defined inside another function may refer to local names there.
        local_names = dict(caller.f_locals) if caller and caller.f_code.co_name != "<module>" else None
        chosen = task_options(options)
        check_task_place(name, queue)

        def register(function: Any) -> Task[..., Any]:
            function = function.function if isinstance(function, Task) else function
            check_function(function, name)
            called = name_of(function) if name is None else name
            task = make_task(cast(Producer, self), called, queue, function, chosen, local_names)
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
        """Enqueue a task, or a call of one, periodically: by a cron expression in a timezone, or `every` interval.

        The workers of this app fire it, once for each slot. `missed` says which slots to fire if no worker was running
        at their time: none of them, the last one, or all. The default name is that of the task.
        """
        remedy = "arguments by name go into a call: app.schedule(…, task.call({}=…))"
        refuse_unknown_options("schedule", unknown, ("every", "timezone", "missed", "name"), remedy)
        schedule = declared_schedule(given, every, timezone, missed, name)
        if schedule.name in self.schedules:
            raise ConfigurationError(f"schedule {schedule.name!r} is declared twice; give one of them another name=")
        if self.registry.find(schedule.call.task.name) is not schedule.call.task:
            raise ConfigurationError(f"{schedule!r}: {schedule.call.task!r} is a task of another app")
        self.schedules[schedule.name] = schedule
        return schedule

    def middleware(self, middleware: M) -> M:
        """Add a middleware around every run and every enqueue of this app. The first one added is the outermost."""
        if not isinstance(middleware, Middleware):
            raise ConfigurationError(
                f"middleware: {shown(middleware)} is not a Middleware; make an object of a class derived from it"
            )
        self.middlewares.append(middleware)
        return middleware

    def check(self) -> None:
        """Refuse declarations that do not fit together: a limit by a key that no task provides, an unknown queue."""
        for task in self.registry:
            if task.queue != DEFAULT_QUEUE and task.queue not in self.queues:
                raise UnknownQueue(f"task {task.name!r}: declare its queue with app.queue({task.queue!r}, …)")
            task.codec.check_types()
        for queue in self.queues.values():
            check_keys(queue.partitions[0], self.registry.of_queue(queue.name))

    @property
    def queue_names(self) -> list[str]:
        """The queues of this app: those declared, and `default` if it is used."""
        return [policies[0].queue for policies in self._declarations()]

    @property
    def declared_policies(self) -> dict[str, Policy]:
        """The declared policies by queue, and by partition for partitioned queues."""
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


log = logging.getLogger("fairlane.app")
guard_loggers()

H = TypeVar("H", bound=Callable[[Any], object])
R = TypeVar("R")
W = TypeVar("W")

STREAMED_AT_ONCE = 5_000
LARGEST_PAYLOAD = 1 << 30
"""Bytes: the most that PostgreSQL stores in one value."""
MOST_KEPT = 1_000_000
"""The most finished jobs that can be kept by count: every sweep counts them."""


class App(Declarations):
    """The queues and tasks of a program, and their database, which is opened at first use."""

    @checked(unchecked=["retention", "dead_retention", "retention_count", "max_payload"])
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
        if url == "":  # a variable that is not set, as a rule: jobs in a file that nobody looks at would be a surprise
            raise ConfigurationError("App: url='' names no database; give its URL, or leave it out for FAIRLANE_URL")
        self.codec = codec
        self.redact = redact
        beside = folder_of(inspect.currentframe())
        self.url = url or os.environ.get("FAIRLANE_URL") or f"sqlite:///{beside / 'fairlane.db'}"
        self.clock: Clock = clock or SystemClock()
        self.max_payload = check_whole("max_payload", max_payload, 1, LARGEST_PAYLOAD, "give bytes, or leave it out")
        if retention_count is not None:
            check_whole("retention_count", retention_count, 0, MOST_KEPT, "leave it out to keep all")
        done, dead = checked_time("retention", retention), checked_time("dead_retention", dead_retention)
        self.retention = Retention(done=done, dead=dead, keep=retention_count)
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
        """Call a function, async or not, for each event in this process, or only for these kinds; see `events`.

        Add handlers before the worker starts. They can neither stop nor delay jobs.
        """
        return self.telemetry.on_event(*kinds)

    @property
    def actor(self) -> str:
        """Who acts if an operation does not say: FAIRLANE_ACTOR, otherwise user@host."""
        return actor_of_process()

    # Opening and closing.

    def make_store(self) -> Store:
        """A store for the database of this app, not opened: for tools that read it without declaring anything."""
        return self._make_store()

    @checked()
    def move_to(self, url: str, clock: Clock | None = None) -> None:
        """Use another database and another clock from now on: for tests, before the app is used or after it was closed.
        A connection that is open is not moved."""
        self._make_store = store_factory(url, clock or self.clock, self._durable_claims)
        self.url, self.clock = url, clock or self.clock

    async def opened(self) -> Store:
        """The open store. The first call opens it, checks the app and declares its queues."""
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
        name = name_of_process()
        # The listener has an id of its own: a claim that fills its slots withdraws its worker, and it waits for others.
        alive_lock = QueueListener(store, self.clock, WorkerIdentity(uuid4(), name))
        connection = Connection(store, loop, producing, WorkerIdentity(uuid4(), name), alive_lock)
        try:
            for partitions in self._declarations():
                await producing.declare(partitions)
            self._refuse_if_retired(loop)
        except BaseException:
            await store.close()
            raise
        return connection

    def _refuse_if_retired(self, loop: asyncio.AbstractEventLoop) -> None:
        # A blocking call that was about to start must not open the app again in a loop that is being stopped.
        if self._retired is not None and loop is self._retired.loop:
            raise StoreUnavailable("the app was closed while this call waited; call again, and it opens itself")

    async def close(self) -> None:
        """Close the database. The app opens it again when it is used again."""
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
        """Open the database now, for code that is not async: on SQLite, before it begins a transaction of its own."""
        self.run_blocking(self.opened())

    def close_sync(self) -> None:
        """`close` for code that is not async."""
        asyncio.run(self.close())

    async def __aenter__(self) -> App:
        await self.opened()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def migrate(self) -> list[str]:
        """Apply the migrations that the database lacks. Returns their names."""
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
        """Store these calls as jobs, all or none: durably when this returns, or with the caller's transaction.

        Each call has the outcome that it would have alone: one whose unique key is held is a duplicate or refused, and
        the others are stored all the same. `progress` is called with how many jobs have been stored, and how many there
        are; if it fails, the error is logged and the bulk goes on.
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

        async def store(calls: Sequence[Call[R]], tx: Any) -> Enqueued[R]:
            connection = await self._connected()
            return handles_of(*await connection.producing.stored(calls, tx, progress, pace=pace), self)

        return await self._wrapped(listed, tx, store)

    async def _wrapped(
        self, calls: Sequence[Call[R]], tx: Any, store: Callable[[Sequence[Call[R]], Any], Awaitable[Enqueued[R]]]
    ) -> Enqueued[R]:
        """Store calls, with the middlewares around it."""
        around = wrapping(self.middlewares, "around_enqueue")
        return await around_enqueue(around, calls, lambda calls: store(calls, tx))

    @checked(unchecked=["calls"])
    async def enqueue_stream(
        self, calls: Iterable[Call[R]], *, batch: int = STREAMED_AT_ONCE, tx: Any = None, pace: bool = False
    ) -> AsyncIterator[Enqueued[R]]:
        """Store calls from an iterable, a batch at a time: any number of them, in constant memory.

        Each batch is stored, all or none, before it is yielded; with `tx`, in the caller's transaction. With `pace`,
        each batch waits until no backlog that it joins is full, so that a backlog is exceeded by one batch at most, and
        nothing is refused.
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
        (job,) = await self._wrapped([call], call.options.tx, self._store_one)
        return job

    async def _store_one(self, calls: Sequence[Call[R]], _: Any) -> Enqueued[R]:
        (call,) = calls
        connection = await self._connected()
        jobs, conflicts, verdicts = await connection.producing.stored([call], call.options.tx)
        for full in verdicts.refused.values():
            raise BacklogFull(full.queue, full.key, full.ready, full.max)
        for conflict in conflicts.values():
            if conflict.outcome is Outcome.REFUSED:
                kind = PayloadDiffers if conflict.differs else UniqueConflict
                raise kind(call.task.name, conflict.holder)
        return handles_of(jobs, conflicts, verdicts, self)

    async def foresee(self, call: Call[R]) -> Foreseen:
        """What enqueueing this call would do now."""
        return await (await self._connected()).producing.foreseen(call)

    enqueue_many_sync = blocking(enqueue_many, "run_blocking")

    def job(self, job: UUID | str) -> Job[Any]:
        """The handle of the job with this id."""
        return Job(as_id("job", job), self)

    def known_tasks(self) -> list[str]:
        """The names of the tasks of this app."""
        return [task.name for task in self.registry]

    def codec_of(self, task: str) -> Codec | None:
        """The codec of a task; `None` if the task belongs to another program."""
        found = self.registry.find(task)
        return None if found is None else found.codec

    @checked()
    def run_blocking(self, work: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine of this app from code that is not async, in the event loop of the app."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            raise refuse_inside_a_loop(work)
        caller = CallerThread()
        with self._blocking:
            running = caller.submit(work, self._loop_of_threads())
        return caller.wait_for(running)

    def is_open_in(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether this app was opened in this event loop: a blocking call there would wait for itself."""
        return self._connection is not None and self._connection.loop is loop

    def _loop_of_threads(self) -> asyncio.AbstractEventLoop:
        """The loop that does the work of blocking calls. Call this with the lock held."""
        self._leave_to_parent()
        if self._connection is not None and self._connection.loop.is_running():
            return self._connection.loop
        self._background = self._background or BackgroundLoop()
        return self._background.loop

    def _leave_to_parent(self) -> None:
        """After a fork, the thread and its connection belong to the parent. They are kept and not closed: to the
        database, whatever we sent on them would come from the parent."""
        if self._background is not None and not self._background.is_ours:
            self._inherited.append((self._background, self._connection))
            self._background = self._connection = None
            self._opening = asyncio.Lock()

    # Working.

    @checked()
    async def worker(self, options: WorkerOptions | None = None) -> Worker:
        """A worker for the tasks of this app, in this process: `await (await app.worker()).run()`. It serves the queues
        of a forwarder only if they are named."""
        own = [name for name in self.queue_names if name not in self.forwarded]
        return await self.make_worker(Worker, (options or WorkerOptions()).serving(own))

    async def make_worker(self, kind: Callable[[Program, WorkerOptions], W], options: WorkerOptions) -> W:
        """A worker of this kind: for forwarders, not for programs."""
        connection = await self._connected()
        served = await partitions_served(connection.store, [share.name for share in options.shares], self.queue_names)
        program = Program(
            store=connection.store,
            registry=self.registry,
            clock=self.clock,
            build=connection.producing.build,
            max_result=self.max_payload,
            middlewares=self.middlewares,
            telemetry=self.telemetry,
            served=served,
            retention=self.retention,
            cron_runner=self._cron_runner(connection),
            look_again=connection.producing.look_again,
            # A database in memory is visible to its own store only.
            make_store=None if self.url in ("sqlite://", "sqlite:///") else self._make_store,
            waited_for=partial(limits_waited_for, connection.store),
        )
        return kind(program, options)

    def _cron_runner(self, connection: Connection, only: Collection[str] | None = None) -> CronRunner | None:
        fired = [each for each in self.schedules.values() if only is None or each.name in only]
        return CronRunner(connection.store, fired, connection.producing.admitted) if fired else None

    @checked()
    async def fire_schedules(self, only: Collection[str] | None = None) -> Instant | None:
        """Fire the schedules of this app that are due, or those named in `only`: for programs without workers, which do
        this by themselves, and for tests. Returns the time of the next slot."""
        cron_runner = self._cron_runner(await self._connected(), only)
        if cron_runner is None:
            return None
        await cron_runner.declare()
        return await cron_runner.look()

    async def job_builder(self) -> BuildJob:
        """What builds jobs from calls without I/O: for claims that are held, not for programs."""
        return (await self.connected()).producing.build

    async def connected(self, policies: Sequence[Policy] = ()) -> Connection:
        """The open store and what goes with it, after declaring the queue with these policies and refreshing what is in
        force: for queues and their claims, not for programs."""
        connection = await self._connected()
        if policies and policies[0].queue not in connection.producing.policies:
            await connection.producing.declare(policies)
        await connection.producing.look_again()
        return connection

    def in_force(self, queue: str) -> Policy | None:
        """The policy of a queue as last read from the database: for queues, not for programs."""
        return None if self._connection is None else self._connection.producing.policies.get(queue)

    async def upkeep(self) -> bool:
        """Do one bounded round of upkeep, for programs without workers. Returns whether there is more to do.

        Ends claims whose lease has expired; removes finished jobs past their retention, and idle scheduling state.
        """
        return await keep_up(await self.opened(), self.retention, self.queue_names)


def store_factory(url: str, clock: Clock, durable_claims: bool) -> Callable[[], Store]:
    """A function that makes the store of this URL. The URL is checked now."""
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

            # The clock of this machine is no better than that of the database, and differs from machine to machine.
            own = None if isinstance(clock, SystemClock) else clock
            return PostgresStore(url, clock=own, durable_claims=durable_claims)

        return postgres
    raise ConfigurationError(
        f"{shown(without_password(url))} is not a database URL that Fairlane knows; possible are sqlite:///file.db, "
        f"sqlite:// (in memory) and postgresql://user@host/database"
    )


def _check_hosts(url: str, rest: str) -> None:
    """Refuse a URL that no driver can connect to. It may have several hosts, none, or the folder of a socket."""
    hosts = rest.partition("?")[0].partition("/")[0].rpartition("@")[2]
    for host in hosts.split(","):
        try:
            urlsplit(f"//{host}").port  # noqa: B018 - it is checked when it is read
        except ValueError:
            if "@" in rest.partition("/")[2]:  # what looks like a host is a login
                why = "a '/' in its password is written %2F"
            else:
                why = f"{host!r} is neither a host nor a host and a port from 1 to 65535"
            raise ConfigurationError(
                f"{without_password(url)!r} is not a database URL: {why}; write postgresql://user@host:5432/database"
            ) from None


def folder_of(frame: FrameType | None) -> Path:
    """The folder of the file whose code called this frame."""
    caller = frame.f_back if frame else None
    while caller and caller.f_globals.get("__name__") == parameters.__name__:  # it checks what the call was given
        caller = caller.f_back
    file = caller.f_globals.get("__file__") if caller else None
    return Path(file).resolve().parent if file else Path.cwd()


def actor_of_process() -> str:
    """Who acts if nobody is named: FAIRLANE_ACTOR, otherwise user@host."""
    if named := os.environ.get("FAIRLANE_ACTOR", "").strip():
        return named
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # in a container, the uid may have no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def without_password(url: str) -> str:
    """The URL of a database as it may be shown. All of it is known to be one URL, so its login ends at the last `@`,
    whatever signs the password has."""
    head, at, tail = url.rpartition("@")
    scheme, separator, login = head.partition("://")
    user, colon, _ = login.partition(":")
    masked = f"{scheme}{separator}{user}{':***' if colon else ''}{at}{tail}" if at else url
    return without_secrets(masked)
