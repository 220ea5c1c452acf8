"""Partitions of a queue: what they are called, and which of them a key belongs to.

Partition 0 has the name of the whole, so that a queue of one partition is a plain queue, and growing strands nothing.
The route of a key is a number made of its values, as identities are (see `keys.py`) but in a domain of its own, and
Lamping and Veach's jump consistent hash of that number: growing from n to m partitions moves (m - n) / m of the keys,
and all of them to the new partitions.
"""

from __future__ import annotations

import re
from functools import lru_cache

import msgspec

from fairlane.clock import Instant
from fairlane.errors import ConfigurationError, InvalidKey, InvalidPolicy
from fairlane.parameters import shown
from fairlane.policy.keys import BUILT_IN, KEYS_REMEMBERED, By, Keys, canonical_key, normalize_by, routing_number

MOST_PARTITIONS = 256
_RESERVED = re.compile(r"(?P<of>.+)__p(?P<index>0|[1-9][0-9]*)\Z")


class Partition(msgspec.Struct, frozen=True, kw_only=True):
    """The place of a queue among the partitions of one that is partitioned."""

    of: str
    """The name of the whole: what programs and operators say."""
    index: int
    width: int
    """How many there are."""
    by: By = ()
    """The keys that say where a job belongs; none: a job may be in any of them."""
    was: int | None = None
    """How many there were, while their number changes."""
    to: int | None = None
    """How many there will be. Only partition 0 says so, while the others learn of a change that is about to begin."""
    since: Instant | None = None
    """When producers could first learn the width. Only partition 0 says so, while keys move."""
    is_settled: bool = False
    """Nothing moves any more, and the change is being ended. Only partition 0 says so."""
    is_abandoned: bool = False
    """The width goes back to what it was: keys that were about to move never lived where they were going."""
    own: int = 0
    """How many of the policy's limits, its last ones, each partition keeps for itself."""
    is_guarded: bool = False
    """Their number has changed before: jobs may be here that belong elsewhere, and must not start here."""

    @property
    def is_changing(self) -> bool:
        """Whether a change of the width has begun and is not over."""
        return self.to is not None or self.was is not None

    @property
    def names(self) -> tuple[str, ...]:
        """All partitions, in order."""
        return tuple(partition_name(self.of, index) for index in range(self.width))

    def determines(self, by: By) -> bool:
        """Whether jobs that agree in these keys are always in one partition."""
        return bool(self.by) and set(self.by) <= set(by)

    def home_of(self, keys: Keys) -> int | None:
        """Where jobs with these keys belong; `None`: anywhere."""
        return partition_of(tuple(keys.get(name) for name in self.by), self.width) if self.by else None

    def strays(self, keys: Keys) -> bool:
        """Whether jobs with these keys belong to another partition."""
        home = self.home_of(keys)
        return self.index >= self.width if home is None else home != self.index

    def holds_back(self, keys: Keys) -> bool:
        """Whether such jobs must not start here: they belong elsewhere, or some of them may still run elsewhere."""
        if not self.is_guarded or not all(name in keys for name in self.by):
            return False
        if self.strays(keys):
            return True
        values = tuple(keys.get(name) for name in self.by)
        return bool(self.was and self.by) and partition_of(values, self.was or 1) != self.index


def partition_name(of: str, index: int) -> str:
    """What a partition is stored under."""
    return of if index == 0 else f"{of}__p{index}"


def parse_partition(name: str) -> tuple[str, int] | None:
    """`email__p2` as (`email`, 2), and `email__p0` as its first partition alone; `None` for any other name."""
    found = _RESERVED.match(name)
    return None if found is None else (found["of"], int(found["index"]))


def whole_of(name: str) -> str:
    """The queue that a partition belongs to; of any other queue, its own name."""
    place = parse_partition(name)
    return name if place is None else place[0]


def partition_for(key: object, partitions: int) -> int:
    """The partition, from 0 on, that a key belongs to: a value, or a tuple of values where several keys decide."""
    return partition_of(_routed(key), checked_width(partitions))


def partition_number(key: object) -> int:
    """The number, below 2^64, that a key is routed by: what `partition_for` divides, and another router can too."""
    return routing_number(_routed(key))


def _routed(key: object) -> tuple[str | None, ...]:
    values = key if isinstance(key, tuple) else (key,)
    if not values:
        raise InvalidKey(
            "key=() names no value; give the key's value, a tuple of several, or None for jobs without one"
        )
    return tuple(canonical_key("partition_by", value) for value in values)


@lru_cache(maxsize=KEYS_REMEMBERED)
def partition_of(values: tuple[str | None, ...], width: int) -> int:
    """The same for canonical values."""
    number = routing_number(values)
    chosen, jump = 0, 0
    while jump < width:
        chosen = jump
        number = (number * 2862933555777941757 + 1) & 0xFFFF_FFFF_FFFF_FFFF
        jump = int((chosen + 1) * (2147483648.0 / ((number >> 33) + 1)))
    return chosen


def checked_width(partitions: object) -> int:
    """A number of partitions."""
    if isinstance(partitions, bool) or not isinstance(partitions, int) or not 1 <= partitions <= MOST_PARTITIONS:
        raise ConfigurationError(
            f"partitions={shown(partitions)} is not a number of partitions from 1 to {MOST_PARTITIONS}; give one"
        )
    return partitions


def checked_partition(queue: str, partition: object) -> None:
    """Refuse a place that no queue can have."""
    if not isinstance(partition, Partition):
        raise InvalidPolicy(f"{queue}: partition={shown(partition)} is none; declare app.queue(…, partitions=…)")
    what = f"queue {partition.of!r}: partition_by={partition.by!r}"
    normalize_by(what, partition.by, "partition_by")
    if built_in := sorted(set(partition.by) & set(BUILT_IN)):
        raise InvalidPolicy(f"{what}: the {built_in[0]} is not a key that says where jobs belong; name a key of theirs")


MOVING = "moving:"
"""The name of the gates at which keys wait that move to another partition; no other limit has it."""
