"""What cannot be a caller's transaction is refused in words, whatever the driver, and nothing is stored. E06."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiosqlite
import asyncpg
import psycopg
import pytest
import sqlalchemy
import sqlalchemy.orm
from psycopg.types.string import TextLoader
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from fairlane import App
from fairlane.errors import ConfigurationError, StoreUnavailable
from fairlane.store.postgres.caller_transactions import literal
from fairlane.store.postgres.connections import STATEMENTS
from fairlane.store.postgres.jobs import COLUMNS
from fairlane.store.sqlite import database
from fairlane.task import AsyncTask
from tests.transactions.drivers import Django

Work = AsyncTask[[], None]

PATIENCE = 1.0
"""Seconds: with none at all a file that nobody holds counts as locked while it is opened."""


def work_of(app: App) -> Work:
    @app.task(name="work")
    async def work() -> None: ...

    return work


@pytest.fixture
async def on_postgres(postgres_url: str) -> AsyncIterator[Work]:
    async with App(postgres_url) as app:
        yield work_of(app)
        assert (await (await app.opened()).counts("default")).events == 0, "what was refused was stored"


@pytest.fixture
async def on_sqlite(tmp_path: Path) -> AsyncIterator[Work]:
    async with App(f"sqlite:///{tmp_path / 'jobs.db'}") as app:
        yield work_of(app)
        assert (await (await app.opened()).counts("default")).events == 0, "what was refused was stored"


async def refused(task: Work, tx: Any, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        await task.using(tx=tx).enqueue()
    with pytest.raises(ConfigurationError, match=match):
        await task.using(tx=tx).enqueue_many([task.call()])


async def test_psycopg_without_a_transaction_failed_and_closed(on_postgres: Work, postgres_url: str) -> None:
    connection = psycopg.connect(postgres_url, autocommit=True)
    await refused(on_postgres, connection, "not in a transaction: this connection commits every statement")
    connection.autocommit = False
    with pytest.raises(psycopg.Error):
        connection.execute("select 1 / 0")
    await refused(on_postgres, connection, "in a transaction that has failed")
    connection.close()
    await refused(on_postgres, connection, "closed connection")


async def test_async_psycopg_without_a_transaction_failed_and_closed(on_postgres: Work, postgres_url: str) -> None:
    connection = await psycopg.AsyncConnection.connect(postgres_url, autocommit=True)
    await refused(on_postgres, connection, "not in a transaction: this connection commits every statement")
    await connection.set_autocommit(False)
    with pytest.raises(psycopg.Error):
        await connection.execute("select 1 / 0")
    await refused(on_postgres, connection, "in a transaction that has failed")
    await connection.close()
    await refused(on_postgres, connection, "closed connection")


async def test_asyncpg_without_a_transaction_failed_and_closed(on_postgres: Work, postgres_url: str) -> None:
    connection = await asyncpg.connect(postgres_url)
    await refused(on_postgres, connection, "not in a transaction")
    transaction = connection.transaction()
    await transaction.start()
    with pytest.raises(asyncpg.PostgresError):
        await connection.execute("select 1 / 0")
    await refused(on_postgres, connection, "in a transaction that has failed")
    await transaction.rollback()
    await connection.close()
    await refused(on_postgres, connection, "closed connection")
    async with asyncpg.create_pool(postgres_url, min_size=1) as pool:
        async with pool.acquire() as lent:
            pass
        await refused(on_postgres, lent, "released back to the pool")


async def test_sqlalchemy_that_commits_alone_has_failed_or_is_closed(on_postgres: Work, postgres_url: str) -> None:
    url = postgres_url.replace("postgresql", "postgresql+psycopg", 1)
    alone = sqlalchemy.create_engine(url, isolation_level="AUTOCOMMIT")
    with alone.connect() as connection:
        await refused(on_postgres, connection, "not in a transaction: this connection commits every statement")
    await refused(on_postgres, connection, "(?i)closed")
    alone.dispose()
    engine = sqlalchemy.create_engine(url)
    with sqlalchemy.orm.Session(engine) as session:
        with pytest.raises(sqlalchemy.exc.DBAPIError):
            session.execute(sqlalchemy.text("select 1 / 0"))
        await refused(on_postgres, session, "failed")
    engine.dispose()


@pytest.mark.parametrize("driver", ["postgresql+asyncpg", "postgresql+psycopg"])
async def test_async_sqlalchemy_that_commits_alone_or_is_closed(
    on_postgres: Work, postgres_url: str, driver: str
) -> None:
    engine = create_async_engine(postgres_url.replace("postgresql", driver, 1), isolation_level="AUTOCOMMIT")
    connection: AsyncConnection
    async with engine.connect() as connection:
        await refused(on_postgres, connection, "not in a transaction")
    await refused(on_postgres, connection, "(?i)closed")
    await engine.dispose()


async def test_django_outside_of_an_atomic_block_and_in_one_that_has_failed(
    on_sqlite: Work, on_postgres: Work, tmp_path: Path, postgres_url: str
) -> None:
    for task, place in ((on_sqlite, str(tmp_path / "jobs.db")), (on_postgres, postgres_url)):
        caller = Django(place)
        await caller.open()

        def enqueue(task: Work = task, caller: Django = caller) -> None:
            task.using(tx=caller.tx).enqueue_sync()

        with pytest.raises(ConfigurationError, match=r"Django's connection 'default' .* transaction\.atomic"):
            await caller.there(enqueue)
        await caller.begin()
        await caller.there(lambda caller=caller: caller.tx.set_rollback(True))  # type: ignore[misc]
        with pytest.raises(ConfigurationError, match="a transaction that has failed"):
            await caller.there(enqueue)
        await caller.commit()
        await caller.close()


async def test_a_connection_to_another_database(
    on_postgres: Work, empty_postgres_url: str, on_sqlite: Work, tmp_path: Path
) -> None:
    elsewhere = psycopg.connect(empty_postgres_url)
    await refused(on_postgres, elsewhere, "is not the one that this app uses")
    elsewhere.close()
    other = sqlite3.connect(tmp_path / "other.db")
    await refused(on_sqlite, other, r"other\.db.*this app uses")
    other.close()
    also = await aiosqlite.connect(tmp_path / "other.db")
    await refused(on_sqlite, also, r"other\.db.*this app uses")
    await also.close()
    await refused(on_sqlite, also, "cannot be used here")


async def test_a_connection_to_a_database_of_another_kind(
    on_postgres: Work, on_sqlite: Work, tmp_path: Path, postgres_url: str
) -> None:
    local, remote = sqlite3.connect(tmp_path / "jobs.db"), psycopg.connect(postgres_url)
    await refused(on_postgres, local, "tx=Connection does not fit a PostgreSQL store; give an asyncpg or psycopg")
    await refused(on_sqlite, remote, "tx=Connection cannot be used with a SQLite store; give a sqlite3 or aiosqlite")
    local.close()
    remote.close()


async def test_sqlite3_that_commits_alone_or_is_of_another_thread(on_sqlite: Work, tmp_path: Path) -> None:
    alone = sqlite3.connect(tmp_path / "jobs.db", isolation_level=None)
    await refused(on_sqlite, alone, "not in a transaction: this connection commits by itself")
    alone.close()
    await refused(on_sqlite, alone, "cannot be used here: Cannot operate on a closed database")
    foreign = await asyncio.to_thread(sqlite3.connect, tmp_path / "jobs.db")
    await refused(on_sqlite, foreign, "cannot be used here: SQLite objects created in a thread")


async def test_an_app_that_is_opened_while_the_callers_transaction_holds_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "BUSY_TIMEOUT", PATIENCE)
    connection = sqlite3.connect(tmp_path / "new.db")
    connection.execute("create table orders (id integer)")
    connection.execute("insert into orders values (1)")
    task = work_of(App(f"sqlite:///{tmp_path / 'new.db'}"))
    with pytest.raises(StoreUnavailable, match=r"transaction of your own open. Open the app before it begins"):
        await task.using(tx=connection).enqueue()
    connection.commit()
    assert connection.execute("select count(*) from orders").fetchone() == (1,)
    connection.close()


async def test_a_transaction_of_ones_own_that_was_not_given_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "BUSY_TIMEOUT", PATIENCE)
    async with App(f"sqlite:///{tmp_path / 'jobs.db'}") as app:
        task = work_of(app)
        connection = sqlite3.connect(tmp_path / "jobs.db")
        connection.execute("begin immediate")
        with pytest.raises(StoreUnavailable, match="a transaction of your own may hold it: pass"):
            await task.enqueue()
        await task.using(tx=connection).enqueue()
        connection.rollback()
        connection.close()


@pytest.mark.parametrize("mode", ["file that only reads", "connection that only reads"])
async def test_sqlite3_that_only_reads(on_sqlite: Work, tmp_path: Path, mode: str) -> None:
    how = "?mode=ro" if mode.startswith("file") else ""
    connection = sqlite3.connect(f"file:{tmp_path / 'jobs.db'}{how}", uri=True)
    connection.execute("pragma query_only = on")
    await refused(on_sqlite, connection, "only reads .* and a job is to be written")
    connection.close()


@pytest.mark.parametrize("is_begun", [True, False])
async def test_what_fails_halfway_leaves_nothing_behind_and_the_callers_rows_alone(
    on_sqlite: Work, tmp_path: Path, is_begun: bool
) -> None:
    connection = sqlite3.connect(tmp_path / "jobs.db")
    connection.execute("create table orders (id integer)")
    connection.execute("create temp trigger boom before insert on main.arrivals begin select raise(abort, 'boom'); end")
    connection.commit()
    if is_begun:
        connection.execute("insert into orders values (1)")
    with pytest.raises(sqlite3.IntegrityError, match="boom"):
        await on_sqlite.using(tx=connection).enqueue()
    assert connection.in_transaction is is_begun
    connection.commit()
    assert connection.execute("select count(*) from orders").fetchone() == (int(is_begun),)
    assert connection.execute("select count(*) from jobs").fetchone() == (0,)
    connection.close()


async def test_a_locked_file_is_told_with_its_remedy(on_sqlite: Work, tmp_path: Path) -> None:
    first, second = (sqlite3.connect(tmp_path / "jobs.db", timeout=0) for _ in range(2))
    first.execute("begin immediate")
    with pytest.raises(StoreUnavailable, match="locked; where it is locked, begin with BEGIN IMMEDIATE"):
        await on_sqlite.using(tx=second).enqueue()
    first.close()
    second.close()


async def test_a_transaction_that_only_reads(on_postgres: Work, postgres_url: str) -> None:
    connection = await asyncpg.connect(postgres_url)
    async with connection.transaction(readonly=True):
        with pytest.raises(ConfigurationError, match="only reads, and a job is to be written"):
            await on_postgres.using(tx=connection).enqueue()
    await connection.close()
    blocking = psycopg.connect(postgres_url)
    blocking.read_only = True
    with pytest.raises(ConfigurationError, match="only reads, and a job is to be written"):
        await on_postgres.using(tx=blocking).enqueue()
    blocking.close()


async def test_psycopg_in_pipeline_mode(on_postgres: Work, postgres_url: str) -> None:
    connection = psycopg.connect(postgres_url)
    with connection.pipeline():
        await refused(on_postgres, connection, "in pipeline mode")
    connection.close()


async def turns() -> None:
    """For as many turns of a loop as it takes to hang up."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_asyncpg_of_another_event_loop(on_postgres: Work, postgres_url: str) -> None:
    elsewhere = asyncio.new_event_loop()

    async def begun() -> asyncpg.Connection[Any]:
        connection = await asyncpg.connect(postgres_url)
        await connection.transaction().start()
        return connection

    connection = await asyncio.to_thread(elsewhere.run_until_complete, begun())
    with pytest.raises(ConfigurationError, match="belongs to another event loop"):
        await on_postgres.using(tx=connection).enqueue()
    elsewhere.call_soon(connection.terminate)
    await asyncio.to_thread(elsewhere.run_until_complete, turns())
    elsewhere.close()


@pytest.mark.parametrize("name", ["uuid", "bytea"])
async def test_a_driver_that_was_taught_to_read_ids_or_bytes_in_another_way(
    on_postgres: Work, postgres_url: str, name: str
) -> None:
    # What a unique key is compared with would never be the same, and two jobs would hold it.
    connection = await asyncpg.connect(postgres_url)
    await connection.set_type_codec(name, encoder=str, decoder=str, schema="pg_catalog", format="text")
    async with connection.transaction():
        await refused(on_postgres, connection, f"reads and writes {name} in a way of its own")
    await connection.close()
    blocking = psycopg.connect(postgres_url)
    blocking.adapters.register_loader(name, TextLoader)
    await refused(on_postgres, blocking, f"reads and writes {name} in a way of its own")
    blocking.close()


async def test_an_async_connection_in_a_blocking_call(on_postgres: Work, postgres_url: str) -> None:
    connection = await asyncpg.connect(postgres_url)
    async with connection.transaction():
        with pytest.raises(ConfigurationError, match="tx=Connection is async and this call blocks; await"):
            await asyncio.to_thread(on_postgres.using(tx=connection).enqueue_sync)
    await connection.close()


def test_the_copied_columns_are_those_that_are_written() -> None:
    inside = STATEMENTS["copy_jobs"].partition("fairlane.jobs (")[2].partition(")")[0]
    assert tuple(name.strip() for name in inside.split(",")) == COLUMNS


def test_arrays_and_rows_have_the_form_that_the_server_reads() -> None:
    assert literal([('a"b\\c', None, True, 3, b"\x00\xff")]) == r'{"(\"a\\\"b\\\\c\",,\"t\",\"3\",\"\\\\x00ff\")"}'
    assert literal([]) == "{}"
    assert literal([None, "x"]) == '{NULL,"x"}'


# F9
async def test_psycopg_in_a_two_phase_transaction(on_postgres: Work, postgres_url: str) -> None:
    with psycopg.connect(postgres_url) as connection:
        connection.tpc_begin(connection.xid(1, "shop", "order 1"))
        connection.execute("select 1")
        await refused(
            on_postgres, connection, "two-phase transaction, .*write a row of your own in it, and enqueue from"
        )
        connection.tpc_rollback()
    async with await psycopg.AsyncConnection.connect(postgres_url) as lent:
        await lent.tpc_begin(lent.xid(1, "shop", "order 1"))
        await refused(on_postgres, lent, "two-phase transaction")
        await lent.tpc_rollback()
    engine = sqlalchemy.create_engine(postgres_url.replace("postgresql", "postgresql+psycopg", 1))
    with engine.connect() as begun, begun.begin_twophase() as transaction:
        await refused(on_postgres, begun, "two-phase transaction")
        transaction.rollback()
    engine.dispose()
