"""The rights of the roles that use a database, as SQL to be run by the owner of the schema."""

from __future__ import annotations

from collections.abc import Mapping

from fairlane.errors import ConfigurationError
from fairlane.store.statements import load_statements

ROLES = ("producer", "worker", "viewer", "operator")
LONGEST_NAME = 63


def grants(roles: Mapping[str, str]) -> str:
    """What gives each of these roles, by what it is for, the rights it needs and takes all others away."""
    statements = load_statements("fairlane.store.postgres", "grants.sql")
    if len(set(roles.values())) < len(roles):
        raise ConfigurationError(
            "name a different role for each purpose: the rights of the second would replace those of the first"
        )
    return "\n\n".join(
        f"-- {purpose}: {name!r}\n{statements[part].replace('{role}', _quoted(name))}"
        for purpose, name in roles.items()
        for part in ("everybody", purpose)
    )


def _quoted(name: str) -> str:
    if not name or "\0" in name or len(name.encode()) > LONGEST_NAME or not name.isprintable():
        raise ConfigurationError(f"{name!r} cannot be the name of a role")
    return '"' + name.replace('"', '""') + '"'
