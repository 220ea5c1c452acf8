"""Jobs that kill their process in three ways, and jobs that do no harm. As a program, it enqueues what it is given."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys

from fairlane import App, Fair

app = App()
app.queue("culprits", fair=Fair(by="tenant"))


def note(what: str, number: int) -> None:
    """One line, one write, in a file that outlives the process."""
    ledger = os.open(os.environ["CULPRITS_LEDGER"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(ledger, f"{what} {number}\n".encode())
    os.close(ledger)


async def rest(seconds: float) -> None:
    """What the work takes."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    loop.call_later(seconds, done.set_result, None)
    await done


@app.task(queue="culprits", max_attempts=3)
async def innocent(number: int, tenant: int) -> None:
    note("began", number)
    await rest(float(os.environ.get("CULPRITS_TAKE", "0.05")))
    note("ended", number)


@app.task(queue="culprits", max_attempts=3)
async def killer(number: int, tenant: int) -> None:
    note("killed", number)
    await rest(0.02)
    match number % 3:
        case 0:
            os._exit(0)
        case 1:
            os.kill(os.getpid(), signal.SIGKILL)
        case _:
            ctypes.string_at(0)


async def main() -> None:
    tasks = {"innocent": innocent, "killer": killer}
    async with app:
        calls = [tasks[name].call(number, number % 7) for name, number in json.load(sys.stdin)]
        print(*[job.id for job in await app.enqueue_many(calls)])


if __name__ == "__main__":
    asyncio.run(main())
