from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

import pytest

from fairlane.testing.postgres import ThrowawayPostgres

_database_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def postgres() -> Iterator[ThrowawayPostgres]:
    """One cluster for each xdist worker."""
    with ThrowawayPostgres(fsync=False) as server:
        yield server


@pytest.fixture(scope="session")
def postgres_template(postgres: ThrowawayPostgres) -> str:
    """The name of the database that every test's own database is a copy of. Leave no connection to it open."""
    asyncio.run(postgres.create_database("fairlane_template"))
    return "fairlane_template"


# The database fixtures are blocking, so that blocking and async tests can both use them.
@pytest.fixture
def postgres_url(postgres: ThrowawayPostgres, postgres_template: str) -> Iterator[str]:
    """A fresh database for one test."""
    name = f"test_{next(_database_numbers)}"
    yield asyncio.run(postgres.create_database(name, template=postgres_template))
    asyncio.run(postgres.drop_database(name))
