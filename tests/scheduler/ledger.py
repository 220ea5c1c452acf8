"""What really happened to a queue's jobs, kept beside the plan and never read from its rows.

A ledger knows each lane's waiting jobs, each start and its end. From these alone it says whether a limit was exceeded,
whether a job could start, and in which order jobs ought to run.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from dataclasses import dataclass, field
from fractions import Fraction

from fairlane.clock import Instant
from fairlane.policy import Concurrency, Limit, Policy, Rate, lane_id

LaneKey = tuple[int, tuple[tuple[str, str | None], ...]]
"""A lane as people see it: its priority and its keys."""


@dataclass(slots=True)
class Run:
    """One start of a job, and how it ended."""

    position: int
    enqueued_at: Instant
    lane: LaneKey
    at: Instant
    ended_at: Instant | None = None
    given_back: bool = False


@dataclass
class Ledger:
    policy: Policy
    waiting: dict[LaneKey, list[tuple[int, Instant]]] = field(default_factory=lambda: defaultdict(list))
    runs: list[Run] = field(default_factory=list)
    running: dict[int, Run] = field(default_factory=dict)
    tokens: list[tuple[Instant, LaneKey, Instant | None]] = field(default_factory=list)
    """What rates were charged (None) and refunded (when it was charged), in the order of events."""
    returned: list[Run] = field(default_factory=list)
    """Given back, and not folded by a claim yet."""
    crowded: list[str] = field(default_factory=list)
    """Starts that found their limit of concurrency used up."""

    def arrive(self, lane: LaneKey, position: int, enqueued_at: Instant) -> None:
        insort(self.waiting[lane], (position, enqueued_at))

    def withdraw(self, lane: LaneKey, position: int) -> None:
        self.waiting[lane] = [job for job in self.waiting[lane] if job[0] != position]

    def start(self, lane: LaneKey, position: int, now: Instant) -> Run:
        head = self.waiting[lane].pop(0)
        assert head[0] == position, f"lane {lane} started {position} before {head[0]}"
        run = Run(position, head[1], lane, now)
        self.runs.append(run)
        self.running[position] = run
        self.tokens.append((now, lane, None))
        for limit in self.policy.limits:
            if isinstance(limit, Concurrency) and (level := self.in_flight(limit, self.scope(limit, lane))) > limit.max:
                self.crowded.append(f"{limit!r} for {self.scope(limit, lane)}: {level} in flight at {now}")
        return run

    def end(self, position: int, now: Instant, *, given_back: bool = False) -> Run:
        run = self.running.pop(position)
        run.ended_at, run.given_back = now, given_back
        if given_back:
            self.returned.append(run)
        return run

    def fold(self, now: Instant) -> None:
        """A claim folds what was given back before it. Lane events of one claim are folded lane by lane."""
        self.tokens += [(now, run.lane, run.at) for run in self.returned]
        self.returned.clear()

    def scope(self, limit: Limit, lane: LaneKey) -> tuple[str | None, ...]:
        return scope_of(limit.by, lane)

    def in_flight(self, limit: Limit, scope: tuple[str | None, ...]) -> int:
        return sum(self.scope(limit, run.lane) == scope for run in self.running.values())

    def could_start(self, lane: LaneKey, now: Instant) -> bool:
        return all(self.room(limit, self.scope(limit, lane), now) > 0 for limit in self.policy.limits)

    def room(self, limit: Limit, scope: tuple[str | None, ...], now: Instant) -> int:
        if isinstance(limit, Concurrency):
            return limit.max - self.in_flight(limit, scope)
        assert isinstance(limit, Rate)
        if limit.rolling:
            return max(0, limit.burst - sum(at + limit.per > now for at in self.starts(limit, scope)))
        return limit.room(self.arrival_time(limit, scope), now)

    def starts(self, limit: Rate, scope: tuple[str | None, ...]) -> list[Instant]:
        """What was started, without what was given back while it still counted."""
        starts: list[Instant] = []
        for at, lane, charged_at in self.tokens:
            if self.scope(limit, lane) == scope:
                if charged_at is None:
                    starts.append(at)
                elif charged_at + limit.per > at:
                    starts.remove(charged_at)
        return starts

    def arrival_time(self, limit: Rate, scope: tuple[str | None, ...]) -> Instant:
        """GCRA played again over what was started and what was given back."""
        tat = 0
        for at, lane, charged_at in self.tokens:
            if self.scope(limit, lane) == scope:
                tat = limit.charged(tat, at, 1) if charged_at is None else limit.refunded(tat, 1, at - charged_at)
        return tat

    def startable(self, now: Instant) -> list[LaneKey]:
        """Every lane whose head could start now, by asking all of them."""
        return [lane for lane, jobs in self.waiting.items() if jobs and self.could_start(lane, now)]

    def rank(self, lane: LaneKey) -> int:
        return self.waiting[lane][0][1] - lane[0] * self.policy.priority_step

    def flow(self, lane: LaneKey) -> tuple[str | None, ...]:
        return scope_of(self.policy.fair.by, lane) if self.policy.fair else ()

    def lane_id(self, lane: LaneKey) -> bytes:
        return lane_id(self.policy.queue, lane[0], dict(lane[1]))

    def violations(self) -> list[str]:
        """Every limit that was exceeded at some time. Starts that were given back unstarted do not count for rates."""
        found = list(self.crowded)
        for limit in self.policy.limits:
            if isinstance(limit, Rate):
                times: dict[tuple[str | None, ...], list[Instant]] = defaultdict(list)
                for run in self.runs:
                    if not run.given_back:
                        times[self.scope(limit, run.lane)].append(run.at)
                found += [f"{limit!r} for {key}: {what}" for key, at in times.items() for what in too_fast(limit, at)]
        return found


def scope_of(by: tuple[str, ...], lane: LaneKey) -> tuple[str | None, ...]:
    keys = dict(lane[1])
    return tuple(str(lane[0]) if name == "priority" else keys[name] for name in by)


def too_fast(limit: Rate, times: list[Instant]) -> list[str]:
    """Every window, from each start to each later one: never more than burst + limit·t/per, or than a rolling limit."""
    if limit.rolling:
        windows = [[at for at in times if first <= at < first + limit.per] for first in times]
        return [f"{len(window)} starts from {window[0]} on" for window in windows if len(window) > limit.limit]
    rate = Fraction(str(limit.limit)) / limit.per
    return [
        f"{j - i + 1} starts in {times[j] - times[i]} µs from {times[i]}"
        for i in range(len(times))
        for j in range(i, len(times))
        if j - i + 1 > limit.burst + rate * (times[j] - times[i])
    ]
