"""Which database Django's connections go to, as Fairlane writes it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from django.db import connections

from fairlane.errors import ConfigurationError

__all__ = ["IN_MEMORY", "address_of", "is_under_test"]

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
