"""Fairlane's works on a SQLite file: drains by one worker process, and four that share the file."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from bench.crew import LOOK_EVERY, TIMEOUT, Crew, migrate, produce
from bench.judging import Run
from bench.ledger import ran_otherwise, shares
from bench.measuring import CLIENT, JOBS_PER_SECOND, Load
from bench.running import Bench, Work
from bench.works_postgres import CONCURRENCY, GATED_CONCURRENCY, VIOLATIONS, gate_violations

__all__ = ["LEAST_SHARE", "LONGEST_WAIT", "works"]

LEAST_SHARE, LONGEST_WAIT = "least share", "longest wait ms"
PROCESSES = 4

# As on PostgreSQL: all jobs are only searched when no claim has left any.
DRAINED = """
select case
    when exists (select 1 from lanes where ready > 0) or exists (select 1 from arrivals) then 0
    else not exists (select 1 from jobs where state in (0, 1, 2))
end
"""
SPAN = "select max(finished_at) - min(claimed_at) from jobs where state = 3"
HELD = "select keys->>'account', claimed_at, finished_at from jobs"

Extra = Callable[[Path, int, Crew], dict[str, float]]


def _ask(path: Path, query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path, timeout=60.0)) as connection:
        return connection.execute(query).fetchall()


def _wait(path: Path, crew: Crew) -> None:
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        if _ask(path, DRAINED)[0][0]:
            return
        crew.check()
        time.sleep(LOOK_EVERY)
    raise RuntimeError(f"{path.name} was not drained within {TIMEOUT:.0f} s")


def drain(
    work: str, extra: Extra, *, queue: str = "", share: float = 1.0, processes: int = 1
) -> Callable[[Bench], Run]:
    """Enqueue, then drain the file with fresh worker processes."""

    def run(bench: Bench) -> Run:
        jobs, path = round(bench.jobs * share), bench.file()
        url = f"sqlite:///{path}"
        migrate(url)
        produce(url, "fill", work, jobs)
        load = Load.now()
        concurrency = GATED_CONCURRENCY if work == "gated" else CONCURRENCY
        with Crew.at_work(url, queue or work, processes, concurrency) as crew:
            _wait(path, crew)
            foreign = load.foreign_until_now()
            crew.read_processors()
        if crew.runs != jobs:
            raise RuntimeError(f"SQLite, {work}: {jobs} jobs were enqueued, but handlers counted {crew.runs} runs")
        seconds = _ask(path, SPAN)[0][0] / 1e6
        figures = {JOBS_PER_SECOND: jobs / seconds, CLIENT: crew.handling_cpu / jobs * 1e6}
        return Run(
            figures=figures | extra(path, jobs, crew),
            foreign_load=foreign,
            configuration=f"{jobs:,} jobs, {processes} × `fairlane worker --concurrency {concurrency}`",
        )

    return run


def _nothing(path: Path, jobs: int, crew: Crew) -> dict[str, float]:
    return {}


def _violations(path: Path, jobs: int, crew: Crew) -> dict[str, float]:
    held = [(str(account), claimed, finished) for account, claimed, finished in _ask(path, HELD)]
    return {VIOLATIONS: float(gate_violations(crew, jobs, held))}


def _shares(path: Path, jobs: int, crew: Crew) -> dict[str, float]:
    if len(crew.entries) < PROCESSES:
        return {LEAST_SHARE: 0.0}
    if wrong := ran_otherwise((start for entry in crew.entries for start in entry.starts), jobs):
        raise RuntimeError(f"SQLite, four processes: {wrong} of {jobs} jobs did not run exactly once")
    found = shares([entry.starts for entry in crew.entries])
    return {LEAST_SHARE: found.least, LONGEST_WAIT: found.longest_wait / 1e6}


def works() -> list[Work]:
    four = drain("timed", _shares, queue="plain", share=3.0, processes=PROCESSES)
    named: list[tuple[str, str, Callable[[Bench], Run]]] = [
        ("SQLite drain", "no-op, one process", drain("plain", _nothing)),
        ("SQLite fair drain, 1,000 keys", "`Fair(by='account')`, no-op, one process", drain("fair", _nothing)),
        ("SQLite gated drain, 1,000 keys", "`Fair`, `Concurrency` and `Rate` by key", drain("gated", _violations)),
        ("SQLite, four processes", "no-op, all on one file, while all four work", four),
    ]
    return [Work(name=name, what=what, run=run, is_short=True) for name, what, run in named]
