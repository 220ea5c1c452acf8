"""Stats on SQLite: questions are answered by the database's thread, each in one transaction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from fairlane.clock import Instant
from fairlane.stats.keys import DAY
from fairlane.store import operators, stats_rows, stats_sums
from fairlane.store import stats as questions
from fairlane.store.health import Health, Standstill
from fairlane.store.job_rows import no_such_queue
from fairlane.store.procedures import Query
from fairlane.store.protocol import FOLD_AT_MOST, WorkerIdentity
from fairlane.store.queue_time import QueueClock
from fairlane.store.sqlite import claims, examining, health, jobs, rows
from fairlane.store.sqlite.database import Database, Transaction
from fairlane.store.stats import Looking, Moment, Peeked, Question, Rows
from fairlane.store.stats_sums import StatsKeeper
from fairlane.store.stats_values import Tallied, WorkerReport

__all__ = ["Stats", "answer", "known_queue"]

T = TypeVar("T")

MOST_TALLIES = 100
"""Added up in one transaction, whatever was asked for: nobody can claim or settle meanwhile."""


def known_queue(tx: Transaction, name: str) -> claims.QueueInForce:
    """A queue by its name, or `UnknownQueue`."""
    queue = claims.load_queue(tx, name)
    if queue is None:
        raise no_such_queue(name)
    return queue


def answer(tx: Transaction, asking: Looking[T]) -> T:
    """Answer a question within this transaction."""
    try:
        asked = next(asking)
        while True:
            asked = asking.send(_answer(tx, asked))
    except StopIteration as stop:
        result: T = stop.value
        return result


def _answer(tx: Transaction, asked: Question) -> Any:
    match asked:
        case Query(name, parameters):
            return tx.all(name, *map(_parameter, parameters))
        case questions.Some(name, parameters, most, but_not):
            return tx.some(name, most, but_not, *map(_parameter, parameters))
        case questions.Many(name, queue, written):
            return tx.run_many(name, [(queue, *row) for row in written])
        case questions.Tables(whose, ask):
            return claims.found(tx, claims.queue_number(tx, whose) if ask.is_of_board else 0, ask)
        case questions.Peek(whose, limit):
            known = known_queue(tx, whose)
            arrivals = [rows.arrival(row) for row in tx.all("select_arrivals", known.id, FOLD_AT_MOST)]
            return Peeked(known.policy, claims.tail_of(tx, known), arrivals, claims.forced_jobs(tx, known.id, limit))
        case questions.Records(refs):
            return [jobs.record_of(row) for row in tx.all("select_jobs_at", stats_rows.encode(refs))]
        case questions.SubjectOf(job):
            return examining.find_subject(tx, job)
        case questions.Examine(subject, lanes, now):
            return examining.look_at(tx, known_queue(tx, subject.queue), subject, lanes, now)
        case questions.FindJobs(wanted, limit):
            return tx.perform(operators.find(wanted, known_queue(tx, wanted.queue or "").id, None, limit))


def _parameter(value: Any) -> Any:
    """Lists are JSON; but ids are one after the other."""
    if isinstance(value, Rows):
        return stats_rows.encode(value.rows)
    if isinstance(value, list):
        return b"".join(value) if value and isinstance(value[0], bytes) else msgspec.json.encode(value).decode()
    return value


class Stats(StatsKeeper):
    """What `Store` says of stats."""

    def __init__(self, database: Database, clock: QueueClock) -> None:
        self._database = database
        self._clock = clock

    async def ask(self, question: Callable[[Moment], Looking[T]]) -> T:
        return await self._database.read(lambda tx: answer(tx, question(Moment(self._clock.now()))))

    async def add_up(self, work: stats_sums.Work, limit: int) -> Tallied:
        return await self._database.write(
            lambda tx: answer(tx, stats_sums.add_up(Moment(self._clock.now()), work, min(limit, MOST_TALLIES))),
            durable=False,
        )

    async def fold(self, queue: str) -> None:
        def fold(tx: Transaction) -> None:
            now = self._clock.now()
            claims.checkpoint(tx, claims.fold_all(tx, known_queue(tx, queue), now), now)

        await self._database.write(fold, durable=False)

    async def report(self, worker: WorkerIdentity, report: WorkerReport | None) -> None:
        def note(tx: Transaction) -> None:
            now = self._clock.now()
            if report is None:
                tx.run("delete_worker", worker.id.bytes)
            else:
                tx.run("forget_workers", now - DAY)
                tx.run("put_worker", worker.id.bytes, now, stats_rows.encode(report))

        await self._database.write(note, durable=False)

    async def health(self, *, brief: bool = False) -> Health:
        return await self._database.read(lambda tx: health.examine_file(tx, self._database.path, brief=brief))

    async def standstills(self, queues: Sequence[str], before: Instant, limit: int = 10) -> list[Standstill]:
        return await self._database.read(
            lambda tx: health.find_standstills(tx, [known_queue(tx, queue) for queue in queues], before, limit)
        )
