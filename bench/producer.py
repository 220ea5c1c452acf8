"""A producer process on `$FAIRLANE_URL`: `python -m bench.producer fill|single|pickup WORK COUNT …`, by the public API.

It prints one line of JSON: the seconds that enqueueing took, and the processor time of it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Iterator

from bench.workload import ACCOUNTS, FILLER, app, calls, ping, plain_noop

BULK = 5_000
"""Jobs in one call of `enqueue_many`."""
PAUSE = 0.02
"""Seconds from one ping to the next, on average: a queue that has been idle for many round trips."""


async def fill(work: str, count: int, keys: int, size: int | None) -> None:
    """Bulk enqueue, so many in one call."""
    text = FILLER if size is None else "x" * size
    bulk = BULK if size is None else max(1, min(BULK, 10_000_000 // max(1, size)))
    left = calls(work, count, keys, text)
    while batch := [call for _, call in zip(range(bulk), left, strict=False)]:
        await app.enqueue_many(batch)


async def single(count: int, at_once: int) -> None:
    """One job a call, so many calls at once."""
    numbers = iter(range(count))

    async def produce(own: Iterator[int]) -> None:
        for n in own:
            await plain_noop.enqueue(n, FILLER)

    await asyncio.gather(*(produce(numbers) for _ in range(at_once)))


async def pickup(count: int) -> None:
    """One job at a time, long after the one before was done."""
    chance = random.Random(1)
    for n in range(count):
        await ping.enqueue(n, time.monotonic_ns(), FILLER)
        await asyncio.sleep(chance.uniform(0.5, 1.5) * PAUSE)


async def main(options: argparse.Namespace) -> dict[str, float]:
    async with app:
        if options.how == "single":
            # Connections are made before the clock starts.
            await asyncio.gather(*(ping.enqueue(n, 0, FILLER) for n in range(options.at_once)))
        began, used = time.perf_counter(), time.process_time()
        match options.how:
            case "fill":
                await fill(options.work, options.count, options.keys, options.size)
            case "single":
                await single(options.count, options.at_once)
            case "pickup":
                await pickup(options.count)
        return {"seconds": time.perf_counter() - began, "cpu": time.process_time() - used}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.producer", description=__doc__)
    parser.add_argument("how", choices=["fill", "single", "pickup"])
    parser.add_argument("work")
    parser.add_argument("count", type=int)
    parser.add_argument("--keys", type=int, default=ACCOUNTS)
    parser.add_argument("--size", type=int, default=None, help="bytes of text in each job")
    parser.add_argument("--at-once", type=int, default=16)
    print(json.dumps(asyncio.run(main(parser.parse_args()))))
