"""What is read to explain why something waits. Nothing is written and no lock is taken: one snapshot answers it all."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from fairlane.job import State
from fairlane.scheduler.explain import (
    COUNTED,
    COUNTED_BESIDE,
    Facts,
    GateFacts,
    Holder,
    Subject,
    examine,
    sequence_lane,
)
from fairlane.scheduler.resident import ResidentBoard
from fairlane.scheduler.snapshot import QueueRow, Snapshot
from fairlane.store.procedures import Each, Procedure, Some, answered, on_board, query, value
from fairlane.store.rows import decode_keys, no_such_job, uuid_of
from fairlane.store.upkeep import miscounts_at

RUNNING = 1_000
NEXT_UP = 10


def subject_of(job: UUID) -> Procedure[Subject]:
    """A job, as far as it concerns its waiting; or `JobNotFound`."""
    found = yield query("select_subject", job)
    if not found:
        raise no_such_job(job)
    queue, task, state, priority, keys, lane, position, *rest, worker, suspicion, ready_at = found[0]
    rest += [None if worker is None else uuid_of(worker), suspicion, ready_at]
    return Subject(queue, decode_keys(keys), priority, job, task, State(state), lane, position, *rest)


def facts_about(subject: Subject, lanes: Sequence[bytes]) -> Procedure[Facts]:
    """Everything that is known of what holds a job, a key or a queue, these lanes included."""
    queue = subject.queue
    board, snapshot = yield from _peek(queue, lanes)
    examined, plan = yield from answered(queue, board.answer(examine(snapshot, subject, NEXT_UP)))
    number = yield on_board(queue, "number")
    (ready, _, parked, _), *_ = (yield query("select_counts", number)) or [(0, 0, 0, 0)]
    next_up = (yield Each("select_ids", [(start.head.ref,) for start in plan.starts])) if plan.starts else ()
    running = yield query("select_running_of_queue", number, RUNNING)
    ahead, flows_ahead = yield from _count_ahead(number, subject, snapshot.queue, examined, board)
    lane = sequence_lane(snapshot.policy, subject)
    kept = [
        Holder(uuid_of(job), task, level, decode_keys(keys), None, due, due)
        for job, task, level, keys, due in (
            (yield query("select_kept_places", number, lane, RUNNING)) if lane is not None else ()
        )
    ]
    ahead_in: dict[bytes, int] = {}
    for other in examined.siblings if subject.state is State.READY else ():
        ahead_in[other.id] = yield from value("count_ahead", other.id, other.floor, subject.position, COUNTED_BESIDE)
    return Facts(
        subject,
        snapshot.policy,
        snapshot.now,
        snapshot.queue,
        examined,
        ready,
        [
            Holder(uuid_of(job), task, level, decode_keys(held), worker, since, None, until <= snapshot.now)
            for job, task, level, held, worker, since, until in running
        ],
        ahead,
        flows_ahead,
        [uuid_of(job) for (job,) in next_up],
        kept,
        subject.job is not None and bool((yield from value("is_forced", subject.job))),
        miscounts=(yield from miscounts_at(queue, snapshot.policy, examined.full, RUNNING)),
        parked=parked,
        ahead_in=ahead_in,
    )


def _peek(queue: str, lanes: Sequence[bytes]) -> Procedure[tuple[ResidentBoard, Snapshot]]:
    """What a claim would start from; what has happened stays where it is."""
    loaded = yield on_board(queue, "load")
    events = loaded.events((yield on_board(queue, "forced", NEXT_UP)))
    policy, board = loaded.policy.without(loaded.expired), loaded.board
    if policy.shared_limits:
        policy, events = yield on_board(queue, "sharing.look", policy, events)
    if board.policy is not policy:
        board.rebind(policy)
    return board, (yield from answered(queue, board.snapshot(events, NEXT_UP, lanes)))


def _count_ahead(
    queue: int, subject: Subject, state: QueueRow, examined: GateFacts, board: ResidentBoard
) -> Procedure[tuple[int, int]]:
    """Jobs of its lane, and flows, whose turn comes before."""
    lane, flow = examined.lane, examined.flow
    if subject.state is not State.READY or subject.lane is None:
        return 0, 0
    floor = lane.floor if lane else 0
    ahead: int = yield from value("count_ahead", subject.lane, floor, subject.position, COUNTED)
    if flow is None:
        return ahead, 0
    cursor, turn = (state.cursor, state.cursor_tie), (examined.turn, flow.tie)
    unchanged = yield Some("select_flows_between", (queue, *cursor, *turn), COUNTED, board.changed[0])
    return ahead, min(COUNTED, len(unchanged) + board.changed_flows_before(cursor, turn))
