"""Runs works by turns, repeats what others disturbed, and keeps everything that was measured."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import asyncpg

from bench.judging import Run, Series, is_noisy, quietest
from bench.measuring import FOREIGN
from fairlane.testing.postgres import ThrowawayPostgres

__all__ = ["Bench", "Work", "run_all", "side_by_side"]

CONNECTIONS = 600
"""Of sixty-four workers. Everything else about the server is as PostgreSQL ships it."""

Say = Callable[[str], None]


@dataclass(slots=True)
class Bench:
    """Where works run: one throw-away PostgreSQL and one folder, and a fresh database for every run."""

    server: ThrowawayPostgres
    folder: Path
    jobs: int
    """How many jobs a drain has; other counts follow from it."""
    databases: int = 0
    made: list[str] = field(default_factory=list)

    @classmethod
    @contextmanager
    def opened(cls, jobs: int) -> Iterator[Bench]:
        with (
            ThrowawayPostgres(max_connections=CONNECTIONS) as server,
            tempfile.TemporaryDirectory(prefix="fairlane-bench-") as folder,
        ):
            yield cls(server, Path(folder), jobs)

    def database(self) -> str:
        """The URL of a new, empty database of the server."""
        self.databases += 1
        self.made.append(f"bench_{self.databases}")
        return asyncio.run(self._create(self.made[-1]))

    async def _create(self, name: str) -> str:
        url = await self.server.create_database(name)
        connection = await asyncpg.connect(url)
        try:
            # Whatever was run before has its pages written now, and not during this run.
            await connection.execute("checkpoint")
        finally:
            await connection.close()
        return url

    def file(self) -> Path:
        """The path of a new SQLite file."""
        self.databases += 1
        return self.folder / f"bench_{self.databases}.db"

    def clear(self) -> None:
        """Remove what the last run has made: a million jobs take a gigabyte."""
        while self.made:
            asyncio.run(self.server.drop_database(self.made.pop()))
        for file in self.folder.iterdir():
            file.unlink()


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Something that is measured: its name, one sentence about it, and how to run it once."""

    name: str
    what: str
    run: Callable[[Bench], Run]
    is_short: bool = False
    """Part of `make bench`; all works are part of `make bench-full`."""
    rounds: int | None = None
    """Where a work takes its own medians, or minutes: fewer rounds than the others."""


def side_by_side(works: Sequence[Work]) -> list[Work]:
    """The same order, but every peer's work right before ours of that name: what is compared is run close together."""
    ours = [work for work in works if ": " not in work.name]
    theirs = [work for work in works if ": " in work.name]
    ordered: list[Work] = []
    for work in ours:
        ordered += [other for other in theirs if other.name.partition(": ")[2] == work.name]
        ordered.append(work)
    return [*ordered, *(other for other in theirs if other not in ordered)]


def run_all(bench: Bench, works: Sequence[Work], *, rounds: int, attempts: int, say: Say) -> Mapping[str, Series]:
    """Every work once a round, one after the other, so that whatever the machine does it does to all of them.

    Ctrl-C ends it; what was measured until then is returned.
    """
    series = {work.name: Series(work.name) for work in works}
    turns = [(number, work) for number in range(1, rounds + 1) for work in works if number <= (work.rounds or rounds)]
    try:
        for number, work in turns:
            known = series[work.name]
            if not known.unsupported and not known.failed:
                known.runs.append(_run_quietly(bench, work, attempts))
                say(f"round {number}: {work.name}: {told(known.runs[-1])}")
    except KeyboardInterrupt:
        say("stopped; what follows is what was measured until then")
    return series


def _run_quietly(bench: Bench, work: Work, attempts: int) -> Run:
    """Run once, and again while others disturb it; the least disturbed attempt counts."""
    tried: list[Run] = []
    for _ in range(attempts):
        try:
            tried.append(work.run(bench))
        except Exception as error:
            # The others are measured all the same; a work that failed is told at the end, and is no success.
            return Run(figures={}, foreign_load=0.0, failed=f"{type(error).__name__}: {error}")
        finally:
            bench.clear()
        if not is_noisy(tried[-1]):
            break
    return quietest(tried)


def told(run: Run) -> str:
    """A run in one line."""
    if run.failed:
        return f"FAILED: {run.failed}"
    if run.unsupported:
        return f"not supported: {run.unsupported}"
    figures = ", ".join(f"{value:,.{0 if value >= 100 else 2}f} {name}" for name, value in run.figures.items())
    return f"{figures}; {run.foreign_load:.2f} {FOREIGN}"
