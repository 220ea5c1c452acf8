"""The schema of a SQLite file: whether it is up to date, and bringing it there."""

from __future__ import annotations

from fairlane.store.migrate import load_migrations, pending
from fairlane.store.scripting import single_statements
from fairlane.store.sqlite.database import Transaction

__all__ = ["is_current", "migrate"]

MIGRATIONS = "fairlane.store.sqlite"


def is_current(tx: Transaction) -> bool:
    if not tx.value("has_migrations"):
        return False
    return not pending(load_migrations(MIGRATIONS), dict(tx.all("select_migrations")))


def migrate(tx: Transaction) -> list[str]:
    tx.run("create_migrations")
    todo = pending(load_migrations(MIGRATIONS), dict(tx.all("select_migrations")))
    for migration in todo:
        for statement in single_statements(migration.sql):
            tx.connection.execute(statement)
        tx.run("insert_migration", migration.number, migration.name, migration.checksum)
    return [migration.name for migration in todo]
