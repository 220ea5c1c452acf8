"""The benchmark's peer: pgqueuer 1.6.0 draining no-op jobs, in the best configuration found for it.

Run by the peer's own Python (``requirements.txt`` beside this file) against an **empty** database::

    python drain.py --url postgresql://user@host:port/name --jobs 50000

It installs pgqueuer's schema, enqueues the jobs in bulk through the public API, drains them in one process on
uvloop, and prints one JSON line. The clock runs from the start of the first dequeue until the last settlement is
committed: start-up, pgqueuer's check of its schema and its shutdown are not charged to it. The exit status is
0 only if handlers counted every job, the queue table is empty and the log holds every job as successful.

The defaults are the best honest configuration found, on two cores shared with a PostgreSQL of default settings:

* durability ``durable``: pgqueuer's own default, every table logged;
* batch size 500, which is also the size at which pgqueuer flushes its buffer of settled jobs;
* asyncpg **pools**, so that a dequeue need not wait for the settlement of the batch before;
* **two** ``PgQueuer`` instances in the one process, so that one's statements run while the other's handlers do;
* ``ANALYZE`` once after the bulk enqueue (not timed), as autovacuum would have done before long: without it the
  planner has no statistics of the queue;
* heartbeats, buffers, health checks and log aggregation as pgqueuer ships them. A heartbeat time-out of nought would
  save a task per job, but then its own dequeue takes running jobs for stale ones: not an option.

Ratios of jobs per second, medians of four or five runs each, interleaved, leaving out runs another process disturbed.
The spread of a configuration is about ±10 %, so steps below that are not findings.

=====================================================  =====
one instance, one connection, batch 500, no ANALYZE    1.00
… with ANALYZE                                         1.16
one instance, a pool, no ANALYZE                       1.15
… with ANALYZE                                         1.26
… batch 250 / 1,000                                    1.28 / 1.33
**two instances, pools, ANALYZE, batch 500**           1.41
… batch 250 / 1,000                                    1.37 / 1.36
… with pgqueuer's autovacuum settings                  1.33
… ``balanced`` (the log table unlogged)                1.45
… ``volatile`` (every table unlogged)                  1.38
=====================================================  =====

Seen in one or two runs each, not guarded against disturbance: pgqueuer's default batch of 10 gives 0.1 to 0.3 of a
batch of 500, batches of 2,000 and 5,000 about 0.9 of it; three instances do no better than two and five worse;
``max_concurrent_tasks``, a longer heartbeat time-out and ``jit=off`` change nothing.

Unlogged tables gain nothing beyond the spread. The worker process is on a core for about nine tenths of the drain (two
asyncio tasks, a cancel scope and a validated model per job), and a drain commits only some two hundred times.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import asyncpg
import uvloop
from pgqueuer import AsyncpgDriver, AsyncpgPoolDriver, Job, PgQueuer, Queries
from pgqueuer.types import QueueExecutionMode

if TYPE_CHECKING:
    from pgqueuer.models import TracebackRecord
    from pgqueuer.queries import EntrypointExecutionParameter
    from pgqueuer.types import JOB_STATUS, QueueEntrypoint, QueueManagerId

ENTRYPOINT = "noop"
PAYLOAD_BYTES = 110
ENQUEUE_CHUNK = 5_000
EXIT_INCOMPLETE = 1
EXIT_UNUSABLE = 2
EXIT_TIMED_OUT = 3


@dataclass
class Clock:
    """What the drain spends its time on; shared by every consumer of the process."""

    first_dequeue: float | None = None
    last_settled: float | None = None
    dequeue_seconds: float = 0.0
    dequeue_calls: int = 0
    settle_seconds: float = 0.0
    settle_calls: int = 0


@dataclass
class ClockedQueries(Queries):
    """pgqueuer's own queries, noting when the first dequeue began and the last settlement was committed.

    Two clock readings per batch; nothing is done per job.
    """

    clock: Clock = field(default_factory=Clock)

    async def dequeue(
        self,
        batch_size: int,
        entrypoints: dict[QueueEntrypoint, EntrypointExecutionParameter],
        queue_manager_id: QueueManagerId,
        global_concurrency_limit: int | None,
        heartbeat_timeout: timedelta,
    ) -> list[Job]:
        """Dequeue as pgqueuer does, timed."""
        started = time.perf_counter()
        if self.clock.first_dequeue is None:
            self.clock.first_dequeue = started
        jobs = await super().dequeue(
            batch_size, entrypoints, queue_manager_id, global_concurrency_limit, heartbeat_timeout
        )
        self.clock.dequeue_seconds += time.perf_counter() - started
        self.clock.dequeue_calls += 1
        return jobs

    async def log_jobs(self, job_status: list[tuple[Job, JOB_STATUS, TracebackRecord | None]]) -> None:
        """Settle a batch as pgqueuer does, timed."""
        started = time.perf_counter()
        await super().log_jobs(job_status)
        self.clock.last_settled = time.perf_counter()
        self.clock.settle_seconds += self.clock.last_settled - started
        self.clock.settle_calls += 1


@dataclass(frozen=True)
class Options:
    """The command line."""

    url: str
    jobs: int
    batch: int
    consumers: int
    driver: str
    durability: str
    tune_autovacuum: bool
    analyze: bool
    max_concurrent_tasks: int | None
    heartbeat_timeout: float
    enqueue_only: bool
    timeout: float

    def configuration(self) -> dict[str, Any]:
        """Everything a reader needs to repeat the run, without the address."""
        return {
            "batch_size": self.batch,
            "consumers_in_process": self.consumers,
            "driver": f"asyncpg {self.driver}",
            "event_loop": "uvloop",
            "durability": self.durability,
            "tuned_autovacuum": self.tune_autovacuum,
            "analyzed": self.analyze,
            "max_concurrent_tasks": self.max_concurrent_tasks,
            "heartbeat_timeout_seconds": self.heartbeat_timeout,
            "mode": "drain",
            "payload_bytes": PAYLOAD_BYTES,
            "asyncpg": version("asyncpg"),
            "uvloop": version("uvloop"),
            "python": ".".join(str(part) for part in sys.version_info[:3]),
        }


def payload(number: int) -> bytes:
    """A small JSON document of ``PAYLOAD_BYTES`` bytes."""
    head = f'{{"tenant": "tenant-{number % 100:03d}", "order": {number:08d}, "note": "'
    return f'{head}{"x" * (PAYLOAD_BYTES - len(head) - 2)}"}}'.encode()


class UnusableDatabaseError(Exception):
    """The database given is not empty."""


async def install(options: Options) -> None:
    """Put pgqueuer's schema into the empty database."""
    connection = await asyncpg.connect(options.url)
    try:
        queries = Queries(AsyncpgDriver(connection))
        if await queries.schema_is_installed():
            message = "pgqueuer is already installed in this database; give an empty one"
            raise UnusableDatabaseError(message)
        await queries.install()
        if options.tune_autovacuum:
            await queries.optimize_autovacuum()
    finally:
        await connection.close()


async def enqueue(options: Options) -> float:
    """Enqueue every job in bulk; the seconds it took."""
    connection = await asyncpg.connect(options.url)
    try:
        queries = Queries(AsyncpgDriver(connection))
        seconds = 0.0
        for first in range(0, options.jobs, ENQUEUE_CHUNK):
            payloads: list[bytes | None] = [
                payload(number) for number in range(first, min(first + ENQUEUE_CHUNK, options.jobs))
            ]
            started = time.perf_counter()
            await queries.enqueue([ENTRYPOINT] * len(payloads), payloads, [0] * len(payloads))
            seconds += time.perf_counter() - started
        if options.analyze:
            await connection.execute("ANALYZE")
        return seconds
    finally:
        await connection.close()


async def drain(options: Options, clock: Clock) -> int:
    """Run the worker until the queue is empty and every settlement is committed; the jobs handlers counted."""
    counted = 0

    async def noop(job: Job) -> None:
        nonlocal counted
        counted += 1

    async with contextlib.AsyncExitStack() as stack:
        consumers: list[PgQueuer] = []
        for _ in range(options.consumers):
            driver: AsyncpgDriver | AsyncpgPoolDriver
            if options.driver == "pool":
                driver = AsyncpgPoolDriver(
                    await stack.enter_async_context(asyncpg.create_pool(options.url, min_size=4, max_size=4))
                )
            else:
                connection = await asyncpg.connect(options.url)
                stack.push_async_callback(connection.close)
                driver = AsyncpgDriver(connection)
            consumer = PgQueuer(driver, queries=ClockedQueries(driver, clock=clock))
            consumer.entrypoint(ENTRYPOINT)(noop)
            consumers.append(consumer)
        async with asyncio.TaskGroup() as group:
            for consumer in consumers:
                group.create_task(
                    consumer.run(
                        batch_size=options.batch,
                        mode=QueueExecutionMode.drain,
                        max_concurrent_tasks=options.max_concurrent_tasks,
                        heartbeat_timeout=timedelta(seconds=options.heartbeat_timeout),
                    )
                )
    return counted


async def left_and_settled(options: Options) -> tuple[int, int]:
    """Rows still in the queue table, and distinct jobs the log calls successful."""
    connection = await asyncpg.connect(options.url)
    try:
        left = await connection.fetchval("SELECT count(*) FROM pgqueuer")
        settled = await connection.fetchval(
            "SELECT count(DISTINCT job_id) FROM pgqueuer_log WHERE status = 'successful'"
        )
        return int(left), int(settled)
    finally:
        await connection.close()


async def run(options: Options) -> int:
    """The whole benchmark; the exit status."""
    report: dict[str, Any] = {"peer": "pgqueuer", "version": version("pgqueuer"), "jobs": options.jobs}
    await install(options)
    report["enqueue_seconds"] = round(await enqueue(options), 4)
    report |= {"drain_seconds": None, "jobs_per_second": None, "counted_by_handlers": 0}
    complete = True
    if not options.enqueue_only:
        clock = Clock()
        cpu = time.process_time()
        counted = await drain(options, clock)
        cpu = time.process_time() - cpu
        left, settled = await left_and_settled(options)
        complete = left == 0 and counted == settled == options.jobs
        if clock.first_dequeue is not None and clock.last_settled is not None:
            seconds = clock.last_settled - clock.first_dequeue
            report |= {
                "drain_seconds": round(seconds, 4),
                "jobs_per_second": round(options.jobs / seconds, 1),
                "counted_by_handlers": counted,
                "left_in_queue": left,
                "settled_in_log": settled,
                "spent": {
                    "dequeue_seconds": round(clock.dequeue_seconds, 4),
                    "dequeue_calls": clock.dequeue_calls,
                    "settle_seconds": round(clock.settle_seconds, 4),
                    "settle_calls": clock.settle_calls,
                    "worker_cpu_seconds": round(cpu, 4),
                },
            }
    report["configuration"] = options.configuration()
    print(json.dumps(report), flush=True)
    if not complete:
        print("not every job ran and was settled exactly once", file=sys.stderr)
        return EXIT_INCOMPLETE
    return 0


def parse(arguments: list[str] | None = None) -> Options:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Drain no-op jobs with pgqueuer, and print one JSON line.")
    parser.add_argument("--url", required=True, help="an empty database: postgresql://user@host:port/name")
    parser.add_argument("--jobs", type=int, default=50_000)
    parser.add_argument("--batch", type=int, default=500, help="jobs per dequeue, and per flush of the job log")
    parser.add_argument("--consumers", type=int, default=2, help="pgqueuer instances in this one process")
    parser.add_argument("--driver", choices=("connection", "pool"), default="pool")
    parser.add_argument("--durability", choices=("durable", "balanced", "volatile"), default="durable")
    parser.add_argument("--tune-autovacuum", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--analyze", action=argparse.BooleanOptionalAction, default=True, help="after the enqueue")
    parser.add_argument("--max-concurrent-tasks", type=int, default=None)
    parser.add_argument("--heartbeat-timeout", type=float, default=30.0, help="seconds; pgqueuer's default is 30")
    parser.add_argument("--enqueue-only", action="store_true")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds before the process gives up")
    return Options(**vars(parser.parse_args(arguments)))


def give_up() -> None:
    """End the process when its time is over, whatever the event loop is doing."""
    print("timed out", file=sys.stderr, flush=True)
    os._exit(EXIT_TIMED_OUT)


def main() -> int:
    """Run, bounded in time."""
    options = parse()
    # pgqueuer reads its settings from the environment once, at its first use.
    os.environ["PGQUEUER_DURABILITY"] = options.durability
    watchdog = threading.Timer(options.timeout, give_up)
    watchdog.daemon = True
    watchdog.start()
    try:
        return uvloop.run(run(options))
    except UnusableDatabaseError as error:
        print(error, file=sys.stderr)
        return EXIT_UNUSABLE
    finally:
        watchdog.cancel()


if __name__ == "__main__":
    sys.exit(main())
