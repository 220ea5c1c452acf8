"""The app whose numbers are held against an oracle: its jobs are short, and every seventh dies."""

from __future__ import annotations

import asyncio
import os
import random

from fairlane import App, Concurrency, Dead, Fair, Task

__all__ = ["AT_ONCE", "QUEUE", "TOTAL", "app", "make_app"]

QUEUE = "life"
AT_ONCE, TOTAL = 2, 8


async def live(number: int, account: str) -> None:
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    loop.call_later(random.uniform(0.001, 0.05), done.set_result, None)
    await done
    if number % 7 == 0:
        raise Dead(f"{number} is a multiple of 7")


def make_app(url: str) -> tuple[App, Task[[int, str], None]]:
    app = App(url)
    app.queue(QUEUE, fair=Fair(by="account"), limits=[Concurrency(AT_ONCE, by="account"), Concurrency(TOTAL)])
    return app, app.task(queue=QUEUE, name="live", max_attempts=100)(live)


app, _ = make_app(os.environ.get("FAIRLANE_URL", "sqlite://"))
