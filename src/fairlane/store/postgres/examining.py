"""Looking at what holds a job, a key or a queue on PostgreSQL: one snapshot, no lock, nothing written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from uuid import UUID

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
from fairlane.store.job_rows import no_such_job
from fairlane.store.postgres import census, rows
from fairlane.store.postgres.connections import STATEMENTS
from fairlane.store.postgres.scheduling import QueueHandle, Scheduling

if TYPE_CHECKING:
    from fairlane.store.postgres.connections import Connection

__all__ = ["find_subject", "look_at", "waiting_lanes"]

RUNNING = 1_000
NEXT_UP = 10


async def find_subject(connection: Connection, job: UUID) -> Subject:
    """A job, as far as it concerns its waiting."""
    row = await connection.fetchrow(STATEMENTS["select_subject"], job)
    if row is None:
        raise no_such_job(job)
    return Subject(
        row["queue"],
        rows.decode_keys(row["keys"]),
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
        [Running(job, task, level, rows.decode_keys(held), *rest) for job, task, level, held, *rest in running],
        ahead,
        flows_ahead,
        [row["id"] for row in next_up],
        await _kept(connection, queue, sequence_lane(snapshot.policy, subject)),
        subject.job is not None and await connection.fetchval(STATEMENTS["is_forced"], subject.job),
        miscounts=await census.at_gates(scheduling, snapshot.policy, examined.full, RUNNING),
        parked=parked,
        ahead_in=await _ahead_in(connection, subject, examined),
    )


async def _kept(connection: Connection, queue: int, lane: bytes | None) -> list[Kept]:
    if lane is None:
        return []
    found = await connection.fetch(STATEMENTS["select_kept_places"], queue, lane, RUNNING)
    return [Kept(job, task, priority, rows.decode_keys(keys), due) for job, task, priority, keys, due in found]


async def waiting_lanes(connection: Connection, handle: QueueHandle) -> list[LaneRow]:
    """Every lane with ready jobs, as far as claims have seen."""
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        board = (await Scheduling(connection, handle, None).load(0)).board
        found = await connection.fetch(STATEMENTS["select_waiting_lanes"], handle.id)
    rows_of_tables = [
        LaneRow(lane, b"", priority, rows.decode_keys(keys), ready, 0, 0, 0, 0, None, 0.0)
        for lane, priority, keys, ready in found
    ]
    return [lane for lane in board.over(Delta(lanes=rows_of_tables)).lanes if lane.ready > 0]


async def _peek(scheduling: Scheduling, lanes: Sequence[bytes]) -> tuple[ResidentBoard, Snapshot]:
    """What a claim would start from; what has happened stays where it is."""
    loaded = await scheduling.load(0)
    board, opened, policy = loaded.board, loaded.opened, loaded.policy
    forced = await scheduling.forced(NEXT_UP)
    events = Events(opened.now, opened.state, opened.arrivals, opened.releases, forced, opened.policy_since)
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
