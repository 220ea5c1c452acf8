"""How full the limits of queues and keys are, asked for together: one look at the gates of many keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fairlane.clock import SECOND, Instant, as_datetime
from fairlane.operations.views import GaugeView
from fairlane.policy.overrides import PauseGate
from fairlane.policy.policy import BoundLimit, Policy
from fairlane.scheduler.estimate import drains_at, run_time_of
from fairlane.stats.gates import Gauge, gauges
from fairlane.store.stats import Looking, Moment, Wanted

__all__ = ["drained_in", "gauge_view", "gauges_of", "limit_words"]


def gauges_of(
    moment: Moment, policies: Mapping[str, Policy], wanted: Mapping[str, Sequence[Wanted]]
) -> Looking[dict[str, list[Gauge]]]:
    """By queue, a gauge for everything that was asked for, in that order."""
    boards = yield from moment.boards(policies, wanted)
    return {queue: gauges(boards[queue], asked) for queue, asked in wanted.items()}


def gauge_view(gauge: Gauge, bound: BoundLimit) -> GaugeView:
    """A gauge in the form that people get."""
    saturation = min(1.0, max(0.0, gauge.used / gauge.bound)) if gauge.bound > 0 else 1.0
    return GaugeView(
        limit=gauge.limit,
        words=_pause_words(bound) or repr(gauge.in_force),
        reason=str(gauge.reason),
        used=gauge.used,
        bound=gauge.bound,
        room=gauge.room,
        saturation=saturation,
        opens_at=None if gauge.opens_at is None else as_datetime(gauge.opens_at),
        bound_from=gauge.origin,
    )


def limit_words(bound: BoundLimit) -> str:
    """A limit as one would write it in Python, or a pause in words."""
    return _pause_words(bound) or repr(bound.limit)


def _pause_words(bound: BoundLimit) -> str | None:
    if not isinstance(bound.limit, PauseGate):
        return None
    return f"a pause by {', '.join(bound.limit.by)}" if bound.limit.by else "a pause of the queue"


def drained_in(
    waiting: int,
    run_time: float,
    told: Iterable[Gauge],
    now: Instant,
    pace: float | None,
    *,
    of_some: Iterable[tuple[Gauge, int]] = (),
    running_for: int = 0,
    can_start: bool = True,
) -> float | None:
    """Seconds until all that waits has started: as limits allow it, or as fast as jobs were really started (`pace`, a
    second), whichever is slower. All of it passes the limits that `told` shows, and so many jobs each of those in
    `of_some`. What runs has run for `running_for` at least. `can_start` is False where it is paused or no worker serves
    it. `None`: nothing says so, it depends on run times that are not known, or somebody has to act first."""
    if not waiting or not can_start:
        return None
    known = run_time_of(round(run_time * SECOND), [running_for])
    gates = [(each.in_force, each.gate) for each in told]
    latest = now
    for more, jobs in [([], waiting), *(([(each.in_force, each.gate)], jobs) for each, jobs in of_some)]:
        started = drains_at([*gates, *more], now, jobs, known)
        if started is None and (gates or more):
            return None
        latest = max(latest, started or now)
    return max((latest - now) / SECOND, waiting / pace if pace else 0.0)
