"""Numbers that a policy takes from its jobs: evaluated by the producer, on every way to enqueue."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import Any
from uuid import uuid4

import pytest
from click.testing import CliRunner

from fairlane import App, Concurrency, Effects, Fair, Policy, Queue, Rate, Task
from fairlane.cli.program import program
from fairlane.clock import ManualClock
from fairlane.errors import InvalidJob, JobNotFound, PayloadTooLarge

SEEN: list[Mapping[str, Any]] = []


def slots(context: Mapping[str, Any]) -> int:
    SEEN.append(context)
    found: int = context["plan"]["slots"]
    return found


@pytest.fixture
async def app(clock: ManualClock) -> AsyncIterator[App]:
    SEEN.clear()
    app = App("sqlite://", clock=clock)
    yield app
    await app.close()


@pytest.fixture
def queue(app: App) -> Queue:
    return app.queue("webhooks", limits=[Concurrency(slots, by="account")])


@pytest.fixture
def deliver(app: App, queue: Queue) -> Task[..., int]:
    @app.task(queue="webhooks", name="deliver")
    async def deliver(event: int, account: str) -> int:
        return event

    return deliver


def plan(number: object) -> dict[str, Any]:
    return {"plan": {"slots": number}}


async def claimed(queue: Queue) -> dict[str | None, int]:
    return dict(Counter(claim.keys["account"] for claim in await queue.claim(50)))


async def test_the_newest_number_holds_for_its_key(queue: Queue, deliver: Task[..., int]) -> None:
    for number in (1, 5, 3):
        for event in range(4):
            await deliver.using(context=plan(number)).enqueue(event, account="acme")
    await deliver.using(context=plan(1)).enqueue(0, account="globex")
    assert await claimed(queue) == {"acme": 3, "globex": 1}


async def test_the_function_is_given_the_context_the_keys_and_what_the_job_is(deliver: Task[..., int]) -> None:
    job = await deliver.using(context={**plan(1), "note": "mine"}, priority=5).enqueue(0, account=42)
    (context,) = SEEN
    assert context == {
        **plan(1),
        "note": "mine",
        "account": "42",
        "queue": "webhooks",
        "task": "deliver",
        "priority": 5,
    }
    assert (await job.record()).context == {**plan(1), "note": "mine"}


async def test_contexts_add_up_as_keys_do(deliver: Task[..., int]) -> None:
    bound = deliver.using(context={"a": 1, "b": 1}).using(context={"b": 2, **plan(1)})
    job = await bound.enqueue(0, account="acme")
    assert (await job.record()).context == {"a": 1, "b": 2, **plan(1)}
    (other,) = await deliver.using(context={"a": 1, **plan(9)}).enqueue_many(
        [deliver.using(context=plan(2)).call(0, account="acme")]
    )
    assert (await other.record()).context == {"a": 1, **plan(2)}


async def test_the_last_number_of_a_bulk_holds_whatever_lanes_its_jobs_are_in(
    queue: Queue, deliver: Task[..., int]
) -> None:
    calls = [
        deliver.using(context=plan(number), priority=priority).call(0, account="acme")
        for number, priority in ((1, 0), (9, 1), (8, 2), (2, 0), (4, 1))
        for _ in range(3)
    ]
    await deliver.enqueue_many(calls)
    assert await claimed(queue) == {"acme": 4}


async def test_every_way_to_enqueue_brings_numbers(app: App, queue: Queue, deliver: Task[..., int]) -> None:
    calls = [deliver.using(context=plan(3)).call(n, account="stream") for n in range(9)]
    async for _ in app.enqueue_stream(calls, batch=4):
        pass
    await deliver.using(context=plan(2)).enqueue_many([deliver.call(n, account="bulk") for n in range(9)])
    for n in range(3):
        await deliver.using(context=plan(1)).enqueue(n, account="single")
    await deliver.using(context=plan(1), delay="1h").enqueue(0, account="later")
    assert await claimed(queue) == {"stream": 3, "bulk": 2, "single": 1}


async def test_follow_ups_bring_numbers(app: App, queue: Queue, deliver: Task[..., int]) -> None:
    await deliver.using(context=plan(1)).enqueue(0, account="acme")
    (lead,) = await queue.claim()
    follow = [deliver.using(context=plan(2)).call(n, account="next") for n in range(5)]
    await lead.ack(effects=Effects(enqueue=follow))
    assert await claimed(queue) == {"next": 2}


@pytest.mark.parametrize(
    ("context", "reason"),
    [
        ({}, "KeyError: 'plan'"),
        (plan(-1), "from 0 to"),
        (plan(2.5), "whole number"),
        (plan("many"), "'many' is not a number"),
        (plan(None), "None is not a number"),
    ],
)
async def test_a_number_that_cannot_be_had_is_an_error_at_enqueue_and_nothing_is_stored(
    app: App, deliver: Task[..., int], context: dict[str, Any], reason: str
) -> None:
    job = uuid4()
    good = deliver.using(context=plan(1)).call(0, account="acme")
    with pytest.raises(InvalidJob) as error:
        await app.enqueue_many([good, deliver.using(context=context, id=job).call(0, account="acme")])
    for part in ("queue 'webhooks'", "'concurrency:account'", str(job), "'deliver'", reason, "using(context={…})"):
        assert part in str(error.value)
    with pytest.raises(JobNotFound):
        await app.job(job).record()
    assert await app.queues["webhooks"].claim(9) == []


async def test_rates_and_weights_are_checked_too(app: App) -> None:
    app.queue(
        "mail",
        fair=Fair(by="account", weight=lambda context: context["weight"]),
        limits=[Rate(lambda context: context["rpm"], per="1m", by="account")],
    )

    @app.task(queue="mail")
    async def send(account: str) -> None: ...

    await send.using(context={"weight": 2, "rpm": 0.5}).enqueue("acme")
    with pytest.raises(InvalidJob, match="would never admit"):
        await send.using(context={"weight": 2, "rpm": 0}).enqueue("acme")
    with pytest.raises(InvalidJob, match=r"'weight'.*between"):
        await send.using(context={"weight": 0, "rpm": 1}).enqueue("acme")


async def test_a_producer_that_does_not_know_the_function_is_told(app: App, clock: ManualClock) -> None:
    app.queue("mail", limits=[Concurrency(3, by="account")])

    @app.task(queue="mail")
    async def send(account: str) -> None: ...

    await send.enqueue("acme")
    store = await app.opened()
    await store.apply(Policy("mail", limits=(Concurrency(slots, by="account"),)))
    clock.advance("31s")
    with pytest.raises(InvalidJob, match="takes 'concurrency:account' from its jobs, and nothing here says how"):
        await send.using(context=plan(1)).enqueue("acme")


@pytest.mark.parametrize("context", [[1], "text", {1: 2}])
async def test_a_context_is_a_mapping_of_names(deliver: Task[..., int], context: Any) -> None:
    with pytest.raises(InvalidJob, match="give a mapping of names"):
        deliver.using(context=context)


async def test_a_context_that_cannot_be_stored_is_refused(app: App, deliver: Task[..., int]) -> None:
    with pytest.raises(InvalidJob, match=r"its context \(dict\) cannot be stored as JSON"):
        await deliver.using(context={**plan(1), "what": object()}).enqueue(1, account="acme")
    with pytest.raises(PayloadTooLarge, match="its context takes"):
        await deliver.using(context={**plan(1), "what": "x" * app.max_payload}).enqueue(1, account="acme")


async def test_a_dry_run_evaluates_as_an_enqueue_would(deliver: Task[..., int]) -> None:
    with pytest.raises(InvalidJob, match="KeyError"):
        await deliver.dry_run(1, account="acme")


async def test_queues_without_such_numbers_call_nothing_and_store_no_numbers(app: App, queue: Queue) -> None:
    app.queue("plain", limits=[Concurrency(2, by="account")])

    @app.task(queue="plain")
    async def send(account: str) -> None: ...

    connection = await app._connected()
    (job,) = await connection.producing.built([send.call("acme")])
    assert (job.given, job.context, SEEN) == (None, None, [])


def test_the_command_takes_a_context(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "numbered_shop.py").write_text(
        """
from fairlane import App, Concurrency

app = App("sqlite:///shop.db")
app.queue("webhooks", limits=[Concurrency(lambda context: context["slots"], by="account")])

@app.task(queue="webhooks")
async def deliver(account: str) -> None: ...
"""
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    call = ["enqueue", "numbered_shop:app", "deliver", "--args", '["acme"]']
    stored = CliRunner().invoke(program, [*call, "--context", '{"slots": 3}', "--json"])
    assert stored.exit_code == 0, stored.output
    assert json.loads(stored.output)["task"] == "numbered_shop.deliver"
    refused = CliRunner().invoke(program, call)
    assert refused.exit_code == 1
    assert "slots" in refused.output
