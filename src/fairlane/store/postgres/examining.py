"""Looking at what holds a job, a key or a queue on PostgreSQL: one snapshot, no lock, nothing written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from uuid import UUID

from fairlane.clock import Instant
from fairlane.job import State
from fairlane.scheduler.explain import COUNTED, Examined, Facts, Kept, Running, Subject, examine, sequence_lane
from fairlane.scheduler.plan import plan_claims
from fairlane.scheduler.snapshot import Arrival, Forced, Head, LaneRow, Need, Plan, QueueRow, Release, Snapshot
from fairlane.store.figures import service_of
from fairlane.store.job_rows import no_such_job
from fairlane.store.postgres import census, rows
from fairlane.store.postgres.connections import STATEMENTS
from fairlane.store.postgres.scheduling import QueueHandle, Scheduling
from fairlane.store.postgres.seeing import workers

if TYPE_CHECKING:
    from fairlane.store.postgres.connections import Connection

__all__ = ["find_subject", "look_at", "waiting_lanes"]

BELLS = 1_000
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
    )


async def look_at(
    connection: Connection, handle: QueueHandle, now: Instant | None, job: UUID | None, keys: Mapping[str, str | None]
) -> Facts:
    """Everything that is known of what holds it."""
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        subject = Subject(handle.name, dict(keys)) if job is None else await find_subject(connection, job)
        scheduling = Scheduling(connection, handle, now)
        snapshot, ready = await _peek(scheduling, subject)
        examined: Examined = await scheduling.answer(examine(snapshot, subject))
        plan: Plan = await scheduling.answer(plan_claims(snapshot, NEXT_UP))
        next_up = await connection.fetch(STATEMENTS["select_ids"], [start.head.ref for start in plan.starts])
        running = await connection.fetch(STATEMENTS["select_running_of_queue"], handle.id, RUNNING)
        ahead, flows_ahead = await _count_ahead(connection, handle.id, subject, snapshot.queue, examined)
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
            await connection.fetchval(STATEMENTS["has_worker"], handle.id),
            [row["id"] for row in next_up],
            await _kept(connection, handle.id, sequence_lane(snapshot.policy, subject)),
            job is not None and await connection.fetchval(STATEMENTS["is_forced"], job),
            service_of(await workers(connection, now), [handle.name], snapshot.now),
            await census.at_gates(scheduling, snapshot.policy, examined.full, RUNNING),
        )


async def _kept(connection: Connection, queue: int, lane: bytes | None) -> list[Kept]:
    if lane is None:
        return []
    found = await connection.fetch(STATEMENTS["select_kept_places"], queue, lane, RUNNING)
    return [Kept(job, task, priority, rows.decode_keys(keys), due) for job, task, priority, keys, due in found]


def _running(row: Sequence[Any]) -> Running:
    job, task, priority, keys, worker, since = row
    return Running(job, task, priority, rows.decode_keys(keys), worker, since)


async def waiting_lanes(connection: Connection, queue: int) -> list[LaneRow]:
    """Every lane with ready jobs, as far as bells have been folded."""
    found = await connection.fetch(STATEMENTS["select_waiting_lanes"], queue)
    return [
        LaneRow(lane, b"", priority, rows.decode_keys(keys), ready, 0, 0, 0, 0, None, 0.0)
        for lane, priority, keys, ready in found
    ]


async def _peek(scheduling: Scheduling, subject: Subject) -> tuple[Snapshot, int]:
    """What a claim would start from; the bells stay where they are."""
    connection, queue = scheduling.connection, scheduling.queue.id
    row = await connection.fetchrow(STATEMENTS["peek_queue"], queue, scheduling.time)
    assert row is not None
    arrived = await connection.fetch(STATEMENTS["peek_arrivals"], queue, row["arrivals_from"], BELLS)
    released = await connection.fetch(STATEMENTS["peek_releases"], queue, row["releases_from"], BELLS)
    arrivals = [
        Arrival(
            lane, priority, rows.decode_keys(keys), count, floor, since, rows.decode_given(given), resumed, given_by
        )
        for lane, priority, keys, count, floor, since, given, resumed, given_by in arrived
    ]
    releases = [Release(*(figure or 0 for figure in each)) for each in released]  # type: ignore[arg-type]
    named = {bell.lane for bell in arrivals} | {bell.lane for bell in releases}
    if subject.lane is not None:
        named.add(subject.lane)
    forced = [
        Forced(lane, Head(*head)) for lane, *head in await connection.fetch(STATEMENTS["select_forced"], queue, NEXT_UP)
    ]
    named.update(each.lane for each in forced)
    state = QueueRow(row["vtime"], row["cursor"], row["cursor_tie"], row["tie"], row["cost"])
    # Tie-breakers are whole numbers: strictly after the one before is at it or after.
    scan = (state.cursor, state.cursor_tie - 1, NEXT_UP)
    found = await scheduling.ask(Need(scan=scan), sorted(named))
    policy = await scheduling.policy_of(row["digest"])
    snapshot = Snapshot(
        policy.without(policy.overrides.expired(row["now"])),
        row["now"],
        state,
        arrivals,
        releases,
        found.lanes,
        found.flows,
        found.scanned,
        len(found.scanned) < NEXT_UP,
        [],
        row["applied_at"],
        forced,
    )
    return await scheduling.sharing.look(snapshot) if policy.shared_limits else snapshot, row["ready"]


async def _count_ahead(
    connection: Connection, queue: int, subject: Subject, state: QueueRow, examined: Examined
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
    )
    return ahead, flows_ahead
