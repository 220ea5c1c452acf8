"""The app that the kill tests run: its handler tells the test, through a pipe, when it starts and when it ends."""

from __future__ import annotations

import asyncio
import os
import random
import time

from fairlane import App, Concurrency, Fair, context

LIMIT = 5
TENANTS = 6
"""So few that their limits bind and not the slots: 6 × 5 against 40 slots on SQLite, 80 on PostgreSQL."""

app = App()
app.queue("chaos", fair=Fair(by="tenant"), limits=[Concurrency(LIMIT, by="tenant")])


def tell(what: str, tenant: str) -> None:
    """One line, one write: lines of several processes do not mix."""
    job = context()
    line = f"{what} {job.id} {job.attempt} {tenant} {os.getpid()} {time.monotonic_ns()}\n"
    os.write(int(os.environ["CHAOS_PIPE"]), line.encode())


@app.task(queue="chaos", max_attempts=100)
async def work(number: int, tenant: str) -> None:
    tell("start", tenant)
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    loop.call_later(random.uniform(0.001, 0.012), done.set_result, None)
    await done
    tell("end", tenant)
