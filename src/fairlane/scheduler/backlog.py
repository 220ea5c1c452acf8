"""What producers are told: which backlogs their jobs would join, how many wait there, and which are full.

A gate's count is what claims have folded. What was enqueued since is in bells, and is added to it: so the count is
right although no producer ever writes to a row that others write.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from uuid import UUID

import msgspec

from fairlane.job import NewJob
from fairlane.policy.backlog import Backlog, FullBacklog
from fairlane.policy.keys import Keys, select
from fairlane.policy.policy import Policy

Values = tuple[str | None, ...]
Joined = dict[bytes, tuple[str, Backlog, Values]]
"""Backlogs by their gates: each with its name and the key's values."""


class Verdicts(msgspec.Struct, frozen=True):
    """What becomes of jobs that meet a full backlog, by their ids."""

    told: dict[UUID, FullBacklog]
    """Stored, and told that they are too many."""
    refused: dict[UUID, FullBacklog]

    def __bool__(self) -> bool:
        return bool(self.told or self.refused)


def backlogs_of(policy: Policy, priority: int, keys: Keys) -> Joined:
    """The backlogs that a job of these keys joins when it is ready, as operators have them."""
    found: Joined = {}
    for gate_id, bound in policy.backlog_gates(priority, keys):
        values = select(bound.limit.by, keys, priority)
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


def add_bells(policy: Policy, counts: dict[bytes, int], bells: Iterable[tuple[int, Keys, int]]) -> dict[bytes, int]:
    """How many wait at these gates, with bells (priority, keys, count) that are not folded yet."""
    for priority, keys, count in bells:
        for gate_id, _ in policy.backlog_gates(priority, keys):
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
