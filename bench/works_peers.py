"""The peers' works, each in its own environment and its best configuration; see bench/peers."""

from __future__ import annotations

from collections.abc import Callable

from bench.judging import Run
from bench.measuring import JOBS_PER_SECOND, Load
from bench.peer import pgqueuer_drain
from bench.running import Bench, Work

__all__ = ["works"]


def _drain(bench: Bench) -> Run:
    load = Load.now()
    rate = pgqueuer_drain(bench.database(), bench.jobs)
    return Run(
        figures={JOBS_PER_SECOND: rate},
        foreign_load=load.foreign_until_now(),
        configuration=f"{bench.jobs:,} jobs; see bench/peers/pgqueuer",
    )


def works() -> list[Work]:
    runs: dict[str, Callable[[Bench], Run]] = {"pgqueuer: drain": _drain}
    return [Work(name=name, what="no-op, one process, FIFO", run=run, is_short=True) for name, run in runs.items()]
