"""Limits for named keys only."""

from __future__ import annotations

from fairlane.clock import ManualClock
from fairlane.policy import Concurrency, Fair, Policy, Rate
from fairlane.store.protocol import Store
from tests.store.harness import by_key, claim, finish, given_jobs

NAMED = Policy("webhooks", limits=(Concurrency({"acme": 2, 42: 1}, by="account"),))
ACCOUNTS = ("acme", 42, "other", None)


async def test_named_keys_are_held_to_their_numbers_and_the_others_to_none(store: Store) -> None:
    await store.declare(NAMED)
    for account in ACCOUNTS:
        await given_jobs(store, NAMED, {"account": account}, 6)
    claims = await claim(store, "webhooks", 50)
    assert by_key(claims) == {"acme": 2, "42": 1, "other": 6, None: 6}
    await finish(store, claims)
    assert by_key(await claim(store, "webhooks", 50)) == {"acme": 2, "42": 1}


async def test_named_rates_and_named_windows_hold_with_a_fair_share(store: Store, clock: ManualClock) -> None:
    limits = (
        Rate({"acme": 2}, per="1m", by="account"),
        Rate({"acme": 3, "42": 1}, per="1h", by="account", rolling=True),
    )
    policy = Policy("webhooks", fair=Fair(by="account"), limits=limits)
    await store.declare(policy)
    for account in ACCOUNTS:
        await given_jobs(store, policy, {"account": account}, 6)
    assert by_key(await claim(store, "webhooks", 50)) == {"acme": 2, "42": 1, "other": 6, None: 6}
    clock.advance("1m")
    assert by_key(await claim(store, "webhooks", 50)) == {"acme": 1}


async def test_a_key_that_is_named_no_longer_is_free_at_once(store: Store) -> None:
    await store.declare(NAMED)
    for account in ACCOUNTS[:2]:
        await given_jobs(store, NAMED, {"account": account}, 4)
    running = await claim(store, "webhooks", 50)
    assert by_key(running) == {"acme": 2, "42": 1}
    changed = Policy("webhooks", limits=(Concurrency({"acme": 3}, by="account"),))
    await store.apply(changed)
    assert by_key(await claim(store, "webhooks", 50)) == {"acme": 1, "42": 3}
    await finish(store, running)
    assert by_key(await claim(store, "webhooks", 50)) == {"acme": 1}


async def test_a_key_that_is_named_counts_what_it_runs_already(store: Store) -> None:
    await store.declare(NAMED)
    await given_jobs(store, NAMED, {"account": "other"}, 6)
    running = await claim(store, "webhooks", 3)
    await store.apply(Policy("webhooks", limits=(Concurrency({"other": 4}, by="account"),)))
    assert len(await claim(store, "webhooks", 50)) == 1
    await finish(store, running)
    assert len(await claim(store, "webhooks", 50)) == 2


async def test_a_limit_for_all_keys_in_place_of_named_ones_keeps_count(store: Store) -> None:
    await store.declare(NAMED)
    for account in ACCOUNTS:
        await given_jobs(store, NAMED, {"account": account}, 6)
    await claim(store, "webhooks", 50)
    await store.apply(Policy("webhooks", limits=(Concurrency(3, by="account"),)))
    assert by_key(await claim(store, "webhooks", 50)) == {"acme": 1, "42": 2}
