"""Uniqueness: at most one job of a task for a key, until it has started, until it has ended, or for a window.

The rule is decided here; a store looks up who holds a key, inside the transaction that would take it, and writes. A key
is never given back: the state of the job that took it says whether it is still held. So claims and settlements know
nothing of uniqueness, and pay nothing for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from hashlib import sha256
from types import MappingProxyType
from typing import Any, Literal, cast
from uuid import UUID

import msgspec

from fairlane.clock import Instant, microseconds
from fairlane.errors import ConfigurationError, InvalidKey
from fairlane.job import NewJob, Outcome, State, UniqueKey, Until
from fairlane.parameters import checked, shown
from fairlane.policy.keys import canonical_key, unique_id

OnConflict = Literal["return", "reject", "replace"]
OnReplayConflict = Literal["reject", "replace"]
"""What a replay does that meets another job which holds the unique key."""


class Unique:
    """At most one job of the task for this key.

    `key` is a value, a tuple of values, or a function of the task's arguments; `None` (or a function that returns it)
    means that this job is not unique. `until` says how long the key is held: until the job has "started" (a retry does
    not take it back), or until it is "done", however it ends. `window` holds it for a time instead, counted from the
    enqueue, whatever becomes of the job. `on_conflict`: "return" the job that holds the key, "reject" the new one, or
    "replace" the old one (one that has started goes on, and the new one is stored beside it). With `same_payload`,
    another payload under the same key is an error.

    >>> Unique("order-42", window="10m")
    Unique('order-42', window='10m')
    """

    __slots__ = ("key", "on_conflict", "same_payload", "until", "window")

    @checked(unchecked=["window"])
    def __init__(
        self,
        key: object | Callable[..., object],
        *,
        until: Literal["started", "done"] = "done",
        window: timedelta | str | float | None = None,
        on_conflict: OnConflict = "return",
        same_payload: bool = False,
    ) -> None:
        if window is not None and microseconds(window) <= 0:
            raise ConfigurationError(f"Unique: window={window!r} is not a time above 0; give one, such as '10m'")
        self.key = key
        self.until = until
        self.window = window
        self.on_conflict = on_conflict
        self.same_payload = same_payload

    def __repr__(self) -> str:
        given = [repr(self.key)]
        if self.window is not None:
            given.append(f"window={self.window!r}")
        elif self.until != "done":
            given.append(f"until={self.until!r}")
        if self.on_conflict != "return":
            given.append(f"on_conflict={self.on_conflict!r}")
        if self.same_payload:
            given.append("same_payload=True")
        return f"Unique({', '.join(given)})"


def unique_key(
    unique: Unique, task: str, args: tuple[Any, ...], kwargs: dict[str, Any], payload: bytes
) -> UniqueKey | None:
    """The key of one call; `None` if it is not unique."""
    value = _called(task, unique.key, args, kwargs) if callable(unique.key) else unique.key
    if value is None:
        return None
    parts = cast(tuple[object, ...], value) if isinstance(value, tuple) else (value,)
    try:
        texts = tuple(canonical_key("unique", part) for part in parts)
    except InvalidKey as error:
        raise InvalidKey(f"task {task!r}: {error}") from None
    until = Until.WINDOW if unique.window is not None else Until[unique.until.upper()]
    return UniqueKey(
        unique_id(task, texts),
        until,
        None if unique.window is None else microseconds(unique.window),
        unique.on_conflict,
        digest_of(payload),
        unique.same_payload,
    )


def _called(task: str, key: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    try:
        return key(*args, **kwargs)
    except Exception as error:
        raise InvalidKey(
            f"task {task!r}: its unique= function failed: {type(error).__name__}: {error}; let it return a value for "
            "every call, or None where a job is not unique"
        ) from error


def digest_of(payload: bytes) -> bytes:
    return sha256(payload).digest()[:16]


class Holder(msgspec.Struct, frozen=True):
    """The job that has taken a unique key, as it stands now."""

    job: UUID
    digest: bytes
    until: Until
    expires_at: Instant | None
    state: State | None
    """`None`: retention has removed it. A window outlives its job."""
    has_started: bool
    """It has been claimed once, whatever became of it since."""

    def holds(self, now: Instant) -> bool:
        """Whether the key is still taken. Nobody has to give it back: what became of the job says so."""
        match self.until:
            case Until.WINDOW:
                return self.expires_at is not None and self.expires_at > now
            case Until.STARTED:
                return self.is_alive and not self.has_started
            case Until.DONE:
                return self.is_alive

    @property
    def waits(self) -> bool:
        return self.state is not None and self.state < State.RUNNING

    @property
    def is_alive(self) -> bool:
        return self.state is not None and not self.state.is_final


class Conflict(msgspec.Struct, frozen=True):
    """What became of a job whose unique key another one held."""

    outcome: Outcome
    holder: UUID
    differs: bool = False
    """Refused because the holder has another payload."""


class Admission(msgspec.Struct, frozen=True):
    """What an enqueue of jobs with unique keys comes to."""

    now: Instant
    stored: list[NewJob]
    taken: dict[bytes, NewJob]
    """The keys that stored jobs take, by their ids."""
    replaced: dict[UUID, UUID]
    """Waiting jobs that go, and the job for which each does."""
    conflicts: dict[UUID, Conflict]
    """By the id of the new job. What is not here was simply stored."""
    own: set[UUID]
    """Jobs that hold their key already: an earlier try has stored them, and with them everything it stored."""


def decide(wanted: UniqueKey, holder: Holder | None, now: Instant) -> Conflict | None:
    """What a job that asks for a key meets; `None`: the key is free."""
    if holder is None or not holder.holds(now):
        return None
    if wanted.same_payload and holder.digest != wanted.digest:
        return Conflict(Outcome.REFUSED, holder.job, differs=True)
    match wanted.on_conflict:
        case "return":
            return Conflict(Outcome.DUPLICATE, holder.job)
        case "reject":
            return Conflict(Outcome.REFUSED, holder.job)
        case "replace":
            return Conflict(Outcome.REPLACED, holder.job) if holder.waits else None


def admit(jobs: Sequence[NewJob], holders: Mapping[bytes, Holder], now: Instant) -> Admission:
    """Decide on jobs one after the other, as if each were enqueued alone."""
    known = dict(holders)
    # By their places in the batch, not by their ids: an id that is given twice is for the store to refuse.
    stored: dict[int, NewJob] = {}
    takers: dict[bytes, int] = {}
    admission = Admission(now, [], {}, {}, {}, set())
    for place, job in enumerate(jobs):
        if job.unique is None:
            stored[place] = job
            continue
        holder = known.get(job.unique.id)
        if holder is not None and holder.job == job.id and holder.state is not None:
            admission.own.add(job.id)
            continue
        conflict = decide(job.unique, holder, now)
        if conflict is not None:
            admission.conflicts[job.id] = conflict
            if not conflict.outcome.is_stored:
                continue
            if job.unique.id in takers:
                # Both are of this batch: the first was never there, and the last stands for it, for all it replaced and
                # for whoever was told that the first stands for them.
                del stored[takers[job.unique.id]]
                never = conflict.holder
                admission.conflicts[never] = Conflict(Outcome.DUPLICATE, never)
                for other, met in admission.conflicts.items():
                    if met.holder == never and not met.outcome.is_stored:
                        admission.conflicts[other] = msgspec.structs.replace(met, holder=job.id)
                admission.replaced.update({old: job.id for old, new in admission.replaced.items() if new == never})
            else:
                admission.replaced[conflict.holder] = job.id
        stored[place] = admission.taken[job.unique.id] = job
        takers[job.unique.id] = place
        key = job.unique
        known[key.id] = Holder(job.id, key.digest, key.until, key.expires_at(now), State.READY, has_started=False)
    admission.stored.extend(stored.values())
    return admission


NO_KEYS: Mapping[bytes, Holder] = MappingProxyType({})


class Ended(msgspec.Struct, frozen=True):
    """A job that has ended and is to be put back, with the unique key that it had when it was enqueued."""

    job: UUID
    key: bytes
    until: Until
    digest: bytes


class Readmission(msgspec.Struct, frozen=True):
    """What putting ended jobs with unique keys back comes to."""

    held: dict[UUID, UUID]
    """Those that stay as they are, and the job that holds the key of each."""
    replaced: dict[UUID, UUID]
    """Waiting jobs that go, and the job for which each does."""
    taken: dict[bytes, Ended]
    """The keys that those which go back hold from now on. None is a window's: that is counted from an enqueue."""
    back: dict[UUID, tuple[bytes, Holder]]
    """Those that go back, each with its key and with who holds that from now on."""


def checked_on_replay_conflict(on_conflict: str) -> OnReplayConflict:
    """What a replay is to do where another job holds the unique key, as it was given."""
    if on_conflict == "reject":
        return "reject"
    if on_conflict == "replace":
        return "replace"
    raise ConfigurationError(f"replay: on_conflict={shown(on_conflict)} is not 'reject' or 'replace'")


def readmit(
    jobs: Sequence[Ended],
    holders: Mapping[bytes, Holder],
    now: Instant,
    on_conflict: OnReplayConflict,
    earlier: Mapping[bytes, Holder] = NO_KEYS,
) -> Readmission:
    """Decide on ended jobs one after the other: none comes back beside another live job of its key.

    A job asks for its key again as if it were enqueued. A window is not begun again, but counts as held for as long as
    another job of its key is alive. Only a holder that waits can be replaced: one that runs is not stopped, and neither
    is one that the same action has put back, in this transaction or in an `earlier` one.
    """
    known = {**holders, **earlier}
    readmission = Readmission({}, {}, {}, {})
    for each in jobs:
        holder = known.get(each.key)
        is_held = holder is not None and (holder.holds(now) or (each.until is Until.WINDOW and holder.is_alive))
        if holder is not None and holder.job != each.job and is_held:
            if on_conflict == "reject" or not holder.waits or each.key in readmission.taken or each.key in earlier:
                readmission.held[each.job] = holder.job
                continue
            readmission.replaced[holder.job] = each.job
        elif holder is not None and holder.job == each.job and holder.until is Until.WINDOW and holder.holds(now):
            readmission.back[each.job] = each.key, holder
            continue  # its own window goes on
        readmission.taken[each.key] = each
        known[each.key] = Holder(each.job, each.digest, each.until, None, State.READY, has_started=False)
        readmission.back[each.job] = each.key, known[each.key]
    return readmission
