"""A producer process on `$FAIRLANE_URL`: `python -m bench.producer HOW WORK COUNT …`, through the public API.

It prints one line of JSON: the seconds that enqueueing took, and the processor time of it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from itertools import islice

from bench.workload import ACCOUNTS, FILLER, app, calls, ping, plain_noop

FILL = 5_000
"""Jobs in one call of `enqueue_many`, where nobody measures it."""
PAUSE = 0.02
"""Seconds from the start of one ping to the next: a queue that has been idle for many round trips."""
PACED = 500

Spent = dict[str, float]


class Stopwatch:
    """Time and processor time from its making on."""

    def __init__(self) -> None:
        self._began, self._used = time.perf_counter(), time.process_time()

    def spent(self) -> Spent:
        return {"seconds": time.perf_counter() - self._began, "cpu": time.process_time() - self._used}


async def fill(work: str, count: int, keys: int, size: int | None) -> None:
    """Store jobs, however."""
    text = FILLER if size is None else "x" * size
    bulk = FILL if size is None else max(1, min(FILL, 10_000_000 // max(1, size)))
    left = calls(work, count, keys, text)
    while batch := list(islice(left, bulk)):
        await app.enqueue_many(batch)


async def bulk(count: int, bulk: int, at_once: int) -> Spent:
    """So many jobs a call, so many calls at once. Making the calls is not timed, as with the peers."""
    left = calls("plain", count)
    batches = []
    while batch := list(islice(left, bulk)):
        batches.append(batch)
    waiting = iter(batches)

    async def produce() -> None:
        for batch in waiting:
            await app.enqueue_many(batch)

    watch = Stopwatch()
    await asyncio.gather(*(produce() for _ in range(at_once)))
    return watch.spent()


async def single(count: int, at_once: int) -> Spent:
    """One job a call, so many calls at once."""
    numbers = iter(range(count))

    async def produce() -> None:
        for n in numbers:
            await plain_noop.enqueue(n, FILLER)

    # Connections are made before the clock starts.
    await asyncio.gather(*(ping.enqueue(n, 0, FILLER) for n in range(at_once)))
    watch = Stopwatch()
    await asyncio.gather(*(produce() for _ in range(at_once)))
    return watch.spent()


async def pickup(count: int) -> None:
    """One job at a time, long after the one before was done."""
    for n in range(count):
        await ping.enqueue(n, time.monotonic_ns(), FILLER)
        await asyncio.sleep(PAUSE)


async def paced(work: str, count: int, keys: int, rate: float) -> None:
    """So many jobs a second. Batches that are late are not left out."""
    left = calls(work, count, keys)
    began, stored = time.monotonic(), 0
    while batch := list(islice(left, PACED)):
        await app.enqueue_many(batch)
        stored += len(batch)
        await asyncio.sleep(max(0.0, began + stored / rate - time.monotonic()))


async def main(options: argparse.Namespace) -> Spent:
    watch = Stopwatch()
    async with app:
        match options.how:
            case "fill":
                await fill(options.work, options.count, options.keys, options.size)
            case "paced":
                await paced(options.work, options.count, options.keys, options.rate)
            case "pickup":
                await pickup(options.count)
            case "single":
                return await single(options.count, options.at_once)
            case "bulk":
                return await bulk(options.count, options.bulk, options.at_once)
    return watch.spent()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.producer", description=__doc__)
    parser.add_argument("how", choices=["fill", "single", "bulk", "pickup", "paced"])
    parser.add_argument("work")
    parser.add_argument("count", type=int)
    parser.add_argument("--keys", type=int, default=ACCOUNTS)
    parser.add_argument("--size", type=int, default=None, help="bytes of text in each job")
    parser.add_argument("--at-once", type=int, default=16, help="calls at the same time")
    parser.add_argument("--bulk", type=int, default=1_000, help="jobs in one call")
    parser.add_argument("--rate", type=float, default=10_000, help="jobs a second")
    print(json.dumps(asyncio.run(main(parser.parse_args()))))
