"""What `app.on_event` promises: order, delivery, and that no handler can stop or delay a job (O11)."""

from __future__ import annotations

import asyncio
import logging
import threading
from datetime import timedelta

import pytest

from fairlane import App, State, events
from fairlane.clock import ManualClock
from fairlane.errors import ConfigurationError, WorkerDied
from fairlane.events import (
    ClaimsLost,
    Event,
    JobEnded,
    JobEvent,
    JobsClaimed,
    JobsEnqueued,
    JobsReaped,
    JobStarted,
    LeasesRenewed,
    LoopDied,
    StoreLost,
    StoreReturned,
    WorkerEvent,
    WorkerStarted,
    WorkerStopped,
    WorkerStopping,
)
from fairlane.telemetry import telemetry
from tests.waiting import until
from tests.worker.harness import WatchedStore, reaches, watched_app, working


async def test_a_handler_hears_of_a_jobs_whole_life_in_order(app: App) -> None:
    heard: list[Event] = []

    @app.on_event
    async def hear(event: Event) -> None:
        heard.append(event)

    app.queue("webhooks", keys=["account"])

    @app.task(queue="webhooks", name="deliver", max_attempts=1)
    async def deliver(account: str) -> None:
        raise ValueError("no such account")

    async with app:
        async with working(app, name="one") as worker:
            job = await deliver.enqueue("acme")
            await reaches(job, State.DEAD)
        await until(lambda: any(isinstance(event, WorkerStopped) for event in heard))
    kinds = [type(event) for event in heard if not isinstance(event, LeasesRenewed)]
    assert set(kinds[:2]) == {WorkerStarted, JobsEnqueued}
    assert kinds[2:] == [JobsClaimed, JobStarted, JobEnded, WorkerStopping, WorkerStopped]
    [enqueued] = [event for event in heard if isinstance(event, JobsEnqueued)]
    assert (enqueued.queue, enqueued.task, enqueued.jobs) == ("webhooks", "deliver", (job.id,))
    [claimed] = [event for event in heard if isinstance(event, JobsClaimed)]
    assert (claimed.queue, claimed.worker, claimed.jobs) == ("webhooks", "one", (job.id,))
    [started] = [event for event in heard if isinstance(event, JobStarted)]
    assert (started.job, started.keys, started.attempt) == (job.id, {"account": "acme"}, 1)
    assert timedelta(0) <= started.waited < timedelta(minutes=1)
    [ended] = [event for event in heard if isinstance(event, JobEnded)]
    assert (ended.outcome, ended.state, ended.max_attempts) == ("failed", State.DEAD, 1)
    assert ended.error is not None
    assert ended.error.startswith("ValueError: no such account")
    assert timedelta(0) <= ended.ran < timedelta(minutes=1)
    assert worker.health().telemetry_failures == 0


async def test_a_handler_that_is_not_async_hears_of_events_in_a_thread_of_its_own(app: App) -> None:
    threads: set[str] = set()
    heard: list[int] = []

    @app.on_event(JobsEnqueued)
    def hear(event: JobsEnqueued) -> None:
        threads.add(threading.current_thread().name)
        heard.append(len(event.jobs))

    @app.task
    async def work(number: int) -> None: ...

    async with app:
        for count in (1, 3, 2):
            await work.enqueue_many([work.call(number) for number in range(count)])
    # Closing the app has waited for them.
    assert heard == [1, 3, 2]
    [thread] = threads
    assert thread.startswith("fairlane-events-")


async def test_a_handler_hears_only_of_the_kinds_it_names_and_of_those_that_belong_to_them(app: App) -> None:
    of_jobs: list[Event] = []
    of_workers: list[Event] = []
    app.on_event(JobEvent)(of_jobs.append)
    app.on_event(WorkerStarted, WorkerStopped)(of_workers.append)

    @app.task
    async def work() -> None: ...

    async with app, working(app):
        await (await work.enqueue()).result()
    assert {type(event) for event in of_jobs} == {JobsEnqueued, JobsClaimed, JobStarted, JobEnded}
    assert [type(event) for event in of_workers] == [WorkerStarted, WorkerStopped]


async def test_a_bulk_is_one_event_for_each_queue_and_task_and_duplicates_are_not_in_it(app: App) -> None:
    heard: list[JobsEnqueued] = []
    app.on_event(JobsEnqueued)(heard.append)
    app.queue("email")

    @app.task(queue="email", name="send", unique=lambda number: number)
    async def send(number: int) -> None: ...

    @app.task(name="other")
    async def other() -> None: ...

    async with app:
        await app.enqueue_many([send.call(1), other.call(), send.call(2), send.call(1)])
    assert [(event.queue, event.task, len(event.jobs)) for event in heard] == [
        ("email", "send", 2),
        ("default", "other", 1),
    ]


async def test_handlers_that_raise_stop_no_job_and_are_visible(app: App, caplog: pytest.LogCaptureFixture) -> None:
    @app.on_event
    async def break_in_the_loop(event: Event) -> None:
        raise RuntimeError("a bug in a handler")

    @app.on_event
    def break_in_a_thread(event: Event) -> None:
        raise SystemExit("a bug in another")

    @app.task
    async def work(number: int) -> int:
        return number

    async with app, working(app, metrics_port=0) as worker:
        jobs = await work.enqueue_many([work.call(number) for number in range(50)])
        assert [await job.result() for job in jobs] == list(range(50))
        await until(lambda: worker.health().telemetry_failures >= 200)
        assert worker.health().is_well
        assert app.telemetry.metrics is not None
        counted = dict(app.telemetry.metrics.value_of("fairlane_telemetry_failures_total"))
    assert counted.pop(("handler",)) >= 200
    assert set(counted.values()) == {0}
    told = [record.getMessage() for record in caplog.records if record.name == "fairlane.telemetry"]
    # The first of each kind, the 10th, the 100th.
    assert len([line for line in told if "break_in_the_loop" in line]) == 3
    assert len([line for line in told if "break_in_a_thread" in line]) == 3
    assert any("10 so far" in line for line in told)


async def test_a_handler_that_hangs_loses_events_and_delays_nothing(
    app: App, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(telemetry, "WAITING_AT_MOST", 10)
    monkeypatch.setattr(telemetry, "FLUSHED_WITHIN", 0.01)
    go_on, heard = threading.Event(), 0
    hanging: list[str] = []

    @app.on_event(JobEnded)
    def hang(event: JobEnded) -> None:
        hanging.append("in its thread")
        go_on.wait()

    @app.on_event(JobEnded)
    async def hang_too(event: JobEnded) -> None:
        hanging.append("in the loop")
        await asyncio.Event().wait()

    @app.on_event(JobEnded)
    async def listen(event: JobEnded) -> None:
        nonlocal heard
        heard += 1

    @app.task
    async def work(number: int) -> None: ...

    try:
        async with app, working(app, concurrency=5):
            await (await work.enqueue(0)).result()
            # Before the flood: a thread that took its first only after it would have had one more dropped.
            await until(lambda: len(hanging) == 2)
            jobs = await work.enqueue_many([work.call(number) for number in range(1, 50)])
            for job in jobs:
                await job.result()
            await until(lambda: heard == 50)
            # One is in the hands of each, ten wait for each.
            await until(lambda: app.telemetry.failures.by_reason["dropped"] == 2 * (50 - 11))
    finally:
        go_on.set()
    assert "hang is too slow, events are dropped (dropped, 10 so far; jobs go on)" in caplog.text


async def test_an_async_handler_that_takes_too_long_is_given_up(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "HANDLED_WITHIN", 0.01)
    heard: list[Event] = []

    @app.on_event(JobsEnqueued)
    async def hear(event: JobsEnqueued) -> None:
        if not heard:
            heard.append(event)
            await asyncio.Event().wait()
        heard.append(event)

    @app.task
    async def work() -> None: ...

    async with app:
        await work.enqueue()
        await work.enqueue()
    assert len(heard) == 2
    assert app.telemetry.failures.by_reason == {"handler": 1}


async def test_nothing_is_made_when_nobody_listens(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object, **fields: object) -> None:
        raise AssertionError("an event was made for nobody")

    for kind in events.EVENTS:
        monkeypatch.setattr(kind, "__init__", never)
    app.on_event(StoreLost)(lambda event: None)

    @app.task
    async def work() -> None: ...

    async with app, working(app) as worker:
        await (await work.enqueue()).result()
    assert worker.health().telemetry_failures == 0
    assert app.telemetry.metrics is None


@pytest.mark.parametrize("given", ["started", int, App])
async def test_what_is_no_kind_of_event_is_refused(app: App, given: object) -> None:
    with pytest.raises(ConfigurationError, match="on_event"):
        app.on_event(given, Event)(print)  # type: ignore[call-overload]
    with pytest.raises(ConfigurationError, match=r"on_event: 'started' cannot be called"):
        app.on_event("started")  # type: ignore[call-overload]


# What is rare happens on a store that can be broken.


@pytest.fixture
def broken(clock: ManualClock) -> tuple[App, WatchedStore]:
    return watched_app(clock)


async def test_an_outage_is_two_events_however_many_calls_fail(broken: tuple[App, WatchedStore]) -> None:
    app, store = broken
    heard: list[Event] = []
    app.on_event(StoreLost, StoreReturned)(heard.append)
    async with app, working(app) as worker:
        store.lose("claim", "now", "reap")
        worker._slots.look_everywhere()
        await until(lambda: not worker.health().is_connected)
        store.restore()
        await until(lambda: worker.health().is_connected)
    assert [type(event) for event in heard] == [StoreLost, StoreReturned]
    assert isinstance(heard[0], StoreLost)
    assert heard[0].error == "the test has cut the line"


async def test_a_loop_that_dies_is_an_event(broken: tuple[App, WatchedStore]) -> None:
    app, store = broken
    heard: list[LoopDied] = []
    app.on_event(LoopDied)(heard.append)

    async def fault() -> None:
        raise RuntimeError("a bug in the store")

    store.before["claim"] = fault
    async with app:
        with pytest.raises(WorkerDied):
            await (await app.worker()).run()
    assert [(event.loop, event.cause) for event in heard] == [("claiming", "RuntimeError: a bug in the store")]


async def test_renewed_lost_and_reaped_claims_are_events(broken: tuple[App, WatchedStore], clock: ManualClock) -> None:
    app, store = broken
    heard: list[WorkerEvent] = []
    app.on_event(LeasesRenewed, ClaimsLost, JobsReaped)(heard.append)
    started, release = asyncio.Event(), asyncio.Event()

    @app.task
    async def work() -> None:
        started.set()
        await release.wait()

    app.queue("by-hand")
    async with app, working(app, queues="default", lease="30s"):
        await work.using(queue="by-hand").enqueue()
        job = await work.enqueue()
        await started.wait()
        clock.advance("10s")
        await until(lambda: any(isinstance(event, LeasesRenewed) for event in heard))
        # Nothing is renewed any more, until the lease is over and another worker takes the job over.
        store.lose("renew")
        clock.advance("31s")
        await store.real.reap()
        store.restore()
        await until(lambda: any(isinstance(event, ClaimsLost) for event in heard))
        release.set()
        await job.result()
        # The other way round.
        [claim] = await app.queues["by-hand"].claim(1, lease="30s")
        clock.advance("31s")
        await until(lambda: any(isinstance(event, JobsReaped) for event in heard))
    assert next(event for event in heard if isinstance(event, LeasesRenewed)).leases == 1
    assert [event.jobs for event in heard if isinstance(event, JobsReaped)] == [(claim.id,)]
    assert [event.jobs for event in heard if isinstance(event, ClaimsLost)] == [(job.id,)]


def test_events_are_a_closed_set_of_frozen_values() -> None:
    made = {kind for kind in vars(events).values() if isinstance(kind, type) and issubclass(kind, Event)}
    assert made - {Event, JobEvent, WorkerEvent} == set(events.EVENTS)
    for kind in events.EVENTS:
        assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
        assert kind.__doc__


def test_the_first_failure_of_a_kind_is_logged_with_its_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = App("sqlite://")
    with caplog.at_level(logging.ERROR, "fairlane.telemetry"):
        for _ in range(99):
            app.telemetry.failures.note("handler", "a handler failed", ValueError("no"))
        app.telemetry.failures.note("handler", "another failed", ValueError("no"))
    assert [record.getMessage() for record in caplog.records] == [
        "a handler failed (handler, 1 so far; jobs go on): ValueError: no",
        "a handler failed (handler, 10 so far; jobs go on): ValueError: no",
        "another failed (handler, 1 so far; jobs go on): ValueError: no",
    ]
    assert app.telemetry.failures.total == 100


async def test_a_handler_that_cancels_itself_has_failed_and_hears_on(app: App) -> None:
    heard: list[Event] = []

    @app.on_event
    async def give_up(event: Event) -> None:
        heard.append(event)
        raise asyncio.CancelledError

    @app.task
    async def work() -> None: ...

    async with app, working(app) as worker:
        for _ in range(3):
            await (await work.enqueue()).result()
        await until(lambda: len(heard) >= 6)
        assert worker.health().telemetry_failures >= 6
        assert worker.health().is_well
