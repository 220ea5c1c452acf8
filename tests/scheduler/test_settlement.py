"""What each outcome means for its job: the whole table."""

from __future__ import annotations

from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.job import BuiltEffects, Claim, NewJob, OnDead, State
from fairlane.scheduler.settlement import (
    SEEN,
    UNSEEN,
    Cancelled,
    Died,
    Done,
    Failed,
    Interrupted,
    Lost,
    Released,
    Retried,
    RunOutcome,
    Settlement,
    Snoozed,
    Verdict,
    settle,
)

JOB, LEASE = UUID(int=1), UUID(int=2)
RAN = 1_500


def claim(attempt: int, max_attempts: int = 3) -> Claim:
    return Claim(JOB, LEASE, "q", "task", 0, {}, b"", attempt, max_attempts, 0, 0, False)


def settled(to: State, outcome: str, **fields: object) -> Settlement:
    values: dict[str, object] = {"ran": RAN} | fields
    return Settlement(JOB, LEASE, to, outcome, **values)  # type: ignore[arg-type]


TABLE: list[tuple[str, int, RunOutcome, Settlement]] = [
    ("done", 1, Done(b"42"), settled(State.DONE, "done", result=b"42")),
    ("done at last", 3, Done(None), settled(State.DONE, "done")),
    ("failed", 1, Failed("boom", 7), settled(State.SCHEDULED, "failed", delay=7, error="boom")),
    ("failed for good", 3, Failed("boom", 7), settled(State.DEAD, "failed", error="boom")),
    ("failed beyond", 4, Failed("boom", 7), settled(State.DEAD, "failed", error="boom")),
    ("retried", 2, Retried("later", 9), settled(State.SCHEDULED, "retry", delay=9, error="later")),
    (
        "retried by an engine at last",
        3,
        Retried("later", 9, is_bounded=False),
        settled(State.SCHEDULED, "retry", delay=9, error="later"),
    ),
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
    ("interrupted", 2, Interrupted("shut down"), settled(State.READY, "lost", error="shut down", is_cut_short=True)),
    (
        "interrupted at last",
        3,
        Interrupted("shut down"),
        settled(State.DEAD, "lost", error="shut down", is_cut_short=True),
    ),
    (
        "lost, and nobody saw how",
        3,
        Lost("gone", UNSEEN),
        settled(State.READY, "lost", error="gone", counts_attempt=False, is_cut_short=True, suspicion=1),
    ),
    (
        "lost in company",
        3,
        Lost("gone", SEEN),
        settled(State.READY, "lost", error="gone", counts_attempt=False, is_cut_short=True, suspicion=2),
    ),
    (
        "lost before it ran",
        3,
        Lost("gone", 0),
        settled(State.READY, "released", error="gone", counts_attempt=False, is_cut_short=True),
    ),
]


@pytest.mark.parametrize(("attempt", "outcome", "expected"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_every_outcome_settles_as_the_table_says(attempt: int, outcome: RunOutcome, expected: Settlement) -> None:
    assert settle(claim(attempt), outcome, RAN) == expected


def test_the_table_names_every_outcome_there_is() -> None:
    assert {type(row[2]) for row in TABLE} == set(RunOutcome.__args__)


outcomes = st.sampled_from([row[2] for row in TABLE])


@given(outcomes, st.integers(1, 50), st.integers(1, 50), st.integers(0, 10**9))
def test_only_a_job_that_goes_on_has_a_delay_and_only_one_that_ran_is_charged(
    outcome: RunOutcome, attempt: int, max_attempts: int, ran: int
) -> None:
    settlement = settle(claim(attempt, max_attempts), outcome, ran)
    assert (settlement.delay is not None) == (settlement.to is State.SCHEDULED)
    assert settlement.ran == (0 if settlement.unstarted else ran)
    assert settlement.to is not State.RUNNING


@given(outcomes, st.integers(1, 50), st.integers(1, 50))
def test_a_job_that_was_asked_to_cancel_never_goes_on_and_an_end_stays_an_end(
    outcome: RunOutcome, attempt: int, max_attempts: int
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


@given(st.sampled_from([Failed("x", 1), Retried("x", 1), Interrupted("x")]), st.integers(1, 50), st.integers(1, 50))
def test_a_job_whose_attempts_are_used_up_never_runs_again(outcome: RunOutcome, attempt: int, most: int) -> None:
    settlement = settle(claim(attempt, most), outcome, RAN)
    assert settlement.counts_attempt
    assert (settlement.to is State.DEAD) == (attempt >= most)


def as_suspect(attempt: int, most: int, suspicion: int) -> Claim:
    return msgspec.structs.replace(claim(attempt, most), suspicion=suspicion)


@given(st.integers(1, 50), st.integers(1, 50), st.integers(2, 10), st.sampled_from([UNSEEN, SEEN]))
def test_a_suspect_that_is_seen_to_die_alone_pays_for_the_losses_before_it_too(
    attempt: int, most: int, suspicion: int, seen: int
) -> None:
    # L23
    settlement = settle(as_suspect(attempt, most, suspicion), Lost("x", seen), RAN)
    assert settlement.counts_attempt
    # Nobody saw it: it may have waited for its turn to run alone.
    assert (settlement.to is State.DEAD) == (attempt + (-(-suspicion // 2) if seen == SEEN else 0) >= most)
    assert settlement.suspicion == suspicion
    assert settlement.verdict is Verdict.FAILED


@pytest.mark.parametrize(("most", "alone"), [(1, 1), (2, 1), (3, 2), (5, 4)])
def test_a_killer_is_dead_after_as_many_losses_as_it_has_attempts_the_first_in_company(most: int, alone: int) -> None:
    # L23
    held, losses = claim(1, most), 0
    settlement = settle(held, Lost("x", SEEN), RAN)
    while settlement.to is State.READY:
        held = as_suspect(held.attempt + (losses > 0), most, settlement.suspicion)
        settlement = settle(held, Lost("x", SEEN), RAN)
        losses += 1
    assert losses == alone


@given(st.integers(1, 50), st.integers(1, 50), st.integers(0, 1), st.sampled_from([0, UNSEEN, SEEN]))
def test_a_job_that_was_not_alone_never_dies_of_a_loss(attempt: int, most: int, suspicion: int, added: int) -> None:
    # L23
    settlement = settle(as_suspect(attempt, most, suspicion), Lost("x", added), RAN)
    assert (settlement.to, settlement.counts_attempt) == (State.READY, False)
    assert settlement.suspicion == suspicion + added
    assert settlement.verdict is (Verdict.FAILED if added else Verdict.NEUTRAL)


@given(st.integers(1, 50), st.lists(st.sampled_from([UNSEEN, SEEN]), min_size=60, max_size=60))
def test_a_job_that_kills_every_process_dies_within_its_attempts(most: int, losses: list[int]) -> None:
    # L23: at most as many runs as it has attempts, however its losses were seen, beyond two in company.
    held = claim(1, most)
    for run, added in enumerate(losses, 1):
        settlement = settle(held, Lost("x", added), RAN)
        if settlement.to is State.DEAD:
            assert run <= most + 2
            return
        held = as_suspect(held.attempt + settlement.counts_attempt, most, settlement.suspicion)
    raise AssertionError("it never died")


@given(outcomes, st.integers(0, 9))
def test_a_run_that_ended_by_itself_clears_its_job_and_one_that_never_began_does_not(
    outcome: RunOutcome, suspicion: int
) -> None:
    settlement = settle(as_suspect(1, 3, suspicion), outcome, RAN)
    if isinstance(outcome, Released):
        assert settlement.suspicion == suspicion
    elif not isinstance(outcome, Lost):
        assert settlement.suspicion == 0


def follow_up(number: int) -> NewJob:
    return NewJob(UUID(int=number), "q", "task", 0, b"lane", {}, {}, b"[]", 3)


def new_ids(count: int) -> list[UUID]:
    return [UUID(int=1_000 + n) for n in range(count)]


def test_only_death_applies_what_was_declared_for_it() -> None:
    for _, attempt, outcome, _ in TABLE:
        settlement = settle(claim(attempt), outcome, RAN)
        assert settlement.is_death is (settlement.to is State.DEAD)


def test_a_death_has_the_effects_that_were_declared_and_new_ids_where_none_was_chosen() -> None:
    declared = BuiltEffects((follow_up(10), follow_up(11), follow_up(12)), {"a": b"1"}, ("b",))
    stored = OnDead(declared, frozenset({UUID(int=11)})).encode()
    death = settle(claim(3), Died("x"), RAN).with_on_dead(stored, new_ids)
    expected = BuiltEffects((follow_up(1_000), follow_up(11), follow_up(1_001)), {"a": b"1"}, ("b",))
    assert death == settled(State.DEAD, "dead", error="x", effects=expected)


@pytest.mark.parametrize("stored", [b"", b"\xc1", msgspec.msgpack.encode({"effects": 5}), b"\x81\xff\xff"])
def test_what_cannot_be_read_is_left_out_of_a_death_that_says_so(stored: bytes) -> None:
    death = settle(claim(3), Died("x"), RAN).with_on_dead(stored, new_ids)
    assert death.to is State.DEAD
    assert death.effects is None
    assert (death.error or "").startswith("x\n\nits on_dead effects were refused: ")


@given(st.binary(max_size=200))
def test_no_bytes_keep_a_job_from_dying(stored: bytes) -> None:
    assert settle(claim(3), Died(""), RAN).with_on_dead(stored, new_ids).to is State.DEAD


def test_effects_for_death_are_stored_whole() -> None:
    nested = OnDead(BuiltEffects(puts={"deep": b"\x00\xff"})).encode()
    job = msgspec.structs.replace(follow_up(10), on_dead=nested, delay=5, keys={"account": None})
    declared = OnDead(BuiltEffects((job,), {"k": b"1"}, ("d",)), frozenset({job.id}))
    assert OnDead.decode(declared.encode()) == declared
