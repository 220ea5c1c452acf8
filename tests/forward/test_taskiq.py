"""Taskiq's own workers run what Fairlane admits: on a real Redis and a real RabbitMQ, in real processes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from taskiq import AsyncTaskiqDecoratedTask, InMemoryBroker

from fairlane import App, Concurrency, Job, State
from fairlane.errors import InvalidJob, JobCancelled, JobFailed
from fairlane.forward.taskiq import TaskiqForwarder
from fairlane.job import ENGINES_MESSAGE, Claim, stored_in
from fairlane.store import records
from fairlane.store.protocol import WorkerIdentity
from tests.forward.members import BIN, Place, at_work
from tests.forward.shop_taskiq import QUEUE, Shop, make
from tests.waiting import until

MODULE = "tests.forward.shop_taskiq"
WATCHDOG = "90s"


@dataclass
class Running:
    """A shop whose workers and dispatcher run."""

    shop: Shop
    folder: Path

    async def enqueue(self, task: str, *args: Any) -> Job[Any]:
        return await self.shop.tasks[task].enqueue(*args)

    async def run(self, task: str, *args: Any) -> Any:
        return await (await self.enqueue(task, *args)).result(WATCHDOG)

    def runs_of(self, name: str) -> int:
        file = self.folder / name
        return file.read_text().count("ran") if file.exists() else 0


@pytest.fixture(scope="module")
def engine(place: Place) -> Iterator[Place]:
    worker = [str(BIN / "taskiq"), "worker", f"{MODULE}:broker", "--workers", "1"]
    with at_work(MODULE, worker, place.environment, place.folder, "--lease", "5s"):
        yield place


@pytest.fixture
async def shop(engine: Place) -> AsyncIterator[Running]:
    made = make(engine.url, engine.broker.url, engine.folder)
    async with made.app:
        yield Running(made, engine.folder)
    await made.forwarder.close()


# In one process: what is started is started once.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("brokers")]


async def test_a_job_runs_in_taskiq_and_gives_its_result(shop: Running) -> None:
    job = await shop.enqueue("add", 2, 3)
    assert await job.result(WATCHDOG) == 5
    record = await job.record()
    assert (record.state, record.attempt) == (State.DONE, 1)


async def test_a_function_that_blocks_runs_in_a_thread_and_knows_its_job(shop: Running) -> None:
    job = await shop.enqueue("added_in_a_thread", 2, 3)
    assert await job.result(WATCHDOG) == [5, str(job.id)]


async def test_a_dependency_of_taskiq_is_given_as_ever(shop: Running) -> None:
    job = await shop.enqueue("depends", 7)
    assert await job.result(WATCHDOG) == [7, str(job.id)]


async def test_a_failure_comes_again_under_the_policy_and_taskiq_does_not_retry(shop: Running) -> None:
    job = await shop.enqueue("fails_twice")
    assert await job.result(WATCHDOG) == 3
    errors = [each.error or "" for each in await job.attempts()]
    assert ["the mail server is away" in error for error in errors] == [True, True, False]


async def test_a_job_dies_after_its_attempts(shop: Running) -> None:
    with pytest.raises(JobFailed, match="after 2 of 2 attempts: ConnectionError: the mail server is away"):
        await shop.run("always_fails")


async def test_a_snoozed_job_keeps_its_attempt(shop: Running) -> None:
    assert await shop.run("snoozes_once") == "attempt 1"


async def test_a_task_can_cancel_its_job(shop: Running) -> None:
    with pytest.raises(JobCancelled, match="the order was withdrawn"):
        await shop.run("cancels")


async def test_a_job_that_is_cancelled_while_it_runs_is_stopped(shop: Running) -> None:
    before = shop.runs_of("never_ends")
    job = await shop.enqueue("never_ends")
    while shop.runs_of("never_ends") == before:
        await shop.run("add", 1)
    await job.cancel()
    with pytest.raises(JobCancelled, match="cancelled while it ran"):
        await job.result(WATCHDOG)
    assert await shop.run("add", 1) == 2, "the worker goes on"


async def test_a_time_limit_of_taskiq_is_a_failure(shop: Running) -> None:
    with pytest.raises(JobFailed, match=r"ran longer than its label timeout=0\.01|broke it off before it began"):
        await shop.run("is_too_slow")


async def test_a_message_that_is_delivered_twice_runs_once(shop: Running) -> None:
    before = shop.runs_of("sends_itself_again")
    await shop.run("sends_itself_again")
    # Its double is behind it in the queue, and these are behind that one.
    for _ in range(8):
        await shop.run("add", 1)
    assert shop.runs_of("sends_itself_again") == before + 1


async def test_retries_of_taskiq_are_counted_by_taskiq(shop: Running) -> None:
    assert await shop.run("retried_by_taskiq") == [2, 3]


@pytest.mark.parametrize(("task", "runs"), [("fails_at_its_own_count", 4), ("fails_once_and_for_all", 1)])
async def test_a_task_is_retried_as_often_as_its_labels_say(shop: Running, task: str, runs: int) -> None:
    """E2: as Taskiq counts, `max_retries=4` is four runs."""
    before = shop.runs_of(task)
    sent = await shop.shop.targets[task].kiq()
    with pytest.raises(JobFailed, match=f"after {runs} of {runs} attempts: .*the mail server is away"):
        await shop.shop.app.job(sent.task_id).result(WATCHDOG)
    assert shop.runs_of(task) == before + runs


async def test_a_job_that_taskiq_gives_up_is_dead(shop: Running) -> None:
    before = shop.runs_of("given_up_by_taskiq")
    with pytest.raises(JobFailed, match=r"after 3 of 3 attempts: .*the mail server is away"):
        await shop.run("given_up_by_taskiq")
    assert shop.runs_of("given_up_by_taskiq") == before + 3


async def test_a_routed_task_is_sent_through_fairlane(shop: Running) -> None:
    sent = await shop.shop.targets["routed"].kiq(6, 7)
    assert await shop.shop.app.job(sent.task_id).result(WATCHDOG) == 42


async def test_a_task_that_fits_a_pattern_is_sent_through_fairlane_and_adopts_its_job(shop: Running) -> None:
    sent = await shop.shop.targets["by_a_pattern"].kiq(6, 7)
    assert await shop.shop.app.job(sent.task_id).result(WATCHDOG) == [42, str(UUID(sent.task_id))]


async def test_labels_of_a_call_travel_to_taskiq(shop: Running) -> None:
    sent = await shop.shop.targets["reads_labels"].kicker().with_labels(shelf=4, floor="upper").kiq(["shelf", "floor"])
    assert await shop.shop.app.job(sent.task_id).result(WATCHDOG) == [4, "upper"]


async def test_what_is_sent_past_fairlane_runs_as_ever(shop: Running) -> None:
    before = shop.runs_of("sent_past_fairlane")
    await shop.shop.forwarder.reach()
    await shop.shop.targets["sent_past_fairlane"].kiq()
    await until(lambda: shop.runs_of("sent_past_fairlane") > before)


# Without processes.


@pytest.fixture
async def app(tmp_path: Path) -> AsyncIterator[App]:
    app = App(f"sqlite:///{tmp_path}/shop.db")
    app.queue(QUEUE, limits=[Concurrency(8)])
    async with app:
        yield app


@pytest.fixture
def routed(app: App) -> AsyncTaskiqDecoratedTask[..., Any]:
    broker = InMemoryBroker()
    forwarder = TaskiqForwarder(app, broker)

    @forwarder.route(queue=QUEUE, max_attempts=5)
    @broker.task("deliver", topic="mail")
    async def deliver(number: int) -> int:
        return number

    return deliver


async def test_labels_that_fairlane_has_are_mapped(app: App, routed: AsyncTaskiqDecoratedTask[..., Any]) -> None:
    wanted = uuid4()
    kicker = routed.kicker().with_labels(delay=3_600, priority=7, topic="mail").with_task_id(wanted.hex)
    sent = await kicker.kiq(1)
    assert UUID(sent.task_id) == wanted
    record = await app.job(wanted).record()
    assert (record.state, record.priority) == (State.SCHEDULED, 7)


async def test_a_label_of_retries_is_refused_where_the_policy_decides(
    routed: AsyncTaskiqDecoratedTask[..., Any],
) -> None:
    with pytest.raises(InvalidJob, match="max_retries would do nothing; give max_attempts and backoff"):
        await routed.kicker().with_labels(max_retries=3).kiq(1)


async def claims(app: App) -> list[Claim]:
    store, dispatcher = await app.opened(), WorkerIdentity.of_dispatcher("dispatcher:1")
    return list((await store.claim(QUEUE, lambda: 1, worker=dispatcher, lease=timedelta(seconds=30))).claims)


async def test_an_id_that_is_no_uuid_stays_that_of_the_message(
    app: App, routed: AsyncTaskiqDecoratedTask[..., Any]
) -> None:
    sent = await routed.kicker().with_task_id("order-7").kiq(1)
    assert sent.task_id == "order-7"
    (claim,) = await claims(app)
    contexts = await (await app.opened()).run(records.contexts([claim.id]))
    assert json.loads(stored_in(contexts[claim.id])[ENGINES_MESSAGE])["task_id"] == "order-7"


async def test_a_task_is_called_as_ever(routed: AsyncTaskiqDecoratedTask[..., Any]) -> None:
    assert await routed(5) == 5
