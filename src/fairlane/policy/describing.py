"""A policy in words: what it does, a sentence for each part."""

from __future__ import annotations

from fairlane.clock import SECOND
from fairlane.policy.adaptive import AdaptiveConcurrency
from fairlane.policy.backlog import Backlog
from fairlane.policy.breaker import Breaker
from fairlane.policy.by import By
from fairlane.policy.limits import Concurrency, Rate
from fairlane.policy.policy import WEIGHT, BoundLimit, Policy
from fairlane.policy.sequence import Sequence

__all__ = ["policy_words"]


def policy_words(policy: Policy) -> list[str]:
    """What it does, a sentence for each part; the order of jobs first."""
    return [_order(policy), *(_limit(bound) for bound in policy.bound), *_partitions(policy)]


def _order(policy: Policy) -> str:
    fair = policy.fair
    if fair is None:
        return "First come, first served, higher priorities with a head start."
    charged = "for the time its jobs run" if fair.charge == "time" else "for each job, however long it runs"
    weights = ", by weight" if policy.brought.get(WEIGHT) or fair.weights else ""
    return f"Every {_by(fair.by)} gets its turn{weights}, charged {charged}."


def _limit(bound: BoundLimit) -> str:
    limit = bound.limit
    where = f"for each {_by(limit.by)}" if limit.by else "in the whole queue"
    shared = f", shared by all queues that name {limit.name!r}" if limit.name is not None else ""
    match limit:
        case Concurrency() if bound.from_job is not None:
            return f"As many at the same time {where} as its jobs say{shared}."
        case Concurrency() if bound.named is not None:
            return f"At the same time {where}: {_numbers(limit.named)}{shared}."
        case Concurrency():
            return f"At most {limit.max:,} at the same time {where}{shared}."
        case Rate() if bound.from_job is not None or bound.named is not None:
            said = "as its jobs say" if bound.named is None else _numbers(limit.named)
            return f"So many starts per {_time(limit.per)} {where}: {said}{shared}."
        case Rate(rolling=True):
            return f"Never more than {limit.limit:g} starts within any {_time(limit.per)} {where}{shared}."
        case Rate():
            return f"At most {limit.limit:g} starts per {_time(limit.per)} {where}, {limit.burst:g} at once{shared}."
        case AdaptiveConcurrency():
            return f"A cap that learns, from {limit.min:,} to {limit.max:,} at the same time {where}."
        case Breaker():
            cooldown = _time(limit.cooldown)
            return f"Stops {where} after {limit.failures} failures in a row; probes again after {cooldown}."
        case Sequence():
            return f"Strictly one after the other {where}."
        case Backlog():
            full = "more are refused" if limit.when_full == "reject" else "producers are told"
            return f"At most {limit.max:,} may wait {where}; beyond that {full}."
        case _:
            return f"{limit!r}."


def _partitions(policy: Policy) -> list[str]:
    place = policy.partition
    if place is None or place.width < 2:
        return []
    by = f" by {_by(place.by)}" if place.by else ""
    return [f"Divided into {place.width} partitions{by}."]


def _by(by: By) -> str:
    return " and ".join(by)


def _numbers(named: object) -> str:
    items = dict(named).items() if named else ()  # type: ignore[call-overload]  # a mapping, or pairs
    return ", ".join(f"{value:g} for {key}" for key, value in items)


def _time(microseconds: int) -> str:
    seconds = microseconds / SECOND
    for size, unit in ((86_400, "day"), (3_600, "hour"), (60, "minute"), (1, "second")):
        if seconds >= size and seconds % size == 0:
            count = int(seconds // size)
            return unit if count == 1 else f"{count} {unit}s"
    return f"{seconds:g} seconds"
