"""Traces through OpenTelemetry: a span for each enqueue, and one for each run, linked to it.

A run begins a trace of its own: a job may wait for days and be tried many times, and a trace that long is of no use.
The link leads back to the enqueue; a run that is tried again also has one to the run before it, where this process
knows it.

Nothing here imports OpenTelemetry unless the program has: who has not set up an SDK has none to send spans to. And
nothing here raises: a span that cannot be made is counted, and the job goes on without.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from fairlane.job import Claim, NewJob
from fairlane.policy.partitions import parse_partition
from fairlane.telemetry.metrics import Failures

if TYPE_CHECKING:
    from opentelemetry.trace import Span, SpanContext, Tracer


T = TypeVar("T")

Carried = dict[str, str]
"""A span's context as W3C text: `traceparent`, and `tracestate` where there is one."""

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


def provider_of(signal: str, kind: str) -> Any | None:
    """The provider that the program has set up for `trace` or `metrics`; `None` if it has none."""
    module = sys.modules.get(f"opentelemetry.{signal}")
    if module is None:
        return None
    provider = getattr(module, f"get_{kind}_provider")()
    # The API's own stand-ins for one that nobody has set up.
    return None if type(provider).__module__.startswith(f"opentelemetry.{signal}") else provider


class Tracing:
    """Makes the spans of one app."""

    def __init__(self, failures: Failures) -> None:
        self._failures = failures
        self._provider: Any = None
        self._tracer: Tracer | None = None
        self._spans: ModuleType | None = None

    def tracer(self) -> Tracer | None:
        """What makes spans; `None` while no SDK is set up."""
        if (module := sys.modules.get("opentelemetry.trace")) is None:
            return None
        provider = module.get_tracer_provider()
        if provider is not self._provider:
            self._provider = provider
            self._tracer = None
            if provider_of("trace", "tracer") is not None:
                self._spans = import_module("fairlane.telemetry.opentelemetry")
                self._tracer = provider.get_tracer(SYSTEM, version("fairlane"))
        return self._tracer

    def carried(self) -> Carried | None:
        """The span that this code runs in, to travel with a job."""
        if self.tracer() is None:
            return None
        return self._guarded("reading a span's context", self._api.carried_now)

    @contextmanager
    def sending(self, queues: Sequence[str], tasks: Sequence[str], count: int) -> Iterator[Sending | None]:
        """The span of an enqueue; what is stamped meanwhile carries its context."""
        tracer = self.tracer()
        if tracer is None:
            yield None
            return
        attributes: dict[str, Any] = {SYSTEM_NAME: SYSTEM, OPERATION_NAME: "send", OPERATION_TYPE: "send"}
        name = "send"
        if len(queues) == 1:
            attributes[DESTINATION], name = queues[0], f"send {queues[0]}"
        if len(tasks) == 1:
            attributes[TASK] = tasks[0]
        if count > 1:
            attributes[MESSAGE_COUNT] = count
        span = self._guarded("starting a span", lambda: self._api.start_producer(tracer, name, attributes))
        if span is None:
            yield None
            return
        with self._made_current(span):
            try:
                yield Sending(self, span)
            except BaseException as error:
                self.end(span, error, is_failed=True)
                raise
            self.end(span)

    def processing(
        self, claim: Claim, origin: Carried | None, before: SpanContext | None, *, nested: bool
    ) -> Span | None:
        """The span of a run, begun; `before` is the run before it."""
        tracer = self.tracer()
        if tracer is None:
            return None
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
        enqueued = self._guarded("reading a job's trace", lambda: self._api.origin_of(origin)) if origin else None
        links = [] if before is None else [(before, "previous run")]
        if enqueued is not None and not nested:
            links.insert(0, (enqueued, "enqueue"))
        name, parent = f"process {queue}", enqueued if nested else None
        return self._guarded(
            "starting a span", lambda: self._api.start_consumer(tracer, name, attributes, parent, links)
        )

    def end(
        self,
        span: Span,
        error: BaseException | None = None,
        outcome: str | None = None,
        *,
        is_failed: bool = False,
        said: str | None = None,
    ) -> None:
        """End a span; where its work failed, it says of what: of a run in the words that were stored (`said`)."""

        def end() -> None:
            if outcome is not None:
                span.set_attribute(OUTCOME, outcome)
            if is_failed:
                self._api.mark_failed(span, error, outcome, said)
            span.end()

        self._guarded("ending a span", end)

    @contextmanager
    def _made_current(self, span: Span) -> Iterator[None]:
        token = self.attach(span)
        try:
            yield
        finally:
            self.detach(token)

    def attach(self, span: Span) -> object:
        """Let what runs from here on be inside of this span."""
        return self._guarded("entering a span", lambda: self._api.enter(span))

    def detach(self, token: object) -> None:
        if token is not None:
            self._guarded("leaving a span", lambda: self._api.leave(token))

    @property
    def _api(self) -> Any:
        assert self._spans is not None, "no span is made before an SDK was found"
        return self._spans

    def _guarded(self, what: str, call: Callable[[], T]) -> T | None:
        try:
            return call()
        except Exception as error:
            self._failures.note("trace", f"{what} failed", error)
            return None


class Sending:
    """The span of an enqueue, while it is under way."""

    __slots__ = ("_span", "_tracing")

    def __init__(self, tracing: Tracing, span: Span) -> None:
        self._tracing = tracing
        self._span = span

    def stored(self, jobs: Sequence[NewJob]) -> None:
        """These are stored now."""
        span = self._span
        if len(jobs) == 1:
            self._tracing._guarded("describing a span", lambda: span.set_attribute(MESSAGE_ID, str(jobs[0].id)))
