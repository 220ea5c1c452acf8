"""How the room of a shared gate is divided between the queues that wait for it."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from fairlane.policy import Concurrency, Fair, Policy, Rate
from fairlane.scheduler.board import KEEP, SharedGate, deal
from fairlane.scheduler.plan import plan_claims
from fairlane.scheduler.snapshot import (
    Contender,
    QueueRow,
    SharedGateRow,
    SharedRelease,
    Snapshot,
    Start,
    Supply,
)
from fairlane.simulation.memory import MemoryQueue, SharedMemory

COUNTS = st.lists(st.integers(0, 60), min_size=1, max_size=6)


@given(room=st.integers(0, 200), taken=COUNTS)
def test_all_room_is_dealt_and_nobody_who_has_more_gets_any_before_the_others(room: int, taken: list[int]) -> None:
    parts = deal(room, taken)
    assert sum(parts) == room
    after = [had + part for had, part in zip(taken, parts, strict=True)]
    served = [level for level, part in zip(after, parts, strict=True) if part]
    assert max(served, default=0) <= min(after) + 1


@given(room=st.integers(0, 60), taken=COUNTS, started=st.integers(0, 60))
def test_what_a_queue_has_started_comes_out_of_its_own_part(room: int, taken: list[int], started: int) -> None:
    part = deal(room, taken)[-1]
    spent = min(started, part)
    assert deal(room - spent, [*taken[:-1], taken[-1] + spent])[-1] == part - spent


def gate(limit: Concurrency | Rate, in_flight: int, *contenders: Contender) -> SharedGate:
    return SharedGate(SharedGateRow(b"gate", "concurrency:@gpu", [], in_flight, 0, list(contenders)), limit, "train")


def test_a_queue_may_have_all_that_nobody_else_waits_for() -> None:
    assert gate(Concurrency(10, name="gpu"), 4, Contender("serve", 4)).room(0) == 6


def test_a_queue_that_holds_its_share_takes_nothing_from_one_that_does_not() -> None:
    serve = Contender("serve", 5, waits=True, is_eager=True)
    assert gate(Concurrency(10, name="gpu"), 5, serve).room(0) == 5
    serve = Contender("serve", 1, waits=True, is_eager=True)
    assert gate(Concurrency(10, name="gpu"), 6, serve, Contender("train", 5)).room(0) == 0


def test_the_last_slot_goes_to_the_one_that_has_waited() -> None:
    serve = Contender("serve", 0, waits=True, is_eager=True)
    assert gate(Concurrency(1, name="gpu"), 0, serve).room(0) == 0


def test_a_part_is_kept_for_a_moment_and_not_longer() -> None:
    woken = Contender("serve", 0, waits=True, is_eager=True, until=KEEP)
    shared = gate(Concurrency(2, name="gpu"), 0, woken)
    assert (shared.room(KEEP - 1), shared.room(KEEP)) == (1, 2)


def test_nobody_waits_for_a_queue_that_cannot_come() -> None:
    busy = Contender("serve", 0, waits=True, is_eager=False)
    shared = gate(Concurrency(2, name="gpu"), 0, busy)
    assert shared.room(0) == 2
    assert [wakeup.queue for wakeup in shared.leave(0, waits=False, is_eager=False)] == ["serve"]
    assert shared.row().contenders == []


def test_a_queue_is_rung_once_for_what_is_left_to_it() -> None:
    shared = gate(Concurrency(4, name="gpu"), 0, Contender("serve", 0, waits=True, is_eager=True))
    shared.charge(0, shared.room(0))
    assert [wakeup.queue for wakeup in shared.leave(0, waits=True, is_eager=True)] == ["serve"]
    assert shared.leave(1, waits=True, is_eager=True) == []
    assert shared.opens_at(1) == KEEP


def test_releases_are_counted_for_the_queue_that_held() -> None:
    shared = gate(Concurrency(4, name="gpu"), 3, Contender("serve", 2), Contender("train", 1))
    shared.free(SharedRelease(b"gate", "serve", "t", 2, 0, 0, 0, 0, 0, 0), 0)
    shared.free(SharedRelease(b"gate", "train", "t", 0, 0, 1, 0, 0, 0, 0), 0)
    assert shared.leave(0, waits=False, is_eager=False) == []
    assert (shared.in_flight, shared.row().contenders) == (0, [])


def test_tokens_of_a_shared_rate_go_round() -> None:
    limit = Rate(1, per="1s", name="vendor")
    shared = SharedGate(
        SharedGateRow(b"gate", "rate:@vendor", [], 0, 0, [Contender("serve", 7, waits=True, is_eager=True)]),
        limit,
        "train",
    )
    assert shared.room(10) == 0, "the one that waits goes first"
    shared.contenders["serve"] = Contender("serve", 8, waits=True, is_eager=True)
    shared.taken = 7
    assert shared.room(10) == 1


def two_queues(limit: Concurrency | Rate) -> dict[str, MemoryQueue]:
    commons = SharedMemory()
    return {name: MemoryQueue(Policy(name, Fair(by="account"), (limit,)), commons) for name in ("train", "serve")}


@given(data=st.data(), by=st.sampled_from([None, "account"]), slots=st.integers(1, 7))
@settings(max_examples=60, deadline=None)
def test_two_queues_that_wait_hold_the_same_within_a_slot_and_leave_no_slot_empty(
    data: st.DataObject, by: str | None, slots: int
) -> None:
    queues = two_queues(Concurrency(slots, by=by, name="gpu"))
    for queue in queues.values():
        queue.enqueue(0, {"account": "acme", "task": "t"}, 400)
    running: list[tuple[str, Start]] = []
    for now in range(40):
        ending = data.draw(st.integers(1, slots))
        for name, start in running[:ending]:
            queues[name].settle(start, 1_000)
        running = running[ending:]
        first = data.draw(st.sampled_from(["train", "serve"]))
        # The first comes twice: what the second leaves is for it.
        for name in (first, "serve" if first == "train" else "train", first):
            starts = queues[name].claim(now, slots, listens=True).starts
            running += [(name, start) for start in starts]
        assert len(running) == slots, "a slot is empty although both queues have work"
        held = Counter(name for name, _ in running)
        assert now < slots or abs(held["train"] - held["serve"]) <= 1, held


def test_a_queue_that_folds_a_release_and_has_nothing_there_holds_nothing_and_rings_the_others() -> None:
    """A14, A24: its own release may come in another claim than that of its lane."""
    policy = Policy("train", limits=(Concurrency(1, by="account", name="gpu"),))
    ((id_, bound, key),) = policy.shared_gates_of(0, {"account": "acme", "task": "t"})
    waiting = Contender("serve", 0, waits=True)
    row = SharedGateRow(id_, bound.name, list(key), 1, 0, [waiting, Contender("train", 1)])
    release = SharedRelease(id_, "train", "t", 1, 0, 0, 0, 0, 0, 0)
    snapshot = Snapshot(0, QueueRow(0.0, 0.0, 0, 0, 0.0), policy=policy, shared=[row], shared_releases=[release])
    steps = plan_claims(snapshot, 1)
    plan = None
    try:
        next(steps)
        while True:
            steps.send(Supply())
    except StopIteration as stop:
        plan = stop.value
    assert plan is not None
    assert [(each.in_flight, each.contenders) for each in plan.shared] == [(0, [])]
    assert [wakeup.queue for wakeup in plan.wakeups] == ["serve"]
