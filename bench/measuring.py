"""What a run costs, read from outside: processor time from /proc, the log and the commits from PostgreSQL itself."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import asyncpg

__all__ = [
    "BOTH",
    "CLIENT",
    "COMMITS",
    "DEAD",
    "FOREIGN",
    "JOBS_PER_SECOND",
    "SERVER",
    "WAL",
    "DatabaseCounters",
    "Load",
    "family",
    "most_memory",
    "process_seconds",
    "thread_seconds",
]

JOBS_PER_SECOND = "jobs/s"
CLIENT = "client µs/job"
SERVER = "server µs/job"
BOTH = "client + server µs/job"
WAL = "WAL B/job"
COMMITS = "commits/job"
DEAD = "dead rows/job"
FOREIGN = "foreign load"
"""Cores that processes of others kept busy while a run was measured."""

TICK = os.sysconf("SC_CLK_TCK")
PROC = Path("/proc")
STATE, PARENT, OWN_TIMES = 0, 1, slice(11, 15)
"""Places in /proc/PID/stat behind the name. The times: user and system, its own and of the children it waited for."""


def _stat(pid: int | str) -> list[str]:
    # The name may hold anything, blanks and brackets too.
    return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()


def process_seconds(pids: Collection[int]) -> float:
    """Processor time of these processes and of all children that they have waited for. One that is gone counts 0."""
    total = 0
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            total += sum(map(int, _stat(pid)[OWN_TIMES]))
    return total / TICK


def thread_seconds(pids: Collection[int]) -> float:
    """Processor time of the threads that these processes have now, to the nanosecond."""
    total = 0
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for thread in (PROC / str(pid) / "task").iterdir():
                total += int((thread / "schedstat").read_text().split()[0])
    return total / 1e9


def family(root: int) -> set[int]:
    """A process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    todo = [root]
    while todo:
        pid = todo.pop()
        found.add(pid)
        todo += children.get(pid, ())
    return found


def _parents() -> Iterator[tuple[int, int]]:
    for entry in PROC.iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                yield int(entry.name), int(_stat(entry.name)[PARENT])


def most_memory(pid: int) -> float:
    """The most memory that a process has had so far, in MiB."""
    status = (PROC / str(pid) / "status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def _machine_seconds() -> float:
    """Processor time of everybody on this machine, with what its host took away; not idle, not waiting for disks."""
    user, nice, system, _, _, interrupts, soft_interrupts, stolen, *_ = map(
        int, (PROC / "stat").read_text().split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + interrupts + soft_interrupts + stolen) / TICK


@dataclass(frozen=True, slots=True)
class Load:
    """What the machine and our own processes have done until a moment."""

    at: float
    machine: float
    ours: float

    @classmethod
    def now(cls) -> Load:
        return cls(time.monotonic(), _machine_seconds(), process_seconds(family(os.getpid())))

    def foreign_until_now(self) -> float:
        """How many cores the processes of others have kept busy since then."""
        now = Load.now()
        foreign = (now.machine - self.machine) - (now.ours - self.ours)
        return max(0.0, foreign / max(now.at - self.at, 1 / TICK))


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseCounters:
    """What a database has written and ended until a moment."""

    wal_bytes: int
    commits: int
    rollbacks: int
    dead_rows: int

    @classmethod
    async def now(cls, url: str) -> DatabaseCounters:
        connection = await asyncpg.connect(url)
        try:
            row = await connection.fetchrow(_COUNTERS)
            assert row is not None
            return cls(**{name: int(value) for name, value in row.items()})
        finally:
            await connection.close()


# Backends report to the statistics when they end, or after a second or ten: read them once the workers are gone.
_COUNTERS = """
select pg_current_wal_insert_lsn() - '0/0'::pg_lsn as wal_bytes, d.xact_commit as commits, d.xact_rollback as rollbacks,
    (select coalesce(sum(t.n_dead_tup), 0) from pg_stat_user_tables t) as dead_rows
from pg_stat_database d
where d.datname = current_database()
"""
