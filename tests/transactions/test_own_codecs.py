"""Callers whose driver writes JSON, or makes rows, in its own way: what is stored is what is stored for everybody."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import asyncpg
import psycopg
import pytest
from psycopg.rows import dict_row, namedtuple_row, scalar_row

from fairlane import App, Fair, Outcome, Unique
from fairlane.testing import run_until_idle


async def teach_json(connection: asyncpg.Connection[Any], form: str) -> None:
    """As asyncpg's documentation shows it, and as programs in a hurry do it."""
    if form == "text":
        await connection.set_type_codec("jsonb", encoder=json.dumps, decoder=json.loads, schema="pg_catalog")
    else:
        await connection.set_type_codec(
            "jsonb",
            encoder=lambda value: b"\x01" + json.dumps(value).encode(),
            decoder=lambda value: json.loads(value[1:]),
            schema="pg_catalog",
            format="binary",
        )


@pytest.mark.parametrize("form", ["text", "binary"])
@pytest.mark.parametrize("count", [1, 3, 600])
@pytest.mark.parametrize("from_pool", [False, True], ids=["connection", "pool"])
async def test_jobs_of_a_connection_with_a_codec_for_json_are_jobs_as_any_other(
    postgres_url: str, form: str, count: int, from_pool: bool
) -> None:
    app = App(postgres_url)
    app.queue("mail", fair=Fair(by="account"), keys=["account", "region"])

    @app.task(queue="mail", name="send")
    async def send(number: int, account: str, region: str | None) -> int:
        return number

    async with app:
        pool = await asyncpg.create_pool(postgres_url, min_size=1, max_size=1, init=lambda each: teach_json(each, form))
        connection = await pool.acquire()
        tx = connection if from_pool else connection._con  # type: ignore[attr-defined]
        async with connection.transaction():
            planned = send.using(context={"plan": {"seats": 3}})
            jobs = await planned.using(tx=tx).enqueue_many([planned.call(each, "acme", None) for each in range(count)])
            assert await connection.fetchval("select '{\"a\": 1}'::jsonb") == {"a": 1}  # as its owner has it
        record = await jobs[0].record()
        assert (record.keys, record.context) == ({"account": "acme", "region": None}, {"plan": {"seats": 3}})
        for kept in ("select keys from fairlane.jobs", "select keys from fairlane.arrivals"):
            (keys,) = {json.dumps(row["keys"]) for row in await connection.fetch(kept)}
            assert json.loads(keys)["account"] == "acme"
        assert [ran.outcome for ran in await run_until_idle(app)] == ["done"] * count
        await pool.release(connection)
        await pool.close()


async def test_a_unique_key_is_held_whoever_asks(postgres_url: str) -> None:
    app = App(postgres_url)

    @app.task(name="once", unique=Unique("once", until="done"))
    async def once() -> None: ...

    async with app:
        first = await once.enqueue()
        connection = await asyncpg.connect(postgres_url)
        await teach_json(connection, "text")
        async with connection.transaction():
            again = await once.using(tx=connection).enqueue()
        assert (again, again.outcome) == (first, Outcome.DUPLICATE)
        await connection.close()


@pytest.mark.parametrize("rows", [dict_row, namedtuple_row, scalar_row], ids=lambda made: made.__name__)
@pytest.mark.parametrize("count", [1, 600])
async def test_a_psycopg_connection_may_make_rows_in_its_own_way(postgres_url: str, rows: Any, count: int) -> None:
    app = App(postgres_url)

    queue = app.queue("mail")

    @app.task(queue="mail", name="once", unique=Unique("{number}", until="done"))
    async def once(number: int) -> int:
        return number

    async with app:
        async with await psycopg.AsyncConnection.connect(postgres_url, row_factory=rows) as lent:
            await once.using(tx=lent).enqueue_many([once.call(number) for number in range(count)])
            await app.values.put("made", count, tx=lent)
            assert await app.values.get("made", tx=lent) == count

        def blocks() -> Outcome | None:
            with psycopg.connect(postgres_url, row_factory=rows) as lent:
                return once.using(tx=lent).enqueue_sync(0).outcome

        assert await asyncio.to_thread(blocks) is Outcome.DUPLICATE
        (claim,) = await queue.claim(1)
        async with await psycopg.AsyncConnection.connect(postgres_url, row_factory=rows) as lent:
            await claim.ack(claim.args[0], tx=lent)
        assert await app.job(claim.id).result() == claim.args[0]
