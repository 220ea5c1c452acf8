"""Procedures of every store, written once: generators that ask for named statements, which each store answers."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from fairlane.clock import Instant

T = TypeVar("T")


class Query(NamedTuple):
    """A statement by its name, to be answered with its rows.

    Parameters are alike on every store: numbers, texts, lists of them (lists of ids as well).
    """

    name: str
    parameters: tuple[Any, ...]


class Each(NamedTuple):
    """A statement for many things: SQLite runs it for each, PostgreSQL is given them together, a list a column."""

    name: str
    rows: Sequence[Sequence[Any]]
    width: int = 1


class Script(NamedTuple):
    """SQL of several statements, as migrations are: it is answered with nothing."""

    sql: str


Procedure = Generator[Query | Each | Script, Any, T]
"""It is sent the rows of each statement that it asks for. Ids are given as `UUID`, lists of texts as lists."""


def query(name: str, *parameters: Any) -> Query:
    return Query(name, parameters)


def is_done(name: str, *parameters: Any) -> Procedure[bool]:
    """Whether a statement has found what it was to change."""
    return bool((yield query(name, *parameters)))


class Performer(Protocol):
    """A store, as far as procedures are concerned. Each is given as what makes it: it may have to start over."""

    def _now(self) -> Instant | None:
        """The time that statements are given. `None`: the database's own; asked within the transaction it is for."""
        ...

    async def _look_up(self, procedure: Callable[[], Procedure[T]], tx: Any = None) -> T:
        """Ask one statement that changes nothing; again, if the connection is lost."""
        ...

    async def _look_up_together(self, procedure: Callable[[], Procedure[T]]) -> T:
        """The same for several statements, in one snapshot."""
        ...

    async def _change(self, procedure: Callable[[], Procedure[T]], tx: Any = None) -> T:
        """One statement that writes, durably. Nothing is tried again: a write whose answer was lost may have been
        done, and doing it twice could undo what another has written since."""
        ...

    async def _transact(self, procedure: Callable[[], Procedure[T]]) -> T:
        """One durable transaction, tried again after a conflict or a lost connection: done twice, it does no harm."""
        ...
