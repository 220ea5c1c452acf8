"""The composition root: an app knows its queues, its tasks and its database, and puts them together."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, ParamSpec, Protocol, TypeVar, overload
from uuid import UUID

from fairlane.blocking import BackgroundLoop, wait_for
from fairlane.clock import SECOND, Clock, Instant, SystemClock, microseconds
from fairlane.codec import Codec
from fairlane.errors import ConfigurationError, InvalidJob, InvalidPolicy, StoreUnavailable, UnknownQueue
from fairlane.handle import Job
from fairlane.job import NewJob, new_job_ids
from fairlane.policy.fair import Fair
from fairlane.policy.keys import BUILT_IN
from fairlane.policy.limits import Limit
from fairlane.policy.policy import Policy
from fairlane.policy.retry import Backoff
from fairlane.stamping import stamp
from fairlane.store.protocol import Retention, Store
from fairlane.task import AsyncTask, Call, Duration, KeySource, Raised, Registry, SyncTask, Task, TaskOptions
from fairlane.values import Values
from fairlane.worker.options import WorkerOptions
from fairlane.worker.worker import Worker

__all__ = ["App", "Queue", "TaskDecorator"]

log = logging.getLogger("fairlane.app")

P = ParamSpec("P")
R = TypeVar("R")

DEFAULT_QUEUE = "default"
STAMP_AT_ONCE = 1_000
"""Jobs of a bulk that are stamped before other coroutines get a turn."""
POLICIES_LAST = 30 * SECOND
"""A producer looks again for the policies in force after this time: an operator may have applied others."""
_BACKOFF = Backoff()


@dataclass(frozen=True, slots=True)
class Queue:
    """A queue as this program declares it."""

    policy: Policy

    @property
    def name(self) -> str:
        return self.policy.queue


class TaskDecorator(Protocol):
    """What `app.task(…)` returns."""

    @overload
    def __call__(  # type: ignore[overload-overlap]  # a coroutine function matches both; the first one wins
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> AsyncTask[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> SyncTask[P, R]: ...


@dataclass(slots=True)
class _Connection:
    """An open store and the event loop that it belongs to."""

    store: Store
    loop: asyncio.AbstractEventLoop
    policies: dict[str, Policy] = field(default_factory=dict)
    looked_at: Instant = 0


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
        max_payload: int = 256 * 1024,
    ) -> None:
        beside = _folder_of(inspect.currentframe())
        self.url = url or os.environ.get("FAIRLANE_URL") or f"sqlite:///{beside / 'fairlane.db'}"
        self.clock: Clock = clock or SystemClock()
        self.max_payload = _checked_size(max_payload)
        self.retention = Retention(
            done=_checked_time("retention", retention), dead=_checked_time("dead_retention", dead_retention)
        )
        self.registry = Registry()
        self.queues: dict[str, Queue] = {}
        self.values = Values(self)
        self._make_store = _store_factory(self.url, self.clock, durable_claims)
        self._connection: _Connection | None = None
        self._opening = asyncio.Lock()
        self._background: BackgroundLoop | None = None
        self._retired: BackgroundLoop | None = None
        self._blocking = threading.Lock()
        self._inherited: list[object] = []

    def __repr__(self) -> str:
        return f"<App {_without_password(self.url)}>"

    # Declaring.

    def queue(
        self,
        name: str,
        *,
        fair: Fair | None = None,
        limits: Iterable[Limit] = (),
        keys: Iterable[str] = (),
        priority_step: Duration = "60s",
    ) -> Queue:
        """Declare a queue and its policy. Without one, a queue is first come, first served."""
        if name in self.queues:
            raise ConfigurationError(f"queue {name!r} is declared twice; put its whole policy into one declaration")
        named = (keys,) if isinstance(keys, str) else tuple(keys)
        policy = Policy(name, fair, tuple(limits), named, microseconds(priority_step))
        self.queues[name] = Queue(policy)
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
            options["keys"] = _key_source(options["keys"])
        checked = TaskOptions(**options)

        def register(function: Any) -> Task[..., Any]:
            if isinstance(function, Task):
                function = function.function
            if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
                raise ConfigurationError(f"{function.__qualname__} is a generator; a task returns one value")
            kind: type[Task[..., Any]] = AsyncTask if _is_async(function) else SyncTask
            task = kind(self, name or _name_of(function), queue, function, checked, local_names)
            self.registry.add(task)
            return task

        return register if function is None else register(function)

    def check(self) -> None:
        """Refuse what cannot work as a whole: a limit by a key that no task provides, a task of an unknown queue."""
        for task in self.registry:
            if task.queue != DEFAULT_QUEUE and task.queue not in self.queues:
                raise UnknownQueue(f"task {task.name!r}: declare its queue with app.queue({task.queue!r}, …)")
            task.codec.check_types()
        for queue in self.queues.values():
            _check_keys(queue.policy, self.registry.of_queue(queue.name))

    @property
    def queue_names(self) -> list[str]:
        """The queues of this app: those declared, and `default` where it is used."""
        return [policy.queue for policy in self._declarations()]

    # Opening and closing.

    def make_store(self) -> Store:
        """A store of this app's database, not opened: for tools that look at it without declaring anything."""
        return self._make_store()

    async def opened(self) -> Store:
        """The open store; the first caller opens it, checks the app and declares its queues."""
        return (await self._connected()).store

    async def _connected(self) -> _Connection:
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

    async def _open(self, loop: asyncio.AbstractEventLoop) -> _Connection:
        self.check()
        store = self._make_store()
        await store.open()
        connection = _Connection(store, loop)
        try:
            await self._declare(connection)
            self._refuse_if_retired(loop)
        except BaseException:
            await store.close()
            raise
        return connection

    def _refuse_if_retired(self, loop: asyncio.AbstractEventLoop) -> None:
        # A blocking call that was about to begin must not open the app again in a loop that is being stopped.
        if self._retired is not None and loop is self._retired.loop:
            raise StoreUnavailable("the app was closed while this call waited; call again, and it opens itself")

    async def _declare(self, connection: _Connection) -> None:
        for policy in self._declarations():
            declared = await connection.store.declare(policy)
            connection.policies[policy.queue] = declared.policy
            if declared.is_drift:
                log.warning(
                    "queue %r: the policy in force (version %d) differs from the one declared here; "
                    "`fairlane policy apply` puts the declared one in force",
                    policy.queue,
                    declared.version,
                )
        connection.looked_at = self.clock.monotonic()

    def _declarations(self) -> list[Policy]:
        declared = [queue.policy for queue in self.queues.values()]
        if DEFAULT_QUEUE not in self.queues and (not declared or self.registry.of_queue(DEFAULT_QUEUE)):
            declared.append(Policy(DEFAULT_QUEUE))
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
                await asyncio.wrap_future(background.submit(connection.store.close()))
            background.stop()
        elif connection is not None:
            await connection.store.close()

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

    async def enqueue_many(self, calls: Iterable[Call[R]], tx: Any = None) -> list[Job[R]]:
        """Store these calls as jobs, all or none; durable when this returns, or with the caller's transaction."""
        listed = list(calls)
        for call in listed:
            if call.options.tx is not None and call.options.tx is not tx:
                raise InvalidJob(f"{call!r} names a transaction of its own; give tx= to enqueue_many, for all of them")
        connection = await self._connected()
        if self.clock.monotonic() - connection.looked_at >= POLICIES_LAST:
            await self._look_again(connection)
        ids = new_job_ids(self.clock.now(), len(listed))
        jobs: list[NewJob] = []
        for number, (call, job) in enumerate(zip(listed, ids, strict=True), start=1):
            name = call.options.queue or call.task.queue
            policy = connection.policies.get(name) or await self._policy_of(name, call.task, connection)
            jobs.append(stamp(call, job, policy, self.max_payload))
            if number % STAMP_AT_ONCE == 0:
                await asyncio.sleep(0)
        await connection.store.enqueue(jobs, tx)
        return [Job(job, self) for job in ids]

    def enqueue_many_sync(self, calls: Iterable[Call[R]], tx: Any = None) -> list[Job[R]]:
        """`enqueue_many` for code that is not async."""
        return self.run_blocking(self.enqueue_many(calls, tx))

    async def _policy_of(self, name: str, task: Task[..., Any], connection: _Connection) -> Policy:
        """The policy of a queue that was declared after the app was opened, or by another program."""
        if name == DEFAULT_QUEUE or name in self.queues:
            declared = self.queues[name].policy if name in self.queues else Policy(DEFAULT_QUEUE)
            policy = (await connection.store.declare(declared)).policy
        elif (stored := await connection.store.policy(name)) is not None:
            policy = stored.policy
        else:
            raise UnknownQueue(f"task {task.name!r}: queue {name!r} is unknown; declare it with app.queue(…)")
        connection.policies[name] = policy
        return policy

    async def _look_again(self, connection: _Connection) -> None:
        connection.looked_at = self.clock.monotonic()
        for name in list(connection.policies):
            if (stored := await connection.store.policy(name)) is not None:
                connection.policies[name] = stored.policy

    def job(self, job: UUID | str) -> Job[Any]:
        """The handle of a job whose id is known."""
        return Job(job if isinstance(job, UUID) else UUID(job), self)

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
        with self._blocking:
            self._leave_to_parent()
            if self._connection is not None and self._connection.loop.is_running():
                running = asyncio.run_coroutine_threadsafe(work, self._connection.loop)
            else:
                self._background = self._background or BackgroundLoop()
                running = self._background.submit(work)
        return wait_for(running)

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
        for share in options.shares:
            if share.name not in connection.policies and await connection.store.policy(share.name) is None:
                known = ", ".join(self.queue_names)
                raise UnknownQueue(f"queues: {share.name!r} is unknown; this app has {known}")
        return Worker(
            connection.store,
            self.registry,
            options,
            self.clock,
            retention=self.retention,
            max_result=self.max_payload,
        )


def _check_keys(policy: Policy, tasks: Iterable[Task[..., Any]]) -> None:
    listed = list(tasks)
    if not listed:
        return
    scopes: list[tuple[str, tuple[str, ...]]] = [(repr(limit), limit.by) for limit in policy.limits]
    if policy.fair:
        scopes.insert(0, (repr(policy.fair), policy.fair.by))
    scopes.append((f"keys={policy.keys!r}", policy.keys))
    for what, by in scopes:
        for key in by:
            if key not in BUILT_IN and not any(task.can_provide(key) for task in listed):
                raise InvalidPolicy(
                    f"queue {policy.queue!r}: {what} looks at the key {key!r}, which none of its tasks can provide "
                    f"({', '.join(task.name for task in listed)}); give one of them a parameter {key!r} or keys=…"
                )


def _key_source(keys: KeySource | Iterable[str]) -> KeySource:
    if keys is None or isinstance(keys, tuple):
        return keys
    if isinstance(keys, str):
        return (keys,)
    return keys if callable(keys) else tuple(keys)


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _name_of(function: Callable[..., Any]) -> str:
    """`module.qualname`. A script that runs as `__main__` goes by the name that importing it would give it."""
    if not hasattr(function, "__qualname__"):
        raise ConfigurationError(f"{function!r} has no name of its own; give it one: app.task(name=…)")
    module = function.__module__
    if module == "__main__":
        main = sys.modules["__main__"]
        spec = getattr(main, "__spec__", None)
        module = spec.name if spec else Path(getattr(main, "__file__", None) or "__main__").stem
    return f"{module}.{function.__qualname__}"


def _folder_of(frame: FrameType | None) -> Path:
    caller = frame.f_back if frame else None
    file = caller.f_globals.get("__file__") if caller else None
    return Path(file).resolve().parent if file else Path.cwd()


def _checked_size(max_payload: object) -> int:
    if isinstance(max_payload, bool) or not isinstance(max_payload, int) or max_payload < 1:
        raise ConfigurationError(f"max_payload={max_payload!r} is not a number of bytes above 0")
    return max_payload


def _checked_time(name: str, duration: Duration) -> int:
    try:
        amount = microseconds(duration)
    except ConfigurationError as error:
        raise ConfigurationError(f"{name}: {error}") from None
    if amount < 0:
        raise ConfigurationError(f"{name}={duration!r} is not a time of at least 0")
    return amount


def _store_factory(url: str, clock: Clock, durable_claims: bool) -> Callable[[], Store]:
    """How to make the store of a URL; checked now, made later."""
    scheme, separator, rest = url.partition("://")
    if separator and scheme == "sqlite":
        path = rest.removeprefix("/") or None
        if path is not None and not rest.startswith("/"):
            raise ConfigurationError(
                f"{url!r} names a host; a SQLite file is written sqlite:///relative.db or sqlite:////absolute.db"
            )

        def sqlite() -> Store:
            from fairlane.store.sqlite import SqliteStore

            return SqliteStore(path, clock=clock, durable_claims=durable_claims)

        return sqlite
    if separator and scheme in ("postgresql", "postgres"):

        def postgres() -> Store:
            from fairlane.store.postgres import PostgresStore

            # The machine's own clock is no better than the database's, and differs from machine to machine.
            own = None if isinstance(clock, SystemClock) else clock
            return PostgresStore(url, clock=own, durable_claims=durable_claims)

        return postgres
    raise ConfigurationError(
        f"{_without_password(url)!r} is not a database URL that Fairlane knows; possible are sqlite:///file.db, "
        f"sqlite:// (in memory) and postgresql://user@host/database"
    )


def _without_password(url: str) -> str:
    head, at, tail = url.rpartition("@")
    scheme, separator, login = head.partition("://")
    return f"{scheme}{separator}{login.partition(':')[0]}{at}{tail}" if at else url
