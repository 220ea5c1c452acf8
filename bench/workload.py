"""The app whose jobs the benchmark runs, through the public API and with default settings.

Handlers count themselves. When a worker process ends it leaves what its handlers saw in `$BENCH_LEDGER`.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import time
from pathlib import Path

from fairlane import App, Fair

app = App()
app.queue("plain")
app.queue("fair", fair=Fair(by="account"))
app.queue("small")

FILLER = "x" * 60
"""Makes a payload of about 110 bytes."""

_runs = 0
_first = 0
_last = 0


def _note() -> None:
    global _runs, _first, _last
    _last = time.monotonic_ns()
    _first = _first or _last
    _runs += 1


@app.task(queue="plain")
async def plain_noop(number: int, text: str) -> None:
    _note()


@app.task(queue="fair")
async def fair_noop(number: int, account: str, text: str) -> None:
    _note()


@app.task(queue="small")
async def nap(number: int, seconds: float) -> None:
    _note()
    await asyncio.sleep(seconds)


@atexit.register
def _leave_ledger() -> None:
    if (folder := os.environ.get("BENCH_LEDGER")) and _runs:
        entry = {"runs": _runs, "first": _first, "last": _last}
        Path(folder, f"{os.getpid()}.json").write_text(json.dumps(entry))
