"""How full the limits of queues and keys are, asked for together: one look at the gates of many keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fairlane.clock import Instant, as_datetime
from fairlane.operations.views import GaugeView
from fairlane.policy.overrides import PauseGate
from fairlane.policy.policy import BoundLimit, Policy
from fairlane.scheduler.gauge import Gauge, gauges, shared_gates_of
from fairlane.store.protocol import Store

__all__ = ["drained_in", "gauge_view", "gauges_of", "limit_words"]

Key = tuple[str | None, ...]
Wanted = tuple[BoundLimit, Key]


async def gauges_of(
    store: Store, policies: Mapping[str, Policy], wanted: Mapping[str, Sequence[Wanted]], now: Instant
) -> dict[str, list[Gauge]]:
    """By queue, a gauge for everything that was asked for, in that order."""
    gates = [policies[queue].gate_of(bound, key) for queue, asked in wanted.items() for bound, key in asked]
    shared = [gate for asked in wanted.values() for gate in shared_gates_of(asked)]
    if not gates:
        return {queue: [] for queue in wanted}
    known, known_shared = await store.gates_named(gates, shared)
    return {queue: gauges(policies[queue], now, asked, known, known_shared) for queue, asked in wanted.items()}


def gauge_view(policy: Policy, gauge: Gauge, bound: BoundLimit) -> GaugeView:
    """A gauge in the form that people get."""
    saturation = min(1.0, max(0.0, gauge.used / gauge.bound)) if gauge.bound > 0 else 1.0
    scope = tuple(sorted(zip(bound.limit.by, gauge.key, strict=True)))
    return GaugeView(
        limit=gauge.limit,
        words=limit_words(policy, bound, gauge.key),
        reason=str(gauge.reason),
        used=gauge.used,
        bound=gauge.bound,
        room=gauge.room,
        saturation=saturation,
        opens_at=None if gauge.opens_at is None else as_datetime(gauge.opens_at),
        is_overridden=(gauge.limit, scope) in policy.overrides.limits,
    )


def limit_words(policy: Policy, bound: BoundLimit, key: Key | None = None) -> str:
    """A limit as one would write it in Python; for a key, with the bound that is in force for it."""
    if isinstance(bound.limit, PauseGate):
        return f"a pause by {', '.join(bound.limit.by)}" if bound.limit.by else "a pause of the queue"
    limit = bound.limit if key is None else policy.limit_at(bound, key) or bound.limit
    return repr(limit)


def drained_in(waiting: int, run_time: float, views: Iterable[GaugeView], rates: Mapping[str, float]) -> float | None:
    """Seconds until all that waits has started, if limits are all that slows it down. `rates` has the starts a second
    that a rate allows, by limit."""
    if not waiting:
        return None
    times = [waiting / rates[view.limit] for view in views if rates.get(view.limit)]
    times += [
        waiting * run_time / view.bound
        for view in views
        if view.reason in ("concurrency", "adaptive", "sequence") and view.bound > 0 and run_time > 0
    ]
    return max(times, default=None)
