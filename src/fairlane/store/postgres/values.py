"""Values by key on PostgreSQL, on a connection: the caller's, or one of the store's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from fairlane.store.postgres.connections import STATEMENTS

if TYPE_CHECKING:
    from fairlane.store.postgres.connections import Connection

__all__ = ["compare_and_set", "delete", "get", "put", "scan", "write"]


async def get(connection: Connection, key: str) -> bytes | None:
    value: bytes | None = await connection.fetchval(STATEMENTS["select_value"], key)
    return value


async def put(connection: Connection, key: str, value: bytes) -> None:
    await connection.execute(STATEMENTS["put_value"], key, value)


async def delete(connection: Connection, key: str) -> bool:
    """Whether it was there."""
    return await connection.fetchval(STATEMENTS["delete_value"], key) is not None


async def compare_and_set(connection: Connection, key: str, expected: bytes | None, value: bytes | None) -> bool:
    """Whether the key had the expected value, and has the new one now; `None` stands for no value."""
    # Each is one statement, which waits for whoever writes the same key and then looks at what they wrote.
    match expected, value:
        case None, None:
            return await get(connection, key) is None
        case None, _:
            found = await connection.fetchval(STATEMENTS["put_value_if_absent"], key, value)
        case _, None:
            found = await connection.fetchval(STATEMENTS["delete_value_if_equal"], key, expected)
        case _:
            found = await connection.fetchval(STATEMENTS["replace_value"], key, expected, value)
    return found is not None


async def scan(connection: Connection, low: str, end: str, limit: int) -> list[tuple[str, bytes]]:
    """What lies from `low` to before `end`, in order."""
    return [(key, value) for key, value in await connection.fetch(STATEMENTS["scan_values"], low, end, limit)]


async def write(connection: Connection, puts: Mapping[str, bytes], deletes: Iterable[str] = ()) -> None:
    """Put and delete all of these, in the order of their keys: two that write the same keys never deadlock.

    A key that is both deleted and put has the value that is put.
    """
    changes: dict[str, bytes | None] = {**dict.fromkeys(deletes), **puts}
    if changes:
        await connection.execute(STATEMENTS["write_values"], list(changes), list(changes.values()))
