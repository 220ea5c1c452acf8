"""One SQLite database: one connection, one thread, a whole transaction per hop.

Several processes may share the file. SQLite's own busy handling starves some of them, so write transactions queue at a
file lock first; `busy_timeout` is the backstop for those who write without it. Neither is waited for without end: while
the thread waits for the file lock, whose holder may have been stopped, those who wait for the thread are answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Generic, TypeVar
from uuid import UUID

from fairlane.errors import ConfigurationError, StoreLost, StoreUnavailable
from fairlane.store.boards import Boards
from fairlane.store.faults import Fault, of_sqlite
from fairlane.store.statements import load_statements

T = TypeVar("T")

STATEMENTS = load_statements(
    "fairlane.store.sqlite",
    "queries.sql",
    "board.sql",
    "operators.sql",
    "explain.sql",
    "census.sql",
    "partitions.sql",
    "sums.sql",
    "stats.sql",
    "health.sql",
    "schedules.sql",
)
BUSY_TIMEOUT = 10.0
"""Seconds for which other processes that write are waited for."""
LOOKS = 10
"""How often a wait is looked at within that time."""
OWN_TRANSACTION = "a transaction of your own may hold it: pass it as tx=, or end it first"
CROWDED_CLAIM, MOST_JOBS = 100, 1 << 20

Row = tuple[Any, ...]


class Transaction:
    """A connection inside a transaction. Statements are called by name; whom they wake is noted until the commit."""

    __slots__ = ("_execute", "_executemany", "boards", "connection", "ended", "nudged", "rows_read", "woken")

    def __init__(self, connection: sqlite3.Connection, boards: Boards | None = None) -> None:
        self.connection = connection
        # Somebody else's transaction may be rolled back without our hearing of it: what it knows ends with it.
        self.boards = boards or Boards()
        self._execute = connection.execute
        self._executemany = connection.executemany
        self.rows_read = 0
        self.woken: Counter[int] = Counter()
        """By queue, how many jobs became claimable: as many of those who wait for it are nudged."""
        self.ended: list[UUID] = []
        """Jobs that ended: whoever waits for one of them is nudged."""
        self.nudged: dict[UUID, bytes] = {}
        """Workers to nudge besides, and what each nudge says."""

    def run(self, name: str, *parameters: Any) -> int:
        """Execute a statement; the number of rows it changed."""
        return self._execute(STATEMENTS[name], parameters).rowcount

    def run_many(self, name: str, rows: Sequence[Sequence[Any]]) -> None:
        self._executemany(STATEMENTS[name], rows)

    def all(self, name: str, *parameters: Any) -> list[Row]:
        rows: list[Row] = self._execute(STATEMENTS[name], parameters).fetchall()
        self.rows_read += len(rows)
        return rows

    def some(self, name: str, count: int, but_not: Collection[Any], *parameters: Any) -> list[Row]:
        """The first rows, without those that have one of these values in front."""
        found: list[Row] = []
        cursor = self._execute(STATEMENTS[name], parameters)
        while len(found) < count and (row := cursor.fetchone()) is not None:
            self.rows_read += 1
            if row[0] not in but_not:
                found.append(row)
        cursor.close()
        return found

    def one(self, name: str, *parameters: Any) -> Row | None:
        # All rows are taken: a statement left half-read would keep its lock, and `returning` would not be carried out.
        rows = self.all(name, *parameters)
        return rows[0] if rows else None

    def value(self, name: str, *parameters: Any) -> Any:
        row = self.one(name, *parameters)
        return row[0] if row else None

    def answer(self, name: str, parameters: Iterable[Any]) -> list[Row]:
        """The rows of a statement; of one that brings none, an empty one for each that it has changed."""
        cursor = self._execute(STATEMENTS[name], tuple(parameters))
        return cursor.fetchall() if cursor.description else [()] * cursor.rowcount


class _Hop(Generic[T]):
    """Work for the thread, and whoever waits for it."""

    __slots__ = ("future", "is_abandoned", "is_running", "loop", "work")

    def __init__(self, work: Callable[[], T]) -> None:
        self.work = work
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[T] = self.loop.create_future()
        self.is_running = False
        """It can no longer be abandoned."""
        self.is_abandoned = False

    def end(self, result: T | None, error: BaseException | None) -> None:
        with contextlib.suppress(RuntimeError):  # its event loop has ended
            self.loop.call_soon_threadsafe(self._end, result, error)

    def _end(self, result: Any, error: BaseException | None) -> None:
        if self.future.done():
            return
        if error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(error)


class _Abandoned(Exception):
    """Whoever waited for this work has been answered: it is not done."""


class Database:
    """A database file (or memory), opened on its own thread."""

    def __init__(self, path: str | None) -> None:
        self.path = path
        self._hops: SimpleQueue[_Hop[Any] | None] = SimpleQueue()
        self._waiting: set[_Hop[Any]] = set()
        self._current: _Hop[Any] | None = None
        self._deciding = threading.Lock()
        """Whether a hop is done or abandoned is decided once, for both sides."""
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._watchdog: tuple[asyncio.AbstractEventLoop, asyncio.TimerHandle] | None = None
        self._file: tuple[str, int, int] | None = None
        """Where it is, and which file it is."""
        self._connection: sqlite3.Connection | None = None
        self._lock: WriteLock | None = None
        self._blocked_since: float | None = None
        """By the monotonic clock: since when no write could begin, over as many tries as there were."""
        self._is_durable: bool | None = None
        self.boards = Boards()
        """What this process remembers of the boards of queues."""
        self.on_begin: Callable[[Transaction, bool], None] = lambda tx, writes: None
        """What every transaction begins with, and whether it writes."""

    @property
    def most_at_once(self) -> int:
        """Jobs a claim may start: fewer while other processes wait to write. It is done sooner, and so are they."""
        return CROWDED_CLAIM if self._lock is not None and self._lock.is_crowded else MOST_JOBS

    async def open(self) -> None:
        await self._hop(self._open)

    @property
    def is_waiting(self) -> bool:
        """Whether the thread waits for another process to end its write."""
        return self._blocked_since is not None

    async def close(self) -> None:
        if self._connection is not None:
            # If the thread waits for a lock that nobody gives back, it is left to the end of the process.
            with contextlib.suppress(StoreUnavailable):
                await self._hop(self._close)
        self._is_closed = True
        self._hops.put(None)

    async def write(self, work: Callable[[Transaction], T], *, durable: bool, keeps: bool = True) -> T:
        """Run `work` in one write transaction: committed as a whole, or not at all; if it `keeps` anything."""
        return await self._hop(lambda: self._transact(work, durable, keeps))

    async def read(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` on one snapshot; it changes nothing."""
        return await self._hop(lambda: self._look(work))

    async def data_version(self) -> int:
        """Changes when another process has written."""
        return await self.read(lambda tx: int(tx.connection.execute("pragma data_version").fetchone()[0]))

    async def _hop(self, work: Callable[[], T]) -> T:
        if self._is_closed:
            raise StoreUnavailable("the store is closed; make another, or open it again through its app")
        hop = _Hop(work)
        self._waiting.add(hop)
        hop.future.add_done_callback(lambda _: self._waiting.discard(hop))
        if self._thread is None:
            # A daemon: a thread that waits for a lock must not keep the interpreter from ending.
            self._thread = threading.Thread(target=self._run, name="fairlane-sqlite", daemon=True)
            self._thread.start()
        self._hops.put(hop)
        if self._watchdog is None or self._watchdog[0] is not hop.loop:
            self._watch(hop.loop)
        # Shielded: a caller that is cancelled must not leave the thread's work half awaited and its error unseen.
        return await asyncio.shield(hop.future)

    def _run(self) -> None:
        while (hop := self._hops.get()) is not None:
            self._current = hop
            try:
                if hop.is_abandoned:
                    raise _Abandoned
                hop.end(hop.work(), None)
            except _Abandoned:
                pass
            except BaseException as error:
                hop.end(None, error)
            self._current = hop = None

    def _go_ahead(self) -> None:
        """Nothing is in the way of the work at hand any more, unless nobody waits for it."""
        hop = self._current
        assert hop is not None
        with self._deciding:
            if hop.is_abandoned:
                raise _Abandoned
            hop.is_running = True

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        self._watchdog = loop, loop.call_later(BUSY_TIMEOUT / LOOKS, self._look_at_wait, loop)

    def _look_at_wait(self, loop: asyncio.AbstractEventLoop) -> None:
        """Answer everybody who waits for the thread, if it has waited for too long for another process."""
        self._watchdog = None
        since = self._blocked_since
        if since is not None and time.monotonic() - since >= BUSY_TIMEOUT:
            for hop in list(self._waiting):
                self._abandon(hop)
        if any(hop.loop is loop for hop in self._waiting):
            self._watch(loop)

    def _abandon(self, hop: _Hop[Any]) -> None:
        with self._deciding:
            if hop.is_running:
                return
            hop.is_abandoned = True
        # Who has our own lock and not that of SQLite waits for somebody who did not take ours.
        is_ours = self._lock is not None and not self._lock.is_waited_for
        who, remedy = ("a transaction", OWN_TRANSACTION) if is_ours or self._lock is None else self._lock.holder()
        message = f"the SQLite database {self.path} has been locked for {BUSY_TIMEOUT:g} s by {who}"
        hop.end(None, StoreUnavailable(message, remedy))

    def _open(self) -> None:
        if self._connection is not None:
            self._go_ahead()
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
            if not Path(self.path).exists():
                make_private(self.path)
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
            with self._alone():
                self._go_ahead()
                connection.execute("pragma journal_mode = wal")
                self._blocked_since = None
            where = os.path.abspath(self.path)
            found = os.stat(where)
            self._file = where, found.st_dev, found.st_ino
            connection.execute("pragma wal_autocheckpoint = 4000")
        connection.execute("pragma cache_size = -65536")
        return connection

    def _close(self) -> None:
        self._go_ahead()
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

    def _require_file(self) -> None:
        """Refuse to go on with a file that nobody else can find any more. (1.5 µs.)"""
        if self._file is None:
            return
        where, *which = self._file
        try:
            found = os.stat(where)
        except FileNotFoundError:
            problem = "is no longer there: it was deleted or moved"
        else:
            if which == [found.st_dev, found.st_ino]:
                return
            problem = "was replaced by another file"
        raise StoreLost(
            f"the SQLite database {where} {problem} while this program had it open, and what it writes would be lost; "
            "put the file back, if you can, and restart the program"
        )

    def _transact(self, work: Callable[[Transaction], T], durable: bool, keeps: bool) -> T:
        connection = self._open_connection()
        with self._translating(), self._alone():
            self._require_file()
            self._set_durable(connection, durable)
            connection.execute("begin immediate")
            self._blocked_since = None
            try:
                self._go_ahead()
                tx = Transaction(connection, self.boards)
                self.on_begin(tx, True)
                result = work(tx)
                connection.execute("commit" if keeps else "rollback")
                return result
            except BaseException:
                if connection.in_transaction:
                    connection.execute("rollback")
                raise

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """No other process of this machine writes during the block, unless it does so past this lock."""
        if self._blocked_since is None:
            self._blocked_since = time.monotonic()
        if self._lock is None:
            yield
            return
        self._lock.take()
        try:
            yield
        finally:
            self._lock.give()

    @contextlib.contextmanager
    def _translating(self) -> Iterator[None]:
        """Turn what is not the program's own fault into `StoreUnavailable`."""
        try:
            yield
        except Exception as error:
            is_busy = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF == sqlite3.SQLITE_BUSY
            if not is_busy:
                self._blocked_since = None
            if of_sqlite(error) in (None, Fault.OURS):
                raise
            raise StoreUnavailable(
                f"the SQLite database {self.path or ':memory:'} refused: {error}", OWN_TRANSACTION if is_busy else ""
            ) from error

    def _set_durable(self, connection: sqlite3.Connection, durable: bool) -> None:
        # 1.5 µs: durable enqueue and settle, claims that do not wait for the disk.
        if durable is not self._is_durable:
            connection.execute("pragma synchronous = full" if durable else "pragma synchronous = normal")
            self._is_durable = durable

    def _look(self, work: Callable[[Transaction], T]) -> T:
        self._go_ahead()
        self._blocked_since = None  # whatever held the thread up, it goes on
        connection = self._open_connection()
        with self._translating():
            self._require_file()
            connection.execute("begin")
            try:
                tx = Transaction(connection, self.boards)
                self.on_begin(tx, False)
                return work(tx)
            finally:
                if connection.in_transaction:  # an I/O error has ended it
                    connection.execute("rollback")


PRIVATE = 0o600
REMEMBERED = 32
"""Writes without anybody else in the way, until the others are held to be gone."""


class WriteLock:
    """A lock file beside one database file, opened once by each store."""

    def __init__(self, path: str) -> None:
        mode = os.stat(path).st_mode & 0o777 if os.path.exists(path) else PRIVATE
        self._file = _opened(f"{path}.lock", mode)
        self._crowd = 0
        self.is_waited_for = False
        """Another process has it."""

    @property
    def is_crowded(self) -> bool:
        """Whether others have been in the way of late."""
        return self._crowd > 0

    def take(self) -> None:
        """Wait until nobody else writes."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._crowd = max(0, self._crowd - 1)
        except BlockingIOError:
            self._crowd = REMEMBERED
            self.is_waited_for = True
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX)
            finally:
                self.is_waited_for = False

    def holder(self) -> tuple[str, str]:
        """Which process holds the lock, as far as the system says, and what to do about it."""
        found = os.fstat(self._file)
        which = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
        with contextlib.suppress(OSError):  # not every system says
            for line in Path("/proc/locks").read_text().splitlines():
                # `1: FLOCK  ADVISORY  WRITE 4711 fe:01:1234 0 EOF`; who waits has an arrow.
                _, kind, *_, pid, file, _, _ = line.split()
                if (kind, file) == ("FLOCK", which) and int(pid) > 0:
                    return _described(int(pid))
        return "another process", "find it with `fuser` or `lsof`, and end it"

    def give(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self._file)


def _described(pid: int) -> tuple[str, str]:
    name, state = "", ""
    with contextlib.suppress(OSError):
        # `4711 (python3) T …`; a name may hold blanks and brackets itself.
        before, _, after = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
        name, state = before.partition("(")[2], after.split()[0]
    who = f"process {pid}" + (f" ({name})" if name else "")
    if state in ("T", "t"):
        return f"{who}, which is stopped", f"let it go on (kill -CONT {pid}), or end it"
    return who, "wait until it has written; it may wait for a transaction that is not Fairlane's itself: see its log"


def make_private(path: str) -> None:
    """Create a database file that only its owner can read. One that is there keeps its mode, and SQLite gives the files
    beside it the mode of the database."""
    os.close(_opened(path, PRIVATE))


def _opened(path: str, mode: int) -> int:
    """The file, open for writing; if it is not there yet, made with exactly this mode."""
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        file = os.open(path, flags | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError:
        return os.open(path, flags)
    os.fchmod(file, mode)  # whoever shares the database shares its lock, whatever the umask says
    return file
