"""What several integrations need."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from functools import cache

from fairlane.errors import ConfigurationError
from fairlane.store.scripts import Schema

_COLUMNS = """
select made.name, columns.name
from sqlite_schema made, pragma_table_info(made.name) columns
where made.type = 'table'
"""


def missing(extra: str, error: ImportError) -> ConfigurationError:
    """What to say where the package of an integration is not installed."""
    return ConfigurationError(
        f"fairlane.integrations.{extra} needs {error.name}, not installed: pip install 'fairlane[{extra}]'"
    )


@cache
def tables_on_sqlite() -> dict[str, set[str]]:
    """The columns of each of our tables in a SQLite file, as the migrations make them."""
    tables: dict[str, set[str]] = {}
    with closing(sqlite3.connect(":memory:")) as scratch:
        scratch.executescript(Schema.of("sqlite").script())
        for table, column in scratch.execute(_COLUMNS):
            tables.setdefault(table, set()).add(column)
    return tables
