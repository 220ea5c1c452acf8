"""Which limits running jobs hold that others wait for: asked by workers whose runs take long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from uuid import UUID

from fairlane.job import Claim
from fairlane.operations.gauging import gauges_of, limit_words
from fairlane.policy.breaker import Breaker
from fairlane.policy.keys import key_words, select
from fairlane.policy.policy import BoundLimit, Policy
from fairlane.store.protocol import Store
from fairlane.store.stats import Looking, Moment, Wanted

__all__ = ["limits_waited_for"]


async def limits_waited_for(store: Store, claims: Sequence[Claim]) -> dict[UUID, str]:
    """Of these running jobs, those that hold a full limit for which others wait, and which limit that is: the first of
    each."""
    return await store.ask(lambda moment: _waited_for(moment, claims))


def _waited_for(moment: Moment, claims: Sequence[Claim]) -> Looking[dict[UUID, str]]:
    known = yield from moment.policies()
    policies = {claim.queue: known[claim.queue].policy for claim in claims if claim.queue in known}
    held = {claim.id: (claim.queue, _held_by(policies[claim.queue], claim)) for claim in claims if claim.queue in known}
    wanted: dict[str, dict[Wanted, None]] = {}
    for queue, limits in held.values():
        wanted.setdefault(queue, {}).update(dict.fromkeys(limits))
    gauges = yield from gauges_of(moment, policies, {queue: list(each) for queue, each in wanted.items()})
    shut = {
        queue: [each for each, gauge in zip(asked, gauges[queue], strict=True) if gauge.room <= 0]
        for queue, asked in wanted.items()
    }
    names = [queue for queue, each in shut.items() if each]
    places = [(bound.limit.by, key) for each in shut.values() for bound, key in each if key]
    ready = {each.queue for each in (yield from moment.survey(names)) if each.ready} if names else set()
    waiting = {
        (queue, figures.by, figures.key)
        for queue, figures in ((yield from moment.keys_named(names, places)) if places else ())
        if figures.waiting
    }
    found: dict[UUID, str] = {}
    for job, (queue, limits) in held.items():
        for bound, key in limits:
            # A limit of the whole queue holds back whoever is ready.
            is_waited_for = (queue, bound.limit.by, key) in waiting if key else queue in ready
            if is_waited_for and (bound, key) in shut[queue]:
                found.setdefault(job, _words(bound, key))
    return found


def _held_by(policy: Policy, claim: Claim) -> list[Wanted]:
    """The limits that a job holds for as long as it runs, with its keys."""
    keys: Mapping[str, str | None] = {**claim.keys, "task": claim.task}
    counting = [b for b in policy.bound if b.limit.counts_in_flight and not isinstance(b.limit, Breaker)]
    selected = [(bound, select(bound.limit.by, keys, claim.priority)) for bound in counting]
    return [(bound, key) for bound, key in selected if policy.limit_at(bound, key) is not None]


def _words(bound: BoundLimit, key: tuple[str | None, ...]) -> str:
    whose = key_words(dict(zip(bound.limit.by, key, strict=True)))
    return f"{limit_words(bound)}{f' for {whose}' if whose else ''}"
