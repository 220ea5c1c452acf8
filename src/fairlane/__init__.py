"""Fairlane: a durable job queue in which every tenant gets its turn.

What programs write every day is here. The rest has a module of its own: `fairlane.errors`, `fairlane.worker`,
`fairlane.operations`, `fairlane.simulation`, `fairlane.testing`; the reference lists them.
"""

from fairlane.app import App
from fairlane.cron.schedules import Schedule
from fairlane.effects import Effects
from fairlane.errors import Cancel, Dead, FairlaneError, Retry, Snooze
from fairlane.job import Outcome, State
from fairlane.policy import (
    AdaptiveConcurrency,
    Backlog,
    Breaker,
    Concurrency,
    Fair,
    Limit,
    Policy,
    Rate,
    Sequence,
    Unique,
)
from fairlane.queue import HeldClaim, Queue
from fairlane.task import Backoff, BoundTask, Call, Enqueued, Foreseen, Job, Task
from fairlane.worker.runs import context

__all__ = [
    "AdaptiveConcurrency",
    "App",
    "Backlog",
    "Backoff",
    "BoundTask",
    "Breaker",
    "Call",
    "Cancel",
    "Concurrency",
    "Dead",
    "Effects",
    "Enqueued",
    "Fair",
    "FairlaneError",
    "Foreseen",
    "HeldClaim",
    "Job",
    "Limit",
    "Outcome",
    "Policy",
    "Queue",
    "Rate",
    "Retry",
    "Schedule",
    "Sequence",
    "Snooze",
    "State",
    "Task",
    "Unique",
    "context",
]
