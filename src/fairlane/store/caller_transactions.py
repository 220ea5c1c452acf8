"""What callers give as their transaction: a driver's connection, or what an ORM or a framework wraps around one.

Statements always go to the driver's own connection, which a store knows how to ask. Nothing is imported here: a
caller that has such an object has loaded its package already.
"""

from __future__ import annotations

import sys
from typing import Any

from fairlane.errors import ConfigurationError
from fairlane.loop_thread import ask_caller, is_blocking_call

DRIVERS = {
    "PostgreSQL": "an asyncpg or psycopg connection, or one of SQLAlchemy or Django over these",
    "SQLite": "a sqlite3 or aiosqlite connection, or one of SQLAlchemy or Django over these",
}
"""What each store accepts, for error messages."""
BEGIN = "select 1"
"""SQLAlchemy begins with the first statement that it sees; those of a store go past it."""


def is_a(tx: Any, module: str, *names: str) -> bool:
    """Whether `tx` is of one of these types. A package that nobody has loaded has no objects."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(tx, tuple(getattr(loaded, name) for name in names))


async def driver_of(tx: Any) -> Any:
    """The driver's connection behind `tx`, in the transaction that its owner will commit or roll back."""
    try:
        if is_a(tx, "sqlalchemy.ext.asyncio", "AsyncSession", "async_scoped_session"):
            refuse_in_blocking_call(tx)
            tx = await tx.connection()
        if is_a(tx, "sqlalchemy.ext.asyncio", "AsyncConnection"):
            refuse_in_blocking_call(tx)
            return await _of_async_sqlalchemy(tx)
        return await ask_caller(lambda: _of_blocking(tx))
    except Exception as error:
        if is_a(error, "sqlalchemy.exc", "InvalidRequestError"):
            raise ConfigurationError(f"tx={type(tx).__name__} cannot be used here: {error}") from error
        raise


def refuse_in_blocking_call(tx: Any) -> None:
    """An async connection belongs to the event loop that it was made in, and a blocking call is not made there."""
    if is_blocking_call():
        raise ConfigurationError(
            f"tx={type(tx).__name__} is async and this call blocks; await the async form in the connection's own event "
            "loop, or give a connection that is not async"
        )


async def _of_async_sqlalchemy(connection: Any) -> Any:
    driver = (await connection.get_raw_connection()).driver_connection
    # SQLAlchemy tells asyncpg to begin as late as it can.
    is_idle = is_a(driver, "asyncpg", "Connection") and not driver.is_in_transaction()
    if is_idle or not connection.in_transaction():
        await connection.exec_driver_sql(BEGIN)
    return driver


def _of_blocking(tx: Any) -> Any:
    if is_a(tx, "sqlalchemy.orm", "Session", "scoped_session"):
        tx = tx.connection()
    if is_a(tx, "sqlalchemy.engine", "Connection"):
        if not tx.in_transaction():
            tx.exec_driver_sql(BEGIN)
        return tx.connection.driver_connection
    if is_a(tx, "django.utils.connection", "ConnectionProxy"):
        tx = tx._connections[tx._alias]
    if is_a(tx, "django.db.backends.base.base", "BaseDatabaseWrapper"):
        return _of_django(tx)
    return tx


def _of_django(connection: Any) -> Any:
    if not connection.in_atomic_block:
        raise ConfigurationError(
            f"tx= is not in a transaction: Django's connection {connection.alias!r} commits every statement by itself; "
            "enqueue inside of `with transaction.atomic():`"
        )
    if connection.needs_rollback:
        raise ConfigurationError(
            f"tx= is in a transaction that has failed (Django's connection {connection.alias!r}); leave its innermost "
            "`with transaction.atomic():` first"
        )
    connection.ensure_connection()
    return connection.connection
