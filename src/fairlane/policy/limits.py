"""What every limit is; concurrency and rates, with the arithmetic of their gates.

A gate of these keeps two numbers: how many jobs are in flight, and (for rates) the theoretical arrival time of GCRA.
That of a rolling rate remembers its starts instead (see `take_in_window`). Each limit says how much room a gate has,
what a start costs, and when a shut gate opens. All in whole numbers: what a limit admits never depends on rounding.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from fractions import Fraction
from functools import cache, lru_cache, partial
from inspect import Parameter, signature
from typing import Any, ClassVar, Self, TypeGuard, TypeVar

from fairlane.clock import SECOND, Instant, duration_text, microseconds
from fairlane.errors import ConfigurationError, InvalidKey, InvalidPolicy
from fairlane.parameters import known_options, shown
from fairlane.policy.gates import (
    AT_REST,
    FROM_JOB,
    FromJob,
    GateState,
    Reason,
    Release,
    Source,
    Why,
    from_job,
    give_back_in_window,
    postpone_in_window,
    room_in_window,
    take_in_window,
    window_opens_at,
)
from fairlane.policy.keys import By, canonical_key, checked_name, normalize_by, repr_by, repr_name

T = TypeVar("T")

UNBOUNDED = 1 << 31
MAX_COUNT = 1_000_000_000
UNTIL_BROUGHT = 1
"""What holds for a key none of whose jobs has brought a number: they were enqueued under a policy that did not ask for
one. The least with which they run."""
LONGEST_INTERVAL = 100 * 365 * 86_400 * SECOND
SMOOTH = SECOND // 2
"""A bucket that holds less than this much of its rate is a smooth one: what it does not give at its time is lost."""
PLANNED_AHEAD = SECOND
"""How far ahead of their instants starts are claimed."""
HEARD_WITHIN = SECOND // 10
"""How long it takes, at most, until workers know of a change."""
LATEST_IN_WINDOW = SECOND // 20
LONGEST_DEBT = 4 * 10**18
"""Microseconds: an instant must stay what a database can hold."""


KINDS: dict[str, type[Limit]] = {}
"""Every kind of limit that a policy may have, by the `kind` of its document."""


class Limit(ABC):
    """A bound with a scope. It keeps its state in gates and changes nothing else.

    A kind of limit is one class: it reads and writes its document, says in words what it does and why it holds a job
    back, and shows simulations and estimates how it goes on. What is said here is true of most kinds.

    A limit that is asked in the wrong order does no harm, but must never admit more than it says: `take` follows
    `room_at`, at the same instant, under the same lock.
    """

    __slots__ = ()

    kind: ClassVar[str] = ""
    """The `kind` of its document. A class that has one is registered in `KINDS`."""
    times: ClassVar[frozenset[str]] = frozenset()
    """The fields that are durations: microseconds in Python, and "1m" in documents that people write."""
    is_declared: ClassVar[bool] = True
    """Whether policies declare it. Pauses and moves between partitions are gates too, and nobody declares them."""
    is_learning: ClassVar[bool] = False
    """Whether the results of jobs can shut it."""
    is_of_starts: ClassVar[bool] = False
    """Whether it limits how often jobs start, not how many run."""
    is_of_producers: ClassVar[bool] = False
    """Whether it counts waiting jobs, for producers, and never holds a job back."""
    is_woken_by_arrivals: ClassVar[bool] = False
    """Whether its gates change when jobs become ready: see `arrive` and `resume`."""
    is_held_by_runs: ClassVar[bool] = True
    """Whether a running job occupies a place that another job could have."""
    by: By
    name: str | None = None
    """The name under which several queues share it, with one state. `None`: it belongs to one queue."""
    counts_in_flight: bool = True
    """Whether it counts running jobs: its gates are recounted when the policy changes."""
    named: Mapping[str, float] = {}
    """A number for each key that it applies to; empty: it applies to all keys."""
    from_job: FromJob | None = None
    """The source of its number, if jobs bring it."""
    is_foreseen: bool = True
    """Whether estimates take it into account: nobody knows when an operator will lift a pause."""

    def __init_subclass__(cls) -> None:
        if cls.kind:
            KINDS[cls.kind] = cls

    @property
    def identity(self) -> str:
        """Names the limit's state. The bound itself is left out: changing it keeps what the gates hold."""
        return f"{self.kind}:{','.join(self.by)}"

    def _set(self, **values: object) -> None:
        """Set attributes in a constructor: limits are frozen."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    # What a claim asks.

    @abstractmethod
    def room_at(self, gate: GateState, now: Instant) -> int:
        """How many jobs may start now."""

    def take(self, gate: GateState, now: Instant, count: int) -> None:
        """Charge jobs that start."""
        gate.in_flight += count

    def postpone(self, gate: GateState, before: Instant, now: Instant, lag: int) -> None:  # noqa: B027
        """The jobs that were taken now start up to `lag` microseconds later: whoever counts their starts must find the
        limit kept. `before` is what `tat` was before them. A claimed job holds its place, started or not."""

    def free(self, gate: GateState, ending: Release, now: Instant, held: int | None, task: str | None) -> bool:
        """Take note of claims of one task that ended; say whether the gate has changed.

        `held` is for how long those that never started were held, in microseconds; `None` where another policy had
        charged them.
        """
        left = gate.in_flight - ending.ended - ending.unstarted
        gate.in_flight = left if left > 0 else 0
        return True

    def arrive(self, gate: GateState, count: int) -> bool:
        """Jobs became ready, or (below zero) ceased to be; say whether the gate has changed."""
        return False

    def resume(self, gate: GateState, count: int) -> bool:
        """Jobs that had kept their place are ready again, or will never be; say whether the gate has changed."""
        return False

    def opens_again_at(self, gate: GateState) -> Instant | None:
        """For a gate without room: the first instant at which it has some by itself; `None`: not by time."""
        return None

    def carry_over(self, gate: GateState, now: Instant) -> None:  # noqa: B027
        """Make the state its own that this limit left when it had another bound. `in_flight` is counted anew."""

    @property
    def paced(self) -> Rate | None:
        """Itself, if its starts are worth planning one by one."""
        return None

    # What people ask.

    @abstractmethod
    def why(self, gate: GateState, now: Instant) -> Why:
        """Why a gate without room holds jobs back."""

    def describe(self, where: str) -> str:
        """What it does, in one sentence without the full stop; `where`: "for each account", "in the whole queue"."""
        return repr(self)

    # Other numbers for single keys.

    def at(self, values: Sequence[str | None], value: float | None) -> Self | None:
        """What holds at one key, with `value` in place of the declared number if there is one; `None`: nothing."""
        if value is None and self.from_job is not None:
            value = UNTIL_BROUGHT
        elif value is None:
            if not self.named:
                return self
            value = None if values[0] is None else self.named.get(values[0])
        return None if value is None else self.with_bound(value)

    def with_bound(self, bound: float) -> Self:
        """The same limit with another number, for an operator who overrides it; refused where it makes no sense."""
        found: Self = _with_bound(self, bound)
        return found

    def document_with(self, bound: float) -> dict[str, Any]:
        """Its document with another number."""
        return {**self.to_document(), self.parts()[0]: as_whole(bound)}

    # What a policy asks that has several of them.

    @property
    def is_shareable(self) -> bool:
        """Whether several queues can share it: its kind may have a name, and it has one number for all keys."""
        return "name" in signature(type(self)).parameters and self.has_one_number

    @property
    def has_one_number(self) -> bool:
        """Whether it has a fixed number, the same for all keys."""
        return not self.named and self.from_job is None

    @property
    def counted(self) -> str | None:
        """What it counts; `None`: nothing that can be compared with another limit of its scope."""
        return None

    @property
    def least_and_most(self) -> tuple[int, int]:
        """Between which numbers its bound lies: of most kinds it stays where it is."""
        bound = int(self.why(AT_REST, 0).bound)
        return bound, bound

    def never_binds(self, beside: Any) -> bool:
        """Whether another limit that counts the same, for the same keys, always binds before it."""
        return bool(self.least_and_most[0] >= beside.least_and_most[1])

    # How it goes on: for simulations and estimates.

    def nth_at(self, gate: GateState, now: Instant, nth: int, turn: int) -> Instant | None:
        """When the `nth` job from now may start, if each starts as soon as this limit lets it and its place is free
        again a `turn` later. What runs now is taken to have just begun. `None`: not by time, nor by what runs."""
        place, later = self.round_of(gate, now, nth, turn)
        if self.counts_in_flight and self.why(gate, now).bound > 0:
            return now + later
        first = self._place_at(gate, now, place)
        return None if first is None else first + later

    def round_of(self, gate: GateState, now: Instant, nth: int, turn: int) -> tuple[int, int]:
        """Places of a cap come round with every run: which of them the `nth` job takes, and how much later than the
        first that took it."""
        if self.counts_in_flight and (places := int(self.why(gate, now).bound)) > 0:
            waiting = nth - max(0, places - gate.in_flight)
            if waiting > 0:
                rounds, place = divmod(waiting - 1, places)
                return place + 1, (rounds + 1) * turn
        return nth, 0

    def _place_at(self, gate: GateState, now: Instant, place: int) -> Instant | None:
        """When a place is free for the first time."""
        opens = now if self.room_at(gate, now) > 0 else self.opens_again_at(gate)
        return None if opens is None else max(now, opens)

    def take_many(self, gate: GateState, now: Instant, count: int, turn: int) -> tuple[Instant, int] | None:
        """Charge a bundle of jobs, one after the other where there is no room for all. Returns until when it holds how
        many places, if runs hold any."""
        places = min(count, self.room_at(gate, now))
        self.take(gate, now, places)
        return (now + -(-count // places) * turn, places) if self.counts_in_flight else None

    # Its document.

    @classmethod
    @cache
    def parts(cls) -> tuple[str, ...]:
        """Fields of its document besides kind, scope and name: the other arguments of its constructor, which are
        attributes too. The first is its number."""
        names = signature(cls).parameters
        return tuple(each for each in names if each not in ("by", "name", "rolling"))

    def to_document(self) -> dict[str, Any]:
        """What is stored; `from_document` reads it back."""
        parts = {part: getattr(self, part) for part in self.parts()}
        if not self.has_one_number:
            parts[self.parts()[0]] = FROM_JOB if self.from_job else dict(self.named)
        # A name is left out where there is none: what was stored before reads, and compares, as before.
        name = {} if self.name is None else {"name": self.name}
        return {"kind": self.kind, **parts, "by": list(self.by), **name}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """Read a stored document, or one that people wrote (see `written`)."""
        return cls(**cls.read(document))

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> dict[str, Any]:
        """The constructor arguments in a document."""
        given = {part: document[part] for part in cls.parts() if part in document}
        for part in cls.times & given.keys():
            if isinstance(given[part], int):
                given[part] = timedelta(microseconds=given[part])
        parameters = signature(cls).parameters
        if missing := [
            each for each in cls.parts() if each not in given and parameters[each].default is Parameter.empty
        ]:
            raise KeyError(missing[0])
        name = {"name": document["name"]} if document.get("name") is not None else {}
        return {**given, "by": document.get("by") or (), **name}

    def written(self) -> dict[str, Any]:
        """Its document as people write it: without what it would have anyway."""
        document = self.to_document()
        by = document.pop("by")
        for part in self.parts():
            rest = {name: value for name, value in document.items() if name != part}
            with suppress(KeyError):
                if self.from_document({**rest, "by": by}) == self:
                    document = rest
        for part in self.times & document.keys():
            document[part] = duration_text(document[part])
        return {**document, "by": by[0] if len(by) == 1 else by} if by else document


@lru_cache(maxsize=4_096, typed=True)
def _with_bound(limit: Limit, bound: float) -> Any:
    return limit.from_document(limit.document_with(bound))


class Obstacle(Limit):
    """What policies do not declare: where lanes wait whose key is paused, or moves to another partition. It is shut, or
    was and is open again. It counts nothing: starts and ends leave its gates as they are."""

    __slots__ = ("_is_shut", "by", "is_foreseen", "reason")

    is_declared = False
    is_held_by_runs = False
    counts_in_flight = False

    def __init__(self, reason: Reason, by: By = (), *, is_shut: bool = True) -> None:
        self.reason = reason
        self.by = by
        self.is_foreseen = reason is not Reason.PAUSED
        self._is_shut = is_shut

    def __repr__(self) -> str:
        return f"Obstacle({self.reason}, {self.by!r}, is_shut={self._is_shut})"

    def room_at(self, gate: GateState, now: Instant) -> int:
        return 0 if self._is_shut else UNBOUNDED

    def take(self, gate: GateState, now: Instant, count: int) -> None: ...

    def free(self, gate: GateState, ending: Release, now: Instant, held: int | None, task: str | None) -> bool:
        return False

    def why(self, gate: GateState, now: Instant) -> Why:
        words = "its key moves to another partition of the queue, and starts there"
        return Why(self.reason, 0, 0, words if self.reason is Reason.MOVING else "")

    def describe(self, where: str) -> str:
        what = "a pause" if self.reason is Reason.PAUSED else "a move to another partition"
        return f"{what} by {', '.join(self.by)}" if self.by else f"{what} of the queue"


@known_options
@dataclass(frozen=True, slots=True, init=False)
class Concurrency(Limit):
    """Never more than `max` jobs in flight per key, over the whole fleet. Without `by`: in the whole queue.

    >>> Concurrency(5, by="account")
    Concurrency(5, by='account')
    >>> Concurrency({"acme": 5, "globex": 2}, by="account")  # other accounts: no limit
    Concurrency({'acme': 5, 'globex': 2}, by='account')
    >>> Concurrency(50, name="gpu")  # in all queues together that name it
    Concurrency(50, name='gpu')
    """

    max: int
    """0 where it is not the same for all keys: `at` says what holds for one."""
    by: By
    named: Mapping[str, int] = field(hash=False)
    from_job: FromJob | None
    name: str | None

    kind = "concurrency"
    counted = "in flight"

    def __init__(
        self,
        max: int | Mapping[Any, int] | Source | FromJob,
        *,
        by: str | tuple[str, ...] | None = None,
        name: str | None = None,
    ) -> None:
        brought = from_job(max)
        what = f"Concurrency({brought or shown(max)})"
        names = normalize_by(what, by)
        named: dict[str, int] = {}
        checked = partial(checked_count, what, "max", least=0, reason="0 stops its keys")
        if isinstance(max, Mapping) and brought is None:
            named = named_numbers(what, names, max, checked)
        self._set(
            max=0 if named or brought else checked(max),
            by=names,
            named=named,
            from_job=brought,
            name=_shareable(what, name, named or brought),
        )

    def __repr__(self) -> str:
        number = self.from_job or self.named or self.max
        return f"Concurrency({number}{repr_by(self.by)}{repr_name(self.name)})"

    def room_at(self, gate: GateState, now: Instant) -> int:
        return self.max - gate.in_flight if gate.in_flight < self.max else 0

    def why(self, gate: GateState, now: Instant) -> Why:
        return Why(Reason.CONCURRENCY, gate.in_flight, self.max)

    def describe(self, where: str) -> str:
        if self.from_job is not None:
            return f"As many at the same time {where} as its jobs say"
        if self.named:
            return f"At the same time {where}: {number_words(self.named)}"
        return f"At most {self.max:,} at the same time {where}"


def checked_count(what: str, name: str, value: object, least: int = 1, most: int = MAX_COUNT, reason: str = "") -> int:
    """A number of jobs that a policy was given; `what` and `name` say in errors where it stands."""
    if not is_whole(value) or not least <= value <= most:
        because = f": {reason}" if reason else ""
        raise InvalidPolicy(f"{what}: {name}={shown(value)} is not a whole number from {least:,} to {most:,}{because}")
    return value


@known_options
@dataclass(frozen=True, slots=True, init=False)
class Rate(Limit):
    """At most `burst + limit·t/per` starts in any time t, per key (GCRA). `burst` defaults to `limit`.

    With `rolling=True`: never more than `limit` starts in any window of length `per`, exactly.

    >>> Rate(100, per="1m", by="endpoint")
    Rate(100, per='60s', burst=100, by='endpoint')
    >>> Rate(0.5, per="1s").burst  # one job every two seconds
    1
    >>> Rate(100, per="1m", by="endpoint", rolling=True)
    Rate(100, per='60s', rolling=True, by='endpoint')
    >>> Rate({"acme": 10}, per="1s", by="account")  # other accounts: no limit
    Rate({'acme': 10}, per='1s', by='account')
    """

    limit: float
    """0 where it is not the same for all keys: `at` says what holds for one. So is `burst` if each has its own."""
    per: int
    burst: int
    by: By
    name: str | None
    interval: int
    rolling: bool
    named: Mapping[str, float] = field(hash=False)
    from_job: FromJob | None

    kind = "rate"
    times = frozenset({"per"})
    is_of_starts = True
    is_held_by_runs = False
    counts_in_flight = False

    def __init__(
        self,
        limit: float | Mapping[Any, float] | Source | FromJob,
        *,
        per: timedelta | str | float,
        burst: int | None = None,
        by: str | tuple[str, ...] | None = None,
        rolling: bool = False,
        name: str | None = None,
    ) -> None:
        brought = from_job(limit)
        what = f"Rate({brought or shown(limit)}, per={shown(per)}{', rolling=True' if rolling is True else ''})"
        names = normalize_by(what, by)
        if not isinstance(rolling, bool):
            raise InvalidPolicy(f"{what}: rolling={shown(rolling)} is neither True nor False; give one of them")
        window = duration_above_zero(what, "per", per)
        if burst is not None and rolling:
            raise InvalidPolicy(
                f"{what}: burst={shown(burst)} has no meaning in a rolling window, which holds `limit` jobs however "
                "they come"
            )
        if burst is not None:
            checked_count(what, "burst", burst)
        named: dict[str, float] = {}
        number, interval, allowed = 0.0, 0, burst or 0
        if isinstance(limit, Mapping) and brought is None:
            named = named_numbers(what, names, limit, lambda number: _checked_limit(what, number, window, rolling))
        elif brought is None:
            number = _checked_limit(what, limit, window, rolling)
            # Rounded up: the rate that is kept is never above the one that was asked for.
            interval = math.ceil(Fraction(window) / Fraction(str(number)))
            allowed = _default_burst(number) if burst is None else burst
            if interval * allowed > LONGEST_DEBT:
                raise InvalidPolicy(f"{what}: burst={allowed} would take longer to refill than any clock can count")
        self._set(
            limit=number,
            per=window,
            burst=allowed,
            by=names,
            name=_shareable(what, name, named or brought),
            interval=interval,
            rolling=rolling,
            named=named,
            from_job=brought,
        )

    def __repr__(self) -> str:
        number = self.from_job or self.named or f"{self.limit:g}"
        how = ", rolling=True" if self.rolling else f", burst={self.burst}" if self.burst else ""
        return f"Rate({number}, per='{self.per / SECOND:g}s'{how}{repr_by(self.by)}{repr_name(self.name)})"

    @property
    def identity(self) -> str:
        """Names the limit's state. `per` takes part, so that 10 a minute and 600 an hour on one key stay apart."""
        return f"{'rolling' if self.rolling else 'rate'}/{self.per / SECOND:g}s:{','.join(self.by)}"

    def room(self, tat: Instant, now: Instant) -> int:
        """How many jobs may start now."""
        if tat <= now:
            return self.burst
        room = self.burst + (now - tat) // self.interval
        return room if room > 0 else 0

    def charged(self, tat: Instant, now: Instant, count: int) -> Instant:
        return (tat if tat > now else now) + count * self.interval

    def refunded(self, tat: Instant, count: int, held: int = 0) -> Instant:
        """Give back what never started, `held` microseconds after it was charged.

        The bucket has refilled for that long; had it been full, as much would have been lost. Given back whole, a
        token that was held would let one job too many start.
        """
        return tat - max(0, count * self.interval - held)

    def carried_over(self, tat: Instant, now: Instant) -> Instant:
        """The state of this limit when it had another bound: a bucket can be empty, it cannot be emptier than that."""
        return min(tat, now + self.burst * self.interval)

    def opens_at(self, tat: Instant) -> Instant | None:
        """The first instant at which one more job may start."""
        return tat + self.interval - self.burst * self.interval

    @property
    def paced(self) -> Rate | None:
        return self if self.is_smooth else None

    @property
    def is_smooth(self) -> bool:
        """Whether its starts are worth planning one by one: a start that comes late is never made up for."""
        return self.rolling or (self.burst - 1) * self.interval < SMOOTH

    @property
    def slack(self) -> int:
        """How many microseconds after its planned instant a start may be made, and be counted as made at it.

        An eighth of the distance between two. The last start of a claim may be late by it, and may have come that much
        too soon after the one before: whoever counts starts sees a quarter of a job too many, at most. A rolling window
        has no such tolerance, and counts every planned start from the last instant at which it may be made."""
        return min(LATEST_IN_WINDOW, self.per // 50) if self.rolling else self.interval // 8

    def starts_at(self, gate: GateState, now: Instant) -> Instant:
        """The first instant from now on at which a job may start."""
        opens = None if self.room_at(gate, now) > 0 else self.opens_again_at(gate)
        return now if opens is None else max(now, opens)

    def room_by(self, gate: GateState, now: Instant, until: Instant) -> int:
        """How many jobs may start from now until then, each at its own instant."""
        if self.rolling:
            return room_in_window(gate, self.burst, self.per, until)
        return max(0, (until + self.burst * self.interval - max(gate.tat, now)) // self.interval)

    def take_at(self, gate: GateState, at: Instant, now: Instant) -> None:
        """Charge a job that is to start at an instant, which is not before now."""
        if self.rolling:
            take_in_window(gate, self.per, now, 1, at + self.slack)
        else:
            gate.tat = self.charged(gate.tat, at, 1)

    def room_at(self, gate: GateState, now: Instant) -> int:
        if self.rolling:
            return room_in_window(gate, self.burst, self.per, now)
        return self.room(gate.tat, now)

    def take(self, gate: GateState, now: Instant, count: int) -> None:
        if self.rolling:
            take_in_window(gate, self.per, now, count)
        else:
            gate.tat = self.charged(gate.tat, now, count)

    def postpone(self, gate: GateState, before: Instant, now: Instant, lag: int) -> None:
        """As if they had been taken when they start. A bucket that is not full gives its tokens later anyway."""
        if self.rolling:
            postpone_in_window(gate, self.per, now, lag)
        else:
            later = now + lag - (before if before > now else now)
            if later > 0:
                gate.tat += later

    def free(self, gate: GateState, ending: Release, now: Instant, held: int | None, task: str | None) -> bool:
        """Tokens come back for what never started, unless they were never taken here."""
        if not ending.unstarted or held is None:
            return False
        if self.rolling:
            return give_back_in_window(gate, self.per, now, ending.unstarted, now - held)
        if gate.memo is not None and ending.since <= gate.memo["changed"] + PLANNED_AHEAD:
            return False  # planned by another number, and given back when that changed
        refunded = self.refunded(gate.tat, ending.unstarted, held)
        if self.is_smooth and (ending.since > now or gate.tat > now + self.burst * self.interval):
            # Starts are planned for later.
            if ending.since + (self.burst + ending.unstarted - 1) * self.interval + self.slack < gate.tat:
                # Others start after them, at instants that stay as they are: what lies between is gone.
                return False
            # Nothing opens before the first of them would have, though they were charged by another number.
            refunded = max(refunded, min(gate.tat, ending.since + (self.burst - 1) * self.interval))
        gate.tat = refunded
        return True

    def opens_again_at(self, gate: GateState) -> Instant | None:
        return window_opens_at(gate, self.burst, self.per) if self.rolling else self.opens_at(gate.tat)

    def carry_over(self, gate: GateState, now: Instant) -> None:
        """What a rolling window remembers are facts, whatever the bound is. Starts that were planned by another number
        are void: a bucket no longer counts them, so that it must not take them back either."""
        if self.rolling:
            return
        carried = self.carried_over(gate.tat, now)
        if self.is_smooth:
            # Until every worker has heard of it, some of them may still start.
            carried = max(carried, min(gate.tat, now + HEARD_WITHIN))
        gate.tat = carried
        gate.memo = {"changed": now} if self.is_smooth else None

    def why(self, gate: GateState, now: Instant) -> Why:
        return Why(
            Reason.RATE, self.burst - self.room_at(gate, now), self.burst, f"{self.limit:g} per {_time(self.per)}"
        )

    def describe(self, where: str) -> str:
        per = time_words(self.per)
        if not self.has_one_number:
            said = number_words(self.named) if self.named else "as its jobs say"
            return f"So many starts per {per} {where}: {said}"
        if self.rolling:
            return f"Never more than {self.limit:g} starts within any {per} {where}"
        return f"At most {self.limit:g} starts per {per} {where}, {self.burst:g} at once"

    def document_with(self, bound: float) -> dict[str, Any]:
        document = Limit.document_with(self, bound)
        if self.burst == (_default_burst(self.limit) if self.limit else 0):
            document.pop("burst", None)  # it was left to the number, and goes with it
        return document

    @property
    def counted(self) -> str:
        return self.identity.partition(":")[0]

    def never_binds(self, beside: Rate) -> bool:
        # With a higher limit and a smaller burst it binds at first.
        return self.limit >= beside.limit and (self.rolling or self.burst >= beside.burst)

    def round_of(self, gate: GateState, now: Instant, nth: int, turn: int) -> tuple[int, int]:
        """Places of a window come round with every window."""
        if not self.rolling:
            return nth, 0
        rounds, place = divmod(nth - 1, self.burst)
        return place + 1, rounds * self._round

    @property
    def _round(self) -> int:
        # A planned start is counted from the last instant at which it may be made.
        return self.per + self.slack

    def _place_at(self, gate: GateState, now: Instant, place: int) -> Instant:
        if not self.rolling:
            return max(now, max(gate.tat, now) + (place - self.burst) * self.interval)
        # A start takes the place of one that leaves the window.
        starts: list[list[int]] = gate.memo["starts"] if gate.memo else []
        leaving = [(at + self.per, count) for at, count in starts if at + self.per > now]
        room = self.burst - sum(count for _, count in leaving)
        for at, count in leaving:
            if place <= room:
                break
            now, room = at, room + count
        return now

    def take_many(self, gate: GateState, now: Instant, count: int, turn: int) -> None:
        if not self.rolling:
            self.take(gate, now, count)
            return
        places = min(count, self.room_at(gate, now))
        last = now + (-(-count // places) - 1) * self._round
        take_in_window(gate, self.per, now, places, last)

    def to_document(self) -> dict[str, Any]:
        document = {**Limit.to_document(self), "burst": self.burst or None}
        if self.rolling:
            # A kind of its own: a version that does not know it must refuse it, not keep a bucket instead.
            document["kind"] = "rolling_rate"
            del document["burst"]
        return document

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Rate:
        return cls(**cls.read(document), rolling=document["kind"] == "rolling_rate")


KINDS["rolling_rate"] = Rate


def _default_burst(limit: float) -> int:
    return max(1, math.floor(limit))


def _checked_limit(what: str, limit: object, window: int, rolling: bool) -> float:
    if not is_number(limit):
        raise InvalidPolicy(f"{what}: the rate is a number of jobs, such as 100 or 0.5")
    if limit <= 0:
        raise InvalidPolicy(
            f"{what} would never admit a job; give a rate above 0, or stop the key with Concurrency(0, by=…)"
        )
    if rolling and not isinstance(limit, int):
        raise InvalidPolicy(f"{what}: a rolling window counts whole jobs; give a whole number, or leave rolling out")
    if Fraction(window) / Fraction(str(limit)) > LONGEST_INTERVAL:
        raise InvalidPolicy(f"{what} is less than one job in a hundred years; stop the key instead: fairlane pause")
    if limit > window:
        raise InvalidPolicy(f"{what}: more than one job a microsecond is no limit at all; remove it")
    return limit


def _shareable(what: str, name: str | None, differs: object) -> str | None:
    """The name by which queues share it. One number for all keys: queues would not agree on any other."""
    if name is not None and differs:
        raise InvalidPolicy(
            f"{what}: a limit that queues share by name={shown(name)} has one number for all keys; give a number, "
            "or leave the name out"
        )
    return checked_name(what, name)


def _time(amount: int) -> str:
    seconds = amount / SECOND
    return f"{seconds:g} s" if seconds < 120 else f"{seconds / 60:g} min"


def read_limit(document: Mapping[str, Any]) -> Limit:
    """The limit that `to_document` or `written` wrote."""
    kind = KINDS.get(document["kind"])
    if kind is None:
        known = ", ".join(sorted(KINDS))
        raise InvalidPolicy(
            f"a limit of kind {document['kind']!r} is not known to this version, which knows {known}; "
            "if the policy is stored so, upgrade fairlane here, or apply a policy without it"
        )
    return kind.from_document(document)


def named_numbers(what: str, by: By, given: Mapping[Any, Any], checked: Callable[[object], T]) -> dict[str, T]:
    """A number for each key that is named, in canonical form; `what` names the policy in errors."""
    if len(by) != 1:
        raise InvalidPolicy(f"{what}: numbers for named keys need a single key in `by`")
    if not given:
        raise InvalidPolicy(f"{what}: it names no key, so it would hold for none; name some, or leave it out")
    numbers: dict[str, T] = {}
    for value, number in given.items():
        try:
            key = canonical_key(by[0], value)
        except InvalidKey as error:
            raise InvalidPolicy(f"{what}: {error}") from None
        if key is None:
            raise InvalidPolicy(f"{what}: None cannot be named; it is what jobs without a value share")
        if key in numbers:
            raise InvalidPolicy(f"{what}: the number of {key!r} is given twice")
        numbers[key] = checked(number)
    return numbers


def is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether this is a number that a database can hold: none that is infinite, or too large for a float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def as_whole(number: float) -> Any:
    """A number that operators may have given with a fraction: 4.0 is 4, and 4.5 is left for its limit to refuse."""
    return int(number) if number == int(number) else number


def number_words(named: Mapping[str, float]) -> str:
    """`5 for acme, 2 for globex`."""
    return ", ".join(f"{value:g} for {key}" for key, value in named.items())


def time_words(microseconds: int) -> str:
    """`minute`, or `30 seconds`, as it stands behind "per"."""
    seconds = microseconds / SECOND
    for size, unit in ((86_400, "day"), (3_600, "hour"), (60, "minute"), (1, "second")):
        if seconds >= size and seconds % size == 0:
            count = int(seconds // size)
            return unit if count == 1 else f"{count} {unit}s"
    return f"{seconds:g} seconds"


def duration_above_zero(what: str, name: str, value: timedelta | str | float) -> int:
    """A duration that a policy was given, in microseconds; `what` and `name` say in errors where it stands."""
    try:
        found = microseconds(value)
    except ConfigurationError as error:
        raise InvalidPolicy(f"{what}: {name}: {error}") from None
    if found <= 0:
        raise InvalidPolicy(f"{what}: `{name}` is a time above 0, such as '500ms' or '1m'")
    return found


SMOOTHING = 0.1
"""The weight of one run in a moving average."""


def smoothed(average: float, observed: float, runs: int, weight: float = SMOOTHING) -> float:
    """A moving average of run time, after `runs` more of the mean length `observed`."""
    if average <= 0.0:
        return observed
    if runs == 1:
        return average + weight * (observed - average)
    return average + (1.0 - (1.0 - weight) ** runs) * (observed - average)
