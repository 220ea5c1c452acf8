"""From what a page shows to HTML: the templates, and the words and numbers in them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from importlib.metadata import version
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fairlane.clock import SECOND, Instant, as_datetime

__all__ = ["Rendering", "address", "fingerprint", "lasting", "number", "seconds"]

_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


class Rendering:
    """The templates of the dashboard, compiled once."""

    def __init__(self) -> None:
        self.environment = Environment(
            loader=PackageLoader("fairlane.dashboard"),
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=StrictUndefined,
        )
        self.environment.filters.update(
            ago=ago, lasting=lasting, number=number, clock=clock, iso=iso, pretty=pretty, per=per, pathpart=path_part
        )
        self.environment.filters["seconds"] = seconds
        self.environment.globals["version"] = version("fairlane")

    def part(self, template: str, shown: Mapping[str, Any]) -> str:
        """The main part of a page: what changes while somebody looks."""
        return self.environment.get_template(template).render(shown)

    def whole(self, main: str, frame: Mapping[str, Any]) -> str:
        """A page from its first line to its last, around a main part that is rendered already."""
        return self.environment.get_template("layout.html").render({**frame, "main": Markup(main)})


def address(root: str, path: str, **query: Any) -> str:
    """A path of the dashboard as the browser must ask for it; what is `None` or empty is left out."""
    given = [(name, value) for name, value in query.items() if value not in (None, "", [])]
    return f"{root}{path}{'?' if given else ''}{urlencode(given, doseq=True)}"


def fingerprint(html: str) -> str:
    """Tells whether two renders are the same."""
    return sha256(html.encode()).hexdigest()[:16]


def path_part(text: object) -> str:
    """A name as one part of a path, slashes and all."""
    return quote(str(text), safe="")


def number(value: float | None, digits: int = 0) -> str:
    """1,234 or 0.25; a dash where there is none."""
    return "–" if value is None else f"{value:,.{digits}f}"


def per(value: float | None) -> str:
    """A share as a percentage."""
    return "–" if value is None else f"{value * 100:.0f} %"


def lasting(microseconds: float | None) -> str:
    """A duration in at most two units: 250 ms, 12 s, 3 min 20 s, 2 h, 5 d 3 h."""
    if microseconds is None:
        return "–"
    if microseconds < SECOND:
        return f"{microseconds / 1_000:.0f} ms"
    seconds = round(microseconds / SECOND)
    parts: list[str] = []
    for size, unit in _UNITS:
        if seconds >= size and len(parts) < 2:
            parts.append(f"{seconds // size} {unit}")
            seconds %= size
        elif parts:
            break
    return " ".join(parts)


def seconds(value: float) -> str:
    """A duration to be compared with others: 532 ms, 8.44 s."""
    if value < 1:
        return f"{value * 1_000:.0f} ms"
    return f"{value:.2f} s" if value < 100 else f"{value:,.0f} s"


def ago(at: Instant | None) -> Markup:
    """A moment that the browser tells as "5 s ago" and keeps up to date: what was sent is still true by then."""
    if at is None:
        return Markup("–")
    return Markup('<time class="ago" datetime="{}" title="{} UTC">{}</time>').format(iso(at), clock(at), clock(at))


def clock(at: Instant | None) -> str:
    return "–" if at is None else f"{as_datetime(at):%Y-%m-%d %H:%M:%S}"


def iso(at: Instant | None) -> str:
    return "" if at is None else as_datetime(at).isoformat()


def pretty(value: Any) -> str:
    """JSON as a person reads it; text as it is."""
    return value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False, default=str)
