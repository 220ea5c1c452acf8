"""What operators read is so at every moment: while workers run, and after the last one has stopped."""

from __future__ import annotations

import asyncio

from fairlane import App, Concurrency
from fairlane.operations.views import QueueStatus
from tests.waiting import until, until_found
from tests.worker.harness import working


async def test_n2_when_the_last_worker_has_stopped_every_count_is_right_and_stays_right(url: str) -> None:
    """O15"""
    app, ran = App(url), []
    app.queue("webhooks", limits=[Concurrency(3, by="account")])

    @app.task(queue="webhooks")
    async def deliver(event: int, account: str) -> None:
        ran.append(event)

    async with app:
        await deliver.enqueue_many([deliver.call(n, account="acme") for n in range(30)])
        async with working(app, concurrency=3):
            await until(lambda: len(ran) == 30)
        (view,) = await app.operations.queues.list()
        assert (view.ready, view.running, view.held_jobs) == (0, 0, 0)
        page = await app.operations.keys.list("webhooks", "account")
        assert [(key.keys["account"], key.waiting, key.running, key.ended) for key in page.keys] == [("acme", 0, 0, 30)]
        shown = await app.operations.queues.show("webhooks")
        assert sum(minute.ended for minute in shown.chart.minutes) == 30


async def test_n1_what_a_limit_holds_is_never_shown_as_lag(url: str) -> None:
    """O14"""
    app, going, running = App(url), asyncio.Event(), []
    app.queue("webhooks", limits=[Concurrency(2, by="account")])

    @app.task(queue="webhooks")
    async def deliver(event: int, account: str) -> None:
        running.append(event)
        await going.wait()

    async with app:
        await deliver.enqueue_many([deliver.call(n, account="acme") for n in range(200)])
        async with working(app, concurrency=20):
            await until(lambda: len(running) == 2)

            async def has_reported() -> bool:
                return bool((await app.operations.workers.list()).workers)

            await until_found(has_reported)
            (view,) = await app.operations.queues.list()
            assert (view.ready, view.held_jobs, view.running) == (198, 198, 2)
            assert view.status is QueueStatus.LIMITED
            (key,) = (await app.operations.keys.list("webhooks", "account")).keys
            assert (key.waiting, key.running, key.held_by) == (198, 2, ["concurrency:account"])
            going.set()
            await until(lambda: len(running) == 200)


async def test_n8_a_queue_that_nobody_serves_has_an_age(url: str) -> None:
    app = App(url)
    app.queue("webhooks")

    @app.task(queue="webhooks")
    async def deliver(event: int) -> None:
        pass

    async with app:
        await deliver.enqueue(1)
        (view,) = await app.operations.queues.list()
        assert view.ready == 1
        assert view.oldest_wait is not None
