"""`fairlane worker` in one process: an event loop, signals, and an exit code."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from fairlane.clock import Clock
from fairlane.errors import WorkerDied
from fairlane.parameters import checked
from fairlane.scheduler.settlement import Settlement
from fairlane.stamping import Stamp
from fairlane.store.protocol import Store
from fairlane.task import Registry
from fairlane.worker.execution import Execution, Run
from fairlane.worker.lone import Began, Begin, Ended, Interrupt, Ready, framed, next_order, send
from fairlane.worker.middleware import Middleware
from fairlane.worker.options import QueueShare, WorkerOptions
from fairlane.worker.processes import die_with
from fairlane.worker.slots import QueueSlots, ShareSlots, Slots
from fairlane.worker.worker import Worker

__all__ = ["Host", "run_alone", "run_worker"]

log = logging.getLogger("fairlane.worker")

EXIT_WELL, EXIT_DIED, EXIT_UNSETTLED, EXIT_FORCED = 0, 1, 3, 130
STOPS = (signal.SIGTERM, signal.SIGINT)
HURRY_WITHIN = 3.0
"""Seconds for which a process still says goodbye to the database after a second signal, which may not answer."""


class Host(Protocol):
    """What runs a worker: an app."""

    async def worker(self, options: WorkerOptions | None = None) -> Worker: ...

    async def close(self) -> None: ...


class LoneHost(Protocol):
    """What runs single jobs for a worker: an app."""

    async def make_worker(self, kind: Callable[..., LoneRunner], options: WorkerOptions) -> LoneRunner: ...


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


class LoneExecution(Execution):
    """Tells the worker when the handler is called."""

    socket: socket.socket

    def _begins(self, run: Run) -> bool:
        begins = super()._begins(run)
        if begins:
            # Past the event loop, which would send it in its next turn: the handler may end the process before that.
            os.write(self.socket.fileno(), framed(Began(run.started_at)))
        return begins


class LoneRunner:
    """In a process that runs one job at a time for a worker: its handler, and nothing else."""

    def __init__(
        self,
        store: Store,
        registry: Registry,
        options: WorkerOptions,
        clock: Clock,
        *,
        max_result: int,
        stamp: Stamp,
        middlewares: Sequence[Middleware],
        **_: Any,
    ) -> None:
        share = QueueShare(name="alone")
        self._queue = QueueSlots(share.name, ShareSlots(share, ()))
        slots = Slots([share], 1, options.order, lambda: 0)
        self._execution = LoneExecution(store, registry, slots, clock, self._ended, max_result, stamp, middlewares)
        self._writer: asyncio.StreamWriter | None = None

    async def run(self, connection: socket.socket) -> None:
        """Run what the worker sends, for as long as it lives."""
        self._execution.socket = connection
        reader, self._writer = await asyncio.open_connection(sock=connection)
        send(self._writer, Ready())
        while True:
            match await next_order(reader):
                case Begin(claim=claim, begin_by=begin_by, offset=offset, ahead=ahead):
                    self._execution.store_time.offset = offset
                    self._execution.store_ahead = ahead
                    self._queue.used += 1
                    self._execution.start(self._queue, [claim], begin_by)
                case Interrupt(reason=reason):
                    for run in self._execution.held():
                        self._execution.interrupt(run, reason)

    def _ended(self, settlement: Settlement, queue: QueueSlots, *, may_be_settled: bool = False) -> None:
        assert self._writer is not None
        send(self._writer, Ended(settlement, may_be_settled))


def run_alone(app: LoneHost, options: WorkerOptions, descriptor: int) -> None:
    """Run jobs one at a time for the worker at the other end of this socket, until it closes it or dies."""
    die_with(descriptor)
    for number in STOPS:
        # Whether we go on is the worker's decision. Not ignored: what a task starts would ignore them as well.
        signal.signal(number, lambda *_: None)

    async def serve() -> None:
        runner = await app.make_worker(LoneRunner, options)
        await runner.run(socket.socket(fileno=descriptor))

    with contextlib.suppress(asyncio.IncompleteReadError), asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(serve())


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
