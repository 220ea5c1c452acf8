"""Settlements that travel with a claim, where workers ask in public."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from fairlane.clock import ManualClock
from fairlane.job import Claim, State
from fairlane.policy import Policy
from fairlane.scheduler.settlement import Done, settle
from fairlane.store.postgres import PostgresStore
from fairlane.store.postgres.settlements import Done as DoneClaims
from fairlane.store.postgres.settlements import Piggyback
from tests.store.harness import LEASE, claim_once, given_jobs, ids, soon, worker_named
from tests.store.test_postgres_combined_claims import crowded, release_lock, requests, take_lock

PLAIN = Policy("webhooks")


@pytest.fixture
async def store(postgres_url: str, clock: ManualClock) -> AsyncIterator[PostgresStore]:
    store = PostgresStore(postgres_url, clock=clock)
    await store.open()
    await store.declare(PLAIN)
    yield store
    await store.close()


async def claimed_in_public(store: PostgresStore, count: int) -> list[Claim]:
    """Jobs of a store whose next claim asks in public again."""
    await crowded(store)
    claimed = await claim_once(store, "webhooks", count, worker=worker_named("worker"))
    await crowded(store)
    return claimed.claims


def settling(store: PostgresStore, claims: list[Claim]) -> asyncio.Future[list[UUID]]:
    return asyncio.ensure_future(store.settle([settle(claim, Done(b"1"), 10) for claim in claims]))


def claiming(store: PostgresStore, count: int) -> asyncio.Future[Any]:
    return asyncio.ensure_future(claim_once(store, "webhooks", count, worker=worker_named("worker")))


def not_by_itself(store: PostgresStore, monkeypatch: pytest.MonkeyPatch) -> None:
    async def again(work: Callable[..., Awaitable[Any]]) -> Any:
        raise AssertionError("the settlement went by itself")

    monkeypatch.setattr(store._connections, "again", again)


async def states(store: PostgresStore, jobs: list[UUID]) -> list[State]:
    return [(await store.job(job)).state for job in jobs]


async def test_a_claim_takes_along_what_is_settled_in_the_same_turn(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = await given_jobs(store, PLAIN, count=4)
    claims = await claimed_in_public(store, 2)
    with monkeypatch.context() as patched:
        not_by_itself(store, patched)
        lost, claimed = await soon(asyncio.gather(settling(store, claims), claiming(store, 2)))
    assert lost == []
    assert ids(claimed.claims) == jobs[2:]
    assert await states(store, jobs) == [State.DONE, State.DONE, State.RUNNING, State.RUNNING]


async def test_it_is_settled_before_the_claim_has_got_anything(
    store: PostgresStore, connection: asyncpg.Connection[Any]
) -> None:
    jobs = await given_jobs(store, PLAIN, count=2)
    claims = await claimed_in_public(store, 1)
    await take_lock(connection)
    both = [settling(store, claims), claiming(store, 1)]
    while await soon(requests(connection)) < 1:
        pass
    assert await states(store, jobs) == [State.DONE, State.READY]
    assert not any(each.done() for each in both)
    await release_lock(connection)
    await soon(asyncio.gather(*both))


async def test_what_others_have_claimed_for_us_comes_with_the_settlement(
    store: PostgresStore, postgres_url: str, clock: ManualClock, connection: asyncpg.Connection[Any]
) -> None:
    jobs = await given_jobs(store, PLAIN, count=3)
    other = PostgresStore(postgres_url, clock=clock)
    await other.open()
    try:
        claims = await claimed_in_public(store, 1)
        await crowded(other)
        await take_lock(connection)
        asked = [settling(store, claims), claiming(store, 1), claiming(other, 1)]
        while await soon(requests(connection)) < 2:
            pass
        await release_lock(connection)
        lost, *claimed = await soon(asyncio.gather(*asked))
        assert lost == []
        assert sorted(job for each in claimed for job in ids(each.claims)) == sorted(jobs[1:])
        assert await states(store, jobs) == [State.DONE, State.RUNNING, State.RUNNING]
    finally:
        await other.close()


async def test_a_lost_claim_is_told_to_whoever_settles_it(
    store: PostgresStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = await given_jobs(store, PLAIN, count=3)
    claims = await claimed_in_public(store, 1)
    clock.advance(2 * LEASE.total_seconds())
    await store.reap()
    with monkeypatch.context() as patched:
        not_by_itself(store, patched)
        lost, _ = await soon(asyncio.gather(settling(store, claims), claiming(store, 1)))
    assert lost == [claims[0].id] == jobs[:1]


async def test_a_claim_that_is_broken_off_does_not_undo_what_it_settled(
    store: PostgresStore, connection: asyncpg.Connection[Any]
) -> None:
    jobs = await given_jobs(store, PLAIN, count=2)
    claims = await claimed_in_public(store, 1)
    await take_lock(connection)
    settled, claimed = settling(store, claims), claiming(store, 1)
    while await soon(requests(connection)) < 1:
        pass
    claimed.cancel()
    await asyncio.gather(claimed, return_exceptions=True)
    # It is asked again, and finds its own work, which is not a claim that somebody took over.
    assert await soon(settled) == []
    assert await states(store, jobs) == [State.DONE, State.READY]
    await release_lock(connection)


async def test_without_a_claim_it_goes_by_itself(store: PostgresStore) -> None:
    jobs = await given_jobs(store, PLAIN, count=2)
    claims = await claimed_in_public(store, 1)
    assert store._claimer.piggyback.is_in_service
    assert await soon(settling(store, claims)) == []
    assert await states(store, jobs) == [State.DONE, State.READY]


class Journey:
    """A settlement beside claims that are only pretended."""

    def __init__(self, *, may_wait: bool) -> None:
        self.piggyback = Piggyback()
        self.piggyback.is_in_service = True
        self.piggyback.may_wait = may_wait
        self.piggyback.depart()
        self.settled = asyncio.ensure_future(self.piggyback.settle(DoneClaims(None, [], [])))


async def test_where_limits_wait_for_it_a_settlement_does_not_wait_for_the_claim_under_way() -> None:
    assert await soon(Journey(may_wait=False).settled) is None


async def test_else_it_goes_with_the_one_that_follows() -> None:
    journey = Journey(may_wait=True)
    await asyncio.sleep(0)
    journey.piggyback.arrive()
    with journey.piggyback.taken() as pending:
        assert pending is not None
        pending.arrived([])
    assert await soon(journey.settled) == []


async def test_or_by_itself_if_none_follows() -> None:
    journey = Journey(may_wait=True)
    await asyncio.sleep(0)
    journey.piggyback.arrive()
    assert await soon(journey.settled) is None
    with journey.piggyback.taken() as pending:
        assert pending is None
