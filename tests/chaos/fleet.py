"""Real worker processes that are killed at random, real producers, and the ledger of what handlers told."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WATCHDOG = 240.0
"""Seconds without the expected end after which the test fails. Never the measure of anything."""


@dataclass
class Run:
    """One run of a job, as its handler told it."""

    job: str
    attempt: int
    tenant: str
    pid: int
    started: int
    ended: int | None = None


@dataclass
class Ledger:
    """What the handlers told, in the order in which the pipe brought it."""

    runs: dict[tuple[str, int, int], Run] = field(default_factory=dict)
    ended_jobs: set[str] = field(default_factory=set)
    ended_in: dict[str, int] = field(default_factory=dict)
    """The process in which each job ended last."""

    def take(self, line: str) -> None:
        what, job, attempt, tenant, pid, moment = line.split()
        key = (job, int(attempt), int(pid))
        if what == "start":
            assert key not in self.runs, f"attempt {attempt} of job {job} was started twice in one process"
            self.runs[key] = Run(job, int(attempt), tenant, int(pid), int(moment))
        else:
            self.runs[key].ended = int(moment)
            self.ended_jobs.add(job)
            self.ended_in[job] = int(pid)

    def by_job(self) -> dict[str, list[Run]]:
        jobs: dict[str, list[Run]] = defaultdict(list)
        for run in self.runs.values():
            jobs[run.job].append(run)
        return jobs

    def most_at_once(self, deaths: dict[int, int]) -> dict[str, int]:
        """For each tenant, the highest number of runs at one instant. A killed run ends at its kill."""
        edges: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for run in self.runs.values():
            end = run.ended if run.ended is not None else deaths[run.pid]
            edges[run.tenant] += [(run.started, 1), (end, -1)]
        most: dict[str, int] = {}
        for tenant, moments in edges.items():
            running = 0
            # Ends come before starts at the same instant: what ended then did not overlap.
            for _, change in sorted(moments):
                running += change
                most[tenant] = max(most.get(tenant, 0), running)
        return most


@dataclass(frozen=True)
class Standstill:
    """A process that was stopped for longer than its lease, and went on."""

    pid: int
    began: int


class Source:
    """A producer process. What it committed stands in a file: nobody reads a pipe while it runs."""

    def __init__(self, output: Path, command: list[str], environment: dict[str, str]) -> None:
        self._output = output
        with output.open("w") as file:
            self.process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=file)

    def ids(self) -> tuple[set[str], set[str]]:
        """The jobs it committed, and those it rolled back."""
        kept, dropped = self._output.read_text().split("\n")[:2]
        return set(kept.split()), set(dropped.split())


class Fleet:
    """Worker processes on one database."""

    def __init__(self, url: str, workers: int, concurrency: int, lease: str, seed: int) -> None:
        self._read, self._write = os.pipe()
        self._environment = dict(
            os.environ, FAIRLANE_URL=url, CHAOS_PIPE=str(self._write), PYTHONPATH=str(ROOT), PYTHONWARNINGS="ignore"
        )
        self._arguments = ["tests.chaos.chaos_app:app", "--concurrency", str(concurrency), "--lease", lease]
        self._random = random.Random(seed)
        self._pending = b""
        self.ledger = Ledger()
        self.deaths: dict[int, int] = {}
        self.killed: set[int] = set()
        self.standstills: list[Standstill] = []
        self.crew = [self._start() for _ in range(workers)]

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "fairlane.cli", "worker", *self._arguments, "--log-level", "error"]
        return subprocess.Popen(command, env=self._environment, cwd=ROOT, pass_fds=[self._write])

    def produce(self, producers: int, jobs: int, folder: Path) -> list[Source]:
        command = [sys.executable, "-m", "tests.chaos.producer"]
        each = str(jobs // producers)
        return [
            Source(folder / f"{seed}.ids", [*command, str(seed), each], self._environment) for seed in range(producers)
        ]

    def kill_one(self) -> None:
        """SIGKILL a worker, note when it was certainly dead, and start another."""
        index = self._random.randrange(len(self.crew))
        victim = self.crew[index]
        victim.send_signal(signal.SIGKILL)
        victim.wait()
        self.deaths[victim.pid] = time.monotonic_ns()
        self.killed.add(victim.pid)
        self.crew[index] = self._start()

    def let_one_stand_still(self, deadline: float) -> None:
        """SIGSTOP a worker that runs something, until others have begun that again; then let it go on."""
        index = self._random.randrange(len(self.crew))
        while True:
            index = (index + 1) % len(self.crew)
            victim = self.crew[index]
            victim.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, victim.pid, os.WSTOPPED)
            began = time.monotonic_ns()
            while select.select([self._read], [], [], 0)[0]:
                self.listen(0)
            runs = self.ledger.runs.values()
            held = {run.job for run in runs if run.pid == victim.pid and run.ended is None}
            if held:
                break
            victim.send_signal(signal.SIGCONT)
            self.listen(0.05)
            assert time.monotonic() < deadline, "no worker runs anything"
        while not any(run.job in held and run.pid != victim.pid for run in self.ledger.runs.values()):
            self.listen(0.05)
            assert time.monotonic() < deadline, f"nobody has taken over what process {victim.pid} held"
        self.standstills.append(Standstill(victim.pid, began))
        victim.send_signal(signal.SIGCONT)

    def listen(self, timeout: float) -> None:
        """Take what the handlers tell; return after each read, or when nothing came for so long."""
        readable, _, _ = select.select([self._read], [], [], timeout)
        if not readable:
            return
        self._pending += os.read(self._read, 1 << 16)
        *lines, self._pending = self._pending.split(b"\n")
        for line in lines:
            self.ledger.take(line.decode())

    def unsure(self) -> set[str]:
        """Jobs that ended in a process that was killed or stood still: settled before that, or to be run again."""
        suspects = self.killed | {each.pid for each in self.standstills}
        return {job for job, pid in self.ledger.ended_in.items() if pid in suspects}

    def stop(self) -> list[int]:
        """SIGTERM to all; the exit codes of those that ran something. What they still tell is taken."""
        for process in self.crew:
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 60
        while any(process.poll() is None for process in self.crew) and time.monotonic() < deadline:
            self.listen(0.05)
        codes = []
        for process in self.crew:
            if process.poll() is None:
                process.kill()
            code = process.wait()
            # One that is only just starting has no handler for the signal yet, and nothing to give back.
            if code != -signal.SIGTERM or any(run.pid == process.pid for run in self.ledger.runs.values()):
                codes.append(code)
            self.deaths.setdefault(process.pid, time.monotonic_ns())
        while select.select([self._read], [], [], 0)[0]:
            self.listen(0)
        os.close(self._read)
        os.close(self._write)
        return codes
