"""Fairlane's runs: jobs enqueued by the public API, drained by `fairlane worker` processes with default settings."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg

__all__ = ["Drain", "drain", "stop"]

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """One drain, as the database and the handlers recorded it."""

    jobs: int
    counted_by_handlers: int
    enqueue_seconds: float
    drain_seconds: float

    @property
    def jobs_per_second(self) -> float:
        return self.jobs / self.drain_seconds


def drain(
    url: str, calls: str, jobs: int, *, processes: int, concurrency: int, queue: str, warm: bool = False
) -> Drain:
    """Migrate an empty database, enqueue `jobs` calls of a workload, and drain them with fresh worker processes.

    `warm`: the workers come first and wait for work. Sixty-four interpreters take long to start on two cores, and their
    start is not what is measured.
    """
    environment = dict(os.environ, FAIRLANE_URL=url, PYTHONPATH=str(ROOT))
    command = [sys.executable, "-m", "fairlane.cli"]
    subprocess.run([*command, "migrate", "--url", url], check=True, env=environment, stdout=subprocess.DEVNULL)
    with tempfile.TemporaryDirectory(prefix="fairlane-bench-") as ledger:
        environment["BENCH_LEDGER"] = ledger
        crew: list[subprocess.Popen[bytes]] = []
        try:
            seconds = 0.0 if warm else _enqueue(calls, jobs, environment)
            worker = [*command, "worker", "bench.workload:app", "--queues", queue, "--concurrency", str(concurrency)]
            worker += ["--log-level", "warning"]
            crew += [subprocess.Popen(worker, env=environment, cwd=ROOT) for _ in range(processes)]
            if warm:
                asyncio.run(_until(url, WAITING, processes, crew))
                seconds = _enqueue(calls, jobs, environment)
            asyncio.run(_until(url, DRAINED, 1, crew))
            drained = asyncio.run(_drain_seconds(url))
        finally:
            stop(crew)
        entries: Sequence[dict[str, Any]] = [json.loads(file.read_text()) for file in Path(ledger).glob("*.json")]
    return Drain(
        jobs=jobs,
        counted_by_handlers=sum(entry["runs"] for entry in entries),
        enqueue_seconds=seconds,
        drain_seconds=drained,
    )


def _enqueue(calls: str, jobs: int, environment: dict[str, str]) -> float:
    started = time.monotonic()
    subprocess.run([sys.executable, "-m", "bench.enqueue", calls, str(jobs)], check=True, env=environment, cwd=ROOT)
    return time.monotonic() - started


WAITING = "select count(distinct worker) from fairlane.waiters"
# Release bells of the last batch may stay unfolded; jobs that are scheduled, ready or running may not.
DRAINED = "select 1 - exists (select from fairlane.jobs where state in (0, 1, 2))::integer"


async def _until(url: str, query: str, least: int, crew: Sequence[subprocess.Popen[bytes]]) -> None:
    connection = await asyncpg.connect(url)
    try:
        deadline = time.monotonic() + TIMEOUT
        while time.monotonic() < deadline:
            if await connection.fetchval(query) >= least:
                return
            if dead := [process.returncode for process in crew if process.poll() is not None]:
                raise RuntimeError(f"a worker ended before its work was done (exit status {dead[0]})")
            await asyncio.sleep(0.25)
        raise RuntimeError(f"not within {TIMEOUT:.0f} s: {query}")
    finally:
        await connection.close()


async def _drain_seconds(url: str) -> float:
    """From the first claim to the last settlement, on the database's clock."""
    connection = await asyncpg.connect(url)
    try:
        span = await connection.fetchval("select max(finished_at) - min(claimed_at) from fairlane.jobs where state = 3")
        return float(span) / 1e6
    finally:
        await connection.close()


def stop(crew: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask processes to end, and see to it that they do."""
    _each(crew, lambda process: process.send_signal(signal.SIGTERM))
    for process in crew:
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _each(crew: Sequence[subprocess.Popen[bytes]], act: Callable[[subprocess.Popen[bytes]], None]) -> None:
    for process in crew:
        with contextlib.suppress(ProcessLookupError):
            act(process)
