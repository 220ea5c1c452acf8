"""What must be true of a queue's rows after every claim, checked against the ledger."""

from __future__ import annotations

from collections import Counter

from fairlane.policy import Concurrency, Rate, gate_id
from fairlane.scheduler.snapshot import Standing
from tests.scheduler.ledger import LaneKey
from tests.scheduler.simulation import Bench


def books_are_right(bench: Bench) -> None:
    _lanes_count_their_jobs(bench)
    _flows_count_their_lanes(bench)
    _gates_count_who_waits(bench)
    _gates_count_who_runs(bench)
    _no_ready_flow_is_behind_the_cursor(bench)


def check_order(bench: Bench, lane: LaneKey) -> None:
    """Of the lanes of its flow that could start now, this one has the head of the lowest rank."""
    ledger = bench.ledger
    for other in ledger.startable(bench.now):
        if ledger.flow(other) == ledger.flow(lane):
            assert ledger.rank(other) >= ledger.rank(lane), f"{lane} went before {other}"


def _lanes_count_their_jobs(bench: Bench) -> None:
    running = Counter(bench.ledger.lane_id(run.lane) for run in bench.ledger.running.values())
    for lane, jobs in bench.ledger.waiting.items():
        row = bench.queue.lanes[bench.ledger.lane_id(lane)]
        assert row.in_flight == running[row.id]
        if bench.queue.arrivals:
            continue
        assert row.ready == len(jobs), f"lane {lane} counts {row.ready} ready, there are {len(jobs)}"
        if jobs:
            assert row.standing != Standing.IDLE, f"lane {lane} has jobs and nobody will look"
            assert row.floor <= jobs[0][0]
            assert row.rank <= bench.ledger.rank(lane)


def _flows_count_their_lanes(bench: Bench) -> None:
    standing = Counter((row.flow, row.standing) for row in bench.queue.lanes.values())
    for flow in bench.queue.flows.values():
        assert flow.open == standing[flow.id, Standing.READY]
        assert flow.shut == standing[flow.id, Standing.PARKED]
        if flow.standing != Standing.PARKED:
            assert flow.standing == (Standing.READY if flow.open else Standing.IDLE)


def _gates_count_who_waits(bench: Bench) -> None:
    parked = Counter(row.gate for row in bench.queue.lanes.values() if row.standing == Standing.PARKED)
    parked += Counter(row.gate for row in bench.queue.flows.values() if row.standing == Standing.PARKED)
    assert None not in parked
    assert parked == +Counter({gate.id: gate.waiting for gate in bench.queue.gates.values()})


def _gates_count_who_runs(bench: Bench) -> None:
    ledger, policy = bench.ledger, bench.policy
    for bound in policy.bound:
        for scope in {ledger.scope(bound.limit, run.lane) for run in ledger.runs}:
            row = bench.queue.gates[gate_id(policy.queue, bound.name, scope)]
            if isinstance(bound.limit, Concurrency):
                assert row.in_flight == ledger.in_flight(bound.limit, scope)
            elif isinstance(bound.limit, Rate) and not bound.limit.rolling:
                assert max(row.tat, bench.now) == max(ledger.arrival_time(bound.limit, scope), bench.now)


def _no_ready_flow_is_behind_the_cursor(bench: Bench) -> None:
    cursor = (bench.queue.queue.cursor, bench.queue.queue.cursor_tie)
    for flow in bench.queue.flows.values():
        assert flow.standing != Standing.READY or (flow.vtime, flow.tie) >= cursor
