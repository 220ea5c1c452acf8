"""The schema for tools that apply SQL by themselves, in a transaction of their own: Alembic, Django, `psql`.

What they apply is recorded as our own `migrate` records it, so that each finds what the other did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fairlane.errors import ConfigurationError, SchemaError
from fairlane.store.migrations import Migration, load_functions, load_migrations, pending, require_current
from fairlane.store.procedures import Procedure, Query, Script, query, snapshot, transaction
from fairlane.store.statements import load_statements

_PACKAGES = {"postgresql": "fairlane.store.postgres", "sqlite": "fairlane.store.sqlite"}
_RECORDS = {"fairlane.store.postgres": "fairlane.migrations", "fairlane.store.sqlite": "migrations"}
"""The tables of the migrations that a database has."""

Rows = Iterable[Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Schema:
    """The numbered migrations of one kind of database."""

    package: str

    @classmethod
    def of(cls, dialect: str) -> Schema:
        """The schema on `postgresql` or `sqlite`."""
        if dialect not in _PACKAGES:
            raise ConfigurationError(
                f"Fairlane keeps its jobs in PostgreSQL or SQLite, and has no schema for {dialect!r}; give it a "
                "database of its own: App('sqlite:///jobs.db')"
            )
        return cls(_PACKAGES[dialect])

    @property
    def newest(self) -> int:
        """The number of the last migration that this version has."""
        return len(load_migrations(self.package))

    def between(self, after: int, to: int | None = None) -> list[Migration]:
        """The migrations `after + 1 … to`; all that follow unless `to` is given."""
        newest = self.newest
        to = newest if to is None else to
        if to > newest:
            raise SchemaError(
                f"the newest migration of this version of Fairlane is {newest}, not {to}; upgrade Fairlane first"
            )
        if not 0 <= after < to:
            raise SchemaError(f"after={after} and to={to} name no migration; say 0 <= after < to <= {newest}")
        return load_migrations(self.package)[after:to]

    def script(self, after: int = 0, to: int | None = None) -> str:
        """SQL that brings a database from migration `after` to `to` and records it, to be run in one transaction."""
        parts = [f"{self._statement('create_migrations')};"] if after == 0 else []
        parts += [self._with_record(migration) for migration in self.between(after, to)]
        return "\n\n".join(parts) + "\n"

    @snapshot
    def require_current(self) -> Procedure[None]:
        """Raise `SchemaOutOfDate` or `SchemaTooNew` unless the database is what this program needs."""
        require_current(load_migrations(self.package), (yield from self._applied()))

    @transaction
    def migrate(self, to: int | None = None) -> Procedure[list[str]]:
        """Apply what is missing, one process at a time, all of it or nothing; the names of what was applied."""
        if self.package == _PACKAGES["postgresql"]:
            yield query("lock_migrations")
        yield Script(f"{self._statement('create_migrations')};")
        todo = pending(load_migrations(self.package), (yield from self._applied()))
        todo = [each for each in todo if to is None or each.number <= to]
        for migration in todo:
            yield Script(self._with_record(migration))
        return [migration.name for migration in todo]

    def apply(self, to: int, ask: Callable[[str], Rows], run: Callable[[str], object]) -> list[str]:
        """The same up to `to`, in the caller's transaction.

        `ask` returns the rows of one statement; `run` runs a script of several, and ends no transaction.
        """
        self.between(0, to)
        migrating = self.migrate(to).make()
        found: Any = None
        try:
            while True:
                asked = migrating.send(found)
                match asked:
                    case Script(sql):
                        found = run(sql)
                    case Query(name):
                        found = list(ask(self._statement(name)))
        except StopIteration as stop:
            applied: list[str] = stop.value
            return applied

    def _applied(self) -> Procedure[dict[int, str]]:
        """The checksum of each migration that the database has."""
        is_there = (yield query("has_migrations"))[0][0]
        return {row[0]: row[1] for row in (yield query("select_migrations"))} if is_there else {}

    def _with_record(self, migration: Migration) -> str:
        # Numbers, file names and checksums of our own package: nothing here comes from a user.
        values = f"({migration.number}, '{migration.name}', '{migration.checksum}')"
        recorded = f"insert into {_RECORDS[self.package]} (number, name, checksum)\nvalues {values};"
        parts = [f"-- migration {migration.name}", migration.sql.strip()]
        if migration.number == self.newest:
            parts.append(load_functions(self.package).strip())
        return "\n\n".join([*filter(None, parts), recorded])

    def _statement(self, name: str) -> str:
        return load_statements(self.package, "queries.sql")[name]
