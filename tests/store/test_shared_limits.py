"""Limits that several queues share by name: one limit, one state, exact over all of them."""

from __future__ import annotations

import pytest

from fairlane.clock import ManualClock
from fairlane.errors import InvalidPolicy
from fairlane.job import Claim
from fairlane.policy import Concurrency, Fair, Limit, Policy, Rate
from fairlane.policy.gates import Reason
from fairlane.scheduler.explain import explain
from fairlane.scheduler.settlement import Failed, Released
from fairlane.store import operators, records
from fairlane.store.audit import Note
from fairlane.store.protocol import QueueCounts, Store
from tests.store.harness import (
    LEASE,
    Database,
    claim,
    claim_once,
    finish,
    given_jobs,
    hear,
    ids,
    soon,
    worker_named,
)

GPU = Concurrency(4, name="gpu")
VENDOR = Rate(6, per="1m", name="vendor", by="account")


def sharing(*limits: Limit, fair: Fair | None = None) -> tuple[Policy, Policy]:
    return Policy("train", fair, limits, ("account",)), Policy("serve", fair, limits, ("account",))


async def given_queues(store: Store, *policies: Policy) -> None:
    for policy in policies:
        await store.declare(policy)


async def fill(store: Store, queue: str, most: int = 20) -> list[Claim]:
    return await claim(store, queue, most)


async def assert_shared_at_rest(store: Store, policies: tuple[Policy, ...], most: int) -> None:
    """A14: nothing runs in any queue, so each of them alone may start as many as the limit says."""
    for policy in policies:
        assert await fill(store, policy.queue) == []
    for policy in policies:
        await given_jobs(store, policy, {"account": "rest"}, most + 1)
        claims = await fill(store, policy.queue)
        assert len(claims) == most
        await finish(store, claims)
        await finish(store, await fill(store, policy.queue))
        assert await fill(store, policy.queue) == []
        assert await store.counts(policy.queue) == QueueCounts(ready=0, running=0, parked_lanes=0, events=0)


# A09
@pytest.mark.parametrize("limit", [GPU, Concurrency(4, by="account", name="gpu")], ids=["keyless", "keyed"])
@pytest.mark.parametrize("fair", [None, Fair(by="account")], ids=["fifo", "fair"])
async def test_a_shared_limit_counts_what_runs_in_all_its_queues(store: Store, limit: Limit, fair: Fair | None) -> None:
    train, serve = sharing(limit, fair=fair)
    await given_queues(store, train, serve)
    await given_jobs(store, train, {"account": "acme"}, 10)
    await given_jobs(store, serve, {"account": "acme"}, 10)
    first = await fill(store, "train", 3)
    second = await fill(store, "serve")
    assert (len(first), len(second)) == (3, 1)
    assert await fill(store, "train") == []
    await finish(store, first)
    third = await fill(store, "serve")
    assert len(third) == 3
    await finish(store, second + third)
    while claims := await fill(store, "train") + await fill(store, "serve"):
        assert len(claims) <= 4
        await finish(store, claims)
    await assert_shared_at_rest(store, (train, serve), 4)


async def test_keys_of_a_shared_limit_are_apart(store: Store) -> None:
    train, serve = sharing(Concurrency(2, by="account", name="gpu"))
    await given_queues(store, train, serve)
    for account in ("acme", "bolt"):
        await given_jobs(store, train, {"account": account}, 3)
        await given_jobs(store, serve, {"account": account}, 3)
    assert len(await fill(store, "train")) == 4
    assert await fill(store, "serve") == []


# A01, A02, A17
async def test_a_shared_rate_has_one_bucket_for_all_its_queues(store: Store, clock: ManualClock) -> None:
    train, serve = sharing(VENDOR)
    await given_queues(store, train, serve)
    await given_jobs(store, train, {"account": "acme"}, 10)
    await given_jobs(store, serve, {"account": "acme"}, 10)
    first = await fill(store, "train", 4)
    assert len(await fill(store, "serve")) == 2
    assert await fill(store, "train") == []
    await finish(store, first[:1], Released("a drain"))
    assert len(await fill(store, "serve")) == 1
    assert await fill(store, "train") == []
    clock.advance("10s")
    assert len(await fill(store, "train")) == 1
    assert await fill(store, "serve") == []


async def test_a_queue_without_workers_gives_back_what_it_held(store: Store, clock: ManualClock) -> None:
    """Its claims end by their leases alone, and the other queue folds what they held."""
    train, serve = sharing(GPU)
    await given_queues(store, train, serve)
    await given_jobs(store, train, {"account": "acme"}, 4, max_attempts=1)
    await given_jobs(store, serve, {"account": "acme"}, 4)
    assert len(await fill(store, "train")) == 4
    assert await fill(store, "serve") == []
    clock.advance(LEASE * 2)
    assert len((await store.reap()).settled) == 4
    assert len(await fill(store, "serve")) == 4


# A13, A25
async def test_every_end_of_a_claim_gives_its_slot_back(store: Store, clock: ManualClock) -> None:
    train, serve = sharing(GPU)
    await given_queues(store, train, serve)
    jobs = await given_jobs(store, train, {"account": "acme"}, 4)
    await given_jobs(store, serve, {"account": "acme"}, 12)
    claims = {each.id: each for each in await fill(store, "train")}
    await store.cancel(jobs[0])
    await finish(store, [claims[jobs[0]]], Failed("it was asked to stop", 0))
    await finish(store, [claims[jobs[1]]], Failed("no luck", 60_000_000))
    await finish(store, [claims[jobs[2]]], Released("a drain"))
    assert len(await fill(store, "serve", 12)) == 3
    clock.advance(LEASE * 2)
    await store.reap()
    held = await fill(store, "serve", 12)
    assert len(held) == 4


async def test_releases_in_one_queue_wake_a_worker_of_the_other(store: Store) -> None:
    train, serve = sharing(Concurrency(1, by="account", name="gpu"))
    await given_queues(store, train, serve)
    await given_jobs(store, train, {"account": "acme"})
    running = await fill(store, "train")
    (waiting,) = await given_jobs(store, serve, {"account": "acme"})
    worker = worker_named("idle")
    listener = await store.listen(worker)
    await hear(store, "serve", listener, worker=worker)
    await finish(store, running)
    assert await soon(listener.wait(None))
    assert ids(await claim(store, "serve", worker=worker)) == [waiting]
    await listener.close()


@pytest.mark.parametrize("limit", [GPU, Concurrency(4, by="account", name="gpu")], ids=["keyless", "keyed"])
async def test_no_queue_takes_it_all_while_another_waits(store: Store, limit: Limit) -> None:
    train, serve = sharing(limit)
    await given_queues(store, train, serve)
    await given_jobs(store, train, {"account": "acme"}, 60)
    running = await fill(store, "train")
    await given_jobs(store, serve, {"account": "acme"}, 60)
    worker = worker_named("idle")
    listener = await store.listen(worker)
    await hear(store, "serve", listener, worker=worker)
    started = {"train": 0, "serve": 0}
    for _ in range(10):
        # One that is always there first, and one that comes when it is called.
        await finish(store, running)
        running = await claim(store, "train", 4)
        started["train"] += len(running)
        assert await soon(listener.wait(None))
        others: list[Claim] = []
        while brought := (await claim_once(store, "serve", 10, worker=worker, listener=listener)).claims:
            others += brought
        started["serve"] += len(others)
        assert len(running) + len(others) == 4
        running += others
    assert abs(started["train"] - started["serve"]) <= 4, started
    await listener.close()


async def test_a_part_that_is_not_taken_goes_to_the_others(store: Store, clock: ManualClock) -> None:
    train, serve = sharing(GPU)
    await given_queues(store, train, serve)
    await given_jobs(store, train, {"account": "acme"}, 60)
    running = await fill(store, "train")
    await given_jobs(store, serve, {"account": "acme"}, 60)
    worker = worker_named("idle, then gone")
    listener = await store.listen(worker)
    await hear(store, "serve", listener, worker=worker)
    await finish(store, running)
    brought = await claim_once(store, "train", 4)
    assert len(brought.claims) == 2
    assert await claim(store, "train", 2) == []
    due = (await claim_once(store, "train", 2)).next_due
    assert due is not None
    clock.advance((due - clock.now()) / 1_000_000)
    assert len(await claim(store, "train", 4)) == 2
    await listener.close()


async def test_what_one_queue_leaves_the_other_takes_at_once(store: Store) -> None:
    """F14, between queues: the one that is rung has less to do than its part."""
    train, serve = sharing(GPU)
    await given_queues(store, train, serve)
    await given_jobs(store, train, {"account": "acme"}, 60)
    running = await fill(store, "train")
    (last,) = await given_jobs(store, serve, {"account": "acme"}, 1)
    here, there = worker_named("here"), worker_named("there")
    listeners = [await store.listen(here), await store.listen(there)]
    await hear(store, "serve", listeners[1], worker=there)
    await hear(store, "train", listeners[0], worker=here)
    await finish(store, running)
    first = (await claim_once(store, "train", 9, worker=here, listener=listeners[0])).claims
    assert len(first) == 2
    assert await soon(listeners[1].wait(None))
    second = (await claim_once(store, "serve", 9, worker=there, listener=listeners[1])).claims
    assert ids(second) == [last]
    assert await soon(listeners[0].wait(None))
    assert len(await claim(store, "train", 9, worker=here)) == 1
    for listener in listeners:
        await listener.close()


# A24
async def test_raising_the_bound_wakes_the_lanes_of_every_queue(store: Store) -> None:
    train, serve = sharing(Concurrency(2, by="account", name="gpu"))
    await given_queues(store, train, serve)
    await given_jobs(store, train, {"account": "acme"}, 10)
    await given_jobs(store, serve, {"account": "acme"}, 10)
    assert len(await fill(store, "train")) == 2
    assert await fill(store, "serve") == []
    worker = worker_named("idle")
    listener = await store.listen(worker)
    await hear(store, "serve", listener, worker=worker)
    more = sharing(Concurrency(5, by="account", name="gpu"))
    await store.apply(more[0])
    assert await soon(listener.wait(None))
    assert len(await claim(store, "serve", 10, worker=worker)) == 3
    assert await fill(store, "train") == []
    in_force = await store.policy("serve")
    assert in_force is not None
    assert in_force.policy == more[1]
    assert await store.declare(more[1]) == in_force
    await listener.close()


# A23
async def test_lowering_the_bound_stops_every_queue_until_enough_has_ended(store: Store) -> None:
    train, serve = sharing(GPU)
    await given_queues(store, train, serve)
    await given_jobs(store, train, {"account": "acme"}, 10)
    await given_jobs(store, serve, {"account": "acme"}, 10)
    running = await fill(store, "train")
    await store.apply(sharing(Concurrency(2, name="gpu"))[1])
    await finish(store, running[:2])
    assert await fill(store, "train") + await fill(store, "serve") == []
    await finish(store, running[2:3])
    assert len(await fill(store, "train") + await fill(store, "serve")) == 1


async def test_a_limit_that_a_busy_queue_joins_counts_what_runs_there(store: Store) -> None:
    _, serve = sharing(GPU)
    alone = Policy("train", keys=("account",))
    await given_queues(store, alone, serve)
    await given_jobs(store, alone, {"account": "acme"}, 6)
    running = await fill(store, "train", 3)
    train = sharing(GPU)[0]
    await store.apply(train)
    await given_jobs(store, serve, {"account": "acme"}, 10)
    first = await fill(store, "serve")
    assert len(first) == 1
    await finish(store, running[:2])
    second = await fill(store, "serve")
    assert len(second) == 2
    await finish(store, running[2:] + first + second)
    while claims := await fill(store, "train") + await fill(store, "serve"):
        await finish(store, claims)
    await assert_shared_at_rest(store, (train, serve), 4)


async def test_a_limit_that_a_queue_leaves_counts_its_running_jobs_to_their_end(store: Store) -> None:
    train, serve = sharing(GPU)
    await given_queues(store, train, serve)
    await given_jobs(store, train, {"account": "acme"}, 10)
    await given_jobs(store, serve, {"account": "acme"}, 10)
    running = await fill(store, "train", 3)
    await store.apply(Policy("train", keys=("account",)))
    assert len(await fill(store, "serve")) == 1
    assert len(await fill(store, "train")) == 7
    await finish(store, running)
    assert len(await fill(store, "serve")) == 3


async def test_queues_that_mean_different_limits_by_one_name_are_refused(store: Store) -> None:
    await store.declare(Policy("train", limits=(GPU,)))
    for other in (Rate(4, per="1s", name="gpu"), Concurrency(4, by="account", name="gpu")):
        with pytest.raises(InvalidPolicy, match=r"'serve'.*'train'.*another name"):
            await store.declare(Policy("serve", limits=(other,)))
    assert await store.run(records.queues()) == ["train"]


async def test_the_bound_of_a_name_is_stored_once(store: Store, database: Database) -> None:
    await store.declare(Policy("train", limits=(GPU,)))
    declared = await store.declare(Policy("serve", limits=(Concurrency(9, name="gpu"),)))
    if database.kind == "postgres":
        assert (declared.policy.limits, declared.is_drift) == ((GPU,), True)
        await store.apply(Policy("serve", limits=(Concurrency(9, name="gpu"),)))
    for queue in ("train", "serve"):
        in_force = await store.policy(queue)
        assert in_force is not None
        assert in_force.policy.limits == (Concurrency(9, name="gpu"),)


async def test_limits_of_several_names_in_any_order_all_hold(store: Store) -> None:
    small, large = Concurrency(2, name="a"), Concurrency(3, by="account", name="b")
    train = Policy("train", limits=(small, large))
    serve = Policy("serve", limits=(large, small))
    await given_queues(store, train, serve)
    await given_jobs(store, train, {"account": "acme"}, 5)
    await given_jobs(store, serve, {"account": "acme"}, 5)
    seen = []
    while claims := await fill(store, "train", 1) + await fill(store, "serve"):
        assert len(claims) == 2
        seen += claims
        await finish(store, claims)
    assert len(seen) == 10


# A14
async def test_shared_gates_at_rest_are_collected(store: Store, clock: ManualClock) -> None:
    train, serve = sharing(Concurrency(4, by="account", name="gpu"))
    await given_queues(store, train, serve)
    for account in range(5):
        await given_jobs(store, train, {"account": account}, 2)
    await finish(store, await fill(store, "train"))
    assert await fill(store, "serve") == []
    assert await fill(store, "train") == []
    assert (await store.collect("train")).gates == 5
    assert (await store.collect("train")).gates == 0


async def test_a_waiting_job_says_that_another_queue_holds_what_it_waits_for(store: Store) -> None:
    train, serve = sharing(Concurrency(2, by="account", name="gpu"))
    await given_queues(store, train, serve)
    await given_jobs(store, train, {"account": "acme"}, 2)
    (waiting,) = await given_jobs(store, serve, {"account": "acme"})
    running = await fill(store, "train")
    assert await fill(store, "serve") == []
    holds = explain(await store.ask(lambda moment: moment.examine(None, waiting, {}))).holds
    assert [(hold.limit, hold.used, hold.bound) for hold in holds if hold.reason is Reason.CONCURRENCY] == [
        ("concurrency:account@gpu", 2, 2)
    ]
    # Looking folds nothing: the one who claims still finds the release.
    await finish(store, running)
    assert Reason.CONCURRENCY not in explain(await store.ask(lambda moment: moment.examine(None, waiting, {}))).reasons
    assert ids(await fill(store, "serve")) == [waiting]


# A10
async def test_a_forced_start_is_counted_by_every_queue(store: Store) -> None:
    train, serve = sharing(Concurrency(1, name="gpu"))
    await given_queues(store, train, serve)
    await given_jobs(store, train, {"account": "acme"})
    first = await fill(store, "train")
    (forced, _) = await given_jobs(store, serve, {"account": "acme"}, 2)
    await store.run(operators.force([forced], Note(actor="ada", action="force")))
    second = await fill(store, "serve")
    assert ids(second) == [forced]
    await finish(store, first)
    assert await fill(store, "serve") == []
    await finish(store, second)
    assert len(await fill(store, "serve")) == 1
