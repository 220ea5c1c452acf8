"""A job that runs here: what is known of it while it does, and what is to land with its end."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Protocol

import msgspec

from fairlane.effects import Effects
from fairlane.errors import ClaimLost, UndecodablePayload
from fairlane.job import Claim, StampedEffects, State
from fairlane.scheduler.settlement import Done, Failed, Outcome, Settlement, settle
from fairlane.stamping import Stamp, stamped_effects
from fairlane.store.protocol import Store
from fairlane.task import Task
from fairlane.worker.outcomes import Stop, summary

__all__ = ["Home", "RunningJob", "log_end", "settlement_of"]

NOTHING = StampedEffects()


class Home(Protocol):
    """What a job that runs asks of whatever runs it: a worker, or an engine's process."""

    store: Store
    loop: asyncio.AbstractEventLoop
    thread: int
    """Where the loop runs."""
    log: logging.Logger
    max_result: int
    stamp: Stamp

    def ran(self, run: Any, /) -> int:
        """Microseconds since its handler was called."""
        ...


class RunningJob:
    """One claim whose handler has been called, or is about to be."""

    __slots__ = ("args", "claim", "effects", "home", "kwargs", "may_be_settled", "started_at", "stop", "task")

    def __init__(self, home: Home, claim: Claim, task: Task[..., Any], args: Any, kwargs: Any) -> None:
        self.home = home
        self.claim = claim
        self.task = task
        self.args = args
        self.kwargs = kwargs
        self.started_at = 0
        """By the monotonic clock; 0 until user code begins."""
        self.stop: Stop | None = None
        self.effects = NOTHING
        self.may_be_settled = False
        """Its handler has settled it in a transaction of its own; only the database knows whether that committed."""

    async def ack(self, value: Any, tx: Any) -> None:
        """Settle the job as done, with its effects, in its handler's transaction."""
        if self.stop is Stop.GONE:
            raise ClaimLost([self.claim.id])
        home = self.home
        done = Done(self.task.codec.encode_result(value, home.max_result), self.effects)
        settlement = settle(self.claim, done, home.ran(self))
        # Before it is written: from then on the claim may be gone because we have ended it.
        self.may_be_settled = True
        if lost := await home.store.settle([settlement], tx=tx):
            raise ClaimLost(lost)

    def add(self, given: Effects) -> None:
        """Let these land with the job. Refused at once if they cannot be stored: the handler hears of it."""
        more = stamped_effects(given, self.home.stamp, self.home.max_result)
        before = self.effects
        self.effects = StampedEffects(
            (*before.jobs, *more.jobs),
            {**{key: value for key, value in before.puts.items() if key not in more.deletes}, **more.puts},
            (*(key for key in before.deletes if key not in more.puts), *more.deletes),
        )


def settlement_of(run: RunningJob, outcome: Outcome, ran: int) -> Settlement:
    """What an outcome means for a job that ran, also if its effects should be refused."""
    settlement = settle(run.claim, outcome, ran)
    if settlement.effects is None:
        return settlement
    refused = Failed("its effects were refused", run.task.options.backoff.delay(run.claim.attempt, 0.5))
    return msgspec.structs.replace(settlement, fallback=settle(run.claim, refused, ran))


def log_lost(claim: Claim, log: logging.Logger) -> None:
    """Tell that a run goes on for nothing."""
    log.error(
        "job %s (%s): ClaimLost: %s; nothing of this run is recorded",
        claim.id,
        claim.task,
        Stop.GONE.value,
        extra={"claim": claim},
    )


def log_unreadable(claim: Claim, error: UndecodablePayload, log: logging.Logger) -> None:
    log.error("job %s (%s) is set aside as dead: %s", claim.id, claim.task, error, extra={"claim": claim})


def log_end(
    run: RunningJob, outcome: Outcome, settlement: Settlement, error: BaseException | None, log: logging.Logger
) -> None:
    """Tell how a run has ended."""
    claim = run.claim
    level = logging.INFO if type(outcome).__name__ in ("Snoozed", "Cancelled", "Done") else logging.WARNING
    # What was raised because we stopped it says nothing; why we did, the settlement says.
    reason = summary(error) if error is not None and run.stop is None else (settlement.error or "").partition("\n")[0]
    log.log(
        level,
        "job %s (%s) attempt %d of %d: %s%s%s",
        claim.id,
        claim.task,
        claim.attempt,
        claim.max_attempts,
        type(outcome).__name__.lower(),
        f": {reason}" if reason else "",
        "; it is dead now" if settlement.to is State.DEAD else "",
        extra={"claim": claim},
    )
