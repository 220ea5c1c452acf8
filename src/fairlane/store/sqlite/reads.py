"""Stats on SQLite: questions are answered by the database's thread, each in one transaction."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import msgspec

from fairlane.clock import Instant
from fairlane.job import State
from fairlane.scheduler.explain import (
    COUNTED,
    COUNTED_BESIDE,
    Examined,
    Facts,
    Holder,
    Subject,
    examine,
    sequence_lane,
)
from fairlane.scheduler.resident import ResidentBoard
from fairlane.scheduler.snapshot import QueueRow
from fairlane.stats.keys import DAY
from fairlane.store import operators, stats_rows, stats_sums
from fairlane.store import stats as questions
from fairlane.store.boards import QueueClock
from fairlane.store.health import Health, SqliteHealth, Standstill, standstills_in
from fairlane.store.procedures import Query
from fairlane.store.protocol import FOLD_AT_MOST, WorkerIdentity
from fairlane.store.rows import decode_keys, no_such_job, no_such_queue
from fairlane.store.sqlite import claims, jobs, rows, upkeep
from fairlane.store.sqlite.database import Database, Transaction
from fairlane.store.sqlite.procedures import perform
from fairlane.store.stats import Looking, Moment, Peeked, Question, Rows
from fairlane.store.stats_sums import StatsKeeper
from fairlane.store.stats_values import Tallied, WorkerReport

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
            return find_subject(tx, job)
        case questions.Examine(subject, lanes, now):
            return look_at(tx, known_queue(tx, subject.queue), subject, lanes, now)
        case questions.FindJobs(wanted, limit):
            return perform(tx, operators.find_jobs(wanted, None, limit).make())


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
        return await self._database.read(lambda tx: examine_file(tx, self._database.path, brief=brief))

    async def standstills(self, queues: Sequence[str], before: Instant, limit: int = 10) -> list[Standstill]:
        return await self._database.read(
            lambda tx: find_standstills(tx, [known_queue(tx, queue) for queue in queues], before, limit)
        )


RUNNING = 1_000
NEXT_UP = 10


def find_subject(tx: Transaction, job: UUID) -> Subject:
    """A job, as far as it concerns its waiting."""
    row = tx.one("select_subject", job.bytes)
    if row is None:
        raise no_such_job(job)
    queue, task, state, priority, keys, lane, position, *rest, holder, suspicion = row
    rest.append(None if holder is None else UUID(bytes=holder))
    rest.append(suspicion)
    return Subject(queue, decode_keys(keys), priority, job, task, State(state), lane, position, *rest)


def look_at(
    tx: Transaction, queue: claims.QueueInForce, subject: Subject, lanes: Sequence[bytes], now: Instant
) -> Facts:
    """Everything that is known of what holds it, these lanes included."""
    board, snapshot = claims.peek(tx, queue, NEXT_UP, now, lanes)
    examined, plan = claims.answer(tx, queue, board.answer(examine(snapshot, subject, NEXT_UP)))
    running = [
        Holder(UUID(bytes=held), task, priority, decode_keys(its_keys), worker, since)
        for held, task, priority, its_keys, worker, since in tx.all("select_running_of_queue", queue.id, RUNNING)
    ]
    ahead, flows_ahead = _count_ahead(tx, queue.id, subject, snapshot.queue, examined, board)
    ready, _, parked = tx.one("select_counts", queue.id) or (0, 0, 0)
    return Facts(
        subject,
        snapshot.policy,
        now,
        snapshot.queue,
        examined,
        ready,
        running,
        ahead,
        flows_ahead,
        [UUID(bytes=tx.value("select_id", start.head.ref)) for start in plan.starts],
        _kept(tx, queue.id, sequence_lane(snapshot.policy, subject)),
        subject.job is not None and bool(tx.value("is_forced", subject.job.bytes)),
        miscounts=upkeep.at_gates(tx, queue, snapshot.policy, examined.full, RUNNING),
        parked=parked,
        ahead_in=_ahead_in(tx, subject, examined),
    )


def _kept(tx: Transaction, queue: int, lane: bytes | None) -> list[Holder]:
    found = [] if lane is None else tx.all("select_kept_places", queue, lane, RUNNING)
    return [
        Holder(UUID(bytes=job), task, level, decode_keys(keys), None, due, due) for job, task, level, keys, due in found
    ]


def _count_ahead(
    tx: Transaction, queue: int, subject: Subject, state: QueueRow, examined: Examined, board: ResidentBoard
) -> tuple[int, int]:
    lane, flow = examined.lane, examined.flow
    if subject.state is not State.READY or subject.lane is None:
        return 0, 0
    ahead: int = tx.value("count_ahead", subject.lane, lane.floor if lane else 0, subject.position, COUNTED)
    if flow is None:
        return ahead, 0
    cursor, turn = (state.cursor, state.cursor_tie), (examined.turn, flow.tie)
    unchanged = tx.some("select_flows_between", COUNTED, board.changed[0], queue, *cursor, *turn)
    return ahead, min(COUNTED, len(unchanged) + board.changed_flows_before(cursor, turn))


def _ahead_in(tx: Transaction, subject: Subject, examined: Examined) -> dict[bytes, int]:
    return {
        lane.id: tx.value("count_ahead", lane.id, lane.floor, subject.position, COUNTED_BESIDE)
        for lane in examined.others.lanes
        if subject.state is State.READY
    }


def examine_file(tx: Transaction, path: str | None, *, brief: bool) -> SqliteHealth:
    wal = 0 if path is None else _size(f"{path}-wal")
    return SqliteHealth(
        path=path,
        journal_mode=tx.value("select_journal_mode"),
        size=tx.value("select_page_count") * tx.value("select_page_size"),
        wal_size=wal,
        free_space=None if path is None else shutil.disk_usage(Path(path).resolve().parent).free,
        others=[] if path is None or brief else sorted(_processes_with(Path(path).resolve())),
    )


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def _processes_with(file: Path) -> Iterator[int]:
    """Processes that have the file open, where the system tells (Linux), and of those that this user may ask."""
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) == os.getpid():
            continue
        try:
            if any(os.readlink(each) == str(file) for each in (process / "fd").iterdir()):
                yield int(process.name)
        except OSError:  # it has ended, or is somebody else's
            continue


def find_standstills(
    tx: Transaction, queues: Sequence[claims.QueueInForce], before: Instant, limit: int
) -> list[Standstill]:
    found: list[Standstill] = []
    for queue in queues:
        board, state, name = claims.tail_of(tx, queue), queue.state, queue.policy.queue
        behind = tx.some("select_flows_behind", limit, board.changed[0], queue.id, state.cursor, state.cursor_tie)
        overdue = tx.some("select_overdue_gates", limit, board.changed[2], queue.id, before)
        found += [
            Standstill(queue=name, limit=gate, key=msgspec.json.decode(key), lanes=lanes, since=since)
            for _, gate, key, lanes, since in (*behind, *overdue)
        ]
        found += standstills_in(name, board.changed_rows(), state, before)
    return found
