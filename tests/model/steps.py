"""What the steps of a life are given: policies, jobs to enqueue, ends of claims. They print as they are written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fairlane.policy import Concurrency, Fair, Policy, Rate
from fairlane.policy.unique import OnConflict
from fairlane.scheduler.settlement import Cancelled, Died, Done, Failed, Released, Retried, RunOutcome, Snoozed
from tests.store.harness import SECOND

__all__ = ["POLICIES", "QUEUE", "Call", "End", "Ending", "Key", "Tx"]

QUEUE = "life"
KEYS = ("account", "endpoint")
RATE = Rate(3, per="5s", by="endpoint")


def _policies(*given: tuple[Fair | None, tuple[Concurrency | Rate, ...]]) -> tuple[Policy, ...]:
    return tuple(Policy(QUEUE, fair=fair, limits=limits, keys=KEYS) for fair, limits in given)


BY_ACCOUNT = Fair(by="account")
POLICIES: dict[str, tuple[Policy, ...]] = {
    "plain": _policies((None, ()), (None, (Concurrency(5),)), (None, (Concurrency(0),))),
    "lanes": _policies(
        (None, (Concurrency(2, by="account"), RATE)),
        (None, (Concurrency(3, by="account"), Rate(5, per="5s", by="endpoint"))),
        (None, (Concurrency(0, by="account"), RATE)),
    ),
    "flows": _policies(
        (BY_ACCOUNT, (Concurrency(2, by="account"), Concurrency(5))),
        (BY_ACCOUNT, (Concurrency(1, by="account"),)),
    ),
    "mixed": _policies(
        (BY_ACCOUNT, (Concurrency(3, by="account"), RATE)),
        (Fair(by="account", charge="count"), (RATE, Rate(9, per="7s"))),
        (Fair(by="endpoint"), (Concurrency(2, by=KEYS), Concurrency(4))),
    ),
}
"""In each life, one of these families: the first is declared, and any of them may be applied later."""

Tx = Literal["none", "committed", "rolled back"]
Ending = Literal["done", "failed", "retried", "snoozed", "dead", "cancelled", "released", "put off"]


@dataclass(frozen=True)
class Key:
    """A unique key. Those of a window last for 8 seconds."""

    name: int
    until: Literal["started", "done", "window"] = "done"
    on_conflict: OnConflict = "return"
    same_payload: bool = False


@dataclass(frozen=True)
class Call:
    """A job to enqueue. `known` gives it the id of a job that there was before."""

    account: str = "a"
    endpoint: str = "x"
    delay: int | None = None
    priority: int = 0
    payload: int = 0
    unique: Key | None = None
    known: int | None = None


@dataclass(frozen=True)
class End:
    """How one of the claims in hand is settled; with effects, if any are given."""

    which: int
    how: Ending = "done"
    wait: int = SECOND
    ran: int = 1_000
    follow_ups: tuple[Call, ...] = ()
    put: int | None = None
    delete: int | None = None

    @property
    def outcome(self) -> RunOutcome:
        outcomes: dict[Ending, RunOutcome] = {
            "done": Done(b"1"),
            "failed": Failed("boom", self.wait),
            "retried": Retried("again", self.wait),
            "snoozed": Snoozed("later", self.wait),
            "dead": Died("over"),
            "cancelled": Cancelled("stop"),
            "released": Released("drain"),
            "put off": Released("unknown", self.wait),
        }
        return outcomes[self.how]

    @property
    def has_effects(self) -> bool:
        return self.how == "done" and bool(self.follow_ups or self.put is not None or self.delete is not None)
