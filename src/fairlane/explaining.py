"""Why a job, a key or a queue waits: one question for programs, commands and pages alike."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any
from uuid import UUID

from fairlane.clock import Instant, as_datetime
from fairlane.errors import UnknownQueue
from fairlane.policy.keys import canonical_keys
from fairlane.policy.partitions import parse_partition, partition_name
from fairlane.scheduler.explain import Explanation, Hold, explain, together
from fairlane.store.protocol import Store

__all__ = ["describe_explanation", "explain_job", "explain_queue"]


async def explain_job(store: Store, job: UUID, tasks: Collection[str] | None = None) -> Explanation:
    """Everything that holds a job, or `JobNotFound`. `tasks` are those that the app knows, if there is one."""
    return explain(await store.examine(job=job), tasks)


async def explain_queue(store: Store, queue: str, keys: Mapping[str, object] | None = None) -> Explanation:
    """Everything that holds all jobs of a queue or of one partition of it, or all of some keys in it."""
    alone = parse_partition(queue)
    queue = queue if alone is None else partition_name(*alone)
    if queue not in await store.queues():
        known = ", ".join(await store.queues()) or "none"
        raise UnknownQueue(f"queue {queue!r} is not known to this database; known are {known}")
    canonical = canonical_keys(keys or {})
    found = await store.policy(queue)
    place = None if found is None else found.policy.partition
    if place is None or alone is not None:
        return explain(await store.examine(queue, keys=canonical))
    if place.by and set(place.by) <= set(canonical):
        home = place.names[place.home_of(canonical) or 0]
        return together(queue, [explain(await store.examine(home, keys=canonical))])
    return together(queue, [explain(await store.examine(name, keys=canonical)) for name in place.names])


def describe_explanation(told: Explanation) -> dict[str, Any]:
    """An explanation as JSON has it: times in ISO 8601, reasons by their codes."""
    subject = told.subject
    return {
        "job": None if subject.job is None else str(subject.job),
        "queue": subject.queue,
        "task": subject.task,
        "state": None if subject.state is None else str(subject.state),
        "priority": subject.priority,
        "keys": {name: value for name, value in subject.keys.items() if name != "task"},
        "reasons": [_described(hold) for hold in told.holds],
        "earliest": _iso(told.earliest),
        "estimate": _iso(told.estimate),
        "next_up": [str(job) for job in told.next_up],
        "now": _iso(told.now),
    }


def _described(hold: Hold) -> dict[str, Any]:
    holders = [
        {
            "job": str(each.job),
            "task": each.task,
            "worker": each.worker,
            "since": _iso(each.since if each.due_at is None else None),
            "due_at": _iso(each.due_at),
        }
        for each in hold.holders
    ]
    override = hold.override
    return {
        "reason": str(hold.reason),
        "words": hold.words,
        "limit": hold.limit,
        "key": hold.key,
        "used": hold.used,
        "bound": hold.bound,
        "until": _iso(hold.until),
        "count": hold.count,
        "holders": holders,
        "set_by": None if override is None else override.set_by,
    }


def _iso(at: Instant | None) -> str | None:
    return None if at is None else as_datetime(at).isoformat()
