"""Looking things up: jobs and their attempts, queues, the audit, ended sessions; and values by key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from uuid import UUID

import msgspec

from fairlane.clock import Instant
from fairlane.job import AttemptRecord, Claim, JobRecord
from fairlane.policy.backlog import add_events
from fairlane.policy.policy import Policy
from fairlane.stats.keys import DAY
from fairlane.store.audit import LAST_ENTRY, AuditEntry, entry_of
from fairlane.store.boards import QueueTime
from fairlane.store.procedures import (
    NOW,
    Each,
    Procedure,
    Work,
    change,
    is_done,
    look,
    note,
    on_board,
    query,
    snapshot,
    transaction,
    value,
)
from fairlane.store.rows import (
    attempts_of,
    claim_of,
    decode_given,
    decode_keys,
    encode,
    no_such_job,
    record_of,
    uuid_of,
)
from fairlane.store.stats_values import WorkerReport

T = TypeVar("T")

UNFOLDED_AT_MOST = 200
"""Lane events of arrivals that a producer adds up by itself. More of them are folded first: perhaps nobody claims."""


@look
def job(job: UUID) -> Procedure[JobRecord]:
    """The job as it stands, or `JobNotFound`."""
    found = yield query("select_job", job)
    if not found:
        raise no_such_job(job)
    return record_of(found[0])


@snapshot
def attempts(job: UUID) -> Procedure[list[AttemptRecord]]:
    """Every attempt of a job, the last one included, in order."""
    last = yield query("select_last_attempt", job)
    if not last:
        raise no_such_job(job)
    return attempts_of((yield query("select_attempts", job)), last[0])


@look
def contexts(ids: Sequence[UUID]) -> Procedure[dict[UUID, str]]:
    """The contexts of these jobs, as JSON; those that have none are left out."""
    return _of_jobs("select_contexts", ids, str)


@look
def given(ids: Sequence[UUID]) -> Procedure[dict[UUID, dict[str, float]]]:
    """The numbers that these jobs brought along, by the name of their limit; those without any are left out."""
    return _of_jobs("select_given", ids, lambda text: decode_given(text) or {})


@look
def retries(ids: Sequence[UUID]) -> Procedure[dict[UUID, int]]:
    """How often each of these jobs asked for a retry since it was enqueued or replayed; those at 0 are left out."""
    return _of_jobs("select_retries", ids, int)


def _of_jobs(name: str, jobs: Sequence[UUID], decode: Callable[[Any], T]) -> Procedure[dict[UUID, T]]:
    return {uuid_of(job): decode(value) for job, value in (yield Each(name, [(job,) for job in jobs]))}


@look
def held(claims: Sequence[tuple[UUID, UUID]]) -> Procedure[list[UUID]]:
    """Of these (job, lease) pairs, the jobs whose claim still stands: asked after a lost connection."""
    return [uuid_of(job) for (job,) in (yield Each("select_held", claims, 2))]


@transaction
def adopt(
    job: UUID, lease: UUID, own: UUID, worker: UUID, name: str, duration: int, tasks: list[str]
) -> Procedure[tuple[Claim, QueueTime] | None]:
    """Move a claim that stands under a lease to a new one, of this worker: see `Store.adopt`."""
    found = yield query("adopt", (yield NOW), job, lease, own, worker, name, duration, tasks)
    if not found:
        return None
    *columns, claimed_at, queue, now, ahead = found[0]
    return claim_of(columns, own, queue, claimed_at), QueueTime(now, ahead)


@note
def report_progress(claim: Claim, fraction: float, message: str | None) -> Procedure[None]:
    """Note how far a running job is, in words that every database takes; a claim that is gone reports nothing."""
    yield query("update_progress", claim.id, claim.lease, fraction, message)


@note
def report(worker: UUID, latest: WorkerReport | None) -> Procedure[None]:
    """Store the latest report of a worker; `None` removes it."""
    if latest is None:
        yield query("delete_worker", worker)
    else:
        yield query("put_worker", (yield NOW), worker, encode(latest), DAY)


class QueueCounts(msgspec.Struct, frozen=True):
    """How many jobs of a queue are where. `ready` and `running` come from folded lane events, not from a scan."""

    ready: int
    running: int
    parked_lanes: int
    events: int
    """Lane events that no claim has folded yet."""


@look
def counts(queue: str) -> Procedure[QueueCounts]:
    (row,) = yield query("select_counts", (yield on_board(queue, "number")))
    return QueueCounts(*row)


@look
def count_ready(policy: Policy, gates: Sequence[bytes]) -> Procedure[tuple[dict[bytes, int], bool]]:
    """Ready jobs by gate, and whether so many lane events wait that they should be folded: not all of them were
    counted."""
    found = yield query("count_ready", (yield on_board(policy.queue, "number")), list(gates), UNFOLDED_AT_MOST + 1)
    counts = dict.fromkeys(gates, 0) | {gate: count for gate, count, _, _ in found if gate is not None}
    events = [(priority, decode_keys(keys), count) for gate, count, priority, keys in found if gate is None]
    return add_events(policy, counts, events), len(events) > UNFOLDED_AT_MOST


@look
def queues() -> Procedure[list[str]]:
    return [name for (name,) in (yield query("select_queue_names"))]


@look
def policy_versions(queues: Sequence[str]) -> Procedure[dict[str, int]]:
    """The versions of the policies in force, by queue: what a producer asks again and again."""
    return dict(map(tuple, (yield Each("select_policy_versions", [(name,) for name in queues]))))


@look
def audit(queue: str | None = None, before: int | None = None, limit: int = 100) -> Procedure[list[AuditEntry]]:
    """What operators did, the newest first."""
    asked = (LAST_ENTRY if before is None else before, limit)
    found = yield query("select_audit", *asked) if queue is None else query("select_audit_of_queue", *asked, queue)
    return [entry_of(row) for row in found]


@transaction
def end_session(session: str, expires_at: Instant) -> Procedure[bool]:
    """Remember that a session of the dashboard has ended, at least until it would have expired."""
    return is_done("end_session", session, expires_at)


@look
def is_session_ended(session: str) -> Procedure[bool]:
    return bool((yield query("is_session_ended", session))[0][0])


# Values. All of these may be run in the caller's transaction.


@look
def get_value(key: str) -> Procedure[bytes | None]:
    """The value of a key; `None` where there is none."""
    return value("select_value", key)


@change
def put_value(key: str, value: bytes) -> Procedure[bool]:
    return is_done("put_value", key, value)


@change
def delete_value(key: str) -> Procedure[bool]:
    """Remove a key. Returns whether it was there."""
    return is_done("delete_value", key)


def compare_and_set_value(key: str, expected: bytes | None, value: bytes | None) -> Work[bool]:
    """Replace a key's value if it is the expected one; `None` stands for no value. Returns whether it was."""
    # Each is one statement, which waits for whoever writes the same key and then looks at what they wrote. (And on
    # SQLite, a caller's transaction may be one that has only read so far.)
    if expected is None and value is None:
        return _is_absent(key)
    if expected is None:
        return _compare_and_set_value("put_value_if_absent", key, value)
    if value is None:
        return _compare_and_set_value("delete_value_if_equal", key, expected)
    return _compare_and_set_value("replace_value", key, expected, value)


@look
def _is_absent(key: str) -> Procedure[bool]:
    return not (yield query("select_value", key))


@change
def _compare_and_set_value(name: str, *given: object) -> Procedure[bool]:
    return is_done(name, *given)


@look
def scan_values(low: str, end: str, limit: int) -> Procedure[list[tuple[str, bytes]]]:
    """The keys from `low` to before `end` in the order of their bytes, with their values."""
    return [(key, value) for key, value in (yield query("scan_values", low, end, limit))]
