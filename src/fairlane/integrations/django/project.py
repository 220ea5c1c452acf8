"""The app of a Django project: its database is Django's, and so are its transactions.

A Django process has many event loops: one that serves, one for each async view under WSGI, one for each async test, and
none in a view that is not async. So the app lives in a loop of its own, and calls from other loops are served
there. In a worker that is the worker's loop.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import quote, urlencode

from asgiref.sync import SyncToAsync, ThreadSensitiveContext, sync_to_async
from django.apps import apps
from django.conf import settings as django_settings
from django.db import DEFAULT_DB_ALIAS, close_old_connections, connections, transaction
from django.utils.module_loading import import_string

import django
from fairlane.app import App, store_factory
from fairlane.clock import Clock
from fairlane.errors import ConfigurationError
from fairlane.job import new_job_ids
from fairlane.loop_thread import ask_caller, is_blocking_call
from fairlane.queue import Connection
from fairlane.store.caller_transactions import is_a
from fairlane.store.protocol import Store
from fairlane.task import Call, Enqueued, Foreseen, Job, Registry, Task
from fairlane.worker.options import WorkerOptions
from fairlane.worker.runs import JobContext, Middleware, Next, current_run
from fairlane.worker.worker import Worker

R = TypeVar("R")
T = TypeVar("T")

MODES = ("in_transaction", "on_commit", "at_once")
APP_OPTIONS = ("durable_claims", "retention", "dead_retention", "retention_count", "max_payload", "codec", "redact")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The setting FAIRLANE, checked."""

    url: str | None = None
    """The URL of another database than Django's."""
    database: str = DEFAULT_DB_ALIAS
    """The database whose transactions enqueues follow, and where jobs are stored unless `url` is set."""
    enqueue: str | None = None
    task_modules: tuple[str, ...] = ("tasks",)
    dashboard_url: str | None = None
    app: Mapping[str, Any] = field(default_factory=dict)
    """Options of the app."""

    def address(self) -> str:
        """The URL of the database with the jobs. In tests, only databases that Django made for them are used."""
        if self.url is None:
            return address_of(self.database)
        return IN_MEMORY if is_under_test() else self.url

    def mode(self, address: str) -> str:
        """What an enqueue inside `transaction.atomic()` does, with jobs stored at this address."""
        if address == IN_MEMORY or (self.url is not None and self.enqueue is None):
            return "at_once" if self.enqueue == "at_once" else "on_commit"
        return self.enqueue or "in_transaction"


def load_settings(given: object = None) -> Settings:
    """The setting FAIRLANE; `ConfigurationError` if it is invalid."""
    given = getattr(django_settings, "FAIRLANE", {}) if given is None else given
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"FAIRLANE is a {type(given).__name__}; write a dict, such as FAIRLANE = {{}}")
    own = [each.name.upper() for each in fields(Settings) if each.name != "app"]
    known = [*own, *(name.upper() for name in APP_OPTIONS)]
    for name in given:
        if name not in known:
            similar = get_close_matches(str(name).upper(), known, n=1)
            meant = f"did you mean {similar[0]!r}?" if similar else f"known are {', '.join(known)}"
            raise ConfigurationError(f"FAIRLANE[{name!r}] is unknown; {meant}")
    options = {name: _imported(name.upper(), given[name.upper()]) for name in APP_OPTIONS if name.upper() in given}
    return Settings(**{name.lower(): _checked(name, given[name]) for name in own if name in given}, app=options)


def _checked(name: str, value: Any) -> Any:
    match name:
        case "ENQUEUE" if value is not None and value not in MODES:
            raise ConfigurationError(f"FAIRLANE['ENQUEUE'] = {value!r} is unknown; write one of {', '.join(MODES)}")
        case "DATABASE" if value not in django_settings.DATABASES:
            known = ", ".join(map(repr, django_settings.DATABASES))
            raise ConfigurationError(f"FAIRLANE['DATABASE'] = {value!r} is not in DATABASES; there are {known}")
        case "TASK_MODULES":
            if isinstance(value, str) or not all(isinstance(each, str) for each in value):
                raise ConfigurationError(f"FAIRLANE['TASK_MODULES'] = {value!r} is not a list of names of modules")
            return tuple(value)
        case "DASHBOARD_URL" if value is not None and not (
            isinstance(value, str) and value.startswith("/") and value.endswith("/") and len(value) > 2
        ):
            raise ConfigurationError(
                f"FAIRLANE['DASHBOARD_URL'] = {value!r} is not a path below the site; write one such as '/fairlane/'"
            )
        case "URL" if value is not None and not isinstance(value, str):
            raise ConfigurationError(f"FAIRLANE['URL'] = {value!r} is not the URL of a database")
    return value


def _imported(name: str, value: Any) -> Any:
    """A codec or a redacting function may be given as a dotted path."""
    if name not in ("CODEC", "REDACT") or not isinstance(value, str):
        return value
    try:
        found: Any = import_string(value)
    except ImportError as error:
        raise ConfigurationError(f"FAIRLANE[{name!r}] = {value!r} cannot be imported: {error}") from error
    return found() if isinstance(found, type) else found


IN_MEMORY = "sqlite://"
PASSED_ON = ("passfile", "sslcert", "sslcrl", "sslkey", "sslmode", "sslrootcert")
"""Options of psycopg about access. The others are about Django's own connection."""


def address_of(alias: str) -> str:
    """The URL of the database that Django uses; in tests, that of the test database."""
    connection = connections[alias]
    match connection.vendor:
        case "postgresql":
            return _postgres(alias, connection.settings_dict)
        case "sqlite":
            name = connection.settings_dict["NAME"]
            if connection.creation.is_in_memory_db(name):
                return IN_MEMORY
            return f"sqlite:///{Path(name).resolve()}"
    raise ConfigurationError(
        f"Django's database {alias!r} is of {connection.vendor}, and Fairlane keeps jobs in PostgreSQL or SQLite; name "
        "another database with FAIRLANE['URL'] or FAIRLANE['DATABASE']"
    )


def _postgres(alias: str, given: Mapping[str, Any]) -> str:
    options = given.get("OPTIONS") or {}
    if "service" in options:
        raise ConfigurationError(
            f"Django's database {alias!r} is named by a service file, which Fairlane does not read; write its address "
            "into FAIRLANE['URL'] (and FAIRLANE['ENQUEUE'] = 'in_transaction', as it is the same database)"
        )
    asked = {name: str(options[name]) for name in PASSED_ON if name in options}
    login = quote(str(given.get("USER") or ""), safe="")
    if given.get("PASSWORD"):
        login += f":{quote(str(given['PASSWORD']), safe='')}"
    place, port = str(given.get("HOST") or ""), str(given.get("PORT") or "")
    if place.startswith("/"):  # the folder of a socket
        asked |= {"host": place, "port": port} if port else {"host": place}
        place = port = ""
    if ":" in place:
        place = f"[{place}]"
    place += f":{port}" if port else ""
    database, query = quote(str(given.get("NAME") or ""), safe=""), urlencode(asked)
    return f"postgresql://{login}{'@' if login else ''}{place}/{database}{'?' if query else ''}{query}"


def is_under_test() -> bool:
    """Whether Django's test runner, or pytest-django, has set up its environment."""
    utils: Any = sys.modules.get("django.test.utils")
    return utils is not None and hasattr(utils._TestState, "saved_data")


def with_fresh_connections(function: Callable[..., Any], *, always: bool = False) -> Callable[..., Any]:
    """Wrap a function that workers run in a thread: like around a view, old connections are closed before and after."""

    @functools.wraps(function)
    def fresh(*args: Any, **kwargs: Any) -> Any:
        if not always and current_run.get(None) is None:
            return function(*args, **kwargs)  # called as a function: the connections are the caller's
        close_old_connections()
        try:
            return function(*args, **kwargs)
        finally:
            close_old_connections()

    return fresh


class OwnThread(Middleware):
    """Gives each run of an async task its own thread for the ORM, as Django does for each request.

    Otherwise the queries of all runs would share one thread. Without queries it costs nothing.
    """

    async def around_run(self, job: JobContext, run: Next) -> Any:
        async with ThreadSensitiveContext() as thread:
            try:
                return await run()
            finally:
                if thread in SyncToAsync.context_to_thread_executor:
                    # The thread ends with the run, and its connections could not be closed later.
                    await sync_to_async(connections.close_all)()


async def run_in(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, R]) -> R:
    """Await a coroutine in this loop, which may be here or in another thread."""
    if asyncio.get_running_loop() is loop:
        return await work
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))


class Elsewhere:
    """A store whose coroutines run in the loop that it belongs to."""

    def __init__(self, store: Store, loop: asyncio.AbstractEventLoop) -> None:
        self._store = store
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if not inspect.iscoroutinefunction(found):
            return found

        async def there(*args: Any, **kwargs: Any) -> Any:
            return await run_in(self._loop, found(*args, **kwargs))

        return there


CHILDREN = "fairlane.integrations.django.children"
DJANGOS_CONNECTIONS = (
    ("django.utils.connection", "ConnectionProxy"),
    ("django.db.backends.base.base", "BaseDatabaseWrapper"),
)

_making = threading.RLock()
_made: list[DjangoApp] = []


def project_app() -> DjangoApp:
    """The app of this process. A program that is no command of Django's, such as `fairlane worker`, is set up by it."""
    with _making:
        if not _made:
            _made.append(DjangoApp(load_settings()))
    # If the app registry is loading, Django is already being set up.
    if not apps.ready and not apps.loading:
        django.setup()
    return _made[0]


class ProjectTasks(Registry):
    """The tasks of a project. Threads that run them get fresh database connections."""

    def __init__(self) -> None:
        super().__init__()
        self.adopt: Callable[[str], Task[..., Any] | None] = lambda name: None
        """Finds tasks that are not registered: those of Django's own Tasks framework."""
        self.known = self._tasks.get
        """The task that is registered by this name, or `None`."""
        self.find = lambda name: self.known(name) or self.adopt(name)  # type: ignore[assignment]

    def add(self, task: Task[..., Any]) -> None:
        super().add(task)
        if task.is_async:
            return
        is_elsewhere = task.options.executor == "process"
        place = f"{task.function.__module__}.{task.function.__qualname__}" if is_elsewhere else ""
        task.function = with_fresh_connections(task.function, always=is_elsewhere)
        if is_elsewhere:
            # The process imports it by these names, and must set up Django before it can import the project.
            task.function.__module__, task.function.__qualname__ = CHILDREN, place


class DjangoApp(App):
    """An app that keeps its jobs where Django keeps its rows, and follows Django to a test database."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        super().__init__(settings.address(), **settings.app)
        self._make_store = self._store_of_now
        self.registry: ProjectTasks = ProjectTasks()
        self.captures: list[Callable[[Sequence[Call[Any]]], object]] = []
        """Called with the calls of every enqueue, before its transaction commits: for tests."""
        self.middleware(OwnThread())

    # Where it lives.

    def _store_of_now(self) -> Store:
        self.url = self.settings.address()
        return store_factory(self.url, self.clock, self._durable_claims)()

    def move_to(self, url: str, clock: Clock | None = None) -> None:
        super().move_to(url, clock)
        if url == self.settings.address():
            self._make_store = self._store_of_now

    def _home(self) -> asyncio.AbstractEventLoop:
        with self._blocking:
            return self._loop_of_threads()

    @property
    def is_open(self) -> bool:
        return self._connection is not None

    async def _connected(self) -> Connection:
        is_following = self._make_store == self._store_of_now
        if is_following and self._connection is not None and is_under_test() and self.url != self.settings.address():
            # Opened before the test database was made, or in another database: tests must not write there.
            stale, self._connection = self._connection, None
            await stale.close()
        return await super()._connected()

    async def opened(self) -> Store:
        home = self._home()
        store = await run_in(home, super().opened())
        return store if asyncio.get_running_loop() is home else cast(Store, Elsewhere(store, home))

    async def worker(self, options: WorkerOptions | None = None) -> Worker:
        if self._connection is not None and self._connection.loop is not asyncio.get_running_loop():
            await self.close()  # somebody enqueued while the program was set up
        return await super().worker(options)

    async def foresee(self, call: Call[R]) -> Foreseen:
        return await run_in(self._home(), super().foresee(call))

    # What an enqueue does inside `transaction.atomic()`.

    async def _wrapped(
        self, calls: Sequence[Call[R]], tx: Any, store: Callable[[Sequence[Call[R]], Any], Awaitable[Enqueued[R]]]
    ) -> Enqueued[R]:
        async def now(lent: Any) -> Enqueued[R]:
            in_it = calls if lent is None else [call.using(tx=lent) for call in calls]
            return await App._wrapped(self, in_it, lent, store)

        async def later() -> Enqueued[R]:
            named = await self._named(calls)
            await self._on_commit(lambda: self.run_blocking(App._wrapped(self, named, None, store)))
            return Enqueued(Job(cast(Any, call.options.id), self) for call in named)

        enqueued = await self._as_django_does(tx, now, later)
        for capture in self.captures:
            capture(calls)
        return enqueued

    async def _as_django_does(
        self, tx: Any, store: Callable[[Any], Awaitable[T]], later: Callable[[], Awaitable[T]]
    ) -> T:
        """Store in the caller's transaction, when it commits, or at once, depending on its thread and the settings."""
        home = self._home()
        await run_in(home, App.opened(self))  # from here on the database is known
        if is_blocking_call():
            lent = await ask_caller(self._open_transaction) if tx is None else tx
            if lent is None or tx is not None:
                return await store(tx)
            return await (store(lent) if self.settings.mode(self.url) == "in_transaction" else later())
        if asyncio.get_running_loop() is home:
            return await store(tx)
        # Async code has no transaction of its own, but in a test the thread of its queries may be in one.
        is_lent = tx is not None or await sync_to_async(self._open_transaction)() is not None
        if not is_lent:
            return await run_in(home, _awaited(store(None)))
        if tx is not None and not any(is_a(tx, *each) for each in DJANGOS_CONNECTIONS):
            raise ConfigurationError(
                f"tx={type(tx).__name__} belongs to this event loop, and the app of a Django project has its own; "
                "leave tx= out, or give Django's connection"
            )
        work = partial(self._as_django_does, tx, store, later)
        return await sync_to_async(lambda: self.run_blocking(_awaited(work())))()

    def _open_transaction(self) -> Any:
        """The connection of this thread, if it is in a transaction that an enqueue must follow."""
        if self.settings.mode(self.url) == "at_once":
            return None
        connection = connections[self.settings.database]
        return connection if connection.in_atomic_block else None

    async def _named(self, calls: Sequence[Call[R]]) -> list[Call[R]]:
        """The calls with ids, checked: what cannot be stored is refused now, not after the commit."""
        ids = new_job_ids(self.clock.now(), len(calls))
        named = [call if call.options.id else call.using(id=job) for call, job in zip(calls, ids, strict=True)]
        await (await self._connected()).producing.built(named)
        return named

    async def _on_commit(self, work: Callable[[], object]) -> None:
        await ask_caller(lambda: transaction.on_commit(work, using=self.settings.database))


async def _awaited(work: Awaitable[T]) -> T:
    return await work
