"""The demo's program, as a user would write it: three queues and one task.

`fairlane worker fairlane.demo.app:app` runs it. The database comes from FAIRLANE_URL.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from fairlane.app import App
from fairlane.demo.acts import ACTS, FIFO
from fairlane.demo.stage import STAGE_VARIABLE, LedgerWriter, wait_for_curtain
from fairlane.task import AsyncTask
from fairlane.worker.runs import current_run

RUN_TIME = 0.005  # seconds

_ledger: LedgerWriter | None = None


async def deliver(number: int, tenant: str, endpoint: str) -> int:
    """Stands for a call to somebody's server, and writes down when it began and ended."""
    admitted_at = current_run.get().claim.claimed_at * 1_000
    with _open_ledger().record(number, tenant, endpoint, admitted_at):
        await asyncio.sleep(RUN_TIME)
    return number


def _open_ledger() -> LedgerWriter:
    global _ledger
    if _ledger is None:
        _ledger = LedgerWriter(Path(os.environ[STAGE_VARIABLE]))
    return _ledger


def make_app(url: str | None = None) -> tuple[App, AsyncTask[[int, str, str], int]]:
    """The app on a database, and its task."""
    app = App(url)
    for act in ACTS:
        app.queue(act.queue, fair=act.fair, limits=act.limits)
    return app, app.task(queue=FIFO.queue, name="deliver", keys=("tenant", "endpoint"))(deliver)


app = make_app()[0]
if STAGE_VARIABLE in os.environ:
    wait_for_curtain(Path(os.environ[STAGE_VARIABLE]))
