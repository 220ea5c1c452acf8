"""An event loop on a thread of its own, for programs that are not async."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

__all__ = ["BackgroundLoop", "wait_for"]

R = TypeVar("R")

ENDS_WITHIN = 2.0
"""Seconds that what is under way has to end by itself when the loop is stopped."""


class BackgroundLoop:
    """Runs coroutines for threads that have no loop. It does not keep the program alive."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="fairlane-blocking", daemon=True)
        self._thread.start()

    @property
    def is_ours(self) -> bool:
        """Whether its thread runs in this process: a fork has none of its parent's threads."""
        return self._process == os.getpid()

    def submit(self, work: Coroutine[Any, Any, R]) -> Future[R]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def stop(self) -> None:
        """End, and leave no thread waiting: what does not end soon is cancelled."""
        self.submit(_end_all()).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


def wait_for(running: Future[R]) -> R:
    """Block until it is done. Whoever is interrupted meanwhile (Ctrl-C) leaves nothing running."""
    try:
        return running.result()
    except BaseException:
        running.cancel()
        raise


async def _end_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if not others:
        return
    _, left = await asyncio.wait(others, timeout=ENDS_WITHIN)
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
