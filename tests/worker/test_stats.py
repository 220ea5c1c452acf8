"""Figures and reports are telemetry: workers keep them by the way, and no failure of theirs concerns a job (O11)."""

from __future__ import annotations

import asyncio
import logging
from itertools import pairwise
from typing import cast

import pytest

from fairlane import App, State, Task
from fairlane.clock import SECOND, Instant, ManualClock
from fairlane.stats.keys import KeyStats
from fairlane.store.protocol import Store
from fairlane.store.stats import Moment
from fairlane.store.stats_values import AddedUp
from fairlane.waits import Outage
from fairlane.worker.runtime import Warnings
from fairlane.worker.upkeep import EVERY, RESTS, keep_stats
from tests.waiting import until
from tests.worker.harness import WatchedStore, reaches, turns, watched_app, working


def a_shop(clock: ManualClock) -> tuple[App, WatchedStore, Task[[str], None]]:
    app, store = watched_app(clock)
    app.queue("mail", keys=["account"])

    @app.task(name="send", queue="mail")
    async def send(account: str) -> None: ...

    return app, store, send


async def advance_until(clock: ManualClock, store: WatchedStore, name: str, times: int) -> None:
    while store.ended[name] < times:
        await turns()
        clock.advance("1s")


async def test_figures_come_by_themselves(clock: ManualClock) -> None:
    app, store, send = a_shop(clock)
    async with app, working(app):
        job = await send.enqueue("acme")
        await reaches(job, State.DONE)
        await send.enqueue("acme")
        found: list[tuple[str, KeyStats]] = []
        while not found:
            await turns()
            clock.advance("1s")
            found = await store.real.ask(lambda moment: moment.keys_named(["mail"], [(("account",), ("acme",))]))
        assert found[0][1].ended >= 1


async def test_a_worker_reports_and_takes_it_back_when_it_stops(clock: ManualClock) -> None:
    app, store, _ = a_shop(clock)
    async with app:
        async with working(app, name="worker-1", concurrency=7) as worker:
            await store.finished("report")
            (seen,) = await store.real.ask(Moment.workers)
            assert (seen.id, seen.report.name, seen.report.concurrency) == (worker.identity.id.hex, "worker-1", 7)
            assert (seen.report.queues, seen.report.tasks) == ({"mail": 1.0}, ["send"])
            assert seen.report.loops["adding up"] == "running"
        assert await store.real.ask(Moment.workers) == []


async def test_a_failure_to_keep_figures_is_visible_and_stops_no_job(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """O11"""
    app, store, send = a_shop(clock)

    async def fail() -> None:
        raise RuntimeError("no such figure")

    store.before["add_up"] = store.before["report"] = fail
    async with app, working(app) as worker:
        with caplog.at_level(logging.WARNING, "fairlane.worker"):
            await advance_until(clock, store, "add_up", 3)
            await advance_until(clock, store, "report", 3)
            assert worker.health().is_well
            assert worker.health().warnings == {
                "adding up": "RuntimeError: no such figure",
                "reporting": "RuntimeError: no such figure",
            }
            assert [record.getMessage()[:15] for record in caplog.records].count("adding up fails") == 1
            await reaches(await send.enqueue("acme"), State.DONE)
            del store.before["report"]
            await advance_until(clock, store, "report", store.ended["report"] + 1)
            (seen,) = await store.real.ask(Moment.workers)
            assert set(seen.report.warnings) == {"adding up", "reporting"}
            store.restore()
            await advance_until(clock, store, "add_up", store.ended["add_up"] + 2)
            await until(lambda: not worker.health().warnings)
            assert "adding up works again" in caplog.text


class Slow:
    """A store whose passes take some time, and that is behind for so many of them."""

    def __init__(self, clock: ManualClock, takes: int, passes: int) -> None:
        self._clock = clock
        self._takes = takes
        self._passes = passes
        self.began: list[Instant] = []

    async def add_up(self, queue: str, limit: int, rest: int) -> AddedUp:
        self.began.append(self._clock.now())
        self._clock.set(self._clock.now() + self._takes)
        return AddedUp(limit, 1, more=len(self.began) < self._passes)


@pytest.mark.parametrize("takes", [SECOND // 100, SECOND])
async def test_adding_up_never_takes_more_than_a_twentieth_of_the_time(takes: int) -> None:
    clock = ManualClock()
    slow = Slow(clock, takes, 6)
    keeping = asyncio.create_task(keep_stats(cast(Store, slow), Outage(lambda: None), clock, ["mail"], Warnings()))
    while len(slow.began) <= 6:
        await turns(5)
        clock.advance("10ms")
    keeping.cancel()
    *between, last = [later - earlier - takes for earlier, later in pairwise(slow.began)]
    assert min(between) >= RESTS * takes
    assert last >= 0.75 * EVERY
