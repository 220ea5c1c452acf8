"""How outcomes reach the store, whatever happens on the way."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast
from uuid import UUID

import pytest

from fairlane import App, Outcome, State, Unique, context
from fairlane.clock import ManualClock
from fairlane.errors import DuplicateJob, StoreUnavailable
from fairlane.events import FollowUpsNotStored
from fairlane.job import Landed
from fairlane.scheduler.settlement import Settlement
from fairlane.store.postgres import PostgresStore
from fairlane.store.protocol import Store
from tests.waiting import until
from tests.worker.harness import WatchedStore, working


async def test_what_ends_while_a_settlement_is_in_flight_goes_with_the_next_one(app: App, store: WatchedStore) -> None:
    @app.task
    async def work() -> None: ...

    async with working(app) as worker:
        started, gate = store.hold_up("settle")
        jobs = [await work.enqueue()]
        await started.wait()
        jobs += [await work.enqueue() for _ in range(9)]
        await until(lambda: worker.health().unsettled == 10)
        assert store.calls["settle"] == 1
        store.before.clear()
        gate.set()
        for job in jobs:
            await job.result()
    assert [len(batch[0]) for batch in store.arguments["settle"]] == [1, 9]


async def test_a_slot_is_free_as_soon_as_its_handler_has_ended(app: App, store: WatchedStore) -> None:
    gate = asyncio.Event()
    ran = 0

    @app.task
    async def work() -> None:
        nonlocal ran
        ran += 1

    async with working(app, concurrency=1, prefetch=0):
        store.before["settle"] = gate.wait  # type: ignore[assignment]
        jobs = await work.enqueue_many([work.call() for _ in range(5)])
        await until(lambda: ran == 5)
        assert store.ended["settle"] == 0
        store.before.clear()
        gate.set()
        for job in jobs:
            await job.result()


async def test_a_settlement_that_meets_a_dropped_connection_is_tried_again(app: App, store: WatchedStore) -> None:
    # L08.
    tries, runs = 0, 0

    @app.task
    async def work() -> str:
        nonlocal runs
        runs += 1
        return "recorded"

    async def drop_twice() -> None:
        nonlocal tries
        tries += 1
        if tries <= 2:
            raise StoreUnavailable("the connection was dropped")

    async with working(app):
        store.before["settle"] = drop_twice
        assert await (await work.enqueue()).result() == "recorded"
    assert (tries, runs) == (3, 1)


async def test_a_settlement_that_was_recorded_before_the_connection_broke_is_no_error(
    app: App, store: WatchedStore, caplog: pytest.LogCaptureFixture
) -> None:
    @app.task
    async def work() -> str:
        return "recorded"

    async def break_after() -> None:
        store.after.clear()
        raise StoreUnavailable("the connection broke in the commit")

    async with working(app):
        store.after["settle"] = break_after
        assert await (await work.enqueue()).result() == "recorded"
        await store.finished("settle", 2)
    assert "recorded just before the connection broke" in caplog.text
    assert "ClaimLost" not in caplog.text


async def test_a_settlement_that_fails_for_good_does_not_end_the_loop_and_takes_no_other_with_it(
    app: App, store: WatchedStore, caplog: pytest.LogCaptureFixture
) -> None:
    # L09.
    bad: list[object] = []
    both = asyncio.Event()

    @app.task
    async def work(name: str) -> str:
        await both.wait()
        return name

    async def refuse() -> None:
        [batch] = store.arguments["settle"][-1]
        if any(each.job in bad for each in batch):
            raise RuntimeError("this row cannot be written")

    async with working(app, lease="1h") as worker:
        store.before["settle"] = refuse
        first, second = await work.enqueue_many([work.call("first"), work.call("second")])
        bad.append(first.id)
        both.set()
        assert await second.result() == "second"
        assert await (await work.enqueue("third")).result() == "third"
        assert await first.status() is State.RUNNING  # until its lease ends
        assert worker.health().is_well
    assert f"job {first.id}: its outcome (done) could not be recorded" in caplog.text
    assert worker.left_unsettled == 1


async def test_what_is_settled_alone_after_its_batch_was_refused_may_have_landed_before(
    app: App, store: WatchedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    # PostgreSQL records what it can of such a batch. Unasked, it would call that lost.
    both, real = asyncio.Event(), store.real.settle
    asked: list[tuple[int, bool]] = []
    started = 0

    @app.task
    async def work() -> None:
        nonlocal started
        started += 1
        await both.wait()

    async def refuse_batches(batch: Sequence[Settlement], *, is_repeated: bool = False, **rest: Any) -> list[UUID]:
        asked.append((len(batch), is_repeated))
        if len(batch) > 1:
            raise DuplicateJob(batch[0].job)
        return await real(batch, is_repeated=is_repeated, **rest)

    async with working(app):
        monkeypatch.setattr(store.real, "settle", refuse_batches)
        jobs = await work.enqueue_many([work.call(), work.call()])
        await until(lambda: started == 2)
        both.set()
        for job in jobs:
            await job.result()
    assert asked == [(2, False), (1, True), (1, True)]


async def test_running_jobs_go_on_while_the_database_is_away(app: App, store: WatchedStore, clock: ManualClock) -> None:
    started, release, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    @app.task
    async def work() -> str:
        started.set()
        await release.wait()
        ended.set()
        return "done meanwhile"

    async with working(app, lease="1h") as worker:
        job = await work.enqueue()
        await started.wait()
        store.lose("claim", "settle", "renew", "held", "reap", "prune", "collect", "listen")
        release.set()
        await ended.wait()
        await store.called("settle", 2)
        health = worker.health()
        assert (health.is_well, health.is_connected, health.unsettled) == (True, False, 1)
        store.restore()
        assert await job.result() == "done meanwhile"


async def test_a_follow_up_that_is_not_stored_is_logged_and_told(app: App, caplog: pytest.LogCaptureFixture) -> None:
    """E11."""
    heard: list[FollowUpsNotStored] = []
    app.on_event(FollowUpsNotStored)(heard.append)

    @app.task
    async def receipt(order: int) -> None: ...

    @app.task
    async def charge(order: int) -> None:
        for word in ("return", "reject"):
            context().enqueue(receipt.using(unique=Unique("a", on_conflict=word)).call(order))

    holder = await receipt.using(unique=Unique("a"), delay="1h").enqueue(1)
    job = await charge.enqueue(1)
    with caplog.at_level("INFO", "fairlane.worker"):
        async with working(app):
            await job.result()
            await until(lambda: bool(heard))
    (event,) = heard
    assert (event.job, [each.outcome for each in event.follow_ups]) == (job.id, [Outcome.DUPLICATE, Outcome.REFUSED])
    told = [record for record in caplog.records if "was not stored" in record.getMessage()]
    assert [record.levelname for record in told] == ["INFO", "WARNING"]
    assert f"job {holder.id} holds its unique key" in told[1].getMessage()


async def test_a_follow_up_that_is_not_stored_is_reported_though_the_answer_was_lost(postgres_url: str) -> None:
    """E11: the try that landed is the one that knows. (On SQLite, no answer gets lost.)"""
    app, store = App(postgres_url), WatchedStore(PostgresStore(postgres_url))
    app._make_store = lambda: cast("Store", store)
    heard: list[FollowUpsNotStored] = []
    app.on_event(FollowUpsNotStored)(heard.append)

    @app.task
    async def charge(order: int) -> None:
        context().enqueue(charge.using(unique=Unique("a", on_conflict="reject")).call(order))

    async def lose_the_answer() -> None:
        store.after.clear()
        raise StoreUnavailable("the test has cut the line")

    holder = await charge.using(unique=Unique("a"), delay="1h").enqueue(1)
    store.after["settle"] = lose_the_answer
    job = await charge.enqueue(1)
    async with working(app):
        await job.result()
        await until(lambda: bool(heard))
    await app.close()
    assert store.calls["settle"] == 2
    ((told,),) = (each.follow_ups for each in heard)
    assert (told.outcome, told.job) == (Outcome.REFUSED, holder.id)


async def test_a_handler_that_settles_in_its_transaction_hears_of_its_effects(
    tmp_path: Path, clock: ManualClock
) -> None:
    """E11."""
    file = str(tmp_path / "jobs.db")
    landed: list[Landed] = []
    async with App(f"sqlite:///{file}", clock=clock) as app:

        @app.task
        async def receipt(order: int) -> None: ...

        @app.task
        def charge(order: int) -> None:
            context().enqueue(receipt.using(unique=Unique("a", on_conflict="reject")).call(order))
            connection = sqlite3.connect(file, isolation_level=None)
            connection.execute("begin immediate")
            landed.append(context().ack_sync(tx=connection))
            connection.execute("commit")
            connection.close()

        holder = await receipt.using(unique=Unique("a"), delay="1h").enqueue(1)
        job = await charge.enqueue(1)
        async with working(app):
            await job.result()
    ((follow_up,),) = (each.enqueue for each in landed)
    assert (follow_up.task, follow_up.outcome, follow_up.job) == (receipt.name, Outcome.REFUSED, holder.id)
