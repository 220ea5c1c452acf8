"""What a ledger of runs says: who had the workers, how many ran at once, how fast they started. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

import msgspec

from fairlane.simulation.measures import jain_index

__all__ = [
    "Run",
    "backlogged_until",
    "busiest_second",
    "highest_in_flight",
    "jain_index",
    "rate_excess",
    "shares_over_time",
    "worker_time",
]

NANOSECONDS = 1_000_000_000


class Run(msgspec.Struct, frozen=True):
    """One run of a handler, as the handler itself wrote it down. Times are nanoseconds of the monotonic clock."""

    number: int
    tenant: str
    endpoint: str
    started_at: int
    ended_at: int
    admitted_at: int
    """When the store let the job start (its own clock, in nanoseconds): rates are kept at this moment."""


def backlogged_until(runs: Iterable[Run]) -> int:
    """The moment at which the first tenant starts its last job: until then every tenant has work waiting."""
    last_start: dict[str, int] = {}
    for run in runs:
        last_start[run.tenant] = max(run.started_at, last_start.get(run.tenant, run.started_at))
    return min(last_start.values())


def worker_time(runs: Iterable[Run], until: int) -> dict[str, int]:
    """The nanoseconds for which each tenant held a slot before `until`; a tenant that held none has 0."""
    held: dict[str, int] = defaultdict(int)
    for run in runs:
        held[run.tenant] += max(0, min(run.ended_at, until) - run.started_at)
    return dict(held)


def highest_in_flight(runs: Iterable[Run], by: Callable[[Run], str]) -> dict[str, int]:
    """For each key, the most runs that overlapped at any instant."""
    changes: list[tuple[int, int, str]] = []
    for run in runs:
        changes += [(run.started_at, 1, by(run)), (run.ended_at, -1, by(run))]
    in_flight: dict[str, int] = defaultdict(int)
    highest: dict[str, int] = defaultdict(int)
    # An end sorts before a start of the same instant: the slot that was handed over is not counted twice.
    for _, change, key in sorted(changes):
        in_flight[key] += change
        highest[key] = max(highest[key], in_flight[key])
    return dict(highest)


def rate_excess(starts: Sequence[int], *, burst: int, interval: float) -> float:
    """By how many jobs the worst window of any length t went over `burst + t / interval`; 0 or less: the rate held."""
    worst = -float(burst)
    lowest = float("inf")
    # With a(k) = k - s(k)/interval, a window from i to j holds a(j) - a(i) + 1 more starts than its length allows.
    first = min(starts, default=0)
    for position, start in enumerate(sorted(starts)):
        level = position - (start - first) / interval
        lowest = min(lowest, level)
        worst = max(worst, level - lowest + 1 - burst)
    return worst


def busiest_second(starts: Iterable[int]) -> int:
    """The most starts in any window of one second."""
    ordered = sorted(starts)
    most = left = 0
    for right, start in enumerate(ordered):
        while start - ordered[left] >= NANOSECONDS:
            left += 1
        most = max(most, right - left + 1)
    return most


def shares_over_time(
    runs: Iterable[Run], by: Callable[[Run], str], *, since: int, until: int, columns: int
) -> list[Mapping[str, float]]:
    """For each of `columns` equal stretches of time, how many slots each class held on average."""
    width = max(1.0, (until - since) / columns)
    held: list[dict[str, float]] = [defaultdict(float) for _ in range(columns)]
    for run in runs:
        key = by(run)
        first = min(columns - 1, max(0, int((run.started_at - since) / width)))
        last = min(columns - 1, max(0, int((run.ended_at - since) / width)))
        edges = [run.started_at, *(since + width * column for column in range(first + 1, last + 1)), run.ended_at]
        for column, (start, end) in enumerate(pairwise(edges), first):
            held[column][key] += (end - start) / width
    return [dict(column) for column in held]
