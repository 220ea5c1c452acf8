"""`python -m bench shared`: fifty slots, shared by two queues over 1,000 lanes, drained by `fairlane worker` processes.

Judged by what the handlers wrote down, and by the database: never more than fifty at once, at least 3,000 jobs/s, and
neither queue far from half while both have work.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import asyncpg

from bench.crew import DRAINED, ROOT, WAITING, stop, until
from bench.shared_workload import QUEUES, SLOTS, app, serve, train
from fairlane.testing.postgres import ThrowawayPostgres

LEAST = 3_000
"""Jobs per second that have to be reached."""

BOTH_BUSY = """
select min(least) as until, min(first) as since
from (select queue_id, max(claimed_at) as least, min(claimed_at) as first from fairlane.jobs group by queue_id) q
"""
IN_FLIGHT = """
select sum(least(finished_at, $2) - greatest(claimed_at, $1)) / (($2 - $1) * $3::double precision)
from fairlane.jobs
where claimed_at < $2 and finished_at > $1
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """One drain of both queues."""

    jobs: int
    seconds: float
    most_at_once: int
    shares: dict[str, float]
    used: float
    """Of the slots, the part that was claimed (by the database's record) while both queues had work."""

    @property
    def jobs_per_second(self) -> float:
        return self.jobs / self.seconds


def run(url: str, jobs: int, lanes: int, seconds: float, processes: int, concurrency: int) -> Shared:
    environment = dict(os.environ, FAIRLANE_URL=url, PYTHONPATH=str(ROOT))
    command = [sys.executable, "-m", "fairlane.cli"]
    subprocess.run([*command, "migrate", "--url", url], check=True, env=environment, stdout=subprocess.DEVNULL)
    with tempfile.TemporaryDirectory(prefix="fairlane-bench-") as ledger:
        environment["BENCH_LEDGER"] = ledger
        arguments = [str(jobs), str(lanes), str(seconds)]
        subprocess.run([sys.executable, "-m", "bench.shared", *arguments], check=True, env=environment, cwd=ROOT)
        crew = []
        try:
            for queue in QUEUES * processes:
                worker = [*command, "worker", "bench.shared_workload:app", "--queues", queue]
                worker += ["--concurrency", str(concurrency), "--log-level", "warning"]
                crew.append(subprocess.Popen(worker, env=environment, cwd=ROOT))
            asyncio.run(until(url, DRAINED, 1, crew))
            asyncio.run(until(url, WAITING, len(crew), crew))
            span, last, used = asyncio.run(_recorded(url))
        finally:
            stop(crew)
        runs = [run for file in Path(ledger).glob("*.json") for run in json.loads(file.read_text())]
    if len(runs) != jobs:
        raise RuntimeError(f"{jobs} jobs were enqueued, but handlers counted {len(runs)} runs")
    asyncio.run(_at_rest(url))
    started = Counter(asyncio.run(_started(url, last)))
    return Shared(
        jobs=jobs,
        seconds=span,
        most_at_once=_most_at_once(runs),
        shares={queue: started[queue] / started.total() for queue in QUEUES},
        used=used,
    )


async def enqueue(jobs: int, lanes: int, seconds: float) -> None:
    """Half of the jobs for each queue, spread over its lanes."""
    each, accounts = jobs // len(QUEUES), lanes // len(QUEUES)
    async with app:
        for task in (train, serve):
            for first in range(0, each, 5_000):
                numbers = range(first, min(each, first + 5_000))
                await task.enqueue_many(task.call(n, f"account-{n % accounts}", seconds) for n in numbers)


async def _recorded(url: str) -> tuple[float, int, float]:
    connection = await asyncpg.connect(url)
    try:
        span = await connection.fetchval("select max(finished_at) - min(claimed_at) from fairlane.jobs where state = 3")
        busy = await connection.fetchrow(BOTH_BUSY)
        assert busy is not None
        used = await connection.fetchval(IN_FLIGHT, busy["since"], busy["until"], SLOTS)
        return float(span) / 1e6, busy["until"], float(used)
    finally:
        await connection.close()


async def _started(url: str, until: int) -> dict[str, int]:
    """How many jobs of each queue had started when the first of them ran out of work."""
    connection = await asyncpg.connect(url)
    try:
        rows = await connection.fetch(
            "select q.name, count(*) from fairlane.jobs j join fairlane.queues q on q.id = j.queue_id "
            "where j.claimed_at <= $1 group by q.name",
            until,
        )
        return {row[0]: row[1] for row in rows}
    finally:
        await connection.close()


async def _at_rest(url: str) -> None:
    """What is in flight when nothing runs: nothing, once the lane events are counted."""
    connection = await asyncpg.connect(url)
    try:
        left = await connection.fetchval(
            "select (select coalesce(sum(in_flight), 0) from fairlane.shared_gates)"
            " - (select coalesce(sum(ended + unstarted), 0) from fairlane.shared_releases)"
        )
    finally:
        await connection.close()
    if left:
        raise RuntimeError(f"{left} jobs are counted as in flight, and none runs")


def _most_at_once(runs: list[tuple[str, int, int]]) -> int:
    edges = sorted([(start, 1) for _, start, _ in runs] + [(end, -1) for _, _, end in runs])
    running = most = 0
    for _, change in edges:
        running += change
        most = max(most, running)
    return most


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench shared", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=40_000)
    parser.add_argument("--lanes", type=int, default=1_000)
    parser.add_argument("--seconds", type=float, default=0.002, help="how long a job sleeps")
    parser.add_argument("--processes", type=int, default=1, help="workers for each queue")
    parser.add_argument("--concurrency", type=int, default=50)
    options = parser.parse_args(arguments)
    missed = 0
    with ThrowawayPostgres() as server:
        for number in range(options.rounds):
            url = asyncio.run(server.create_database(f"shared_{number}"))
            found = run(url, options.jobs, options.lanes, options.seconds, options.processes, options.concurrency)
            shares = ", ".join(f"{queue} {share:.0%}" for queue, share in found.shares.items())
            print(
                f"round {number + 1}: {found.jobs_per_second:,.0f} jobs/s, "
                f"at most {found.most_at_once} of {SLOTS} at once, {shares}, slots in use {found.used:.0%}",
                flush=True,
            )
            missed += found.jobs_per_second < LEAST or found.most_at_once > SLOTS or min(found.shares.values()) < 0.4
    return 1 if missed else 0


if __name__ == "__main__":
    asyncio.run(enqueue(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
