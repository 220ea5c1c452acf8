"""Minutes as charts have them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fairlane.clock import SECOND, Instant, as_datetime
from fairlane.operations.views import Chart, KeyMinute, MinuteView
from fairlane.scheduler.figures import Minute, Span

__all__ = ["MINUTE", "SHOWN", "chart_of", "key_minutes", "per_minute"]

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
    shown = [sums.get(number, Minute(minute=number)) for number in _shown(sums, now)]
    denied: dict[str, int] = {}
    for each in shown:
        for limit, count in each.denied.items():
            denied[limit] = denied.get(limit, 0) + count
    return Chart(
        minutes=[_view(each) for each in shown],
        denied=dict(sorted(denied.items(), key=lambda item: (-item[1], item[0]))),
    )


def key_minutes(minutes: Iterable[Span], now: Instant) -> list[KeyMinute]:
    """The last hour of a key."""
    known = {each.number: each for each in minutes}
    return [
        KeyMinute(
            at=as_datetime(each.number * MINUTE),
            started=each.started,
            ended=each.done,
            failed=each.failed,
            mean_wait=_mean(each.waited, each.started),
            mean_run=_mean(each.ran, each.done),
        )
        for each in (known.get(number, Span(number)) for number in _shown(known, now))
    ]


def _shown(known: Iterable[int], now: Instant) -> range:
    """Which minutes a chart has."""
    # The minute that has just begun would look like a standstill, unless it is the only one of which there is anything.
    current = now // MINUTE
    last = current - 1 if any(number < current for number in known) else current
    return range(last - SHOWN + 1, last + 1)


def _mean(microseconds: int, count: int) -> float:
    """In seconds."""
    return microseconds / count / SECOND if count else 0.0


def _view(minute: Minute) -> MinuteView:
    return MinuteView(
        at=as_datetime(minute.minute * MINUTE),
        arrived=minute.arrived,
        started=minute.started,
        ended=minute.ended,
        failed=minute.failed,
        mean_wait=_mean(minute.waited, minute.started),
        longest_wait=minute.waited_longest / SECOND,
        mean_run=_mean(minute.ran, minute.ended),
        denied=minute.denied,
    )


def per_minute(minutes: Sequence[Minute], now: Instant) -> tuple[float, float, float]:
    """Starts, ends and failures in a minute, as of late."""
    current = now // MINUTE
    since = max(current - RECENT, min((each.minute for each in minutes), default=current))
    # Of a queue that has just begun to work, the minute that has just begun is all there is.
    until = current if since < current - 1 else current + 1
    recent = [each for each in minutes if since <= each.minute < until]
    passed = max(1.0, (min(now, until * MINUTE) - since * MINUTE) / MINUTE)
    return (
        sum(each.started for each in recent) / passed,
        sum(each.ended for each in recent) / passed,
        sum(each.failed for each in recent) / passed,
    )
