"""Stats on PostgreSQL: a question is answered from one snapshot, without a lock."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from uuid import UUID

import msgspec

from fairlane.clock import Instant
from fairlane.job import State
from fairlane.scheduler.explain import (
    COUNTED,
    COUNTED_BESIDE,
    Examined,
    Facts,
    Kept,
    Running,
    Subject,
    examine,
    sequence_lane,
)
from fairlane.scheduler.journal import Delta
from fairlane.scheduler.resident import Events, ResidentBoard
from fairlane.scheduler.snapshot import LaneRow, QueueRow, Snapshot
from fairlane.stats.keys import DAY
from fairlane.store import operators, stats_rows, stats_sums
from fairlane.store import stats as questions
from fairlane.store.health import (
    ConnectionLimit,
    Health,
    HorizonHolder,
    PostgresHealth,
    Standstill,
    TableHealth,
    standstills_in,
)
from fairlane.store.postgres import jobs, upkeep
from fairlane.store.postgres.claim_lock import QueueHandle, Scheduling
from fairlane.store.postgres.claims import Claimer
from fairlane.store.postgres.connections import CONFLICTS, STATEMENTS, Connection, Connections, StoreClock
from fairlane.store.postgres.procedures import perform
from fairlane.store.postgres.settlements import storable
from fairlane.store.procedures import Query
from fairlane.store.protocol import WorkerIdentity
from fairlane.store.rows import decode_keys, no_such_job
from fairlane.store.stats import Looking, Moment, Peeked, Question, Rows
from fairlane.store.stats_sums import StatsKeeper
from fairlane.store.stats_values import Tallied, WorkerReport

if TYPE_CHECKING:
    from fairlane.store.postgres.connections import Connection

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
            loaded = await scheduling.load()
            return Peeked(loaded.policy, loaded.board, loaded.arrivals, await scheduling.forced(limit))
        case questions.Records(refs):
            return [jobs.record_of(row) for row in await connection.fetch(STATEMENTS["select_jobs_at"], refs)]
        case questions.SubjectOf(job):
            return await find_subject(connection, job)
        case questions.Examine(subject, lanes, now):
            return await look_at(await _scheduling(connection, subject.queue, now), subject, lanes)
        case questions.FindJobs(wanted, limit):
            return await perform(connection, operators.find_jobs(wanted, None, limit).make())


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
            said = storable(stats_rows.encode(report))
            await self._ask(lambda connection: connection.execute(STATEMENTS["put_worker"], now, worker.id, said, DAY))

    async def health(self, *, brief: bool = False) -> Health:
        return await self._ask(lambda connection: examine_server(connection, brief=brief))

    async def standstills(self, queues: Sequence[str], before: Instant, limit: int = 10) -> list[Standstill]:
        handles = [await self._claimer.queue(queue) for queue in queues]
        return await self._ask(lambda connection: find_standstills(connection, handles, before, limit))


RUNNING = 1_000
NEXT_UP = 10


async def find_subject(connection: Connection, job: UUID) -> Subject:
    """A job, as far as it concerns its waiting."""
    row = await connection.fetchrow(STATEMENTS["select_subject"], job)
    if row is None:
        raise no_such_job(job)
    return Subject(
        row["queue"],
        decode_keys(row["keys"]),
        row["priority"],
        job,
        row["task"],
        State(row["state"]),
        row["lane"],
        row["position"],
        row["due_at"],
        row["claimed_at"],
        row["worker"],
        row["finished_at"],
        row["attempt"],
        row["outcome"],
        row["error"],
        row["worker_id"],
        row["suspicion"],
    )


async def look_at(scheduling: Scheduling, subject: Subject, lanes: Sequence[bytes]) -> Facts:
    """Everything that is known of what holds it, these lanes included."""
    connection, queue = scheduling.connection, scheduling.queue.id
    board, snapshot = await _peek(scheduling, lanes)
    examined, plan = await scheduling.answer(board.answer(examine(snapshot, subject, NEXT_UP)))
    ready, _, parked, *_ = await connection.fetchrow(STATEMENTS["select_counts"], queue) or (0, 0, 0)
    next_up = await connection.fetch(STATEMENTS["select_ids"], [start.head.ref for start in plan.starts])
    running = await connection.fetch(STATEMENTS["select_running_of_queue"], queue, RUNNING)
    ahead, flows_ahead = await _count_ahead(connection, queue, subject, snapshot.queue, examined, board)
    return Facts(
        subject,
        snapshot.policy,
        snapshot.now,
        snapshot.queue,
        examined,
        ready,
        [Running(job, task, level, decode_keys(held), *rest) for job, task, level, held, *rest in running],
        ahead,
        flows_ahead,
        [row["id"] for row in next_up],
        await _kept(connection, queue, sequence_lane(snapshot.policy, subject)),
        subject.job is not None and await connection.fetchval(STATEMENTS["is_forced"], subject.job),
        miscounts=await upkeep.at_gates(scheduling, snapshot.policy, examined.full, RUNNING),
        parked=parked,
        ahead_in=await _ahead_in(connection, subject, examined),
    )


async def _kept(connection: Connection, queue: int, lane: bytes | None) -> list[Kept]:
    if lane is None:
        return []
    found = await connection.fetch(STATEMENTS["select_kept_places"], queue, lane, RUNNING)
    return [Kept(job, task, priority, decode_keys(keys), due) for job, task, priority, keys, due in found]


async def waiting_lanes(connection: Connection, handle: QueueHandle) -> list[LaneRow]:
    """Every lane with ready jobs, as far as claims have seen."""
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        board = (await Scheduling(connection, handle, None).load()).board
        found = await connection.fetch(STATEMENTS["select_waiting_lanes"], handle.id)
    rows_of_tables = [
        LaneRow(lane, b"", priority, decode_keys(keys), ready, 0, 0, 0, 0, None, 0.0)
        for lane, priority, keys, ready in found
    ]
    return [lane for lane in board.over(Delta(lanes=rows_of_tables)).lanes if lane.ready > 0]


async def _peek(scheduling: Scheduling, lanes: Sequence[bytes]) -> tuple[ResidentBoard, Snapshot]:
    """What a claim would start from; what has happened stays where it is."""
    loaded = await scheduling.load()
    board, policy = loaded.board, loaded.policy
    forced = await scheduling.forced(NEXT_UP)
    events = Events(loaded.now, loaded.state, loaded.arrivals, loaded.releases, forced, loaded.policy_since)
    policy = policy.without(loaded.expired)
    if policy.shared_limits:
        policy, events = await scheduling.sharing.look(policy, events)
    if board.policy is not policy:
        board.rebind(policy)
    return board, await scheduling.answer(board.snapshot(events, NEXT_UP, lanes))


async def _count_ahead(
    connection: Connection, queue: int, subject: Subject, state: QueueRow, examined: Examined, board: ResidentBoard
) -> tuple[int, int]:
    lane, flow = examined.lane, examined.flow
    if subject.state is not State.READY or subject.lane is None:
        return 0, 0
    floor = lane.floor if lane else 0
    ahead: int = await connection.fetchval(STATEMENTS["count_ahead"], subject.lane, floor, subject.position, COUNTED)
    if flow is None:
        return ahead, 0
    flows_ahead: int = await connection.fetchval(
        STATEMENTS["count_flows_ahead"],
        queue,
        state.cursor,
        state.cursor_tie,
        examined.turn,
        flow.tie,
        COUNTED,
        list(board.changed[0]),
    )
    changed = board.changed_flows_before((state.cursor, state.cursor_tie), (examined.turn, flow.tie))
    return ahead, min(COUNTED, flows_ahead + changed)


async def _ahead_in(connection: Connection, subject: Subject, examined: Examined) -> dict[bytes, int]:
    return {
        lane.id: await connection.fetchval(
            STATEMENTS["count_ahead"], lane.id, lane.floor, subject.position, COUNTED_BESIDE
        )
        for lane in examined.others.lanes
        if subject.state is State.READY
    }


HOLDERS = 10


async def examine_server(connection: Connection, *, brief: bool) -> PostgresHealth:
    limits = await connection.fetch(STATEMENTS["select_connection_limits"])
    holders = await connection.fetch(STATEMENTS["select_horizon_holders"], HOLDERS)
    tables = [] if brief else await connection.fetch(STATEMENTS["select_tables"])
    return PostgresHealth(
        settings={} if brief else dict(await connection.fetch(STATEMENTS["select_settings"])),
        connections=[ConnectionLimit(**row) for row in limits],
        tables=[TableHealth(**row) for row in tables],
        holders=[HorizonHolder(**row) for row in holders],
        hidden=0 if brief else await connection.fetchval(STATEMENTS["count_hidden_sessions"]),
    )


async def find_standstills(
    connection: Connection, queues: Sequence[QueueHandle], before: Instant, limit: int
) -> list[Standstill]:
    found: list[Standstill] = []
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        for queue in queues:
            loaded = await Scheduling(connection, queue, None).load()
            changed, state = loaded.board.changed, loaded.state
            stored = await connection.fetch(
                STATEMENTS["select_standstills"], [queue.name], before, limit, list(changed[0]), list(changed[2])
            )
            found += [
                Standstill(
                    queue=row["queue"],
                    limit=row["limit"],
                    key=msgspec.json.decode(row["key"]),
                    lanes=row["lanes"],
                    since=row["since"],
                )
                for row in stored
            ]
            found += standstills_in(queue.name, loaded.board.changed_rows(), state, before)
    return found
