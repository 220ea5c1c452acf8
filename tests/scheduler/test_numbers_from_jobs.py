"""Numbers that jobs bring along, at the claim: the newest holds, and a raised one wakes who waits."""

from __future__ import annotations

from typing import Any

import pytest

from fairlane.clock import SECOND
from fairlane.policy import Concurrency, Fair, Policy, Rate
from fairlane.policy.keys import flow_id, gate_id
from fairlane.scheduler.rebuild import rebuild
from fairlane.scheduler.snapshot import GateRow
from fairlane.simulation.memory import MemoryQueue
from tests.scheduler.simulation import EPOCH


def anything(context: Any) -> int:
    return 1


SLOTS = Policy("q", limits=(Concurrency(anything, by="account"),), keys=("account", "endpoint"))
NAME = "concurrency:account"


def lane(account: str = "a", endpoint: str = "e") -> dict[str, str | None]:
    return {"account": account, "endpoint": endpoint}


def started(queue: MemoryQueue, want: int = 50, now: int = EPOCH) -> int:
    return len(queue.claim(now, want).starts)


def gate_of(queue: MemoryQueue, account: str = "a", name: str = NAME) -> GateRow:
    return queue.gates[gate_id("q", name, (account,))]


@pytest.mark.parametrize("fair", [None, Fair(by="account"), Fair(by="endpoint")], ids=["none", "flow", "lane"])
def test_a_raised_number_wakes_the_waiting_lanes_in_the_same_claim(fair: Fair | None) -> None:
    queue = MemoryQueue(Policy("q", fair, SLOTS.limits, SLOTS.keys))
    for endpoint in "efg":
        queue.enqueue(EPOCH, lane(endpoint=endpoint), 3, given={NAME: 2})
    assert (started(queue), started(queue)) == (2, 0)
    queue.enqueue(EPOCH, lane(endpoint="new"), 1, given={NAME: 6})
    assert started(queue) == 4


def test_a_lowered_number_lets_nothing_new_start() -> None:
    queue = MemoryQueue(SLOTS)
    queue.enqueue(EPOCH, lane(), 9, given={NAME: 5})
    plan = queue.claim(EPOCH, 3)
    queue.enqueue(EPOCH, lane(), 1, given={NAME: 2})
    assert started(queue) == 0
    for start in plan.starts[:2]:
        queue.settle(start, 5)
    assert started(queue) == 1


def test_the_last_of_several_bells_holds_whatever_their_lanes() -> None:
    queue = MemoryQueue(SLOTS)
    for number, endpoint in enumerate("efghe", start=1):
        queue.enqueue(EPOCH, lane(endpoint=endpoint), 4, given={NAME: number})
    assert started(queue) == 5
    assert gate_of(queue).value == 5


def test_bells_without_numbers_leave_what_was_brought() -> None:
    queue = MemoryQueue(SLOTS)
    queue.enqueue(EPOCH, lane(), 1, given={NAME: 3})
    queue.enqueue(EPOCH, lane(endpoint="other"), 9)
    assert started(queue) == 3


def test_the_gate_of_a_new_lane_is_asked_for_before_its_number_is_written() -> None:
    queue = MemoryQueue(SLOTS)
    queue.enqueue(EPOCH, lane(), 9, given={NAME: 4})
    assert started(queue) == 4
    queue.enqueue(EPOCH, lane(endpoint="new"), 9, given={NAME: 5})
    assert started(queue) == 1, "what is in flight was forgotten"


def test_keys_have_numbers_of_their_own() -> None:
    queue = MemoryQueue(SLOTS)
    for account, number in (("a", 1), ("b", 3), ("c", 0)):
        queue.enqueue(EPOCH, lane(account), 9, given={NAME: number})
    assert started(queue) == 4
    assert [gate_of(queue, account).in_flight for account in "ab"] == [1, 3]


def test_a_raised_rate_opens_at_once_and_keeps_its_bucket() -> None:
    name = "rate/60s:account"
    queue = MemoryQueue(Policy("q", limits=(Rate(anything, per="1m", by="account"),)))
    queue.enqueue(EPOCH, {"account": "a"}, 99, given={name: 2})
    assert (started(queue), started(queue)) == (2, 0)
    later = EPOCH + SECOND
    queue.enqueue(later, {"account": "a"}, 1, given={name: 60})
    # It was emptied a second ago, and a second is worth one job now.
    assert (started(queue, now=later), started(queue, now=later)) == (1, 0)
    assert started(queue, now=later + SECOND) == 1


def test_a_raised_quota_counts_what_its_window_holds() -> None:
    name = "rolling/60s:account"
    queue = MemoryQueue(Policy("q", limits=(Rate(anything, per="1m", by="account", rolling=True),)))
    queue.enqueue(EPOCH, {"account": "a"}, 99, given={name: 2})
    assert (started(queue), started(queue)) == (2, 0)
    queue.enqueue(EPOCH, {"account": "a"}, 1, given={name: 7})
    assert started(queue) == 5


def test_the_whole_queue_s_number_can_be_brought_too() -> None:
    queue = MemoryQueue(Policy("q", limits=(Concurrency(anything),), keys=("account",)))
    queue.enqueue(EPOCH, {"account": "a"}, 9, given={"concurrency:": 2})
    assert (started(queue), started(queue)) == (2, 0)
    queue.enqueue(EPOCH, {"account": "b"}, 9, given={"concurrency:": 3})
    assert started(queue) == 1


def test_a_weight_that_was_brought_gives_its_flow_that_share() -> None:
    queue = MemoryQueue(Policy("q", Fair(by="account", weight=anything, charge="count")))
    queue.enqueue(EPOCH, {"account": "a"}, 90, given={"weight": 3.0})
    queue.enqueue(EPOCH, {"account": "b"}, 90, given={"weight": 1.0})
    had = [start.lane for start in queue.claim(EPOCH, 40).starts]
    assert sorted(had.count(each) for each in set(had)) == [10, 30]
    queue.enqueue(EPOCH, {"account": "b"}, 1, given={"weight": 3.0})
    had = [start.lane for start in queue.claim(EPOCH, 40).starts]
    assert sorted(had.count(each) for each in set(had)) == [20, 20]
    assert queue.flows[flow_id("q", ("account",), ("b",))].weight == 3.0


def test_numbers_that_the_policy_does_not_ask_for_are_ignored() -> None:
    queue = MemoryQueue(Policy("q", Fair(by="account"), (Concurrency(4, by="account"),)))
    queue.enqueue(EPOCH, {"account": "a"}, 9, given={NAME: 9, "weight": 9, "unknown": 1})
    assert started(queue) == 4
    assert gate_of(queue).value is None
    assert queue.flows[flow_id("q", ("account",), ("a",))].weight == 1.0


def test_another_policy_keeps_what_was_brought_if_it_asks_for_it_too() -> None:
    queue = MemoryQueue(Policy("q", Fair(by="account", weight=anything), SLOTS.limits))
    queue.enqueue(EPOCH, {"account": "a"}, 9, given={NAME: 3, "weight": 2.0})
    started(queue)
    state = (queue.flows.values(), queue.lanes.values(), queue.gates.values())
    same = Policy("q", Fair(by="account", weight=anything), (*SLOTS.limits, Concurrency(99)))
    kept = rebuild(same, EPOCH, queue.queue, *state)
    assert [gate.value for gate in kept.gates if gate.limit == NAME] == [3]
    assert [flow.weight for flow in kept.flows] == [2.0]
    plain = Policy("q", Fair(by="account", weight=5), (Concurrency(8, by="account"),))
    changed = rebuild(plain, EPOCH, queue.queue, *state)
    assert [(gate.value, gate.in_flight) for gate in changed.gates] == [(None, 3)]
    assert [flow.weight for flow in changed.flows] == [5]
