"""A process that claims until nothing is left. It is killed at any moment, while it claims, settles, reaps, or adds
stats up. It writes down what it is about to do and what it was told, before and after every call, and looks now and
then whether the board that it remembers is true.

While there is a file `hold` beside the ledgers, it settles nothing: what is claimed then, nobody flushes. It ends once
there is a file `closing`, and nothing to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sqlite3
import time
from datetime import timedelta
from pathlib import Path
from typing import TextIO, get_args

from fairlane.errors import StoreUnavailable
from fairlane.job import Claim, State
from fairlane.policy import Concurrency, Fair, Policy
from fairlane.scheduler.settlement import Done, Failed, Released, RunOutcome, settle
from fairlane.store import operators
from fairlane.store.operators import JobFilter
from fairlane.store.protocol import Store
from tests.model import boards
from tests.store.harness import Database, Kind, worker_named

__all__ = ["CLOSING", "GIVEN_BACK", "HOLD", "LEASE", "PER_ACCOUNT", "QUEUE", "TOTALS", "policy_of", "run"]

QUEUE = "webhooks"
PER_ACCOUNT = 2
TOTALS = (6, 5)
LEASE = timedelta(seconds=2)
GIVEN_BACK = Released("drain")
OUTCOMES: list[RunOutcome] = [*[Done(None)] * 6, GIVEN_BACK, GIVEN_BACK, Failed("boom", 1_000)]
HOLD, CLOSING = "hold", "closing"


def policy_of(total: int) -> Policy:
    return Policy(QUEUE, Fair(by="account"), (Concurrency(PER_ACCOUNT, by="account"), Concurrency(total)))


def run(kind: str, url: str, seed: str, ledger: str) -> None:
    (chosen,) = (each for each in get_args(Kind) if each == kind)
    with Path(ledger).open("a", buffering=1) as written:
        asyncio.run(Claimer(Database(chosen, url), seed, written, Path(ledger).parent).run())


class Claimer:
    def __init__(self, database: Database, seed: str, written: TextIO, folder: Path) -> None:
        self._database = database
        self._chance = random.Random(seed)
        self._worker = worker_named(f"process {seed}")
        self._written = written
        self._hold, self._closing = folder / HOLD, folder / CLOSING
        self._held: list[Claim] = []

    async def run(self) -> None:
        store = await self._opened()
        is_left = True
        while is_left:
            # A session was ended, the database has crashed, or the test has set a fault.
            with contextlib.suppress(StoreUnavailable, sqlite3.IntegrityError):
                is_left = await self._turn(store)
        await self._database.close()

    async def _opened(self) -> Store:
        while True:
            with contextlib.suppress(StoreUnavailable):
                return await self._database.open()

    async def _turn(self, store: Store) -> bool:
        """Claim, end half of what is held, and see to the queue. Whether there may be more to do."""
        has_brought = await self._claim(store)
        is_held = self._hold.exists()
        if not is_held:
            await self._settle(store)
        if not has_brought:
            await store.reap()  # held or not: the dead may hold every slot
        if is_held:
            return True
        if not has_brought:
            if self._closing.exists() and not await is_left(store):
                return False
        elif self._chance.random() < 0.05:
            await store.collect(QUEUE)
        elif self._chance.random() < 0.05:
            wrong = await boards.compare(store, QUEUE)
            assert not wrong, "\n".join(wrong)
        if self._chance.random() < 0.3:
            await store.add_up(QUEUE, self._chance.choice([1, 3, 500]))
        return True

    async def _claim(self, store: Store) -> bool:
        """Whether it brought anything."""
        want = self._chance.randrange(1, 5)
        self._note("asking")
        try:
            brought = await store.claim(QUEUE, lambda: want, worker=self._worker, lease=LEASE)
        except StoreUnavailable:
            self._note("unanswered")
            raise
        except sqlite3.IntegrityError:
            self._note("failed")
            raise
        jobs = " ".join(f"{each.id}:{each.keys['account']}" for each in brought.claims)
        self._note(f"claimed {brought.lease} {jobs}" if jobs else "nothing")
        # What is handed to us again was lost in a crash before.
        again = {each.id for each in brought.claims}
        self._held = [*(each for each in self._held if each.id not in again), *brought.claims]
        return bool(brought.claims)

    async def _settle(self, store: Store) -> None:
        self._chance.shuffle(self._held)
        half = len(self._held) // 2 + 1
        ending, self._held = self._held[:half], self._held[half:]
        if ending:
            ends = [(each, self._chance.choice(OUTCOMES)) for each in ending]
            words = " ".join(f"{each.id}:{each.lease}:{type(outcome).__name__}" for each, outcome in ends)
            self._note(f"settling {words}")
            lost = await store.settle([settle(each, outcome, 1_000) for each, outcome in ends])
            self._note(f"settled {' '.join(map(str, lost))}")

    def _note(self, words: str) -> None:
        self._written.write(f"{time.monotonic_ns()} {words}\n")


async def is_left(store: Store) -> bool:
    counts = await store.counts(QUEUE)
    if counts.ready + counts.running + counts.events:
        return True
    return bool((await store.run(operators.find_jobs(JobFilter(state=State.SCHEDULED), limit=1))).jobs)
