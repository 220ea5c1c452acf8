"""What an app tells of itself: its event handlers, its metrics, its traces, and what went wrong with them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import UUID

from fairlane.clock import Instant
from fairlane.events import JobsEnqueued
from fairlane.job import NewJob
from fairlane.policy.unique import Conflict
from fairlane.telemetry.failures import Failures
from fairlane.telemetry.fleet import FleetSource
from fairlane.telemetry.hooks import Handler, Hooks
from fairlane.telemetry.metrics import Metrics
from fairlane.telemetry.opentelemetry import export
from fairlane.telemetry.tracing import Tracing, provider_of


class Telemetry:
    """One for each app."""

    def __init__(self, fleet: FleetSource | None = None) -> None:
        self.failures = Failures()
        self.hooks = Hooks(self.failures)
        self.tracing = Tracing(self.failures)
        self.metrics: Metrics | None = None
        """`None` while nobody reads them."""
        self.fleet = fleet
        """What the database tells of the whole fleet."""
        self._exported_to: Any = None

    def on_event(self, *given: Any) -> Any:
        """As a decorator, bare or with kinds of events, or as a call with a handler."""
        if len(given) == 1 and not inspect.isclass(given[0]):
            return self._added(given[0], ())
        return lambda handler: self._added(handler, given)

    def _added(self, handler: Handler, kinds: Sequence[object]) -> Handler:
        self.hooks.add(handler, kinds)
        return handler

    def measured(self, *, wanted: bool = False) -> Metrics | None:
        """The metrics, if they are wanted here, or by an OpenTelemetry SDK that the program has set up."""
        provider = provider_of("metrics", "meter")
        if self.metrics is None and (wanted or provider is not None):
            self.metrics = Metrics(self.failures)
        if self.metrics is not None and provider is not None and provider is not self._exported_to:
            self._exported_to = provider
            export(self.metrics, provider)
        return self.metrics

    @property
    def is_exported(self) -> bool:
        """Whether OpenTelemetry has the metrics."""
        return self._exported_to is not None

    @property
    def is_watched(self) -> bool:
        """Whether anybody wants to know what a worker does."""
        return bool(self.hooks) or self.metrics is not None or self.tracing.tracer() is not None

    def enqueued(self, jobs: Sequence[NewJob], conflicts: Mapping[UUID, Conflict], now: Callable[[], Instant]) -> None:
        """Tell of jobs that were stored, but for those that met another in their place."""
        is_heard = self.hooks.wants(JobsEnqueued)
        if self.metrics is None and not is_heard:
            return
        groups: dict[tuple[str, str], list[UUID]] = {}
        for job in jobs:
            conflict = conflicts.get(job.id) if conflicts else None
            if conflict is None or conflict.outcome.is_stored:
                groups.setdefault((job.queue, job.task), []).append(job.id)
        for (queue, task), ids in groups.items():
            if self.metrics is not None:
                self.metrics.enqueued.add((queue, task), len(ids))
            if is_heard:
                self.hooks.emit(JobsEnqueued(at=now(), queue=queue, task=task, jobs=tuple(ids)))
