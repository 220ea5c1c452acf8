"""Real producers and workers that declare the old and the new number of partitions, and a change that is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from fairlane import App
from fairlane.policy.partitions import Phase, phase_of
from tests.chaos.test_policies import Run, most_at_once
from tests.waiting import until_blocking

ROOT = Path(__file__).resolve().parents[2]
WATCHDOG = 240.0
OLD, NEW = 2, 5


class Deploy:
    """Processes of one program, each with the number of partitions that it declares."""

    def __init__(self, url: str, ledger: Path) -> None:
        self._url, self._path = url, ledger
        self._ledger = os.open(ledger, os.O_APPEND | os.O_CREAT | os.O_WRONLY)
        self.workers: list[subprocess.Popen[str]] = []
        self._producers: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str, declared: int, talks: bool = False) -> subprocess.Popen[str]:
        environment = dict(
            os.environ,
            FAIRLANE_URL=self._url,
            ROLLING_LEDGER=str(self._ledger),
            ROLLING_PARTITIONS=str(declared),
            PYTHONPATH=str(ROOT),
        )
        return subprocess.Popen(
            [sys.executable, "-m", *arguments],
            env=environment,
            cwd=ROOT,
            pass_fds=[self._ledger],
            stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
            stdout=subprocess.PIPE if talks else subprocess.DEVNULL,
            text=True,
        )

    def worker(self, declared: int) -> None:
        command = ("fairlane.cli", "worker", "tests.chaos.rolling_app:app", "--log-level", "error")
        self.workers.append(self.start(*command, declared=declared))

    def producer(self, name: str, declared: int) -> None:
        self._producers.append(self.start("tests.chaos.rolling_producer", name, declared=declared, talks=True))

    def sent(self) -> int:
        """End the producers; how many jobs they have stored."""
        answers = [producer.communicate("end\n", timeout=WATCHDOG)[0] for producer in self._producers]
        return sum(map(int, answers))

    def runs(self) -> list[Run]:
        """What handlers have written so far, of runs that have ended."""
        found: dict[str, Run] = {}
        for line in self._path.read_text().splitlines():
            what, job, account, number, at = line.split()
            if what == "start":
                assert job not in found, f"{job} ran twice"
                found[job] = Run(job, "email", account, int(number), int(at) / 1e9)
            else:
                found[job].ended = int(at) / 1e9
        return [run for run in found.values() if run.ended]

    def close(self) -> None:
        for producer in self._producers:
            if producer.returncode is None:
                producer.kill()
                producer.communicate()
        for worker in self.workers:
            worker.send_signal(signal.SIGTERM)
        for worker in self.workers:
            worker.wait(60)
        os.close(self._ledger)


def phase(url: str) -> tuple[Phase, int]:
    async def look() -> tuple[Phase, int]:
        store = App(url).make_store()
        await store.open()
        try:
            found = await store.policy("email")
        finally:
            await store.close()
        if found is None:
            return Phase.RESTING, 0
        place = found.policy.partition
        return phase_of(found.policy), 1 if place is None else place.width

    return asyncio.run(look())


@pytest.fixture(params=["sqlite-file", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite-file":
        return f"sqlite:///{tmp_path / 'jobs.db'}"
    found: str = request.getfixturevalue("postgres_url")
    return found


@pytest.mark.slow
def test_programs_with_either_number_work_before_during_and_after_a_change_that_was_killed(
    url: str, tmp_path: Path
) -> None:
    """P5, F13: every job runs once, in the order of its account and within limits, though nobody ends the change."""
    deploy = Deploy(url, tmp_path / "ledger")
    try:
        deploy.worker(OLD)
        until_blocking(lambda: phase(url)[1] == OLD)
        # The new program before the change, and the old one beside it.
        deploy.producer("old", OLD)
        deploy.producer("new", NEW)
        deploy.worker(NEW)
        change = deploy.start("fairlane.cli", "partition", "email", "--to", str(NEW), "--yes", declared=NEW)
        until_blocking(lambda: phase(url)[0] is Phase.MOVING)
        change.kill()
        change.wait()
        assert phase(url)[0] is Phase.MOVING
        # Both start in the middle of it.
        deploy.worker(OLD)
        deploy.producer("late", OLD)
        until_blocking(lambda: phase(url) == (Phase.RESTING, NEW), within=WATCHDOG)
        # And the old one after it.
        deploy.worker(OLD)
        deploy.producer("last", OLD)
        sent = deploy.sent()
        until_blocking(lambda: len(deploy.runs()) >= sent, within=WATCHDOG)
        assert [worker.poll() for worker in deploy.workers] == [None] * 4, "none ended because of a declared number"
        runs = deploy.runs()
    finally:
        deploy.close()
    assert len(runs) == sent > 100
    by_account: defaultdict[str, list[Run]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run.started):
        by_account[run.key].append(run)
    for own in by_account.values():
        assert [run.number for run in own] == list(range(len(own)))
        assert most_at_once(own) == 1
    assert most_at_once(runs) <= 12
