"""chancy 0.26.0, in the best configuration found for it; see ../README.md for the workloads and how they are timed.

Handlers run on chancy's asynchronous executor, the only one that needs no thread or process per job; the driver is
psycopg 3 with its C speed-ups, the loop is uvloop. Of the default plugins those that keep jobs safe and the table
small stay (leadership, recovery, pruner); metrics and workflows, which look at every job, are left out. Its log, by
default a line per job, is silenced. Durability is as shipped. ``ANALYZE`` runs once after the jobs of a drain are
enqueued (not timed).

* ``eager_polling``: without it a worker that has finished its jobs waits for the next poll, in seconds.
* ``send_outgoing_interval`` of 10 ms: chancy writes settlements in batches, by default once a second.
* drain: a concurrency of 1,000, which is also the size of its batches of settlements.
* pickup: chancy listens for notifications.
* bulk: ``push_many``, which is a statement per job in one transaction per call.

Seen on a machine with a load of 10 to 50 on its two cores, where few rounds could be had: a drain at a concurrency of
200 ran at 0.63 and 1.29 of one at 1,000, with 1.07 and 0.98 of its CPU per job, so no difference; a poll every second
instead of every five at 1.12 and 0.72, so no stall either; pickup, p50, at a concurrency of **20** 1.00, of one 1.08
(two rounds). The rest follows from its code and its documentation: it has no benchmark of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvloop
from chancy import Chancy, Job, Queue, QueuedJob, Worker
from chancy.plugins.leadership import Leadership
from chancy.plugins.pruner import Pruner
from chancy.plugins.recovery import Recovery

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common

QUEUE = "bench"
tally = common.Tally(0)  # chancy finds its handlers by name in this module, so what they count into is here too
pickups: common.Pickups


async def noop(**document: object) -> None:
    """A job of a drain."""
    tally.count()


async def swim(*, tenant: str, **document: object) -> None:
    """A job of the whale."""
    tally.watch.start()
    await asyncio.sleep(common.WHALE_HANDLER_SECONDS)
    tally.finish(tenant)


async def start(**document: object) -> None:
    """A job of the pick-ups."""
    pickups.start()


class WatchedWorker(Worker):
    """chancy's worker, noting when the first fetch began and the last settlement was committed."""

    watch = common.Watch()

    async def fetch_jobs(self, *arguments: Any, **named: Any) -> list[QueuedJob]:
        """Fetch as chancy does, and start the watch."""
        self.watch.start()
        return await super().fetch_jobs(*arguments, **named)

    async def flush(self) -> None:
        """Settle as chancy does, and stop the watch."""
        await super().flush()
        self.watch.stop()


@contextlib.asynccontextmanager
async def opened(options: common.Options) -> AsyncIterator[Chancy]:
    """chancy's schema in the empty database, a pool to it, and the queue."""
    settings = options.settings
    log = logging.getLogger("chancy")
    log.setLevel(logging.ERROR)  # by default chancy writes a line per job
    bare = settings["plugins"] == "leadership, pruner, recovery"
    async with Chancy(
        options.url,
        plugins=[Leadership(), Pruner(), Recovery()] if bare else None,
        no_default_plugins=bare,
        min_connection_pool_size=settings["connections"],
        max_connection_pool_size=settings["connections"],
        log=log,
    ) as chancy:
        await chancy.migrate()
        await chancy.declare(
            Queue(
                QUEUE,
                concurrency=settings.get("concurrency"),
                executor=Chancy.Executor.Async,
                eager_polling=settings.get("eager_polling", False),
                polling_interval=settings.get("polling_interval", 5),
            )
        )
        yield chancy


def job(function: str, document: dict[str, Any]) -> Job:
    """One job of this module's handlers."""
    return Job(func=f"{__name__}.{function}", kwargs=document, queue=QUEUE)


async def count(chancy: Chancy, *, settled: bool) -> int:
    """Jobs in the database that have succeeded, or those that have not."""
    condition = "=" if settled else "<>"
    async with chancy.pool.connection() as connection:
        cursor = await connection.execute(f"SELECT count(*) FROM chancy_jobs WHERE state {condition} 'succeeded'")
        row = await cursor.fetchone()
    return int(row[0]) if row else 0


async def push_many(chancy: Chancy, function: str, documents: list[dict[str, Any]]) -> None:
    """One call with many jobs."""
    async for _ in chancy.push_many([job(function, document) for document in documents], batch_size=len(documents)):
        pass


async def enqueue(options: common.Options) -> common.Measured:
    """Single pushes through the pool."""
    async with opened(options) as chancy:
        watch = await common.produce(options, lambda document: chancy.push(job("noop", document)))
        complete = await count(chancy, settled=False) == options.jobs
    return common.measured(watch, complete=complete)


async def bulk(options: common.Options) -> common.Measured:
    """Many pushes in one transaction, which is what chancy has."""
    async with opened(options) as chancy:
        watch = await common.produce_chunks(
            options, lambda documents: push_many(chancy, "noop", documents), options.settings["at_once"]
        )
        complete = await count(chancy, settled=False) == options.jobs
    return common.measured(watch, complete=complete)


async def work(options: common.Options, function: str) -> bool:
    """Fill the queue, untimed, and run one worker until every settlement is committed; whether every job succeeded."""
    tally.expected = options.jobs
    async with opened(options) as chancy:
        for chunk in options.chunks():
            await push_many(chancy, function, chunk)
        async with chancy.pool.connection() as connection:
            await connection.execute("ANALYZE")
        worker = WatchedWorker(chancy, register_signal_handlers=False)
        worker.send_outgoing_interval = options.settings["send_outgoing_interval"]
        async with worker:
            await asyncio.to_thread(tally.all_counted.wait)
            await common.settled(lambda: count(chancy, settled=False), common.Watch())
        return tally.counted == options.jobs == await count(chancy, settled=True)


async def drain(options: common.Options) -> common.Measured:
    """No-op jobs on the worker's event loop."""
    complete = await work(options, "noop")
    return common.measured(WatchedWorker.watch, counted=tally.counted, complete=complete)


async def whale(options: common.Options) -> common.Measured:
    """Twenty slots are the queue's concurrency."""
    complete = await work(options, "swim")
    tally.watch.stop()
    return common.measured_whale(tally, complete=complete)


async def pickup(options: common.Options) -> common.Measured:
    """One worker that listens."""
    global pickups
    pickups = common.Pickups(options.jobs)
    async with opened(options) as chancy, Worker(chancy, register_signal_handlers=False):
        await asyncio.sleep(1)
        return await pickups.measure(options, lambda document: chancy.push(job("start", document)))


APP = {"connections": 16, "plugins": "leadership, pruner, recovery"}
WORKLOADS = {
    "enqueue": common.Workload(lambda options: uvloop.run(enqueue(options)), APP),
    "bulk": common.Workload(lambda options: uvloop.run(bulk(options)), APP | {"at_once": 2}),
    "drain": common.Workload(
        lambda options: uvloop.run(drain(options)),
        APP | {"concurrency": 1000, "eager_polling": True, "send_outgoing_interval": 0.01},
    ),
    "pickup": common.Workload(lambda options: uvloop.run(pickup(options)), APP | {"concurrency": 20}),
    "whale": common.Workload(
        lambda options: uvloop.run(whale(options)),
        APP | {"concurrency": common.WHALE_SLOTS, "eager_polling": True, "send_outgoing_interval": 0.01},
    ),
}

if __name__ == "__main__":
    sys.exit(common.main("chancy", "chancy", WORKLOADS))
