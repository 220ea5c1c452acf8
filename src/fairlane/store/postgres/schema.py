"""The schema on PostgreSQL: numbered migrations, applied by one process at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fairlane.store import migrate as migrations
from fairlane.store.postgres.connections import STATEMENTS

if TYPE_CHECKING:
    from fairlane.store.postgres.connections import Connection

__all__ = ["migrate", "require_current"]

PACKAGE = "fairlane.store.postgres"


async def require_current(connection: Connection) -> None:
    """Raise `SchemaOutOfDate` or `SchemaTooNew` unless the database is what this program needs."""
    applied: dict[int, str] = {}
    if await connection.fetchval(STATEMENTS["has_migrations"]):
        applied = dict(await connection.fetch(STATEMENTS["select_migrations"]))
    migrations.require_current(migrations.load_migrations(PACKAGE), applied)


async def migrate(connection: Connection) -> list[str]:
    """Apply what is missing, all of it or nothing."""
    async with connection.transaction():
        await connection.execute(STATEMENTS["lock_migrations"])
        await connection.execute(STATEMENTS["create_migrations"])
        applied = dict(await connection.fetch(STATEMENTS["select_migrations"]))
        todo = migrations.pending(migrations.load_migrations(PACKAGE), applied)
        for migration in todo:
            await connection.execute(migration.sql)
            await connection.execute(
                STATEMENTS["insert_migration"], migration.number, migration.name, migration.checksum
            )
    return [migration.name for migration in todo]
