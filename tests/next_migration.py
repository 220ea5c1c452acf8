"""The migration that comes after the last one: what a database of an older version meets."""

from __future__ import annotations

import pytest

from fairlane.store import migrations as migrate
from fairlane.store.migrations import Migration

NUMBERS = "select number from fairlane.from_the_next_migration"
"""One row with a 1 where it was applied."""


def add_next_migration(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on this version has one migration more, on both stores, in this process."""
    load = migrate._load

    def load_with_next(package: str) -> tuple[Migration, ...]:
        released = load(package)
        number = len(released) + 1
        schema = "fairlane." if package.endswith("postgres") else ""
        sql = f"create table {schema}from_the_next_migration as select 1 as number;"
        return (*released, Migration(number, f"{number:04}_next", "of the next", sql))

    monkeypatch.setattr(migrate, "_load", load_with_next)
