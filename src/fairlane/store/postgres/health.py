"""The condition of a PostgreSQL server, and of what waits in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from fairlane.clock import Instant
from fairlane.store.health import ConnectionLimit, HorizonHolder, PostgresHealth, Standstill, TableHealth
from fairlane.store.postgres.connections import STATEMENTS

if TYPE_CHECKING:
    from fairlane.store.postgres.connections import Connection

__all__ = ["examine_server", "find_standstills"]

HOLDERS = 10


async def examine_server(connection: Connection) -> PostgresHealth:
    limits = await connection.fetch(STATEMENTS["select_connection_limits"])
    tables = await connection.fetch(STATEMENTS["select_tables"])
    holders = await connection.fetch(STATEMENTS["select_horizon_holders"], HOLDERS)
    return PostgresHealth(
        settings=dict(await connection.fetch(STATEMENTS["select_settings"])),
        connections=[ConnectionLimit(**row) for row in limits],
        tables=[TableHealth(**row) for row in tables],
        holders=[HorizonHolder(**row) for row in holders],
        hidden=await connection.fetchval(STATEMENTS["count_hidden_sessions"]),
    )


async def find_standstills(
    connection: Connection, queues: Sequence[str], before: Instant, limit: int
) -> list[Standstill]:
    found = await connection.fetch(STATEMENTS["select_standstills"], list(queues), before, limit)
    return [
        Standstill(
            queue=row["queue"],
            limit=row["limit"],
            key=msgspec.json.decode(row["key"]),
            lanes=row["lanes"],
            since=row["since"],
        )
        for row in found
    ]
