"""A process that claims until nothing is left: `python -m tests.store.takeover <kind> <url> <seed> <ledger>`.

It is killed at any moment, while it claims, settles, reaps, or adds stats up. It writes down every claim and every
settlement. While there is a file `hold` beside the ledgers, it settles nothing: what is claimed then, nobody flushes.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import TextIO, get_args

from fairlane.errors import StoreUnavailable
from fairlane.job import Claim, State
from fairlane.policy import Concurrency, Fair, Policy
from fairlane.scheduler.settlement import Done, Failed, Outcome, Released, settle
from fairlane.store.operators import JobFilter
from fairlane.store.protocol import Store
from tests.store.harness import Database, Kind, worker_named

__all__ = ["GIVEN_BACK", "LEASE", "PER_ACCOUNT", "QUEUE", "TOTALS", "policy_of"]

QUEUE = "webhooks"
PER_ACCOUNT = 2
TOTALS = (6, 5)
LEASE = timedelta(seconds=2)
GIVEN_BACK = Released("drain")
OUTCOMES: list[Outcome] = [*[Done(None)] * 6, GIVEN_BACK, GIVEN_BACK, Failed("boom", 1_000)]


def policy_of(total: int) -> Policy:
    return Policy(QUEUE, Fair(by="account"), (Concurrency(PER_ACCOUNT, by="account"), Concurrency(total)))


async def is_left(store: Store) -> bool:
    counts = await store.counts(QUEUE)
    if counts.ready + counts.running + counts.bells:
        return True
    return bool((await store.find_jobs(JobFilter(state=State.SCHEDULED), limit=1)).jobs)


async def main(kind: str, url: str, seed: str, written: TextIO, hold: Path) -> None:
    (chosen,) = (each for each in get_args(Kind) if each == kind)
    chance, worker = random.Random(seed), worker_named(f"process {seed}")
    database = Database(chosen, url)
    held: list[Claim] = []
    store = await _opened(database)
    while True:
        with contextlib.suppress(StoreUnavailable):  # a session was ended, or the database has crashed
            want, asked = chance.randrange(1, 5), time.monotonic_ns()
            brought = await store.claim(QUEUE, lambda want=want: want, worker=worker, lease=LEASE)  # type: ignore[misc]
            if brought.claims:
                jobs = " ".join(f"{each.id}:{each.keys['account']}" for each in brought.claims)
                written.write(f"claimed {asked} {time.monotonic_ns()} {brought.lease} {jobs}\n")
            # What is handed to us again was lost in a crash before.
            again = {each.id for each in brought.claims}
            held = [*(each for each in held if each.id not in again), *brought.claims]
            chance.shuffle(held)
            if hold.exists():
                continue
            ending, held = held[: len(held) // 2 + 1], held[len(held) // 2 + 1 :]
            if ending:
                ends = [(each, chance.choice(OUTCOMES)) for each in ending]
                words = " ".join(f"{each.id}:{each.lease}:{type(outcome).__name__}" for each, outcome in ends)
                written.write(f"settling {time.monotonic_ns()} {words}\n")
                lost = await store.settle([settle(each, outcome, 1_000) for each, outcome in ends])
                written.write(f"settled {time.monotonic_ns()} {' '.join(map(str, lost))}\n")
            if not brought.claims:
                await store.reap()
                if not await is_left(store):
                    break
            elif chance.random() < 0.05:
                await store.collect(QUEUE)
            if chance.random() < 0.3:
                await store.tally(QUEUE, chance.choice([1, 3, 500]))
    await database.close()


async def _opened(database: Database) -> Store:
    while True:
        with contextlib.suppress(StoreUnavailable):
            return await database.open()


if __name__ == "__main__":
    kind, url, seed, ledger = sys.argv[1:]
    with Path(ledger).open("a", buffering=1) as written:
        asyncio.run(main(kind, url, seed, written, Path(ledger).with_name("hold")))
