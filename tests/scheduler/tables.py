"""Tables as a store has them, in memory: they answer what a board asks for."""

from __future__ import annotations

from fairlane.scheduler.journal import Delta
from fairlane.scheduler.resident import LANES_PER_FLOW, Found
from fairlane.scheduler.snapshot import Ask, FlowRow, GateRow, LaneRow, Standing


class Tables:
    """The rows of one queue, as they were when they were last written."""

    def __init__(self) -> None:
        self.flows: dict[bytes, FlowRow] = {}
        self.lanes: dict[bytes, LaneRow] = {}
        self.gates: dict[bytes, GateRow] = {}

    def write(self, rows: Delta) -> None:
        self.flows.update((row.id, row) for row in rows.flows)
        self.lanes.update((row.id, row) for row in rows.lanes)
        self.gates.update((row.id, row) for row in rows.gates)

    def found(self, ask: Ask) -> Found:
        """What they hold of it, but for jobs."""
        flows = {row.id: row for row in self._scanned(ask)}
        scanned = len(flows)
        lanes = [self.lanes[lane] for lane in ask.lanes if lane in self.lanes]
        ready = [*ask.ready, *((flow, LANES_PER_FLOW) for flow in flows)]
        lanes += [lane for flow, count in ready for lane in self._ready(flow, ask.but_not[1])[:count]]
        for gate, count in ask.parked:
            lanes += self._parked_lanes(gate, ask.but_not[1])[:count]
            flows |= {row.id: row for row in self._parked_flows(gate, ask.but_not[0])[:count]}
        flows |= {flow: self.flows[flow] for flow in ask.flows if flow in self.flows}
        flows |= {lane.flow: self.flows[lane.flow] for lane in lanes}
        gates = [self.gates[gate] for gate in ask.gates if gate in self.gates]
        return Found(list(flows.values()), lanes, gates + self._alarms(ask), scanned=scanned)

    def _scanned(self, ask: Ask) -> list[FlowRow]:
        if ask.scan is None:
            return []
        vtime, tie, count = ask.scan
        ready = [row for row in self.flows.values() if row.standing == Standing.READY and row.id not in ask.but_not[0]]
        return sorted((row for row in ready if (row.vtime, row.tie) >= (vtime, tie)), key=_turn)[:count]

    def _alarms(self, ask: Ask) -> list[GateRow]:
        if ask.alarms is None:
            return []
        after, count = ask.alarms
        due = [row for row in self.gates.values() if row.wake_at is not None and row.wake_at > after]
        return sorted((row for row in due if row.id not in ask.but_not[2]), key=lambda row: row.wake_at or 0)[:count]

    def _ready(self, flow: bytes, but_not: list[bytes]) -> list[LaneRow]:
        found = [row for row in self.lanes.values() if row.flow == flow and row.standing == Standing.READY]
        return sorted((row for row in found if row.id not in but_not), key=lambda row: (row.rank, row.head, row.id))

    def _parked_lanes(self, gate: bytes, but_not: list[bytes]) -> list[LaneRow]:
        found = [row for row in self.lanes.values() if row.gate == gate and row.standing == Standing.PARKED]
        return sorted((row for row in found if row.id not in but_not), key=lambda row: (row.tag, row.head, row.id))

    def _parked_flows(self, gate: bytes, but_not: list[bytes]) -> list[FlowRow]:
        found = [row for row in self.flows.values() if row.gate == gate and row.standing == Standing.PARKED]
        return sorted((row for row in found if row.id not in but_not), key=_turn)


def _turn(row: FlowRow) -> tuple[float, int]:
    return row.vtime, row.tie
