"""dbos 3.3.0, in the best configuration found for it; see ../README.md for the workloads and how they are timed.

A job is a durable workflow without steps, enqueued by ``DBOSClient`` and run from a database-backed queue: dbos
records its arguments, its owner and its result, which is more than a queue does and is paid for here. Durability,
recovery, serialization and the pool of 20 are as shipped; logging is down to errors. ``ANALYZE`` runs once after the
jobs of a drain are enqueued (not timed). The clock of a drain starts with the first handler, in dbos's favour.

* enqueue: from 16 threads; the asynchronous call is the same call on a thread.
* bulk: dbos has no bulk enqueue. ``enqueue_in_transaction`` is the nearest to one: a statement per job, one commit
  per call.
* drain: up to 500 workflows claimed per poll, a poll every 10 ms (dbos's default is a second), synchronous handlers
  on its threads.
* pickup: dbos does not listen for queues, it polls them: every millisecond, which is as often as its two statements
  allow.

Seen on a machine with a load of 20 to 50 on its two cores, where few rounds could be had: a drain with asynchronous
handlers ran at 0.82 of one with synchronous ones at the same CPU per job (one round); pickup, p50, polled every 5 ms
1.00, every **1 ms** 0.71 (one to two rounds). The rest follows from its code and its documentation.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import sqlalchemy
from dbos import DBOS, DBOSClient, DBOSConfig, EnqueueOptions

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common

QUEUE = "bench"
WORKFLOW = "job"


@contextlib.contextmanager
def launched(options: common.Options, handler: Callable[..., Any]) -> Iterator[DBOSClient]:
    """dbos with its schema in the empty database, and a client of it; the queue is registered later."""
    settings = options.settings
    config = DBOSConfig(
        name="bench",
        system_database_url=options.url,
        sys_db_pool_size=settings["connections"],
        log_level="ERROR",
    )
    if "max_executor_threads" in settings:
        config["max_executor_threads"] = settings["max_executor_threads"]
    DBOS(config=config)
    DBOS.workflow(name=WORKFLOW)(handler)
    DBOS.launch()
    client = DBOSClient(system_database_url=options.url, system_database_pool_size=options.producers)
    try:
        yield client
    finally:
        client.destroy()
        DBOS.destroy(workflow_completion_timeout_sec=0)


def options_of_enqueue() -> EnqueueOptions:
    """Where a job goes."""
    return EnqueueOptions(workflow_name=WORKFLOW, queue_name=QUEUE)


def enqueue_many(client: DBOSClient, engine: sqlalchemy.Engine, documents: list[dict[str, Any]]) -> None:
    """Many enqueues in one transaction, which is the nearest that dbos has to a bulk call."""
    with engine.begin() as connection:
        for document in documents:
            client.enqueue_in_transaction(connection, options_of_enqueue(), **document)


def engine_of(options: common.Options) -> sqlalchemy.Engine:
    """An engine of the caller's own."""
    return sqlalchemy.create_engine(options.url.replace("postgresql://", "postgresql+psycopg://", 1))


def fill(options: common.Options, client: DBOSClient) -> None:
    """Enqueue every job, untimed, and ANALYZE as autovacuum would have done before long."""
    engine = engine_of(options)
    for chunk in options.chunks():
        enqueue_many(client, engine, chunk)
    engine.dispose()
    with psycopg.connect(options.url, autocommit=True) as connection:
        connection.execute("ANALYZE")


def register(options: common.Options) -> None:
    """Let dbos see the queue: from now on it is polled."""
    DBOS.register_queue(
        QUEUE,
        worker_concurrency=options.settings.get("worker_concurrency"),
        polling_interval_sec=options.settings["polling_interval_sec"],
    )


def count(options: common.Options, condition: str) -> int:
    """Jobs in the database."""
    with psycopg.connect(options.url) as connection:
        row = connection.execute(f"SELECT count(*) FROM dbos.workflow_status WHERE {condition}").fetchone()
    return int(row[0]) if row else 0


def nothing(**document: object) -> None:
    """A job that never runs."""


def enqueue(options: common.Options) -> common.Measured:
    """Single enqueues from threads: the asynchronous call is the same call on a thread."""
    with launched(options, nothing) as client:
        watch = common.produce_in_threads(options, lambda document: client.enqueue(options_of_enqueue(), **document))
        complete = count(options, "status = 'ENQUEUED'") == options.jobs
    return common.measured(watch, complete=complete)


def bulk(options: common.Options) -> common.Measured:
    """Transactions of many enqueues each, on threads."""
    with launched(options, nothing) as client:
        engine = engine_of(options)
        watch = asyncio.run(
            common.produce_chunks(
                options,
                lambda documents: asyncio.to_thread(enqueue_many, client, engine, documents),
                options.settings["at_once"],
            )
        )
        engine.dispose()
        complete = count(options, "status = 'ENQUEUED'") == options.jobs
    return common.measured(watch, complete=complete)


def work(options: common.Options, handler: Callable[..., Any], tally: common.Tally) -> bool:
    """Fill the queue, and run it until every settlement is committed; whether every job succeeded."""

    async def left() -> int:
        return await asyncio.to_thread(count, options, "status <> 'SUCCESS'")

    with launched(options, handler) as client:
        fill(options, client)
        register(options)
        tally.all_counted.wait()
        asyncio.run(common.settled(left, tally.watch))
        return tally.counted == options.jobs == count(options, "status = 'SUCCESS'")


def drain(options: common.Options) -> common.Measured:
    """No-op jobs, asynchronous on dbos's event loop or synchronous on its threads."""
    tally = common.Tally(options.jobs)

    async def noop(**document: object) -> None:
        tally.watch.start()
        tally.count()

    def noop_on_thread(**document: object) -> None:
        tally.watch.start()
        tally.count_from_thread()

    complete = work(options, noop if options.settings["handlers"] == "async" else noop_on_thread, tally)
    return common.measured(tally.watch, counted=tally.counted, complete=complete)


def whale(options: common.Options) -> common.Measured:
    """Twenty slots are the worker's concurrency."""
    tally = common.Tally(options.jobs)

    async def swim(*, tenant: str, **document: object) -> None:
        tally.watch.start()
        await asyncio.sleep(common.WHALE_HANDLER_SECONDS)
        tally.finish(tenant)

    def swim_on_thread(*, tenant: str, **document: object) -> None:
        tally.watch.start()
        time.sleep(common.WHALE_HANDLER_SECONDS)
        tally.finish(tenant)

    complete = work(options, swim if options.settings["handlers"] == "async" else swim_on_thread, tally)
    return common.measured_whale(tally, complete=complete)


def pickup(options: common.Options) -> common.Measured:
    """dbos polls its queues: the interval is the latency, and the cost of being idle."""
    pickups = common.Pickups(options.jobs)

    def handle(**document: object) -> None:
        pickups.start()

    with launched(options, handle) as client:
        register(options)
        time.sleep(2)
        return pickups.measure_blocking(options, lambda document: client.enqueue(options_of_enqueue(), **document))


WORKERS = {"connections": 20, "handlers": "sync"}
WORKLOADS = {
    "enqueue": common.Workload(enqueue, {"connections": 20}),
    "bulk": common.Workload(bulk, {"connections": 20, "at_once": 2}),
    "drain": common.Workload(drain, WORKERS | {"polling_interval_sec": 0.01, "worker_concurrency": 500}),
    "pickup": common.Workload(pickup, {"connections": 20, "polling_interval_sec": 0.001}),
    "whale": common.Workload(
        whale, WORKERS | {"polling_interval_sec": 0.005, "worker_concurrency": common.WHALE_SLOTS}
    ),
}

if __name__ == "__main__":
    sys.exit(common.main("dbos", "dbos", WORKLOADS))
