"""L23 with real processes: beside jobs that kill their process nobody else dies, and the killers do."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from uuid import UUID

import pytest

from fairlane import App, State
from tests.chaos.fleet import ROOT
from tests.waiting import until_blocking

KILLERS, INNOCENTS = (24, 1_000) if os.environ.get("FAIRLANE_CULPRITS") else (6, 60)
"""`FAIRLANE_CULPRITS=1` runs it at full size."""
WITHIN = 900.0 if os.environ.get("FAIRLANE_CULPRITS") else 240.0
MAX_ATTEMPTS = 3
TWICE_UNSEEN = 2
"""Runs in company before a job is a suspect, where nobody saw its process die."""


class Scene:
    """Jobs in a database, the worker command that is to run them, and what their handlers have noted."""

    def __init__(self, url: str, folder: Path, *arguments: str) -> None:
        self._url = url
        self._notes = folder / "ledger"
        self._notes.touch()
        self._environment = dict(
            os.environ,
            FAIRLANE_URL=url,
            CULPRITS_LEDGER=str(self._notes),
            PYTHONPATH=str(ROOT),
            PYTHONWARNINGS="ignore",
        )
        self._command = [sys.executable, "-m", "fairlane.cli", "worker", "tests.chaos.culprits_app:app"]
        self._command += ["--log-level", "error", "--lease", "2s", *arguments]

    def start(self, **environment: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, env=self._environment | environment, cwd=ROOT)

    def enqueue(self, calls: list[tuple[str, int]]) -> dict[tuple[str, int], UUID]:
        program = [sys.executable, "-m", "tests.chaos.culprits_app"]
        stored = subprocess.run(
            program,
            env=self._environment,
            cwd=ROOT,
            input=json.dumps(calls),
            text=True,
            capture_output=True,
            check=True,
        )
        return dict(zip(calls, map(UUID, stored.stdout.split()), strict=True))

    def noted(self, what: str) -> Counter[int]:
        """How often each job has noted this."""
        lines = (line.split() for line in self._notes.read_text().splitlines())
        return Counter(int(number) for word, number in lines if word == what)

    async def states(self, jobs: dict[tuple[str, int], UUID]) -> dict[tuple[str, int], State]:
        app = App(self._url)
        async with app:
            store = await app.opened()
            return {call: (await store.job(job)).state for call, job in jobs.items()}


def stop(worker: subprocess.Popen[bytes]) -> None:
    worker.send_signal(signal.SIGTERM)
    worker.wait(60)


def crowd() -> list[tuple[str, int]]:
    calls = [("innocent", number) for number in range(INNOCENTS)] + [("killer", number) for number in range(KILLERS)]
    random.Random(7).shuffle(calls)
    return calls


def judge(scene: Scene, jobs: dict[tuple[str, int], UUID], in_company: int) -> None:
    states = asyncio.run(scene.states(jobs))
    assert {states["innocent", number] for number in range(INNOCENTS)} == {State.DONE}
    assert {states["killer", number] for number in range(KILLERS)} == {State.DEAD}
    runs = scene.noted("killed")
    assert len(runs) == KILLERS
    assert max(runs.values()) <= in_company + MAX_ATTEMPTS, f"a killer ran {max(runs.values())} times"


@pytest.mark.slow
def test_a_pool_outlives_its_killers_and_no_innocent_dies_with_them(url: str, tmp_path: Path) -> None:
    scene = Scene(url, tmp_path, "--processes", "3", "--concurrency", "20")
    jobs = scene.enqueue(crowd())
    pool = scene.start()
    try:
        until_blocking(lambda: len(scene.noted("ended")) == INNOCENTS, WITHIN)
        until_blocking(lambda: set(asyncio.run(scene.states(jobs)).values()) == {State.DONE, State.DEAD}, WITHIN)
        assert pool.poll() is None, "the pool has given up"
    finally:
        stop(pool)
    judge(scene, jobs, in_company=1)


@pytest.mark.slow
def test_a_worker_that_is_restarted_by_others_kills_no_innocent_either(url: str, tmp_path: Path) -> None:
    # Whoever restarts it saw nothing: a job is a suspect once its worker was lost twice.
    scene = Scene(url, tmp_path, "--concurrency", "20")
    jobs = scene.enqueue(crowd())
    worker = scene.start()

    def is_over() -> bool:
        nonlocal worker
        if worker.poll() is not None:
            worker = scene.start()
        return len(scene.noted("ended")) == INNOCENTS and len(scene.noted("killed")) == KILLERS

    try:
        until_blocking(is_over, WITHIN)
        until_blocking(
            lambda: is_over() and set(asyncio.run(scene.states(jobs)).values()) == {State.DONE, State.DEAD}, WITHIN
        )
    finally:
        stop(worker)
    judge(scene, jobs, in_company=TWICE_UNSEEN)


@pytest.mark.slow
def test_the_loss_of_a_host_makes_no_suspects(url: str, tmp_path: Path) -> None:
    scene = Scene(url, tmp_path, "--processes", "2", "--concurrency", "128")
    jobs = scene.enqueue([("innocent", number) for number in range(256)])
    lost = scene.start(CULPRITS_TAKE="3600")
    until_blocking(lambda: len(scene.noted("began")) == 256, WITHIN)
    lost.kill()  # the process above them all: the others die with it, and nobody is left who saw it
    lost.wait()
    heir = scene.start(CULPRITS_TAKE="3600")
    try:
        # All at once again, which no suspect would be.
        until_blocking(lambda: set(scene.noted("began").values()) == {2}, WITHIN)
        assert set(asyncio.run(scene.states(jobs)).values()) == {State.RUNNING}
    finally:
        heir.kill()
        heir.wait()
