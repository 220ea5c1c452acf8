"""Minutes as charts have them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

from fairlane.clock import SECOND, Instant, as_datetime
from fairlane.operations.views import Chart, KeyMinute, MinuteView
from fairlane.stats.keys import Minute, Span

__all__ = ["MINUTE", "SHOWN", "chart_of", "key_minutes", "lately", "latest", "per_minute"]

MINUTE = 60 * SECOND
SHOWN = 60
"""Minutes of a chart."""
RECENT = 5
"""Minutes that say how things go of late, besides the one that has begun."""


def chart_of(minutes: Iterable[Minute], now: Instant) -> Chart:
    """The last hour of several queues together."""
    sums: dict[int, Minute] = {}
    for each in minutes:
        known = sums.get(each.minute)
        sums[each.minute] = each if known is None else known.and_also(each)
    shown = [sums.get(number, Minute(minute=number)) for number in _shown(now)]
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
            ended=each.ended,
            failed=each.failed,
            mean_wait=_mean(each.waited, each.claimed),
            mean_run=_mean(each.ran, each.timed),
        )
        for each in (known.get(number, Span(number)) for number in _shown(now))
    ]


def _shown(now: Instant) -> range:
    """Which minutes a chart has: up to the one that has begun, as rates do."""
    return range(now // MINUTE - SHOWN + 1, now // MINUTE + 1)


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
        mean_wait=_mean(minute.waited, minute.claimed),
        longest_wait=minute.waited_longest / SECOND,
        mean_run=_mean(minute.ran, minute.timed),
        denied=minute.denied,
    )


def per_minute(minutes: Iterable[Minute], now: Instant) -> tuple[float, float, float]:
    """Starts, ends and failures of the last 60 seconds. Of a minute that is partly older, those count that came since,
    if they came evenly from the first to the last of that minute."""
    since = now - MINUTE
    started = ended = failed = 0.0
    for each in minutes:
        if each.claimed_in is not None:
            started += each.claimed_in.share_after(since) * each.started
        if each.ended_in is not None:
            share = each.ended_in.share_after(since)
            ended += share * each.ended
            failed += share * each.failed
    return started, ended, failed


def lately(minutes: Iterable[Minute], now: Instant) -> Minute:
    """The minute that has begun and the five before it, as one."""
    return _since(minutes, now // MINUTE - RECENT)


def latest(minutes: Iterable[Minute], now: Instant) -> Minute:
    """The minute that has begun and the one before it, as one."""
    return _since(minutes, now // MINUTE - 1)


def _since(minutes: Iterable[Minute], first: int) -> Minute:
    return reduce(Minute.and_also, (each for each in minutes if each.minute >= first), Minute(minute=first))
