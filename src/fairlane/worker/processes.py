"""Several worker processes under one: started, watched, restarted, stopped together."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Sequence

from fairlane.clock import SECOND, Clock, SystemClock
from fairlane.errors import ConfigurationError
from fairlane.worker.timing import jittered

__all__ = ["WorkerPool"]

log = logging.getLogger("fairlane.worker")

FIRST_RESTART, LONGEST_RESTART = SECOND // 2, 30 * SECOND
SETTLED_AFTER = 60 * SECOND
"""A child that has lived for this long has proven itself: its next death starts a new count."""
DEATHS_IN_A_ROW = 5
MOST_PROCESSES = 1_000
EXIT_KEEPS_DYING = 1
LAST_PORT = 65_535


class WorkerPool:
    """Runs `command` in so many processes, and restarts those that die; if they keep dying, it ends, loudly."""

    def __init__(
        self, command: Sequence[str], processes: int, *, clock: Clock | None = None, first_port: int | None = None
    ) -> None:
        if not 1 <= processes <= MOST_PROCESSES:
            raise ConfigurationError(f"processes={processes!r} does not lie between 1 and {MOST_PROCESSES:,}")
        if first_port and first_port + processes - 1 > LAST_PORT:
            raise ConfigurationError(
                f"metrics_port={first_port} leaves no port to some of processes={processes}; the last is {LAST_PORT}"
            )
        self._command = list(command)
        self._first_port = first_port
        self._processes = processes
        self._clock: Clock = clock or SystemClock()
        self._children: dict[int, asyncio.subprocess.Process] = {}
        self._stop = asyncio.Event()
        self._passed_on = {signal.SIGTERM}
        self._code = 0

    @classmethod
    def of_workers(cls, arguments: Sequence[str], processes: int, metrics_port: int | None = None) -> WorkerPool:
        """A pool of `fairlane worker …` with these arguments (without `--processes`).

        Each has a port of its own, from `metrics_port` on: a scraper sees every process, and tells them apart.
        """
        command = [sys.executable, "-m", "fairlane.cli", "worker", *arguments]
        return cls(command, processes, first_port=metrics_port)

    def _command_of(self, place: int) -> list[str]:
        if self._first_port is None:
            return self._command
        return [*self._command, "--metrics-port", str(self._first_port and self._first_port + place)]

    def run(self) -> int:
        """Run until signalled, and return the exit code."""
        return asyncio.run(self.supervise())

    def signal(self, number: int) -> None:
        """Pass a signal on to every child. After the first, none is restarted."""
        self._passed_on.add(signal.Signals(number))
        self._stop.set()
        for child in list(self._children.values()):
            if child.returncode is None:
                child.send_signal(number)

    async def supervise(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.signal, number)
        try:
            await asyncio.gather(*(self._keep_alive(place) for place in range(self._processes)))
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
        return self._code

    async def _keep_alive(self, place: int) -> None:
        deaths = 0
        while not self._stop.is_set():
            began = self._clock.monotonic()
            code = await self._run_child(place)
            if self._stop.is_set():
                self._code = self._code or self._after_stop(code)
                return
            deaths = 1 if self._clock.monotonic() - began >= SETTLED_AFTER else deaths + 1
            if deaths >= DEATHS_IN_A_ROW:
                log.critical("worker process %d died %d times in a row (exit code %d); giving up", place, deaths, code)
                self._code = EXIT_KEEPS_DYING
                self.signal(signal.SIGTERM)
                return
            wait = jittered(min(FIRST_RESTART << (deaths - 1), LONGEST_RESTART))
            log.error("worker process %d died with exit code %d; restarting it in %.1f s", place, code, wait / SECOND)
            await self._pause(wait)

    def _after_stop(self, code: int) -> int:
        """The exit code that a child leaves us with. One that the signal itself has ended was not listening yet, or not
        any more: it held nothing."""
        return 0 if -code in self._passed_on else abs(code)

    async def _run_child(self, place: int) -> int:
        # A group of its own: a Ctrl-C at the terminal reaches us alone, and we pass it on once.
        child = await asyncio.create_subprocess_exec(*self._command_of(place), start_new_session=True)
        self._children[place] = child
        if self._stop.is_set():
            child.send_signal(signal.SIGTERM)
        try:
            return await child.wait()
        finally:
            del self._children[place]

    async def _pause(self, wait: int) -> None:
        sleeping = asyncio.ensure_future(self._clock.sleep_until(self._clock.now() + wait))
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({sleeping, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            sleeping.cancel()
            stopping.cancel()
