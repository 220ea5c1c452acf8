"""Waiting for what tells nobody that it has come: looks, with a rest between two, and an end to patience."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable

PATIENCE = 60.0
"""Seconds of real time after which a test that hangs has failed. Never the measure of anything."""
REST = 0.001


async def until(is_so: Callable[[], object], within: float = PATIENCE) -> None:
    """Return once something in this process is so."""

    async def looked() -> object:
        return is_so()

    await until_found(looked, within)


async def until_found(look: Callable[[], Awaitable[object]], within: float = PATIENCE) -> None:
    """Return once whoever has to go and look finds it so.

    The rest is no wait for something to happen: a test that looked in every turn of its event loop would keep the
    interpreter from the threads that it waits for. (SQLite's took 20 seconds for what takes them 20 milliseconds.)
    """
    async with asyncio.timeout(within):
        while not await look():  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(REST)


def until_blocking(is_so: Callable[[], object], within: float = PATIENCE) -> None:
    """The same for a test without an event loop."""
    deadline = time.monotonic() + within
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(f"it was not so within {within:g} s")
        time.sleep(REST)


def stand_still_now(pid: int) -> bool:
    """Stop a child process and wait until it stands. Returns whether it does: it may have ended."""
    try:
        os.kill(pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    except (ProcessLookupError, ChildProcessError):
        return False
    return True
