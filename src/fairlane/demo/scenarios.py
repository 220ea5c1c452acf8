"""The three acts: the same jobs under three policies."""

from __future__ import annotations

import msgspec

from fairlane.policy.fair import Fair
from fairlane.policy.gates import Limit
from fairlane.policy.limits import Concurrency, Rate

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


WHALE = "whale"
RATED_ENDPOINT = "partner.example"
WHALE_ENDPOINTS = 50
"""The whale sends to many endpoints of its own: fifty lanes, and still one turn."""
WHALE_TO_RATED = 25
"""Every so many-th job of the whale goes to the endpoint that everybody uses."""


class Delivery(msgspec.Struct, frozen=True):
    """The arguments of one job. `number` identifies it in the ledger, whatever the queue says of it."""

    number: int
    tenant: str
    endpoint: str


class Workload(msgspec.Struct, frozen=True):
    """How much is enqueued, and how much may run at once."""

    whale_jobs: int = 5_000
    small_tenants: int = 100
    small_jobs: int = 10
    processes: int = 2
    slots: int = 10
    """In each process."""

    @property
    def small_total(self) -> int:
        return self.small_tenants * self.small_jobs

    @property
    def total(self) -> int:
        return self.whale_jobs + self.small_total

    @property
    def all_slots(self) -> int:
        return self.processes * self.slots

    def scaled(self, scale: float) -> Workload:
        """The same shape with fewer jobs; as many of each small tenant as before."""
        return msgspec.structs.replace(
            self,
            whale_jobs=max(200, round(self.whale_jobs * scale)),
            small_tenants=max(4, round(self.small_tenants * scale)),
        )

    def deliveries(self) -> list[Delivery]:
        """All jobs in the order in which they are enqueued: the whale's come first."""
        whale = [(WHALE, _whale_endpoint(nth)) for nth in range(self.whale_jobs)]
        tenants = [f"tenant-{nth:03}" for nth in range(1, self.small_tenants + 1)]
        # Each small tenant enqueues all of its jobs at once; one of them goes to the endpoint that everybody uses.
        small = [
            (tenant, RATED_ENDPOINT if nth == 0 else f"{tenant}.example")
            for tenant in tenants
            for nth in range(self.small_jobs)
        ]
        return [Delivery(number, tenant, endpoint) for number, (tenant, endpoint) in enumerate(whale + small)]


def _whale_endpoint(nth: int) -> str:
    if nth % WHALE_TO_RATED == 0:
        return RATED_ENDPOINT
    return f"{WHALE}-{nth % WHALE_ENDPOINTS:02}.example"


def class_of(tenant: str) -> str:
    """`whale` or `small`: the two classes that the demo compares."""
    return WHALE if tenant == WHALE else "small"
