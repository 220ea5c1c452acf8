"""Processes take a queue over from one another, under tight limits, and are killed wherever they are (J01, J02).

`FAIRLANE_TAKEOVER_CLAIMS=10000 FAIRLANE_TAKEOVER_PROCESSES=8 pytest -s tests/store/test_takeover.py` does it at length.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

from fairlane.errors import StoreUnavailable
from fairlane.job import State
from fairlane.store.protocol import QueueCounts, Store
from tests.model import boards
from tests.store.harness import Database, new_jobs
from tests.store.takeover import PER_ACCOUNT, QUEUE, TOTALS, policy_of

CLAIMS = int(os.environ.get("FAIRLANE_TAKEOVER_CLAIMS", "150"))
PROCESSES = int(os.environ.get("FAIRLANE_TAKEOVER_PROCESSES", "3"))
ACCOUNTS = 12
TROUBLE_EVERY = 12
"""Claims between two troubles."""
ROOT = Path(__file__).resolve().parent.parent.parent
WATCHDOG = 120 + CLAIMS / 5
"""Seconds after which processes that hang have failed. Never the measure of anything."""


class Fleet:
    def __init__(self, database: Database, store: Store) -> None:
        self.database = database
        self.store = store
        self.chance = random.Random(CLAIMS)
        self.claims = 0
        self.troubles: Counter[str] = Counter()
        self.jobs: list[Any] = []
        session = "terminate" if database.kind == "postgres" else "kill"
        self._troubles = itertools.cycle(["kill", "policy", session, "kill", "cancel", "checkpoint"])
        self._started = 0
        self._running: dict[asyncio.Task[None], Process] = {}

    async def start(self) -> None:
        self._started += 1
        given = (self.database.kind, self.database.url, str(self._started))
        command = [sys.executable, "-m", "tests.store.takeover", *given]
        process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, cwd=ROOT)
        self._running[asyncio.create_task(self._hear(process))] = process

    async def _hear(self, process: Process) -> None:
        assert process.stdout is not None
        while await process.stdout.readline():
            self.claims += 1
        await process.wait()

    async def run(self) -> None:
        for _ in range(PROCESSES):
            await self.start()
        due = TROUBLE_EVERY
        try:
            while self._running:
                done, _ = await asyncio.wait(self._running, timeout=0.005, return_when=asyncio.FIRST_COMPLETED)
                for each in done:
                    assert self._running.pop(each).returncode in (0, -9), "its error is on stderr"
                await self._look()
                if self.claims >= due:
                    due = self.claims + TROUBLE_EVERY
                    await self._trouble()
        finally:
            for process in self._running.values():
                process.kill()
            await asyncio.gather(*self._running)

    async def _trouble(self) -> None:
        what = next(self._troubles)
        self.troubles[what] += 1
        match what:
            case "kill" if self._running:
                self.chance.choice(list(self._running.values())).kill()
                await self.start()
            case "terminate":
                async with self.database.transaction() as mine:
                    await mine.tx.execute(
                        "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() "
                        "and application_name = 'fairlane' order by random() limit 2"
                    )
            case "cancel":
                await _again(lambda: self.store.cancel(self.chance.choice(self.jobs)))
            case "policy":
                await _again(lambda: self.store.apply(policy_of(self.chance.choice(TOTALS))))
            case _:
                await _again(lambda: boards.checkpoint(self.store, QUEUE))

    async def _look(self) -> None:
        """By what the database holds to run, no limit is exceeded. (While it is lowered, what runs goes on.)"""
        running = Counter({lane: count for lane, state, count in await self.states() if state == State.RUNNING})
        assert max(running.values(), default=0) <= PER_ACCOUNT
        assert running.total() <= max(TOTALS)

    async def states(self) -> list[Any]:
        async with self.database.transaction(begin=False) as mine:
            if self.database.kind == "postgres":
                found = await mine.tx.fetch("select lane, state, count(*) from fairlane.jobs group by lane, state")
                return [tuple(row) for row in found]
            return list(mine.tx.execute("select lane, state, count(*) from jobs group by lane, state"))


async def _again(act: Any) -> Any:
    """Until nobody ends our session in the middle of it."""
    while True:
        try:
            doing: Awaitable[Any] = act()
            return await doing
        except StoreUnavailable:
            continue


@pytest.mark.slow
async def test_processes_take_over_from_one_another_and_are_killed(shared_database: Database) -> None:
    store = await shared_database.open()
    await store.declare(policy_of(TOTALS[0]))
    fleet = Fleet(shared_database, store)
    jobs = [
        job
        for number in range(CLAIMS * 2)
        for job in new_jobs(policy_of(TOTALS[0]), {"account": number % ACCOUNTS}, max_attempts=100)
    ]
    await store.enqueue(jobs)
    fleet.jobs = [job.id for job in jobs]
    async with asyncio.timeout(WATCHDOG):
        await fleet.run()
    states: Counter[State] = Counter()
    for _, state, count in await fleet.states():
        states[State(state)] += count
    print(f"\n{shared_database.kind}: {fleet.claims:,} claims, {dict(fleet.troubles)}, {dict(states)}")
    assert fleet.claims >= CLAIMS
    assert states.total() == len(jobs)
    assert set(states) <= {State.DONE, State.CANCELLED}, "a job is lost"
    await _again(lambda: boards.fold(store, QUEUE))
    board = await boards.catch_up(store, QUEUE)
    found = await boards.said(store, QUEUE)
    assert boards.differences(board, found) == []
    assert [row for row in found.now.lanes if row.ready or row.in_flight] == []
    assert [row for row in found.now.gates if row.in_flight or row.waiting or row.awake] == []
    assert await store.counts(QUEUE) == QueueCounts(ready=0, running=0, parked_lanes=0, bells=0)
