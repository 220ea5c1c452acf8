"""Where the flows, lanes and gates of a queue are stored, as far as one transaction has read them.

The only lane of a flow has no row of its own: the flow's row houses it, so that a claim over a thousand tenants of one
lane each reads and writes half the rows. A second lane makes the flow spill: from then on all its lanes have rows of
their own, until collection has removed the last of them. The plan knows nothing of this.
"""

from __future__ import annotations

import msgspec

from fairlane.clock import Instant
from fairlane.scheduler.snapshot import FlowRow, LaneRow, Plan
from fairlane.store.postgres import rows

__all__ = ["Changes", "Housing"]


class Changes(msgspec.Struct, frozen=True):
    """What a plan changes, as rows to insert and rows to update."""

    new_flows: list[rows.Row] = []
    new_lanes: list[rows.Row] = []
    new_gates: list[rows.Row] = []
    flows: list[rows.Row] = []
    served: list[rows.Row] = []
    """Flows of which only the account and the numbers of their housed lane have changed, as most do."""
    lanes: list[rows.Row] = []
    gates: list[rows.Row] = []
    weights: list[float] = []
    """Of the flows that are updated, in their order."""
    given_by: list[int] = []
    """And by which jobs those were given."""


class Housing:
    """What has been read under the claim lock, and where it was found; what is not here is not stored yet."""

    def __init__(self, queue: int) -> None:
        self._queue = queue
        self._places: dict[bytes, rows.Place] = {}
        self._flows: dict[bytes, FlowRow] = {}
        self._lanes: dict[bytes, LaneRow] = {}
        self._housed: dict[bytes, LaneRow | None] = {}

    def remember(self, found: rows.Found) -> None:
        self._places.update(found.places)
        self._flows.update({flow.id: flow for flow in found.flows})
        self._lanes.update({lane.id: lane for lane in found.lanes})
        self._housed.update(found.housed)

    def remember_gates(self, places: dict[bytes, rows.Place]) -> None:
        self._places.update(places)

    def forget(self) -> None:
        for known in (self._places, self._flows, self._lanes, self._housed):
            known.clear()

    def totals(self, plan: Plan) -> tuple[int, int, int]:
        """How far the plan moves what the queue's state counts: ready jobs, running jobs, parked lanes."""
        return plan.moves([self._lanes[lane.id] for lane in plan.lanes if lane.id in self._lanes])

    def changes(self, plan: Plan, now: Instant) -> Changes:
        """The rows in which the plan is to be stored."""
        changes = Changes()
        places = self._places
        for gate in plan.gates:
            if gate.id in places:
                changes.gates.append(rows.touched_gate(gate, places[gate.id]))
            else:
                changes.new_gates.append(rows.new_gate(gate, self._queue))
        flows = {flow.id: flow for flow in plan.flows}
        without_row: dict[bytes, list[LaneRow]] = {}
        for lane in plan.lanes:
            if lane.id in places:
                changes.lanes.append(rows.touched_lane(lane, places[lane.id]))
            else:
                without_row.setdefault(lane.flow, []).append(lane)
                if lane.flow not in flows:
                    flows[lane.flow] = self._flows[lane.flow]
        for flow in flows.values():
            lanes, before = without_row.get(flow.id, []), self._housed.get(flow.id)
            if before is not None and len(lanes) == 1 and lanes[0].id == before.id:
                if rows.is_only_served(self._flows[flow.id], flow, before, lanes[0]):
                    changes.served.append(rows.served_flow(flow, places[flow.id], lanes[0]))
                    continue
                changes.flows.append(rows.touched_flow(flow, places[flow.id], lanes[0], spilled=False))
                changes.weights.append(flow.weight)
                changes.given_by.append(flow.given_by)
            else:
                self._settle_in(flow, lanes, before, changes, now)
        return changes

    def _settle_in(
        self, flow: FlowRow, lanes: list[LaneRow], before: LaneRow | None, changes: Changes, now: Instant
    ) -> None:
        """Store a flow, and those of its lanes that have no row of their own: in its row if there is only one."""
        place = self._places.get(flow.id)
        spilled = place is not None and flow.id not in self._housed
        if before is not None and before.id not in [lane.id for lane in lanes]:
            lanes = [before, *lanes]
        if spilled or len(lanes) > 1:
            spilled = True
            changes.new_lanes.extend([rows.new_lane(lane, self._queue) for lane in lanes])
            lanes = []
        lane = lanes[0] if lanes else None
        if place is None:
            changes.new_flows.append(rows.new_flow(flow, self._queue, lane, now))
        else:
            changes.flows.append(
                rows.touched_flow(flow, place, lane, spilled=spilled, moves_in=lane is not None and before is None)
            )
            changes.weights.append(flow.weight)
            changes.given_by.append(flow.given_by)
