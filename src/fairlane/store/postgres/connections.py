"""Connections to PostgreSQL: a pool for short statements, and single ones for those who hold a lock or listen.

What the driver raises when a server is gone becomes `StoreUnavailable`; the next use connects again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import asyncpg

from fairlane.errors import ConfigurationError, StoreUnavailable
from fairlane.store.statements import load_statements

if TYPE_CHECKING:
    from asyncpg.pool import PoolConnectionProxy

    Connection = asyncpg.Connection[Any] | PoolConnectionProxy[Any]

__all__ = ["CONFLICTS", "STATEMENTS", "Connections", "hang_up", "is_lost", "translating"]

STATEMENTS = load_statements(
    "fairlane.store.postgres",
    "queries.sql",
    "claims.sql",
    "operators.sql",
    "examining.sql",
    "sharing.sql",
    "partitions.sql",
    "schedules.sql",
    "tallying.sql",
    "seeing.sql",
    "health.sql",
)

T = TypeVar("T")

POOL_SIZE = 8
HANG_UP_WITHIN = 2.0
CLOSE_WITHIN = 10.0
GROW_AFTER = 0.05
"""Seconds for which one waits for a connection that is in use before there is another one."""
TRIES = 6
FIRST_PAUSE = 0.02
"""Seconds before a transaction is tried again; doubled each time."""

CONFLICTS = (asyncpg.SerializationError, asyncpg.DeadlockDetectedError)

GONE = (
    asyncpg.PostgresConnectionError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.CannotConnectNowError,
    asyncpg.IdleInTransactionSessionTimeoutError,
    asyncpg.IdleSessionTimeoutError,
    asyncpg.InsufficientResourcesError,  # too many connections, a full disk
    asyncpg.QueryCanceledError,  # a timeout that the server's owner has set
    asyncpg.ReadOnlySQLTransactionError,  # what was the primary is a standby now
    asyncpg.InternalClientError,  # the driver met the end of a session in the middle of something
    OSError,
    TimeoutError,
)

REFUSED = (
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InvalidCatalogNameError,
    asyncpg.ClientConfigurationError,
)


def is_lost(error: BaseException, connection: Connection | None = None) -> bool:
    """Whether the server, or the way to it, is gone or cannot serve us."""
    if isinstance(error, asyncpg.InterfaceError):
        return connection is None or _is_closed(connection)
    return isinstance(error, GONE)


def _is_closed(connection: Connection) -> bool:
    try:
        return connection.is_closed()
    except asyncpg.InterfaceError:
        return True  # a pool has taken it back, because it is


async def hang_up(connection: asyncpg.Connection[Any]) -> None:
    """End a session, whatever it is doing: the server forgets it and lets its locks go."""
    try:
        await connection.close(timeout=HANG_UP_WITHIN)
    except Exception:
        connection.terminate()
    except BaseException:
        connection.terminate()
        raise


@contextlib.contextmanager
def translating(connection: Connection | None = None, where: str = "") -> Any:
    """Turn what the driver raises into what Fairlane raises."""
    try:
        yield
    except REFUSED as error:
        raise ConfigurationError(f"PostgreSQL refuses this connection: {error}; check FAIRLANE_URL") from error
    except Exception as error:
        if is_lost(error, connection):
            raise StoreUnavailable(
                f"PostgreSQL{where} cannot be reached: {str(error) or type(error).__name__}"
            ) from error
        raise


def _place(url: str) -> str:
    """The host and the database that a URL names, without the password."""
    return url.partition("://")[2].rpartition("@")[2].partition("?")[0] or "the default host"


class Connections:
    """Where all connections of one store come from.

    Its pool is a stack: who asks gets the connection that was used last, whose plans are warm. (The driver's own pool
    arms a timer and wraps the connection at every use, which costs as much as a short statement.)
    """

    def __init__(self, url: str, application_name: str) -> None:
        self._url = url
        self._where = f" at {_place(url)}"
        self._application_name = application_name
        self._is_open = False
        self._free: list[asyncpg.Connection[Any]] = []
        self._busy: set[asyncpg.Connection[Any]] = set()
        self._room = asyncio.Semaphore(POOL_SIZE)
        self._waiting: deque[asyncio.Future[asyncpg.Connection[Any]]] = deque()

    async def open(self) -> None:
        if not self._is_open:
            self._free.append(await self.connect())
            self._is_open = True

    async def close(self) -> None:
        """Hang up. What is under way may end first, if it does so soon."""
        self._is_open = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_WITHIN):
                for _ in range(POOL_SIZE):
                    await self._room.acquire()
        for connection in self._busy:
            connection.terminate()
        self._room = asyncio.Semaphore(POOL_SIZE)
        while self._free:
            await hang_up(self._free.pop())

    async def connect(self) -> asyncpg.Connection[Any]:
        """A connection of its own, with the plans pinned."""
        with translating(where=self._where):
            connection = await asyncpg.connect(
                self._url,
                server_settings={"application_name": self._application_name},
                max_cached_statement_lifetime=0,
            )
            try:
                await connection.execute(STATEMENTS["pin_plans"])
            except BaseException:
                await hang_up(connection)
                raise
            return connection

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[asyncpg.Connection[Any]]:
        """A connection from the pool, for one transaction."""
        if not self._is_open:
            raise StoreUnavailable("the store is closed; open it first")
        room = self._room
        async with room:
            connection = await self._idle()
            self._busy.add(connection)
            try:
                with translating(connection):
                    yield connection
            except BaseException as error:
                # The server cannot serve us any more, or we were cancelled in the middle: the next use finds a better
                # one. Any other error is about the statement, and the connection as good as before.
                if isinstance(error, StoreUnavailable) or not isinstance(error, Exception):
                    connection.terminate()
                raise
            finally:
                self._busy.discard(connection)
                self._give_back(connection)

    async def _idle(self) -> asyncpg.Connection[Any]:
        while self._free:
            connection = self._free.pop()
            if not connection.is_closed():
                return connection
        if self._busy and (lent := await self._handed_over()) is not None:
            return lent
        return await self.connect()

    async def _handed_over(self) -> asyncpg.Connection[Any] | None:
        """What somebody else has done with, if that is soon: most statements take less time than a new connection."""
        waiter: asyncio.Future[asyncpg.Connection[Any]] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            await asyncio.wait({waiter}, timeout=GROW_AFTER)
        except BaseException:
            if waiter.done():
                self._give_back(waiter.result())
            waiter.cancel()
            raise
        if waiter.done():
            return waiter.result()
        waiter.cancel()
        return None

    def _give_back(self, connection: asyncpg.Connection[Any]) -> None:
        if connection.is_closed():
            return
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(connection)
                return
        self._free.append(connection)

    async def again(self, work: Callable[[Connection, bool], Awaitable[T]]) -> T:
        """Run one transaction, and run it again after a conflict or a lost connection.

        `work` is told whether an earlier try may have committed.
        """
        pause, may_have_committed = FIRST_PAUSE, False
        for _ in range(TRIES - 1):
            try:
                async with self.session() as connection:
                    return await work(connection, may_have_committed)
            except CONFLICTS:
                pass
            except StoreUnavailable:
                may_have_committed = True
            await asyncio.sleep(pause)
            pause *= 2
        async with self.session() as connection:
            return await work(connection, may_have_committed)
