"""A cap that learns how much concurrency is good for whatever its jobs call.

It moves as a sender's window moves in TCP: up by one for each cap's worth of good runs, and only while it is what
binds; down by half on a failure, and by a twentieth while runs (or, at an engine, the waits before them) take too long.
What was claimed before the last step down is old news: it frees its slot and says nothing, so one outage is one step
and not one for each job that it hit. Until the first step down it goes up by one for each good run: that is how the
order of magnitude is found.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
from msgspec.structs import replace

from fairlane.clock import SECOND, Instant, duration_text
from fairlane.errors import InvalidPolicy
from fairlane.parameters import known_options, shown
from fairlane.policy.gates import GateState, Reason, Release, Why
from fairlane.policy.keys import By, normalize_by, repr_by
from fairlane.policy.limits import (
    SMOOTHING,
    Limit,
    as_whole,
    checked_count,
    duration_above_zero,
    is_number,
    smoothed,
)

START = 10
MOST = 1_000
HALF = 0.5
EASE = 0.95
"""What a cap is multiplied by while runs take longer than the target."""

REMEMBERED = 24 * 3_600 * SECOND
"""How long a cap stays learned after the last run of its key."""

MOST_TASKS = 16
"""Run times are kept for so many tasks of a key; of more, for those that ran last."""


class Learned(msgspec.Struct, frozen=True):
    """What a gate has learned: its memo."""

    cap: int
    reached: int = 0
    """The highest cap since the last step down that was all in flight: one that was not reached has not been tried."""
    good: int = 0
    """Good runs that count towards the next step up."""
    decreased_at: Instant = 0
    """When the cap was last lowered; 0: never, it is still looking for the order of magnitude."""
    runs: dict[str, float] = {}
    """For each task, a moving average of run time in microseconds."""


@known_options
@dataclass(frozen=True, slots=True, init=False)
class AdaptiveConcurrency(Limit):
    """A cap on jobs in flight that moves between `min` and `max` with how runs end and how long they take.

    Without `target`, a run time, only failures lower it. Where an engine runs what was admitted, `target` is the time
    from admission to start: how long a job may lie at the engine's broker.

    >>> AdaptiveConcurrency(max=200, target="500ms", by="endpoint")
    AdaptiveConcurrency(start=10, min=1, max=200, target='500ms', by='endpoint')
    """

    start: int
    min: int
    max: int
    target: int | None
    decrease: float
    smoothing: float
    by: By

    kind = "adaptive"
    times = frozenset({"target"})
    is_learning = True
    counted = "in flight"

    def __init__(
        self,
        *,
        start: int | None = None,
        min: int = 1,
        max: int = MOST,
        target: timedelta | str | float | None = None,
        decrease: float = HALF,
        smoothing: float = SMOOTHING,
        by: str | tuple[str, ...] | None = None,
    ) -> None:
        what = f"AdaptiveConcurrency(start={shown(start)}, min={shown(min)}, max={shown(max)})"
        stop = "a cap of 0 would never learn that it may rise; stop a key with Concurrency(0, by=…)"
        checked_count(what, "min", min, reason=stop)
        checked_count(what, "max", max)
        if min > max:
            raise InvalidPolicy(f"{what}: `min` is above `max`, which leaves no cap to choose")
        if start is not None:
            checked_count(what, "start", start, min, max, "it lies between `min` and `max`")
        if not is_number(decrease) or not 0 < decrease < 1:
            raise InvalidPolicy(
                f"{what}: decrease={shown(decrease)} would not lower the cap on a failure; "
                "give a factor between 0 and 1"
            )
        if not is_number(smoothing) or not 0 < smoothing <= 1:
            raise InvalidPolicy(
                f"{what}: smoothing={shown(smoothing)} is not the weight of one run in an average; "
                "give a number above 0 (at 0 it would never move) and at most 1"
            )
        self._set(
            start=_clamped(START, min, max) if start is None else start,
            min=min,
            max=max,
            target=None if target is None else duration_above_zero(what, "target", target),
            decrease=float(decrease),
            smoothing=float(smoothing),
            by=normalize_by(what, by),
        )

    def __repr__(self) -> str:
        parts = [f"start={self.start}", f"min={self.min}", f"max={self.max}"]
        if self.target is not None:
            parts.append(f"target={duration_text(self.target)!r}")
        if self.decrease != HALF:
            parts.append(f"decrease={self.decrease!r}")
        if self.smoothing != SMOOTHING:
            parts.append(f"smoothing={self.smoothing!r}")
        return f"AdaptiveConcurrency({', '.join(parts)}{repr_by(self.by)})"

    def cap_of(self, gate: GateState) -> int:
        """How many jobs this gate lets be in flight at present."""
        # An operator may have set other bounds for a time: what was learned comes back with the old ones.
        return self.start if gate.memo is None else _clamped(gate.memo["cap"], self.min, self.max)

    def learned(self, gate: GateState) -> Learned:
        """What this gate knows."""
        return Learned(self.start) if gate.memo is None else msgspec.convert(gate.memo, Learned)

    def room_at(self, gate: GateState, now: Instant) -> int:
        return max(0, self.cap_of(gate) - gate.in_flight)

    def take(self, gate: GateState, now: Instant, count: int) -> None:
        gate.in_flight += count
        cap = self.cap_of(gate)
        if gate.in_flight >= cap and (gate.memo is None or gate.memo["reached"] < cap):
            gate.memo = msgspec.to_builtins(replace(self.learned(gate), reached=cap))

    def free(self, gate: GateState, ending: Release, now: Instant, held: int | None, task: str | None) -> bool:
        Limit.free(self, gate, ending, now, held, task)
        if ending.ended > ending.neutral:
            gate.memo = msgspec.to_builtins(self.after(self.learned(gate), ending, now, task or ""))
            gate.tat = now + REMEMBERED
        return True

    def after(self, learned: Learned, ending: Release, now: Instant, task: str) -> Learned:
        if learned.decreased_at > now:
            # A clock that was set back must not turn all that follows into old news.
            learned = replace(learned, decreased_at=now)
        if ending.latest < learned.decreased_at:
            return learned
        if ending.failed:
            return self._lowered(learned, self.decrease, now)
        signal = ending.ran if ending.signal is None else ending.signal
        average = smoothed(learned.runs.get(task, 0.0), signal / ending.ended, ending.ended, self.smoothing)
        if self.target is not None:
            others = [each for each in learned.runs.items() if each[0] != task]
            learned = replace(learned, runs=dict([*others, (task, average)][-MOST_TASKS:]))
            if average > self.target:
                return self._lowered(learned, EASE, now)
        return self._raised(learned, ending.ended - ending.neutral)

    def _lowered(self, learned: Learned, factor: float, now: Instant) -> Learned:
        if learned.decreased_at == now:
            # Lane events of one claim are folded at one instant: they are one piece of news.
            return learned
        cap = max(self.min, int(learned.cap * factor))
        return replace(learned, cap=cap, reached=0, good=0, decreased_at=now)

    def _raised(self, learned: Learned, good: int) -> Learned:
        if not learned.decreased_at:
            # To twice of what has been in flight, however the runs of a round are put into lane events.
            most = min(2 * learned.reached, self.max)
            return replace(learned, cap=max(learned.cap, min(learned.cap + good, most)))
        if learned.reached < learned.cap or learned.cap >= self.max:
            return learned
        if learned.good + good < learned.cap:
            return replace(learned, good=learned.good + good)
        return replace(learned, cap=learned.cap + 1, good=0)

    def carry_over(self, gate: GateState, now: Instant) -> None:
        """A cap that was learned between other bounds is brought between these."""
        if gate.memo is not None:
            learned, cap = self.learned(gate), self.cap_of(gate)
            gate.memo = msgspec.to_builtins(replace(learned, cap=cap, reached=min(learned.reached, cap)))

    def why(self, gate: GateState, now: Instant) -> Why:
        learned = "never lowered" if not self.learned(gate).decreased_at else "learned"
        return Why(
            Reason.ADAPTIVE, gate.in_flight, self.cap_of(gate), f"a cap from {self.min} to {self.max}, {learned}"
        )

    def describe(self, where: str) -> str:
        return f"A cap that learns, from {self.min:,} to {self.max:,} at the same time {where}"

    def document_with(self, bound: float) -> dict[str, Any]:
        """With another `max`; the cap goes on moving below it."""
        most = as_whole(bound)
        return {**self.to_document(), "start": min(self.start, most), "min": min(self.min, most), "max": most}

    @property
    def least_and_most(self) -> tuple[int, int]:
        return self.min, self.max


def _clamped(value: int, least: int, most: int) -> int:
    return min(max(value, least), most)
