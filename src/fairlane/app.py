"""The composition root: an app knows its queues, its tasks and its database, and puts them together."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from itertools import islice
from types import TracebackType
from typing import Any, ParamSpec, Protocol, TypeVar, overload
from uuid import UUID

from fairlane.blocking import BackgroundLoop, CallerThread
from fairlane.clock import Clock, SystemClock, microseconds
from fairlane.codec import Codec
from fairlane.composition import Connection, actor_of_process, hand_of, store_factory, without_password
from fairlane.declaring import (
    check_keys,
    check_name,
    checked_count,
    checked_size,
    checked_time,
    folder_of,
    is_async,
    key_source,
    name_of,
    names,
    several,
    width_of,
)
from fairlane.errors import (
    BacklogFull,
    ConfigurationError,
    InvalidJob,
    PayloadDiffers,
    StoreUnavailable,
    UniqueConflict,
    UnknownQueue,
)
from fairlane.events import Event
from fairlane.handle import Enqueued, Foreseen, Job, handles_of
from fairlane.job import Outcome
from fairlane.operations import Operations
from fairlane.policy.dividing import divided
from fairlane.policy.fair import Fair
from fairlane.policy.gates import Limit
from fairlane.policy.policy import Policy
from fairlane.policy.retry import Backoff
from fairlane.policy.sharing import check_agreement
from fairlane.policy.unique import Unique
from fairlane.producing import Producing
from fairlane.queue import Hand, Queue, partitions_served
from fairlane.stamping import Stamp
from fairlane.store.protocol import Retention, Store
from fairlane.task import (
    AsyncTask,
    Call,
    Duration,
    KeySource,
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
from fairlane.values import Values
from fairlane.worker.options import WorkerOptions
from fairlane.worker.upkeep import keep_up
from fairlane.worker.worker import Worker

__all__ = ["App", "TaskDecorator"]

log = logging.getLogger("fairlane.app")

H = TypeVar("H", bound=Callable[[Any], object])
P = ParamSpec("P")
R = TypeVar("R")

DEFAULT_QUEUE = "default"
STREAMED_AT_ONCE = 5_000
_BACKOFF = Backoff()


class TaskDecorator(Protocol):
    """What `app.task(…)` returns."""

    @overload
    def __call__(  # type: ignore[overload-overlap]  # a coroutine function matches both; the first one wins
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> AsyncTask[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> SyncTask[P, R]: ...


class App:
    """A program's queues and tasks, and the database they live in. It opens itself at first use."""

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
    ) -> None:
        beside = folder_of(inspect.currentframe())
        self.url = url or os.environ.get("FAIRLANE_URL") or f"sqlite:///{beside / 'fairlane.db'}"
        self.clock: Clock = clock or SystemClock()
        self.max_payload = checked_size(max_payload)
        self.retention = Retention(
            done=checked_time("retention", retention),
            dead=checked_time("dead_retention", dead_retention),
            keep=checked_count(retention_count),
        )
        self.registry = Registry()
        self.queues: dict[str, Queue] = {}
        self.values = Values(self)
        self.operations = Operations(self)
        self.telemetry = Telemetry(self.operations.fleet_figures)
        self._make_store = store_factory(self.url, self.clock, durable_claims)
        self._connection: Connection | None = None
        self._opening = asyncio.Lock()
        self._background: BackgroundLoop | None = None
        self._retired: BackgroundLoop | None = None
        self._blocking = threading.Lock()
        self._inherited: list[object] = []

    def __repr__(self) -> str:
        return f"<App {without_password(self.url)}>"

    # Declaring.

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
        policy = Policy(name, fair, several(limits), names(keys), microseconds(priority_step))
        check_name(name, self.queues)
        by, own = names(partition_by), several(per_partition)
        parts = divided(policy, width_of(name, partitions, by, own), by, own)
        check_agreement(parts[0], [queue.partitions[0] for queue in self.queues.values()])
        self.queues[name] = Queue(policy, parts, self)
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
        if "keys" in options:
            options["keys"] = key_source(options["keys"])
        options["unique"] = as_unique(options.get("unique"))
        checked = TaskOptions(**options)

        def register(function: Any) -> Task[..., Any]:
            if isinstance(function, Task):
                function = function.function
            if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
                raise ConfigurationError(f"{function.__qualname__} is a generator; a task returns one value")
            kind: type[Task[..., Any]] = AsyncTask if is_async(function) else SyncTask
            task = kind(self, name or name_of(function), queue, function, checked, local_names)
            self.registry.add(task)
            return task

        return register if function is None else register(function)

    @overload
    def on_event(self, handler: H, /) -> H: ...
    @overload
    def on_event(self, *kinds: type[Event]) -> Callable[[H], H]: ...
    def on_event(self, *kinds: Any) -> Any:
        """Call a function, async or not, for each event of this process, or only for these kinds; see `events`.

        Add handlers before the worker starts. They can neither stop nor delay a job.
        """
        return self.telemetry.on_event(*kinds)

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

    @property
    def actor(self) -> str:
        """Who acts where an operation names nobody: FAIRLANE_ACTOR, else user@host."""
        return actor_of_process()

    # Opening and closing.

    def make_store(self) -> Store:
        """A store of this app's database, not opened: for tools that look at it without declaring anything."""
        return self._make_store()

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
            await producing.declare(policy for policies in self._declarations() for policy in policies)
            self._refuse_if_retired(loop)
        except BaseException:
            await store.close()
            raise
        return connection

    def _refuse_if_retired(self, loop: asyncio.AbstractEventLoop) -> None:
        # A blocking call that was about to begin must not open the app again in a loop that is being stopped.
        if self._retired is not None and loop is self._retired.loop:
            raise StoreUnavailable("the app was closed while this call waited; call again, and it opens itself")

    def _declared(self, name: str) -> tuple[Policy, ...]:
        if name in self.queues:
            return self.queues[name].partitions
        return (Policy(DEFAULT_QUEUE),) if name == DEFAULT_QUEUE else ()

    def _declarations(self) -> list[tuple[Policy, ...]]:
        declared = [queue.partitions for queue in self.queues.values()]
        if DEFAULT_QUEUE not in self.queues and (not declared or self.registry.of_queue(DEFAULT_QUEUE)):
            declared.append((Policy(DEFAULT_QUEUE),))
        return declared

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

    async def enqueue_many(
        self, calls: Iterable[Call[R]], tx: Any = None, progress: Progress | None = None
    ) -> Enqueued[R]:
        """Store these calls as jobs, all or none; durable when this returns, or with the caller's transaction.

        Each has the outcome that it would have alone: a call whose unique key is held is a duplicate, or refused, and
        the others are stored all the same. `progress` is told how many have been stored, and how many there are.
        """
        return await self._store_calls(list(one_by_one(calls, "enqueue_many")), tx, progress)

    async def _store_calls(
        self, listed: list[Call[R]], tx: Any, progress: Progress | None = None, *, pace: bool = False
    ) -> Enqueued[R]:
        for call in listed:
            if not isinstance(call, Call):
                raise not_a_call(call)
            if call.options.tx is not None and call.options.tx is not tx:
                raise InvalidJob(f"{call!r} names a transaction of its own; give tx= to enqueue_many, for all of them")
        connection = await self._connected()
        return handles_of(*await connection.producing.stored(listed, tx, progress, pace=pace), self)

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
            raise ConfigurationError(f"enqueue_stream: batch={batch} is not a number of jobs of at least 1")
        coming = one_by_one(calls, "enqueue_stream")
        while listed := list(islice(coming, batch)):
            yield await self._store_calls(listed, tx, pace=pace)

    async def enqueue_one(self, call: Call[R]) -> Job[R]:
        """Store one call; `UniqueConflict` or `BacklogFull` if it is refused."""
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

    def enqueue_many_sync(self, calls: Iterable[Call[R]], tx: Any = None) -> Enqueued[R]:
        """`enqueue_many` for code that is not async."""
        return self.run_blocking(self.enqueue_many(calls, tx))

    def job(self, job: UUID | str) -> Job[Any]:
        """The handle of a job whose id is known."""
        try:
            return Job(job if isinstance(job, UUID) else UUID(job), self)
        except (ValueError, TypeError, AttributeError):
            raise InvalidJob(f"{job!r} is not the id of a job; ids are UUIDs") from None

    def known_tasks(self) -> list[str]:
        """The names of the tasks of this app."""
        return [task.name for task in self.registry]

    def codec_of(self, task: str) -> Codec | None:
        """How a task's calls and results are stored; `None` for a task of another program."""
        found = self.registry.find(task)
        return None if found is None else found.codec

    def run_blocking(self, work: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine of this app from code that is not async, in the loop that the app was opened in."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            work.close()
            raise ConfigurationError("a blocking call inside an event loop would stop it; await the async form instead")
        with self._blocking, CallerThread() as caller:
            self._leave_to_parent()
            if self._connection is not None and self._connection.loop.is_running():
                running = asyncio.run_coroutine_threadsafe(work, self._connection.loop)
            else:
                self._background = self._background or BackgroundLoop()
                running = self._background.submit(work)
        return caller.wait_for(running)

    def _leave_to_parent(self) -> None:
        """After a fork: the thread and its connection stay with the parent. They are kept and not closed, for whatever
        we did to them would come from the parent, as far as the database can see."""
        if self._background is not None and not self._background.is_ours:
            self._inherited.append((self._background, self._connection))
            self._background = self._connection = None
            self._opening = asyncio.Lock()

    # Working.

    async def worker(self, options: WorkerOptions | None = None) -> Worker:
        """A worker for this app's tasks, in this process: `await (await app.worker()).run()`."""
        connection = await self._connected()
        options = (options or WorkerOptions()).serving(self.queue_names)
        served = await partitions_served(connection.store, [share.name for share in options.shares], self.queue_names)
        return Worker(
            connection.store,
            self.registry,
            options,
            self.clock,
            served=served,
            retention=self.retention,
            max_result=self.max_payload,
            stamp=connection.producing.stamp,
            telemetry=self.telemetry,
        )

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
        return connection.hand

    async def wait_for_room(self, policies: Sequence[Policy], keys: Mapping[str, object], timeout: int | None) -> bool:
        """Wait until no backlog of these keys is full: for the methods of a queue, not for programs."""
        await self.hand(policies)
        producing = (await self._connected()).producing
        return await producing.wait_for_room(policies[0].queue, keys, timeout)

    async def upkeep(self) -> bool:
        """One bounded round of what workers do by themselves, for programs without one; whether there is more to do.

        Claims whose lease ran out are ended, finished jobs past their time and idle scheduling state removed.
        """
        return await keep_up(await self.opened(), self.retention, list(self.declared_policies) or self.queue_names)
