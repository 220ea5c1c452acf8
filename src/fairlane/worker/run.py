"""`fairlane worker` in one process: an event loop, signals, and an exit code."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Protocol

from fairlane.errors import WorkerDied
from fairlane.worker.options import WorkerOptions
from fairlane.worker.worker import Worker

__all__ = ["Host", "run_worker"]

log = logging.getLogger("fairlane.worker")

EXIT_WELL, EXIT_DIED, EXIT_UNSETTLED, EXIT_FORCED = 0, 1, 3, 130


class Host(Protocol):
    """What runs a worker: an app."""

    async def worker(self, options: WorkerOptions | None = None) -> Worker: ...

    async def close(self) -> None: ...


def run_worker(app: Host, options: WorkerOptions | None = None) -> int:
    """Run a worker until SIGTERM or SIGINT and return the exit code. A second signal does not wait for running jobs."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        worker, code = runner.run(_run(app, options))
        if worker is not None and worker.left_running:
            # Handlers in threads that would not stop would also keep the interpreter from ending. Their claims stand
            # until their leases end, so nobody runs these jobs beside them.
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return code


async def _run(app: Host, options: WorkerOptions | None) -> tuple[Worker | None, int]:
    try:
        worker = await app.worker(options)
    except BaseException:
        await app.close()
        raise
    loop = asyncio.get_running_loop()
    signals = 0

    def on_signal() -> None:
        nonlocal signals
        signals += 1
        if signals > 2:
            os._exit(EXIT_FORCED)
        log.info("asked to stop%s", "" if signals == 1 else ", at once")
        worker.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        await worker.run()
    except WorkerDied as error:
        log.critical("%s", error)
        return worker, EXIT_DIED
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        await app.close()
    return worker, EXIT_UNSETTLED if worker.left_unsettled else EXIT_WELL


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
