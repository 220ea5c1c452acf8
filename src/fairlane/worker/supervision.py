"""The loops of a worker under one roof: a loop that ends by itself is a fault, and a loud one."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from fairlane.errors import WorkerDied
from fairlane.redaction import error_text

log = logging.getLogger("fairlane.worker")


class Supervisor:
    """Starts loops, notices the first that dies, and stops them in the order it is told."""

    def __init__(self, cancel: Callable[[asyncio.Task[None]], object]) -> None:
        self._cancel = cancel
        self._loops: dict[str, asyncio.Task[None]] = {}
        self._told_to_stop: set[str] = set()
        self.causes: dict[str, str] = {}
        self.died = asyncio.Event()
        self.on_death: Callable[[str, str], None] = lambda name, cause: None

    def start(self, name: str, loop: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(loop, name=f"fairlane-{name}")
        self._loops[name] = task
        task.add_done_callback(lambda ended: self._ended(name, ended))

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if name in self._told_to_stop and error is None:
            return
        self.causes[name] = error_text(error) if error else "it ended without being told to"
        # A cancellation that did not come from us is the end of the whole event loop, not a fault of this one.
        if not task.cancelled():
            log.critical("the worker's loop %r died: %s; the worker stops", name, self.causes[name], exc_info=error)
            self.on_death(name, self.causes[name])
        self.died.set()

    async def stop(self, *names: str) -> None:
        """Cancel these loops and wait until they are gone."""
        tasks = [self._loops[name] for name in names if name in self._loops]
        self._told_to_stop.update(names)
        for task in tasks:
            self._cancel(task)
        await asyncio.gather(*tasks, return_exceptions=True)

    def let_end(self, name: str) -> None:
        """This loop has been told to end by itself."""
        self._told_to_stop.add(name)

    async def finish(self, name: str) -> None:
        """Wait until it has."""
        if name in self._loops:
            await asyncio.wait({self._loops[name]})

    def states(self) -> dict[str, str]:
        return {
            name: self.causes.get(name) or ("ended" if task.done() else "running") for name, task in self._loops.items()
        }

    def raise_if_died(self) -> None:
        if self.causes:
            told = "; ".join(f"{name}: {cause}" for name, cause in self.causes.items())
            raise WorkerDied(f"a loop of this worker died, and the worker with it ({told})")


T = TypeVar("T")


class Troubles:
    """By loop, what it fails with now, and how often it has failed."""

    def __init__(self) -> None:
        self._now: dict[str, str] = {}
        self.failures: Counter[str] = Counter()

    @property
    def now(self) -> Mapping[str, str]:
        return dict(self._now)

    async def endure(self, name: str, call: Callable[[], Awaitable[T]]) -> T | None:
        """What the call brings; `None` where it fails. It is logged when that starts and when it ends."""
        try:
            result = await call()
        except Exception as error:
            self.note(name, error)
            return None
        self.clear(name)
        return result

    def note(self, name: str, error: Exception) -> None:
        """It fails."""
        self.failures[name] += 1
        if name not in self._now:
            log.error("%s fails (%s); jobs go on, trying again", name, error, exc_info=error)
        self._now[name] = error_text(error)

    def tell(self, name: str, words: str) -> None:
        """Something is amiss that no error says."""
        if name not in self._now:
            log.warning("%s: %s", name, words)
        self._now[name] = words

    def clear(self, name: str, words: str | None = None) -> None:
        """It does not, or no more; `words` say so."""
        if self._now.pop(name, None) is not None:
            log.warning("%s", words or f"{name} works again")
