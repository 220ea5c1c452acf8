"""Counting: the figures of one process, filled by its worker and its producers, a batch at a time where possible."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping

from fairlane.telemetry.catalogue import CATALOGUE, Metric
from fairlane.telemetry.failures import REASONS, Failures

__all__ = ["LOST", "NO_TASK", "OTHER", "Cell", "Counter", "Histogram", "Labels", "Metrics", "Reading", "Sample"]

Labels = tuple[str, ...]
Reading = Callable[[], Iterable[tuple[Labels, float]]]
"""What tells a gauge when it is asked for."""
Recorder = Callable[[float, Labels], None]
"""Somebody else who wants each value of a histogram: OpenTelemetry adds them up by itself."""

SERIES_AT_MOST = 1_000
"""Of one metric. Labels come from what programs declare; whoever makes names as they go pays with `other`."""
OTHER = "other"
NO_TASK = "none"
"""The label of what blocks an event loop and is no handler's doing."""
LOST = ("lease gone", "settled late")
"""How a worker finds out that a job was taken over from it."""


class Cell:
    """A histogram of one series: how many values were at most each boundary, and above the last."""

    __slots__ = ("counts", "total")

    def __init__(self, boundaries: int) -> None:
        self.counts = [0] * (boundaries + 1)
        self.total = 0.0


class Counter:
    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self.values: dict[Labels, float] = {}

    def add(self, labels: Labels = (), amount: float = 1) -> None:
        values = self.values
        if labels in values:
            values[labels] += amount
        else:
            labels = _bounded(values, labels)
            values[labels] = values.get(labels, 0) + amount


class Histogram:
    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self.cells: dict[Labels, Cell] = {}
        self.recorder: Recorder | None = None

    def observe(self, value: float, labels: Labels = ()) -> None:
        cell = self.cells.get(labels)
        if cell is None:
            labels = _bounded(self.cells, labels)
            cell = self.cells.setdefault(labels, Cell(len(self.metric.boundaries)))
        cell.counts[bisect_left(self.metric.boundaries, value)] += 1
        cell.total += value
        if self.recorder is not None:
            self.recorder(value, labels)


def _bounded(known: Mapping[Labels, object], labels: Labels) -> Labels:
    return labels if len(known) < SERIES_AT_MOST else (OTHER,) * len(labels)


Sample = tuple[Metric, Iterable[tuple[Labels, float | Cell]]]


class Metrics:
    """The registry: every metric of the catalogue, by its name."""

    def __init__(self, failures: Failures) -> None:
        self.failures = failures
        self.counters = {name: Counter(each) for name, each in CATALOGUE.items() if each.kind == "counter"}
        self.histograms = {name: Histogram(each) for name, each in CATALOGUE.items() if each.kind == "histogram"}
        self._readings: dict[str, list[Reading]] = {}

        self.enqueued = self.counters["fairlane_jobs_enqueued_total"]
        self.claimed = self.counters["fairlane_jobs_claimed_total"]
        self.started = self.counters["fairlane_jobs_started_total"]
        self.ended = self.counters["fairlane_jobs_ended_total"]
        self.empty_claims = self.counters["fairlane_claims_empty_total"]
        self.folded = self.counters["fairlane_bells_folded_total"]
        self.renewals = self.counters["fairlane_lease_renewals_total"]
        self.reaped = self.counters["fairlane_jobs_reaped_total"]
        self.recounted = self.counters["fairlane_gates_recounted_total"]
        self.claims_lost = self.counters["fairlane_claims_lost_total"]
        self.blocked = self.counters["fairlane_event_loop_blocked_seconds_total"]
        self.outages = self.counters["fairlane_store_outages_total"]
        self.wait = self.histograms["fairlane_job_wait_seconds"]
        self.run = self.histograms["fairlane_job_run_seconds"]
        self.claim_time = self.histograms["fairlane_claim_seconds"]
        self.lock_wait = self.histograms["fairlane_claim_lock_wait_seconds"]
        self.claim_size = self.histograms["fairlane_claim_jobs"]
        self.settle_time = self.histograms["fairlane_settle_seconds"]
        self.settle_size = self.histograms["fairlane_settle_jobs"]
        self.lag = self.histograms["fairlane_event_loop_lag_seconds"]
        # Known from the first scrape on: an increase needs a point to start from.
        for each in (self.renewals, self.reaped, self.outages):
            each.add((), 0)
        for reason in LOST:
            self.claims_lost.add((reason,), 0)

    def read(self, name: str, reading: Reading) -> Callable[[], None]:
        """Let a gauge be told by `reading`, beside others that tell it too, until what is returned is called."""
        readings = self._readings.setdefault(name, [])
        assert CATALOGUE[name].kind == "gauge", f"{name} is no gauge"
        readings.append(reading)
        return lambda: readings.remove(reading) if reading in readings else None

    def value_of(self, name: str) -> list[tuple[Labels, float]]:
        """What a counter or a gauge stands at, by its labels. A gauge that fails is left out, and counted."""
        if name == "fairlane_telemetry_failures_total":
            return [((reason,), float(self.failures.by_reason[reason])) for reason in REASONS]
        if (counter := self.counters.get(name)) is not None:
            return list(counter.values.items())
        found: dict[Labels, float] = {}
        for reading in list(self._readings.get(name, ())):
            try:
                for labels, value in reading():
                    found[labels] = found.get(labels, 0) + value
            except Exception as error:
                self.failures.note("collector", f"reading {name} failed", error)
        return list(found.items())

    def totals(self) -> dict[str, float]:
        """What was counted so far, each counter added up over its labels."""
        return {name: sum(value for _, value in self.value_of(name)) for name in self.counters}

    def samples(self) -> Iterator[Sample]:
        """All metrics that have something to tell, in the order of the catalogue."""
        for name, metric in CATALOGUE.items():
            if (histogram := self.histograms.get(name)) is not None:
                cells: list[tuple[Labels, float | Cell]] = list(histogram.cells.items())
                if cells:
                    yield metric, cells
            elif values := self.value_of(name):
                yield metric, values
