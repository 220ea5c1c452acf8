"""Back-pressure on producers: how many jobs of a key may wait before its producers are told, or refused.

A gate's count is what claims have folded. What was enqueued since is in lane events, and is added to it: so the count
is right although no producer ever writes to a row that others write.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal
from uuid import UUID

import msgspec

from fairlane.clock import Instant
from fairlane.errors import InvalidPolicy
from fairlane.job import NewJob
from fairlane.parameters import known_options, shown
from fairlane.policy.gates import GateState, Reason, Release, Why
from fairlane.policy.keys import By, Keys, key_words, normalize_by, repr_by
from fairlane.policy.limits import UNBOUNDED, Limit, checked_count

if TYPE_CHECKING:
    from fairlane.policy.policy import Policy

WhenFull = Literal["signal", "reject"]
Values = tuple[str | None, ...]


@known_options
@dataclass(frozen=True, slots=True, init=False)
class Backlog(Limit):
    """At most `max` jobs of a key should wait, ready to start. Without `by`: of the whole queue.

    It holds back no start. `when_full` says what an enqueue beyond it meets: it is stored and told so ("signal"), or
    refused ("reject"). Its gates count what is ready, where those of other limits count what runs.

    >>> Backlog(1000, by="account")
    Backlog(1000, by='account', when_full='signal')
    """

    max: int
    by: By
    when_full: WhenFull

    kind = "backlog"
    is_of_producers = True
    is_woken_by_arrivals = True
    is_held_by_runs = False
    counts_in_flight = False

    def __init__(self, max: int, *, by: str | tuple[str, ...] | None = None, when_full: WhenFull = "signal") -> None:
        what = f"Backlog({shown(max)})"
        if when_full not in ("signal", "reject"):
            raise InvalidPolicy(f"{what}: when_full={shown(when_full)} is unknown; use 'signal' or 'reject'")
        self._set(max=checked_count(what, "max", max), by=normalize_by(what, by), when_full=when_full)

    def __repr__(self) -> str:
        return f"Backlog({self.max}{repr_by(self.by)}, when_full={self.when_full!r})"

    def room_at(self, gate: GateState, now: Instant) -> int:
        """It holds nobody back who waits."""
        return UNBOUNDED

    def arrive(self, gate: GateState, count: int) -> bool:
        gate.in_flight += count
        return True

    def take(self, gate: GateState, now: Instant, count: int) -> None:
        """What starts waits no more. Below zero until the lane event is folded that tells of its arrival."""
        gate.in_flight -= count

    def free(self, gate: GateState, ending: Release, now: Instant, held: int | None, task: str | None) -> bool:
        return False

    def why(self, gate: GateState, now: Instant) -> Why:
        return Why(Reason.SLOT, gate.in_flight, self.max)

    def describe(self, where: str) -> str:
        full = "more are refused" if self.when_full == "reject" else "producers are told"
        return f"At most {self.max:,} may wait {where}; beyond that {full}"

    @property
    def counted(self) -> str:
        return f"ready, {self.when_full}"


class FullBacklog(msgspec.Struct, frozen=True):
    """What an enqueue met that was more than its backlog holds."""

    queue: str
    limit: str
    key: dict[str, str | None]
    """Empty for the whole queue."""
    ready: int
    """How many waited, this enqueue's own included up to then."""
    max: int

    def describe(self) -> str:
        key = f", {key_words(self.key)}" if self.key else ""
        return f"queue {self.queue!r}{key}: {self.ready:,} jobs wait, and its backlog holds {self.max:,}"


Joined = dict[bytes, tuple[str, Backlog, Values]]
"""Backlogs by their gates: each with its name and the key's values."""


class Verdicts(msgspec.Struct, frozen=True):
    """What becomes of jobs that meet a full backlog, by their ids."""

    told: dict[UUID, FullBacklog]
    """Stored, and told that they are too many."""
    refused: dict[UUID, FullBacklog]


def backlogs_of(policy: Policy, priority: int, keys: Keys) -> Joined:
    """The backlogs that a job of these keys joins when it is ready, as operators have them."""
    found: Joined = {}
    for gate_id, bound, values in policy.backlog_gates(priority, keys):
        limit = policy.limit_at(bound, values)
        # A policy that is suspended holds nobody back, and no producer either.
        if isinstance(limit, Backlog):
            found[gate_id] = bound.name, limit, values
    return found


def joined_by(policy: Policy, jobs: Iterable[NewJob]) -> dict[UUID, Joined]:
    """The backlogs that these jobs join. Those for later join none yet."""
    return {
        job.id: joined
        for job in jobs
        if job.queue == policy.queue
        and not job.delay
        and job.run_at is None
        and (joined := backlogs_of(policy, job.priority, job.lane_keys))
    }


def add_events(policy: Policy, counts: dict[bytes, int], events: Iterable[tuple[int, Keys, int]]) -> dict[bytes, int]:
    """How many wait at these gates, with lane events (priority, keys, count) that are not folded yet."""
    for priority, keys, count in events:
        for gate_id, *_ in policy.backlog_gates(priority, keys):
            if gate_id in counts:
                counts[gate_id] += count
    return {gate_id: max(0, count) for gate_id, count in counts.items()}


def judge(policy: Policy, joined: Mapping[UUID, Joined], ready: Mapping[bytes, int]) -> Verdicts:
    """Decide on jobs one after the other, as if each were enqueued alone."""
    counts = dict(ready)
    verdicts = Verdicts({}, {})
    for job, backlogs in joined.items():
        full = {
            limit.when_full: FullBacklog(
                policy.queue, name, dict(zip(limit.by, values, strict=True)), counts[gate_id], limit.max
            )
            for gate_id, (name, limit, values) in backlogs.items()
            if counts[gate_id] >= limit.max
        }
        if (refusal := full.get("reject")) is not None:
            verdicts.refused[job] = refusal
            continue
        if full:
            verdicts.told[job] = full["signal"]
        for gate_id in backlogs:
            counts[gate_id] += 1
    return verdicts
