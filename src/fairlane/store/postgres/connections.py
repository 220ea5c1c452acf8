"""Connections to PostgreSQL: a pool for short statements, and single ones for those who hold a lock or listen.

What the driver raises for which the program is not to blame becomes `StoreUnavailable` (`fairlane.store.faults`); the
next use connects again.

Every wait for an answer has a bound, and a statement may take as long as it needs. The two go together because silence
is asked about: a session that has not answered for 5 s is looked up by another one. As long as the server works on the
statement or waits for a lock, so do we. If it has nothing to do, the question or the answer was lost on the way; if it
cannot be asked, nothing can be reached. Then the session is ended, and whoever waits for it gets `StoreUnavailable`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import asyncpg
from asyncpg.pool import PoolConnectionProxy
from msgspec import Struct

from fairlane.clock import Clock, Instant, SystemClock
from fairlane.errors import ConfigurationError, StoreUnavailable
from fairlane.store.boards import UNKNOWN, Expected, QueueClock, QueueTime, Witness
from fairlane.store.faults import Fault, of_sqlstate, remedy_for
from fairlane.store.procedures import Each, Many, Procedure, Query, Question, Rows, Script, Some, Whole
from fairlane.store.statements import load_bodies, load_statements

Connection: TypeAlias = "asyncpg.Connection[Any] | PoolConnectionProxy[Any]"
if TYPE_CHECKING:
    DriverConnection = asyncpg.Connection[Any]
else:
    DriverConnection = asyncpg.Connection

log = logging.getLogger("fairlane.store.postgres")

STATEMENTS = load_statements(
    "fairlane.store.postgres",
    "queries.sql",
    "claims.sql",
    "board.sql",
    "operators.sql",
    "explain.sql",
    "sharing.sql",
    "census.sql",
    "partitions.sql",
    "schedules.sql",
    "sums.sql",
    "stats.sql",
    "health.sql",
) | load_bodies("fairlane.store.postgres", "store_job", "cancel_job")

T = TypeVar("T")
Asked = TypeVar("Asked")

POOL_SIZE = 8
HANG_UP_WITHIN = 2.0
CLOSE_WITHIN = 5.0
CONNECT_WITHIN = 10.0
"""Seconds for a new session, from the address to the end of the log-in."""
GROW_AFTER = 0.05
"""Seconds for which one waits for a connection that is in use before there is another one."""
TRIES = 6
FIRST_PAUSE = 0.02
"""Seconds before a transaction is tried again; doubled each time."""
PATIENCE = 15.0
"""Seconds after which it is not tried again."""
ASK_AFTER, LONGEST_BETWEEN = 5.0, 30.0
"""Seconds of silence after which a session is asked about, and the most until it is asked about again."""
LOOK_EVERY = 1.0
UNDECIDED_FOR = 60.0
"""Seconds after which a silent session is ended that cannot be asked about, because the server admits nobody."""
KEEPALIVE_AFTER, KEEPALIVE_EVERY, KEEPALIVES = 10, 5, 3
UNACKNOWLEDGED_FOR = 15_000
"""Milliseconds for which the network may leave what was sent without an acknowledgement."""

CHECK_URL = "check the database URL: FAIRLANE_URL, --url, or that of the App"

CONFLICTS = (asyncpg.SerializationError, asyncpg.DeadlockDetectedError)


class Conflict(StoreUnavailable):
    """The server has undone this transaction in favour of another."""


class Misaddressed(ConfigurationError, StoreUnavailable):
    """A database URL with which no session can be opened: a mistake to correct, and nothing is there until then."""


class Session(DriverConnection):
    """A connection of our own."""

    backend = 0
    """The process that serves it. (Behind a pooler, it is not the one that the driver knows of.)"""

    def __init__(self, protocol: Any, transport: asyncio.Transport, *given: Any) -> None:
        super().__init__(protocol, transport, *given)
        _notice_lost_peers(transport.get_extra_info("socket"))

    @property
    def is_left_open(self) -> bool:
        """The driver takes it to be in a transaction, as it does after a BEGIN that failed."""
        return getattr(self, "_top_xact", None) is not None


def _notice_lost_peers(connected: socket.socket | None) -> None:
    """Have the system find out that the other side is gone, also while nothing is sent, and within seconds."""
    if connected is None or connected.family not in (socket.AF_INET, socket.AF_INET6):
        return
    options = {
        "TCP_KEEPIDLE": KEEPALIVE_AFTER,
        "TCP_KEEPALIVE": KEEPALIVE_AFTER,  # the same on macOS
        "TCP_KEEPINTVL": KEEPALIVE_EVERY,
        "TCP_KEEPCNT": KEEPALIVES,
        "TCP_USER_TIMEOUT": UNACKNOWLEDGED_FOR,
    }
    with contextlib.suppress(OSError):
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in options.items():
            if (option := getattr(socket, name, None)) is not None:
                connected.setsockopt(socket.IPPROTO_TCP, option, value)


def fault_of(error: BaseException, connection: Connection | None = None) -> Fault | None:
    """What an error of the driver means; `None` for an error that is not the driver's."""
    if isinstance(error, asyncpg.PostgresError):
        return of_sqlstate(error.sqlstate)
    if isinstance(error, asyncpg.InterfaceError):  # of the driver's own use, unless the session has ended beneath it
        return Fault.AWAY if connection is None or _is_closed(connection) else Fault.OURS
    # Among the driver's internal errors is that it met the end of a session in the middle of something.
    return Fault.AWAY if isinstance(error, asyncpg.InternalClientError | OSError | TimeoutError) else None


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
def translating(connection: Connection | None = None, where: str = "") -> Iterator[None]:
    """Turn what the driver raises into what Fairlane raises. What is the program's own fault stays as it is."""
    try:
        yield
    except StoreUnavailable:
        raise
    except Exception as error:
        match fault_of(error, connection):
            case Fault.CONFLICT:
                raise Conflict(*_problem_and_remedy(error, where)) from error
            case Fault.AWAY:
                raise StoreUnavailable(*_problem_and_remedy(error, where)) from error
        raise


def _problem_and_remedy(error: Exception, where: str) -> tuple[str, str]:
    """An error in our words, and what to do about it."""
    sqlstate = error.sqlstate if isinstance(error, asyncpg.PostgresError) else None
    if sqlstate is None or sqlstate.startswith("08"):
        return f"PostgreSQL{where} cannot be reached: {_words(error)}", remedy_for(None)
    return f"PostgreSQL{where} refused: {_words(error)} (SQLSTATE {sqlstate})", remedy_for(sqlstate)


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.ECONNREFUSED:
        return "connection refused"
    if isinstance(error, TimeoutError) and not str(error):
        return f"no answer within {CONNECT_WITHIN:g} s"
    return (str(error) or type(error).__name__).partition("\n")[0]


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
        self._has_connected = False
        self._refusal: tuple[float, StoreUnavailable] | None = None
        """When nobody could be reached the last time, and what was said; nothing, once somebody was."""
        self._free: asyncio.LifoQueue[Session] = asyncio.LifoQueue()
        self._busy: set[Session] = set()
        self._silence = Silence(self)
        self._room = asyncio.Semaphore(POOL_SIZE)

    async def open(self) -> None:
        if not self._is_open:
            self._free.put_nowait(await self.connect())
            self._is_open = True

    async def close(self) -> None:
        """Hang up. What is under way may end first, if it does so soon."""
        self._is_open = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_WITHIN):
                for _ in range(POOL_SIZE):
                    await self._room.acquire()
        self._silence.close()
        for connection in self._busy:
            connection.terminate()
        self._room = asyncio.Semaphore(POOL_SIZE)
        idle, self._free = self._idle_sessions(), asyncio.LifoQueue()
        await asyncio.gather(*map(hang_up, idle))

    async def connect(self) -> Session:
        """A session of its own, with settings that our statements rely on, whatever the defaults of server and role."""
        try:
            async with asyncio.timeout(CONNECT_WITHIN):
                connection = await asyncpg.connect(
                    self._url,
                    timeout=CONNECT_WITHIN,
                    server_settings={"application_name": self._application_name},
                    max_cached_statement_lifetime=0,
                    connection_class=Session,
                )
                try:
                    connection.backend = await connection.fetchval(STATEMENTS["set_session"])
                except BaseException:
                    connection.terminate()
                    raise
        except Exception as error:
            # Whatever goes wrong is about the address, the server, or the way there. Once it has worked, the address is
            # not to blame: a certificate is being replaced, say.
            refusal = StoreUnavailable(*_problem_and_remedy(error, self._where))
            if not self._has_connected and (isinstance(error, ValueError) or fault_of(error) is Fault.OURS):
                problem = f"PostgreSQL{self._where} cannot be connected to: {_words(error)}"
                refusal = Misaddressed(problem, CHECK_URL)
            self._refusal = asyncio.get_running_loop().time(), refusal
            raise refusal from error
        self._has_connected, self._refusal = True, None
        return connection

    @contextlib.contextmanager
    def in_use(self, connection: Session) -> Iterator[None]:
        """Answers of this session are waited for during the block: one that has silently died is ended."""
        self._silence.begin(connection)
        try:
            with translating(connection, self._where):
                yield
        finally:
            self._silence.end(connection)

    def forget_idle(self) -> None:
        """A session of ours has died unseen: those that lay idle beside it probably have, too."""
        for connection in self._idle_sessions():
            connection.terminate()

    def _idle_sessions(self) -> list[Session]:
        """Take all that nobody uses."""
        return [self._free.get_nowait() for _ in range(self._free.qsize())]

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        """A connection from the pool, for one transaction."""
        if not self._is_open:
            raise StoreUnavailable("the store is closed; open it first")
        room, asked_at = self._room, asyncio.get_running_loop().time()
        async with room:
            connection = await self._idle(asked_at)
            self._busy.add(connection)
            try:
                with self.in_use(connection):
                    yield connection
            except BaseException as error:
                # The server cannot serve us any more, or we were cancelled in the middle: the next use finds a better
                # one. Any other error is about the statement, and the connection as good as before.
                is_away = isinstance(error, StoreUnavailable) and not isinstance(error, Conflict)
                if is_away or connection.is_left_open or not isinstance(error, Exception):
                    connection.terminate()
                raise
            finally:
                self._busy.discard(connection)
                if not connection.is_closed():
                    self._free.put_nowait(connection)

    async def _idle(self, asked_at: float) -> Session:
        while not self._free.empty():
            connection = self._free.get_nowait()
            if not connection.is_closed():
                return connection
        if self._busy:
            # Most statements take less time than a new connection.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GROW_AFTER):
                    return await self._free.get()
        if self._refusal is not None and self._refusal[0] > asked_at:
            # Others have tried while we waited for our turn. If each tried for itself, a crowd would wait for minutes.
            refusal = self._refusal[1]
            raise StoreUnavailable(refusal.problem, refusal.remedy)
        return await self.connect()

    async def again(self, work: Callable[[Connection, bool], Awaitable[T]]) -> T:
        """Run one transaction, and run it again after a conflict or a lost connection.

        `work` is given whether an earlier try may have committed.
        """
        clock = asyncio.get_running_loop().time
        pause, may_have_committed, give_up_at = FIRST_PAUSE, False, clock() + PATIENCE
        for tries_left in reversed(range(TRIES)):
            try:
                async with self.session() as connection:
                    return await work(connection, may_have_committed)
            except StoreUnavailable as error:
                may_have_committed = may_have_committed or not isinstance(error, Conflict)
                if not tries_left or clock() >= give_up_at:
                    raise
            await asyncio.sleep(pause)
            pause *= 2
        raise AssertionError("the last try returns or raises")


async def answer(connection: Connection, asked: Question) -> Any:
    """The rows of a statement that a procedure asks for."""
    match asked:
        case Query(name, parameters):
            return await connection.fetch(STATEMENTS[name], *_columns(parameters))
        case Each(name, rows, width):
            return await connection.fetch(STATEMENTS[name], *_columns([Rows(rows, width)]))
        case Some(name, parameters, most, but_not):
            return await connection.fetch(STATEMENTS[name], *_columns(parameters), most, list(but_not))
        case Many(name, queue, rows):
            return await connection.execute(STATEMENTS[name], queue, rows)
        case Whole(name, rows):
            return await connection.execute(STATEMENTS[name], rows)
        case Script(sql):
            return await connection.execute(sql)
    raise AssertionError(f"{asked!r} is not asked on a connection alone")


def _columns(parameters: Sequence[Any]) -> list[Any]:
    """Rows become columns."""
    given: list[Any] = []
    for each in parameters:
        is_rows = isinstance(each, Rows)
        given += [[row[n] for row in each.rows] for n in range(each.width)] if is_rows else [each]
    return given


async def driven(asking: Generator[Asked, Any, T], answer: Callable[[Asked], Awaitable[Any]]) -> T:
    """Answer whatever a generator asks, until it has come to a result."""
    try:
        asked = next(asking)
        while True:
            asked = asking.send(await answer(asked))
    except StopIteration as stop:
        result: T = stop.value
        return result


async def perform(connection: Connection, procedure: Procedure[T]) -> T:
    """Carry out a procedure that needs no more than a connection."""
    return await driven(procedure, lambda asked: answer(connection, asked))


class _Use(Struct):
    """One use of a session, from its first statement to its last answer."""

    since: float
    look_at: float
    looks: int = 0


class Silence:
    """Finds sessions from which no answer will come. One timer for all of them, and only while one is in use."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._uses: dict[Session, _Use] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._asking: asyncio.Task[None] | None = None

    def begin(self, connection: Session) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._uses[connection] = _Use(now, now + ASK_AFTER)
        if self._timer is None:
            self._timer = loop.call_later(LOOK_EVERY, self._look)

    def end(self, connection: Session) -> None:
        self._uses.pop(connection, None)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._asking is not None:
            self._asking.cancel()

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(LOOK_EVERY, self._look) if self._uses else None
        now = loop.time()
        silent = {each: use for each, use in self._uses.items() if use.look_at <= now}
        if silent and self._asking is None:
            self._asking = loop.create_task(self._ask_about(silent), name="fairlane silence")
            self._asking.add_done_callback(self._asked)

    def _asked(self, task: asyncio.Task[None]) -> None:
        self._asking = None
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("sessions that do not answer could not be asked about: %s", error, exc_info=error)

    async def _ask_about(self, silent: dict[Session, _Use]) -> None:
        now = asyncio.get_running_loop().time
        try:
            lost = await self._without_work([each.backend for each in silent])
        except StoreUnavailable as error:
            lost = {each.backend for each in silent}
            if isinstance(error.__cause__, asyncpg.PostgresError):
                # The server is there, and does not admit us: it may still be at our statements.
                log.warning("sessions that do not answer cannot be asked about: %s", error)
                lost = {each.backend for each, use in silent.items() if now() - use.since >= UNDECIDED_FOR}
        for connection, use in silent.items():
            use.looks += 1
            use.look_at = now() + min(ASK_AFTER * 2**use.looks, LONGEST_BETWEEN)
            # Unless the answer has come meanwhile.
            if connection.backend in lost and self._uses.get(connection) is use:
                log.warning("a session has not answered for %.0f s and is ended", now() - use.since)
                connection.terminate()
                self._connections.forget_idle()

    async def _without_work(self, backends: Sequence[int]) -> set[int]:
        """Which of these are gone, or wait for us as we wait for them."""
        connection = await self._connections.connect()
        try:
            with translating(connection):
                async with asyncio.timeout(CONNECT_WITHIN):
                    rows = await connection.fetch(STATEMENTS["select_without_work"], backends, ASK_AFTER / 2)
        finally:
            await hang_up(connection)
        return {row[0] for row in rows}


class StoreClock:
    """What statements take as their time (`parameter()`: nothing, where the database is to say), and waiting for it."""

    def __init__(self, given: Clock | None) -> None:
        self._given = None if given is None else QueueClock(given)
        self._local = SystemClock()
        self._offset = 0
        self._witness = Witness(self._local)

    def parameter(self) -> Instant | None:
        return None if self._given is None else self._given.now()

    def given(self) -> QueueTime | None:
        """Queue time, unless the database is to say."""
        return None if self._given is None else self._given.time()

    def learn(self, ahead: int, latest: Instant) -> None:
        """What is stored. The database goes by it by itself, a clock that was given is to do so too."""
        if self._given is not None:
            self._given.learn(ahead, latest)

    def expected(self) -> Expected:
        """What queue time should be, from what this process has seen. To be asked before the database is."""
        return UNKNOWN if self._given is not None else self._witness.expected()

    def observe(self, now: Instant) -> None:
        """The database says that queue time is `now`: a wait on this machine ends by it."""
        self._offset = now - self._local.now()

    def kept(self, now: Instant) -> None:
        """The same, where it has compared that with what was expected."""
        self.observe(now)
        self._witness.saw(now)

    def estimate(self) -> Instant:
        """The time, estimated without asking the database: for ids, which only have to rise with it roughly."""
        return self._local.now() + self._offset if self._given is None else self._given.now()

    async def sleep_until(self, moment: Instant) -> None:
        if self._given is not None:
            await self._given.sleep_until(moment)
        else:
            await self._local.sleep_until(moment - self._offset)
