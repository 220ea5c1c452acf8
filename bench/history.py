"""`make bench-history`: what ten million finished jobs do to the times of claims and enqueues. Bar: at most 1.2 x."""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

from rich.console import Console
from rich.table import Table

from bench.past import ACCOUNTS, FILLER, BenchApp, fill_postgres, fill_sqlite
from bench.results import append_results
from fairlane import HeldClaim, Queue
from fairlane.testing.postgres import ThrowawayPostgres

__all__ = ["main"]

MOST = 1.2
BATCH, BULK, PRODUCERS = 200, 1_000, 16
BULKS, SINGLES = 5, 6
"""Bulks a round and queue, and between them the jobs that each producer enqueues one by one."""

CLAIM, CLAIM_FAIR = f"claim of {BATCH}", f"claim of {BATCH}, Fair over {ACCOUNTS:,} keys"
ENQUEUE, ENQUEUE_BULK = f"enqueue, {PRODUCERS} at once", f"enqueue of {BULK:,}"
ACK = f"ack of {BATCH}"
UPKEEP = "upkeep with nothing to remove"
ENDED = object()

Times = dict[str, list[float]]
Say = Callable[[str], None]
Fill = Callable[[str, int, Callable[[int], None]], Awaitable[None]]


class Stopwatch:
    """Milliseconds by what took them."""

    def __init__(self) -> None:
        self.times: Times = defaultdict(list)

    @contextmanager
    def measure(self, what: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.note(what, started)

    def note(self, what: str, started: float) -> None:
        self.times[what].append((time.perf_counter() - started) * 1_000)


async def steps(bench: BenchApp, watch: Stopwatch) -> AsyncIterator[None]:
    """Enqueue and drain some thousand jobs by the public API, a measured step at a time."""
    for _ in range(BULKS):
        plain = [bench.plain_noop.call(n, FILLER) for n in range(BULK)]
        with watch.measure(ENQUEUE_BULK):
            await bench.app.enqueue_many(plain)
        yield
        await bench.app.enqueue_many(bench.fair_noop.call(n, f"account-{n % ACCOUNTS}", FILLER) for n in range(BULK))
        await asyncio.gather(*(_produce(bench, watch) for _ in range(PRODUCERS)))
        yield
    for queue, what in ((bench.plain, CLAIM), (bench.fair, CLAIM_FAIR)):
        while claims := await _claim(queue, what, watch):
            yield
            with watch.measure(ACK):
                await queue.ack(claims)
            yield
    with watch.measure(UPKEEP):
        await bench.app.upkeep()


async def _produce(bench: BenchApp, watch: Stopwatch) -> None:
    for n in range(SINGLES):
        with watch.measure(ENQUEUE):
            await bench.plain_noop.enqueue(n, FILLER)


async def _claim(queue: Queue, what: str, watch: Stopwatch) -> Sequence[HeldClaim]:
    """Only a claim that finds its full number counts."""
    started = time.perf_counter()
    claims = await queue.claim(BATCH)
    if len(claims) == BATCH:
        watch.note(what, started)
    return claims


async def measure_round(lives: list[AsyncIterator[None]]) -> None:
    """Databases take turns with every step: whatever else the machine does meanwhile, it does to all of them."""
    while lives:
        for life in list(lives):
            if await anext(life, ENDED) is ENDED:
                lives.remove(life)
        lives.reverse()


@dataclass(frozen=True, slots=True)
class Figure:
    """One kind of call: its times without a history and with one."""

    store: str
    what: str
    empty: Sequence[float]
    full: Sequence[float]

    @property
    def ratio(self) -> float:
        return median(self.full) / median(self.empty)

    @property
    def is_met(self) -> bool:
        return self.ratio <= MOST

    def cells(self) -> list[str]:
        return [self.store, self.what, _spread(self.empty), _spread(self.full), f"{self.ratio:.2f}"]


def _spread(times: Sequence[float]) -> str:
    quarters = quantiles(times, n=4)
    return f"{median(times):.2f} ({quarters[0]:.2f} – {quarters[2]:.2f})"


async def compare(store: str, empty: BenchApp, full: BenchApp, rounds: int, say: Say) -> list[Figure]:
    """So many rounds on both, after one to warm up."""
    without, with_it = Stopwatch(), Stopwatch()
    figures: list[Figure] = []
    async with empty.app, full.app:
        await measure_round([steps(empty, Stopwatch()), steps(full, Stopwatch())])
        for number in range(1, rounds + 1):
            await measure_round([steps(empty, without), steps(full, with_it)])
            figures = [Figure(store, what, times, with_it.times[what]) for what, times in without.times.items()]
            so_far = "; ".join(f"{figure.what} {figure.ratio:.2f}" for figure in figures)
            say(f"{store}, ratios after round {number}, load {os.getloadavg()[0]:.1f}: {so_far}")
    return figures


async def _measure(
    store: str, places: Sequence[str], fill: Fill, rows: int, rounds: int, url: Callable[[str], str], say: Say
) -> list[Figure]:
    empty, full = (BenchApp(url(place)) for place in places)
    for bench in (empty, full):
        await bench.app.migrate()
    started = time.monotonic()
    told = 0

    def progress(done: int) -> None:
        nonlocal told
        if done - told >= 1_000_000:
            told = done
            say(f"{store}: {done:,} jobs in the history, {time.monotonic() - started:.0f} s")

    # The same life before, a moment long: flows that were never used are not claimed from as others are.
    await fill(places[0], 1, progress)
    await fill(places[1], rows, progress)
    say(f"{store}: filled in {time.monotonic() - started:.0f} s; load {os.getloadavg()[0]:.1f}")
    return await compare(store, empty, full, rounds, say)


async def measure_postgres(rows: int, rounds: int, say: Say) -> list[Figure]:
    with ThrowawayPostgres(settings={"max_wal_size": "4GB"}) as server:
        urls = [await server.create_database(name) for name in ("empty", "full")]
        return await _measure("PostgreSQL", urls, fill_postgres, rows, rounds, str, say)


async def measure_sqlite(rows: int, rounds: int, say: Say) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="fairlane-bench-") as folder:
        paths = [str(Path(folder, name)) for name in ("empty.db", "full.db")]
        return await _measure("SQLite", paths, fill_sqlite, rows, rounds, "sqlite:///{}".format, say)


STORES = {"postgres": measure_postgres, "sqlite": measure_sqlite}
COLUMNS = ("store", "what", "ms, no history", "ms, with it", "ratio")


def main(arguments: Sequence[str]) -> int:
    """Fill, measure, judge and keep the figures; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench history", description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000, help="finished jobs in the history")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=sorted(STORES), help="measure one store")
    parser.add_argument("--no-save", action="store_true", help="do not append to bench/RESULTS.md")
    options = parser.parse_args(arguments)
    console = Console()
    figures: list[Figure] = []
    for name, measure in STORES.items():
        if options.only in (None, name):
            figures += asyncio.run(measure(options.rows, options.rounds, console.print))
    table = Table(*COLUMNS, "bar")
    for figure in figures:
        table.add_row(*figure.cells(), f"≤ {MOST}: {'met' if figure.is_met else 'missed'}")
    console.print(table)
    if not options.no_save:
        _save(figures, options.rows, options.rounds)
    missed = [figure for figure in figures if not figure.is_met]
    for figure in missed:
        console.print(f"[bold red]missed:[/] {figure.store}, {figure.what}: {figure.ratio:.2f} x without a history")
    return 1 if missed else 0


def _save(figures: Sequence[Figure], rows: int, rounds: int) -> None:
    lines = [
        f"Milliseconds a call, the median of {rounds} rounds (and the quartiles), on both databases by turns; "
        f"load {os.getloadavg()[1]:.1f}.\n",
        f"| {' | '.join(COLUMNS)} |",
        "|---|---|---|---|---|",
        *(
            f"| {' | '.join(figure.cells())} (bar {MOST}: {'met' if figure.is_met else '**missed**'}) |"
            for figure in figures
        ),
    ]
    append_results(f"{rows:,} finished jobs in the history", lines)
