"""A policy of several partitions: what each of them enforces, and what they enforce together.

A limit whose keys say where a job belongs stays in one partition and costs nothing more. A limit that crosses
partitions is shared by them under a name of its own, and is as exact; each claim then takes the lock of that limit too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import msgspec

from fairlane.errors import ConfigurationError, InvalidPolicy
from fairlane.policy.by import By
from fairlane.policy.gates import Limit
from fairlane.policy.kinds import read_limit
from fairlane.policy.limits import Concurrency, Rate
from fairlane.policy.partitions import Partition, partition_name
from fairlane.policy.policy import Policy
from fairlane.policy.sequence import Sequence

__all__ = ["adopted", "as_divided", "divided", "logical", "partitioned", "sibling"]


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
        return (replace(policy, limits=(*policy.limits, *own), keys=keys),)
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
    limits = (*_crossing(place, policy.limits), *own)
    return replace(policy, limits=limits, partition=msgspec.structs.replace(place, own=len(own)))


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


def as_divided(stored: Policy, declared: Policy) -> Policy:
    """A declaration, with what it does not say: how far a change of the width has come.

    Refused where it divides the queue otherwise than it is: its jobs would go where nobody looks for them.
    """
    before, after = stored.partition, declared.partition
    name = (before or after or Partition(of=declared.queue, index=0, width=1)).of
    has, wants = (1 if before is None else before.width), (1 if after is None else after.width)
    if has != wants:
        raise ConfigurationError(
            f"queue {name!r} has {_partitions(has)}, and this program declares {_partitions(wants)}; declare "
            f"partitions={has}, or change the queue: `fairlane partition {name} --to {wants}`"
        )
    if before is not None and after is not None and before.by != after.by:
        raise ConfigurationError(
            f"queue {name!r} is partitioned by {_keys(before.by)}, and this program declares {_keys(after.by)}; let it "
            f"be one queue in between: `fairlane partition {name} --to 1`, then `--to {wants}` with the new keys"
        )
    return adopted(stored, declared)


def adopted(stored: Policy, declared: Policy) -> Policy:
    """A declaration, with how far a change of the width has come, if it divides the queue as it is divided."""
    before, after = stored.partition, declared.partition
    if before is None or after is None or before.width != after.width:
        return declared
    return replace(declared, partition=msgspec.structs.replace(after, was=before.was, is_guarded=before.is_guarded))


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
