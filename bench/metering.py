"""What a run on PostgreSQL costs for each job, from its start to its stop."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Self

from bench.measuring import COMMITS, DEAD, SERVER, WAL, DatabaseCounters, Load, family, process_seconds
from bench.running import Bench

__all__ = ["Meter"]


@dataclass(slots=True)
class Meter:
    """The server's side of a run, and what others did meanwhile."""

    url: str
    server: int
    load: Load = field(init=False)
    before: DatabaseCounters = field(init=False)
    seconds: float = field(init=False)
    foreign_load: float = field(init=False)

    @classmethod
    def started(cls, bench: Bench, url: str) -> Self:
        meter = cls(url, bench.server.pid)
        meter.before = asyncio.run(DatabaseCounters.now(url))
        meter.restart()
        return meter

    def restart(self) -> None:
        """Begin once more: what was before is preparation. The database's counters are not set back."""
        self.load = Load.now()
        self.seconds = process_seconds(family(self.server))

    def stop(self) -> None:
        """The end of what is measured, while the workers are still there."""
        self.seconds = process_seconds(family(self.server)) - self.seconds
        self.foreign_load = self.load.foreign_until_now()

    def figures(self, jobs: int, looks: int = 0) -> dict[str, float]:
        """By job. To be asked once the clients are gone; `looks` are our own transactions."""
        after = asyncio.run(DatabaseCounters.now(self.url))
        return {
            SERVER: self.seconds / jobs * 1e6,
            WAL: (after.wal_bytes - self.before.wal_bytes) / jobs,
            COMMITS: (after.commits - self.before.commits - looks) / jobs,
            DEAD: after.dead_rows / jobs,
        }
