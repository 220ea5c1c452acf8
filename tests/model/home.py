"""Where a life is lived: a store on its database, which may crash and be looked into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fairlane.clock import ManualClock
from fairlane.store import records
from fairlane.store.postgres import PostgresStore
from fairlane.store.protocol import Store
from fairlane.store.sqlite import SqliteStore
from tests.model import boards
from tests.store.harness import Database

__all__ = ["Home"]


@dataclass
class Home:
    """A store that takes part."""

    database: Database
    clock: ManualClock
    _store: Store | None = None

    @property
    def store(self) -> Store:
        assert self._store is not None
        return self._store

    async def open(self) -> None:
        self._store = await self.database.open(self.clock)

    async def crash(self) -> None:
        """All that was in this process's memory is gone. (A database in memory would go with it, and stays.)"""
        if self.database.kind != "sqlite-memory":
            await self.database.close()
            await self.open()

    # The only looks behind the protocol.

    async def checkpoint(self) -> None:
        """Let the tables hold all boards, and everybody forget them."""
        for name in await self.store.run(records.queues()):
            await boards.seal(self.store, name)

    async def counted(self) -> dict[bytes, int]:
        """How many each gate of a concurrency says are in flight."""
        await self.checkpoint()
        return dict(
            await self.look("""select id, in_flight from gates where "limit" like 'concurrency%' and in_flight <> 0""")
        )

    async def keys_of_nobody(self) -> list[Any]:
        """Unique keys that were taken by jobs that are gone, and that no time will free."""
        return await self.look(
            "select id from uniques where expires_at is null and not exists (select 1 from jobs where id = uniques.job)"
        )

    async def run(self, statement: str) -> None:
        """Whatever the database is told."""
        match self.store:
            case SqliteStore() as store:
                await store._database.write(lambda tx: tx.connection.execute(statement), durable=False)
            case PostgresStore() as store:
                async with store._connections.session() as connection:
                    await connection.execute(statement)
            case _:
                raise AssertionError(f"{self.store!r} is not a store that is known here")

    async def look(self, query: str) -> list[Any]:
        """Whatever the database says."""
        match self.store:
            case SqliteStore() as store:
                return await store._database.read(lambda tx: tx.connection.execute(query).fetchall())
            case PostgresStore() as store:
                async with store._connections.session() as connection, connection.transaction():
                    await connection.execute("set local search_path to fairlane")
                    return [tuple(row) for row in await connection.fetch(query)]
        raise AssertionError(f"{self.store!r} is not a store that is known here")
