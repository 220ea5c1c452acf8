"""A policy of several partitions: what each of them enforces, and what they enforce together.

A limit whose keys say where a job belongs stays in one partition and costs nothing more. A limit that crosses
partitions is shared by them under a name of its own, and is as exact; each claim then takes the lock of that limit too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import msgspec

from fairlane.errors import InvalidPolicy
from fairlane.policy.gates import Limit
from fairlane.policy.keys import By
from fairlane.policy.limits import Concurrency, Rate
from fairlane.policy.partitions import Partition, partition_name
from fairlane.policy.policy import Policy, read_limit
from fairlane.policy.sequence import Sequence


def divided(policy: Policy, width: int, by: By = (), per_partition: Iterable[Limit] = ()) -> tuple[Policy, ...]:
    """The policies of the partitions of a queue. A queue of one partition is a plain one."""
    own = tuple(per_partition)
    if width == 1:
        keys = policy.keys
        if left_out := sorted(set(by) - set(policy.stamped_keys)):
            if keys:
                raise InvalidPolicy(
                    f"queue {policy.queue!r}: keys={keys!r} leaves out {left_out[0]!r}, its partition_by"
                )
            # Its jobs carry them all the same: it can be divided while they wait.
            keys = tuple(sorted({*policy.stamped_keys, *by}))
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
    return concise if policy.keys and concise.stamped_keys == policy.stamped_keys else policy


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
    limits = tuple(_unnamed(limit) if _is_crossing(place.of, limit) else limit for limit in shared)
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
        if _is_crossing(queue, limit):
            raise InvalidPolicy(f"queue {queue!r}: {limit!r}: names that begin with {queue}__ belong to its partitions")
        if limit.name is not None or partition.determines(limit.by):
            yield limit
            continue
        if isinstance(limit, Sequence):
            raise InvalidPolicy(
                f"queue {queue!r}: {limit!r} would run through several partitions, where nothing keeps its order; "
                f"partition by one of its keys: partition_by={limit.by[0]!r}"
            )
        if not isinstance(limit, Concurrency | Rate) or limit.named or limit.from_job:
            raise InvalidPolicy(
                f"queue {queue!r}: {limit!r} looks across partitions, and only Concurrency and Rate with one number "
                f"for all keys can; let each partition keep one for itself: per_partition=[…], or partition by its key"
            )
        nth = seen[limit.identity] = seen.get(limit.identity, 0) + 1
        yield read_limit({**limit.to_document(), "name": _shared_name(queue, limit, nth)})


def _shared_name(queue: str, limit: Limit, nth: int) -> str:
    """What partitions share a limit by: `email__rate-60s.endpoint` for `rate/60s:endpoint` of `email`."""
    words = limit.identity.replace("/", "-").replace(":", ".").replace(",", ".").rstrip(".")
    return f"{queue}__{words}" if nth == 1 else f"{queue}__{words}-{nth}"


def _is_crossing(queue: str, limit: Limit) -> bool:
    return limit.name is not None and limit.name.startswith(f"{queue}__")


def _unnamed(limit: Limit) -> Limit:
    document = limit.to_document()
    document.pop("name", None)
    return read_limit(document)


def _partitions(width: int) -> str:
    return "one partition" if width == 1 else f"{width} partitions"


def _keys(by: By) -> str:
    return ", ".join(by) or "no key"
