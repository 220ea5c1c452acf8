"""What every limit is, and what its gates keep: the words in which limits and the plan talk to each other.

A number of a limit may differ from key to key: given for those that are named, or brought along by jobs. A number that
jobs bring along is declared as a function of their context. Producers evaluate it at enqueue, and the newest one holds
for its key. What is stored of such a declaration is only that it comes from the job: claimers enforce what was brought,
and never call anything.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeGuard, TypeVar

import msgspec

from fairlane.clock import SECOND, Instant, duration_text, microseconds
from fairlane.errors import ConfigurationError, InvalidKey, InvalidPolicy
from fairlane.policy.keys import By, canonical_key

if TYPE_CHECKING:
    from fairlane.policy.limits import Rate

T = TypeVar("T")

UNBOUNDED = 1 << 31
MAX_COUNT = 1_000_000_000


class GateState:
    """The state of one limit for one key. Only the holder of the claim lock changes it."""

    __slots__ = ("in_flight", "memo", "tat", "waiting")

    def __init__(self, in_flight: int = 0, tat: Instant = 0, memo: Any = None, waiting: int = 0) -> None:
        self.in_flight = in_flight
        self.tat = tat
        """From when on the gate, with nothing in flight, says no more than a new one would: it may be forgotten then.
        For a rate, the theoretical arrival time of GCRA."""
        self.memo = memo
        """What a limit keeps besides, as JSON can hold it; `None` to begin with."""
        self.waiting = waiting
        """How many lanes and flows are parked on it."""


AT_REST = GateState()
"""The state of a gate that nothing has passed."""


class Ending(Protocol):
    """Claims of one lane that ended, as a release bell reports them."""

    @property
    def ended(self) -> int:
        """Claims that ran, however they ended."""

    @property
    def ran(self) -> int:
        """Their run time in microseconds, added up."""

    @property
    def unstarted(self) -> int:
        """Claims that were given back before they started."""

    @property
    def since(self) -> Instant:
        """When the oldest of those was claimed."""

    @property
    def failed(self) -> int:
        """Of those that ran, how many failed; all of them were claimed at `latest` then."""

    @property
    def neutral(self) -> int:
        """Of those that ran, how many say nothing about what they called: snoozed, cancelled."""

    @property
    def kept(self) -> int:
        """Of all these, how many have not ended their job: it is ready again, or will be, in its old place."""

    @property
    def signal(self) -> int | None:
        """What adaptive caps look at, in microseconds, added up for those that ran; `None`: their run time."""

    @property
    def latest(self) -> Instant:
        """When the last of those that ran was claimed."""


class Reason(StrEnum):
    """What holds a job. The codes are stable: scripts and dashboards name them."""

    SCHEDULED = "scheduled"
    """Its time has not come: a delay, a retry's backoff, a snooze."""
    PAUSED = "paused"
    """An operator has paused its queue, its key or its task."""
    MOVING = "moving"
    """Its key moves to another partition of its queue."""
    CONCURRENCY = "concurrency"
    """As many run as its limit allows."""
    RATE = "rate"
    """Its rate is used up for now."""
    ADAPTIVE = "adaptive"
    """As many run as the cap allows that is learned from how runs go."""
    BREAKER = "breaker"
    """Too many runs have failed; it is tried again later."""
    SEQUENCE = "sequence"
    """The job before it in its sequence has not ended."""
    LANE = "lane"
    """Others are ahead of it in its own lane."""
    TURN = "turn"
    """Others have their turn first."""
    GIVEN_BACK = "given_back"
    """It was claimed and given back before it ran: its worker stopped, or a broker refused it."""
    NEW = "new"
    """No claim has seen it yet."""
    SLOT = "slot"
    """Nothing holds it: it starts with the next free slot."""
    NO_WORKER = "no_worker"
    """No worker serves its queue."""
    BROKER = "broker"
    """The broker of the engine that its queue is forwarded to refuses messages."""
    PUBLISHED = "published"
    """It is at the broker of its engine, and no worker of the engine has begun it."""
    UNKNOWN_TASK = "unknown_task"
    """No task of the app has its name."""
    FORCED = "forced"
    """Nothing holds it: an operator wants it to start next, whatever its limits say."""
    RUNNING = "running"
    """It runs."""
    ENDED = "ended"
    """It has ended."""


class Why(msgspec.Struct, frozen=True):
    """What a gate without room says of itself."""

    reason: Reason
    used: float
    bound: float
    """`used` of `bound`: 5 of 5 in flight, 100 of 100 starts."""
    words: str = ""
    """What there is to say besides, such as "failing since …"."""


Source = Callable[[Mapping[str, Any]], float]
"""Gives the number of a job's key, from the job's context."""


class Origin(StrEnum):
    """Where a number that is in force came from."""

    POLICY = "policy"
    """It is declared."""
    JOB = "job"
    """The newest job of its key brought it along."""
    OVERRIDE = "override"
    """An operator has set it."""
    DEFAULT = "default"
    """Jobs are to bring it along, and none has yet: 1 holds until one does."""

    @property
    def words(self) -> str:
        """As people read it, behind the number; nothing for what the policy declares."""
        return _ORIGINS[self]


_ORIGINS = {
    Origin.POLICY: "",
    Origin.JOB: "from its newest job",
    Origin.OVERRIDE: "set by an operator",
    Origin.DEFAULT: "until a job brings a number",
}


FROM_JOB = {"from": "job"}
"""What is stored in place of a number that jobs bring along."""

UNTIL_BROUGHT = 1
"""What holds for a key none of whose jobs has brought a number: they were enqueued under a policy that did not ask for
one. The least with which they run."""

VALUES_LAST = 30 * 24 * 3_600 * SECOND
"""For how long a gate without jobs keeps the number that was brought to it."""


@dataclass(frozen=True, slots=True)
class FromJob:
    """A number that jobs bring along. Read from a stored policy it has no source, and says the same."""

    source: Source | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        return "<from the job>"


def from_job(number: object) -> FromJob | None:
    """What was given in place of a number, if that is a function of the job's context or stands for one."""
    if isinstance(number, FromJob):
        return number
    if number == FROM_JOB:
        return FromJob()
    return FromJob(number) if callable(number) else None


class Limit:
    """A bound with a scope. It keeps its state in gates and changes nothing else.

    A kind of limit is one class: it reads and writes its document, says in words what it does and why it holds a job
    back, and tells simulations and estimates how it goes on. What is said here is true of most kinds.

    A limit that is asked in the wrong order does no harm, but must never admit more than it says: `take` follows
    `room_at`, at the same instant, under the same lock.
    """

    __slots__ = ()

    kind: ClassVar[str]
    """What its document is told by."""
    parts: ClassVar[tuple[str, ...]] = ()
    """What its document holds beside its kind, its scope and its name: attributes that its constructor takes."""
    times: ClassVar[frozenset[str]] = frozenset()
    """Those of them that are times: whole microseconds here, and "1m" for people."""
    is_declared: ClassVar[bool] = True
    """Whether it belongs to policies. What operators and changes of partitions put in the way are gates too."""
    is_learning: ClassVar[bool] = False
    """Whether it shuts by what it learns from jobs that end."""
    is_of_starts: ClassVar[bool] = False
    """Whether it holds jobs back for how often others start, and not for what runs."""
    is_of_producers: ClassVar[bool] = False
    """Whether it counts who waits, for producers, and holds nobody back."""
    is_rung_by_arrivals: ClassVar[bool] = False
    """Whether jobs that become ready change its gates: see `arrive` and `resume`."""
    is_held_by_runs: ClassVar[bool] = True
    """Whether a job that runs takes up a place of another one."""
    is_foreseen: ClassVar[bool] = True
    """Whether estimates reckon with it: nobody knows when an operator lifts what he has put in the way."""

    is_shareable: ClassVar[bool] = False
    """Whether several queues can keep it together."""

    by: By
    name: str | None = None
    """What several queues share it by: one limit with one state. `None`: it is its queue's own."""
    counts_in_flight: bool = True
    """Whether it counts what runs: its gates are counted again when the policy changes."""
    named: Mapping[str, float] = {}
    """The keys that it holds for, each with its number, if it does not hold for all."""
    from_job: FromJob | None = None
    """Where its number comes from, if jobs bring it along."""

    @property
    def identity(self) -> str:
        """Names the limit's state. The bound itself is left out: changing it keeps what the gates hold."""
        return f"{self.kind}:{','.join(self.by)}"

    def _set(self, **values: object) -> None:
        """What a constructor has checked: limits are frozen."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    # What a claim asks.

    def room_at(self, gate: GateState, now: Instant) -> int:
        """How many jobs may start now."""
        raise NotImplementedError

    def take(self, gate: GateState, now: Instant, count: int) -> None:
        """Charge jobs that start."""
        gate.in_flight += count

    def postpone(self, gate: GateState, before: Instant, now: Instant, lag: int) -> None:
        """The jobs that were taken now start up to `lag` microseconds later: whoever counts their starts must find the
        limit kept. `before` is what `tat` was before them. A claimed job holds its place, started or not."""

    def free(self, gate: GateState, ending: Ending, now: Instant, held: int | None, task: str | None) -> bool:
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

    def carry_over(self, gate: GateState, now: Instant) -> None:
        """Make the state its own that this limit left when it had another bound. `in_flight` is counted anew."""

    @property
    def paced(self) -> Rate | None:
        """Itself, if its starts are worth planning one by one."""
        return None

    # What people ask.

    def why(self, gate: GateState, now: Instant) -> Why:
        """What a gate without room has to say."""
        raise NotImplementedError

    def describe(self, where: str) -> str:
        """In words, what it does, for each key or in the whole queue; without a full stop."""
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
        raise NotImplementedError

    # What a policy asks that has several of them.

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
        """Between which numbers its bound lies."""
        raise NotImplementedError

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

    def to_document(self) -> dict[str, Any]:
        """What is stored; `from_document` reads it back."""
        parts = {part: getattr(self, part) for part in self.parts}
        # A name is left out where there is none: what was stored before reads, and compares, as before.
        name = {} if self.name is None else {"name": self.name}
        return {"kind": self.kind, **parts, "by": list(self.by), **name}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """The limit of a document that was stored, or that people wrote: see `written`."""
        return cls(**cls.read(document))

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> dict[str, Any]:
        """What its constructor takes, from a document."""
        given = {part: document[part] for part in cls.parts if part in document}
        for part in cls.times & given.keys():
            if isinstance(given[part], int):
                given[part] = timedelta(microseconds=given[part])
        if missing := [part for part in cls.needed() if part not in given]:
            raise KeyError(missing[0])
        name = {"name": document["name"]} if document.get("name") is not None else {}
        return {**given, "by": document.get("by") or (), **name}

    @classmethod
    def needed(cls) -> tuple[str, ...]:
        """The parts that have no default."""
        return cls.parts[:1]

    def usual(self) -> dict[str, Any]:
        """What goes without saying in its document."""
        return {}

    def written(self) -> dict[str, Any]:
        """Its document as people write it: without what goes without saying."""
        document, usual = self.to_document(), self.usual()
        by = document.pop("by")
        said = {part: value for part, value in document.items() if part == "kind" or value != usual.get(part, _UNSAID)}
        for part in self.times & said.keys():
            said[part] = duration_text(said[part])
        return {**said, "by": by[0] if len(by) == 1 else by} if by else said


_UNSAID = object()


class Obstacle(Limit):
    """What policies do not declare: shut or open, and starts and ends leave its gates as they are."""

    __slots__ = ()

    is_declared = False
    is_held_by_runs = False
    counts_in_flight = False

    def take(self, gate: GateState, now: Instant, count: int) -> None: ...

    def free(self, gate: GateState, ending: Ending, now: Instant, held: int | None, task: str | None) -> bool:
        return False


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
