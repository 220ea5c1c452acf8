"""Fairlane's schema in the Alembic migrations of a program, so that one tool migrates the whole database.

Migrations are recorded as by `fairlane migrate`: workers accept them, and each tool finds what the other applied.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from contextlib import closing
from typing import Any, Protocol

from fairlane.errors import ConfigurationError
from fairlane.integrations.extras import missing, tables_on_sqlite
from fairlane.store.migrations import single_statements
from fairlane.store.scripts import Schema

try:
    from alembic.runtime.migration import MigrationContext
    from sqlalchemy import Connection, Table
    from sqlalchemy.schema import SchemaItem
except ImportError as error:
    raise missing("alembic", error) from error

__all__ = ["include_name", "include_object", "upgrade", "upgrade_sql"]

SCHEMA = "fairlane"
"""The schema of our tables on PostgreSQL. SQLite has no schemas: they are beside the tables of the program."""


class Operating(Protocol):
    """Alembic's `op`, the module or an `Operations`."""

    def get_context(self) -> MigrationContext: ...


def upgrade(op: Operating, *, to: int, after: int = 0) -> list[str]:
    """Apply Fairlane's missing migrations up to `to`, in Alembic's own transaction. Returns their names.

    Offline (`alembic upgrade --sql`) the database cannot be read: the migrations `after + 1 … to` are written.
    """
    context = op.get_context()
    schema = Schema.of(context.dialect.name)
    coming = schema.between(after, to)
    if context.as_sql:
        context.impl.static_output(schema.script(after, to).rstrip())
        return [migration.name for migration in coming]
    connection = context.connection
    if connection is None:
        raise ConfigurationError("upgrade: this Alembic context has neither a connection nor an output; configure one")
    run = _run_on_sqlite if context.dialect.name == "sqlite" else _run_on_postgres
    return schema.apply(to, lambda statement: connection.exec_driver_sql(statement), lambda sql: run(connection, sql))


def upgrade_sql(dialect: str, *, to: int, after: int = 0) -> str:
    """The migrations as SQL, for `postgresql` or `sqlite`: for other tools that apply scripts in a transaction."""
    return Schema.of(dialect).script(after, to)


def include_name(name: str | None, type_: str, parent_names: MutableMapping[Any, Any]) -> bool:
    """For `context.configure(include_name=…)`: with `include_schemas=True`, Alembic does not look into our schema."""
    return not (type_ == "schema" and name == SCHEMA)


def include_object(
    object: SchemaItem, name: str | None, type_: str, reflected: bool, compare_to: SchemaItem | None
) -> bool:
    """For `context.configure(include_object=…)`: `alembic revision --autogenerate` leaves our tables alone."""
    if not (isinstance(object, Table) and reflected and compare_to is None):
        return True
    if object.schema == SCHEMA:
        return False
    return not _is_ours_on_sqlite(object)


def _is_ours_on_sqlite(table: Table) -> bool:
    # On SQLite our tables have plain names, such as `jobs`, which a program on PostgreSQL may use for its own. The
    # columns show whose table it is; one list may be longer if the file is from another version of Fairlane.
    ours = tables_on_sqlite().get(table.name)
    found = {column.name for column in table.columns}
    return table.schema is None and ours is not None and (found <= ours or ours <= found)


def _run_on_postgres(connection: Connection, script: str) -> None:
    """Run a script unchanged. SQLAlchemy itself takes one statement at a time, or interprets `%` and `:`."""
    adapted: Any = connection.connection.dbapi_connection
    if connection.dialect.driver == "asyncpg":
        adapted.run_async(lambda driver: driver.execute(script))
        return
    with closing(adapted.cursor()) as cursor:
        cursor.execute(script)


def _run_on_sqlite(connection: Connection, script: str) -> None:
    # Python begins a transaction only before statements that write rows; without one, the schema would change stepwise.
    if not connection.connection.driver_connection.in_transaction:  # type: ignore[union-attr]
        connection.exec_driver_sql("begin immediate")
    for statement in single_statements(script):
        connection.exec_driver_sql(statement)
