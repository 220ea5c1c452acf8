"""No change of policy, sharing or partitions may leave a slot that nobody holds, whatever is under way at that moment.

Each test holds a lock at the point where two transactions meet, so that they meet in the order that once went wrong.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from fairlane.clock import ManualClock
from fairlane.policy import Concurrency, Policy, Sequence, lane_id
from fairlane.scheduler.settlement import Failed
from fairlane.store.postgres import PostgresStore
from fairlane.store.postgres.connections import STATEMENTS
from fairlane.store.protocol import Store
from tests.store.harness import LEASE, claim, finish, given_jobs, ids, new_jobs, operations_on, soon, worker_named
from tests.waiting import until_found

GPU = Concurrency(1, name="gpu")
# (Not `pg_stat_activity`, of which a transaction sees the same state until it ends.)
WAITING = "select count(distinct pid) from pg_locks where not granted"


@pytest.fixture
async def fleet(postgres_url: str, clock: ManualClock) -> AsyncIterator[Store]:
    """A store whose transactions can wait for one another."""
    store = PostgresStore(postgres_url, clock=clock)
    await store.open()
    yield store
    await store.close()


async def waiters(connection: asyncpg.Connection[Any], count: int) -> None:
    """Return once so many sessions of this database wait for a lock."""

    async def are_there() -> bool:
        return bool(await connection.fetchval(WAITING) >= count)

    await until_found(are_there)


@asynccontextmanager
async def held(connection: asyncpg.Connection[Any], table: str) -> AsyncIterator[None]:
    """Nobody writes this table meanwhile."""
    async with connection.transaction():
        await connection.execute(f"lock table fairlane.{table} in share mode")
        yield


async def shared_counts(connection: asyncpg.Connection[Any]) -> list[tuple[str, int]]:
    return [tuple(row) for row in await connection.fetch('select "limit", in_flight from fairlane.shared_gates')]


async def settled_during(
    store: Store, connection: asyncpg.Connection[Any], change: Callable[[], Awaitable[object]]
) -> None:
    """Settle the only job while a change waits to write what it has counted of that job."""
    (running,) = await claim(store, "q", 1, worker=worker_named("a worker"))
    async with held(connection, "shared_gates"):
        changing = asyncio.ensure_future(change())
        await waiters(connection, 1)
        settling = asyncio.ensure_future(finish(store, [running]))
        await waiters(connection, 2)
    await soon(asyncio.gather(changing, settling))


async def test_a_job_that_ends_while_its_queue_is_divided_leaves_its_slot(
    fleet: Store, connection: asyncpg.Connection[Any], clock: ManualClock
) -> None:
    """F2a, A14."""
    policy = Policy("q", limits=(Concurrency(1),), keys=("k",))
    await fleet.declare(policy)
    await given_jobs(fleet, policy, {"k": "a"})

    async def rest() -> None:
        clock.advance("1s")

    await settled_during(
        fleet, connection, lambda: operations_on(fleet, rest=rest).partitions.change("q", 2, by=("k",), actor="ops")
    )
    assert await claim(fleet, "q") + await claim(fleet, "q__p1") == []
    assert [count for _, count in await shared_counts(connection)] == [0]


async def test_a_job_that_ends_while_its_queue_begins_to_share_leaves_its_slot(
    fleet: Store, connection: asyncpg.Connection[Any]
) -> None:
    """F2b, A14."""
    policy = Policy("q")
    sharing = Policy("q", limits=(GPU,))
    await fleet.declare(policy)
    await given_jobs(fleet, policy)
    await settled_during(fleet, connection, lambda: fleet.apply(sharing))
    await given_jobs(fleet, sharing)
    assert len(await claim(fleet, "q")) == 1


async def test_a_claim_that_is_adopted_while_its_queue_begins_to_share_is_counted(
    fleet: Store, connection: asyncpg.Connection[Any]
) -> None:
    """A09: it runs under a lease that whoever counts cannot see yet."""
    policy, sharing = Policy("q"), Policy("q", limits=(GPU,))
    await fleet.declare(policy)
    await given_jobs(fleet, policy, count=2)
    (running,) = await claim(fleet, "q", 1)
    adopter, own = worker_named("an adopter"), uuid4()
    blocked = connection.transaction()
    await blocked.start()
    # Whoever adopts has changed the job, and waits to store a lease of the same id.
    await connection.execute(
        "insert into fairlane.leases (id, queue_id, worker_id, worker, renewed_at, expires_at, jobs) "
        "values ($1, 0, $1, '', 0, 0, '{}')",
        own,
    )
    adopting = asyncio.ensure_future(
        fleet.adopt(running.id, running.lease, own, tasks=["deliver"], worker=adopter, lease_for=LEASE)
    )
    await waiters(connection, 1)
    changing = asyncio.ensure_future(fleet.apply(sharing))
    await waiters(connection, 2)
    await blocked.rollback()
    adopted, _ = await soon(asyncio.gather(adopting, changing))
    assert adopted is not None
    assert await claim(fleet, "q") == [], "one runs, and one may"
    await finish(fleet, [adopted.claim])
    assert len(await claim(fleet, "q")) == 1


@pytest.mark.parametrize("scope", [{"by": "account"}, {"by": "task"}])
async def test_a_slot_that_was_held_by_a_limit_of_another_scope_is_free_when_that_scope_comes_back(
    store: Store, scope: dict[str, str]
) -> None:
    """A14, A21: what is released is what was taken, whatever the policy says meanwhile."""
    whole = Policy("q", limits=(GPU,), keys=("account",))
    keyed = Policy("q", limits=(Concurrency(1, name="gpu", **scope),), keys=("account",))
    await store.declare(whole)
    await given_jobs(store, whole, {"account": "acme"}, 2)
    (running,) = await claim(store, "q", 1)
    await store.apply(keyed)
    assert await claim(store, "q") == []
    await finish(store, [running])
    (running,) = await claim(store, "q", 1)
    await finish(store, [running])
    assert await claim(store, "q") == []
    await store.apply(whole)
    await given_jobs(store, whole, {"account": "acme"})
    assert len(await claim(store, "q")) == 1


async def test_a_place_that_comes_from_another_partition_during_a_change_of_policy_is_kept_once(
    fleet: Store, connection: asyncpg.Connection[Any], clock: ManualClock
) -> None:
    """A14: its lane event is not folded yet, and the job itself is seen already."""
    here, there = (Policy(name, limits=(Sequence(by="k"),)) for name in ("q", "q__p1"))
    for policy in (here, there):
        await fleet.declare(policy)
    (new,) = new_jobs(here, {"k": "a"})
    await fleet.enqueue([new])
    await finish(fleet, await claim(fleet, "q", 1), Failed("boom", 1_000))
    assert await claim(fleet, "q") == []
    numbers = dict(await connection.fetch("select name, id from fairlane.queues"))
    lane = lane_id("q__p1", 0, {"k": "a"})
    async with connection.transaction():
        # As the partition that it leaves moves it, and commits once the other one has drained its lane events.
        moved = STATEMENTS["move_scheduled_jobs"]
        await connection.execute(moved, numbers["q"], [new.lane], [numbers["q__p1"]], [lane], 10)
        await connection.execute("lock table fairlane.lanes in share mode")
        changing = asyncio.ensure_future(fleet.apply(Policy("q__p1", limits=(Sequence(by="k"), Concurrency(5)))))
        await waiters(connection, 1)
    await soon(changing)
    clock.advance("1s")
    (back,) = await claim(fleet, "q__p1", 1)
    assert back.id == new.id
    await finish(fleet, [back])
    await given_jobs(fleet, there, {"k": "a"})
    assert len(await claim(fleet, "q__p1", 1)) == 1


@pytest.mark.parametrize("folder", ["b", "c"])
async def test_whoever_folds_a_release_rings_those_that_wait_for_it(store: Store, folder: str) -> None:
    """A24, C10: also a queue that has no lane of that key, and the one that held the slot."""
    policies = [Policy(name, limits=(Concurrency(1, by="account", name="gpu"),)) for name in "abc"]
    for policy in policies:
        await store.declare(policy)
    await given_jobs(store, policies[2], {"account": "acme"})
    running = await claim(store, "c", 1)
    (waiting,) = await given_jobs(store, policies[0], {"account": "acme"})
    assert await claim(store, "a") == []
    await finish(store, running)
    assert await claim(store, folder) == []
    assert ids(await claim(store, "a")) == [waiting]
