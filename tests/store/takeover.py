"""A process that claims until nothing is left: `python -m tests.store.takeover <kind> <url> <seed>`.

It is killed at any moment. It says a line for every claim that started something.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from datetime import timedelta
from typing import get_args

from fairlane.errors import StoreUnavailable
from fairlane.job import Claim, State
from fairlane.policy import Concurrency, Fair, Policy
from fairlane.scheduler.settlement import Done, Failed, Outcome, Released, settle
from fairlane.store.operators import JobFilter
from fairlane.store.protocol import Store
from tests.store.harness import Database, Kind, worker_named

__all__ = ["PER_ACCOUNT", "QUEUE", "TOTALS", "policy_of"]

QUEUE = "webhooks"
PER_ACCOUNT = 2
TOTALS = (6, 5)
LEASE = timedelta(seconds=2)
OUTCOMES: list[Outcome] = [*[Done(None)] * 6, Released("drain"), Released("drain"), Failed("boom", 1_000)]


def policy_of(total: int) -> Policy:
    return Policy(QUEUE, Fair(by="account"), (Concurrency(PER_ACCOUNT, by="account"), Concurrency(total)))


async def is_left(store: Store) -> bool:
    counts = await store.counts(QUEUE)
    if counts.ready + counts.running + counts.bells:
        return True
    return bool((await store.find_jobs(JobFilter(state=State.SCHEDULED), limit=1)).jobs)


async def main(kind: str, url: str, seed: str) -> None:
    (chosen,) = (each for each in get_args(Kind) if each == kind)
    chance, worker = random.Random(seed), worker_named(f"process {seed}")
    database = Database(chosen, url)
    store = await database.open()
    held: list[Claim] = []
    while True:
        with contextlib.suppress(StoreUnavailable):  # a session was ended
            want = chance.randrange(1, 5)
            brought = await store.claim(QUEUE, lambda want=want: want, worker=worker, lease=LEASE)  # type: ignore[misc]
            held += brought.claims
            if brought.claims:
                print("claimed", flush=True)
            chance.shuffle(held)
            ending, held = held[: len(held) // 2 + 1], held[len(held) // 2 + 1 :]
            if ending:
                await store.settle([settle(each, chance.choice(OUTCOMES), 1_000) for each in ending])
            if not brought.claims:
                await store.reap()
                if not await is_left(store):
                    break
            elif chance.random() < 0.05:
                await store.collect(QUEUE)
    await database.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
