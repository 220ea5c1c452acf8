"""The registry: what a worker fills it with, how Prometheus and OpenTelemetry read it, and that it stays bounded."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client.parser import text_string_to_metric_families

from fairlane import App, Backoff
from fairlane.clock import ManualClock
from fairlane.telemetry import metrics as metrics_module
from fairlane.telemetry.metrics import CATALOGUE, Cell, Failures, Metrics, as_text
from tests.waiting import until
from tests.worker.harness import WatchedStore, watched_app, working

Values = dict[str, dict[tuple[tuple[str, str], ...], float]]


def parsed(text: str) -> Values:
    """What a scraper makes of a text, by the name of the sample and its labels."""
    found: Values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def told(app: App) -> Values:
    assert app.telemetry.metrics is not None
    return parsed(as_text(app.telemetry.metrics.samples()))


def of(**labels: str) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(labels.items()))


async def test_a_worker_counts_what_passes_through_it(app: App) -> None:
    app.queue("email")

    @app.task(queue="email", name="send", max_attempts=2, backoff=Backoff("1ms"))
    async def send(number: int) -> None:
        if number == 0:
            raise ValueError

    async with app, working(app, metrics_port=0, concurrency=7) as worker:
        jobs = await send.enqueue_many([send.call(number) for number in range(10)])
        for job in jobs:
            if job is not jobs[0]:
                await job.result()
        await until(lambda: told(app)["fairlane_jobs_ended_total"].get(of(queue="email", task="send", outcome="dead")))
        await until(lambda: told(app)["fairlane_settle_jobs_sum"][()] == 11)
        await until(lambda: "fairlane_claims_empty_total" in told(app))
        found = told(app)
    assert found["fairlane_jobs_enqueued_total"] == {of(queue="email", task="send"): 10}
    assert found["fairlane_jobs_claimed_total"] == {of(queue="email"): 11}
    assert found["fairlane_jobs_started_total"] == {of(queue="email", task="send"): 11}
    assert found["fairlane_jobs_ended_total"] == {
        of(queue="email", task="send", outcome="done"): 9,
        of(queue="email", task="send", outcome="failed"): 1,
        of(queue="email", task="send", outcome="dead"): 1,
    }
    # The wait of a second attempt is the doing of the first.
    assert found["fairlane_job_wait_seconds_count"] == {of(queue="email"): 10}
    assert found["fairlane_job_run_seconds_count"] == {of(queue="email", task="send"): 11}
    assert found["fairlane_claim_jobs_sum"] == {of(queue="email"): 11}
    assert found["fairlane_claim_seconds_count"] == found["fairlane_claim_jobs_count"]
    assert found["fairlane_claim_lock_wait_seconds_count"] == found["fairlane_claim_jobs_count"]
    assert found["fairlane_claims_empty_total"][of(queue="email")] >= 1
    assert found["fairlane_lane_events_folded_total"][of(queue="email")] >= 2
    assert found["fairlane_slots"] == {(): 7}
    assert found["fairlane_store_connected"] == {(): 1}
    assert found["fairlane_worker_stopping"] == {(): 0}
    assert set(found["fairlane_loop_alive"].values()) == {1}
    assert of(loop="claiming") in found["fairlane_loop_alive"]
    assert found["fairlane_jobs_running"] == {of(queue="email"): 0}
    assert found["fairlane_store_outages_total"] == {(): 0}
    reported = worker.report().stats
    assert (reported["fairlane_jobs_ended_total"], reported["fairlane_jobs_reaped_total"]) == (11, 0)
    # Its gauges end with the worker; what it has counted stays.
    assert "fairlane_slots" not in told(app)
    assert told(app)["fairlane_jobs_started_total"] == {of(queue="email", task="send"): 11}


async def test_what_runs_and_what_waits_is_told_while_it_does(app: App) -> None:
    release = asyncio.Event()

    @app.task
    async def work() -> None:
        await release.wait()

    async with app, working(app, metrics_port=0, concurrency=2):
        await work.enqueue_many([work.call() for _ in range(3)])
        await until(lambda: told(app)["fairlane_jobs_running"][of(queue="default")] == 2)
        release.set()
        await until(lambda: told(app)["fairlane_jobs_running"][of(queue="default")] == 0)


async def test_renewals_outages_and_lost_claims_are_counted() -> None:
    clock = ManualClock()
    app, store = watched_app(clock)
    started, release = asyncio.Event(), asyncio.Event()

    @app.task
    async def work() -> None:
        started.set()
        await release.wait()

    async with app, working(app, metrics_port=0, lease="30s"):
        job = await work.enqueue()
        await started.wait()
        clock.advance("10s")
        await until(lambda: told(app)["fairlane_lease_renewals_total"][()] >= 1)
        store.lose("renew")
        clock.advance("31s")
        await _reaped(store)
        await until(lambda: told(app)["fairlane_store_outages_total"][()] >= 1)
        store.restore()
        await until(lambda: told(app)["fairlane_claims_lost_total"][of(reason="lease gone")] == 1)
        release.set()
        await job.result()


async def _reaped(store: WatchedStore) -> None:
    assert (await store.real.reap()).settled


async def test_opentelemetry_reads_the_same_registry(app: App, meter: InMemoryMetricReader) -> None:
    @app.task(name="work")
    async def work() -> None: ...

    async with app, working(app, concurrency=3):
        for job in await work.enqueue_many([work.call() for _ in range(5)]):
            await job.result()
        await until(lambda: told(app)["fairlane_settle_jobs_sum"].get(()) == 5)
        found = read(meter)
    assert found["fairlane.jobs.enqueued"] == {of(queue="default", task="work"): 5}
    assert found["fairlane.jobs.ended"] == {of(queue="default", task="work", outcome="done"): 5}
    assert found["fairlane.slots"] == {(): 3}
    run = found["fairlane.job.run"][of(queue="default", task="work")]
    assert run.count == 5
    assert tuple(run.explicit_bounds) == CATALOGUE["fairlane_job_run_seconds"].boundaries


def read(reader: InMemoryMetricReader) -> dict[str, dict[Any, Any]]:
    data = reader.get_metrics_data()
    assert data is not None
    return {
        metric.name: {
            tuple(sorted((point.attributes or {}).items())): getattr(point, "value", point)
            for point in metric.data.data_points
        }
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


async def test_an_exporter_and_a_tracer_that_raise_stop_no_job_and_are_visible(
    app: App, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from opentelemetry import metrics, trace

    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("the exporter is broken")

    class BrokenProvider:
        def get_tracer(self, *args: object) -> Broken:
            return Broken()

        def get_meter(self, *args: object) -> Broken:
            return Broken()

    monkeypatch.setattr(trace, "_TRACER_PROVIDER", BrokenProvider())
    monkeypatch.setattr(metrics._internal, "_METER_PROVIDER", BrokenProvider())

    @app.task
    async def work(number: int) -> int:
        return number

    async with app, working(app, metrics_port=0) as worker:
        jobs = await work.enqueue_many([work.call(number) for number in range(20)])
        assert [await job.result() for job in jobs] == list(range(20))
        assert worker.health().is_well
        assert worker.health().telemetry_failures >= 21
        failures = told(app)["fairlane_telemetry_failures_total"]
    assert failures[of(reason="export")] == 1
    assert failures[of(reason="trace")] >= 20
    assert "starting a span failed (trace, 1 so far; jobs go on): RuntimeError: the exporter is broken" in caplog.text


async def test_traces_that_cannot_be_looked_up_are_done_without(spans: Any) -> None:
    clock = ManualClock()
    app, store = watched_app(clock)

    @app.task
    async def work() -> str:
        return "done"

    store.lose("contexts")
    async with app, working(app) as worker:
        assert await (await work.enqueue()).result() == "done"
        assert worker.health().telemetry_failures == 1
        assert worker.health().is_connected


def test_a_gauge_that_cannot_be_read_is_left_out_and_counted() -> None:
    metrics = Metrics(Failures())

    def broken() -> list[tuple[tuple[str, ...], float]]:
        raise RuntimeError

    metrics.read("fairlane_slots", broken)
    metrics.read("fairlane_jobs_unsettled", lambda: [((), 3)])
    found = parsed(as_text(metrics.samples()))
    assert "fairlane_slots" not in found
    assert found["fairlane_jobs_unsettled"] == {(): 3}
    assert parsed(as_text(metrics.samples()))["fairlane_telemetry_failures_total"][of(reason="collector")] == 2


def test_a_text_of_any_label_and_any_number_is_read_as_it_was_written() -> None:
    metrics = Metrics(Failures())
    label = 'a "quoted" \\ path\nof two lines ▸'
    metrics.add("fairlane_jobs_claimed_total", (label,), 3)
    metrics.observe("fairlane_job_wait_seconds", 0.0, (label,))
    metrics.observe("fairlane_job_wait_seconds", 0.3, (label,))
    metrics.observe("fairlane_job_wait_seconds", 10_000.0, (label,))
    metrics.read("fairlane_slots", lambda: [((), float("nan"))])
    metrics.read("fairlane_jobs_unsettled", lambda: [((), float("inf"))])
    found = parsed(as_text(metrics.samples()))
    assert found["fairlane_jobs_claimed_total"] == {of(queue=label): 3}
    buckets = found["fairlane_job_wait_seconds_bucket"]
    assert buckets[of(queue=label, le="0.001")] == 1
    assert buckets[of(queue=label, le="0.25")] == 1
    assert buckets[of(queue=label, le="0.5")] == 2
    assert buckets[of(queue=label, le="1800")] == 2
    assert buckets[of(queue=label, le="+Inf")] == 3
    assert found["fairlane_job_wait_seconds_sum"] == {of(queue=label): 10_000.3}
    assert found["fairlane_jobs_unsettled"] == {(): float("inf")}


def test_series_are_bounded_and_the_rest_is_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "SERIES_AT_MOST", 3)
    metrics = Metrics(Failures())
    for number in range(10):
        metrics.add("fairlane_jobs_claimed_total", (f"queue-{number}",))
        metrics.observe("fairlane_job_wait_seconds", 1.0, (f"queue-{number}",))
    assert dict(metrics.value_of("fairlane_jobs_claimed_total")) == {
        ("queue-0",): 1,
        ("queue-1",): 1,
        ("queue-2",): 1,
        ("other",): 7,
    }
    samples = {metric.name: dict(values) for metric, values in metrics.samples()}
    waits = samples["fairlane_job_wait_seconds"][("other",)]
    assert isinstance(waits, Cell)
    assert sum(waits.counts) == 7


def test_every_metric_has_a_name_of_its_own_in_both_worlds() -> None:
    for name, metric in CATALOGUE.items():
        assert name.startswith("fairlane_")
        assert name.endswith("_total") == (metric.kind == "counter")
        assert name.removesuffix("_total").endswith("_seconds") == (metric.unit == "s")
        assert bool(metric.boundaries) == (metric.kind == "histogram")
        assert list(metric.boundaries) == sorted(set(metric.boundaries))
    assert len({metric.dotted for metric in CATALOGUE.values()}) == len(CATALOGUE)
    labels = {label for metric in CATALOGUE.values() for label in metric.labels}
    assert labels == {"queue", "task", "outcome", "reason", "loop", "limit", "key"}
