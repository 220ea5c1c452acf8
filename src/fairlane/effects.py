"""Effects as programs write them: calls and values that land with a settlement, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fairlane.codec import encode_value
from fairlane.errors import InvalidJob
from fairlane.job import NewJob, StampedEffects
from fairlane.task import Call
from fairlane.values import checked_key

__all__ = ["Effects", "Stamp", "stamped_effects"]

Stamp = Callable[[Call[Any]], NewJob]
"""Makes a job of a call, under the policies in force."""


class Effects:
    """What lands when a job is done, in the same transaction: follow-up jobs, values to put, keys to delete."""

    __slots__ = ("delete", "enqueue", "put")

    def __init__(
        self,
        *,
        enqueue: Iterable[Call[Any]] = (),
        put: Mapping[str, Any] | None = None,
        delete: Iterable[str] = (),
    ) -> None:
        self.enqueue = list(enqueue)
        self.put = dict(put or {})
        self.delete = list(delete)

    def __repr__(self) -> str:
        return f"Effects(enqueue={self.enqueue!r}, put={self.put!r}, delete={self.delete!r})"


def stamped_effects(effects: Effects, stamp: Stamp, max_value: int) -> StampedEffects:
    """The same as the store takes it; whatever cannot be stored is refused here, before anything is."""
    for call in effects.enqueue:
        if not isinstance(call, Call):
            raise InvalidJob(f"a follow-up is a call, not a {type(call).__name__}; write task.call(…)")
        if call.options.tx is not None:
            raise InvalidJob(f"{call!r} names a transaction; a follow-up lands with its job, and takes none")
    return StampedEffects(
        tuple(stamp(call) for call in effects.enqueue),
        {checked_key(key): encode_value(key, value, max_value) for key, value in effects.put.items()},
        tuple(checked_key(key) for key in effects.delete),
    )
