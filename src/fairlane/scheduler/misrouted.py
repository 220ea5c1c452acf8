"""What is in a partition and belongs to another: which jobs move, where to, and with which gates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
from msgspec.structs import replace

from fairlane.policy.division import logical
from fairlane.policy.keys import Keys, gate_id, lane_id, shared_gate_id
from fairlane.policy.partitions import partition_name, partition_of
from fairlane.policy.policy import WEIGHT, BoundLimit, Policy
from fairlane.scheduler.snapshot import FlowRow, GateRow, SharedGateRow


class WaitingLane(msgspec.Struct, frozen=True):
    """A lane of a partition with jobs that wait or run."""

    id: bytes
    priority: int
    keys: dict[str, str | None]
    ready: int = 0
    in_flight: int = 0
    floor: int = 0


class StrayLane(msgspec.Struct, frozen=True):
    """A lane whose jobs do not belong here, and the lane that they join."""

    was: WaitingLane
    queue: str
    lane: bytes


def stray_lanes(policy: Policy, lanes: Iterable[WaitingLane]) -> list[StrayLane]:
    """The lanes among these whose jobs belong to another partition."""
    place = policy.partition
    if place is None or not place.is_guarded:
        return []
    strays = []
    for lane in lanes:
        if place.strays(lane.keys):
            queue = _home(policy, lane.id, lane.keys)
            strays.append(StrayLane(lane, queue, lane_id(queue, lane.priority, lane.keys)))
    return strays


def _home(policy: Policy, lane: bytes, keys: Keys) -> str:
    place = policy.partition
    assert place is not None
    home = place.home_of(keys)
    # Where any partition will do, a lane moves as a whole: its order stays.
    return partition_name(place.of, partition_of((lane.hex(),), place.width) if home is None else home)


def gates_of_strays(policy: Policy, was: int, gates: Iterable[GateRow]) -> list[tuple[str, GateRow]]:
    """Gates of keys that have lived here, when there were `was` partitions, and move to another one; each with the
    queue that it goes to. It is the same once this partition has learned that the change is over."""
    place = policy.partition
    if place is None:
        return []
    # A key may have lived here long ago as well: only its last home knows what it has spent.
    lived_here = replace(place, width=was)
    found = []
    for row in gates:
        bound = policy.bound_named(row.limit)
        if bound is None or bound.is_shared or not place.determines(bound.limit.by) or policy.is_own(bound):
            continue
        keys = dict(zip(bound.limit.by, row.key, strict=True))
        if place.strays(keys) and not lived_here.strays(keys):
            found.append((_home(policy, row.id, keys), row))
    return found


def weights_of_strays(policy: Policy, was: int, flows: Iterable[FlowRow]) -> list[tuple[str, GateRow]]:
    """Weights that jobs have brought for keys that move to another partition. They go with the gates, as if they were
    the bounds of some: in force there, unless a later job has brought another (`rebuild`)."""
    place = policy.partition
    if place is None or WEIGHT not in policy.brought or not place.determines(policy.fair_by):
        return []
    lived_here = replace(place, width=was)
    found = []
    for flow in flows:
        keys = dict(zip(policy.fair_by, flow.key, strict=True))
        if flow.given_by and place.strays(keys) and not lived_here.strays(keys):
            row = GateRow(flow.id, WEIGHT, flow.key, 0, 0, 0, 0, None, None, flow.weight, flow.given_by)
            found.append((_home(policy, flow.id, keys), row))
    return found


def imported(queue: str, own: Iterable[GateRow], others: Iterable[GateRow]) -> list[GateRow]:
    """The gates of a partition with those that come from others: what a key has spent there, it has spent. The number
    that was brought last holds, wherever it was."""
    rows = {row.id: row for row in own}
    for other in others:
        gate = gate_id(queue, other.limit, tuple(other.key))
        known = rows.get(gate, other)
        newest = known if known.given_by > other.given_by else other
        rows[gate] = replace(
            other,
            id=gate,
            in_flight=0,
            waiting=0,
            awake=0,
            wake_at=None,
            value=newest.value,
            given_by=newest.given_by,
        )
    return list(rows.values())


def tokens_to_share(before: Policy, after: Policy, gates: Iterable[GateRow]) -> list[SharedGateRow]:
    """What a plain queue has spent of limits that its partitions share from now on. What runs is counted anew."""
    if before.partition is not None or after.partition is None:
        return []
    shared = _renamed(logical(after)[0], after)
    rows = []
    for row in gates:
        if (bound := shared.get(row.limit)) is not None:
            gate = shared_gate_id(bound.name, tuple(row.key))
            rows.append(SharedGateRow(gate, bound.name, row.key, 0, row.tat, [], row.memo, row.value))
    return rows


def shared_tokens(before: Policy, after: Policy) -> Mapping[str, BoundLimit]:
    """The limits whose tokens partitions have shared and a plain queue has to itself from now on, by their names then;
    each as it was shared."""
    if before.partition is None or after.partition is not None:
        return {}
    return _renamed(logical(before)[0], before)


def tokens_of_its_own(queue: str, limit: str, rows: Iterable[SharedGateRow]) -> list[GateRow]:
    """What partitions have spent of a shared limit, as gates of the plain queue that is left of them."""
    return [
        GateRow(gate_id(queue, limit, tuple(row.key)), limit, row.key, 0, row.tat, 0, 0, None, row.memo, row.value)
        for row in rows
    ]


def _renamed(whole: Policy, part: Policy) -> dict[str, BoundLimit]:
    """Limits with tokens by the names that they have in a plain queue, as partitions share them."""
    pairs = zip(whole.bound, part.bound, strict=False)
    return {
        plain.name: shared for plain, shared in pairs if plain.name != shared.name and not shared.limit.counts_in_flight
    }
