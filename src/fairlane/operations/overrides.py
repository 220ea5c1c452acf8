"""What operators change while a policy is in force: pauses, bounds and weights of single keys, suspension.

Each is one transaction, recorded with who and why. A dry run says what would change, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Unpack

from msgspec import structs

from fairlane.clock import Instant
from fairlane.errors import InvalidOverride
from fairlane.job import State
from fairlane.operations.keys import keys_at
from fairlane.operations.requests import (
    find_jobs,
    find_limit,
    in_force,
    known_partitions,
    partitions_of,
    scope_of,
)
from fairlane.operations.section import ChangeOptions, Intent, KeyValues, Section, TimedOptions
from fairlane.operations.views import jobs_wait
from fairlane.parameters import checked_methods
from fairlane.policy.limits import Limit
from fairlane.policy.overrides import Kind, Override, Scope, change_overrides, everyone_in, without_effect
from fairlane.policy.partitions import parse_partition
from fairlane.policy.policy import BoundLimit, Policy
from fairlane.store import records
from fairlane.store.operators import JobFilter
from fairlane.store.protocol import Store

COUNTED = (State.READY, State.SCHEDULED, State.RUNNING)
COUNT_AT_MOST = 1_000
"""Jobs of each state that a preview counts."""
PAGE = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Affected:
    """The jobs that a change is about, counted before it is made."""

    waiting: int
    """Ready or scheduled."""
    running: int
    more: bool
    """At least so many: not all were counted."""

    def __str__(self) -> str:
        least = "at least " if self.more else ""
        return f"{least}{jobs_wait(self.waiting)} and {least}{self.running:,} run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What an action changed about a queue, or would change."""

    queue: str
    action: str
    is_dry_run: bool
    before: tuple[Override, ...]
    """Overrides that were replaced, or ended."""
    after: tuple[Override, ...]
    """Overrides that were set."""
    remaining: tuple[Override, ...]
    """All that the queue has then."""
    everyone: str
    """What an override without keys is about, in words."""
    partitions: tuple[Change, ...] = ()
    """What it changed in partitions that had an override of their own."""
    affected: Affected | None = None
    """The jobs that it would be about; of a dry run only."""

    @property
    def is_empty(self) -> bool:
        """There was nothing to change."""
        return not (self.before or self.after or self.partitions)


@dataclass(frozen=True, slots=True, kw_only=True)
class OverrideInForce:
    """An override, and what it does."""

    queue: str
    override: Override
    no_effect: str | None
    """Why it has none under the policy in force; `None`: it has."""
    everyone: str
    """What it is about where it has no keys, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitInForce:
    """A limit for every key, or for one key that an operator has given another bound."""

    name: str
    scope: Scope
    """Empty: the whole queue, or every key that is not listed by itself."""
    declared: Limit
    in_force: Limit
    is_suspended: bool
    override: Override | None
    is_per_partition: bool
    """Each partition keeps it for itself."""


class OverrideSection(Section):
    """What sets overrides and ends them."""

    async def _put(self, queue: str, action: str, override: Override, **options: Unpack[TimedOptions]) -> Change:
        intent, store = self._intent(**options), await self._store()
        time = await store.time()
        signed = structs.replace(
            override, expires_at=intent.ends_at(time), set_at=time.now, set_by=intent.actor, reason=intent.reason
        )
        return await _change(store, queue, action, [signed], [], intent)

    async def _end(self, queue: str, action: str, *ended: Override, **options: Unpack[ChangeOptions]) -> Change:
        intent, store = self._intent(**options), await self._store()
        return await _change(store, queue, action, [], [each.id for each in ended], intent)


@checked_methods
class Limits(OverrideSection):
    """`app.operations.limits`: the limits of queues, and other bounds for single keys."""

    async def set(
        self, queue: str, limit: str, value: float, *, keys: KeyValues | None = None, **options: Unpack[TimedOptions]
    ) -> Change:
        """Give a limit another bound for one key. A lower one preempts nothing: what runs drains first."""
        scope = scope_of(keys)
        name = find_limit((await in_force(await self._store(), queue)).policy, limit, scope).name
        override = Override(kind=Kind.LIMIT, limit=name, value=value, scope=scope)
        return await self._put(queue, "limit set", override, **options)

    async def clear(
        self, queue: str, limit: str, *, keys: KeyValues | None = None, **options: Unpack[ChangeOptions]
    ) -> Change:
        """Let a key have the bound again that the policy declares."""
        scope = scope_of(keys)
        policy = (await in_force(await self._store(), queue)).policy
        # By the name it was set under first: its limit may be gone from the policy.
        known = policy.overrides.limits.get((limit, scope))
        name = limit if known else find_limit(policy, limit, scope).name
        return await self._end(queue, "limit clear", Override(kind=Kind.LIMIT, limit=name, scope=scope), **options)

    # Last: below it, `list` in an annotation would be this method.
    async def list(self, queue: str) -> list[LimitInForce]:
        """Every limit of a queue: what the policy declares, what is in force, and who changed it for which key."""
        store = await self._store()
        name = (await in_force(store, queue)).policy.queue
        policy = await store.ask(lambda moment: moment.policy(name))
        rows = []
        for bound in policy.bound:
            changed = [each for (name, _), each in policy.overrides.limits.items() if name == bound.name]
            if bound.limit.by or not changed:
                rows.append(_limit_in_force(policy, bound, None))
            rows += [_limit_in_force(policy, bound, each) for each in changed]
        return rows


@checked_methods
class Weights(OverrideSection):
    """`app.operations.weights`: the weights of flows."""

    async def set(self, queue: str, weight: float, *, keys: KeyValues, **options: Unpack[TimedOptions]) -> Change:
        """Give a flow another weight."""
        override = Override(kind=Kind.WEIGHT, value=weight, scope=scope_of(keys))
        return await self._put(queue, "weight set", override, **options)

    async def boost(self, queue: str, factor: float, *, keys: KeyValues, **options: Unpack[TimedOptions]) -> Change:
        """Multiply a flow's weight."""
        override = Override(kind=Kind.BOOST, value=factor, scope=scope_of(keys))
        return await self._put(queue, "boost", override, **options)

    async def clear(self, queue: str, *, keys: KeyValues, **options: Unpack[ChangeOptions]) -> Change:
        """Let a flow have the weight again that the policy declares, and no boost."""
        ended = [Override(kind=kind, scope=scope_of(keys)) for kind in (Kind.WEIGHT, Kind.BOOST)]
        return await self._end(queue, "weight clear", *ended, **options)


@checked_methods
class Overrides(Section):
    """`app.operations.overrides`: what operators have set, of every kind."""

    async def restore(
        self, queue: str, overrides: Sequence[Override], *, ending: Sequence[str] = (), **options: Unpack[ChangeOptions]
    ) -> Change:
        """Set overrides again as they were (`Change.before`), each with the end that it had, and end those that came
        instead, by their ids."""
        store, intent = await self._store(), self._intent(**options)
        now = await store.now()
        for each in overrides:
            if each.expires_at is not None and each.expires_at <= now:
                raise InvalidOverride(
                    f"queue {queue!r}: {each.describe()}: that would have ended meanwhile; set another end"
                )
        signed = [structs.replace(each, set_at=now, set_by=intent.actor, reason=intent.reason) for each in overrides]
        return await _change(store, queue, "restore", signed, ending, intent)

    # Last: below it, `list` in an annotation would be this method.
    async def list(self, queue: str | None = None) -> list[OverrideInForce]:
        """The overrides of a queue, or of all queues, and which of them have no effect. After those of a queue come
        what single partitions have besides."""
        store = await self._store()
        now = await store.now()
        found: list[OverrideInForce] = []
        for name in sorted(await store.run(records.queues())) if queue is None else [queue]:
            if queue is None and parse_partition(name) is not None:
                continue  # with their queue
            policy = (await in_force(store, name)).policy
            found += overrides_of(policy, now)
            for partition in (await known_partitions(store, name))[1:]:
                part = overrides_of((await in_force(store, partition)).policy, now)
                found += [each for each in part if each.override not in policy.overrides.all]
        return found


async def _change(
    store: Store, queue: str, action: str, put: Sequence[Override], remove: Sequence[str], intent: Intent
) -> Change:
    """Change the overrides of a queue. All of its partitions have the same ones, because any key may land in any."""
    names = await partitions_of(store, queue)
    policies = [(await in_force(store, name)).policy for name in names]
    amendments = [change_overrides(policy, put, remove) for policy in policies]
    if not intent.dry_run:
        amendments = await store.change_overrides(names, put, remove, intent.note(action))
    changes = []
    for policy, override_change in zip(policies, amendments, strict=True):
        limits = [each.limit for each in (*override_change.before, *override_change.after)]
        change = Change(
            queue=policy.queue,
            action=action,
            is_dry_run=intent.dry_run,
            before=override_change.before,
            after=override_change.after,
            remaining=override_change.overrides.all,
            everyone=everyone_in(policy, limits[0] if limits else None),
        )
        changes.append(change)
    whole, *others = changes
    whole = replace(whole, partitions=tuple(each for each in others if each.before != whole.before))
    touched = [each.scope for each in (*whole.after, *whole.before)]
    if not intent.dry_run or not touched:
        return whole
    return replace(whole, affected=await _count_affected(store, queue, dict(touched[0])))


async def _count_affected(store: Store, queue: str, scope: Mapping[str, str | None]) -> Affected | None:
    """Exact where stats are kept for it: by every scope of the policy, and for the whole queue."""
    if not scope:
        names = await partitions_of(store, queue)
        parts = await store.ask(lambda moment: moment.survey(names))
        ready_or_scheduled = sum(each.ready + each.scheduled.count for each in parts)
        more = not all(each.scheduled.is_all for each in parts)
        return Affected(waiting=ready_or_scheduled, running=sum(each.running for each in parts), more=more)
    for view in await store.ask(lambda moment: keys_at(moment, queue, [scope])):
        later = view.scheduled
        return Affected(waiting=view.waiting + later.count, running=view.running, more=not later.is_all)
    if "priority" in scope:
        return None  # by which no listing can be filtered
    keys = {name: value for name, value in scope.items() if name != "task"}
    wanted = JobFilter(queue=queue, task=scope.get("task"), keys=keys)
    counts = [await _count(store, structs.replace(wanted, state=state)) for state in COUNTED]
    (ready, scheduled, running), more = (count for count, _ in counts), any(more for _, more in counts)
    return Affected(waiting=ready + scheduled, running=running, more=more)


async def _count(store: Store, wanted: JobFilter) -> tuple[int, bool]:
    """How many jobs fit, up to a bound; and whether there may be more."""
    count, after = 0, None
    for _ in range(COUNT_AT_MOST // PAGE):
        page = await find_jobs(store, wanted, after, PAGE)
        count, after = count + len(page.jobs), page.after
        if after is None:
            return count, False
    return count, True


def overrides_of(policy: Policy, now: Instant) -> list[OverrideInForce]:
    """The overrides of a policy, and which of them have no effect."""
    return [
        OverrideInForce(
            queue=policy.queue,
            override=each,
            no_effect=without_effect(policy, each, now),
            everyone=everyone_in(policy, each.limit),
        )
        for each in policy.overrides.all
    ]


def _limit_in_force(policy: Policy, bound: BoundLimit, override: Override | None) -> LimitInForce:
    value = None if override is None else override.value
    return LimitInForce(
        name=bound.name,
        scope=() if override is None else override.scope,
        declared=bound.limit,
        in_force=bound.limit if value is None else bound.limit.with_bound(value),
        is_suspended=policy.overrides.suspension is not None,
        override=override,
        is_per_partition=policy.is_own(bound),
    )
