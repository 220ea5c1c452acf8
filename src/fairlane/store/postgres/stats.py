"""Stats on PostgreSQL: a question is answered from one snapshot, without a lock."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from fairlane.clock import Instant
from fairlane.stats.keys import DAY
from fairlane.store import operators, stats_rows, stats_sums
from fairlane.store import stats as questions
from fairlane.store.health import Health, Standstill
from fairlane.store.postgres import examining, health, jobs, rows
from fairlane.store.postgres.claims import Claimer
from fairlane.store.postgres.connections import CONFLICTS, STATEMENTS, Connections, perform
from fairlane.store.postgres.scheduling import QueueHandle, Scheduling
from fairlane.store.postgres.timing import StoreClock
from fairlane.store.procedures import Query
from fairlane.store.protocol import WorkerIdentity
from fairlane.store.stats import Looking, Moment, Peeked, Question, Rows
from fairlane.store.stats_sums import StatsKeeper
from fairlane.store.stats_values import Tallied, WorkerReport

if TYPE_CHECKING:
    from fairlane.store.postgres.connections import Connection

__all__ = ["Stats", "answer"]

T = TypeVar("T")
Isolation = Literal["read_committed", "repeatable_read"]


async def answer(connection: Connection, asking: Looking[T]) -> T:
    """Answer a question within the transaction at hand."""
    try:
        asked = next(asking)
        while True:
            asked = asking.send(await _answer(connection, asked))
    except StopIteration as stop:
        result: T = stop.value
        return result


async def _answer(connection: Connection, asked: Question) -> Any:
    match asked:
        case Query(name, parameters):
            return await connection.fetch(STATEMENTS[name], *_parameters(parameters))
        case questions.Some(name, parameters, most, but_not):
            return await connection.fetch(STATEMENTS[name], *_parameters(parameters), most, list(but_not))
        case questions.Many(name, queue, written):
            return await connection.execute(STATEMENTS[name], queue, written)
        case questions.Tables(queue, ask):
            return await (await _scheduling(connection, queue if ask.is_of_board else None)).ask(ask)
        case questions.Peek(queue, limit):
            scheduling = await _scheduling(connection, queue)
            loaded = await scheduling.load(0)
            return Peeked(loaded.policy, loaded.board, loaded.arrivals, await scheduling.forced(limit))
        case questions.Records(refs):
            return [jobs.record_of(row) for row in await connection.fetch(STATEMENTS["select_jobs_at"], refs)]
        case questions.SubjectOf(job):
            return await examining.find_subject(connection, job)
        case questions.Examine(subject, lanes, now):
            return await examining.look_at(await _scheduling(connection, subject.queue, now), subject, lanes)
        case questions.FindJobs(wanted, limit):
            number = await connection.fetchval(STATEMENTS["select_queue_id"], wanted.queue)
            return await perform(connection, operators.find(wanted, number, None, limit))


def _parameters(given: Sequence[Any]) -> list[Any]:
    """Rows become columns."""
    parameters: list[Any] = []
    for value in given:
        is_rows = isinstance(value, Rows)
        parameters += [[row[n] for row in value.rows] for n in range(value.width)] if is_rows else [value]
    return parameters


async def _scheduling(connection: Connection, queue: str | None, now: Instant | None = None) -> Scheduling:
    """A look at a queue's board, without its lock."""
    number = 0 if queue is None else await connection.fetchval(STATEMENTS["select_queue_id"], queue)
    return Scheduling(connection, QueueHandle(queue or "", number, "", "", "", ""), now)


class Stats(StatsKeeper):
    """What `Store` says of stats."""

    def __init__(self, connections: Connections, clock: StoreClock, claimer: Claimer) -> None:
        self._connections = connections
        self._clock = clock
        self._claimer = claimer

    async def _ask(self, question: Callable[[Connection], Awaitable[T]]) -> T:
        """Ask what may be asked twice: a session that the server has ended meanwhile is not the caller's concern."""
        return await self._connections.again(lambda connection, _: question(connection))

    async def ask(self, question: Callable[[Moment], Looking[T]]) -> T:
        async def look(connection: Connection) -> T:
            async with connection.transaction(isolation="repeatable_read", readonly=True):
                now = await connection.fetchval(STATEMENTS["select_time"], self._clock.parameter())
                return await answer(connection, question(Moment(now)))

        return await self._ask(look)

    async def add_up(self, work: stats_sums.Work, limit: int) -> Tallied:
        isolation: Isolation = "repeatable_read" if work.counts_anew else "read_committed"
        async with self._connections.session() as connection:
            try:
                async with connection.transaction(isolation=isolation):
                    await connection.execute(STATEMENTS["guard_tallying"])
                    if not await connection.fetchval(STATEMENTS["take_turn_at_tallying"], work.id):
                        return stats_sums.NOTHING
                    now = await connection.fetchval(STATEMENTS["select_time"], self._clock.parameter())
                    return await answer(connection, stats_sums.add_up(Moment(now), work, limit))
            except CONFLICTS:
                return Tallied(0, 0, more=True)  # somebody else was done between our first look and our turn

    async def fold(self, queue: str) -> None:
        async with self._claimer.locked(await self._claimer.queue(queue), durable=False) as scheduling:
            await scheduling.checkpoint(await scheduling.fold_all())

    async def report(self, worker: WorkerIdentity, report: WorkerReport | None) -> None:
        now = self._clock.parameter()
        if report is None:
            await self._ask(lambda connection: connection.execute(STATEMENTS["delete_worker"], worker.id))
        else:
            said = rows.storable(stats_rows.encode(report))
            await self._ask(lambda connection: connection.execute(STATEMENTS["put_worker"], now, worker.id, said, DAY))

    async def health(self, *, brief: bool = False) -> Health:
        return await self._ask(lambda connection: health.examine_server(connection, brief=brief))

    async def standstills(self, queues: Sequence[str], before: Instant, limit: int = 10) -> list[Standstill]:
        handles = [await self._claimer.queue(queue) for queue in queues]
        return await self._ask(lambda connection: health.find_standstills(connection, handles, before, limit))
