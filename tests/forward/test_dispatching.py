"""The dispatcher: claims under the policy, publishes, and holds on until somebody has begun."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from fairlane import App, Concurrency, Rate, State
from fairlane.clock import SECOND, ManualClock
from fairlane.errors import ConfigurationError
from fairlane.forward import Forwarder, Message, Unpublishable
from fairlane.task import Task
from tests.forward.paper import PaperForwarder, dispatching, heartbeat
from tests.waiting import until
from tests.worker.harness import WatchedStore, reaches, turns

LEASE = "30s"


def double(number: int) -> int:
    return 2 * number


@pytest.fixture
def task(forwarder: PaperForwarder) -> Task[..., Any]:
    return forwarder.task(double, queue="emails")


async def test_no_more_is_published_than_the_queue_lets_the_engine_hold(
    forwarder: PaperForwarder, task: Task[..., Any]
) -> None:
    jobs = [await task.enqueue(n) for n in range(5)]
    async with dispatching(forwarder):
        await until(lambda: len(forwarder.messages) == 2)
        await turns(200)
        assert len(forwarder.messages) == 2
        # An end makes room for the next, with nobody polling.
        assert await forwarder.deliver(forwarder.messages[0]) == 0
        await until(lambda: len(forwarder.messages) == 3)
        for message in forwarder.messages[1:]:
            await forwarder.deliver(message)
        await until(lambda: len(forwarder.messages) == 5)
        for message in forwarder.messages[3:]:
            await forwarder.deliver(message)
        assert [await job.result() for job in jobs] == [0, 2, 4, 6, 8]


async def test_a_message_carries_the_job_and_its_arguments_in_plain_form(
    app: App, forwarder: PaperForwarder, task: Task[..., Any]
) -> None:
    job = await task.using(priority=3).enqueue(number=4)
    async with dispatching(forwarder):
        await until(lambda: forwarder.messages)
    (message,) = forwarder.messages
    assert (message.id, message.queue, message.target) == (job.id, None, double)
    assert (list(message.args), dict(message.kwargs), message.priority) == ([], {"number": 4}, 3)
    assert message.carried["fairlane"] == str(message.token)


async def test_headers_travel_with_the_message_each_time_that_it_is_published(
    forwarder: PaperForwarder, task: Task[..., Any]
) -> None:
    await task.using(context={"plan": "gold", "headers": {"locale": "de", "fairlane": "forged"}}).enqueue(4)
    await task.enqueue(5)
    async with dispatching(forwarder) as dispatcher:
        await until(lambda: len(forwarder.messages) == 2)
        dispatcher.publishing.publish_again_soon()
        await dispatcher.publishing.look_after(dispatcher._outage)
        assert len(forwarder.messages) == 4
    for message in forwarder.messages:
        locale = {"locale": "de"} if message.args == [4] else {}
        assert message.carried == {**locale, "fairlane": str(message.token)}


async def test_a_queue_without_a_bound_of_its_own_is_refused(app: App, forwarder: PaperForwarder) -> None:
    app.queue("open", limits=Concurrency(5, by="account"))
    forwarder.task(double, queue="open", keys=["account"])
    with pytest.raises(ConfigurationError, match=r"'open' has no limit .* Concurrency\(n\)"):
        async with dispatching(forwarder):
            pass
    forwarder.unbounded = True
    async with dispatching(forwarder):
        pass


async def test_a_queue_with_tasks_of_others_is_refused(
    app: App, forwarder: PaperForwarder, task: Task[..., Any]
) -> None:
    @app.task(queue="emails")
    def other() -> None: ...

    with pytest.raises(ConfigurationError, match=r"does not forward .*other"):
        async with dispatching(forwarder):
            pass


async def test_a_worker_leaves_forwarded_queues_alone_unless_it_is_told(app: App, task: Task[..., Any]) -> None:
    app.queue("own")
    assert [share.name for share in (await app.worker()).options.shares] == ["own"]


# E04
async def test_what_the_broker_refuses_waits_in_its_place_and_was_never_started(
    app: App, forwarder: PaperForwarder, clock: ManualClock, store: WatchedStore
) -> None:
    app.queue("rated", limits=[Concurrency(10), Rate(1, per="1d")])
    task = forwarder.task(double, queue="rated")
    forwarder.refusal = ConnectionRefusedError("nobody there")
    job, behind = await task.enqueue(1), await task.enqueue(2)
    async with dispatching(forwarder) as dispatcher:
        await store.finished("settle")
        record = await job.record()
        assert (record.state, record.attempt) == (State.READY, 0)
        assert record.error == "broker refused: ConnectionRefusedError: nobody there"
        assert "nobody there" in dispatcher.health().warnings["publishing"]
        asked = forwarder.asked
        await turns(200)
        assert forwarder.asked == asked  # left alone until a pause is over
        forwarder.refusal = None
        while not forwarder.messages:
            clock.advance("1s")
            await turns()
        # In its old place, and its token of the rate was given back.
        assert [message.id for message in forwarder.messages] == [job.id]
        await turns(50)
        assert dispatcher.health().warnings == {}
        assert await behind.status() is State.READY


# E04
async def test_a_broker_that_stays_away_is_asked_less_and_less_often(
    forwarder: PaperForwarder, task: Task[..., Any], clock: ManualClock
) -> None:
    forwarder.refusal = ConnectionRefusedError("nobody there")
    await task.enqueue(1)
    async with dispatching(forwarder):
        await until(lambda: forwarder.asked)
        for _ in range(60):
            await turns()
            clock.advance("5s")
            await turns()
        assert 8 < forwarder.asked < 30


async def test_a_message_that_can_never_be_published_ends_its_job(
    forwarder: PaperForwarder, task: Task[..., Any]
) -> None:
    forwarder.refusal = Unpublishable("too large for the broker")
    job = await task.enqueue(1)
    async with dispatching(forwarder):
        await reaches(job, State.DEAD)
    assert "too large for the broker" in str((await job.record()).error)


async def test_a_message_that_is_not_begun_is_published_again_under_the_same_token(
    forwarder: PaperForwarder, task: Task[..., Any], clock: ManualClock, store: WatchedStore
) -> None:
    job = await task.enqueue(21)
    async with dispatching(forwarder) as dispatcher:
        await until(lambda: forwarder.messages)
        began = clock.now()
        while len(forwarder.messages) < 2:
            await heartbeat(store, clock)
            await dispatcher.publishing.look_after(dispatcher._outage)
        assert clock.now() - began >= 225 * SECOND  # five minutes, a quarter less or more by chance
        first, again = forwarder.messages
        assert first == again
        # Whichever comes first runs; the other finds its token stale.
        assert await forwarder.deliver(again) == 42
        assert await forwarder.deliver(first) is None
        assert await job.result() == 42


async def test_a_job_whose_headers_cannot_be_read_holds_no_slot(
    forwarder: PaperForwarder, task: Task[..., Any], store: WatchedStore
) -> None:
    async def fail() -> None:
        raise RuntimeError("of the statement")

    store.before["contexts"] = fail
    job = await task.enqueue(21)
    async with dispatching(forwarder) as dispatcher:
        await store.finished("settle", 2)  # at once, then later
        assert not dispatcher.publishing.running
        record = await job.record()
        assert (record.state, record.attempt) == (State.SCHEDULED, 0)
        assert "RuntimeError: of the statement" in str(record.error)


async def test_a_broker_that_does_not_answer_has_refused(
    app: App, clock: ManualClock, store: WatchedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()

    class Blocking(PaperForwarder):
        publish = Forwarder.publish

        def publish_blocking(self, message: Message) -> None:
            answers.wait()

    monkeypatch.setattr("fairlane.forward.forwarder.ANSWER_WITHIN", 0.01)
    blocking = Blocking(app)
    job = await blocking.task(double, queue="emails").enqueue(21)
    async with dispatching(blocking) as dispatcher:
        await store.finished("settle")
        assert "has not answered for 0.01 s" in dispatcher.health().warnings["publishing"]
        record = await job.record()
        assert (record.state, record.attempt) == (State.READY, 0)
    assert dispatcher.left_running == 1  # its thread: the process must not wait for it
    answers.set()
    await blocking.close()


async def test_a_worker_that_is_faster_than_the_brokers_answer_is_no_loss(
    forwarder: PaperForwarder, task: Task[..., Any], clock: ManualClock, store: WatchedStore,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    publish = forwarder.publish

    async def publishing(message: Message) -> None:
        await publish(message)
        assert await forwarder.deliver(message) == 42
        await heartbeat(store, clock)
        await turns()

    monkeypatch.setattr(forwarder, "publish", publishing)
    job = await task.enqueue(21)
    async with dispatching(forwarder, lease=LEASE) as dispatcher:
        assert await job.result() == 42
        await until(lambda: not dispatcher.publishing.running)
        assert dispatcher.publishing._published == {}
    assert "ClaimLost" not in caplog.text


async def test_what_is_begun_is_published_no_more(forwarder: PaperForwarder, task: Task[..., Any]) -> None:
    await task.enqueue(21)
    async with dispatching(forwarder) as dispatcher:
        await until(lambda: forwarder.messages)
        assert await forwarder.deliveries.begin(forwarder.messages[0].token, ["double"]) is not None
        dispatcher.publishing.publish_again_soon()
        await dispatcher.publishing.look_after(dispatcher._outage)
        assert len(forwarder.messages) == 1
        assert dispatcher.publishing.held() == []


async def test_a_published_job_is_kept_for_as_long_as_its_message_waits(
    forwarder: PaperForwarder, task: Task[..., Any], clock: ManualClock, store: WatchedStore
) -> None:
    job = await task.enqueue(21)
    async with dispatching(forwarder):
        await until(lambda: forwarder.messages)
        for _ in range(12):
            await heartbeat(store, clock)
        assert await forwarder.deliver(forwarder.messages[0]) == 42
        assert (await job.record()).attempt == 1


async def test_a_job_that_is_cancelled_at_the_broker_never_runs(
    forwarder: PaperForwarder, task: Task[..., Any]
) -> None:
    job = await task.enqueue(21)
    async with dispatching(forwarder):
        await until(lambda: forwarder.messages)
        await job.cancel()
        await reaches(job, State.CANCELLED)
        assert await forwarder.deliver(forwarder.messages[0]) is None


async def test_a_dispatcher_that_stops_leaves_what_it_published_to_its_messages(
    app: App, forwarder: PaperForwarder, task: Task[..., Any], clock: ManualClock
) -> None:
    job = await task.enqueue(21)
    async with dispatching(forwarder):
        await until(lambda: forwarder.messages)
    clock.advance("2m")
    await app.upkeep()
    assert await job.status() is State.RUNNING
    assert await forwarder.deliver(forwarder.messages[0]) == 42


async def test_a_dispatcher_that_dies_after_publishing_costs_nothing_if_the_message_comes_in_time(
    app: App, forwarder: PaperForwarder, task: Task[..., Any], clock: ManualClock, store: WatchedStore
) -> None:
    in_time, too_late = await task.enqueue(1), await task.enqueue(2)
    async with dispatching(forwarder) as dispatcher:
        await until(lambda: len(forwarder.messages) == 2)
        store.lose("renew")
        dispatcher.publishing._published.clear()  # and that was the last that was heard of it
    store.restore()
    clock.advance("20s")
    assert await forwarder.deliver(forwarder.messages[0]) == 2
    clock.advance("20s")
    await app.upkeep()
    assert await in_time.result() == 2
    record = await too_late.record()
    assert (record.state, record.attempt) == (State.READY, 0)
    assert await forwarder.deliver(forwarder.messages[1]) is None


async def test_others_get_past_a_message_that_the_broker_never_takes(
    app: App, forwarder: PaperForwarder, clock: ManualClock
) -> None:
    app.queue("single", limits=Concurrency(1))
    task = forwarder.task(double, queue="single")
    forwarder.never_taken = [1]
    refused, behind = await task.enqueue(1), await task.enqueue(2)
    async with dispatching(forwarder):
        while not forwarder.messages:
            await turns()
            clock.advance("500ms")
            await turns()
        assert [message.id for message in forwarder.messages] == [behind.id]
        record = await refused.record()
        assert record.state in (State.SCHEDULED, State.READY)  # it may be due again by now
        assert (record.attempt, record.error) == (0, "broker refused: ValueError: too large")


async def test_a_broker_that_refuses_now_and_then_does_not_drown_in_copies(
    forwarder: PaperForwarder, task: Task[..., Any], clock: ManualClock
) -> None:
    await task.enqueue(21)
    async with dispatching(forwarder) as dispatcher:
        await until(lambda: forwarder.messages)
        for _ in range(200):
            dispatcher.publishing.publish_again_soon()
            await dispatcher.publishing.look_after(dispatcher._outage)
            clock.advance("500ms")
            await turns()
        # The first at once, and then after 4 s, 8 s, 16 s …
        assert 2 < len(forwarder.messages) < 10
