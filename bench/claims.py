"""How long a claim of 200 takes, by the public claim of a queue: whatever waits, however many keys, however old the
oldest snapshot.

Two databases take turns, so that whatever else the machine does it does to both. Beside the time by the clock stands
the processor time of the server's backends, which others disturb less.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from statistics import median

import asyncpg

from bench.crew import Crew, migrate, produce, producing
from bench.judging import Run
from bench.measuring import Load, most_memory, thread_seconds
from bench.past import FILLER, BenchApp
from bench.running import Bench, Work

__all__ = ["MEMORY", "PINS", "RATIO", "SERVER_RATIO", "works"]

BATCH = 200
CLAIMS = 100
WARM_UP, MOST_WARM_UPS = 20, 100
RATIO, SERVER_RATIO = "ratio", "server's ratio"
MEMORY = "MiB"
READY = 200_000
"""Jobs that wait where the number of keys is what differs."""
FEW, MANY = 10_000, 1_000_000
"""Jobs that wait where that is what differs."""
PIN_SECONDS, PINNED_RATE = 60, 8_000

EVENTS = "select count(*) from fairlane.arrivals"
BACKENDS = "select pid from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
PINS: Mapping[str, Sequence[str]] = {
    "a reader": ("begin isolation level repeatable read", "select count(*) from pg_class"),
    "a transaction with an xid": ("begin", "select pg_current_xact_id()"),
}


@dataclass(frozen=True, slots=True)
class Backlog:
    """What waits in a queue."""

    queue: str
    jobs: int
    keys: int

    @property
    def name(self) -> str:
        return f"{self.jobs:,} waiting, {self.keys:,} {'key' if self.keys == 1 else 'keys'}"


@dataclass(slots=True)
class Claimer:
    """One database, and the times of the claims that were made there, in milliseconds."""

    bench: BenchApp
    backlog: Backlog
    observer: asyncpg.Connection
    stored: int = 0
    wall: list[float] = field(default_factory=list)
    server: list[float] = field(default_factory=list)

    async def claim(self, *, is_measured: bool = True) -> None:
        """Claim, settle, and put as many jobs back as were taken. Only a claim that finds its full number counts."""
        queue = self.bench.plain if self.backlog.queue == "plain" else self.bench.fair
        backends = [row[0] for row in await self.observer.fetch(BACKENDS)] if is_measured else []
        used, began = thread_seconds(backends), time.perf_counter()
        claims = await queue.claim(BATCH)
        ended = time.perf_counter()
        if is_measured and len(claims) == BATCH:
            self.wall.append((ended - began) * 1e3)
            self.server.append((thread_seconds(backends) - used) * 1e3)
        await queue.ack(claims)
        await self._store(len(claims))

    async def _store(self, count: int) -> None:
        numbers = range(self.stored, self.stored + count)
        self.stored += count
        if self.backlog.queue == "plain":
            await self.bench.app.enqueue_many(self.bench.plain_noop.call(n, FILLER) for n in numbers)
        else:
            keys = self.backlog.keys
            await self.bench.app.enqueue_many(
                self.bench.fair_noop.call(n, f"account-{n % keys}", FILLER) for n in numbers
            )

    async def events(self) -> int:
        """Arrivals that no claim has folded yet."""
        return int(await self.observer.fetchval(EVENTS))

    def forget(self) -> tuple[float, float]:
        """The medians so far, and none from here on."""
        medians = median(self.wall), median(self.server)
        self.wall, self.server = [], []
        return medians


@asynccontextmanager
async def claiming(url: str, backlog: Backlog) -> AsyncIterator[Claimer]:
    """A claimer on a filled database, its tables as autovacuum would leave them."""
    observer = await asyncpg.connect(url)
    try:
        await observer.execute("vacuum analyze")
        bench = BenchApp(url)
        async with bench.app:
            yield Claimer(bench, backlog, observer)
    finally:
        await observer.close()


async def warm_up(claimers: Sequence[Claimer]) -> None:
    """Claim until old lane events are folded, on all databases equally often: those of the last batch are left."""
    for _ in range(MOST_WARM_UPS):
        for each in list(claimers) * WARM_UP:
            await each.claim(is_measured=False)
        if max([await each.events() for each in claimers]) <= BATCH:
            return
    raise RuntimeError(f"lane events of jobs that arrived were not folded by {MOST_WARM_UPS * WARM_UP:,} claims")


def filled(bench: Bench, backlog: Backlog) -> str:
    url = bench.database()
    migrate(url)
    produce(url, "fill", backlog.queue, backlog.jobs, keys=backlog.keys)
    return url


def compare(few: Backlog, many: Backlog) -> Callable[[Bench], Run]:
    """Claims from two databases by turns."""

    async def measure(urls: Sequence[str]) -> Run:
        async with AsyncExitStack() as stack:
            claimers = [
                await stack.enter_async_context(claiming(url, backlog))
                for url, backlog in zip(urls, (few, many), strict=True)
            ]
            await warm_up(claimers)
            load = Load.now()
            for number in range(CLAIMS):
                for each in claimers if number % 2 else reversed(claimers):
                    await each.claim()
            before, after = (each.forget() for each in claimers)
            return compared(few.name, many.name, before, after, load)

    return lambda bench: asyncio.run(measure([filled(bench, few), filled(bench, many)]))


def compared(few: str, many: str, before: tuple[float, float], after: tuple[float, float], load: Load) -> Run:
    return Run(
        figures={
            RATIO: after[0] / before[0],
            SERVER_RATIO: after[1] / before[1],
            f"ms, {few}": before[0],
            f"ms, {many}": after[0],
            f"server's ms, {few}": before[1],
            f"server's ms, {many}": after[1],
        },
        foreign_load=load.foreign_until_now(),
        configuration=f"claims of {BATCH} by `queue.claim`, medians of {CLAIMS}",
    )


def pinned(pin: str, backlog: Backlog) -> Callable[[Bench], Run]:
    """Claims before and after a worker has drained for a minute while somebody held the vacuum horizon where it was."""

    async def measure(url: str) -> Run:
        async with claiming(url, backlog) as claimer:
            await warm_up([claimer])
            load = Load.now()
            before = await medians(claimer)
            holder = await asyncpg.connect(url)
            try:
                for statement in PINS[pin]:
                    await holder.execute(statement)
                await asyncio.to_thread(drain, url, backlog)
                await warm_up([claimer])
                return compared("before", f"after {PIN_SECONDS} s", before, await medians(claimer), load)
            finally:
                await holder.close()

    async def medians(claimer: Claimer) -> tuple[float, float]:
        for _ in range(CLAIMS):
            await claimer.claim()
        return claimer.forget()

    return lambda bench: asyncio.run(measure(filled(bench, backlog)))


def drain(url: str, backlog: Backlog) -> None:
    """A worker and a producer beside it, for as long as the horizon is pinned. Enough is left to claim from."""
    jobs = PIN_SECONDS * PINNED_RATE
    with (
        Crew.at_work(url, backlog.queue, 1, 500),
        producing(url, "paced", backlog.queue, jobs, keys=backlog.keys, rate=PINNED_RATE),
    ):
        time.sleep(PIN_SECONDS)
    produce(url, "fill", backlog.queue, FEW * 4, keys=backlog.keys)


def memory(bench: Bench) -> Run:
    """The most memory of a worker that drains for half a minute from a million jobs of 100,000 keys."""
    url = filled(bench, Backlog("fair", MANY, 100_000))
    load = Load.now()
    with Crew.at_work(url, "fair", 1, 500) as crew:
        time.sleep(30)
        most = max(most_memory(pid) for pid in crew.pids)
    return Run(
        figures={MEMORY: most, "jobs run": float(crew.runs)},
        foreign_load=load.foreign_until_now(),
        configuration="`fairlane worker --concurrency 500`, 30 s",
    )


def works() -> list[Work]:
    fair = Backlog("fair", READY, 1_000)
    named: list[tuple[str, str, Callable[[Bench], Run]]] = [
        ("claim, 1,000 → 100,000 keys", "`Fair`, 200,000 waiting", compare(fair, Backlog("fair", READY, 100_000))),
        (
            "claim, 10k → 1M waiting, one lane",
            "no policy",
            compare(Backlog("plain", FEW, 1), Backlog("plain", MANY, 1)),
        ),
        (
            "claim, 10k → 1M waiting, 1,000 lanes",
            "`Fair`",
            compare(Backlog("fair", FEW, 1_000), Backlog("fair", MANY, 1_000)),
        ),
        *(
            (
                f"claim, horizon pinned 60 s by {pin}",
                f"`Fair` over 1,000 keys; a worker drains, {PINNED_RATE:,} jobs/s arrive",
                pinned(pin, fair),
            )
            for pin in PINS
        ),
        ("memory of a worker", "100,000 keys, 1M waiting", memory),
    ]
    return [Work(name=name, what=what, run=run, rounds=1) for name, what, run in named]
