"""What `manage.py check` says about Fairlane, and what is prepared from TASKS."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.apps import apps
from django.conf import settings as django_settings
from django.core import checks
from django.db import connections

from fairlane.errors import FairlaneError, SchemaError
from fairlane.integrations.django.project import project_app
from fairlane.integrations.django.settings import load_settings

OWN = "fairlane.integrations.django"
ADMIN = "django.contrib.admin"


def check_settings(app_configs: object = None, **told: Any) -> list[checks.CheckMessage]:
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
    if settings.url is None and _reads_before_it_locks(settings.database):
        found.append(
            checks.Warning(
                f"on SQLite, a transaction of {settings.database!r} that reads first and enqueues later fails where "
                "another has written meanwhile",
                hint='In DATABASES, set "OPTIONS": {"transaction_mode": "IMMEDIATE"}.',
                id="fairlane.W004",
            )
        )
    return found


def _reads_before_it_locks(database: str) -> bool:
    connection = connections[database]
    mode = str(connection.settings_dict.get("OPTIONS", {}).get("transaction_mode") or "deferred")
    return connection.vendor == "sqlite" and not connection.is_in_memory_db() and mode.lower() == "deferred"


def check_schema(databases: Sequence[str] | None = None, **told: Any) -> list[checks.CheckMessage]:
    """Whether the schema is up to date: `check --database default`, and before every `migrate`."""
    try:
        app = project_app()
    except FairlaneError:
        return []
    if app.settings.database not in (databases or ()) or app.settings.address().startswith("sqlite:"):
        return []  # a SQLite file is brought up to date whenever it is opened, and looking must not change it
    try:
        app.run_blocking(_look(app))
    except SchemaError as error:
        return [checks.Warning(str(error), hint="Run `manage.py migrate`.", id="fairlane.W002")]
    except FairlaneError as error:
        return [checks.Warning(str(error), id="fairlane.W003")]
    return []


async def _look(app: Any) -> None:
    store = app.make_store()
    try:
        await store.open()
    finally:
        await store.close()


def prepare_backends() -> None:
    """Declare the queues of TASKS that this app is to serve, and let it know the tasks of Django's framework."""
    named = getattr(django_settings, "TASKS", {})
    if any(str(each.get("BACKEND", "")).startswith(f"{OWN}.") for each in named.values()):
        from fairlane.integrations.django.tasks import prepare

        prepare(project_app())
