"""A producer with two transactions open at once: they commit out of order, and every third one rolls back.

`python -m tests.chaos.producer SEED JOBS` prints the ids of the jobs it committed, then those it rolled back.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg

from tests.chaos.chaos_app import TENANTS, app, work

BATCH = 20
BY_TRANSACTION = 0.1
"""On SQLite, how many batches go through the caller's own transaction. It does not queue at the store's lock, and waits
long for a turn to write beside busy workers."""


class Producer:
    def __init__(self, seed: int, jobs: int) -> None:
        self.random = random.Random(seed)
        self.left = jobs
        self.committed: list[str] = []
        self.rolled_back: list[str] = []

    async def run(self) -> None:
        async with app:
            while self.left > 0:
                if app.url.startswith("sqlite"):
                    await self._one_after_the_other()
                else:
                    await self._two_at_once()

    async def _two_at_once(self) -> None:
        async with connected(app.url) as first, connected(app.url) as second:
            while self.left > 0:
                await first.execute("begin")
                early = await self._enqueue(first)
                await second.execute("begin")
                late = await self._enqueue(second)
                # The later one ends first: its positions become visible before lower ones do.
                await self._end(second, late)
                await self._end(first, early)

    async def _one_after_the_other(self) -> None:
        if self.random.random() > BY_TRANSACTION:
            jobs = await self._enqueue(None)
            self.left -= len(jobs)
            self.committed.extend(jobs)
            return
        connection = sqlite3.connect(app.url.removeprefix("sqlite:///"), isolation_level=None, timeout=60)
        try:
            connection.execute("begin immediate")
            jobs = await self._enqueue(connection)
            connection.execute("commit" if self._keep(jobs) else "rollback")
        finally:
            connection.close()

    async def _enqueue(self, tx: Any) -> list[str]:
        count = self.random.randint(1, BATCH)
        calls = [work.call(n, f"tenant-{self.random.randrange(TENANTS)}") for n in range(count)]
        return [str(job.id) for job in await app.enqueue_many(calls, tx=tx)]

    async def _end(self, connection: asyncpg.Connection[Any], jobs: list[str]) -> None:
        await connection.execute("commit" if self._keep(jobs) else "rollback")

    def _keep(self, jobs: list[str]) -> bool:
        keep = self.random.random() > 1 / 3
        if keep:
            self.left -= len(jobs)
        (self.committed if keep else self.rolled_back).extend(jobs)
        return keep


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[asyncpg.Connection[Any]]:
    connection = await asyncpg.connect(url)
    try:
        yield connection
    finally:
        await connection.close()


def main() -> None:
    producer = Producer(int(sys.argv[1]), int(sys.argv[2]))
    asyncio.run(producer.run())
    print(" ".join(producer.committed))
    print(" ".join(producer.rolled_back))


if __name__ == "__main__":
    main()
