"""The scheduling core: pure functions from a snapshot to a plan, without I/O, clock or chance."""

from fairlane.scheduler.plan import Planning, plan_claims
from fairlane.scheduler.snapshot import (
    Arrival,
    FlowRow,
    GateRow,
    Head,
    LaneRow,
    Need,
    Plan,
    QueueRow,
    Release,
    Snapshot,
    Standing,
    Start,
    Supply,
)

__all__ = [
    "Arrival",
    "FlowRow",
    "GateRow",
    "Head",
    "LaneRow",
    "Need",
    "Plan",
    "Planning",
    "QueueRow",
    "Release",
    "Snapshot",
    "Standing",
    "Start",
    "Supply",
    "plan_claims",
]
