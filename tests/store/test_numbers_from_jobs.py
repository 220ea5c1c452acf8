"""Numbers that jobs bring along for their queue's policy."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any, NamedTuple
from uuid import UUID, uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fairlane import App
from fairlane.clock import ManualClock
from fairlane.policy import Concurrency, Fair, Policy, Rate
from fairlane.policy.overrides import Kind, Override
from fairlane.scheduler.explain import explain
from fairlane.scheduler.settlement import Died, Failed, RunOutcome, Snoozed
from fairlane.store import operators
from fairlane.store.audit import Note
from fairlane.store.protocol import Store
from tests.model import boards
from tests.store.by_hand import url_of
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
    jobs = new_jobs(policy, {name: keys[name] for name in policy.keys_of_job}, count, delay=delay)
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


async def test_an_old_job_that_comes_late_does_not_take_a_newer_number_back(store: Store, clock: ManualClock) -> None:
    """U01."""
    await store.declare(SLOTS)
    await bring(store, {NAME: 1}, delay=10 * SECOND)
    await bring(store, {NAME: 9}, delay=10 * SECOND, endpoint="other")
    clock.advance("1s")
    await bring(store, {NAME: 5}, 20)
    claims = await claim(store, "webhooks", 50)
    assert len(claims) == 5
    clock.advance("10s")
    await finish(store, claims)
    assert len(await claim(store, "webhooks", 50)) == 5


async def test_the_number_of_a_job_that_is_due_later_holds_from_its_enqueue_on(
    store: Store, clock: ManualClock
) -> None:
    """U01."""
    await store.declare(SLOTS)
    await bring(store, {NAME: 1}, 9)
    await bring(store, {NAME: 3}, delay=10 * SECOND)
    claims = await claim(store, "webhooks", 50)
    assert len(claims) == 3
    await finish(store, claims)
    clock.advance("20d")
    while (await store.collect("webhooks", 100)).more:
        pass
    assert len(await claim(store, "webhooks", 50)) == 3


async def test_an_old_weight_that_comes_late_does_not_take_a_newer_one_back(store: Store, clock: ManualClock) -> None:
    """U01."""
    policy = Policy("webhooks", fair=Fair(by="account", weight=anything, charge="count"))
    await store.declare(policy)
    await bring(store, {"weight": 1.0}, policy=policy, account="acme", delay=SECOND)
    await bring(store, {"weight": 3.0}, 90, policy=policy, account="acme")
    await bring(store, {"weight": 1.0}, 90, policy=policy, account="globex")
    assert by_key(await claim(store, "webhooks", 40)) == {"acme": 30, "globex": 10}
    clock.advance("1s")
    assert by_key(await claim(store, "webhooks", 40)) == {"acme": 30, "globex": 10}


async def test_a_weight_outlives_the_idle_state_around_it(store: Store, clock: ManualClock) -> None:
    policy = Policy("webhooks", fair=Fair(by="account", weight=anything, charge="count"))
    await store.declare(policy)
    await bring(store, {"weight": 3.0}, policy=policy)
    await finish(store, await claim(store, "webhooks", 1))
    await bring(store, {"weight": 1.0}, policy=policy, account="globex")
    await finish(store, await claim(store, "webhooks", 1))
    clock.advance("20d")
    for _ in range(3):
        await store.collect("webhooks", 100)
    for account in ("acme", "globex"):
        await bring(store, None, 90, policy=policy, account=account)
    assert by_key(await claim(store, "webhooks", 40)) == {"acme": 30, "globex": 10}


async def test_a_weight_that_no_job_has_asked_for_in_a_month_is_forgotten(store: Store, clock: ManualClock) -> None:
    policy = Policy("webhooks", fair=Fair(by="account", weight=anything, charge="count"))
    await store.declare(policy)
    await bring(store, {"weight": 3.0}, policy=policy)
    await finish(store, await claim(store, "webhooks", 1))
    await bring(store, None, 9, policy=policy, account="globex")
    await finish(store, await claim(store, "webhooks", 9))
    await claim(store, "webhooks", 1)
    await boards.checkpoint(store, "webhooks")
    removed = []
    for days in (20, 11):
        clock.advance(timedelta(days=days))
        removed.append(sum([(await store.collect("webhooks", 100)).flows for _ in range(3)]))
    assert removed == [0, 1], "the flow of globex is ahead of the queue's virtual time, and stays"


@pytest.mark.parametrize("count", [1, 3, 400], ids=["one", "some", "copied"])
async def test_in_a_bulk_the_last_number_of_a_key_holds_whatever_its_lane_and_delay(store: Store, count: int) -> None:
    """U01."""
    await store.declare(SLOTS)
    lanes = [{"account": "acme", "endpoint": endpoint} for endpoint in ("zz", "aa", "mm")]
    late, other, last = (new_jobs(SLOTS, keys, count) for keys in lanes)
    bulk = [replace(job, given={NAME: 9}, delay=SECOND) for job in late]
    bulk += [replace(job, given={NAME: 7}) for job in other]
    bulk += [replace(job, given={NAME: 2}) for job in last]
    await store.enqueue(bulk)
    assert len(await claim(store, "webhooks", 50)) == 2


async def test_a_transaction_that_commits_late_does_not_take_a_newer_number_back(
    shared_database: Database, clock: ManualClock
) -> None:
    """U01: when a number was given decides, and not when it could be seen."""
    if shared_database.kind != "postgres":
        pytest.skip("SQLite has one writer at a time")
    store = await shared_database.open(clock)
    await store.declare(SLOTS)
    keys = {"account": "acme", "endpoint": "api"}
    async with shared_database.transaction() as open_one:
        (early,) = new_jobs(SLOTS, keys)
        await store.enqueue([replace(early, given={NAME: 1})], open_one.tx)
        await bring(store, {NAME: 4}, 9)
        await open_one.commit()
    assert len(await claim(store, "webhooks", 50)) == 4


class Step(NamedTuple):
    """Something that happens to a queue whose jobs bring numbers along."""

    what: str
    account: str
    number: int
    delay: int | None
    jobs: int


steps = st.builds(
    Step,
    what=st.sampled_from(["enqueue", "enqueue", "enqueue", "done", "fail", "snooze", "die", "replay", "hurry", "wait"]),
    account=st.sampled_from("ab"),
    number=st.integers(1, 6),
    delay=st.sampled_from([None, None, SECOND, 5 * SECOND, 60 * SECOND]),
    jobs=st.integers(1, 4),
)


@pytest.mark.parametrize("kind", ["limit", "weight"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(life=st.lists(steps, min_size=3, max_size=14))
def test_whatever_happens_the_number_of_the_latest_enqueue_holds(place: Database, kind: str, life: list[Step]) -> None:
    """U01: jobs that are delayed, retried, snoozed, replayed and hurried come late, and bring nothing back."""
    with asyncio.Runner() as loop:
        loop.run(_live(place, kind, life))


async def _live(place: Database, kind: str, life: list[Step]) -> None:
    clock = ManualClock()
    store = await place.open(clock)
    try:
        queue = f"q{uuid4().hex}"
        limit, fair = Concurrency(anything, by="account"), Fair(by="account", weight=anything, charge="count")
        policy = Policy(queue, limits=(limit,)) if kind == "limit" else Policy(queue, fair=fair)
        name = NAME if kind == "limit" else "weight"
        await store.declare(policy)
        latest: dict[str, int] = {}
        dead: list[UUID] = []
        known: list[UUID] = []
        for step in life:
            if step.what == "enqueue":
                jobs = new_jobs(policy, {"account": step.account}, step.jobs, delay=step.delay)
                numbers = range(step.number, step.number + step.jobs)
                await store.enqueue(
                    [replace(job, given={name: number}) for job, number in zip(jobs, numbers, strict=True)]
                )
                latest[step.account] = numbers[-1]
                known += [job.id for job in jobs]
            elif step.what == "replay":
                await store.replay(dead, step.delay)
            elif step.what == "hurry":
                await store.run(operators.retry_now(known[-5:]))
            elif step.what == "wait":
                clock.advance("2s")
            else:
                ends: dict[str, RunOutcome] = {
                    "fail": Failed("no", SECOND),
                    "snooze": Snoozed("", SECOND),
                    "die": Died("no"),
                }
                claims = await claim(store, queue, step.jobs)
                await finish(store, claims, ends.get(step.what))
                if step.what == "die":
                    dead += [each.id for each in claims]
        clock.advance("1h")
        while claims := await claim(store, queue, 50):
            await finish(store, claims)
        for account in latest:
            await store.enqueue(new_jobs(policy, {"account": account}, 100))
        if kind == "limit":
            assert by_key(await claim(store, queue, 100)) == latest
        elif len(latest) == 2:
            await claim(store, queue, 30)  # whoever was ahead of the other is not any more
            share = by_key(await claim(store, queue, 4 * sum(latest.values())))
            assert all(abs(share[each] - 4 * weight) <= 1 for each, weight in latest.items()), (share, latest)
    finally:
        await place.close()


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
    await store.change_overrides(["webhooks"], [six], [], NOTE)
    assert len(await claim(store, "webhooks", 50)) == 5
    await bring(store, {NAME: 9})
    assert await claim(store, "webhooks", 50) == []
    await store.change_overrides(["webhooks"], [], [six.id], NOTE)
    assert len(await claim(store, "webhooks", 50)) == 3


async def test_a_flow_whose_weight_an_operator_has_set_takes_its_own_again_afterwards(store: Store) -> None:
    policy = Policy("webhooks", fair=Fair(by="account", weight=anything, charge="count"))
    await store.declare(policy)
    three = Override(kind=Kind.WEIGHT, value=3, scope=(("account", "acme"),))
    await store.change_overrides(["webhooks"], [three], [], NOTE)
    for account in ("acme", "globex"):
        await bring(store, {"weight": 1.0}, 90, policy=policy, account=account)
    assert by_key(await claim(store, "webhooks", 40)) == {"acme": 30, "globex": 10}
    await store.change_overrides(["webhooks"], [], [three.id], NOTE)
    assert by_key(await claim(store, "webhooks", 40)) == {"acme": 20, "globex": 20}


async def test_a_waiting_job_is_explained_by_the_number_that_was_brought(store: Store) -> None:
    await store.declare(SLOTS)
    await bring(store, {NAME: 2}, 5)
    assert len(await claim(store, "webhooks", 5)) == 2
    facts = await store.ask(lambda moment: moment.examine("webhooks", keys={"account": "acme"}))
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


@pytest.mark.parametrize("how", ["forced", "retried now", "another policy", "other partitions"])
async def test_what_operators_do_with_an_old_job_does_not_take_a_newer_number_back(
    shared_database: Database, clock: ManualClock, stack: AsyncExitStack, producers_know_at_once: None, how: str
) -> None:
    """U01."""
    app = await stack.enter_async_context(App(url_of(shared_database), clock=clock))
    slots = Concurrency(lambda context: context["slots"], by="account")
    queue = app.queue("webhooks", limits=[slots])

    @app.task(queue="webhooks")
    async def deliver(account: str) -> None: ...

    who: Any = {"actor": "ada", "reason": "a test"}
    old = await deliver.using(context={"slots": 1}, delay="1h").enqueue("acme")
    clock.advance("10m")
    await deliver.using(context={"slots": 5}).enqueue_many([deliver.call("acme")] * 20)
    match how:
        case "forced":
            await app.operations.jobs.force([old.id], **who)
        case "retried now":
            await app.operations.jobs.retry([old.id], **who)
        case "another policy":
            other = await stack.enter_async_context(App(url_of(shared_database), clock=clock))
            other.queue("webhooks", fair=Fair(by="account"), limits=[slots, Rate(1_000, per="1s")])
            await other.operations.policies.apply(**who)
        case "other partitions":
            await app.operations.partitions.change("webhooks", 4, by=["account"], **who)
    for _ in range(2):
        clock.advance("2h")
        held = await queue.claim(20)
        assert len(held) == 5
        for each in held:
            await each.snooze("1m")
