"""The condition of a PostgreSQL server, and of what waits in it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fairlane.clock import Instant
from fairlane.store.health import (
    ConnectionLimit,
    HorizonHolder,
    PostgresHealth,
    Standstill,
    TableHealth,
    standstills_in,
)
from fairlane.store.postgres.connections import STATEMENTS, Connection
from fairlane.store.postgres.scheduling import QueueHandle, Scheduling

HOLDERS = 10


async def examine_server(connection: Connection, *, brief: bool) -> PostgresHealth:
    limits = await connection.fetch(STATEMENTS["select_connection_limits"])
    holders = await connection.fetch(STATEMENTS["select_horizon_holders"], HOLDERS)
    tables = [] if brief else await connection.fetch(STATEMENTS["select_tables"])
    return PostgresHealth(
        settings={} if brief else dict(await connection.fetch(STATEMENTS["select_settings"])),
        connections=[ConnectionLimit(**row) for row in limits],
        tables=[TableHealth(**row) for row in tables],
        holders=[HorizonHolder(**row) for row in holders],
        hidden=0 if brief else await connection.fetchval(STATEMENTS["count_hidden_sessions"]),
    )


async def find_standstills(
    connection: Connection, queues: Sequence[QueueHandle], before: Instant, limit: int
) -> list[Standstill]:
    found: list[Standstill] = []
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        for queue in queues:
            loaded = await Scheduling(connection, queue, None).load(0)
            changed, state = loaded.board.changed, loaded.opened.state
            stored = await connection.fetch(
                STATEMENTS["select_standstills"], [queue.name], before, limit, list(changed[0]), list(changed[2])
            )
            found += [
                Standstill(
                    queue=row["queue"],
                    limit=row["limit"],
                    key=msgspec.json.decode(row["key"]),
                    lanes=row["lanes"],
                    since=row["since"],
                )
                for row in stored
            ]
            found += standstills_in(queue.name, loaded.board.changed_rows(), state, before)
    return found
