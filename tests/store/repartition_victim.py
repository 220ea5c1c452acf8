"""A process that changes the number of a queue's partitions, and is killed before one of its writes."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from typing import Any

from fairlane.store import repartition
from fairlane.store.procedures import Work
from tests.store.harness import Database, Kind, operations_on

__all__ = ["WRITES", "change_and_die"]

WRITES = ("divide", "insert", "move_misrouted", "change_overrides")
"""What a change writes with."""

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload([__name__])


async def change_and_die(database: Database, queue: str, to: int, before: int) -> bool:
    """Change a queue in a process of its own that kills itself before so many writes were done; whether it was."""
    given = (database.kind, database.url, queue, to, before)
    process = _processes.Process(target=_change, args=given)
    process.start()
    await asyncio.to_thread(process.join, 120)
    assert process.exitcode in (0, -signal.SIGKILL), f"it ended with {process.exitcode}"
    return process.exitcode != 0


def _change(kind: Kind, url: str, queue: str, to: int, before: int) -> None:
    asyncio.run(_changed(Database(kind, url), queue, to, before))


async def _changed(database: Database, queue: str, to: int, before: int) -> None:
    store = await database.open()
    written, run = 0, store.run

    async def watched(work: Work[Any], tx: Any = None) -> Any:
        nonlocal written
        if work.name in WRITES:
            if written == before:
                os.kill(os.getpid(), signal.SIGKILL)
            written += 1
        return await run(work, tx)

    store.run = watched  # type: ignore[method-assign]
    repartition.LEARNED_AFTER = 0  # type: ignore[attr-defined]  # its producers are not what these tests are about
    await operations_on(store).partitions.change(queue, to, by=("account",), actor="ops")
    await database.close()
