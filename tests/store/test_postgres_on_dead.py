"""The reaper of PostgreSQL kills in transactions of their own, after the one that ends the other claims."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from uuid import UUID

import pytest

from fairlane.clock import ManualClock
from fairlane.errors import StoreUnavailable
from fairlane.job import Claim, State
from fairlane.scheduler.settlement import Died, Done, Settlement, settle
from fairlane.store.postgres import PostgresStore
from fairlane.store.postgres.connections import POOL_SIZE
from tests.store.harness import (
    LEASE,
    claim,
    new_jobs,
    soon,
    state_of,
)
from tests.store.test_on_dead import OTHER, PLAIN, followed, mortal, on_dead, suspected


@pytest.fixture
async def reaper(postgres_url: str, clock: ManualClock) -> AsyncIterator[PostgresStore]:
    store = PostgresStore(postgres_url, clock=clock)
    await store.open()
    await store.declare(PLAIN)
    await store.declare(OTHER)
    yield store
    await store.close()


def before_each_death(
    monkeypatch: pytest.MonkeyPatch, reaper: PostgresStore, happens: Callable[[Settlement], Awaitable[object]]
) -> None:
    settler = reaper._settler
    real = settler._settle_with_effects

    async def watched(settlement: Settlement, *args: Any, **options: Any) -> list[UUID]:
        await happens(settlement)
        return await real(settlement, *args, **options)

    monkeypatch.setattr(settler, "_settle_with_effects", watched)


async def given_two_who_are_lost(reaper: PostgresStore, clock: ManualClock) -> list[Claim]:
    """Two jobs with effects and one without, suspects all, under one lease that has run out: they die of it."""
    await reaper.enqueue([mortal(on_dead(*new_jobs(OTHER))), mortal(None), mortal(on_dead(*new_jobs(OTHER)))])
    held = await suspected(reaper, await claim(reaper, "webhooks", 3))
    clock.advance(2 * LEASE.total_seconds())
    return held


async def test_a_worker_that_renews_while_it_is_reaped_has_lost_all_that_its_lease_held(
    reaper: PostgresStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = await given_two_who_are_lost(reaper, clock)
    lease = held[0].lease

    async def come_back(settlement: Settlement) -> None:
        assert (await reaper.renew([lease], LEASE)).gone == [lease]
        late = next(each for each in held if each.id == settlement.job)
        assert await reaper.settle([settle(late, Done(None), 0)]) == [late.id]

    before_each_death(monkeypatch, reaper, come_back)
    reaped = await reaper.reap()
    assert sorted(each.job for each in reaped.settled) == sorted(each.id for each in held)
    assert reaped.next_due is None
    assert {await state_of(reaper, each.id) for each in held} == {State.DEAD}
    assert len(await followed(reaper)) == 2


async def test_a_reaper_that_is_lost_in_the_middle_is_followed_by_one_that_ends_its_work(
    reaper: PostgresStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = await given_two_who_are_lost(reaper, clock)
    seen: list[UUID] = []

    async def fail_at_the_second(settlement: Settlement) -> None:
        seen.append(settlement.job)
        if len(seen) == 2:
            raise StoreUnavailable("the test has cut the line")

    before_each_death(monkeypatch, reaper, fail_at_the_second)
    with pytest.raises(StoreUnavailable):
        await reaper.reap()
    assert len(await followed(reaper)) == 1
    reaped = await reaper.reap()
    assert [each.job for each in reaped.settled] == [seen[1]]
    assert reaped.next_due is None
    assert len(await followed(reaper)) == 1
    assert {await state_of(reaper, each.id) for each in held} == {State.DEAD}


async def test_two_reapers_at_once_kill_each_job_once(
    reaper: PostgresStore, postgres_url: str, clock: ManualClock
) -> None:
    other = PostgresStore(postgres_url, clock=clock)
    await other.open()
    for _ in range(10):
        held = await given_two_who_are_lost(reaper, clock)
        both = await soon(asyncio.gather(reaper.reap(), other.reap()))
        settled = [each.job for reaped in both for each in reaped.settled]
        assert sorted(settled) == sorted(set(settled))
        settled += [each.job for each in (await other.reap()).settled]  # what both have left to each other
        assert sorted(settled) == sorted(each.id for each in held)
        assert len(await followed(reaper)) == 2
    assert (await reaper.reap()).next_due is None
    await other.close()


async def test_many_who_settle_at_once_with_effects_for_a_queue_they_have_not_met(
    reaper: PostgresStore, postgres_url: str, clock: ManualClock
) -> None:
    count = 3 * POOL_SIZE
    await reaper.enqueue([mortal(on_dead(*new_jobs(OTHER))) for _ in range(count)])
    other = PostgresStore(postgres_url, clock=clock)
    await other.open()
    held = await claim(other, "webhooks", count)
    await soon(asyncio.gather(*(other.settle([settle(each, Died("x"), 0)]) for each in held)))
    assert len(await followed(reaper)) == count
    await other.close()
