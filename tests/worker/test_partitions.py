"""A worker and the partitions of a queue: which it serves, and in which turns."""

from __future__ import annotations

from collections import Counter

import pytest

from fairlane import App, Fair
from fairlane.clock import ManualClock
from fairlane.errors import UnknownQueue
from fairlane.worker import WorkerOptions
from fairlane.worker.claims import Slots, Turns, Visit
from fairlane.worker.options import QueueShare
from tests.waiting import until
from tests.worker.harness import turns, working

pytestmark = pytest.mark.usefixtures("producers_know_at_once")


def serve(turns: Turns, tenants: dict[str, int], rounds: int, clock: dict[str, float]) -> Counter[str]:
    """Partitions with so many equal tenants each, all busy: how many jobs each was given."""
    got: Counter[str] = Counter()
    for _ in range(rounds):
        queue = turns.in_order()[0]
        got[queue] += 1
        clock[queue] += 1 / tenants[queue]
        turns.note(queue, clock[queue], is_idle=False)
    return got


def test_tenants_get_equal_turns_whatever_partition_they_are_in() -> None:
    tenants = {"email": 1, "email__p1": 9}
    turns, clock = Turns(tenants), dict.fromkeys(tenants, 0.0)
    serve(turns, tenants, 100, clock)
    got = serve(turns, tenants, 10_000, clock)
    assert abs(got["email__p1"] / got["email"] - 9) < 0.1


def test_a_partition_is_owed_nothing_for_what_was_before_this_process() -> None:
    tenants = {"email": 1, "email__p1": 1}
    turns, clock = Turns(tenants), {"email": 5_000.0, "email__p1": 0.0}
    got = serve(turns, tenants, 1_000, clock)
    assert abs(got["email"] - got["email__p1"]) <= 2


def test_a_partition_that_was_idle_is_owed_nothing_either() -> None:
    tenants = {"email": 1, "email__p1": 1}
    turns, clock = Turns(tenants), dict.fromkeys(tenants, 0.0)
    serve(turns, tenants, 10, clock)
    turns.note("email__p1", clock["email__p1"], is_idle=True)
    for _ in range(1_000):
        clock["email"] += 1
        turns.note("email", clock["email"], is_idle=False)
    turns.note("email__p1", clock["email__p1"], is_idle=False)
    got = serve(turns, tenants, 1_000, clock)
    assert abs(got["email"] - got["email__p1"]) <= 4


def slots_of(queues: str, concurrency: int, **served: list[str]) -> Slots:
    shares = [QueueShare.parse(part) for part in queues.split(",")]
    return Slots(shares, concurrency, "weighted", lambda: 0, served)


def test_slots_of_a_queue_are_those_of_all_its_partitions() -> None:
    slots = slots_of("email:-10", 100, email=["email", "email__p1"])
    first, second = slots.queues["email"], slots.queues["email__p1"]
    assert Visit(slots, first).portion() == 5
    slots.note_claimed(first, 8)
    assert slots.room(second) == 2


def test_a_partition_that_was_not_asked_yet_has_room_beside_what_another_holds_ahead() -> None:
    slots = slots_of("email", 10, email=["email", "email__p1"])
    first, second = slots.queues["email"], slots.queues["email__p1"]
    slots.ahead = 40
    first.whole.is_limited = False
    slots.note_claimed(first, 25, 0.0)
    assert slots.room(second) == slots.room(first) == 25


def test_partitions_do_not_add_to_the_weight_of_their_queue() -> None:
    slots = slots_of("email,reports", 12, email=["email", "email__p1", "email__p2"])
    got: Counter[str] = Counter()
    for _ in range(4_000):
        queue = slots.next_to_ask()
        assert queue is not None
        visit = Visit(slots, queue)
        count = visit.portion()
        visit.end(None)
        queue.wants_more = True
        slots.note_claimed(queue, count, got[queue.name] + count)
        got[queue.name] += count
        queue.used -= count
    assert abs((got["email"] + got["email__p1"] + got["email__p2"]) / got["reports"] - 1) < 0.05


def mailing(app: App, partitions: int = 4) -> Counter[str]:
    seen: Counter[str] = Counter()
    app.queue("email", fair=Fair(by="account"), partitions=partitions, partition_by="account")

    async def send(account: str) -> None:
        seen[account] += 1

    app.task(queue="email", name="send")(send)
    return seen


async def test_one_name_serves_all_partitions(app: App) -> None:
    seen = mailing(app)
    send = app.registry["send"]
    await app.enqueue_many([send.call(f"account-{n}") for n in range(40)])
    async with working(app, queues="email"):
        await until(lambda: len(seen) == 40)


async def test_a_partition_can_be_served_by_itself(app: App) -> None:
    seen = mailing(app)
    queue, send = app.queues["email"], app.registry["send"]
    await app.enqueue_many([send.call(f"account-{n}") for n in range(40)])
    for index in (1, 0):
        seen.clear()
        mine = {f"account-{n}" for n in range(40) if queue.partition_for(f"account-{n}") == index}
        assert mine
        async with working(app, queues=f"email__p{index}"):
            await until(lambda mine=mine: len(seen) == len(mine))  # type: ignore[misc]
        assert set(seen) == mine


async def test_a_partition_that_is_named_has_slots_of_its_own_and_the_whole_serves_the_others(app: App) -> None:
    mailing(app)
    worker = await app.worker(WorkerOptions(queues="email:-2,email__p1:5-5"))
    assert {name: queue.whole.share.max_slots for name, queue in worker._slots.queues.items()} == {
        "email": 2,
        "email__p1": 5,
        "email__p2": 2,
        "email__p3": 2,
    }


async def test_a_partition_that_there_is_not_is_refused(app: App) -> None:
    mailing(app)
    with pytest.raises(UnknownQueue, match="email__p4"):
        await app.worker(WorkerOptions(queues="email__p4"))


async def test_without_names_a_worker_serves_all_partitions_of_all_queues(app: App) -> None:
    mailing(app, 2)
    worker = await app.worker()
    assert list(worker._slots.queues) == ["email", "email__p1"]


async def test_a_worker_serves_partitions_that_come_later(app: App, clock: ManualClock) -> None:
    seen = mailing(app, 2)
    send = app.registry["send"]
    # The clock is moved faster than a worker on a busy machine renews.
    async with working(app, queues="email", lease="1h") as worker:
        await app.operations.partitions.change("email", 4)
        await app.enqueue_many([send.call(f"account-{n}") for n in range(40)])
        while len(worker._slots.queues) < 4:
            clock.advance("10s")
            await turns()
        await until(lambda: len(seen) == 40)


async def test_a_worker_moves_what_an_old_producer_has_sent_to_the_old_place(app: App, clock: ManualClock) -> None:
    seen = mailing(app, 4)
    send = app.registry["send"]
    await app.opened()
    await app.operations.partitions.change("email", 2)
    # This program has not looked again yet: it sends jobs to partitions that are no more.
    jobs = await app.enqueue_many([send.call(f"account-{n}") for n in range(40)])
    assert {(await job.record()).queue for job in jobs} > {"email", "email__p1"}
    # Its clock runs ahead of the database: a claim may be answered a minute late.
    async with working(app, queues="email", lease="1h"):
        while len(seen) < 40:
            clock.advance("10s")
            await turns()


async def test_a_program_without_a_worker_moves_them_by_its_upkeep(app: App) -> None:
    mailing(app, 4)
    send = app.registry["send"]
    await app.opened()
    await app.operations.partitions.change("email", 2)
    jobs = await app.enqueue_many([send.call(f"account-{n}") for n in range(40)])
    await app.upkeep()
    assert {(await job.record()).queue for job in jobs} == {"email", "email__p1"}
