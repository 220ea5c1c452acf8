"""An app with a queue for each kind of limit. Its handler tells the test, through a pipe, when it starts and ends."""

from __future__ import annotations

import asyncio
import os
import random
import time

from fairlane import App, Concurrency, Fair, Rate, context

app = App()
app.queue("capped", fair=Fair(by="key"), limits=[Concurrency(3, by="key"), Concurrency(8)])
app.queue("metered", limits=[Rate(60, per="1s", burst=5, by="key")])
app.queue("rolling", limits=[Rate(30, per="1s", rolling=True, by="key")])
app.queue("train", fair=Fair(by="key"), limits=[Concurrency(6, name="gpu")])
app.queue("serve", limits=[Concurrency(6, name="gpu")], keys=["key"])


def tell(what: str, number: int, key: str) -> None:
    """One line, one write: lines of several processes do not mix."""
    job = context()
    line = f"{what} {job.id} {job.attempt} {job.queue} {key} {number} {time.monotonic_ns()}\n"
    os.write(int(os.environ["CHAOS_PIPE"]), line.encode())


@app.task(queue="capped")
async def work(number: int, key: str) -> None:
    tell("start", number, key)
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    loop.call_later(random.uniform(0.001, 0.02), done.set_result, None)
    await done
    tell("end", number, key)
