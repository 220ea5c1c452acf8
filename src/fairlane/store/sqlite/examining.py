"""Looking at what holds a job, a key or a queue on SQLite: one snapshot, nothing written."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

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
from fairlane.scheduler.resident import ResidentBoard
from fairlane.scheduler.snapshot import QueueRow
from fairlane.store.job_rows import no_such_job
from fairlane.store.sqlite import census, claims, rows
from fairlane.store.sqlite.database import Transaction

__all__ = ["find_subject", "look_at"]

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
    return Subject(queue, rows.decode_keys(keys), priority, job, task, State(state), lane, position, *rest)


def look_at(
    tx: Transaction, queue: claims.QueueInForce, subject: Subject, lanes: Sequence[bytes], now: Instant
) -> Facts:
    """Everything that is known of what holds it, these lanes included."""
    board, snapshot = claims.peek(tx, queue, NEXT_UP, now, lanes)
    examined, plan = claims.answer(tx, queue, board.answer(examine(snapshot, subject, NEXT_UP)))
    running = [
        Running(UUID(bytes=held), task, priority, rows.decode_keys(its_keys), worker, since)
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
        miscounts=census.at_gates(tx, queue, snapshot.policy, examined.full, RUNNING),
        parked=parked,
        ahead_in=_ahead_in(tx, subject, examined),
    )


def _kept(tx: Transaction, queue: int, lane: bytes | None) -> list[Kept]:
    found = [] if lane is None else tx.all("select_kept_places", queue, lane, RUNNING)
    return [Kept(UUID(bytes=job), task, level, rows.decode_keys(keys), due) for job, task, level, keys, due in found]


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
