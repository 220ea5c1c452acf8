"""A worker on a real store in memory, whose calls can be watched, held up and made to fail."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fairlane import App, Job, State, Task
from fairlane.clock import ManualClock
from fairlane.errors import StoreUnavailable
from fairlane.store.procedures import Work
from fairlane.store.protocol import Store
from fairlane.store.sqlite import SqliteStore
from fairlane.worker import Worker, WorkerOptions
from tests.waiting import PATIENCE, until_found

AnyWorker = TypeVar("AnyWorker", bound=Worker)


class WatchedStore:
    """A store seen through a window: what was called, and what shall happen then."""

    def __init__(self, real: Store) -> None:
        self.real = real
        self.calls: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.arguments: dict[str, list[tuple[Any, ...]]] = {}
        self.before: dict[str, Callable[[], Awaitable[None]]] = {}
        """What happens before a call reaches the store; it may wait, and it may raise."""
        self.after: dict[str, Callable[[], Awaitable[None]]] = {}
        self._changed = asyncio.Condition()

    async def run(self, work: Work[Any], tx: Any = None) -> Any:
        return await self._watched(work.name, self.real.run)(work, tx)

    def __getattr__(self, name: str) -> Any:
        return self._watched(name, getattr(self.real, name))

    def _watched(self, name: str, method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def watched(*args: Any, **kwargs: Any) -> Any:
            await self._note(self.calls, name)
            self.arguments.setdefault(name, []).append(args)
            try:
                if name in self.before:
                    await self.before[name]()
                result = await method(*args, **kwargs)
                if name in self.after:
                    await self.after[name]()
                return result
            finally:
                await self._note(self.ended, name)

        return watched

    async def _note(self, counter: Counter[str], name: str) -> None:
        counter[name] += 1
        async with self._changed:
            self._changed.notify_all()

    async def called(self, name: str, times: int = 1) -> None:
        """Return once `name` has been called so many times."""
        await self._until(lambda: self.calls[name] >= times)

    async def finished(self, name: str, times: int = 1) -> None:
        """Return once so many calls of `name` have ended."""
        await self._until(lambda: self.ended[name] >= times)

    async def _until(self, is_so: Callable[[], bool]) -> None:
        async with self._changed, asyncio.timeout(PATIENCE):
            await self._changed.wait_for(is_so)

    def lose(self, *names: str) -> None:
        """From now on these calls do not reach the database."""

        async def lost() -> None:
            raise StoreUnavailable("the test has cut the line")

        for name in names:
            self.before[name] = lost

    def hold_up(self, name: str, *, after: bool = False) -> tuple[asyncio.Event, asyncio.Event]:
        """From now on this call waits, before it reaches the database or after it. Returns an event that is set once it
        waits, and one that lets it go on."""
        is_held, may_go_on = asyncio.Event(), asyncio.Event()

        async def wait() -> None:
            is_held.set()
            await may_go_on.wait()

        (self.after if after else self.before)[name] = wait
        return is_held, may_go_on

    def restore(self) -> None:
        self.before.clear()


def watched_app(clock: ManualClock) -> tuple[App, WatchedStore]:
    app, store = App("sqlite://", clock=clock), WatchedStore(SqliteStore(None, clock=clock))
    app._make_store = lambda: store
    return app, store


@asynccontextmanager
async def working(app: App, **options: Any) -> AsyncIterator[Worker]:
    """A worker that runs during the block, and is stopped and waited for after it."""
    async with running(await app.worker(WorkerOptions(**options))) as worker:
        yield worker


@asynccontextmanager
async def running(worker: AnyWorker) -> AsyncIterator[AnyWorker]:
    """The same for a worker that somebody has made."""
    task = asyncio.create_task(worker.run())
    try:
        async with asyncio.timeout(PATIENCE):
            yield worker
            worker.stop()
            await task
    finally:
        # A test that failed does not wait for its jobs.
        task.cancel()
        await asyncio.wait({task}, timeout=1)


def hanging(app: App, **options: Any) -> tuple[Task[[], None], asyncio.Event]:
    """A task that does not end by itself, and an event that is set once it runs."""
    started = asyncio.Event()

    async def hang() -> None:
        started.set()
        await asyncio.get_running_loop().create_future()

    return app.task(**options)(hang), started


async def reaches(job: Job[Any], state: State) -> None:
    """Return once the job is in this state."""

    async def arrived() -> bool:
        return await job.status() is state

    await until_found(arrived)


async def turns(count: int = 20) -> None:
    """Let everything that is ready go on."""
    for _ in range(count):
        await asyncio.sleep(0)
