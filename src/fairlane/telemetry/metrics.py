"""All metrics: one table for the code, the reference, the Grafana dashboard and the alert rules.

Names follow Prometheus. OpenTelemetry gets them with dots and without the suffixes of Prometheus:
`fairlane_job_wait_seconds` is `fairlane.job.wait` there. Labels are bounded: programs declare queues and tasks;
outcomes, reasons and loops are our own; and of keys, only those with most jobs waiting are named.
"""

from __future__ import annotations

import asyncio
import collections
import logging
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isfinite
from time import monotonic
from typing import Literal

from fairlane.redaction import error_text

log = logging.getLogger("fairlane.telemetry")

REASONS = ("handler", "dropped", "trace", "export", "collector", "endpoint")
"""An event handler raised or was too slow; a span, an exporter, a reading of stats or a response failed."""


class Failures:
    """Counts failures by reason. The first of a kind is logged, then the 10th, the 100th and so on."""

    def __init__(self) -> None:
        self.by_reason: collections.Counter[str] = collections.Counter()
        self._kinds: collections.Counter[tuple[str, str, str]] = collections.Counter()

    @property
    def total(self) -> int:
        return self.by_reason.total()

    def note(self, reason: str, what: str, error: BaseException | None = None, count: int = 1) -> None:
        """`what` names the thing that failed."""
        assert reason in REASONS, reason
        self.by_reason[reason] += count
        kind = (reason, what, "" if error is None else type(error).__name__)
        before = self._kinds[kind]
        self._kinds[kind] += count
        if len(str(before)) == len(str(before + count)) and before:
            return
        cause = "" if error is None else f": {error_text(error)}"
        log.error("%s (%s, %d so far; jobs go on)%s", what, reason, before + count, cause, exc_info=error)


Scope = Literal["process", "fleet"]

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
"""From a claim's millisecond to a job that waits for half an hour."""
JOBS = (0.0, 1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """The name, the meaning and the labels of a metric."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    """As OpenTelemetry writes units: `s`, `1`, `{job}`."""
    help: str
    labels: tuple[str, ...] = ()
    scope: Scope = "process"
    """`fleet`: read from the database, so the same in every process. Aggregate it with `max`, not `sum`."""
    boundaries: tuple[float, ...] = ()

    @property
    def dotted(self) -> str:
        """Its name for OpenTelemetry."""
        plain = self.name
        for ending in ("_total", "_seconds", "_ratio"):
            plain = plain.removesuffix(ending)
        return plain.replace("_", ".")


def _counter(name: str, unit: str, help: str, *labels: str) -> Metric:
    return Metric(name, "counter", unit, help, labels)


def _gauge(name: str, unit: str, help: str, *labels: str, scope: Scope = "process") -> Metric:
    return Metric(name, "gauge", unit, help, labels, scope)


def _seconds(name: str, help: str, *labels: str) -> Metric:
    return Metric(name, "histogram", "s", help, labels, boundaries=SECONDS)


def _sizes(name: str, help: str, *labels: str) -> Metric:
    return Metric(name, "histogram", "{job}", help, labels, boundaries=JOBS)


def _fleet(name: str, unit: str, help: str, *labels: str) -> Metric:
    return _gauge(name, unit, help, *labels, scope="fleet")


_METRICS = (
    # What passes through.
    _counter("fairlane_jobs_enqueued_total", "{job}", "Jobs that this process has stored.", "queue", "task"),
    _counter("fairlane_jobs_claimed_total", "{job}", "Jobs that were handed to this worker.", "queue"),
    _counter(
        "fairlane_jobs_started_total",
        "{job}",
        "Jobs handed to handlers; those given back before they began end as `released`.",
        "queue",
        "task",
    ),
    _counter("fairlane_jobs_ended_total", "{job}", "Handlers that have ended.", "queue", "task", "outcome"),
    _seconds("fairlane_job_wait_seconds", "From enqueue to the start of the first attempt; a delay is in it.", "queue"),
    _seconds("fairlane_job_run_seconds", "How long handlers ran.", "queue", "task"),
    # What is in hand.
    _gauge("fairlane_jobs_running", "{job}", "Jobs that run here now.", "queue"),
    _gauge("fairlane_jobs_waiting_for_a_slot", "{job}", "Jobs claimed ahead, which start as slots become free."),
    _gauge("fairlane_jobs_unsettled", "{job}", "Outcomes that are on their way to the database."),
    _gauge("fairlane_slots", "{job}", "Jobs that this worker may run at the same time."),
    # The database, as this worker sees it.
    _seconds("fairlane_claim_seconds", "How long a claim took, the wait for its lock included.", "queue"),
    _seconds("fairlane_claim_lock_wait_seconds", "How long a claim waited for its lock.", "queue"),
    _sizes("fairlane_claim_jobs", "Jobs that a claim brought.", "queue"),
    _counter("fairlane_claims_empty_total", "{claim}", "Claims that brought nothing.", "queue"),
    _counter("fairlane_lane_events_folded_total", "{event}", "Arrivals and releases that claims have folded.", "queue"),
    _seconds("fairlane_settle_seconds", "How long it took to record a batch of outcomes."),
    _sizes("fairlane_settle_jobs", "Outcomes that were recorded together."),
    _counter("fairlane_lease_renewals_total", "{lease}", "Leases that were renewed."),
    _counter("fairlane_jobs_reaped_total", "{job}", "Jobs that this worker took from workers that were gone."),
    _counter(
        "fairlane_gates_recounted_total", "{gate}", "Gates that did not count what ran, and were counted anew.", "queue"
    ),
    _counter("fairlane_claims_lost_total", "{job}", "Jobs that were taken over from this worker.", "reason"),
    _counter("fairlane_store_outages_total", "{outage}", "How often the database could not be reached."),
    _gauge("fairlane_store_connected", "1", "1 while the database answers, else 0."),
    # The process itself.
    _gauge("fairlane_loop_alive", "1", "0 once this loop of the worker has died, else 1.", "loop"),
    _seconds("fairlane_event_loop_lag_seconds", "How late the event loop was: handlers that block it show here."),
    _counter(
        "fairlane_event_loop_blocked_seconds_total",
        "s",
        "For how long handlers of a task blocked the event loop, in blocks of a second or more.",
        "task",
    ),
    _gauge("fairlane_worker_stopping", "1", "1 once the worker has been told to stop, else 0."),
    _counter("fairlane_telemetry_failures_total", "{failure}", "What went wrong with telemetry itself.", "reason"),
    # The whole fleet, from the database.
    _fleet("fairlane_queue_ready_jobs", "{job}", "Jobs that wait and are due.", "queue"),
    _fleet("fairlane_queue_held_jobs", "{job}", "Of those, what a limit or a pause holds back.", "queue", "limit"),
    _fleet("fairlane_queue_startable_jobs", "{job}", "Of those, what no limit and no pause holds back.", "queue"),
    _fleet("fairlane_queue_running_jobs", "{job}", "Jobs that run, anywhere.", "queue"),
    _fleet("fairlane_queue_scheduled_jobs", "{job}", "Jobs that are not due yet.", "queue"),
    _fleet("fairlane_queue_dead_jobs", "{job}", "Jobs that were set aside as dead.", "queue"),
    _fleet("fairlane_queue_day_ended_jobs", "{job}", "Runs that ended in the last 24 hours, failed ones too.", "queue"),
    _fleet("fairlane_queue_day_failed_jobs", "{job}", "Of those, what failed; each attempt counts.", "queue"),
    _fleet("fairlane_queue_oldest_wait_seconds", "s", "For how long the oldest ready job has waited.", "queue"),
    _fleet("fairlane_limit_saturation_ratio", "1", "How much of a limit is used, 1 if all of it.", "queue", "limit"),
    _fleet("fairlane_key_waiting_jobs", "{job}", "Jobs that wait, of the keys with most.", "queue", "key"),
    _fleet("fairlane_queue_workers", "{worker}", "Workers that serve a queue: alive, and not stopping.", "queue"),
    _fleet(
        "fairlane_queue_long_runs",
        "{job}",
        "Runs that take far longer than usual, or hold a limit for which others wait.",
        "queue",
        "task",
    ),
    _fleet("fairlane_workers_blocked", "{worker}", "Workers whose event loop a handler of this task blocks.", "task"),
    _fleet("fairlane_workers_alive", "{worker}", "Workers that have given a sign of life."),
)  # fmt: skip

CATALOGUE: dict[str, Metric] = {metric.name: metric for metric in _METRICS}


Labels = tuple[str, ...]
Reading = Callable[[], Iterable[tuple[Labels, float]]]
"""Reads a gauge."""
Recorder = Callable[[float, Labels], None]
"""Receives each value of a histogram: OpenTelemetry aggregates by itself."""

SERIES_AT_MOST = 1_000
"""Series of one metric, at most. Labels come from what programs declare; names beyond that count as `other`."""
OTHER = "other"
NO_TASK = "none"
"""The label of blocks of an event loop that no handler causes."""
LOST = ("lease gone", "settled late")
"""How a worker learns that a job was taken over from it."""


class Cell:
    """A histogram of one series: how many values fell below each boundary, and above the last."""

    __slots__ = ("counts", "total")

    def __init__(self, boundaries: int) -> None:
        self.counts = [0] * (boundaries + 1)
        self.total = 0.0


Sample = tuple[Metric, Iterable[tuple[Labels, float | Cell]]]


class Metrics:
    """The registry: every metric of the catalogue, by its name."""

    def __init__(self, failures: Failures) -> None:
        self.failures = failures
        self._counts: dict[str, dict[Labels, float]] = {
            name: {} for name, each in CATALOGUE.items() if each.kind == "counter"
        }
        self._cells: dict[str, dict[Labels, Cell]] = {
            name: {} for name, each in CATALOGUE.items() if each.kind == "histogram"
        }
        self.recorders: dict[str, Recorder] = {}
        self._readings: dict[str, list[Reading]] = {}
        # Known from the first scrape on: an increase needs a point to start from.
        for name in ("fairlane_lease_renewals_total", "fairlane_jobs_reaped_total", "fairlane_store_outages_total"):
            self.add(name, (), 0)
        for reason in LOST:
            self.add("fairlane_claims_lost_total", (reason,), 0)

    def add(self, name: str, labels: Labels = (), amount: float = 1) -> None:
        """Add to a counter."""
        values = self._counts[name]
        if labels not in values:
            labels = _bounded(values, labels)
        values[labels] = values.get(labels, 0) + amount

    def observe(self, name: str, value: float, labels: Labels = ()) -> None:
        """Count a value in a histogram."""
        cells, boundaries = self._cells[name], CATALOGUE[name].boundaries
        if labels not in cells:
            labels = _bounded(cells, labels)
            cells.setdefault(labels, Cell(len(boundaries)))
        cell = cells[labels]
        cell.counts[bisect_left(boundaries, value)] += 1
        cell.total += value
        if (recorder := self.recorders.get(name)) is not None:
            recorder(value, labels)

    def read(self, name: str, reading: Reading) -> Callable[[], None]:
        """Add a reading to a gauge, beside any others. Returns a function that removes it."""
        readings = self._readings.setdefault(name, [])
        assert CATALOGUE[name].kind == "gauge", f"{name} is no gauge"
        readings.append(reading)
        return lambda: readings.remove(reading) if reading in readings else None

    def value_of(self, name: str) -> list[tuple[Labels, float]]:
        """The values of a counter or a gauge, by labels. A reading that fails is left out, and counted."""
        if name == "fairlane_telemetry_failures_total":
            return [((reason,), float(self.failures.by_reason[reason])) for reason in REASONS]
        if name in self._counts:
            return list(self._counts[name].items())
        found: dict[Labels, float] = {}
        for reading in list(self._readings.get(name, ())):
            try:
                for labels, value in reading():
                    found[labels] = found.get(labels, 0) + value
            except Exception as error:
                self.failures.note("collector", f"reading {name} failed", error)
        return list(found.items())

    def totals(self) -> dict[str, float]:
        """The total of each counter over its labels."""
        return {name: sum(value for _, value in self.value_of(name)) for name in self._counts}

    def samples(self) -> Iterator[Sample]:
        """All metrics that have values, in the order of the catalogue."""
        for name, metric in CATALOGUE.items():
            values: Sequence[tuple[Labels, float | Cell]] = (
                list(self._cells[name].items()) if name in self._cells else self.value_of(name)
            )
            if values:
                yield metric, values


def _bounded(known: Mapping[Labels, object], labels: Labels) -> Labels:
    return labels if len(known) < SERIES_AT_MOST else (OTHER,) * len(labels)


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def as_text(samples: Iterable[Sample]) -> str:
    """The metrics in the text format of Prometheus."""
    return "".join(f"{line}\n" for metric, values in samples for line in _lines(metric, values))


def _lines(metric: Metric, values: Iterable[tuple[Labels, float | Cell]]) -> Iterator[str]:
    yield f"# HELP {metric.name} {_escaped(metric.help)}"
    yield f"# TYPE {metric.name} {metric.kind}"
    for labels, value in values:
        pairs = list(zip(metric.labels, labels, strict=True))
        if isinstance(value, Cell):
            counts = list(accumulate(value.counts))
            for boundary, count in zip([*map(_number, metric.boundaries), "+Inf"], counts, strict=True):
                yield f"{metric.name}_bucket{_shown([*pairs, ('le', boundary)])} {count}"
            yield f"{metric.name}_sum{_shown(pairs)} {_number(value.total)}"
            yield f"{metric.name}_count{_shown(pairs)} {counts[-1]}"
        else:
            yield f"{metric.name}{_shown(pairs)} {_number(value)}"


def _shown(pairs: Iterable[tuple[str, str]]) -> str:
    inside = ",".join(f'{name}="{_escaped(value, quoted=True)}"' for name, value in pairs)
    return f"{{{inside}}}" if inside else ""


def _escaped(text: str, *, quoted: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quoted else text


def _number(value: float) -> str:
    if not isfinite(value):
        return "NaN" if value != value else "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) else repr(float(value))


FleetMetrics = Mapping[str, Iterable[tuple[Labels, float]]]
"""The values of fleet metrics, by their name."""
FleetSource = Callable[[int], Awaitable[FleetMetrics]]
"""Reads them, naming at most so many keys."""

LOOKED_UP_EVERY = 10.0
FOUND_WITHIN = 5.0
FORGOTTEN_AFTER = 60.0
"""Seconds after which values that could not be read again are dropped: old ones mislead."""

FLEET = tuple(metric.name for metric in CATALOGUE.values() if metric.scope == "fleet")


class Fleet:
    """What the database says about all workers and queues, cached for a moment."""

    def __init__(self, source: FleetSource, failures: Failures, keys: int) -> None:
        self._source = source
        self._keys = keys
        self._failures = failures
        self._stats: FleetMetrics = {}
        self._looked_at = self._found_at = -FORGOTTEN_AFTER
        self._looking = asyncio.Lock()

    async def refresh(self) -> None:
        """Read again, unless that was done a moment ago. Never raises."""
        async with self._looking:
            if monotonic() - self._looked_at < LOOKED_UP_EVERY:
                return
            self._looked_at = monotonic()
            try:
                async with asyncio.timeout(FOUND_WITHIN):
                    self._stats = await self._source(self._keys)
                self._found_at = monotonic()
            except Exception as error:
                self._failures.note("collector", "looking up the figures of the fleet failed", error)

    async def text(self) -> str:
        """All current values, in the text format of Prometheus."""
        await self.refresh()
        return as_text((CATALOGUE[name], found) for name in FLEET if (found := self.value_of(name)))

    def value_of(self, name: str) -> list[tuple[Labels, float]]:
        is_old = monotonic() - self._found_at > FORGOTTEN_AFTER
        return [] if is_old else list(self._stats.get(name, ()))
