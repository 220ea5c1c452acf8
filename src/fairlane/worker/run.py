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
STOPS = (signal.SIGTERM, signal.SIGINT)


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
    # Heard from the first moment to the last: a worker that is stopped while it starts, or again while it closes, has
    # nothing to lose and ends well.
    loop = asyncio.get_running_loop()
    starting = asyncio.ensure_future(app.worker(options))
    stopping = _Stopping(starting)
    for number in STOPS:
        loop.add_signal_handler(number, stopping.on_signal)
    try:
        worker = await stopping.started()
        if worker is None:
            return None, EXIT_WELL
        await worker.run()
    except WorkerDied as error:
        log.critical("%s", error)
        return starting.result(), EXIT_DIED
    finally:
        await app.close()
        for number in STOPS:
            loop.remove_signal_handler(number)
    return worker, EXIT_UNSETTLED if worker.left_unsettled else EXIT_WELL


class _Stopping:
    """What signals do: the first stops the worker, the second at once, the third the process."""

    def __init__(self, starting: asyncio.Future[Worker]) -> None:
        self._starting = starting
        self._worker: Worker | None = None
        self._signals = 0

    async def started(self) -> Worker | None:
        """The worker; nothing if it was stopped before it was there."""
        try:
            worker = await self._starting
        except asyncio.CancelledError:
            if self._signals < 2:
                raise
            return None
        if self._signals:
            return None
        self._worker = worker
        return worker

    def on_signal(self) -> None:
        self._signals += 1
        if self._signals > 2:
            os._exit(EXIT_FORCED)
        log.info("asked to stop%s", "" if self._signals == 1 else ", at once")
        if self._worker is not None:
            self._worker.stop()
        elif self._signals == 2:
            self._starting.cancel()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
