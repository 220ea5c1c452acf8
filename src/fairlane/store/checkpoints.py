"""Checkpoints: when the tables of boards are written. A second after the first change, or at once if much has changed.

Nothing depends on it: the journal holds every change that the tables do not. Checkpoints keep the journal short, for
claimers that catch up and for readers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from fairlane.errors import SchemaTooNew, StoreLost, StoreUnavailable
from fairlane.store.boards import Boards

__all__ = ["Checkpoints"]

log = logging.getLogger("fairlane.store")

EVERY = 1.0
"""Seconds from a change until the tables are written."""
LAST_WITHIN = 5.0
"""Seconds for the last time, when the store is closed."""


class Checkpoints:
    """Has the tables written by `write`, which is given the number of a queue. Where somebody has claimed, `add_up` is
    given it after that: perhaps no worker is there to add up what claims have told."""

    def __init__(
        self, boards: Boards, write: Callable[[int], Awaitable[None]], add_up: Callable[[int], Awaitable[None]]
    ) -> None:
        self._boards = boards
        self._write = write
        self._add_up = add_up
        self._claimed: set[int] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._writing: asyncio.Task[None] | None = None

    def soon(self, queue: int) -> None:
        """A claim has changed a queue's board."""
        self._claimed.add(queue)
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # another thread's, or one that has ended: its timers are gone with it
            self._loop, self._timer, self._writing = loop, None, None
        if self._writing is not None and not self._writing.done():
            return
        is_due = self._boards.is_due(queue)
        if is_due or self._timer is None:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = loop.call_later(0.0 if is_due else EVERY, self._begin)

    def _begin(self) -> None:
        self._timer = None
        self._writing = asyncio.get_running_loop().create_task(self._write_all())

    async def _write_all(self) -> None:
        for queue in self._boards.unwritten():
            try:
                await self._write(queue)
                if queue in self._claimed:
                    self._claimed.discard(queue)
                    await self._add_up(queue)
            except (StoreUnavailable, StoreLost) as error:
                log.warning("the board of a queue could not be checkpointed (%s); the next claim tries again", error)
                return
            except SchemaTooNew:  # whoever writes this journal now has all that we have
                self._boards.drop(queue)
            except Exception:
                log.exception("the board of a queue could not be checkpointed; the next claim tries again")
                return

    async def close(self) -> None:
        """Write what is left, unless that takes long."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._writing is None or self._writing.done() or self._loop is not asyncio.get_running_loop():
            self._writing = asyncio.create_task(self._write_all())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WITHIN):
                await self._writing
