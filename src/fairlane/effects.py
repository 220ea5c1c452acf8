"""Effects as programs write them: calls and values that land with the end of a job, or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fairlane.task import Call

__all__ = ["Effects"]


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
        self.enqueue = list(enqueue)
        self.put = dict(put or {})
        self.delete = list(delete)

    def __repr__(self) -> str:
        return f"Effects(enqueue={self.enqueue!r}, put={self.put!r}, delete={self.delete!r})"

    def copy(self) -> Effects:
        """The same, which no longer changes with the original."""
        return Effects(enqueue=self.enqueue, put=self.put, delete=self.delete)
