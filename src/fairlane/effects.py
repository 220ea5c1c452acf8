"""Effects as programs write them: calls and values that land with the end of a job, or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any
from uuid import UUID

from fairlane.errors import InvalidJob, InvalidValue
from fairlane.job import FollowUp, Landed, Outcome, StampedEffects
from fairlane.parameters import known_options, shown

if TYPE_CHECKING:
    from fairlane.policy.unique import Conflict
    from fairlane.task import Call

__all__ = ["Effects", "landed_of"]


@known_options
class Effects:
    """What lands with the end of a job, in the same transaction: follow-up jobs, values to put, keys to delete."""

    __slots__ = ("delete", "enqueue", "put")

    def __init__(
        self,
        *,
        enqueue: Iterable[Call[Any]] = (),
        put: Mapping[str, Any] | None = None,
        delete: Iterable[str] = (),
    ) -> None:
        self.enqueue = _listed("enqueue", enqueue, "a list of calls, such as [task.call(…)]")
        if put is not None and not isinstance(put, Mapping):
            raise InvalidValue(f"Effects: put={shown(put)} is not a mapping; give keys with their values: {{'k': 1}}")
        self.put = dict(put or {})
        self.delete = _listed("delete", delete, "a list of keys, such as ['k']")

    def __repr__(self) -> str:
        return f"Effects(enqueue={self.enqueue!r}, put={self.put!r}, delete={self.delete!r})"

    def copy(self) -> Effects:
        """The same, which no longer changes with the original."""
        return Effects(enqueue=self.enqueue, put=self.put, delete=self.delete)


def landed_of(effects: StampedEffects | None, conflicts: Mapping[UUID, Conflict] | None) -> Landed:
    """What landed of these effects, given what met a unique key that another job holds; `None`: nobody knows."""
    if not effects:
        return Landed()
    jobs = []
    for job in effects.jobs:
        conflict = None if conflicts is None else conflicts.get(job.id)
        outcome = None if conflicts is None else Outcome.ENQUEUED if conflict is None else conflict.outcome
        stands = job.id if conflict is None or conflict.outcome.is_stored else conflict.holder
        jobs.append(FollowUp(job.task, job.queue, outcome, stands))
    return Landed(tuple(jobs), tuple(effects.puts), effects.deletes)


def _listed(name: str, given: Any, remedy: str) -> list[Any]:
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | Mapping):
        raise InvalidJob(f"Effects: {name}={shown(given)} is not a list; give {remedy}")
    return list(given)
