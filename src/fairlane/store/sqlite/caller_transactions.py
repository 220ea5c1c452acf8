"""Connections of callers to our file: asked with the store's own statements, in the thread that they belong to."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fairlane.errors import ConfigurationError, FairlaneError, StoreUnavailable
from fairlane.loop_thread import ask_caller
from fairlane.store.caller_transactions import DRIVERS, driver_of, is_a, refuse_in_blocking_call
from fairlane.store.sqlite.database import Transaction

T = TypeVar("T")


async def in_callers_transaction(
    tx: Any, path: str | None, work: Callable[[Transaction], T], *, writes: bool = True
) -> T:
    """Run `work` in the caller's transaction, which goes on; on a connection that has not begun one, it begins."""
    driver = await driver_of(tx)
    if is_a(driver, "aiosqlite", "Connection"):
        refuse_in_blocking_call(tx)
        try:
            result: T = await driver._execute(lambda: _perform(driver._conn, path, work, writes))
        except ValueError as error:
            if isinstance(error, FairlaneError):
                raise
            raise ConfigurationError(f"tx= cannot be used here: {error}") from error
        return result
    if not isinstance(driver, sqlite3.Connection):
        raise ConfigurationError(
            f"tx={type(driver).__name__} cannot be used with a SQLite store; give {DRIVERS['SQLite']}"
        )
    return await ask_caller(lambda: _perform(driver, path, work, writes))


def _perform(connection: sqlite3.Connection, path: str | None, work: Callable[[Transaction], T], writes: bool) -> T:
    try:
        _check(connection, path)
        with _all_or_nothing(connection) if writes else contextlib.nullcontext():
            return work(Transaction(_Unshaped(connection)))  # type: ignore[arg-type]
    except sqlite3.ProgrammingError as error:
        raise ConfigurationError(f"tx= cannot be used here: {error}") from error
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_READONLY:
            raise ConfigurationError(
                f"tx= only reads {path}, and a job is to be written; give one that writes"
            ) from error
        raise StoreUnavailable(
            f"the SQLite database {path} refused this in the caller's transaction: {error}; where it is locked, begin "
            "with BEGIN IMMEDIATE and give the connection a longer timeout"
        ) from error


@contextlib.contextmanager
def _all_or_nothing(connection: sqlite3.Connection) -> Iterator[None]:
    """In the caller's transaction, which goes on after an error: what it then commits has no part of a job in it."""
    if not connection.in_transaction:
        # Python would begin only before some kinds of statements, and as one that reads first, which fails where
        # another has written meanwhile.
        connection.execute("begin immediate")
        undo, is_begun = ["rollback"], True
    else:
        connection.execute("savepoint fairlane")
        undo, is_begun = ["rollback to fairlane", "release fairlane"], False
    try:
        yield
    except BaseException:
        with contextlib.suppress(sqlite3.Error):  # a full disk has taken back all of it
            for statement in undo:
                connection.execute(statement)
        raise
    if not is_begun:
        connection.execute("release fairlane")


def _check(connection: sqlite3.Connection, path: str | None) -> None:
    commits_alone = connection.isolation_level is None if _is_legacy(connection) else connection.autocommit  # type: ignore[attr-defined]
    if commits_alone and not connection.in_transaction:
        raise ConfigurationError("tx= is not in a transaction: this connection commits by itself; execute BEGIN first")
    if connection.text_factory is not str:
        raise ConfigurationError("tx= has a text_factory; give a connection without one, or reset it for the call")
    if path is None:
        raise ConfigurationError("tx= needs a database file: nobody else can open a database in memory")
    cursors = _Unshaped(connection)
    main = next((row[2] for row in cursors.execute("pragma database_list", ()) if row[1] == "main"), "")
    if not main or Path(main).resolve() != Path(path).resolve():
        raise ConfigurationError(f"tx= is a connection to {main or 'memory'!r}, this app uses {path!r}")


def _is_legacy(connection: sqlite3.Connection) -> bool:
    """Whether transactions begin and end as they did before Python 3.12, which knows another way."""
    return getattr(connection, "autocommit", -1) == -1


class _Unshaped:
    """A connection whose rows are tuples, whatever its owner has made of them."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def _cursor(self) -> sqlite3.Cursor:
        cursor = self._connection.cursor()
        cursor.row_factory = None
        return cursor

    def execute(self, statement: str, parameters: Sequence[Any]) -> sqlite3.Cursor:
        return self._cursor().execute(statement, parameters)

    def executemany(self, statement: str, rows: Sequence[Sequence[Any]]) -> sqlite3.Cursor:
        return self._cursor().executemany(statement, rows)


def write(tx: Transaction, puts: Mapping[str, bytes], deletes: Iterable[str] = ()) -> None:
    """Put and delete all of these. A key that is both deleted and put has the value that is put."""
    tx.run_many("delete_value", [(key,) for key in deletes])
    tx.run_many("put_value", list(puts.items()))
