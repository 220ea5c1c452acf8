"""What a worker is made of: what its app gives to it, what its loops share, and what supervises them.

A loop that ends by itself is a fault, and the worker stops.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from fairlane.clock import Clock
from fairlane.enqueue import BuildJob
from fairlane.redaction import error_text
from fairlane.store.protocol import Retention, Store, WorkerIdentity
from fairlane.task import Registry
from fairlane.telemetry.telemetry import Telemetry
from fairlane.waits import Outage, StoreTime

if TYPE_CHECKING:
    from fairlane.cron.schedules import CronRunner
    from fairlane.worker.claims import Slots
    from fairlane.worker.options import WorkerOptions
    from fairlane.worker.reports import Watching
    from fairlane.worker.runs import Middleware
    from fairlane.worker.watchdog import WaitedFor

log = logging.getLogger("fairlane.worker")

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What an app gives to whatever runs its jobs."""

    store: Store
    registry: Registry
    clock: Clock
    build: BuildJob
    max_result: int
    middlewares: Sequence[Middleware] = ()
    telemetry: Telemetry = field(default_factory=Telemetry)
    served: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The partitions of each queue."""
    retention: Retention = field(default_factory=Retention)
    cron_runner: CronRunner | None = None
    look_again: Callable[[], Awaitable[None]] | None = None
    """Tells the handlers of this process where the follow-ups go that they declare."""
    make_store: Callable[[], Store] | None = None
    """Opens the same database once more; `None` where it is in memory."""
    waited_for: WaitedFor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """What the loops of one worker share."""

    store: Store
    clock: Clock
    options: WorkerOptions
    identity: WorkerIdentity
    outage: Outage
    time: StoreTime
    slots: Slots
    watching: Watching
    warnings: Warnings


class Supervisor:
    """Starts loops, notices when one dies, and stops them in the given order."""

    def __init__(self, cancel: Callable[[asyncio.Task[None]], object], on_death: Callable[[str, str], None]) -> None:
        self._cancel = cancel
        self._on_death = on_death
        self._loops: dict[str, asyncio.Task[None]] = {}
        self.may_end: set[str] = set()
        """Loops whose end is no fault."""
        self.causes: dict[str, str] = {}
        self.died = asyncio.Event()

    def start(self, name: str, loop: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(loop, name=f"fairlane-{name}")
        self._loops[name] = task
        task.add_done_callback(lambda ended: self._ended(name, ended))

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if name in self.may_end and error is None:
            return
        self.causes[name] = error_text(error) if error else "it ended without being told to"
        # A cancellation that did not come from us is the end of the whole event loop, not a fault of this one.
        if not task.cancelled():
            log.critical("the worker's loop %r died: %s; the worker stops", name, self.causes[name], exc_info=error)
            self._on_death(name, self.causes[name])
        self.died.set()

    async def stop(self, *names: str) -> None:
        """Cancel these loops and wait until they are gone."""
        tasks = [self._loops[name] for name in names if name in self._loops]
        self.may_end.update(names)
        for task in tasks:
            self._cancel(task)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def finish(self, name: str) -> None:
        """Wait until this loop has ended."""
        if name in self._loops:
            await asyncio.wait({self._loops[name]})

    def states(self) -> dict[str, str]:
        return {
            name: self.causes.get(name) or ("ended" if task.done() else "running") for name, task in self._loops.items()
        }


class Warnings:
    """What fails without harm to any job: the current error of each loop, and how often it has failed."""

    def __init__(self) -> None:
        self._now: dict[str, str] = {}
        self.failures: Counter[str] = Counter()

    @property
    def now(self) -> Mapping[str, str]:
        return dict(self._now)

    async def endure(self, name: str, call: Callable[[], Awaitable[T]]) -> T | None:
        """The result of the call; `None` if it fails. It is logged when failures start and when they end."""
        try:
            result = await call()
        except Exception as error:
            self.note(name, error)
            return None
        self.clear(name)
        return result

    def note(self, name: str, error: Exception) -> None:
        self.failures[name] += 1
        if name not in self._now:
            log.error("%s fails (%s); jobs go on, trying again", name, error, exc_info=error)
        self._now[name] = error_text(error)

    def tell(self, name: str, words: str) -> None:
        """Note a problem that is not an error."""
        if name not in self._now:
            log.warning("%s: %s", name, words)
        self._now[name] = words

    def clear(self, name: str, words: str | None = None) -> None:
        """It works again."""
        if self._now.pop(name, None) is not None:
            log.warning("%s", words or f"{name} works again")
