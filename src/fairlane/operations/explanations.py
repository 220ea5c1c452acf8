"""Why a job, a key or a queue waits: one question for programs, commands and pages alike."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from uuid import UUID

import msgspec

from fairlane.clock import SECOND
from fairlane.errors import ConfigurationError
from fairlane.job import ENGINES_MESSAGE, State, stored_in
from fairlane.operations.requests import find_jobs
from fairlane.operations.views import jobs_wait
from fairlane.policy.keys import key_words
from fairlane.policy.partitions import parse_partition, partition_name, whole_of
from fairlane.policy.policy import BoundLimit, Policy
from fairlane.scheduler.estimate import Seen
from fairlane.scheduler.explain import Explanation, Facts, Hold, explain, paused, together
from fairlane.stats.gates import Gauge, gauges
from fairlane.store import records
from fairlane.store.operators import JobFilter
from fairlane.store.protocol import Store
from fairlane.store.stats import Looking, Moment, Wanted

LANES = 200
"""Lanes of a key that are looked at."""
LOOKED_BACK = 600 * SECOND
"""How far a job's estimate looks back for the pace of its queue."""
MOST_LIMITS = 10
"""Limits that are named, for those that hold some of the jobs back."""


def facts_of_job(moment: Moment, job: UUID) -> Looking[tuple[Facts, Seen | None]]:
    """What holds a job, and how the last minutes of its queue went if it waits."""
    facts = yield from moment.examine(job=job)
    if facts.subject.state is not State.READY:
        return facts, None
    queue = facts.subject.queue
    minutes = yield from moment.minutes([queue], facts.now - LOOKED_BACK)
    return facts, Seen(minutes[queue], facts.now)


Parts = list[tuple[Facts, list[Hold]]]
"""What holds all jobs of a queue, or of some of its keys: by partition, what is known, and what holds some of them."""


def explanation_of(queue: str, parts: Parts, forwarded: Sequence[Collection[str] | None]) -> Explanation:
    """The same in words; `forwarded` are the queues that an engine runs, as far as each partition can tell."""
    explanations = []
    for (facts, some), forwards in zip(parts, forwarded, strict=True):
        explanation = explain(facts, forwarded=forwards)
        known = {(hold.limit, *hold.key.items()) for hold in explanation.holds}
        # Limits of other scopes than these keys hold only some of the jobs.
        others = [hold for hold in some if (hold.limit, *hold.key.items()) not in known]
        explanations.append(msgspec.structs.replace(explanation, holds=[*explanation.holds, *others]))
    is_divided = parse_partition(queue) is None and parts[0][0].policy.partition is not None
    return together(queue, explanations) if is_divided else explanations[0]


def explained(moment: Moment, queue: str, canonical: Mapping[str, str | None]) -> Looking[Parts]:
    """The same as of one moment."""
    alone = parse_partition(queue)
    queue = queue if alone is None else partition_name(*alone)
    policy = yield from moment.policy(queue)
    keys = {name for by in (*policy.scopes, *policy.overrides.pauses) for name in by}
    if unknown := [name for name in canonical if name not in keys]:
        raise no_such_key(policy, unknown)
    place = policy.partition
    if place is None or alone is not None:
        names = [queue]
    elif place.by and set(place.by) <= set(canonical):
        names = [place.names[place.home_of(canonical) or 0]]
    else:
        names = list(place.names)
    parts = []
    for name in names:
        facts = yield from moment.examine(name, keys=canonical)
        parts.append((facts, (yield from _behind_limits(moment, facts.policy, canonical))))
    return parts


async def is_routed(store: Store, queue: str) -> bool:
    """Whether the newest job that is ready came through an engine's own API: an engine runs the jobs of its queue."""
    newest = (await find_jobs(store, JobFilter(queue=queue, state=State.READY), None, 1)).jobs
    contexts = await store.run(records.contexts([each.id for each in newest]))
    return any(ENGINES_MESSAGE in stored_in(each) for each in contexts.values())


def no_such_key(policy: Policy, names: Collection[str]) -> ConfigurationError:
    """Nothing is known of keys that a policy does not look at: for a typo it would say that nothing holds it."""
    scopes = "; ".join(", ".join(by) for by in policy.scopes) or "none"
    unknown = f"key {next(iter(names))!r}" if len(names) == 1 else f"keys {', '.join(map(repr, names))}"
    return ConfigurationError(f"queue {policy.queue!r} has no {unknown}; its keys are: {scopes}")


async def forwarded_at(store: Store, facts: Facts, forwarded: Collection[str] | None) -> Collection[str] | None:
    """The queues that an engine runs; where no app says so, and nobody serves this one, its jobs may."""
    if forwarded is not None or facts.service.is_served or not await is_routed(store, facts.subject.queue):
        return forwarded
    return [whole_of(facts.subject.queue)]


def _behind_limits(moment: Moment, policy: Policy, keys: Mapping[str, str | None]) -> Looking[list[Hold]]:
    """Limits and pauses that hold some of the jobs back: of a key that takes turns, those that its lanes wait on; of a
    whole queue, those that most wait on."""
    counts: dict[Wanted, int] = {}
    if not keys:
        for _, stats in (yield from moment.list_held([policy.queue])):
            for limit in stats.held_by:
                if (bound := policy.bound_named(limit)) is not None and stats.waiting:
                    counts[bound, stats.key] = stats.waiting
    elif policy.is_flow(keys):
        for lane, gate in (yield from moment.lanes_of(policy, keys, LANES)):
            if gate is not None and lane.ready > 0:
                wanted = (gate.bound, tuple(gate.key))
                counts[wanted] = counts.get(wanted, 0) + lane.ready
    most = dict(sorted(counts.items(), key=lambda item: -item[1])[:MOST_LIMITS])
    limits = [each for each in most if each[0].limit.is_declared]
    board = (yield from moment.boards({policy.queue: limits}))[policy.queue]
    found = dict(zip(limits, gauges(board, limits), strict=True))
    holds = []
    for each, count in most.items():
        if each in found:
            holds.append(_held(each[0], found[each], count))
        elif (pause := policy.overrides.pauses.get(each[0].limit.by, {}).get(each[1])) is not None:
            hold = paused(pause, moment.now)
            holds.append(msgspec.structs.replace(hold, words=f"{hold.words}; {jobs_wait(count)}", count=count))
    return holds


def _held(bound: BoundLimit, gauge: Gauge, count: int) -> Hold:
    keys = dict(zip(bound.limit.by, gauge.key, strict=True))
    jobs = "1 job of {} is" if count == 1 else f"{count:,} jobs of {{}} are"
    origin = f", {gauge.origin.words}" if gauge.origin.words else ""
    words = f"{jobs.format(key_words(keys))} held by {gauge.in_force!r}{origin}"
    return Hold(gauge.reason, words, bound.name, keys, bound=gauge.bound, count=count, origin=gauge.origin)
