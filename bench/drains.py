"""`make bench`: the short run. Ratios, medians of alternating rounds; a bar that is missed exits non-zero."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from rich.console import Console
from rich.table import Table

from bench.fairlane_runs import Drain, drain
from bench.peer import pgqueuer_drain
from bench.results import append_results
from fairlane.testing.postgres import ThrowawayPostgres

__all__ = ["main"]


@dataclass(frozen=True, slots=True)
class Bar:
    """What one work has to reach, as a ratio of another's jobs per second."""

    work: str
    against: str
    least: float


BARS = (
    Bar("fairlane, one process, no-op", "pgqueuer, one process, no-op", 1.0),
    Bar("fairlane, Fair over 1,000 keys, no-op", "pgqueuer, one process, no-op", 0.7),
    Bar("fairlane, 64 processes x 4 slots, 20 ms", "fairlane, one process x 256 slots, 20 ms", 0.5),
)


class Bench:
    """One throw-away server, a fresh database for every run."""

    def __init__(self, server: ThrowawayPostgres, jobs: int, small_jobs: int) -> None:
        self._server = server
        self._runs = 0
        self._jobs = jobs
        self._small_jobs = small_jobs

    def _database(self) -> str:
        self._runs += 1
        return asyncio.run(self._server.create_database(f"bench_{self._runs}"))

    def works(self) -> dict[str, Callable[[], float]]:
        return {
            "pgqueuer, one process, no-op": lambda: pgqueuer_drain(self._database(), self._jobs),
            "fairlane, one process, no-op": lambda: self._fairlane("plain", self._jobs, 1, 500),
            "fairlane, Fair over 1,000 keys, no-op": lambda: self._fairlane("fair", self._jobs, 1, 500),
            "fairlane, one process x 256 slots, 20 ms": lambda: self._fairlane(
                "small", self._small_jobs, 1, 256, warm=True
            ),
            "fairlane, 64 processes x 4 slots, 20 ms": lambda: self._fairlane(
                "small", self._small_jobs, 64, 4, warm=True
            ),
        }

    def _fairlane(self, calls: str, jobs: int, processes: int, concurrency: int, warm: bool = False) -> float:
        run: Drain = drain(
            self._database(), calls, jobs, processes=processes, concurrency=concurrency, queue=calls, warm=warm
        )
        if run.counted_by_handlers != jobs:
            raise RuntimeError(f"{jobs} jobs were enqueued, but handlers counted {run.counted_by_handlers} runs")
        return run.jobs_per_second


def main(arguments: Sequence[str]) -> int:
    """Run the drains, judge and keep them; the exit status."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=50_000)
    parser.add_argument("--small-jobs", type=int, default=20_000)
    parser.add_argument("--only", default="", help="run the works whose name contains this")
    parser.add_argument("--no-save", action="store_true", help="do not append to bench/RESULTS.md")
    options = parser.parse_args(arguments)
    console = Console()
    figures: dict[str, list[float]] = {}
    with ThrowawayPostgres() as server:
        works = Bench(server, options.jobs, options.small_jobs).works()
        for round_number in range(1, options.rounds + 1):
            for name, run in works.items():
                if options.only in name:
                    figures.setdefault(name, []).append(run())
                    console.print(f"round {round_number}: {name}: {figures[name][-1]:,.0f} jobs/s")
    medians = {name: median(values) for name, values in figures.items()}
    table, missed = _judge(medians, figures)
    console.print(table)
    if not options.no_save and not options.only:
        _save(medians, figures, missed)
    for bar in missed:
        console.print(f"[bold red]missed:[/] {bar.work} is below {bar.least} x {bar.against}")
    return 1 if missed else 0


def _judge(medians: dict[str, float], figures: dict[str, list[float]]) -> tuple[Table, list[Bar]]:
    table = Table("work", "jobs/s (median)", "spread", "ratio", "bar")
    missed = []
    by_work = {bar.work: bar for bar in BARS}
    for name, value in medians.items():
        spread = f"{min(figures[name]):,.0f} – {max(figures[name]):,.0f}"
        bar = by_work.get(name)
        if bar is None or bar.against not in medians:
            table.add_row(name, f"{value:,.0f}", spread, "", "")
            continue
        ratio = value / medians[bar.against]
        if ratio < bar.least:
            missed.append(bar)
        verdict = "missed" if ratio < bar.least else "met"
        table.add_row(name, f"{value:,.0f}", spread, f"{ratio:.2f}", f"≥ {bar.least} × {bar.against}: {verdict}")
    return table, missed


def _save(medians: dict[str, float], figures: dict[str, list[float]], missed: list[Bar]) -> None:
    lines = [
        "| work | jobs/s (median) | spread | ratio |",
        "|---|---|---|---|",
    ]
    by_work = {bar.work: bar for bar in BARS}
    for name, value in medians.items():
        bar = by_work.get(name)
        ratio = ""
        if bar is not None and bar.against in medians:
            verdict = "**missed**" if bar in missed else "met"
            ratio = f"{value / medians[bar.against]:.2f} (bar {bar.least}: {verdict})"
        lines.append(f"| {name} | {value:,.0f} | {min(figures[name]):,.0f} – {max(figures[name]):,.0f} | {ratio} |")
    append_results("", lines)
