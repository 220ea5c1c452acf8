"""A long past: a few thousand jobs really run through the public API, then copied back in time, as often as it takes.

Every row is one that Fairlane's own statements have left. A copy differs only in its ids, its positions and its times.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sqlite3
from collections.abc import Callable, Iterator
from typing import Any

import asyncpg

from fairlane import App, Fair, HeldClaim, Unique

__all__ = ["ACCOUNTS", "FILLER", "BenchApp", "fill_postgres", "fill_sqlite"]

ACCOUNTS = 1_000
FILLER = "x" * 60
TEMPLATE = 2_000
"""Jobs that are really run, half of them in each queue."""
MARGIN = 1_000
"""Milliseconds between one copy and the next."""
AT_ONCE = 50
"""Copies that are committed together."""

Progress = Callable[[int], None]


class BenchApp:
    """An app of two queues, one without a policy and one that is fair to a thousand accounts, on one database."""

    def __init__(self, url: str) -> None:
        self.app = App(url)
        self.plain = self.app.queue("plain")
        self.fair = self.app.queue("fair", fair=Fair(by="account"))

        @self.app.task(queue="plain", name="plain_noop")
        async def plain_noop(number: int, text: str) -> None: ...

        @self.app.task(queue="fair", name="fair_noop")
        async def fair_noop(number: int, account: str, text: str) -> None: ...

        self.plain_noop, self.fair_noop = plain_noop, fair_noop

    async def run_template(self) -> None:
        """Every way for a job to end, in the proportions of a healthy system: nearly all are done at the first try."""
        keyed = [self.plain_noop.using(unique=Unique(n)).call(n, FILLER) for n in range(0, TEMPLATE // 2, 10)]
        plain = [self.plain_noop.call(n, FILLER) for n in range(TEMPLATE // 2 - len(keyed))]
        fair = [self.fair_noop.call(n, f"account-{n % ACCOUNTS}", FILLER) for n in range(TEMPLATE // 2)]
        await self.app.enqueue_many([*keyed, *plain])
        await self.app.enqueue_many(fair)
        for queue in (self.plain, self.fair):
            turn = 0
            while claims := await queue.claim(50):
                turn += 1
                await self._settle(queue, claims, together=turn % 2 == 0)

    async def _settle(self, queue: Any, claims: list[HeldClaim], *, together: bool) -> None:
        retried, dead, cancelled, *rest = claims
        if retried.attempt == 1:
            await retried.retry("0s", "a service was away")
        else:
            rest.append(retried)
        await dead.dead("a service refused")
        await cancelled.cancel("not needed any more")
        if together:
            await queue.ack(rest)
        else:
            await asyncio.gather(*(claim.ack() for claim in rest))


def _copies(rows: int) -> Iterator[range]:
    """The numbers of all copies, the oldest first, in groups."""
    last = -(-rows // TEMPLATE)
    for first in range(last - 1, -1, -AT_ONCE):
        yield range(first, max(-1, first - AT_ONCE), -1)


# A copy's id keeps the random part of its job's, and its time goes back with the copy. Lists of columns are taken from
# the schema: what a later migration adds is copied as it stands.
_PREPARE = """
create schema past;
create function past.earlier(id uuid, ms bigint) returns uuid language sql immutable parallel safe as $$
    select (lpad(to_hex(('x' || left(replace(id::text, '-', ''), 12))::bit(48)::bigint - ms), 12, '0')
        || right(replace(id::text, '-', ''), 20))::uuid
$$;
create table past.jobs as select * from fairlane.jobs order by position;
create table past.attempts as select * from fairlane.attempts order by id;
create table past.finished as select * from fairlane.finished order by id;
create table past.uniques as select * from fairlane.uniques;
truncate fairlane.jobs, fairlane.attempts, fairlane.finished, fairlane.uniques;
set synchronous_commit = off;
alter table fairlane.jobs set (fillfactor = 60);
"""
# A live table fills two fifths of a page with new jobs, which grow by a third until they have ended. Two fifths of
# ended ones would leave room for one more new job, and a bulk of 1,000 would go to 1,000 pages.
_RESTORE = "alter table fairlane.jobs set (fillfactor = 40)"
_INSTANTS = ("enqueued_at", "ready_at", "due_at", "claimed_at", "finished_at", "ended_at", "at", "expires_at")
_POSTGRES = {instant: f"t.{instant} - $1::bigint * 1000" for instant in _INSTANTS} | {
    "position": "t.position - $2::bigint",
    "jobs": "array(select past.earlier(u.id, $1) from unnest(t.jobs) as u (id))",
    "job": "past.earlier(t.job, $1)",
}
_IDS = {
    "jobs": "past.earlier(t.id, $1)",
    "uniques": "decode(md5(t.id || int8send($2)), 'hex')",
    "attempts": None,
    "finished": None,
}


async def fill_postgres(url: str, rows: int, progress: Progress) -> None:
    """Give a migrated database a past of so many finished jobs, vacuumed and analysed as autovacuum would leave it."""
    connection = await asyncpg.connect(url)
    try:
        await connection.execute("select setval('fairlane.positions', $1::bigint)", 2 * rows)
        bench = BenchApp(url)
        async with bench.app:
            await bench.run_template()
        await connection.execute(_PREPARE)
        span = MARGIN + await connection.fetchval(
            "select (max(finished_at) - min(enqueued_at)) / 1000 from past.jobs",
        )
        statements = [await _insertion(connection, table) for table in _IDS]
        positions = await connection.fetchval("select max(position) - min(position) + 1 from past.jobs")
        done = 0
        for group in _copies(rows):
            async with connection.transaction():
                for copy in group:
                    for statement in statements:
                        await statement.fetch(copy * span, copy * positions)
            done += len(group) * TEMPLATE
            progress(done)
        await connection.execute("drop schema past cascade")
        await connection.execute(_RESTORE)
        await connection.execute("vacuum (analyze)")
        await connection.execute("checkpoint")
    finally:
        await connection.close()


async def _insertion(connection: Any, table: str) -> Any:
    """The statement that stores one copy of a table: $1 how many milliseconds earlier, $2 how many positions before."""
    columns = [
        row["attname"]
        for row in await connection.fetch(
            "select attname from pg_attribute where attrelid = $1::text::regclass and attnum > 0 and not attisdropped",
            f"fairlane.{table}",
        )
    ]
    values = {"id": _IDS[table]} if table in ("jobs", "uniques") else {}
    chosen = {
        name: values.get(name) or _POSTGRES.get(name, f"t.{name}")
        for name in columns
        if not (name == "id" and _IDS[table] is None)  # those count themselves
    }
    order = {"jobs": "t.position", "uniques": "t.job"}.get(table, "t.id")
    return await connection.prepare(
        f"insert into fairlane.{table} ({', '.join(chosen)}) select {', '.join(chosen.values())} "
        f"from past.{table} t, (select $1::bigint, $2::bigint) given order by {order}"
    )


async def fill_sqlite(path: str, rows: int, progress: Progress) -> None:
    """The same for a SQLite file."""
    bench = BenchApp(f"sqlite:///{path}")
    async with bench.app:
        pass
    _execute(path, f"update positions set last = {2 * rows}")
    async with bench.app:
        await bench.run_template()
    await asyncio.to_thread(_copy_sqlite, path, rows, progress)


def _execute(path: str, statement: str) -> None:
    connection = sqlite3.connect(path)
    with connection:
        connection.execute(statement)
    connection.close()


_SQLITE = {instant: f"{instant} - :ms * 1000" for instant in _INSTANTS} | {
    "position": "position - :positions",
    "job": "earlier(job, :ms)",
}
_SQLITE_IDS = {"jobs": "earlier(id, :ms)", "uniques": "another(id, :ms)", "attempts": "id"}


def _copy_sqlite(path: str, rows: int, progress: Progress) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        # Nobody else is there, and a run that breaks off throws the file away.
        connection.execute("pragma journal_mode = off")
        connection.execute("pragma synchronous = off")
        connection.execute("pragma cache_size = -524288")
        connection.create_function("earlier", 2, _earlier, deterministic=True)
        connection.create_function("another", 2, _another, deterministic=True)
        for table in _SQLITE_IDS:
            order = "position" if table == "jobs" else "rowid" if table == "attempts" else "job"
            connection.execute(f"create temp table past_{table} as select * from main.{table} order by {order}")
            connection.execute(f"delete from main.{table}")
        span, positions = connection.execute(
            "select ?1 + (max(finished_at) - min(enqueued_at)) / 1000, max(position) - min(position) + 1 "
            "from past_jobs",
            (MARGIN,),
        ).fetchone()
        statements = [_sqlite_insertion(connection, table) for table in _SQLITE_IDS]
        done = 0
        for group in _copies(rows):
            connection.execute("begin")
            for copy in group:
                for statement in statements:
                    connection.execute(statement, {"ms": copy * span, "positions": copy * positions})
            connection.execute("commit")
            done += len(group) * TEMPLATE
            progress(done)
    finally:
        connection.close()
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _sqlite_insertion(connection: sqlite3.Connection, table: str) -> str:
    columns = [row[1] for row in connection.execute(f"pragma main.table_info({table})")]
    values = [_SQLITE_IDS[table] if name == "id" else _SQLITE.get(name, name) for name in columns]
    return f"insert into main.{table} ({', '.join(columns)}) select {', '.join(values)} from past_{table}"


def _earlier(job: bytes, ms: int) -> bytes:
    return (int.from_bytes(job[:6], "big") - ms).to_bytes(6, "big") + job[6:]


def _another(key: bytes, ms: int) -> bytes:
    return hashlib.sha256(key + ms.to_bytes(8, "big")).digest()[: len(key)]
