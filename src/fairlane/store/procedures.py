"""Procedures of every store, written once: generators that ask for named statements, which each store answers.

Whoever calls a procedure gets a `Work`, for `Store.run`: how it is to be run is said where it is defined. Within a
procedure, `yield from` goes through another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from functools import wraps
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

from fairlane.job import NewJob
from fairlane.scheduler.resident import Found
from fairlane.scheduler.snapshot import Ask

P = ParamSpec("P")
T = TypeVar("T")
Asked = TypeVar("Asked")
T_co = TypeVar("T_co", covariant=True)


class Query(NamedTuple):
    """A statement by its name, to be answered with its rows.

    Parameters are alike on every store: numbers, texts, ids as `UUID`, lists of these, and `Rows`. What one database
    does in a single statement, another may do in several, by the same name.
    """

    name: str
    parameters: tuple[Any, ...]


class Each(NamedTuple):
    """A statement for many things: SQLite runs it for each, PostgreSQL is given them together, a list a column."""

    name: str
    rows: Sequence[Sequence[Any]]
    width: int = 1


class Some(NamedTuple):
    """The first rows of a statement, without those that have one of these values in front. PostgreSQL takes the
    number and the values as its last parameters."""

    name: str
    parameters: tuple[Any, ...]
    most: int
    but_not: Collection[Any]


class Many(NamedTuple):
    """A statement that writes many rows of a queue."""

    name: str
    queue: int
    rows: Sequence[Sequence[Any]]


class Whole(NamedTuple):
    """A statement that writes rows of one table, whole: PostgreSQL takes them as one array."""

    name: str
    rows: Sequence[Sequence[Any]]


class Rows(NamedTuple):
    """Rows that a statement is given together, as one of its parameters: PostgreSQL takes a list for each column."""

    rows: Sequence[Sequence[Any]]
    width: int


class Script(NamedTuple):
    """SQL of several statements, as migrations are: it is answered with nothing."""

    sql: str


class Enqueue(NamedTuple):
    """Jobs to be stored, as a producer's; answered with what `Store.enqueue` returns."""

    jobs: Sequence[NewJob]


class OnBoard(NamedTuple):
    """What a store does with the board of a queue, by the name of the method; answered with what that returns.

    A procedure that holds the queue's claim lock may write the board, every other one looks at it. Without a queue,
    only what is of no board can be asked.
    """

    queue: str
    action: str
    parameters: tuple[Any, ...] = ()


class Told(NamedTuple):
    """Something that only the store can say."""

    what: str


NOW = Told("now")
"""The time that statements are given. `None`: the database's own."""
TIME = Told("time")
"""The time, as `QueueTime`."""
MEMORY = Told("memory")
"""What the store remembers from one procedure to the next, for as long as it is open: a dictionary."""

EVERYONE = 1 << 20
"""More than ever wait for a queue's jobs."""

Question = Query | Each | Some | Many | Whole | Script | Enqueue | OnBoard | Told
Procedure = Generator[Question, Any, T]
"""It is sent the rows of each statement that it asks for. Lists of texts are given as lists."""


class Terms(NamedTuple):
    """How a procedure is run."""

    writes: bool = False
    is_together: bool = False
    """In one transaction, or one snapshot if it does not write. Else it asks one statement, which needs none."""
    is_durable: bool = True
    is_repeated: bool = True
    """Tried again after a conflict or a lost connection: done twice, it does no harm."""
    locks: bool = False
    """With the claim lock of the queue, or queues, that its first argument names."""
    keeps: bool = True
    """False: whatever it has written is taken back."""
    is_of_one_moment: bool = False
    """It writes what it has read in one snapshot, and is undone where somebody else has changed that."""


class Work(Generic[T_co]):
    """A procedure with its arguments. It may have to start over, so it is given as what makes it."""

    __slots__ = ("make", "name", "queues", "terms")

    def __init__(
        self, name: str, make: Callable[[], Procedure[T_co]], terms: Terms, queues: str | Sequence[str] = ()
    ) -> None:
        self.name = name
        self.make = make
        self.terms = terms
        self.queues = [queues] if isinstance(queues, str) else list(queues)

    def __iter__(self) -> Procedure[T_co]:
        return self.make()


def run_by(terms: Terms, procedure: Callable[P, Procedure[T]]) -> Callable[P, Work[T]]:
    """A procedure that is run by these terms."""
    name = procedure.__name__.removeprefix("_")

    @wraps(procedure)
    def called(*args: P.args, **kwargs: P.kwargs) -> Work[T]:
        queues: Any = args[0] if terms.locks else ()
        return Work(name, lambda: procedure(*args, **kwargs), terms, queues)

    return called


def look(procedure: Callable[P, Procedure[T]]) -> Callable[P, Work[T]]:
    """One statement that changes nothing."""
    return run_by(Terms(), procedure)


def snapshot(procedure: Callable[P, Procedure[T]]) -> Callable[P, Work[T]]:
    """Several statements that change nothing, of one moment."""
    return run_by(Terms(is_together=True), procedure)


def change(procedure: Callable[P, Procedure[T]]) -> Callable[P, Work[T]]:
    """One statement that writes, durably. Nothing is tried again: a write whose answer was lost may have been done, and
    doing it twice could undo what another has written since."""
    return run_by(Terms(writes=True, is_repeated=False), procedure)


def note(procedure: Callable[P, Procedure[T]]) -> Callable[P, Work[T]]:
    """One statement that writes what is only written again if a crash loses it."""
    return run_by(Terms(writes=True, is_durable=False), procedure)


def transaction(procedure: Callable[P, Procedure[T]]) -> Callable[P, Work[T]]:
    """One durable transaction."""
    return run_by(Terms(writes=True, is_together=True), procedure)


def sweep(procedure: Callable[P, Procedure[T]]) -> Callable[P, Work[T]]:
    """One transaction that does not wait for the disk: whatever is lost of it is only done again."""
    return run_by(Terms(writes=True, is_together=True, is_durable=False, is_repeated=False), procedure)


def locked(procedure: Callable[P, Procedure[T]]) -> Callable[P, Work[T]]:
    """One durable transaction that holds the claim lock of the queue, or queues, that its first argument names."""
    return run_by(Terms(writes=True, is_together=True, locks=True), procedure)


def locked_sweep(procedure: Callable[P, Procedure[T]]) -> Callable[P, Work[T]]:
    """The same, and it does not wait for the disk."""
    return run_by(Terms(writes=True, is_together=True, is_durable=False, locks=True), procedure)


def locked_look(procedure: Callable[P, Procedure[T]]) -> Callable[P, Work[T]]:
    """The same, and what it has written on the way is taken back."""
    return run_by(Terms(writes=True, is_together=True, is_durable=False, locks=True, keeps=False), procedure)


def query(name: str, *parameters: Any) -> Query:
    return Query(name, parameters)


def is_done(name: str, *parameters: Any) -> Procedure[bool]:
    """Whether a statement has found what it was to change."""
    return bool((yield query(name, *parameters)))


def value(name: str, *parameters: Any) -> Procedure[Any]:
    """The first value that a statement brings; `None` where it brings no row."""
    found = yield query(name, *parameters)
    return found[0][0] if found else None


def on_board(queue: str, action: str, *parameters: Any) -> OnBoard:
    return OnBoard(queue, action, parameters)


def driven(asking: Generator[Asked, Any, T], answer: Callable[[Asked], Any]) -> T:
    """Answer whatever a generator asks, until it has come to a result."""
    try:
        asked = next(asking)
        while True:
            asked = asking.send(answer(asked))
    except StopIteration as stop:
        result: T = stop.value
        return result


def answered(queue: str, asking: Generator[Ask, Found, T]) -> Procedure[T]:
    """Give whoever asks what the tables of a queue's board hold, until it has come to a result."""
    try:
        ask = next(asking)
        while True:
            ask = asking.send((yield on_board(queue, "ask", ask)))
    except StopIteration as stop:
        result: T = stop.value
        return result
