"""Must-show 4 of the telemetry: an enqueue span, and run spans that are linked to it, also across retries."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from fairlane import App, Backoff, Concurrency, Effects, Snooze, context
from fairlane.errors import InvalidJob
from fairlane.job import trace_of, with_trace
from fairlane.store import records
from tests.waiting import until
from tests.worker.harness import working


def named(spans: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    found: Sequence[ReadableSpan] = spans.get_finished_spans()
    return [span for span in found if span.name == name]


def id_of(span: ReadableSpan) -> tuple[int, int]:
    found = span.get_span_context()
    assert found is not None
    return found.trace_id, found.span_id


def links_of(span: ReadableSpan) -> dict[str, tuple[int, int]]:
    """The links of a span, by their role."""
    return {
        str((link.attributes or {})["fairlane.link"]): (link.context.trace_id, link.context.span_id)
        for link in span.links
    }


def told(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


async def test_a_run_is_linked_to_its_enqueue_in_a_trace_of_its_own(app: App, spans: InMemorySpanExporter) -> None:
    app.queue("webhooks", keys=["account"])

    @app.task(queue="webhooks", name="deliver")
    async def deliver(account: str) -> None: ...

    async with app, working(app):
        job = await deliver.enqueue("acme")
        await job.result()
        await until(lambda: named(spans, "process webhooks"))
    [sent], [run] = named(spans, "send webhooks"), named(spans, "process webhooks")
    assert (sent.kind, run.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    assert links_of(run) == {"enqueue": id_of(sent)}
    assert run.parent is None
    assert id_of(run)[0] != id_of(sent)[0]
    assert told(sent) == {
        "messaging.system": "fairlane",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": "webhooks",
        "messaging.message.id": str(job.id),
        "fairlane.task": "deliver",
    }
    assert told(run) == {
        "messaging.system": "fairlane",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "webhooks",
        "messaging.message.id": str(job.id),
        "messaging.message.body.size": len(b'[["acme"],{}]'),
        "fairlane.task": "deliver",
        "fairlane.key.account": "acme",
        "fairlane.attempt": 1,
        "fairlane.max_attempts": 5,
        "fairlane.outcome": "done",
    }
    assert run.status.status_code is StatusCode.UNSET


async def test_every_run_of_a_retried_job_is_linked_to_the_enqueue_and_to_the_run_before(
    app: App, spans: InMemorySpanExporter
) -> None:
    @app.task(backoff=Backoff("1ms"))
    async def work() -> str:
        if context().attempt < 3:
            raise ValueError(f"attempt {context().attempt}")
        return "at last"

    async with app, working(app):
        assert await (await work.enqueue()).result() == "at last"
        await until(lambda: len(named(spans, "process default")) == 3)
    [sent], runs = named(spans, "send default"), named(spans, "process default")
    assert [told(run)["fairlane.attempt"] for run in runs] == [1, 2, 3]
    assert [told(run)["fairlane.outcome"] for run in runs] == ["failed", "failed", "done"]
    assert [links_of(run).get("enqueue") for run in runs] == [id_of(sent)] * 3
    assert [links_of(run).get("previous run") for run in runs] == [None, id_of(runs[0]), id_of(runs[1])]
    assert [run.status.status_code for run in runs] == [StatusCode.ERROR, StatusCode.ERROR, StatusCode.UNSET]
    assert told(runs[0])["error.type"] == "ValueError"
    assert [event.name for event in runs[0].events] == ["exception"]
    assert (runs[0].events[0].attributes or {})["exception.message"] == "attempt 1"


@pytest.mark.parametrize("is_async", [True, False])
async def test_what_a_handler_enqueues_is_part_of_its_run(
    app: App, spans: InMemorySpanExporter, is_async: bool
) -> None:
    @app.task
    async def child() -> None: ...

    async def parent() -> None:
        await child.enqueue()

    def blocking_parent() -> None:
        child.enqueue_sync()

    task = app.task(name="parent")(parent if is_async else blocking_parent)
    async with app, working(app):
        await (await task.enqueue()).result()
        await until(lambda: len(named(spans, "process default")) == 2)
    sends = {told(span)["fairlane.task"]: span for span in named(spans, "send default")}
    runs = {told(span)["fairlane.task"]: span for span in named(spans, "process default")}
    follow_up = next(span for task, span in sends.items() if task.endswith("child"))
    assert follow_up.parent is not None
    assert (follow_up.parent.trace_id, follow_up.parent.span_id) == id_of(runs["parent"])
    [child_run] = [span for task, span in runs.items() if task.endswith("child")]
    assert links_of(child_run) == {"enqueue": id_of(follow_up)}


async def test_effects_and_what_is_declared_for_death_carry_the_span_they_come_from(
    app: App, spans: InMemorySpanExporter
) -> None:
    @app.task(name="lands")
    async def lands() -> None: ...

    @app.task(name="mourns")
    async def mourns() -> None: ...

    @app.task(name="works", max_attempts=1)
    async def works() -> None:
        context().enqueue(lands.call())

    @app.task(name="dies", max_attempts=1)
    async def dies() -> None:
        raise ValueError

    async with app, working(app):
        await works.enqueue()
        await dies.using(on_dead=Effects(enqueue=[mourns.call()])).enqueue()
        await until(lambda: len(named(spans, "process default")) == 4)
    runs = {told(span)["fairlane.task"]: span for span in named(spans, "process default")}
    sends = {told(span)["fairlane.task"]: span for span in named(spans, "send default")}
    assert links_of(runs["lands"]) == {"enqueue": id_of(runs["works"])}
    assert links_of(runs["mourns"]) == {"enqueue": id_of(sends["dies"])}


async def test_a_bulk_is_one_span_and_all_its_runs_are_linked_to_it(app: App, spans: InMemorySpanExporter) -> None:
    app.queue("email")

    @app.task(queue="email")
    async def send(number: int) -> None: ...

    @app.task
    async def other() -> None: ...

    async with app, working(app):
        await send.enqueue_many([send.call(number) for number in range(300)])
        await app.enqueue_many([send.call(0), other.call()])
        await until(lambda: len(named(spans, "process email")) == 301)
    [bulk], [mixed] = named(spans, "send email"), named(spans, "send")
    assert told(bulk)["messaging.batch.message_count"] == 300
    assert "messaging.message.id" not in told(bulk)
    assert "messaging.destination.name" not in told(mixed)
    linked = [links_of(run)["enqueue"] for run in named(spans, "process email")]
    assert sorted(linked) == sorted([id_of(bulk)] * 300 + [id_of(mixed)])


async def test_a_run_may_be_nested_into_the_trace_of_its_enqueue(app: App, spans: InMemorySpanExporter) -> None:
    @app.task
    async def work() -> None: ...

    async with app, working(app, traces="nested"):
        await (await work.enqueue()).result()
        await until(lambda: named(spans, "process default"))
    [sent], [run] = named(spans, "send default"), named(spans, "process default")
    assert run.parent is not None
    assert (run.parent.trace_id, run.parent.span_id) == id_of(sent)
    assert links_of(run) == {}


async def test_spans_made_by_a_handler_are_inside_of_its_run_and_of_no_other(
    app: App, spans: InMemorySpanExporter
) -> None:
    tracer = trace.get_tracer("shop")

    @app.task
    async def work(number: int) -> None:
        await asyncio.sleep(0)
        with tracer.start_as_current_span(f"inner {number}"):
            await asyncio.sleep(0)

    async with app, working(app, concurrency=2):
        await work.enqueue_many([work.call(number) for number in range(10)])
        await until(lambda: len(named(spans, "process default")) == 10)
    parents = [span.parent for span in spans.get_finished_spans() if span.name.startswith("inner")]
    runs = [id_of(span) for span in named(spans, "process default")]
    assert sorted((parent.trace_id, parent.span_id) for parent in parents if parent) == sorted(runs)


async def test_a_trace_in_a_job_is_seen_by_no_policy_and_no_person(app: App, spans: InMemorySpanExporter) -> None:
    seen: list[set[str]] = []

    def most(told: Any) -> int:
        seen.append(set(told))
        return 5

    app.queue("email", limits=[Concurrency(most, by="account")])

    @app.task(queue="email")
    async def send(account: str) -> None: ...

    async with app:
        job = await send.using(context={"plan": "gold"}).enqueue("acme")
        store = await app.opened()
        assert (await job.record()).context == {"plan": "gold"}
        carried = trace_of((await store.run(records.contexts([job.id])))[job.id])
    assert seen == [{"plan", "account", "queue", "task", "priority"}]
    [sent] = named(spans, "send email")
    assert carried is not None
    assert carried["traceparent"].startswith(f"00-{id_of(sent)[0]:032x}-{id_of(sent)[1]:016x}-")


async def test_without_an_sdk_a_job_carries_nothing(app: App) -> None:
    @app.task
    async def work() -> None: ...

    async with app:
        job = await work.enqueue()
        assert await (await app.opened()).run(records.contexts([job.id])) == {}


async def test_names_that_begin_with_ours_are_refused_in_a_context(app: App) -> None:
    @app.task
    async def work() -> None: ...

    with pytest.raises(InvalidJob, match=r"'fairlane\.trace' is a name of Fairlane's own"):
        work.using(context={"fairlane.trace": {}})


def test_a_trace_is_added_to_any_context_and_found_in_it() -> None:
    trace = {"traceparent": "00-a-b-01"}
    for told in (None, "{}", '{"plan":"gold"}'):
        stored = with_trace(told, trace)
        assert stored is not None
        assert trace_of(stored) == trace
    assert with_trace('{"plan":"gold"}', None) == '{"plan":"gold"}'
    assert trace_of('{"plan":"gold"}') is None


async def test_a_snoozed_job_is_linked_to_the_run_that_snoozed_it(app: App, spans: InMemorySpanExporter) -> None:
    runs = 0

    @app.task
    async def work() -> None:
        nonlocal runs
        runs += 1
        if runs == 1:
            raise Snooze("1ms")

    async with app, working(app):
        await (await work.enqueue()).result()
        await until(lambda: len(named(spans, "process default")) == 2)
    first, second = named(spans, "process default")
    assert told(first)["fairlane.outcome"] == "snoozed"
    assert first.status.status_code is StatusCode.UNSET
    assert links_of(second)["previous run"] == id_of(first)


async def test_an_enqueue_that_fails_is_a_span_that_failed(app: App, spans: InMemorySpanExporter) -> None:
    @app.task
    async def work(number: object) -> None: ...

    async with app:
        with pytest.raises(InvalidJob):
            await work.enqueue(object())
    [sent] = named(spans, "send default")
    assert sent.status.status_code is StatusCode.ERROR
    assert told(sent)["error.type"] == "InvalidJob"
