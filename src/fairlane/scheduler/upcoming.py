"""The next jobs of one flow, in the order in which it would start them if nothing held it back: the plan itself says
so, given a queue that has no limits and no other flow."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import replace

import msgspec

from fairlane.clock import Instant
from fairlane.policy.overrides import NO_OVERRIDES
from fairlane.policy.policy import Policy
from fairlane.scheduler.plan import plan_claims
from fairlane.scheduler.snapshot import (
    Arrival,
    FlowRow,
    Forced,
    Head,
    LaneRow,
    Need,
    QueueRow,
    Snapshot,
    Standing,
    Supply,
)

__all__ = ["upcoming"]

READY, IDLE = int(Standing.READY), int(Standing.IDLE)


def upcoming(
    policy: Policy,
    now: Instant,
    flow: FlowRow | None,
    lanes: Iterable[LaneRow],
    arrivals: Sequence[Arrival],
    forced: Sequence[Forced],
    count: int,
) -> Generator[Need, Supply, list[Head]]:
    """Up to `count` heads. `lanes` are those that the arrivals name, and perhaps more.

    Asked for are heads of lanes, and lanes of the flow: READY or PARKED, the lowest rank first.
    """
    known = {lane.id: _opened(lane) for lane in lanes}
    flows = []
    if flow is not None:
        in_use = flow.open + flow.shut
        standing = READY if in_use > 0 else IDLE
        flows.append(msgspec.structs.replace(flow, open=in_use, shut=0, standing=standing, gate=None, debt=0.0))
    # What is parked now would start too.
    snapshot = Snapshot(
        replace(policy, limits=(), overrides=NO_OVERRIDES, partition=None),
        now,
        QueueRow(0.0, 0.0, 0, 0, 0.0),
        list(arrivals),
        [],
        list(known.values()),
        flows,
        [each.id for each in flows if each.standing == READY],
        scan_ended=True,
        due_gates=[],
        forced=forced,
    )
    planning = plan_claims(snapshot, count)
    try:
        need = next(planning)
        while True:
            supply = yield Need(lanes=need.lanes, heads=need.heads)
            need = planning.send(Supply(lanes=[_opened(lane) for lane in supply.lanes], heads=supply.heads))
    except StopIteration as stop:
        return [start.head for start in stop.value.starts]


def _opened(lane: LaneRow) -> LaneRow:
    standing = IDLE if lane.standing == IDLE else READY
    return msgspec.structs.replace(lane, standing=standing, gate=None)
