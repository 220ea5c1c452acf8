"""Enqueues one workload's jobs in bulk: `python -m bench.enqueue plain|fair|small COUNT`, on `$FAIRLANE_URL`."""

from __future__ import annotations

import asyncio
import sys

from bench.workload import FILLER, app, fair_noop, nap, plain_noop

KEYS = 1_000
NAP = 0.02


async def main(calls: str, count: int) -> None:
    async with app:
        match calls:
            case "plain":
                await app.enqueue_many(plain_noop.call(n, FILLER) for n in range(count))
            case "fair":
                await app.enqueue_many(fair_noop.call(n, f"account-{n % KEYS}", FILLER) for n in range(count))
            case "small":
                await app.enqueue_many(nap.call(n, NAP) for n in range(count))
            case _:
                raise SystemExit(f"unknown workload {calls!r}; use plain, fair or small")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
