"""When a failed job is tried again."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from fairlane.clock import SECOND, microseconds
from fairlane.errors import ConfigurationError
from fairlane.parameters import checked, shown


@dataclass(frozen=True, slots=True, init=False)
class Backoff:
    """Exponential backoff: `first`, then times `factor` each attempt, up to `cap`; then a jitter on top.

    The jitter comes after the cap: jobs that have all reached it would otherwise come back as one herd.
    """

    first: int
    factor: float
    cap: int
    jitter: float

    @checked(unchecked=["first", "cap"])
    def __init__(
        self,
        first: timedelta | str | float = "1s",
        *,
        factor: float = 2.0,
        cap: timedelta | str | float = "1h",
        jitter: float = 0.2,
    ) -> None:
        what = f"Backoff({shown(first)}, factor={factor!r}, cap={shown(cap)}, jitter={jitter!r})"
        try:
            start, most = microseconds(first), microseconds(cap)
        except ConfigurationError as error:
            raise ConfigurationError(f"{what}: {error}") from None
        if start < 0 or most < start:
            raise ConfigurationError(f"{what}: `first` is at least 0, and `cap` at least `first`")
        if not 1.0 <= factor <= 100.0:
            raise ConfigurationError(f"{what}: `factor` lies between 1 and 100")
        if not 0.0 <= jitter <= 1.0:
            raise ConfigurationError(f"{what}: `jitter` is a fraction between 0 and 1")
        for name, value in (("first", start), ("factor", float(factor)), ("cap", most), ("jitter", float(jitter))):
            object.__setattr__(self, name, value)

    def delay(self, attempt: int, chance: float) -> int:
        """Microseconds until the next attempt, after `attempt` have failed; `chance` in [0, 1) picks the jitter."""
        # The exponent is bounded before it is raised: attempt 5,000 is a cap, not an overflow.
        exponent = min(max(attempt, 1) - 1, 64)
        delay = min(float(self.cap), self.first * self.factor**exponent)
        return round(delay * (1.0 + self.jitter * chance))

    def __repr__(self) -> str:
        first, cap = f"{self.first / SECOND:g}s", f"{self.cap / SECOND:g}s"
        return f"Backoff({first!r}, factor={self.factor:g}, cap={cap!r}, jitter={self.jitter:g})"
