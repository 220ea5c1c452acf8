"""Policies in force: declared, kept, changed under way."""

from __future__ import annotations

import asyncio

import pytest

from fairlane.clock import ManualClock
from fairlane.policy import Concurrency, Fair, Policy, Rate
from fairlane.scheduler.settlement import Released
from fairlane.store import records
from fairlane.store.protocol import Store
from tests.store.harness import (
    Database,
    assert_at_rest,
    by_key,
    claim,
    finish,
    given_jobs,
    hear,
    ids,
    soon,
    worker_named,
)

KEYS = ("account", "endpoint")
ACME = {"account": "acme", "endpoint": "api"}


def policy_of(*limits: Concurrency | Rate, fair: Fair | None = None) -> Policy:
    return Policy("webhooks", fair=fair, limits=limits, keys=KEYS)


async def test_the_first_declaration_is_put_in_force(store: Store) -> None:
    policy = policy_of(Rate(2.5, per="1m", by="account"), Concurrency(3), fair=Fair(by="account", weight={"acme": 2}))
    assert await store.policy("webhooks") is None
    declared = await store.declare(policy)
    assert (declared.policy, declared.is_drift) == (policy, False)
    assert await store.policy("webhooks") == declared
    assert await store.run(records.queues()) == ["webhooks"]


async def test_declaring_the_same_again_changes_nothing(store: Store) -> None:
    first = await store.declare(policy_of(Concurrency(3)))
    assert await store.declare(policy_of(Concurrency(3))) == first


async def test_queues_are_listed_by_name(store: Store) -> None:
    for name in ("mail", "a", "webhooks"):
        await store.declare(Policy(name))
    assert await store.run(records.queues()) == ["a", "mail", "webhooks"]


async def test_a_differing_declaration_wins_on_sqlite_and_is_drift_on_postgres(
    store: Store, database: Database
) -> None:
    first = await store.declare(policy_of(Concurrency(3)))
    second = await store.declare(policy_of(Concurrency(5)))
    if database.kind == "postgres":
        assert (second.policy, second.version, second.is_drift) == (first.policy, first.version, True)
    else:
        assert (second.policy, second.is_drift) == (policy_of(Concurrency(5)), False)
        assert second.version > first.version
    in_force = await store.policy("webhooks")
    assert in_force is not None
    assert (in_force.policy, in_force.version) == (second.policy, second.version)


async def test_the_limit_in_force_is_the_one_that_policy_shows(store: Store) -> None:
    await store.declare(policy_of(Concurrency(3)))
    declared = await store.declare(policy_of(Concurrency(5)))
    await given_jobs(store, declared.policy, ACME, 10)
    (limit,) = declared.policy.limits
    assert isinstance(limit, Concurrency)
    assert len(await claim(store, "webhooks", 10)) == limit.max


async def test_an_applied_policy_is_in_force_at_once_and_ends_the_drift(store: Store) -> None:
    first = await store.declare(policy_of(Concurrency(3)))
    applied = await store.apply(policy_of(Concurrency(5)))
    assert (applied.policy, applied.is_drift) == (policy_of(Concurrency(5)), False)
    assert applied.version > first.version
    assert await store.policy("webhooks") == applied
    assert await store.declare(policy_of(Concurrency(5))) == applied


async def test_a_policy_applied_to_an_unknown_queue_makes_it_known(store: Store) -> None:
    policy = policy_of(Concurrency(1))
    await store.apply(policy)
    await given_jobs(store, policy, ACME, 2)
    assert len(await claim(store, "webhooks", 2)) == 1


async def test_every_store_sees_a_policy_that_another_has_applied(database: Database, clock: ManualClock) -> None:
    one, other = await database.open(clock), await database.open(clock)
    await one.declare(policy_of(Concurrency(3)))
    await other.declare(policy_of(Concurrency(3)))
    await given_jobs(one, policy_of(), ACME, 20)
    assert len(await claim(other, "webhooks", 20)) == 3
    await one.apply(policy_of(Concurrency(5)))
    assert len(await claim(other, "webhooks", 20)) == 2


async def test_many_first_declarations_at_once_agree(database: Database, clock: ManualClock) -> None:
    stores = [await database.open(clock) for _ in range(5)]
    declared = await asyncio.gather(*(store.declare(policy_of(Concurrency(3))) for store in stores))
    assert len({each.version for each in declared}) == 1
    assert not any(each.is_drift for each in declared)


async def test_a_policy_outlives_its_store(shared_database: Database) -> None:
    first = await shared_database.open()
    declared = await first.declare(policy_of(Rate(3, per="7s", burst=9, by=KEYS), fair=Fair(by=KEYS, charge="count")))
    await shared_database.close()
    assert await (await shared_database.open()).policy("webhooks") == declared


# A21
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (policy_of(Concurrency(2, by="account")), policy_of(Concurrency(2, by="endpoint"))),
        (policy_of(Concurrency(2, by="account")), policy_of(Concurrency(2, by="account"), fair=Fair(by="account"))),
        (policy_of(Concurrency(2), fair=Fair(by="endpoint")), policy_of(Concurrency(3, by=KEYS))),
        (policy_of(), policy_of(Concurrency(2, by="account"), Concurrency(4))),
        (policy_of(Concurrency(2, by="account"), Concurrency(4)), policy_of()),
    ],
    ids=["scope", "level", "queue-to-lane", "added", "removed"],
)
async def test_what_was_acquired_under_one_policy_is_released_under_another(
    store: Store, clock: ManualClock, before: Policy, after: Policy
) -> None:
    await store.apply(before)
    keys = [{"account": account, "endpoint": endpoint} for account in "ab" for endpoint in "xy"]
    for each in keys:
        await given_jobs(store, before, each, 3)
    claims = await claim(store, "webhooks", 12)
    await store.apply(after)
    assert (await store.counts("webhooks")).running == len(claims)
    await finish(store, claims[1:])
    await finish(store, claims[:1], Released("drain"))
    while claims := await claim(store, "webhooks", 12):
        await finish(store, claims)
    await assert_at_rest(store, after, clock, keys)
    await store.apply(before)
    await assert_at_rest(store, before, clock, keys)


# A21
async def test_a_limit_that_is_added_counts_what_already_runs(store: Store) -> None:
    await store.declare(policy_of())
    await given_jobs(store, policy_of(), ACME, 10)
    held = await claim(store, "webhooks", 3)
    await store.apply(policy_of(Concurrency(4, by="account")))
    assert len(await claim(store, "webhooks", 10)) == 1
    await finish(store, held)
    assert len(await claim(store, "webhooks", 10)) == 3


# A21
async def test_a_policy_may_change_while_settlements_are_not_yet_folded(store: Store, clock: ManualClock) -> None:
    policy = policy_of(Concurrency(3, by="account"), Rate(6, per="1h", by="endpoint"))
    await store.declare(policy)
    await given_jobs(store, policy, ACME, 10)
    claims = await claim(store, "webhooks", 10)
    await finish(store, claims[:2])
    await finish(store, claims[2:], Released("drain"))
    wider = policy_of(Concurrency(5, by="account"), Rate(6, per="1h", by="endpoint"))
    await store.apply(wider)
    assert len(await claim(store, "webhooks", 10)) == 4  # two tokens were spent, one was given back


# A21
async def test_a_rate_keeps_its_tokens_when_another_limit_changes(store: Store) -> None:
    rate = Rate(5, per="1h", by="account")
    await store.declare(policy_of(rate))
    await given_jobs(store, policy_of(), ACME, 20)
    await finish(store, await claim(store, "webhooks", 3))
    await store.apply(policy_of(rate, Concurrency(50)))
    assert len(await claim(store, "webhooks", 20)) == 2


# A21, A17
@pytest.mark.parametrize("by", ["account", None])
async def test_a_claim_given_back_is_refunded_nothing_by_a_rate_that_never_charged_it(
    store: Store, by: str | None
) -> None:
    await store.declare(policy_of())
    await given_jobs(store, policy_of(), ACME, 10)
    held = await claim(store, "webhooks", 1)
    await store.apply(policy_of(Rate(3, per="1h", by=by)))
    assert len(await claim(store, "webhooks", 10)) == 3
    await finish(store, held, Released("drain"))
    assert await claim(store, "webhooks", 10) == [], "a token came back that was never taken"


# A21
async def test_jobs_enqueued_under_a_policy_with_fewer_keys_are_still_served(store: Store, clock: ManualClock) -> None:
    narrow = Policy("webhooks", limits=(Concurrency(2, by="account"),))
    wide = Policy("webhooks", limits=(Concurrency(2, by="account"), Concurrency(1, by="endpoint")))
    await store.declare(narrow)
    old = await given_jobs(store, narrow, ACME, 3)
    held = await claim(store, "webhooks", 1)
    await store.apply(wide, accept_missing_keys=True)
    new = await given_jobs(store, wide, {"account": "acme", "endpoint": "other"}, 3)
    started = ids(held)
    await finish(store, held)
    while claims := await claim(store, "webhooks", 10):
        assert len(claims) <= 2
        started += ids(claims)
        await finish(store, claims)
    assert sorted(started) == sorted(old + new)
    await assert_at_rest(store, wide, clock, [ACME])


# A23
@pytest.mark.parametrize("by", ["account", None])
async def test_lowering_a_limit_stops_new_starts_until_the_count_has_drained(store: Store, by: str | None) -> None:
    await store.declare(policy_of(Concurrency(5, by=by)))
    await given_jobs(store, policy_of(), ACME, 20)
    held = await claim(store, "webhooks", 20)
    assert len(held) == 5
    await store.apply(policy_of(Concurrency(2, by=by)))
    assert await claim(store, "webhooks", 20) == []
    assert (await store.counts("webhooks")).running == 5
    assert sorted(await store.run(records.held([(each.id, each.lease) for each in held]))) == sorted(ids(held))
    for left, started in ((4, 0), (3, 0), (2, 0), (1, 1)):
        await finish(store, [held.pop()])
        assert len(held) == left
        fresh = await claim(store, "webhooks", 20)
        assert len(fresh) == started


# A24
@pytest.mark.parametrize(
    ("before", "after", "admitted"),
    [
        (Concurrency(2, by="account"), (Concurrency(5, by="account"),), 3),
        (Concurrency(2), (Concurrency(5),), 3),
        (Concurrency(0, by="account"), (Concurrency(1, by="account"),), 1),
        (Concurrency(0), (Concurrency(1),), 1),
        (Concurrency(2, by="account"), (), 18),
        (Rate(2, per="1h", by="account"), (), 18),
        (Rate(2, per="1h", burst=2, by="account"), (Rate(2, per="1h", burst=6, by="account"),), 4),
        (Rate(2, per="1h", by="account"), (Rate(9, per="1m", by="account"),), 9),
    ],
    ids=repr,
)
@pytest.mark.parametrize("fair", [None, Fair(by="account")], ids=["fifo", "fair"])
async def test_raising_or_deleting_a_limit_wakes_what_waited_on_it(
    store: Store,
    before: Concurrency | Rate,
    after: tuple[Concurrency | Rate, ...],
    admitted: int,
    fair: Fair | None,
) -> None:
    await store.declare(policy_of(before, fair=fair))
    await given_jobs(store, policy_of(fair=fair), ACME, 20)
    await claim(store, "webhooks", 20)
    assert await claim(store, "webhooks", 20) == []
    await store.apply(policy_of(*after, fair=fair))
    assert len(await claim(store, "webhooks", 20)) == admitted


# A24
async def test_raising_a_limit_wakes_an_idle_worker(database: Database, clock: ManualClock) -> None:
    store, operator = await database.open(clock), await database.open(clock)
    await store.declare(policy_of(Concurrency(1, by="account")))
    await given_jobs(store, policy_of(), ACME, 2)
    await claim(store, "webhooks", 1)
    worker = worker_named("idle")
    listener = await store.listen(worker)
    await hear(store, "webhooks", listener, worker=worker)
    waiting = asyncio.ensure_future(listener.wait(None))
    await operator.apply(policy_of(Concurrency(2, by="account")))
    assert await soon(waiting) is True
    assert len(await claim(store, "webhooks", 1)) == 1
    await listener.close()


# A24
async def test_changing_the_fair_key_keeps_every_job(store: Store) -> None:
    await store.declare(policy_of(fair=Fair(by="account", charge="count")))
    for account in "ab":
        for endpoint in "xyz":
            await given_jobs(store, policy_of(), {"account": account, "endpoint": endpoint}, 10)
    await finish(store, await claim(store, "webhooks", 7))
    await store.apply(policy_of(fair=Fair(by="endpoint", charge="count")))
    turns = await claim(store, "webhooks", 12)
    assert by_key(turns, "endpoint") == {"x": 4, "y": 4, "z": 4}
    assert len(await claim(store, "webhooks", 100)) == 60 - 7 - 12


# A24
async def test_changed_weights_hold_from_the_next_claim_on(store: Store) -> None:
    await store.declare(policy_of(fair=Fair(by="account", charge="count")))
    for account in ("gold", "plain"):
        await given_jobs(store, policy_of(), {"account": account, "endpoint": "api"}, 200)
    assert by_key(await claim(store, "webhooks", 20)) == {"gold": 10, "plain": 10}
    await store.apply(policy_of(fair=Fair(by="account", charge="count", weight={"gold": 3})))
    assert by_key(await claim(store, "webhooks", 80))["gold"] == pytest.approx(60, abs=3)
