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

__all__ = ["Drain", "drain"]

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


def drain(url: str, calls: str, jobs: int, *, processes: int, concurrency: int, queue: str) -> Drain:
    """Migrate an empty database, enqueue `jobs` calls of a workload, and drain them with fresh worker processes."""
    environment = dict(os.environ, FAIRLANE_URL=url, PYTHONPATH=str(ROOT))
    command = [sys.executable, "-m", "fairlane.cli"]
    subprocess.run([*command, "migrate", "--url", url], check=True, env=environment, stdout=subprocess.DEVNULL)
    started = time.monotonic()
    enqueue = [sys.executable, "-m", "bench.enqueue", calls, str(jobs)]
    subprocess.run(enqueue, check=True, env=environment, cwd=ROOT)
    enqueued = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fairlane-bench-") as ledger:
        environment["BENCH_LEDGER"] = ledger
        worker = [*command, "worker", "bench.workload:app", "--queues", queue, "--concurrency", str(concurrency)]
        crew = [
            subprocess.Popen([*worker, "--log-level", "warning"], env=environment, cwd=ROOT) for _ in range(processes)
        ]
        try:
            asyncio.run(_until_drained(url, crew))
            seconds = asyncio.run(_drain_seconds(url))
        finally:
            _stop(crew)
        entries: Sequence[dict[str, Any]] = [json.loads(file.read_text()) for file in Path(ledger).glob("*.json")]
    return Drain(
        jobs=jobs,
        counted_by_handlers=sum(entry["runs"] for entry in entries),
        enqueue_seconds=enqueued - started,
        drain_seconds=seconds,
    )


async def _until_drained(url: str, crew: Sequence[subprocess.Popen[bytes]]) -> None:
    connection = await asyncpg.connect(url)
    try:
        deadline = time.monotonic() + TIMEOUT
        while time.monotonic() < deadline:
            # Release bells of the last batch may stay unfolded; jobs that are ready or running may not.
            left = await connection.fetchval("select exists (select from fairlane.jobs where state in (0, 1, 2))")
            if not left:
                return
            if dead := [process.returncode for process in crew if process.poll() is not None]:
                raise RuntimeError(f"a worker ended before the queue was empty (exit status {dead[0]})")
            await asyncio.sleep(0.25)
        raise RuntimeError(f"the queue was not empty after {TIMEOUT:.0f} s")
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


def _stop(crew: Sequence[subprocess.Popen[bytes]]) -> None:
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
