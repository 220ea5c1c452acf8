"""The part of tracing that imports OpenTelemetry: imported by `tracing` once a program has set up an SDK."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from importlib.metadata import version
from traceback import format_exception
from typing import Any

from opentelemetry.context import Context, attach, detach  # noqa: F401 - for `Tracing`
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from fairlane.redaction import without_secrets
from fairlane.telemetry.metrics import CATALOGUE, Histogram, Labels, Metric, Metrics

ERROR_TYPE = "error.type"
LONGEST_STATUS = 500
_NOTHING = Context()
_text = TraceContextTextMapPropagator()


def carried_now() -> dict[str, str] | None:
    """The span that this code runs in, as W3C text."""
    carrier: dict[str, str] = {}
    _text.inject(carrier)
    return carrier or None


@lru_cache(maxsize=1_024)  # the jobs of a bulk all come from one span
def _read(traceparent: str, tracestate: str) -> SpanContext | None:
    carrier = {"traceparent": traceparent, "tracestate": tracestate} if tracestate else {"traceparent": traceparent}
    found = get_current_span(_text.extract(carrier, _NOTHING)).get_span_context()
    return found if found.is_valid else None


def origin_of(carried: Mapping[str, str]) -> SpanContext | None:
    """The span context of W3C text; `None` if the text is invalid."""
    return _read(str(carried.get("traceparent", "")), str(carried.get("tracestate", "")))


def start_consumer(
    tracer: Tracer,
    name: str,
    attributes: Mapping[str, Any],
    parent: SpanContext | None,
    links: Sequence[tuple[SpanContext, str]],
) -> Span:
    """A run has no parent but the given one, whatever the current span."""
    context = _NOTHING if parent is None else set_span_in_context(NonRecordingSpan(parent), _NOTHING)
    linked = [Link(to, {"fairlane.link": role}) for to, role in links]
    return tracer.start_span(name, context, SpanKind.CONSUMER, attributes, linked)


def mark_failed(span: Span, error: BaseException | None, outcome: str | None, said: str | None) -> None:
    """Mark a span as failed, with an error or an outcome. The SDK itself would record the error with its secrets."""
    if error is not None:
        kind = type(error)
        trace = without_secrets("".join(format_exception(error))) if said is None else said
        message = without_secrets(str(error))
        if said is not None:
            message = (
                said.partition("\n\n")[0].removeprefix(f"{kind.__module__}.").removeprefix(f"{kind.__qualname__}: ")
            )
        told = {
            "exception.type": f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins."),
            "exception.message": message,
            "exception.stacktrace": trace,
        }
        span.add_event("exception", told)
        span.set_attribute(ERROR_TYPE, kind.__qualname__)
        span.set_status(Status(StatusCode.ERROR, f"{kind.__name__}: {message}"[:LONGEST_STATUS]))
    else:
        span.set_attribute(ERROR_TYPE, outcome or "_OTHER")
        span.set_status(Status(StatusCode.ERROR, outcome))


def export(metrics: Metrics, provider: Any) -> None:
    """Make every metric of the catalogue an instrument of this provider. Failures are counted."""
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
