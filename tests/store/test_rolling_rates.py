"""Rolling windows: a vendor's quota is kept in every window, whoever claims and however often."""

from __future__ import annotations

import asyncio

import pytest

from fairlane.clock import ManualClock
from fairlane.policy import Concurrency, Policy, Rate
from fairlane.scheduler.settlement import Failed, Released
from fairlane.store.protocol import Store
from tests.store.harness import (
    MINUTE,
    SECOND,
    Database,
    assert_at_rest,
    by_key,
    claim,
    claim_once,
    finish,
    given_jobs,
    ids,
)

ACME = {"account": "acme"}
QUOTA = Policy("webhooks", limits=(Rate(4, per="1m", by="account", rolling=True),))


async def test_no_window_holds_more_starts_than_the_limit_wherever_it_begins(store: Store, clock: ManualClock) -> None:
    await store.declare(QUOTA)
    await given_jobs(store, QUOTA, ACME, 60)
    starts: list[int] = []
    for seconds in (0, 17, 20, 22, 0.5, 3, 14, 25, 9, 60, 1, 1, 58, 2, 119):
        clock.advance(seconds)
        claims = await claim(store, "webhooks", 2)
        starts += [clock.now()] * len(claims)
        await finish(store, claims)
        inside = sum(at > clock.now() - MINUTE for at in starts)
        assert len(claims) == min(2, 4 - (inside - len(claims)))
    assert max(sum(first <= at < first + MINUTE for at in starts) for first in starts) == 4


# A01
async def test_a_window_admits_its_limit_once_among_many_claimers(database: Database, clock: ManualClock) -> None:
    stores = [await database.open(clock) for _ in range(4)]
    await stores[0].declare(QUOTA)
    await given_jobs(stores[0], QUOTA, ACME, 60)
    claims = await asyncio.gather(*(claim(store, "webhooks", 3) for store in stores for _ in range(2)))
    assert sum(map(len, claims)) == 4


# A05
async def test_two_windows_and_a_bucket_on_one_key_all_hold(store: Store, clock: ManualClock) -> None:
    limits = (
        Rate(3, per="1s", by="account", rolling=True),
        Rate(10, per="10s", by="account", rolling=True),
        Rate(5, per="1s", by="account"),
    )
    policy = Policy("webhooks", limits=limits)
    await store.declare(policy)
    await given_jobs(store, policy, ACME, 60)
    starts: list[int] = []
    for _ in range(60):
        now = clock.now()
        short = 3 - sum(at + SECOND > now for at in starts)
        long = 10 - sum(at + 10 * SECOND > now for at in starts)
        claims = await claim(store, "webhooks", 100)
        assert len(claims) == min(short, long)
        starts += [now] * len(claims)
        await finish(store, claims)
        clock.advance(0.17)


async def test_a_shut_window_says_when_it_opens_and_opens_then(store: Store, clock: ManualClock) -> None:
    await store.declare(QUOTA)
    await given_jobs(store, QUOTA, ACME, 20)
    first = clock.now()
    await finish(store, await claim(store, "webhooks", 1))
    clock.advance("20s")
    await finish(store, await claim(store, "webhooks", 3))
    waiting = await claim_once(store, "webhooks", 5)
    assert waiting.claims == []
    assert waiting.next_due == first + MINUTE
    clock.set(first + MINUTE - 1)
    assert await claim(store, "webhooks", 5) == []
    clock.set(first + MINUTE)
    assert len(await claim(store, "webhooks", 5)) == 1


# A17
async def test_a_claim_given_back_before_it_started_gets_its_place_in_the_window_back(
    store: Store, clock: ManualClock
) -> None:
    await store.declare(QUOTA)
    await given_jobs(store, QUOTA, ACME, 20)
    begun = clock.now()
    held = await claim(store, "webhooks", 2)
    clock.advance("10s")
    later = await claim(store, "webhooks", 5)
    assert len(later) == 2
    await finish(store, held, Released("shutdown"))
    again = await claim(store, "webhooks", 5)
    assert ids(again) == ids(held)
    # All four were charged ten seconds after the beginning now, and none at it.
    clock.set(begun + MINUTE)
    assert await claim(store, "webhooks", 5) == []
    clock.advance("10s")
    assert len(await claim(store, "webhooks", 5)) == 4


# A17
async def test_a_failed_run_keeps_its_place_in_the_window(store: Store, clock: ManualClock) -> None:
    await store.declare(QUOTA)
    await given_jobs(store, QUOTA, ACME, 10)
    await finish(store, await claim(store, "webhooks", 3), Failed("boom", 1))
    clock.set(clock.now() + 1)
    assert len(await claim(store, "webhooks", 10)) == 1


async def test_keys_have_windows_of_their_own(store: Store) -> None:
    await store.declare(QUOTA)
    for account in ("acme", "globex", None):
        await given_jobs(store, QUOTA, {"account": account}, 9)
    assert by_key(await claim(store, "webhooks", 50)) == {"acme": 4, "globex": 4, None: 4}


@pytest.mark.parametrize(("limit", "admitted"), [(2, 0), (4, 0), (9, 5)])
async def test_another_limit_counts_what_has_started_before_it(
    store: Store, clock: ManualClock, limit: int, admitted: int
) -> None:
    await store.declare(QUOTA)
    await given_jobs(store, QUOTA, ACME, 30)
    await finish(store, await claim(store, "webhooks", 30))
    changed = Policy("webhooks", limits=(Rate(limit, per="1m", by="account", rolling=True),))
    await store.apply(changed)
    assert len(await claim(store, "webhooks", 30)) == admitted
    clock.advance("1m")
    assert len(await claim(store, "webhooks", 30)) == limit


async def test_a_restart_changes_nothing(shared_database: Database, clock: ManualClock) -> None:
    before = await shared_database.open(clock)
    await before.declare(QUOTA)
    await given_jobs(before, QUOTA, ACME, 20)
    await finish(before, await claim(before, "webhooks", 3))
    await before.close()
    after = await shared_database.open(clock)
    clock.advance("59s")
    assert len(await claim(after, "webhooks", 20)) == 1
    clock.advance("1s")
    assert len(await claim(after, "webhooks", 20)) == 3


# A14
async def test_windows_leave_nothing_behind(store: Store, clock: ManualClock) -> None:
    limits = (
        Rate(5, per="1m", by="account", rolling=True),
        Rate(7, per="1h", rolling=True),
        Concurrency(6, by="account"),
    )
    policy = Policy("webhooks", limits=limits)
    await store.declare(policy)
    await given_jobs(store, policy, ACME, 9)
    while (await store.counts("webhooks")).ready or (await store.counts("webhooks")).events:
        claims = await claim(store, "webhooks", 4)
        await finish(store, claims[1:2], Released("drain"))
        await finish(store, claims[:1] + claims[2:])
        clock.advance("20m")
    await assert_at_rest(store, policy, clock, [ACME, {"account": "other"}])
