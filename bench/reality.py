"""The app whose jobs are run for real and simulated: every handler takes 50 ms and writes down its start and its end.

Beside the queue that is compared it has two that tell how long a claim and a settlement take here: one without a limit,
and one that a limit holds back.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import time
from pathlib import Path

from fairlane import App, Concurrency, Fair, Task, context

NAP = 0.05

_runs: list[tuple[str, int, int]] = []


async def nap(account: str) -> None:
    began = time.time_ns() // 1_000
    await asyncio.sleep(NAP)
    _runs.append((str(context().id), began, time.time_ns() // 1_000))


def make_app(url: str | None = None) -> tuple[App, dict[str, Task[[str], None]]]:
    """The app and its task for each queue."""
    made = App(url)
    made.queue("real", fair=Fair(by="account", weight={"premium": 4}), limits=[Concurrency(10, by="account")])
    made.queue("free")
    made.queue("held", limits=[Concurrency(10)])
    return made, {queue: made.task(queue=queue, name=f"nap.{queue}")(nap) for queue in ("real", "free", "held")}


app, _ = make_app()


@atexit.register
def _leave_ledger() -> None:
    if (folder := os.environ.get("BENCH_LEDGER")) and _runs:
        Path(folder, f"{os.getpid()}.json").write_text(json.dumps(_runs))
