"""Spans and exported metrics: imports OpenTelemetry, so it is itself imported only once a program has set up an SDK.

Each run begins a trace of its own: a job may wait for days and be tried many times, and a trace that long is of no use.
A link leads back to the enqueue; a retried run also links to the previous run, if this process knows it. A span that
cannot be made is counted, and the job goes on without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, wraps
from importlib.metadata import version
from traceback import format_exception
from typing import Any, Concatenate, ParamSpec, TypeVar

from opentelemetry.context import Context, attach, detach
from opentelemetry.metrics import Observation
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

from fairlane.job import Claim, NewJob
from fairlane.policy.partitions import parse_partition
from fairlane.redaction import without_secrets
from fairlane.telemetry.metrics import CATALOGUE, Failures, Labels, Metric, Metrics

P = ParamSpec("P")
T = TypeVar("T")

SYSTEM = "fairlane"
# The messaging conventions of OpenTelemetry, copied: the package that has them is not stable.
SYSTEM_NAME = "messaging.system"
OPERATION_NAME = "messaging.operation.name"
OPERATION_TYPE = "messaging.operation.type"
DESTINATION = "messaging.destination.name"
PARTITION = "messaging.destination.partition.id"
MESSAGE_ID = "messaging.message.id"
MESSAGE_COUNT = "messaging.batch.message_count"
BODY_SIZE = "messaging.message.body.size"
TASK, ATTEMPT, MAX_ATTEMPTS, OUTCOME = "fairlane.task", "fairlane.attempt", "fairlane.max_attempts", "fairlane.outcome"
ERROR_TYPE = "error.type"
LONGEST_STATUS = 500
_NOTHING = Context()
_text = TraceContextTextMapPropagator()


def _guarded(
    what: str,
) -> Callable[[Callable[Concatenate[Spans, P], T]], Callable[Concatenate[Spans, P], T | None]]:
    """`None` where a step fails, which is counted."""

    def guard(step: Callable[Concatenate[Spans, P], T]) -> Callable[Concatenate[Spans, P], T | None]:
        @wraps(step)
        def guarded(self: Spans, /, *args: P.args, **kwargs: P.kwargs) -> T | None:
            try:
                return step(self, *args, **kwargs)
            except Exception as error:
                self.failures.note("trace", f"{what} failed", error)
                return None

        return guarded

    return guard


class Spans:
    """Makes the spans of one app."""

    def __init__(self, provider: Any, failures: Failures) -> None:
        self.failures = failures
        self._tracer: Tracer = provider.get_tracer(SYSTEM, version("fairlane"))

    @_guarded("reading a span's context")
    def carried(self) -> dict[str, str] | None:
        """The context of the current span as W3C text, to travel with a job."""
        carrier: dict[str, str] = {}
        _text.inject(carrier)
        return carrier or None

    @contextmanager
    def sending(self, queues: Sequence[str], tasks: Sequence[str], count: int) -> Iterator[Span | None]:
        """The span of an enqueue; jobs made inside the block carry its context."""
        span = self._sending(queues, tasks, count)
        if span is None:
            yield None
            return
        token = self.attach(span)
        try:
            yield span
        except BaseException as error:
            self.end(span, error, is_failed=True)
            raise
        else:
            self.end(span)
        finally:
            self.detach(token)

    @_guarded("starting a span")
    def _sending(self, queues: Sequence[str], tasks: Sequence[str], count: int) -> Span:
        attributes: dict[str, Any] = {SYSTEM_NAME: SYSTEM, OPERATION_NAME: "send", OPERATION_TYPE: "send"}
        name = "send"
        if len(queues) == 1:
            attributes[DESTINATION], name = queues[0], f"send {queues[0]}"
        if len(tasks) == 1:
            attributes[TASK] = tasks[0]
        if count > 1:
            attributes[MESSAGE_COUNT] = count
        return self._tracer.start_span(name, kind=SpanKind.PRODUCER, attributes=attributes)

    @_guarded("describing a span")
    def stored(self, span: Span | None, jobs: Sequence[NewJob]) -> None:
        """An enqueue has stored these jobs."""
        if span is not None and len(jobs) == 1:
            span.set_attribute(MESSAGE_ID, str(jobs[0].id))

    @_guarded("starting a span")
    def processing(
        self, claim: Claim, origin: Mapping[str, str] | None, before: SpanContext | None, *, nested: bool
    ) -> Span:
        """Start the span of a run; `before` is the previous run. It has no parent but the enqueue, if `nested`."""
        queue, partition = parse_partition(claim.queue) or (claim.queue, None)
        attributes: dict[str, Any] = {
            SYSTEM_NAME: SYSTEM,
            OPERATION_NAME: "process",
            OPERATION_TYPE: "process",
            DESTINATION: queue,
            MESSAGE_ID: str(claim.id),
            BODY_SIZE: len(claim.payload),
            TASK: claim.task,
            ATTEMPT: claim.attempt,
            MAX_ATTEMPTS: claim.max_attempts,
        }
        attributes |= {f"fairlane.key.{name}": value for name, value in claim.keys.items() if value is not None}
        if partition is not None:
            attributes[PARTITION] = str(partition)
        enqueued = None if origin is None else self._origin(origin)
        links = [] if before is None else [Link(before, {"fairlane.link": "previous run"})]
        context = _NOTHING
        if enqueued is not None and nested:
            context = set_span_in_context(NonRecordingSpan(enqueued), _NOTHING)
        elif enqueued is not None:
            links.insert(0, Link(enqueued, {"fairlane.link": "enqueue"}))
        return self._tracer.start_span(f"process {queue}", context, SpanKind.CONSUMER, attributes, links)

    @_guarded("reading a job's trace")
    def _origin(self, carried: Mapping[str, str]) -> SpanContext | None:
        return _read(str(carried.get("traceparent", "")), str(carried.get("tracestate", "")))

    @_guarded("ending a span")
    def end(
        self,
        span: Span,
        error: BaseException | None = None,
        outcome: str | None = None,
        *,
        is_failed: bool = False,
        said: str | None = None,
    ) -> None:
        """End a span. If its work failed, it says why; for a run, in the stored words (`said`)."""
        if outcome is not None:
            span.set_attribute(OUTCOME, outcome)
        if is_failed:
            _mark_failed(span, error, outcome, said)
        span.end()

    @_guarded("entering a span")
    def attach(self, span: Span) -> object:
        """Make this span the current one."""
        return attach(set_span_in_context(span))

    @_guarded("leaving a span")
    def detach(self, token: Any) -> None:
        if token is not None:
            detach(token)


@lru_cache(maxsize=1_024)  # the jobs of a bulk all come from one span
def _read(traceparent: str, tracestate: str) -> SpanContext | None:
    """The span context of W3C text; `None` if the text is invalid."""
    carrier = {"traceparent": traceparent, "tracestate": tracestate} if tracestate else {"traceparent": traceparent}
    found = get_current_span(_text.extract(carrier, _NOTHING)).get_span_context()
    return found if found.is_valid else None


def _mark_failed(span: Span, error: BaseException | None, outcome: str | None, said: str | None) -> None:
    """Mark a span as failed, with an error or an outcome. The SDK itself would record the error with its secrets."""
    if error is None:
        span.set_attribute(ERROR_TYPE, outcome or "_OTHER")
        span.set_status(Status(StatusCode.ERROR, outcome))
        return
    kind = type(error)
    if said is None:
        message, trace = without_secrets(str(error)), without_secrets("".join(format_exception(error)))
    else:
        first, trace = said.partition("\n\n")[0], said
        message = first.removeprefix(f"{kind.__module__}.").removeprefix(f"{kind.__qualname__}: ")
    recorded = {
        "exception.type": f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins."),
        "exception.message": message,
        "exception.stacktrace": trace,
    }
    span.add_event("exception", recorded)
    span.set_attribute(ERROR_TYPE, kind.__qualname__)
    span.set_status(Status(StatusCode.ERROR, f"{kind.__name__}: {message}"[:LONGEST_STATUS]))


def export(metrics: Metrics, provider: Any) -> None:
    """Make every metric of the catalogue an instrument of this provider. Failures are counted."""
    try:
        meter = provider.get_meter("fairlane", version("fairlane"))
        for metric in CATALOGUE.values():
            _export(metrics, meter, metric)
    except Exception as error:
        metrics.failures.note("export", "exporting metrics through OpenTelemetry failed", error)


def _export(metrics: Metrics, meter: Any, metric: Metric) -> None:
    if metric.kind == "histogram":
        instrument = meter.create_histogram(
            metric.dotted, metric.unit, metric.help, explicit_bucket_boundaries_advisory=metric.boundaries
        )
        metrics.recorders[metric.name] = _recorder(metrics, metric, instrument)
        return

    def observe(_: Any) -> Iterable[Observation]:
        # On a thread of the exporter: what is read here are copies.
        return [
            Observation(value, dict(zip(metric.labels, labels, strict=True)))
            for labels, value in metrics.value_of(metric.name)
        ]

    create = meter.create_observable_counter if metric.kind == "counter" else meter.create_observable_gauge
    create(metric.dotted, [observe], metric.unit, metric.help)


def _recorder(metrics: Metrics, metric: Metric, instrument: Any) -> Callable[[float, Labels], None]:
    def record(value: float, labels: Labels) -> None:
        try:
            instrument.record(value, dict(zip(metric.labels, labels, strict=True)))
        except Exception as error:
            metrics.failures.note("export", f"recording {metric.name} failed", error)

    return record
