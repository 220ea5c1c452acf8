"""Numbers that jobs bring along for their queue's policy."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from msgspec.structs import replace

from fairlane.clock import ManualClock
from fairlane.policy import Concurrency, Fair, Policy, Rate
from fairlane.policy.overrides import Kind, Override
from fairlane.scheduler.explain import explain
from fairlane.scheduler.settlement import Died, Failed, Snoozed
from fairlane.store.auditing import Note
from fairlane.store.protocol import Store
from tests.store.harness import SECOND, WORKER, Database, by_key, claim, finish, hear, new_jobs, soon


def anything(context: Any) -> int:
    return 1


SLOTS = Policy("webhooks", limits=(Concurrency(anything, by="account"),), keys=("account", "endpoint"))
NAME = "concurrency:account"
NOTE = Note(actor="ada", action="test")


async def bring(
    store: Store,
    given: dict[str, float] | None,
    count: int = 1,
    *,
    policy: Policy = SLOTS,
    account: str = "acme",
    endpoint: str = "api",
    delay: int | None = None,
) -> None:
    keys: Mapping[str, object] = {"account": account, "endpoint": endpoint}
    jobs = new_jobs(policy, {name: keys[name] for name in policy.stamped_keys}, count, delay=delay)
    await store.enqueue([replace(job, given=given) for job in jobs])


async def test_each_key_is_held_to_what_its_newest_job_brought(store: Store) -> None:
    await store.declare(SLOTS)
    await bring(store, {NAME: 1}, 9)
    await bring(store, {NAME: 3}, 9, endpoint="other")
    await bring(store, {NAME: 2}, 9, account="globex")
    await bring(store, {NAME: 0}, 9, account="stopped")
    assert by_key(await claim(store, "webhooks", 50)) == {"acme": 3, "globex": 2}


async def test_a_raised_number_starts_waiting_jobs_in_the_same_claim(store: Store) -> None:
    await store.declare(SLOTS)
    await bring(store, {NAME: 2}, 20)
    assert len(await claim(store, "webhooks", 50)) == 2
    assert await claim(store, "webhooks", 50) == []
    await bring(store, {NAME: 7})
    assert len(await claim(store, "webhooks", 50)) == 5


async def test_a_raised_number_wakes_a_waiting_worker(store: Store) -> None:
    await store.declare(SLOTS)
    await bring(store, {NAME: 1}, 9)
    running = await claim(store, "webhooks", 9)
    listener = await store.listen(WORKER)
    try:
        await hear(store, "webhooks", listener)
        await bring(store, {NAME: 3})
        await soon(listener.wait(None))
    finally:
        await listener.close()
    assert (len(running), len(await claim(store, "webhooks", 9))) == (1, 2)


async def test_a_lowered_number_stops_nothing_and_starts_nothing_until_enough_have_ended(store: Store) -> None:
    await store.declare(SLOTS)
    await bring(store, {NAME: 5}, 20)
    running = await claim(store, "webhooks", 4)
    await bring(store, {NAME: 2})
    assert await claim(store, "webhooks", 50) == []
    await finish(store, running[:3])
    assert len(await claim(store, "webhooks", 50)) == 1


async def test_rates_and_windows_are_brought_too(store: Store, clock: ManualClock) -> None:
    limits = (Rate(anything, per="1s", by="account"), Rate(anything, per="1h", by="account", rolling=True))
    policy = Policy("webhooks", limits=limits)
    await store.declare(policy)
    await bring(store, {"rate/1s:account": 2, "rolling/3600s:account": 3}, 20, policy=policy)
    assert len(await claim(store, "webhooks", 50)) == 2
    clock.advance("1s")
    assert len(await claim(store, "webhooks", 50)) == 1
    await bring(store, {"rate/1s:account": 2.5, "rolling/3600s:account": 9}, policy=policy)
    clock.advance("2s")
    assert len(await claim(store, "webhooks", 50)) == 2


async def test_a_weight_is_brought_and_changes_while_its_flow_waits(store: Store) -> None:
    policy = Policy("webhooks", fair=Fair(by="account", weight=anything, charge="count"))
    await store.declare(policy)
    for account, weight in (("acme", 3.0), ("globex", 1.0)):
        await bring(store, {"weight": weight}, 90, policy=policy, account=account)
    assert by_key(await claim(store, "webhooks", 40)) == {"acme": 30, "globex": 10}
    await bring(store, {"weight": 3.0}, policy=policy, account="globex")
    assert by_key(await claim(store, "webhooks", 40)) == {"acme": 20, "globex": 20}


async def test_a_job_that_is_due_later_brings_its_number_when_it_joins_its_lane(
    store: Store, clock: ManualClock
) -> None:
    await store.declare(SLOTS)
    await bring(store, {NAME: 3}, 1, delay=10 * SECOND)
    await bring(store, {NAME: 4}, 1, delay=10 * SECOND)
    await bring(store, {NAME: 1}, 9)
    assert len(await claim(store, "webhooks", 50)) == 1
    clock.advance("10s")
    assert len(await claim(store, "webhooks", 50)) == 3


async def test_retries_and_snoozes_do_not_bring_their_old_number_again(store: Store, clock: ManualClock) -> None:
    await store.declare(SLOTS)
    await bring(store, {NAME: 9}, 2)
    failed, snoozed = await claim(store, "webhooks", 2)
    await finish(store, [failed], Failed("boom", 5 * SECOND))
    await finish(store, [snoozed], Snoozed("later", 5 * SECOND))
    await bring(store, {NAME: 1}, 9)
    assert len(await claim(store, "webhooks", 50)) == 1
    clock.advance("5s")
    assert await claim(store, "webhooks", 50) == []


async def test_a_replayed_job_does_not_bring_its_old_number_again(store: Store, clock: ManualClock) -> None:
    await store.declare(SLOTS)
    await bring(store, {NAME: 9})
    (dead,) = await claim(store, "webhooks", 1)
    await finish(store, [dead], Died("boom"))
    await bring(store, {NAME: 1}, 9)
    assert len(await claim(store, "webhooks", 50)) == 1
    for delay in (None, SECOND):
        await store.replay([dead.id], delay)
        clock.advance("1s")
        assert await claim(store, "webhooks", 50) == []


async def test_a_number_outlives_the_idle_state_around_it(store: Store, clock: ManualClock) -> None:
    await store.declare(SLOTS)
    await bring(store, {NAME: 3})
    await finish(store, await claim(store, "webhooks", 1))
    clock.advance("20d")
    while (await store.collect("webhooks", 100)).more:
        pass
    await bring(store, None, 9)
    claims = await claim(store, "webhooks", 50)
    assert len(claims) == 3
    await finish(store, claims)


async def test_a_number_that_no_job_has_asked_for_in_a_month_is_forgotten(store: Store, clock: ManualClock) -> None:
    await store.declare(SLOTS)
    await bring(store, {NAME: 3})
    await finish(store, await claim(store, "webhooks", 1))
    await claim(store, "webhooks", 1)
    clock.advance(timedelta(days=31))
    assert (await store.collect("webhooks", 100)).gates == 1


async def test_jobs_from_before_the_policy_run_one_at_a_time_until_a_number_comes(store: Store) -> None:
    before = Policy("webhooks", limits=(Concurrency(5, by="account"),), keys=SLOTS.keys)
    await store.declare(before)
    await bring(store, None, 20)
    running = await claim(store, "webhooks", 2)
    await store.apply(SLOTS)
    assert await claim(store, "webhooks", 50) == []
    await finish(store, running)
    assert len(await claim(store, "webhooks", 50)) == 1
    await bring(store, {NAME: 4})
    assert len(await claim(store, "webhooks", 50)) == 3


async def test_a_plain_number_in_place_of_those_that_were_brought_holds_for_all(store: Store) -> None:
    await store.declare(SLOTS)
    await bring(store, {NAME: 1}, 9)
    assert len(await claim(store, "webhooks", 50)) == 1
    await store.apply(Policy("webhooks", limits=(Concurrency(4, by="account"),), keys=SLOTS.keys))
    assert len(await claim(store, "webhooks", 50)) == 3


async def test_a_worker_that_knows_only_the_stored_policy_enforces_what_was_brought(
    shared_database: Database, clock: ManualClock
) -> None:
    producer, worker = await shared_database.open(clock), await shared_database.open(clock)
    await producer.declare(SLOTS)
    stored = await worker.policy("webhooks")
    assert stored is not None
    assert [number.source for number in stored.policy.brought.values()] == [None]
    await bring(producer, {NAME: 3}, 9)
    assert len(await claim(worker, "webhooks", 9)) == 3


async def test_what_an_operator_sets_wins_over_what_jobs_bring_until_it_is_removed(store: Store) -> None:
    await store.declare(SLOTS)
    await bring(store, {NAME: 1}, 20)
    assert len(await claim(store, "webhooks", 50)) == 1
    six = Override(kind=Kind.LIMIT, limit=NAME, value=6, scope=(("account", "acme"),))
    await store.amend(["webhooks"], [six], [], NOTE)
    assert len(await claim(store, "webhooks", 50)) == 5
    await bring(store, {NAME: 9})
    assert await claim(store, "webhooks", 50) == []
    await store.amend(["webhooks"], [], [six.id], NOTE)
    assert len(await claim(store, "webhooks", 50)) == 3


async def test_a_flow_whose_weight_an_operator_has_set_takes_its_own_again_afterwards(store: Store) -> None:
    policy = Policy("webhooks", fair=Fair(by="account", weight=anything, charge="count"))
    await store.declare(policy)
    three = Override(kind=Kind.WEIGHT, value=3, scope=(("account", "acme"),))
    await store.amend(["webhooks"], [three], [], NOTE)
    for account in ("acme", "globex"):
        await bring(store, {"weight": 1.0}, 90, policy=policy, account=account)
    assert by_key(await claim(store, "webhooks", 40)) == {"acme": 30, "globex": 10}
    await store.amend(["webhooks"], [], [three.id], NOTE)
    assert by_key(await claim(store, "webhooks", 40)) == {"acme": 20, "globex": 20}


async def test_a_waiting_job_is_explained_by_the_number_that_was_brought(store: Store) -> None:
    await store.declare(SLOTS)
    await bring(store, {NAME: 2}, 5)
    assert len(await claim(store, "webhooks", 5)) == 2
    facts = await store.examine("webhooks", keys={"account": "acme"})
    assert [(hold.used, hold.bound) for hold in explain(facts).holds if hold.limit == NAME] == [(2, 2)]


async def test_what_a_producer_told_of_a_job_is_stored_with_it(store: Store) -> None:
    await store.declare(SLOTS)
    keys = {"account": "acme", "endpoint": "api"}
    (told,) = new_jobs(SLOTS, keys)
    (silent,) = new_jobs(SLOTS, keys)
    await store.enqueue([replace(told, context='{"plan":{"slots":3},"note":"\\u0000"}'), silent])
    (alone,) = new_jobs(SLOTS, keys)
    await store.enqueue([replace(alone, context='{"rpm":1.5}')])
    assert (await store.job(told.id)).context == {"plan": {"slots": 3}, "note": "\x00"}
    assert (await store.job(silent.id)).context == {}
    assert (await store.job(alone.id)).context == {"rpm": 1.5}
