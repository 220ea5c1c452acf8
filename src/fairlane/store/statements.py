"""Named statements from `.sql` files: SQL is written to be read, and is never built from strings."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

from fairlane.store.migrations import load_functions, read_sql

_NAME = re.compile(r"^-- (name|part): ([a-z_]+)(?: = (.+))?\s*$", re.MULTILINE)


@cache
def load_bodies(package: str, *names: str) -> dict[str, str]:
    """The bodies of functions of a store's schema: a statement that the database carries out by itself and is also sent
    is written once."""
    functions = load_functions(package)
    return {
        name: re.findall(rf"function fairlane\.{name}\(.*?\nas \$\$\n(.*?)\n\$\$;", functions, re.DOTALL)[0]
        for name in names
    }


@cache
def load_statements(package: str, *names: str) -> dict[str, str]:
    """The statements of one store's `.sql` files by name. `-- name: claim_jobs` starts one; comments stay with it.

    What several statements have in common is a `-- part: named` before them, and stands in each as `{named}`.
    Statements that differ in one expression share their text: `-- name: list_by_end = k.ended` gives it for `{it}`.
    """
    statements: dict[str, str] = {}
    parts: dict[str, str] = {}
    for name in names:
        pieces = iter(_NAME.split(read_sql(files(package).joinpath(name)))[1:])
        waiting: list[tuple[str, str]] = []
        for kind, key, it, piece in zip(pieces, pieces, pieces, pieces, strict=True):
            body = piece.strip()
            for part, text in parts.items():
                body = body.replace(part, text)
            if kind == "part":
                parts[f"{{{key}}}"] = body
                continue
            if key in statements or key in dict(waiting):
                raise ValueError(f"{package}/{name}: the statement {key!r} is defined twice")
            waiting.append((key, it or ""))
            if body:
                statements |= {each: body.replace("{it}", value) for each, value in waiting}
                waiting = []
    return statements
