"""pgqueuer 1.6.0, in the best configuration found for it; see ../README.md for the workloads and how they are timed.

Every table is logged (durability ``durable``, pgqueuer's default), the driver is asyncpg, the loop is uvloop;
heartbeats, buffers, health checks and log aggregation are as pgqueuer ships them. A heartbeat time-out of nought
would save a task per job, but then its own dequeue takes running jobs for stale ones: not an option. ``ANALYZE`` runs
once after the jobs of a drain are enqueued (not timed), as autovacuum would have done before long. The clock of a
drain runs from the start of the first dequeue until the last settlement is committed.

Drain: batch size 500, which is also the size at which pgqueuer flushes its buffer of settled jobs; asyncpg **pools**,
so that a dequeue need not wait for the settlement of the batch before; **two** ``PgQueuer`` instances in the one
process, so that one's statements run while the other's handlers do. Ratios of jobs per second on two cores shared
with a PostgreSQL of default settings, medians of four or five runs each, interleaved, leaving out runs another
process disturbed. The spread of a configuration is about ±10 %, so steps below that are not findings.

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

The other workloads, medians of three interleaved runs each, on a machine with other work on it:

==========================================================================  =====
enqueue: a pool of **16** connections / 8 / 4                               1.00 / 1.07 / 0.81
bulk: one call at a time / 2 / **4**                                        1.00 / 0.94 / 1.24
pickup, p50: **a pool, batch 10** / batch 1 / a connection of its own       1.00 / 1.16 / 0.97
whale, total: ``concurrency_limit=20``, batch 20                            1.00
… **a semaphore of 20 around the handler**, batch 20 / **100** / 500        0.56 / 0.48 / 0.59
… a semaphore, batch 100, two instances                                     0.55
==========================================================================  =====

The whale's twenty slots are a semaphore because a ``concurrency_limit`` is kept in the dequeue: a slot is free again
only when the buffer of settled jobs is flushed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncpg
import uvloop
from pgqueuer import AsyncpgDriver, AsyncpgPoolDriver, Job, PgQueuer, Queries
from pgqueuer.types import QueueExecutionMode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common

if TYPE_CHECKING:
    from pgqueuer.models import TracebackRecord
    from pgqueuer.queries import EntrypointExecutionParameter
    from pgqueuer.types import JOB_STATUS, QueueEntrypoint, QueueManagerId

ENTRYPOINT = "job"
FILL_CHUNK = 5_000


@dataclass
class WatchedQueries(Queries):
    """pgqueuer's own queries, noting when the first dequeue began and the last settlement was committed.

    Two readings per batch; nothing is done per job.
    """

    watch: common.Watch = field(default_factory=common.Watch)

    async def dequeue(
        self,
        batch_size: int,
        entrypoints: dict[QueueEntrypoint, EntrypointExecutionParameter],
        queue_manager_id: QueueManagerId,
        global_concurrency_limit: int | None,
        heartbeat_timeout: timedelta,
    ) -> list[Job]:
        """Dequeue as pgqueuer does, and start the watch."""
        self.watch.start()
        return await super().dequeue(
            batch_size, entrypoints, queue_manager_id, global_concurrency_limit, heartbeat_timeout
        )

    async def log_jobs(self, job_status: list[tuple[Job, JOB_STATUS, TracebackRecord | None]]) -> None:
        """Settle a batch as pgqueuer does, and stop the watch."""
        await super().log_jobs(job_status)
        self.watch.stop()


def encode(document: dict[str, Any]) -> bytes:
    """pgqueuer's payloads are bytes."""
    return json.dumps(document).encode()


@contextlib.asynccontextmanager
async def connected(options: common.Options, connections: int) -> AsyncIterator[Queries]:
    """pgqueuer's schema in the empty database, and a pool to it."""
    async with asyncpg.create_pool(options.url, min_size=connections, max_size=connections) as pool:
        queries = Queries(AsyncpgPoolDriver(pool))
        if not await queries.schema_is_installed():
            await queries.install()
        yield queries


async def rows(queries: Queries) -> tuple[int, int]:
    """Rows in the queue table, and distinct jobs the log calls successful."""
    left = await queries.driver.fetch("SELECT count(*) AS n FROM pgqueuer")
    logged = await queries.driver.fetch(
        "SELECT count(DISTINCT job_id) AS n FROM pgqueuer_log WHERE status = 'successful'"
    )
    return int(str(left[0]["n"])), int(str(logged[0]["n"]))


async def fill(options: common.Options) -> None:
    """Enqueue every job, untimed, and ANALYZE as autovacuum would have done before long."""
    async with connected(options, 2) as queries:
        payloads: list[bytes | None] = [encode(document) for document in options.documents()]
        for first in range(0, len(payloads), FILL_CHUNK):
            chunk = payloads[first : first + FILL_CHUNK]
            await queries.enqueue([ENTRYPOINT] * len(chunk), chunk, [0] * len(chunk))
        await queries.driver.execute("ANALYZE")


async def enqueue(options: common.Options) -> common.Measured:
    """Single enqueues through the pool."""
    async with connected(options, options.settings["connections"]) as queries:
        watch = await common.produce(options, lambda document: queries.enqueue(ENTRYPOINT, encode(document)))
        stored, _ = await rows(queries)
    return common.measured(watch, complete=stored == options.jobs)


async def bulk(options: common.Options) -> common.Measured:
    """Lists of jobs in one call."""
    at_once: int = options.settings["at_once"]
    async with connected(options, at_once + 1) as queries:

        async def enqueue_many(documents: list[dict[str, Any]]) -> None:
            many = len(documents)
            await queries.enqueue([ENTRYPOINT] * many, [encode(document) for document in documents], [0] * many)

        watch = await common.produce_chunks(options, enqueue_many, at_once)
        stored, _ = await rows(queries)
    return common.measured(watch, complete=stored == options.jobs)


async def work(options: common.Options, watch: common.Watch, register: Callable[[PgQueuer], object]) -> None:
    """Run the consumers of one process until the queue is empty and every settlement is committed."""
    settings = options.settings
    async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        for _ in range(settings["consumers_in_process"]):
            driver = AsyncpgPoolDriver(
                await stack.enter_async_context(asyncpg.create_pool(options.url, min_size=4, max_size=4))
            )
            consumer = PgQueuer(driver, queries=WatchedQueries(driver, watch=watch))
            register(consumer)
            group.create_task(
                consumer.run(
                    batch_size=settings["batch_size"],
                    mode=QueueExecutionMode.drain,
                    max_concurrent_tasks=settings.get("max_concurrent_tasks"),
                )
            )


async def drain(options: common.Options) -> common.Measured:
    """No-op jobs, in pgqueuer's drain mode."""
    await fill(options)
    tally = common.Tally(options.jobs)

    async def noop(job: Job) -> None:
        tally.count()

    await work(options, tally.watch, lambda consumer: consumer.entrypoint(ENTRYPOINT)(noop))
    async with connected(options, 2) as queries:
        complete = await rows(queries) == (0, options.jobs)
    return common.measured(tally.watch, counted=tally.counted, complete=complete and tally.counted == options.jobs)


async def whale(options: common.Options) -> common.Measured:
    """Twenty slots: a limit that pgqueuer keeps in its dequeue, or a semaphore around the handler."""
    await fill(options)
    tally, watch = common.Tally(options.jobs), common.Watch()
    in_dequeue = options.settings["slots"] == "concurrency_limit"
    free = asyncio.Semaphore(common.WHALE_SLOTS)

    async def handle(job: Job) -> None:
        async with contextlib.nullcontext() if in_dequeue else free:
            tally.watch.start()
            await asyncio.sleep(common.WHALE_HANDLER_SECONDS)
            tally.finish(json.loads(job.payload or b"")["tenant"])

    limit = common.WHALE_SLOTS if in_dequeue else 0
    await work(options, watch, lambda consumer: consumer.entrypoint(ENTRYPOINT, concurrency_limit=limit)(handle))
    tally.watch.stop()
    async with connected(options, 2) as queries:
        complete = await rows(queries) == (0, options.jobs)
    return common.measured_whale(tally, complete=complete and tally.counted == options.jobs)


async def pickup(options: common.Options) -> common.Measured:
    """One consumer that listens; the enqueues come through a pool of their own."""
    pickups = common.Pickups(options.jobs)
    async with connected(options, 2) as producer, connected(options, 4) as queries:
        alone = options.settings["driver"] == "connection"
        consumer = PgQueuer(AsyncpgDriver(await asyncpg.connect(options.url)) if alone else queries.driver)

        @consumer.entrypoint(ENTRYPOINT)
        async def handle(job: Job) -> None:
            pickups.start()

        running = asyncio.create_task(consumer.run(batch_size=options.settings["batch_size"]))
        await asyncio.sleep(1)
        result = await pickups.measure(options, lambda document: producer.enqueue(ENTRYPOINT, encode(document)))
        consumer.shutdown.set()
        await running
    return result


WORKLOADS = {
    "enqueue": common.Workload(lambda options: uvloop.run(enqueue(options)), {"connections": 16}),
    "bulk": common.Workload(lambda options: uvloop.run(bulk(options)), {"at_once": 4}),
    "drain": common.Workload(
        lambda options: uvloop.run(drain(options)),
        {"batch_size": 500, "consumers_in_process": 2, "durability": "durable"},
    ),
    "pickup": common.Workload(lambda options: uvloop.run(pickup(options)), {"batch_size": 10, "driver": "pool"}),
    "whale": common.Workload(
        lambda options: uvloop.run(whale(options)),
        {"slots": "semaphore", "batch_size": 100, "consumers_in_process": 1},
    ),
}

if __name__ == "__main__":
    sys.exit(common.main("pgqueuer", "pgqueuer", WORKLOADS))
