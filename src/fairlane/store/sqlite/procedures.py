"""What procedures ask, answered on SQLite within one transaction.

What PostgreSQL does in one statement and SQLite in several is in `COMPOSED`, by the same name. Whoever is to be nudged
is told once the transaction is committed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

import msgspec

from fairlane.clock import Instant, SystemClock
from fairlane.store.boards import QueueClock
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
)
from fairlane.store.schedules import ORPHANED_AFTER
from fairlane.store.sqlite import jobs
from fairlane.store.sqlite.database import Row, Transaction
from fairlane.store.sqlite.wakeups import take_waiters

T = TypeVar("T")


class Nudges(NamedTuple):
    """Whom a transaction wakes."""

    waiters: Sequence[UUID] = ()
    schedule_holders: Sequence[UUID] = ()


class Driver:
    """Answers a procedure within one transaction."""

    def __init__(self, tx: Transaction, clock: QueueClock, memory: dict[Any, Any]) -> None:
        self.tx = tx
        self.clock = clock
        self._memory = memory
        self.woken: Counter[int] = Counter()
        self.has_new_schedules = False

    def perform(self, procedure: Procedure[T]) -> T:
        found: Any = None
        try:
            while True:
                found = self.answer(procedure.send(found))
        except StopIteration as stop:
            result: T = stop.value
            return result

    def answer(self, asked: Question) -> Any:
        tx = self.tx
        match asked:
            case Query(name, parameters) if name in COMPOSED:
                return COMPOSED[name](self, *parameters)
            case Query(name, parameters):
                return tx.answer(name, map(_bound, parameters))
            case Each(name, rows, _):
                return [row for each in rows for row in tx.answer(name, map(_bound, each))]
            case Some(name, parameters, most, but_not):
                return tx.some(name, most, but_not, *map(_bound, parameters))
            case Many(name, queue, written):
                return tx.run_many(name, [(queue, *row) for row in written])
            case Script(sql):
                for statement in single_statements(sql):
                    tx.connection.execute(statement)
            case Enqueue(new):
                ready, conflicts = jobs.insert(tx, new, self.clock.now())
                self.woken.update(ready)
                return conflicts
            case OnBoard(queue, action, parameters):
                return attrgetter(action)(queue)(*parameters)
            case Told("now"):
                return self.clock.now()
            case Told("time"):
                return self.clock.time()
            case Told():
                return self._memory
        return None

    def nudges(self) -> Nudges:
        """Whom this transaction wakes. To be asked at its end."""
        return Nudges(
            take_waiters(self.tx, self.woken),
            [UUID(bytes=worker) for (worker,) in self.tx.all("select_schedule_holders")]
            if self.has_new_schedules
            else (),
        )


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


def _announce_schedules(driver: Driver) -> list[Row]:
    driver.has_new_schedules = True
    return []


def _keep_schedules(
    driver: Driver, now: Instant, names: Sequence[str], digests: Sequence[bytes], worker: UUID | None
) -> list[Row]:
    driver.tx.run("forget_schedule_holders", now - ORPHANED_AFTER)
    if worker is not None:
        driver.tx.run("put_schedule_holder", worker.bytes, now)
    driver.tx.run_many("keep_schedule", [(now, *each) for each in zip(names, digests, strict=True)])
    return []


COMPOSED: dict[str, Callable[..., list[Row]]] = {
    "announce_schedules": _announce_schedules,
    "keep_schedules": _keep_schedules,
}


def perform(tx: Transaction, procedure: Procedure[T]) -> T:
    """Carry out a procedure that needs no more than a transaction."""
    return Driver(tx, QueueClock(SystemClock()), {}).perform(procedure)
