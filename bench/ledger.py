"""What handlers saw. A worker process leaves it in `$BENCH_LEDGER` when it ends; the judge reads it there."""

from __future__ import annotations

import json
import os
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from time import process_time

__all__ = [
    "Entry",
    "HandlerLedger",
    "Shares",
    "Started",
    "free_slot_gaps",
    "most_at_once",
    "ran_otherwise",
    "read_ledger",
    "shares",
    "too_many_starts",
    "violations",
]

FIELDS = 4


class HandlerLedger:
    """Kept inside a worker process. Counting one job takes about a tenth of a microsecond, noting it four."""

    __slots__ = ("cpu_at_first", "notes", "runs")

    def __init__(self) -> None:
        self.runs = 0
        self.cpu_at_first = 0.0
        self.notes = array("q")

    def count(self) -> None:
        """A job ran."""
        if not self.runs:
            self.cpu_at_first = process_time()
        self.runs += 1

    def note(self, number: int, key: int, began: int, ended: int) -> None:
        """The job of this number and key ran from then till then."""
        self.count()
        self.notes.extend((number, key, began, ended))

    def leave(self, folder: str) -> None:
        if self.runs:
            values = {name: getattr(self, name) for name in self.__slots__} | {"notes": self.notes.tolist()}
            Path(folder, f"{os.getpid()}.json").write_text(json.dumps(values))


@dataclass(frozen=True, slots=True)
class Started:
    """One run of a job, as its handler saw it; times in nanoseconds of this machine's clock."""

    number: int
    key: int
    began: int
    ended: int


@dataclass(frozen=True, slots=True)
class Entry:
    """What one worker process left."""

    process: int
    runs: int
    cpu_at_first: float
    starts: Sequence[Started]


def read_ledger(folder: str | Path) -> list[Entry]:
    entries = []
    for file in sorted(Path(folder).glob("*.json")):
        values = json.loads(file.read_text())
        notes = values["notes"]
        starts = [Started(*notes[at : at + FIELDS]) for at in range(0, len(notes), FIELDS)]
        entries.append(
            Entry(
                process=int(file.stem),
                runs=values["runs"],
                cpu_at_first=values["cpu_at_first"],
                starts=starts,
            )
        )
    return entries


def most_at_once(spans: Iterable[tuple[int, int]]) -> int:
    """The most of these spans that overlap. One that begins when another ends does not overlap it."""
    edges = sorted(edge for began, ended in spans for edge in ((began, 1), (ended, -1)))
    running = most = 0
    for _, change in edges:
        running += change
        most = max(most, running)
    return most


def too_many_starts(times: Iterable[int], *, burst: int, interval: int) -> int:
    """How many starts came too early for `burst + t / interval` in any time t."""
    violations = 0
    free_at = None
    for time in sorted(times):
        free_at = max(time if free_at is None else free_at, time) + interval
        if free_at - time > burst * interval:
            violations += 1
            free_at -= interval
    return violations


def violations(starts: Sequence[Started], *, concurrency: int, burst: int, interval: int) -> int:
    """How often, for one key, more ran at once or started in a time than its limits allow."""
    by_key: dict[int, list[Started]] = {}
    for start in starts:
        by_key.setdefault(start.key, []).append(start)
    found = 0
    for each in by_key.values():
        found += most_at_once((run.began, run.ended) for run in each) > concurrency
        found += too_many_starts((run.began for run in each), burst=burst, interval=interval)
    return found


def ran_otherwise(starts: Iterable[Started], jobs: int) -> int:
    """Jobs that ran not at all, or more than once, of those numbered from 0."""
    runs = Counter(start.number for start in starts)
    return sum(1 for number in range(jobs) if runs[number] != 1)


def free_slot_gaps(starts: Iterable[Started]) -> list[int]:
    """Within one process: the times from a slot's becoming free to the next start, first freed, first used."""
    runs = list(starts)
    ends = sorted(run.ended for run in runs)
    slots = most_at_once((run.began, run.ended) for run in runs)
    later = sorted(run.began for run in runs)[slots:]
    return [began - ended for ended, began in zip(ends, later, strict=False) if began >= ended]


@dataclass(frozen=True, slots=True)
class Shares:
    """How processes shared the work while all of them were at it."""

    jobs_per_second: float
    least: float
    """The share of the one that ran fewest, as a part of what an even share would be."""
    longest_wait: int
    """The longest time from one start to the next within one process, in nanoseconds."""


def shares(processes: Sequence[Sequence[Started]]) -> Shares:
    """From when the last of them had begun until the first had started its last job."""
    times = [sorted(start.began for start in each) for each in processes]
    since, until = max(each[0] for each in times), min(each[-1] for each in times)
    within = [[time for time in each if since <= time <= until] for each in times]
    total = sum(map(len, within))
    if since >= until or not total:
        return Shares(0.0, 0.0, 0)
    waits = [later - earlier for each in within for earlier, later in pairwise(each)]
    return Shares(total / (until - since) * 1e9, min(map(len, within)) * len(within) / total, max(waits, default=0))
