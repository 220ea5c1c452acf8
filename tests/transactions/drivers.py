"""Producers with a transaction of their own, one for each driver that a caller may use."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import aiosqlite
import asyncpg
import django.conf
import psycopg
import sqlalchemy
import sqlalchemy.ext.asyncio
import sqlalchemy.orm
from django.db import connection as django_connection
from django.db import connections as django_connections
from django.db import transaction as django_transaction

import django
from fairlane import App, Call, Enqueued, Job
from fairlane.task import BoundTask

__all__ = ["CALLERS", "POSTGRES", "SQLITE", "Caller"]

T = TypeVar("T")

if not django.conf.settings.configured:
    django.conf.settings.configure(USE_TZ=True)
    django.setup()


class Caller:
    """A program with a connection of its own: it writes orders, and enqueues in the same transaction."""

    is_blocking = False

    def __init__(self, place: str) -> None:
        self.place = place
        """The URL of a PostgreSQL database, or the path of a SQLite file."""
        self.tx: Any = None

    async def open(self) -> None:
        """Connect, without a transaction."""
        raise NotImplementedError

    async def begin(self) -> None:
        """Begin, where that is not left to the first statement."""

    async def execute(self, statement: str) -> None:
        await self.tx.execute(statement)

    async def savepoint(self) -> None:
        await self.execute("savepoint here")

    async def rollback_to_savepoint(self) -> None:
        await self.execute("rollback to savepoint here")

    async def commit(self) -> None:
        await self.tx.commit()

    async def rollback(self) -> None:
        await self.tx.rollback()

    async def close(self) -> None:
        await self.tx.close()

    async def enqueue(self, task: BoundTask[..., Any], *args: Any, **kwargs: Any) -> Job[Any]:
        return await task.using(tx=self.tx).enqueue(*args, **kwargs)

    async def enqueue_many(self, app: App, calls: Iterable[Call[Any]]) -> Enqueued[Any]:
        return await app.enqueue_many(calls, tx=self.tx)


class Asyncpg(Caller):
    async def open(self) -> None:
        self.tx = await asyncpg.connect(self.place)

    async def begin(self) -> None:
        self._transaction = self.tx.transaction()
        await self._transaction.start()

    async def commit(self) -> None:
        await self._transaction.commit()

    async def rollback(self) -> None:
        await self._transaction.rollback()


class AsyncpgPool(Asyncpg):
    async def open(self) -> None:
        self._pool = await asyncpg.create_pool(self.place, min_size=1, max_size=1)
        self.tx = await self._pool.acquire()

    async def close(self) -> None:
        await self._pool.release(self.tx)
        await self._pool.close()


class AsyncPsycopg(Caller):
    async def open(self) -> None:
        self.tx = await psycopg.AsyncConnection.connect(self.place)


class AsyncAlchemyConnection(Caller):
    async def open(self) -> None:
        self._engine = sqlalchemy.ext.asyncio.create_async_engine(_alchemy_url(self.place, self.driver))
        self.tx = await self._engine.connect()

    driver = ""

    async def execute(self, statement: str) -> None:
        await self.tx.execute(sqlalchemy.text(statement))

    async def savepoint(self) -> None:
        self._nested = await self.tx.begin_nested()

    async def rollback_to_savepoint(self) -> None:
        await self._nested.rollback()

    async def close(self) -> None:
        await self.tx.close()
        await self._engine.dispose()


class AsyncAlchemySession(AsyncAlchemyConnection):
    async def open(self) -> None:
        self._engine = sqlalchemy.ext.asyncio.create_async_engine(_alchemy_url(self.place, self.driver))
        self.tx = sqlalchemy.ext.asyncio.AsyncSession(self._engine)


class AsyncAlchemyConnectionOverAsyncpg(AsyncAlchemyConnection):
    driver = "postgresql+asyncpg"


class AsyncAlchemySessionOverAsyncpg(AsyncAlchemySession):
    driver = "postgresql+asyncpg"


class AsyncAlchemyConnectionOverPsycopg(AsyncAlchemyConnection):
    driver = "postgresql+psycopg"


class AsyncAlchemySessionOverPsycopg(AsyncAlchemySession):
    driver = "postgresql+psycopg"


class AsyncAlchemyConnectionOverAiosqlite(AsyncAlchemyConnection):
    driver = "sqlite+aiosqlite"


class AsyncAlchemySessionOverAiosqlite(AsyncAlchemySession):
    driver = "sqlite+aiosqlite"


class Aiosqlite(Caller):
    async def open(self) -> None:
        self.tx = await aiosqlite.connect(self.place)


class Blocking(Caller):
    """One that is not async: all that it does, it does in a thread of its own, which is not the event loop's."""

    is_blocking = True

    _thread: ThreadPoolExecutor | None = None

    async def open(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="caller")
        await self.there(self.connect)

    async def there(self, work: Callable[[], T]) -> T:
        if self._thread is None:  # it was opened here, with `connect`
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def connect(self) -> None:
        raise NotImplementedError

    def disconnect(self) -> None:
        self.tx.close()

    def run(self, statement: str) -> None:
        self.tx.execute(statement)

    async def execute(self, statement: str) -> None:
        await self.there(lambda: self.run(statement))

    async def commit(self) -> None:
        await self.there(self.tx.commit)

    async def rollback(self) -> None:
        await self.there(self.tx.rollback)

    async def close(self) -> None:
        await self.there(self.disconnect)
        if self._thread is not None:
            self._thread.shutdown()

    async def enqueue(self, task: BoundTask[..., Any], *args: Any, **kwargs: Any) -> Job[Any]:
        return await self.there(lambda: task.using(tx=self.tx).enqueue_sync(*args, **kwargs))

    async def enqueue_many(self, app: App, calls: Iterable[Call[Any]]) -> Enqueued[Any]:
        return await self.there(lambda: app.enqueue_many_sync(calls, tx=self.tx))


class Psycopg(Blocking):
    def connect(self) -> None:
        self.tx = psycopg.connect(self.place)


class Sqlite3(Blocking):
    def connect(self) -> None:
        self.tx = sqlite3.connect(self.place)
        self.tx.row_factory = sqlite3.Row


class InTheEventLoop(Sqlite3):
    """A blocking connection in an async program: it is used in the thread of the event loop."""

    is_blocking = False

    async def open(self) -> None:
        self.connect()

    enqueue = Caller.enqueue
    enqueue_many = Caller.enqueue_many


class PsycopgInTheEventLoop(InTheEventLoop):
    connect = Psycopg.connect


class AlchemyConnection(Blocking):
    driver = "sqlite"

    def connect(self) -> None:
        self._engine = sqlalchemy.create_engine(_alchemy_url(self.place, self.driver))
        self.tx = self._engine.connect()

    def run(self, statement: str) -> None:
        self.tx.execute(sqlalchemy.text(statement))

    async def savepoint(self) -> None:
        self._nested = await self.there(self.tx.begin_nested)

    async def rollback_to_savepoint(self) -> None:
        await self.there(self._nested.rollback)

    def disconnect(self) -> None:
        self.tx.close()
        self._engine.dispose()


class AlchemySession(AlchemyConnection):
    def connect(self) -> None:
        self._engine = sqlalchemy.create_engine(_alchemy_url(self.place, self.driver))
        self.tx = sqlalchemy.orm.Session(self._engine)


class AlchemyScopedSession(AlchemyConnection):
    def connect(self) -> None:
        self._engine = sqlalchemy.create_engine(_alchemy_url(self.place, self.driver))
        self.tx = sqlalchemy.orm.scoped_session(sqlalchemy.orm.sessionmaker(self._engine))


class AlchemyConnectionOverPsycopg(AlchemyConnection):
    driver = "postgresql+psycopg"


class AlchemySessionOverPsycopg(AlchemySession):
    driver = "postgresql+psycopg"


class Django(Blocking):
    """`django.db.connection`, whatever database is behind it."""

    def connect(self) -> None:
        self.tx = django_connection
        settings: dict[str, dict[str, Any]] = {"default": _django_settings(self.place)}
        django_connections.settings = django_connections.configure_settings(settings)

    async def begin(self) -> None:
        self._atomic = django_transaction.atomic()
        await self.there(self._atomic.__enter__)

    def run(self, statement: str) -> None:
        with django_connection.cursor() as cursor:
            cursor.execute(statement)

    async def savepoint(self) -> None:
        self._savepoint = await self.there(django_transaction.savepoint)

    async def rollback_to_savepoint(self) -> None:
        await self.there(lambda: django_transaction.savepoint_rollback(self._savepoint))

    async def commit(self) -> None:
        await self.there(lambda: self._atomic.__exit__(None, None, None))

    async def rollback(self) -> None:
        await self.there(lambda: django_transaction.set_rollback(True))
        await self.commit()


def _alchemy_url(place: str, driver: str) -> str:
    return f"{driver}:///{place}" if driver.startswith("sqlite") else place.replace("postgresql", driver, 1)


def _django_settings(place: str) -> dict[str, Any]:
    if "://" not in place:
        return {"ENGINE": "django.db.backends.sqlite3", "NAME": place}
    url = urlsplit(place)
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": url.path.removeprefix("/"),
        "HOST": url.hostname,
        "PORT": url.port,
        "USER": unquote(url.username or ""),
        "PASSWORD": unquote(url.password or ""),
    }


POSTGRES: list[type[Caller]] = [
    Asyncpg,
    AsyncpgPool,
    AsyncPsycopg,
    Psycopg,
    PsycopgInTheEventLoop,
    AsyncAlchemyConnectionOverAsyncpg,
    AsyncAlchemySessionOverAsyncpg,
    AsyncAlchemyConnectionOverPsycopg,
    AsyncAlchemySessionOverPsycopg,
    AlchemyConnectionOverPsycopg,
    AlchemySessionOverPsycopg,
    Django,
]
SQLITE: list[type[Caller]] = [
    Sqlite3,
    InTheEventLoop,
    Aiosqlite,
    AsyncAlchemyConnectionOverAiosqlite,
    AsyncAlchemySessionOverAiosqlite,
    AlchemyConnection,
    AlchemySession,
    AlchemyScopedSession,
    Django,
]
CALLERS = [("postgres", each) for each in POSTGRES] + [("sqlite", each) for each in SQLITE]
