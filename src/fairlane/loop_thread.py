"""For programs that are not async: an event loop in a thread, and work that only the calling thread may do."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextvars import ContextVar
from operator import attrgetter
from queue import SimpleQueue
from typing import Any, Concatenate, ParamSpec, TypeVar

from fairlane.errors import ConfigurationError

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")

ENDS_WITHIN = 2.0
"""Seconds for running work to finish by itself when the loop is stopped."""


class BackgroundLoop:
    """Runs coroutines for threads without an event loop. It does not keep the program alive."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="fairlane-blocking", daemon=True)
        self._thread.start()

    @property
    def is_ours(self) -> bool:
        """Whether its thread runs in this process: a fork does not inherit threads."""
        return self._process == os.getpid()

    def submit(self, work: Coroutine[Any, Any, R]) -> Future[R]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def stop(self) -> None:
        """Stop, and leave no thread waiting: work that does not finish soon is cancelled."""
        self.submit(_end_all()).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class CallerThread:
    """The thread of a blocking call. Its coroutine runs in another thread, and asks this one for work that must be done
    here: drivers and frameworks demand that a caller's connection is used in the caller's thread.
    """

    def __init__(self) -> None:
        self._asked: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

    def submit(self, work: Coroutine[Any, Any, R], loop: asyncio.AbstractEventLoop) -> Future[R]:
        """Run it in this loop, as a part of the call."""
        outer = _caller.set(self)
        try:
            return asyncio.run_coroutine_threadsafe(work, loop)
        finally:
            _caller.reset(outer)

    def wait_for(self, running: Future[R]) -> R:
        """Block until it is done. If this is interrupted (Ctrl-C), nothing is left running."""
        running.add_done_callback(lambda _: self._asked.put(None))
        try:
            while (work := self._asked.get()) is not None:
                work()
            return running.result()
        except BaseException:
            running.cancel()
            raise

    async def ask(self, work: Callable[[], R]) -> R:
        """Run a function in this thread."""
        answer: Future[R] = Future()
        answer.set_running_or_notify_cancel()  # what was asked for is done, even if whoever asked is cancelled

        def do() -> None:
            try:
                answer.set_result(work())
            except Exception as error:
                answer.set_exception(error)

        self._asked.put(do)
        return await asyncio.wrap_future(answer)


_caller: ContextVar[CallerThread | None] = ContextVar("fairlane_caller", default=None)


def is_blocking_call() -> bool:
    """Whether a thread is blocked on what runs here."""
    return _caller.get() is not None


def blocking(
    method: Callable[Concatenate[S, P], Coroutine[Any, Any, R]], run: str = "_source.run_blocking"
) -> Callable[Concatenate[S, P], R]:
    """The form of an async method for code that is not async: it blocks its thread until the work is done. `run` is the
    attribute of its object that runs coroutines."""
    name, runner = method.__name__, attrgetter(run)

    @functools.wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = runner(self)(getattr(self, name)(*args, **kwargs))
        return result

    call.__name__ = f"{name}_sync"
    call.__doc__ = f"`{name}` for code that is not async."
    return call


def refuse_inside_a_loop(work: Coroutine[Any, Any, Any]) -> ConfigurationError:
    """The error for a blocking call that would block the event loop itself. The work is dropped."""
    work.close()
    return ConfigurationError("a blocking call inside an event loop would stop it; await the async form instead")


async def ask_caller(work: Callable[[], R]) -> R:
    """Run a function in the thread of the caller: here, or where a blocking call waits."""
    caller = _caller.get()
    return work() if caller is None else await caller.ask(work)


async def _end_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if not others:
        return
    _, left = await asyncio.wait(others, timeout=ENDS_WITHIN)
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
