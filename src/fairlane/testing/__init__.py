"""For the tests of programs that use Fairlane: no waiting, no server, no randomness."""

from fairlane.clock import ManualClock
from fairlane.testing.jobs import (
    EnqueuedJob,
    Ran,
    assert_enqueued,
    enqueued_jobs,
    immediate,
    in_memory,
    run_for,
    run_until_idle,
)
from fairlane.testing.trials import Figure, Trial, arrivals, try_policy

__all__ = [
    "EnqueuedJob",
    "Figure",
    "ManualClock",
    "Ran",
    "Trial",
    "arrivals",
    "assert_enqueued",
    "enqueued_jobs",
    "immediate",
    "in_memory",
    "run_for",
    "run_until_idle",
    "try_policy",
]
