"""Dramatiq's own workers run what Fairlane admits: on a real RabbitMQ and a real Redis, in real processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import dramatiq
import pika
import pytest
import redis as redis_client
from dramatiq.brokers.stub import StubBroker

from fairlane import App, Concurrency, Job, State
from fairlane.errors import InvalidJob, JobCancelled, JobFailed, JobNotFound
from fairlane.forward.dramatiq import DramatiqForwarder
from tests.forward.brokers import ThrowawayBroker
from tests.forward.members import BIN, Place, at_work
from tests.forward.shop_dramatiq import QUEUE, Shop, make
from tests.waiting import until_blocking

MODULE = "tests.forward.shop_dramatiq"
WATCHDOG = "90s"


@dataclass
class Running:
    """A shop whose workers and dispatcher run."""

    shop: Shop
    server: ThrowawayBroker
    folder: Path

    def enqueue(self, task: str, *args: Any) -> Job[Any]:
        return self.shop.tasks[task].enqueue_sync(*args)

    def run(self, task: str, *args: Any) -> Any:
        return self.enqueue(task, *args).result_sync(WATCHDOG)

    def has_job(self, message_id: str) -> bool:
        try:
            self.shop.app.job(message_id).status_sync()
        except JobNotFound:
            return False
        return True

    def record(self, job: Job[Any]) -> Any:
        return self.shop.app.run_blocking(job.record())

    def set_aside(self) -> int:
        """How many messages Dramatiq has dead-lettered."""
        if self.server.name == "redis":
            with redis_client.Redis.from_url(self.server.url) as client:
                return int(client.zcard(f"dramatiq:{QUEUE}.XQ"))
        with pika.BlockingConnection(pika.URLParameters(self.server.url)) as connection:
            try:
                declared = connection.channel().queue_declare(f"{QUEUE}.XQ", passive=True)
            except pika.exceptions.ChannelClosedByBroker:
                return 0  # its worker has only just started, and declared nothing yet
            return int(declared.method.message_count)

    def has_set_aside(self, count: int) -> None:
        """Return once so many are. A job is dead before its message is there."""
        until_blocking(lambda: self.set_aside() >= count)

    def runs_of(self, name: str) -> int:
        file = self.folder / name
        return file.read_text().count("ran") if file.exists() else 0


@pytest.fixture(scope="module")
def engine(place: Place) -> Iterator[Running]:
    worker = [str(BIN / "dramatiq"), MODULE + ":broker", "--processes", "1", "--threads", "4"]
    shop = make(place.url, place.broker.url, place.folder)
    with at_work(MODULE, worker, place.environment, place.folder, "--lease", "5s"):
        yield Running(shop, place.broker, place.folder)
    shop.app.close_sync()
    shop.broker.close()
    if place.broker.name == "redis":
        shop.broker.client.close()  # type: ignore[attr-defined]


# In one process: what is started is started once.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("brokers")]


def test_a_job_runs_in_dramatiq_and_gives_its_result(engine: Running) -> None:
    job = engine.enqueue("add", 2, 3)
    assert job.result_sync(WATCHDOG) == 5
    record = engine.record(job)
    assert (record.state, record.attempt) == (State.DONE, 1)


def test_an_async_actor_knows_its_job(engine: Running) -> None:
    job = engine.enqueue("added_async", 2, 3)
    assert job.result_sync(WATCHDOG) == [5, str(job.id)]


def test_a_failure_comes_again_under_the_policy_and_dramatiq_neither_retries_nor_sets_it_aside(engine: Running) -> None:
    before = engine.set_aside()
    job = engine.enqueue("fails_twice")
    assert job.result_sync(WATCHDOG) == 3
    attempts = engine.shop.app.run_blocking(job.attempts())
    assert ["the mail server is away" in (each.error or "") for each in attempts] == [True, True, False]
    assert engine.set_aside() == before


def test_a_job_dies_after_its_attempts_and_dramatiq_sets_nothing_aside(engine: Running) -> None:
    before = engine.set_aside()
    job = engine.enqueue("always_fails")
    with pytest.raises(JobFailed, match="after 2 of 2 attempts: ConnectionError: the mail server is away"):
        job.result_sync(WATCHDOG)
    assert engine.set_aside() == before


def test_what_an_actor_throws_on_purpose_is_not_tried_again(engine: Running) -> None:
    with pytest.raises(JobFailed, match="after 1 of 5 attempts: KeyError"):
        engine.run("throws")


def test_a_snoozed_job_keeps_its_attempt(engine: Running) -> None:
    assert engine.run("snoozes_once") == "attempt 1"


def test_a_task_can_cancel_its_job(engine: Running) -> None:
    with pytest.raises(JobCancelled, match="the order was withdrawn"):
        engine.run("cancels")


def test_a_job_whose_message_dramatiq_sets_aside_for_its_age_is_dead(engine: Running) -> None:
    before = engine.set_aside()
    job = engine.enqueue("too_old")
    with pytest.raises(JobFailed, match="set its message aside"):
        job.result_sync(WATCHDOG)
    engine.has_set_aside(before + 1)
    assert engine.runs_of("too_old") == 0


def test_a_message_that_is_delivered_twice_runs_once(engine: Running) -> None:
    before = engine.runs_of("sends_itself_again")
    engine.run("sends_itself_again")
    # Its double is behind it in the queue, and these are behind that one.
    for _ in range(8):
        engine.run("add", 1)
    assert engine.runs_of("sends_itself_again") == before + 1


def test_retries_of_dramatiq_are_counted_by_dramatiq(engine: Running) -> None:
    job = engine.enqueue("retried_by_dramatiq")
    assert job.result_sync(WATCHDOG) == [2, 3]
    attempts = engine.shop.app.run_blocking(job.attempts())
    assert [each.outcome for each in attempts] == ["retry", "retry", "done"], "the slot was given up meanwhile"


def test_an_actor_is_retried_as_often_as_it_says(engine: Running) -> None:
    """E2: `max_retries=3` is three retries, so four runs."""
    before = engine.runs_of("fails_at_its_own_count")
    message = engine.shop.actors["fails_at_its_own_count"].send()
    with pytest.raises(JobFailed, match=r"after 4 of 4 attempts: .*the mail server is away"):
        engine.shop.app.job(message.message_id).result_sync(WATCHDOG)
    assert engine.runs_of("fails_at_its_own_count") == before + 4


def test_pipelines_and_groups_go_through_fairlane(engine: Running) -> None:
    """E2: each message of theirs is admitted by itself."""
    routed, broker = engine.shop.actors["routed"], engine.shop.broker
    piped = dramatiq.pipeline([routed.message(6, 7), routed.message(2)], broker=broker)
    piped.run()  # type: ignore[no-untyped-call]
    *_, last = piped.messages
    grouped = dramatiq.group([routed.message(1, n) for n in range(3)], broker=broker)  # type: ignore[no-untyped-call]
    grouped.run()  # type: ignore[no-untyped-call]
    until_blocking(lambda: engine.has_job(last.message_id))
    assert engine.shop.app.job(last.message_id).result_sync(WATCHDOG) == 84
    results = [engine.shop.app.job(each.message_id).result_sync(WATCHDOG) for each in grouped.children]
    assert results == [0, 1, 2]


def test_a_job_that_dramatiq_gives_up_is_dead(engine: Running) -> None:
    before, set_aside = engine.runs_of("given_up_by_dramatiq"), engine.set_aside()
    with pytest.raises(JobFailed, match=r"after 3 of 3 attempts: .*the mail server is away"):
        engine.run("given_up_by_dramatiq")
    assert engine.runs_of("given_up_by_dramatiq") == before + 3
    engine.has_set_aside(set_aside + 1)


def test_a_routed_actor_sends_through_fairlane(engine: Running) -> None:
    message = engine.shop.actors["routed"].send(6, 7)
    job = engine.shop.app.job(message.message_id)
    assert job.result_sync(WATCHDOG) == 42
    assert message.queue_name == QUEUE


def test_an_actor_that_fits_a_pattern_sends_through_fairlane_and_adopts_its_job(engine: Running) -> None:
    message = engine.shop.actors["by_a_pattern"].send(6, 7)
    assert engine.shop.app.job(message.message_id).result_sync(WATCHDOG) == [42, message.message_id]


def test_options_of_a_call_and_headers_of_a_job_travel_to_dramatiq(engine: Running) -> None:
    message = engine.shop.actors["reads_options"].send_with_options(
        kwargs={"names": ["shelf", "time_limit"]}, shelf=4, time_limit=60_000
    )
    assert engine.shop.app.job(message.message_id).result_sync(WATCHDOG) == [4, 60_000]


def test_what_is_sent_past_fairlane_runs_as_ever(engine: Running) -> None:
    before = engine.runs_of("sent_past_fairlane")
    engine.shop.actors["sent_past_fairlane"].send()
    until_blocking(lambda: engine.runs_of("sent_past_fairlane") > before)
    assert engine.run("add", 1) == 2


# Without processes.


@pytest.fixture
def app(tmp_path: Path) -> Iterator[App]:
    app = App(f"sqlite:///{tmp_path}/shop.db")
    app.queue(QUEUE, limits=[Concurrency(8)])
    yield app
    app.close_sync()


@pytest.fixture
def routed(app: App) -> dramatiq.Actor[..., Any]:
    broker = StubBroker()
    forwarder = DramatiqForwarder(app, broker)

    @forwarder.route(queue=QUEUE, max_attempts=5)
    @dramatiq.actor(broker=broker)
    def deliver(number: int) -> int:
        return number

    actor: dramatiq.Actor[..., Any] = deliver
    return actor


def test_options_that_fairlane_has_are_mapped(app: App, routed: dramatiq.Actor[..., Any]) -> None:
    message = routed.send_with_options(args=(1,), delay=timedelta(hours=1), broker_priority=7)
    record = app.run_blocking(app.job(UUID(message.message_id)).record())
    assert (record.state, record.priority) == (State.SCHEDULED, 7)
    assert routed.broker.queues["default"].empty(), "it went past Fairlane"


def test_an_option_of_retries_is_refused_where_the_policy_decides(routed: dramatiq.Actor[..., Any]) -> None:
    with pytest.raises(InvalidJob, match="max_retries would do nothing; give max_attempts and backoff"):
        routed.send_with_options(args=(1,), max_retries=3)


def test_an_actor_is_called_as_ever(routed: dramatiq.Actor[..., Any]) -> None:
    assert routed(5) == 5
