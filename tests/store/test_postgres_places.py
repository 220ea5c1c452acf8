"""A new job's arrival says where its row is on PostgreSQL, so that a claim need not look it up."""

from __future__ import annotations

from collections.abc import AsyncIterator

import asyncpg
import pytest

from fairlane.clock import ManualClock
from fairlane.policy import Concurrency, Fair, Policy, Rate
from fairlane.scheduler.resident import Found
from fairlane.scheduler.snapshot import Ask
from fairlane.store.postgres import PostgresStore
from fairlane.store.postgres.claims import Scheduling
from tests.store.harness import claim, finish, given_jobs, ids

KEYS = {"account": "acme"}
POLICIES = {
    "plain": Policy("webhooks"),
    "fair, with limits": Policy(
        "webhooks", Fair(by="account"), (Concurrency(5, by="account"), Rate(1000, per="1m", by="account"))
    ),
}


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> Policy:
    return POLICIES[request.param]


@pytest.fixture
async def store(postgres_url: str, clock: ManualClock, policy: Policy) -> AsyncIterator[PostgresStore]:
    opened = PostgresStore(postgres_url, clock=clock)
    await opened.open()
    await opened.declare(policy)
    yield opened
    await opened.close()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Ask]:
    """What claims have asked the tables for, beside what has happened: each costs a round trip."""
    asks: list[Ask] = []
    ask = Scheduling.ask

    async def noting(scheduling: Scheduling, what: Ask) -> Found:
        asks.append(what)
        return await ask(scheduling, what)

    monkeypatch.setattr(Scheduling, "ask", noting)
    return asks


async def test_a_job_that_comes_to_an_idle_queue_is_claimed_in_two_round_trips(
    store: PostgresStore, policy: Policy, asked: list[Ask]
) -> None:
    await given_jobs(store, policy, KEYS)
    await finish(store, await claim(store, "webhooks", 1))
    asked.clear()
    for _ in range(3):
        new = await given_jobs(store, policy, KEYS)
        claims = await claim(store, "webhooks", 1)
        assert ids(claims) == new
        await finish(store, claims)
    assert asked == []


async def test_several_that_came_one_by_one_are_claimed_in_their_order_without_being_looked_up(
    store: PostgresStore, policy: Policy, asked: list[Ask]
) -> None:
    await given_jobs(store, policy, KEYS)
    await finish(store, await claim(store, "webhooks", 1))
    asked.clear()
    new = [job for _ in range(4) for job in await given_jobs(store, policy, KEYS)]
    assert ids(await claim(store, "webhooks", 3)) == new[:3]
    assert ids(await claim(store, "webhooks", 3)) == new[3:]
    assert asked == []


async def test_a_job_whose_row_has_moved_since_it_came_is_looked_up(
    store: PostgresStore, postgres_url: str, policy: Policy
) -> None:
    moved, other = [job for _ in range(2) for job in await given_jobs(store, policy, KEYS)]
    connection = await asyncpg.connect(postgres_url)
    await connection.execute("update fairlane.jobs set payload = payload where id = $1", moved)
    await connection.close()
    assert ids(await claim(store, "webhooks", 1)) == [moved]
    assert ids(await claim(store, "webhooks", 1)) == [other]


async def test_a_job_whose_place_another_has_taken_is_not_mixed_up_with_it(
    store: PostgresStore, postgres_url: str, policy: Policy
) -> None:
    first, second = [job for _ in range(2) for job in await given_jobs(store, policy, KEYS)]
    connection = await asyncpg.connect(postgres_url)
    await connection.execute(
        "update fairlane.arrivals a set place = o.place from fairlane.arrivals o where o.place <> a.place"
    )
    await connection.close()
    assert ids(await claim(store, "webhooks", 1)) == [first]
    assert ids(await claim(store, "webhooks", 1)) == [second]
