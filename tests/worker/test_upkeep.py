"""The pace of upkeep: it keeps up with what there is to remove, and leaves the database to those who claim."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import cast

import pytest

from fairlane import App, Concurrency, State
from fairlane.clock import SECOND, Instant, ManualClock
from fairlane.events import GatesRecounted
from fairlane.store.protocol import Pruned, Retention, Store
from fairlane.store.sqlite import SqliteStore
from fairlane.waits import Outage
from fairlane.worker.upkeep import RESTS, remove_old_jobs
from tests.model import boards
from tests.waiting import until, until_found
from tests.worker.harness import WatchedStore, turns

PASSES = 6


class Backlog:
    """A store with so many passes of old jobs, each of which takes some time."""

    def __init__(self, clock: ManualClock, takes: int) -> None:
        self._clock = clock
        self._takes = takes
        self.began: list[Instant] = []

    async def prune(self, retention: Retention, limit: int) -> Pruned:
        self.began.append(self._clock.now())
        self._clock.set(self._clock.now() + self._takes)
        return Pruned(limit, more=len(self.began) < PASSES)


async def rests(takes: int, step: str = "1ms") -> list[int]:
    """The microseconds between passes while there is more to remove, and after the last of them."""
    clock = ManualClock()
    backlog = Backlog(clock, takes)
    pruning = asyncio.create_task(remove_old_jobs(cast(Store, backlog), Outage(lambda: None), clock, Retention()))
    while len(backlog.began) <= PASSES:
        await turns(5)
        clock.advance(step)
    pruning.cancel()
    return [later - earlier - takes for earlier, later in pairwise(backlog.began)]


async def test_while_there_is_more_to_remove_a_worker_goes_on_after_a_moment() -> None:
    *between, after = await rests(takes=0)
    assert max(between) < SECOND // 50  # passes of two thousand: up to 100,000 jobs a second
    assert after > SECOND


@pytest.mark.parametrize("takes", [SECOND // 10, SECOND])
async def test_the_longer_a_pass_takes_the_longer_it_rests(takes: int) -> None:
    *between, _ = await rests(takes, step="10ms")
    assert min(between) >= 0.75 * takes / RESTS


async def test_a_pass_that_rode_out_an_outage_is_not_followed_by_as_long_a_rest() -> None:
    *between, _ = await rests(takes=3_600 * SECOND, step="100ms")
    assert max(between) < 10 * SECOND


async def test_a_worker_gives_back_a_slot_that_nobody_holds_and_says_so(
    app: App, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """F2, A14: it looks every minute or so, and the jobs that waited for the slot start."""
    app.queue("gpu", limits=[Concurrency(1)])
    heard: list[GatesRecounted] = []
    app.on_event(GatesRecounted)(heard.append)

    @app.task(queue="gpu")
    async def train(number: int) -> int:
        return number

    async with app:
        opened = await app.opened()
        store = opened.real if isinstance(opened, WatchedStore) else opened
        assert isinstance(store, SqliteStore)
        running = asyncio.create_task((worker := await app.worker()).run())
        assert await (await train.enqueue(1)).result() == 1
        await until_found(lambda: _is_folded(store))
        await boards.seal(store, "gpu")
        await store._database.write(lambda tx: tx.connection.execute("update gates set in_flight = 1"), durable=False)
        job = await train.enqueue(2)
        await turns()
        assert await job.status() is State.READY
        for _ in range(20):
            clock.advance("5s")
            await turns()
        assert await job.result() == 2
        worker.stop()
        await running
        await until(lambda: heard)
    assert [(event.queue, event.gates) for event in heard] == [("gpu", 1)]
    assert "queue gpu: concurrency: of the whole queue counts 1, and 0 run; it was counted anew" in caplog.text


async def _is_folded(store: Store) -> bool:
    return (await store.counts("gpu")).running == 0
