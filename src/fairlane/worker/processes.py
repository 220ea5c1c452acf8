"""Processes that belong together: how one is started, how it ended, and how it ends with the one above it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import multiprocessing
import os
import pickle
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

from fairlane.task import Task

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


HEEDED_BY_THE_WORKER = (signal.SIGINT, signal.SIGTERM)
ENDS_WITHIN = 2.0
"""Seconds that an idle child has to end by itself."""


class ProcessDied(BaseException):
    """The process that ran a task is gone. No `Exception`: whatever a task retries on, this is a failed attempt."""


class Child:
    """One process, and our end of the pipe to it."""

    def __init__(self) -> None:
        spawning = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawning.Pipe()
        self._process = spawning.Process(target=_serve, args=(theirs,), name="fairlane-task", daemon=True)
        # A signal to the whole group, such as Ctrl-C, must not end it while it is being imported: it is blocked until
        # there is a handler for it. The tracker comes first, as starting it unblocks signals.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, HEEDED_BY_THE_WORKER)
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        # Only the child holds its end now: when it dies, we read the end of the pipe.
        theirs.close()

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def call(
        self, task: Task[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Any, BaseException | None]:
        """Run a call there, and wait: for a thread. An error is returned, not raised."""
        try:
            self._pipe.send_bytes(pickle.dumps((*_place_of(task), tuple(args), kwargs)))
            answer: tuple[Any, BaseException | None] = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            self._process.join(ENDS_WITHIN)
            code = self._process.exitcode
            return None, ProcessDied(f"the process that ran the task died ({how(code)}); the worker goes on")
        except Exception as error:
            # Its arguments cannot be sent, or what it sent cannot be read: this child may be in the middle of it.
            self.kill()
            return None, error
        return answer

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """Let it end: it reads the end of the pipe."""
        self._pipe.close()
        self._process.join(ENDS_WITHIN)
        self._process.kill()
        self._process.join()


class ProcessPool:
    """As many children as are needed at once, up to the number of processors."""

    def __init__(self, most: int | None = None) -> None:
        self._places = asyncio.Semaphore(most or _processors())
        self._idle: list[Child] = []

    @contextlib.asynccontextmanager
    async def child(self) -> AsyncIterator[Child]:
        """A child for one call, once there is one to have."""
        async with self._places:
            child = self._idle.pop() if self._idle else None
            if child is None or not child.is_alive:
                child = await asyncio.to_thread(Child)
            try:
                yield child
            except BaseException:
                child.kill()
                raise
            if child.is_alive:
                self._idle.append(child)

    def close(self) -> None:
        for child in self._idle:
            child.close()
        self._idle.clear()


def _processors() -> int:
    # Those that this process may use: a container may have fewer than the machine.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _place_of(task: Task[..., Any]) -> tuple[str, str]:
    return task.function.__module__, task.function.__qualname__


# In the child.


def _serve(pipe: Connection) -> None:
    # A Ctrl-C at the terminal reaches us too, and so does the SIGTERM of a supervisor that tells all processes of a
    # service. Whether we go on is the worker's decision. Not ignored: what a task starts would ignore them as well.
    for each in HEEDED_BY_THE_WORKER:
        signal.signal(each, _go_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HEEDED_BY_THE_WORKER)
    is_busy = False
    die_with(pipe.fileno(), lambda: is_busy)
    while True:
        try:
            request = pipe.recv_bytes()
        except (EOFError, OSError):
            return  # the worker has closed its end, or is gone
        is_busy = True
        answer = _answer(request)
        is_busy = False
        try:
            pipe.send_bytes(answer)
        except OSError:
            return


def _go_on(_signal: int, _frame: object) -> None: ...


def _answer(request: bytes) -> bytes:
    try:
        module, name, args, kwargs = pickle.loads(request)
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        function = found.function if isinstance(found, Task) else found
        return pickle.dumps((function(*args, **kwargs), None))
    except BaseException as error:
        # What was raised, with where it was raised: a traceback does not travel.
        error.add_note(f"in the process of the task:\n{''.join(traceback.format_tb(error.__traceback__)[1:]).rstrip()}")
        return _told(error)


def _told(error: BaseException) -> bytes:
    try:
        told = pickle.dumps((None, error))
        pickle.loads(told)  # an error whose constructor takes other arguments can be written, and not be read
    except Exception:
        lines = "".join(traceback.format_exception_only(error)).strip()
        return pickle.dumps((None, RuntimeError(f"the task raised what cannot be sent: {lines}")))
    return told
