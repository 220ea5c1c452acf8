"""What a test may give by mistake: it is named, with a remedy, and never makes an assertion true."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from fairlane import App, Concurrency, Fair, FairlaneError, Policy
from fairlane.clock import SystemClock
from fairlane.errors import ConfigurationError, UnknownTask
from fairlane.testing import (
    arrivals,
    assert_enqueued,
    enqueued_jobs,
    immediate,
    in_memory,
    run_for,
    run_until_idle,
    try_policy,
)

POLICY = Policy("mail", Fair(by="account"), (Concurrency(2, by=("account", "endpoint")),))


@pytest.mark.parametrize(
    ("tried", "coming", "told"),
    [
        ("mail", [arrivals(1)], "'mail' is not a queue; give what app.queue"),
        (App("sqlite://"), [arrivals(1)], "is not a queue; give what app.queue"),
        (POLICY, [{"account": "acme"}], "does not arrive; give arrivals"),
        (POLICY, [arrivals(9, account="acme")], "needs the key 'endpoint', .* carry: account"),
        (
            POLICY,
            [arrivals(9, account="a", endpoint="x", runtime="10s")],
            "the key 'runtime', .* did you mean run_time=?",
        ),
        (Policy("mail"), [arrivals(9, account="a", runtime="10s")], "the key 'runtime', .* did you mean run_time=?"),
        (POLICY, [arrivals(9, account="a", endpoint="x", shop="b")], "'shop', .* it looks at account, endpoint"),
        (POLICY, [arrivals(9, acount="acme", endpoint="x")], "needs the key 'account', .* carry: acount, endpoint"),
    ],
)
def test_a_trial_of_nothing_is_refused(tried: Any, coming: list[Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        try_policy(tried, *coming)


def test_a_job_without_a_key_arrives_if_it_is_said() -> None:
    assert try_policy(POLICY, arrivals(9, account=None, endpoint=None), slots=9).most_in_flight() == 2


@pytest.mark.parametrize("jobs", [-1, "5", True, 1.5])
def test_what_arrives_is_a_number_of_jobs(jobs: Any) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(f"arrivals({jobs!r}, …): give a number of jobs")):
        arrivals(jobs, account="acme")


def program() -> App:
    app = App("sqlite://")
    app.queue("mail", partitions=2, partition_by="account")

    @app.task(queue="mail", name="send")
    async def send(account: str) -> None: ...

    return app


Asked = Callable[[App], Awaitable[Any]]
QUESTIONS: list[tuple[Asked, str]] = [
    (lambda app: enqueued_jobs(app, "sent"), "no task is named 'sent'; known are: send"),
    (lambda app: enqueued_jobs(app, print), "neither a task nor a call"),  # type: ignore[arg-type]
    (lambda app: enqueued_jobs(app, queue="male"), "queue='male' is unknown; this app has mail"),
    (lambda app: assert_enqueued(app, "sent", count=0), "no task is named 'sent'"),
    (lambda app: assert_enqueued(app, "send", count=0, queue="male"), "queue='male' is unknown"),
    (lambda app: assert_enqueued(app, "send", count=0, queue="male__p0"), "queue='male__p0' is unknown"),
    (lambda app: assert_enqueued(app, "send", count=0, state="redy"), r"state='redy' cannot be used; give a State"),  # type: ignore[arg-type]
    (lambda app: run_for(app, -5), "duration=-5 is not a time of at least 0"),
    (lambda app: run_for(app, "tomorrow"), "run_for: duration: 'tomorrow' is not a duration"),
]


@pytest.mark.parametrize(("asked", "told"), QUESTIONS)
async def test_a_question_about_nothing_is_refused(asked: Asked, told: str) -> None:
    async with in_memory(app := program()):
        with pytest.raises(FairlaneError, match=told):
            await asked(app)


async def test_a_task_may_go_by_its_name_and_a_queue_by_that_of_its_partition() -> None:
    async with in_memory(app := program()):
        job = await app.registry["send"].enqueue("acme")
        queue = (await job.record()).queue
        (found,) = await assert_enqueued(app, "send", queue=queue)
        assert found.record.id == job.id
        with pytest.raises(UnknownTask):
            await assert_enqueued(app, "sent")


@pytest.mark.parametrize("given", ["shop:app", None])
async def test_what_is_no_app_is_named(given: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"in_memory: app=.* cannot be used; give an App"):
        async with in_memory(given):
            pass
    with pytest.raises(ConfigurationError, match=r"in_memory: clock=.* cannot be used; give a ManualClock"):
        async with in_memory(program(), clock=SystemClock()):  # type: ignore[arg-type]
            pass
    with pytest.raises(ConfigurationError, match=r"immediate: app=.* cannot be used; give an App"), immediate(given):
        pass
    for run in (run_until_idle(given), run_for(given, 1), enqueued_jobs(given), assert_enqueued(given, "send")):
        with pytest.raises(ConfigurationError, match=r"app=.* cannot be used; give an App"):
            await run
