"""Beside SQLAlchemy: whose database an engine's is, and what follows a commit."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from fairlane import App, Backlog, Outcome
from fairlane.errors import ConfigurationError, StoreUnavailable
from fairlane.integrations.sqlalchemy import enqueue_after_commit, url_of
from fairlane.testing import assert_enqueued, enqueued_jobs

# Where an engine's database is.


@pytest.mark.parametrize(
    ("of_sqlalchemy", "ours"),
    [
        ("postgresql://db/shop", "postgresql://db/shop"),
        ("postgresql+asyncpg://shop@db:6432/shop", "postgresql://shop@db:6432/shop"),
        ("postgresql+psycopg://shop:p%40ss%2Fword@db/shop", "postgresql://shop:p%40ss%2Fword@db/shop"),
        ("postgresql+psycopg2://u@/shop?host=/run/pg", "postgresql://u@/shop?host=%2Frun%2Fpg"),
        ("postgresql+psycopg://u@/shop?host=/run/pg&port=5433", "postgresql://u@/shop?host=%2Frun%2Fpg&port=5433"),
        ("postgresql://u@/shop?host=a:1&host=b:2", "postgresql://u@/shop?host=a%3A1%2Cb%3A2"),
        ("postgresql://u@/shop?host=a,b&port=1,2", "postgresql://u@/shop?host=a%2Cb&port=1%2C2"),
        ("postgresql://u@[::1]:5433/shop", "postgresql://u@[::1]:5433/shop"),
        ("postgresql+asyncpg://u@db/shop?ssl=require", "postgresql://u@db/shop?sslmode=require"),
        ("postgresql://u@db/shop?sslmode=verify-full&sslrootcert=%2Fca", "postgresql://u@db/shop?sslmode=verify-full&sslrootcert=%2Fca"),
        ("postgresql://u@db/shop?connect_timeout=3&application_name=web", "postgresql://u@db/shop"),
        ("sqlite:///shop.db", f"sqlite:///{Path.cwd()}/shop.db"),
        ("sqlite+aiosqlite:////srv/shop.db?timeout=9", "sqlite:////srv/shop.db"),
        ("sqlite:///file:shop.db?mode=rwc&uri=true", f"sqlite:///{Path.cwd()}/shop.db"),
    ],
)  # fmt: skip
def test_an_app_finds_the_database_of_an_engine(of_sqlalchemy: str, ours: str) -> None:
    assert url_of(of_sqlalchemy) == ours
    App(ours)


def test_an_engine_a_connection_and_a_session_s_bind_name_the_same_database(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    engine = create_engine(f"sqlite:///{path}")
    with engine.connect() as connection:
        assert url_of(engine) == url_of(engine.url) == url_of(connection) == f"sqlite:///{path}"
    assert url_of(create_async_engine(f"sqlite+aiosqlite:///{path}")) == f"sqlite:///{path}"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("sqlite://", "in memory"),
        ("sqlite+aiosqlite:///:memory:", "in memory"),
        ("sqlite:///file:shared?mode=memory&cache=shared&uri=true", "in memory"),
        ("mysql+pymysql://shop@db/shop", "PostgreSQL or SQLite, not in mysql"),
        ("postgresql://u@db/shop?channel_binding=require", "'channel_binding'"),
    ],
)
def test_what_no_app_can_share_is_refused(url: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        url_of(url)


async def test_the_url_of_an_engine_reaches_its_database(postgres_url: str) -> None:
    place = urlsplit(postgres_url)
    login, database = f"postgresql+asyncpg://{place.username}@", place.path[1:]
    folder = (await asked(postgres_url, "select current_setting('unix_socket_directories')")).partition(",")[0]
    for url in (
        postgres_url,
        f"{login}/{database}?host={place.hostname}:{place.port}",
        f"{login}/{database}?host={folder}&port={place.port}",
    ):
        engine = create_async_engine(url.replace("postgresql://", "postgresql+asyncpg://"))
        async with App(url_of(engine)) as app, AsyncSession(engine) as session, session.begin():
            assert (await app.task(nothing).using(tx=session).enqueue(1)).outcome is Outcome.ENQUEUED
        await engine.dispose()


async def test_what_the_server_is_told_goes_along(postgres_url: str) -> None:
    url = url_of(
        f"{postgres_url}?options=-cwork_mem%3D7MB&connect_timeout=3".replace("postgresql", "postgresql+psycopg")
    )
    assert await asked(url, "select current_setting('work_mem')") == "7MB"


async def asked(url: str, statement: str) -> str:
    connection = await asyncpg.connect(url)
    try:
        return str(await connection.fetchval(statement))
    finally:
        await connection.close()


# After the commit.


async def nothing(order: int) -> None: ...


@pytest.fixture
async def shop(tmp_path: Path) -> AsyncIterator[App]:
    async with App(f"sqlite:///{tmp_path}/jobs.db") as app:
        app.task(name="confirm")(nothing)
        yield app


@pytest.fixture
async def session(tmp_path: Path) -> AsyncIterator[AsyncSession]:
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/orders.db")
    async with AsyncSession(engine) as session:
        await session.execute(text("create table orders (id integer primary key)"))
        await session.commit()
        yield session
    await engine.dispose()


async def orders_of(app: App) -> list[int]:
    return [each.arguments["order"] for each in await enqueued_jobs(app)]


async def test_a_commit_is_followed_by_what_was_asked_for_and_a_rollback_by_nothing(
    shop: App, session: AsyncSession
) -> None:
    confirm = shop.registry["confirm"]
    await session.execute(text("insert into orders values (1)"))
    enqueue_after_commit(session, confirm.call(1), confirm.call(2))
    assert await orders_of(shop) == []
    await session.commit()
    assert await orders_of(shop) == [1, 2]

    enqueue_after_commit(session, confirm.call(3))
    await session.rollback()
    enqueue_after_commit(session, confirm.call(4))
    await session.close()
    await session.execute(text("insert into orders values (5)"))
    await session.commit()
    assert await orders_of(shop) == [1, 2]


async def test_a_savepoint_takes_back_its_own_share(shop: App, session: AsyncSession) -> None:
    confirm = shop.registry["confirm"]
    async with session.begin():
        await session.execute(text("insert into orders values (1)"))
        enqueue_after_commit(session, confirm.call(1))
        async with session.begin_nested():
            enqueue_after_commit(session, confirm.call(2))
            taken_back = await session.begin_nested()
            enqueue_after_commit(session, confirm.call(3))
            await taken_back.rollback()
        assert await orders_of(shop) == []
    assert await orders_of(shop) == [1, 2]


async def test_a_released_savepoint_goes_with_the_whole(shop: App, session: AsyncSession) -> None:
    await session.execute(text("insert into orders values (1)"))
    async with session.begin_nested():
        enqueue_after_commit(session, shop.registry["confirm"].call(1))
    await session.rollback()
    assert await orders_of(shop) == []


async def test_run_sync_enqueues_too(shop: App, session: AsyncSession) -> None:
    confirm = shop.registry["confirm"]

    def work(inner: Session) -> None:
        enqueue_after_commit(inner, confirm.call(1))
        inner.commit()

    await session.run_sync(work)
    await assert_enqueued(shop, confirm.call(1), count=1)


def test_a_session_that_is_not_async_blocks_until_its_jobs_are_enqueued(tmp_path: Path) -> None:
    app = App(f"sqlite:///{tmp_path}/jobs.db")
    confirm = app.task(nothing)
    engine = create_engine(f"sqlite:///{tmp_path}/orders.db")
    with Session(engine) as session:
        enqueue_after_commit(session, confirm.call(1))
        session.commit()
    scoped = scoped_session(sessionmaker(engine))
    with scoped.begin():
        enqueue_after_commit(scoped, confirm.call(2))
    scoped.remove()
    assert asyncio.run(_listed(app)) == [1, 2]


async def _listed(app: App) -> list[int]:
    await app.close()
    async with app:
        return await orders_of(app)


async def test_what_is_lost_after_a_commit_is_said_and_leaves_the_session_in_order(
    session: AsyncSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    app = App(f"sqlite:///{tmp_path}/no-such-folder/jobs.db")
    enqueue_after_commit(session, app.task(name="confirm")(nothing).call(7))
    with caplog.at_level(logging.ERROR), pytest.raises(StoreUnavailable):
        await session.commit()
    assert "has committed, and jobs of these tasks were not enqueued: confirm" in caplog.text
    await session.execute(text("insert into orders values (8)"))
    await session.commit()


async def test_a_full_backlog_after_a_commit_is_said(
    shop: App, session: AsyncSession, caplog: pytest.LogCaptureFixture
) -> None:
    shop.queue("small", limits=[Backlog(1, when_full="reject")])
    confirm = shop.task(name="small", queue="small")(nothing)
    enqueue_after_commit(session, confirm.call(1), confirm.call(2))
    with caplog.at_level(logging.ERROR):
        await session.commit()
    assert "has committed, and a job of small was refused" in caplog.text


async def test_what_cannot_follow_a_commit_is_refused_at_once(shop: App, session: AsyncSession) -> None:
    confirm = shop.registry["confirm"]
    with pytest.raises(ConfigurationError, match="takes calls"):
        enqueue_after_commit(session, "confirm")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="of its own"):
        enqueue_after_commit(session, confirm.using(tx=session).call(1))
    with (
        Session(create_engine("sqlite://")) as blocking,
        pytest.raises(ConfigurationError, match="use an AsyncSession"),
    ):
        enqueue_after_commit(blocking, confirm.call(1))
