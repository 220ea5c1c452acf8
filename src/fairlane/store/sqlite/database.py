"""One SQLite database: one connection, one thread, a whole transaction per hop.

Several processes may share the file. SQLite's own busy handling starves some of them, so write transactions queue at a
file lock first; `busy_timeout` is the backstop for those who write without it.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from fairlane.errors import ConfigurationError, StoreUnavailable
from fairlane.store.sqlite.known import Known
from fairlane.store.sqlite.write_lock import WriteLock
from fairlane.store.statements import load_statements

__all__ = ["Database", "Row", "Transaction"]

T = TypeVar("T")

STATEMENTS = load_statements(
    "fairlane.store.sqlite",
    "queries.sql",
    "operators.sql",
    "examining.sql",
    "partitions.sql",
    "tallying.sql",
    "seeing.sql",
    "health.sql",
    "schedules.sql",
)
BUSY_TIMEOUT = 10.0
CROWDED_CLAIM, MOST_JOBS = 100, 1 << 20

Row = tuple[Any, ...]


class Transaction:
    """A connection inside a write transaction. Statements are called by name."""

    __slots__ = ("_execute", "_executemany", "_known", "connection", "rows_read")

    def __init__(self, connection: sqlite3.Connection, known: dict[int, Known] | None = None) -> None:
        self.connection = connection
        # Somebody else's transaction may be rolled back without our hearing of it: what it knows ends with it.
        self._known = {} if known is None else known
        self._execute = connection.execute
        self._executemany = connection.executemany
        self.rows_read = 0

    def known_of(self, queue: int, revision: int) -> Known:
        """What is known of a queue's rows at this revision."""
        found = self._known.get(queue)
        if found is None or found.revision != revision or found.is_too_much():
            found = self._known[queue] = Known(revision)
        return found

    def run(self, name: str, *parameters: Any) -> int:
        """Execute a statement; the number of rows it changed."""
        return self._execute(STATEMENTS[name], parameters).rowcount

    def run_many(self, name: str, rows: Sequence[Sequence[Any]]) -> None:
        self._executemany(STATEMENTS[name], rows)

    def all(self, name: str, *parameters: Any) -> list[Row]:
        rows: list[Row] = self._execute(STATEMENTS[name], parameters).fetchall()
        self.rows_read += len(rows)
        return rows

    def one(self, name: str, *parameters: Any) -> Row | None:
        # All rows are taken: a statement left half-read would keep its lock, and `returning` would not be carried out.
        rows = self.all(name, *parameters)
        return rows[0] if rows else None

    def value(self, name: str, *parameters: Any) -> Any:
        row = self.one(name, *parameters)
        return row[0] if row else None


class Database:
    """A database file (or memory), opened on its own thread."""

    def __init__(self, path: str | None) -> None:
        self.path = path
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fairlane-sqlite")
        self._connection: sqlite3.Connection | None = None
        self._lock: WriteLock | None = None
        self._is_durable: bool | None = None
        self._known: dict[int, Known] = {}

    @property
    def most_at_once(self) -> int:
        """Jobs a claim may start: fewer while other processes wait to write. It is done sooner, and so are they."""
        return CROWDED_CLAIM if self._lock is not None and self._lock.is_crowded else MOST_JOBS

    async def open(self) -> None:
        await self._hop(self._open)

    async def close(self) -> None:
        if self._connection is not None:
            await self._hop(self._close)
        self._thread.shutdown(wait=False)

    async def write(self, work: Callable[[Transaction], T], *, durable: bool, keeps: bool = True) -> T:
        """Run `work` in one write transaction: committed as a whole, or not at all; if it `keeps` anything."""
        return await self._hop(lambda: self._transact(work, durable, keeps))

    async def read(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` on one snapshot; it changes nothing."""
        return await self._hop(lambda: self._look(work))

    async def _hop(self, work: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        # Shielded: a caller that is cancelled must not leave the thread's work half awaited and its error unseen.
        try:
            hop = loop.run_in_executor(self._thread, work)
        except RuntimeError:  # the thread was ended
            raise StoreUnavailable("the store is closed; make another, or open it again through its app") from None
        return await asyncio.shield(hop)

    def _open(self) -> None:
        if self._connection is not None:
            return
        try:
            self._connection = self._connect()
        except (sqlite3.OperationalError, OSError) as error:
            hint = "" if isinstance(error, FileNotFoundError) else "; can this user write to it and to its folder?"
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:
                hint = "; is a transaction of your own open? Open the app before it begins"
            raise StoreUnavailable(f"the SQLite database {self.path!r} cannot be opened: {error}{hint}") from error
        except sqlite3.DatabaseError as error:
            raise ConfigurationError(f"{self.path!r} is not a SQLite database: {error}") from error

    def _connect(self) -> sqlite3.Connection:
        if self.path is not None:
            folder = Path(self.path).resolve().parent
            if not folder.is_dir():
                raise FileNotFoundError(f"the folder {str(folder)!r} does not exist; create it first")
        connection = sqlite3.connect(
            self.path or ":memory:",
            timeout=BUSY_TIMEOUT,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=256,
        )
        connection.execute("pragma foreign_keys = on")
        if self.path is not None:
            self._lock = WriteLock(self.path)
            # Of several processes that open a new file, one switches it to WAL; SQLite's own waiting does not cover it.
            self._lock.take()
            try:
                connection.execute("pragma journal_mode = wal")
            finally:
                self._lock.give()
            connection.execute("pragma wal_autocheckpoint = 4000")
        connection.execute("pragma cache_size = -65536")
        return connection

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _open_connection(self) -> sqlite3.Connection:
        if self._connection is None:
            raise StoreUnavailable("the store is closed; open it first")
        return self._connection

    def _transact(self, work: Callable[[Transaction], T], durable: bool, keeps: bool) -> T:
        connection = self._open_connection()
        if self._lock is not None:
            self._lock.take()
        try:
            self._set_durable(connection, durable)
            connection.execute("begin immediate")
            try:
                result = work(Transaction(connection, self._known))
                if not keeps:
                    self._known.clear()
                connection.execute("commit" if keeps else "rollback")
                return result
            except BaseException:
                self._known.clear()
                if connection.in_transaction:
                    connection.execute("rollback")
                raise
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_ERROR:
                raise  # a table is missing, say: no wait brings it back
            is_busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
            hint = "; a transaction of your own may hold it: pass it as tx=, or end it first" if is_busy else ""
            raise StoreUnavailable(f"the SQLite database {self.path or ':memory:'} refused: {error}{hint}") from error
        finally:
            if self._lock is not None:
                self._lock.give()

    def _set_durable(self, connection: sqlite3.Connection, durable: bool) -> None:
        # 1.5 µs: durable enqueue and settle, claims that do not wait for the disk.
        if durable is not self._is_durable:
            connection.execute("pragma synchronous = full" if durable else "pragma synchronous = normal")
            self._is_durable = durable

    def _look(self, work: Callable[[Transaction], T]) -> T:
        connection = self._open_connection()
        try:
            connection.execute("begin")
            try:
                return work(Transaction(connection, self._known))
            finally:
                connection.execute("rollback")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_ERROR:
                raise  # a table is missing, say: no wait brings it back
            raise StoreUnavailable(f"the SQLite database {self.path or ':memory:'} refused: {error}") from error

    async def data_version(self) -> int:
        """Changes when another process has written."""
        return await self._hop(lambda: int(self._open_connection().execute("pragma data_version").fetchone()[0]))
