"""A job that runs here: what is known of it while it does, and what is to land with its end."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Any, Protocol

import msgspec

from fairlane.effects import Effects, landed_of
from fairlane.errors import ClaimLost
from fairlane.job import Claim, Landed, StampedEffects
from fairlane.job_builder import Stamp, stamped_effects
from fairlane.redaction import Audience, Redactor, Surface
from fairlane.scheduler.settlement import Done, Failed, Outcome, Settlement, settle
from fairlane.store.protocol import Landings, Store
from fairlane.task import Task
from fairlane.worker.outcomes import Stop

__all__ = ["Home", "RunTimes", "RunningJob", "settlement_of"]

NOTHING = StampedEffects()
REMEMBERED = 100
"""Runs of a task whose times are kept."""
USUAL = 0.95
"""The share of them that take no longer than what is called usual."""
FAR_BEYOND = 3
"""How many times the usual a run may take before it is called long."""


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

    __slots__ = ("args", "claim", "effects", "home", "kwargs", "late", "may_be_settled", "started_at", "stop", "task")

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
        self.late = 0
        """Effects that were added since."""

    async def ack(self, value: Any, tx: Any) -> Landed:
        """Settle the job as done, with its effects, in its handler's transaction."""
        if self.stop is Stop.GONE:
            raise ClaimLost([self.claim.id])
        home = self.home
        done = Done(self.task.codec.encode_result(value, home.max_result), self.effects)
        settlement = settle(self.claim, done, home.ran(self))
        # Before it is written: from then on the claim may be gone because we have ended it.
        self.may_be_settled, self.late = True, 0
        landed: Landings = {}
        if lost := await home.store.settle([settlement], tx=tx, landed=landed):
            raise ClaimLost(lost)
        return landed_of(settlement.effects, landed.get(self.claim.id))

    def add(self, given: Effects) -> None:
        """Let these land with the job. Refused at once if they cannot be stored: the handler hears of it."""
        more = stamped_effects(given, self.home.stamp, self.home.max_result)
        if self.may_be_settled:
            self.late += len(more.jobs) + len(more.puts) + len(more.deletes)
        before = self.effects
        self.effects = StampedEffects(
            (*before.jobs, *more.jobs),
            {**{key: value for key, value in before.puts.items() if key not in more.deletes}, **more.puts},
            (*(key for key in before.deletes if key not in more.puts), *more.deletes),
        )


class RunTimes:
    """How long the runs of each task take, as far as one worker has seen."""

    def __init__(self) -> None:
        self._last: dict[str, deque[int]] = {}

    def note(self, task: str, ran: int) -> None:
        times = self._last.get(task)
        if times is None:
            times = self._last[task] = deque(maxlen=REMEMBERED)
        times.append(ran)

    def usual(self, task: str) -> int | None:
        """What 95 of the last 100 runs of a task took at most; `None`: none has ended yet."""
        times = sorted(self._last.get(task, ()))
        return times[int(USUAL * (len(times) - 1))] if times else None

    def long_after(self, task: Task[..., Any], at_least: int) -> int:
        """How long a run may take before it is called long: three times the usual, and `at_least` so long; but no
        longer than its timeout. Where nothing is known, the timeout is its author's word on it."""
        usual, timeout = self.usual(task.name), task.timeout
        if usual is None:
            return at_least if timeout is None else timeout
        after = max(at_least, FAR_BEYOND * usual)
        return after if timeout is None else min(after, timeout)


def settlement_of(run: RunningJob, outcome: Outcome, ran: int) -> Settlement:
    """What an outcome means for a job that ran, also if its effects should be refused."""
    settlement = settle(run.claim, outcome, ran)
    if settlement.error is not None and (redact := run.task.producer.redact) is not None:
        redactor = Redactor((redact,), Audience(Surface.WORKER))
        settlement = msgspec.structs.replace(settlement, error=redactor.error(settlement.error, run.claim))
    if settlement.effects is None:
        return settlement
    refused = Failed("its effects were refused", run.task.options.backoff.delay(run.claim.attempt, 0.5))
    return msgspec.structs.replace(settlement, late_effects=run.late, fallback=settle(run.claim, refused, ran))
