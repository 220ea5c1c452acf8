"""Gates held against the jobs that run: what is wrong is found, told, put right and recorded, on every store (A14)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fairlane.clock import ManualClock
from fairlane.policy import Backlog, Breaker, Concurrency, Fair, Policy, Rate, Sequence
from fairlane.scheduler.explain import explain
from fairlane.scheduler.rebuild import Miscount
from fairlane.scheduler.settlement import Failed, Released
from fairlane.store import records, upkeep
from fairlane.store.protocol import Store
from tests.model.home import Home
from tests.store.harness import Database, claim, diagnosed, finish, given_jobs, ids, new_jobs

OWN = Policy("q", fair=Fair(by="account"), limits=(Concurrency(1, by="account"), Concurrency(3)))
SHARED = Policy("q", limits=(Concurrency(1, by="account", name="gpu"), Rate(100, per="1s", name="quota")))
OTHER = Policy("other", limits=(Concurrency(1, by="account", name="gpu"),))
ORDERED = Policy("q", limits=(Sequence(by="account"),))
ALL = (OWN, SHARED, ORDERED, Policy("q", limits=(Breaker(1, by="account"), Backlog(100), Concurrency(5))))


async def spoil(database: Database, clock: ManualClock, table: str, by: int) -> None:
    """Change what gates count, behind everybody's back."""
    schema = "fairlane." if database.kind == "postgres" else ""
    home = Home(database, clock, database._open[0])
    await home.checkpoint()
    await home.run(f"update {schema}{table} set in_flight = in_flight + {by} where \"limit\" not like 'rate%'")


async def counted(store: Store, queue: str = "q") -> list[Miscount]:
    found = []
    while True:
        stretch = await store.run(upkeep.count_gates(queue, 2))
        found += stretch.found
        if not stretch.more:
            return found


@pytest.mark.parametrize(("policy", "table"), [(OWN, "gates"), (SHARED, "shared_gates"), (ORDERED, "gates")])
async def test_a_slot_that_nobody_holds_is_found_told_and_given_back(
    store: Store, database: Database, clock: ManualClock, policy: Policy, table: str
) -> None:
    """F2: before this, 0 ran, the gate said 1 for ever, and `explain` and the doctor had nothing to say."""
    await store.declare(policy)
    await given_jobs(store, policy, {"account": "acme"})
    await finish(store, await claim(store, "q", 1))
    assert await claim(store, "q") == []
    assert await counted(store) == []
    await spoil(database, clock, table, 1)
    (waiting,) = await given_jobs(store, policy, {"account": "acme"})
    assert await claim(store, "q") == []

    wrong = await counted(store)
    assert {(each.counted, each.running) for each in wrong} == {(1, 0)}
    (told,) = [each for each in await diagnosed(store) if each.check == "a gate is miscounted"]
    assert "counts 1, and 0 run" in told.message
    words = " ".join(hold.words for hold in explain(await store.ask(lambda moment: moment.examine(job=waiting))).holds)
    assert "no running job holds it, so the count is wrong" in words

    assert {(each.limit, each.key) for each in await store.run(upkeep.recount("q"))} == {
        (each.limit, each.key) for each in wrong
    }
    assert ids(await claim(store, "q")) == [waiting]
    (entry,) = [each for each in await store.run(records.audit("q")) if each.action == "recount"]
    assert (entry.actor, "counts 1, and 0 run" in entry.target) == ("upkeep", True)
    assert await store.run(upkeep.recount("q")) == []


@pytest.mark.parametrize(("policy", "table"), [(OWN, "gates"), (SHARED, "shared_gates")])
async def test_a_running_job_that_no_gate_counts_is_counted_again(
    store: Store, database: Database, clock: ManualClock, policy: Policy, table: str
) -> None:
    await store.declare(policy)
    await given_jobs(store, policy, {"account": "acme"}, 2)
    (running,) = await claim(store, "q", 1)
    await spoil(database, clock, table, -1)
    assert {(each.counted, each.running) for each in await store.run(upkeep.recount("q"))} == {(0, 1)}
    assert await claim(store, "q") == []
    await finish(store, [running])
    assert len(await claim(store, "q")) == 1


@pytest.mark.parametrize("policy", ALL)
async def test_what_has_ended_and_is_not_folded_is_no_difference(store: Store, policy: Policy) -> None:
    await store.declare(policy)
    await store.declare(OTHER)
    await given_jobs(store, policy, {"account": "acme"}, 2)
    await given_jobs(store, policy, {"account": "bolt"}, 2)
    held = await claim(store, "q", 2)
    assert await counted(store) == []
    await finish(store, held[:1], Failed("boom", 1_000))
    await finish(store, held[1:], Released("a drain"))
    assert await counted(store) == []
    assert await store.run(upkeep.recount("q")) == []
    await claim(store, "q", 2)
    assert await counted(store) + await store.run(upkeep.recount("q")) == []


async def test_a_slot_of_a_queue_that_shares_no_more_is_no_difference(store: Store) -> None:
    """A21: it is held until its job ends, and another queue sees it."""
    await store.declare(SHARED)
    await store.declare(OTHER)
    await given_jobs(store, SHARED, {"account": "acme"})
    running = await claim(store, "q", 1)
    await store.apply(Policy("q", keys=("account",)))
    assert await counted(store, "other") + await store.run(upkeep.recount("other")) == []
    await finish(store, running)
    assert await counted(store, "other") + await store.run(upkeep.recount("other")) == []


async def test_gates_are_right_at_every_look_while_others_claim_and_settle(
    shared_database: Database, clock: ManualClock
) -> None:
    """The look takes no lock: whatever goes on meanwhile, it never takes a gate that is right for one that is wrong."""
    stores = [await shared_database.open(clock) for _ in range(3)]
    for policy in (SHARED, OTHER):
        await stores[0].declare(policy)
    looked: list[Any] = []
    is_over = asyncio.Event()

    async def work(store: Store, policy: Policy) -> None:
        for n in range(15):
            await store.enqueue(new_jobs(policy, {"account": f"{n % 3}"}))
            await finish(store, await claim(store, policy.queue, 3), Released("again") if n % 4 == 0 else None)

    async def look() -> None:
        while not is_over.is_set():
            looked.append(await counted(stores[2], "q") + await stores[2].run(upkeep.recount("other")))

    looking = asyncio.ensure_future(look())
    await asyncio.gather(work(stores[0], SHARED), work(stores[1], OTHER))
    is_over.set()
    await looking
    assert [each for each in looked if each] == []
    assert len(looked) > 1
