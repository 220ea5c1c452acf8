"""awa-pg 0.6.9, in the best configuration found for it; see ../README.md for the workloads and how they are timed.

awa is a Rust worker behind a Python API. It runs on its queue storage, the default engine: a fresh database is
switched to it by the first worker that starts, so one is started and stopped before anything is measured. Handlers
get their payloads as dictionaries (no dataclass is made per job); the loop is uvloop; durability, heartbeats,
deadlines, receipts, rotation and pruning are as awa ships them. ``ANALYZE`` runs once after the jobs of a drain are
enqueued (not timed). The clock of a drain starts with the first handler, as the first claim is made inside awa, and
stops when awa has no job in flight: it holds a job's permit until the settlement is committed.

* drain: 1,024 workers, awa's own advice for no-op jobs, whose handlers hold a permit until they are settled, with one
  completion flusher: from 512 workers on awa starts four, which cost more CPU per job on these two cores.
* enqueue: eight enqueue shards, awa's remedy for many producers of one queue: without them every insert waits for the
  head row of the queue. Each shard is used before the clock starts: two first inserts at once end in
  ``UniqueConflict``.
* bulk: ``enqueue_many_copy``, awa's direct COPY, four calls at once.
* pickup: awa listens for notifications; its poll of 200 ms is only a fallback.

What was tried, medians of three interleaved runs of 8,000 jobs. The machine had a load of 10 to 50 on its two cores
throughout, so CPU per job says more than jobs per second; the server's includes the installation of awa's schema.

========================================================  ===============  ================  ==================
drain                                                     jobs per second  CPU, client (µs)  CPU, server (µs)
========================================================  ===============  ================  ==================
128 workers                                               1.00             79                522
256 workers                                               1.44             81                424
512 workers                                               1.36             78                476
1,024 workers                                             1.40             71                496
**1,024 workers, one completion flusher**                 1.23             59                368
1,024 workers, two claimers                               1.41             65                439
1,024 workers over two partitions                         0.70             86                560
========================================================  ===============  ================  ==================

Enqueue, jobs per second: one shard 1.00, **eight shards** 1.77, eight partitions 1.64, a pool of 8 instead of 16 0.24.
Bulk, one undisturbed enough round: one call at a time 1.00, two 0.82, **four** 1.54, four over four partitions 0.67.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import awa
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common

QUEUE = "bench"
KIND = "bench_job"


async def _never(job: awa.Job[dict[str, Any]]) -> None:
    raise AssertionError


@contextlib.asynccontextmanager
async def connected(options: common.Options) -> AsyncIterator[awa.AsyncClient]:
    """awa's schema in the empty database, and a client with its own pool."""
    os.environ |= {name: str(value) for name, value in options.settings.items() if name.startswith("AWA_")}
    async with awa.AsyncClient(options.url) as installer:
        await installer.migrate()
        installer.task(dict, kind=KIND, queue=QUEUE)(_never)
        await installer.start([(QUEUE, 1)])  # a first worker turns awa's queue storage on
        await installer.shutdown()
    async with awa.AsyncClient(options.url, max_connections=options.settings["connections"]) as client:
        if (shards := options.settings.get("enqueue_shards", 1)) > 1:
            async with await client.transaction() as transaction:
                await transaction.execute(
                    "INSERT INTO awa.queue_meta (queue, enqueue_shards) VALUES ($1, $2)", QUEUE, shards
                )
        yield client


async def analyze(client: awa.AsyncClient) -> None:
    """As autovacuum would have done before long; without statistics awa's own counts can take minutes."""
    async with await client.transaction() as transaction:
        await transaction.execute("ANALYZE")


async def unfinished(client: awa.AsyncClient) -> int:
    """Jobs not settled, as awa counts them; the settled ones cannot be counted, awa prunes them by the second."""
    await analyze(client)
    return sum(queue.total_queued + queue.failed for queue in await client.queue_stats())


async def stored(client: awa.AsyncClient) -> int:
    """Jobs waiting."""
    await analyze(client)
    return sum(queue.available for queue in await client.queue_stats())


def queues(options: common.Options) -> awa.PartitionedQueue:
    """The physical queues of the one logical queue."""
    return awa.PartitionedQueue(QUEUE, options.settings.get("partitions", 1))


async def enqueue_many(options: common.Options, client: awa.AsyncClient, documents: list[dict[str, Any]]) -> None:
    """One COPY into one of the queues."""
    queue = queues(options).queue_for_index(documents[0]["order"] // options.bulk)
    await client.enqueue_many_copy(documents, kind=KIND, queue=queue)


async def fill(options: common.Options, client: awa.AsyncClient) -> None:
    """Enqueue every job, untimed, and ANALYZE as autovacuum would have done before long."""
    for chunk in options.chunks():
        await enqueue_many(options, client, chunk)
    await analyze(client)


async def start(options: common.Options, client: awa.AsyncClient, workers: int) -> None:
    """Start the worker with the settings that are given, and awa's own for the rest."""
    names = ("claim_batch_size", "claimers", "deadline_duration_ms")
    given = {name: options.settings[name] for name in names if name in options.settings}
    partitioned = queues(options)
    await client.start(
        partitioned.queue_configs(max_workers_per_partition=workers // len(partitioned), **given),
        poll_interval_ms=options.settings.get("poll_interval_ms", 200),
    )


async def enqueue(options: common.Options) -> common.Measured:
    """Single inserts through the pool."""
    async with connected(options) as client:
        routes = queues(options)
        for number in range(warm := 16 * options.settings["enqueue_shards"]):
            # awa makes a shard's objects at its first insert, and two first inserts at once collide.
            seed = common.document(number, options.size, "warm")
            await client.insert(seed, kind=KIND, queue=QUEUE, ordering_key=str(number))
        watch = await common.produce(
            options,
            lambda document: client.insert(document, kind=KIND, queue=routes.queue_for_index(document["order"])),
        )
        complete = await stored(client) == options.jobs + warm
    return common.measured(watch, complete=complete)


async def bulk(options: common.Options) -> common.Measured:
    """COPY straight into the queue storage."""
    async with connected(options) as client:
        watch = await common.produce_chunks(
            options,
            lambda documents: enqueue_many(options, client, documents),
            options.settings["at_once"],
        )
        complete = await stored(client) == options.jobs
    return common.measured(watch, complete=complete)


async def nothing_in_flight(client: awa.AsyncClient, tally: common.Tally) -> None:
    """Wait until every settlement is committed: awa holds a job's permit until then."""
    await asyncio.to_thread(tally.all_counted.wait)

    async def in_flight() -> int:
        return sum(queue.in_flight for queue in (await client.health_check()).queues.values())

    await common.settled(in_flight, tally.watch)


async def drain(options: common.Options) -> common.Measured:
    """No-op jobs."""
    tally = common.Tally(options.jobs)
    async with connected(options) as client:
        await fill(options, client)

        @client.task(dict, kind=KIND, queue=QUEUE)
        async def noop(job: awa.Job[dict[str, Any]]) -> None:
            tally.watch.start()
            tally.count()

        await start(options, client, options.settings["max_workers"])
        await nothing_in_flight(client, tally)
        await client.shutdown()
        complete = tally.counted == options.jobs and await unfinished(client) == 0
    return common.measured(tally.watch, counted=tally.counted, complete=complete)


async def whale(options: common.Options) -> common.Measured:
    """Twenty slots are the queue's workers."""
    tally = common.Tally(options.jobs)
    async with connected(options) as client:
        await fill(options, client)

        @client.task(dict, kind=KIND, queue=QUEUE)
        async def handle(job: awa.Job[dict[str, Any]]) -> None:
            tally.watch.start()
            await asyncio.sleep(common.WHALE_HANDLER_SECONDS)
            tally.finish(job.args["tenant"])

        await start(options, client, common.WHALE_SLOTS)
        await nothing_in_flight(client, tally)
        await client.shutdown()
        complete = tally.counted == options.jobs and await unfinished(client) == 0
    return common.measured_whale(tally, complete=complete)


async def pickup(options: common.Options) -> common.Measured:
    """One worker that listens."""
    pickups = common.Pickups(options.jobs)
    async with connected(options) as client:

        @client.task(dict, kind=KIND, queue=QUEUE)
        async def handle(job: awa.Job[dict[str, Any]]) -> None:
            pickups.start()

        await start(options, client, options.settings["max_workers"])
        await asyncio.sleep(1)
        result = await pickups.measure(options, lambda document: client.insert(document, kind=KIND, queue=QUEUE))
        await client.shutdown()
    return result


WORKLOADS = {
    "enqueue": common.Workload(lambda options: uvloop.run(enqueue(options)), {"connections": 16, "enqueue_shards": 8}),
    "bulk": common.Workload(lambda options: uvloop.run(bulk(options)), {"connections": 10, "at_once": 4}),
    "drain": common.Workload(
        lambda options: uvloop.run(drain(options)), {"connections": 20, "max_workers": 1024, "AWA_COMPLETION_SHARDS": 1}
    ),
    "pickup": common.Workload(lambda options: uvloop.run(pickup(options)), {"connections": 10, "max_workers": 20}),
    "whale": common.Workload(lambda options: uvloop.run(whale(options)), {"connections": 20}),
}

if __name__ == "__main__":
    sys.exit(common.main("awa-pg", "awa-pg", WORKLOADS))
