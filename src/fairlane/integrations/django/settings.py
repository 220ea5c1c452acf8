"""The setting FAIRLANE: what it may hold, and what stands for what is left out."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from django.conf import settings as django_settings
from django.db import DEFAULT_DB_ALIAS, connections
from django.utils.module_loading import import_string

from fairlane.errors import ConfigurationError

MODES = ("in_transaction", "on_commit", "at_once")
APP_OPTIONS = ("durable_claims", "retention", "dead_retention", "retention_count", "max_payload", "codec", "redact")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """FAIRLANE as it was written, checked."""

    url: str | None = None
    """Another database than Django's."""
    database: str = DEFAULT_DB_ALIAS
    """Whose transactions count, and where jobs are kept unless `url` says otherwise."""
    enqueue: str | None = None
    task_modules: tuple[str, ...] = ("tasks",)
    dashboard_url: str | None = None
    app: Mapping[str, Any] = field(default_factory=dict)
    """What the app is made with."""

    def address(self) -> str:
        """Where jobs are kept now. Tests never reach a database that Django has not made for them."""
        if self.url is None:
            return address_of(self.database)
        return IN_MEMORY if is_under_test() else self.url

    def mode(self, address: str) -> str:
        """What an enqueue inside of `transaction.atomic()` does, where jobs are kept at this address."""
        if address == IN_MEMORY or (self.url is not None and self.enqueue is None):
            return "at_once" if self.enqueue == "at_once" else "on_commit"
        return self.enqueue or "in_transaction"


def load_settings(given: object = None) -> Settings:
    """What FAIRLANE says, or `ConfigurationError` with the name and the remedy."""
    given = getattr(django_settings, "FAIRLANE", {}) if given is None else given
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"FAIRLANE is a {type(given).__name__}; write a dict, such as FAIRLANE = {{}}")
    own = [each.name.upper() for each in fields(Settings) if each.name != "app"]
    known = [*own, *(name.upper() for name in APP_OPTIONS)]
    for name in given:
        if name not in known:
            similar = get_close_matches(str(name).upper(), known, n=1)
            meant = f"did you mean {similar[0]!r}?" if similar else f"known are {', '.join(known)}"
            raise ConfigurationError(f"FAIRLANE[{name!r}] is unknown; {meant}")
    options = {name: _imported(name.upper(), given[name.upper()]) for name in APP_OPTIONS if name.upper() in given}
    return Settings(**{name.lower(): _checked(name, given[name]) for name in own if name in given}, app=options)


def _checked(name: str, value: Any) -> Any:
    match name:
        case "ENQUEUE" if value is not None and value not in MODES:
            raise ConfigurationError(f"FAIRLANE['ENQUEUE'] = {value!r} is unknown; write one of {', '.join(MODES)}")
        case "DATABASE" if value not in django_settings.DATABASES:
            known = ", ".join(map(repr, django_settings.DATABASES))
            raise ConfigurationError(f"FAIRLANE['DATABASE'] = {value!r} is not in DATABASES; there are {known}")
        case "TASK_MODULES":
            if isinstance(value, str) or not all(isinstance(each, str) for each in value):
                raise ConfigurationError(f"FAIRLANE['TASK_MODULES'] = {value!r} is not a list of names of modules")
            return tuple(value)
        case "DASHBOARD_URL" if value is not None and not (
            isinstance(value, str) and value.startswith("/") and value.endswith("/") and len(value) > 2
        ):
            raise ConfigurationError(
                f"FAIRLANE['DASHBOARD_URL'] = {value!r} is not a path below the site; write one such as '/fairlane/'"
            )
        case "URL" if value is not None and not isinstance(value, str):
            raise ConfigurationError(f"FAIRLANE['URL'] = {value!r} is not the URL of a database")
    return value


def _imported(name: str, value: Any) -> Any:
    """A codec and a function that redacts may be named by where they are."""
    if name not in ("CODEC", "REDACT") or not isinstance(value, str):
        return value
    try:
        found: Any = import_string(value)
    except ImportError as error:
        raise ConfigurationError(f"FAIRLANE[{name!r}] = {value!r} cannot be imported: {error}") from error
    return found() if isinstance(found, type) else found


IN_MEMORY = "sqlite://"
PASSED_ON = ("passfile", "sslcert", "sslcrl", "sslkey", "sslmode", "sslrootcert")
"""Options of psycopg that say how to get in. The others are about Django's own connection."""


def address_of(alias: str) -> str:
    """The URL of the database that Django uses now; while it runs tests, that is the test database."""
    connection = connections[alias]
    match connection.vendor:
        case "postgresql":
            return _postgres(alias, connection.settings_dict)
        case "sqlite":
            name = connection.settings_dict["NAME"]
            if connection.creation.is_in_memory_db(name):
                return IN_MEMORY
            return f"sqlite:///{Path(name).resolve()}"
    raise ConfigurationError(
        f"Django's database {alias!r} is of {connection.vendor}, and Fairlane keeps jobs in PostgreSQL or SQLite; name "
        "another database with FAIRLANE['URL'] or FAIRLANE['DATABASE']"
    )


def _postgres(alias: str, given: Mapping[str, Any]) -> str:
    options = given.get("OPTIONS") or {}
    if "service" in options:
        raise ConfigurationError(
            f"Django's database {alias!r} is named by a service file, which Fairlane does not read; write its address "
            "into FAIRLANE['URL'] (and FAIRLANE['ENQUEUE'] = 'in_transaction', as it is the same database)"
        )
    login = quote(str(given.get("USER") or ""), safe="")
    if given.get("PASSWORD"):
        login += f":{quote(str(given['PASSWORD']), safe='')}"
    asked = {name: str(options[name]) for name in PASSED_ON if name in options}
    host, port = str(given.get("HOST") or ""), str(given.get("PORT") or "")
    if host.startswith("/"):  # the folder of a socket
        asked["host"] = host
        if port:
            asked["port"] = port
        host = port = ""
    elif ":" in host:
        host = f"[{host}]"
    place = f"{host}:{port}" if port else host
    address = f"postgresql://{login}{'@' if login else ''}{place}/{quote(str(given.get('NAME') or ''), safe='')}"
    return f"{address}?{urlencode(asked)}" if asked else address


def is_under_test() -> bool:
    """Whether Django's test runner, or pytest-django, has set up its environment."""
    utils: Any = sys.modules.get("django.test.utils")
    return utils is not None and hasattr(utils._TestState, "saved_data")
