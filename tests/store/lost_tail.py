"""A database that has crashed: what was not flushed is gone, and processes remember it.

Claims, checkpoints, reaping and collection do not wait for the disk; a crash may lose the last of them. What is durable
flushes everything before it, so that nothing else is ever lost. A copy is taken, and put back under open stores.
"""

from __future__ import annotations

import sqlite3

import asyncpg

from tests.store.harness import Database

__all__ = ["BOARD", "Copy"]

BOARD = ("flows", "lanes", "gates", "journal")
"""What a checkpoint writes, beside two numbers of the queue."""


class Copy:
    """The database as it was."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._file: sqlite3.Connection | None = None

    async def take(self) -> None:
        if self._database.kind == "postgres":
            await self._run(
                "drop schema if exists kept cascade; create schema kept;"
                + "".join(f"create table kept.{each} as table fairlane.{each};" for each in await self._tables())
            )
            return
        self._file = sqlite3.connect(":memory:")
        source = sqlite3.connect(self._database.url)
        source.backup(self._file)
        source.close()

    async def put_back(self) -> None:
        """All that was written since is lost."""
        if self._database.kind == "postgres":
            tables = await self._tables()
            await self._run(
                "set local session_replication_role = replica;"
                f"truncate {', '.join(f'fairlane.{each}' for each in tables)};"
                + "".join(
                    f"insert into fairlane.{each} ({names}) overriding system value select {names} from kept.{each};"
                    for each, names in tables.items()
                )
            )
            return
        assert self._file is not None
        target = sqlite3.connect(self._database.url)
        self._file.backup(target)
        target.close()

    async def put_back_checkpoint(self) -> None:
        """The tables of the board are as they were, and nothing else is."""
        if self._database.kind == "postgres":
            await self._run(
                f"truncate {', '.join(f'fairlane.{each}' for each in BOARD)};"
                + "".join(f"insert into fairlane.{each} select * from kept.{each};" for each in BOARD)
                + "update fairlane.queue_states q set stored = k.stored, base = k.base from kept.queue_states k "
                "where k.queue_id = q.queue_id"
            )
            return
        assert self._file is not None
        target = sqlite3.connect(self._database.url, isolation_level=None)
        target.execute("begin immediate")
        for table in BOARD:
            target.execute(f"delete from {table}")
            for row in self._file.execute(f"select * from {table}"):
                target.execute(f"insert into {table} values ({', '.join('?' * len(row))})", row)
        for numbers in self._file.execute("select stored, base, id from queues"):
            target.execute("update queues set stored = ?, base = ? where id = ?", numbers)
        target.execute("commit")
        target.close()

    async def _tables(self) -> dict[str, str]:
        """With the columns of each that can be written."""
        connection = await asyncpg.connect(self._database.url)
        try:
            found = await connection.fetch(
                "select table_name, string_agg(quote_ident(column_name), ', ') from information_schema.columns "
                "join information_schema.tables using (table_schema, table_name) where table_schema = 'fairlane' "
                "and table_type = 'BASE TABLE' and is_generated = 'NEVER' group by table_name"
            )
            return dict(map(tuple, found))
        finally:
            await connection.close()

    async def _run(self, script: str) -> None:
        connection = await asyncpg.connect(self._database.url)
        try:
            # All of one moment: a store may write a checkpoint at any time.
            async with connection.transaction(isolation="repeatable_read"):
                await connection.execute(script)
        finally:
            await connection.close()
