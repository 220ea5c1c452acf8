"""`python -m bench rates`: how much of a smooth rate real workers give, and that they never give more.

The starts are those that the handlers note. A rate of n a second with a burst of 1 allows `1 + n·t` of them in any time
t; a quarter of a job is allowed for what lies between a start and its note.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from fairlane import App, Rate, State
from fairlane.store.operators import JobFilter
from fairlane.testing.postgres import ThrowawayPostgres

RATES = (10, 50, 200, 1_000)
LEAST = 0.97
MOST_OVER = 0.25


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench rates", description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="for how long starts are counted (default: 20)")
    parser.add_argument("--rates", type=int, nargs="*", default=RATES, help="starts a second")
    parser.add_argument("--stores", nargs="*", default=["sqlite", "postgres"])
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 3])
    parser.add_argument("--stops", action="store_true", help="stop a worker for 500 ms, again and again")
    parser.add_argument(
        "--changes", action="store_true", help="pause, resume, cancel, and change the limit all the time"
    )
    given = parser.parse_args(arguments)
    failed = 0
    print("store     processes  rate/s   given   over    CPU  claims/s")
    for store, processes, rate in itertools.product(given.stores, given.processes, given.rates):
        with ExitStack() as stack:
            found = measured(database_of(store, stack), rate, processes, given)
        is_bad = found.over > MOST_OVER or (found.share < LEAST and not (given.stops or given.changes))
        failed += is_bad
        figures = f"{found.share:7.1%} {found.over:6.2f} {found.cpu:6.1%} {found.claims:9.1f}"
        print(f"{store:9} {processes:9} {rate:7} {figures}  {'MISSED' if is_bad else ''}", flush=True)
    return 1 if failed else 0


@dataclass(frozen=True, slots=True)
class Found:
    share: float
    """Of the rate, what was given."""
    over: float
    """By how many jobs it was exceeded in the worst time; below zero: never reached."""
    cpu: float
    """Of one core, what the workers took."""
    claims: float
    """A second, of all workers: those that brought jobs."""


def database_of(store: str, stack: ExitStack) -> str:
    """An empty database, which goes with the stack."""
    if store == "sqlite":
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        return f"sqlite:///{folder}/jobs.db"
    server = stack.enter_context(ThrowawayPostgres())
    return asyncio.run(server.create_database("rates"))


def measured(url: str, rate: int, processes: int, given: argparse.Namespace) -> Found:
    with tempfile.TemporaryDirectory() as folder:
        starts = Path(folder) / "starts"
        starts.touch()
        environment = dict(
            os.environ, FAIRLANE_URL=url, RATES_LIMIT=str(rate), RATES_STARTS=str(starts), PYTHONWARNINGS="ignore"
        )
        migrate = [sys.executable, "-m", "fairlane.cli", "migrate", "bench.rates_app:app"]
        subprocess.run(migrate, env=environment, check=True, stdout=subprocess.DEVNULL)
        count = round(rate * (given.seconds + 3))
        subprocess.run([sys.executable, "-m", "bench.rates_app", str(count)], env=environment, check=True)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "fairlane.cli", "worker", "bench.rates_app:app", "--log-level", "error"]
        command += ["--no-banner"]
        workers = [subprocess.Popen(command, env=environment) for _ in range(processes)]
        try:
            while not starts.stat().st_size:
                assert all(worker.poll() is None for worker in workers), "a worker has died"
                time.sleep(0.05)
            disturbed(url, rate, workers, given)
        finally:
            for worker in workers:
                worker.send_signal(signal.SIGTERM)
            for worker in workers:
                worker.wait(60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        noted = [line.split() for line in starts.read_text().splitlines()]
    numbers = [number for _, number, _ in noted]
    assert len(set(numbers)) == len(numbers), "a job was started twice"
    instants = sorted(int(at) / 1e9 for at, _, _ in noted)
    within = [at for at in instants if at < instants[0] + given.seconds]
    cpu = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / given.seconds
    return Found(
        len(within) / (rate * given.seconds),
        exceeded_by(instants, rate),
        cpu,
        len({lease for _, _, lease in noted}) / given.seconds,
    )


def disturbed(url: str, rate: int, workers: Sequence[subprocess.Popen[bytes]], given: argparse.Namespace) -> None:
    """Let time go by, and disturb the workers as was asked for."""
    ends = time.monotonic() + given.seconds + 0.5
    turn = 0
    while time.monotonic() < ends:
        time.sleep(0.3)
        turn += 1
        if given.stops:
            worker = workers[turn % len(workers)]
            worker.send_signal(signal.SIGSTOP)
            time.sleep(0.5)
            worker.send_signal(signal.SIGCONT)
        if given.changes:
            asyncio.run(changed(url, rate, turn))


async def changed(url: str, rate: int, turn: int) -> None:
    """One change after the other: a pause and its end, a lower rate and its end, and some jobs cancelled."""
    app = App(url)
    app.queue("rates", limits=[Rate(rate, per="1s", burst=1)])
    async with app:
        match turn % 5:
            case 0:
                await app.operations.queues.pause("rates", actor="bench")
            case 1:
                await app.operations.queues.resume("rates", actor="bench")
            case 2:
                await app.operations.limits.set("rates", "rate/1s:", rate / 2, actor="bench")
            case 3:
                await app.operations.limits.clear("rates", "rate/1s:", actor="bench")
            case _:
                running = JobFilter(queue="rates", state=State.RUNNING)
                await app.operations.jobs.cancel(running, limit=5, reason="bench", actor="bench")


def exceeded_by(instants: Sequence[float], rate: float) -> float:
    """By how many jobs `1 + rate·t` was exceeded, in the worst time t; below zero: never reached."""
    least, worst = float("inf"), float("-inf")
    for number, at in enumerate(instants):
        here = number - rate * at
        worst = max(worst, here - least)
        least = min(least, here)
    return worst
