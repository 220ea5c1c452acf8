"""Procedures of every store, written once: generators that ask for named statements, which each store answers.

A call of a procedure returns a `Work` for `Store.run`: its decorator says how it is run. Within a
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


class StoreValue(NamedTuple):
    """Something that only the store knows."""

    name: str


NOW = StoreValue("now")
"""The time that statements are given. `None`: the database's own."""
TIME = StoreValue("time")
"""The time, as `QueueTime`."""
MEMORY = StoreValue("memory")
"""What the store remembers from one procedure to the next, for as long as it is open: a dictionary."""

EVERYONE = 1 << 20
"""More than ever wait for a queue's jobs."""

Question = Query | Each | Some | Many | Whole | Script | Enqueue | OnBoard | StoreValue
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


def run_by(terms: Terms) -> Callable[[Callable[P, Procedure[T]]], Callable[P, Work[T]]]:
    """A decorator for procedures that are run by these terms."""

    def decorated(procedure: Callable[P, Procedure[T]]) -> Callable[P, Work[T]]:
        name = procedure.__name__.removeprefix("_")

        @wraps(procedure)
        def called(*args: P.args, **kwargs: P.kwargs) -> Work[T]:
            queues: Any = args[0] if terms.locks else ()
            return Work(name, lambda: procedure(*args, **kwargs), terms, queues)

        return called

    return decorated


look = run_by(Terms())
"""One statement that changes nothing."""
snapshot = run_by(Terms(is_together=True))
"""Several statements that change nothing, of one moment."""
change = run_by(Terms(writes=True, is_repeated=False))
"""One statement that writes, durably. It is not tried again: a write whose answer was lost may have been done, and
doing it twice could undo what another has written since."""
note = run_by(Terms(writes=True, is_durable=False))
"""One statement that writes what is only written again if a crash loses it."""
transaction = run_by(Terms(writes=True, is_together=True))
"""One durable transaction."""
locked = run_by(Terms(writes=True, is_together=True, locks=True))
"""One durable transaction that holds the claim lock of the queue, or queues, that its first argument names."""
locked_sweep = run_by(Terms(writes=True, is_together=True, is_durable=False, locks=True))
"""The same, and it does not wait for the disk."""


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
    """Answer the questions of a generator, until it returns a result."""
    try:
        asked = next(asking)
        while True:
            asked = asking.send(answer(asked))
    except StopIteration as stop:
        result: T = stop.value
        return result


def ask_board(queue: str, ask: Ask) -> Procedure[Found]:
    """What the tables of a queue's board hold."""
    found: Found = yield on_board(queue, "ask", ask)
    return found


def answered(
    queue: str, asking: Generator[Ask, Found, T], answer: Callable[[str, Ask], Procedure[Found]] = ask_board
) -> Procedure[T]:
    """Answer the questions of a generator from the tables of a queue's board, until it returns a result."""
    try:
        ask = next(asking)
        while True:
            ask = asking.send((yield from answer(queue, ask)))
    except StopIteration as stop:
        result: T = stop.value
        return result
