"""Fairlane's processes: producers that enqueue by the public API, and `fairlane worker` with default settings."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg

from bench.ledger import Entry, read_ledger
from bench.measuring import family, process_seconds

__all__ = [
    "DRAINED",
    "LOOK_EVERY",
    "ROOT",
    "SLOTS",
    "TIMEOUT",
    "WAITING",
    "Crew",
    "Produced",
    "environment",
    "migrate",
    "produce",
    "producing",
    "stop",
    "until",
]

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 600.0
LOOK_EVERY = 0.2
FAIRLANE = [sys.executable, "-m", "fairlane.cli"]

WAITING = "select count(distinct worker) from fairlane.waiters"
SLOTS = "select coalesce(sum((report::json->>'concurrency')::integer), 0) from fairlane.workers"
"""Those that workers say they have. A worker with processes has them once these have started."""
# Jobs are only searched when no claim has left any: a scan of all that is done, several times a second, would be felt.
# Release events of the last batch may stay unfolded; jobs that are scheduled, ready or running may not.
DRAINED = """
select case
    when exists (
        select from fairlane.queues q
        cross join lateral (
            select s.ready from fairlane.queue_states s where s.queue_id = q.id order by s.version desc limit 1
        ) s
        where s.ready > 0
    ) then 0
    else 1 - exists (select from fairlane.jobs where state in (0, 1, 2))::integer
end
"""


def environment(url: str, ledger: str | None = None) -> dict[str, str]:
    here = dict(os.environ, FAIRLANE_URL=url, PYTHONPATH=str(ROOT))
    here.pop("BENCH_LEDGER", None)
    return here if ledger is None else here | {"BENCH_LEDGER": ledger}


def migrate(url: str) -> None:
    subprocess.run(
        [*FAIRLANE, "migrate", "--url", url],
        check=True,
        env=environment(url),
        stdout=subprocess.DEVNULL,
    )


@dataclass(frozen=True, slots=True)
class Produced:
    """How long a producer took, and its processor time."""

    seconds: float
    cpu: float


def produce(url: str, how: str, work: str, count: int, **options: Any) -> Produced:
    """Enqueue in a process of its own; see bench/producer.py."""
    command = _producer(how, work, count, options)
    answer = subprocess.run(command, check=True, env=environment(url), cwd=ROOT, stdout=subprocess.PIPE)
    return Produced(**json.loads(answer.stdout))


@contextmanager
def producing(url: str, how: str, work: str, count: int, **options: Any) -> Iterator[None]:
    """A producer beside whatever the block does; it is stopped with it."""
    command = _producer(how, work, count, options)
    process = subprocess.Popen(command, env=environment(url), cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        stop([process])


def _producer(how: str, work: str, count: int, options: Mapping[str, Any]) -> list[str]:
    command = [sys.executable, "-m", "bench.producer", how, work, str(count)]
    for name, value in options.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    return command


@dataclass(slots=True)
class Crew:
    """Worker processes, the ledger that they keep, and the times of their processors when it was looked at."""

    ledger: str
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    cpu: dict[int, float] = field(default_factory=dict)
    cpu_before: dict[int, float] = field(default_factory=dict)
    entries: Sequence[Entry] = ()

    @classmethod
    @contextmanager
    def at_work(
        cls,
        url: str,
        queue: str,
        processes: int,
        concurrency: int,
        *,
        each: int = 1,
        app: str = "bench.workload:app",
        settings: Mapping[str, str] | None = None,
    ) -> Iterator[Crew]:
        """Workers that run inside the block, each a `fairlane worker --processes {each}` of its own; at its end the
        ledger is read."""
        worker = [*FAIRLANE, "worker", app, "--queues", queue, "--concurrency", str(concurrency)]
        worker += ["--log-level", "warning", "--processes", str(each)]
        with tempfile.TemporaryDirectory(prefix="fairlane-bench-") as ledger:
            crew, here = cls(ledger), environment(url, ledger) | dict(settings or {})
            try:
                for _ in range(processes):
                    crew.processes.append(subprocess.Popen(worker, env=here, cwd=ROOT))
                yield crew
            finally:
                stop(crew.processes)
                crew.entries = read_ledger(ledger)

    def start_processors(self) -> None:
        """Note the processor time until now of those that run no handlers: they claim for others, which are there."""
        self.cpu_before = self._processors()

    def read_processors(self) -> None:
        """Note the processor time of every process of the workers until now."""
        self.cpu = self._processors()

    def _processors(self) -> dict[int, float]:
        return {pid: process_seconds([pid]) for process in self.processes for pid in family(process.pid)}

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    @property
    def runs(self) -> int:
        return sum(entry.runs for entry in self.entries)

    @property
    def handling_cpu(self) -> float:
        """Processor time from the first handler of each process until it was read: starting up is not charged. That of
        processes without handlers counts from `start_processors` on."""
        began = self.cpu_before | {entry.process: entry.cpu_at_first for entry in self.entries}
        return sum(self.cpu[pid] - before for pid, before in began.items() if pid in self.cpu)

    def check(self) -> None:
        """Raise if a worker has ended."""
        check_alive(self.processes)

    def wait(self, url: str, query: str, least: int) -> int:
        """Look until the answer is so high; how often it was asked."""
        return asyncio.run(until(url, query, least, self.processes))


async def until(url: str, query: str, least: int, crew: Sequence[subprocess.Popen[bytes]]) -> int:
    connection = await asyncpg.connect(url)
    asked = 0
    try:
        deadline = time.monotonic() + TIMEOUT
        while time.monotonic() < deadline:
            asked += 1
            if await connection.fetchval(query) >= least:
                return asked
            check_alive(crew)
            await asyncio.sleep(LOOK_EVERY)
        raise RuntimeError(f"not within {TIMEOUT:.0f} s: {query}")
    finally:
        await connection.close()


def check_alive(crew: Sequence[subprocess.Popen[bytes]]) -> None:
    if dead := [process.returncode for process in crew if process.poll() is not None]:
        raise RuntimeError(f"a worker ended before its work was done (exit status {dead[0]})")


def stop(crew: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask processes to end, and see to it that they do."""
    for process in crew:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
    for process in crew:
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
