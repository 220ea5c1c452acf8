"""What gates keep and say of themselves: the words in which limits and the plan talk to each other.

A number of a limit may differ from key to key: given for those that are named, or brought along by jobs. A number that
jobs bring along is declared as a function of their context. Producers evaluate it at enqueue, and the newest one holds
for its key. What is stored of such a declaration is only that it comes from the job: claimers enforce what was brought,
and never call anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

from fairlane.clock import SECOND, Instant


class GateState:
    """The state of one limit for one key. Only the holder of the claim lock changes it."""

    __slots__ = ("in_flight", "memo", "tat", "waiting")

    def __init__(self, in_flight: int = 0, tat: Instant = 0, memo: Any = None, waiting: int = 0) -> None:
        self.in_flight = in_flight
        self.tat = tat
        """From when on the gate, with nothing in flight, says no more than a new one would: it may be forgotten then.
        For a rate, the theoretical arrival time of GCRA."""
        self.memo = memo
        """Further state of its limit, as JSON can hold it; `None` for a new gate."""
        self.waiting = waiting
        """How many lanes and flows are parked on it."""


AT_REST = GateState()
"""The state of a gate that nothing has passed."""


class Release(msgspec.Struct, frozen=True, gc=False):
    """A lane event: claims of one lane ended."""

    lane: bytes
    ended: int
    """Claims that ran, however they ended."""
    ran: int
    """Their run time in microseconds, added up."""
    charged: float
    """What was charged for them at claim time, added up."""
    unstarted: int
    """Claims that were given back before they started."""
    refund: float
    """What was charged for those."""
    since: Instant = 0
    """When the oldest of those was claimed: tokens that time has given back are not given back twice."""
    failed: int = 0
    """Of those that ran, how many failed; all of them were claimed at `latest` then."""
    neutral: int = 0
    """Of those that ran, how many say nothing about what they called: snoozed, cancelled."""
    latest: Instant = 0
    """When the last of those that ran was claimed."""
    kept: int = 0
    """Of all these, how many have not ended their job: it is ready again, or will be, in its old place, which it keeps
    in a sequence."""
    lost: int = 0
    """Of those that ran, how many were lost: all of them, or none. They ran until their last renewal, as far as anybody
    knows: for so long they are charged, and it does not show how long a run takes."""
    signal: int | None = None
    """What adaptive caps look at, in microseconds, added up for those that ran; `None`: their run time."""


class Reason(StrEnum):
    """What holds a job. The codes are stable: scripts and dashboards name them."""

    SCHEDULED = "scheduled"
    """Its time has not come: a delay, a retry's backoff, a snooze."""
    PAUSED = "paused"
    """An operator has paused its queue, its key or its task."""
    MOVING = "moving"
    """Its key moves to another partition of its queue."""
    CONCURRENCY = "concurrency"
    """As many run as its limit allows."""
    RATE = "rate"
    """Its rate is used up for now."""
    ADAPTIVE = "adaptive"
    """As many run as the cap allows that is learned from how runs go."""
    BREAKER = "breaker"
    """Too many runs have failed; it is tried again later."""
    SEQUENCE = "sequence"
    """The job before it in its sequence has not ended."""
    LANE = "lane"
    """Others are ahead of it in its own lane."""
    TURN = "turn"
    """Others have their turn first."""
    GIVEN_BACK = "given_back"
    """It was claimed and given back before it ran: its worker stopped, or a broker refused it."""
    NEW = "new"
    """No claim has seen it yet."""
    SLOT = "slot"
    """Nothing holds it: it starts with the next free slot."""
    NO_WORKER = "no_worker"
    """No worker serves its queue."""
    BROKER = "broker"
    """The broker of the engine that its queue is forwarded to refuses messages."""
    PUBLISHED = "published"
    """It is at the broker of its engine, and no worker of the engine has begun it."""
    UNKNOWN_TASK = "unknown_task"
    """No task of the app has its name."""
    FORCED = "forced"
    """Nothing holds it: an operator wants it to start next, whatever its limits say."""
    RUNNING = "running"
    """It runs."""
    ENDED = "ended"
    """It has ended."""


class Why(msgspec.Struct, frozen=True):
    """Why a gate without room holds jobs back."""

    reason: Reason
    used: float
    bound: float
    """`used` of `bound`: 5 of 5 in flight, 100 of 100 starts."""
    words: str = ""
    """Details, such as "failing since …"."""


Source = Callable[[Mapping[str, Any]], float]
"""Gives the number of a job's key, from the job's context."""


class Origin(StrEnum):
    """Where the number in force came from."""

    POLICY = "policy"
    """It is declared."""
    JOB = "job"
    """The newest job of its key brought it along."""
    OVERRIDE = "override"
    """An operator has set it."""
    DEFAULT = "default"
    """Jobs are to bring it along, and none has yet: 1 holds until one does."""

    @property
    def words(self) -> str:
        """For people, after the number; empty if the policy declares it."""
        return _ORIGINS[self]


_ORIGINS = {
    Origin.POLICY: "",
    Origin.JOB: "from its newest job",
    Origin.OVERRIDE: "set by an operator",
    Origin.DEFAULT: "until a job brings a number",
}


FROM_JOB = {"from": "job"}
"""What is stored in place of a number that jobs bring along."""

VALUES_LAST = 30 * 24 * 3_600 * SECOND
"""For how long a gate without jobs keeps the number that was brought to it."""


@dataclass(frozen=True, slots=True)
class FromJob:
    """A number that jobs bring along. Read from a stored policy it has no source, and says the same."""

    source: Source | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        return "<from the job>"


def from_job(number: object) -> FromJob | None:
    """The source of a number, if a function of the job's context (or its stored form) was given in its place."""
    if isinstance(number, FromJob):
        return number
    if number == FROM_JOB:
        return FromJob()
    return FromJob(number) if callable(number) else None


EXACT_ENTRIES = 1_000
"""So many instants are remembered one by one."""
SLICES = 500
"""Where there are more, those of one slice of the window, a five-hundredth, count as made at the last of them."""


def room_in_window(gate: GateState, limit: int, per: int, now: Instant) -> int:
    """How many jobs may start now."""
    memo: dict[str, Any] | None = gate.memo
    if memo is None:
        return limit
    room: int = limit - memo["taken"]
    for instant, count in memo["starts"]:
        if instant + per > now:
            break
        room += count
    return room if room > 0 else 0


def take_in_window(gate: GateState, per: int, now: Instant, count: int, at: Instant | None = None) -> None:
    """Remember jobs that start, now or `at` a later instant, and forget those that have left the window."""
    memo = gate.memo or {"taken": 0, "starts": []}
    starts: list[list[int]] = memo["starts"]
    left = 0
    while left < len(starts) and starts[left][0] + per <= now:
        memo["taken"] -= starts[left][1]
        left += 1
    del starts[:left]
    # Never before the entry before it: that may lie ahead, because its jobs start late or a clock was set back.
    instant = max(now if at is None else at, starts[-1][0] if starts else 0)
    if starts and (starts[-1][0] == instant if at is not None else memo.get("now") == now):
        starts[-1][1] += count
    else:
        starts.append([instant, count])
        if len(starts) > EXACT_ENTRIES:
            memo["starts"] = starts = _merged(starts, max(1, per // SLICES))
    memo["taken"] += count
    memo["now"] = now
    gate.memo = memo
    gate.tat = starts[-1][0] + per


def postpone_in_window(gate: GateState, per: int, now: Instant, lag: int) -> None:
    """What was taken now is started by `now + lag`: it counts from then on."""
    memo: dict[str, Any] | None = gate.memo
    if memo is not None and memo.get("now") == now and memo["starts"]:
        last = memo["starts"][-1]
        last[0] = max(last[0], now + lag)
        gate.tat = last[0] + per


def _merged(starts: list[list[int]], width: int) -> list[list[int]]:
    """Entries of one slice as one, at the last of their instants.

    Slices lie still: were neighbours merged by their number alone, the oldest entry would be merged with the next for
    ever, and never leave.
    """
    merged: list[list[int]] = []
    for instant, count in starts:
        if merged and merged[-1][0] // width == instant // width:
            merged[-1] = [instant, merged[-1][1] + count]
        else:
            merged.append([instant, count])
    return merged


def give_back_in_window(gate: GateState, per: int, now: Instant, count: int, since: Instant) -> bool:
    """Forget starts that were not made, the oldest of them charged at `since`; say whether any still counted.

    They are taken from the entry of that instant, and what it does not hold from those after it, in order. If their own
    entries are later ones, what is left counts for too long, never too short.
    """
    memo: dict[str, Any] | None = gate.memo
    if memo is None or since + per <= now:
        # The first has left the window by itself, and how many of the others have is not known.
        return False
    starts: list[list[int]] = memo["starts"]
    owed = count
    for entry in starts:
        if entry[0] >= since and owed:
            taken = min(owed, entry[1])
            entry[1] -= taken
            owed -= taken
    memo["taken"] -= count - owed
    if starts and not starts[-1][1]:
        # The entry before it is of an earlier claim: what starts at this same instant must not be counted from then.
        memo.pop("now", None)
    memo["starts"] = starts = [entry for entry in starts if entry[1]]
    gate.memo = memo if starts else None
    gate.tat = starts[-1][0] + per if starts else 0
    return owed < count


def window_opens_at(gate: GateState, limit: int, per: int) -> Instant | None:
    """When enough of the oldest have left for one more to start."""
    memo: dict[str, Any] | None = gate.memo
    if memo is None:
        return None
    room = limit - memo["taken"]
    for instant, count in memo["starts"]:
        room += count
        if room > 0:
            return int(instant) + per
    return None
