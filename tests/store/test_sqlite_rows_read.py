"""What a claim costs on SQLite, counted in the virtual machine's own steps and in rows, never in milliseconds."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from fairlane.clock import ManualClock
from fairlane.policy import Concurrency, Fair, Policy
from fairlane.store.sqlite import SqliteStore
from tests.store.harness import claim_once, finish, new_jobs

BATCH = 50
STEP = 10
"""The virtual machine reports every so many instructions."""

STEPS_PER_JOB = 3_000
ROWS_PER_JOB = 20


@asynccontextmanager
async def opened(policy: Policy) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(None, clock=ManualClock())
    await store.open()
    await store.declare(policy)
    try:
        yield store
    finally:
        await store.close()


async def fill(store: SqliteStore, policy: Policy, lanes: int, jobs_per_lane: int, prefix: str = "a") -> None:
    for first in range(0, lanes, 1_000):
        batch = [
            job
            for number in range(first, min(first + 1_000, lanes))
            for job in new_jobs(policy, {"account": f"{prefix}{number}"}, jobs_per_lane)
        ]
        await store.enqueue(batch)


async def fold_everything(store: SqliteStore, queue: str) -> None:
    """Arrivals are folded a thousand at a time; what a claim costs is looked at once they all are."""
    while (await store.counts(queue)).events:
        await claim_once(store, queue, 0)


class Cost:
    """Steps of the virtual machine, and rows handed to Python."""

    def __init__(self) -> None:
        self.steps = 0
        self.rows = 0


async def cost_of(store: SqliteStore, act: Callable[[], object]) -> Cost:
    cost = Cost()

    def tick() -> int:
        cost.steps += STEP
        return 0

    connection = store._database._connection
    assert connection is not None
    before = store.rows_read
    connection.set_progress_handler(tick, STEP)
    await act()  # type: ignore[misc]
    connection.set_progress_handler(None, 0)
    cost.rows = store.rows_read - before
    return cost


async def claim_cost(lanes: int, jobs_per_lane: int) -> Cost:
    policy = Policy("q", Fair(by="account", charge="count"), (Concurrency(1_000, by="account"),))
    async with opened(policy) as store:
        await fill(store, policy, lanes, jobs_per_lane)
        await fold_everything(store, "q")
        await finish(store, (await claim_once(store, "q", BATCH)).claims)
        return await cost_of(store, lambda: claim_once(store, "q", BATCH))


@pytest.mark.parametrize("lanes", [100, 100_000])
async def test_a_claim_reads_a_bounded_number_of_rows_however_many_lanes_there_are(lanes: int) -> None:
    cost = await claim_cost(lanes, 1 if lanes > 1_000 else 3)
    assert cost.rows <= ROWS_PER_JOB * BATCH
    assert cost.steps <= STEPS_PER_JOB * BATCH


async def test_a_claim_costs_the_same_with_4_000_and_with_100_000_jobs_waiting() -> None:
    few = await claim_cost(lanes=100, jobs_per_lane=40)  # of each lane, more than a claim keeps for the next
    many = await claim_cost(lanes=100, jobs_per_lane=1_000)
    assert many.rows <= 1.2 * few.rows
    assert many.steps <= 1.5 * few.steps


async def test_ten_thousand_parked_lanes_cost_a_claim_nothing() -> None:
    policy = Policy("q", None, (Concurrency(1, by="account"),))
    async with opened(policy) as store:
        # Two jobs in each of 10,000 lanes that admit one at a time: once the first ones run, every lane is parked.
        await fill(store, policy, 10_000, 2)
        await fold_everything(store, "q")
        held = 0
        while claimed := (await claim_once(store, "q", 1_000)).claims:
            held += len(claimed)
        assert held == 10_000
        while (await claim_once(store, "q", 1_000)).more:
            pass
        assert (await store.counts("q")).parked_lanes == 10_000
        await fill(store, policy, 2 * BATCH, 1, prefix="free")
        await claim_once(store, "q", BATCH)
        cost = await cost_of(store, lambda: claim_once(store, "q", BATCH))
        assert cost.rows <= ROWS_PER_JOB * BATCH
        assert cost.steps <= STEPS_PER_JOB * BATCH
