"""Real `fairlane worker` processes: what they tell a scraper, a probe, a collector of traces and a reader of logs."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sqlite3
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from fairlane import App, Job, State
from tests.telemetry.test_metrics import of, parsed
from tests.telemetry.test_traces import id_of, named
from tests.telemetry.worker_process import worker_process
from tests.waiting import PATIENCE
from tests.worker.harness import reaches

SHOP = """
import asyncio, json, logging, os, pathlib
from fairlane import App, Backoff, context
app = App()
app.queue("shop", keys=["account"])

@app.task(queue="shop", name="wait_for")
async def wait_for(path: str, account: str) -> str:
    logging.getLogger("shop").warning("it waits for %s", path, extra={"path": path})
    while not os.path.exists(path):
        await asyncio.sleep(0.005)
    return "in peace"

@app.task(queue="shop", name="flaky", backoff=Backoff("1ms"))
async def flaky(account: str) -> int:
    if context().attempt < 3:
        raise ValueError("not yet")
    return context().attempt
"""

COLLECTOR = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

class ToFile(SpanExporter):
    def export(self, spans):
        with open("spans.jsonl", "a") as file:
            for span in spans:
                file.write(span.to_json(indent=None) + "\\n")
        return SpanExportResult.SUCCESS

provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(ToFile()))
trace.set_tracer_provider(provider)
"""

BROKEN = """
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExporter, PeriodicExportingMetricReader
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

class Broken(SpanProcessor):
    def on_start(self, span, parent_context=None):
        raise RuntimeError("a broken processor")

    def on_end(self, span):
        raise RuntimeError("a broken processor")

provider = TracerProvider()
provider.add_span_processor(Broken())
trace.set_tracer_provider(provider)

@app.on_event
def break_here(event):
    raise RuntimeError("a broken handler")

@app.on_event
async def break_there(event):
    raise RuntimeError("another broken handler")
"""


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """The folder of a program."""
    (tmp_path / "shop.py").write_text(SHOP)
    return tmp_path


def producer(url: str) -> App:
    """The producer's side of it, in this process."""
    app = App(url)
    app.queue("shop", keys=["account"])

    async def wait_for(path: str, account: str) -> str: ...  # type: ignore[empty-body]

    async def flaky(account: str) -> int: ...  # type: ignore[empty-body]

    app.task(queue="shop", name="wait_for")(wait_for)
    app.task(queue="shop", name="flaky")(flaky)
    return app


async def ran_three_times(url: str, shop: Path, *options: str) -> tuple[Job[Any], list[dict[str, Any]]]:
    """A job that a worker process has run three times, and the spans that were collected there."""
    async with producer(url) as app, worker_process(shop, url, *options) as worker:
        job = await app.registry["flaky"].enqueue("acme")
        assert await job.result(timeout=PATIENCE) == 3
        worker.process.send_signal(signal.SIGTERM)
        assert await worker.ended() == 0
    collected = [json.loads(line) for line in (shop / "spans.jsonl").read_text().splitlines()]
    assert [span["name"] for span in collected] == ["process shop"] * 3
    return job, collected


async def test_a_trace_leads_from_a_producer_to_every_run_in_another_process(
    url: str, shop: Path, spans: InMemorySpanExporter
) -> None:
    (shop / "shop.py").write_text(COLLECTOR + SHOP)
    job, collected = await ran_three_times(url, shop)
    [sent] = named(spans, "send shop")
    enqueue = [f"0x{part:0{width}x}" for part, width in zip(id_of(sent), (32, 16), strict=True)]
    before: list[str] = []
    for number, span in enumerate(collected, start=1):
        attributes, context = span["attributes"], span["context"]
        assert attributes["messaging.message.id"] == str(job.id)
        assert (attributes["fairlane.attempt"], attributes["fairlane.key.account"]) == (number, "acme")
        assert span["parent_id"] is None
        links = {link["attributes"]["fairlane.link"]: link["context"] for link in span["links"]}
        assert [links["enqueue"]["trace_id"], links["enqueue"]["span_id"]] == enqueue
        assert ("previous run" in links) == (number > 1)
        if number > 1:
            assert [links["previous run"]["trace_id"], links["previous run"]["span_id"]] == before
        before = [context["trace_id"], context["span_id"]]


async def test_a_worker_answers_scrapers_and_probes(url: str, shop: Path) -> None:
    async with producer(url) as app, worker_process(shop, url, "--metrics-port", "0", "--name", "one") as worker:
        job = await app.registry["flaky"].enqueue("acme")
        assert await job.result(timeout=PATIENCE) == 3
        assert (await worker.get("/healthz"))[0] == 200
        assert (await worker.get("/readyz?verbose"))[0] == 200
        status, text = await worker.get("/metrics")
        found = parsed(text)
        assert status == 200
        assert found["fairlane_jobs_ended_total"] == {
            of(queue="shop", task="flaky", outcome="failed"): 2,
            of(queue="shop", task="flaky", outcome="done"): 1,
        }
        assert found["fairlane_loop_alive"][of(loop="claiming")] == 1
        assert (await worker.get("/"))[0] == 404

        # While it drains it is well, and takes no more.
        await app.registry["wait_for"].enqueue(str(shop / "go"), "acme")
        await worker.says("it waits for")  # what has not started would be given back
        worker.process.send_signal(signal.SIGTERM)
        told = json.loads(await worker.get_until("/readyz", 503))
        assert told["reasons"] == ["it is stopping"]
        assert (await worker.get("/healthz"))[0] == 200
        (shop / "go").touch()
        assert await worker.ended() == 0


async def test_a_worker_with_several_processes_answers_for_all_of_them_at_one_port(url: str, shop: Path) -> None:
    async with (
        producer(url) as app,
        worker_process(shop, url, "--metrics-port", "0", "--processes", "2", "--concurrency", "3") as worker,
    ):
        waiting = [await app.registry["wait_for"].enqueue(str(shop / "go"), "acme") for _ in range(6)]
        for job in waiting:
            await reaches(job, State.RUNNING)
        found = parsed((await worker.get("/metrics"))[1])
        assert found["fairlane_slots"] == {of(): 6}
        assert found["fairlane_jobs_running"] == {of(queue="shop"): 6}
        assert found["fairlane_loop_alive"][of(loop="processes")] == 1
        (shop / "go").touch()
        flaky = await app.registry["flaky"].enqueue("acme")
        assert await flaky.result(timeout=PATIENCE) == 3
        for job in waiting:
            await job.result(timeout=PATIENCE)
        found = parsed((await worker.get("/metrics"))[1])
        assert found["fairlane_jobs_ended_total"] == {
            of(queue="shop", task="wait_for", outcome="done"): 6,
            of(queue="shop", task="flaky", outcome="failed"): 2,
            of(queue="shop", task="flaky", outcome="done"): 1,
        }
        assert found["fairlane_jobs_started_total"][of(queue="shop", task="flaky")] == 3
        worker.process.send_signal(signal.SIGTERM)
        assert await worker.ended() == 0


@pytest.mark.parametrize("processes", ["1", "2"])
async def test_events_and_traces_of_runs_come_from_where_they_run(
    url: str, shop: Path, spans: InMemorySpanExporter, processes: str
) -> None:
    events = "\n@app.on_event\ndef note(event):\n    print(type(event).__name__, event.worker, flush=True)\n"
    (shop / "shop.py").write_text(COLLECTOR + SHOP + events)
    _, collected = await ran_three_times(url, shop, "--name", "one", "--processes", processes)
    [sent] = named(spans, "send shop")
    for span in collected:
        links = {link["attributes"]["fairlane.link"]: link["context"] for link in span["links"]}
        assert links["enqueue"]["span_id"] == f"0x{id_of(sent)[1]:016x}"


async def test_a_loop_that_dies_turns_health_red_and_ends_the_process(url: str, shop: Path) -> None:
    """O08, by taking a table away under a worker that runs a job."""
    async with producer(url) as app, worker_process(shop, url, "--metrics-port", "0") as worker:
        held = await app.registry["wait_for"].enqueue(str(shop / "go"), "acme")
        await reaches(held, State.RUNNING)
        await _drop_a_table(url)
        await app.registry["flaky"].enqueue("acme")
        told = json.loads(await worker.get_until("/healthz", 503))
        assert not told["is_well"]
        assert [reason.partition(": ")[0] for reason in told["reasons"]] == ["loop 'claiming' died"]
        assert ("forced" if url.startswith("sqlite") else "journal") in told["reasons"][0]
        assert (await worker.get("/readyz"))[0] == 503
        assert parsed((await worker.get("/metrics"))[1])["fairlane_loop_alive"][of(loop="claiming")] == 0
        (shop / "go").touch()
        assert await worker.ended() == 1
        assert await held.result(timeout=PATIENCE) == "in peace"
    assert any("CRITICAL" in line and "the worker's loop 'claiming' died" in line for line in worker.lines)


async def _drop_a_table(url: str) -> None:
    """One that claims look at, and settlements do not."""
    if url.startswith("sqlite"):
        with sqlite3.connect(url.removeprefix("sqlite:///"), timeout=PATIENCE) as database:
            database.execute("drop table forced")
        database.close()
        return
    connection = await asyncpg.connect(url)
    await connection.execute("drop table fairlane.journal cascade")
    await connection.close()


async def test_broken_handlers_and_a_broken_sdk_stop_no_job_and_are_visible(url: str, shop: Path) -> None:
    """O11 in a real process."""
    (shop / "shop.py").write_text(SHOP + BROKEN)
    async with producer(url) as app, worker_process(shop, url, "--metrics-port", "0") as worker:
        jobs = [await app.registry["flaky"].enqueue(f"account-{number}") for number in range(5)]
        assert [await job.result(timeout=PATIENCE) for job in jobs] == [3] * 5
        failures = parsed((await worker.get("/metrics"))[1])["fairlane_telemetry_failures_total"]
        assert failures[of(reason="trace")] >= 15
        assert failures[of(reason="handler")] >= 15
        assert json.loads((await worker.get("/healthz"))[1])["telemetry_failures"] >= 30
        worker.process.send_signal(signal.SIGTERM)
        assert await worker.ended() == 0


async def test_a_log_of_json_says_of_every_line_in_a_job_which_job_it_was(url: str, shop: Path) -> None:
    options = ("--log-format", "json", "--name", "one")
    async with producer(url) as app, worker_process(shop, url, *options) as worker:
        held = await app.registry["wait_for"].enqueue(str(shop / "go"), "acme")
        await worker.says("it waits for")
        flaky = await app.registry["flaky"].enqueue("globex")
        await flaky.result(timeout=PATIENCE)
        (shop / "go").touch()
        await held.result(timeout=PATIENCE)
        worker.process.send_signal(signal.SIGTERM)
        assert await worker.ended() == 0
    told = worker.told()
    [waits] = [line for line in told if line["logger"] == "shop"]
    assert {name: value for name, value in waits.items() if name != "time"} == {
        "level": "warning",
        "logger": "shop",
        "message": f"it waits for {shop / 'go'}",
        "worker": "one",
        "job": str(held.id),
        "queue": "shop",
        "task": "wait_for",
        "keys": {"account": "acme"},
        "attempt": 1,
        "path": str(shop / "go"),
    }
    failed: list[Any] = [line for line in told if ": ValueError: not yet" in line["message"]]
    assert [(line["job"], line["keys"], line["attempt"]) for line in failed] == [
        (str(flaky.id), {"account": "globex"}, 1),
        (str(flaky.id), {"account": "globex"}, 2),
    ]
    started = next(line for line in told if "serves shop" in line["message"])
    assert "job" not in started
    assert waits["time"].endswith("+00:00")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--metrics-port", "70000"), "--metrics-port"),
        (("--metrics-port", "0", "--metrics-host", "no.such.host.invalid"), "metrics_host='no.such.host.invalid'"),
        (("--metrics-port", "0", "--metrics-host", " "), "metrics_host=' '"),
        (("--log-format", "xml"), "--log-format"),
        (("--traces", "none"), "--traces"),
    ],
)
async def test_a_setting_that_cannot_work_is_refused_by_its_name(
    shop: Path, options: tuple[str, ...], told: str
) -> None:
    """O09."""
    async with worker_process(shop, "sqlite://", *options) as worker:
        assert await worker.ended() in (1, 2)
        await asyncio.sleep(0)
    assert told in "".join(worker.lines)
    assert "Traceback" not in "".join(worker.lines)


async def test_a_port_that_is_taken_is_told_in_a_line(shop: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        async with worker_process(shop, "sqlite://", "--metrics-port", str(port)) as worker:
            assert await worker.ended() == 1
    assert f"metrics_port={port}, metrics_host='127.0.0.1': cannot listen there" in "".join(worker.lines)
    assert "Traceback" not in "".join(worker.lines)
