"""The curtain: workers are up before the first job runs, so that starting Python is not measured as waiting.

A worker process says that it is ready with a file and waits for another; whoever started it counts the first kind and
then makes the second. Nothing is claimed before: a job that waits for the curtain would be charged for the time.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

__all__ = ["STAGE_VARIABLE", "count_ready", "raise_curtain", "wait_for_curtain"]

STAGE_VARIABLE = "FAIRLANE_DEMO_STAGE"
"""Names the folder that an act's processes share."""
LOOK_EVERY = 0.005
LOOK_FOR_PARENT_EVERY = 0.5


def wait_for_curtain(stage: Path) -> None:
    """In a worker process: return when all of them are ready. Ends this process if whoever started it is gone."""
    parent = os.getppid()
    (stage / f"{os.getpid()}.ready").touch()
    while not (stage / "curtain").exists():
        if os.getppid() != parent:
            raise SystemExit("whoever started this worker is gone")
        time.sleep(LOOK_EVERY)
    threading.Thread(target=_leave_with, args=(parent,), name="fairlane-demo-parent", daemon=True).start()


def _leave_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_FOR_PARENT_EVERY)
    os.kill(os.getpid(), signal.SIGTERM)


def count_ready(stage: Path) -> int:
    return sum(1 for _ in stage.glob("*.ready"))


def raise_curtain(stage: Path) -> None:
    (stage / "curtain").touch()
