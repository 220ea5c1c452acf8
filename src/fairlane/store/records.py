"""Looking things up: jobs and their attempts, queues, the audit, ended sessions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar
from uuid import UUID

from fairlane.clock import Instant
from fairlane.job import AttemptRecord, JobRecord
from fairlane.store import audit
from fairlane.store.audit import AuditEntry
from fairlane.store.procedures import Each, Performer, Procedure, is_done, query
from fairlane.store.rows import attempts_of, decode_given, no_such_job, record_of, uuid_of

T = TypeVar("T")


class Records(Performer, Protocol):
    """A store, as far as looking things up is concerned."""

    async def job(self, job: UUID) -> JobRecord:
        """The job as it stands, or `JobNotFound`."""
        return await self._look_up(lambda: _record(job))

    async def attempts(self, job: UUID) -> list[AttemptRecord]:
        """Every attempt of a job, the last one included, in order."""
        return await self._look_up_together(lambda: _attempts(job))

    async def contexts(self, ids: Sequence[UUID]) -> dict[UUID, str]:
        """The contexts of these jobs, as JSON; those that have none are left out."""
        return await self._look_up(lambda: _of_jobs("select_contexts", ids, str))

    async def given(self, ids: Sequence[UUID]) -> dict[UUID, dict[str, float]]:
        """The numbers that these jobs brought along, by the name of their limit; those without any are left out."""
        return await self._look_up(lambda: _of_jobs("select_given", ids, lambda text: decode_given(text) or {}))

    async def retries(self, ids: Sequence[UUID]) -> dict[UUID, int]:
        """How often each of these jobs asked for a retry since it was enqueued or replayed; those at 0 are left out."""
        return await self._look_up(lambda: _of_jobs("select_retries", ids, int))

    async def queues(self) -> list[str]:
        return await self._look_up(_queues)

    async def policy_versions(self, queues: Sequence[str]) -> dict[str, int]:
        """The versions of the policies in force, by queue: what a producer asks again and again."""
        return await self._look_up(lambda: _policy_versions(queues))

    async def audit(self, queue: str | None = None, before: int | None = None, limit: int = 100) -> list[AuditEntry]:
        """What operators did, the newest first."""
        return await self._look_up(lambda: audit.entries(queue, before, limit))

    async def end_session(self, session: str, expires_at: Instant) -> None:
        """Remember that a session of the dashboard has ended, at least until it would have expired."""
        await self._transact(lambda: is_done("end_session", session, expires_at))

    async def is_session_ended(self, session: str) -> bool:
        return await self._look_up(lambda: _is_session_ended(session))


def _record(job: UUID) -> Procedure[JobRecord]:
    found = yield query("select_job", job)
    if not found:
        raise no_such_job(job)
    return record_of(found[0])


def _attempts(job: UUID) -> Procedure[list[AttemptRecord]]:
    last = yield query("select_last_attempt", job)
    if not last:
        raise no_such_job(job)
    return attempts_of((yield query("select_attempts", job)), last[0])


def _of_jobs(name: str, jobs: Sequence[UUID], decode: Callable[[Any], T]) -> Procedure[dict[UUID, T]]:
    return {uuid_of(job): decode(value) for job, value in (yield Each(name, [(job,) for job in jobs]))}


def _queues() -> Procedure[list[str]]:
    return [name for (name,) in (yield query("select_queue_names"))]


def _policy_versions(queues: Sequence[str]) -> Procedure[dict[str, int]]:
    return dict(map(tuple, (yield Each("select_policy_versions", [(name,) for name in queues]))))


def _is_session_ended(session: str) -> Procedure[bool]:
    return bool((yield query("is_session_ended", session))[0][0])


class Values(Performer, Protocol):
    """A store, as far as values are concerned."""

    async def get_value(self, key: str, tx: Any = None) -> bytes | None:
        """The value of a key; `None` where there is none. All of these take the caller's transaction as `tx`."""
        return await self._look_up(lambda: _get(key), tx)

    async def put_value(self, key: str, value: bytes, tx: Any = None) -> None:
        await self._change(lambda: is_done("put_value", key, value), tx)

    async def delete_value(self, key: str, tx: Any = None) -> bool:
        """Remove a key. Returns whether it was there."""
        return await self._change(lambda: is_done("delete_value", key), tx)

    async def compare_and_set_value(
        self, key: str, expected: bytes | None, value: bytes | None, tx: Any = None
    ) -> bool:
        """Replace a key's value if it is the expected one; `None` stands for no value. Returns whether it was."""
        # Each is one statement, which waits for whoever writes the same key and then looks at what they wrote. (And on
        # SQLite, a caller's transaction may be one that has only read so far.)
        match expected, value:
            case None, None:
                return await self.get_value(key, tx) is None
            case None, _:
                return await self._change(lambda: is_done("put_value_if_absent", key, value), tx)
            case _, None:
                return await self._change(lambda: is_done("delete_value_if_equal", key, expected), tx)
            case _:
                return await self._change(lambda: is_done("replace_value", key, expected, value), tx)

    async def scan_values(self, low: str, end: str, limit: int, tx: Any = None) -> list[tuple[str, bytes]]:
        """The keys from `low` to before `end` in the order of their bytes, with their values."""
        return await self._look_up(lambda: _scan(low, end, limit), tx)


def _get(key: str) -> Procedure[bytes | None]:
    found = yield query("select_value", key)
    return found[0][0] if found else None


def _scan(low: str, end: str, limit: int) -> Procedure[list[tuple[str, bytes]]]:
    return [(key, value) for key, value in (yield query("scan_values", low, end, limit))]
