"""Limits: what they allow, and the arithmetic of their gates.

A gate of these keeps two numbers: how many jobs are in flight, and (for rates) the theoretical arrival time of GCRA.
Each limit says how much room a gate has, what a start costs, and when a shut gate opens. All in whole numbers: what a
limit admits never depends on rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from fractions import Fraction
from typing import Any

from fairlane.clock import SECOND, Instant, microseconds
from fairlane.errors import ConfigurationError, InvalidPolicy
from fairlane.policy.by import By, normalize_by, repr_by
from fairlane.policy.checking import is_number, is_whole
from fairlane.policy.gates import Ending, GateState
from fairlane.policy.reasons import Reason, Why

__all__ = ["Concurrency", "Rate"]

UNBOUNDED = 1 << 31
MAX_COUNT = 1_000_000_000


@dataclass(frozen=True, slots=True, init=False)
class Concurrency:
    """Never more than `max` jobs in flight per key, over the whole fleet. Without `by`: in the whole queue.

    >>> Concurrency(5, by="account")
    Concurrency(5, by='account')
    """

    max: int
    by: By

    counts_in_flight = True

    def __init__(self, max: int, *, by: str | tuple[str, ...] | None = None) -> None:
        what = f"Concurrency({max!r})"
        if not is_whole(max):
            raise InvalidPolicy(f"{what}: the maximum is a whole number of jobs, not a {type(max).__name__}")
        if not 0 <= max <= MAX_COUNT:
            raise InvalidPolicy(f"{what}: the maximum is at least 0 (0 stops its keys) and at most {MAX_COUNT:,}")
        object.__setattr__(self, "max", max)
        object.__setattr__(self, "by", normalize_by(what, by))

    def __repr__(self) -> str:
        return f"Concurrency({self.max}{repr_by(self.by)})"

    @property
    def identity(self) -> str:
        """Names the limit's state. The bound itself is left out: changing it keeps what is in flight."""
        return f"concurrency:{','.join(self.by)}"

    def room(self, in_flight: int, tat: Instant, now: Instant) -> int:
        """How many jobs may start now."""
        return self.max - in_flight if in_flight < self.max else 0

    def charged(self, tat: Instant, now: Instant, count: int) -> Instant:
        return tat

    def refunded(self, tat: Instant, count: int, held: int = 0) -> Instant:
        return tat

    def carried_over(self, tat: Instant, now: Instant) -> Instant:
        return tat

    def opens_at(self, tat: Instant) -> Instant | None:
        """Not by time: a slot must be released."""
        return None

    def room_at(self, gate: GateState, now: Instant) -> int:
        return self.room(gate.in_flight, gate.tat, now)

    def take(self, gate: GateState, now: Instant, count: int) -> None:
        gate.in_flight += count

    def postpone(self, gate: GateState, before: Instant, now: Instant, lag: int) -> None:
        """A claimed job holds its slot, started or not."""

    def free(self, gate: GateState, ending: Ending, now: Instant, held: int | None, task: str | None) -> bool:
        gate.in_flight = max(0, gate.in_flight - ending.ended - ending.unstarted)
        return True

    def opens_again_at(self, gate: GateState) -> Instant | None:
        return None

    def carry_over(self, gate: GateState, now: Instant) -> None:
        """What runs is counted anew; there is nothing else."""

    def why(self, gate: GateState, now: Instant) -> Why:
        return Why(Reason.CONCURRENCY, gate.in_flight, self.max)

    def with_bound(self, bound: float) -> Concurrency:
        return Concurrency(int(bound) if bound == int(bound) else bound, by=self.by)  # type: ignore[arg-type]

    def to_document(self) -> dict[str, Any]:
        return {"kind": "concurrency", "max": self.max, "by": list(self.by)}

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> Concurrency:
        return cls(document["max"], by=tuple(document["by"]))


@dataclass(frozen=True, slots=True, init=False)
class Rate:
    """At most `burst + limit·t/per` starts in any time t, per key (GCRA). `burst` defaults to `limit`.

    >>> Rate(100, per="1m", by="endpoint")
    Rate(100, per='60s', burst=100, by='endpoint')
    >>> Rate(0.5, per="1s").burst  # one job every two seconds
    1
    """

    limit: float
    per: int
    burst: int
    by: By
    interval: int

    counts_in_flight = False

    def __init__(
        self,
        limit: float,
        *,
        per: timedelta | str | float,
        burst: int | None = None,
        by: str | tuple[str, ...] | None = None,
    ) -> None:
        what = f"Rate({limit!r}, per={per!r})"
        if not is_number(limit):
            raise InvalidPolicy(f"{what}: the rate is a number of jobs, such as 100 or 0.5")
        if limit <= 0:
            raise InvalidPolicy(
                f"{what} would never admit a job; give a rate above 0, or stop the key with Concurrency(0, by=…)"
            )
        try:
            window = microseconds(per)
        except ConfigurationError as error:
            raise InvalidPolicy(f"{what}: {error}") from None
        if window <= 0:
            raise InvalidPolicy(f"{what}: `per` is a time above 0, such as '1s' or '1m'")
        if limit > window:
            raise InvalidPolicy(
                f"{what}: more than one job a microsecond cannot be told apart from no limit; remove it"
            )
        allowed = max(1, math.floor(limit)) if burst is None else burst
        if not is_whole(allowed) or not 1 <= allowed <= MAX_COUNT:
            raise InvalidPolicy(f"{what}: burst={burst!r} is not a whole number of at least 1")
        # Rounded up: the rate that is kept is never above the one that was asked for.
        interval = math.ceil(Fraction(window) / Fraction(str(limit)))
        object.__setattr__(self, "limit", limit)
        object.__setattr__(self, "per", window)
        object.__setattr__(self, "burst", allowed)
        object.__setattr__(self, "by", normalize_by(what, by))
        object.__setattr__(self, "interval", interval)

    def __repr__(self) -> str:
        return f"Rate({self.limit:g}, per='{self.per / SECOND:g}s', burst={self.burst}{repr_by(self.by)})"

    @property
    def identity(self) -> str:
        """Names the limit's state. `per` takes part, so that 10 a minute and 600 an hour on one key stay apart."""
        return f"rate/{self.per / SECOND:g}s:{','.join(self.by)}"

    def room(self, in_flight: int, tat: Instant, now: Instant) -> int:
        """How many jobs may start now."""
        base = tat if tat > now else now
        return max(0, (now + self.burst * self.interval - base) // self.interval)

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

    def room_at(self, gate: GateState, now: Instant) -> int:
        return self.room(gate.in_flight, gate.tat, now)

    def take(self, gate: GateState, now: Instant, count: int) -> None:
        gate.tat = self.charged(gate.tat, now, count)

    def postpone(self, gate: GateState, before: Instant, now: Instant, lag: int) -> None:
        """As if they had been taken when they start. A bucket that is not full gives its tokens later anyway."""
        gate.tat += max(0, now + lag - max(before, now))

    def free(self, gate: GateState, ending: Ending, now: Instant, held: int | None, task: str | None) -> bool:
        """Tokens come back for what never started, unless they were never taken here."""
        if not ending.unstarted or held is None:
            return False
        gate.tat = self.refunded(gate.tat, ending.unstarted, held)
        return True

    def opens_again_at(self, gate: GateState) -> Instant | None:
        return self.opens_at(gate.tat)

    def carry_over(self, gate: GateState, now: Instant) -> None:
        gate.tat = self.carried_over(gate.tat, now)

    def why(self, gate: GateState, now: Instant) -> Why:
        return Why(
            Reason.RATE, self.burst - self.room_at(gate, now), self.burst, f"{self.limit:g} per {_time(self.per)}"
        )

    def with_bound(self, bound: float) -> Rate:
        """A burst that was as large as the rate goes with it."""
        burst = None if self.burst == max(1, math.floor(self.limit)) else self.burst
        return Rate(bound, per=self.per / SECOND, burst=burst, by=self.by)

    def to_document(self) -> dict[str, Any]:
        return {"kind": "rate", "limit": self.limit, "per": self.per, "burst": self.burst, "by": list(self.by)}

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> Rate:
        per = document["per"] / SECOND
        return cls(document["limit"], per=per, burst=document["burst"], by=tuple(document["by"]))


def _time(amount: int) -> str:
    seconds = amount / SECOND
    return f"{seconds:g} s" if seconds < 120 else f"{seconds / 60:g} min"
