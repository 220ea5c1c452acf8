"""`python -m bench horizon`: what a claim costs while somebody keeps the vacuum horizon where it is.

A report that reads in one snapshot, or a transaction that wrote and does not end, keeps every dead version of every
row. Claims, settlements and enqueues go on at full speed; each kind of queue runs free and pinned, each in a fresh
database, and the last third of both is compared: the wall time of a claim, and the CPU of the session that claims.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any
from uuid import uuid4

import asyncpg
from rich.console import Console
from rich.table import Table

from fairlane import App, Concurrency, Fair
from fairlane.scheduler.settlement import Done, settle
from fairlane.store.postgres import PostgresStore
from fairlane.store.protocol import WorkerIdentity
from fairlane.testing.postgres import ThrowawayPostgres

__all__ = ["main"]

KEYS = 1_000
BATCH = 200
BACKLOG = 20_000
LEASE = timedelta(minutes=5)
BARS = {"reader": 1.3, "xid": 4.0}
QUEUES = ("one-lane", "fair", "gated")


@dataclass(frozen=True, slots=True)
class Claims:
    """The claims of one run: when each ended, how long it took, and the CPU of its session so far, all in seconds."""

    ended: list[float]
    took: list[float]
    cpu: list[float]

    def late(self, part: float = 1 / 3) -> tuple[float, float]:
        """The wall time and the CPU of a claim towards the end: the median of one, the mean of the other."""
        since = self.ended[-1] - (self.ended[-1] - self.ended[0]) * part
        first = next(nth for nth, ended in enumerate(self.ended) if ended >= since)
        count = len(self.ended) - first - 1
        return median(self.took[first:]), (self.cpu[-1] - self.cpu[first]) / max(count, 1)


@contextlib.asynccontextmanager
async def pinned(url: str, by: str) -> AsyncIterator[None]:
    """Keep the horizon where it is: by a snapshot, or by a transaction with an id of its own."""
    if by == "nobody":
        yield
        return
    connection = await asyncpg.connect(url)
    try:
        await connection.execute("begin isolation level repeatable read" if by == "reader" else "begin")
        await connection.execute("select count(*) from fairlane.queues")
        if by == "xid":
            await connection.execute("select pg_current_xact_id()")
        yield
    finally:
        await connection.close()


async def run(url: str, queue: str, by: str, seconds: float) -> Claims:
    """Claim, settle and enqueue for so long."""
    app = App(url)
    app.queue("one-lane")
    app.queue("fair", fair=Fair(by="account"))
    # Without `Fair`, one flow: its lanes park when their only slot is taken, and wake when it is settled.
    app.queue("gated", limits=[Concurrency(1, by="account")])

    @app.task(queue=queue)
    async def work(number: int, account: str) -> None: ...

    made = 0

    async def enqueue(count: int) -> None:
        nonlocal made
        calls = [work.call(number, f"account {number % KEYS}") for number in range(made, made + count)]
        await work.enqueue_many(calls)
        made += count

    store = app.make_store()
    assert isinstance(store, PostgresStore)
    await store.migrate()
    async with app, pinned(url, by):
        await store.open()
        try:
            await enqueue(BACKLOG)
            return await _claim(store, queue, enqueue, seconds)
        finally:
            await store.close()


async def _claim(store: PostgresStore, queue: str, enqueue: Any, seconds: float) -> Claims:
    claims = Claims([], [], [])
    worker = WorkerIdentity(uuid4(), "bench")
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.perf_counter()
        claimed = await store.claim(queue, lambda: BATCH, worker=worker, lease=LEASE)
        claims.took.append(time.perf_counter() - began)
        claims.ended.append(began)
        claims.cpu.append(_cpu(store))
        await store.settle([settle(claim, Done(None), 1_000) for claim in claimed.claims])
        await enqueue(len(claimed.claims))
    return claims


def _cpu(store: PostgresStore) -> float:
    """Seconds that the session which claims has had a processor."""
    session = store._claimer._connection
    assert session is not None
    # Time on a processor in nanoseconds, where the kernel tells it.
    return int(Path(f"/proc/{session.get_server_pid()}/schedstat").read_text().split()[0]) / 1e9


def main(arguments: Sequence[str]) -> int:
    """Run each kind of queue free and pinned; the exit status says whether all bars are met."""
    parser = argparse.ArgumentParser(prog="python -m bench horizon", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--only", choices=QUEUES)
    parser.add_argument("--pin", choices=BARS)
    options = parser.parse_args(arguments)
    table = Table("queue", "pinned by", "claim, ms", "CPU of a claim, ms", "claims", "wall ×", "CPU ×", "bar")
    missed = 0
    with ThrowawayPostgres() as server:
        for queue in QUEUES if options.only is None else (options.only,):
            free: tuple[float, float] | None = None
            for by in ("nobody", *BARS) if options.pin is None else ("nobody", options.pin):
                name = f"{queue}_{by}".replace("-", "_")
                url = asyncio.run(server.create_database(name))
                claims = asyncio.run(run(url, queue, by, options.seconds))
                asyncio.run(server.drop_database(name))
                took, cpu = claims.late()
                free = free or (took, cpu)
                bar = BARS.get(by)
                is_missed = bar is not None and min(took / free[0], cpu / free[1]) > bar
                missed += is_missed
                ratios = (f"{took / free[0]:.2f}", f"{cpu / free[1]:.2f}") if bar else ("", "")
                verdict = f"≤ {bar}: {'missed' if is_missed else 'met'}" if bar else ""
                table.add_row(
                    queue, by, f"{took * 1e3:.2f}", f"{cpu * 1e3:.2f}", str(len(claims.took)), *ratios, verdict
                )
                Console().print(queue, by, f"{took * 1e3:.2f} ms", f"{cpu * 1e3:.2f} ms CPU", len(claims.took))
    Console().print(table)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
