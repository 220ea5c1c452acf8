"""The engine's side: what becomes of a message that is delivered, and of its job."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Coroutine
from datetime import timedelta
from typing import Any

import pytest

from fairlane import App, Cancel, Dead, Snooze, State, Unique, context
from fairlane.clock import ManualClock
from fairlane.errors import InvalidJob, StoreUnavailable
from fairlane.events import FollowUpsNotStored, JobEnded, JobStarted
from fairlane.forward.delivery import Delivery, Token
from fairlane.task import Job, Task
from tests.forward.paper import PaperForwarder, dispatching, heartbeat
from tests.waiting import until, until_found
from tests.worker.harness import WatchedStore, reaches, turns


def length(forwarder: PaperForwarder, **options: Any) -> Task[..., Any]:
    return forwarder.task(len, queue="emails", name="length", **options)


async def published(forwarder: PaperForwarder, task: Task[..., Any], *args: Any) -> Job[Any]:
    """A job whose message is at the broker, with no dispatcher left."""
    job = await task.enqueue(*args)
    before = len(forwarder.messages)
    async with dispatching(forwarder):
        await until(lambda: len(forwarder.messages) > before)
    return job


async def begun(forwarder: PaperForwarder) -> Delivery:
    delivery = await forwarder.deliveries.begin(forwarder.messages[-1].token, [forwarder.messages[-1].task])
    assert delivery is not None
    return delivery


async def test_the_function_gets_what_is_stored_and_not_what_the_message_says(forwarder: PaperForwarder) -> None:
    def due(wait: timedelta) -> float:
        return wait.total_seconds()

    job = await published(forwarder, forwarder.task(due, queue="emails"), timedelta(minutes=2))
    assert list(forwarder.messages[0].args) == ["PT120S"]
    assert await forwarder.deliver(forwarder.messages[0]) == 120.0
    assert await job.result() == 120.0


async def test_of_two_deliveries_of_one_message_one_runs(forwarder: PaperForwarder) -> None:
    runs: list[int] = []
    job = await published(forwarder, forwarder.task(runs.append, queue="emails", name="note"), 7)
    first = await begun(forwarder)
    assert await forwarder.deliveries.begin(forwarder.messages[0].token, [forwarder.messages[0].task]) is None
    await forwarder.deliveries.done(first, None)
    assert await forwarder.deliveries.begin(forwarder.messages[0].token, [forwarder.messages[0].task]) is None
    assert await job.status() is State.DONE


async def test_a_follow_up_that_is_not_stored_is_reported_by_the_engines_worker_too(
    app: App, forwarder: PaperForwarder, caplog: pytest.LogCaptureFixture
) -> None:
    """E11."""
    heard: list[FollowUpsNotStored] = []
    app.on_event(FollowUpsNotStored)(heard.append)

    @app.task
    async def receipt(number: int) -> None: ...

    def charge(number: int) -> None:
        context().enqueue(receipt.using(unique=Unique("a", on_conflict="reject")).call(number))

    holder = await receipt.using(unique=Unique("a")).enqueue(1)
    job = await published(forwarder, forwarder.task(charge, queue="emails"), 1)
    await forwarder.deliver(forwarder.messages[0])
    assert await job.status() is State.DONE
    assert f"job {holder.id} holds its unique key" in caplog.text
    await until(lambda: bool(heard))
    assert heard[0].job == job.id


async def test_the_context_tells_of_the_job_and_its_effects_land(app: App, forwarder: PaperForwarder) -> None:
    def tell(name: str) -> int:
        context().put("told", name)
        return context().attempt

    job = await published(forwarder, forwarder.task(tell, queue="emails"), "Ada")
    assert await forwarder.deliver(forwarder.messages[0]) == 1
    assert await job.result() == 1
    assert await app.values.get("told") == "Ada"


async def test_events_tell_of_runs_where_they_are(app: App, forwarder: PaperForwarder) -> None:
    heard: list[str] = []
    app.on_event(JobStarted, JobEnded)(lambda event: heard.append(type(event).__name__))
    job = await published(forwarder, length(forwarder), "abc")
    assert heard == []  # publishing is no run
    await forwarder.deliver(forwarder.messages[0])
    await until(lambda: len(heard) == 2)
    assert heard == ["JobStarted", "JobEnded"]
    assert await job.result() == 3


@pytest.mark.parametrize(
    ("raised", "state", "attempt"),
    [
        (ValueError("no"), State.SCHEDULED, 1),
        (Snooze("1h"), State.SCHEDULED, 0),
        (Dead("never"), State.DEAD, 1),
        (Cancel(), State.CANCELLED, 1),
    ],
    ids=["a failure", "a snooze", "a death", "a cancellation"],
)
async def test_what_is_raised_means_what_it_means_on_a_worker(
    forwarder: PaperForwarder, raised: Exception, state: State, attempt: int
) -> None:
    def fail() -> None:
        raise raised

    job = await published(forwarder, forwarder.task(fail, queue="emails"))
    await forwarder.deliver(forwarder.messages[0])
    record = await job.record()
    assert (record.state, record.attempt) == (state, attempt)


async def test_when_the_engine_has_tried_often_enough_a_failure_is_the_end(forwarder: PaperForwarder) -> None:
    job = await published(forwarder, length(forwarder), "abc")
    await forwarder.deliveries.failed(await begun(forwarder), ValueError("for good"), is_final=True)
    assert await job.status() is State.DEAD


async def test_a_job_is_kept_while_it_runs_and_lost_when_nobody_keeps_it(
    app: App, forwarder: PaperForwarder, clock: ManualClock, store: WatchedStore
) -> None:
    job = await published(forwarder, length(forwarder), "abc")
    delivery = await begun(forwarder)
    for _ in range(6):
        await heartbeat(store, clock)
    await app.upkeep()
    assert await job.status() is State.RUNNING
    store.lose("renew")
    await turns()
    clock.advance("31s")
    await app.upkeep()
    assert await job.status() is State.READY
    store.restore()
    # Whoever took it over has it: nothing of this run is recorded.
    await forwarder.deliveries.done(delivery, 3)
    assert await job.status() is State.READY


async def test_a_job_that_kills_its_engines_worker_dies_in_the_end(
    app: App, forwarder: PaperForwarder, clock: ManualClock, store: WatchedStore
) -> None:
    """L23: the first two losses are nobody's, and those that follow are attempts."""
    job = await published(forwarder, length(forwarder, max_attempts=2), "abc")
    store.lose("renew")  # a dead process renews nothing
    for lost in range(1, 5):
        delivery = await begun(forwarder)
        assert delivery.claim.attempt == max(1, lost - 2)
        await turns()
        clock.advance("31s")
        await app.upkeep()
        if lost < 4:
            assert await job.status() is State.READY
            before = len(forwarder.messages)
            async with dispatching(forwarder):
                await until(lambda before=before: len(forwarder.messages) > before)  # type: ignore[misc]
    assert await job.status() is State.DEAD
    assert [each.outcome for each in await job.attempts()] == ["lost"] * 4
    store.restore()


async def test_the_heartbeat_outlives_an_error_that_nobody_expected(
    app: App,
    forwarder: PaperForwarder,
    clock: ManualClock,
    store: WatchedStore,
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = await published(forwarder, length(forwarder), "abc")
    delivery = await begun(forwarder)

    async def break_once() -> None:
        store.restore()
        raise RuntimeError("nobody thought of this")

    store.before["renew"] = break_once
    for _ in range(6):
        await heartbeat(store, clock)
    assert "leases could not be renewed: RuntimeError: nobody thought of this" in caplog.text
    await app.upkeep()
    assert await job.status() is State.RUNNING
    await forwarder.deliveries.done(delivery, 3)
    assert await job.result() == 3


async def test_a_job_that_is_cancelled_while_it_runs_is_asked_to_stop(
    forwarder: PaperForwarder, clock: ManualClock
) -> None:
    job = await published(forwarder, length(forwarder), "abc")
    delivery = await begun(forwarder)
    await job.cancel()
    await turns()
    clock.advance("11s")
    with delivery.entered():
        await until(lambda: context().cancelled)
        with pytest.raises(Cancel) as stopped:
            context().raise_if_cancelled()
    await forwarder.deliveries.failed(delivery, stopped.value)
    assert await job.status() is State.CANCELLED


async def test_a_retry_of_the_engines_own_gives_up_its_slot_and_is_bounded_by_the_engine(
    forwarder: PaperForwarder, clock: ManualClock
) -> None:
    """E2: more retries than `max_attempts`, each of them counted."""
    task = length(forwarder)
    job = await published(forwarder, task, "abc")
    for retries in range(7):
        assert forwarder.messages[-1].retries == retries
        await forwarder.deliveries.retried(await begun(forwarder), "busy", timedelta(minutes=5))
        record = await job.record()
        assert (record.state, record.attempt) == (State.SCHEDULED, retries + 1)
        clock.advance("6m")
        before = len(forwarder.messages)
        async with dispatching(forwarder):
            await until(lambda before=before: len(forwarder.messages) > before)  # type: ignore[misc]
    await forwarder.deliveries.done(await begun(forwarder), 3)
    assert await job.result() == 3


async def test_a_job_that_waits_for_a_retry_of_the_engines_own_can_be_cancelled(forwarder: PaperForwarder) -> None:
    job = await published(forwarder, length(forwarder), "abc")
    await forwarder.deliveries.retried(await begun(forwarder), "busy", timedelta(hours=1))
    await job.cancel()
    assert await job.status() is State.CANCELLED


async def test_what_an_engine_does_not_retry_is_the_end_of_its_job(forwarder: PaperForwarder) -> None:
    job = await published(forwarder, length(forwarder), "abc")
    assert await forwarder.deliveries.failed(await begun(forwarder), ValueError("no"), is_final=True) is State.DEAD
    assert await job.status() is State.DEAD


async def test_a_task_that_is_not_deployed_where_it_is_delivered_comes_again(
    app: App, forwarder: PaperForwarder
) -> None:
    job = await published(forwarder, length(forwarder), "abc")
    del app.registry._tasks["length"]
    assert await forwarder.deliveries.begin(forwarder.messages[0].token, ["as it was called"]) is None
    record = await job.record()
    assert (record.state, record.attempt) == (State.SCHEDULED, 0)
    assert "no task named 'length'" in str(record.error)


async def test_a_token_of_another_task_is_refused_and_its_job_waits_for_its_own_message(
    forwarder: PaperForwarder,
) -> None:
    job = await published(forwarder, length(forwarder), "abc")
    forwarder.task(abs, queue="emails", name="most")
    with pytest.raises(InvalidJob, match=rf"job {job.id} is one of 'length', .* a message for 'most'"):
        await forwarder.deliveries.begin(forwarder.messages[0].token, ["most"])
    assert await forwarder.deliver(forwarder.messages[0]) == 3


async def test_a_job_is_adopted_however_often_the_answer_is_lost(
    forwarder: PaperForwarder, store: WatchedStore
) -> None:
    job = await published(forwarder, length(forwarder, max_attempts=1), "abc")

    async def cut() -> None:
        if store.ended["adopt"] < 2:
            raise StoreUnavailable("the answer is lost")

    store.after["adopt"] = cut
    assert await forwarder.deliver(forwarder.messages[0]) == 3
    assert await job.status() is State.DONE


# L22
async def test_the_outcome_of_a_message_is_recorded_however_long_the_database_refuses_it(
    forwarder: PaperForwarder, store: WatchedStore
) -> None:
    job = await published(forwarder, length(forwarder, max_attempts=1), "abc")
    store.lose("settle")
    delivering = asyncio.ensure_future(forwarder.deliver(forwarder.messages[0]))
    await store.called("settle", 3)
    assert not delivering.done()
    store.restore()
    assert await delivering == 3
    assert await job.status() is State.DONE


async def test_whoever_is_given_a_message_while_the_database_is_away_waits_for_it(
    app: App, forwarder: PaperForwarder, store: WatchedStore
) -> None:
    job = await published(forwarder, length(forwarder), "abc")
    here = app._connection
    app._connection = None  # as in a process that has just begun
    store.lose("open")
    delivering = asyncio.ensure_future(forwarder.deliver(forwarder.messages[0]))
    await store.called("open", 3)
    assert not delivering.done()
    store.restore()
    assert await delivering == 3
    assert await job.status() is State.DONE
    assert here is not None


async def test_nothing_begins_under_a_lease_that_has_ended(
    forwarder: PaperForwarder, clock: ManualClock, store: WatchedStore
) -> None:
    job = await published(forwarder, length(forwarder), "abc")

    async def stand_still() -> None:
        clock.advance("31s")

    store.after["adopt"] = stand_still
    assert await forwarder.deliver(forwarder.messages[0]) is None
    record = await job.record()
    assert (record.state, record.attempt) == (State.READY, 0)
    assert "stood still" in str(record.error)


async def test_a_heartbeat_that_fails_once_goes_on(
    app: App, forwarder: PaperForwarder, clock: ManualClock, store: WatchedStore
) -> None:
    job = await published(forwarder, length(forwarder), "abc")
    await begun(forwarder)

    async def fail() -> None:
        raise RuntimeError("of the statement")

    store.before["renew"] = fail
    for _ in range(4):
        await heartbeat(store, clock)
        store.restore()
    await app.upkeep()
    assert await job.status() is State.RUNNING


async def test_a_token_of_others_is_refused_by_what_it_says() -> None:
    with pytest.raises(InvalidJob, match="'nonsense' is not the token of a forwarded job"):
        Token.parse("nonsense")


class OutOfTime(BaseException):
    """What a time limit of an engine's raises, wherever a thread is."""


def interrupt(thread: int) -> None:
    """As Dramatiq does it: it is raised when the thread comes back from what blocks it."""
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_long(thread), ctypes.py_object(OutOfTime)) == 1


async def test_a_job_whose_thread_is_interrupted_while_it_is_adopted_is_not_kept_for_ever(
    forwarder: PaperForwarder, store: WatchedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await published(forwarder, length(forwarder), "abc")
    thread: list[int] = []
    adopt = store.adopt

    async def adopting(*given: Any, **named: Any) -> Any:
        interrupt(thread[0])
        return await adopt(*given, **named)

    monkeypatch.setattr(store, "adopt", adopting, raising=False)

    def begin() -> None:
        thread.append(threading.get_ident())
        with pytest.raises(OutOfTime):
            forwarder.deliveries.begin_sync(forwarder.messages[0].token, ["length"])

    await asyncio.to_thread(begin)
    await reaches(job, State.SCHEDULED)
    assert "OutOfTime" in str((await job.record()).error)


@pytest.mark.parametrize("error", [OutOfTime, SystemExit], ids=["has failed too", "is lost"])
async def test_a_job_whose_thread_is_interrupted_or_stopped_before_it_is_adopted(
    app: App,
    forwarder: PaperForwarder,
    store: WatchedStore,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
) -> None:
    job = await published(forwarder, length(forwarder), "abc")
    loop, is_asked, may_go_on = asyncio.get_running_loop(), threading.Event(), asyncio.Event()

    async def hold_up() -> None:
        is_asked.set()
        await may_go_on.wait()

    def run_blocking(work: Coroutine[Any, Any, Any]) -> None:
        """As it ends when Celery's signal comes while it waits."""
        running = asyncio.run_coroutine_threadsafe(work, loop)
        is_asked.wait()
        running.cancel()
        raise error

    store.before["adopt"] = hold_up
    monkeypatch.setattr(app, "run_blocking", run_blocking)
    with pytest.raises(error):
        await asyncio.to_thread(forwarder.deliveries.begin_sync, forwarder.messages[0].token, ["length"])
    may_go_on.set()
    if error is OutOfTime:
        await reaches(job, State.SCHEDULED)
        assert "OutOfTime" in str((await job.record()).error)
        return
    await store.finished("adopt")

    async def has_come_back() -> bool:
        clock.advance("1m")  # nobody renews its lease
        await store.real.reap()
        return await job.status() is State.READY

    await until_found(has_come_back)


async def test_a_job_whose_task_is_cancelled_before_it_is_adopted_has_failed_too(
    forwarder: PaperForwarder, store: WatchedStore
) -> None:
    job = await published(forwarder, length(forwarder), "abc")
    is_asked, may_go_on = store.hold_up("adopt")
    beginning = asyncio.ensure_future(begun(forwarder))
    await is_asked.wait()
    beginning.cancel()
    await asyncio.wait({beginning})
    may_go_on.set()
    await reaches(job, State.SCHEDULED)
    assert "before it began" in str((await job.record()).error)


async def test_a_job_that_has_run_is_recorded_although_its_thread_is_interrupted_meanwhile(
    forwarder: PaperForwarder, store: WatchedStore
) -> None:
    job = await published(forwarder, length(forwarder), "abc")
    is_asked, may_go_on = store.hold_up("settle")
    ending = asyncio.ensure_future(
        forwarder.deliveries._to_its_end(forwarder.deliveries.done(await begun(forwarder), 3))
    )
    await is_asked.wait()
    ending.cancel()
    await turns()
    may_go_on.set()
    assert await job.result() == 3
