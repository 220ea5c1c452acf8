"""What procedures ask, answered on PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import isawaitable
from operator import attrgetter
from typing import Any, TypeVar

from fairlane.clock import Instant
from fairlane.store.boards import QueueTime
from fairlane.store.postgres import jobs
from fairlane.store.postgres.claim_lock import QueueHandle, Scheduling
from fairlane.store.postgres.connections import STATEMENTS, Connection, StoreClock
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
    StoreValue,
)
from fairlane.store.rows import no_such_queue

T = TypeVar("T")


class Driver:
    """Answers a procedure on one connection; with the boards of queues whose claim locks it holds."""

    def __init__(
        self,
        connection: Connection,
        clock: StoreClock | None = None,
        locked: Sequence[Scheduling] = (),
        numbers: dict[str, int] | None = None,
        memory: dict[Any, Any] | None = None,
    ) -> None:
        self._connection = connection
        self._clock = clock or StoreClock(None)
        self._boards = {board.queue.name: board for board in locked}
        self._numbers = {} if numbers is None else numbers
        """Of queues that are known: they never change."""
        self._memory = {} if memory is None else memory
        self._moment: Instant | None = None
        """Whatever is asked after the time is of that time."""

    async def perform(self, procedure: Procedure[T]) -> T:
        found: Any = None
        try:
            while True:
                found = await self.answer(procedure.send(found))
        except StopIteration as stop:
            result: T = stop.value
            return result

    async def answer(self, asked: Question) -> Any:
        fetch = self._connection.fetch
        match asked:
            case Query(name, parameters):
                return await fetch(STATEMENTS[name], *_columns(parameters))
            case Each(name, rows, width):
                return await fetch(STATEMENTS[name], *_columns([Rows(rows, width)]))
            case Some(name, parameters, most, but_not):
                return await fetch(STATEMENTS[name], *_columns(parameters), most, list(but_not))
            case Many(name, queue, written):
                return await self._connection.execute(STATEMENTS[name], queue, written)
            case Script(sql):
                return await self._connection.execute(sql)
            case Enqueue(new):
                queues = {name: await self._number(name) for name in {job.queue for job in new}}
                # As in a caller's transaction: it ends later than the statement.
                return await jobs.insert(self._connection, new, queues, self._now, is_callers=True)
            case OnBoard(queue, "number"):
                return await self._number(queue)
            case OnBoard(queue, action, parameters):
                found = attrgetter(action)(await self._board(queue))(*parameters)
                return await found if isawaitable(found) else found
            case StoreValue("now"):
                return self._now
            case StoreValue("time"):
                return await self._time()
            case StoreValue():
                return self._memory

    @property
    def _now(self) -> Instant | None:
        return self._clock.parameter() if self._moment is None else self._moment

    async def _time(self) -> QueueTime:
        time = self._clock.given()
        if time is None:
            time = QueueTime(*await self._connection.fetchrow(STATEMENTS["select_time"], None) or (0, 0))
        self._moment = time.now
        return time

    async def _board(self, queue: str) -> Scheduling:
        """A look at a queue's board, where its lock is not held."""
        if queue not in self._boards:
            number = await self._number(queue) if queue else 0
            handle = QueueHandle(queue, number, "", "", "", "")
            self._boards[queue] = Scheduling(self._connection, handle, self._now)
        return self._boards[queue]

    async def _number(self, queue: str) -> int:
        if queue not in self._numbers:
            number: int | None = await self._connection.fetchval(STATEMENTS["select_queue_id"], queue)
            if number is None:
                raise no_such_queue(queue)
            self._numbers[queue] = number
        return self._numbers[queue]


def _columns(parameters: Sequence[Any]) -> list[Any]:
    """Rows become columns."""
    given: list[Any] = []
    for each in parameters:
        is_rows = isinstance(each, Rows)
        given += [[row[n] for row in each.rows] for n in range(each.width)] if is_rows else [each]
    return given


async def perform(connection: Connection, procedure: Procedure[T]) -> T:
    """Carry out a procedure that needs no more than a connection."""
    return await Driver(connection).perform(procedure)


async def perform_locked(scheduling: Scheduling, procedure: Procedure[T]) -> T:
    """The same under a queue's claim lock."""
    numbers = {scheduling.queue.name: scheduling.queue.id}
    return await Driver(scheduling.connection, None, [scheduling], numbers).perform(procedure)
