"""Connections to PostgreSQL: a pool for short statements, and single ones for those who hold a lock or listen.

What the driver raises when a server is gone becomes `StoreUnavailable`; the next use connects again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import asyncpg

from fairlane.errors import ConfigurationError, StoreUnavailable
from fairlane.store.statements import load_statements

if TYPE_CHECKING:
    from asyncpg.pool import PoolConnectionProxy

    Connection = asyncpg.Connection[Any] | PoolConnectionProxy[Any]

__all__ = ["CONFLICTS", "STATEMENTS", "Connections", "hang_up", "is_lost", "translating"]

STATEMENTS = load_statements("fairlane.store.postgres", "queries.sql", "claims.sql")

T = TypeVar("T")

POOL_SIZE = 8
HANG_UP_WITHIN = 2.0
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
def translating(connection: Connection | None = None) -> Any:
    """Turn what the driver raises into what Fairlane raises."""
    try:
        yield
    except REFUSED as error:
        raise ConfigurationError(f"PostgreSQL refuses this connection: {error}; check FAIRLANE_URL") from error
    except Exception as error:
        if is_lost(error, connection):
            raise StoreUnavailable(f"PostgreSQL cannot be reached: {str(error) or type(error).__name__}") from error
        raise


class Connections:
    """Where all connections of one store come from."""

    def __init__(self, url: str, application_name: str) -> None:
        self._url = url
        self._application_name = application_name
        self._pool: asyncpg.Pool[Any] | None = None

    async def open(self) -> None:
        if self._pool is None:
            with translating():
                self._pool = await asyncpg.create_pool(
                    min_size=1, max_size=POOL_SIZE, reset=_keep, connect=self._connect_for_pool
                )

    async def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            try:
                await asyncio.wait_for(pool.close(), timeout=10.0)
            except Exception:
                pool.terminate()

    async def connect(self) -> asyncpg.Connection[Any]:
        """A connection of its own, with the plans pinned."""
        with translating():
            return await self._connect()

    async def _connect(self) -> asyncpg.Connection[Any]:
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

    async def _connect_for_pool(self, *_: Any, **__: Any) -> asyncpg.Connection[Any]:
        return await self._connect()

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[Connection]:
        """A connection from the pool, for one transaction."""
        pool = self._pool
        if pool is None:
            raise StoreUnavailable("the store is closed; open it first")
        with translating():
            connection = await pool.acquire()
        try:
            with translating(connection):
                yield connection
        except StoreUnavailable:
            # It may still be open, to a server that cannot serve us any more. The next use finds a better one.
            with contextlib.suppress(asyncpg.InterfaceError):
                connection.terminate()
            raise
        finally:
            await pool.release(connection)

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


async def _keep(connection: Connection) -> None:
    """Nothing to reset: every use is one transaction and changes no setting. The default costs a round trip a use."""
