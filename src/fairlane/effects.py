"""Effects: follow-up calls and values that land with the end of a job, or not at all. And the key-value store."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from uuid import UUID

import msgspec

from fairlane.codec import LONGEST_KEY, checked_key, decode_value, encode_value
from fairlane.errors import InvalidJob, InvalidValue
from fairlane.job import BuiltEffects, FollowUp, Landed, Outcome
from fairlane.loop_thread import blocking
from fairlane.parameters import known_options, shown
from fairlane.policy.limits import is_whole
from fairlane.store import records
from fairlane.store.procedures import Work
from fairlane.store.protocol import Store

if TYPE_CHECKING:
    from fairlane.policy.unique import Conflict
    from fairlane.task import Call


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
        """A copy that does not change with the original."""
        return Effects(enqueue=self.enqueue, put=self.put, delete=self.delete)


def landed_of(effects: BuiltEffects | None, conflicts: Mapping[UUID, Conflict] | None) -> Landed:
    """The outcome of these effects, given the conflicts of follow-ups, or `None` if those are not known."""
    if not effects:
        return Landed()
    jobs = []
    for job in effects.jobs:
        outcome, stands = (None, job.id) if conflicts is None else became(job.id, conflicts)
        jobs.append(FollowUp(job.task, job.queue, outcome, stands))
    return Landed(tuple(jobs), tuple(effects.puts), effects.deletes)


def became(job: UUID, conflicts: Mapping[UUID, Conflict]) -> tuple[Outcome, UUID]:
    """The outcome of enqueuing a job, and the job that stands for it: itself, or the holder of its unique key."""
    conflict = conflicts.get(job)
    if conflict is None:
        return Outcome.ENQUEUED, job
    return conflict.outcome, job if conflict.outcome.is_stored else conflict.holder


def _listed(name: str, given: Any, remedy: str) -> list[Any]:
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | Mapping):
        raise InvalidJob(f"Effects: {name}={shown(given)} is not a list; give {remedy}")
    return list(given)


R = TypeVar("R")

MOST_ITEMS = 10_000
BEYOND_EVERY_KEY = "\U0010ffff" * (LONGEST_KEY // 4 + 1)


class Absent:
    """The type of `ABSENT`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "ABSENT"

    def __reduce__(self) -> str:
        return "ABSENT"  # pickled and copied as the one object


ABSENT = Absent()
"""No value: `compare_and_set` can expect it, and can set it. (`None` is a value like any other.)"""


class Page(msgspec.Struct, frozen=True):
    """A page of a scan, in byte order of the keys."""

    items: list[tuple[str, Any]]
    next: str | None
    """Pass it as `after=` to get the next page; `None` on the last page."""


class ValueSource(Protocol):
    """What the values need from their app."""

    max_payload: int

    async def opened(self) -> Store: ...

    def run_blocking(self, work: Coroutine[Any, Any, R]) -> R: ...


class Values:
    """The key-value store: `app.values`. Writes are durable when a call returns, or when `tx` commits."""

    def __init__(self, source: ValueSource) -> None:
        self._source = source

    async def _run(self, work: Work[R], tx: Any) -> R:
        return await (await self._source.opened()).run(work, tx)

    @known_options
    async def get(self, key: str, default: Any = None, *, tx: Any = None) -> Any:
        """The value of a key, or `default`."""
        stored = await self._run(records.get_value(checked_key(key)), tx)
        return default if stored is None else decode_value(stored)

    @known_options
    async def put(self, key: str, value: Any, *, tx: Any = None) -> None:
        """Set the value of a key."""
        encoded = encode_value(checked_key(key), value, self._source.max_payload)
        await self._run(records.put_value(key, encoded), tx)

    @known_options
    async def delete(self, key: str, *, tx: Any = None) -> bool:
        """Remove a key. Returns whether it existed."""
        return await self._run(records.delete_value(checked_key(key)), tx)

    @known_options
    async def compare_and_set(self, key: str, expected: Any, value: Any, *, tx: Any = None) -> bool:
        """Set the value of a key if its current value is the expected one, atomically. Returns whether it was.

        `ABSENT` as `expected` means that the key does not exist; as `value`, that it is removed.
        """
        most = self._source.max_payload
        before = None if expected is ABSENT else encode_value(checked_key(key), expected, most)
        after = None if value is ABSENT else encode_value(checked_key(key), value, most)
        return await self._run(records.compare_and_set_value(checked_key(key), before, after), tx)

    @known_options
    async def scan(self, prefix: str = "", after: str | None = None, limit: int = 100, *, tx: Any = None) -> Page:
        """The keys that start with `prefix` and their values, a page at a time."""
        if not is_whole(limit) or not 1 <= limit <= MOST_ITEMS:
            raise InvalidValue(f"limit={shown(limit)} is not a whole number from 1 to {MOST_ITEMS:,}; take more pages")
        low, end = key_range(
            prefix if prefix == "" else checked_key(prefix),
            None if after is None or after == "" else checked_key(after),
        )
        # One more than asked for, to know whether there is another page.
        found = await self._run(records.scan_values(low, end, limit + 1), tx)
        items = [(key, decode_value(value)) for key, value in found[:limit]]
        return Page(items, items[-1][0] if len(found) > limit else None)

    get_sync = blocking(get)
    put_sync = blocking(put)
    delete_sync = blocking(delete)
    compare_and_set_sync = blocking(compare_and_set)
    scan_sync = blocking(scan)


def key_range(prefix: str, after: str | None) -> tuple[str, str]:
    """The range of keys that start with `prefix` and come after `after`: from the first text to before the second.

    Comparing code points is the same as comparing UTF-8 bytes.
    """
    # No key contains a NUL, so this is the very next key.
    low = prefix if after is None else max(prefix, after + "\x01")
    return low, prefix + BEYOND_EVERY_KEY
