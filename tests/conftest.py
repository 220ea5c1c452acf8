from __future__ import annotations

import asyncio
import itertools
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from fairlane import App
from fairlane.clock import ManualClock
from fairlane.store.postgres import PostgresStore
from fairlane.testing.postgres import ThrowawayPostgres

_database_numbers = itertools.count(1)

MEMORY = Path("/dev/shm")
PLENTY = 6 << 30


def _has_plenty(folder: Path) -> bool:
    """Whether this is memory in which the databases of all tests have room, and whose programs may be run."""
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return False
    room = os.statvfs(folder)
    stats = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(stats["MemAvailable"].removesuffix("kB")) << 10
    return not room.f_flag & os.ST_NOEXEC and min(room.f_bavail * room.f_frsize, available) >= PLENTY


# Most of what tests write is a database that lives for a moment: a disk is busy with these for minutes.
if "TMPDIR" not in os.environ and _has_plenty(MEMORY):
    os.environ["TMPDIR"] = str(MEMORY)
    tempfile.tempdir = None

# A shell that runs the tests in its background has them ignore Ctrl-C, and so would every process that they interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says how busy the machine is, and nothing about the code.
settings.register_profile("house", deadline=None)
settings.load_profile("house")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`-k "not postgres"` leaves out every test that needs a server, not only those with the word in their name."""
    for item in items:
        if isinstance(item, pytest.Function) and "postgres" in item.fixturenames:
            item.extra_keyword_matches.add("postgres")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def producers_know_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No producer has to learn the new number before a change of partitions is over."""
    monkeypatch.setattr("fairlane.store.repartition.LEARNED_AFTER", 0)


@pytest.fixture(scope="session")
def postgres() -> Iterator[ThrowawayPostgres]:
    """One cluster for each xdist worker."""
    with ThrowawayPostgres(fsync=False) as server:
        yield server


@pytest.fixture(scope="session")
def postgres_template(postgres: ThrowawayPostgres) -> str:
    """The database that every test's own is a copy of, with Fairlane's schema. Leave no connection to it open."""
    asyncio.run(_migrate(asyncio.run(postgres.create_database("fairlane_template"))))
    return "fairlane_template"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def app(clock: ManualClock) -> AsyncIterator[App]:
    """An app with a database in memory, whose time stands still."""
    app = App("sqlite://", clock=clock)
    yield app
    await app.close()


# The database fixtures are blocking, so that blocking and async tests can both use them.
@pytest.fixture
def postgres_url(postgres: ThrowawayPostgres, postgres_template: str) -> Iterator[str]:
    """A fresh database for one test, its schema in place."""
    yield from _database(postgres, postgres_template)


@pytest.fixture
def empty_postgres_url(postgres: ThrowawayPostgres) -> Iterator[str]:
    """A fresh database for one test, with nothing in it."""
    yield from _database(postgres, "template1")


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A fresh database of each kind: a SQLite file, and one with the schema in place on PostgreSQL."""
    return f"sqlite:///{tmp_path / 'jobs.db'}" if request.param == "sqlite" else request.getfixturevalue("postgres_url")


def _database(postgres: ThrowawayPostgres, template: str) -> Iterator[str]:
    name = f"test_{next(_database_numbers)}"
    yield asyncio.run(postgres.create_database(name, template=template))
    asyncio.run(postgres.drop_database(name))


async def _migrate(url: str) -> None:
    store = PostgresStore(url)
    await store.migrate()
    await store.close()
