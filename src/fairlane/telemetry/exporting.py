"""The registry through OpenTelemetry: counters and gauges are read when an exporter asks, histograms as they come."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Any

from fairlane.telemetry.catalogue import CATALOGUE, Metric
from fairlane.telemetry.metrics import Histogram, Labels, Metrics

__all__ = ["export"]


def export(metrics: Metrics, provider: Any) -> None:
    """Make every metric of the catalogue an instrument of this provider. Whatever fails is counted."""
    try:
        meter = provider.get_meter("fairlane", version("fairlane"))
        for metric in CATALOGUE.values():
            _export(metrics, meter, metric)
    except Exception as error:
        metrics.failures.note("export", "exporting metrics through OpenTelemetry failed", error)


def _export(metrics: Metrics, meter: Any, metric: Metric) -> None:
    match metric.kind:
        case "histogram":
            instrument = meter.create_histogram(
                metric.dotted, metric.unit, metric.help, explicit_bucket_boundaries_advisory=metric.boundaries
            )
            histogram = metrics.histograms[metric.name]
            histogram.recorder = _recorder(metrics, histogram, instrument)
        case "counter":
            meter.create_observable_counter(metric.dotted, [_observer(metrics, metric)], metric.unit, metric.help)
        case "gauge":
            meter.create_observable_gauge(metric.dotted, [_observer(metrics, metric)], metric.unit, metric.help)


def _recorder(metrics: Metrics, histogram: Histogram, instrument: Any) -> Callable[[float, Labels], None]:
    names = histogram.metric.labels

    def record(value: float, labels: Labels) -> None:
        try:
            instrument.record(value, dict(zip(names, labels, strict=True)))
        except Exception as error:
            metrics.failures.note("export", f"recording {histogram.metric.name} failed", error)

    return record


def _observer(metrics: Metrics, metric: Metric) -> Callable[[Any], Iterable[Any]]:
    from opentelemetry.metrics import Observation

    def observe(_: Any) -> Iterable[Any]:
        # On a thread of the exporter: what is read here are copies.
        return [
            Observation(value, dict(zip(metric.labels, labels, strict=True)))
            for labels, value in metrics.value_of(metric.name)
        ]

    return observe
