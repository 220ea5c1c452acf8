"""Which limits running jobs hold that others wait for: asked by workers whose runs take long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from uuid import UUID

from fairlane.job import Claim
from fairlane.operations.diagnosis_queues import has_ready_jobs
from fairlane.operations.gauging import limit_words
from fairlane.policy.breaker import Breaker
from fairlane.policy.keys import key_words, select
from fairlane.policy.policy import BoundLimit, Policy
from fairlane.scheduler.gauge import gauges, shared_gates_of
from fairlane.store.protocol import Store

__all__ = ["limits_waited_for"]

Held = tuple[BoundLimit, tuple[str | None, ...]]


async def limits_waited_for(store: Store, claims: Sequence[Claim]) -> dict[UUID, str]:
    """Of these running jobs, those that hold a full limit for which others wait, and which limit that is: the first of
    each. Three questions, and one for each queue with a limit of its own that is full."""
    policies = await store.policies()
    held = {
        claim.id: (policies[claim.queue].policy, _held_by(policies[claim.queue].policy, claim))
        for claim in claims
        if claim.queue in policies
    }
    wanted = [each for _, limits in held.values() for each in limits]
    if not wanted:
        return {}
    gates: dict[str, list[bytes]] = {}
    for policy, limits in held.values():
        gates.setdefault(policy.queue, []).extend(policy.gate_of(*each) for each in limits)
    known, shared = await store.gates_named(
        {queue: list(dict.fromkeys(each)) for queue, each in gates.items()}, shared_gates_of(wanted)
    )
    waiting, now, ready = {gate.id: gate.waiting for gate in known}, await store.now(), dict[str, bool]()
    found: dict[UUID, str] = {}
    for job, (policy, limits) in held.items():
        for gauge, (bound, key) in zip(gauges(policy, now, limits, known, shared), limits, strict=True):
            if gauge.room > 0:
                continue
            if not key and policy.queue not in ready:
                # A limit of the whole queue holds back whoever is ready, and nobody is parked on it.
                ready[policy.queue] = await has_ready_jobs(store, policy.queue, await store.counts(policy.queue))
            if waiting.get(policy.gate_of(bound, key)) or (not key and ready[policy.queue]):
                found.setdefault(job, _words(bound, key))
    return found


def _held_by(policy: Policy, claim: Claim) -> list[Held]:
    """The limits that a job holds for as long as it runs, with its keys."""
    keys: Mapping[str, str | None] = {**claim.keys, "task": claim.task}
    counting = [b for b in policy.bound if b.limit.counts_in_flight and not isinstance(b.limit, Breaker)]
    selected = [(bound, select(bound.limit.by, keys, claim.priority)) for bound in counting]
    return [(bound, key) for bound, key in selected if policy.limit_at(bound, key) is not None]


def _words(bound: BoundLimit, key: tuple[str | None, ...]) -> str:
    whose = key_words(dict(zip(bound.limit.by, key, strict=True)))
    return f"{limit_words(bound)}{f' for {whose}' if whose else ''}"
