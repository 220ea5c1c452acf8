"""Named statements from `.sql` files: SQL is written to be read, and is never built from strings."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

from fairlane.store.migrations import load_migrations

_NAME = re.compile(r"^-- name: ([a-z_]+)\s*$", re.MULTILINE)


@cache
def load_functions(package: str, *names: str) -> dict[str, str]:
    """The bodies of functions of a store's schema, as its last migration that defines each has it: a statement that
    the database carries out by itself and is also sent is written once."""
    schema = "\n".join(migration.sql for migration in load_migrations(package))
    return {
        name: re.findall(rf"function fairlane\.{name}\(.*?\nas \$\$\n(.*?)\n\$\$;", schema, re.DOTALL)[-1]
        for name in names
    }


@cache
def load_statements(package: str, *names: str) -> dict[str, str]:
    """The statements of one store's `.sql` files by name. `-- name: claim_jobs` starts one; comments stay with it."""
    statements: dict[str, str] = {}
    for name in names:
        text = files(package).joinpath(name).read_text(encoding="utf-8")
        parts = _NAME.split(text)[1:]
        for key, body in zip(parts[::2], parts[1::2], strict=True):
            if key in statements:
                raise ValueError(f"{package}/{name}: the statement {key!r} is defined twice")
            statements[key] = body.strip()
    return statements
