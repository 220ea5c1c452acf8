"""Worker processes under one that does nothing else: started, watched, restarted, stopped together.

A handler can end its process without a word. The process above it lives on, restarts it, and hands over what it noted
(see `BlackBox`), so that the next one knows which jobs ran. Should this process die itself, its children die with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence

from fairlane.clock import SECOND, Clock, SystemClock
from fairlane.errors import ConfigurationError
from fairlane.worker.black_box import BlackBox, new_black_box
from fairlane.worker.timing import jittered

__all__ = ["WorkerPool", "command_of_worker", "die_with", "how"]

log = logging.getLogger("fairlane.worker")

FIRST_RESTART, LONGEST_RESTART = SECOND // 2, 30 * SECOND
AFTER_KILLER = SECOND // 10
"""How long the others of a process wait that one of its jobs has killed."""
SETTLED_AFTER = 60 * SECOND
"""A child that has lived for this long has proven itself: its next death starts a new count."""
DEATHS_IN_A_ROW = 5
MOST_PROCESSES = 1_000
EXIT_KEEPS_DYING = 1
EXIT_ORPHANED = 4
ORPHANED_LOOK = 0.1
"""Seconds between two looks whether a process that is to end by itself has begun something instead."""
SIGNALS_OBEYED = 2
"""By the children themselves. One that is still there at the third is killed."""
LAST_PORT = 65_535


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


def command_of_worker(arguments: Sequence[str]) -> list[str]:
    """`fairlane worker …`, as a process of its own."""
    return [sys.executable, "-m", "fairlane.cli", "worker", *arguments]


def how(code: int | None) -> str:
    """How a process ended, for people."""
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"by {signal.Signals(-code).name}"
    return f"exit code {code}"


class WorkerPool:
    """Runs `command` in so many processes, and restarts those that die.

    A process that died while jobs ran was killed by one of them: it is restarted for as long as it takes. One that dies
    with nothing to do, again and again, ends the pool, loudly.
    """

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
        self._signals = 0
        self._code = 0
        self._lifeline, self._our_end = os.pipe()

    @classmethod
    def of_workers(cls, arguments: Sequence[str], processes: int, metrics_port: int | None = None) -> WorkerPool:
        """A pool of `fairlane worker …` with these arguments (without `--processes`).

        Each has a port of its own, from `metrics_port` on: a scraper sees every process, and tells them apart.
        """
        return cls(command_of_worker(arguments), processes, first_port=metrics_port)

    def _command_of(self, place: int, box: int) -> list[str]:
        command = [*self._command, "--black-box", str(box), "--lifeline", str(self._lifeline)]
        if self._first_port is not None:
            command += ["--metrics-port", str(self._first_port and self._first_port + place)]
        return command

    def run(self) -> int:
        """Run until signalled, and return the exit code."""
        return asyncio.run(self.supervise())

    def signal(self, number: int) -> None:
        """Pass a signal on to every child. After the first, none is restarted; at the third, those left are killed."""
        self._passed_on.add(signal.Signals(number))
        self._signals += 1
        self._stop.set()
        for child in list(self._children.values()):
            if child.returncode is None:
                child.send_signal(number if self._signals <= SIGNALS_OBEYED else signal.SIGKILL)

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
        box = new_black_box()
        while not self._stop.is_set():
            began = self._clock.monotonic()
            code = await self._run_child(place, box)
            if self._stop.is_set():
                self._code = self._code or self._after_stop(code)
                return
            dead = BlackBox(box).read()
            if dead is not None and (suspects := len(dead.running) + len(dead.ended)):
                wait = jittered(AFTER_KILLER)
                jobs = "1 job" if suspects == 1 else f"{suspects:,} jobs"
                log.error("worker process %d died (%s) while %s ran; restarting it", place, how(code), jobs)
            else:
                deaths = 1 if self._clock.monotonic() - began >= SETTLED_AFTER else deaths + 1
                if deaths >= DEATHS_IN_A_ROW:
                    log.critical("worker process %d died %d times in a row (%s); giving up", place, deaths, how(code))
                    self._code = EXIT_KEEPS_DYING
                    self.signal(signal.SIGTERM)
                    return
                wait = jittered(min(FIRST_RESTART << (deaths - 1), LONGEST_RESTART))
                log.error("worker process %d died (%s); restarting it in %.1f s", place, how(code), wait / SECOND)
            await self._pause(wait)

    def _after_stop(self, code: int) -> int:
        """The exit code that a child leaves us with. One that the signal itself has ended was not listening yet, or not
        any more: it held nothing."""
        return 0 if -code in self._passed_on else abs(code)

    async def _run_child(self, place: int, box: int) -> int:
        # A group of its own: a Ctrl-C at the terminal reaches us alone, and we pass it on once.
        child = await asyncio.create_subprocess_exec(
            *self._command_of(place, box), pass_fds=[box, self._lifeline], start_new_session=True
        )
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
