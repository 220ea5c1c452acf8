"""Named statements from `.sql` files: SQL is written to be read, and is never built from strings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

__all__ = ["load_statements"]

_NAME = re.compile(r"^-- name: ([a-z_]+)\s*$", re.MULTILINE)


@cache
def load_statements(package: str, *names: str) -> Mapping[str, str]:
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
