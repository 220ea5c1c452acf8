from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, get_args

import asyncpg
import pytest

from fairlane.clock import ManualClock
from fairlane.store.protocol import Store
from tests.store.by_hand import Shop, open_shop
from tests.store.harness import Database, Kind


@pytest.fixture(params=get_args(Kind))
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    return _empty_database(request, tmp_path)


@pytest.fixture(params=["sqlite-file", "postgres"])
def shared_place(request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    return _empty_database(request, tmp_path)


@pytest.fixture
async def database(place: Database) -> AsyncIterator[Database]:
    """A database of every kind, without jobs; the stores on it are closed with the test."""
    yield place
    await place.close()


@pytest.fixture
async def shared_database(shared_place: Database) -> AsyncIterator[Database]:
    """The same, of the kinds that several connections and processes can share."""
    yield shared_place
    await shared_place.close()


@pytest.fixture
async def connection(postgres_url: str) -> AsyncIterator[asyncpg.Connection[Any]]:
    """To the test's PostgreSQL database, beside its store."""
    connection = await asyncpg.connect(postgres_url)
    yield connection
    await connection.close()


@pytest.fixture
async def store(database: Database, clock: ManualClock) -> Store:
    """An open store whose time moves only when the test says so."""
    return await database.open(clock)


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    """Apps that are entered here are closed with the test, before their database."""
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
async def shop(database: Database, clock: ManualClock, stack: AsyncExitStack) -> Shop:
    """A program that claims by hand, on a database of every kind."""
    return await open_shop(stack, database, clock)


def _empty_database(request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    kind: Kind = request.param
    match kind:
        case "sqlite-memory":
            return Database(kind, "")
        case "sqlite-file":
            return Database(kind, str(tmp_path / "jobs.db"))
        case "postgres":
            return Database(kind, request.getfixturevalue("postgres_url"))
