"""An app with one queue of `$BENCH_PARTITIONS` partitions, fair to a thousand accounts, and its producer.

`python -m bench.partitioned COUNT` enqueues so many jobs on `$FAIRLANE_URL`.
"""

from __future__ import annotations

import asyncio
import os
import sys
from time import monotonic_ns

from bench.workload import ACCOUNTS, FILLER, LEDGER
from fairlane import App, Fair

__all__ = ["app"]

BULK = 5_000

app = App()
app.queue("email", partitions=int(os.environ["BENCH_PARTITIONS"]), partition_by="account", fair=Fair(by="account"))


@app.task(queue="email")
async def send(number: int, account: str, text: str) -> None:
    now = monotonic_ns()
    LEDGER.note(number, 0, now, now)


async def main(count: int) -> None:
    async with app:
        for first in range(0, count, BULK):
            numbers = range(first, min(count, first + BULK))
            await app.enqueue_many(send.call(n, f"account-{n % ACCOUNTS}", FILLER) for n in numbers)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
