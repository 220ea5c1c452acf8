"""Which queue is asked next, and for how many jobs."""

from __future__ import annotations

from fairlane.worker.claims import MOST_UNSETTLED, Slots
from fairlane.worker.options import Order, QueueShare


def slots_of(queues: str, concurrency: int, order: Order = "weighted", unsettled: int = 0) -> Slots:
    return Slots([QueueShare.parse(part) for part in queues.split(",")], concurrency, order, lambda: unsettled)


def fill(slots: Slots, rounds: int) -> dict[str, int]:
    """Claims of endless queues whose jobs end at once: how many each queue got."""
    got = dict.fromkeys(slots.queues, 0)
    for _ in range(rounds):
        queue = slots.next_to_ask()
        assert queue is not None
        count = slots.portion(queue)
        slots.note_claimed(queue, count)
        got[queue.name] += count
        queue.used -= count
    return got


def test_one_queue_may_use_all_slots() -> None:
    slots = slots_of("a", 20)
    assert slots.portion(slots.queues["a"]) == 20


def test_queues_share_slots_by_weight() -> None:
    got = fill(slots_of("a,b=3", 10), 4_000)
    assert abs(got["b"] / got["a"] - 3) < 0.05


def test_a_strict_order_asks_the_first_queue_for_as_long_as_it_is_hungry() -> None:
    slots = slots_of("a,b", 10, "strict")
    assert fill(slots, 50)["b"] == 0
    slots.queues["a"].wants_more = False
    assert slots.next_to_ask() is slots.queues["b"]


def test_no_queue_uses_more_than_its_maximum() -> None:
    slots = slots_of("a:-3,b", 10)
    slots.queues["b"].wants_more = False
    queue = slots.queues["a"]
    assert slots.portion(queue) == 3
    slots.note_claimed(queue, 3)
    assert slots.room(queue) == 0
    assert slots.next_to_ask() is None


def test_a_minimum_is_kept_free_from_the_other_queues() -> None:
    slots = slots_of("a,b:4-", 10)
    assert slots.room(slots.queues["a"]) == 6
    assert slots.room(slots.queues["b"]) == 10
    slots.note_claimed(slots.queues["b"], 3)
    assert slots.room(slots.queues["a"]) == 6
    slots.note_claimed(slots.queues["b"], 3)
    assert slots.room(slots.queues["a"]) == 4


def test_a_queue_that_was_idle_earns_no_credit() -> None:
    slots = slots_of("a,b", 10)
    slots.queues["b"].wants_more, slots.queues["b"].is_idle = False, True
    fill(slots, 1_000)
    slots.feed(slots.queues["b"])
    got = fill(slots, 100)
    assert abs(got["a"] - got["b"]) <= 10


def test_news_of_a_busy_queue_does_not_cost_it_its_weight() -> None:
    slots = slots_of("a,b=3", 10)
    got = dict.fromkeys(slots.queues, 0)
    for _ in range(4_000):
        queue = slots.next_to_ask()
        assert queue is not None
        queue.wants_more = False  # as while a claim is in flight
        slots.feed(queue)
        count = slots.portion(queue)
        slots.note_claimed(queue, count)
        got[queue.name] += count
        queue.used -= count
    assert abs(got["b"] / got["a"] - 3) < 0.05


def test_a_queue_that_waits_is_not_counted_as_a_rival() -> None:
    slots = slots_of("a,b=9", 10)
    slots.queues["b"].wants_more = False
    assert slots.portion(slots.queues["a"]) == 10


def test_outcomes_that_pile_up_unsettled_stop_further_claims() -> None:
    assert slots_of("a", 100, unsettled=MOST_UNSETTLED - 1).room(slots_of("a", 1).queues["a"]) == 1
    assert slots_of("a", 100, unsettled=MOST_UNSETTLED + 5).next_to_ask() is None


def test_a_closed_worker_asks_for_nothing_but_passes_wakeups_on() -> None:
    slots = slots_of("a,b", 10)
    slots.is_closed = True
    assert slots.next_to_ask() is None
    slots.queues["b"].owes_wakeup = True
    assert slots.next_to_ask() is slots.queues["b"]
    assert slots.portion(slots.queues["b"]) == 0


def test_a_queue_that_was_idle_earns_no_credit_while_another_is_being_asked() -> None:
    slots = slots_of("a,b", 10)
    busy, idle = slots.queues["a"], slots.queues["b"]
    slots.note_idle(idle)
    idle.wants_more = False
    fill(slots, 1_000)
    busy.wants_more = False  # as while a claim is in flight
    slots.feed(idle)
    busy.wants_more = True
    got = fill(slots, 100)
    assert abs(got["a"] - got["b"]) <= 10


def test_jobs_are_held_ahead_of_the_slots_only_where_nothing_else_waits_for_them() -> None:
    alone, among = slots_of("a", 10), slots_of("a,b:4-", 10, "strict")
    for slots in (alone, among):
        slots.ahead = 5
        slots.queues["a"].whole.is_limited = False
    assert alone.room(alone.queues["a"]) == 15
    assert among.room(among.queues["a"]) == 6
    alone.queues["a"].whole.is_limited = True
    assert alone.room(alone.queues["a"]) == 10
    alone.prefetches = True
    assert alone.room(alone.queues["a"]) == 15
