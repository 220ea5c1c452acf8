"""`fairlane.enqueue` and its neighbours: what Python's producers do, from any language."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from fairlane import App, Backlog, Concurrency, Fair, FairlaneError, Rate, Sequence, State, Unique
from fairlane.errors import InvalidKey, UnknownQueue
from fairlane.policy.keys import canonical_key, lane_id, unique_id
from fairlane.policy.partitions import partition_of
from fairlane.policy.unique import digest_of
from fairlane.store.operators import JobFilter
from fairlane.store.postgres.connections import STATEMENTS
from fairlane.task import AsyncTask
from tests.transactions.test_matrix import is_idle
from tests.waiting import until
from tests.worker.harness import working

if TYPE_CHECKING:
    Connection = asyncpg.Connection[Any]

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text())
Given = dict[str, Any]
HOUR = timedelta(hours=1)

JSON = {"args", "kwargs", "keys", "unique_key", "context", "numbers", "partition_key"}


@pytest.fixture
async def app(postgres_url: str) -> AsyncIterator[App]:
    app = App(postgres_url)
    yield app
    await app.close()


@pytest.fixture
async def connection(postgres_url: str) -> AsyncIterator[Connection]:
    connection = await asyncpg.connect(postgres_url)
    yield connection
    await connection.close()


async def enqueue(connection: Connection, task: str, **given: Any) -> asyncpg.Record:
    """Call the function as another program would, with named arguments."""
    named = ", ".join(f"{name} => ${n}" for n, name in enumerate(given, start=2))
    values = [json.dumps(value, ensure_ascii=False) if name in JSON else value for name, value in given.items()]
    row: asyncpg.Record | None = await connection.fetchrow(
        f"select * from fairlane.enqueue(task => $1{', ' if named else ''}{named})", task, *values
    )
    assert row is not None
    return row


# The vectors.


@pytest.mark.parametrize("vector", VECTORS["lanes"], ids=str)
async def test_lanes_have_the_same_identity(connection: Connection, vector: Given) -> None:
    assert lane_id(vector["queue"], vector["priority"], vector["keys"]).hex() == vector["id"]
    found = await connection.fetchval(
        "select fairlane.lane_id($1, $2, $3::jsonb)", vector["queue"], vector["priority"], json.dumps(vector["keys"])
    )
    assert found.hex() == vector["id"]


async def test_unique_keys_partitions_digests_and_numbers_agree(connection: Connection) -> None:
    for each in VECTORS["unique_keys"]:
        assert unique_id(each["task"], tuple(each["values"])).hex() == each["id"]
        parts = [each["task"], *each["values"]]
        found = await connection.fetchval("select fairlane.identity('fairlane/unique/1', $1)", parts)
        assert found.hex() == each["id"], each
    for each in VECTORS["partitions"]:
        assert partition_of(tuple(each["values"]), each["width"]) == each["partition"]
        found = await connection.fetchval("select fairlane.partition_of($1, $2)", each["values"], each["width"])
        assert found == each["partition"], each
    for each in VECTORS["digests"]:
        assert digest_of(each["payload"].encode()).hex() == each["digest"]
        found = await connection.fetchval("select substring(sha256($1) for 16)", each["payload"].encode())
        assert found.hex() == each["digest"]
    for each in VECTORS["short_numbers"]:
        assert f"{each['number']:g}" == each["text"]
        assert await connection.fetchval("select fairlane.short_number($1)", each["number"]) == each["text"]


@pytest.mark.parametrize("vector", VECTORS["keys"], ids=lambda each: repr(each["value"])[:20])
async def test_keys_have_one_canonical_form_and_are_refused_in_the_same_words(
    connection: Connection, vector: Given
) -> None:
    value = vector["value"]
    asked = connection.fetchval("select fairlane.canonical_key('account', $1::json)", json.dumps(value))
    if "canonical" in vector:
        assert canonical_key("account", value) == vector["canonical"]
        assert await asked == vector["canonical"]
        return
    with pytest.raises(InvalidKey) as here:
        canonical_key("account", value)
    with pytest.raises(asyncpg.PostgresError) as there:
        await asked
    assert str(here.value) == str(there.value) == vector["error"]
    assert there.value.sqlstate == "FL002"


# The same job, whoever stores it.

POLICIES: dict[str, Given] = {
    "plain": {},
    "fair": {
        "fair": Fair(by="account"),
        "limits": [Concurrency(2, by=("account", "region")), Rate(5, per="1m", by="task")],
    },
    "declared": {"keys": ("account", "zone"), "limits": [Concurrency(2, by="account")]},
    "ordered": {"limits": [Sequence(by="account")], "keys": ("account", "region")},
    "divided": {"partitions": 4, "partition_by": "account", "fair": Fair(by="account")},
    "spread": {"partitions": 4},
    "weighed": {
        "fair": Fair(by="account", weight=lambda job: job["plan"]),
        "limits": [
            Concurrency(lambda job: job["slots"], by="account"),
            Rate(lambda job: job["rate"], per="30d", by="account"),
            Rate(7, per="1m", by="account"),
            Rate(lambda job: job["rate"], per="1m", by="account"),
        ],
    },
}
KEYED = {"account": "acme", "region": "north"}
SAME: list[tuple[str, Given, Given]] = [
    ("plain", {}, {}),
    ("plain", {"priority": -5, "max_attempts": 7, "context": {"plan": "gold", "n": [1, None]}}, {}),
    ("plain", {"keys": {"label": "red", "ünï": 7}}, {}),
    ("fair", {"keys": KEYED}, {}),
    ("fair", {"keys": {"account": 42, "region": None, "label": "x"}, "priority": 3}, {}),
    ("fair", {"keys": {"account": "over", "region": "eu"}}, {"account": "under"}),
    ("declared", {"keys": {"account": "a", "zone": "z", "label": "l"}}, {}),
    ("ordered", {"keys": KEYED}, {}),
    *[("divided", {"keys": {"account": f"account-{n}"}}, {}) for n in range(6)],
    ("divided", {"keys": {"account": None}}, {}),
    ("spread", {"partition": 3}, {}),
    ("spread", {"partition_key": "acme"}, {}),
    ("spread", {"partition_key": None}, {}),
    ("weighed", {"keys": {"account": "acme"}, "context": {"plan": 2.5, "slots": 3, "rate": 10}}, {}),
]
STORED = """
select q.name, encode(j.lane, 'hex') as lane, j.keys::text, j.lane_keys::text,
    convert_from(j.payload, 'UTF8') as payload,
    j.priority, j.max_attempts, j.state, j.context::json ->> 'plan' as plan, j.given::jsonb::text as given,
    (select jsonb_agg(jsonb_build_array(encode(a.lane, 'hex'), a.priority, a.keys, a.count) order by a.floor)::text
     from fairlane.arrivals a where a.floor = j.position) as events
from fairlane.jobs j join fairlane.queues q on q.id = j.queue_id where j.id = $1
"""


def task_of(app: App, queue: str, **policy: Any) -> AsyncTask[..., Any]:
    app.queue(queue, **policy)

    @app.task(queue=queue, name=f"{queue}.work")
    async def work(*args: Any, **kwargs: Any) -> Any:
        return [args, kwargs]

    # A policy may look only at keys that some task of its queue provides.
    @app.task(queue=queue, name=f"{queue}.other")
    async def other(account: str, region: str, zone: str) -> None: ...

    return work


@pytest.mark.parametrize(("policy", "using", "kwargs"), SAME, ids=str)
async def test_sql_stamps_a_job_as_python_does(
    app: App, connection: Connection, policy: str, using: Given, kwargs: Given
) -> None:
    work = task_of(app, policy, **POLICIES[policy])
    here = await work.using(**using).enqueue(1, "two", None, [3.5, {"four": "ö"}], **kwargs)
    asked = dict(using, args=[1, "two", None, [3.5, {"four": "ö"}]], kwargs=kwargs, queue=policy)
    if policy == "weighed":
        brought = {"concurrency:account": 3, "rate/2.592e+06s:account": 10, "rate/60s:account#2": 10, "weight": 2.5}
        asked["numbers"] = brought
    there = await enqueue(connection, work.name, **asked)
    assert there["outcome"] == "enqueued"
    first, second = [await connection.fetchrow(STORED, job) for job in (here.id, there["job"])]
    assert first is not None
    assert second is not None
    assert dict(first) == dict(second)


async def test_a_key_is_found_among_the_named_arguments(app: App, connection: Connection) -> None:
    app.queue("fair", fair=Fair(by="account"))

    @app.task(queue="fair", name="send")
    async def send(order: int, account: str) -> None: ...

    here = await send.enqueue(1, account="acme")
    asked: Given = {"queue": "fair", "args": [1], "kwargs": {"account": "acme"}}
    there = await enqueue(connection, "send", **asked)
    first, second = [await connection.fetchrow(STORED, job) for job in (here.id, there["job"])]
    assert first == second


async def test_a_job_from_sql_waits_for_its_time(app: App, connection: Connection) -> None:
    work = task_of(app, "later")
    await work.using(delay="1h").enqueue()
    for given in ("delay => '1 hour'", "run_at => now() + interval '1 hour'"):
        job = await connection.fetchval(f"select job from fairlane.enqueue('later.work', queue => 'later', {given})")
        record = await app.job(job).record()
        assert record.state is State.SCHEDULED
        assert record.due_at is not None
        assert abs(record.due_at - record.enqueued_at - 3_600_000_000) < 60_000_000


REFUSED: list[tuple[str, Given, str]] = [
    ("fair", {"keys": {"account": "acme"}}, "FL002"),
    ("fair", {"keys": {"account": 1.5, "region": "x"}}, "FL002"),
    ("fair", {"keys": {"account": "a", "region": "x", "task": "t"}}, "FL002"),
    ("fair", {"keys": {"account": "a", "region": "x", "two words": "t"}}, "FL002"),
    ("plain", {"priority": 101}, "FL001"),
    ("plain", {"max_attempts": 0}, "FL001"),
    ("plain", {"partition": 2}, "FL001"),
    ("ordered", {"keys": KEYED, "priority": 5}, "FL001"),
    ("divided", {"keys": {"account": "a"}, "partition": 1}, "FL001"),
    ("spread", {"partition": 4}, "FL001"),
    ("plain", {"unique": ("a", 1.5)}, "FL002"),
]


@pytest.mark.parametrize(("policy", "using", "code"), REFUSED, ids=str)
async def test_sql_refuses_what_python_refuses_in_the_same_words(
    app: App, connection: Connection, policy: str, using: Given, code: str
) -> None:
    work = task_of(app, policy, **POLICIES[policy])
    await app.opened()
    with pytest.raises(FairlaneError) as here:
        await work.using(**using).enqueue()
    asked = {("unique_key" if name == "unique" else name): value for name, value in using.items()}
    with pytest.raises(asyncpg.PostgresError) as there:
        await enqueue(connection, work.name, queue=policy, **asked)
    assert str(there.value) == str(here.value)
    assert there.value.sqlstate == code


async def test_an_unknown_queue_is_refused_in_the_same_words(app: App, connection: Connection) -> None:
    work = task_of(app, "known")
    await app.opened()
    with pytest.raises(UnknownQueue) as here:
        await work.using(queue="nowhere").enqueue()
    with pytest.raises(asyncpg.PostgresError) as there:
        await enqueue(connection, work.name, queue="nowhere")
    assert (str(there.value), there.value.sqlstate) == (str(here.value), "FL008")


async def test_numbers_that_a_function_would_give_are_given_or_refused(app: App, connection: Connection) -> None:
    work = task_of(app, "weighed", **POLICIES["weighed"])
    await app.opened()
    asked: Given = {"queue": "weighed", "keys": {"account": "a"}}
    brought = {"concurrency:account": 3, "rate/2.592e+06s:account": 10, "rate/60s:account#2": 10, "weight": 2}
    for numbers, words in (
        ({}, "takes 'concurrency:account' from its jobs, and nothing here says how; give it: numbers"),
        ({**brought, "weight": "much"}, "weight=much is not a number that it can have"),
        ({**brought, "concurrency:account": 1.5}, "is not a number that it can have"),
        ({**brought, "other": 1}, "takes no number 'other' from its jobs"),
    ):
        with pytest.raises(asyncpg.PostgresError, match=re.escape(words)):
            await enqueue(connection, work.name, numbers=numbers, **asked)
    assert (await enqueue(connection, work.name, numbers=brought, **asked))["outcome"] == "enqueued"


async def test_python_and_sql_hold_the_same_unique_keys(app: App, connection: Connection) -> None:
    work = task_of(app, "once")
    here = await work.using(unique=Unique(("order", 1))).enqueue(1, account="a")
    asked: Given = {"queue": "once", "args": [1], "kwargs": {"account": "a"}, "unique_key": ["order", 1]}
    assert tuple(await enqueue(connection, work.name, **asked)) == (here.id, "duplicate")
    assert tuple(await enqueue(connection, work.name, **asked, same_payload=True)) == (here.id, "duplicate")
    for given, python, code in (
        ({"on_conflict": "reject"}, Unique(("order", 1), on_conflict="reject"), "FL005"),
        ({"same_payload": True, "args": [2]}, Unique(("order", 1), same_payload=True), "FL006"),
    ):
        with pytest.raises(FairlaneError) as refused:
            await work.using(unique=python).enqueue(2)
        with pytest.raises(asyncpg.PostgresError) as there:
            await enqueue(connection, work.name, **{**asked, **given})
        assert (str(there.value), there.value.sqlstate) == (str(refused.value), code)
    replacing = await enqueue(connection, work.name, **asked, on_conflict="replace", unique_until="started")
    assert replacing["outcome"] == "replaced"
    assert await here.status() is State.CANCELLED
    again = await work.using(unique=Unique(("order", 1))).enqueue(1)
    assert again.id == replacing["job"]
    other = await enqueue(connection, work.name, queue="once", unique_key="window", unique_window=HOUR)
    await app.job(other["job"]).cancel()
    assert (await work.using(unique="window").enqueue()).id == other["job"], "a window outlives its job"


async def test_a_unique_key_taken_in_sql_knows_its_payload(app: App, connection: Connection) -> None:
    work = task_of(app, "known_payload")
    before = await work.using(unique=Unique("order", same_payload=True)).enqueue(0)
    await before.cancel()
    asked: Given = {"queue": "known_payload", "unique_key": "order", "same_payload": True}
    there = await enqueue(connection, work.name, **asked, args=[1])
    same = await work.using(unique=Unique("order", same_payload=True)).enqueue(1)
    assert same.id == there["job"]
    for other in (0, 2):
        with pytest.raises(asyncpg.PostgresError, match="with other arguments"):
            await enqueue(connection, work.name, **asked, args=[other])
        with pytest.raises(FairlaneError, match="with other arguments"):
            await work.using(unique=Unique("order", same_payload=True)).enqueue(other)


async def test_nulls_and_a_context_without_bound_are_refused(app: App, connection: Connection) -> None:
    work = task_of(app, "strict")
    await app.opened()
    for name in ("args", "kwargs", "queue", "priority", "max_attempts", "unique_until", "on_conflict", "same_payload"):
        with pytest.raises(asyncpg.PostgresError, match="is null that cannot be") as refused:
            await connection.fetchrow(f"select * from fairlane.enqueue($1, {name} => null)", work.name)
        assert refused.value.sqlstate == "FL001"
    with pytest.raises(asyncpg.PostgresError, match=r"its context takes 262,\d+ bytes") as refused:
        await enqueue(connection, work.name, queue="strict", context={"a": "x" * 262_144})
    assert refused.value.sqlstate == "FL003"
    with pytest.raises(asyncpg.PostgresError, match=r"window=.* is not a time above 0"):
        await enqueue(connection, work.name, queue="strict", unique_key="k", unique_window=-HOUR)


DEEP = "[" * 5_000 + "]" * 5_000


@pytest.mark.parametrize("said", ['"\\ud800"', "1e999", DEEP], ids=["surrogate", "number", "depth"])
async def test_json_that_python_cannot_read_hides_no_other_job(app: App, connection: Connection, said: str) -> None:
    work = task_of(app, "odd")
    await app.opened()
    row = await connection.fetchrow(
        "select * from fairlane.enqueue($1, args => $2, queue => 'odd', context => $3)",
        work.name,
        f"[{said}]",
        f'{{"a": {said}}}',
    )
    assert row is not None
    other = await work.enqueue(1)
    listed = await app.operations.jobs.list(JobFilter(queue="odd"))
    assert {each.id for each in listed.jobs} == {row["job"], other.id}
    assert (await app.operations.jobs.show(row["job"])).record.context == {}


async def test_an_id_that_is_taken_is_refused_in_the_same_words(app: App, connection: Connection) -> None:
    work = task_of(app, "named")
    here = await work.enqueue()
    with pytest.raises(FairlaneError) as refused:
        await work.using(id=here.id).enqueue()
    with pytest.raises(asyncpg.PostgresError) as there:
        await enqueue(connection, work.name, queue="named", id=here.id)
    assert (str(there.value), there.value.sqlstate) == (str(refused.value), "FL004")


async def test_a_full_backlog_refuses_in_the_same_words(app: App, connection: Connection) -> None:
    work = task_of(app, "few", limits=[Backlog(2, by="account", when_full="reject"), Backlog(9, when_full="reject")])
    asked: Given = {"queue": "few", "keys": {"account": "acme"}}
    await work.using(keys=asked["keys"]).enqueue()
    await enqueue(connection, work.name, **asked)
    with pytest.raises(FairlaneError) as refused:
        await work.using(keys=asked["keys"]).enqueue()
    with pytest.raises(asyncpg.PostgresError) as there:
        await enqueue(connection, work.name, **asked)
    assert (str(there.value), there.value.sqlstate) == (str(refused.value), "FL007")
    await enqueue(connection, work.name, **asked, delay=HOUR)  # joins no backlog yet
    for n in range(7):
        await enqueue(connection, work.name, queue="few", keys={"account": n})
    with pytest.raises(asyncpg.PostgresError, match="queue 'few': 9 jobs wait, and its backlog holds 9"):
        await enqueue(connection, work.name, queue="few", keys={"account": "last"})


# What becomes of them.


async def test_a_job_from_sql_commits_rolls_back_and_wakes_an_idle_worker(app: App, connection: Connection) -> None:
    ran: list[Any] = []
    app.queue("orders", fair=Fair(by="account"))

    @app.task(queue="orders", name="ship")
    async def ship(order: int, account: str) -> None:
        ran.append((order, account))

    await app.opened()
    async with working(app, queues=["orders"]):
        await is_idle(app, "orders")
        transaction = connection.transaction()
        await transaction.start()
        await enqueue(connection, "ship", queue="orders", args=[1], kwargs={"account": "never"})
        await transaction.rollback()
        async with connection.transaction():
            await enqueue(connection, "ship", queue="orders", args=[2], kwargs={"account": "acme"})
        await until(lambda: ran)
    assert ran == [(2, "acme")]


async def test_sql_cancels_and_tells_the_status(app: App, connection: Connection) -> None:
    work = task_of(app, "orders")
    await app.opened()
    job = (await enqueue(connection, work.name, queue="orders"))["job"]
    unknown = "00000000-0000-0000-0000-000000000000"
    assert await connection.fetchval("select fairlane.job_status($1)", job) == "ready"
    assert await connection.fetchval("select fairlane.cancel($1)", job) == "cancelled"
    assert await connection.fetchval("select fairlane.job_status($1)", job) == "cancelled"
    assert await connection.fetchval("select fairlane.job_status($1)", unknown) is None
    with pytest.raises(asyncpg.PostgresError, match=f"there is no job {unknown}") as refused:
        await connection.fetchval("select fairlane.cancel($1)", unknown)
    assert refused.value.sqlstate == "FL009"
    (running,) = await app.enqueue_many([work.call()])
    (claim,) = await app.queues["orders"].claim(1)
    assert await connection.fetchval("select fairlane.cancel($1)", running.id) == "running"
    await claim.renew()
    assert claim.cancel_requested


async def test_an_application_needs_the_right_to_execute_and_no_other(app: App, connection: Connection) -> None:
    task_of(app, "orders")
    await app.opened()
    await connection.execute("drop role if exists shop; create role shop; grant usage on schema fairlane to shop")
    try:
        await connection.execute("set role shop")
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await enqueue(connection, "orders.work", queue="orders")
        await connection.execute("reset role")
        await connection.execute(
            "grant execute on function fairlane.enqueue, fairlane.cancel, fairlane.job_status to shop"
        )
        await connection.execute("set role shop")
        job = (await enqueue(connection, "orders.work", queue="orders", unique_key="once"))["job"]
        assert await connection.fetchval("select fairlane.job_status($1)", job) == "ready"
        assert await connection.fetchval("select fairlane.cancel($1)", job) == "cancelled"
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await connection.fetch("select * from fairlane.jobs")
    finally:
        await connection.execute("reset role")
        await connection.execute("drop owned by shop; drop role shop")


@pytest.mark.parametrize("function", ["store_job", "cancel_job"])
async def test_what_python_sends_is_what_the_function_does(connection: Connection, function: str) -> None:
    written = await connection.fetchval(
        "select prosrc from pg_proc where pronamespace = 'fairlane'::regnamespace and proname = $1", function
    )
    assert written.strip("\n") == STATEMENTS[function]
