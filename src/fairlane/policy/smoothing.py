"""Moving averages of run times."""

from __future__ import annotations

__all__ = ["SMOOTHING", "smoothed"]

SMOOTHING = 0.1
"""The weight of one run in a moving average."""


def smoothed(average: float, observed: float, runs: int, weight: float = SMOOTHING) -> float:
    """A moving average of run time, after `runs` more of the mean length `observed`."""
    if average <= 0.0:
        return observed
    if runs == 1:
        return average + weight * (observed - average)
    return average + (1.0 - (1.0 - weight) ** runs) * (observed - average)
