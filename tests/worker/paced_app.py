"""The app of workers that share a smooth rate. Its handlers write down when they were called, and where."""

from __future__ import annotations

import os
import time

from fairlane import App, Rate, Task

__all__ = ["PER_SECOND", "QUEUE", "app", "make_app"]

QUEUE = "calls"
PER_SECOND = 10


async def call(number: int) -> None:
    line = f"{time.monotonic_ns()} {number} {os.getpid()}\n"
    file = os.open(os.environ["FAIRLANE_CALLS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, line.encode())
    os.close(file)


def make_app(url: str) -> tuple[App, Task[[int], None]]:
    app = App(url)
    app.queue(QUEUE, limits=[Rate(PER_SECOND, per="1s", burst=1)])
    return app, app.task(queue=QUEUE, name="call")(call)


app, _ = make_app(os.environ.get("FAIRLANE_URL", "sqlite://"))
