"""Fairlane's schema and Django's `migrate`, `flush` and test databases."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import sqlite3
from collections.abc import Callable
from typing import Any

from django.core.management.color import no_style
from django.db import DEFAULT_DB_ALIAS, connections, router

from fairlane.errors import FairlaneError
from fairlane.integrations.django.project import DjangoApp, project_app
from fairlane.integrations.django.settings import IN_MEMORY, is_under_test
from fairlane.store.scripts import Schema
from fairlane.store.statements import load_statements

__all__ = ["on_connected", "on_migrated"]

log = logging.getLogger("fairlane.app")

LABEL = "fairlane"
STATEMENTS = load_statements("fairlane.integrations.django", "queries.sql")


def on_migrated(using: str, verbosity: int = 1, stdout: Any = None, **told: Any) -> None:
    """After `migrate`: bring the schema up to date. After `flush`, which a test ends with, leave no job behind."""
    app = project_app()
    if using != (app.settings.database if app.settings.url is None else DEFAULT_DB_ALIAS):
        return
    if not router.allow_migrate(using, LABEL):
        return
    if is_under_test():
        _let_go_before_the_end(app, connections[using].creation)
    if "plan" in told:
        for name in asyncio.run(app.migrate()) if app.settings.address() != IN_MEMORY else ():
            if verbosity >= 1 and stdout is not None:
                stdout.write(f"  Applying {LABEL}.{name}... OK")
    elif is_under_test():
        _forget_all_jobs(app, using)
    _open_on_sqlite(app, connections[using])


def on_connected(connection: Any, **told: Any) -> None:
    """Before Django's first transaction on a SQLite file that has been migrated: open the app."""
    app = project_app()
    if connection.alias == app.settings.database and connection.vendor == "sqlite" and not app.is_open:
        with connection.cursor() as cursor:
            cursor.execute(STATEMENTS["has_schema_on_sqlite"])
            (has_schema,) = cursor.fetchone()
        if has_schema:
            _open_on_sqlite(app, connection)


def _open_on_sqlite(app: DjangoApp, connection: Any) -> None:
    """Opening declares queues, and there is one writer: inside of a transaction of Django's it would wait in vain."""
    if connection.vendor != "sqlite" or app.settings.url is not None or app.settings.address() == IN_MEMORY:
        return
    try:
        app.run_blocking(app.opened())
    except FairlaneError as error:
        # Django's own work does not depend on it; whoever enqueues is told again.
        log.warning("the queues of this project could not be declared yet: %s", error)


def _let_go_before_the_end(app: DjangoApp, creation: Any) -> None:
    """A database that somebody is connected to cannot be dropped, and Django tells nobody that it is about to."""
    destroy: Callable[..., Any] = creation.destroy_test_db
    if getattr(destroy, "lets_fairlane_go", False):
        return

    @functools.wraps(destroy)
    def let_go(*args: Any, **kwargs: Any) -> Any:
        app.close_sync()
        return destroy(*args, **kwargs)

    let_go.lets_fairlane_go = True  # type: ignore[attr-defined]
    creation.destroy_test_db = let_go


def _forget_all_jobs(app: DjangoApp, using: str) -> None:
    app.close_sync()  # what is in memory is gone with it, and queues are declared anew
    if app.settings.url is not None or app.settings.address() == IN_MEMORY:
        return
    connection = connections[using]
    with connection.constraint_checks_disabled():
        connection.ops.execute_sql_flush(connection.ops.sql_flush(no_style(), _tables(connection)))


def _tables(connection: Any) -> list[str]:
    if connection.vendor == "sqlite":
        return _sqlite_tables()
    with connection.cursor() as cursor:
        cursor.execute(STATEMENTS["tables_on_postgresql"])
        return [name for (name,) in cursor.fetchall()]


@functools.cache
def _sqlite_tables() -> list[str]:
    with contextlib.closing(sqlite3.connect(":memory:")) as empty:
        empty.executescript(Schema.of("sqlite").script())
        return [name for (name,) in empty.execute(STATEMENTS["tables_on_sqlite"])]
