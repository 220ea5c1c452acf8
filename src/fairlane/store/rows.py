"""Rows of jobs and boards, alike on every database, and the errors for those that do not exist."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from typing import Any
from uuid import UUID

import msgspec
from msgspec.structs import astuple

from fairlane.clock import Instant
from fairlane.errors import JobNotFound, SchemaTooNew, StoreUnavailable, UnknownQueue
from fairlane.job import AttemptRecord, Claim, FrozenKeys, JobRecord, NewJob, Outcome, State, given_context, new_job_ids
from fairlane.policy.keys import KEYS_REMEMBERED
from fairlane.policy.limits import Limit, read_limit
from fairlane.policy.overrides import Override, Overrides
from fairlane.policy.partitions import parse_partition
from fairlane.policy.policy import Policy
from fairlane.policy.unique import Conflict
from fairlane.scheduler.journal import FORMAT
from fairlane.scheduler.settlement import Settlement
from fairlane.scheduler.snapshot import FlowRow, GateRow, LaneRow
from fairlane.store.procedures import Procedure, value

Row = tuple[Any, ...]
_encode = msgspec.json.Encoder().encode


def encode(value: object) -> str:
    """A value as JSON."""
    return _encode(value).decode()


@lru_cache(maxsize=KEYS_REMEMBERED)
def decode_keys(text: str) -> FrozenKeys:
    """Keys by name. The same text gives the same mapping, which nobody can write to."""
    return FrozenKeys(msgspec.json.decode(text, type=dict[str, str | None]))


@lru_cache(maxsize=KEYS_REMEMBERED)
def decode_key(text: str) -> list[str | None]:
    return msgspec.json.decode(text, type=list[str | None])


@lru_cache(maxsize=KEYS_REMEMBERED)
def decode_given(text: str | None) -> dict[str, float] | None:
    """Numbers that a job brought along, by name."""
    return None if text is None else msgspec.json.decode(text, type=dict[str, float])


def uuid_of(found: UUID | bytes) -> UUID:
    """An id as a database brings it."""
    return UUID(bytes=found) if isinstance(found, bytes) else found


def claim_of(row: Sequence[Any], lease: UUID, queue: str, claimed_at: Instant) -> Claim:
    """A job that was handed out, by its columns from `id` to `suspicion`."""
    job, task, priority, keys, payload, attempt, most, enqueued_at, is_cancelled, suspicion = row
    rest = decode_keys(keys), payload, attempt, most, enqueued_at, claimed_at, bool(is_cancelled), suspicion
    return Claim(uuid_of(job), lease, queue, task, priority, *rest)


# Flows, lanes and gates have their queue as the first column, then the fields of their rows in order; keys are JSON.


def lane_row(lane: bytes, flow: bytes, priority: int, keys: str, *rest: Any) -> LaneRow:
    return LaneRow(lane, flow, priority, decode_keys(keys), *rest)


def gate_row(gate: bytes, limit: str, key: str, *rest: Any) -> GateRow:
    return GateRow(gate, limit, decode_key(key), *rest)


def flow_parameters(row: FlowRow, queue: int, now: Instant) -> Row:
    return (queue, row.id, encode(row.key), *astuple(row)[2:], now if row.given_by else 0)


def lane_parameters(row: LaneRow, queue: int) -> Row:
    return (queue, row.id, row.flow, row.priority, encode(row.keys), *astuple(row)[4:])


def gate_parameters(row: GateRow, queue: int) -> Row:
    return (queue, row.id, row.limit, encode(row.key), *astuple(row)[3:])


def flow_of(row: Sequence[Any]) -> FlowRow:
    return FlowRow(row[0], decode_key(row[1]), *row[2:])


def lane_of(row: Sequence[Any]) -> LaneRow:
    return LaneRow(row[0], row[1], row[2], decode_keys(row[3]), *row[4:])


def gate_of(row: Sequence[Any]) -> GateRow:
    return GateRow(row[0], row[1], decode_key(row[2]), *row[3:])


def texts(value: str | Sequence[str]) -> tuple[str, ...]:
    """A list of texts, which one store hands out as JSON."""
    return tuple(msgspec.json.decode(value, type=list[str]) if isinstance(value, str) else value)


def record_of(row: Sequence[Any]) -> JobRecord:
    """A row of `select_job` as people see it."""
    job, queue, task, state, priority, keys, *rest, is_cancelled, replays, has_on_dead, context = row
    last = (bool(is_cancelled), replays, bool(has_on_dead), given_context(context))
    values = (uuid_of(job), queue, task, State(state), priority, decode_keys(keys), *rest, *last)
    return JobRecord(*values)


def cancelled_too_fast(queue: str) -> StoreUnavailable:
    """The error of a claim if jobs of each of its plans were cancelled meanwhile."""
    return StoreUnavailable(f"queue {queue!r}: jobs were cancelled faster than they could be claimed; try again")


def journal_too_new(queue: str, found: int) -> SchemaTooNew:
    """The error of a claimer that does not know the format of a queue's journal."""
    return SchemaTooNew(
        f"queue {queue!r} is claimed by workers of another version of Fairlane (its journal has format {found}, this "
        f"version writes {FORMAT}); upgrade Fairlane on this machine"
    )


def attempts_of(past: Iterable[Sequence[Any]], last: Sequence[Any]) -> list[AttemptRecord]:
    """The past ones, and the one that runs or was the last: that one stands in the job's own row."""
    found = [AttemptRecord(*each) for each in past]
    state, attempt, claimed_at, finished_at, worker, outcome, error = last
    if state == State.RUNNING:
        found.append(AttemptRecord(attempt, claimed_at, None, worker, "running", None))
    elif finished_at is not None and claimed_at is not None:
        found.append(AttemptRecord(attempt, claimed_at, finished_at, worker, outcome, error))
    return found


def no_such_job(job: UUID) -> JobNotFound:
    return JobNotFound(f"there is no job {job}; it was never stored, or its retention has passed")


def no_such_queue(name: str) -> UnknownQueue:
    """The error where a queue is to be used."""
    return UnknownQueue(f"queue {name!r} is not known to this database; declare it with app.queue({name!r}, …)")


def queue_number(name: str) -> Procedure[int]:
    """The number of a queue, or `UnknownQueue`."""
    number: int | None = yield from value("select_queue_id", name)
    if number is None:
        raise no_such_queue(name)
    return number


def not_among(queue: str, known: Iterable[str]) -> UnknownQueue:
    """What is said to whoever looks, with the name that was probably meant."""
    known, place = sorted(known), parse_partition(queue)
    if place is not None and place[1] == 0 and place[0] in known:
        return UnknownQueue(
            f"{queue!r} is the first partition of {place[0]!r}, which has its name and changes with all of them; "
            f"give {place[0]!r}"
        )
    similar = get_close_matches(queue, known, n=1)
    hint = f"did you mean {similar[0]!r}?" if similar else f"known are {', '.join(known) or 'none'}"
    return UnknownQueue(f"queue {queue!r} is not known to this database; {hint}")


class Declared(msgspec.Struct, frozen=True):
    """The policy in force for a queue once a declaration has been made."""

    policy: Policy
    version: int
    is_drift: bool
    """The stored policy differs from the declared one and wins; `fairlane policy apply` changes that."""


def decode_limit(document: str) -> Limit:
    """A limit that queues share."""
    return read_limit(msgspec.json.decode(document))


def encode_limit(limit: Limit) -> str:
    """The same limit is always the same text: stores compare them."""
    return msgspec.json.encode(limit.to_document(), order="sorted").decode()


def decode_overrides(documents: Iterable[str]) -> Overrides:
    return Overrides(tuple(msgspec.json.decode(each, type=Override) for each in documents))


@lru_cache(maxsize=1_000)
def decode_policy(text: str, overrides: tuple[str, ...], shared: tuple[str, ...]) -> Policy:
    """A policy with its overrides, and with its shared limits as they are in force."""
    policy = Policy.decode(text).overridden(decode_overrides(overrides))
    limits = map(decode_limit, shared)
    in_force = {limit.name: limit for limit in limits if limit.name is not None}
    return policy.with_shared(in_force) if in_force else policy


log = logging.getLogger("fairlane.store")


def dying(settlement: Settlement, stored: bytes, now: Instant) -> Settlement:
    """A death with what its job has declared for it."""
    death = settlement.with_on_dead(stored, lambda count: new_job_ids(now, count))
    if death.error != settlement.error:
        log.error("job %s is dead, and what it declared for that cannot be read", settlement.job)
    return death


def refused(settlement: Settlement, error: Exception) -> Settlement:
    """The same death without its effects, which the database would not take."""
    log.error(
        "job %s is dead, and its on_dead effects were refused: %s: %s", settlement.job, type(error).__name__, error
    )
    return settlement.without_effects(error)


def not_taken(settlement: Settlement, jobs: tuple[NewJob, ...], taken: UUID) -> tuple[NewJob, ...]:
    """These follow-ups without the one whose id another job has."""
    log.warning("job %s is dead; there is a job %s already, so that follow-up is skipped", settlement.job, taken)
    return tuple(job for job in jobs if job.id != taken)


def tell_of_conflicts(settlement: Settlement, follow_ups: Sequence[NewJob], conflicts: Mapping[UUID, Conflict]) -> None:
    """Say which follow-ups were not stored because their unique keys are held: as after a job that is done."""
    for follow_up in follow_ups:
        conflict = conflicts.get(follow_up.id)
        if conflict is not None and not conflict.outcome.is_stored:
            log.log(
                logging.WARNING if conflict.outcome is Outcome.REFUSED else logging.INFO,
                "job %s is dead; its follow-up (%s) was not stored (%s): job %s holds its unique key",
                settlement.job,
                follow_up.task,
                conflict.outcome,
                conflict.holder,
            )
