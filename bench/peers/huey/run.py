"""huey 3.5.4 on SQLite, in the best configuration found for it; see ../README.md for the workloads and the timing.

The file is in WAL mode and ``synchronous`` is SQLite's own FULL, both as huey ships them: a commit waits for the
disk. (``fsync=False`` would not be durable.) The driver is the standard library's. huey deletes a job when it takes
it and writes nothing afterwards, so a job that dies with its worker is lost; the last handler is also the last
settlement. Results are switched off, as no-op jobs have none. The jobs of a drain are written in one transaction,
untimed, since huey's own way is one commit per job; for the same reason it has no bulk enqueue to measure.

* drain: **two** worker threads in the process. All threads share one connection and its lock, so more cannot help much.
* pickup: huey polls SQLite, by default every 100 ms and then less and less often, down to every 10 s. Every
  millisecond is the best for latency, at 1.8 times the CPU of an interval of 20 ms.
* whale: twenty worker threads.

What was tried, medians of three interleaved runs, on a machine with a load of 20 to 50 on its two cores, where waiting
for the disk also means waiting for the processor. One configuration spread over a factor of three between rounds
(two threads: 903 to 2,975 jobs a second, and 83 and 147 half an hour later, beside 101 and 319 with one), so only
CPU per job is evidence, and the number of threads should be looked at again on a quiet machine.

======================================================================  ===============  ================
drain                                                                   jobs per second  CPU per job (µs)
======================================================================  ===============  ================
one thread                                                              1.00             419
one thread, ``cysqlite`` / results kept / a cache of 64 MB              1.1 / 1.7 / 1.5  358 / 328 / 402
**two threads**                                                         8.6              213
four threads                                                            4.2              296
======================================================================  ===============  ================

Enqueue: **sqlite3** 1.00, ``cysqlite`` 0.74, results kept 0.93. Pickup, p50: **1 ms** 1.00, 5 ms 1.49, 20 ms 1.15.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huey import CySqliteHuey, SqliteHuey
from huey.consumer import Consumer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common


def opened(options: common.Options) -> SqliteHuey:
    """A queue in a new file, as durable as huey ships it: a commit waits for the disk."""
    kind = CySqliteHuey if options.settings.get("driver") == "cysqlite" else SqliteHuey
    tuned = {name: options.settings[name] for name in ("cache_mb", "fsync", "journal_mode") if name in options.settings}
    return kind("bench", filename=options.url, results=options.settings["results"], **tuned)


def consume(huey: SqliteHuey, options: common.Options) -> Consumer:
    """Start the consumer's threads in this process."""
    settings = options.settings
    consumer = Consumer(
        huey,
        workers=settings["workers"],
        periodic=False,
        initial_delay=settings.get("initial_delay", 0.1),
        max_delay=settings.get("max_delay", 10.0),
        backoff=settings.get("backoff", 1.15),
    )
    consumer.start()
    return consumer


def enqueue(options: common.Options) -> common.Measured:
    """Single enqueues from threads: huey has no asynchronous enqueue, and one connection for all threads."""
    huey = opened(options)
    task = huey.task()(_nothing)
    watch = common.produce_in_threads(options, lambda document: task(**document))
    return common.measured(watch, complete=huey.pending_count() == options.jobs)


def drain(options: common.Options) -> common.Measured:
    """No-op jobs. huey deletes a job when it takes it, so the last handler is the last settlement."""
    tally = common.Tally(options.jobs)

    def noop(**document: object) -> None:
        tally.watch.start()
        tally.count_from_thread()

    left = _run(options, noop, tally)
    return common.measured(tally.watch, counted=tally.counted, complete=not left and tally.counted == options.jobs)


def whale(options: common.Options) -> common.Measured:
    """Twenty worker threads."""
    tally = common.Tally(options.jobs)

    def handle(*, tenant: str, **document: object) -> None:
        tally.watch.start()
        time.sleep(common.WHALE_HANDLER_SECONDS)
        tally.finish(tenant)

    left = _run(options, handle, tally)
    return common.measured_whale(tally, complete=not left and tally.counted == options.jobs)


def pickup(options: common.Options) -> common.Measured:
    """huey polls SQLite: the interval is the latency, and the cost of being idle."""
    pickups = common.Pickups(options.jobs)
    huey = opened(options)

    def handle(**document: object) -> None:
        pickups.start()

    task = huey.task()(handle)
    consumer = consume(huey, options)
    result = pickups.measure_blocking(options, lambda document: task(**document))
    consumer.stop(graceful=True)
    return result


def _run(options: common.Options, handler: Callable[..., None], tally: common.Tally) -> int:
    """Fill the queue in one transaction, untimed, and run the consumer until every handler has; the jobs left."""
    huey = opened(options)
    task = huey.task()(handler)
    with huey.storage.db(commit=True) as cursor:
        rows = ((huey.storage.name, huey.serialize_task(task.s(**document)), 0) for document in options.documents())
        cursor.executemany("insert into task (queue, data, priority) values (?, ?, ?)", rows)
    consumer = consume(huey, options)
    tally.all_counted.wait()
    tally.watch.stop()
    consumer.stop(graceful=True)
    return int(huey.pending_count())


def _nothing(**document: Any) -> None:
    pass


WORKLOADS: dict[str, common.Workload | common.Unsupported] = {
    "enqueue": common.Workload(enqueue, {"results": False}),
    "bulk": common.Unsupported("huey has no bulk enqueue: a group or a map is enqueued one job, one commit at a time"),
    "drain": common.Workload(drain, {"results": False, "workers": 2}),
    "pickup": common.Workload(
        pickup, {"results": False, "workers": 1, "initial_delay": 0.001, "max_delay": 0.001, "backoff": 1.0}
    ),
    "whale": common.Workload(whale, {"results": False, "workers": common.WHALE_SLOTS}),
}

if __name__ == "__main__":
    sys.exit(common.main("huey", "huey", WORKLOADS))
