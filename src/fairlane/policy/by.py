"""The scope of a limit or of a fair share: which keys it looks at."""

from __future__ import annotations

import re
from typing import Any

from fairlane.errors import InvalidPolicy
from fairlane.parameters import shown

__all__ = ["NAME", "By", "checked_name", "normalize_by", "repr_by", "repr_name"]

By = tuple[str, ...]

NAME = "[A-Za-z0-9][A-Za-z0-9_.-]{0,119}"
"""What a queue may be called, and a limit that queues share."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}\Z")
_SHARED_NAME = re.compile(rf"{NAME}\Z")


def normalize_by(what: str, by: str | tuple[str, ...] | None, parameter: str = "by") -> By:
    """`"account"`, `("account", "region")` or nothing, as a tuple of names; `what` and `parameter` say in errors where
    they were given."""
    names: Any = () if by is None and parameter == "by" else by if isinstance(by, tuple | list) else (by,)
    for name in names:
        if not _is_name(name):
            raise InvalidPolicy(
                f"{what}: {parameter}={shown(by)} is not a key's name; give one, such as {parameter}='account', or a "
                "tuple of them, in letters, digits and underscores"
            )
    if len(set(names)) != len(names):
        raise InvalidPolicy(f"{what}: {parameter}={shown(by)} names a key twice; leave one of them out")
    return tuple(names)


def checked_name(what: str, name: object) -> str | None:
    """The name by which queues share a limit, if it has one."""
    if name is None or (isinstance(name, str) and _SHARED_NAME.match(name) is not None):
        return name
    raise InvalidPolicy(
        f"{what}: name={shown(name)} is no name; use letters, digits, '_', '.', '-' and at most 120 of them"
    )


def repr_by(by: By) -> str:
    """The last argument of a declaration, as one would write it."""
    if not by:
        return ""
    return f", by={by[0]!r}" if len(by) == 1 else f", by={by!r}"


def repr_name(name: str | None) -> str:
    """The name of a shared limit, as one would write it."""
    return "" if name is None else f", name={name!r}"


def _is_name(name: object) -> bool:
    return isinstance(name, str) and _NAME.match(name) is not None
