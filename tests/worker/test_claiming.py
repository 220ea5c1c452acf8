"""What a worker claims, when, and what it does with a job that it cannot run."""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta
from uuid import UUID

import pytest
from msgspec import structs

from fairlane import App, Concurrency, State, context
from fairlane.clock import ManualClock
from fairlane.errors import JobCancelled, JobFailed, StoreUnavailable, UnknownQueue
from fairlane.job import NewJob, new_job_ids
from fairlane.policy import lane_id
from fairlane.store.sqlite.wakeups import SqliteListener
from fairlane.worker import WorkerOptions
from tests.waiting import until
from tests.worker.harness import WatchedStore, reaches, turns, working


async def store_raw(app: App, clock: ManualClock, task: str, payload: bytes, queue: str = "default") -> UUID:
    """A job as no producer of this version would write it."""
    [job] = new_job_ids(clock.now(), 1)
    new = NewJob(job, queue, task, 0, lane_id(queue, 0, {}), {}, {}, payload, 5)
    await (await app.opened()).enqueue([new])
    return job


@pytest.mark.parametrize(
    "payload", [b"\xff", b"{}", b"[]", b'[["a"],{}]', b"[[1,2],{}]", b'[[],{"nomber":1}]', b"[[],{}]"]
)
async def test_a_job_that_cannot_be_decoded_is_set_aside_with_the_reason_and_stops_nobody(
    app: App, clock: ManualClock, payload: bytes
) -> None:
    # L10, A13.
    app.queue("default", limits=[Concurrency(1)])

    @app.task(name="double")
    async def double(number: int) -> int:
        return 2 * number

    async with working(app):
        bad = app.job(await store_raw(app, clock, "double", payload))
        with pytest.raises(JobFailed, match="the arguments do not fit task 'double'"):
            await bad.result()
        assert await (await double.enqueue(2)).result() == 4
    assert (await (await app.opened()).counts("default")).running == 0


async def test_an_unknown_task_is_given_back_with_a_growing_delay_and_never_dies_of_it(
    app: App, store: WatchedStore, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    # A13, and "a task it does not know is given back untouched".
    waits = []
    async with working(app, lease="1h", poll="1d"):
        job = app.job(await store_raw(app, clock, "of.another.version", b"[[],{}]"))
        for _ in range(11):
            await reaches(job, State.SCHEDULED)
            record = await job.record()
            assert record.attempt == 0
            wait = (record.due_at or 0) - clock.now()
            waits.append(wait // 1_000_000)
            settled = store.ended["settle"]
            clock.advance(wait / 1_000_000)
            await store.finished("settle", settled + 1)
    assert waits == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]
    assert f"job {job.id}: this worker has no task named 'of.another.version'" in caplog.text


async def test_a_job_whose_cancel_was_asked_for_before_it_started_does_not_run(app: App, store: WatchedStore) -> None:
    # A13: dropped before user code runs.
    ran = []

    @app.task
    async def work() -> None:
        ran.append(1)

    async with app:
        job = await work.enqueue()
        worker = await app.worker()
        claimed = await store.claim("default", lambda: 1, worker=worker.identity, lease=timedelta(hours=1))
        await job.cancel()
        queue = worker._slots.queues["default"]
        worker._slots.note_claimed(queue, 1)
        worker._execution.start(queue, [structs.replace(claimed.claims[0], cancel_requested=True)], 1 << 62)
        assert (queue.used, worker.health().running, worker.health().unsettled) == (0, 0, 1)
        await store.settle(worker._settling._pending)
        with pytest.raises(JobCancelled, match="cancelled before it ran"):
            await job.result()
    assert ran == []


async def test_an_idle_worker_is_woken_by_a_job_and_not_by_a_poll(app: App, store: WatchedStore) -> None:
    @app.task
    async def work() -> str:
        return "woken"

    async with working(app):
        await store.finished("claim")
        await turns()
        assert await (await work.enqueue()).result() == "woken"  # the clock stands still: no poll is due


async def test_a_nudge_that_arrives_while_a_claim_is_on_its_way_back_is_not_lost(app: App, store: WatchedStore) -> None:
    # C01 from the worker's side: the answer in flight does not hold the job that the nudge is about.
    answered, let_go = asyncio.Event(), asyncio.Event()

    @app.task
    async def work() -> str:
        return "seen"

    async def hold_up() -> None:
        answered.set()
        await let_go.wait()

    async with working(app, poll="1d", lease="1h") as worker:
        await until(lambda: worker._slots.queues["default"].is_registered)
        worker._slots.queues["default"].is_registered = False  # as before the first claim
        store.after["claim"] = hold_up
        worker._slots.look_everywhere()
        await answered.wait()
        job = await work.enqueue()
        await until(lambda: worker._claiming._is_nudged)
        store.after.clear()
        let_go.set()
        assert await job.result() == "seen"


async def test_a_worker_whose_ear_was_cut_off_hears_again(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    hear, cuts = SqliteListener.wait, 0

    async def cut_twice(self: SqliteListener, until: int | None) -> bool:
        nonlocal cuts
        cuts += 1
        if cuts <= 2:
            raise StoreUnavailable("the connection broke")
        return await hear(self, until)

    @app.task
    async def work() -> str:
        return "heard"

    monkeypatch.setattr(SqliteListener, "wait", cut_twice)
    async with working(app, poll="1d", lease="1h") as worker:
        await until(lambda: cuts == 3 and worker._slots.queues["default"].is_registered)
        assert await (await work.enqueue()).result() == "heard"


async def test_a_due_job_is_picked_up_at_its_time_although_nothing_else_happens(app: App, clock: ManualClock) -> None:
    # C10.
    @app.task
    async def work() -> str:
        return "on time"

    async with working(app, poll="1d", lease="1h") as worker:
        await until(lambda: worker._slots.queues["default"].is_registered)
        job = await work.using(delay="10m").enqueue()
        assert await job.status() is State.SCHEDULED
        clock.advance("9m59s")
        await turns()
        assert await job.status() is State.SCHEDULED
        clock.advance("1s")
        assert await job.result() == "on time"


async def test_an_idle_worker_asks_less_than_once_a_second(app: App, store: WatchedStore, clock: ManualClock) -> None:
    @app.task
    async def work() -> None: ...

    async with working(app):
        await (await work.enqueue()).result()
        await turns(50)
        before = store.calls.total()
        for _ in range(120):
            clock.advance("1s")
            await turns(50)
        # A report and a look at what there is to add up, every five seconds each, are half of it.
        assert 0 < store.calls.total() - before <= 110


async def test_a_settlement_that_opens_a_limit_lets_the_next_job_start(app: App) -> None:
    app.queue("mail", limits=[Concurrency(1)])
    highest, running = 0, 0

    @app.task(queue="mail")
    async def send(number: int) -> int:
        nonlocal highest, running
        running += 1
        highest = max(highest, running)
        await asyncio.sleep(0)
        running -= 1
        return number

    async with working(app):
        jobs = await send.enqueue_many([send.call(n) for n in range(20)])
        assert [await job.result() for job in jobs] == list(range(20))
    assert highest == 1


async def test_a_worker_never_runs_more_jobs_than_it_has_slots(app: App) -> None:
    highest, running = 0, 0

    @app.task
    async def work() -> None:
        nonlocal highest, running
        running += 1
        highest = max(highest, running)
        await asyncio.sleep(0)
        running -= 1

    async with working(app, concurrency=7):
        jobs = await work.enqueue_many([work.call() for _ in range(2_000)])
        for job in jobs[-3:]:
            await job.result()
    assert highest == 7


async def test_short_jobs_are_claimed_ahead_and_long_ones_are_not(
    app: App, store: WatchedStore, clock: ManualClock
) -> None:
    release = asyncio.Event()

    @app.task
    async def short() -> None: ...

    @app.task
    async def long() -> None:
        await release.wait()

    async with working(app, concurrency=2, prefetch=500) as worker:
        await long.enqueue_many([long.call() for _ in range(10)])
        await until(lambda: worker.health().running == 2)
        assert worker.health().waiting == 0
        release.set()
        for job in await short.enqueue_many([short.call() for _ in range(3_000)]):
            await job.status()
        last = await short.enqueue()
        await last.result()
        # Less than one claim for every two slots' worth of jobs: they came in larger batches.
        assert store.calls["claim"] < 1_000


async def test_what_was_claimed_ahead_and_has_to_wait_is_given_back(app: App, clock: ManualClock) -> None:
    started, release = asyncio.Event(), asyncio.Event()

    @app.task
    async def work() -> None:
        started.set()
        await release.wait()

    async with working(app, concurrency=1, lease="1h", prefetch=500) as worker:
        worker._execution.mean_run = 1.0  # as after many short jobs
        worker._slots.ahead = 5
        jobs = await work.enqueue_many([work.call() for _ in range(4)])
        await started.wait()
        await until(lambda: worker.health().waiting == 3)
        clock.advance("1s")
        for job in jobs[1:]:
            await reaches(job, State.READY)
        assert [(await job.record()).attempt for job in jobs] == [1, 0, 0, 0]
        release.set()
        for job in jobs:
            await job.result()


async def test_a_worker_serves_the_queues_it_was_told_to_and_no_other(app: App) -> None:
    app.queue("mail")
    app.queue("reports")

    @app.task(queue="mail")
    async def send() -> str:
        return context().queue

    @app.task(queue="reports")
    async def report() -> None: ...

    async with working(app, queues="mail"):
        left = await report.enqueue()
        assert await (await send.enqueue()).result() == "mail"
        assert await left.status() is State.READY


async def test_a_full_worker_that_is_nudged_asks_for_nothing_so_that_the_store_wakes_another(
    app: App, store: WatchedStore
) -> None:
    # C08: one job wakes one waiter; a waiter without a free slot must not swallow the wake-up.
    app.queue("mail")
    app.queue("reports")
    started, release = asyncio.Event(), asyncio.Event()

    @app.task(queue="reports")
    async def report() -> None:
        started.set()
        await release.wait()

    @app.task(queue="mail")
    async def send() -> str:
        return "sent"

    async with working(app, concurrency=1, lease="1h", poll="1d"):
        await store.finished("claim", 2)  # waits for both queues
        await report.enqueue()
        await started.wait()
        claims = store.ended["claim"]
        waiting = await send.enqueue()
        await store.finished("claim", claims + 1)
        queue, want = store.arguments["claim"][-1]
        assert (queue, want()) == ("mail", 0)
        release.set()
        assert await waiting.result() == "sent"


async def test_a_worker_is_not_started_for_a_queue_that_nobody_knows(app: App) -> None:
    with pytest.raises(UnknownQueue, match="queues: 'mial' is unknown; this app has default"):
        await app.worker(WorkerOptions(queues="mial"))


async def test_every_line_about_a_job_names_it(app: App, caplog: pytest.LogCaptureFixture) -> None:
    # L14.
    caplog.set_level(logging.INFO)

    @app.task(max_attempts=1)
    async def fail() -> None:
        raise ValueError("no luck")

    async with working(app):
        job = await fail.enqueue()
        with pytest.raises(JobFailed):
            await job.result()
    assert [record.message for record in caplog.records if "no luck" in record.message] == [
        f"job {job.id} ({fail.name}) attempt 1 of 1 failed, the job is dead: ValueError: no luck"
    ]


async def test_what_waits_in_the_place_of_those_that_have_started_is_given_back_by_its_own_age(
    app: App, clock: ManualClock
) -> None:
    started = [asyncio.Event() for _ in range(3)]
    release = [asyncio.Event() for _ in range(3)]

    @app.task
    async def work(number: int) -> None:
        started[number].set()
        await release[number].wait()

    async with working(app, concurrency=1, lease="1h", prefetch=500) as worker:
        worker._execution.mean_run = 1.0  # as after many short jobs
        worker._slots.ahead = 1
        await work.enqueue_many([work.call(0), work.call(1)])
        await started[0].wait()
        await until(lambda: worker.health().waiting == 1)
        clock.advance("600ms")
        release[0].set()
        await started[1].wait()
        worker._execution.mean_run = 1.0
        worker._slots.ahead = 1
        late = await work.enqueue(2)
        await until(lambda: worker.health().waiting == 1)
        clock.advance("600ms")  # a second since the first was claimed ahead, which has started meanwhile
        await asyncio.sleep(0)
        assert (worker.health().waiting, await late.status()) == (1, State.RUNNING)
        clock.advance("600ms")
        await reaches(late, State.READY)
        for each in release:
            each.set()
        await late.result()
