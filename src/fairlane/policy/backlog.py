"""Back-pressure on producers: how many jobs of a key may wait before its producers are told, or refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from fairlane.clock import Instant
from fairlane.errors import InvalidPolicy
from fairlane.parameters import known_options, shown
from fairlane.policy.gates import Ending, GateState, Reason, Why, as_whole, is_whole
from fairlane.policy.keys import By, key_words, normalize_by, repr_by
from fairlane.policy.limits import MAX_COUNT, UNBOUNDED

WhenFull = Literal["signal", "reject"]


@known_options
@dataclass(frozen=True, slots=True, init=False)
class Backlog:
    """At most `max` jobs of a key should wait, ready to start. Without `by`: of the whole queue.

    It holds back no start. `when_full` says what an enqueue beyond it meets: it is stored and told so ("signal"), or
    refused ("reject"). Its gates count what is ready, where those of other limits count what runs.

    >>> Backlog(1000, by="account")
    Backlog(1000, by='account', when_full='signal')
    """

    max: int
    by: By
    when_full: WhenFull

    counts_in_flight = False
    name = None
    """Queues do not share it."""

    def __init__(self, max: int, *, by: str | tuple[str, ...] | None = None, when_full: WhenFull = "signal") -> None:
        what = f"Backlog({shown(max)})"
        if not is_whole(max) or not 1 <= max <= MAX_COUNT:
            raise InvalidPolicy(f"{what}: the maximum is a whole number of waiting jobs, from 1 to {MAX_COUNT:,}")
        if when_full not in ("signal", "reject"):
            raise InvalidPolicy(f"{what}: when_full={shown(when_full)} is unknown; use 'signal' or 'reject'")
        object.__setattr__(self, "max", max)
        object.__setattr__(self, "by", normalize_by(what, by))
        object.__setattr__(self, "when_full", when_full)

    def __repr__(self) -> str:
        return f"Backlog({self.max}{repr_by(self.by)}, when_full={self.when_full!r})"

    @property
    def identity(self) -> str:
        return f"backlog:{','.join(self.by)}"

    def room_at(self, gate: GateState, now: Instant) -> int:
        """It holds nobody back who waits."""
        return UNBOUNDED

    def arrive(self, gate: GateState, count: int) -> None:
        """Jobs became ready, or (below zero) ceased to be."""
        gate.in_flight += count

    def take(self, gate: GateState, now: Instant, count: int) -> None:
        """What starts waits no more. Below zero until the bell is folded that tells of its arrival."""
        gate.in_flight -= count

    def postpone(self, gate: GateState, before: Instant, now: Instant, lag: int) -> None:
        """It does not look at when jobs start."""

    def free(self, gate: GateState, ending: Ending, now: Instant, held: int | None, task: str | None) -> bool:
        return False

    def opens_again_at(self, gate: GateState) -> Instant | None:
        return None

    def carry_over(self, gate: GateState, now: Instant) -> None:
        """What waits is counted anew; there is nothing else."""

    def why(self, gate: GateState, now: Instant) -> Why:
        return Why(Reason.SLOT, gate.in_flight, self.max)

    def with_bound(self, bound: float) -> Backlog:
        return Backlog(as_whole(bound), by=self.by, when_full=self.when_full)

    def to_document(self) -> dict[str, Any]:
        return {"kind": "backlog", "max": self.max, "by": list(self.by), "when_full": self.when_full}

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> Backlog:
        return cls(document["max"], by=tuple(document["by"]), when_full=document["when_full"])


class FullBacklog(msgspec.Struct, frozen=True):
    """What an enqueue met that was more than its backlog holds."""

    queue: str
    limit: str
    key: dict[str, str | None]
    """Empty for the whole queue."""
    ready: int
    """How many waited, this enqueue's own included up to then."""
    max: int

    def describe(self) -> str:
        key = key_words(self.key)
        whose = f"queue {self.queue!r}, {key}" if key else f"queue {self.queue!r}"
        return f"{whose}: {self.ready:,} jobs wait, and its backlog holds {self.max:,}"
