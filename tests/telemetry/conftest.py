from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from fairlane import App


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """An OpenTelemetry SDK, set up for one test, and the spans that have ended."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    yield exporter
    provider.shutdown()


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemoryMetricReader]:
    """An OpenTelemetry SDK for metrics, set up for one test, and what it reads."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    monkeypatch.setattr(metrics._internal, "_METER_PROVIDER", provider)
    yield reader
    provider.shutdown()


@pytest.fixture(params=["sqlite-memory", "sqlite-file", "postgres"])
def app(request: pytest.FixtureRequest, tmp_path: Path) -> App:
    """An app on each kind of database; use it as `async with app`."""
    match request.param:
        case "sqlite-memory":
            url = "sqlite://"
        case "sqlite-file":
            url = f"sqlite:///{tmp_path / 'jobs.db'}"
        case _:
            url = request.getfixturevalue("postgres_url")
    return App(url)
