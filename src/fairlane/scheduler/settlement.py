"""How a claim ends: the outcome of a run becomes a settlement. One table, no clock, no chance."""

from __future__ import annotations

from enum import IntEnum
from typing import assert_never
from uuid import UUID

import msgspec

from fairlane.job import Claim, NewIds, OnDead, StampedEffects, State

__all__ = [
    "DISPATCHER",
    "Cancelled",
    "Died",
    "Done",
    "Failed",
    "Lost",
    "Outcome",
    "Released",
    "Retried",
    "Settlement",
    "Snoozed",
    "Verdict",
    "abandoned_by",
    "settle",
]

DISPATCHER = 8
"""The version of a dispatcher's id, as of a UUID: those of workers are random (4)."""


class Done(msgspec.Struct, frozen=True):
    """The handler returned."""

    result: bytes | None
    effects: StampedEffects | None = None
    """What is to land with it."""


class Failed(msgspec.Struct, frozen=True):
    """The handler raised; `backoff` is what its task waits after this attempt, in microseconds."""

    error: str
    backoff: int


class Retried(msgspec.Struct, frozen=True):
    """The handler asked for another attempt after so many microseconds."""

    reason: str
    delay: int


class Snoozed(msgspec.Struct, frozen=True):
    """The handler asked to be called later; the attempt does not count."""

    reason: str
    delay: int


class Died(msgspec.Struct, frozen=True):
    """No further attempt makes sense."""

    reason: str


class Cancelled(msgspec.Struct, frozen=True):
    """The job was cancelled while it ran, or by its handler."""

    reason: str


class Released(msgspec.Struct, frozen=True):
    """Given back before user code ran: at once and in its old place, or after so many microseconds."""

    reason: str
    delay: int = 0


class Lost(msgspec.Struct, frozen=True):
    """The lease ran out: its worker is gone."""

    reason: str


Outcome = Done | Failed | Retried | Snoozed | Died | Cancelled | Released | Lost


class Verdict(IntEnum):
    """What a run says about whatever it called. The numbers are given to stores."""

    GOOD = 0
    FAILED = 1
    NEUTRAL = 2


_VERDICTS = {
    "done": Verdict.GOOD,
    "failed": Verdict.FAILED,
    "retry": Verdict.FAILED,
    "dead": Verdict.FAILED,
    "lost": Verdict.FAILED,
}


class Settlement(msgspec.Struct, frozen=True):
    """What ending one claim writes. Fenced: it applies only where the job still holds this lease."""

    job: UUID
    lease: UUID
    to: State
    outcome: str
    ran: int
    """Run time in microseconds: what the flow is charged in the end."""
    delay: int | None = None
    """SCHEDULED: microseconds from the store's now until it is due."""
    result: bytes | None = None
    error: str | None = None
    counts_attempt: bool = True
    unstarted: bool = False
    """Never ran: its rate tokens and its charge are given back."""
    effects: StampedEffects | None = None
    """What is written in the same transaction. `DuplicateJob` if a follow-up's id is taken: nothing is applied then.
    Death does not wait for its effects: there, what is taken or cannot be stored is left out."""
    lag: int | None = None
    """Microseconds from admission to start, where an engine ran it: what an adaptive cap looks at, not the run time."""
    fallback: Settlement | None = None
    """What applies instead, if the effects are refused for good."""

    @property
    def verdict(self) -> Verdict:
        """What this run says about whatever it called."""
        return _VERDICTS.get(self.outcome, Verdict.NEUTRAL)

    def if_asked_to_cancel(self) -> Settlement:
        """What applies instead where the job has been asked to cancel: it goes on no more, but an end stays an end.

        Only the store knows, once it holds the job.
        """
        if self.to.is_final:
            return self
        return msgspec.structs.replace(self, to=State.CANCELLED, outcome="cancelled", delay=None)

    @property
    def is_death(self) -> bool:
        """Whether the job is dead then: what it has declared for its death lands with it, whoever settles."""
        return self.to is State.DEAD

    def with_on_dead(self, stored: bytes, new_ids: NewIds) -> Settlement:
        """This death, with what the job has declared for it. What cannot be read is left out, and the error says so."""
        try:
            effects = OnDead.decode(stored).landing(new_ids)
        except msgspec.DecodeError as error:
            return self.without_effects(error)
        return msgspec.structs.replace(self, effects=effects or None)

    def without_effects(self, refusal: Exception) -> Settlement:
        """This death where its effects were refused: it says so, and happens all the same."""
        said = f"its on_dead effects were refused: {type(refusal).__name__}: {refusal}"
        error = f"{self.error}\n\n{said}" if self.error else said
        return msgspec.structs.replace(self, effects=None, error=error)


def settle(claim: Claim, outcome: Outcome, ran: int) -> Settlement:
    """What an outcome means for its job."""
    last = claim.attempt >= claim.max_attempts
    job, lease = claim.id, claim.lease
    match outcome:
        case Done(result=result, effects=effects):
            return Settlement(job, lease, State.DONE, "done", ran, result=result, effects=effects or None)
        case Failed(error=error) if last:
            return Settlement(job, lease, State.DEAD, "failed", ran, error=error)
        case Failed(error=error, backoff=delay):
            return Settlement(job, lease, State.SCHEDULED, "failed", ran, delay, error=error)
        case Retried(reason=reason) if last:
            return Settlement(job, lease, State.DEAD, "retry", ran, error=reason)
        case Retried(reason=reason, delay=delay):
            return Settlement(job, lease, State.SCHEDULED, "retry", ran, delay, error=reason)
        case Snoozed(reason=reason, delay=delay):
            return Settlement(job, lease, State.SCHEDULED, "snoozed", ran, delay, error=reason, counts_attempt=False)
        case Died(reason=reason):
            return Settlement(job, lease, State.DEAD, "dead", ran, error=reason)
        case Cancelled(reason=reason):
            return Settlement(job, lease, State.CANCELLED, "cancelled", ran, error=reason)
        case Released(reason=reason, delay=delay):
            to = State.SCHEDULED if delay > 0 else State.READY
            return Settlement(
                job, lease, to, "released", 0, delay or None, error=reason, counts_attempt=False, unstarted=True
            )
        case Lost(reason=reason):
            return Settlement(job, lease, State.DEAD if last else State.READY, "lost", ran, error=reason)
        case _:
            assert_never(outcome)


def abandoned_by(worker: UUID) -> Outcome:
    """How the claims of a worker end that is gone."""
    if worker.version == DISPATCHER:
        # Whoever begins a job that was dispatched adopts it, and holds it then.
        return Released("its dispatcher stopped renewing the lease, and no worker of the engine had begun it")
    return Lost("its worker stopped renewing the lease")
