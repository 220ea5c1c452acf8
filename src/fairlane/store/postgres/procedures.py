"""What procedures ask, answered on PostgreSQL."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from inspect import isawaitable
from operator import attrgetter
from typing import Any, TypeVar

from fairlane.clock import Instant
from fairlane.store.boards import QueueTime
from fairlane.store.postgres import connections, jobs
from fairlane.store.postgres.claims import QueueHandle, Scheduling
from fairlane.store.postgres.connections import STATEMENTS, Connection, StoreClock
from fairlane.store.procedures import Enqueue, OnBoard, Procedure, Question, Told
from fairlane.store.rows import no_such_queue

T = TypeVar("T")


class Driver:
    """Answers a procedure on one connection; with the boards of queues whose claim locks it holds."""

    def __init__(
        self,
        connection: Connection,
        clock: StoreClock,
        locked: Sequence[Scheduling],
        numbers: dict[str, int],
        memory: dict[Any, Any],
    ) -> None:
        self._connection = connection
        self._clock = clock
        self._boards = {board.queue.name: board for board in locked}
        self._numbers = numbers
        """Of queues that are known: they never change."""
        self._memory = memory
        self._moment: Instant | None = None
        """Whatever is asked after the time is of that time."""

    async def perform(self, procedure: Procedure[T]) -> T:
        return await connections.driven(procedure, self.answer)

    async def answer(self, asked: Question) -> Any:
        connection = self._connection
        match asked:
            case Enqueue(new):
                queues = {name: await self._number(name) for name in {job.queue for job in new}}
                # As in a caller's transaction: it ends later than the statement.
                return await jobs.insert(connection, new, queues, self._now, is_callers=True)
            case OnBoard(queue, "number"):
                return await self._number(queue)
            case OnBoard(queue, action, parameters):
                found: Any = attrgetter(action)(await self._board(queue))(*parameters)
                if isinstance(found, Generator):
                    return await self.perform(found)
                return await found if isawaitable(found) else found
            case Told("now"):
                return self._now
            case Told("time"):
                return await self._time()
            case Told():
                return self._memory
        return await connections.answer(connection, asked)

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
