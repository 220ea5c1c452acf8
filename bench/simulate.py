"""`python -m bench.simulate`: how fast a simulation is, and how near to what `fairlane worker` does.

`speed`: 1,000,000 jobs over 10,000 keys with `Fair` and a limit of concurrency for each key, on one core.
`reality`: a hot tenant enqueued first, ten small ones and a premium one, jobs of 50 ms, run by `fairlane worker` on a
SQLite file and on PostgreSQL, and simulated. How long a claim and a settlement take there is told by two short runs of
other queues, before and after. p95 waits and shares that differ by more than 15 % (the median of three rounds) exit
non-zero.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from uuid import UUID

from rich.console import Console
from rich.table import Table

from bench.reality import NAP, app, make_app
from fairlane import App, Concurrency, Fair, Policy, State, Task
from fairlane.job import JobRecord
from fairlane.simulation.measures import Group, Simulation, measure
from fairlane.simulation.replay import record, simulate
from fairlane.simulation.run import JobKind, Recording
from fairlane.simulation.workload import JobClass, RunTimes, Workload
from fairlane.store.operators import JobFilter
from fairlane.testing.postgres import ThrowawayPostgres

ROOT = Path(__file__).resolve().parent.parent
TOLERANCE = 0.15
SLOTS = 20
TIMEOUT = 120.0
WORKLOAD = Workload(
    classes=(
        JobClass(name="hot", keys={"account": "hot"}, jobs=2_000, run_time=NAP),
        JobClass(name="small", keys={"account": "small-{n}"}, count=10, jobs=60, run_time=NAP),
        JobClass(name="premium", keys={"account": "premium"}, jobs=600, run_time=NAP),
    )
)
CALIBRATION = Workload(classes=(JobClass(name="all", keys={"account": "any"}, jobs=500, run_time=NAP),))
CALIBRATIONS = (("free", CALIBRATION), ("held", CALIBRATION))
LONGEST_TRIP = 100_000
"""Microseconds: a claim or a settlement that takes longer is no claim that this bench knows."""
MANY = Workload(
    classes=(
        JobClass(
            name="tenants",
            keys={"account": "tenant-{n}"},
            count=10_000,
            jobs=100,
            burst=10,
            poisson=0.2,
            run_time=RunTimes(exponential="200ms"),
        ),
    ),
    seed=1,
)
MANY_SLOTS = 1_000

console = Console()


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure of a class, as it was and as it was foreseen."""

    name: str
    real: float
    simulated: float

    @property
    def ratio(self) -> float:
        return self.simulated / self.real if self.real else 1.0


def speed() -> bool:
    """Time a million jobs, from the declaration to the figures."""
    policy = Policy("many", Fair(by="account"), (Concurrency(20, by="account"),))
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)
    began, used = time.monotonic(), time.process_time()
    recording = record(policy, MANY, slots=MANY_SLOTS, claim_time="5ms")
    played = time.process_time() - used
    figures = measure(recording)
    seconds, used = time.monotonic() - began, time.process_time() - used
    console.print(
        f"{figures.runs:,} jobs over {len(figures.keys):,} keys, {figures.claims:,} claims, "
        f"{figures.seconds:,.0f} virtual seconds, utilisation {figures.utilisation:.2f}: {used:.1f} s of one core "
        f"({played:.1f} s of it the plan and the queue), {seconds:.1f} s by the clock"
    )
    return figures.left == 0


def reality(rounds: int) -> bool:
    """Run and simulate the same workload on each store, some times over."""
    near = True
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fl-")))
        server = stack.enter_context(ThrowawayPostgres())

        def empty(store: str, nth: int) -> str:
            if store == "sqlite":
                return f"sqlite:///{folder / f'jobs{nth}.db'}"
            return asyncio.run(server.create_database(f"reality_{nth}"))

        for store in ("sqlite", "postgres"):
            near &= _judge(store, [_compared(store, empty(store, nth)) for nth in range(rounds)])
    return near


def _compared(store: str, url: str) -> list[Compared]:
    """One round. How busy the machine is shows in the runs of the other queues right before and after."""
    *before, real, free, held = _run(url)
    trips = [_trips(*before), _trips(free, held)]
    claim_time, settle_time = (sum(each) // 2 for each in zip(*trips, strict=True))
    console.print(f"{store}: a claim takes {claim_time / 1_000:.1f} ms, a settlement {settle_time / 1_000:.1f} ms")
    foreseen = _foresee("real", WORKLOAD, claim_time, settle_time)
    compared = [
        Compared(f"{was.name}: {what}", before, after)
        for was, will in zip(real.classes, foreseen.classes, strict=True)
        for what, before, after in _figures(was, will)
    ]
    return [*compared, Compared("all: seconds", real.seconds, foreseen.seconds)]


def _trips(free: Simulation, held: Simulation) -> tuple[int, int]:
    """How long a claim and a settlement take, from what took place without a limit and with one."""
    claim_time = _fitted(free, lambda trip: _foresee("free", CALIBRATION, trip, trip))
    return claim_time, _fitted(held, lambda trip: _foresee("held", CALIBRATION, claim_time, trip))


def _foresee(queue: str, workload: Workload, claim_time: int, settle_time: int) -> Simulation:
    policy = app.queues[queue].policy
    return simulate(policy, workload, slots=SLOTS, claim_time=claim_time / 1e6, settle_time=settle_time / 1e6)


def _fitted(real: Simulation, foresee: Callable[[int], Simulation]) -> int:
    """The time of a trip, in microseconds, with which the simulation takes as long as it really took."""
    low, high = 0, LONGEST_TRIP
    while high - low > 50:
        middle = (low + high) // 2
        low, high = (middle, high) if foresee(middle).seconds < real.seconds else (low, middle)
    return low


def _judge(store: str, rounds: list[list[Compared]]) -> bool:
    """The median of each figure's ratio decides: one round may have met a machine that was busy halfway."""
    table = Table("store", "figure", "real", "simulated", "ratio (median)", "spread", "within 15 %")
    near = True
    for same in zip(*rounds, strict=True):
        ratios = [each.ratio for each in same]
        is_near = abs(median(ratios) - 1.0) <= TOLERANCE
        near &= is_near
        table.add_row(
            store,
            same[0].name,
            f"{median(each.real for each in same):.3f}",
            f"{median(each.simulated for each in same):.3f}",
            f"{median(ratios):.3f}",
            f"{min(ratios):.2f} – {max(ratios):.2f}",
            "yes" if is_near else "[bold red]no[/]",
        )
    console.print(table)
    return near


def _figures(was: Group, will: Group) -> list[tuple[str, float, float]]:
    return [
        ("p95 wait, s", was.waits.p95, will.waits.p95),
        ("share", was.share, will.share),
        ("share while all waited", was.share_when_busy or 0.0, will.share_when_busy or 0.0),
    ]


def _run(url: str) -> list[Simulation]:
    """On a real worker: both calibrations, the workload, both again; measured by the functions of simulations."""
    environment = dict(os.environ, FAIRLANE_URL=url, PYTHONPATH=str(ROOT))
    command = [sys.executable, "-m", "fairlane.cli"]
    subprocess.run([*command, "migrate", "--url", url], check=True, env=environment, stdout=subprocess.DEVNULL)
    with tempfile.TemporaryDirectory(prefix="fl-") as ledger:
        environment["BENCH_LEDGER"] = ledger
        arguments = ["worker", "bench.reality:app", "--concurrency", str(SLOTS), "--log-level", "warning"]
        worker = subprocess.Popen([*command, *arguments], env=environment, cwd=ROOT)
        try:
            finished = asyncio.run(_enqueue_and_wait(url))
        finally:
            worker.send_signal(signal.SIGTERM)
            worker.wait(timeout=TIMEOUT)
        runs = [run for file in Path(ledger).glob("*.json") for run in json.loads(file.read_text())]
    times = {UUID(job): (began, ended) for job, began, ended in runs}
    return [measure(_recorded(queue, labels, jobs, times)) for queue, labels, jobs in finished]


async def _enqueue_and_wait(url: str) -> list[tuple[str, dict[UUID, str], list[JobRecord]]]:
    """One queue after the other: the classes of its jobs, and what the store says of them."""
    real, tasks = make_app(url)
    async with real:
        await (await tasks["free"].enqueue("warm-up")).result(timeout=TIMEOUT)
        return [
            (queue, *await _drain(real, tasks[queue], workload))
            for queue, workload in (*CALIBRATIONS, ("real", WORKLOAD), *CALIBRATIONS)
        ]


async def _drain(real: App, task: Task[[str], None], workload: Workload) -> tuple[dict[UUID, str], list[JobRecord]]:
    jobs = workload.simulated()
    stored = await task.enqueue_many(task.call(str(job.kind.keys["account"])) for job in jobs)
    labels = {job.id: each.kind.label for job, each in zip(stored, jobs, strict=True)}
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        await asyncio.sleep(1.0)
        page = await real.operations.jobs.list(JobFilter(queue=task.queue, state=State.DONE), limit=len(jobs) + 1)
        found = [job for job in page.jobs if job.id in labels]
        if len(found) == len(jobs):
            return labels, found
    raise RuntimeError(f"queue {task.queue!r} was not drained within {TIMEOUT:.0f} s")


def _recorded(
    queue: str, labels: dict[UUID, str], jobs: list[JobRecord], times: dict[UUID, tuple[int, int]]
) -> Recording:
    recording = Recording(app.queues[queue].policy, SLOTS, jobs=len(jobs))
    order = list(dict.fromkeys(labels.values()))
    places: dict[tuple[str, str | None], int] = {}
    for job in sorted(jobs, key=lambda job: order.index(labels[job.id])):
        name = (labels[job.id], job.keys.get("account"))
        if name not in places:
            places[name] = len(places)
            recording.kinds.append(JobKind(name[0], {"account": name[1]}))
        began, ended = times[job.id]
        recording.kind_of.append(places[name])
        recording.ready_at.append(job.enqueued_at)
        recording.started_at.append(began)
        recording.finished_at.append(ended)
    recording.began_at = min(recording.ready_at)
    recording.ended_at = max(recording.finished_at)
    return recording


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.simulate", description=__doc__)
    parser.add_argument("what", nargs="*", choices=["speed", "reality", []], help="both, unless named")
    parser.add_argument("--rounds", type=int, default=3, help="of reality; the median counts")
    options = parser.parse_args()
    chosen = options.what or ["reality", "speed"]
    works: dict[str, Callable[[], bool]] = {"speed": speed, "reality": lambda: reality(options.rounds)}
    held = [works[each]() for each in chosen]
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
