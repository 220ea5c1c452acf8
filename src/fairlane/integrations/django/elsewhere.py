"""A store that lives in another event loop than the one that asks."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Coroutine
from typing import Any, TypeVar

from fairlane.store.protocol import Store

__all__ = ["Elsewhere", "run_in"]

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
