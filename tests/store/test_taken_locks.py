"""Claims of several queues at once: where somebody holds the lock of one, the next is claimed from."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from fairlane.clock import ManualClock
from fairlane.policy import Concurrency, Fair, Policy
from fairlane.store.postgres import PostgresStore
from fairlane.store.protocol import Choice, Claimed, Listener, Store
from tests.store.harness import LEASE, WORKER, claim, claim_once, finish, hear, ids, new_jobs, soon, worker_named
from tests.waiting import until_found

FIRST, SECOND, THIRD = (Policy(name, fair=Fair(by="account", charge="count")) for name in ("first", "second", "third"))
GPU = Concurrency(3, name="gpu")


class Asking:
    """Asks one store for jobs of the first queue or the others, and notes what it was told."""

    def __init__(self, store: Store, *others: Policy, listener: Listener | None = None) -> None:
        self.choices: list[Choice] = []
        self._store = store
        self._others = [policy.queue for policy in others]
        self._listener = listener

    async def claim(self, want: int = 1, queue: str = "first") -> Claimed:
        return await self._store.claim(
            queue,
            lambda: want,
            worker=WORKER,
            lease=LEASE,
            listener=self._listener,
            others=self._others,
            chose=self.choices.append,
        )


async def given(store: Store, policy: Policy, keys: Mapping[str, object], count: int = 1) -> list[UUID]:
    """Declare a queue, and enqueue so many jobs."""
    await store.declare(policy)
    jobs = new_jobs(policy, keys, count)
    await store.enqueue(jobs)
    return [job.id for job in jobs]


async def hold(connection: asyncpg.Connection[Any], *policies: Policy) -> None:
    names = [policy.queue for policy in policies]
    await connection.fetch("select pg_advisory_lock(1717660018, id) from fairlane.queues where name = any ($1)", names)


async def let_go(connection: asyncpg.Connection[Any], *policies: Policy) -> None:
    names = [policy.queue for policy in policies]
    await connection.fetch(
        "select pg_advisory_unlock(1717660018, id) from fairlane.queues where name = any ($1)", names
    )


async def waits_for(connection: asyncpg.Connection[Any], policy: Policy) -> bool:
    found: bool = await connection.fetchval(
        "select exists (select from pg_locks l join fairlane.queues q on q.id = l.objid "
        "where l.locktype = 'advisory' and l.classid = 1717660018 and not l.granted and q.name = $1)",
        policy.queue,
    )
    return found


@pytest.fixture
async def postgres_store(postgres_url: str, clock: ManualClock) -> AsyncIterator[PostgresStore]:
    store = PostgresStore(postgres_url, clock=clock)
    await store.open()
    yield store
    await store.close()


async def test_whoever_finds_no_lock_taken_claims_where_it_asked(store: Store) -> None:
    (mine,) = await given(store, FIRST, {"account": 1})
    await given(store, SECOND, {"account": 1})
    asking = Asking(store, SECOND)
    assert ids((await asking.claim()).claims) == [mine]
    # A store of one writer has nothing to choose.
    assert [(choice.queue, choice.taken) for choice in asking.choices] in ([], [("first", frozenset())])


async def test_whoever_finds_a_lock_taken_claims_from_the_next(
    postgres_store: PostgresStore, connection: asyncpg.Connection[Any]
) -> None:
    await given(postgres_store, FIRST, {"account": 1})
    await given(postgres_store, SECOND, {"account": 1})
    theirs = await given(postgres_store, THIRD, {"account": 1}, 2)
    await hold(connection, FIRST, SECOND)
    asking = Asking(postgres_store, SECOND, THIRD)
    claimed = await soon(asking.claim(5))
    assert ids(claimed.claims) == theirs
    assert {each.queue for each in claimed.claims} == {"third"}
    (choice,) = asking.choices
    assert (choice.queue, choice.taken) == ("third", frozenset({"first", "second"}))
    assert choice.vtimes.keys() == {"first", "second", "third"}


async def test_it_hears_how_far_the_others_are(
    postgres_store: PostgresStore, connection: asyncpg.Connection[Any]
) -> None:
    await given(postgres_store, FIRST, {"account": 1}, 5)
    await given(postgres_store, SECOND, {"account": 1}, 5)
    await claim_once(postgres_store, "first", 1)
    last = await claim_once(postgres_store, "first", 1)
    asking = Asking(postgres_store, SECOND)
    await hold(connection, FIRST)
    await soon(asking.claim())
    assert last.vtime is not None
    assert last.vtime > 0
    assert asking.choices[0].vtimes == {"first": last.vtime, "second": 0.0}


async def test_where_all_are_taken_the_first_is_waited_for(
    postgres_store: PostgresStore, connection: asyncpg.Connection[Any]
) -> None:
    (mine,) = await given(postgres_store, FIRST, {"account": 1})
    await given(postgres_store, SECOND, {"account": 1})
    await hold(connection, FIRST, SECOND)
    asking = Asking(postgres_store, SECOND)
    waiting = asyncio.ensure_future(asking.claim())
    await until_found(lambda: waits_for(connection, FIRST))
    await let_go(connection, SECOND)
    assert not await waits_for(connection, SECOND)
    assert not waiting.done()
    await let_go(connection, FIRST)
    assert ids((await soon(waiting)).claims) == [mine]
    assert [(choice.queue, choice.taken) for choice in asking.choices] == [("first", frozenset({"second"}))]


async def test_a_job_that_came_while_a_queue_was_passed_by_is_in_its_next_claim(
    postgres_store: PostgresStore, connection: asyncpg.Connection[Any]
) -> None:
    """C01."""
    await given(postgres_store, FIRST, {"account": 1})
    await given(postgres_store, SECOND, {"account": 1}, 2)
    first = await claim(postgres_store, "first")
    await hold(connection, FIRST)
    asking = Asking(postgres_store, SECOND)
    await soon(asking.claim())
    (late,) = await given(postgres_store, FIRST, {"account": 2})
    await soon(asking.claim())
    await let_go(connection, FIRST)
    assert ids((await asking.claim()).claims) == [late]
    await finish(postgres_store, first)


async def test_whoever_passes_by_a_queue_that_it_waits_for_is_still_woken_for_it(
    postgres_store: PostgresStore, connection: asyncpg.Connection[Any], clock: ManualClock
) -> None:
    """C09: passing by is neither a registration nor a withdrawal."""
    for policy in (FIRST, SECOND):
        await postgres_store.declare(policy)
    listener = await postgres_store.listen(WORKER)
    try:
        await hear(postgres_store, "first", listener)
        await given(postgres_store, SECOND, {"account": 1})
        await hold(connection, FIRST)
        claimed = await soon(Asking(postgres_store, SECOND, listener=listener).claim())
        assert len(claimed.claims) == 1
        await given(postgres_store, FIRST, {"account": 1})
        assert await soon(listener.wait(None))
        await let_go(connection, FIRST)
        assert len(await claim(postgres_store, "first")) == 1
    finally:
        await listener.close()


async def test_a_producer_that_did_not_see_the_waiter_is_looked_for_again_though_the_queue_was_passed_by(
    postgres_store: PostgresStore, postgres_url: str, connection: asyncpg.Connection[Any]
) -> None:
    """C09: registered while a producer's transaction is open, passed by when that has ended, and asked after that."""
    await postgres_store.declare(FIRST)
    await given(postgres_store, SECOND, {"account": 1})
    listener = await postgres_store.listen(WORKER)
    producer = await asyncpg.connect(postgres_url)
    try:
        async with producer.transaction():
            await postgres_store.enqueue(new_jobs(FIRST, {"account": 1}), tx=producer)
            first = await Asking(postgres_store, listener=listener).claim()
            assert (first.claims, first.look_again) == ([], True)
        await hold(connection, FIRST)
        passing = Asking(postgres_store, SECOND, listener=listener)
        assert [each.queue for each in (await soon(passing.claim())).claims] == ["second"]
        await let_go(connection, FIRST)
        assert [each.queue for each in (await passing.claim()).claims] == ["first"]
    finally:
        await producer.close()
        await listener.close()


async def test_a_limit_that_queues_share_holds_while_claimers_pass_each_other_by(
    postgres_url: str, clock: ManualClock
) -> None:
    """A09: whoever goes elsewhere takes the lock of the shared limit as everybody does."""
    names = ("first", "second", "third")
    policies = [Policy(name, fair=Fair(by="account"), limits=(GPU,)) for name in names]
    stores = [PostgresStore(postgres_url, clock=clock) for _ in range(4)]
    running: Counter[str] = Counter()
    most, passed, done = 0, 0, 0
    for store in stores:
        await store.open()
    try:
        for policy in policies:
            await given(stores[0], policy, {"account": 1}, 40)

        async def work(number: int, store: PostgresStore) -> None:
            nonlocal most, passed, done
            me, turn = worker_named(f"worker {number}"), number
            while done < 120:
                queue, *others = names[turn % 3 :] + names[: turn % 3]
                turn += 1
                choices: list[Choice] = []
                claimed = await store.claim(
                    queue, lambda: 2, worker=me, lease=LEASE, others=others, chose=choices.append
                )
                passed += sum(choice.queue != queue for choice in choices)
                running["now"] += len(claimed.claims)
                most = max(most, running["now"])
                await asyncio.sleep(0)
                running["now"] -= len(claimed.claims)
                await finish(store, claimed.claims)
                done += len(claimed.claims)

        await soon(asyncio.gather(*(work(number, store) for number, store in enumerate(stores))))
        assert most <= GPU.max
        assert passed, "nobody has passed anybody by: this has shown nothing"
        for name in names:
            assert await claim(stores[0], name) == []  # it folds what was settled last
            assert (await stores[0].counts(name)).running == 0
    finally:
        for store in stores:
            await store.close()
