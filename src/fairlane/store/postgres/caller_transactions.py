"""Connections of callers: asked with the store's own statements, whatever driver they are of.

asyncpg's are asked as they are. For psycopg's there is a thin coat here with the methods that the statements are called
by. It hands over parameters in the text form of PostgreSQL, which needs nothing registered on the caller's connection.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterable, Iterator, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID

import asyncpg
from asyncpg.pool import PoolConnectionProxy

from fairlane.errors import ConfigurationError
from fairlane.loop_thread import ask_caller
from fairlane.store.caller_transactions import DRIVERS, driver_of, is_a, refuse_in_blocking_call
from fairlane.store.postgres.connections import STATEMENTS, Connection

if TYPE_CHECKING:
    import psycopg

    from fairlane.store.postgres.connections import Connection

Row = Sequence[Any]

TYPES = ("bytea", "uuid", "bigint", "integer", "smallint", "boolean")
"""What jobs are made of, besides text and jsonb."""


async def callers_connection(tx: Any) -> Connection:
    """A caller's connection as the store's statements are called by, if it is in a transaction that can go on."""
    driver = await driver_of(tx)
    if isinstance(driver, asyncpg.Connection | PoolConnectionProxy):
        refuse_in_blocking_call(tx)
        return _asyncpg(driver)
    if is_a(driver, "psycopg", "AsyncConnection"):
        refuse_in_blocking_call(tx)
        _check_psycopg(driver)
        return cast("Connection", AsyncPsycopg(driver))
    if is_a(driver, "psycopg", "Connection"):
        _check_psycopg(driver)
        return cast("Connection", BlockingPsycopg(driver))
    raise ConfigurationError(
        f"tx={type(driver).__name__} does not fit a PostgreSQL store; give {DRIVERS['PostgreSQL']}, in a transaction"
    )


def _asyncpg(connection: Connection) -> Connection:
    try:
        is_closed = connection.is_closed()
    except asyncpg.InterfaceError as error:  # its pool has it back
        raise ConfigurationError(f"tx= cannot be used any more: {error}; give one that is in a transaction") from error
    if is_closed:
        raise ConfigurationError("tx= is a closed connection; give one that is in a transaction")
    if not connection.is_in_transaction():
        raise ConfigurationError("tx= is not in a transaction; open one first: async with connection.transaction(): …")
    return connection


def _check_psycopg(connection: Any) -> None:
    from psycopg.pq import PipelineStatus, TransactionStatus

    if connection.closed:
        raise ConfigurationError("tx= is a closed connection; give one that is in a transaction")
    if connection.pgconn.pipeline_status != PipelineStatus.OFF:
        raise ConfigurationError(
            "tx= is in pipeline mode, in which no answer comes; enqueue after connection.pipeline()"
        )
    if getattr(connection, "_tpc", None) is not None:
        raise ConfigurationError(
            "tx= is in a two-phase transaction, which PostgreSQL will not prepare with an enqueue in it (NOTIFY); "
            "write a row of your own in it, and enqueue from that row after the commit"
        )
    status = connection.info.transaction_status
    if status == TransactionStatus.INERROR:
        raise _failed()
    if status == TransactionStatus.IDLE and connection.autocommit:
        raise ConfigurationError(
            "tx= is not in a transaction: this connection commits every statement by itself; open one first: "
            "with connection.transaction(): …"
        )


def _failed() -> ConfigurationError:
    return ConfigurationError(
        "tx= is in a transaction that has failed; roll it back, or to a savepoint, before anything else is done in it"
    )


def _read_only() -> ConfigurationError:
    return ConfigurationError(
        "tx= is in a transaction that only reads, and a job is to be written; begin one that writes"
    )


@contextlib.contextmanager
def speaking() -> Iterator[None]:
    """Say what is wrong with a caller's transaction. Whatever else its driver raises is the caller's to see."""
    try:
        yield
    except asyncpg.InFailedSQLTransactionError as error:
        raise _failed() from error
    except asyncpg.ReadOnlySQLTransactionError as error:
        raise _read_only() from error
    except RuntimeError as error:
        if "attached to a different loop" not in str(error):
            raise
        raise ConfigurationError(
            "tx= belongs to another event loop; enqueue in the loop that it was made in, or connect in this one"
        ) from error


def check_types(here: Any, there: Any) -> None:
    """Refuse a connection that reads another value than ours does: what it writes would be another one, too."""
    for name, own, given in zip(TYPES, here, there, strict=True):
        if own != given:
            raise ConfigurationError(
                f"tx= reads and writes {name} in a way of its own, a codec or an adapter that was set for it, and jobs "
                "are written with it; give a connection without"
            )


class _Psycopg:
    """What the store's statements are called by, as far as they are run in a caller's transaction."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    async def fetch(self, statement: str, *parameters: Any) -> list[Row]:
        raise NotImplementedError

    async def fetchrow(self, statement: str, *parameters: Any) -> Row | None:
        rows = await self.fetch(statement, *parameters)
        return rows[0] if rows else None

    async def fetchval(self, statement: str, *parameters: Any) -> Any:
        row = await self.fetchrow(statement, *parameters)
        return None if row is None else row[0]

    async def execute(self, statement: str, *parameters: Any) -> None:
        await self.fetch(statement, *parameters)

    def is_in_transaction(self) -> bool:
        return True  # or it begins with the next statement


class AsyncPsycopg(_Psycopg):
    """A `psycopg.AsyncConnection`."""

    async def fetch(self, statement: str, *parameters: Any) -> list[Row]:
        from psycopg import AsyncRawCursor
        from psycopg.rows import tuple_row

        with _in_our_words():
            # Its own row factory: the connection may have one that makes dictionaries or objects.
            async with AsyncRawCursor(self.driver, row_factory=tuple_row) as cursor:
                await cursor.execute(statement.encode(), _given(parameters))
                found: list[Any] = await cursor.fetchall() if cursor.description else []
                return found

    async def copy_to_table(self, _table: str, *, source: AsyncIterable[bytes], **_: Any) -> None:
        """Store rows of jobs that are written as the server takes them."""
        with _in_our_words():
            async with self.driver.cursor() as cursor, cursor.copy(STATEMENTS["copy_jobs"]) as copy:
                async for piece in source:
                    await copy.write(piece)


class BlockingPsycopg(_Psycopg):
    """A `psycopg.Connection`, used in the thread that has given it."""

    async def fetch(self, statement: str, *parameters: Any) -> list[Row]:
        return await ask_caller(lambda: self._fetch(statement, parameters))

    def _fetch(self, statement: str, parameters: Sequence[Any]) -> list[Row]:
        from psycopg import RawCursor
        from psycopg.rows import tuple_row

        with _in_our_words(), RawCursor(self.driver, row_factory=tuple_row) as cursor:
            cursor.execute(statement.encode(), _given(parameters))
            found: list[Any] = cursor.fetchall() if cursor.description else []
            return found

    async def copy_to_table(self, _table: str, *, source: AsyncIterable[bytes], **_: Any) -> None:
        pieces = [piece async for piece in source]
        await ask_caller(lambda: self._copy(pieces))

    def _copy(self, pieces: Sequence[bytes]) -> None:
        with _in_our_words(), self.driver.cursor() as cursor, cursor.copy(STATEMENTS["copy_jobs"]) as copy:
            for piece in pieces:
                copy.write(piece)


@contextlib.contextmanager
def _in_our_words() -> Iterator[None]:
    """What the store decides upon, it knows by asyncpg's names. All else stays as the caller's driver says it."""
    try:
        yield
    except Exception as error:
        if is_a(error, "psycopg.errors", "UniqueViolation"):
            taken = asyncpg.UniqueViolationError(str(error))
            taken.detail = cast("psycopg.errors.UniqueViolation", error).diag.message_detail
            raise taken from error
        if is_a(error, "psycopg.errors", "InFailedSqlTransaction"):
            raise _failed() from error
        if is_a(error, "psycopg.errors", "ReadOnlySqlTransaction"):
            raise _read_only() from error
        if is_a(error, "psycopg", "DataError"):
            raise asyncpg.DataError(str(error)) from error
        raise


def _given(parameters: Sequence[Any]) -> list[Any] | None:
    """Parameters as psycopg takes them. Statements say the type of each."""
    return [_parameter(each) for each in parameters] or None


def _parameter(value: Any) -> Any:
    match value:
        case list() | tuple():
            return literal(value)
        case IntEnum():
            return int(value)
        case _:
            return value


def literal(value: Any) -> str:
    """A value in PostgreSQL's text form: a list is an array, a tuple a row of a composite type."""
    match value:
        case bool():
            return "t" if value else "f"
        case int():
            return str(int(value))
        case bytes():
            return f"\\x{value.hex()}"
        case UUID() | float():
            return str(value)
        case str():
            return value
        case tuple():
            return f"({','.join('' if part is None else _quoted(part) for part in value)})"
        case list():
            return f"{{{','.join('NULL' if part is None else _quoted(part) for part in value)}}}"
    raise TypeError(f"{value!r} has no text form here")


def _quoted(value: Any) -> str:
    text = literal(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'
