"""The app that the tests of `processes` run: its handlers note what they do in a file that outlives their process."""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
import time
from pathlib import Path

from fairlane import App, Rate, context
from tests.waiting import until, until_blocking

app = App()
app.queue("paced", limits=[Rate(50, per="1s", burst=1)])

AN_HOUR = 3_600
LEDGER = Path(os.environ.get("CREW_LEDGER", "ledger"))


def note(what: str) -> None:
    """One line, one write: lines of several processes do not mix."""
    job = context()
    line = f"{what} {job.id} {job.attempt} {os.getpid()} {time.monotonic_ns()}\n"
    ledger = os.open(LEDGER, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(ledger, line.encode())
    os.close(ledger)


@app.task
async def where(number: int) -> int:
    note("where")
    return os.getpid()


@app.task
async def wait_for(path: str) -> str:
    note("waits")
    await until(lambda: os.path.exists(path), AN_HOUR)
    note("ended")
    return "in peace"


@app.task
async def hang() -> None:
    note("hangs")
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        note("interrupted")
        raise


@app.task
async def block(path: str) -> int:
    """Lets nothing else run in its process."""
    note("blocks")
    until_blocking(lambda: os.path.exists(path), AN_HOUR)
    return os.getpid()


@app.task
async def keep_the_interpreter() -> None:
    """Lets not even a thread of its process run."""
    note("keeps")
    ctypes.PyDLL(None).sleep(AN_HOUR)


@app.task
def stuck() -> None:
    note("stuck")
    threading.Event().wait()


@app.task(executor="process")
def square(number: int) -> list[int]:
    return [number * number, os.getpid()]


@app.task
async def tell(key: str) -> dict[str, str | None]:
    job = context()
    job.put(key, "told")
    job.enqueue(where.call(1))
    await job.progress(0.5, "half")
    return dict(job.keys)


@app.task(queue="paced")
async def paced(number: int) -> int:
    return time.monotonic_ns() // 1_000
