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

from fairlane.errors import ConfigurationError, InvalidPolicy
from fairlane.policy.by import By, normalize_by
from fairlane.policy.keys import BUILT_IN, Keys, canonical_key, routing_number

__all__ = [
    "MOST_PARTITIONS",
    "Partition",
    "checked_partition",
    "checked_width",
    "parse_partition",
    "partition_for",
    "partition_name",
    "partition_of",
]

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
    own: int = 0
    """How many of the policy's limits, its last ones, each partition keeps for itself."""

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


def partition_name(of: str, index: int) -> str:
    """What a partition is stored under."""
    return of if index == 0 else f"{of}__p{index}"


def parse_partition(name: str) -> tuple[str, int] | None:
    """`email__p2` as (`email`, 2), and `email__p0` as its first partition alone; `None` for any other name."""
    found = _RESERVED.match(name)
    return None if found is None else (found["of"], int(found["index"]))


def partition_for(key: object, partitions: int) -> int:
    """The partition, from 0 on, that a key belongs to: a value, or a tuple of values where several keys decide."""
    values = key if isinstance(key, tuple) else (key,)
    return partition_of(tuple(canonical_key("partition_by", value) for value in values), checked_width(partitions))


@lru_cache(maxsize=65_536)
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
        raise ConfigurationError(f"partitions={partitions!r} is not a number of partitions from 1 to {MOST_PARTITIONS}")
    return partitions


def checked_partition(partition: Partition) -> None:
    """Refuse a place that no queue can have."""
    what = f"queue {partition.of!r}: partition_by={partition.by!r}"
    normalize_by(what, partition.by)
    if built_in := sorted(set(partition.by) & set(BUILT_IN)):
        raise InvalidPolicy(f"{what}: the {built_in[0]} is not a key that says where jobs belong; name a key of theirs")
