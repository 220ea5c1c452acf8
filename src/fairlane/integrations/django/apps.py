"""What Django does with Fairlane when a project starts, is checked, migrates, and ends a test."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from django.apps import AppConfig, apps
from django.conf import settings as django_settings
from django.core import checks
from django.core.management.color import no_style
from django.db import DEFAULT_DB_ALIAS, connections, router
from django.db.backends.signals import connection_created
from django.db.models.signals import post_migrate
from django.utils.module_loading import module_has_submodule

from fairlane.errors import ConfigurationError, FairlaneError, SchemaError
from fairlane.integrations.django.project import IN_MEMORY, DjangoApp, is_under_test, load_settings, project_app
from fairlane.integrations.extras import tables_on_sqlite
from fairlane.store.protocol import Store
from fairlane.store.statements import load_statements

OWN = "fairlane.integrations.django"
ADMIN = "django.contrib.admin"
LABEL = "fairlane"
STATEMENTS = load_statements(OWN, "queries.sql")

log = logging.getLogger("fairlane.app")


class FairlaneConfig(AppConfig):
    """`"fairlane.integrations.django"` in INSTALLED_APPS."""

    name = OWN
    label = LABEL
    verbose_name = "Fairlane"

    def ready(self) -> None:
        checks.register(check_settings, "fairlane")
        checks.register(check_schema, checks.Tags.database)
        try:
            given = load_settings()
        except ConfigurationError:
            return  # `manage.py check` reports it, and asking for the app raises it
        for config in apps.get_app_configs():
            for module in given.task_modules:
                if config.name != self.name and module_has_submodule(config.module, module):
                    import_module(f"{config.name}.{module}")
        backends = getattr(django_settings, "TASKS", {})
        if any(str(each.get("BACKEND", "")).startswith(f"{OWN}.") for each in backends.values()):
            from fairlane.integrations.django.tasks import prepare

            prepare(project_app())
        post_migrate.connect(on_migrated, sender=self, dispatch_uid="fairlane")
        connection_created.connect(on_connected, dispatch_uid="fairlane")


def check_settings(app_configs: object = None, **named: Any) -> list[checks.CheckMessage]:
    """FAIRLANE, the tasks and queues of the project, and the order of INSTALLED_APPS."""
    try:
        settings = load_settings()
        project_app().check()
    except FairlaneError as error:
        what, _, remedy = str(error).partition("; ")
        return [checks.Error(what, hint=remedy or None, id="fairlane.E001")]
    found: list[checks.CheckMessage] = []
    if settings.dashboard_url and apps.is_installed(ADMIN):
        names = [config.name for config in apps.get_app_configs()]
        if names.index(OWN) > names.index(ADMIN):
            found.append(
                checks.Warning(
                    "the admin's index shows no link to the dashboard: its own template is found first",
                    hint=f"In INSTALLED_APPS, put {OWN!r} before {ADMIN!r}.",
                    id="fairlane.W001",
                )
            )
    connection = connections[settings.database]
    mode = str(connection.settings_dict.get("OPTIONS", {}).get("transaction_mode") or "deferred")
    is_our_file = settings.url is None and connection.vendor == "sqlite" and not connection.is_in_memory_db()
    if is_our_file and mode.lower() == "deferred":
        found.append(
            checks.Warning(
                f"on SQLite, a transaction of {settings.database!r} that reads first and enqueues later fails where "
                "another has written meanwhile",
                hint='In DATABASES, set "OPTIONS": {"transaction_mode": "IMMEDIATE"}.',
                id="fairlane.W004",
            )
        )
    return found


def check_schema(databases: Sequence[str] | None = None, **named: Any) -> list[checks.CheckMessage]:
    """Whether the schema is up to date: `check --database default`, and before every `migrate`."""
    try:
        app = project_app()
    except FairlaneError:
        return []
    if app.settings.database not in (databases or ()) or app.settings.address().startswith("sqlite:"):
        return []  # a SQLite file is brought up to date whenever it is opened, and looking must not change it
    try:
        app.run_blocking(_open(app.make_store()))
    except SchemaError as error:
        return [checks.Warning(str(error), hint="Run `manage.py migrate`.", id="fairlane.W002")]
    except FairlaneError as error:
        return [checks.Warning(str(error), id="fairlane.W003")]
    return []


async def _open(store: Store) -> None:
    try:
        await store.open()
    finally:
        await store.close()


def on_migrated(using: str, verbosity: int = 1, stdout: Any = None, **named: Any) -> None:
    """After `migrate`: bring the schema up to date. After `flush`, which a test ends with, leave no job behind."""
    app = project_app()
    if using != (app.settings.database if app.settings.url is None else DEFAULT_DB_ALIAS):
        return
    if not router.allow_migrate(using, LABEL):
        return
    if is_under_test():
        _let_go_before_the_end(app, connections[using].creation)
    if "plan" in named:
        for name in asyncio.run(app.migrate()) if app.settings.address() != IN_MEMORY else ():
            if verbosity >= 1 and stdout is not None:
                stdout.write(f"  Applying {LABEL}.{name}... OK")
    elif is_under_test():
        _forget_all_jobs(app, using)
    _open_on_sqlite(app, connections[using])


def on_connected(connection: Any, **named: Any) -> None:
    """Before Django's first transaction on a SQLite file that has been migrated: open the app."""
    app = project_app()
    is_its_file = connection.alias == app.settings.database and connection.vendor == "sqlite"
    if is_its_file and not app.is_open and {"gates", "lanes"} <= set(connection.introspection.table_names()):
        _open_on_sqlite(app, connection)


def _open_on_sqlite(app: DjangoApp, connection: Any) -> None:
    """Opening declares queues, and there is one writer: inside a transaction of Django's it would wait for ever."""
    if connection.vendor != "sqlite" or app.settings.url is not None or app.settings.address() == IN_MEMORY:
        return
    try:
        app.run_blocking(app.opened())
    except FairlaneError as error:
        # Django's own work does not depend on it; an enqueue raises it again.
        log.warning("the queues of this project could not be declared yet: %s", error)


def _let_go_before_the_end(app: DjangoApp, creation: Any) -> None:
    """Close the app before Django drops its test database: one with open connections cannot be dropped."""
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
    if connection.vendor == "sqlite":
        # The one row of `positions` came with the schema, and jobs are numbered by it.
        kept = ("migrations", "positions")
        tables = [name for name in tables_on_sqlite() if name not in kept and not name.startswith("sqlite_")]
    else:
        with connection.cursor() as cursor:
            cursor.execute(STATEMENTS["tables_on_postgresql"])
            tables = [name for (name,) in cursor.fetchall()]
    with connection.constraint_checks_disabled():
        connection.ops.execute_sql_flush(connection.ops.sql_flush(no_style(), tables))
