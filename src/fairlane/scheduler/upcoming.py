"""The next jobs of one flow, in the order in which it would start them if nothing held it back: the plan itself says
so, given a queue that has no limits and no other flow."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import replace
from uuid import UUID

import msgspec

from fairlane.clock import Instant
from fairlane.policy.overrides import NO_OVERRIDES
from fairlane.policy.policy import Policy
from fairlane.scheduler.board import IDLE, READY
from fairlane.scheduler.journal import Delta, Mark
from fairlane.scheduler.resident import Ask, Events, Found, ResidentBoard
from fairlane.scheduler.snapshot import Arrival, FlowRow, Forced, Head, LaneRow, Plan, QueueRow

__all__ = ["upcoming"]


def upcoming(
    policy: Policy,
    now: Instant,
    flow: FlowRow | None,
    lanes: Iterable[LaneRow],
    arrivals: Sequence[Arrival],
    forced: Sequence[Forced],
    count: int,
) -> Generator[Ask, Found, list[Head]]:
    """Up to `count` heads. `lanes` are those of the flow that the arrivals name, and perhaps more.

    Asked for are heads of lanes, and lanes of the flow: READY or PARKED, the lowest rank first.
    """
    board = ResidentBoard(replace(policy, limits=(), overrides=NO_OVERRIDES, partition=None))
    flows = []
    if flow is not None:
        # What is parked now would start too.
        in_use = flow.open + flow.shut
        standing = READY if in_use > 0 else IDLE
        flows.append(msgspec.structs.replace(flow, open=in_use, shut=0, standing=standing, gate=None, debt=0.0))
    board.apply(Delta(flows, [_opened(lane) for lane in lanes]), Mark(1, UUID(int=0)))
    events = Events(now, QueueRow(0.0, 0.0, 0, 0, 0.0), list(arrivals), forced=list(forced))
    claiming = board.claim(events, count)
    try:
        ask = next(claiming)
        while True:
            found = Found()
            if ask.ready or ask.heads:
                found = yield Ask(ready=ask.ready, heads=ask.heads, but_not=ask.but_not)
            ask = claiming.send(Found(lanes=[_opened(lane) for lane in found.lanes], heads=found.heads))
    except StopIteration as stop:
        plan: Plan = stop.value
        return [start.head for start in plan.starts]


def _opened(lane: LaneRow) -> LaneRow:
    standing = IDLE if lane.standing == IDLE else READY
    return msgspec.structs.replace(lane, standing=standing, gate=None)
