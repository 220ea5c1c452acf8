"""A board that stays in memory, one that catches up, and one that is read again plan alike."""

from __future__ import annotations

from uuid import UUID

from hypothesis import given, settings
from hypothesis import strategies as st

from fairlane.policy import Policy
from fairlane.scheduler.journal import Delta, Mark, Tail, decode_delta, encode_delta
from fairlane.scheduler.resident import Found, ResidentBoard
from fairlane.scheduler.snapshot import Events, Plan
from tests.scheduler.lives import take
from tests.scheduler.simulation import Bench
from tests.scheduler.strategies import Step, lives, policies
from tests.scheduler.tables import Tables

TOKEN = UUID(int=7)


class Follower:
    """Somebody else who claims from the queue of a bench: its board, and the tables that both write."""

    def __init__(self, bench: Bench, resident: int) -> None:
        self.bench = bench
        self.tables = Tables()
        self.tail: list[tuple[Mark, bytes]] = []
        self.board = ResidentBoard(bench.policy, Mark(0, TOKEN))
        self.resident = resident
        self.seq = 0

    def rows(self) -> Delta:
        queue = self.bench.queue
        return Delta(list(queue.flows.values()), list(queue.lanes.values()), list(queue.gates.values()))

    def hear(self, plan: Plan) -> None:
        """The bench has made a claim."""
        self.seq += 1
        self.tail.append((Mark(self.seq, TOKEN), encode_delta(plan)))

    def catch_up(self) -> None:
        assert self.board.mark is not None
        for mark, delta in self.tail:
            if mark.seq > self.board.mark.seq:
                self.board.apply(decode_delta(delta), mark)

    def checkpoint(self) -> None:
        """Write what has changed, and keep no more than may be kept."""
        self.catch_up()
        self.tables.write(self.board.changed_rows())
        self.board.wrote(self.seq)
        self.tail.clear()
        self.board.shrink(self.resident)

    def reload(self) -> None:
        """Begin again with the tables and the tail."""
        self.board = ResidentBoard(self.bench.policy, Mark(0, TOKEN))
        self.catch_up()

    def plan(self, want: int) -> Plan:
        """What it would claim now. Its board is not to be used any more."""
        queue = self.bench.queue
        events = Events(self.bench.now, queue.queue, list(queue.arrivals), list(queue.releases))
        claiming = self.board.claim(events, want)
        try:
            ask = next(claiming)
            while True:
                found = self.tables.found(ask)
                heads = {lane: queue.jobs[lane].since(at, n) for lane, at, n in ask.heads if lane in queue.jobs}
                ask = claiming.send(Found(found.flows, found.lanes, found.gates, heads, scanned=found.scanned))
        except StopIteration as stop:
            plan: Plan = stop.value
            return plan


@settings(deadline=None, max_examples=150)
@given(policies(), lives(), st.integers(0, 6), st.data())
def test_a_board_that_stayed_one_that_caught_up_and_one_that_was_read_again_plan_alike(
    policy: Policy, steps: list[Step], resident: int, data: st.DataObject
) -> None:
    bench = Bench(policy)
    follower = Follower(bench, resident)
    for step in steps:
        if step[0] != "claim":
            take(bench, step)
            continue
        follower.catch_up()
        did = data.draw(st.sampled_from(["goes on", "reloads", "checkpoints", "checkpoints and reloads"]))
        if "checkpoints" in did:
            follower.checkpoint()
        if "reloads" in did:
            follower.reload()
        foreseen = follower.plan(step[1])
        follower.reload()
        plan = bench.claim(step[1])
        assert [start.head for start in foreseen.starts] == [start.head for start in plan.starts]
        assert foreseen.queue == plan.queue
        assert _sorted(encode_delta(foreseen)) == _sorted(encode_delta(plan))
        follower.hear(plan)
    follower.checkpoint()
    rows = follower.rows()
    assert follower.tables.flows == {row.id: row for row in rows.flows}
    assert follower.tables.lanes == {row.id: row for row in rows.lanes}
    assert follower.tables.gates == {row.id: row for row in rows.gates}


def _sorted(delta: bytes) -> dict[bytes, object]:
    """The pieces of a delta; in which order a plan met them does not matter."""
    found = Tail([delta])
    return {**found.flows, **found.lanes, **found.gates}
