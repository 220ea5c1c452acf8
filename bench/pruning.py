"""`python -m bench pruning`: whether a worker's upkeep keeps up with ten thousand finishes a second.

The backlog of jobs that should be gone may not grow.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median, quantiles
from typing import Any

import asyncpg
from rich.console import Console
from rich.table import Table

from bench.crew import stop
from bench.results import ROOT, append_results
from fairlane.testing.postgres import ThrowawayPostgres

__all__ = ["main"]

MISSED = "**missed**"
EVERY = 2.0
"""Seconds from one sample to the next."""
REACHED = 0.95
"""A worker that does not finish as many as it was given does not show that they can be removed."""
STEADY = 1.2
"""The longest backlog of a run's second half may be this much longer than that of its first."""

Say = Callable[[str], None]

COUNTS = {
    "PostgreSQL": """
        select (select last_value from fairlane.positions), count(*),
            count(*) filter (where state < 3),
            count(*) filter (where finished_at <= (select fairlane.instant(null) - 1000000))
        from fairlane.jobs
    """,
    "SQLite": """
        select (select last from positions), count(*),
            coalesce(sum(state < 3), 0), coalesce(sum(finished_at <= unixepoch() * 1000000 - 1000000), 0)
        from jobs
    """,
}
WAITS = {
    "PostgreSQL": "select claimed_at - enqueued_at from fairlane.jobs where state = 3 order by id desc limit 2000",
    "SQLite": "select claimed_at - enqueued_at from jobs where state = 3 order by position desc limit 2000",
}


@dataclass(frozen=True, slots=True)
class Sample:
    """What the database held at one moment."""

    at: float
    enqueued: int
    stored: int
    unfinished: int
    expired: int
    waits: Sequence[int]

    @property
    def finished(self) -> int:
        return self.enqueued - self.unfinished

    @property
    def pruned(self) -> int:
        return self.enqueued - self.stored

    def backlog(self, keep: int | None) -> int:
        """Finished jobs that should be gone."""
        return self.expired if keep is None else max(0, self.finished - self.pruned - keep)


@dataclass(frozen=True, slots=True)
class Run:
    """One run: its samples, from the first second of steady work to the last."""

    name: str
    samples: Sequence[Sample]
    keep: int | None
    is_pruned: bool
    asked: int
    """Jobs a second that were to finish."""

    @property
    def due(self) -> Sequence[Sample]:
        """From when there was something to remove."""
        first = next((n for n, each in enumerate(self.samples) if each.backlog(self.keep)), 0)
        return self.samples[first:]

    def rate(self, count: Callable[[Sample], int]) -> float:
        first, last = self.due[0], self.due[-1]
        return (count(last) - count(first)) / (last.at - first.at)

    @property
    def peaks(self) -> tuple[int, int]:
        """The longest backlog of the first half and of the second."""
        backlog = [each.backlog(self.keep) for each in self.due]
        middle = len(backlog) // 2
        return max(backlog[:middle]), max(backlog[middle:])

    @property
    def is_steady(self) -> bool:
        first, second = self.peaks
        return second <= STEADY * first and self.rate(lambda each: each.finished) >= REACHED * self.asked

    @property
    def verdict(self) -> str:
        if not self.is_pruned:
            return ""
        return "met" if self.is_steady else MISSED

    def cells(self) -> list[str]:
        waits = [wait / 1_000 for each in self.samples for wait in each.waits]
        return [
            self.name,
            f"{self.rate(lambda each: each.finished):,.0f}",
            f"{self.rate(lambda each: each.pruned):,.0f}",
            " / ".join(f"{peak:,}" for peak in self.peaks) if self.is_pruned else "",
            f"{median(waits):.1f} / {quantiles(waits, n=100)[98]:.1f}",
        ]


class Watched:
    """A database of either kind, as an onlooker sees it."""

    def __init__(self, store: str, url: str) -> None:
        self.store, self.url = store, url

    def sample(self) -> Sample:
        enqueued, stored, unfinished, expired = self._fetch(COUNTS[self.store])[0]
        waits = [row[0] for row in self._fetch(WAITS[self.store])]
        return Sample(time.monotonic(), enqueued, stored, unfinished, expired, waits)

    def _fetch(self, query: str) -> Sequence[Sequence[Any]]:
        if self.store == "PostgreSQL":
            return asyncio.run(self._ask(query))
        connection = sqlite3.connect(self.url.removeprefix("sqlite:///"), timeout=10)
        try:
            return connection.execute(query).fetchall()
        finally:
            connection.close()

    async def _ask(self, query: str) -> Sequence[Sequence[Any]]:
        connection = await asyncpg.connect(self.url)
        try:
            await connection.execute("set enable_sort = off")  # looking at the newest must not read them all
            return [tuple(row) for row in await connection.fetch(query)]
        finally:
            await connection.close()


def run(name: str, watched: Watched, rate: int, seconds: float, kept: Mapping[str, str], say: Say) -> Run:
    """A producer at a steady rate, one `fairlane worker` with default settings, and an onlooker."""
    environment = dict(os.environ, FAIRLANE_URL=watched.url, PYTHONPATH=str(ROOT), **kept)
    keep = int(kept["BENCH_KEEP"]) if "BENCH_KEEP" in kept else None
    command = [sys.executable, "-m", "fairlane.cli"]
    subprocess.run([*command, "migrate", "--url", watched.url], check=True, env=environment, stdout=subprocess.DEVNULL)
    worker = [*command, "worker", "bench.short_lived:app", "--concurrency", "500", "--log-level", "warning"]
    producer = [sys.executable, "-m", "bench.short_lived", str(rate), str(seconds)]
    crew: list[subprocess.Popen[bytes]] = []
    samples: list[Sample] = []
    try:
        crew += [subprocess.Popen(each, env=environment, cwd=ROOT) for each in (worker, producer)]
        while crew[1].poll() is None:
            time.sleep(EVERY)
            last = watched.sample()
            samples.append(last)
            say(
                f"{name}: {last.finished:,} finished, {last.pruned:,} pruned, {last.backlog(keep):,} to prune, "
                f"{last.unfinished:,} waiting"
            )
    finally:
        stop(crew)
    # The last one may lie behind the last job.
    return Run(name, [each for each in samples[:-1] if each.finished], keep, kept is not UNPRUNED, rate)


UNPRUNED = {"BENCH_RETENTION": "24h"}
"""How it is without pruning: nothing is old enough."""
KEPT = {
    "kept for a day": UNPRUNED,
    "kept for 1 s": {"BENCH_RETENTION": "1s"},
    "100,000 kept": {"BENCH_RETENTION": "24h", "BENCH_KEEP": "100000"},
}
RUNS = {f"{store}, {kept}": (store, settings) for store, (kept, settings) in product(COUNTS, KEPT.items())}
COLUMNS = ("run", "finished/s", "pruned/s", "most to prune, by halves", "ms from enqueue to start, median / 99 %")


def measure(rate: int, seconds: float, only: str, say: Say) -> list[Run]:
    """All runs, each on a database of its own."""
    runs = []
    with ThrowawayPostgres() as server, tempfile.TemporaryDirectory(prefix="fairlane-bench-") as folder:
        for number, (name, (store, settings)) in enumerate(RUNS.items()):
            if only not in name:
                continue
            if store == "SQLite":
                url = f"sqlite:///{folder}/{number}.db"
            else:
                url = asyncio.run(server.create_database(f"bench_{number}"))
            runs.append(run(name, Watched(store, url), rate, seconds, settings, say))
    return runs


def main(arguments: Sequence[str]) -> int:
    """Measure, judge and keep the figures; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench pruning", description=__doc__)
    parser.add_argument("--rate", type=int, default=10_000, help="jobs that are enqueued each second")
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--only", default="", help="run the works whose name contains this")
    parser.add_argument("--no-save", action="store_true", help="do not append to bench/RESULTS.md")
    options = parser.parse_args(arguments)
    if not any(options.only in name for name in RUNS):
        parser.error(f"no work's name contains {options.only!r}; the works are: {'; '.join(RUNS)}")
    console = Console()
    runs = measure(options.rate, options.seconds, options.only, console.print)
    table = Table(*COLUMNS, "bar")
    for each in runs:
        table.add_row(*each.cells(), each.verdict)
    console.print(table)
    if not options.no_save:
        lines = [
            f"{options.rate:,} jobs a second enqueued for {options.seconds:.0f} s, one worker; "
            f"load {os.getloadavg()[1]:.1f}.\n",
            f"| {' | '.join(COLUMNS)} | bar |",
            "|---|---|---|---|---|---|",
            *(f"| {' | '.join(each.cells())} | {each.verdict} |" for each in runs),
        ]
        append_results("pruning", lines)
    return 0 if all(each.verdict != MISSED for each in runs) else 1
