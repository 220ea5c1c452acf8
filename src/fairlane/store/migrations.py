"""Numbered migrations: which there are, which a database has, which it lacks. Stores apply them; this only decides.

A migration is a file `migrations/0001_first.sql` inside the package of its store. Once released it never changes:
its checksum is stored with it, and a database that was built from another text is refused, not guessed at.
Functions are in one file, `functions.sql`, which is applied again with the newest migration: to change a function is to
edit it there and to add a migration, which may hold nothing else.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable

import msgspec

from fairlane.errors import SchemaError, SchemaOutOfDate, SchemaTooNew
from fairlane.job import State

_STATES = {f"{{{state}}}": str(int(state)) for state in State}
_FILE = re.compile(r"(\d{4})_([a-z0-9_]+)\.sql\Z")


class Migration(msgspec.Struct, frozen=True):
    """One numbered step of a schema."""

    number: int
    name: str
    """As people see it: `0001_first`."""
    checksum: str
    sql: str


@cache
def _load(package: str) -> tuple[Migration, ...]:
    found: dict[int, Migration] = {}
    for file in files(package).joinpath("migrations").iterdir():
        if (match := _FILE.match(file.name)) is None:
            continue
        sql = read_sql(file)
        number = int(match[1])
        if number in found:
            raise SchemaError(f"{package}: {found[number].name} and {file.name} have the same number; renumber one")
        found[number] = Migration(number, file.name.removesuffix(".sql"), sha256(sql.encode()).hexdigest(), sql)
    numbers = sorted(found)
    if numbers != list(range(1, len(numbers) + 1)):
        raise SchemaError(f"{package}: its migrations are numbered {numbers}; number them from 1 without a gap")
    return tuple(found[number] for number in numbers)


def read_sql(file: Traversable) -> str:
    """The text of a `.sql` file, in which `{ready}` stands for the number of that state (see `job.State`)."""
    return re.sub(r"\{[a-z]+\}", lambda named: _STATES.get(named[0], named[0]), file.read_text(encoding="utf-8"))


def single_statements(script: str) -> list[str]:
    """A script for SQLite, taken apart: `executescript` would commit the transaction that it is run in."""
    statements, current = [], ""
    for line in script.splitlines(keepends=True):
        current += line
        if sqlite3.complete_statement(current):
            statements.append(current)
            current = ""
    return statements


def load_migrations(package: str) -> list[Migration]:
    """The migrations in the folder `migrations` of a store's package (`"fairlane.store.sqlite"`), in order."""
    return list(_load(package))


@cache
def load_functions(package: str) -> str:
    """The functions of a store's schema, to be created or replaced. SQLite has none."""
    file = files(package).joinpath("functions.sql")
    return read_sql(file) if file.is_file() else ""


def pending(migrations: Sequence[Migration], applied: Mapping[int, str]) -> list[Migration]:
    """What is still to be applied, in order; `applied` holds the checksum of each number the database has.

    Raises `SchemaTooNew` for a number this program does not know, `SchemaError` for one applied from another text.
    """
    known = {migration.number: migration for migration in migrations}
    unknown = sorted(set(applied) - set(known))
    if unknown:
        newest = max(known, default=0)
        raise SchemaTooNew(
            f"the database is at migration {unknown[-1]}, this version knows {newest}; upgrade Fairlane on this machine"
        )
    for number, checksum in sorted(applied.items()):
        if known[number].checksum != checksum:
            raise SchemaError(
                f"migration {known[number].name} was applied from another text than this version has; "
                "install the version that created this database, or restore the file as it was released"
            )
    return [migration for migration in migrations if migration.number not in applied]


def require_current(migrations: Sequence[Migration], applied: Mapping[int, str]) -> None:
    """Raise `SchemaOutOfDate` unless the database has every migration; what `pending` raises, too."""
    if missing := pending(migrations, applied):
        found = max(applied, default=0)
        raise SchemaOutOfDate(
            f"the database is at migration {found}, this version needs {missing[-1].number}; run `fairlane migrate`"
        )
