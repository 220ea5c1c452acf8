"""Every kind of limit among real worker processes, judged by what the handlers told and by nothing else."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from fairlane.worker.execution import LONGEST_START_LAG

ROOT = Path(__file__).resolve().parents[2]
WATCHDOG = 240.0
"""Seconds without the expected end after which the test fails. Never the measure of anything."""
LATE = LONGEST_START_LAG / 1e6
"""Seconds by which a start may follow its claim on a machine that has other things to do."""


@dataclass
class Run:
    job: str
    queue: str
    key: str
    number: int
    started: float
    ended: float = 0.0


@contextmanager
def workers(url: str, count: int) -> Iterator[int]:
    """So many `fairlane worker` processes, and where their handlers tell. At the end a SIGTERM stops them."""
    read, write = os.pipe()
    environment = dict(os.environ, FAIRLANE_URL=url, CHAOS_PIPE=str(write), PYTHONPATH=str(ROOT))
    command = [sys.executable, "-m", "fairlane.cli", "worker", "tests.chaos.policies_app:app", "--log-level", "error"]
    crew = [subprocess.Popen(command, env=environment, cwd=ROOT, pass_fds=[write]) for _ in range(count)]
    try:
        yield read
    finally:
        for process in crew:
            process.send_signal(signal.SIGTERM)
        for process in crew:
            process.wait(60)
        os.close(read)
        os.close(write)


def told(pipe: int, jobs: int) -> list[Run]:
    """What the handlers told until so many jobs had ended."""
    runs: dict[str, Run] = {}
    ended, pending, deadline = 0, b"", time.monotonic() + WATCHDOG
    while ended < jobs:
        assert time.monotonic() < deadline, f"{ended} of {jobs} jobs ended"
        if not select.select([pipe], [], [], 1.0)[0]:
            continue
        pending += os.read(pipe, 1 << 16)
        *lines, pending = pending.split(b"\n")
        for line in lines:
            what, job, attempt, queue, key, number, at = line.decode().split()
            if what == "start":
                assert job not in runs, f"{job} was started again in attempt {attempt}"
                runs[job] = Run(job, queue, key, int(number), int(at) / 1e9)
            else:
                runs[job].ended = int(at) / 1e9
                ended += 1
    return list(runs.values())


def most_at_once(runs: Iterable[Run]) -> int:
    """The highest number of runs at one instant. What ends at an instant does not overlap with what starts then."""
    edges = sorted(edge for run in runs for edge in ((run.started, 1), (run.ended, -1)))
    most = running = 0
    for _, change in edges:
        running += change
        most = max(most, running)
    return most


@pytest.fixture(params=["sqlite-file", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite-file":
        return f"sqlite:///{tmp_path / 'jobs.db'}"
    found: str = request.getfixturevalue("postgres_url")
    return found


@pytest.mark.slow
async def test_every_limit_holds_among_worker_processes_by_what_handlers_saw(url: str) -> None:
    jobs = {"capped": 240, "metered": 150, "rolling": 75, "train": 150, "serve": 150}
    produce = [sys.executable, "-m", "tests.chaos.policies_producer", *(f"{name}={n}" for name, n in jobs.items())]
    environment = dict(os.environ, FAIRLANE_URL=url, PYTHONPATH=str(ROOT))
    subprocess.run(produce, env=environment, cwd=ROOT, check=True, timeout=WATCHDOG)
    with workers(url, 3) as pipe:
        runs = told(pipe, sum(jobs.values()))
    assert Counter(run.queue for run in runs) == jobs
    by_queue: dict[str, list[Run]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run.started):
        by_queue[run.queue].append(run)

    # Concurrency by key and of the whole queue: never more, and as many.
    tenants = {run.key for run in by_queue["capped"]}
    assert {most_at_once(run for run in by_queue["capped"] if run.key == key) for key in tenants} == {3}
    assert most_at_once(by_queue["capped"]) == 8

    # A rate by key: in any time t at most burst + rate·t starts.
    starts = [run.started for run in by_queue["metered"]]
    for first in range(len(starts)):
        for last in range(first, len(starts)):
            assert last - first + 1 <= 5 + 60 * (starts[last] - starts[first] + LATE)

    # A rolling window: at most the limit in any of them.
    starts = [run.started for run in by_queue["rolling"]]
    assert all(later - earlier > 1 - LATE for earlier, later in zip(starts, starts[30:], strict=False))

    # A limit that two queues share: never more in both together, as many, and both had their part from the beginning.
    both = sorted([*by_queue["train"], *by_queue["serve"]], key=lambda run: run.started)
    assert most_at_once(both) == 6
    early = Counter(run.queue for run in both[:150])
    assert min(early["train"], early["serve"]) >= 30
