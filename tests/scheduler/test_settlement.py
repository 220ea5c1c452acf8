"""What each outcome means for its job: the whole table."""

from __future__ import annotations

from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.job import Claim, State
from fairlane.scheduler.settlement import (
    Cancelled,
    Died,
    Done,
    Failed,
    Lost,
    Outcome,
    Released,
    Retried,
    Settlement,
    Snoozed,
    settle,
)

JOB, LEASE = UUID(int=1), UUID(int=2)
RAN = 1_500


def claim(attempt: int, max_attempts: int = 3) -> Claim:
    return Claim(JOB, LEASE, "q", "task", 0, {}, b"", attempt, max_attempts, 0, 0, False)


def settled(to: State, outcome: str, **fields: object) -> Settlement:
    values: dict[str, object] = {"ran": RAN} | fields
    return Settlement(JOB, LEASE, to, outcome, **values)  # type: ignore[arg-type]


TABLE: list[tuple[str, int, Outcome, Settlement]] = [
    ("done", 1, Done(b"42"), settled(State.DONE, "done", result=b"42")),
    ("done at last", 3, Done(None), settled(State.DONE, "done")),
    ("failed", 1, Failed("boom", 7), settled(State.SCHEDULED, "failed", delay=7, error="boom")),
    ("failed for good", 3, Failed("boom", 7), settled(State.DEAD, "failed", error="boom")),
    ("failed beyond", 4, Failed("boom", 7), settled(State.DEAD, "failed", error="boom")),
    ("retried", 2, Retried("later", 9), settled(State.SCHEDULED, "retry", delay=9, error="later")),
    ("retried at last", 3, Retried("later", 9), settled(State.DEAD, "retry", error="later")),
    (
        "snoozed",
        1,
        Snoozed("nap", 5),
        settled(State.SCHEDULED, "snoozed", delay=5, error="nap", counts_attempt=False),
    ),
    (
        "snoozed at last",
        3,
        Snoozed("nap", 5),
        settled(State.SCHEDULED, "snoozed", delay=5, error="nap", counts_attempt=False),
    ),
    ("died", 1, Died("bad input"), settled(State.DEAD, "dead", error="bad input")),
    ("cancelled", 1, Cancelled("operator"), settled(State.CANCELLED, "cancelled", error="operator")),
    (
        "released",
        3,
        Released("drain"),
        settled(State.READY, "released", ran=0, error="drain", counts_attempt=False, unstarted=True),
    ),
    (
        "released for later",
        1,
        Released("unknown task", 6),
        settled(
            State.SCHEDULED, "released", ran=0, delay=6, error="unknown task", counts_attempt=False, unstarted=True
        ),
    ),
    ("lost", 2, Lost("worker gone"), settled(State.READY, "lost", error="worker gone")),
    ("lost at last", 3, Lost("worker gone"), settled(State.DEAD, "lost", error="worker gone")),
]


@pytest.mark.parametrize(("attempt", "outcome", "expected"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_every_outcome_settles_as_the_table_says(attempt: int, outcome: Outcome, expected: Settlement) -> None:
    assert settle(claim(attempt), outcome, RAN) == expected


def test_the_table_names_every_outcome_there_is() -> None:
    assert {type(row[2]) for row in TABLE} == set(Outcome.__args__)


outcomes = st.sampled_from([row[2] for row in TABLE])


@given(outcomes, st.integers(1, 50), st.integers(1, 50), st.integers(0, 10**9))
def test_only_a_job_that_goes_on_has_a_delay_and_only_one_that_ran_is_charged(
    outcome: Outcome, attempt: int, max_attempts: int, ran: int
) -> None:
    settlement = settle(claim(attempt, max_attempts), outcome, ran)
    assert (settlement.delay is not None) == (settlement.to is State.SCHEDULED)
    assert settlement.ran == (0 if settlement.unstarted else ran)
    assert settlement.to is not State.RUNNING


@given(outcomes, st.integers(1, 50), st.integers(1, 50))
def test_a_job_that_was_asked_to_cancel_never_goes_on_and_an_end_stays_an_end(
    outcome: Outcome, attempt: int, max_attempts: int
) -> None:
    settlement = settle(claim(attempt, max_attempts), outcome, RAN)
    asked = settlement.if_asked_to_cancel()
    if settlement.to.is_final:
        assert asked == settlement
    else:
        assert (asked.to, asked.outcome, asked.delay) == (State.CANCELLED, "cancelled", None)
        # What it gives back and what is told of it is that of its outcome.
        assert (
            msgspec.structs.replace(asked, to=settlement.to, outcome=settlement.outcome, delay=settlement.delay)
            == settlement
        )


@given(st.sampled_from([Failed("x", 1), Retried("x", 1), Lost("x")]), st.integers(1, 50), st.integers(1, 50))
def test_a_job_whose_attempts_are_used_up_never_runs_again(outcome: Outcome, attempt: int, most: int) -> None:
    settlement = settle(claim(attempt, most), outcome, RAN)
    assert settlement.counts_attempt
    assert (settlement.to is State.DEAD) == (attempt >= most)
