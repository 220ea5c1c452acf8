"""Processes × partitions: a fair queue with a claim lock for each of its partitions, near and a round trip away."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack

import asyncpg

from bench.crew import DRAINED, ROOT, Crew, environment, migrate
from bench.judging import Run
from bench.ledger import ran_otherwise, shares
from bench.measuring import CLIENT, JOBS_PER_SECOND
from bench.metering import Meter
from bench.proxy import far_away
from bench.running import Bench, Work
from bench.works_postgres import CONCURRENCY

__all__ = ["works"]

ROUND_TRIP_MS = 1.0
SHAPES = ((1, 1), (2, 1), (4, 1), (2, 2), (4, 4))
FAR_SHAPES = ((2, 1), (2, 2))
TRIP = "round trip ms"


def partitioned(processes: int, partitions: int, *, is_far: bool = False) -> Callable[[Bench], Run]:
    """Drain one queue. Its jobs are enqueued from near; only the workers are far away."""

    def run(bench: Bench) -> Run:
        jobs, url = bench.jobs * 2, bench.database()
        migrate(url)
        settings = {"BENCH_PARTITIONS": str(partitions)}
        command = [sys.executable, "-m", "bench.partitioned", str(jobs)]
        subprocess.run(command, check=True, env=environment(url) | settings, cwd=ROOT)
        with ExitStack() as stack:
            workers_url = stack.enter_context(far_away(url, ROUND_TRIP_MS)) if is_far else url
            trip = asyncio.run(_round_trip(workers_url))
            meter = Meter.started(bench, url)
            crew = stack.enter_context(
                Crew.at_work(
                    workers_url, "email", processes, CONCURRENCY, app="bench.partitioned:app", settings=settings
                )
            )
            looks = crew.wait(url, DRAINED, 1)
            meter.stop()
            crew.read_processors()
        if wrong := ran_otherwise((start for entry in crew.entries for start in entry.starts), jobs):
            raise RuntimeError(f"partitions: {wrong} of {jobs} jobs did not run exactly once")
        shared = shares([entry.starts for entry in crew.entries])
        return Run(
            figures={
                # Workers that start one after the other are only compared while all of them work.
                JOBS_PER_SECOND: shared.jobs_per_second if len(crew.entries) == processes else 0.0,
                CLIENT: crew.handling_cpu / jobs * 1e6,
                **meter.figures(jobs, looks),
                TRIP: trip,
            },
            foreign_load=meter.foreign_load,
            configuration=f"{jobs:,} jobs, {processes} × `fairlane worker --concurrency {CONCURRENCY}`",
        )

    return run


async def _round_trip(url: str) -> float:
    """Milliseconds of the shortest of many statements: what the way alone takes."""
    connection = await asyncpg.connect(url)
    try:
        times = []
        for _ in range(100):
            began = time.perf_counter()
            await connection.fetchval("select 1")
            times.append(time.perf_counter() - began)
        return min(times) * 1e3
    finally:
        await connection.close()


def name_of(processes: int, partitions: int, *, is_far: bool = False) -> str:
    crew = "1 process" if processes == 1 else f"{processes} processes"
    queue = "1 partition" if partitions == 1 else f"{partitions} partitions"
    return f"{crew} × {queue}{', 1 ms away' if is_far else ''}"


def works() -> list[Work]:
    shapes = [(*shape, False) for shape in SHAPES] + [(*shape, True) for shape in FAR_SHAPES]
    return [
        Work(
            name=name_of(processes, partitions, is_far=is_far),
            what="`Fair` over 1,000 accounts, no-op",
            run=partitioned(processes, partitions, is_far=is_far),
            rounds=3,
        )
        for processes, partitions, is_far in shapes
    ]
