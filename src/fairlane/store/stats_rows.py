"""Figures as they are stored, alike on every store: rows of keys, and the places of a list of them."""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from heapq import nsmallest
from typing import Any

import msgspec
from msgspec.structs import replace

from fairlane.clock import Instant
from fairlane.errors import ConfigurationError
from fairlane.policy.keys import KEYS_REMEMBERED, By
from fairlane.scheduler.snapshot import UnseenLane
from fairlane.stats.keys import HOUR, HOURS, KeyStats, Minute, Place, Span
from fairlane.store.rows import encode
from fairlane.store.stats_values import KeyPage, KeySort, WorkerReport, key_scope

Row = Sequence[Any]

_read_hours = msgspec.json.Decoder(tuple[Span, ...]).decode
_encode_figures = msgspec.msgpack.Encoder().encode
_read_figures = msgspec.msgpack.Decoder(KeyStats).decode
_read_key = msgspec.json.Decoder(tuple[str | None, ...]).decode
decode_minute = msgspec.json.Decoder(Minute).decode

decode_report = msgspec.json.Decoder(WorkerReport).decode

LONGEST_KEY = 2_000
"""Bytes of a key that can be listed, since an index does not take much more. Longer ones are in no list."""
LOWEST = -(2**63)
HIGHEST = 2**63 - 1
FEW = 200
"""Keys that match a search, and are sorted here. Where more do, a list in its order comes upon enough of them soon."""


def key_text(key: Sequence[str | None]) -> str:
    """A key as it is stored: the values that its scope names, as a JSON array."""
    return encode(key)


@lru_cache(maxsize=KEYS_REMEMBERED)
def _key(text: str) -> tuple[str | None, ...]:
    return _read_key(text)


@lru_cache(maxsize=1_024)
def _by(scope: str) -> By:
    return tuple(scope.split(","))


def label_of(key: Sequence[str | None]) -> str:
    """What people search for a key by."""
    return "\n".join(value.lower() for value in key if value is not None)


def sought(search: str) -> str | None:
    """What labels are searched for; `None`: no label has such a thing in it."""
    try:
        search.encode()
    except UnicodeEncodeError:
        return None
    return None if "\x00" in search else search.lower()


def key_stats(waiting: int, running: int, held_by: str | None, stats: bytes) -> KeyStats:
    """A row of a key as its figures. What counting anew sets is in columns of its own."""
    known = _read_figures(stats)
    return replace(known, waiting=waiting, running=running, held_by=known.held_by if held_by is not None else ())


def parameters(stats: KeyStats) -> Row:
    """The same figures, to be stored: with what lists are sorted and searched by, and when to look at them again."""
    return (
        key_scope(stats.by),
        key_text(stats.key),
        label_of(stats.key),
        stats.waiting,
        stats.running,
        stats.ended,
        stats.started_at,
        encode(stats.held_by) if stats.held_by else None,
        (stats.hours[0].number + HOURS) * HOUR if stats.hours else None,
        _encode_figures(stats),
    )


def decode_hours(text: str | None) -> tuple[Span, ...]:
    return () if text is None else _read_hours(text)


def start_of(place: KeyPlace | None) -> tuple[int, str, str]:
    """After what a list goes on, as its statement takes it."""
    return (LOWEST, "", "") if place is None else (place.value, place.key, place.queue)


class KeyPlace(msgspec.Struct, frozen=True, array_like=True):
    """A place in a list of keys: most first, then by key, then by partition."""

    sort: KeySort
    value: int
    """What it is sorted by, so that the least comes first."""
    key: str
    queue: str

    @classmethod
    def of(cls, sort: KeySort, queue: str, stats: KeyStats) -> KeyPlace:
        return cls(sort, -_sorted_by(sort, stats), key_text(stats.key), queue)

    @property
    def order(self) -> tuple[int, bytes, bytes]:
        """As the stores have it, which compare text by its bytes."""
        return self.value, self.key.encode(), self.queue.encode()

    def encode(self) -> str:
        return urlsafe_b64encode(encode(self).encode()).decode().rstrip("=")

    @classmethod
    def decode(cls, text: str, sort: KeySort, queues: Sequence[str]) -> KeyPlace:
        try:
            place = msgspec.json.decode(urlsafe_b64decode(text.encode() + b"=" * (-len(text) % 4)), type=cls)
            _read_key(place.key)
            if place.sort != sort or place.queue not in queues or not LOWEST <= place.value <= HIGHEST:
                raise ValueError
            if "\x00" in place.key:
                raise ValueError
        except (ValueError, msgspec.MsgspecError):
            raise ConfigurationError(f"after={text!r} is no place in this list; give what its last page said") from None
        return place


def page_of(found: Iterable[tuple[str, KeyStats]], sort: KeySort, place: KeyPlace | None, limit: int) -> KeyPage:
    """What a list has after that place, where these are all that a search finds."""
    placed = sorted(
        ((KeyPlace.of(sort, *each), each) for each in found),
        key=lambda each: each[0].order,
    )
    listed = [each for each in placed if place is None or each[0].order > place.order]
    after = listed[limit - 1][0].encode() if len(listed) > limit else None
    return KeyPage([each for _, each in listed[:limit]], after)


def matching(found: Iterable[tuple[str, KeyStats]], sought: str) -> list[tuple[str, KeyStats]]:
    """Of these keys, those that are listed where this is searched for: they are short enough, and not idle."""
    return [
        each
        for each in found
        if not each[1].is_idle and sought in label_of(each[1].key) and len(key_text(each[1].key)) < LONGEST_KEY
    ]


class KeySums(msgspec.Struct, array_like=True, gc=False):
    """What a list of keys is sorted by, of one key."""

    scope: str
    key: str
    waiting: int = 0
    running: int = 0
    ended: int = 0
    started_at: Instant = 0
    held_by: tuple[str, ...] = ()

    @property
    def place(self) -> Place:
        return place_of(self.scope, self.key)

    @classmethod
    def of(cls, stats: KeyStats) -> KeySums:
        counts = (stats.waiting, stats.running, stats.ended, stats.started_at or 0)
        return cls(key_scope(stats.by), key_text(stats.key), *counts, stats.held_by)


decode_sums = msgspec.json.Decoder(list[KeySums]).decode
decode_lanes = msgspec.json.Decoder(list[UnseenLane]).decode


def place_of(scope: str, key: str) -> Place:
    return _by(scope), _key(key)


def with_arrivals(
    stored: Iterable[KeySums], by: By, arrived: Mapping[tuple[str | None, ...], int], known: Collection[str]
) -> list[KeySums]:
    """The same with jobs that came since, of all keys of a scope but those that are known better."""
    scope = key_scope(by)
    sums = {each.key: each for each in stored if each.key not in known}
    for key, count in arrived.items():
        text = key_text(key)
        found = sums.get(text)
        if found is not None:
            found.waiting += count
        elif count > 0 and text not in known:
            sums[text] = KeySums(scope, text, count)
    return list(sums.values())


def first_of(
    sums: Iterable[KeySums], scope: str, sort: KeySort, place: KeyPlace | None, queue: str, limit: int, sought: str
) -> list[str]:
    """The first keys of a scope after that place of a list, by their names."""
    name = queue.encode()
    placed = (
        (-_sorted_by(sort, each), each.key.encode(), name, each.key)
        for each in sums
        if each.scope == scope
        and len(each.key) < LONGEST_KEY
        and (not sought or sought in label_of(_read_key(each.key)))
    )
    if place is not None:
        start = place.order
        placed = (each for each in placed if each[:3] > start)
    return [key for *_, key in nsmallest(limit, placed)]


def _sorted_by(sort: KeySort, stats: KeyStats | KeySums) -> Instant | int:
    match sort:
        case KeySort.WAITING:
            return stats.waiting
        case KeySort.RUNNING:
            return stats.running
        case KeySort.ENDED:
            return stats.ended
        case KeySort.STARTED:
            return stats.started_at or 0
        case KeySort.NAME:
            return 0
