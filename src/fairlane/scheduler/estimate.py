"""Estimates: when the jobs that wait will have started, as limits allow it and as it really goes.

What a limit allows is reckoned from its gate as it stands: the instant at which the n-th job from now may start if all
before it start as soon as they may. What really goes is what was seen while jobs waited. Whatever is slower decides, so
that no estimate lies before what the limits allow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import floor, inf

import msgspec

from fairlane.clock import SECOND, Instant
from fairlane.policy.gates import GateState, Limit
from fairlane.policy.limits import Rate
from fairlane.policy.overrides import PauseGate, Suspended
from fairlane.scheduler.figures import MINUTE, Minute

__all__ = ["TURNAROUND", "Line", "Others", "OwnLane", "Passed", "Rival", "Seen", "starts_at", "starts_by"]

TURNAROUND = 8_000
"""Microseconds between the end of a run and the next start in its place: a settlement and a claim take that long."""
TELLING = 10 * SECOND
"""Of a minute that has just begun, so much must have passed before it says how fast things go."""
RECENT = 5
"""Minutes that say how fast things go now."""


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
        """Starts a second in the whole minutes since then, up to the last few; `None`: too little was seen.

        To be asked of a time in which jobs waited: how fast a queue goes that has nothing to do says nothing.
        """
        if since is None:
            return None
        first = max(-(-since // MINUTE), self.until // MINUTE - RECENT)
        passed = self.until - first * MINUTE
        if passed < TELLING:
            return None
        started = sum(each.started for each in self.minutes if each.minute >= first)
        return started * SECOND / passed if started else None


class Passed(msgspec.Struct, frozen=True):
    """A gate that a job has to pass."""

    id: bytes
    limit: Limit
    gate: GateState
    is_of_queue: bool
    """Every job of the queue passes it."""
    sharers: int = 1
    """Queues that wait for a shared one, this one included."""
    crowd: float = 1.0
    """How many wait at it for each of those that were looked at."""


class OwnLane(msgspec.Struct, frozen=True):
    """Another lane of the job's flow."""

    id: bytes
    priority: int
    ready: int
    floor: int
    gates: frozenset[bytes]


class Rival(msgspec.Struct, frozen=True):
    """Another flow that takes turns."""

    tag: float
    step: float
    """What a turn adds to its virtual time."""
    waiting: Mapping[bytes, int]
    """Its ready jobs, by the keyed gates that they pass."""

    def turns(self, own: float, turn: float) -> int:
        """How many turns it has while another flow goes from one virtual time to the other. One that is ahead of the
        other waits no longer for it: who is woken at a gate is raised to where the others are."""
        return floor((turn - min(self.tag, own)) / self.step + 1e-9) + 1


class Others(msgspec.Struct, frozen=True):
    """The lanes and flows beside a job's own, as far as they were looked at."""

    tag: float = 0.0
    """When it is its own flow's turn, in virtual time."""
    step: float = 1.0
    """What a turn adds to that."""
    lanes: list[OwnLane] = []
    lanes_each: float = 1.0
    """How many lanes its flow has for each of these."""
    rivals: list[Rival] = []
    reach: float = inf
    """Every flow whose turn comes up to this virtual time is among the rivals."""


class Line(msgspec.Struct, frozen=True):
    """Who goes before a job: others of its own flow by rank, and other flows by their turns."""

    ahead: int
    """Jobs of its own lane before it."""
    ahead_in: Mapping[bytes, int]
    """The same in other lanes of its flow; of a lane that is not in it, all."""
    ready: int
    """Ready jobs of the whole queue."""
    others: Others

    def _in(self, lanes: Iterable[OwnLane]) -> int:
        return round(self.others.lanes_each * sum(self.ahead_in.get(each.id, each.ready) for each in lanes))

    def before(self) -> int:
        """How many jobs of the queue go before it."""
        others = self.others
        own = self.ahead + self._in(others.lanes)
        turn = others.tag + others.step * own
        if turn > others.reach:
            return max(own, self.ready - 1)
        foreign = sum(each.turns(others.tag, turn) for each in others.rivals)
        return max(own, min(self.ready - 1, own + foreign))

    def before_at(self, gate: Passed) -> int:
        """How many of them pass one of its gates."""
        if gate.is_of_queue:
            return self.before()
        others = self.others
        own = self.ahead + self._in(each for each in others.lanes if gate.id in each.gates)
        # While it waits at the gate, other lanes of its flow have turns too, and its own comes later for it.
        busy = self.ahead + others.lanes_each * sum(each.ready for each in others.lanes)
        turn = others.tag + others.step * busy
        foreign = sum(min(each.waiting.get(gate.id, 0), each.turns(others.tag, turn)) for each in others.rivals)
        return own + round(gate.crowd * foreign)


def starts_by(gates: Iterable[Passed], line: Line, opens_at: Instant, run_time: int) -> Instant:
    """When a job may start, by all its gates. None of them lets anybody through before `opens_at`: what a bucket would
    have given until then is lost."""
    passed = [
        (each, (line.before_at(each) + 1) * each.sharers) for each in gates if not isinstance(each.limit, PauseGate)
    ]
    return _together(passed, opens_at, run_time)


def _together(passed: list[tuple[Passed, int]], now: Instant, run_time: int) -> Instant:
    """When each gate has let as many through as it has to. Where places come round again, whatever held up the first
    that took them has held up all who follow."""
    latest = now
    for gate, nth in passed:
        at = starts_at(gate.limit, gate.gate, now, nth, run_time)
        place, later = _round_of(gate.limit, gate.gate, now, nth, run_time)
        others = [(each, min(n, place)) for each, n in passed if each is not gate]
        first = _together(others, now, run_time) if later else now
        latest = max(latest, first + later, now if at is None else at)
    return latest
