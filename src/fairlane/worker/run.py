"""`fairlane worker`: an event loop, signals, and an exit code."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Protocol

from fairlane.errors import WorkerDied
from fairlane.parameters import checked
from fairlane.worker.options import WorkerOptions
from fairlane.worker.processes import die_with, die_with_parent
from fairlane.worker.runner import RunnerHost, serve
from fairlane.worker.worker import Worker

__all__ = ["Host", "run_mate", "run_worker"]

log = logging.getLogger("fairlane.worker")

EXIT_WELL, EXIT_DIED, EXIT_UNSETTLED, EXIT_FORCED = 0, 1, 3, 130
STOPS = (signal.SIGTERM, signal.SIGINT)
HURRY_WITHIN = 3.0
"""Seconds for which a process still says goodbye to the database after a second signal, which may not answer."""


class Host(Protocol):
    """What runs a worker: an app."""

    async def worker(self, options: WorkerOptions | None = None) -> Worker: ...

    async def close(self) -> None: ...


@checked()
def run_worker(app: Host, options: WorkerOptions | None = None) -> int:
    """Run a worker until SIGTERM or SIGINT and return the exit code. A second signal does not wait for running jobs."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        worker, code = runner.run(_run(app, options))
        if worker is not None and worker.left_running:
            # Handlers in threads that would not stop would also keep the interpreter from ending. Their claims stand
            # until their leases end, so nobody runs these jobs beside them.
            _leave(code)
    return code


def _leave(code: int) -> None:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


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
    """What signals do: the first stops the worker, the second at once, the third the process.

    "At once" has a bound of its own, whatever the worker still waits for: time for cancelled handlers to clean up and
    for their outcomes to be recorded, if there are any, and a moment to leave.
    """

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
            if self._signals == 2:
                self._leave_soon(self._worker)
        elif self._signals == 2:
            self._starting.cancel()

    def _leave_soon(self, worker: Worker) -> None:
        within = HURRY_WITHIN
        if _is_busy(worker):
            within += 2 * worker.options.time("cancel_grace").total_seconds()
        asyncio.get_running_loop().call_later(within, self._leave_now, worker)

    def _leave_now(self, worker: Worker) -> None:
        log.error("the database does not answer; leaving without a word to it")
        _leave(EXIT_UNSETTLED if _is_busy(worker) else EXIT_WELL)


def _is_busy(worker: Worker) -> bool:
    health = worker.health()
    return bool(health.running or health.waiting or health.unsettled)


def run_mate(app: RunnerHost, options: WorkerOptions, descriptor: int, notes: int) -> None:
    """Run jobs for the worker at the other end of this socket, until it says that there are no more, or dies."""
    die_with_parent()
    die_with(descriptor)
    for number in STOPS:
        # Whether we go on is the worker's decision. Not ignored: what a task starts would ignore them as well.
        signal.signal(number, lambda *_: None)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        if runner.run(serve(app, options, descriptor, notes)).left_running:
            _leave(EXIT_WELL)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
