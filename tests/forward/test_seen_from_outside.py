"""What operators are told of a dispatcher: that its broker refuses, that nobody begins what it published."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import dramatiq
import pytest
from dramatiq.brokers.stub import StubBroker

from fairlane import App, Job, State
from fairlane.clock import ManualClock
from fairlane.errors import ConfigurationError
from fairlane.forward.dispatcher import QUIET, UNBEGUN, Dispatcher
from fairlane.forward.dramatiq import DramatiqForwarder
from fairlane.operations.diagnosis import Level
from fairlane.operations.views import QueueStatus
from fairlane.policy import Reason
from fairlane.store import records
from fairlane.store.protocol import Store
from fairlane.store.stats_values import PUBLISHING, unbegun_in
from tests.forward.paper import PaperForwarder, dispatching
from tests.store.harness import operations_on
from tests.waiting import until
from tests.worker.harness import reaches


def send(number: int) -> str:
    return f"sent {number}"


async def reported(app: App, dispatcher: Dispatcher) -> Store:
    store = await app.opened()
    await store.run(records.report(dispatcher.identity.id, dispatcher.report()))
    return store


async def refused(app: App, forwarder: PaperForwarder, dispatcher: Dispatcher) -> tuple[Store, Job[Any]]:
    forwarder.refusal = ConnectionError("nobody is there")
    job = await forwarder.task_of(send).enqueue(1)
    await until(lambda: PUBLISHING in dispatcher.warnings.now)
    return await reported(app, dispatcher), job


async def test_a_broker_that_refuses_is_told_by_everybody_who_is_asked(app: App, forwarder: PaperForwarder) -> None:
    forwarder.task(send, queue="emails")
    async with dispatching(forwarder) as dispatcher:
        store, job = await refused(app, forwarder, dispatcher)
        await reaches(job, State.READY)
        view = (await app.operations.overview()).queues[0]
        assert view.status is QueueStatus.STOPPED
        assert "the broker refuses" in view.words
        assert "nobody is there" in view.words
        (hint,) = (await app.operations.overview()).hints
        assert "check the broker" in hint.knob
        (worker,) = (await app.operations.workers.list()).workers
        assert (worker.is_dispatcher, worker.state) == (True, "troubled")
        (finding,) = [each for each in await app.operations.diagnose() if each.check == "broker refuses"]
        assert finding.level is Level.FAULT
        assert "nobody is there" in finding.message
        for told in (await job.explain(), await operations_on(store).queues.explain("emails")):
            assert told.reasons[0] is Reason.BROKER
            assert Reason.NO_WORKER not in told.reasons
            assert "nobody is there" in told.holds[0].words
            assert told.earliest is None


async def test_a_broker_that_is_back_is_no_trouble_although_there_is_nothing_to_publish(
    app: App, forwarder: PaperForwarder, clock: ManualClock
) -> None:
    forwarder.task(send, queue="emails")
    async with dispatching(forwarder) as dispatcher:
        _, job = await refused(app, forwarder, dispatcher)
        await job.cancel()
        forwarder.refusal = None
        clock.advance("1s")
        await until(lambda: dispatcher.publishing._is_pausing is None)
        await dispatcher.publishing.look_after(dispatcher._outage)
        assert PUBLISHING in dispatcher.warnings.now  # it can be reached, and may refuse messages all the same
        dispatcher.publishing._refused_at -= QUIET
        await dispatcher.publishing.look_after(dispatcher._outage)
        assert PUBLISHING not in dispatcher.warnings.now


async def test_a_published_job_that_nobody_begins_says_so(app: App, forwarder: PaperForwarder) -> None:
    task = forwarder.task(send, queue="emails")
    async with dispatching(forwarder) as dispatcher:
        job = await task.enqueue(1)
        await until(lambda: len(forwarder.messages) == 1)
        told = await job.explain()
        assert told.reasons == [Reason.PUBLISHED]
        assert "no worker of the engine has begun it" in told.holds[0].words
        (published,) = dispatcher.publishing._published.values()
        await dispatcher.publishing.look_after(dispatcher._outage)
        assert unbegun_in("emails") not in dispatcher.warnings.now
        published.first_at -= UNBEGUN
        await dispatcher.publishing.look_after(dispatcher._outage)
        assert dispatcher.warnings.now[unbegun_in("emails")].startswith("1 job is at the broker, the oldest for 60")
        await reported(app, dispatcher)
        (finding,) = [each for each in await app.operations.diagnose() if each.check == "unbegun jobs"]
        assert finding.level is Level.WARNING
        assert any("1 job is at the broker" in hint.words for hint in (await app.operations.overview()).hints)
        assert await forwarder.deliver(forwarder.messages[0]) == "sent 1"
        await dispatcher.publishing.look_after(dispatcher._outage)
        assert unbegun_in("emails") not in dispatcher.warnings.now


async def test_a_published_job_that_later_ones_overtake_says_so(app: App, forwarder: PaperForwarder) -> None:
    """The engine has queues of its own: one that nobody consumes is not hidden by the others."""
    task, other = forwarder.task(send, queue="emails"), forwarder.task(send, queue="emails", name="other")
    async with dispatching(forwarder) as dispatcher:
        publishing = dispatcher.publishing
        left = await other.enqueue(1)
        await until(lambda: len(forwarder.messages) == 1)
        publishing._published[left.id].first_at -= UNBEGUN
        await task.enqueue(2)
        await until(lambda: len(forwarder.messages) == 2)
        assert await forwarder.deliver(forwarder.messages[1]) == "sent 2"
        await publishing.look_after(dispatcher._outage)
        words = dispatcher.warnings.now[unbegun_in("emails")]
        assert words.startswith("1 job is at the broker, the oldest for 60")
        assert "later ones have begun" in words
        assert "(other)" in words
        await reported(app, dispatcher)
        assert [each.level for each in await app.operations.diagnose() if each.check == "unbegun jobs"] == [
            Level.WARNING
        ]
        assert await forwarder.deliver(forwarder.messages[0]) == "sent 1"
        await publishing.look_after(dispatcher._outage)
        assert unbegun_in("emails") not in dispatcher.warnings.now


@pytest.mark.parametrize("idle_for", [0, UNBEGUN], ids=["others begin", "nothing begins any more"])
async def test_a_published_job_that_later_ones_overtake_is_published_once_more(
    forwarder: PaperForwarder, idle_for: int
) -> None:
    """Redis forgets what it was handing out when it died, and its clients reconnect without a word."""
    task = forwarder.task(send, queue="emails")
    async with dispatching(forwarder) as dispatcher:
        publishing = dispatcher.publishing
        lost = await task.enqueue(1)
        await until(lambda: len(forwarder.messages) == 1)
        await task.enqueue(2)
        await until(lambda: len(forwarder.messages) == 2)
        assert await forwarder.deliver(forwarder.messages[1]) == "sent 2"
        await publishing.look_after(dispatcher._outage)
        publishing._published[lost.id].first_at -= UNBEGUN
        publishing._begun_at["emails"] -= idle_for
        for _ in range(3):
            await publishing.look_after(dispatcher._outage)
        assert [message.token for message in forwarder.messages[2:]] == [forwarder.messages[0].token]


async def test_where_nobody_serves_a_forwarded_queue_a_dispatcher_is_to_be_started(
    app: App, forwarder: PaperForwarder
) -> None:
    job = await forwarder.task(send, queue="emails").enqueue(1)
    command = "fairlane forward module:forwarder --queues emails"
    assert command in (await job.explain()).holds[0].words
    assert command in (await app.operations.queues.explain("emails")).holds[0].words
    assert [hint.knob for hint in (await app.operations.overview()).hints] == [command]
    (finding,) = [each for each in await app.operations.diagnose() if each.check == "no dispatcher"]
    assert command in finding.remedy


async def test_whoever_knows_no_app_is_not_told_to_start_a_worker_alone(app: App, forwarder: PaperForwarder) -> None:
    """E1: `status` and `doctor` with a URL advised the worker that the guide of Celery forbids."""
    job = await forwarder.task(send, queue="emails").enqueue(1)
    outside = operations_on(await app.opened(), forwarded=None)
    told = [
        (await outside.jobs.explain(job.id)).holds[0].words,
        (await outside.queues.explain("emails")).holds[0].words,
        *(hint.knob for hint in (await outside.overview()).hints),
        *(each.remedy for each in await outside.diagnose() if each.check == "no worker"),
    ]
    assert len(told) == 4
    for each in told:
        assert "fairlane worker module:app --queues emails if Fairlane's own workers run its tasks" in each
        assert "fairlane forward module:forwarder --queues emails if Celery, Dramatiq or Taskiq does" in each


async def test_jobs_of_an_engines_own_calls_tell_whoever_knows_no_app_what_to_start(app: App) -> None:
    """E1: what a routed call brings along is in the database, and says who runs it."""
    broker = StubBroker()
    actor = dramatiq.actor(broker=broker, actor_name="send")(send)
    forwarder = DramatiqForwarder(app, broker, routes={"*": "emails"})
    job = await forwarder.enqueue_routed(forwarder.task_of(actor), [1], {}, id=str(uuid4()), own="{}", using={})
    outside = operations_on(await app.opened(), forwarded=None)
    command = "fairlane forward module:forwarder --queues emails"
    (view,) = (found := await outside.overview()).queues
    assert view.words.startswith("no dispatcher serves the queue")
    assert [hint.knob for hint in found.hints] == [command]
    (finding,) = [each for each in await outside.diagnose() if each.check == "no dispatcher"]
    of_job, of_queue = await outside.jobs.explain(job.id), await outside.queues.explain("emails")
    assert finding.remedy == command
    for each in (of_job.holds[0].words, of_queue.holds[0].words):
        assert each.endswith(f"start one: {command}")


async def test_the_task_of_an_engines_task_can_be_asked_for(forwarder: PaperForwarder) -> None:
    task = forwarder.task(send, queue="emails")
    assert forwarder.task_of(send) is task
    with pytest.raises(ConfigurationError, match="'print' is not forwarded"):
        forwarder.task_of(print)
