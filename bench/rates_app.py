"""A smooth rate, and a task that notes when it was called. As a program, it enqueues so many jobs."""

from __future__ import annotations

import asyncio
import os
import sys
import time

from fairlane import App, Rate
from fairlane.worker.runs import current_run

app = App()
app.queue("rates", limits=[Rate(float(os.environ.get("RATES_LIMIT", "10")), per="1s", burst=1)])
_starts = os.open(os.environ.get("RATES_STARTS", os.devnull), os.O_WRONLY | os.O_APPEND | os.O_CREAT)


@app.task(queue="rates")
async def called(number: int) -> None:
    at = time.monotonic_ns()
    os.write(_starts, f"{at} {number} {current_run.get().claim.lease}\n".encode())


async def main(count: int) -> None:
    async with app:
        await app.enqueue_many([called.call(number) for number in range(count)])


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
