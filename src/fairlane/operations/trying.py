"""Policies tried on a workload, or on what a queue has just been through: for surfaces that many people share.

A simulation takes a processor for as long as it lasts. So it is bounded in jobs and in time, and runs in a thread that
makes way for others: who looks at other things meanwhile hardly feels it. Whoever asked and goes away ends it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

from fairlane.clock import SECOND, SystemClock, microseconds
from fairlane.errors import ConfigurationError
from fairlane.operations.asking import in_force
from fairlane.policy.documents import parse_policy
from fairlane.policy.keys import normalize_by
from fairlane.policy.overrides import NO_OVERRIDES
from fairlane.policy.policy import Policy
from fairlane.simulation.measures import Simulation, Timeline, measure, report_by, timeline
from fairlane.simulation.replay import read_history, record
from fairlane.simulation.run import SimulatedJob
from fairlane.simulation.workload import Workload
from fairlane.store.protocol import Store

__all__ = ["MOST_POLICIES", "MOST_SIMULATED", "MOST_SLOTS", "PolicyGiven", "Tried", "try_policies"]

MOST_POLICIES = 4
MOST_SIMULATED = 50_000
"""Jobs of one simulation, attempts included."""
MOST_SLOTS = 10_000
MOST_ATTEMPTS = 100
LONGEST_SPAN = 366 * 86_400 * SECOND
LONGEST_TRY = 20 * SECOND
"""Of all policies together, by the clock on the wall."""
STRETCH = 1_000
"""Microseconds that a simulation goes on for before it makes way."""
WAY = 100
"""And for how long it does."""

Tried = tuple[Simulation, Timeline]
"""What became of the jobs under one policy, and how it went over time."""
PolicyGiven = str | dict[str, Any] | Policy
"""The name of a queue (its policy in force), a document, or the policy itself."""


async def try_policies(
    store: Store,
    policies: Sequence[PolicyGiven],
    *,
    workload: Workload | None = None,
    history: str | None = None,
    last: str | float = "1h",
    slots: int = 100,
    seed: int | None = None,
    until: str | float | None = None,
    by: Sequence[str] = (),
) -> list[Tried]:
    """The same jobs under each policy: those of a workload, or those that ended lately in the queue `history`."""
    if not 1 <= len(policies) <= MOST_POLICIES:
        raise ConfigurationError(f"{len(policies)} policies: give from 1 to {MOST_POLICIES}")
    if not 1 <= slots <= MOST_SLOTS:
        raise ConfigurationError(f"slots={slots}: give from 1 to {MOST_SLOTS:,}")
    found = [await _policy(store, each) for each in policies]
    span = None if until is None else _span("until", until)
    if history is None:
        jobs = await asyncio.to_thread(_foreseen, workload, seed)
    else:
        jobs = await _remembered(store, history, last, workload)
    names = normalize_by("by", tuple(by)) or next(filter(None, map(report_by, found)), ())
    pace = _Pace()
    try:
        return await asyncio.to_thread(_try, found, jobs, slots, span, names, pace)
    finally:
        pace.stop.set()


async def _policy(store: Store, given: PolicyGiven) -> Policy:
    match given:
        case str():
            # As it is declared: what operators have changed for now says nothing about it.
            return (await in_force(store, given)).policy.overridden(NO_OVERRIDES)
        case Policy():
            return given
        case _:
            return parse_policy(given, "policies")


def _foreseen(workload: Workload | None, seed: int | None) -> list[SimulatedJob]:
    if workload is None:
        raise ConfigurationError("which jobs? Give a workload, or history with the name of a queue")
    for each in workload.classes:
        if each.max_attempts > MOST_ATTEMPTS:
            raise ConfigurationError(f"class {each.name!r}: max_attempts is at most {MOST_ATTEMPTS} here")
        # Other arrivals and run times than these would take longer to reckon than there is time for.
        for name, time in (("at", each.at), ("every", each.every or 0), ("backoff", each.backoff)):
            _span(f"class {each.name!r}: {name}", time)
    _check_number(sum(each.count * max(1, each.jobs) for each in workload.classes))
    jobs = workload.simulated(seed)
    _check_number(sum(1 + len(job.retries) for job in jobs))
    return jobs


def _check_number(count: int) -> None:
    if count > MOST_SIMULATED:
        raise ConfigurationError(
            f"{count:,} runs are more than {MOST_SIMULATED:,}, which is what can be tried here; give fewer jobs, or "
            "use `fairlane simulate`"
        )


async def _remembered(store: Store, queue: str, last: str | float, workload: Workload | None) -> list[SimulatedJob]:
    if workload is not None:
        raise ConfigurationError("give a workload or history, not both")
    await in_force(store, queue)
    jobs = await read_history(store, queue, await store.now(), _span("last", last), limit=MOST_SIMULATED)
    if not jobs:
        raise ConfigurationError(f"no job of queue {queue!r} ended within the last {last}; look further back")
    return jobs


def _span(name: str, given: str | float) -> int:
    span = microseconds(given)
    if not 0 <= span <= LONGEST_SPAN:
        raise ConfigurationError(f"{name}={given!r}: give a time from 0 to {LONGEST_SPAN // SECOND // 86_400} days")
    return span


def _try(
    policies: Sequence[Policy],
    jobs: Sequence[SimulatedJob],
    slots: int,
    until: int | None,
    by: tuple[str, ...],
    pace: _Pace,
) -> list[Tried]:
    try:
        recordings = [
            record(each, jobs, slots=slots, until=None if until is None else until / SECOND, on_progress=pace)
            for each in policies
        ]
        return [(measure(each, by), timeline(each)) for each in recordings]
    except (ArithmeticError, KeyError) as error:
        raise ConfigurationError(
            f"this cannot be reckoned ({error}); give smaller numbers, and jobs their keys"
        ) from error


class _Pace:
    """Holds a simulation to its time, ends it when nobody waits for it any more, and lets others run meanwhile."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self._clock = SystemClock()
        self._since = self._clock.monotonic()
        self._ends_at = self._since + LONGEST_TRY

    def __call__(self, runs: int) -> None:
        now = self._clock.monotonic()
        if now > self._ends_at:
            raise ConfigurationError(
                f"it took longer than {LONGEST_TRY // SECOND} s, of which {runs:,} runs; give fewer jobs, or use "
                "`fairlane simulate`"
            )
        if now - self._since < STRETCH:
            return
        # A thread that only reckons gives the interpreter away every 5 ms at best; one that waits, at once.
        if self.stop.wait(WAY / SECOND):
            raise ConfigurationError("nobody waits for it any more")
        self._since = self._clock.monotonic()
