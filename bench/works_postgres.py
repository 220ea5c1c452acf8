"""Fairlane's works on PostgreSQL: drains, enqueues, the wait of an idle queue, the whale, an idle worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from statistics import median, quantiles

import asyncpg

from bench.crew import DRAINED, SLOTS, WAITING, Crew, migrate, produce
from bench.judging import Run
from bench.ledger import free_slot_gaps, most_at_once, ran_otherwise, violations
from bench.measuring import BOTH, CLIENT, JOBS_PER_SECOND, SERVER, DatabaseCounters, Load, thread_seconds
from bench.metering import Meter
from bench.running import Bench, Work
from bench.workload import ACCOUNTS, EACH, ENDPOINTS, GATED, HOT, SMALL

__all__ = [
    "CONCURRENCY",
    "GATED_CONCURRENCY",
    "IDLE_CPU",
    "IDLE_QUERIES",
    "LAST_SMALL",
    "P50",
    "P99",
    "PICKUPS",
    "SLOT_GAP",
    "TOTAL",
    "VIOLATIONS",
    "WHALE_JOBS",
    "Drain",
    "gate_violations",
    "run_drain",
    "works",
]

CONCURRENCY = 500
"""`--concurrency` of the drains: also the batch that is pgqueuer's best."""
GATED_CONCURRENCY = 1_000
"""Where a queue has limits nothing is claimed ahead: so many slots give claims as large as those of the others."""
NAPPING_SLOTS = 256
WHALE_SLOTS = 20
WHALE_JOBS = HOT + SMALL * EACH
PRODUCERS = 16
BULK, BULKS = 1_000, 2
"""Jobs a call, and calls at once."""
PICKUPS, WARM_UP = 300, 10
P50, P99 = "p50 ms", "p99 ms"
VIOLATIONS = "violations"
SLOT_GAP = "slot free to next start p50 ms"
LAST_SMALL = "last small / total"
TOTAL = "total s"

SPAN = "select max(finished_at) - min(claimed_at) from fairlane.jobs where state = 3"
STORED = "select count(*) from fairlane.jobs where task = 'plain_noop'"
HELD = "select keys->>'account', claimed_at, finished_at from fairlane.jobs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """One drain of a queue: how many jobs over how many keys, by which workers."""

    work: str
    queue: str = ""
    share: float = 1.0
    """Of the bench's number of jobs."""
    keys: int = ACCOUNTS
    size: int | None = None
    processes: int = 1
    each: int = 1
    """Processes of each worker."""
    concurrency: int = CONCURRENCY
    is_warm: bool = False
    """The workers come first and wait. Sixty-four interpreters take long to start, and that is not what is measured."""

    def __call__(self, bench: Bench) -> Run:
        return run_drain(bench, self, self._nothing)

    @staticmethod
    def _nothing(url: str, jobs: int, crew: Crew) -> dict[str, float]:
        return {}

    @property
    def options(self) -> dict[str, int]:
        """What the producer is told."""
        return {"keys": self.keys} | ({} if self.size is None else {"size": self.size})

    def configuration(self, jobs: int) -> str:
        payload = "" if self.size is None else f", payload {self.size:,} B"
        processes = "" if self.each == 1 else f" --processes {self.each}"
        command = f"`fairlane worker{processes} --concurrency {self.concurrency}`"
        return f"{jobs:,} jobs, {self.processes} × {command}{payload}"


Extra = Callable[[str, int, Crew], dict[str, float]]


def run_drain(bench: Bench, drain: Drain, extra: Extra) -> Run:
    """Enqueue, drain with fresh worker processes, and hold the handlers' ledger against what was enqueued."""
    jobs = max(drain.processes, round(bench.jobs * drain.share))
    url = bench.database()
    migrate(url)
    if not drain.is_warm:
        produce(url, "fill", drain.work, jobs, **drain.options)
    meter = Meter.started(bench, url)
    with Crew.at_work(url, drain.queue or drain.work, drain.processes, drain.concurrency, each=drain.each) as crew:
        if drain.is_warm:
            crew.wait(url, WAITING, drain.processes)
            crew.wait(url, SLOTS, drain.processes * drain.each * drain.concurrency)
            meter.restart()
            crew.start_processors()
            produce(url, "fill", drain.work, jobs, **drain.options)
        looks = crew.wait(url, DRAINED, 1)
        meter.stop()
        crew.read_processors()
    if crew.runs != jobs:
        raise RuntimeError(f"{drain.work}: {jobs} jobs were enqueued, but handlers counted {crew.runs} runs")
    figures = {JOBS_PER_SECOND: jobs / _span(url), CLIENT: crew.handling_cpu / jobs * 1e6}
    # Where the jobs came while the workers were there, the server's cost of storing them is not told from the rest.
    if not drain.is_warm:
        figures |= meter.figures(jobs, looks)
        figures[BOTH] = figures[CLIENT] + figures[SERVER]
    figures |= extra(url, jobs, crew)
    return Run(figures=figures, foreign_load=meter.foreign_load, configuration=drain.configuration(jobs))


def _span(url: str) -> float:
    """Seconds from the first claim to the last settlement, on the database's clock."""
    return asyncio.run(_ask(url, SPAN)) / 1e6


async def _ask(url: str, query: str) -> float:
    connection = await asyncpg.connect(url)
    try:
        return float(await connection.fetchval(query))
    finally:
        await connection.close()


async def _rows(url: str, query: str) -> list[tuple[str, int, int]]:
    connection = await asyncpg.connect(url)
    try:
        return [tuple(row) for row in await connection.fetch(query)]
    finally:
        await connection.close()


def gated_drain(bench: Bench) -> Run:
    """`Fair`, `Concurrency` and `Rate` by key. Every job's start is held against the limits of its key."""

    def check(url: str, jobs: int, crew: Crew) -> dict[str, float]:
        return {VIOLATIONS: float(gate_violations(crew, jobs, asyncio.run(_rows(url, HELD))))}

    return run_drain(bench, Drain(work="gated", concurrency=GATED_CONCURRENCY), check)


def gate_violations(crew: Crew, jobs: int, held: Iterable[tuple[str, int, int]]) -> int:
    """How often limits were exceeded: by what handlers wrote down, and by the claims that the database held."""
    starts = [start for entry in crew.entries for start in entry.starts]
    if wrong := ran_otherwise(starts, jobs):
        raise RuntimeError(f"gated: {wrong} of {jobs} jobs did not run exactly once")
    found = violations(starts, concurrency=GATED.CONCURRENCY, burst=GATED.STARTS, interval=GATED.INTERVAL)
    # Handlers that do nothing never overlap. How many claims each key had at once, the database knows.
    spans: dict[str, list[tuple[int, int]]] = {}
    for account, claimed, finished in held:
        spans.setdefault(account, []).append((claimed, finished))
    return found + sum(most_at_once(each) > GATED.CONCURRENCY for each in spans.values())


def napping(processes: int, concurrency: int, *, each: int = 1) -> Callable[[Bench], Run]:
    """Jobs of 20 ms, by so many workers of so many processes each that wait for them."""

    def gaps(url: str, jobs: int, crew: Crew) -> dict[str, float]:
        waits = [gap for entry in crew.entries for gap in free_slot_gaps(entry.starts)]
        return {SLOT_GAP: median(waits) / 1e6}

    drain = Drain(work="small", share=0.4, processes=processes, each=each, concurrency=concurrency, is_warm=True)
    return lambda bench: run_drain(bench, drain, gaps)


def whale(queue: str) -> Callable[[Bench], Run]:
    """5,000 jobs of one account first, then 100 accounts with 10 each; 20 slots, 5 ms a job. As the handlers saw it."""

    def run(bench: Bench) -> Run:
        url = bench.database()
        migrate(url)
        produce(url, "fill", queue, 0)
        load = Load.now()
        with Crew.at_work(url, queue, 1, WHALE_SLOTS) as crew:
            crew.wait(url, DRAINED, 1)
            foreign = load.foreign_until_now()
        starts = [start for entry in crew.entries for start in entry.starts]
        if wrong := ran_otherwise(starts, WHALE_JOBS):
            raise RuntimeError(f"{queue}: {wrong} of {WHALE_JOBS} jobs did not run exactly once")
        began = min(start.began for start in starts)
        total = max(start.ended for start in starts) - began
        last_small = max(start.ended for start in starts if start.key) - began
        return Run(
            figures={TOTAL: total / 1e9, LAST_SMALL: last_small / total},
            foreign_load=foreign,
            configuration=f"`fairlane worker --concurrency {WHALE_SLOTS}`",
        )

    return run


def enqueue(how: str, share: float, **options: int) -> Callable[[Bench], Run]:
    """Enqueues with nobody to run them."""

    def run(bench: Bench) -> Run:
        jobs = round(bench.jobs * share)
        url = bench.database()
        migrate(url)
        meter = Meter.started(bench, url)
        produced = produce(url, how, "plain", jobs, **options)
        meter.stop()
        stored = asyncio.run(_ask(url, STORED))
        if stored != jobs:
            raise RuntimeError(f"enqueue: {jobs} jobs were enqueued, but {stored:.0f} are stored")
        figures = {JOBS_PER_SECOND: jobs / produced.seconds, CLIENT: produced.cpu / jobs * 1e6}
        return Run(
            figures=figures | meter.figures(jobs),
            foreign_load=meter.foreign_load,
            configuration=f"{jobs:,} jobs, " + ", ".join(f"{name} {value:,}" for name, value in options.items()),
        )

    return run


def pickup(bench: Bench) -> Run:
    """From before the enqueue is called to the first line of the handler, on a queue with nothing else to do."""
    jobs = PICKUPS + WARM_UP
    url = bench.database()
    migrate(url)
    with Crew.at_work(url, "ping", 1, 100) as crew:
        crew.wait(url, WAITING, 1)
        load = Load.now()
        produce(url, "pickup", "ping", jobs)
        crew.wait(url, DRAINED, 1)
        foreign = load.foreign_until_now()
    starts = [start for entry in crew.entries for start in entry.starts]
    if ran_otherwise(starts, jobs):
        raise RuntimeError(f"pickup: {jobs} jobs were enqueued, but handlers noted {len(starts)}")
    waits = [(start.ended - start.began) / 1e6 for start in starts if start.number >= WARM_UP]
    return Run(
        figures={P50: median(waits), P99: quantiles(waits, n=100)[98]},
        foreign_load=foreign,
        configuration=f"{PICKUPS} jobs, 20 ms after the one before; `fairlane worker`",
    )


IDLE, IDLE_CPU, IDLE_QUERIES = 30.0, "% of a core", "transactions/s"


def idle_worker(bench: Bench) -> Run:
    """A worker with nothing to do for 30 s. Counters tell of a backend once it ends: two lives, one 30 s longer."""
    counts, cpu, foreign = [], 0.0, 0.0
    for seconds in (0.0, IDLE):
        url = bench.database()
        migrate(url)
        with Crew.at_work(url, "plain", 1, 100) as crew:
            looks = crew.wait(url, WAITING, 1)
            time.sleep(5.0)
            load = Load.now()
            cpu = thread_seconds(crew.pids)
            time.sleep(seconds)
            cpu = thread_seconds(crew.pids) - cpu
            foreign = load.foreign_until_now()
        ended = asyncio.run(DatabaseCounters.now(url))
        counts.append(ended.commits + ended.rollbacks - looks)
    return Run(
        figures={IDLE_CPU: cpu / IDLE * 100, IDLE_QUERIES: (counts[1] - counts[0]) / IDLE},
        foreign_load=foreign,
        configuration="`fairlane worker`, 30 s",
    )


def works() -> list[Work]:
    """All of them, in the order in which a round runs them."""
    fair = Drain(work="fair")
    lanes = ACCOUNTS * ENDPOINTS
    named: list[tuple[str, str, Callable[[Bench], Run], bool]] = [
        ("drain", "no-op, one process", Drain(work="plain"), True),
        ("fair drain, 1,000 keys", "`Fair(by='account')`, no-op, one process", fair, True),
        ("gated drain, 1,000 keys", "`Fair`, `Concurrency` and `Rate` by key, no-op", gated_drain, True),
        ("single enqueue", "16 at once in one process", enqueue("single", 0.3, at_once=PRODUCERS), True),
        ("bulk enqueue", "`enqueue_many` in one process", enqueue("bulk", 2.0, bulk=BULK, at_once=BULKS), True),
        ("pickup", "an idle queue, one job at a time", pickup, True),
        ("whale", "5,000 hot, then 100 × 10, `Fair`; 20 slots × 5 ms", whale("whale"), True),
        ("whale, FIFO", "the same jobs without `Fair`", whale("whale_fifo"), True),
        ("20 ms jobs, 1 × 256 slots", "one process", napping(1, NAPPING_SLOTS), True),
        ("20 ms jobs, 64 × 4 slots", "one worker, `--processes 64`", napping(1, NAPPING_SLOTS // 64, each=64), True),
        ("20 ms jobs, 64 workers × 4 slots", "sixty-four workers", napping(64, NAPPING_SLOTS // 64), False),
        ("idle worker", "nothing to do", idle_worker, True),
        *(
            (
                f"fair drain, {keys:,} keys",
                "`Fair(by='account')`, no-op, one process",
                replace(fair, keys=keys, share=2),
                False,
            )
            for keys in (1, 100, 10_000, 100_000)
        ),
        (
            "flows of many lanes",
            "1,000 accounts × 50 endpoints: `Fair` and `Concurrency` by account, `Rate` by endpoint",
            Drain(work="lanes", share=2.0),
            False,
        ),
        ("one flow of 1,000 lanes", "no `Fair`, `Concurrency` by endpoint", Drain(work="one_flow"), False),
        (
            f"one flow of {lanes:,} lanes",
            "no `Fair`, `Concurrency` by endpoint",
            Drain(work="one_flow", keys=lanes),
            False,
        ),
        *(
            (f"drain, payloads of {name}", "no-op, one process", Drain(work="plain", size=size, share=share), False)
            for name, size, share in (("100 B", 100, 1.0), ("10 kB", 10_000, 0.4), ("100 kB", 100_000, 0.06))
        ),
    ]
    return [
        Work(name=name, what=what, run=run, is_short=short, rounds=1 if run is idle_worker else None)
        for name, what, run, short in named
    ]
