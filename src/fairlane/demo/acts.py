"""The three acts: the same jobs under three policies."""

from __future__ import annotations

import msgspec

from fairlane.policy.fair import Fair
from fairlane.policy.gates import Limit
from fairlane.policy.limits import Concurrency, Rate

__all__ = ["ACTS", "FAIR", "FIFO", "LIMITED", "LIMITS", "Act"]

LIMITS = (Concurrency(5, by="tenant"), Rate(100, per="1s", burst=20, by="endpoint"))


class Act(msgspec.Struct, frozen=True):
    """One queue, and what its policy is."""

    name: str
    queue: str
    title: str
    fair: Fair | None = None
    limits: tuple[Limit, ...] = ()

    @property
    def in_flight_limit(self) -> Concurrency | None:
        return next((limit for limit in self.limits if isinstance(limit, Concurrency)), None)

    @property
    def rate_limit(self) -> Rate | None:
        return next((limit for limit in self.limits if isinstance(limit, Rate)), None)


FIFO = Act("FIFO", "demo-fifo", "no policy: first come, first served")
FAIR = Act("Fair", "demo-fair", 'Fair(by="tenant")', Fair(by="tenant"))
LIMITED = Act(
    "Limits",
    "demo-limits",
    "Fair, 5 in flight per tenant, 100/s (burst 20) per endpoint",
    Fair(by="tenant"),
    LIMITS,
)
ACTS = (FIFO, FAIR, LIMITED)
