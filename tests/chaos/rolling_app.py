"""A program as it is deployed: how many partitions it declares is in its environment. Its handler writes
down when it starts and when it ends."""

from __future__ import annotations

import asyncio
import os
import random
import time

from fairlane import App, Concurrency, Fair, context

ACCOUNTS = 8
"""Of each producer."""

app = App()
app.queue(
    "email",
    partitions=int(os.environ.get("ROLLING_PARTITIONS", "1")),
    partition_by="account",
    fair=Fair(by="account"),
    limits=[Concurrency(1, by="account"), Concurrency(12)],
)


def tell(what: str, number: int, account: str) -> None:
    """One line, one write to the end of a file: lines of several processes do not mix."""
    line = f"{what} {context().id} {account} {number} {time.monotonic_ns()}\n"
    os.write(int(os.environ["ROLLING_LEDGER"]), line.encode())


@app.task(queue="email")
async def send(number: int, account: str) -> None:
    tell("start", number, account)
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    loop.call_later(random.uniform(0.001, 0.02), done.set_result, None)
    await done
    tell("end", number, account)
