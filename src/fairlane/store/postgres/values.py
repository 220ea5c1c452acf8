"""Values by key on PostgreSQL, on a connection: the caller's, or one of the store's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fairlane.store.postgres.connections import STATEMENTS, Connection


async def write(connection: Connection, puts: Mapping[str, bytes], deletes: Iterable[str] = ()) -> None:
    """Put and delete all of these, in the order of their keys: two that write the same keys never deadlock.

    A key that is both deleted and put has the value that is put.
    """
    changes: dict[str, bytes | None] = {**dict.fromkeys(deletes), **puts}
    if changes:
        await connection.execute(STATEMENTS["write_values"], list(changes), list(changes.values()))
