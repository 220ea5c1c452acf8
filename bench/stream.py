"""`python -m bench stream`: a million jobs in one streamed call. Memory may not grow, and every id must be told."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from uuid import UUID

import asyncpg
from rich.console import Console
from rich.table import Table

from bench.results import ROOT, append_results
from fairlane import App
from fairlane.testing.postgres import ThrowawayPostgres

__all__ = ["main"]

EARLY = 50_000
MOST_MORE = {"PostgreSQL": 10, "SQLite": 74}
"""Megabytes that the process may have needed more at the end than early on. SQLite fills its page cache, of 64."""
FILLER = "x" * 60


async def produce(url: str, count: int, told: str) -> dict[str, float]:
    """Stream so many jobs, write every id that is reported to a file, and say what it took."""
    app = App(url)
    await app.migrate()
    app.queue("plain")

    @app.task(queue="plain")
    async def noop(number: int, text: str) -> None: ...

    early = 0
    stored = 0
    async with app:
        started = time.monotonic()
        with open(told, "wb") as file:  # noqa: ASYNC230  # nothing else runs here
            async for batch in app.enqueue_stream(noop.call(n, FILLER) for n in range(count)):
                file.writelines(job.id.bytes for job in batch.stored)
                stored += len(batch)
                if not early and stored >= EARLY:
                    early = _most_memory()
        seconds = time.monotonic() - started
    return {"seconds": seconds, "early": early / 1024, "late": _most_memory() / 1024}


def _most_memory() -> int:
    """The most memory that this program has had so far, in kilobytes.

    Not `ru_maxrss`: it begins with what the process had that started this one.
    """
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


async def _stored_postgres(url: str) -> list[bytes]:
    connection = await asyncpg.connect(url)
    try:
        return [row[0].bytes for row in await connection.fetch("select id from fairlane.jobs order by id")]
    finally:
        await connection.close()


def _stored_sqlite(url: str) -> list[bytes]:
    connection = sqlite3.connect(url.removeprefix("sqlite:///"))
    try:
        return [row[0] for row in connection.execute("select id from jobs order by id")]
    finally:
        connection.close()


def measure(store: str, url: str, count: int, folder: str) -> dict[str, float]:
    """In a process of its own, whose memory is that of a producer and nothing else."""
    told = f"{folder}/{store}.ids"
    command = [sys.executable, "-m", "bench.stream", url, str(count), told]
    answer = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, cwd=ROOT, env=dict(os.environ, PYTHONPATH=str(ROOT))
    )
    with open(told, "rb") as file:
        content = file.read()
    reported = sorted(content[at : at + 16] for at in range(0, len(content), 16))
    stored = _stored_sqlite(url) if store == "SQLite" else asyncio.run(_stored_postgres(url))
    if reported != stored or len(stored) != count:
        missing = next(iter(set(stored) ^ set(reported)), None)
        raise RuntimeError(
            f"{store}: {len(reported):,} ids were reported and {len(stored):,} jobs are stored of {count:,}; "
            f"one that differs: {missing and UUID(bytes=missing)}"
        )
    figures: dict[str, float] = json.loads(answer.stdout)
    return figures


COLUMNS = ("store", "jobs", "s", "jobs/s", f"most memory at {EARLY:,}, MB", "at the end, MB", "bar")


def main(arguments: Sequence[str]) -> int:
    """Measure, judge and keep the figures; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench stream", description=__doc__)
    parser.add_argument("--jobs", type=int, default=1_000_000)
    parser.add_argument("--no-save", action="store_true", help="do not append to bench/RESULTS.md")
    options = parser.parse_args(arguments)
    rows: list[list[str]] = []
    is_met = True
    with ThrowawayPostgres() as server, tempfile.TemporaryDirectory(prefix="fairlane-bench-") as folder:
        for store in ("PostgreSQL", "SQLite"):
            url = f"sqlite:///{folder}/jobs.db" if store == "SQLite" else server.url()
            figures = measure(store, url, options.jobs, folder)
            is_within = figures["late"] - figures["early"] <= MOST_MORE[store]
            is_met = is_met and is_within
            rows.append(
                [
                    store,
                    f"{options.jobs:,}",
                    f"{figures['seconds']:.1f}",
                    f"{options.jobs / figures['seconds']:,.0f}",
                    f"{figures['early']:.0f}",
                    f"{figures['late']:.0f}",
                    f"at most {MOST_MORE[store]} MB more: {'met' if is_within else '**missed**'}",
                ]
            )
    table = Table(*COLUMNS)
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    if not options.no_save:
        lines = [
            f"Every id was reported and is stored; load {os.getloadavg()[1]:.1f}.\n",
            f"| {' | '.join(COLUMNS)} |",
            "|---|---|---|---|---|---|---|",
            *(f"| {' | '.join(row)} |" for row in rows),
        ]
        append_results("one streamed call", lines)
    return 0 if is_met else 1


if __name__ == "__main__":
    print(json.dumps(asyncio.run(produce(sys.argv[1], int(sys.argv[2]), sys.argv[3]))))
