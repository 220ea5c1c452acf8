"""The schema of a SQLite file: whether it is up to date, and bringing it there."""

from __future__ import annotations

import sqlite3

from fairlane.store.migrate import load_migrations, pending
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
        for statement in _statements(migration.sql):
            tx.connection.execute(statement)
        tx.run("insert_migration", migration.number, migration.name, migration.checksum)
    return [migration.name for migration in todo]


def _statements(script: str) -> list[str]:
    """`executescript` would commit our transaction, so the script is taken apart."""
    statements, current = [], ""
    for line in script.splitlines(keepends=True):
        current += line
        if sqlite3.complete_statement(current):
            statements.append(current)
            current = ""
    return statements
