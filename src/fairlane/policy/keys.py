"""The scope of a limit or of a fair share: which keys it looks at."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from hashlib import sha256
from typing import Any
from uuid import UUID

from fairlane.errors import InvalidKey, InvalidPolicy
from fairlane.parameters import is_storable, shown

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
        if not isinstance(name, str) or _NAME.match(name) is None:
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
    return f", by={(by[0] if len(by) == 1 else by)!r}" if by else ""


def repr_name(name: str | None) -> str:
    """The name of a shared limit, as one would write it."""
    return "" if name is None else f", name={name!r}"


MAX_KEY_BYTES = 512
BUILT_IN = ("priority", "task")
KEYS_REMEMBERED = 16_384
"""How many keys have their ids and decoded forms cached. More keys than that, taken in turns, would only fill a larger
cache without ever being found in it."""

Keys = Mapping[str, str | None]
"""Canonical keys by name."""


def key_words(key: Keys) -> str:
    """`account=acme, region=eu`."""
    return ", ".join(f"{name}={'None' if value is None else value}" for name, value in key.items())


def canonical_key(name: str, value: object) -> str | None:
    """The one form of a key's value, or `InvalidKey` with the reason."""
    # Nearly always, and for every job of every producer.
    if type(value) is str and len(value) <= MAX_KEY_BYTES and value.isascii() and "\x00" not in value:
        return value
    match value:
        case None:
            return None
        case bool():
            raise InvalidKey(f"key {name!r}: {value!r} is a bool; give a str or an int, such as {str(value).lower()!r}")
        case str():
            # What it holds, not what an enum or another subclass prints: equal values are the same key.
            text = str.__str__(value)
        case int():
            # Python refuses to print numbers of many thousand digits; none of them would fit anyway.
            if value.bit_length() > 4 * MAX_KEY_BYTES:
                raise InvalidKey(
                    f"key {shown(name)}: a number of more than {MAX_KEY_BYTES} digits; "
                    "hash the value, or use a shorter one"
                )
            text = int.__repr__(value)
        case UUID():
            text = str(value)
        case float():
            raise InvalidKey(
                f"key {shown(name)}: {shown(value)} is a float, which has no one canonical form; give a str or an int"
            )
        case _:
            kind = type(value).__name__
            raise InvalidKey(f"key {shown(name)}: a {kind} cannot be a key; give a str, an int, a UUID or None")
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidKey(f"key {shown(name)}: {shown(value)} is not valid Unicode text; encode what it holds") from None
    if "\x00" in text:
        raise InvalidKey(f"key {shown(name)}: {shown(value)} holds a NUL character, which PostgreSQL cannot store")
    if size > MAX_KEY_BYTES:
        raise InvalidKey(
            f"key {shown(name)}: {size} bytes is more than {MAX_KEY_BYTES}; hash the value, or use a shorter one"
        )
    return text


def canonical_keys(values: Mapping[str, object]) -> dict[str, str | None]:
    """All keys in canonical form, ordered by name."""
    if not isinstance(values, Mapping):
        raise InvalidKey(f"keys={shown(values)} is not a mapping; give one, such as {{'account': 'acme'}}")
    names: Iterable[Any] = values
    for name in names:
        if not isinstance(name, str) or not is_storable(name):
            raise InvalidKey(f"keys: {shown(name)} is not a key's name; give one, such as 'account'")
    return {name: canonical_key(name, values[name]) for name in sorted(values)}


def select(by: tuple[str, ...], keys: Keys, priority: int) -> tuple[str | None, ...]:
    """The values that `by` names, from a lane's keys and the built-ins."""
    if len(by) == 1:  # nearly always, and several times for every job that is claimed
        return (str(priority) if by[0] == "priority" else keys.get(by[0]),)
    return tuple(str(priority) if name == "priority" else keys.get(name) for name in by)


def lane_id(queue: str, priority: int, keys: Keys) -> bytes:
    """A producer needs no look-up: this names the lane that a job belongs to."""
    return _lane_id(queue, priority, tuple(sorted(keys.items())))


@lru_cache(maxsize=KEYS_REMEMBERED)
def _lane_id(queue: str, priority: int, items: tuple[tuple[str, str | None], ...]) -> bytes:
    return _digest("fairlane/lane/1", (queue, str(priority), *(part for item in items for part in item)))


@lru_cache(maxsize=KEYS_REMEMBERED)
def flow_id(queue: str, by: tuple[str, ...], values: tuple[str | None, ...]) -> bytes:
    """The flow of a fair key. `by` takes part: a flow by account is not the flow by region of the same value."""
    return _digest("fairlane/flow/1", (queue, str(len(by)), *by, *values))


@lru_cache(maxsize=KEYS_REMEMBERED)
def gate_id(queue: str, limit: str, values: tuple[str | None, ...]) -> bytes:
    """The gate of one limit for one key."""
    return _digest("fairlane/gate/1", (queue, limit, *values))


@lru_cache(maxsize=KEYS_REMEMBERED)
def shared_gate_id(limit: str, values: tuple[str | None, ...]) -> bytes:
    """The gate of a limit that queues share, for one key: it belongs to no queue."""
    return _digest("fairlane/shared-gate/1", (limit, *values))


def routing_number(values: tuple[str | None, ...]) -> int:
    """The number, below 2^64, by which a key finds its partition. Lanes have another domain: with one hash for both,
    a partition would hold lanes that are alike."""
    return int.from_bytes(_digest("fairlane/partition/1", values)[:8])


def unique_id(task: str, values: tuple[str | None, ...]) -> bytes:
    """The identity of a unique key: of one task, whatever the queue."""
    return _digest("fairlane/unique/1", (task, *values))


def _digest(domain: str, parts: Iterable[str | None]) -> bytes:
    body = bytearray(domain.encode())
    body += b"\n"
    for part in parts:
        if part is None:
            body += b"~"
        else:
            raw = part.encode()
            body += b"%d:%b," % (len(raw), raw)
    return sha256(body).digest()[:16]
