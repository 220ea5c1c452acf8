"""Celery, with real workers on a real Redis: what it runs, and what becomes of it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from uuid import uuid4

import pytest

from fairlane import State
from fairlane.errors import JobCancelled, JobFailed
from tests.forward.brokers import ThrowawayRedis
from tests.forward.members import BIN, at_work, environment_with

SHOP = "tests.forward.celery_shop"
PATIENCE = "90s"


@pytest.fixture(scope="module")
def shop(redis: ThrowawayRedis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The shop, with a dispatcher and a worker of Celery's that serve it."""
    folder = tmp_path_factory.mktemp("shop")
    known = {"FAIRLANE_URL": f"sqlite:///{folder / 'shop.db'}", "CELERY_BROKER": redis.url}
    with pytest.MonkeyPatch.context() as patched:
        for name, value in known.items():
            patched.setenv(name, value)
        sys.modules.pop(SHOP, None)
        module = importlib.import_module(SHOP)
    worker = [str(BIN / "celery"), "-A", f"{SHOP}:celery", "worker", "-c", "2", "-Q", "emails,unrelated", "-l", "info"]
    with at_work(SHOP, worker, environment_with(**known), folder):
        yield module
    module.app.close_sync()
    sys.modules.pop(SHOP, None)


def test_celery_runs_what_fairlane_admits(shop: ModuleType) -> None:
    jobs = [shop.doubling.enqueue_sync(n) for n in range(20)]
    assert [job.result_sync(PATIENCE) for job in jobs] == [2 * n for n in range(20)]


def test_the_task_knows_its_job_and_celery_its_message(shop: ModuleType) -> None:
    job = shop.asking.enqueue_sync("Ada")
    told: dict[str, Any] = job.result_sync(PATIENCE)
    assert told == {"attempt": 1, "job": str(job.id), "id": str(job.id), "queue": "unrelated", "args": ["Ada"]}
    # Its effects have landed with it.
    assert shop.app.run_blocking(shop.app.values.get("greeted")) == "Ada"


def test_the_attempt_is_told_by_the_process_that_ran_it(shop: ModuleType) -> None:
    job = shop.doubling.enqueue_sync(1)
    job.result_sync(PATIENCE)
    (attempt,) = shop.app.run_blocking(job.attempts())
    dispatchers = {each.report.name for each in shop.app.run_blocking(workers_of(shop.app))}
    assert attempt.worker not in dispatchers


async def workers_of(app: Any) -> list[Any]:
    found: list[Any] = await (await app.opened()).ask(lambda moment: moment.workers())
    return found


def test_a_failure_re_enters_the_policy(shop: ModuleType) -> None:
    job = shop.stumbling.enqueue_sync(2)
    assert job.result_sync(PATIENCE) == 3
    assert [each.outcome for each in shop.app.run_blocking(job.attempts())] == ["failed", "failed", "done"]


def test_a_task_that_fails_too_often_is_dead(shop: ModuleType) -> None:
    job = shop.stumbling.enqueue_sync(9)
    with pytest.raises(JobFailed, match=r"failed after 3 of 3 attempts: ValueError: attempt 3"):
        job.result_sync(PATIENCE)


def test_a_retry_that_the_task_asks_celery_for_is_the_policys(shop: ModuleType) -> None:
    job = shop.trying_again.enqueue_sync(2)
    assert job.result_sync(PATIENCE) == 3
    assert [each.outcome for each in shop.app.run_blocking(job.attempts())] == ["retry", "retry", "done"]


def test_retries_are_celerys_unless_a_policy_is_given(shop: ModuleType) -> None:
    job = shop.by_engine.enqueue_sync(2)
    assert job.result_sync(PATIENCE) == [3, 2]
    assert [each.outcome for each in shop.app.run_blocking(job.attempts())] == ["retry", "retry", "done"]


def test_when_celery_gives_up_the_job_is_dead(shop: ModuleType) -> None:
    job = shop.by_engine.enqueue_sync(9)
    with pytest.raises(JobFailed, match=r"after 4 of 4 attempts: .*not yet"):
        job.result_sync(PATIENCE)
    assert job.status_sync() is State.DEAD


def test_a_job_whose_message_is_revoked_is_cancelled(shop: ModuleType) -> None:
    shop.doubling.enqueue_sync(1).result_sync(PATIENCE)  # the worker is there to hear of it
    revoked = uuid4()
    assert shop.celery.control.revoke(str(revoked), reply=True, timeout=10, limit=1)
    job = shop.doubling.using(id=revoked).enqueue_sync(1)
    with pytest.raises(JobCancelled, match="revoked in Celery"):
        job.result_sync(PATIENCE)


def test_delay_goes_through_fairlane_where_it_is_routed(shop: ModuleType) -> None:
    found = shop.routed.delay(41)
    assert shop.app.job(found.id).result_sync(PATIENCE) == 42
    later = shop.routed.apply_async((1,), countdown=3_600, priority=5)
    record = shop.app.run_blocking(shop.app.job(later.id).record())
    assert (record.state, record.priority) == (State.SCHEDULED, -55)  # on Redis, the lowest is served first


def test_headers_reach_the_task(shop: ModuleType) -> None:
    found = shop.headed.apply_async((), headers={"locale": "de"})
    assert shop.app.job(found.id).result_sync(PATIENCE) == "de"


def test_a_message_of_celerys_own_runs_as_ever(shop: ModuleType) -> None:
    assert shop.double(4) == 8
    assert shop.double.apply((4,)).get() == 8
