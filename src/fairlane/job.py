"""Jobs as values: what a producer hands in, what a worker gets, what an operator sees."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from struct import Struct, unpack
from threading import Lock
from typing import Any, Literal, NoReturn
from uuid import UUID

import msgspec

from fairlane.clock import Instant


class State(IntEnum):
    """The state of a job. The numbers are stored."""

    SCHEDULED = 0
    READY = 1
    RUNNING = 2
    DONE = 3
    DEAD = 4
    CANCELLED = 5

    @property
    def is_final(self) -> bool:
        return self >= State.DONE

    def __str__(self) -> str:
        return self.name.lower()


class Outcome(IntEnum):
    """The outcome of an enqueue."""

    ENQUEUED = 0
    """Stored as a new job."""
    REPLACED = 1
    """Stored; the job that held its unique key and had not started was cancelled."""
    DUPLICATE = 2
    """Not stored: the job that holds its unique key stands for it."""
    REFUSED = 3
    """Not stored: another job holds its unique key, and `on_conflict` says to refuse."""
    FULL = 4
    """Not stored: its backlog is full, and refuses more."""

    @property
    def is_stored(self) -> bool:
        return self <= Outcome.REPLACED

    def __str__(self) -> str:
        return self.name.lower()


class Until(IntEnum):
    """How long a key is held. The numbers are stored."""

    STARTED = 0
    DONE = 1
    WINDOW = 2


class UniqueKey(msgspec.Struct, frozen=True):
    """A unique key as it is stamped on a job."""

    id: bytes
    until: Until
    window: int | None
    on_conflict: Literal["return", "reject", "replace"]
    digest: bytes
    same_payload: bool

    def expires_at(self, now: Instant) -> Instant | None:
        """When the key expires for a job that is enqueued now."""
        return None if self.window is None else now + self.window


class NewJob(msgspec.Struct, frozen=True, gc=False):
    """A job as its producer hands it to the store."""

    id: UUID
    queue: str
    task: str
    priority: int
    lane: bytes
    lane_keys: dict[str, str | None]
    """The keys that identify the lane, in canonical form."""
    keys: dict[str, str | None]
    """All keys stamped on the job."""
    payload: bytes
    max_attempts: int
    delay: int | None = None
    """Microseconds from the store's now until it is due; `None` or less than 1: at once."""
    run_at: Instant | None = None
    """Or the instant at which it is due."""
    unique: UniqueKey | None = None
    on_dead: bytes | None = None
    """What is to land when it dies: an `OnDead` as it is stored."""
    given: dict[str, float] | None = None
    """Numbers for the policy of its queue, by the name of their limit."""
    context: str | None = None
    """The context that its producer gave, as JSON."""
    is_named: bool = False
    """Whether its producer chose its id, so that another job may already have it."""


class BuiltEffects(msgspec.Struct, frozen=True):
    """What lands with a settlement, or not at all: follow-up jobs and values."""

    jobs: tuple[NewJob, ...] = ()
    puts: dict[str, bytes] = {}
    deletes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.jobs or self.puts or self.deletes)


class FollowUp(msgspec.Struct, frozen=True):
    """What became of one follow-up."""

    task: str
    queue: str
    outcome: Outcome | None
    """`None` if not known: an earlier try recorded it, but its answer was lost."""
    job: UUID
    """The job that was stored, otherwise the job that holds its unique key."""

    @property
    def is_stored(self) -> bool:
        return self.outcome is None or self.outcome.is_stored


class Landed(msgspec.Struct, frozen=True):
    """What landed with the end of a job. Values always do; a follow-up whose unique key is held may not."""

    enqueue: tuple[FollowUp, ...] = ()
    """In the order given."""
    put: tuple[str, ...] = ()
    delete: tuple[str, ...] = ()

    @property
    def not_stored(self) -> tuple[FollowUp, ...]:
        """Follow-ups for which there is no new job: another one holds their unique key."""
        return tuple(each for each in self.enqueue if not each.is_stored)


NewIds = Callable[[int], Sequence[UUID]]
"""Returns this many fresh ids."""


class OnDead(msgspec.Struct, frozen=True):
    """Effects that land if a job dies. They can land more than once: a job that is replayed may die again."""

    effects: BuiltEffects
    named: frozenset[UUID] = frozenset()
    """Follow-ups whose ids were given by the producer. The others get a new id each time."""

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, stored: bytes) -> OnDead:
        """As it was stored, or a `msgspec.DecodeError`."""
        return msgspec.msgpack.decode(stored, type=cls)

    def landing(self, new_ids: NewIds) -> BuiltEffects:
        """What lands at one death."""
        jobs = self.effects.jobs
        fresh = iter(new_ids(sum(job.id not in self.named for job in jobs)))
        landing = (job if job.id in self.named else msgspec.structs.replace(job, id=next(fresh)) for job in jobs)
        return msgspec.structs.replace(self.effects, jobs=tuple(landing))


class FrozenKeys(dict[str, str | None]):
    """The keys of a stored job: an immutable mapping, shared by many jobs."""

    __slots__ = ()

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("the keys of a stored job cannot be changed; copy them first: dict(keys)")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[type[FrozenKeys], tuple[dict[str, str | None]]]:
        return FrozenKeys, (dict(self),)


SUSPECT_FROM = 2
"""From this level of suspicion, a job runs alone."""


class Claim(msgspec.Struct, frozen=True):
    """A job handed to one worker. `lease` is random, names the batch it was claimed in, and fences it."""

    id: UUID
    lease: UUID
    queue: str
    task: str
    priority: int
    keys: Mapping[str, str | None]
    payload: bytes
    attempt: int
    """Counts from 1; a snooze or a release gives it back."""
    max_attempts: int
    enqueued_at: Instant
    claimed_at: Instant
    cancel_requested: bool
    suspicion: int = 0
    """How often its worker was lost while it ran beside other jobs."""

    @property
    def is_suspect(self) -> bool:
        """It may be what killed its worker: it runs with nothing beside it, so that the next loss has a culprit."""
        return self.suspicion >= SUSPECT_FROM


class JobRecord(msgspec.Struct, frozen=True):
    """A job as it stands. Looking never changes anything: a record cannot be settled."""

    id: UUID
    queue: str
    task: str
    state: State
    priority: int
    keys: Mapping[str, str | None]
    payload: bytes
    attempt: int
    max_attempts: int
    enqueued_at: Instant
    due_at: Instant | None
    claimed_at: Instant | None
    finished_at: Instant | None
    worker: str | None
    error: str | None
    result: bytes | None
    progress: float | None
    progress_message: str | None
    cancel_requested: bool
    replays: int = 0
    """How often it was replayed; `attempt` counts from the last replay."""
    has_on_dead: bool = False
    """Whether it has `on_dead` effects."""
    context: dict[str, Any] = {}
    """The context that its producer gave."""


class AttemptRecord(msgspec.Struct, frozen=True):
    """One run of a job: when, where, and how it ended."""

    attempt: int
    claimed_at: Instant
    ended_at: Instant | None
    worker: str | None
    outcome: str
    error: str | None


RESERVED = "fairlane."
"""Names in a context that start with this are reserved: producers cannot give them, and they are never shown."""
_TRACE = f"{RESERVED}trace"
ENGINES_MESSAGE = f"{RESERVED}engine"
"""The name under which a routed call keeps the message that its engine wrote."""


def with_trace(context: str | None, trace: dict[str, str] | None) -> str | None:
    """The context of a job with the span that it was enqueued in added, as stored."""
    if trace is None:
        return context
    return msgspec.json.encode({**({} if context is None else stored_in(context)), _TRACE: trace}).decode()


def trace_of(context: str) -> dict[str, str] | None:
    """The span that a job was enqueued in, from its stored context."""
    found = stored_in(context).get(_TRACE)
    return found if isinstance(found, dict) else None


def given_context(context: str | None) -> dict[str, Any]:
    """What the producer gave as context, from the stored context."""
    if context is None:
        return {}
    return {name: value for name, value in stored_in(context).items() if not name.startswith(RESERVED)}


def stored_in(context: str) -> dict[str, Any]:
    """The stored context of a job, reserved names included."""
    # PostgreSQL takes JSON from producers in other languages that cannot be read here: half a surrogate pair, 1e999, a
    # thousand lists in each other. One such job must not keep the others from being seen.
    try:
        found: dict[str, Any] = msgspec.json.decode(context, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return {}
    return found


_lock = Lock()
_last = 0
_two_words = Struct(">QQ").pack


def new_job_ids(now: Instant, count: int) -> list[UUID]:
    """Fresh ids (UUID version 7). They rise within a process, so that an index on them is filled at its end."""
    global _last
    with _lock:
        # 48 bits of milliseconds and 12 of a counter; a clock that steps back does not make ids fall.
        first = max(_last + 1, (now // 1_000) << 12)
        _last = first + count - 1
    tails = unpack(f">{count}Q", os.urandom(8 * count))
    raw = [
        _two_words((build >> 12) << 16 | 0x7000 | build & 0xFFF, 0x8000_0000_0000_0000 | tail & 0x3FFF_FFFF_FFFF_FFFF)
        for build, tail in zip(range(first, first + count), tails, strict=True)
    ]
    return msgspec.convert(raw, list[UUID])  # at a third of the price of calling `UUID` for each
