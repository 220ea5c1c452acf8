"""Every metric that there is: one table for the code, the reference, the Grafana dashboard and the alert rules.

Names are those of Prometheus. OpenTelemetry has them without the endings that Prometheus wants, and with dots:
`fairlane_job_wait_seconds` is `fairlane.job.wait` there. Labels are bounded: queues and tasks are declared by programs,
outcomes, reasons and loops are our words, and of keys only the first few that have most jobs waiting are named.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["CATALOGUE", "JOBS", "SECONDS", "Metric", "Scope"]

Scope = Literal["process", "fleet"]

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
"""From a claim's millisecond to a job that waits for half an hour."""
JOBS = (0.0, 1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """What a metric is called, what it means, and what tells its series apart."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    """As OpenTelemetry writes units: `s`, `1`, `{job}`."""
    help: str
    labels: tuple[str, ...] = ()
    scope: Scope = "process"
    """`fleet`: read from the database, and so the same wherever it is asked for. Take its `max`, not its `sum`."""
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
    _counter("fairlane_bells_folded_total", "{bell}", "Arrivals and releases that claims have folded.", "queue"),
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
