"""Why a job, a key or a queue waits: one question for programs, commands and pages alike."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any
from uuid import UUID

import msgspec

from fairlane.clock import SECOND, Instant, iso_text
from fairlane.errors import ConfigurationError
from fairlane.job import ENGINES_MESSAGE, State, stored_in
from fairlane.policy.keys import canonical_keys, key_words
from fairlane.policy.overrides import PauseGate
from fairlane.policy.partitions import parse_partition, partition_name, whole_of
from fairlane.policy.policy import BoundLimit, Policy
from fairlane.scheduler.estimate import Seen
from fairlane.scheduler.explain import Explanation, Facts, Hold, explain, together
from fairlane.scheduler.gauge import Gauge, gauges, shared_gates_of
from fairlane.store.finding import find_jobs
from fairlane.store.job_rows import not_among
from fairlane.store.operators import JobFilter
from fairlane.store.protocol import Store

__all__ = ["describe_explanation", "explain_job", "explain_queue", "has_jobs", "is_routed", "not_told_apart"]

LANES = 200
"""Lanes of a key that are looked at."""
LOOKED_BACK = 600 * SECOND
"""How far a job's estimate looks back for the pace of its queue."""
MOST_LIMITS = 10
"""Limits that are named, for those that hold some of the jobs back."""


async def explain_job(
    store: Store, job: UUID, tasks: Collection[str] | None = None, forwarded: Collection[str] | None = ()
) -> Explanation:
    """Everything that holds a job, or `JobNotFound`. `tasks` are those that the app knows, if there is one;
    `forwarded`, the queues that it leaves to an engine (`None`: no app is at hand)."""
    facts = await store.examine(job=job)
    return explain(facts, tasks, await _forwarded(store, facts, forwarded), await _seen(store, facts))


async def explain_queue(
    store: Store, queue: str, keys: Mapping[str, object] | None = None, forwarded: Collection[str] | None = ()
) -> Explanation:
    """Everything that holds all jobs of a queue or of one partition of it, or all of some keys in it."""
    alone = parse_partition(queue)
    queue = queue if alone is None else partition_name(*alone)
    if queue not in (known := await store.queues()):
        raise not_among(queue, known)
    canonical = canonical_keys(keys or {})
    found = await store.policy(queue)
    if found is not None:
        _check_names(found.policy, canonical)
    place = None if found is None else found.policy.partition
    if place is None or alone is not None:
        return await _explain(store, queue, canonical, forwarded)
    if place.by and set(place.by) <= set(canonical):
        home = place.names[place.home_of(canonical) or 0]
        return together(queue, [await _explain(store, home, canonical, forwarded)])
    return together(queue, [await _explain(store, name, canonical, forwarded) for name in place.names])


async def is_routed(store: Store, queue: str) -> bool:
    """Whether the newest job that is ready came through an engine's own API: an engine runs the jobs of its queue."""
    newest = (await find_jobs(store, JobFilter(queue=queue, state=State.READY), None, 1)).jobs
    contexts = await store.contexts([each.id for each in newest])
    return any(ENGINES_MESSAGE in stored_in(each) for each in contexts.values())


async def has_jobs(store: Store, queue: str, keys: Mapping[str, object]) -> bool | None:
    """Whether a job with these keys waits or runs; `None` where more would have to be read than one page looks at."""
    canonical = canonical_keys(keys)
    wanted = {name: value for name, value in canonical.items() if name != "task"}
    is_known = True
    for state in (State.READY, State.RUNNING, State.SCHEDULED):
        asked = JobFilter(queue=queue, state=state, keys=wanted, task=canonical.get("task"))
        page = await find_jobs(store, asked, None, 1)
        if page.jobs:
            return True
        is_known = is_known and page.after is None
    return False if is_known else None


def not_told_apart(policy: Policy, names: Collection[str]) -> ConfigurationError:
    """Nothing is known of keys that a policy does not look at: a typo would be told that nothing holds it."""
    scopes = "; ".join(", ".join(by) for by in policy.scopes) or "nothing"
    return ConfigurationError(
        f"queue {policy.queue!r} does not tell its jobs apart by {', '.join(names)}; it does so by {scopes}"
    )


def _check_names(policy: Policy, keys: Mapping[str, str | None]) -> None:
    known = {name for by in (*policy.scopes, *policy.overrides.pauses) for name in by}
    if unknown := [name for name in keys if name not in known]:
        raise not_told_apart(policy, unknown)


async def _seen(store: Store, facts: Facts) -> Seen | None:
    """How the last minutes of a waiting job's queue went."""
    if facts.subject.state is not State.READY:
        return None
    queue = facts.subject.queue
    minutes = await store.minutes([queue], facts.now - LOOKED_BACK)
    return Seen(minutes[queue], facts.now)


async def _forwarded(store: Store, facts: Facts, forwarded: Collection[str] | None) -> Collection[str] | None:
    """The queues that an engine runs; where no app says so, and nobody serves this one, its jobs may."""
    if forwarded is not None or facts.is_served or not await is_routed(store, facts.subject.queue):
        return forwarded
    return [whole_of(facts.subject.queue)]


async def _explain(
    store: Store, queue: str, keys: Mapping[str, str | None], forwarded: Collection[str] | None
) -> Explanation:
    """What holds all jobs of these keys, and what holds some of them: limits of other scopes than these."""
    facts = await store.examine(queue, keys=keys)
    told = explain(facts, forwarded=await _forwarded(store, facts, forwarded))
    some = await _behind_limits(store, facts.policy, keys, facts.now)
    known = {(hold.limit, *hold.key.items()) for hold in told.holds}
    return msgspec.structs.replace(
        told, holds=[*told.holds, *(hold for hold in some if (hold.limit, *hold.key.items()) not in known)]
    )


async def _behind_limits(store: Store, policy: Policy, keys: Mapping[str, str | None], now: Instant) -> list[Hold]:
    """Limits that hold some of the jobs back: of a key that takes turns, those that its lanes wait on; of a whole
    queue, those that most wait on."""
    if not keys:
        held = [
            (limit, figures.key, figures.waiting)
            for _, figures in await store.list_held([policy.queue])
            for limit in figures.held_by
        ]
    elif policy.is_flow(keys):
        held = await _of_lanes(store, policy, keys)
    else:
        return []
    counts: dict[tuple[str, tuple[str | None, ...]], int] = {}
    for limit, key, count in held:
        bound = policy.bound_named(limit)
        if bound is not None and count and not isinstance(bound.limit, PauseGate):
            counts[limit, key] = counts.get((limit, key), 0) + count
    most = sorted(counts.items(), key=lambda item: -item[1])[:MOST_LIMITS]
    wanted = [(bound, key) for (limit, key), _ in most if (bound := policy.bound_named(limit)) is not None]
    gates = {policy.queue: [policy.gate_of(*each) for each in wanted]}
    known, shared = await store.gates_named(gates, shared_gates_of(wanted))
    told = gauges(policy, now, wanted, known, shared)
    return [_held(bound, gauge, count) for (bound, _), gauge, (_, count) in zip(wanted, told, most, strict=True)]


async def _of_lanes(
    store: Store, policy: Policy, keys: Mapping[str, str | None]
) -> list[tuple[str, tuple[str | None, ...], int]]:
    lanes = [lane for lane in await store.lanes_of(policy.queue, policy.flow_of(0, keys), LANES) if lane.ready > 0]
    gates, _ = await store.gates_named({policy.queue: [lane.gate for lane in lanes if lane.gate is not None]}, [])
    names = {gate.id: (gate.limit, tuple(gate.key)) for gate in gates if gate.waiting}
    return [(*names[lane.gate], lane.ready) for lane in lanes if lane.gate in names]


def _held(bound: BoundLimit, gauge: Gauge, count: int) -> Hold:
    keys = dict(zip(bound.limit.by, gauge.key, strict=True))
    jobs = "1 job of {} is" if count == 1 else f"{count:,} jobs of {{}} are"
    origin = f", {gauge.origin.words}" if gauge.origin.words else ""
    words = f"{jobs.format(key_words(keys))} held by {gauge.in_force!r}{origin}"
    return Hold(gauge.reason, words, bound.name, keys, bound=gauge.bound, count=count, origin=gauge.origin)


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
        "earliest": iso_text(told.earliest),
        "estimate": iso_text(told.estimate),
        "next_up": [str(job) for job in told.next_up],
        "now": iso_text(told.now),
    }


def _described(hold: Hold) -> dict[str, Any]:
    holders = [
        {
            "job": str(each.job),
            "task": each.task,
            "worker": each.worker,
            "since": iso_text(each.since if each.due_at is None else None),
            "due_at": iso_text(each.due_at),
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
        "bound_from": hold.origin,
        "until": iso_text(hold.until),
        "count": hold.count,
        "holders": holders,
        "set_by": None if override is None else override.set_by,
    }
