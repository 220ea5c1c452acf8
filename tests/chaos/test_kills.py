"""L18, A09, C01, E06 with real processes and real kills: nothing lost, nothing settled twice, no limit exceeded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from uuid import UUID

import pytest

from fairlane import App, State
from tests.chaos.chaos_app import LIMIT
from tests.chaos.fleet import WATCHDOG, Fleet

JOBS = 20_000
KILL_EVERY = 1_000
"""Ended runs between two kills."""


def run_chaos(
    fleet: Fleet, url: str, folder: Path, *, producers: int, jobs: int, disturb: Callable[[float], None]
) -> tuple[set[str], set[str]]:
    """Let a fleet run what producers send, and disturb it all the while, until nothing is left: the jobs that were
    committed, and those that were rolled back. `disturb` is told by when all has to be over."""
    sources = fleet.produce(producers, jobs, folder)
    committed: set[str] = set()
    rolled_back: set[str] = set()
    deadline = time.monotonic() + WATCHDOG
    try:
        while sources or not committed <= fleet.ledger.ended_jobs or not asyncio.run(all_done(url, fleet.unsure())):
            assert time.monotonic() < deadline, f"{len(committed - fleet.ledger.ended_jobs)} jobs have never ended"
            fleet.listen(0.05)
            disturb(deadline)
            for source in [each for each in sources if each.process.poll() is not None]:
                assert source.process.returncode == 0, "a producer failed"
                kept, dropped = source.ids()
                committed |= kept
                rolled_back |= dropped
                sources.remove(source)
    finally:
        for source in sources:
            source.process.kill()
            source.process.wait()
        codes = fleet.stop()
    assert set(codes) == {0}, f"workers that were asked to stop ended with {codes}"
    return committed, rolled_back


def run_kills(url: str, folder: Path, *, workers: int, producers: int) -> tuple[Fleet, set[str], set[str]]:
    fleet = Fleet(url, workers, concurrency=20, lease="5s", seed=7)

    def kill(_: float) -> None:
        if len(fleet.ledger.ended_jobs) >= KILL_EVERY * (len(fleet.killed) + 1):
            fleet.kill_one()

    return fleet, *run_chaos(fleet, url, folder, producers=producers, jobs=JOBS, disturb=kill)


async def all_done(url: str, jobs: set[str]) -> bool:
    return all(state is State.DONE for state, _ in (await states(url, jobs)).values())


async def states(url: str, jobs: set[str]) -> dict[str, tuple[State, int]]:
    app = App(url)
    async with app:
        store = await app.opened()
        records = [await store.job(UUID(job)) for job in sorted(jobs)]
    return {str(record.id): (record.state, record.attempt) for record in records}


def judge(url: str, fleet: Fleet, committed: set[str], rolled_back: set[str]) -> None:
    runs = fleet.ledger.by_job()
    assert not rolled_back & runs.keys(), "a job that was rolled back has run"
    assert runs.keys() == committed, "a job was lost, or one ran that nobody committed"
    for job, attempts in runs.items():
        last = max(attempts, key=lambda run: run.started)
        for run in attempts:
            assert run is last or run.pid in fleet.killed, f"job {job} ran twice although nobody was killed"
        assert last.ended is not None, f"the last run of job {job} never ended"
    found = asyncio.run(states(url, committed))
    for job, (state, _) in found.items():
        assert state is State.DONE, f"job {job} is {state}"
    most = fleet.ledger.most_at_once(fleet.deaths)
    assert max(most.values()) <= LIMIT, f"more than {LIMIT} runs of a key at one instant: {most}"
    assert max(most.values()) == LIMIT, "the limit was never reached: this test proves nothing"
    assert len(fleet.killed) >= 5, "hardly anybody was killed: this test proves nothing"


@pytest.mark.slow
def test_kills_on_postgresql_lose_nothing_and_exceed_no_limit(postgres_url: str, tmp_path: Path) -> None:
    fleet, committed, rolled_back = run_kills(postgres_url, tmp_path, workers=4, producers=6)
    assert len(committed) >= JOBS * 0.99
    judge(postgres_url, fleet, committed, rolled_back)


@pytest.mark.slow
def test_kills_on_a_shared_sqlite_file_lose_nothing_and_exceed_no_limit(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'chaos.db'}"
    fleet, committed, rolled_back = run_kills(url, tmp_path, workers=2, producers=2)
    judge(url, fleet, committed, rolled_back)
