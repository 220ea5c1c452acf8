"""Processes that belong together: how one is started, how it ended, and how it ends with the one above it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence

__all__ = ["command_of_worker", "die_with", "die_with_parent", "how"]

EXIT_ORPHANED = 4
ORPHANED_LOOK = 0.1
"""Seconds between two looks whether a process that is to end by itself has begun something instead."""
PR_SET_PDEATHSIG = 1


def die_with(descriptor: int, is_busy: Callable[[], bool] = lambda: True) -> None:
    """End this process at once when whoever holds the other end of this pipe or socket is gone: nobody else would stop
    it, and what it runs is soon run elsewhere. One that is not busy ends by itself."""
    hung_up = select.poll()
    hung_up.register(descriptor, 0)

    def watch() -> None:
        hung_up.poll()
        while not is_busy():
            time.sleep(ORPHANED_LOOK)  # something may still be on its way to it
        os._exit(EXIT_ORPHANED)

    # A thread: the event loop may be blocked by a handler.
    threading.Thread(target=watch, name="fairlane-lifeline", daemon=True).start()


def die_with_parent() -> None:
    """Let the system kill this process when the one that started it dies, also where no thread of ours gets its turn:
    a handler may keep the interpreter to itself, in C. Only Linux does so."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def command_of_worker(arguments: Sequence[str]) -> list[str]:
    """`fairlane worker …`, as a process of its own."""
    return [sys.executable, "-m", "fairlane.cli", "worker", *arguments]


def how(code: int | None) -> str:
    """How a process ended, for people."""
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"by {signal.Signals(-code).name}"
    return f"exit code {code}"
