"""The plots of docs/explanation/benchmarks.md, from the medians of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from bench.judging import Series
from bench.measuring import CLIENT, JOBS_PER_SECOND, SERVER
from bench.peer import POSTGRES_PEERS
from bench.works_peers import HUEY_DRAIN
from bench.works_postgres import P50, P99
from fairlane.simulation import plots

__all__ = ["PICTURES", "draw"]


@dataclass(frozen=True, slots=True)
class Picture:
    """Groups of bars: a place for each work, one bar in it for each figure."""

    file: str
    title: str
    unit: str
    places: Mapping[str, str]
    """What stands below a group, and the work that it shows."""
    figures: Mapping[str, str]
    """What a colour is called, and the figure that it shows."""


def _beside_peers(work: str) -> dict[str, str]:
    return {peer: f"{peer}: {work}" for peer in POSTGRES_PEERS} | {"Fairlane": work}


_DRAINS = {"Fairlane": "drain", "Fair": "fair drain, 1,000 keys", "Fair + limits": "gated drain, 1,000 keys"}
_JOBS = {"jobs per second": JOBS_PER_SECOND}

PICTURES = (
    Picture("bench-drain", "Drain of no-op jobs, one process", "jobs/s", _beside_peers("drain") | _DRAINS, _JOBS),
    Picture("bench-cpu", "Processor time of a job", "µs", _DRAINS, {"client": CLIENT, "server": SERVER}),
    Picture("bench-enqueue", "Single enqueues, 16 at once", "jobs/s", _beside_peers("single enqueue"), _JOBS),
    Picture("bench-bulk", "Bulk enqueue", "jobs/s", _beside_peers("bulk enqueue"), _JOBS),
    Picture(
        "bench-pickup", "From enqueue to start, an idle queue", "ms", _beside_peers("pickup"), {"p50": P50, "p99": P99}
    ),
    Picture(
        "bench-keys",
        "Fair drain, by the number of keys",
        "jobs/s",
        {f"{keys:,}": f"fair drain, {keys:,} keys" for keys in (1, 100, 1_000, 10_000, 100_000)},
        _JOBS,
    ),
    Picture(
        "bench-sqlite",
        "SQLite: drain of no-op jobs, one process",
        "jobs/s",
        {"huey": HUEY_DRAIN} | {place: f"SQLite {work}" for place, work in _DRAINS.items()},
        _JOBS,
    ),
)


def draw(series: Mapping[str, Series], note: str) -> dict[str, str]:
    """SVG by file name. What was not measured has no bar; one bar alone compares nothing, and is not drawn."""
    drawn = {}
    for picture in PICTURES:
        places = {place: work for place, work in picture.places.items() if _has(series, work, picture)}
        if len(places) > 1:
            bars = [
                plots.Series(name, [median(series[work].values(figure)) for work in places.values()])
                for name, figure in picture.figures.items()
            ]
            title = f"{picture.title} ({note})"
            drawn[f"{picture.file}.svg"] = plots.plot_bars(title, picture.unit, list(places), bars)
    return drawn


def _has(series: Mapping[str, Series], work: str, picture: Picture) -> bool:
    return work in series and all(series[work].values(figure) for figure in picture.figures.values())
