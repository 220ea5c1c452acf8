"""How full the limits of queues and keys are, asked for together: one look at the gates of many keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fairlane.clock import SECOND, Instant, as_datetime
from fairlane.operations.views import GaugeView
from fairlane.policy.overrides import PauseGate
from fairlane.policy.policy import BoundLimit, Policy
from fairlane.scheduler.estimate import starts_at
from fairlane.scheduler.gauge import Gauge, gauges, shared_gates_of
from fairlane.store.stats import Looking, Moment

__all__ = ["drained_in", "gauge_view", "gauges_of", "limit_words"]

Key = tuple[str | None, ...]
Wanted = tuple[BoundLimit, Key]


def gauges_of(
    moment: Moment, policies: Mapping[str, Policy], wanted: Mapping[str, Sequence[Wanted]]
) -> Looking[dict[str, list[Gauge]]]:
    """By queue, a gauge for everything that was asked for, in that order."""
    gates = {queue: [policies[queue].gate_of(bound, key) for bound, key in asked] for queue, asked in wanted.items()}
    shared = [gate for asked in wanted.values() for gate in shared_gates_of(asked)]
    if not any(gates.values()):
        return {queue: [] for queue in wanted}
    known, known_shared = yield from moment.gates_named(gates, shared)
    return {queue: gauges(policies[queue], moment.now, asked, known, known_shared) for queue, asked in wanted.items()}


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


def drained_in(waiting: int, run_time: float, told: Iterable[Gauge], now: Instant, pace: float | None) -> float | None:
    """Seconds until all that waits has started: as limits allow it, or as fast as jobs were really started (`pace`, a
    second), whichever is slower. `None`: nothing says so."""
    if not waiting:
        return None
    starts = [starts_at(each.in_force, each.gate, now, waiting, round(run_time * SECOND)) for each in told]
    times = [(at - now) / SECOND for at in starts if at is not None]
    times += [waiting / pace] if pace else []
    return max(times, default=None)
