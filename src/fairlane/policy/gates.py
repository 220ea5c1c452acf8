"""What a gate keeps, and what ends at it: the words in which limits and the plan talk to each other."""

from __future__ import annotations

import math
from datetime import timedelta
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from fairlane.clock import Instant, microseconds
from fairlane.errors import ConfigurationError, InvalidPolicy
from fairlane.policy.keys import By


class GateState(Protocol):
    """The state of one limit for one key. Only the holder of the claim lock changes it."""

    in_flight: int
    tat: Instant
    """From when on the gate, with nothing in flight, says no more than a new one would: it may be forgotten then. For a
    rate, the theoretical arrival time of GCRA."""
    memo: Any
    """What a limit keeps besides, as JSON can hold it; `None` to begin with."""
    waiting: int
    """How many lanes and flows are parked on it."""


class _AtRest:
    """The state of a gate that nothing has passed."""

    __slots__ = ("in_flight", "memo", "tat", "waiting")

    def __init__(self) -> None:
        self.in_flight: int = 0
        self.tat: Instant = 0
        self.memo: Any = None
        self.waiting: int = 0


AT_REST: GateState = _AtRest()


class Ending(Protocol):
    """Claims of one lane that ended, as a release bell reports them."""

    @property
    def ended(self) -> int:
        """Claims that ran, however they ended."""
        ...

    @property
    def ran(self) -> int:
        """Their run time in microseconds, added up."""
        ...

    @property
    def unstarted(self) -> int:
        """Claims that were given back before they started."""
        ...

    @property
    def since(self) -> Instant:
        """When the oldest of those was claimed."""
        ...

    @property
    def failed(self) -> int:
        """Of those that ran, how many failed; all of them were claimed at `latest` then."""
        ...

    @property
    def neutral(self) -> int:
        """Of those that ran, how many say nothing about what they called: snoozed, cancelled."""
        ...

    @property
    def kept(self) -> int:
        """Of all these, how many have not ended their job: it is ready again, or will be, in its old place."""
        ...

    @property
    def signal(self) -> int | None:
        """What adaptive caps look at, in microseconds, added up for those that ran; `None`: their run time."""
        ...

    @property
    def latest(self) -> Instant:
        """When the last of those that ran was claimed."""
        ...


class Limit(Protocol):
    """A bound with a scope. It keeps its state in gates and changes nothing else.

    A limit that is asked in the wrong order does no harm, but must never admit more than it says: `take` follows
    `room`, at the same instant, under the same lock.
    """

    @property
    def by(self) -> By: ...

    @property
    def name(self) -> str | None:
        """What several queues share it by: one limit with one state. `None`: it is its queue's own."""
        ...

    @property
    def identity(self) -> str:
        """Names the limit's state. The bound itself is left out: changing it keeps what the gates hold."""
        ...

    @property
    def counts_in_flight(self) -> bool:
        """Whether it counts what runs: its gates are counted again when the policy changes."""
        ...

    def room_at(self, gate: GateState, now: Instant) -> int:
        """How many jobs may start now."""
        ...

    def take(self, gate: GateState, now: Instant, count: int) -> None:
        """Charge jobs that start."""
        ...

    def postpone(self, gate: GateState, before: Instant, now: Instant, lag: int) -> None:
        """The jobs that were taken now start up to `lag` microseconds later: whoever counts their starts must find the
        limit kept. `before` is what `tat` was before them."""
        ...

    def free(self, gate: GateState, ending: Ending, now: Instant, held: int | None, task: str | None) -> bool:
        """Take note of claims of one task that ended; say whether the gate has changed.

        `held` is for how long those that never started were held, in microseconds; `None` where another policy had
        charged them.
        """
        ...

    def opens_again_at(self, gate: GateState) -> Instant | None:
        """For a gate without room: the first instant at which it has some by itself; `None`: not by time."""
        ...

    def carry_over(self, gate: GateState, now: Instant) -> None:
        """Make the state its own that this limit left when it had another bound. `in_flight` is counted anew."""
        ...

    def why(self, gate: GateState, now: Instant) -> Why:
        """What a gate without room has to say."""
        ...

    def with_bound(self, bound: float) -> Limit:
        """The same limit with another number, for an operator who overrides it; refused where it makes no sense."""
        ...

    def to_document(self) -> dict[str, Any]: ...


class CountsNothing:
    """What limits have in common that are only shut or open: starts and ends leave their gates as they are."""

    __slots__ = ()

    counts_in_flight = False
    name = None

    def take(self, gate: GateState, now: Instant, count: int) -> None: ...

    def postpone(self, gate: GateState, before: Instant, now: Instant, lag: int) -> None: ...

    def free(self, gate: GateState, ending: Ending, now: Instant, held: int | None, task: str | None) -> bool:
        return False

    def opens_again_at(self, gate: GateState) -> Instant | None:
        return None

    def carry_over(self, gate: GateState, now: Instant) -> None: ...


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


def is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    return is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def as_whole(number: float) -> Any:
    """A number that operators may have given with a fraction: 4.0 is 4, and 4.5 is left for its limit to refuse."""
    return int(number) if number == int(number) else number


def duration_above_zero(what: str, name: str, value: timedelta | str | float) -> int:
    """A duration that a policy was given, in microseconds; `what` and `name` say in errors where it stands."""
    try:
        found = microseconds(value)
    except ConfigurationError as error:
        raise InvalidPolicy(f"{what}: {name}: {error}") from None
    if found <= 0:
        raise InvalidPolicy(f"{what}: `{name}` is a time above 0, such as '500ms' or '1m'")
    return found
