"""Bars and verdicts: what has to be reached, and whether the figures of a run reach it. Nothing is measured here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median

__all__ = ["NOISE", "Bar", "Figure", "Judged", "Run", "Series", "Verdict", "is_noisy", "judge", "quietest", "spread"]

NOISE = 0.25
"""Foreign load, in cores, from which on a run is repeated: an eighth of the two that the bars are made for."""


@dataclass(frozen=True, slots=True)
class Figure:
    """The name of one number of one work."""

    work: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of a work: its figures by name, and what it was done with."""

    figures: Mapping[str, float]
    foreign_load: float
    configuration: str = ""
    unsupported: str = ""
    """Why a peer cannot do this work; it has no figures then."""
    failed: str = ""
    """What went wrong: jobs that did not run exactly once, a process that broke. It has no figures either."""


@dataclass(slots=True)
class Series:
    """All runs of one work."""

    work: str
    runs: list[Run] = field(default_factory=list)

    def values(self, name: str) -> list[float]:
        return [run.figures[name] for run in self.runs if name in run.figures]

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name for run in self.runs for name in run.figures))

    @property
    def configuration(self) -> str:
        return next((run.configuration for run in self.runs if run.configuration), "")

    @property
    def unsupported(self) -> str:
        return next((run.unsupported for run in self.runs if run.unsupported), "")

    @property
    def failed(self) -> str:
        return next((run.failed for run in self.runs if run.failed), "")


class Verdict(StrEnum):
    MET = "met"
    MISSED = "missed"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """What a figure has to reach, by itself or as a ratio to the best of others: at least so much, or at most."""

    what: str
    figure: Figure
    against: tuple[Figure, ...] = ()
    least: float | None = None
    most: float | None = None

    def __post_init__(self) -> None:
        if (self.least is None) == (self.most is None):
            raise ValueError(f"{self.what!r}: give `least` or `most`, and not both")

    def __str__(self) -> str:
        sign, number = ("≥", self.least) if self.least is not None else ("≤", self.most)
        return f"{sign} {number:g}{' ×' if self.against else ''}"


@dataclass(frozen=True, slots=True)
class Judged:
    """A bar, the value that it was held against, and the verdict."""

    bar: Bar
    value: float | None
    opponent: str
    verdict: Verdict


def judge(bar: Bar, series: Mapping[str, Series]) -> Judged:
    """Hold a bar against the medians of all runs. What was not measured meets nothing."""
    own = _median(bar.figure, series)
    if own is None:
        return Judged(bar, None, "", Verdict.NOT_MEASURED)
    if not bar.against:
        return Judged(bar, own, "", _verdict(bar, own))
    others = [(value, each.work) for each in bar.against if (value := _median(each, series))]
    if not others:
        return Judged(bar, None, "", Verdict.NOT_MEASURED)
    # The best peer is the fastest where more is better, and the quickest to answer where less is.
    best, opponent = max(others) if bar.least is not None else min(others)
    return Judged(bar, own / best, opponent, _verdict(bar, own / best))


def _verdict(bar: Bar, value: float) -> Verdict:
    is_met = value >= bar.least if bar.least is not None else value <= (bar.most or 0.0)
    return Verdict.MET if is_met else Verdict.MISSED


def _median(figure: Figure, series: Mapping[str, Series]) -> float | None:
    values = series[figure.work].values(figure.name) if figure.work in series else []
    return median(values) if values else None


def is_noisy(run: Run) -> bool:
    return run.foreign_load > NOISE


def quietest(attempts: Sequence[Run]) -> Run:
    """Of several attempts at one run, the one that others disturbed least; of equals the first."""
    return min(attempts, key=lambda run: run.foreign_load)


def spread(values: Iterable[float]) -> tuple[float, float, float]:
    """Median, least and most."""
    known = list(values)
    return median(known), min(known), max(known)
