"""The app of the pruning benchmark: jobs that do nothing, and are kept for `$BENCH_RETENTION` or `$BENCH_KEEP` of them.

`python -m bench.short_lived RATE SECONDS` enqueues at a steady rate, on `$FAIRLANE_URL`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time

from fairlane import App

FILLER = "x" * 60
BULK = 500

app = App(
    retention=os.environ.get("BENCH_RETENTION", "24h"),
    retention_count=int(keep) if (keep := os.environ.get("BENCH_KEEP")) else None,
)
app.queue("plain")


@app.task(queue="plain")
async def noop(number: int, text: str) -> None: ...


async def main(rate: int, seconds: float) -> None:
    """Bulks at their times. One that is late is not left out: the rate is what is measured."""
    async with app:
        started = time.monotonic()
        for first in range(0, round(rate * seconds), BULK):
            await asyncio.sleep(max(0.0, started + first / rate - time.monotonic()))
            await app.enqueue_many(noop.call(n, FILLER) for n in range(first, first + BULK))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2])))
