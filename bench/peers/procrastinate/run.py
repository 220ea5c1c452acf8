"""procrastinate 3.10.0, in the best configuration found for it; see ../README.md for the workloads and the timing.

The driver is psycopg 3 with its C speed-ups, the loop is uvloop; listening, heartbeats and durability are as shipped,
and finished jobs are kept. Two things are taken out of every statement's way, both documented options of the pool:
connections are in autocommit (each call of procrastinate is one statement, so a transaction around it adds two round
trips and no safety), and the pool is handed in, without the ``SELECT`` with which procrastinate's own tests a
connection each time it lends it. ``ANALYZE`` runs once after the jobs of a drain are enqueued (not timed).

* drain: a worker fetches one job at a time, and only then starts it, so the process runs **eight** workers side by
  side, two slots each.
* whale: four workers of five slots.
* pickup: one worker that listens.
* bulk: ``batch_defer``, one statement per call.

What was tried, in one interleaved round on a machine with a load of 20 to 50 on its two cores, so that
CPU per job, client and server together, says more than jobs per second:

=======================================================  ===============  ================
drain of 500                                             jobs per second  CPU per job (µs)
=======================================================  ===============  ================
four workers, 16 slots                                   1.00             2,143
one worker, 16 slots                                     0.58             2,495
**eight workers, 16 slots**                              2.19             1,852
four workers, finished jobs deleted                      0.95             2,072
four workers, transactions around every statement        0.35             3,030
four workers, connections tested each time               0.51             2,889
=======================================================  ===============  ================

Enqueue of 1,000, one round: **as above** 1.00, transactions 0.73, tested connections 0.74. Bulk: one call at a time
1.00 (two rounds), four 0.99 (one round). Pickup, p50: **20 slots** 1.00, one slot 1.30 (two rounds).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import procrastinate
import psycopg
import psycopg_pool
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common

Handler = Callable[..., Awaitable[None]]


async def _autocommit(connection: psycopg.AsyncConnection) -> None:
    await connection.set_autocommit(True)


@contextlib.asynccontextmanager
async def opened(options: common.Options) -> AsyncIterator[procrastinate.App]:
    """procrastinate's schema in the empty database, and an open app."""
    connections: int = options.settings["connections"]
    arguments: dict[str, Any] = {"conninfo": options.url, "min_size": connections, "max_size": connections}
    if options.settings["autocommit"]:
        arguments["configure"] = _autocommit
    logging.getLogger("procrastinate").setLevel(logging.ERROR)  # it warns of an app in the main module
    app = procrastinate.App(connector=procrastinate.PsycopgConnector(**arguments))
    async with contextlib.AsyncExitStack() as stack:
        pool = None
        if not options.settings["checked_connections"]:
            pool = await stack.enter_async_context(psycopg_pool.AsyncConnectionPool(**arguments, open=False))
        async with app.open_async(pool):
            await app.schema_manager.apply_schema_async()
            yield app


async def statuses(app: procrastinate.App) -> dict[str, int]:
    """Jobs in the database by their status."""
    rows = await app.connector.execute_query_all_async(
        "SELECT status::text, count(*) AS n FROM procrastinate_jobs GROUP BY status"
    )
    return {row["status"]: row["n"] for row in rows}


def task(app: procrastinate.App, handler: Handler) -> Any:
    """The benchmark's one task."""
    return app.task(name="job")(handler)


async def nothing(**document: object) -> None:
    """The task of a producer, which never runs."""


async def enqueue(options: common.Options) -> common.Measured:
    """Single defers through the pool."""
    async with opened(options) as app:
        job = task(app, nothing)
        watch = await common.produce(options, lambda document: job.defer_async(**document))
        complete = await statuses(app) == {"todo": options.jobs}
    return common.measured(watch, complete=complete)


async def bulk(options: common.Options) -> common.Measured:
    """Batches in one statement."""
    async with opened(options) as app:
        job = task(app, nothing)
        watch = await common.produce_chunks(
            options, lambda documents: job.batch_defer_async(*documents), options.settings["at_once"]
        )
        complete = await statuses(app) == {"todo": options.jobs}
    return common.measured(watch, complete=complete)


def watched(app: procrastinate.App, watch: common.Watch) -> None:
    """Start the watch with the first fetch, and stop it when a settlement is committed."""
    fetch, finish = app.job_manager.fetch_job, app.job_manager.finish_job

    async def watched_fetch(*arguments: Any, **named: Any) -> Any:
        watch.start()
        return await fetch(*arguments, **named)

    async def watched_finish(*arguments: Any, **named: Any) -> None:
        await finish(*arguments, **named)
        watch.stop()

    app.job_manager.fetch_job = watched_fetch  # type: ignore[method-assign]
    app.job_manager.finish_job = watched_finish  # type: ignore[method-assign]


async def work(options: common.Options, handler: Handler, watch: common.Watch) -> bool:
    """Fill the queue, untimed, and run the workers of one process until it is empty; whether every job succeeded."""
    settings = options.settings
    async with opened(options) as app:
        job = task(app, handler)
        for chunk in options.chunks():
            await job.batch_defer_async(*chunk)
        await app.connector.execute_query_async("ANALYZE")
        watched(app, watch)
        workers: int = settings["workers_in_process"]
        await asyncio.gather(
            *(
                app.run_worker_async(
                    name=f"worker-{number}",
                    concurrency=settings["concurrency"] // workers,
                    wait=False,
                    delete_jobs=settings["delete_jobs"],
                    install_signal_handlers=False,
                )
                for number in range(workers)
            )
        )
        kept = {"succeeded": options.jobs} if settings["delete_jobs"] == "never" else {}
        return await statuses(app) == kept


async def drain(options: common.Options) -> common.Measured:
    """No-op jobs."""
    tally = common.Tally(options.jobs)

    async def noop(**document: object) -> None:
        tally.count()

    complete = await work(options, noop, tally.watch)
    return common.measured(tally.watch, counted=tally.counted, complete=complete and tally.counted == options.jobs)


async def whale(options: common.Options) -> common.Measured:
    """Twenty slots are the worker's concurrency."""
    tally = common.Tally(options.jobs)

    async def handle(*, tenant: str, **document: object) -> None:
        tally.watch.start()
        await asyncio.sleep(common.WHALE_HANDLER_SECONDS)
        tally.finish(tenant)

    complete = await work(options, handle, common.Watch())
    tally.watch.stop()
    return common.measured_whale(tally, complete=complete and tally.counted == options.jobs)


async def pickup(options: common.Options) -> common.Measured:
    """One worker that listens."""
    pickups = common.Pickups(options.jobs)

    async def handle(**document: object) -> None:
        pickups.start()

    async with opened(options) as app:
        job = task(app, handle)
        worker = asyncio.create_task(
            app.run_worker_async(concurrency=options.settings["concurrency"], install_signal_handlers=False)
        )
        await asyncio.sleep(1)
        result = await pickups.measure(options, lambda document: job.defer_async(**document))
        worker.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await worker
    return result


POOL = {"connections": 16, "autocommit": True, "checked_connections": False}
WORKERS = {"workers_in_process": 4, "delete_jobs": "never"}
WORKLOADS = {
    "enqueue": common.Workload(lambda options: uvloop.run(enqueue(options)), POOL),
    "bulk": common.Workload(lambda options: uvloop.run(bulk(options)), POOL | {"at_once": 1}),
    "drain": common.Workload(
        lambda options: uvloop.run(drain(options)), POOL | WORKERS | {"workers_in_process": 8, "concurrency": 16}
    ),
    "pickup": common.Workload(lambda options: uvloop.run(pickup(options)), POOL | {"concurrency": 20}),
    "whale": common.Workload(
        lambda options: uvloop.run(whale(options)), POOL | WORKERS | {"concurrency": common.WHALE_SLOTS}
    ),
}

if __name__ == "__main__":
    sys.exit(common.main("procrastinate", "procrastinate", WORKLOADS))
