"""What procedures ask, answered on SQLite within one transaction.

What PostgreSQL does in one statement and SQLite in several is in `Statements`, by the same name.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import cached_property
from operator import attrgetter
from typing import Any, TypeVar
from uuid import UUID

import msgspec

from fairlane.store.boards import QueueClock, QueueTime
from fairlane.store.migrations import single_statements
from fairlane.store.procedures import (
    Each,
    Enqueue,
    Many,
    OnBoard,
    Procedure,
    Query,
    Question,
    Rows,
    Script,
    Some,
    Told,
    Whole,
    driven,
)
from fairlane.store.sqlite import jobs
from fairlane.store.sqlite.claims import Scheduling
from fairlane.store.sqlite.database import Transaction
from fairlane.store.sqlite.statements import Statements

T = TypeVar("T")


class Driver(Statements):
    """Answers a procedure within one transaction, as of one moment."""

    def __init__(self, tx: Transaction, clock: QueueClock, memory: dict[Any, Any], *, is_locked: bool = False) -> None:
        super().__init__(tx)
        self._clock = clock
        self._memory = memory
        self._is_looking = not is_locked
        self._boards: dict[str, Scheduling] = {}

    @cached_property
    def time(self) -> QueueTime:
        return self._clock.time()

    def perform(self, procedure: Procedure[T]) -> T:
        return driven(procedure, self.answer)

    def answer(self, asked: Question) -> Any:
        tx = self.tx
        match asked:
            case Query(name, parameters) if (composed := getattr(Statements, name, None)) is not None:
                return composed(self, *parameters)
            case Query(name, parameters):
                return tx.answer(name, map(_bound, parameters))
            case Each(name, rows_given, _):
                return [row for each in rows_given for row in tx.answer(name, map(_bound, each))]
            case Some(name, parameters, most, but_not):
                return tx.some(name, most, but_not, *map(_bound, parameters))
            case Many(name, queue, written):
                return tx.run_many(name, [(queue, *row) for row in written])
            case Whole(name, written):
                return tx.run_many(name, written)
            case Script(sql):
                for statement in single_statements(sql):
                    tx.connection.execute(statement)
            case Enqueue(new):
                return jobs.insert(tx, new, self.time.now)
            case OnBoard(name, action, parameters):
                if name not in self._boards:
                    self._boards[name] = Scheduling(tx, name, self.time.now, is_looking=self._is_looking)
                found = attrgetter(action)(self._boards[name])
                found = found(*parameters) if callable(found) else found
                return self.perform(found) if isinstance(found, Generator) else found
            case Told("now"):
                return self.time.now
            case Told("time"):
                return self.time
            case Told():
                return self._memory
        return None


def _bound(value: Any) -> Any:
    """A parameter as this database takes it: ids are bytes, several one after the other; other lists are JSON."""
    if isinstance(value, UUID):
        return value.bytes
    if isinstance(value, Rows):
        return msgspec.json.encode(value.rows).decode()
    if not isinstance(value, list):
        return value
    if value and isinstance(value[0], UUID):
        return b"".join([each.bytes for each in value])
    if value and isinstance(value[0], bytes):
        return b"".join(value)
    return msgspec.json.encode(value).decode()
