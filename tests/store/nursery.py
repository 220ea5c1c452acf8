"""Processes that are forked from one that has imported everything: they start in milliseconds instead of half a second.

Each is a process of its own, with a pid, its own connections and its own death. The process between the test and them
(`python -m tests.store.nursery <module> <function>`) does what it is asked on its standard input, one request a line;
with that, or with the test, it ends, and so do they.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from tests.waiting import stand_still_now

__all__ = ["Nursery"]

ROOT = Path(__file__).resolve().parent.parent.parent


class Nursery:
    """Starts a function of a module as often as it is asked to, each time in a new process."""

    def __init__(self, module: str, function: str) -> None:
        command = [sys.executable, "-m", "tests.store.nursery", module, function]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.alive: set[int] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.communicate()

    def start(self, *given: str) -> int:
        pid: int = self._ask("start", *given)
        self.alive.add(pid)
        return pid

    def stop(self, pid: int) -> bool:
        """Have it stand still. Returns whether it does: it may have ended."""
        return bool(self._ask("stop", pid))

    def go_on(self, pid: int) -> None:
        self._ask("signal", pid, int(signal.SIGCONT))

    def kill(self, pid: int) -> None:
        self._ask("signal", pid, int(signal.SIGKILL))

    def kill_all(self) -> None:
        """Return once they are dead."""
        for pid in self.alive:
            self.kill(pid)
        while self.alive:
            self.ended(waits=True)

    async def until_one_ends(self, within: float) -> None:
        """Return then, or after so many seconds."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        handles = [os.pidfd_open(pid) for pid in self.alive]
        try:
            for each in handles:
                loop.add_reader(each, ended.set)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), within)
        finally:
            for each in handles:
                loop.remove_reader(each)
                os.close(each)

    def ended(self, *, waits: bool = False) -> dict[int, int]:
        """Those that have ended since this was asked last, with their status as `subprocess` has it."""
        found = {pid: os.waitstatus_to_exitcode(status) for pid, status in self._ask("ended", waits)}
        self.alive -= found.keys()
        return found

    def _ask(self, *request: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the process that starts the others has ended; its error is on stderr"
        return json.loads(answer)


def _serve(run: Callable[..., None]) -> None:
    alive: set[int] = set()
    try:
        # Not a loop over the file: that reads ahead.
        while line := sys.stdin.readline():
            print(json.dumps(_answer(json.loads(line), run, alive)), flush=True)
    finally:
        for pid in alive:
            os.kill(pid, signal.SIGKILL)


def _answer(request: list[Any], run: Callable[..., None], alive: set[int]) -> object:
    match request:
        case ["start", *given]:
            pid = os.fork()
            if pid == 0:
                _be_born(run, given)
            alive.add(pid)
            return pid
        case ["stop", pid]:
            return pid in alive and stand_still_now(pid)
        case ["signal", pid, number]:
            # A child that nobody has waited for keeps its number: it is nobody else's.
            if pid in alive:
                os.kill(pid, number)
            return None
        case ["ended", waits]:
            found: list[tuple[int, int]] = []
            with contextlib.suppress(ChildProcessError):
                while (ended := os.waitpid(-1, 0 if waits and not found else os.WNOHANG))[0]:
                    found.append(ended)
                    alive.discard(ended[0])
            return found
    raise AssertionError(request)


def _be_born(run: Callable[..., None], given: list[str]) -> NoReturn:
    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        run(*given)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    module, function = sys.argv[1:]
    _serve(getattr(importlib.import_module(module), function))
