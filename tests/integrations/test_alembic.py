"""Fairlane's schema through Alembic: the same as our own `migrate` makes, applied and recorded once."""

from __future__ import annotations

import asyncio
import io
import re
import sqlite3
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import Column, Integer, MetaData, Table, create_engine

from fairlane import App
from fairlane.errors import ConfigurationError, SchemaError, SchemaOutOfDate, SchemaTooNew
from fairlane.integrations.alembic import include_name, include_object, upgrade_sql
from fairlane.store.scripts import Schema
from tests.next_migration import NUMBERS, add_next_migration

ENV = """
import asyncio

from alembic import context
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

url = context.config.get_main_option("sqlalchemy.url")


def migrate(connection):
    context.configure(connection=connection)
    with context.begin_transaction():
        context.run_migrations()


async def migrate_async():
    engine = create_async_engine(url)
    try:
        async with engine.connect() as connection:
            await connection.run_sync(migrate)
    finally:
        await engine.dispose()


if context.is_offline_mode():
    context.configure(url=url, literal_binds=True)
    with context.begin_transaction():
        context.run_migrations()
elif "asyncpg" in url or "aiosqlite" in url:
    asyncio.run(migrate_async())
else:
    engine = create_engine(url)
    try:
        with engine.connect() as connection:
            migrate(connection)
    finally:
        engine.dispose()
"""

REVISION = """
from alembic import op
from fairlane.integrations.alembic import upgrade as upgrade_fairlane

revision, down_revision = {revision!r}, {down!r}


def upgrade():
    op.execute("create table if not exists of_{revision} (id integer primary key)")
    upgrade_fairlane(op, after={after}, to={to})
    {then}


def downgrade():
    op.execute("drop table of_{revision}")
"""


class Project:
    """A program's own Alembic migrations, two of which bring Fairlane's schema along."""

    def __init__(self, folder: Path, url: str, to: int) -> None:
        self.url, self.newest = url, to
        (folder / "versions").mkdir()
        (folder / "env.py").write_text(ENV)
        self._versions = folder / "versions"
        self.write("first", None, 0, to - 1)
        self.write("second", "first", to - 1, to)
        self._config = Config()
        self._config.set_main_option("script_location", str(folder))
        self._config.set_main_option("path_separator", "os")
        self._config.set_main_option("sqlalchemy.url", url)

    def write(self, revision: str, down: str | None, after: int, to: int, then: str = "pass") -> None:
        text = REVISION.format(revision=revision, down=down, after=after, to=to, then=then)
        (self._versions / f"{revision}.py").write_text(text)

    def upgrade(self, to: str = "head") -> None:
        command.upgrade(self._config, to)

    def downgrade(self, to: str) -> None:
        command.downgrade(self._config, to)

    def upgrade_sql(self, to: str = "head") -> str:
        self._config.output_buffer = said = io.StringIO()
        command.upgrade(self._config, to, sql=True)
        return said.getvalue()


@pytest.fixture(params=["sqlite", "sqlite+aiosqlite", "postgresql+psycopg", "postgresql+asyncpg"])
def project(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    add_next_migration(monkeypatch)
    driver: str = request.param
    if driver.startswith("sqlite"):
        return Project(tmp_path, f"{driver}:///{tmp_path}/shop.db", Schema.of("sqlite").newest)
    url: str = request.getfixturevalue("empty_postgres_url")
    return Project(tmp_path, url.replace("postgresql", driver, 1), Schema.of("postgresql").newest)


def app_of(project: Project) -> App:
    scheme, _, rest = project.url.partition("://")
    return App(f"{scheme.partition('+')[0]}://{rest}")


def applied_by_us(project: Project) -> list[str]:
    return asyncio.run(app_of(project).migrate())


def rows_of(project: Project, statement: str) -> list[tuple[Any, ...]]:
    """What the database says; a table that is not there has no rows."""
    app = app_of(project)
    if app.url.startswith("sqlite"):
        connection = sqlite3.connect(app.url.removeprefix("sqlite:///"))
        try:
            return connection.execute(statement.replace("fairlane.", "")).fetchall()
        except sqlite3.OperationalError:
            return []
        finally:
            connection.close()

    async def ask() -> list[tuple[Any, ...]]:
        remote = await asyncpg.connect(app.url)
        try:
            return [tuple(row) for row in await remote.fetch(statement)]
        except (asyncpg.UndefinedTableError, asyncpg.InvalidSchemaNameError):
            return []
        finally:
            await remote.close()

    return asyncio.run(ask())


def test_what_alembic_has_applied_our_own_migrate_finds_done(project: Project) -> None:
    project.upgrade()
    assert applied_by_us(project) == []
    assert asyncio.run(works(app_of(project)))


async def works(app: App) -> bool:
    async def double(number: int) -> int:
        return 2 * number

    task = app.task(double)
    async with app:
        job = await task.enqueue(21)
        return str(await job.status()) == "ready"


def test_what_our_own_migrate_has_applied_alembic_finds_done(project: Project) -> None:
    assert len(applied_by_us(project)) == project.newest
    before = rows_of(project, "select number, checksum from fairlane.migrations order by number")
    project.upgrade()
    assert rows_of(project, "select number, checksum from fairlane.migrations order by number") == before
    assert asyncio.run(works(app_of(project)))


def test_a_step_stops_where_it_says(project: Project) -> None:
    project.upgrade("first")
    numbers = [number for (number,) in rows_of(project, "select number from fairlane.migrations order by number")]
    assert numbers == list(range(1, project.newest))
    if "postgresql" in project.url:
        with pytest.raises(SchemaOutOfDate):
            asyncio.run(works(app_of(project)))
    project.upgrade()
    assert applied_by_us(project) == []


def test_a_migration_that_fails_leaves_nothing_of_our_schema(project: Project) -> None:
    project.write("second", "first", 0, project.newest, then="raise RuntimeError('on second thought')")
    project.upgrade("first")
    before = rows_of(project, "select number from fairlane.migrations")
    with pytest.raises(RuntimeError, match="on second thought"):
        project.upgrade()
    assert rows_of(project, "select number from fairlane.migrations") == before
    assert rows_of(project, NUMBERS) == []
    project.write("second", "first", 0, project.newest)
    project.upgrade()
    assert applied_by_us(project) == []
    assert rows_of(project, NUMBERS) == [(1,)]


def test_a_downgrade_leaves_our_tables_and_the_way_back_up_is_open(project: Project) -> None:
    project.upgrade()
    project.downgrade("base")
    assert len(rows_of(project, "select number from fairlane.migrations")) == project.newest
    project.upgrade()
    assert asyncio.run(works(app_of(project)))


@pytest.mark.parametrize("steps", [("head",), ("first", "first:second")], ids=["at once", "one after the other"])
def test_a_script_made_offline_builds_what_workers_accept(project: Project, steps: tuple[str, ...]) -> None:
    app = app_of(project)
    for step in steps:
        script = project.upgrade_sql(step)
        if app.url.startswith("sqlite"):
            connection = sqlite3.connect(app.url.removeprefix("sqlite:///"))
            connection.executescript(script)
            connection.close()
        else:
            asyncio.run(_execute(app.url, script))
    assert applied_by_us(project) == []
    assert asyncio.run(works(app))


def test_the_page_s_next_migration_goes_on_where_its_last_one_ends() -> None:
    page = Path(__file__).parents[2] / "docs/how-to/use-with-sqlalchemy-and-alembic.md"
    steps = re.findall(r"fairlane\.upgrade\(op, (?:after=(\d+), )?to=(\d+)\)", page.read_text())
    assert len(steps) == 2
    (_, last), (after, _) = steps
    assert after == last


async def _execute(url: str, script: str) -> None:
    connection = await asyncpg.connect(url)
    await connection.execute(script)
    await connection.close()


def test_a_database_of_a_newer_fairlane_is_refused_and_left_alone(project: Project) -> None:
    applied_by_us(project)
    newer = "insert into fairlane.migrations (number, name, checksum) values (9999, '9999_future', 'x') returning 1"
    if "postgresql" in project.url:
        rows_of(project, newer)
    else:
        path = project.url.partition(":///")[2]
        with sqlite3.connect(path) as connection:
            connection.execute(newer.replace("fairlane.", ""))
        connection.close()
    with pytest.raises(SchemaTooNew):
        project.upgrade()


def test_numbers_and_databases_that_there_are_not_are_refused() -> None:
    with pytest.raises(SchemaError, match="upgrade Fairlane first"):
        upgrade_sql("sqlite", to=999)
    with pytest.raises(SchemaError, match="name no migration"):
        upgrade_sql("sqlite", after=1, to=1)
    with pytest.raises(ConfigurationError, match="no schema for 'mysql'"):
        upgrade_sql("mysql", to=1)


# Autogenerate.


def differences(url: str, metadata: MetaData, *, filtered: bool = True, **options: Any) -> list[str]:
    engine = create_engine(url)
    filters: dict[str, Any] = {"include_object": include_object} if filtered else {}
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={**filters, **options})
        found = compare_metadata(context, metadata)
    engine.dispose()
    return [f"{each[0]} {each[1].name}" for each in found]


def of_a_program() -> MetaData:
    metadata = MetaData()
    Table("orders", metadata, Column("id", Integer, primary_key=True))
    return metadata


@pytest.mark.filterwarnings("ignore:Skipped unsupported reflection of expression-based:sqlalchemy.exc.SAWarning")
def test_autogenerate_leaves_our_tables_in_a_sqlite_file_alone(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/shop.db"
    asyncio.run(App(url).migrate())
    assert "remove_table jobs" in differences(url, of_a_program(), filtered=False)
    assert differences(url, of_a_program()) == ["add_table orders"]


def test_a_table_of_the_program_is_its_own_whatever_its_name(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/other.db"
    theirs = MetaData()
    Table("jobs", theirs, Column("number", Integer, primary_key=True), Column("salary", Integer))
    engine = create_engine(url)
    theirs.create_all(engine)
    engine.dispose()
    assert differences(url, theirs) == []
    assert differences(url, MetaData()) == ["remove_table jobs"]


def test_autogenerate_leaves_our_schema_on_postgresql_alone(postgres_url: str) -> None:
    url = postgres_url.replace("postgresql", "postgresql+psycopg", 1)
    assert differences(url, of_a_program(), filtered=False) == ["add_table orders"]
    everywhere: dict[str, Any] = {"include_schemas": True, "include_name": include_name}
    assert differences(url, of_a_program(), **everywhere) == ["add_table orders"]


@pytest.mark.filterwarnings("ignore:Skipped unsupported reflection of expression-based:sqlalchemy.exc.SAWarning")
@pytest.mark.filterwarnings("ignore:Did not recognize type:sqlalchemy.exc.SAWarning")
def test_include_object_alone_keeps_our_schema_too(postgres_url: str) -> None:
    url = postgres_url.replace("postgresql", "postgresql+psycopg", 1)
    assert "remove_table jobs" in differences(url, of_a_program(), filtered=False, include_schemas=True)
    assert differences(url, of_a_program(), include_schemas=True) == ["add_table orders"]
