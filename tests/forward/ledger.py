"""What tasks tell of themselves, and the judge of it. Neither trusts the queue.

A task writes a line to a pipe when it begins and when it ends. The pipe brings the lines of all processes in one order,
and each run is in flight for longer than between its two lines: whatever overlaps in the ledger has overlapped.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from fairlane.job import State

PIPE = "FAIRLANE_CHAOS_PIPE"
"""The variable that names the pipe."""
WHOLE_QUEUE = "the whole queue"


@contextmanager
def recorded(number: int, tenant: str, job: object) -> Iterator[None]:
    """What the body of a task is run in."""
    with open(os.environ[PIPE], "wb", buffering=0) as pipe:
        pipe.write(f"begin {number} {tenant} {job} {os.getpgrp()} {os.getpid()}\n".encode())
        yield
        pipe.write(f"end {number} {tenant} {job} {os.getpgrp()} {os.getpid()}\n".encode())


@dataclass
class Run:
    """One run of a job, as its task told it."""

    number: int
    tenant: str
    job: str
    group: int
    process: int
    has_ended: bool = False
    was_killed: bool = False
    """Its process was killed after it began: while it ran, or before its end was recorded."""


@dataclass
class Ledger:
    """The lines, in the order in which the pipe brought them, and who was killed in between."""

    runs: dict[int, list[Run]] = field(default_factory=lambda: defaultdict(list))
    """By the number that the producer gave each job."""
    most: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """The most runs that were in flight at one moment, by tenant and of the whole queue."""
    faults: list[str] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)
    """The numbers of the jobs of which a run has come to its end."""
    _in_flight: list[Run] = field(default_factory=list)

    def take(self, line: str) -> None:
        what, number, tenant, job, group, process = line.split()
        if what == "begin":
            self._begin(Run(int(number), tenant, job, int(group), int(process)))
        else:
            self._end(int(number), int(process))

    def killed(self, group: int) -> None:
        """The whole group is certainly dead, and all that it wrote has been taken."""
        self._buried([run for run in self._all() if run.group == group])

    def died(self, process: int, *, of: str | None) -> None:
        """This process of an engine is dead, of something that was done to others: of nothing else may it die."""
        if of is None:
            self.faults.append(f"process {process} died by itself")
        self._buried([run for run in self._all() if run.process == process])

    def processes(self) -> set[int]:
        """Those that were not killed, as far as is known."""
        return {run.process for run in self._all() if not run.was_killed}

    def groups(self) -> set[int]:
        """The groups of processes that have begun something and were not killed."""
        return {run.group for run in self._all() if not run.was_killed}

    def _all(self) -> Iterator[Run]:
        return (run for runs in self.runs.values() for run in runs)

    def _buried(self, runs: list[Run]) -> None:
        for run in runs:
            run.was_killed = True
        self._in_flight = [run for run in self._in_flight if not run.was_killed]

    def duplicates(self) -> list[Run]:
        """All runs but the last of each job."""
        return [run for runs in self.runs.values() for run in runs[:-1]]

    def _begin(self, run: Run) -> None:
        for other in self._in_flight:
            if other.number == run.number:
                self.faults.append(f"job {run.number} began in {run.process} while it ran in {other.process}")
        self.runs[run.number].append(run)
        self._in_flight.append(run)
        of_tenant = sum(1 for each in self._in_flight if each.tenant == run.tenant)
        self.most[run.tenant] = max(self.most[run.tenant], of_tenant)
        self.most[WHOLE_QUEUE] = max(self.most[WHOLE_QUEUE], len(self._in_flight))

    def _end(self, number: int, process: int) -> None:
        for run in self._in_flight:
            if (run.number, run.process) == (number, process):
                run.has_ended = True
                self.ended.add(number)
                self._in_flight.remove(run)
                return
        self.faults.append(f"job {number} ended in {process}, where it had not begun")


@dataclass(frozen=True)
class Kept:
    """What the store says of a job in the end."""

    state: State
    runs: int
    """How many runs it knows of: the last, and each that was lost. Not all of them count as attempts."""


def judge(
    ledger: Ledger, jobs: Mapping[int, str], kept: Mapping[str, Kept], limits: Mapping[str, int], *, kills: int = 0
) -> list[str]:
    """What speaks against the promises: nothing lost, no limit exceeded, no run twice that a kill does not explain.
    `jobs`: the id of each number; `limits`: of each tenant and of the whole queue; `kills`: how many were meant."""
    return [
        *ledger.faults,
        *_lost(ledger, jobs, kept),
        *_unexplained(ledger, jobs),
        *_exceeded(ledger, limits),
        *_proves_nothing(ledger, limits, kills),
    ]


def _lost(ledger: Ledger, jobs: Mapping[int, str], kept: Mapping[str, Kept]) -> Iterator[str]:
    yield from (f"job {number} was never run to its end" for number in jobs if number not in ledger.ended)
    yield from (f"job {number} ran and nobody enqueued it" for number in ledger.runs if number not in jobs)
    for number, job in jobs.items():
        if (found := kept.get(job)) is None:
            yield f"job {number} is not in the store"
        elif found.state is not State.DONE:
            yield f"job {number} is {found.state} in the store"
        elif found.runs < len(ledger.runs[number]):
            yield f"job {number} began {len(ledger.runs[number])} times, and the store knows of {found.runs}"


def _unexplained(ledger: Ledger, jobs: Mapping[int, str]) -> Iterator[str]:
    for number, runs in ledger.runs.items():
        for run in runs:
            if run.job != jobs.get(number, run.job):
                yield f"job {number} ran as {run.job}, which is another"
        for run in runs[:-1]:
            if not run.was_killed:
                how = "ended" if run.has_ended else "began"
                yield f"job {number} ran again although {run.process}, in which it {how} before, was not killed"


def _exceeded(ledger: Ledger, limits: Mapping[str, int]) -> Iterator[str]:
    for scope, most in ledger.most.items():
        if most > limits[scope]:
            yield f"{most} ran at once in {scope}, whose limit is {limits[scope]}"


def _proves_nothing(ledger: Ledger, limits: Mapping[str, int], kills: int) -> Iterator[str]:
    # Of the whole queue's, a machine that is slow at starting runs may fall short.
    if all(ledger.most[scope] < limit for scope, limit in limits.items()):
        yield "no limit was ever reached: this proves nothing"
    if kills and not any(run.was_killed for runs in ledger.runs.values() for run in runs):
        yield f"none of {kills} kills hit anything: this proves nothing"


def told(faults: Iterable[str]) -> str:
    """Some of many."""
    listed = list(faults)
    return "\n".join([f"{len(listed)} faults:", *listed[:20]])


def note(text: str) -> None:
    """Figures for who looks: `pytest -s`, and the report of a failure."""
    print(text, file=sys.stderr)
