"""What a page is: a path, a template, and one function that looks up what the template shows.

A new page is a module in `pages/` with a `Page`, a template of the same name, and its place in `contents.PAGES`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import QueryParams
from starlette.routing import compile_path

from fairlane.app import App
from fairlane.clock import Instant
from fairlane.dashboard.access import Role
from fairlane.errors import ConfigurationError
from fairlane.operations import Operations


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What somebody wants to look at. Unless there is a `redact`, everybody with the same role gets the same answer."""

    app: App
    operations: Operations
    role: Role
    root: str
    """Where the dashboard is mounted."""
    path: str
    values: Mapping[str, str]
    """The variable parts of the path."""
    query: QueryParams
    now: Instant

    @property
    def here(self) -> str:
        """Path and query, to come back to."""
        return f"{self.path}?{self.query}" if self.query else self.path


Look = Callable[[Ask], Awaitable[dict[str, Any]]]
Submit = Callable[[Ask, Mapping[str, str]], Coroutine[Any, Any, dict[str, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One page of the dashboard."""

    path: str
    """As Starlette writes it: `/jobs/{job}`."""
    title: str
    template: str
    look: Look
    """What the template shows. It must depend on nothing but the `Ask` and the database."""
    nav: str | None = None
    """Its word in the header; of a page below another one, that of the other."""
    shortcut: str | None = None
    """The letter after `g` that leads here."""
    is_live: bool = True
    submit: Submit | None = None
    """What its form leads to, shown by the same template. It changes nothing either: deeds do that. It ends when the
    visitor goes away. Only for pages that are not live: those are the same for everybody, and a form is somebody's."""
    _pattern: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_pattern", compile_path(self.path))

    def values_of(self, path: str) -> dict[str, str] | None:
        """The variable parts, if this is the page of that path."""
        pattern, _, convertors = self._pattern
        found = pattern.match(path)
        if found is None:
            return None
        return {name: str(convertors[name].convert(value)) for name, value in found.groupdict().items()}


def number_from(query: QueryParams, name: str, default: int, *, low: int, high: int) -> int:
    """A number of the query, brought within its bounds."""
    try:
        return min(max(int(query[name]), low), high)
    except (KeyError, ValueError):
        return default


def keys_from(texts: list[str]) -> dict[str, str | None]:
    """`account=acme`, several with commas or one by one, as keys by name."""
    keys: dict[str, str | None] = {}
    for text in texts:
        for each in filter(None, map(str.strip, text.split(","))):
            name, separator, value = each.partition("=")
            if not separator or not name:
                raise ConfigurationError(f"{each!r} is not a key; write name=value, such as account=acme")
            keys[name] = value
    return keys
