"""Workers that stand still for longer than their lease and come back: only what they had begun is run again."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from fairlane import State
from tests.chaos.chaos_app import LIMIT
from tests.chaos.fleet import WATCHDOG, Fleet, Run, Standstill
from tests.chaos.test_kills import all_done, states

STANDSTILLS = 2
BETWEEN = 1_500
"""Ended runs between two of them."""
UNSETTLED = 1_000_000_000
"""Nanoseconds from the end of a run within which it may not be settled yet."""


def run_with_standstills(url: str, folder: Path, jobs: int) -> tuple[Fleet, set[str]]:
    fleet = Fleet(url, 3, concurrency=20, lease="2s", seed=7)
    sources = fleet.produce(2, jobs, folder)
    committed: set[str] = set()
    next_one = BETWEEN
    deadline = time.monotonic() + WATCHDOG
    try:
        while sources or not committed <= fleet.ledger.ended_jobs or not asyncio.run(all_done(url, fleet.unsure())):
            assert time.monotonic() < deadline, f"{len(committed - fleet.ledger.ended_jobs)} jobs have never ended"
            fleet.listen(0.05)
            if len(fleet.standstills) < STANDSTILLS and len(fleet.ledger.ended_jobs) >= next_one:
                fleet.let_one_stand_still(deadline)
                next_one = len(fleet.ledger.ended_jobs) + BETWEEN
            for source in [each for each in sources if each.process.poll() is not None]:
                assert source.process.returncode == 0, "a producer failed"
                committed |= source.ids()[0]
                sources.remove(source)
    finally:
        for source in sources:
            source.process.kill()
            source.process.wait()
        codes = fleet.stop()
    assert set(codes) == {0}, f"workers that were asked to stop ended with {codes}"
    return fleet, committed


def was_under_way(run: Run, standstills: list[Standstill]) -> bool:
    """Whether its process stood still before it was settled."""
    return any(
        each.pid == run.pid and run.started <= each.began and (run.ended is None or run.ended >= each.began - UNSETTLED)
        for each in standstills
    )


@pytest.mark.slow
def test_who_comes_back_begins_nothing_that_others_have(postgres_url: str, tmp_path: Path) -> None:
    fleet, committed = run_with_standstills(postgres_url, tmp_path, 8_000)
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
