"""Jobs as every database holds them: keys and numbers as text, attempts; and what is said where there is none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any
from uuid import UUID

import msgspec

from fairlane.errors import JobNotFound, SchemaTooNew, StoreUnavailable, UnknownQueue
from fairlane.job import AttemptRecord, FrozenKeys, JobRecord, State, told_in
from fairlane.policy.keys import KEYS_REMEMBERED
from fairlane.scheduler.journal import FORMAT


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


def record_of(row: Sequence[Any]) -> JobRecord:
    """A row of `select_job` as people see it."""
    job, queue, task, state, priority, keys, *rest, is_cancelled, replays, has_on_dead, context = row
    told = (bool(is_cancelled), replays, bool(has_on_dead), told_in(context))
    values = (uuid_of(job), queue, task, State(state), priority, decode_keys(keys), *rest, *told)
    return JobRecord(*values)


def cancelled_too_fast(queue: str) -> StoreUnavailable:
    """What a claim is refused with whose every plan was overtaken."""
    return StoreUnavailable(f"queue {queue!r}: jobs were cancelled faster than they could be claimed; try again")


def journal_too_new(queue: str, found: int) -> SchemaTooNew:
    """What a claimer is told that does not know how others write a queue's journal."""
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
    """What is said to whoever has work for it."""
    return UnknownQueue(f"queue {name!r} is not known to this database; declare it with app.queue({name!r}, …)")


def not_among(queue: str, known: Iterable[str]) -> UnknownQueue:
    """What is said to whoever looks."""
    names = ", ".join(sorted(known)) or "none"
    return UnknownQueue(f"queue {queue!r} is not known to this database; known are {names}")
