"""A change of the number of a queue's partitions: its phases, and what each partition enforces in them.

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

from collections.abc import Iterable
from dataclasses import replace
from enum import StrEnum

import msgspec

from fairlane.clock import SECOND, Instant
from fairlane.policy.division import divided, logical, partitioned, sibling
from fairlane.policy.keys import BUILT_IN, By
from fairlane.policy.partitions import Partition
from fairlane.policy.policy import Policy

LEARNED_EVERY = 5 * SECOND
"""How often producers that enqueue ask for the number of partitions."""
LEARNED_AFTER = 2 * LEARNED_EVERY
"""Keys go on in their new place once producers have learned of it: what one of them had sent to the old place a moment
ago would otherwise run after what it sends to the new one."""


class Phase(StrEnum):
    """How far a change has come."""

    RESTING = "resting"
    """There is none."""
    PREPARING = "preparing"
    MOVING = "moving"
    SETTLING = "settling"


def phase_of(first: Policy) -> Phase:
    """The phase that partition 0 says."""
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
            policy = _placed(_ended(first), width=to, was=before)
        case Phase.MOVING:
            policy = _placed(first, since=None)
        case _:
            policy = _ended(first)
    return sibling(policy, index)


def _ended(first: Policy) -> Policy:
    return _placed(first, was=None, to=None, since=None, is_guarded=True, is_settled=False, is_abandoned=False)


def _placed(policy: Policy, **place: object) -> Policy:
    assert policy.partition is not None
    return replace(policy, partition=msgspec.structs.replace(policy.partition, **place))
