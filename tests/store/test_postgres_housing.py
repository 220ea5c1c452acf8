"""On PostgreSQL the only lane of a flow lives in the flow's row; a second lane makes them all move out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from random import Random
from typing import Any, get_args

import asyncpg
import pytest

from fairlane.clock import ManualClock
from fairlane.policy import Concurrency, Fair, Policy, Rate
from fairlane.scheduler.snapshot import Standing
from fairlane.store.postgres import PostgresStore
from tests.model.home import Home
from tests.model.life import Life
from tests.model.steps import Call, End, Ending
from tests.store.harness import SECOND, Database, assert_at_rest, by_key, claim, claim_once, finish, given_jobs, ids

KEYS = ("account", "endpoint")
FAIR = Policy("webhooks", fair=Fair(by="account", charge="count"), keys=KEYS)
RATED = Policy("webhooks", fair=Fair(by="account", charge="count"), limits=(Rate(2, per="10s", by="endpoint"),))
SHARED = Policy("webhooks", fair=Fair(by="account", charge="count"), limits=(Concurrency(1, by="region"),))
PARKED = int(Standing.PARKED)

MISPLACED = """
    select 'stored twice', lane
    from (select id as lane from fairlane.lanes union all select lane from fairlane.flows where lane is not null) l
    group by lane
    having count(*) > 1
    union all
    select 'spilled, and houses one', id from fairlane.flows where spilled and lane is not null
    union all
    select 'its flow has not spilled', l.id
    from fairlane.lanes l
    left join fairlane.flows f on f.id = l.flow
    where f.spilled is not true
    union all
    select 'half moved out', id
    from fairlane.flows
    where num_nulls(lane, lane_priority, lane_keys, lane_ready, lane_in_flight, lane_floor, lane_rank, lane_standing,
        lane_tag) not in (0, 9)
    union all
    select 'miscounted', null
    from fairlane.queue_states q
    where (q.ready, q.running, q.parked) <> (
        select coalesce(sum(ready), 0), coalesce(sum(in_flight), 0), count(*) filter (where standing = 2)
        from (
            select ready, in_flight, standing from fairlane.lanes
            union all
            select lane_ready, lane_in_flight, lane_standing from fairlane.flows where lane is not null
        ) l
    )
"""


@pytest.fixture
async def store(postgres_url: str, clock: ManualClock) -> AsyncIterator[PostgresStore]:
    store = PostgresStore(postgres_url, clock=clock)
    await store.open()
    yield store
    await store.close()


@pytest.fixture
async def tables(store: PostgresStore, postgres_url: str) -> AsyncIterator[asyncpg.Connection[Any]]:
    connection = await asyncpg.connect(postgres_url)
    yield connection
    assert await connection.fetch(MISPLACED) == []
    await connection.close()


async def homes(tables: asyncpg.Connection[Any]) -> tuple[int, int]:
    """How many lanes live in their flow's row, and how many have a row of their own."""
    housed: int = await tables.fetchval("select count(lane) from fairlane.flows")
    own: int = await tables.fetchval("select count(*) from fairlane.lanes")
    return housed, own


async def parked(tables: asyncpg.Connection[Any]) -> int:
    count: int = await tables.fetchval("select count(*) from fairlane.flows where lane_standing = $1", PARKED)
    return count


def keys_of(account: object, endpoint: object) -> dict[str, object]:
    return {"account": account, "endpoint": endpoint}


async def test_the_only_lane_of_a_flow_lives_in_the_row_of_the_flow(
    store: PostgresStore, tables: asyncpg.Connection[Any]
) -> None:
    await store.declare(FAIR)
    for account in range(5):
        await given_jobs(store, FAIR, keys_of(account, "x"), 3)
    claims = await claim(store, "webhooks", 10)
    assert sorted(by_key(claims).values()) == [2] * 5
    assert await homes(tables) == (5, 0)
    await finish(store, claims)
    await finish(store, await claim(store, "webhooks", 10))
    assert await claim(store, "webhooks", 1) == []
    assert await homes(tables) == (5, 0)


async def test_a_queue_of_one_lane_has_no_row_for_it(store: PostgresStore, tables: asyncpg.Connection[Any]) -> None:
    plain = Policy("webhooks")
    await store.declare(plain)
    jobs = await given_jobs(store, plain, count=4)
    assert ids(await claim(store, "webhooks", 4)) == jobs
    assert await homes(tables) == (1, 0)


async def test_lanes_of_one_flow_that_come_together_have_rows_of_their_own(
    store: PostgresStore, tables: asyncpg.Connection[Any]
) -> None:
    await store.declare(FAIR)
    jobs = [job for endpoint in "xyz" for job in await given_jobs(store, FAIR, keys_of("acme", endpoint))]
    assert sorted(ids(await claim(store, "webhooks", 9))) == sorted(jobs)
    assert await homes(tables) == (0, 3)


@pytest.mark.parametrize("in_flight", [0, 1, 3])
async def test_a_second_lane_makes_the_first_move_out_with_all_it_holds(
    store: PostgresStore, clock: ManualClock, tables: asyncpg.Connection[Any], in_flight: int
) -> None:
    await store.declare(FAIR)
    await given_jobs(store, FAIR, keys_of("acme", "x"), 3)
    first = await claim(store, "webhooks", in_flight or 1)
    if not in_flight:
        await finish(store, first)
        first = []
    assert await homes(tables) == (1, 0)
    await given_jobs(store, FAIR, keys_of("acme", "y"), 2)
    second = await claim(store, "webhooks", 1)
    assert await homes(tables) == (0, 2)
    counts = await store.counts("webhooks")
    assert counts.running == in_flight + 1
    await finish(store, first + second)
    while claims := await claim(store, "webhooks", 2):
        await finish(store, claims)
    assert await homes(tables) == (0, 2), "it stays out while it has lanes"
    await assert_at_rest(store, FAIR, clock, [keys_of("acme", "x"), keys_of("acme", "y")])


async def test_a_parked_lane_in_its_flows_row_wakes(
    store: PostgresStore, clock: ManualClock, tables: asyncpg.Connection[Any]
) -> None:
    await store.declare(RATED)
    for account in "abc":
        await given_jobs(store, RATED, keys_of(account, account), 6)
    for _ in range(3):
        claims = await claim(store, "webhooks", 20)
        assert by_key(claims) == {"a": 2, "b": 2, "c": 2}
        await finish(store, claims)
        assert await claim(store, "webhooks", 20) == []
        assert await homes(tables) == (3, 0)
        clock.advance("10s")
    assert await parked(tables) == 0


async def test_parked_lanes_of_many_flows_wake_in_the_order_of_their_turns(
    store: PostgresStore, tables: asyncpg.Connection[Any]
) -> None:
    await store.declare(SHARED)
    for account in "abcd":
        await given_jobs(store, SHARED, {"account": account, "region": "eu"}, 2)
    order: list[str] = []
    for _ in range(8):
        (one,) = await claim(store, "webhooks", 8)
        assert await parked(tables) >= 1 or len(order) >= 6
        order.append(str(one.keys["account"]))
        await finish(store, [one])
    assert await homes(tables) == (4, 0)
    assert sorted(order[:4]) == sorted(order[4:]) == list("abcd"), "nobody has two turns before everybody had one"


async def test_a_parked_lane_that_moves_out_still_wakes(
    store: PostgresStore, clock: ManualClock, tables: asyncpg.Connection[Any]
) -> None:
    await store.declare(RATED)
    await given_jobs(store, RATED, keys_of("acme", "x"), 4)
    assert len(await claim(store, "webhooks", 9)) == 2
    assert await parked(tables) == 1
    await given_jobs(store, RATED, keys_of("acme", "y"), 1)
    assert by_key(await claim(store, "webhooks", 9), "endpoint") == {"y": 1}
    assert await homes(tables) == (0, 2)
    assert (await store.counts("webhooks")).parked_lanes == 1
    clock.advance("10s")
    assert by_key(await claim(store, "webhooks", 9), "endpoint") == {"x": 2}


async def test_a_flow_that_waits_on_its_gate_lets_its_lane_move_out(
    store: PostgresStore, clock: ManualClock, tables: asyncpg.Connection[Any]
) -> None:
    policy = Policy("webhooks", fair=Fair(by="account"), limits=(Concurrency(1, by="account"),), keys=KEYS)
    await store.declare(policy)
    await given_jobs(store, policy, keys_of("acme", "x"), 2)
    held = await claim(store, "webhooks", 5)
    assert len(held) == 1
    clock.advance("1s")
    await given_jobs(store, policy, keys_of("acme", "y"), 1)
    assert await claim(store, "webhooks", 5) == []
    assert await homes(tables) == (0, 2)
    endpoints = []
    for _ in range(2):
        await finish(store, held)
        held = await claim(store, "webhooks", 5)
        endpoints += [each.keys["endpoint"] for each in held]
    assert endpoints == ["x", "y"]


async def test_a_cancelled_job_leaves_its_lane_in_the_row_of_the_flow(
    store: PostgresStore, tables: asyncpg.Connection[Any]
) -> None:
    await store.declare(RATED)
    jobs = await given_jobs(store, RATED, keys_of("acme", "x"), 4)
    await claim(store, "webhooks", 9)
    for job in jobs[2:]:
        await store.cancel(job)
    assert await claim(store, "webhooks", 9) == []
    assert await homes(tables) == (1, 0)
    assert (await store.counts("webhooks")).parked_lanes == 0


async def test_a_scheduled_job_finds_its_lane_in_the_row_of_the_flow(
    store: PostgresStore, clock: ManualClock, tables: asyncpg.Connection[Any]
) -> None:
    await store.declare(FAIR)
    await given_jobs(store, FAIR, keys_of("acme", "x"), 1)
    (later,) = await given_jobs(store, FAIR, keys_of("acme", "x"), 1, delay=5 * SECOND)
    await finish(store, await claim(store, "webhooks", 5))
    clock.advance("5s")
    assert ids(await claim(store, "webhooks", 5)) == [later]
    assert await homes(tables) == (1, 0)


async def a_flow_ahead_of_the_others(store: PostgresStore, endpoints: str) -> None:
    """Its lanes are idle, and its tag keeps it from being collected: it has had a hundred turns in advance."""
    policy = Policy("webhooks", fair=Fair(by="account", charge="count", weight={"light": 0.01}), keys=KEYS)
    await store.declare(policy)
    for endpoint in endpoints:
        await given_jobs(store, policy, keys_of("light", endpoint), 1)
    await finish(store, await claim(store, "webhooks", 9))
    assert await claim(store, "webhooks", 9) == []


@pytest.mark.parametrize("endpoints", ["x", "xyz"], ids=["housed", "moved out"])
async def test_a_flow_that_outlives_its_lanes_houses_the_next(
    store: PostgresStore, tables: asyncpg.Connection[Any], endpoints: str
) -> None:
    await a_flow_ahead_of_the_others(store, endpoints)
    removed = await store.collect("webhooks")
    assert (removed.lanes, removed.flows) == (len(endpoints), 0)
    assert await homes(tables) == (0, 0)
    assert (await store.collect("webhooks")).lanes == 0
    for endpoint in "uv":
        (job,) = await given_jobs(store, FAIR, keys_of("light", endpoint), 1)
        assert ids(await claim(store, "webhooks", 1)) == [job]
        assert await homes(tables) == ((1, 0) if endpoint == "u" else (0, 2))


async def test_a_flow_behind_the_others_is_collected_with_the_lane_that_it_houses(
    store: PostgresStore, tables: asyncpg.Connection[Any]
) -> None:
    await store.declare(FAIR)
    await given_jobs(store, FAIR, keys_of("early", "x"), 1)
    await given_jobs(store, FAIR, keys_of("steady", "x"), 9)
    for _ in range(6):
        await finish(store, await claim(store, "webhooks", 1))
    await claim(store, "webhooks", 1)
    removed = await store.collect("webhooks")
    assert (removed.lanes, removed.flows) == (1, 1)
    assert await homes(tables) == (1, 0)


async def test_a_lane_with_work_is_not_collected_from_the_row_of_its_flow(
    store: PostgresStore, tables: asyncpg.Connection[Any]
) -> None:
    await store.declare(FAIR)
    await given_jobs(store, FAIR, keys_of("running", "x"), 1)
    held = await claim(store, "webhooks", 1)
    await given_jobs(store, FAIR, keys_of("waiting", "x"), 1)
    await claim_once(store, "webhooks", 0)
    assert (await store.collect("webhooks")).lanes == 0
    await finish(store, held)
    assert by_key(await claim(store, "webhooks", 2)) == {"waiting": 1}


async def test_a_change_of_policy_rearranges_the_lanes(
    store: PostgresStore, clock: ManualClock, tables: asyncpg.Connection[Any]
) -> None:
    by_both = Policy("webhooks", fair=Fair(by=KEYS, charge="count"), keys=KEYS)
    await store.declare(by_both)
    for endpoint in "xyz":
        await given_jobs(store, by_both, keys_of("acme", endpoint), 3)
    held = await claim(store, "webhooks", 3)
    assert await homes(tables) == (3, 0)
    await store.apply(FAIR)
    assert await homes(tables) == (0, 3)
    await finish(store, held[:1])
    await store.apply(by_both)
    assert await homes(tables) == (3, 0)
    counts = await store.counts("webhooks")
    assert (counts.ready, counts.running, counts.bells) == (6, 2, 0)
    await finish(store, held[1:])
    claims = await claim(store, "webhooks", 9)
    assert by_key(claims, "endpoint") == {"x": 2, "y": 2, "z": 2}
    await finish(store, claims)
    await assert_at_rest(store, by_both, clock, [keys_of("acme", "x")])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["flows", "mixed"])
async def test_whatever_happens_every_lane_is_stored_once_and_where_it_belongs(
    store: PostgresStore, clock: ManualClock, tables: asyncpg.Connection[Any], kind: str, seed: int
) -> None:
    life = Life(Home(Database("postgres", ""), clock, store), clock, kind)
    await store.declare(life.model.policy)
    chance = Random(100 + seed)
    housed = own = 0
    for turn in range(120):
        await (life.apply(chance.randrange(3)) if turn % 40 == 39 else _some_step(life, chance))
        assert await tables.fetch(MISPLACED) == []
        now_housed, now_own = await homes(tables)
        housed, own = max(housed, now_housed), max(own, now_own)
    assert min(housed, own) > 0, "the life was meant to see flows of one lane and of several"
    await life.come_to_rest()


def _some_step(life: Life, chance: Random) -> Coroutine[Any, Any, None]:
    some = Call(chance.choice("abcd"), chance.choice("xyz"), delay=chance.choice([None, None, SECOND]))
    ends = [End(chance.randrange(30), chance.choice(get_args(Ending))) for _ in range(4)]
    steps: list[Callable[[], Coroutine[Any, Any, None]]] = [
        *[lambda: life.enqueue([some] * chance.choice([1, 2, 6]))] * 3,
        *[lambda: life.claim(chance.choice([1, 2, 5, 20]), seconds=chance.choice([3, 30]))] * 4,
        *[lambda: life.settle(ends)] * 4,
        *[lambda: life.pass_time(chance.choice([700_001, 2 * SECOND + 3, 11 * SECOND + 1]))] * 3,
        life.reap,
        lambda: life.cancel(chance.randrange(30)),
        *[lambda: life.collect(chance.choice([2, 1_000]))] * 2,
    ]
    return chance.choice(steps)()
