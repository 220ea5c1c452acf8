"""How a claim ends: the outcome of a run becomes a settlement. One table, no clock, no chance."""

from __future__ import annotations

from enum import IntEnum
from functools import partial
from typing import assert_never
from uuid import UUID

import msgspec
from msgspec.structs import replace

from fairlane.job import SUSPECT_FROM, BuiltEffects, Claim, NewIds, OnDead, State
from fairlane.redaction import without_secrets

SEEN = SUSPECT_FROM
UNSEEN = 1
"""What a loss adds to the suspicion of a job that ran: one that nobody saw makes no suspect, it takes two of them."""
DISPATCHER = 8
"""The version of a dispatcher's id, as of a UUID: those of workers are random (4)."""


class Done(msgspec.Struct, frozen=True):
    """The handler returned."""

    result: bytes | None
    effects: BuiltEffects | None = None
    """What is to land with it."""


class Failed(msgspec.Struct, frozen=True):
    """The handler raised; `backoff` is what its task waits after this attempt, in microseconds."""

    error: str
    backoff: int


class Retried(msgspec.Struct, frozen=True):
    """The handler asked for another attempt after so many microseconds."""

    reason: str
    delay: int
    is_bounded: bool = True
    """False: an engine has decided it by its own limit, and `max_attempts` does not end the job."""


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
    is_spent: bool = False
    """What it was charged by rates is not given back."""


class Interrupted(msgspec.Struct, frozen=True):
    """Stopped by its worker's shutdown: it keeps its place, and the attempt counts."""

    reason: str


class Lost(msgspec.Struct, frozen=True):
    """Its worker is gone. A suspect ran alone, and is charged with the loss; any other job comes under suspicion."""

    reason: str
    suspicion: int
    """By how much: 0 where it did not run, `UNSEEN` where its host may be gone, `SEEN` where its process died."""


RunOutcome = Done | Failed | Retried | Snoozed | Died | Cancelled | Released | Interrupted | Lost


class Verdict(IntEnum):
    """What a run says about whatever it called. The numbers are given to stores."""

    GOOD = 0
    FAILED = 1
    NEUTRAL = 2


FAILURES = frozenset({"failed", "retry", "dead", "lost"})
"""Outcomes that count against whatever the run called."""


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
    is_spent: bool = False
    """Its rate tokens are not: the instant that it was to start at has gone by."""
    is_cut_short: bool = False
    """It was lost: `ran` is what is known of it, and says nothing of how long a run takes."""
    suspicion: int = 0
    """What is held against the job from now on. A run that ended by itself has cleared it."""
    effects: BuiltEffects | None = None
    """What is written in the same transaction. `DuplicateJob` if a follow-up's id is taken: nothing is applied then.
    Death does not wait for its effects: there, what is taken or cannot be stored is left out."""
    late_effects: int = 0
    """Effects among these that were added after the handler settled the job in its own transaction. Lost if that has
    committed."""
    lag: int | None = None
    """Microseconds from admission to start, where an engine ran it: what an adaptive cap looks at, not the run time."""
    retry_after: int | None = None
    """If the effects are refused for good: microseconds until the next attempt; `None` if there is none."""

    @property
    def verdict(self) -> Verdict:
        """What this run says about whatever it called."""
        if self.outcome in FAILURES:
            return Verdict.FAILED
        return Verdict.GOOD if self.outcome == "done" else Verdict.NEUTRAL

    def if_effects_refused(self, reason: str) -> Settlement:
        """What applies instead if the effects are refused for good: the attempt has failed."""
        to = State.DEAD if self.retry_after is None else State.SCHEDULED
        error = without_secrets(reason)
        return Settlement(self.job, self.lease, to, "failed", self.ran, self.retry_after, error=error)

    def if_asked_to_cancel(self) -> Settlement:
        """What applies instead where the job has been asked to cancel: it goes on no more, but an end stays an end.

        Only the store knows, once it holds the job.
        """
        if self.to.is_final:
            return self
        return replace(self, to=State.CANCELLED, outcome="cancelled", delay=None)

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
        return replace(self, effects=effects or None)

    def without_effects(self, refusal: Exception) -> Settlement:
        """This death where its effects were refused: it says so, and happens all the same."""
        said = without_secrets(f"its on_dead effects were refused: {type(refusal).__name__}: {refusal}")
        error = f"{self.error}\n\n{said}" if self.error else said
        return replace(self, effects=None, error=error)


def settle(claim: Claim, outcome: RunOutcome, ran: int) -> Settlement:
    """What an outcome means for its job. What is obviously secret in its error stays out of it."""
    settlement = _settle(claim, outcome, ran)
    error = settlement.error
    return settlement if error is None else replace(settlement, error=without_secrets(error))


def _settle(claim: Claim, outcome: RunOutcome, ran: int) -> Settlement:
    last = claim.attempt >= claim.max_attempts
    ended = partial(Settlement, claim.id, claim.lease)
    match outcome:
        case Done(result=result, effects=effects):
            return ended(State.DONE, "done", ran, result=result, effects=effects or None)
        case Failed(error=error) if last:
            return ended(State.DEAD, "failed", ran, error=error)
        case Failed(error=error, backoff=delay):
            return ended(State.SCHEDULED, "failed", ran, delay, error=error)
        case Retried(reason=reason, is_bounded=True) if last:
            return ended(State.DEAD, "retry", ran, error=reason)
        case Retried(reason=reason, delay=delay):
            return ended(State.SCHEDULED, "retry", ran, delay, error=reason)
        case Snoozed(reason=reason, delay=delay):
            return ended(State.SCHEDULED, "snoozed", ran, delay, error=reason, counts_attempt=False)
        case Died(reason=reason):
            return ended(State.DEAD, "dead", ran, error=reason)
        case Cancelled(reason=reason):
            return ended(State.CANCELLED, "cancelled", ran, error=reason)
        case Released(reason=reason, delay=delay, is_spent=is_spent):
            to, suspicion = State.SCHEDULED if delay > 0 else State.READY, claim.suspicion
            given_back = partial(ended, counts_attempt=False, unstarted=True, is_spent=is_spent, suspicion=suspicion)
            return given_back(to, "released", 0, delay or None, error=reason)
        case Interrupted(reason=reason):
            return ended(State.DEAD if last else State.READY, "lost", ran, error=reason, is_cut_short=True)
        case Lost(reason=reason, suspicion=added) if added and claim.is_suspect:
            # Nothing ran beside it: this loss is its own, and so, if somebody saw it, were those before. Nobody saw it:
            # it may have been lost with its worker while it waited for its turn to run alone.
            # A suspicion stands for the losses that somebody saw, and for half of the others.
            before = -(-claim.suspicion // SEEN) if added >= SEEN else 0
            to = State.DEAD if claim.attempt + before >= claim.max_attempts else State.READY
            return ended(to, "lost", ran, error=reason, is_cut_short=True, suspicion=claim.suspicion)
        case Lost(reason=reason, suspicion=added):
            # Any of those that ran may have done it, and most have not. Tokens stay taken, also where nothing ran that
            # anybody knows of.
            lost = partial(ended, counts_attempt=False, is_cut_short=True, suspicion=claim.suspicion + added)
            return lost(State.READY, "lost" if added else "released", ran, error=reason)
        case _:
            assert_never(outcome)


def abandoned_by(worker: UUID) -> RunOutcome:
    """How a claim of a worker ends that is gone."""
    if worker.version == DISPATCHER:
        # Whoever begins a job that was dispatched adopts it, and holds it then.
        return Released("its dispatcher stopped renewing the lease, and no worker of the engine had begun it")
    return Lost("its worker stopped renewing the lease", UNSEEN)
