"""What a page is: a path, a template, and the function that looks up what that shows; and what addresses say."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode
from uuid import UUID

from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.routing import compile_path

from fairlane.clock import Instant
from fairlane.dashboard.access import Role
from fairlane.errors import ConfigurationError
from fairlane.job import State
from fairlane.operations import LIMIT, JobFilter, Operations
from fairlane.policy.keys import canonical_keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request for a page. Without a `redact`, everybody with the same role gets the same answer."""

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


@dataclass(frozen=True, slots=True)
class Page:
    """One page of the dashboard."""

    path: str
    """As Starlette writes it: `/jobs/{job}`."""
    title: str
    template: str
    look: Look
    """What the template shows. It must depend on nothing but the `Ask` and the database."""
    nav: str
    """Its link in the header; of a page below another one, the link of that."""
    shortcut: str | None = None
    """The letter after `g` that leads here."""
    _: KW_ONLY
    is_live: bool = True
    submit: Submit | None = None
    """What its form leads to, shown by the same template. It changes nothing either: actions do that. It ends when the
    visitor goes away. Only for pages that are not live: those are the same for everybody, and a form is somebody's."""

    def values_of(self, path: str) -> dict[str, str] | None:
        """The variable parts, if this is the page of that path."""
        found = compile_path(self.path)[0].match(path)
        return None if found is None else found.groupdict()


def keys_from(text: str) -> dict[str, str | None]:
    """`account=acme`, several with commas, as keys by name."""
    keys: dict[str, str | None] = {}
    for each in filter(None, map(str.strip, text.split(","))):
        name, separator, value = each.partition("=")
        if not separator or not name:
            raise ConfigurationError(f"{each!r} is not a key; write name=value, such as account=acme")
        keys[name] = value
    return keys


# What addresses and forms say.

MOST_AT_ONCE = 10_000
FIELDS = ("queue", "state", "task", "key")


def job_from(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise HTTPException(404, f"{text!r} is not the id of a job") from None


def filter_from(fields: Mapping[str, str], state: State | None = None) -> JobFilter:
    """`queue`, `state`, `task` and `key` (`account=acme, region=eu`); what is empty does not matter."""
    given = shown_filter(fields)
    if given["state"] and given["state"] not in map(str, State):
        raise ConfigurationError(f"{given['state']!r} is not a state; those are {', '.join(map(str, State))}")
    return JobFilter(
        queue=given["queue"] or None,
        task=given["task"] or None,
        state=State[given["state"].upper()] if state is None and given["state"] else state,
        keys=canonical_keys(keys_from(given["key"])),
    )


def shown_filter(fields: Mapping[str, str]) -> dict[str, str]:
    """The filter as a form shows it again and links pass it on."""
    return {name: fields.get(name, "").strip() for name in FIELDS}


def limit_from(fields: Mapping[str, str]) -> int:
    text = fields.get("limit", "").strip() or str(LIMIT)
    if not text.isdecimal() or len(text) > 10 or not 1 <= int(text) <= MOST_AT_ONCE:
        raise ConfigurationError(f"at most: give a number from 1 to {MOST_AT_ONCE:,}, not {text[:20]!r}")
    return int(text)


MOST_WATCHED = 20
_VALUE, _NONE = "key.", "none."


def keys_of(fields: Mapping[str, str]) -> dict[str, str | None]:
    """The keys that an address or a form names, exactly."""
    keys: dict[str, str | None] = {
        name.removeprefix(_VALUE): value for name, value in fields.items() if name.startswith(_VALUE)
    }
    return keys | {name.removeprefix(_NONE): None for name in fields if name.startswith(_NONE)}


def key_query(keys: Mapping[str, str | None]) -> dict[str, str]:
    """The inverse of `keys_of`."""
    return {
        f"{_NONE}{name}" if value is None else f"{_VALUE}{name}": "1" if value is None else value
        for name, value in keys.items()
    }


def watched_text(queue: str, keys: Mapping[str, str | None]) -> str:
    """One watched key, as the browser keeps it: the end of its page's address."""
    return f"{quote(queue, safe='')}/{urlencode(key_query(keys))}"


def watched_from(texts: Sequence[str]) -> dict[str, list[dict[str, str | None]]]:
    """Watched keys by queue; anything else is left out."""
    found: dict[str, list[dict[str, str | None]]] = {}
    for text in texts[:MOST_WATCHED]:
        queue, _, query = text.partition("/")
        keys = keys_of(dict(parse_qsl(query, keep_blank_values=True)))
        # What is decoded here a second time may hold what the security middleware has not seen.
        if queue and keys and "\0" not in unquote(text):
            found.setdefault(unquote(queue), []).append(keys)
    return found
