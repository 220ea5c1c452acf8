"""Drains: when all jobs that wait will have started, as limits allow it and as it really goes.

What a limit allows is reckoned from its gate as it stands: the instant at which the n-th job from now may start if all
before it start as soon as they may. What really goes is what was seen while jobs waited. Whatever is slower decides, so
that no estimate lies before what the limits allow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec

from fairlane.clock import SECOND, Instant
from fairlane.policy.gates import GateState, Limit
from fairlane.policy.limits import Rate
from fairlane.policy.overrides import PauseGate, Suspended
from fairlane.stats.keys import MINUTE, Minute

__all__ = ["TURNAROUND", "Seen", "at_any_run_time", "drains_at", "run_time_of", "starts_at"]

T = TypeVar("T")

TURNAROUND = 8_000
"""Microseconds between the end of a run and the next start in its place: a settlement and a claim take that long."""
TELLING = 10 * SECOND
"""Starts must go on for so long before they say how fast things go."""
OLD_ENOUGH = SECOND
"""What has only just begun says nothing of how long runs take."""
ASSUMED = (100_000, SECOND)
"""Run times to try where none is known, and runs are taken to be short."""
ANY = (100_000, 24 * 3_600 * SECOND)
"""Run times to try where none is known: what is the same for both depends on limits alone."""
RECENT = 5
"""Minutes that say how fast things go now."""


def run_time_of(known: int, ages: Sequence[int]) -> int:
    """Microseconds that a run takes: what those that ended took, but no less than those that still go on have taken in
    the mean. 0: nothing is known, since none has ended; how old those are that go on does not say when they will."""
    mean = sum(ages) // len(ages) if ages else 0
    return max(known, mean) if known and mean >= OLD_ENOUGH else known


def at_any_run_time(run_time: int, told: Callable[[int], T], assumed: tuple[int, int] = ASSUMED) -> T | None:
    """What is told for a run time; where none is known (0), what is told for any. `None`: it depends on it."""
    if run_time:
        return told(run_time)
    short, long = map(told, assumed)
    return short if short == long else None


def starts_at(limit: Limit, gate: GateState, now: Instant, nth: int, run_time: int) -> Instant | None:
    """When the `nth` job from now may start, if each runs for `run_time` and starts as soon as this limit lets it.

    What runs now is taken to have just begun. `None`: not by time, nor by what runs; somebody has to act.
    """
    place, later = _round_of(limit, gate, now, nth, run_time)
    if isinstance(limit, Suspended) or (limit.counts_in_flight and limit.why(gate, now).bound > 0):
        return now + later
    if isinstance(limit, Rate):
        first = _within_window(limit, gate, now, place) if limit.rolling else _from_bucket(limit, gate, now, place)
        return first + later
    opens = now if limit.room_at(gate, now) > 0 else limit.opens_again_at(gate)
    return None if opens is None else max(now, opens)


def _round_of(limit: Limit, gate: GateState, now: Instant, nth: int, run_time: int) -> tuple[int, int]:
    """Places of a window come round with every window, those of a cap with every run: which of them the `nth` job
    takes, and how much later than the first that took it."""
    if isinstance(limit, Suspended):
        return nth, 0
    if isinstance(limit, Rate) and limit.rolling:
        rounds, place = divmod(nth - 1, limit.burst)
        # A planned start is counted from the last instant at which it may be made.
        return place + 1, rounds * (limit.per + limit.slack)
    if limit.counts_in_flight and (places := int(limit.why(gate, now).bound)) > 0:
        waiting = nth - max(0, places - gate.in_flight)
        if waiting > 0:
            rounds, place = divmod(waiting - 1, places)
            return place + 1, (rounds + 1) * (run_time + TURNAROUND)
    return nth, 0


def _from_bucket(rate: Rate, gate: GateState, now: Instant, nth: int) -> Instant:
    return max(now, max(gate.tat, now) + (nth - rate.burst) * rate.interval)


def _within_window(rate: Rate, gate: GateState, now: Instant, nth: int) -> Instant:
    """The first time round: a start takes the place of one that leaves the window."""
    starts: list[list[int]] = gate.memo["starts"] if gate.memo else []
    leaving = [(at + rate.per, count) for at, count in starts if at + rate.per > now]
    room = rate.burst - sum(count for _, count in leaving)
    for at, count in leaving:
        if nth <= room:
            break
        now, room = at, room + count
    return now


class Seen(msgspec.Struct, frozen=True):
    """How the last minutes of a queue went, as far as they are added up."""

    minutes: list[Minute]
    until: Instant

    def pace(self, since: Instant | None) -> float | None:
        """Starts a second in the whole minutes since then, up to the last few, from the first to the last of them;
        `None`: too little was seen.

        To be asked of a time in which jobs waited: how fast a queue goes that has nothing to do says nothing.
        """
        if since is None:
            return None
        first = max(-(-since // MINUTE), self.until // MINUTE - RECENT)
        seen = [(each.started, each.claimed_in) for each in self.minutes if each.minute >= first]
        within = [each for _, each in seen if each is not None]
        passed = max(each.last for each in within) - min(each.first for each in within) if within else 0
        started = sum(count for count, _ in seen)
        return started * SECOND / passed if started and passed >= TELLING else None


def drains_at(gates: Iterable[tuple[Limit, GateState]], now: Instant, jobs: int, run_time: int) -> Instant | None:
    """When as many jobs have started, all of which pass these gates and nobody else does; `run_time` is 0 if it is not
    known. `None`: no gate says so, it depends on a run time that is not known, or somebody has to act first."""
    passed = [(limit, gate, jobs) for limit, gate in gates if not _is_lifted(limit, gate, now)]
    if any(starts_at(limit, gate, now, 1, run_time) is None for limit, gate, _ in passed):
        return None
    return at_any_run_time(run_time, lambda assumed: _together(passed, now, assumed), ANY)


def _is_lifted(limit: Limit, gate: GateState, now: Instant) -> bool:
    """A pause that is over, and no limit."""
    return isinstance(limit, PauseGate) and limit.room_at(gate, now) > 0


def _together(passed: list[tuple[Limit, GateState, int]], now: Instant, run_time: int) -> Instant | None:
    """When each gate has let as many through as it has to. Where places come round again, whatever held up the first
    that took them has held up all who follow."""
    times = []
    for at, (limit, gate, nth) in enumerate(passed):
        opens = starts_at(limit, gate, now, nth, run_time)
        if opens is None:
            continue
        place, later = _round_of(limit, gate, now, nth, run_time)
        others = [(each, its, min(n, place)) for other, (each, its, n) in enumerate(passed) if other != at]
        first = _together(others, now, run_time) if later else None
        times.append(max(opens, (first or now) + later))
    return max(times, default=None)
