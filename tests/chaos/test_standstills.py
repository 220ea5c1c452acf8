"""Workers that stand still for longer than their lease and come back: only what they had begun is run again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fairlane import State
from tests.chaos.chaos_app import LIMIT
from tests.chaos.fleet import Fleet, Run, Standstill
from tests.chaos.test_kills import run_chaos, states

STANDSTILLS = 2
BETWEEN = 1_500
"""Ended runs between two of them."""
UNSETTLED = 1_000_000_000
"""Nanoseconds from the end of a run within which it may not be settled yet."""


def was_under_way(run: Run, standstills: list[Standstill]) -> bool:
    """Whether its process stood still before it was settled."""
    return any(
        each.pid == run.pid and run.started <= each.began and (run.ended is None or run.ended >= each.began - UNSETTLED)
        for each in standstills
    )


@pytest.mark.slow
def test_who_comes_back_begins_nothing_that_others_have(postgres_url: str, tmp_path: Path) -> None:
    fleet = Fleet(postgres_url, 3, concurrency=20, lease="2s", seed=7)
    next_one = BETWEEN

    def let_stand_still(deadline: float) -> None:
        nonlocal next_one
        if len(fleet.standstills) < STANDSTILLS and len(fleet.ledger.ended_jobs) >= next_one:
            fleet.let_one_stand_still(deadline)
            next_one = len(fleet.ledger.ended_jobs) + BETWEEN

    committed, _ = run_chaos(fleet, postgres_url, tmp_path, producers=2, jobs=8_000, disturb=let_stand_still)
    runs = fleet.ledger.by_job()
    assert runs.keys() == committed, "a job was lost, or one ran that nobody committed"
    # Of several runs of a job, the last attempt is the one that counts; the others were taken over.
    stale = [run for attempts in runs.values() for run in sorted(attempts, key=lambda run: run.attempt)[:-1]]
    assert stale, "nothing had to be run again: this test proves nothing"
    late = [run for run in stale if not was_under_way(run, fleet.standstills)]
    # One may have been between the look at the clock and its first line.
    assert len(late) <= len(fleet.standstills), f"begun although others had them: {late}"
    found = asyncio.run(states(postgres_url, committed))
    assert {state for state, _ in found.values()} == {State.DONE}
    # A run that has lost its claim ends when its process finds out: until then it is one too many.
    for run in stale:
        if run in late:
            del fleet.ledger.runs[run.job, run.attempt, run.pid]
        else:
            began = next(each.began for each in fleet.standstills if each.pid == run.pid and each.began >= run.started)
            run.ended = min(began, run.ended or began)
    most = fleet.ledger.most_at_once(fleet.deaths)
    assert max(most.values()) == LIMIT, f"{LIMIT} runs of a key at one instant are allowed: {most}"
