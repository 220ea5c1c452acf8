"""The runtime: claims jobs, runs them, settles them, and keeps the database tidy while it does."""

from fairlane.worker.options import QueueShare, WorkerOptions
from fairlane.worker.reports import Health
from fairlane.worker.runs import JobContext, Middleware, context
from fairlane.worker.worker import Worker, run_mate, run_worker

__all__ = [
    "Health",
    "JobContext",
    "Middleware",
    "QueueShare",
    "Worker",
    "WorkerOptions",
    "context",
    "run_mate",
    "run_worker",
]
