"""Several workers on one database, on every store that can be shared: what they promise each other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any

import pytest

from fairlane import App, Concurrency, State, Task
from fairlane.clock import ManualClock
from fairlane.worker import Worker
from tests.waiting import until
from tests.worker.harness import WatchedStore, working

Handler = Callable[[int, str], Coroutine[Any, Any, int]]


class Member:
    """One of the fleet: an app on the shared database, its store, and its one task."""

    def __init__(self, url: str, clock: ManualClock, handler: Handler, limit: int) -> None:
        self.app = App(url, clock=clock)
        self.store = WatchedStore(self.app._make_store())
        self.app._make_store = lambda: self.store
        self.app.queue("webhooks", limits=[Concurrency(limit, by="account")])
        self.task: Task[Any, int] = self.app.task(queue="webhooks", name="deliver")(handler)


Recruit = Callable[..., Awaitable[Member]]


@pytest.fixture
async def recruit(url: str, clock: ManualClock) -> AsyncIterator[Recruit]:
    async with AsyncExitStack() as stack:

        async def join(handler: Handler, limit: int = 100) -> Member:
            member = Member(url, clock, handler, limit)
            await stack.enter_async_context(member.app)
            return member

        yield join


async def asleep(worker: Worker) -> None:
    """Return once the worker waits for a nudge, sure to get it."""
    queue = worker._slots.queues["webhooks"]
    # A settlement of its own makes it look once more, and whoever awaits the result may hear of the end before that.
    await until(
        lambda: (
            not worker._settling.count_unsettled()
            and worker._slots.is_awaited
            and queue.is_registered
            and not queue.wants_more
            and not queue.looks
        )
    )


async def test_a_claimed_job_that_has_not_started_yet_holds_its_slot_against_the_whole_fleet(recruit: Recruit) -> None:
    # A11.
    started, release, elsewhere = asyncio.Event(), asyncio.Event(), list[str]()

    async def slow(number: int, account: str) -> int:
        started.set()
        await release.wait()
        return number

    async def quick(number: int, account: str) -> int:
        elsewhere.append(account)
        return number

    one, other = await recruit(slow, 2), await recruit(quick, 2)
    async with working(one.app, concurrency=1, prefetch=1, lease="1h", poll="1d") as busy:
        await asleep(busy)  # its claims set anew how far it claims ahead
        busy._slots.ahead = 1
        jobs = await one.task.enqueue_many([one.task.call(n, account="acme") for n in range(3)])
        await started.wait()
        await until(lambda: (busy.health().running, busy.health().waiting) == (1, 1))
        async with working(other.app, concurrency=5, lease="1h", poll="1d"):
            # It asks, and has slots enough: it runs what is another account's.
            assert await (await other.task.enqueue(9, account="globex")).result() == 9
            assert elsewhere == ["globex"]
            assert [await job.status() for job in jobs] == [State.RUNNING, State.RUNNING, State.READY]
            release.set()
            assert [await job.result() for job in jobs] == [0, 1, 2]


async def test_one_job_wakes_one_idle_worker_and_lets_the_others_sleep(recruit: Recruit) -> None:
    # C08. Time stands still, so nobody looks by itself; who is woken too late for its round is seen in the next one.
    async def deliver(number: int, account: str) -> int:
        return number

    fleet = [await recruit(deliver) for _ in range(3)]
    async with AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(working(each.app, concurrency=2, lease="1h", poll="1d")) for each in fleet
        ]
        for number in range(6):
            for worker in workers:
                await asleep(worker)
            asked_before = [each.store.calls["claim"] for each in fleet]
            job = await fleet[0].task.enqueue(number, account="acme")
            assert await job.result() == number
            for worker in workers:
                await asleep(worker)
            asked = [each.store.calls["claim"] - before for each, before in zip(fleet, asked_before, strict=True)]
            assert sorted(count > 0 for count in asked) == [False, False, True]


async def test_a_worker_that_loses_the_race_goes_on_waiting_and_is_woken_for_the_next_job(recruit: Recruit) -> None:
    # C08.
    ran: list[int] = []

    async def deliver(number: int, account: str) -> int:
        ran.append(number)
        return number

    waiter, rival = await recruit(deliver), await recruit(deliver)
    nudged, lost = asyncio.Event(), asyncio.Event()

    async def lose_the_race() -> None:
        nudged.set()
        await lost.wait()

    async with working(waiter.app, lease="1h", poll="1d") as worker:
        await asleep(worker)
        waiter.store.before["claim"] = lose_the_race
        first = await rival.task.enqueue(1, account="acme")
        await nudged.wait()
        async with working(rival.app, lease="1h", poll="1d"):
            assert await first.result() == 1
        waiter.store.restore()
        lost.set()
        await asleep(worker)
        assert await (await rival.task.enqueue(2, account="acme")).result() == 2
    assert ran == [1, 2]
