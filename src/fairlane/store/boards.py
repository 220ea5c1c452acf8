"""The boards that a process holds in memory, by queue."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from fairlane.errors import SchemaTooNew, StoreLost, StoreUnavailable
from fairlane.scheduler.resident import MOST_RESIDENT, ResidentBoard

MOST_WHOLE = 2_000
"""Pieces of a kind that are read at once, so that the whole of a small board is in memory from the first claim on."""
CHECKPOINT_AT = 20_000
"""Pieces that differ from the tables, and bytes of the journal, after which the tables are written."""
CHECKPOINT_BYTES = 4 * 2**20

PLANS_AT_MOST = 50
"""How often a claim is planned anew because a job it had planned was cancelled meanwhile."""


class Raced(Exception):
    """A job that was planned is not ready any more. Its board is forgotten, and the claim is planned anew."""


class Boards:
    """Boards of queues. All together they hold some `MOST_RESIDENT` keys; whoever was not used for the longest goes."""

    def __init__(self) -> None:
        self._boards: dict[int, ResidentBoard] = {}
        self._bytes: dict[int, int] = {}

    def get(self, queue: int) -> ResidentBoard | None:
        return self._boards.get(queue)

    def put(self, queue: int, board: ResidentBoard) -> None:
        """This one is true, as of now."""
        self._boards.pop(queue, None)
        self._boards[queue] = board

    def drop(self, queue: int) -> None:
        """Forget a board: whether it is true, nobody knows."""
        self._boards.pop(queue, None)
        self._bytes.pop(queue, None)

    def noted(self, queue: int, size: int) -> None:
        """A change of so many bytes was appended to the journal."""
        self._bytes[queue] = self._bytes.get(queue, 0) + size

    def is_due(self, queue: int) -> bool:
        """Whether the tables are to be written without waiting for the next moment of rest."""
        board = self._boards.get(queue)
        return board is not None and (board.unwritten >= CHECKPOINT_AT or self._bytes.get(queue, 0) >= CHECKPOINT_BYTES)

    def unwritten(self) -> list[int]:
        """Queues whose tables do not hold everything that we know."""
        return [queue for queue, board in self._boards.items() if board.unwritten]

    def written(self, queue: int) -> None:
        """The tables hold all of it: what is too much to keep can go."""
        self._bytes[queue] = 0
        self._boards[queue].shrink()
        held = sum(len(board.flows) for board in self._boards.values())
        for other, board in list(self._boards.items()):
            if held > 2 * MOST_RESIDENT and other != queue and not board.unwritten:
                held -= len(board.flows)
                self.drop(other)


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
