"""Where the demo's database is: a file in a temporary folder, a new database on a server, or a server of its own.

Nothing of it is left afterwards, and nothing that was there before is touched.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit
from uuid import uuid4

from fairlane.demo.troupe import DemoFailed

__all__ = ["own_database", "sqlite_file", "throwaway_postgres"]


@contextmanager
def sqlite_file() -> Iterator[str]:
    """The URL of a SQLite file in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="fairlane-demo-") as folder:
        yield f"sqlite:///{Path(folder) / 'demo.db'}"


@contextmanager
def throwaway_postgres() -> Iterator[str]:
    """The URL of a PostgreSQL server that lives as long as this block."""
    from fairlane.testing.postgres import PostgresUnavailable, ThrowawayPostgres

    with ExitStack() as stack:
        try:
            server = stack.enter_context(ThrowawayPostgres())
        except PostgresUnavailable as error:
            raise DemoFailed(str(error)) from error
        yield server.url()


@contextmanager
def own_database(url: str) -> Iterator[str]:
    """The URL of a new database on the server of `url`, dropped afterwards; what `url` itself names is only a door."""
    import asyncpg

    if urlsplit(url).scheme not in ("postgresql", "postgres"):
        raise DemoFailed(f"--url takes a PostgreSQL, such as postgresql://user@host/database; {url!r} is none")
    name = f"fairlane_demo_{uuid4().hex[:12]}"
    try:
        asyncio.run(_run_formatted(url, "create database %I", name))
    except asyncpg.InsufficientPrivilegeError as error:
        raise DemoFailed(
            "the demo plays in a database of its own and drops it afterwards, but this user may not create one "
            f"({error}); give a user that may, or use --postgres"
        ) from error
    except (OSError, ValueError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise DemoFailed(f"the PostgreSQL of --url cannot be used: {error}") from error
    try:
        yield urlunsplit(urlsplit(url)._replace(path=f"/{name}"))
    finally:
        asyncio.run(_run_formatted(url, "drop database if exists %I with (force)", name))


async def _run_formatted(url: str, statement: str, name: str) -> None:
    import asyncpg

    connection = await asyncpg.connect(url, timeout=10)
    try:
        # An identifier cannot be a parameter of these statements, so the server itself quotes it.
        quoted = await connection.fetchval("select format($1, $2::text)", statement, name)
        await connection.execute(quoted)
    finally:
        await connection.close()
