"""The figures of an act, all counted from the runs that the handlers wrote down. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from fairlane.demo.acts import Act
from fairlane.demo.measures import (
    SECOND,
    Run,
    backlogged_until,
    busiest_second,
    highest_in_flight,
    jain_index,
    rate_excess,
    worker_time,
)
from fairlane.demo.workload import RATED_ENDPOINT, WHALE, Workload, class_of

__all__ = ["Figures", "RateFigures", "measure"]

MICROSECOND = 1_000


class RateFigures(msgspec.Struct, frozen=True):
    """The starts at the endpoint that everybody uses, against its rate (of the acts without one, too)."""

    starts: int
    busiest_second: int
    """The most starts in any one second."""
    most_in_a_second: int | None
    """What the rate allows: `burst` and one second's worth. `None` in an act without a rate."""
    worst_excess: float | None
    """By how many jobs the worst window of any length, over all endpoints, went over `burst + rate·t`, by the moment at
    which the store admitted each job. `None` in an act without a rate."""
    worst_excess_at_start: float | None
    """The same by the moment at which the handlers began, which come a little later, and not all equally late."""
    start_lag: float
    """The spread, in seconds, between the fastest and the slowest way from admission to the handler."""


class Figures(msgspec.Struct, frozen=True):
    """One act. Time counts from the first start of a handler to the last end."""

    act: str
    queue: str
    jobs: int
    jobs_run: int
    ran_twice: int
    total: float
    """Seconds."""
    last_small: float
    """Seconds until the last job of a small tenant had ended."""
    last_small_share: float
    """The same as a fraction of the total."""
    whale_before: int
    """Jobs of the whale that had ended when the last job of a small tenant had."""
    whale_admitted_before: int
    """Those that had been admitted when the last job of a small tenant was: the order of the policy alone, also where a
    process stands still with what it was given."""
    jain: float
    """Jain index of the worker-seconds that each tenant got while every tenant still had work waiting, which is until
    the first of them starts its last job. 1.0: all had the same. 1/tenants: one had everything."""
    in_flight_whale: int
    in_flight_small: int
    """The most that any one small tenant had at an instant."""
    in_flight_all: int
    in_flight_limit: int | None
    rate: RateFigures


def measure(act: Act, workload: Workload, runs: Sequence[Run]) -> Figures:
    """What the runs of an act say."""
    began = min(run.started_at for run in runs)
    ended = max(run.ended_at for run in runs)
    small_ended = max((run.ended_at for run in runs if class_of(run.tenant) == "small"), default=began)
    small_admitted = max((run.admitted_at for run in runs if class_of(run.tenant) == "small"), default=0)
    by_tenant = highest_in_flight(runs, lambda run: run.tenant)
    times = Counter(run.number for run in runs)
    limit = act.in_flight_limit
    return Figures(
        act=act.name,
        queue=act.queue,
        jobs=workload.total,
        jobs_run=len(times),
        ran_twice=sum(count > 1 for count in times.values()),
        total=(ended - began) / SECOND,
        last_small=(small_ended - began) / SECOND,
        last_small_share=(small_ended - began) / (ended - began),
        whale_before=sum(run.ended_at <= small_ended for run in runs if class_of(run.tenant) == WHALE),
        whale_admitted_before=sum(run.admitted_at <= small_admitted for run in runs if class_of(run.tenant) == WHALE),
        jain=jain_index(worker_time(runs, backlogged_until(runs)).values()),
        in_flight_whale=max((most for tenant, most in by_tenant.items() if class_of(tenant) == WHALE), default=0),
        in_flight_small=max((most for tenant, most in by_tenant.items() if class_of(tenant) == "small"), default=0),
        in_flight_all=highest_in_flight(runs, lambda run: "all")["all"],
        in_flight_limit=limit.max if limit else None,
        rate=_rate_figures(act, runs),
    )


def _rate_figures(act: Act, runs: Sequence[Run]) -> RateFigures:
    rated = [run.started_at for run in runs if run.endpoint == RATED_ENDPOINT]
    lags = [run.started_at - run.admitted_at for run in runs]
    allowed = excess = excess_at_start = None
    if act.rate_limit is not None:
        burst, interval = act.rate_limit.burst, act.rate_limit.interval * MICROSECOND
        allowed = burst + SECOND // interval
        admitted: dict[str, list[int]] = {}
        started: dict[str, list[int]] = {}
        for run in runs:
            admitted.setdefault(run.endpoint, []).append(run.admitted_at)
            started.setdefault(run.endpoint, []).append(run.started_at)
        excess = max(rate_excess(times, burst=burst, interval=interval) for times in admitted.values())
        excess_at_start = max(rate_excess(times, burst=burst, interval=interval) for times in started.values())
    return RateFigures(
        starts=len(rated),
        busiest_second=busiest_second(rated),
        most_in_a_second=allowed,
        worst_excess=excess,
        worst_excess_at_start=excess_at_start,
        start_lag=(max(lags) - min(lags)) / SECOND,
    )
