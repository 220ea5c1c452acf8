"""What a view says, as the browser draws it: the numbers as they are, and how they are to look."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from fairlane.operations.views import Chart, KeyMinute

__all__ = ["denial_chart", "hours_chart", "key_wait_chart", "sparkline", "throughput_chart", "wait_chart"]

CALM = ("series-1", "series-4", "series-3", "soft")
"""Of series that tell of no fault: none is red."""
HOUR = 3_600


def _series(label: str, values: Sequence[float], **look: Any) -> dict[str, Any]:
    return {"label": label, "values": [round(value, 3) for value in values], **look}


def _minutes(chart: Chart) -> list[float]:
    return [each.at.timestamp() for each in chart.minutes]


def throughput_chart(chart: Chart) -> dict[str, Any]:
    """Arrivals, ends and failures, by minute."""
    minutes = chart.minutes
    return {
        "x": _minutes(chart),
        "series": [
            _series("ended", [each.ended for each in minutes], color="series-1", fill=True),
            _series("arrived", [each.arrived for each in minutes], color="series-4", dash=[4, 3]),
            _series("failed", [each.failed for each in minutes], color="series-2"),
        ],
    }


def wait_chart(chart: Chart) -> dict[str, Any]:
    """How long those that started had waited."""
    minutes = chart.minutes
    return {
        "x": _minutes(chart),
        "unit": "s",
        "series": [
            _series("longest wait", [each.longest_wait for each in minutes], color="series-3", dash=[4, 3]),
            _series("mean wait", [each.mean_wait for each in minutes], color="series-1", fill=True),
        ],
    }


def key_wait_chart(minutes: Sequence[KeyMinute]) -> dict[str, Any]:
    """How long jobs of a key that started had waited."""
    return {
        "x": [each.at.timestamp() for each in minutes],
        "unit": "s",
        "series": [_series("mean wait", [each.mean_wait for each in minutes], color="series-1", fill=True)],
    }


def denial_chart(chart: Chart) -> dict[str, Any]:
    """How often the limits that did so most turned somebody away."""
    return {
        "x": _minutes(chart),
        "series": [
            _series(limit, [each.denied.get(limit, 0) for each in chart.minutes], color=color)
            for limit, color in zip(chart.denied, CALM, strict=False)
        ],
    }


def hours_chart(now: datetime, ended: Sequence[int], failed: Sequence[int]) -> dict[str, Any]:
    """What ended of a key, by hour."""
    last = int(now.timestamp()) // HOUR * HOUR
    return {
        "x": [last - HOUR * (len(ended) - 1 - number) for number in range(len(ended))],
        "series": [
            _series("ended", ended, color="series-1", fill=True),
            _series("failed", failed, color="series-2"),
        ],
    }


def sparkline(values: Sequence[float | None], width: float = 100.0, height: float = 20.0) -> str:
    """The points of a line through these values, the highest at the top. Where there is none, the last one holds on."""
    top = max((value for value in values if value is not None), default=0.0) or 1.0
    step = width / max(1, len(values) - 1)
    points, last = [], None
    for number, value in enumerate(values):
        last = last if value is None else value
        if last is not None:
            points.append(f"{number * step:.1f},{height - last / top * height:.1f}")
    return " ".join(points)
