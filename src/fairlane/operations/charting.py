"""Minutes as charts have them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fairlane.clock import SECOND, Instant, as_datetime
from fairlane.operations.views import Chart, MinuteView
from fairlane.scheduler.figures import Minute

__all__ = ["MINUTE", "SHOWN", "chart_of", "per_minute"]

MINUTE = 60 * SECOND
SHOWN = 60
"""Minutes of a chart."""
RECENT = 5
"""Minutes that say how things go now. The one that has just begun says too little, and is left out."""


def chart_of(minutes: Iterable[Minute], now: Instant) -> Chart:
    """The last hour of several queues together."""
    sums: dict[int, Minute] = {}
    for each in minutes:
        known = sums.get(each.minute)
        sums[each.minute] = each if known is None else known.and_also(each)
    # The minute that has just begun would look like a standstill, unless it is the only one of which there is anything.
    current = now // MINUTE
    last = current - 1 if any(number < current for number in sums) else current
    shown = [sums.get(number, Minute(minute=number)) for number in range(last - SHOWN + 1, last + 1)]
    denied: dict[str, int] = {}
    for each in shown:
        for limit, count in each.denied.items():
            denied[limit] = denied.get(limit, 0) + count
    return Chart(
        minutes=[_view(each) for each in shown],
        denied=dict(sorted(denied.items(), key=lambda item: (-item[1], item[0]))),
    )


def _view(minute: Minute) -> MinuteView:
    return MinuteView(
        at=as_datetime(minute.minute * MINUTE),
        arrived=minute.arrived,
        started=minute.started,
        ended=minute.ended,
        failed=minute.failed,
        mean_wait=minute.waited / minute.started / SECOND if minute.started else 0.0,
        longest_wait=minute.waited_longest / SECOND,
        mean_run=minute.ran / minute.ended / SECOND if minute.ended else 0.0,
        denied=minute.denied,
    )


def per_minute(minutes: Sequence[Minute], now: Instant) -> tuple[float, float, float]:
    """Starts, ends and failures in a minute, as of late."""
    current = now // MINUTE
    recent = [each for each in minutes if current - RECENT <= each.minute < current]
    return (
        sum(each.started for each in recent) / RECENT,
        sum(each.ended for each in recent) / RECENT,
        sum(each.failed for each in recent) / RECENT,
    )
