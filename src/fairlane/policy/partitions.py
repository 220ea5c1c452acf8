"""Partitions of a queue: what they are called, which of them a key belongs to, what each of them enforces, and what
they enforce together.

Partition 0 has the name of the whole, so that a queue of one partition is a plain queue, and growing strands nothing.
The route of a key is a number made of its values, as identities are (see `keys.py`) but in a domain of its own, and
Lamping and Veach's jump consistent hash of that number: growing from n to m partitions moves (m - n) / m of the keys,
and all of them to the new partitions.

A limit whose keys say where a job belongs stays in one partition and costs nothing more. A limit that crosses
partitions is shared by them under a name of its own, and is as exact; each claim then takes the lock of that limit too.

The state of a change is in the policies of the partitions and nowhere else, so whoever comes can go on with it.
Partition 0 says which phase it is in, and nobody goes on to the next one before every other partition has come as far:

- preparing: partition 0 says how many there will be, and works as before. Every other one learns both numbers, and from
  then on starts no job of a key that moves: not where the key was, nor where it goes.
- moving: partition 0 has learned it too, and producers learn the new number from it. What waits moves to where it
  belongs; what runs ends where it is. Keys that move stand still.
- settling: nothing of these keys runs or waits where it was. The others learn, with the state of the limits of keys
  that come to them, that the change is over; partition 0 last.

A change that has not come to settling can be abandoned: partition 0 goes to moving with the two numbers exchanged.
Nothing has run in a new place by then, so what has moved goes back, and nobody waits for what runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec

from fairlane.clock import SECOND, Instant
from fairlane.errors import ConfigurationError, InvalidKey, InvalidPolicy
from fairlane.parameters import shown
from fairlane.policy.keys import BUILT_IN, KEYS_REMEMBERED, By, Keys, canonical_key, normalize_by, routing_number
from fairlane.policy.limits import Limit, read_limit
from fairlane.policy.sequence import Sequence

if TYPE_CHECKING:
    from fairlane.policy.policy import Policy

MOST_PARTITIONS = 256
_RESERVED = re.compile(r"(?P<of>.+)__p(?P<index>0|[1-9][0-9]*)\Z")


LEARNED_EVERY = 5 * SECOND
"""How often producers that enqueue ask for the number of partitions."""
LEARNED_AFTER = 2 * LEARNED_EVERY
"""Keys go on in their new place once producers have learned of it: what one of them had sent to the old place a moment
ago would otherwise run after what it sends to the new one."""


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
        return tuple(partition_name(self.of, index) for index in range(self.width))

    def determines(self, by: By) -> bool:
        """Whether jobs that agree in these keys are always in one partition."""
        return bool(self.by) and set(self.by) <= set(by)

    def home_of(self, keys: Keys) -> int | None:
        """Where jobs with these keys belong; `None`: anywhere."""
        return partition_of(tuple(keys.get(name) for name in self.by), self.width) if self.by else None

    def misrouted(self, keys: Keys) -> bool:
        """Whether jobs with these keys belong to another partition."""
        home = self.home_of(keys)
        return self.index >= self.width if home is None else home != self.index

    def holds_back(self, keys: Keys) -> bool:
        """Whether such jobs must not start here: they belong elsewhere, or some of them may still run elsewhere."""
        if not self.is_guarded or not all(name in keys for name in self.by):
            return False
        if self.misrouted(keys):
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
    if isinstance(partitions, bool) or not isinstance(partitions, int) or not 1 <= partitions <= MOST_PARTITIONS:
        raise ConfigurationError(
            f"partitions={shown(partitions)} is not a number of partitions from 1 to {MOST_PARTITIONS}; give one"
        )
    return partitions


def checked_partition(queue: str, partition: object) -> None:
    if not isinstance(partition, Partition):
        raise InvalidPolicy(
            f"{queue}: partition={shown(partition)} is not a Partition; declare app.queue(…, partitions=…)"
        )
    what = f"queue {partition.of!r}: partition_by={partition.by!r}"
    normalize_by(what, partition.by, "partition_by")
    if built_in := sorted(set(partition.by) & set(BUILT_IN)):
        raise InvalidPolicy(f"{what}: the {built_in[0]} is not a key that says where jobs belong; name a key of theirs")


MOVING = "moving:"
"""The name of the gates at which keys wait that move to another partition; no other limit has it."""


def divided(policy: Policy, width: int, by: By = (), per_partition: Iterable[Limit] = ()) -> tuple[Policy, ...]:
    """The policies of the partitions of a queue. A queue of one partition is a plain one."""
    own = tuple(per_partition)
    if width == 1:
        keys = policy.keys
        if left_out := sorted(set(by) - set(policy.keys_of_job)):
            if keys:
                raise InvalidPolicy(
                    f"queue {policy.queue!r}: keys={keys!r} leaves out {left_out[0]!r}, its partition_by"
                )
            # Its jobs carry them all the same: it can be divided while they wait.
            keys = tuple(sorted({*policy.keys_of_job, *by}))
        return (_concise(replace(policy, limits=(*policy.limits, *own), keys=keys)),)
    first = partitioned(policy, Partition(of=policy.queue, index=0, width=width, by=by), own)
    return tuple(sibling(first, index) for index in range(width))


def partitioned(policy: Policy, place: Partition, per_partition: Iterable[Limit] = ()) -> Policy:
    """What one partition of a queue enforces, of however many."""
    own = tuple(per_partition)
    for limit in own:
        if limit.name is not None:
            raise InvalidPolicy(
                f"queue {policy.queue!r}: per_partition has {limit!r}, which other queues share by its name; "
                "put it into limits, or leave the name out"
            )
    fair = policy.fair
    if fair is not None and fair.from_job is not None and not place.determines(fair.by):
        raise InvalidPolicy(
            f"queue {place.of!r}: {fair!r} looks across partitions, and a weight that a job brings along is known only "
            f"where that job is; partition by its key: partition_by={fair.by[0]!r}, or give the weights by key"
        )
    limits = (*_crossing(place, policy.limits), *own)
    return _concise(replace(policy, limits=limits, partition=msgspec.structs.replace(place, own=len(own))))


def _concise(policy: Policy) -> Policy:
    """Without `keys` that say no more than the policy does: however it is divided, it then reads the same."""
    concise = replace(policy, keys=())
    return concise if policy.keys and concise.keys_of_job == policy.keys_of_job else policy


def sibling(policy: Policy, index: int) -> Policy:
    """The policy of another partition of the same queue."""
    assert policy.partition is not None
    place = msgspec.structs.replace(policy.partition, index=index)
    return replace(policy, queue=partition_name(place.of, index), partition=place)


def logical(policy: Policy) -> tuple[Policy, tuple[Limit, ...]]:
    """The policy of the whole queue as it was declared, and the limits that each partition keeps for itself."""
    place = policy.partition
    if place is None:
        return policy, ()
    shared, own = policy.limits[: len(policy.limits) - place.own], policy.limits[len(policy.limits) - place.own :]
    limits = tuple(
        read_limit({**limit.to_document(), "name": None}) if is_crossing(place.of, limit) else limit for limit in shared
    )
    return replace(policy, queue=place.of, limits=limits, partition=None), own


def division(policy: Policy) -> tuple[int, By]:
    """How many partitions a queue has, and by which keys."""
    place = policy.partition
    return (1, ()) if place is None or place.width == 1 else (place.width, place.by)


def as_divided(stored: Policy, declared: Policy) -> Policy:
    """A declaration, divided as the queue is: only an operator changes that, never a program that starts.

    `InvalidPolicy` where a declared limit cannot hold under the stored division.
    """
    before, after = stored.partition, declared.partition
    if before is None and after is None:
        return declared
    whole, own = logical(declared)
    if before is None:
        return divided(whole, 1, after.by if after else (), own)[0]
    try:
        return sibling(partitioned(whole, before, own), before.index)
    except InvalidPolicy as error:
        has = f"{_partitions(before.width)} by {_keys(before.by)}"
        raise InvalidPolicy(
            f"queue {before.of!r} has {has}, and what this program declares cannot hold there: {error}; or "
            f"change the queue first: {way_to(stored, declared)}"
        ) from error


def differing(stored: Policy, declared: Policy) -> str | None:
    """In words, how a declaration divides a queue otherwise than it is divided; `None`: it does not."""
    (has, by), (wants, wants_by) = division(stored), division(declared)
    if (has, by) == (wants, wants_by):
        return None
    keys = "" if by == wants_by or 1 in (has, wants) else f" by {_keys(wants_by)}, not by {_keys(by)}"
    return f"it has {_partitions(has)}, and this program declares {_partitions(wants)}{keys}"


def way_to(stored: Policy, declared: Policy) -> str:
    """The commands that divide a queue as it is declared. Other keys need one queue in between."""
    (has, by), (wants, wants_by) = division(stored), division(declared)
    command = f"`fairlane partition {logical(stored)[0].queue} --to"
    if wants == 1 or (has > 1 and by == wants_by):
        return f"{command} {wants}`"
    keys = "".join(f" --by {name}" for name in wants_by) or " --app module:app"
    return f"{command} {wants}{keys}`" if has == 1 else f"{command} 1`, then {command} {wants}{keys}`"


def _crossing(partition: Partition, limits: Iterable[Limit]) -> Iterator[Limit]:
    """Limits as partitions enforce them: those that cross them have a name."""
    seen: dict[str, int] = {}
    queue = partition.of
    for limit in limits:
        if is_crossing(queue, limit):
            raise InvalidPolicy(f"queue {queue!r}: {limit!r}: names that begin with {queue}__ belong to its partitions")
        if limit.name is not None or partition.determines(limit.by):
            yield limit
            continue
        if isinstance(limit, Sequence):
            raise InvalidPolicy(
                f"queue {queue!r}: {limit!r} would run through several partitions, where nothing keeps its order; "
                f"partition by one of its keys: partition_by={limit.by[0]!r}"
            )
        if not limit.is_shareable:
            raise InvalidPolicy(
                f"queue {queue!r}: {limit!r} looks across partitions, and only Concurrency and Rate with one number "
                f"for all keys can; let each partition keep one for itself: per_partition=[…], or partition by its key"
            )
        nth = seen[limit.identity] = seen.get(limit.identity, 0) + 1
        # `email__rate-60s.endpoint` for `rate/60s:endpoint` of `email`; twins are numbered.
        words = limit.identity.replace("/", "-").replace(":", ".").replace(",", ".").rstrip(".")
        name = f"{queue}__{words}" if nth == 1 else f"{queue}__{words}-{nth}"
        yield read_limit({**limit.to_document(), "name": name})


def is_crossing(queue: str, limit: Limit) -> bool:
    """Whether the partitions of a queue share this limit, and nobody else."""
    return limit.name is not None and limit.name.startswith(f"{queue}__")


def _partitions(width: int) -> str:
    return "one partition" if width == 1 else f"{width} partitions"


def _keys(by: By) -> str:
    return ", ".join(by) or "no key"


class Phase(StrEnum):
    """How far a change has come."""

    RESTING = "resting"
    """There is none."""
    PREPARING = "preparing"
    MOVING = "moving"
    SETTLING = "settling"


def phase_of(first: Policy) -> Phase:
    place = first.partition
    if place is None or not place.is_changing:
        return Phase.RESTING
    if place.to is not None:
        return Phase.PREPARING
    return Phase.SETTLING if place.is_settled else Phase.MOVING


def widths(first: Policy) -> tuple[int, int]:
    """How many partitions there were before the change that is under way, and how many there will be."""
    place = first.partition
    assert place is not None
    return (place.width, place.to) if place.to is not None else (place.was or place.width, place.width)


def begun(first: Policy, to: int, by: By = ()) -> Policy:
    """Partition 0 of a queue that is to have another number of partitions; by these keys, if it is a plain queue."""
    if first.partition is None:
        # What it was divided by before is in its keys, and the new ones are not.
        keys = tuple(sorted({*first.keys, *by} - {*BUILT_IN})) if first.keys else ()
        return partitioned(replace(first, keys=keys), Partition(of=first.queue, index=0, width=1, by=by, to=to))
    return _placed(first, to=to)


def abandoned(first: Policy, now: Instant) -> Policy:
    """Partition 0 once the change that it says is given up. One that is settling goes on: there is nothing to undo."""
    before, to = widths(first)
    return _placed(first, width=before, was=to, to=None, since=now, is_guarded=True, is_abandoned=True)


def next_phase(first: Policy, now: Instant) -> Policy:
    """Partition 0 once all others have come as far as it says."""
    place = first.partition
    assert place is not None
    match phase_of(first):
        case Phase.PREPARING:
            return _placed(first, width=place.to, was=place.width, to=None, since=now, is_guarded=True)
        case Phase.MOVING:
            return _placed(first, is_settled=True)
        case _:
            ended = _ended(first)
            if place.width > 1:
                return ended
            whole, own = logical(ended)
            return divided(whole, 1, place.by, own)[0]


def others(first: Policy, known: Iterable[int]) -> list[int]:
    """The partitions beside partition 0 that take part in a change: new ones first, for jobs will be sent to them."""
    before, to = widths(first)
    return sorted({*range(1, max(before, to)), *known} - {0}, key=lambda index: (index < before, index))


def in_phase(first: Policy, index: int) -> Policy:
    """What another partition enforces in the phase that partition 0 says."""
    match phase_of(first):
        case Phase.PREPARING:
            before, to = widths(first)
            return sibling(_placed(_ended(first), width=to, was=before), index)
        case Phase.MOVING:
            return sibling(_placed(first, since=None), index)
        case _:
            return sibling(_ended(first), index)


def _ended(first: Policy) -> Policy:
    return _placed(first, was=None, to=None, since=None, is_guarded=True, is_settled=False, is_abandoned=False)


def _placed(policy: Policy, **place: object) -> Policy:
    assert policy.partition is not None
    return replace(policy, partition=msgspec.structs.replace(policy.partition, **place))
