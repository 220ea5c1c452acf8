"""Keys in addresses and forms: `key.account=acme`, and `none.region=1` for a key without a value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import parse_qsl, quote, unquote, urlencode

__all__ = ["MOST_WATCHED", "key_query", "keys_of", "watched_from", "watched_text"]

MOST_WATCHED = 20
_VALUE, _NONE = "key.", "none."


def keys_of(fields: Mapping[str, str]) -> dict[str, str | None]:
    """The keys that an address or a form names, exactly."""
    keys: dict[str, str | None] = {
        name.removeprefix(_VALUE): value for name, value in fields.items() if name.startswith(_VALUE)
    }
    return keys | {name.removeprefix(_NONE): None for name in fields if name.startswith(_NONE)}


def key_query(keys: Mapping[str, str | None]) -> dict[str, str]:
    """The same the other way round."""
    return {
        f"{_NONE}{name}" if value is None else f"{_VALUE}{name}": "1" if value is None else value
        for name, value in keys.items()
    }


def watched_text(queue: str, keys: Mapping[str, str | None]) -> str:
    """One watched key, as the browser keeps it: the end of its page's address."""
    return f"{quote(queue, safe='')}/{urlencode(key_query(keys))}"


def watched_from(texts: Sequence[str]) -> dict[str, list[dict[str, str | None]]]:
    """Watched keys by queue; what is none is left out."""
    found: dict[str, list[dict[str, str | None]]] = {}
    for text in texts[:MOST_WATCHED]:
        queue, _, query = text.partition("/")
        keys = keys_of(dict(parse_qsl(query, keep_blank_values=True)))
        # What is decoded here a second time may hold what the doorkeeper has not seen.
        if queue and keys and "\0" not in unquote(text):
            found.setdefault(unquote(queue), []).append(keys)
    return found
