"""Handlers and Django's connections: none is used after the database has closed it, none is left open behind a run."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from asgiref.sync import SyncToAsync, ThreadSensitiveContext, sync_to_async
from django.db import close_old_connections, connections

from fairlane.store.protocol import Store
from fairlane.worker.runs import JobContext, Middleware, Next, current_run


def with_fresh_connections(function: Callable[..., Any], *, always: bool = False) -> Callable[..., Any]:
    """A function that workers run in a thread, as Django runs a view: old connections are closed before and after."""

    @functools.wraps(function)
    def fresh(*args: Any, **kwargs: Any) -> Any:
        if not always and current_run.get(None) is None:
            return function(*args, **kwargs)  # called as a function: the connections are the caller's
        close_old_connections()
        try:
            return function(*args, **kwargs)
        finally:
            close_old_connections()

    return fresh


class OwnThread(Middleware):
    """Gives each run of an async task a thread of its own for the ORM, as Django does for each request.

    Otherwise the queries of all runs would wait for each other in one thread. It costs nothing where none is made.
    """

    async def around_run(self, job: JobContext, run: Next) -> Any:
        async with ThreadSensitiveContext() as thread:
            try:
                return await run()
            finally:
                if thread in SyncToAsync.context_to_thread_executor:
                    # The thread ends with the run, and nobody could reach its connections any more.
                    await sync_to_async(connections.close_all)()


R = TypeVar("R")


async def run_in(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, R]) -> R:
    """Await a coroutine where its things live: here, or in the loop of another thread."""
    if asyncio.get_running_loop() is loop:
        return await work
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))


class Elsewhere:
    """What is asked of the store is done in its own loop."""

    def __init__(self, store: Store, loop: asyncio.AbstractEventLoop) -> None:
        self._store = store
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if not inspect.iscoroutinefunction(found):
            return found

        async def there(*args: Any, **kwargs: Any) -> Any:
            return await run_in(self._loop, found(*args, **kwargs))

        return there
